// The emulator reports the errors that emulator.h lists: each check runs a correct kernel and a
// wrong one. With an argument the program makes one access out of bounds, for the address
// sanitizer.
#define TM_CUDA_NS cuda_emulated
#define TM_CUDA_EMULATED 1
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/emulated_gpu.h"
#include "cuda/gpu.h"
#include "cuda/kernel.h"
#include "cuda/last_block.h"
#include "tests/check.h"
#include "tests/cuda/emulator_kernels.h"

namespace turbomind::cuda_emulated {
namespace {

constexpr int kThreads = 128;

std::vector<float> count_up(int n) {
  std::vector<float> v(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) v[i] = static_cast<float>(i);
  return v;
}

// ---- Barriers.

// Reverses blocks of kThreads, through shared memory, twice. Mode 1 lacks the barrier after
// writing, mode 2 the one before writing again.
TM_KERNEL(kThreads, 1) void reverse_block(const Arrays p) {
  wait_for_previous();
  float* s = shared_memory<float>();
  const int base = static_cast<int>(blockIdx.x) * kThreads, t = static_cast<int>(threadIdx.x);
  s[t] = load(p.x + base + t);
  if (p.mode != 1) __syncthreads();
  const float first = s[kThreads - 1 - t];
  if (p.mode != 2) __syncthreads();
  s[t] = 2 * first;
  __syncthreads();
  store(p.y + base + t, first + s[kThreads - 1 - t]);
}

// The same within a warp.
TM_KERNEL(32, 1) void reverse_warp(const Arrays p) {
  wait_for_previous();
  float* s = shared_memory<float>();
  const int t = static_cast<int>(threadIdx.x);
  s[t] = load(p.x + t);
  if (p.mode != 1) __syncwarp();
  const float first = s[31 - t];
  if (p.mode != 2) __syncwarp();
  s[t] = 2 * first;
  __syncwarp();
  store(p.y + t, first + s[31 - t]);
}

bool reverses_blocks(int mode) {
  constexpr int kBlocks = 3, n = kBlocks * kThreads;
  const auto x = count_up(n);
  std::vector<float> y(n, -1);
  launch<reverse_block>(nullptr, dim3(kBlocks), kThreads, kThreads * sizeof(float),
                        Arrays{x.data(), y.data(), n, mode});
  for (int i = 0; i < n; ++i)
    if (y[i] != x[i / kThreads * kThreads + kThreads - 1 - i % kThreads] + 2 * x[i]) return false;
  return true;
}

bool reverses_warp(int mode) {
  const auto x = count_up(32);
  std::vector<float> y(32, -1);
  launch<reverse_warp>(nullptr, dim3(1), 32, 32 * sizeof(float),
                       Arrays{x.data(), y.data(), 32, mode});
  for (int i = 0; i < 32; ++i)
    if (y[i] != x[31 - i] + 2 * x[i]) return false;
  return true;
}

void test_removed_barriers() {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    emulator::set_schedule_seed(seed);
    CHECK(reverses_blocks(0) && !reverses_blocks(1) && !reverses_blocks(2));
    CHECK(reverses_warp(0) && !reverses_warp(1) && !reverses_warp(2));
  }
}

// Launches of several host threads take turns.
void test_host_threads() {
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&] {
      for (int round = 0; round < 20; ++round) wrong += !reverses_blocks(0) + !reverses_warp(0);
    });
  for (std::thread& t : threads) t.join();
  CHECK(wrong == 0);
}

// Some threads do not reach the operation at which the others wait.
TM_KERNEL(64, 1) void diverge(const Arrays p) {
  wait_for_previous();
  const unsigned t = threadIdx.x;
  if (p.mode == 0 && t < 32) __syncthreads();  // one warp waits, the other returns
  if (p.mode == 1 && t < 16) __syncthreads();  // half a warp
  if (p.mode == 2 && t < 16) __syncwarp();
  if (p.mode == 3) {
    if (t % 2 == 0)
      __syncwarp();
    else
      __shfl_sync(kAllLanes, 1, 0);
  }
  if (p.mode == 4 && t < 48) return;  // half of the second warp continues
  if (p.mode == 4) __ballot_sync(kAllLanes, true);
  if (p.mode == 5) __shfl_sync(0xffffu, 1, 0);
  if (p.mode == 6 && t < 32) return;  // a warp returns early, the other continues
  if (p.mode == 6) __syncwarp();
}

