#include "linear/weight_format.h"

#include "core/error.h"
#include "linear/dense_format.h"

namespace turbomind {

const WeightFormat& weight_format(const std::string& name) {
  const WeightFormat* formats[] = {&bfloat16_format(), &float16_format(), &float32_format()};
  std::string known;
  for (const WeightFormat* f : formats) {
    if (name == f->name()) return *f;
    known += (known.empty() ? "" : ", ") + std::string(f->name());
  }
  throw_error(ErrorCode::invalid_request, "weight format \"", name,
              "\" is unknown; known: ", known);
}

}  // namespace turbomind
