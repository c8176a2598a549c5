// Element types, their names and sizes, and scalar conversions on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace turbomind {

enum class DType : uint8_t { f32, f16, bf16 };

// One line for each DType, in order: where a new type is declared.
struct DTypeInfo {
  const char* name;
  size_t bytes;  // of an element
};
constexpr DTypeInfo kDTypes[] = {{"float32", 4}, {"float16", 2}, {"bfloat16", 2}};
constexpr int kDTypeCount = sizeof(kDTypes) / sizeof(kDTypes[0]);

constexpr size_t dtype_bytes(DType t) {
  return kDTypes[static_cast<int>(t)].bytes;
}
constexpr const char* dtype_name(DType t) {
  return kDTypes[static_cast<int>(t)].name;
}

static inline float bf16_to_f32(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Round to nearest even; NaN stays a (quiet) NaN.
static inline uint16_t f32_to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  bits += 0x7fffu + ((bits >> 16) & 1);
  return static_cast<uint16_t>(bits >> 16);
}

static inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  uint32_t exp = (h >> 10) & 0x1f, man = h & 0x3ff, bits;
  if (exp == 0x1f) {
    bits = sign | 0x7f800000u | (man << 13);
  } else if (exp != 0) {
    bits = sign | ((exp + 112) << 23) | (man << 13);
  } else if (man == 0) {
    bits = sign;
  } else {  // subnormal half: normalise
    exp = 113;
    while (!(man & 0x400)) man <<= 1, --exp;
    bits = sign | (exp << 23) | ((man & 0x3ff) << 13);
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Round to nearest even; overflow gives infinity, NaN stays NaN.
static inline uint16_t f32_to_f16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t sign = (bits >> 16) & 0x8000, abs = bits & 0x7fffffffu;
  if (abs > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00);
  if (abs >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00);
  if (abs < 0x38800000u) {  // result is subnormal or zero: let float addition round at 2^-24
    float a, magic = 0.5f;
    std::memcpy(&a, &abs, 4);
    a += magic;
    uint32_t r;
    std::memcpy(&r, &a, 4);
    return static_cast<uint16_t>(sign | (r - 0x3f000000u));
  }
  const uint32_t rounded = abs + 0xfffu + ((abs >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace turbomind
