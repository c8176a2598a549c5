// Names of kernels for messages and counters.
#pragma once

#include <string>

namespace turbomind {

// "scale<Bf16>" from the signature, as the compiler prints it, of a function template whose first
// parameter is `auto kernel`.
std::string kernel_name(const std::string& signature);

}  // namespace turbomind
