#include "cuda/emulator.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "core/dtype.h"
#include "core/error.h"
#include "cuda/emulated_stream.h"
#include "cuda/fiber.h"

namespace turbomind::emulator {

Lane* current_lane = nullptr;

namespace {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr size_t kSharedAlignment = 128;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kStackBytes = 256 << 10;
#else
constexpr size_t kStackBytes = 128 << 10;
#endif

// Where a thread waits for its warp.
enum class Point : uint8_t { syncthreads, returned, syncwarp, shuffle, vote, mma, ldmatrix };

const char* point_name(Point p) {
  switch (p) {
    case Point::syncthreads:
      return "waits at __syncthreads";
    case Point::returned:
      return "has returned";
    case Point::syncwarp:
      return "waits at __syncwarp";
    case Point::shuffle:
      return "waits in a shuffle";
    case Point::vote:
      return "waits in a vote";
    case Point::mma:
      return "waits in mma16816";
    case Point::ldmatrix:
      return "waits in ldmatrix";
  }
  return "";
}

// What a lane brings to a warp-level operation. Pointers are into the stacks of waiting lanes.
struct Operands {
  const void* in = nullptr;
  const void* in2 = nullptr;
  void* out = nullptr;
  size_t bytes = 0;
  int number = 0;
  bool flag = false;
};

struct Copy {
  uint8_t* to;
  std::array<uint8_t, 16> bytes;
};

struct Warp;
class Machine;

// What a kernel did wrong; travels no further than its thread's own stack.
struct Failure {
  std::string what;
};

struct Thread : Lane {
  explicit Thread(int index) : fiber(kStackBytes, index), place(index % kWarp) {}
  Fiber fiber;
  const int place;  // in the warp
  Warp* warp = nullptr;
  Machine* machine = nullptr;
  Point point = Point::returned;
  Operands operands;
  std::vector<Copy> copies;    // of copy_async16, in order; not arrived
  std::vector<size_t> groups;  // how many of them each committed group has
  size_t uncommitted = 0;
};

struct Warp {
  std::array<Thread*, kWarp> threads;
  int arrived = 0;
  int direction = 1;  // in which the lanes run

