// Products by cuBLASLt: values, fall-backs to our kernels, messages. The emulator uses the stand-in
// of fake_cublaslt.cc; with "--gpu" and folders, the test checks the values of the real library.
#include <dlfcn.h>

#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "cuda/cublaslt.h"
#include "tests/check.h"
#include "tests/linear/cuda_linear_problem.h"

namespace turbomind {
namespace {

struct Fake {
  int (*live)();
  int (*heuristics)();
  int (*products)();
  void (*behave)(int status_of_matmul, int algorithms_found);

  explicit Fake(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW);
    if (library == nullptr) {
      std::fprintf(stderr, "no stand-in for cuBLASLt: %s\n", dlerror());
      std::exit(2);
    }
    live = reinterpret_cast<int (*)()>(dlsym(library, "fake_live"));
    heuristics = reinterpret_cast<int (*)()>(dlsym(library, "fake_heuristics"));
    products = reinterpret_cast<int (*)()>(dlsym(library, "fake_products"));
    behave = reinterpret_cast<void (*)(int, int)>(dlsym(library, "fake_behave"));
  }
};

struct Library {
  Bytes workspace{8 << 20};
  std::vector<std::string> messages;
  std::unique_ptr<CublasLt> lt;

  explicit Library(const std::vector<std::string>& folders) {
    std::string why;
    lt = CublasLt::open(
        folders, workspace.device<void>(), workspace.size(),
        [this](const std::string& text) { messages.push_back(text); }, &why);
    expect(lt != nullptr, why);
  }
};

double rounding(DType t) {
  return t == DType::bf16 ? 1.0 / 256 : 1.0 / 2048;
}

// Bytes that the kernels after the library's move: 16-byte pieces of gates and ups, or the float32
// sums read and written once; with bias and addend.
void check_traffic(const DeviceProduct& p, bool gated) {
  if (real != nullptr) return;
  const emulator::LaunchCounters seen = emulator::counters(gated ? "gate" : "add_terms");
  const int64_t terms = (p.bias != nullptr) + (p.addend != nullptr);
  const int64_t size = p.y_16bit ? 2 : 4, padding = std::max(0, p.y_zero_end - p.y_cols);
  const int64_t sums = gated ? p.m * ((p.y_cols + 7) / 8) * 32 : terms ? int64_t{4} * p.m * p.n : 0;
  const int64_t loaded = sums + p.m * p.y_cols * (gated ? 8 : 4) * terms;
  const int64_t stored = p.m * (padding + (gated || terms ? p.y_cols : 0)) * size;
  expect(seen.launches == 0 || (seen.bytes_loaded == loaded && seen.bytes_stored == stored),
         std::string(gated ? "gate" : "add_terms") + ": loaded " +
             std::to_string(seen.bytes_loaded) + " of " + std::to_string(loaded) + ", stored " +
             std::to_string(seen.bytes_stored) + " of " + std::to_string(stored));
  expect(seen.launches > 0 || !(gated || terms || padding), "no kernel after the library");
}

// The real library may refuse a product whose rows or columns do not start at multiples of 16
// bytes. It takes all others.
bool may_refuse(const DeviceProduct& p) {
  const bool aligned = p.n % 8 == 0 && (is_gated(p.epilogue) || p.y_stride % 8 == 0);
  return real != nullptr && !aligned;
}

// Checks all epilogues by the library, or by our kernels where it refuses.
// `fake`: null for the real library.
void check_library_values(const Fake* fake, const std::vector<std::string>& folders) {
  const auto products = [&] { return fake != nullptr ? fake->products() : 0; };
  DeviceLinear l;
  l.kind = kind();
  l.shared_per_block = shared_per_block();
  std::unique_ptr<Library> library;
  int refused = 0;
  const auto check_one = [&](const Case& c, const Problem& p) {
    // A library reports a fall-back once, so the real one is opened again for each product.
    if (library == nullptr || real != nullptr) library = std::make_unique<Library>(folders);
    l.cublaslt = library->lt.get();
    // Room for 33 rows: products of more rows are computed in pieces.
    const Bytes scratch(gate_scratch_bytes(33, c.n));
    l.scratch = scratch.device<void>();
    l.scratch_bytes = scratch.size();
    Output y(p.product());
    const int before = products();
    emulator::reset_counters();
    linear(l, nullptr, y.p);
    y.memory.pull();
    const bool taken = c.m > kSkinnyRows && !(c.y_16bit && !c.gated() && (c.bias || c.addend));
    const int pieces = fake == nullptr || !taken ? 0 : c.gated() ? (c.m + 32) / 33 : 1;
    expect(products() - before == pieces, c.text() + ": products of the library");
    if (taken) check_traffic(y.p, c.gated());
    check_values(p, y, "cuBLASLt", taken ? rounding(c.dtype) : 0);
    l.deterministic = true;
    Output ours(p.product());
    linear(l, nullptr, ours.p);
    expect(products() - before == pieces, c.text() + ": the library in deterministic mode");
    l.deterministic = false;
    if (library->messages.empty()) return;
    expect(may_refuse(y.p), c.text() + ": " + library->messages[0]);
    ++refused;
  };
  for (const Case& c : cases()) {
    if (c.m < 15 || c.m > 128) continue;
    Problem p(c, 7);
    check_one(c, p);
    p.y_stride += 5;  // from an odd one to a multiple of 8
    check_one(c, p);
  }
  if (refused > 0) std::printf("%d products were left to our kernels\n", refused);
}

// A product that fails to start is left to our kernels from then on, alone; after four different
// ones every product is.
void check_failed_starts(const Fake& fake, const std::string& folder) {
  constexpr int kFailures = 4;
  Library library({"/nowhere", folder});
  DeviceLinear l;
  l.kind = kind();
  l.shared_per_block = shared_per_block();
  // Returns whether the library computed a product of m rows, whose values are right either way.
  const auto by_library = [&](int m) {
    Case c;
    c.m = m;
    const Problem p(c, 3);
    Output y(p.product());
    const int before = fake.products();
    l.cublaslt = library.lt.get();
    linear(l, nullptr, y.p);
    y.memory.pull();
    const int taken = fake.products() - before;
    check_values(p, y, "cuBLASLt", taken != 0 ? rounding(c.dtype) : 0);
    return taken != 0;
  };
  expect(by_library(33) && by_library(34), "products before any failure");
  for (int i = 1; i <= kFailures; ++i) {
    const int m = 32 + i;
    fake.behave(13, 1);
    expect(!by_library(m), "a failing product");
    fake.behave(0, 1);
    const int plans = fake.heuristics();
    expect(!by_library(m), "a plan that failed is used again");
    expect(fake.heuristics() == plans, "a plan that failed is asked for again");
    expect(by_library(50) == (i < kFailures), "another product after a failure");
    const std::string said = library.messages.empty() ? "" : library.messages.back();
    expect(library.messages.size() == size_t(i) &&
               said.find(std::to_string(m) + " rows") != std::string::npos &&
               said.find("status 13") != std::string::npos,
           "message about each failing product");
    expect((said.find("not used any more: 4 different products") != std::string::npos) ==
               (i == kFailures),
           "message about the library");
  }
}

void check_library_failures(const Fake& fake, const std::string& folder) {
  Case c;
  c.m = 33;
  const Problem p(c, 3);
  DeviceLinear l;
  l.kind = kind();
  l.shared_per_block = shared_per_block();
  Output want(p.product());
  linear(l, nullptr, want.p);
  const auto multiply = [&](Library& library) {
    l.cublaslt = library.lt.get();
    Output y(p.product());
    linear(l, nullptr, y.p);
    return y;
  };
  {
    Library library({"/nowhere", folder});
    const int plans = fake.heuristics();
    fake.behave(0, 0);
    for (int i = 0; i < 3; ++i) expect(multiply(library).same_rows(0, want, 0, c.m), "no plan");
    fake.behave(0, 1);
    expect(fake.heuristics() - plans == 1, "a shape without a plan is asked for again");
    expect(library.messages.size() == 1 &&
               library.messages[0].find("33 rows, n 16") != std::string::npos,
           "message about a missing plan");
  }
  check_failed_starts(fake, folder);
  expect(fake.live() == 0, "objects of the library are left");
}

void check_library_missing() {
  namespace fs = std::filesystem;
  std::string pattern = (fs::temp_directory_path() / "cublaslt_XXXXXX").string();
  const fs::path folder = mkdtemp(pattern.data());
  std::ofstream(folder / CublasLt::library_names()[0]) << "not a library";
  std::string why;
  const auto lt = CublasLt::open({folder.string()}, nullptr, 0, nullptr, &why);
  // A system may have the real library; then there is no message.
  expect(lt != nullptr || why.find(folder.string()) != std::string::npos, why);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  const auto [folders, arguments] = split_folders(read_arguments(argc, argv));
  const std::string folder =
      (std::filesystem::path(argv[0]).parent_path() / "fake_cublaslt").string();
  if (real != nullptr)
    return run_cases(arguments, {{"values", [&] { check_library_values(nullptr, folders); }}},
                     &failures);
  const auto with_fake = [&](auto check) {
    check(Fake(folder + "/" + CublasLt::library_names()[0]));
  };
  return run_cases(
      arguments,
      {
          {"values",
           [&] {
             with_fake([&](const Fake& f) { check_library_values(&f, {"/nowhere", folder}); });
           }},
          {"failures",
           [&] { with_fake([&](const Fake& f) { check_library_failures(f, folder); }); }},
          TM_CASE(check_library_missing),
      },
      &failures);
}
