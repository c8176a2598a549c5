// A fast checksum.
#pragma once

#include <cstddef>
#include <cstdint>

namespace turbomind {

// XXH64 (Yann Collet's specification, revision 0.1.1). Finds accidents, not forgeries.
uint64_t xxh64(const void* data, size_t bytes, uint64_t seed);

}  // namespace turbomind