  Thread& first() const { return *threads[direction > 0 ? 0 : kWarp - 1]; }
};

uint64_t mix(uint64_t x) {  // splitmix64's finalizer
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(mix(seed)) {}
  uint32_t below(uint32_t n) {
    state_ = mix(state_);
    return static_cast<uint32_t>((state_ >> 32) * n >> 32);
  }

 private:
  uint64_t state_;
};

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};

// ---- Warp-level operations, done by the lane that arrives last, for all.

void do_shuffle(const Warp& warp) {
  std::array<uint64_t, kWarp> values{};
  for (int i = 0; i < kWarp; ++i) {
    const Operands& o = warp.threads[i]->operands;
    std::memcpy(&values[i], o.in, o.bytes);
  }
  for (const Thread* t : warp.threads)
    std::memcpy(t->operands.out, &values[t->operands.number & (kWarp - 1)], t->operands.bytes);
}

void do_vote(const Warp& warp) {
  uint32_t votes = 0;
  for (int i = 0; i < kWarp; ++i)
    votes |= static_cast<uint32_t>(warp.threads[i]->operands.flag) << i;
  for (const Thread* t : warp.threads) std::memcpy(t->operands.out, &votes, sizeof votes);
}

// Element `half` of a register pair of 16-bit elements.
float half_of(bool bf16, uint32_t bits, int half) {
  const uint16_t h = static_cast<uint16_t>(bits >> (16 * half));
  return bf16 ? bf16_to_f32(h) : f16_to_f32(h);
}

// c += a b^T of [16, 16] and [8, 16], products added in ascending k. Lane 4 g + t holds of a, b the
// rows g (and g + 8 of a), of k the pairs 2 t and 2 t + 8; of c the columns 2 t, 2 t + 1.
void do_mma(const Warp& warp) {
  const bool bf16 = warp.threads[0]->operands.flag;
  float a[16][16], b[16][8], c[16][8];  // a [row][k], b [k][col]
  for (int lane = 0; lane < kWarp; ++lane) {
    const Operands& o = warp.threads[lane]->operands;
    const int g = lane / 4, t = lane % 4;
    uint32_t ra[4], rb[2];
    float rc[4];
    std::memcpy(ra, o.in, sizeof ra);
    std::memcpy(rb, o.in2, sizeof rb);
    std::memcpy(rc, o.out, sizeof rc);
    for (int half = 0; half < 2; ++half) {
      for (int r = 0; r < 4; ++r)
        a[g + r % 2 * 8][2 * t + r / 2 * 8 + half] = half_of(bf16, ra[r], half);
      for (int r = 0; r < 2; ++r) b[2 * t + r * 8 + half][g] = half_of(bf16, rb[r], half);
      for (int r = 0; r < 2; ++r) c[g + r * 8][2 * t + half] = rc[2 * r + half];
    }
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int col = 0; col < 8; ++col) c[row][col] += a[row][k] * b[k][col];
  for (int lane = 0; lane < kWarp; ++lane) {
    const int g = lane / 4, t = lane % 4;
    const float rc[4] = {c[g][2 * t], c[g][2 * t + 1], c[g + 8][2 * t], c[g + 8][2 * t + 1]};
    std::memcpy(warp.threads[lane]->operands.out, rc, sizeof rc);
  }
}

// Matrix i is the eight 16-byte rows that lanes 8 i to 8 i + 7 point to. Lane 4 g + t gets of row g
// (transposed: column g) the elements 2 t and 2 t + 1.
void do_ldmatrix(const Warp& warp) {
  const bool transposed = warp.threads[0]->operands.flag;
  for (int i = 0; i < warp.threads[0]->operands.number; ++i) {
    uint16_t m[8][8];
    for (int r = 0; r < 8; ++r) std::memcpy(m[r], warp.threads[8 * i + r]->operands.in, 16);
    for (int lane = 0; lane < kWarp; ++lane) {
      const int g = lane / 4, t = 2 * (lane % 4);
      const uint32_t lo = transposed ? m[t][g] : m[g][t];
      const uint32_t hi = transposed ? m[t + 1][g] : m[g][t + 1];
      const uint32_t bits = lo | hi << 16;
      std::memcpy(static_cast<uint32_t*>(warp.threads[lane]->operands.out) + i, &bits, 4);
    }
  }
}

// ---- The machine.

class Machine {
 public:
  LaunchCounters run(const Launch& launch, uint64_t seed);
  // The running thread waits for its warp.
  void arrive(Point point);

 private:
  static void thread_main();
  Fiber* run_thread(Thread& me);
  void prepare(const Launch& launch);
  void run_block();
  void run_warp(Warp& warp);
  void check_phase();
  static Thread* next_lane(const Thread& me);
  static void check_together(const Thread& me);
  void complete(Thread& me);
  void go(Fiber& from, Thread& to) {
    current_lane = &to;
    Fiber::switch_to(from, to.fiber);
  }

  const Launch* launch_ = nullptr;
  Fiber* host_ = nullptr;  // who launched
  Block block_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Warp> warps_;
  std::vector<int> order_;
  Random random_{0};
  std::string error_;
};

// What kernels stored since the last end of a step, in units of 16 bytes.
class Written {
 public:
  void add(const void* p) {
    if (unit(p) == last_) return;
    last_ = unit(p);
    units_.insert(last_);
  }
  bool has(const void* p) const { return !units_.empty() && units_.count(unit(p)) != 0; }
  void clear() {
    units_.clear();
    last_ = 0;
  }

