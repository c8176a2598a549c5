// Several emulated GPUs: access to each other's memory, waits between their streams, kernels that
// wait for kernels of another device, and waits that nothing can end.
#define TM_CUDA_NS cuda_emulated
#define TM_CUDA_EMULATED 1
#include <array>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "cuda/device_wait.h"
#include "cuda/emulated_gpu.h"
#include "cuda/gpu.h"
#include "tests/check.h"
#include "tests/cuda/emulator_kernels.h"

namespace turbomind::cuda_emulated {
namespace {

TM_KERNEL(32, 1) void copy_floats(const Arrays p) {
  wait_for_previous();
  const int i = static_cast<int>(blockIdx.x * 32 + threadIdx.x);
  if (i < p.n) store(p.y + i, load(p.x + i));
}

// Adds a value of two devices to each one's sum, again and again.
struct Round {
  uint32_t* own;          // rounds of this device
  const uint32_t* other;  // of the other one
  uint32_t round;
  const uint32_t* stop;
  uint32_t* missing;  // becomes 1 where the other device does not come
  const float* parts[2];
  float* sum;
  bool waits, stores_early;
};

TM_KERNEL(32, 1) void sum_devices(const Round p) {
  wait_for_previous();
  if (p.stores_early && threadIdx.x == 0) store(p.sum, 0.0f);
  if (threadIdx.x == 0) post_count(p.own, p.round);
  if (p.waits && threadIdx.x == 0 && !wait_for_count(p.other, p.round, p.stop, 1000))
    store(p.missing, 1u);
  __syncthreads();
  if (threadIdx.x == 0) store(p.sum, load(p.sum) + load(p.parts[0]) + load(p.parts[1]));
}

TM_KERNEL(32, 1) void set_part(const Arrays p) {
  wait_for_previous();
  if (threadIdx.x == 0) store(p.y, static_cast<float>(p.n));
}

struct Device {
  explicit Device(int index)
      : gpu(open_gpu(GpuKind::emulated, index)),
        stream(*gpu),
        memory(*gpu, 1024),
        result(*gpu, 256) {
    gpu->fill(stream.handle(), memory.data(), 0, 1024);
    stream.synchronize();
  }
  float* part(int which) const { return memory.as<float>() + which; }
  float* sum() const { return memory.as<float>() + 8; }
  uint32_t* counter() const { return memory.as<uint32_t>() + 16; }
  float read(const float* p) const {
    gpu->copy(stream.handle(), result.data(), p, sizeof(float));
    stream.synchronize();
    return *result.as<float>();
  }

  const std::unique_ptr<Gpu> gpu;
  const GpuStream stream;
  const DeviceBuffer memory;
  const PinnedBuffer result;
};

struct Pair {
  Pair() : stop(*devices[0].gpu, 64) {
    std::fill_n(stop.as<uint32_t>(), 16, 0u);
    for (int d = 0; d < 2; ++d) devices[d].gpu->enable_access(*devices[1 - d].gpu);
  }
  uint32_t* missing(int d) const { return stop.as<uint32_t>() + 1 + d; }

  // Device d adds both parts of a round; the parts have `buffers` places in turn.
  void submit(int d, uint32_t round, int buffers, bool waits = true, bool early = false) {
    const Device &own = devices[d], &other = devices[1 - d];
    const int at = static_cast<int>(round) % buffers;
    own.gpu->make_current();
    launch<set_part>(own.stream.handle(), dim3(1), 32, 0,
                     Arrays{nullptr, own.part(at), static_cast<int>(round) * (d + 1), 0});
    Round r{own.counter(), other.counter(), round, stop.as<uint32_t>(), missing(d), {},
            own.sum(),     waits,           early};
    for (int p = 0; p < 2; ++p) r.parts[p] = devices[p].part(at);
    launch<sum_devices>(own.stream.handle(), dim3(1), 32, 0, r);
  }
  // The sums of both after some rounds. Each is 3 * (1 + ... + rounds) where all goes well.
  std::array<float, 2> run(uint64_t seed, int rounds, int buffers, bool waits) {
    emulator::set_schedule_seed(seed);
    for (const Device& device : devices)
      device.gpu->fill(device.stream.handle(), device.memory.data(), 0, 1024);
    for (const Device& device : devices) device.stream.synchronize();
    for (int d = 0; d < 2; ++d)
      for (int round = 1; round <= rounds; ++round)
        submit(d, static_cast<uint32_t>(round), buffers, waits);
    std::array<float, 2> sums;
    for (int d = 1; d >= 0; --d) sums[d] = devices[d].read(devices[d].sum());
    return sums;
  }

