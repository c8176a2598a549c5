// Matrix products by cuBLASLt, which is found and loaded at run time: the build needs neither its
// header nor its library.
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

// A cuBLASLt handle and its plans. One thread at a time may use it.
class CublasLt {
 public:
  // Called with the reason when a product falls back: for the first shape without a plan, and for
  // each of the few shapes whose product failed to start.
  using Report = std::function<void(const std::string&)>;

  // Returns the file names that open() tries in each folder, then without a folder (the system's
  // search path).
  static const std::vector<std::string>& library_names();

  // Opens the first library found. Returns null if none opens; `why` then lists the attempts.
  // `workspace` is device memory of `workspace_bytes`, aligned to 256 bytes, which outlives the
  // result and has no other user.
  static std::unique_ptr<CublasLt> open(const std::vector<std::string>& folders, void* workspace,
                                        size_t workspace_bytes, Report report, std::string* why);

  virtual ~CublasLt() = default;
  virtual const std::string& path() const = 0;
  virtual size_t version() const = 0;
  // Submits a product. Returns false if it computes nothing, so that the caller uses another
  // kernel: for a shape without a plan, for one that failed to start before, and for every product
  // after several different ones have failed to start.
  virtual bool multiply(StreamHandle stream, const CublasLtProduct& p) = 0;
};

}  // namespace turbomind
