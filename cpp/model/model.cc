#include "model/model.h"

#include "core/error.h"

namespace turbomind {

void Model::read_logits(int64_t, int64_t, float*) {
  throw_error(ErrorCode::internal, "read_logits: this model keeps no logits");
}

void Model::sample(const DeviceSampleRow*, int64_t, int32_t*) {
  throw_error(ErrorCode::internal, "sample: this model keeps no logits");
}

}  // namespace turbomind
