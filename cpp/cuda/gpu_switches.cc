#include "cuda/gpu_switches.h"

#include <cstdlib>
#include <string_view>

#include "core/error.h"

namespace turbomind {

namespace {

bool is_on(const char* name) {
  const char* value = std::getenv(name);
  const std::string_view text = value ? value : "";
  if (text.empty() || text == "1") return true;
  if (text == "0") return false;
  throw_error(ErrorCode::invalid_request, "the environment variable ", name, " is \"", text,
              "\", expected 0 (off) or 1 (on, the default)");
}

}  // namespace

GpuSwitches read_gpu_switches() {
  return {is_on("TM_CUDA_OVERLAP"), is_on("TM_CUDA_GRAPHS")};
}

}  // namespace turbomind
