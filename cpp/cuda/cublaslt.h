// cuBLASLt, found and loaded at run time: no header and no library of it is needed to build.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "cuda/types.h"

namespace turbomind {

// y [m][n] = x w^T, or y += x w^T. All row-major device memory; strides in elements.
struct CublasLtProduct {
  const void* x = nullptr;  // [m][x_stride]
  const void* w = nullptr;  // [n][k]
  void* y = nullptr;        // [m][y_stride]
  int64_t m = 0, n = 0, k = 0;
  int64_t x_stride = 0, y_stride = 0;
  DType dtype = DType::bf16;   // of x and w: bf16 or f16
  DType y_dtype = DType::f32;  // f32 or that of x
  bool add = false;
};

// A handle and its plans. One thread at a time.
class CublasLt {
 public:
  // Called once, with the reason, when a product falls back for the first time.
  using Say = std::function<void(const std::string&)>;

  // The names that open() tries in each folder, then without one (where the system looks).
  static const std::vector<std::string>& library_names();

  // Null when no library opens; then `why` lists what was tried. `workspace`: device memory of
  // `workspace_bytes`, aligned to 256 bytes, that outlives this and that nothing else uses.
  static std::unique_ptr<CublasLt> open(const std::vector<std::string>& folders, void* workspace,
                                        size_t workspace_bytes, Say say, std::string* why);

  virtual ~CublasLt() = default;
  virtual const std::string& path() const = 0;
  virtual size_t version() const = 0;
  // False: nothing was computed, and the caller does it another way. A shape that has no plan is
  // remembered; after a product that failed to start, every later one is refused.
  virtual bool multiply(StreamHandle stream, const CublasLtProduct& p) = 0;
};

}  // namespace turbomind
