#include "cuda/gpu_switches.h"

#include <cstdlib>
#include <string_view>

#include "core/error.h"

namespace turbomind {

namespace {

bool is_on(const char* name, bool otherwise) {
  const char* value = std::getenv(name);
  const std::string_view text = value ? value : "";
  if (text.empty()) return otherwise;
  if (text == "0" || text == "1") return text == "1";
  throw_error(ErrorCode::invalid_request, "the environment variable ", name, " is \"", text,
              "\", expected 0 (off) or 1 (on); the default is ", otherwise ? 1 : 0);
}

}  // namespace

GpuSwitches read_gpu_switches() {
  GpuSwitches switches;
  switches.overlap = is_on("TM_CUDA_OVERLAP", switches.overlap);
  switches.graphs = is_on("TM_CUDA_GRAPHS", switches.graphs);
  switches.rank_waits = is_on("TM_CUDA_RANK_WAITS", switches.rank_waits);
  switches.overlap = switches.overlap && !switches.rank_waits;
  return switches;
}

}  // namespace turbomind