  Device devices[2] = {Device(0), Device(1)};
  const PinnedBuffer stop;
};

void test_devices() {
  emulator::set_device_count(3);
  emulator::set_device_bytes(1 << 20);
  emulator::set_device_bytes(1, 4096);
  CHECK(gpu_count(GpuKind::emulated) == 3);
  CHECK(throws("device index: got 3, expected 0 to 2", [] { open_gpu(GpuKind::emulated, 3); }));
  const Device a(0), b(1);
  CHECK(a.gpu->index() == 0 && b.gpu->index() == 1);
  CHECK(a.gpu->free_bytes() == (1 << 20) - 1024 && b.gpu->free_bytes() == 4096 - 1024);
  emulator::set_device_count(4);
  emulator::set_device_bytes(size_t{1} << 30);
}

void test_access() {
  const Device a(0), b(1);
  const DeviceBuffer x(*a.gpu, 256), y(*b.gpu, 256);
  const PinnedBuffer in(*b.gpu, 256), out(*a.gpu, 256);
  for (int i = 0; i < 64; ++i) in.as<float>()[i] = static_cast<float>(i);
  // A copy needs no access. It knows the memory of both, so it does not wait.
  a.gpu->copy(a.stream.handle(), x.data(), in.data(), 256);
  b.gpu->copy(b.stream.handle(), y.data(), x.data(), 256);
  a.stream.synchronize();
  CHECK(std::isnan(y.as<float>()[3]) || y.as<float>()[3] == 3);
  CHECK(throws("8 bytes at offset 252 of an allocation of 256",
               [&] { b.gpu->copy(b.stream.handle(), x.data() + 252, y.data(), 8); }));
  b.stream.synchronize();
  const Arrays p{x.as<float>(), y.as<float>(), 64, 0};
  const auto run = [&] {
    b.gpu->make_current();
    launch<copy_floats>(b.stream.handle(), dim3(2), 32, 0, p);
    b.stream.synchronize();
  };
  emulator::set_peer_access(false);
  CHECK(!b.gpu->enable_access(*a.gpu) && b.gpu->enable_access(*b.gpu));
  CHECK(throws("load of 4 bytes of GPU 0, to which GPU 1 has no access", run));
  emulator::set_peer_access(true);
  CHECK(throws("has no access", run));  // it can be given, and was not
  CHECK(b.gpu->enable_access(*a.gpu));
  run();
  CHECK(y.as<float>()[63] == 63);
  a.gpu->make_current();  // the other direction was not asked for
  launch<copy_floats>(a.stream.handle(), dim3(2), 32, 0, p);
  CHECK(throws("store of 4 bytes of GPU 1, to which GPU 0 has no access",
               [&] { a.stream.synchronize(); }));
}

// A stream waits for an event of another device; the host waits for the second one alone.
void test_events() {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    emulator::set_schedule_seed(seed);
    const Device a(0), b(1);
    const PinnedBuffer in(*a.gpu, 256), out(*a.gpu, 256);
    *in.as<float>() = 7;
    const GpuEvent written(*a.gpu);
    a.gpu->copy(a.stream.handle(), a.part(0), in.data(), 4);
    written.record(a.stream);
    b.gpu->wait(b.stream.handle(), written.handle());
    b.gpu->copy(b.stream.handle(), out.data(), a.part(0), 4);
    b.stream.synchronize();
    CHECK(*out.as<float>() == 7 && written.query());
  }
}

void test_sums_wait_for_both() {
  Pair pair;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const auto sums = pair.run(seed, 9, 2, true);
    CHECK(sums[0] == 135 && sums[1] == 135, "seed %d: %g %g", int(seed), double(sums[0]),
          double(sums[1]));
  }
  CHECK(*pair.missing(0) == 0 && *pair.missing(1) == 0);
}

