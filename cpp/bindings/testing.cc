// Binds single ops on plain arrays, for tests against independent references.
#include <cstring>
#include <optional>

#include "bindings/bindings.h"
#include "bindings/buffer_view.h"
#include "core/memory.h"
#include "engine/step/step_delay.h"
#include "model/decoder/weight_reader.h"
#include "ops/linear.h"
#include "sampling/sampler.h"
#include "tests/engine/scripted_model.h"
#include "tests/linear/code_rows.h"

namespace turbomind::bindings {
namespace {

using Array = py::array_t<float, py::array::c_style>;

// Rows padded with zeros, as `linear` requires its input.
struct Activations {
  HugeBuffer buffer;
  Mat mat;

  Activations(int64_t rows, int64_t cols, DType dtype)
      : buffer(std::max<size_t>(64, rows * padded_cols(cols) * dtype_bytes(dtype))),
        mat{buffer.data(), dtype, rows, cols, padded_cols(cols)} {}

  void fill(const float* x) {
    for (int64_t r = 0; r < mat.rows; ++r) {
      for (int64_t c = 0; c < mat.cols; ++c) {
        const float v = x[r * mat.cols + c];
        if (mat.dtype == DType::f32)
          mat.f32(r)[c] = v;
        else
          mat.u16(r)[c] = f32_to_bf16(v);
      }
    }
  }
};

void check_shapes(const Array& x, const Array& w, const std::optional<Array>& bias) {
  if (x.ndim() != 2 || w.ndim() != 2 || x.shape(1) != w.shape(1) || w.shape(0) < 1 ||
      w.shape(1) < 1) {
    throw_error(ErrorCode::invalid_request, "x, w: expected shapes [m, k] and [n, k]");
  }
  if (bias && (bias->ndim() != 1 || bias->shape(0) != w.shape(0))) {
    throw_error(ErrorCode::invalid_request, "bias: expected shape [", w.shape(0), "]");
  }
}

// Packs a segment and returns the values that the packed matrix has.
py::array_t<float> packed_values(const std::string& format_name, const RowSegment& segment) {
  const WeightFormat& format = weight_format(format_name);
  const int64_t n = segment.rows, k = segment.cols;
  py::array_t<float> result({n, k});
  ThreadPool pool(1);
  WeightReader reader;
  HugeBuffer packed(format.packed_bytes(n, k));
  format.check({segment}, k);
  format.pack(pool, reader.read(pool, {segment}), n, k, packed.data());
  const LinearWeight weight{&format, n, k, packed.data(), packed.size()};
  for (int64_t r = 0; r < n; ++r) format.unpack_row(weight, r, result.mutable_data() + r * k);
  return result;
}

py::array_t<float> test_unpack(const std::string& format_name, const Array& w) {
  if (w.ndim() != 2 || w.shape(0) < 1 || w.shape(1) < 1)
    throw_error(ErrorCode::invalid_request, "w: expected shape [n, k]");
  return packed_values(format_name, {w.data(), DType::f32, 0, w.shape(0), w.shape(1)});
}

// The rows of a source of codes from `begin` on.
py::array_t<float> test_unpack_codes(const std::string& format_name, const CodeSource& codes,
                                     int64_t begin) {
  RowSegment segment{nullptr, DType::f32, begin, codes.rows - begin, codes.cols};
  segment.codes = &codes;
  return packed_values(format_name, segment);
}

std::shared_ptr<CodeSource> test_code_rows(int64_t rows, int64_t cols, const py::object& codes,
                                           const py::object& scales, const py::object& offsets,
                                           const py::object& super_scales,
                                           const py::object& super_offsets,
                                           const py::object& columns, int code_bits) {
  auto source = std::make_shared<InBuffers<CodeRows>>();
  source->rows = rows;
  source->cols = cols;
  source->code_bits = code_bits;
  source->codes = source->keep(codes, "codes");
  source->scales = source->keep(scales, "scales");
  source->offsets = source->keep(offsets, "offsets");
  source->super_scales = source->keep(super_scales, "super_scales");
  source->super_offsets = source->keep(super_offsets, "super_offsets");
  source->columns = source->keep(columns, "columns");
  return source;
}

// Runs one `linear`; w and bias are in packed row order. `add` starts from y = 1.
py::array_t<float> test_linear(const std::string& isa, int threads, const std::string& format_name,
                               const Array& x, const Array& w, const std::optional<Array>& bias,
                               const std::string& epilogue_name, const std::string& x_dtype) {
  check_shapes(x, w, bias);
  if (threads < 1 || threads > 1024) {
    throw_error(ErrorCode::invalid_request, "threads: got ", threads, ", expected 1 to 1024");
  }
  const int64_t m = x.shape(0), k = x.shape(1), n = w.shape(0);
  const Epilogue epilogue = to_epilogue(epilogue_name);
  const int64_t out = is_gated(epilogue) ? n / 2 : n;
  const DType dtype = to_dtype(x_dtype, "x_dtype", ErrorCode::invalid_request);
  const Isa resolved = resolve_isa(isa);
  py::array_t<float> result({m, out});
  float* y_data = result.mutable_data();
  without_gil([&] {
    Profiler profiler;
    ThreadPool pool(threads);
    Context ctx{pool, resolved, profiler};
    const WeightFormat& format = weight_format(format_name);
    HugeBuffer packed(format.packed_bytes(n, k));
    format.pack(pool, {{w.data(), DType::f32, 0, n, k}}, n, k, packed.data());
    const LinearWeight weight{&format, n, k, packed.data(), packed.size()};
    Activations input(m, k, dtype), y(m, out, DType::f32);
    input.fill(x.data());
    y.fill(std::vector<float>(m * out, 1.0f).data());
    LinearArgs args;
    args.bias = bias ? bias->data() : nullptr;
    args.epilogue = epilogue;
    linear(ctx, Op::other, weight, input.mat, y.mat, args);
    for (int64_t r = 0; r < m; ++r)
      std::memcpy(y_data + r * out, y.mat.f32(r), out * sizeof(float));
  });
  return result;
}

void check_ids(const std::vector<int32_t>& ids, const char* name, int vocab) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < vocab) continue;
    throw_error(ErrorCode::invalid_request, name, "[", i, "]: got ", ids[i], ", expected 0 to ",
                vocab - 1);
  }
}