void test_divergence() {
  const auto run = [](int mode) {
    launch<diverge>(nullptr, dim3(2), 64, 0, Arrays{nullptr, nullptr, 0, mode});
  };
  CHECK(throws("has returned", [&] { run(0); }));
  CHECK(throws("waits at __syncthreads", [&] { run(1); }));
  CHECK(throws("waits at __syncwarp", [&] { run(2); }));
  CHECK(throws("waits in a shuffle", [&] { run(3); }));
  CHECK(throws("diverge: block (", [&] { run(4); }));
  CHECK(throws("mask", [&] { run(5); }));
  run(6);
  CHECK(reverses_blocks(0));  // failures leave no state
}

// ---- Shared memory.

TM_KERNEL(32, 1) void keep_in_shared(const Arrays p) {
  wait_for_previous();
  float* s = shared_memory<float>();
  store(p.y + blockIdx.x * 32 + threadIdx.x, s[threadIdx.x]);
  s[threadIdx.x] = 1;
}

void test_shared_is_poisoned() {
  std::vector<float> y(96, 0);
  launch<keep_in_shared>(nullptr, dim3(3), 32, 128, Arrays{nullptr, y.data(), 96, 0});
  for (const float v : y) CHECK(std::isnan(v));
}

// ---- Asynchronous copies. Each of two groups copies 16 bytes per thread.
TM_KERNEL(32, 1) void copy_through(const Arrays p) {
  wait_for_previous();
  float4* s = shared_memory<float4>();
  const int t = static_cast<int>(threadIdx.x);
  const float4* x = reinterpret_cast<const float4*>(p.x);
  s[t] = s[32 + t] = make_float4(5, 5, 5, 5);
  copy_async16(s + t, x + t, true);
  if (p.mode != 2) copy_async_commit();
  copy_async16(s + 32 + t, p.mode == 4 ? nullptr : x + 32 + t, p.mode != 4);
  if (p.mode != 2) copy_async_commit();
  if (p.mode != 1) {
    if (p.mode == 3)
      copy_async_wait<1>();
    else
      copy_async_wait<0>();
  }
  float4* y = reinterpret_cast<float4*>(p.y);
  store(y + t, s[t]);
  store(y + 32 + t, s[32 + t]);
}

void test_copy_async() {
  const auto x = count_up(256);
  alignas(16) float in[256], y[256];
  std::copy(x.begin(), x.end(), in);
  const auto run = [&](int mode) {
    std::fill(y, y + 256, -1.0f);
    launch<copy_through>(nullptr, dim3(1), 32, 1024, Arrays{in, y, 256, mode});
  };
  run(0);
  for (int i = 0; i < 256; ++i) CHECK(y[i] == in[i]);
  run(1);  // no wait
  for (int i = 0; i < 256; ++i) CHECK(std::isnan(y[i]));
  run(2);  // no commit
  for (int i = 0; i < 256; ++i) CHECK(std::isnan(y[i]));
  run(3);  // waits for the first group only
  for (int i = 0; i < 256; ++i) CHECK(i < 128 ? y[i] == in[i] : std::isnan(y[i]));
  emulator::reset_counters();
  run(4);  // the second group is not valid: zeros, and nothing is read
  for (int i = 0; i < 256; ++i) CHECK(y[i] == (i < 128 ? in[i] : 0));
  const emulator::LaunchCounters c = emulator::counters("copy_through");
  CHECK(c.launches == 1 && c.blocks == 1 && c.bytes_loaded == 512 && c.bytes_stored == 1024);
}

// ---- Accesses that a device refuses.

TM_KERNEL(32, 1) void access(const Arrays p) {
  wait_for_previous();
  float* s = shared_memory<float>();
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(p.x);
  if (p.mode == 0) load(reinterpret_cast<const float*>(bytes + 2));
  if (p.mode == 1) load(reinterpret_cast<const uint4*>(bytes + 8));
  if (p.mode == 2) store(reinterpret_cast<uint2*>(p.y + 1), make_uint2(1, 2));
  if (p.mode == 3) load(static_cast<const float*>(nullptr));
  if (p.mode == 4) load(s);
  if (p.mode == 5) store(s, 1.0f);
  if (p.mode == 6) copy_async16(s + 1, p.x, true);
  if (p.mode == 7) copy_async16(s, bytes + 4, true);
  if (p.mode == 8) copy_async16(p.y, p.x, true);
  uint32_t r[4];
  if (p.mode == 9) ldmatrix_x4(r, s + 1);
  if (p.mode == 10) ldmatrix_x4(r, p.x);
}