 private:
  static uintptr_t unit(const void* p) { return reinterpret_cast<uintptr_t>(p) / 16; }
  std::unordered_set<uintptr_t> units_;
  uintptr_t last_ = 0;
};

// One kernel runs at a time; a copy may come from another host thread.
std::mutex& run_mutex() {
  static std::mutex& mutex = *new std::mutex;
  return mutex;
}
Written& written() {
  static Written& written = *new Written;
  return written;
}

Thread& running() {
  return *static_cast<Thread*>(current_lane);
}

std::string where(const Block& block, unsigned thread) {
  return "block (" + std::to_string(block.index.x) + ", " + std::to_string(block.index.y) + ", " +
         std::to_string(block.index.z) + "), thread " + std::to_string(thread);
}

TM_NOT_TRACED void Machine::thread_main() {
  Thread* const me = &running();
  Fiber* const next = me->machine->run_thread(*me);
  Fiber::switch_to(me->fiber, *next, true);
}

// Who goes on once this thread has returned or failed. Nothing of it is left on its stack.
Fiber* Machine::run_thread(Thread& me) {
  try {
    launch_->entry(launch_->params.data());
    if (!me.waited) fail("returned without wait_for_previous");
    me.point = Point::returned;
    if (Thread* next = next_lane(me)) {
      current_lane = next;
      return &next->fiber;
    }
    check_together(me);
  } catch (const Failure& failure) {
    error_ = where(block_, me.thread_index.x) + ": " + failure.what;
  }
  return host_;
}

void Machine::prepare(const Launch& launch) {
  launch_ = &launch;
  block_ = Block{};
  block_.grid = launch.grid;
  block_.threads = Dim3(static_cast<unsigned>(launch.threads));
  block_.shared_bytes = launch.shared_bytes;
  while (threads_.size() < static_cast<size_t>(launch.threads))
    threads_.push_back(std::make_unique<Thread>(static_cast<int>(threads_.size())));
  warps_.resize(static_cast<size_t>(launch.threads / kWarp));
  for (int i = 0; i < launch.threads; ++i) {
    Thread& t = *threads_[i];
    t.thread_index = Dim3(static_cast<unsigned>(i), 0, 0);
    t.block = &block_;
    t.machine = this;
    t.warp = &warps_[i / kWarp];
    t.warp->threads[i % kWarp] = &t;
  }
  order_.resize(warps_.size());
  for (size_t i = 0; i < order_.size(); ++i) order_[i] = static_cast<int>(i);
}

LaunchCounters Machine::run(const Launch& launch, uint64_t seed) {
  LaunchCounters done;
  Fiber host;
  host_ = &host;
  prepare(launch);
  random_ = Random(seed);
  error_.clear();
  // malloc'ed per launch and exactly as large as asked for: the address sanitizer sees an overrun.
  void* memory = nullptr;
  if (launch.shared_bytes && posix_memalign(&memory, kSharedAlignment, launch.shared_bytes) != 0)
    throw_error(ErrorCode::internal, launch.kernel, ": no memory for ", launch.shared_bytes,
                " bytes of shared memory");
  const std::unique_ptr<void, FreeDeleter> shared(memory);
  block_.shared = static_cast<uint8_t*>(memory);
  for (unsigned z = 0; z < launch.grid.z; ++z)
    for (unsigned y = 0; y < launch.grid.y; ++y)
      for (unsigned x = 0; x < launch.grid.x; ++x) {
        block_.index = Dim3(x, y, z);
        run_block();
        ++done.blocks;
        if (error_.empty()) continue;
        threads_.clear();  // the others were left in the middle
        throw_error(ErrorCode::internal, launch.kernel, ": ", error_);
      }
  done.launches = 1;
  done.bytes_loaded = block_.bytes_loaded;
  done.bytes_stored = block_.bytes_stored;
  done.mmas = block_.mmas;
  return done;
}

void Machine::run_block() {
  if (block_.shared) std::memset(block_.shared, 0xff, block_.shared_bytes);
  for (Warp& warp : warps_) {
    for (Thread* t : warp.threads) {
      t->fiber.start(&Machine::thread_main);
      t->copies.clear();
      t->groups.clear();
      t->uncommitted = 0;
      t->waited = false;
    }
  }
  do {
    for (size_t i = order_.size(); i > 1; --i)
      std::swap(order_[i - 1], order_[random_.below(static_cast<uint32_t>(i))]);
    for (const int w : order_) {
      run_warp(warps_[w]);
      if (!error_.empty()) return;
    }
    check_phase();
  } while (error_.empty() && warps_[0].threads[0]->point == Point::syncthreads);
}

// Until all its lanes are at a barrier of the block or have returned.
void Machine::run_warp(Warp& warp) {
  warp.arrived = 0;
  warp.direction = random_.below(2) ? 1 : -1;
  go(*host_, warp.first());
  current_lane = nullptr;
}

void Machine::check_phase() {
  const Thread& a = *warps_[0].threads[0];
  for (const Warp& warp : warps_) {
    const Thread& b = *warp.threads[0];
    if (a.point == b.point) continue;
    error_ = where(block_, a.thread_index.x) + " " + point_name(a.point) + " but thread " +
             std::to_string(b.thread_index.x) + " " + point_name(b.point);
    return;
  }
}

void Machine::arrive(Point point) {
  Thread& me = running();
  me.point = point;
  if (Thread* next = next_lane(me)) {
    go(me.fiber, *next);
    return;
  }
  check_together(me);
  complete(me);
}

// The next lane of the warp to run, or null when all have arrived and this one is the last.
Thread* Machine::next_lane(const Thread& me) {
  return ++me.warp->arrived < kWarp ? me.warp->threads[me.place + me.warp->direction] : nullptr;
}

void Machine::check_together(const Thread& me) {
  for (const Thread* t : me.warp->threads) {
    if (t->point == me.point) continue;
    throw Failure{std::string(point_name(me.point)) + " but thread " +
                  std::to_string(t->thread_index.x) + " of its warp " + point_name(t->point)};
  }
}

// All lanes of the warp are at the same operation, the running one arrived last.
void Machine::complete(Thread& me) {
  Warp& warp = *me.warp;
  warp.arrived = 0;
  switch (me.point) {
    case Point::returned:
      return;  // run_thread's business
    case Point::syncthreads:
      Fiber::switch_to(me.fiber, *host_);
      return;  // the other warps have come as far: the next phase
    case Point::syncwarp:
      break;
    case Point::shuffle:
      do_shuffle(warp);
      break;
    case Point::vote:
      do_vote(warp);
      break;
    case Point::mma:
      ++block_.mmas;
      do_mma(warp);
      break;
    case Point::ldmatrix:
      do_ldmatrix(warp);
      break;
  }
  warp.direction = random_.below(2) ? 1 : -1;
  if (&warp.first() != &me) go(me.fiber, warp.first());
}

// ---- Counters.

struct Totals {
  std::mutex mutex;
  std::map<std::string, LaunchCounters> by_kernel;
  uint64_t seed = 1;
  uint64_t launches = 0;
};

Totals& totals() {
  static Totals& totals = *new Totals;  // outlives whoever still runs at exit
  return totals;
}

void check(const Launch& launch) {
  if (launch.threads < kWarp || launch.threads > kMaxThreads || launch.threads % kWarp != 0)
    throw_error(ErrorCode::internal, launch.kernel, ": got ", launch.threads,
                " threads a block, expected whole warps, ", kWarp, " to ", kMaxThreads);
  if (launch.shared_bytes > kMaxSharedBytes)
    throw_error(ErrorCode::internal, launch.kernel, ": got ", launch.shared_bytes,
                " bytes of shared memory, expected at most ", kMaxSharedBytes);
  if (launch.grid.x > 0x7fffffffu || launch.grid.y > 65535 || launch.grid.z > 65535)
    throw_error(ErrorCode::internal, launch.kernel, ": got a grid of (", launch.grid.x, ", ",
                launch.grid.y, ", ", launch.grid.z,
                "), expected at most (2147483647, 65535, 65535)");
}

}  // namespace

