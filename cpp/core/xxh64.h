// A fast checksum, not a cryptographic hash.
#pragma once

#include <cstddef>
#include <cstdint>

namespace turbomind {

// Returns XXH64 of `bytes` bytes (Yann Collet's specification, revision 0.1.1). It detects damage,
// not forgery.
uint64_t xxh64(const void* data, size_t bytes, uint64_t seed);

}  // namespace turbomind
