#include "linear/device_format.h"

#include <cstring>

#include "core/error.h"
#include "linear/linear_workspace.h"
#include "linear/row_source.h"

namespace turbomind {

namespace {

class DeviceFormat final : public WeightFormat {
 public:
  DeviceFormat(const char* name, DType dtype) : name_(name), dtype_(dtype) {}
  const char* name() const override { return name_; }
  DType source_dtype() const override { return dtype_; }
  DType activation_dtype(Isa) const override { return dtype_; }

  size_t packed_bytes(int64_t n, int64_t k) const override {
    return static_cast<size_t>(n) * padded_cols(k) * dtype_bytes(dtype_);
  }

  void pack(ThreadPool& pool, const std::vector<RowSegment>& segments, int64_t n, int64_t k,
            uint8_t* dst) const override {
    const SourceRows source(segments, n, k);
    const size_t row_bytes = packed_bytes(1, k);
    pool.parallel_for(n, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r) source.convert(r, dtype_, dst + r * row_bytes);
    });
  }

  void unpack_row(const LinearWeight& w, int64_t row, float* out) const override {
    const auto* from =
        reinterpret_cast<const uint16_t*>(w.data + static_cast<size_t>(row) * packed_bytes(1, w.k));
    for (int64_t i = 0; i < w.k; ++i)
      out[i] = dtype_ == DType::f16 ? f16_to_f32(from[i]) : bf16_to_f32(from[i]);
  }

  void reserve(Context& ctx, const LinearWeight& w, int64_t rows) const override {
    device_linear(*ctx.gpu, rows, w.n);
  }

  void matmul(Context& ctx, const LinearWeight& w, const Mat& x, const Mat& y,
              const LinearArgs& args) const override {
    const bool gated = is_gated(args.epilogue);
    linear(device_linear(*ctx.gpu, gated ? x.rows : 0, w.n), ctx.gpu->handle(),
           product(w, x, y, args));
  }

  void matmul_group(Context& ctx, const WeightGroup& w, const int32_t* begin, int64_t most_rows,
                    const Mat& x, const Mat& y, Epilogue epilogue) const override {
    DeviceGroups g;
    g.all = product(w.weights[0], x, y, {.bias = w.bias(0), .epilogue = epilogue});
    g.begin = begin;
    g.count = static_cast<int32_t>(w.weights.size());
    g.most_rows = static_cast<int32_t>(most_rows);
    if (g.count > 1) {
      g.w_stride = w.weights[1].data - w.weights[0].data;
      if (g.all.bias != nullptr) g.bias_stride = w.biases[1] - w.biases[0];
    }
    for (int64_t i = 1; i < g.count; ++i) {
      if (w.weights[i].data != w.weights[0].data + i * g.w_stride ||
          (g.all.bias != nullptr && w.biases[i] != g.all.bias + i * g.bias_stride))
        throw_error(ErrorCode::internal, "weights of a group are at unequal distances");
    }
    linear_groups(device_linear(*ctx.gpu, 0, 0), ctx.gpu->handle(), g);
  }

 private:
  DeviceProduct product(const LinearWeight& w, const Mat& x, const Mat& y,
                        const LinearArgs& args) const {
    if (x.dtype != dtype_ || (y.dtype != DType::f32 && y.dtype != dtype_))
      throw_error(ErrorCode::internal, "linear on a GPU: ", dtype_name(x.dtype), " -> ",
                  dtype_name(y.dtype), ", expected ", name_, " -> float32 or ", name_);
    DeviceProduct p;
    p.w = w.data;
    p.x = x.data;
    p.y = y.data;
    p.bias = args.bias;
    if (args.addend) p.addend = args.addend->f32(0), p.addend_stride = args.addend->stride;
    p.x_stride = x.stride;
    p.y_stride = y.stride;
    p.m = static_cast<int32_t>(x.rows);
    p.n = static_cast<int32_t>(w.n);
    p.k_padded = static_cast<int32_t>(padded_cols(w.k));
    p.y_cols = static_cast<int32_t>(y.cols);
    p.y_zero_end = static_cast<int32_t>(std::min(padded_cols(y.cols), y.stride));
    p.dtype = dtype_;
    p.y_16bit = y.dtype != DType::f32;
    p.epilogue = args.epilogue;
    return p;
  }

  const char* name_;
  DType dtype_;
};

}  // namespace

const WeightFormat& device_bfloat16_format() {
  static const DeviceFormat format("bfloat16", DType::bf16);
  return format;
}

const WeightFormat& device_float16_format() {
  static const DeviceFormat format("float16", DType::f16);
  return format;
}

}  // namespace turbomind