LaunchCounters counters(const std::string& kernel) {
  Totals& t = totals();
  const std::lock_guard<std::mutex> lock(t.mutex);
  LaunchCounters sum;
  for (const auto& [name, c] : t.by_kernel) {
    if (name != kernel && name.compare(0, kernel.size() + 1, kernel + "<") != 0) continue;
    sum.launches += c.launches;
    sum.blocks += c.blocks;
    sum.bytes_loaded += c.bytes_loaded;
    sum.bytes_stored += c.bytes_stored;
    sum.mmas += c.mmas;
  }
  return sum;
}

void reset_counters() {
  Totals& t = totals();
  const std::lock_guard<std::mutex> lock(t.mutex);
  t.by_kernel.clear();
}

void set_schedule_seed(uint64_t seed) {
  Totals& t = totals();
  const std::lock_guard<std::mutex> lock(t.mutex);
  t.seed = seed;
  t.launches = 0;
}

void submit(StreamHandle stream, Launch launch) {
  check(launch);
  if (launch.grid.x == 0 || launch.grid.y == 0 || launch.grid.z == 0) return;
  if (stream) {
    if (!thread_has_gpu())
      throw_error(ErrorCode::internal, launch.kernel,
                  ": launched on a thread where no GPU was made current by Gpu::make_current");
    to_queue(stream)->enqueue([launch = std::move(launch)] { run(launch); });
  } else {
    end_of_step();
    run(launch);
  }
}

