#include "ceilings/gpu_ceilings.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <random>
#include <vector>

#include "ceilings/ceilings_cuda.h"
#include "core/dtype.h"
#include "core/error.h"
#include "cuda/dispatch.h"
#include "cuda/gpu.h"
#include "linear/linear_workspace.h"

namespace turbomind {

TM_GPU_TABLE(CeilingsCuda, kCeilingsCuda, ceilings_cuda)

namespace {

constexpr size_t kRandomBytes = size_t{16} << 20;
constexpr int kCalls = 4;   // between two events
constexpr int kBlocks = 8;  // of a stream, per multiprocessor

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Returns the best time of one call, in seconds, among those that fit `seconds`.
template <typename Submit>
double best_time(GpuContext& gpu, double seconds, const Submit& submit) {
  const GpuEvent begin(gpu.gpu(), true), end(gpu.gpu(), true);
  double best = std::numeric_limits<double>::infinity();
  const auto start = std::chrono::steady_clock::now();
  for (bool warm = false; !warm || seconds_since(start) < 2 * seconds;) {
    warm = seconds_since(start) >= seconds;
    begin.record(gpu.stream());
    for (int i = 0; i < kCalls; ++i) submit();
    end.record(gpu.stream());
    end.synchronize();
    const double ms = gpu.gpu().elapsed_ms(begin.handle(), end.handle());
    if (warm) best = std::min(best, std::max(ms, 1e-6) / 1e3 / kCalls);
  }
  return best;
}

void measure_memory(GpuContext& gpu, int64_t bytes, double seconds, GpuCeilings& to) {
  MemoryStream m;
  m.blocks = gpu.limits().multiprocessors * kBlocks;
  const int64_t free = static_cast<int64_t>(gpu.gpu().free_bytes() / 4);
  m.bytes = std::max(std::min(bytes, free) / kStreamTile, int64_t{1}) * kStreamTile;
  const int64_t sums = int64_t{16} * m.blocks * kStreamThreads;
  const DeviceBuffer from(gpu.gpu(), m.bytes), copied(gpu.gpu(), std::max(m.bytes, sums));
  fill_random(gpu, from.data(), m.bytes);
  m.from = from.data();
  m.to = copied.data();
  const CeilingsCuda& kernels = ceilings_cuda(gpu.kind());
  const double moved = static_cast<double>(m.bytes);
  to.copy = 2 * moved / best_time(gpu, seconds, [&] { kernels.copy(gpu.handle(), m); });
  to.read = moved / best_time(gpu, seconds, [&] { kernels.read(gpu.handle(), m); });
}

void measure_product(GpuContext& gpu, int64_t size, double seconds, GpuCeilings& to) {
  const size_t bytes = static_cast<size_t>(size * size) * 2;
  const DeviceBuffer operands(gpu.gpu(), 2 * bytes), result(gpu.gpu(), bytes);
  fill_random(gpu, operands.data(), 2 * bytes);
  DeviceProduct p;
  p.w = operands.data();
  p.x = operands.data() + bytes;
  p.y = result.data();
  p.y_16bit = true;
  p.x_stride = p.y_stride = size;
  p.m = p.n = p.k_padded = p.y_cols = p.y_zero_end = static_cast<int32_t>(size);
  const double time =
      best_time(gpu, seconds, [&] { linear(device_linear(gpu, 0, size), gpu.handle(), p); });
  to.flops = 2.0 * static_cast<double>(size) * static_cast<double>(size * size) / time;
}

}  // namespace

GpuCeilings measure_ceilings(GpuContext& gpu, int64_t bytes, int64_t size, double seconds) {
  if (size < 32 || size > 32768 || size % 32 != 0)
    throw_error(ErrorCode::invalid_request, "size: got ", size,
                ", expected a multiple of 32, 32 to 32768");
  gpu.gpu().make_current();
  GpuCeilings found;
  measure_memory(gpu, bytes, seconds, found);
  measure_product(gpu, size, seconds, found);
  return found;
}

void fill_random(GpuContext& gpu, void* to, size_t bytes) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> block(std::min(bytes, kRandomBytes) / 2);
  for (uint16_t& v : block) v = f32_to_bf16(normal(random));
  auto* const at = static_cast<uint8_t*>(to);
  size_t done = block.size() * 2;
  gpu.gpu().copy(gpu.handle(), at, block.data(), done);
  for (; done < bytes; done *= 2)
    gpu.gpu().copy(gpu.handle(), at + done, at, std::min(done, bytes - done));
  gpu.stream().synchronize();
}

}  // namespace turbomind
