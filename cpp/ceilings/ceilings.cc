#include "ceilings/ceilings.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "ceilings/ceilings_kernels.h"
#include "core/memory.h"
#include "cpu/isa_dispatch.h"
#include "ops/linear.h"

namespace turbomind {

TM_KERNEL_TABLE(CeilingKernels, ceiling_kernels)

namespace {

// Calls once() for about `seconds` after one call to warm up; the best rate of `work` per call,
// since anything else the machine does can only slow a call down.
template <typename F>
double best_rate(double seconds, double work, F&& once) {
  using Clock = std::chrono::steady_clock;
  once();
  double best = 0, spent = 0;
  do {
    const auto start = Clock::now();
    once();
    const double t = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::max(best, work / std::max(t, 1e-9));
    spent += t;
  } while (spent < seconds);
  return best;
}

void fill(ThreadPool& pool, uint8_t* data, size_t bytes, size_t piece) {
  pool.parallel_for(static_cast<int64_t>(bytes / piece), 1, [&](int64_t b, int64_t e, int) {
    std::fill(data + b * piece, data + e * piece, uint8_t{0});
  });
}

}  // namespace

double measure_read(Context& ctx, size_t buffer_bytes, double seconds) {
  constexpr size_t kPiece = size_t{1} << 20;
  const size_t bytes = (buffer_bytes + kPiece - 1) / kPiece * kPiece;
  if (bytes == 0) return 0;
  const HugeBuffer buffer(bytes);
  fill(ctx.pool, buffer.data(), bytes, kPiece);  // untouched pages all map the zero page
  const CeilingKernels& kernels = ceiling_kernels(ctx.isa);
  std::vector<float> sums(ctx.pool.size());
  return best_rate(seconds, static_cast<double>(bytes), [&] {
    ctx.pool.parallel_for(
        static_cast<int64_t>(bytes / kPiece), 4, [&](int64_t b, int64_t e, int worker) {
          sums[worker] += kernels.read(buffer.data() + b * kPiece, (e - b) * kPiece);
        });
  });
}

double measure_tiles(Context& ctx, double seconds) {
  const CeilingKernels& kernels = ceiling_kernels(ctx.isa);
  const int64_t rounds = ctx.isa == Isa::amx_emulated ? 2000 : 200000;
  const double flops = kernels.tiles(1) * rounds * ctx.pool.size();
  return best_rate(seconds, flops, [&] { ctx.pool.run([&](int) { kernels.tiles(rounds); }); });
}

double measure_int8(Context& ctx, double seconds) {
  const CeilingKernels& kernels = ceiling_kernels(ctx.isa);
  constexpr int64_t kRounds = 200000;
  const double operations = kernels.int8(1) * kRounds * ctx.pool.size();
  return best_rate(seconds, operations, [&] { ctx.pool.run([&](int) { kernels.int8(kRounds); }); });
}

double measure_linear(Context& ctx, const char* format_name, int64_t m, int64_t n, int64_t k,
                      double seconds, Epilogue epilogue) {
  const WeightFormat& format = weight_format(format_name);
  const bool bf16 = format.activation_dtype(ctx.isa) == DType::bf16;
  const size_t w_bytes = format.packed_bytes(n, k);
  const size_t x_bytes = m * activation_stride(k) * (bf16 ? 2 : 4);
  const HugeBuffer w(w_bytes), x(x_bytes), y(m * activation_stride(n) * 4);
  // The bytes 0x3c repeated are a small number in all three types.
  std::fill_n(w.data(), w_bytes, uint8_t{0x3c});
  std::fill_n(x.data(), x_bytes, uint8_t{0x3c});
  const LinearWeight weight = {&format, n, k, w.data(), w_bytes};
  const Mat xm = {x.data(), bf16 ? DType::bf16 : DType::f32, m, k, activation_stride(k)};
  const bool gated = is_gated(epilogue);
  const int64_t cols = gated ? n / 2 : n;
  const DType dtype = gated && bf16 ? DType::bf16 : DType::f32;
  const Mat ym = {y.data(), dtype, m, cols, activation_stride(cols)};
  return best_rate(seconds, 2.0 * m * n * k,
                   [&] { linear(ctx, Op::other, weight, xm, ym, {.epilogue = epilogue}); });
}

}  // namespace turbomind