// Samples one token. Returns (id, its log-probability or None, the most likely tokens).
py::tuple test_sample(const Array& logits, const SamplingParams& params, py::handle prompt_ids,
                      py::handle produced_ids, int choice, int64_t position) {
  if (logits.ndim() != 1 || logits.shape(0) < 1 || logits.shape(0) > 1 << 24) {
    throw_error(ErrorCode::invalid_request, "logits: expected shape [vocab]");
  }
  const int vocab = static_cast<int>(logits.shape(0));
  validate(params, vocab);
  const auto prompt = to_token_ids(prompt_ids, "prompt");
  const auto produced = to_token_ids(produced_ids, "produced");
  check_ids(prompt, "prompt", vocab);
  check_ids(produced, "produced", vocab);
  if (params.continued > static_cast<int64_t>(prompt.size())) {
    throw_error(ErrorCode::invalid_request, "continued: got ", params.continued, ", expected 0 to ",
                prompt.size());
  }
  Profiler profiler;
  ThreadPool pool(1);
  Context ctx{pool, Isa::portable, profiler};
  Sampler sampler(ctx, vocab);
  SamplerState state(std::make_shared<SamplingParams>(params), choice, prompt.data(),
                     static_cast<int64_t>(prompt.size()));
  for (int32_t id : produced) state.accept(id);
  SampleJob job{logits.data(), &state, position};
  sampler.sample(&job, 1);
  if (!job.finite) throw_error(ErrorCode::model, "logits: not finite, or every token is banned");
  const py::object logprob =
      params.logprobs < 0 ? py::object(py::none()) : py::float_(job.logprobs.logprob);
  return py::make_tuple(job.token, logprob, job.logprobs.top);
}

// A model without arithmetic that checks every page it reads: a wrong page gives an error or other
// tokens.
ModelRef test_scripted_model(int vocab, int max_context, int layers, int layer_us) {
  if (vocab < 1 || max_context < 1 || layers < 0 || layer_us < 0) {
    throw_error(ErrorCode::invalid_request, "vocab, max_context, layers, layer_us: got ", vocab,
                ", ", max_context, ", ", layers, ", ", layer_us, ", expected no negative numbers");
  }
  scripted::Options options;
  options.vocab = vocab;
  options.max_context = max_context;
  options.layers = layers;
  options.layer_us = layer_us;
  return ModelRef{std::make_unique<scripted::ScriptedModel>(options)};
}

void test_set_step_delay(int microseconds) {
  if (microseconds < 0 || microseconds > 1000000) {
    throw_error(ErrorCode::invalid_request, "microseconds: got ", microseconds,
                ", expected 0 to 1000000");
  }
  set_step_delay(microseconds);
}

}  // namespace

void bind_testing(py::module_& m) {
  m.def("test_set_step_delay", &test_set_step_delay, py::arg("microseconds"));
  m.def("test_scripted_model", &test_scripted_model, py::arg("vocab"), py::arg("max_context"),
        py::arg("layers"), py::arg("layer_us"));
  m.def("test_unpack", &test_unpack, py::arg("weight_format"), py::arg("w"));
  m.def("test_unpack_codes", &test_unpack_codes, py::arg("weight_format"), py::arg("codes"),
        py::arg("begin") = 0);
  m.def("test_code_rows", &test_code_rows, py::arg("rows"), py::arg("cols"), py::arg("codes"),
        py::arg("scales"), py::arg("offsets") = py::none(), py::arg("super_scales") = py::none(),
        py::arg("super_offsets") = py::none(), py::arg("columns") = py::none(),
        py::arg("code_bits") = 8);
  m.def("test_linear", &test_linear, py::arg("isa"), py::arg("threads"), py::arg("weight_format"),
        py::arg("x"), py::arg("w"), py::arg("bias"), py::arg("epilogue"), py::arg("x_dtype"));
  m.def("test_sample", &test_sample, py::arg("logits"), py::arg("params"), py::arg("prompt"),
        py::arg("produced"), py::arg("choice"), py::arg("position"));
}

}  // namespace turbomind::bindings
