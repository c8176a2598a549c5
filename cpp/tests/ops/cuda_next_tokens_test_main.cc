// Token ids taken from what the step before has sampled, in the emulator or, with "--gpu", on a
// GPU.
#include <cstdio>
#include <random>
#include <vector>

#include "cuda/dispatch.h"
#include "cuda/emulator.h"
#include "ops/next_tokens_cuda.h"
#include "tests/check.h"
#include "tests/cuda/driver_gpu.h"
#include "tests/cuda/gpu_array.h"

namespace turbomind {

TM_GPU_TABLE(NextTokensCuda, kNextTokensCuda, next_tokens_cuda)

namespace {

constexpr int32_t kAfter = -99;  // what follows the ids and must stay

// False when an id is not what it should be, or the kernel moved other bytes than it needs.
bool check(Gpu& gpu, int count, uint32_t seed) {
  std::mt19937 random(seed + test_seed);
  std::vector<int32_t> from(count), sampled(count), ids(count + 1, kAfter);
  int64_t taken = 0;
  for (int i = 0; i < count; ++i) {
    from[i] = static_cast<int32_t>(random() % (count + 1)) - 1;
    sampled[i] = random() % 8 == 0 ? -1 : static_cast<int32_t>(random() % 1000);
    ids[i] = static_cast<int32_t>(random() % 1000);
    taken += from[i] >= 0;
  }
  std::vector<int32_t> wanted = ids;
  for (int i = 0; i < count; ++i)
    if (from[i] >= 0) wanted[i] = sampled[from[i]] < 0 ? 0 : sampled[from[i]];

  const GpuArray<int32_t> device_from(gpu, from), device_sampled(gpu, sampled),
      device_ids(gpu, ids);
  const GpuStream stream(gpu);
  emulator::reset_counters();
  gpu.make_current();
  next_tokens_cuda(gpu.kind())
      .fill(stream.handle(), {device_from.data(), device_sampled.data(), device_ids.data(), count});
  stream.synchronize();
  if (gpu.kind() == GpuKind::emulated) {
    const emulator::LaunchCounters c = emulator::counters("next_tokens");
    const int64_t loaded = 4 * (count + taken), stored = 4 * taken;
    if (c.bytes_loaded != loaded || c.bytes_stored != stored) {
      std::printf("%d tokens: %lld and %lld bytes, expected %lld and %lld\n", count,
                  static_cast<long long>(c.bytes_loaded), static_cast<long long>(c.bytes_stored),
                  static_cast<long long>(loaded), static_cast<long long>(stored));
      return false;
    }
  }
  if (device_ids.get() == wanted) return true;
  std::printf("%d tokens, seed %u: other ids than expected\n", count, seed);
  return false;
}

void check_counts() {
  const auto gpu = open_gpu(kind(), 0);
  for (const int count : {1, 2, 8, 63, 64, 65, 200})
    for (uint32_t seed = 0; seed < 5; ++seed) CHECK(check(*gpu, count, seed));
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(read_arguments(argc, argv), {
                                                   TM_CASE(check_counts),
                                               });
}
