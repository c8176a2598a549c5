// The registry of weight formats: each name, once, with its format for the host and for a GPU.
#include "linear/weight_format.h"

#include "core/error.h"
#include "core/text.h"
#include "linear/code_format.h"
#include "linear/dense_format.h"
#include "linear/device_format.h"

namespace turbomind {

namespace {

using Maker = const WeightFormat& (*)();

struct Registered {
  const char* name;
  Maker host;
  Maker gpu;  // null: no kernels on a GPU
};

constexpr Registered kFormats[] = {
    {"bfloat16", bfloat16_format, device_bfloat16_format},
    {"float16", float16_format, device_float16_format},
    {"float32", float32_format, nullptr},
    {"int8", int8_format, nullptr},
};

// Returns the maker of a format that is listed, null where there is none.
Maker find(const std::string& name, WeightPlace place) {
  for (const Registered& f : kFormats)
    if (name == f.name) return place == WeightPlace::gpu ? f.gpu : f.host;
  return nullptr;
}

}  // namespace

std::string weight_format_names(WeightPlace place) {
  std::vector<std::string> names;
  for (const Registered& f : kFormats)
    if (find(f.name, place)) names.push_back(f.name);
  return one_of(names);
}

bool has_weight_format(const std::string& name, WeightPlace place) {
  return find(name, place) != nullptr;
}

void WeightFormat::check(const std::vector<RowSegment>& segments, int64_t) const {
  for (const RowSegment& s : segments) {
    if (s.codes != nullptr)
      throw_error(ErrorCode::model, "the source has codes, expected values to pack as ", name());
  }
}

void WeightFormat::pack_rows(ThreadPool& pool, const std::vector<RowSegment>& segments,
                             const RowRange& rows, int64_t, int64_t k, uint8_t* dst) const {
  pack(pool, segments, rows.size(), k, dst + packed_bytes(rows.begin, k));
}

void WeightFormat::matmul_group(Context& ctx, const WeightGroup& w, const int32_t* begin, int64_t,
                                const Mat& x, const Mat& y, Epilogue epilogue) const {
  for (size_t i = 0; i < w.weights.size(); ++i) {
    const int64_t first = begin[i], rows = begin[i + 1] - first;
    if (rows == 0) continue;
    matmul(ctx, w.weights[i], x.some_rows(first, rows), y.some_rows(first, rows),
           {.bias = w.bias(i), .epilogue = epilogue});
  }
}

const WeightFormat& weight_format(const std::string& name, WeightPlace place) {
  if (const auto make = find(name, place)) return make();
  const WeightFormat* codes = place == WeightPlace::host ? named_code_format(name) : nullptr;
  if (codes != nullptr) return *codes;
  throw_error(ErrorCode::invalid_request, "weight format is \"", name, "\", expected ",
              weight_format_names(place), place == WeightPlace::gpu ? " on a GPU" : "");
}

}  // namespace turbomind
