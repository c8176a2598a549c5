#include "cuda/cublaslt.h"

#include <dlfcn.h>

#include <map>
#include <set>
#include <tuple>
#include <utility>

namespace turbomind {

namespace {

// ---- The part of the library's C interface that is used (docs.nvidia.com/cuda/cublas, "cuBLASLt
// API").

using Status = int;  // 0: success
using Handle = void*;
using MatmulDesc = void*;
using Layout = void*;
using Preference = void*;

struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};
static_assert(sizeof(Heuristic) == 96);

constexpr int kReal32 = 0, kReal16 = 2, kRealBf16 = 14;  // cudaDataType_t
constexpr int kCompute32 = 68;                           // CUBLAS_COMPUTE_32F
constexpr int kTransposed = 1;                           // CUBLAS_OP_T
constexpr int kDescTransposeA = 3;                       // CUBLASLT_MATMUL_DESC_TRANSA
constexpr int kPreferWorkspace = 1;                      // CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
constexpr int kPreferAlignment[] = {5, 6, 7, 8};         // _MIN_ALIGNMENT_{A,B,C,D}_BYTES

struct Functions {
  Status (*create)(Handle*);
  Status (*destroy)(Handle);
  size_t (*version)();
  Status (*desc_create)(MatmulDesc*, int compute, int scale);
  Status (*desc_destroy)(MatmulDesc);
  Status (*desc_set)(MatmulDesc, int attribute, const void*, size_t);
  Status (*layout_create)(Layout*, int type, uint64_t rows, uint64_t cols, int64_t stride);
  Status (*layout_destroy)(Layout);
  Status (*preference_create)(Preference*);
  Status (*preference_destroy)(Preference);
  Status (*preference_set)(Preference, int attribute, const void*, size_t);
  Status (*heuristic)(Handle, MatmulDesc, Layout a, Layout b, Layout c, Layout d, Preference,
                      int wanted, Heuristic*, int* found);
  Status (*matmul)(Handle, MatmulDesc, const void* alpha, const void* a, Layout, const void* b,
                   Layout, const void* beta, const void* c, Layout, void* d, Layout,
                   const Algorithm*, void* workspace, size_t workspace_bytes, StreamHandle);
};

template <typename F>
bool resolve(void* library, const char* name, F& function, std::string& missing) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (function == nullptr && missing.empty()) missing = name;
  return function != nullptr;
}

bool resolve_all(void* lib, Functions& f, std::string& missing) {
  bool all = resolve(lib, "cublasLtCreate", f.create, missing);
  all &= resolve(lib, "cublasLtDestroy", f.destroy, missing);
  all &= resolve(lib, "cublasLtGetVersion", f.version, missing);
  all &= resolve(lib, "cublasLtMatmulDescCreate", f.desc_create, missing);
  all &= resolve(lib, "cublasLtMatmulDescDestroy", f.desc_destroy, missing);
  all &= resolve(lib, "cublasLtMatmulDescSetAttribute", f.desc_set, missing);
  all &= resolve(lib, "cublasLtMatrixLayoutCreate", f.layout_create, missing);
  all &= resolve(lib, "cublasLtMatrixLayoutDestroy", f.layout_destroy, missing);
  all &= resolve(lib, "cublasLtMatmulPreferenceCreate", f.preference_create, missing);
  all &= resolve(lib, "cublasLtMatmulPreferenceDestroy", f.preference_destroy, missing);
  all &= resolve(lib, "cublasLtMatmulPreferenceSetAttribute", f.preference_set, missing);
  all &= resolve(lib, "cublasLtMatmulAlgoGetHeuristic", f.heuristic, missing);
  all &= resolve(lib, "cublasLtMatmul", f.matmul, missing);
  return all;
}

// ---- Plans

int data_type(DType t) {
  return t == DType::f32 ? kReal32 : t == DType::f16 ? kReal16 : kRealBf16;
}

// Alignment in bytes as the heuristic takes it, at most 256.
uint32_t alignment(const void* p) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(p) | 256;
  return static_cast<uint32_t>(bits & -bits);
}

using PlanKey = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, DType, DType, uint32_t,
                           uint32_t, uint32_t>;

