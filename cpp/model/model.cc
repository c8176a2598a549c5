#include "model/model.h"

#include "core/error.h"

namespace turbomind {

namespace {

[[noreturn]] void refuse(const char* call) {
  throw_error(ErrorCode::internal, call, ": this model's steps are not asynchronous");
}

}  // namespace

void Model::submit_sample(const DeviceSampleRow*, int64_t) {
  refuse("submit_sample");
}

void Model::read_tokens(int32_t*) {
  refuse("read_tokens");
}

void Model::read_logits(int64_t, int64_t, float*) {
  refuse("read_logits");
}

}  // namespace turbomind