void test_refused_accesses() {
  alignas(16) float x[64] = {}, y[64] = {};
  const auto run = [&](int mode) {
    launch<access>(nullptr, dim3(1), 32, 1024, Arrays{x, y, 64, mode});
  };
  for (const int mode : {0, 1, 2, 6, 7, 9}) CHECK(throws("misaligned", [&] { run(mode); }));
  CHECK(throws("null", [&] { run(3); }));
  for (const int mode : {4, 5}) CHECK(throws("expected device memory", [&] { run(mode); }));
  for (const int mode : {8, 10}) CHECK(throws("not shared memory", [&] { run(mode); }));
}

void test_refused_launches() {
  const auto run = [](dim3 grid, int threads, size_t shared) {
    launch<keep_in_shared>(nullptr, grid, threads, shared, Arrays{});
  };
  CHECK(throws("keep_in_shared: got 33 threads", [&] { run(dim3(1), 33, 0); }));
  CHECK(throws("got 2048 threads", [&] { run(dim3(1), 2048, 0); }));
  CHECK(throws("shared memory", [&] { run(dim3(1), 32, emulator::kMaxSharedBytes + 1); }));
  CHECK(throws("grid", [&] { run(dim3(1, 65536), 32, 128); }));
  run(dim3(0), 32, 128);  // nothing to do
  run(dim3(1, 0), 32, 128);
}

// ---- Kernels that start while the one before them runs.

// Copies x to y; the mode selects the order of calls.
TM_KERNEL(32, 1) void overlap(const Arrays p) {
  let_next_start();
  const int t = static_cast<int>(threadIdx.x);
  float* s = shared_memory<float>();
  if (p.mode == 1) load(p.x + t);
  if (p.mode == 2) store(p.y + t, 1.0f);
  if (p.mode == 3) copy_async16(s, p.x, true);
  if (p.mode == 4 && t == 7) return;
  const float before = p.mode == 5 ? load_constant(p.x + t) : 0;
  if (p.mode == 6 && t % 4 == 0) copy_constant16(s + t, p.x + t, true);
  wait_for_previous();
  if (p.mode == 6) {
    copy_async_commit();
    copy_async_wait<0>();
    __syncwarp();
  }
  store(p.y + t, p.mode == 5 ? before : p.mode == 6 ? s[t] : load(p.x + t));
}

void test_overlap() {
  const auto gpu = open_gpu(GpuKind::emulated, 0);
  const GpuStream s(*gpu), pages(*gpu);
  const DeviceBuffer x(*gpu, 128), y(*gpu, 128), z(*gpu, 128), page(*gpu, 128);
  const auto in = count_up(32);
  const auto run = [&](int mode, const DeviceBuffer& from, const DeviceBuffer& to) {
    launch<overlap>(s.handle(), dim3(1), 32, 128,
                    Arrays{from.as<float>(), to.as<float>(), 32, mode});
  };
  const auto run_alone = [&](int mode) {
    run(mode, x, y);
    s.synchronize();
  };
  gpu->copy(s.handle(), x.data(), in.data(), 128);
  CHECK(throws("load before wait_for_previous", [&] { run_alone(1); }));
  CHECK(throws("store before wait_for_previous", [&] { run_alone(2); }));
  CHECK(throws("load before wait_for_previous", [&] { run_alone(3); }));
  CHECK(throws("thread 7: returned without wait_for_previous", [&] { run_alone(4); }));
  for (const int mode : {0, 5, 6}) {
    gpu->fill(s.handle(), y.data(), 0, 128);
    run_alone(mode);
    for (int i = 0; i < 32; ++i) CHECK(y.as<float>()[i] == in[i]);
  }
  // Memory that a kernel of the same step wrote is no constant; that of an earlier step is.
  for (const int mode : {5, 6}) {
    run(0, x, y);
    run(mode, y, z);
    CHECK(
        throws("load_constant of what a kernel of the same step wrote", [&] { s.synchronize(); }));
    run(0, x, y);
    gpu->copy(s.handle(), x.data(), in.data(), 128);
    run(mode, y, z);
    s.synchronize();
    CHECK(z.as<float>()[9] == 9);
    // A copy in another stream has not waited for this one's kernels.
    run(0, x, y);
    s.synchronize();
    gpu->copy(pages.handle(), page.data(), in.data(), 128);
    pages.synchronize();
    run(mode, y, z);
    CHECK(
        throws("load_constant of what a kernel of the same step wrote", [&] { s.synchronize(); }));
  }
  // Freeing has waited for all kernels, and its memory may be used again.
  run(0, x, y);
  {
    const DeviceBuffer freed(*gpu, 128);
  }
  run(5, y, z);
  s.synchronize();
  CHECK(!gpu->set_overlap(true));
}