PlanKey plan_key(const CublasLtProduct& p) {
  return {p.m,
          p.n,
          p.k,
          p.x_stride,
          p.y_stride,
          p.dtype,
          p.y_dtype,
          alignment(p.x),
          alignment(p.w),
          alignment(p.y)};
}

// A library object and the function that ends it.
class Owned {
 public:
  Owned() = default;
  Owned(Owned&& o) noexcept : object_(std::exchange(o.object_, nullptr)), destroy_(o.destroy_) {}
  Owned& operator=(Owned&& o) noexcept {
    std::swap(object_, o.object_);
    std::swap(destroy_, o.destroy_);
    return *this;
  }
  ~Owned() {
    if (object_ != nullptr) destroy_(object_);
  }
  void** receive(Status (*destroy)(void*)) {
    destroy_ = destroy;
    return &object_;
  }
  void* get() const { return object_; }

 private:
  void* object_ = nullptr;
  Status (*destroy_)(void*) = nullptr;
};

struct Plan {
  bool usable = false;
  Owned desc, w, x, y;
  Heuristic choice{};
};

// Most plans, enough for many different row counts; a full table is cleared.
constexpr size_t kMaxPlans = 1024;
// One shape that fails may be a bug of one algorithm. When this many have, the library or the GPU's
// state is suspect, and each further try would cost a step.
constexpr size_t kMaxFailedPlans = 4;

class LoadedCublasLt final : public CublasLt {
 public:
  LoadedCublasLt(const Functions& f, Handle handle, std::string path, void* workspace,
                 size_t workspace_bytes, Report report)
      : f_(f),
        handle_(handle),
        path_(std::move(path)),
        workspace_(workspace),
        workspace_bytes_(workspace_bytes),
        report_(std::move(report)) {}
  // The library stays loaded: its threads and exit handlers crash when it is unmapped, and other
  // parts of the process may use it.
  ~LoadedCublasLt() override {
    plans_.clear();
    f_.destroy(handle_);
  }

  const std::string& path() const override { return path_; }
  size_t version() const override { return f_.version(); }

  bool multiply(StreamHandle stream, const CublasLtProduct& p) override {
    if (failed_.size() >= kMaxFailedPlans) return false;
    const Plan& plan = plan_for(p);
    if (!plan.usable) return false;
    const float alpha = 1.0f, beta = p.add ? 1.0f : 0.0f;
    const Status status = f_.matmul(handle_, plan.desc.get(), &alpha, p.w, plan.w.get(), p.x,
                                    plan.x.get(), &beta, p.y, plan.y.get(), p.y, plan.y.get(),
                                    &plan.choice.algorithm, workspace_, workspace_bytes_, stream);
    if (status == 0) return true;
    refuse(p, status);
    return false;
  }

 private:
  const Plan& plan_for(const CublasLtProduct& p) {
    const PlanKey key = plan_key(p);
    if (const auto at = plans_.find(key); at != plans_.end()) return at->second;
    if (plans_.size() >= kMaxPlans) plans_.clear();
    Plan& plan = plans_[key];
    if (failed_.contains(key)) return plan;
    const Status status = make_plan(p, plan);
    plan.usable = status == 0;
    if (!plan.usable && !std::exchange(said_none_found_, true)) {
      report(p, "no algorithm was found (status " + std::to_string(status) + ")");
    }
    return plan;
  }

  // Uses this plan no more, and after several different ones the library neither.
  void refuse(const CublasLtProduct& p, Status status) {
    const PlanKey key = plan_key(p);
    plans_[key] = Plan();
    failed_.insert(key);
    std::string why = "cublasLtMatmul returned status " + std::to_string(status);
    if (failed_.size() >= kMaxFailedPlans) {
      why += ", and the library is not used any more: " + std::to_string(failed_.size()) +
             " different products failed";
    }
    report(p, why);
  }

