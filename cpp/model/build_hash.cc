#include "model/build_hash.h"

#include <cmath>
#include <cstdio>
#include <vector>

#include "core/xxh64.h"

namespace turbomind {

namespace {

#ifndef TM_BUILD_FLAGS
#define TM_BUILD_FLAGS ""
#endif

// Rope tables and the portable kernels call these functions, whose last bit differs between
// versions of the library.
std::vector<double> library_samples() {
  std::vector<double> samples;
  for (int i = 1; i <= 64; ++i) {
    volatile double at = i * 0.7310585786300049;  // the compiler must not compute the results
    const auto narrow = static_cast<float>(at);
    for (const double y :
         {std::sin(at), std::cos(at), std::exp(-at), std::log(at), std::pow(10000.0, -at / 64)})
      samples.push_back(y);
    for (const float y : {std::sin(narrow), std::cos(narrow), std::exp(-narrow), std::log(narrow),
                          std::pow(10000.0f, -narrow / 64)})
      samples.push_back(y);
  }
  return samples;
}

std::string compute() {
  const std::string compilers = __VERSION__ "\n" TM_BUILD_FLAGS;
  const std::vector<double> samples = library_samples();
  uint64_t hash = xxh64(compilers.data(), compilers.size(), 0);
  hash = xxh64(samples.data(), samples.size() * sizeof(double), hash);
  char digits[9];
  std::snprintf(digits, sizeof digits, "%08x", static_cast<unsigned>(hash ^ (hash >> 32)));
  return digits;
}

}  // namespace

const std::string& build_hash() {
  static const std::string hash = compute();
  return hash;
}

}  // namespace turbomind
