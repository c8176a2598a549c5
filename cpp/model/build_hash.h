// Identity of the build's arithmetic.
#pragma once

#include <string>

namespace turbomind {

// Returns 8 hexadecimal digits of a hash of the compilers, their flags and sample results of the
// mathematical library that is loaded. Builds of equal sources with equal digits give equal bits.
// What the sources compute is identified by kKernelRevision.
const std::string& build_hash();

}  // namespace turbomind