// ---- Operations of a warp.

struct Bits {
  uint32_t* out;  // [12][32]
};

TM_KERNEL(32, 1) void shuffle_all(const Bits p) {
  wait_for_previous();
  const int t = static_cast<int>(threadIdx.x);
  int row = 0;
  const auto put = [&](uint32_t v) { store(p.out + 32 * row++ + t, v); };
  put(__shfl_sync(kAllLanes, t, 5));
  put(__shfl_sync(kAllLanes, t, t + 3));
  put(__shfl_sync(kAllLanes, t, 1, 8));
  put(__shfl_xor_sync(kAllLanes, t, 9));
  put(__shfl_xor_sync(kAllLanes, t, 2, 4));
  put(__shfl_up_sync(kAllLanes, t, 3));
  put(__shfl_down_sync(kAllLanes, t, 3, 8));
  put(__ballot_sync(kAllLanes, t % 3 == 0));
  put(__any_sync(kAllLanes, t == 31));
  put(__all_sync(kAllLanes, t != 31));
  put(static_cast<uint32_t>(__shfl_xor_sync(kAllLanes, static_cast<double>(t), 1)));
  put(static_cast<uint32_t>(warp_sum(static_cast<float>(t)) + warp_max(static_cast<float>(t))));
}

void test_shuffles() {
  std::vector<uint32_t> out(12 * 32);
  launch<shuffle_all>(nullptr, dim3(1), 32, 0, Bits{out.data()});
  uint32_t ballot = 0;
  for (uint32_t t = 0; t < 32; t += 3) ballot |= 1u << t;
  for (uint32_t t = 0; t < 32; ++t) {
    const uint32_t want[12] = {5,
                               (t + 3) % 32,
                               t / 8 * 8 + 1,
                               t ^ 9,
                               t ^ 2,
                               t < 3 ? t : t - 3,
                               t % 8 + 3 < 8 ? t + 3 : t,
                               ballot,
                               1,
                               0,
                               t ^ 1,
                               496 + 31};
    for (int row = 0; row < 12; ++row) CHECK(out[32 * row + t] == want[row]);
  }
}

struct Tiles {
  const uint16_t* a;  // [16][16]
  const uint16_t* b;  // [8][16]
  float* c;           // [16][8]
};

// c += a b^T, operands by shared memory and ldmatrix, b also transposed.
template <typename T>
TM_KERNEL(32, 1)
void multiply(const Tiles p) {
  wait_for_previous();
  uint16_t* a = shared_memory<uint16_t>();
  uint16_t *b = a + 256, *bt = b + 128;  // bt: [16][8]
  const int t = static_cast<int>(threadIdx.x);
  for (int i = t; i < 256; i += 32) a[i] = load(p.a + i);
  for (int i = t; i < 128; i += 32) b[i] = bt[i % 16 * 8 + i / 16] = load(p.b + i);
  __syncwarp();
  uint32_t ra[4], rb[2], rt[2];
  ldmatrix_x4(ra, a + (t % 16) * 16 + t / 16 * 8);
  ldmatrix_x2(rb, b + (t % 8) * 16 + t / 8 % 2 * 8);
  ldmatrix_x2_trans(rt, bt + t % 16 * 8);
  if (rb[0] != rt[0] || rb[1] != rt[1]) return;
  const int g = t / 4, q = t % 4;
  float* c = p.c;
  float r[4];
  for (int i = 0; i < 4; ++i) r[i] = load(c + (g + i / 2 * 8) * 8 + 2 * q + i % 2);
  mma16816<T>(r, ra, rb);
  for (int i = 0; i < 4; ++i) store(c + (g + i / 2 * 8) * 8 + 2 * q + i % 2, r[i]);
}

