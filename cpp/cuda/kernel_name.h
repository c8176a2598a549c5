// Names of kernels, for messages and counters.
#pragma once

#include <string>

namespace turbomind {

// Returns "scale<Bf16>" from the signature (__PRETTY_FUNCTION__) of a function template whose first
// parameter is `auto kernel`.
std::string kernel_name(const std::string& signature);

}  // namespace turbomind
