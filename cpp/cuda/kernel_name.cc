#include "cuda/kernel_name.h"

#include <string_view>

namespace turbomind {

std::string kernel_name(const std::string& signature) {
  constexpr std::string_view start = "kernel = ";
  const size_t at = signature.find(start);
  std::string name = at == std::string::npos ? signature : signature.substr(at + start.size());
  name = name.substr(0, name.find_first_of(";]"));
  for (const std::string_view drop : {"turbomind::", "cuda_emulated::", "cuda::", "{anonymous}::",
                                      "(anonymous namespace)::", "<unnamed>::", "&"})
    for (size_t i; (i = name.find(drop)) != std::string::npos;) name.erase(i, drop.size());
  return name;
}

}  // namespace turbomind