template <typename T>
void test_multiply() {
  std::mt19937 gen(3);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> a(256), b(128);
  for (uint16_t& v : a) v = from_float<T>(normal(gen)).bits;
  for (uint16_t& v : b) v = from_float<T>(normal(gen)).bits;
  std::vector<float> c(128);
  for (float& v : c) v = normal(gen);
  const std::vector<float> before = c;
  emulator::reset_counters();
  launch<multiply<T>>(nullptr, dim3(1), 32, 1024, Tiles{a.data(), b.data(), c.data()});
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 8; ++n) {
      double want = before[m * 8 + n];
      for (int k = 0; k < 16; ++k)
        want += static_cast<double>(to_float(T{a[m * 16 + k]})) * to_float(T{b[n * 16 + k]});
      CHECK(std::fabs(c[m * 8 + n] - want) < 1e-5);
    }
  const char* name = std::is_same_v<T, Bf16> ? "multiply<Bf16>" : "multiply<F16>";
  CHECK(emulator::counters(name).mmas == 1 && emulator::counters("multiply").launches == 1);
  CHECK(emulator::counters("multipl").launches == 0);
}

// ---- Blocks that work together.

// y[0] becomes the sum of x; the parts of the blocks are in y[1] and after it. Mode 1 wrongly takes
// the block of the highest number for the last.
TM_KERNEL(32, 1) void add_up(const Arrays p) {
  wait_for_previous();
  const int block = static_cast<int>(blockIdx.x), i = block * 32 + lane_index();
  const float sum = warp_sum(i < p.n ? load(p.x + i) : 0.0f);
  if (threadIdx.x == 0) store(p.y + 1 + block, sum);
  uint32_t* counter = reinterpret_cast<uint32_t*>(p.y + 1 + gridDim.x);
  bool last = is_last_block(counter, gridDim.x, shared_memory<bool>());
  if (p.mode == 1) last = blockIdx.x + 1 == gridDim.x;
  if (!last || threadIdx.x != 0) return;
  float all = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) all += load(p.y + 1 + b);
  store(p.y, all);
}

void test_last_block() {
  constexpr int kBlocks = 5, kSeeds = 8;
  const std::vector<float> x = count_up(kBlocks * 32);
  int wrong[2] = {};
  std::vector<float> y(kBlocks + 2);
  for (int mode = 0; mode < 2; ++mode)
    for (int seed = 1; seed <= kSeeds; ++seed) {
      emulator::set_schedule_seed(seed);
      std::fill(y.begin(), y.end() - 1, NAN);  // the kernel resets the counter
      launch<add_up>(nullptr, dim3(kBlocks), 32, 4, Arrays{x.data(), y.data(), 160, mode});
      wrong[mode] += y[0] != 160 * 159 / 2;
    }
  CHECK(wrong[0] == 0 && wrong[1] > 0);
}

// y[0] becomes the sum of x; each warp's part is in y[1] and after it. What is_last_block does,
// less one thing: mode 1 lacks the barrier before the fence, 2 the fence before the counter, 3 the
// fence after it; in 4 the counter is not atomic.
TM_KERNEL(64, 1) void add_parts(const Arrays p) {
  wait_for_previous();
  const int block = static_cast<int>(blockIdx.x);
  const int parts = 2 * static_cast<int>(gridDim.x);
  const float sum = warp_sum(load(p.x + block * 64 + threadIdx.x));
  if (lane_index() == 0) store(p.y + 1 + 2 * block + warp_index(), sum);
  uint32_t* counter = reinterpret_cast<uint32_t*>(p.y + 1 + parts);
  bool* last = shared_memory<bool>();
  if (p.mode == 0) is_last_block(counter, gridDim.x, last);
  if (p.mode > 1) __syncthreads();
  if (p.mode > 0 && threadIdx.x == 0) {
    if (p.mode != 2) device_fence();
    uint32_t before = load(counter);
    if (p.mode != 4) before = atomic_add_device(counter, 1u);
    if (p.mode == 4) store(counter, before + 1);
    if (p.mode != 3) device_fence();
    *last = before + 1 == gridDim.x;
    if (*last) store(counter, 0u);
  }
  __syncthreads();
  if (!*last || threadIdx.x != 0) return;
  float all = 0;
  for (int i = 0; i < parts; ++i) all += load(p.y + 1 + i);
  store(p.y, all);
}