void end_of_step() {
  const std::lock_guard<std::mutex> turn(run_mutex());
  written().clear();
}

void run(const Launch& launch) {
  Totals& t = totals();
  uint64_t seed;
  {
    const std::lock_guard<std::mutex> lock(t.mutex);
    seed = mix(t.seed) ^ ++t.launches;
  }
  static Machine& machine = *new Machine;
  const std::lock_guard<std::mutex> turn(run_mutex());
  const LaunchCounters done = machine.run(launch, seed);
  const std::lock_guard<std::mutex> lock(t.mutex);
  LaunchCounters& c = t.by_kernel[launch.kernel];
  c.launches += done.launches;
  c.blocks += done.blocks;
  c.bytes_loaded += done.bytes_loaded;
  c.bytes_stored += done.bytes_stored;
  c.mmas += done.mmas;
}

// ---- For kernels.

void sync_block() {
  running().machine->arrive(Point::syncthreads);
}

void sync_warp() {
  running().machine->arrive(Point::syncwarp);
}

void shuffle(const void* value, void* result, size_t bytes, int source_lane) {
  running().operands = {value, nullptr, result, bytes, source_lane, false};
  running().machine->arrive(Point::shuffle);
}

uint32_t ballot(bool vote) {
  uint32_t votes = 0;
  running().operands = {nullptr, nullptr, &votes, sizeof votes, 0, vote};
  running().machine->arrive(Point::vote);
  return votes;
}

void mma16816(bool bf16, float* c, const uint32_t* a, const uint32_t* b) {
  running().operands = {a, b, c, 0, 0, bf16};
  running().machine->arrive(Point::mma);
}

void ldmatrix(uint32_t* registers, const void* row, int count, bool transposed) {
  Thread& t = running();
  if (t.place < 8 * count && (reinterpret_cast<uintptr_t>(row) % 16 != 0 || !is_shared(row)))
    fail_access("ldmatrix", row, 16);
  t.operands = {row, nullptr, registers, 16, count, transposed};
  running().machine->arrive(Point::ldmatrix);
}

void copy_async16(void* shared, const void* bytes) {
  if (reinterpret_cast<uintptr_t>(shared) % 16 != 0 || !is_shared(shared))
    fail_access("copy_async16", shared, 16);
  Thread& t = running();
  Copy copy{static_cast<uint8_t*>(shared), {}};
  std::memcpy(copy.bytes.data(), bytes, 16);
  std::memset(shared, 0xff, 16);
  t.copies.push_back(copy);
  ++t.uncommitted;
}

void copy_async_commit() {
  Thread& t = running();
  t.groups.push_back(t.uncommitted);
  t.uncommitted = 0;
}

void copy_async_wait(int groups) {
  Thread& t = running();
  size_t arrived = 0;
  const size_t keep = static_cast<size_t>(groups);
  const size_t done = t.groups.size() > keep ? t.groups.size() - keep : 0;
  for (size_t i = 0; i < done; ++i) arrived += t.groups[i];
  for (size_t i = 0; i < arrived; ++i) std::memcpy(t.copies[i].to, t.copies[i].bytes.data(), 16);
  t.copies.erase(t.copies.begin(), t.copies.begin() + static_cast<ptrdiff_t>(arrived));
  t.groups.erase(t.groups.begin(), t.groups.begin() + static_cast<ptrdiff_t>(done));
}

void note_store(const void* p) {
  written().add(p);
}

void check_constant(const void* p) {
  if (written().has(p)) fail("load_constant of what a kernel of the same step wrote");
}

void fail_early(const char* what) {
  fail(std::string(what) + " before wait_for_previous");
}

void fail(const std::string& what) {
  throw Failure{what};
}

void fail_access(const char* what, const void* p, size_t bytes) {
  char address[32];
  std::snprintf(address, sizeof address, "%p", p);
  const std::string text =
      std::string(what) + " of " + std::to_string(bytes) + " bytes at " + address;
  if (p == nullptr) fail(text + ": null");
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) fail(text + ": misaligned");
  fail(text + (is_shared(p) ? ": shared memory, expected device memory"
                            : ": not shared memory of this block"));
}

}  // namespace turbomind::emulator