// What the seeds are for: they find a wait that is not there and a buffer that is not doubled.
void test_faults_show() {
  Pair pair;
  int without_wait = 0, one_buffer = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const std::array<float, 2> right{135, 135};
    without_wait += pair.run(seed, 9, 2, false) != right;
    one_buffer += pair.run(seed, 9, 1, true) != right;
  }
  CHECK(without_wait > 10 && one_buffer > 10, "%d without a wait, %d with one buffer", without_wait,
        one_buffer);
}

void test_a_device_that_never_comes() {
  emulator::set_wait_limit(0);
  Pair pair;
  pair.submit(0, 1, 2);
  pair.devices[0].stream.synchronize();
  CHECK(*pair.missing(0) == 1 && *pair.missing(1) == 0);
  *pair.missing(0) = 0;
  *pair.stop.as<uint32_t>() = 1;  // the host ends all waits
  pair.submit(0, 2, 2);
  pair.devices[0].stream.synchronize();
  CHECK(*pair.missing(0) == 1);
  emulator::set_wait_limit(10);
}

// It could not be run again.
void test_a_store_before_a_wait_is_an_error() {
  Pair pair;
  pair.submit(0, 1, 2, true, true);
  CHECK(
      throws("sum_devices: block (0, 0, 0), thread 0: waited for another stream after it had "
             "stored",
             [&] { pair.devices[0].stream.synchronize(); }));
}

// An event that is recorded again is waited for as it was at the call.
void test_waits_in_both_directions() {
  emulator::set_wait_limit(0);
  const Device a(0), b(1);
  const GpuStream c(*a.gpu);
  const GpuEvent first(*a.gpu), second(*b.gpu);
  for (int i = 0; i < 4; ++i) {
    a.gpu->wait(c.handle(), second.handle());
    first.record(c);
    b.gpu->wait(b.stream.handle(), first.handle());
    second.record(b.stream);
  }
  b.stream.synchronize();
  CHECK(first.query() && second.query());
  emulator::set_wait_limit(10);
}

void test_errors_stay_with_their_device() {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    emulator::set_schedule_seed(seed);
    Pair pair;
    Device &a = pair.devices[0], &b = pair.devices[1];
    a.gpu->make_current();
    launch<fail>(a.stream.handle(), dim3(1), 64, 0, Arrays{});
    for (int i = 0; i < 8; ++i) b.gpu->fill(b.stream.handle(), b.part(0), 0, 4);
    b.stream.synchronize();
    CHECK(throws("fail: block (", [&] { a.stream.synchronize(); }));
    a.stream.synchronize();
  }
}

// One host thread waits for work that another one submits later.
void test_host_threads() {
  Pair pair;
  for (int round = 1; round <= 20; ++round) {
    std::vector<std::thread> hosts;
    for (int d = 0; d < 2; ++d)
      hosts.emplace_back([&, d] {
        pair.submit(d, static_cast<uint32_t>(round), 2);
        pair.devices[d].stream.synchronize();
      });
    for (std::thread& host : hosts) host.join();
  }
  for (const Device& device : pair.devices) CHECK(device.read(device.sum()) == 630);
  CHECK(*pair.missing(0) == 0 && *pair.missing(1) == 0);
}

// A device that runs blocks at once sees the posts of another device at once, and its own stores
// as before.
void test_blocks_at_once() {
  emulator::run_blocks_at_once(4);
  test_sums_wait_for_both();
  emulator::run_blocks_at_once(0);
}

}  // namespace
}  // namespace turbomind::cuda_emulated

int main(int argc, char** argv) {
  using namespace turbomind::cuda_emulated;
  return turbomind::run_cases(argc, argv,
                              {
                                  TM_CASE(test_devices),
                                  TM_CASE(test_access),
                                  TM_CASE(test_events),
                                  TM_CASE(test_sums_wait_for_both),
                                  TM_CASE(test_faults_show),
                                  TM_CASE(test_a_device_that_never_comes),
                                  TM_CASE(test_a_store_before_a_wait_is_an_error),
                                  TM_CASE(test_waits_in_both_directions),
                                  TM_CASE(test_errors_stay_with_their_device),
                                  TM_CASE(test_host_threads),
                                  TM_CASE(test_blocks_at_once),
                              });
}
