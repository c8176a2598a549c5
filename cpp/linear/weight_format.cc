// The registry of weight formats: each name, once, with its format for the host and for a GPU.
#include "linear/weight_format.h"

#include "core/error.h"
#include "core/text.h"
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
};

// Returns the maker of a format, null where there is none.
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

const WeightFormat& weight_format(const std::string& name, WeightPlace place) {
  if (const auto make = find(name, place)) return make();
  throw_error(ErrorCode::invalid_request, "weight format is \"", name, "\", expected ",
              weight_format_names(place), place == WeightPlace::gpu ? " on a GPU" : "");
}

}  // namespace turbomind
