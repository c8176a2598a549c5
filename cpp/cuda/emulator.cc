#include "cuda/emulator.h"

#include <cstdio>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/error.h"
#include "cuda/emulated_machine.h"
#include "cuda/emulated_stream.h"
#include "cuda/launch_counters.h"

namespace turbomind::emulator {

Lane* current_lane = nullptr;

namespace {

constexpr int kMaxThreads = 1024;

// Addresses that kernels of a stream have stored to since its last end of a step, in units of 16
// bytes.
class Written {
 public:
  void add(const void* p) {
    if (unit(p) == last_) return;
    last_ = unit(p);
    units_.insert(last_);
  }
  bool has(const void* p) const { return !units_.empty() && units_.count(unit(p)) != 0; }

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
// Guarded by run_mutex(), as is the set of the stream whose kernel runs.
std::unordered_map<const StreamQueue*, Written>& written_by_stream() {
  static auto& written = *new std::unordered_map<const StreamQueue*, Written>;
  return written;
}
Written* written = nullptr;

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
  written_by_stream().erase(running_stream());
}

void end_of_all_steps() {
  const std::lock_guard<std::mutex> turn(run_mutex());
  written_by_stream().clear();
}

void run(const Launch& launch) {
  const uint64_t seed = next_seed();
  static Machine& machine = *new Machine;
  const std::lock_guard<std::mutex> turn(run_mutex());
  written = &written_by_stream()[running_stream()];
  count_launch(launch.kernel, machine.run(launch, seed));
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
  const size_t pending = static_cast<size_t>(groups);
  const size_t done = t.groups.size() > pending ? t.groups.size() - pending : 0;
  for (size_t i = 0; i < done; ++i) arrived += t.groups[i];
  for (size_t i = 0; i < arrived; ++i) std::memcpy(t.copies[i].to, t.copies[i].bytes.data(), 16);
  t.copies.erase(t.copies.begin(), t.copies.begin() + static_cast<ptrdiff_t>(arrived));
  t.groups.erase(t.groups.begin(), t.groups.begin() + static_cast<ptrdiff_t>(done));
}

void note_store(const void* p) {
  written->add(p);
}

void check_constant(const void* p) {
  if (written->has(p)) fail("load_constant of what a kernel of the same step wrote");
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