  // The library is column-major: it reads w as [k][n], to be transposed, x as [k][m], y as [n][m].
  Status make_plan(const CublasLtProduct& p, Plan& plan) {
    const int type = data_type(p.dtype);
    Owned preference;
    Status s = f_.desc_create(plan.desc.receive(f_.desc_destroy), kCompute32, kReal32);
    if (s == 0) s = f_.desc_set(plan.desc.get(), kDescTransposeA, &kTransposed, sizeof kTransposed);
    if (s == 0) s = f_.layout_create(plan.w.receive(f_.layout_destroy), type, p.k, p.n, p.k);
    if (s == 0) s = f_.layout_create(plan.x.receive(f_.layout_destroy), type, p.k, p.m, p.x_stride);
    if (s == 0) {
      s = f_.layout_create(plan.y.receive(f_.layout_destroy), data_type(p.y_dtype), p.n, p.m,
                           p.y_stride);
    }
    if (s == 0) s = f_.preference_create(preference.receive(f_.preference_destroy));
    if (s == 0) s = set_preference(p, preference.get());
    if (s != 0) return s;
    int found = 0;
    s = f_.heuristic(handle_, plan.desc.get(), plan.w.get(), plan.x.get(), plan.y.get(),
                     plan.y.get(), preference.get(), 1, &plan.choice, &found);
    return s != 0 ? s : found < 1 ? kNoneFound : plan.choice.state;
  }
  static constexpr Status kNoneFound = 15;  // CUBLAS_STATUS_NOT_SUPPORTED

  Status set_preference(const CublasLtProduct& p, Preference preference) {
    const uint64_t bytes = workspace_bytes_;
    Status s = f_.preference_set(preference, kPreferWorkspace, &bytes, sizeof bytes);
    const uint32_t aligned[] = {alignment(p.w), alignment(p.x), alignment(p.y), alignment(p.y)};
    for (int i = 0; i < 4 && s == 0; ++i) {
      s = f_.preference_set(preference, kPreferAlignment[i], &aligned[i], sizeof aligned[i]);
    }
    return s;
  }

  void report(const CublasLtProduct& p, const std::string& why) {
    if (!report_) return;
    report_("cuBLASLt (" + path_ + ") does not compute a product of " + std::to_string(p.m) +
            " rows, n " + std::to_string(p.n) + ", k " + std::to_string(p.k) + ": " + why +
            "; our own kernels do");
  }

  const Functions f_;
  const Handle handle_;
  const std::string path_;
  void* const workspace_;
  const size_t workspace_bytes_;
  const Report report_;
  bool said_none_found_ = false;
  std::map<PlanKey, Plan> plans_;
  std::set<PlanKey> failed_;  // at most kMaxFailedPlans; they stay when plans_ is cleared
};

// Returns null and appends to `why` if the library does not open or lacks a function.
void* open_library(const std::string& path, Functions& f, std::string& why) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* text = dlerror();
    why += "; " + std::string(text != nullptr ? text : path);
    return nullptr;
  }
  std::string missing;
  if (resolve_all(library, f, missing)) return library;
  why += "; " + path + " has no " + missing;
  dlclose(library);
  return nullptr;
}

}  // namespace

const std::vector<std::string>& CublasLt::library_names() {
  static const std::vector<std::string> names = {"libcublasLt.so.13", "libcublasLt.so.12"};
  return names;
}

std::unique_ptr<CublasLt> CublasLt::open(const std::vector<std::string>& folders, void* workspace,
                                         size_t workspace_bytes, Report report, std::string* why) {
  std::vector<std::string> paths;
  for (const std::string& folder : folders) {
    for (const std::string& name : library_names()) paths.push_back(folder + "/" + name);
  }
  paths.insert(paths.end(), library_names().begin(), library_names().end());
  std::string tried;
  for (const std::string& path : paths) {
    Functions f{};
    if (open_library(path, f, tried) == nullptr) continue;
    Handle handle = nullptr;
    const Status status = f.create(&handle);
    if (status == 0) {
      return std::make_unique<LoadedCublasLt>(f, handle, path, workspace, workspace_bytes,
                                              std::move(report));
    }
    tried += "; cublasLtCreate of " + path + " returned status " + std::to_string(status);
  }
  if (why != nullptr) *why = "no cuBLASLt: " + tried.substr(tried.empty() ? 0 : 2);
  return nullptr;
}

}  // namespace turbomind
