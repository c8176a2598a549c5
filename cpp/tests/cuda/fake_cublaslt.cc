// A stand-in for libcublasLt on the emulator, whose device memory is host memory: it checks its
// arguments, computes the product slowly and counts. cuda_cublaslt_test loads it like the real one.
#include <cstdint>
#include <cstring>

#include "core/dtype.h"

namespace {

using turbomind::DType;

struct Desc {
  int transpose_a;
};
struct Layout {
  int type;
  uint64_t rows, cols;
  int64_t stride;
};
struct Preference {
  uint64_t workspace;
  uint32_t alignments[4];
};
struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

constexpr int kInvalid = 7, kAlgorithm = 42;

int live = 0, heuristics = 0, products = 0;
int matmul_status = 0, found = 1;

template <typename T, typename... Values>
int make(void** out, Values... values) {
  *out = new T{values...};
  ++live;
  return 0;
}
template <typename T>
int end(void* object) {
  delete static_cast<T*>(object);
  --live;
  return 0;
}

// Values of cudaDataType_t.
double read(const void* p, int type, int64_t i) {
  if (type == 0) return static_cast<const float*>(p)[i];
  const uint16_t bits = static_cast<const uint16_t*>(p)[i];
  return type == 2 ? turbomind::f16_to_f32(bits) : turbomind::bf16_to_f32(bits);
}
void write(void* p, int type, int64_t i, double v) {
  const float f = static_cast<float>(v);
  if (type == 0)
    static_cast<float*>(p)[i] = f;
  else
    static_cast<uint16_t*>(p)[i] = type == 2 ? turbomind::f32_to_f16(f) : turbomind::f32_to_bf16(f);
}

bool known(int type) {
  return type == 0 || type == 2 || type == 14;
}
bool agree(const Desc& d, const Layout& a, const Layout& b, const Layout& c) {
  return d.transpose_a == 1 && known(a.type) && a.type == b.type && known(c.type) &&
         a.rows == b.rows && a.cols == c.rows && b.cols == c.cols && a.stride >= int64_t(a.rows) &&
         b.stride >= int64_t(b.rows) && c.stride >= int64_t(c.rows);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int fake_live() {
  return live;
}
EXPORT int fake_heuristics() {
  return heuristics;
}
EXPORT int fake_products() {
  return products;
}
EXPORT void fake_behave(int status_of_matmul, int algorithms_found) {
  matmul_status = status_of_matmul;
  found = algorithms_found;
}

EXPORT int cublasLtCreate(void** handle) {
  return make<int>(handle, 1);
}
EXPORT int cublasLtDestroy(void* handle) {
  return end<int>(handle);
}
EXPORT size_t cublasLtGetVersion() {
  return 130000;
}
EXPORT int cublasLtMatmulDescCreate(void** desc, int compute, int scale) {
  if (compute != 68 || scale != 0) return kInvalid;
  return make<Desc>(desc, 0);
}
EXPORT int cublasLtMatmulDescDestroy(void* desc) {
  return end<Desc>(desc);
}
EXPORT int cublasLtMatmulDescSetAttribute(void* desc, int attribute, const void* v, size_t bytes) {
  if (attribute != 3 || bytes != 4) return kInvalid;
  std::memcpy(&static_cast<Desc*>(desc)->transpose_a, v, bytes);
  return 0;
}
EXPORT int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t cols,
                                      int64_t stride) {
  return make<Layout>(layout, type, rows, cols, stride);
}
EXPORT int cublasLtMatrixLayoutDestroy(void* layout) {
  return end<Layout>(layout);
}
EXPORT int cublasLtMatmulPreferenceCreate(void** preference) {
  return make<Preference>(preference);
}
EXPORT int cublasLtMatmulPreferenceDestroy(void* preference) {
  return end<Preference>(preference);
}
EXPORT int cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute, const void* v,
                                                size_t bytes) {
  Preference& p = *static_cast<Preference*>(preference);
  if (attribute == 1 && bytes == 8) {
    std::memcpy(&p.workspace, v, bytes);
    return 0;
  }
  if (attribute < 5 || attribute > 8 || bytes != 4) return kInvalid;
  std::memcpy(&p.alignments[attribute - 5], v, bytes);
  return 0;
}
EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void* desc, void* a, void* b, void* c, void* d,
                                          void* preference, int wanted, Heuristic* out,
                                          int* found_out) {
  ++heuristics;
  const Preference& p = *static_cast<Preference*>(preference);
  bool good = c == d && wanted == 1 && p.workspace > 0 &&
              agree(*static_cast<Desc*>(desc), *static_cast<Layout*>(a), *static_cast<Layout*>(b),
                    *static_cast<Layout*>(c));
  for (const uint32_t bytes : p.alignments) good = good && bytes >= 4 && bytes <= 256;
  *found_out = found;
  if (!good) return kInvalid;
  *out = {};
  out->algorithm[0] = kAlgorithm;
  return 0;
}
EXPORT int cublasLtMatmul(void*, void* desc, const void* alpha, const void* a, void* a_layout,
                          const void* b, void* b_layout, const void* beta, const void* c,
                          void* c_layout, void* d, void* d_layout, const uint64_t* algorithm,
                          void* workspace, size_t, void*) {
  if (matmul_status != 0) return matmul_status;
  const Layout &la = *static_cast<Layout*>(a_layout), &lb = *static_cast<Layout*>(b_layout),
               &ld = *static_cast<Layout*>(d_layout);
  if (c != d || c_layout != d_layout || *algorithm != kAlgorithm || workspace == nullptr ||
      *static_cast<const float*>(alpha) != 1 || !agree(*static_cast<Desc*>(desc), la, lb, ld))
    return kInvalid;
  ++products;
  const float scale = *static_cast<const float*>(beta);
  for (uint64_t col = 0; col < ld.cols; ++col) {
    for (uint64_t row = 0; row < ld.rows; ++row) {
      const int64_t at = col * ld.stride + row;
      double sum = scale == 0 ? 0 : scale * read(c, ld.type, at);
      for (uint64_t k = 0; k < la.rows; ++k)
        sum += read(a, la.type, row * la.stride + k) * read(b, lb.type, col * lb.stride + k);
      write(d, ld.type, at, sum);
    }
  }
  return 0;
}
