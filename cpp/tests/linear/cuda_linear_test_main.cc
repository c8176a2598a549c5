// Products on the GPU: against a double loop and the CPU's op; one row's bits on every path and in
// any batch; bytes moved against the model. In emulation, or with "--gpu" on the first real one.
#include "core/error.h"
#include "core/memory.h"
#include "cuda/dispatch.h"
#include "ops/linear.h"
#include "tests/check.h"
#include "tests/linear/cuda_linear_problem.h"

namespace turbomind {

TM_GPU_TABLE(LinearCuda, kLinearCuda, linear_kernels)
TM_GPU_TABLE(GemmCuda, kGemmCuda, gemm_kernels)

namespace {

// ---- one path

struct Path {
  std::string name;
  int row_tiles = 0;  // 0: the tiled kernel
  int multiprocessors = 1;
  int stages = 2;
  int groups = kTileGroups;
  int columns = 0;
};

Path skinny_path(int row_tiles, int multiprocessors, int stages, int groups = kTileGroups) {
  return {"skinny " + std::to_string(row_tiles) + " tiles of " + std::to_string(groups) + ", " +
              std::to_string(multiprocessors) + " blocks, " + std::to_string(stages) + " stages",
          row_tiles,
          multiprocessors,
          stages,
          groups,
          0};
}
Path gemm_path(int columns) {
  return {"gemm by " + std::to_string(columns), 0, 1, 0, 0, columns};
}

size_t shared_for(const Path& path) {
  return skinny_sum_bytes(path.groups) +
         size_t(path.stages) * skinny_stage_bytes(path.row_tiles, path.groups);
}

bool takes(const Path& path, int m) {
  if (path.row_tiles == 0) return true;
  return m <= 16 * path.row_tiles && shared_for(path) <= shared_per_block();
}

void expect_traffic(const Path& path, const LinearTraffic& model) {
  if (real != nullptr) return;
  const emulator::LaunchCounters seen = emulator::counters(path.row_tiles == 0 ? "gemm" : "skinny");
  expect(seen.bytes_loaded == model.loaded && seen.bytes_stored == model.stored,
         path.name + ": loaded " + std::to_string(seen.bytes_loaded) + " of " +
             std::to_string(model.loaded) + ", stored " + std::to_string(seen.bytes_stored) +
             " of " + std::to_string(model.stored));
}

Output run(const DeviceProduct& product, const Path& path) {
  Output y(product);
  emulator::reset_counters();
  LinearTraffic model;
  if (path.row_tiles == 0) {
    gemm_kernels(kind()).run(nullptr, y.p, path.columns);
    model = gemm_traffic(y.p, path.columns);
  } else {
    SkinnyPlan plan = skinny_plan(y.p, path.multiprocessors, size_t{1} << 20);
    plan.row_tiles = path.row_tiles;
    plan.tile_groups = path.groups;
    plan.stages = path.stages;
    plan.shared_bytes = shared_for(path);
    linear_kernels(kind()).skinny(nullptr, y.p, plan);
    model = skinny_traffic(y.p, plan);
  }
  y.memory.pull();
  expect_traffic(path, model);
  return y;
}

// The CPU's op on the same operands, in float32.
std::vector<float> on_cpu(const Problem& p, ThreadPool& pool) {
  const Case& c = p.c;
  const bool bf16 = c.dtype == DType::bf16;
  const WeightFormat& format = weight_format(bf16 ? "bfloat16" : "float16");
  HugeBuffer packed(format.packed_bytes(c.n, c.k));
  format.pack(pool, {{p.w_values.data(), DType::f32, 0, c.n, c.k}}, c.n, c.k, packed.data());
  const LinearWeight weight{&format, c.n, c.k, packed.data(), packed.size()};
  std::vector<float> x(size_t(c.m) * p.k_padded), y(size_t(c.m) * p.y_zero_end, kBefore);
  std::vector<uint16_t> x16(x.size());
  for (int r = 0; r < c.m; ++r) {
    for (int i = 0; i < c.k; ++i) {
      x[r * p.k_padded + i] = p.x_values[r * c.k + i];
      x16[r * p.k_padded + i] = f32_to_bf16(p.x_values[r * c.k + i]);
    }
  }
  const Mat x_mat = bf16 ? Mat{x16.data(), DType::bf16, c.m, c.k, p.k_padded}
                         : Mat{x.data(), DType::f32, c.m, c.k, p.k_padded};
  const Mat y_mat{y.data(), DType::f32, c.m, c.y_cols(), p.y_zero_end};
  const Mat addend{p.addend.as<float>(), DType::f32, c.m, c.n, c.n + 1};
  Profiler profiler;
  Context ctx{pool, best_isa(), profiler};
  linear(ctx, Op::other, weight, x_mat, y_mat,
         {c.bias ? p.bias.as<float>() : nullptr, c.addend ? &addend : nullptr, c.epilogue});
  return y;
}

void check_against_cpu(const Problem& p, const Output& y, ThreadPool& pool) {
  const std::vector<float> cpu = on_cpu(p, pool);
  for (int r = 0; r < p.c.m; ++r) {
    for (int j = 0; j < p.c.y_cols(); ++j) {
      const Expected e = expected(p, r, j, 0);
      const float other = cpu[r * p.y_zero_end + j];
      if (!(std::fabs(y.at(r, j) - other) <= 2 * e.bound)) {
        return expect(false, p.c.text() + " at " + std::to_string(r) + "," + std::to_string(j) +
                                 ": " + std::to_string(y.at(r, j)) + ", the CPU's op " +
                                 std::to_string(other));
      }
    }
  }
}

// Every way to the same bits.
std::vector<Path> paths(int turn) {
  return {skinny_path(1, 1 + turn % 4, 2 + turn % 4),
          skinny_path(2, 132, 4),
          skinny_path(4, 2, 2 + turn % 2),
          gemm_path(128),
          gemm_path(64),
          skinny_path(1, turn % 2 ? 132 : 3, 2 + turn % 7, kFewGroups)};
}

void check_parts(const Problem& p, const Output& whole, const std::vector<Path>& all, int turn) {
  const int m = p.c.m, row = turn % m, begin = m / 2, end = std::min(m, begin + 1 + turn % 20);
  const Path& path = all[turn % all.size()];
  const Output alone = run(p.rows(row, row + 1), path);
  expect(alone.same_rows(0, whole, row, 1), path.name + ", " + p.c.text() + ": a row alone");
  for (const Path& other : all) {
    if (!takes(other, end - begin)) continue;
    const Output part = run(p.rows(begin, end), other);
    return expect(part.same_rows(0, whole, begin, end - begin),
                  other.name + ", " + p.c.text() + ": a part of the rows");
  }
}

void check_cases() {
  ThreadPool pool(1);
  int turn = 0;
  for (const Case& c : cases()) {
    const Problem p(c, 1 + turn);
    const std::vector<Path> all = paths(turn);
    std::unique_ptr<Output> first;
    for (size_t i = 0; i < all.size(); ++i) {
      // All ways for few rows; for many, those that a step would take.
      if (!takes(all[i], c.m) || (c.m > 64 && int(i) % 2 != turn % 2)) continue;
      Output y = run(p.product(), all[i]);
      if (first == nullptr) {
        first = std::make_unique<Output>(std::move(y));
        check_values(p, *first, all[i].name, 0);
        check_against_cpu(p, *first, pool);
        continue;
      }
      expect(y.same_rows(0, *first, 0, c.m), all[i].name + ", " + c.text() + ": other bits");
    }
    check_parts(p, *first, all, turn);
    ++turn;
  }
}

// ---- choice and checks

void check_choice() {
  const auto is = [](LinearPath path, int m, bool deterministic, bool cublaslt, int rows) {
    expect(linear_path(m, deterministic, cublaslt, rows) == path,
           "path of " + std::to_string(m) + " rows");
  };
  for (const bool deterministic : {false, true}) {
    for (const bool cublaslt : {false, true}) {
      const bool library = cublaslt && !deterministic;
      is(LinearPath::skinny, 1, deterministic, cublaslt, 64);
      is(LinearPath::skinny, 16, deterministic, cublaslt, 64);
      is(library ? LinearPath::cublaslt : LinearPath::skinny, 17, deterministic, cublaslt, 64);
      is(library ? LinearPath::cublaslt : LinearPath::skinny, 64, deterministic, cublaslt, 64);
      is(library ? LinearPath::cublaslt : LinearPath::gemm, 65, deterministic, cublaslt, 64);
      is(library ? LinearPath::cublaslt : LinearPath::gemm, 17, deterministic, cublaslt, 16);
    }
  }
  constexpr size_t kHopper = 227 << 10, kAmpere = 163 << 10, kAda = 99 << 10;
  expect(skinny_rows(kHopper) == 64 && skinny_rows(kAmpere) == 64 && skinny_rows(kAda) == 16,
         "rows of the skinny kernel");
  DeviceProduct p;
  p.m = 1, p.n = 4096;
  expect(skinny_plan(p, 132, kHopper).stages == 8 && skinny_plan(p, 132, kHopper).tile_groups == 4,
         "stages on Hopper for 4 groups a block");
  p.n = 6144;
  expect(skinny_plan(p, 132, kHopper).stages == 5 && skinny_plan(p, 132, kHopper).tile_groups == 8,
         "stages on Hopper");
  p.m = 64;
  expect(skinny_plan(p, 132, kHopper).stages == 3, "stages on Hopper for 64 rows");
  expect(skinny_plan(p, 128, kAda).row_tiles == 0, "64 rows fit on Ada");
}

void check_refusals() {
  const Problem p({}, 1);
  Output y(p.product());
  DeviceLinear l;
  l.kind = kind();
  l.shared_per_block = shared_per_block();
  const auto refuses = [&](const char* what, auto change) {
    DeviceProduct bad = y.p;
    change(bad);
    try {
      linear(l, nullptr, bad);
      expect(false, std::string("accepted: ") + what);
    } catch (const Error& e) {
      expect(std::string(e.what()).find(what) != std::string::npos, e.what());
    }
  };
  refuses("k_padded is 40", [](DeviceProduct& b) { b.k_padded = 40; });
  refuses("x_stride is 24", [](DeviceProduct& b) { b.x_stride = 24; });
  refuses("y_cols is 15, expected n", [](DeviceProduct& b) { b.y_cols = 15; });
  refuses("n is 16, expected a positive multiple of 32",
          [](DeviceProduct& b) { b.epilogue = Epilogue::silu_mul; });
  refuses("y_16bit is 1", [](DeviceProduct& b) {
    b.epilogue = Epilogue::add;
    b.y_16bit = true;
  });
  refuses("expected a multiple of 16",
          [](DeviceProduct& b) { b.x = static_cast<const uint8_t*>(b.x) + 2; });
  y.p.m = 0;
  linear(l, nullptr, y.p);
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(read_arguments(argc, argv),
                   {
                       TM_CASE(check_cases),
                       TM_CASE(check_choice),
                       TM_CASE(check_refusals),
                   },
                   &failures);
}
