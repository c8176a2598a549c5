#include "cuda/emulator.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/error.h"
#include "cuda/emulated/memory_map.h"
#include "cuda/emulated/streams.h"
#include "cuda/emulated_gpu.h"
#include "cuda/emulated_machine.h"
#include "cuda/emulated_stream.h"
#include "cuda/launch_counters.h"

namespace turbomind::emulator {

Lane* current_lane = nullptr;
DeviceMemory* device_memory = nullptr;
bool owners_matter = false;
bool peers_fail = false;

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

// The GPU of the kernel that runs.
int running_device = -1;

std::atomic<int> blocks_at_once{0};

// Kernels that were loaded at their first launch, by device; guarded by the lock of the streams.
std::set<std::pair<std::string, int>>& loaded_kernels() {
  static auto& kernels = *new std::set<std::pair<std::string, int>>;
  return kernels;
}

void load(const Launch& launch, int device) {
  Streams& streams = Streams::get();
  const std::lock_guard lock(streams.mutex());
  if (streams.lazy_loading() && loaded_kernels().insert({launch.kernel, device}).second)
    streams.require_idle(std::string(launch.kernel) + ": loaded", device);
}

// See set_peer_fault(); guarded by the lock of the streams.
struct PeerFailure {
  PeerFault fault = PeerFault::none;
  int reader = 0, owner = 0;
};
PeerFailure& peer_failure() {
  static PeerFailure& failure = *new PeerFailure;
  return failure;
}

// Sets device_memory for one launch.
class SharedByBlocks {
 public:
  explicit SharedByBlocks(bool on) { device_memory = on ? &memory_ : nullptr; }
  ~SharedByBlocks() { device_memory = nullptr; }
  SharedByBlocks(const SharedByBlocks&) = delete;
  SharedByBlocks& operator=(const SharedByBlocks&) = delete;

 private:
  DeviceMemory memory_;
};

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
    load(launch, to_queue(stream)->device());
    if (!thread_has_gpu())
      throw_error(ErrorCode::internal, launch.kernel,
                  ": launched on a thread where no GPU was made current by Gpu::make_current");
    to_queue(stream)->enqueue([launch = std::move(launch)] { run(launch); });
  } else {
    end_of_step();
    run(launch);
  }
}

void run_blocks_at_once(int blocks) {
  if (blocks < 0)
    throw_error(ErrorCode::internal, "run_blocks_at_once: got ", blocks, ", expected 0 or more");
  blocks_at_once = blocks;
}

void set_lazy_loading(bool on) {
  const std::lock_guard lock(Streams::get().mutex());
  Streams::get().set_lazy_loading(on);
  loaded_kernels().clear();
}

void set_peer_fault(PeerFault fault, int reader, int owner) {
  const std::lock_guard lock(Streams::get().mutex());
  peer_failure() = {fault, reader, owner};
  peers_fail = fault != PeerFault::none;
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
  const int blocks = blocks_at_once;
  const SharedByBlocks memory(blocks > 0);
  running_device = running_stream() ? running_stream()->device() : -1;
  owners_matter = running_device >= 0 && MemoryMap::get().has_peers();
  count_launch(launch.kernel, machine.run(launch, seed, blocks > 0 ? blocks : 1));
}

// ---- For kernels.

static int warp_of(const Thread& t) {
  return static_cast<int>(t.thread_index.x) / kWarp;
}

void sync_block() {
  running().run->arrive(Point::syncthreads);
}

void sync_warp() {
  running().run->arrive(Point::syncwarp);
}

void shuffle(const void* value, void* result, size_t bytes, int source_lane) {
  running().operands = {value, nullptr, result, bytes, source_lane, false};
  running().run->arrive(Point::shuffle);
}

uint32_t ballot(bool vote) {
  uint32_t votes = 0;
  running().operands = {nullptr, nullptr, &votes, sizeof votes, 0, vote};
  running().run->arrive(Point::vote);
  return votes;
}

void mma16816(bool bf16, float* c, const uint32_t* a, const uint32_t* b) {
  running().operands = {a, b, c, 0, 0, bf16};
  running().run->arrive(Point::mma);
}

void ldmatrix(uint32_t* registers, const void* row, int count, bool transposed) {
  Thread& t = running();
  if (t.place < 8 * count && (reinterpret_cast<uintptr_t>(row) % 16 != 0 || !is_shared(row)))
    fail_access("ldmatrix", row, 16);
  t.operands = {row, nullptr, registers, 16, count, transposed};
  running().run->arrive(Point::ldmatrix);
}

void device_fence() {
  if (!device_memory) return;
  Thread& t = running();
  t.run->pause();
  device_memory->fence(t.run->view(), warp_of(t), t.run->phase());
}

uint64_t atomic_add(void* p, uint64_t value, size_t bytes) {
  count_load(p, bytes);
  count_store(p, bytes);
  if (device_memory) {
    running().run->pause();
    return device_memory->add(running().run->view(), p, value, bytes);
  }
  uint64_t before = 0;
  std::memcpy(&before, p, bytes);  // of the lower bytes: the host is little-endian
  const uint64_t sum = before + value;
  std::memcpy(p, &sum, bytes);
  return before;
}

void load_shared_by_blocks(void* to, const void* p, size_t bytes) {
  device_memory->load(running().run->view(), to, p, bytes);
}

void store_shared_by_blocks(void* p, const void* from, size_t bytes) {
  Thread& t = running();
  DeviceMemory::store(t.run->view(), warp_of(t), t.run->phase(), p, from, bytes);
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

void check_owner(const char* what, const void* p, size_t bytes) {
  const int owner = MemoryMap::get().forbidden_owner(running_device, p);
  if (owner < 0) return;
  fail(std::string(what) + " of " + std::to_string(bytes) + " bytes of GPU " +
       std::to_string(owner) + ", to which GPU " + std::to_string(running_device) +
       " has no access");
}

// Whether the running kernel's GPU has this fault where it uses memory of another one.
static bool fails_at(PeerFault fault, const void* p) {
  const PeerFailure& failure = peer_failure();
  if (failure.fault != fault || failure.reader != running_device) return false;
  const MemoryMap::Allocation* const memory = MemoryMap::get().allocation_of(p);
  return memory && !memory->pinned && memory->device == failure.owner;
}

void spoil_peer_load(void* loaded, const void* p) {
  if (fails_at(PeerFault::wrong, p)) *static_cast<uint8_t*>(loaded) ^= 1;
}

// Other streams act on memory itself, so no block's view of it counts.
bool wait_for_count(const uint32_t* counter, uint32_t count, const uint32_t* stop) {
  count_load(counter, sizeof *counter);
  uint32_t seen = 0, stopped = 0;
  std::memcpy(&seen, counter, sizeof seen);
  const bool late = peers_fail && fails_at(PeerFault::late, counter);
  if (!late && static_cast<int32_t>(seen - count) >= 0) return true;
  count_load(stop, sizeof *stop);
  std::memcpy(&stopped, stop, sizeof stopped);
  if (stopped != 0 || TimeRunsOut::now()) return false;
  const MemoryMap::Allocation* const memory = MemoryMap::get().allocation_of(counter);
  if (memory && memory->device == running_device) running_stream()->wait_within_device();
  throw Failure{"waited for another stream after it had stored", true};
}

void post_count(uint32_t* counter, uint32_t count) {
  device_fence();
  check_waited("post");
  check_device_access("post", counter, sizeof *counter);
  std::memcpy(counter, &count, sizeof count);
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