// The third block reads at null after its fence.
TM_KERNEL(64, 1) void fail_late(const Arrays p) {
  wait_for_previous();
  device_fence();
  if (blockIdx.x == 2) load_constant(p.x);
  __syncthreads();
}

int wrong_sums(int mode, int blocks_at_once) {
  constexpr int kBlocks = 5, kSeeds = 8, kValues = kBlocks * 64;
  const std::vector<float> x = count_up(kValues);
  std::vector<float> y(2 + 2 * kBlocks);
  int wrong = 0;
  emulator::run_blocks_at_once(blocks_at_once);
  for (int seed = 1; seed <= kSeeds; ++seed) {
    emulator::set_schedule_seed(seed);
    std::fill(y.begin(), y.end() - 1, NAN);
    y.back() = 0;  // a wrong kernel may leave a count
    launch<add_parts>(nullptr, dim3(kBlocks), 64, 4, Arrays{x.data(), y.data(), kValues, mode});
    wrong += y[0] != kValues * (kValues - 1) / 2;
  }
  emulator::run_blocks_at_once(0);
  return wrong;
}

void test_blocks_at_once() {
  for (const int blocks : {0, 1, 2, 5, 9}) CHECK(wrong_sums(0, blocks) == 0);
  for (const int mode : {1, 2, 3, 4}) CHECK(wrong_sums(mode, 3) > 0);
  for (const int mode : {2, 3, 4}) CHECK(wrong_sums(mode, 0) == 0);  // unseen one by one
  CHECK(throws("run_blocks_at_once: got -1, expected 0 or more",
               [] { emulator::run_blocks_at_once(-1); }));
  // A block that fails while others are in the middle; then the same machine runs again.
  emulator::run_blocks_at_once(3);
  CHECK(throws("load_constant of 4 bytes at",
               [] { launch<fail_late>(nullptr, dim3(4), 64, 4, Arrays{}); }));
  CHECK(wrong_sums(0, 3) == 0);
}

// ---- For the address sanitizer: one access outside.

TM_KERNEL(32, 1) void overrun(const Arrays p) {
  wait_for_previous();
  const int t = static_cast<int>(threadIdx.x);
  float* s = shared_memory<float>();
  if (p.mode == 0) s[t] = load(p.x + t + 1);
  if (p.mode == 1) store(p.y + t + 1, 1.0f);
  if (p.mode == 2) s[t + 1] = 1;
  if (p.mode == 3) copy_async16(s, p.x + 4 * (t / 4), true);
  if (p.mode == 4) store(p.y + t, s[t - 1]);
}

int run_overrun(const std::string& which) {
  const std::vector<std::string> names = {"load", "store", "shared-store", "copy", "shared-load"};
  for (size_t mode = 0; mode < names.size(); ++mode) {
    if (names[mode] != which) continue;
    const auto gpu = open_gpu(GpuKind::emulated, 0);
    const DeviceBuffer x(*gpu, 120), y(*gpu, 128);
    launch<overrun>(nullptr, dim3(1), 32, 128,
                    Arrays{x.as<float>(), y.as<float>(), 32, static_cast<int>(mode)});
    std::printf("nothing was noticed\n");
    return 0;
  }
  std::printf("access: got %s, expected load, store, shared-store, copy or shared-load\n",
              which.c_str());
  return 2;
}

}  // namespace
}  // namespace turbomind::cuda_emulated

int main(int argc, char** argv) {
  using namespace turbomind::cuda_emulated;
  if (argc > 2 && std::string(argv[1]) == "--overrun") return run_overrun(argv[2]);
  return turbomind::run_cases(argc, argv,
                              {
                                  TM_CASE(test_removed_barriers),
                                  TM_CASE(test_host_threads),
                                  TM_CASE(test_divergence),
                                  TM_CASE(test_shared_is_poisoned),
                                  TM_CASE(test_copy_async),
                                  TM_CASE(test_refused_accesses),
                                  TM_CASE(test_refused_launches),
                                  TM_CASE(test_overlap),
                                  TM_CASE(test_shuffles),
                                  {"multiply_bf16", test_multiply<turbomind::Bf16>},
                                  {"multiply_f16", test_multiply<turbomind::F16>},
                                  TM_CASE(test_last_block),
                                  TM_CASE(test_blocks_at_once),
                              });
}
