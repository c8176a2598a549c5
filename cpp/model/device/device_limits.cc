#include "model/device/device_limits.h"

#include <algorithm>
#include <set>
#include <string>
#include <tuple>

#include "core/error.h"
#include "linear/weight_format.h"
#include "model/device/device_step_arrays.h"
#include "ops/attention_cuda.h"
#include "ops/norm_kernels.h"
#include "ops/sample_cuda.h"

namespace turbomind {

namespace {

constexpr int64_t kMostStepTokens = 65535;

AttentionCudaArgs args_of(const ModelConfig& config, const LayerConfig& layer) {
  AttentionCudaArgs args{};
  args.dtype = config.kv_dtype;
  args.heads = layer.heads;
  args.kv_heads = layer.kv_heads;
  args.k_dim = layer.k_dim;
  args.v_dim = layer.v_dim;
  args.scale = 1;
  args.window = layer.window;
  return args;
}

void check_width(const std::string& name, int width) {
  if (width > kMaxHeadDim || width % 8 != 0)
    throw_error(ErrorCode::model, name, " is ", width, ", expected a multiple of 8 up to ",
                kMaxHeadDim, " on a GPU");
}

// How a step is cut changes with its keys and with its sequences or tokens, so all that matters is
// tried. Up to `keys`, multiples of a span do: between two of them no step needs more than at the
// next. A window sees no more than itself and the step's own tokens.
int64_t last_span(const AttentionCudaArgs& args, int64_t keys, int64_t tokens) {
  if (args.window) keys = std::min(keys, args.window + tokens + kSpanTokens);
  return (keys + kSpanTokens - 1) / kSpanTokens;
}

size_t most_for_decode(const AttentionCudaArgs& args, const GpuLimits& limits, int64_t rows,
                       int64_t keys) {
  size_t most = 0;
  const int64_t spans = last_span(args, keys, 1);
  for (int n = 1; n <= rows; ++n)
    for (int64_t s = 1; s <= spans; ++s) {
      const AttentionBounds bounds{n, n, s * kSpanTokens, true, false};
      most = std::max(most, plan_attention(args, bounds, limits).workspace_bytes);
    }
  return most;
}

// Partial results are stored for two spans and more, where few blocks have the work and the results
// are not too many: what is too much stays so with more tokens and more keys.
size_t most_for_chunks(const AttentionCudaArgs& args, const GpuLimits& limits, int64_t tokens,
                       int64_t keys) {
  size_t most = 0;
  const int64_t spans = last_span(args, keys, tokens);
  const auto bytes = [&](int n, int64_t s) {
    const AttentionBounds bounds{1, n, s * kSpanTokens, false, true};
    return plan_attention(args, bounds, limits).workspace_bytes;
  };
  for (int n = 1; n <= tokens && spans >= 2 && bytes(n, 2) > 0; ++n)
    for (int64_t s = 2; s <= spans && bytes(n, s) > 0; ++s) most = std::max(most, bytes(n, s));
  return most;
}

}  // namespace

void check_device_limits(const ModelConfig& config, const GpuInfo& gpu) {
  const std::string& format = config.weight_format;
  if (!has_weight_format(format, WeightPlace::gpu))
    throw_error(ErrorCode::model, "dtype is ", format, ", expected ",
                weight_format_names(WeightPlace::gpu), ": a GPU has no kernels for others");
  for (const auto& [slot, own] : config.slot_formats)
    throw_error(ErrorCode::model, "weight ", slot, " is ", own, ", expected ", format,
                ": a GPU has no kernels for quantized weights");
  if (dtype_name(config.kv_dtype) != format)
    throw_error(ErrorCode::model, "kv_dtype is ", dtype_name(config.kv_dtype), ", expected ",
                format, ", the weights' own, on a GPU");
  if (config.vocab > kMaxSampledVocab)
    throw_error(ErrorCode::model, "vocab is ", config.vocab, ", expected at most ",
                kMaxSampledVocab, " on a GPU");
  if (config.hidden > kMaxNormCols)
    throw_error(ErrorCode::model, "hidden is ", config.hidden, ", expected at most ", kMaxNormCols,
                " on a GPU");
  // A long prompt over a long past is what takes the most shared memory.
  const AttentionBounds large{1, 1 << 16, 1 << 20, true, true};
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const std::string name = "layers[" + std::to_string(i) + "]";
    check_width(name + ".k_dim", config.layers[i].k_dim);
    check_width(name + ".v_dim", config.layers[i].v_dim);
    try {
      plan_attention(args_of(config, config.layers[i]), large,
                     {gpu.multiprocessors, gpu.shared_bytes});
    } catch (const Error& e) {
      throw_error(ErrorCode::model, name, " on ", gpu.name, ": ", e.what());
    }
  }
}

void check_device_steps(const StepLimits& most) {
  if (most.tokens > kMostStepTokens)
    throw_error(ErrorCode::invalid_request, "got ", most.tokens, " tokens, expected at most ",
                kMostStepTokens, " on a GPU");
}

size_t attention_workspace_bytes(const ModelConfig& config, const GpuContext& gpu,
                                 const StepLimits& most) {
  const int64_t pages = (most.keys + kPageTokens - 1) / kPageTokens;
  const int64_t keys = int64_t{page_bucket(static_cast<int>(pages))} * kPageTokens;
  const GpuLimits limits = gpu.limits();
  std::set<std::tuple<int, int, int, int, int>> seen;
  size_t bytes = 0;
  for (const LayerConfig& l : config.layers) {
    if (!seen.insert({l.heads, l.kv_heads, l.k_dim, l.v_dim, l.window}).second) continue;
    const AttentionCudaArgs args = args_of(config, l);
    bytes = std::max({bytes, most_for_decode(args, limits, most.rows, keys),
                      most_for_chunks(args, limits, most.tokens, keys)});
  }
  return bytes;
}

}  // namespace turbomind
