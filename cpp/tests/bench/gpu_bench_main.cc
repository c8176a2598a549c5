// Times of the GPU's ops on the shapes of real models, and of what bounds them; a line of JSON per
// figure. Times are device time by events around replays of a graph, operands rotated beyond the L2
// cache.
//
//   gpu_bench [--gpu] [--quick] [--what PART]... [--library FOLDER]...
//
// Without --gpu in the emulator, always --quick: tiny shapes, to test that every part runs.
// --what: ceilings, attention, rope, rows or linear; without it all of them. --library: folders
// that may hold cuBLASLt.
#include <chrono>
#include <cstring>

#include "ceilings/ceilings_cuda.h"
#include "cuda/dispatch.h"
#include "cuda/emulator.h"
#include "cuda/probe_cuda.h"
#include "tests/bench/gpu_bench.h"
#include "tests/bench/gpu_bench_attention.h"
#include "tests/bench/gpu_bench_linear.h"
#include "tests/bench/gpu_bench_rows.h"

namespace turbomind {

TM_GPU_TABLE(CeilingsCuda, kCeilingsCuda, ceilings_cuda)
TM_GPU_TABLE(ProbeCuda, kProbeCuda, probe_cuda)

namespace {

bool failed = false;

// Streams over much more memory than the cache holds. Results are checked: the exclusive or of all
// values read, and the copy.
void bench_memory(Bench& b) {
  const int64_t wanted = b.quick ? 4 * kStreamTile : int64_t{2} << 30;
  const int blocks = b.quick ? 3 : b.gpu.limits().multiprocessors * 8;
  b.arena.reset();
  MemoryStream m;
  m.bytes = wanted;
  m.blocks = blocks;
  m.from = b.arena.take<uint8_t>(m.bytes);
  m.to = b.arena.take<uint8_t>(m.bytes);
  const CeilingsCuda& kernels = ceilings_cuda(b.gpu.kind());
  const double bytes = static_cast<double>(m.bytes);
  const auto figure = [&](const char* name, double moved, const auto& submit) {
    const Work work{moved, 0};
    Figure{"memory", name, {{"bytes", m.bytes}, {"blocks", blocks}}, ""}.print(
        b.measure(1, work, [&](int) { submit(); }), work);
  };
  figure("fill", bytes,
         [&] { b.gpu.gpu().fill(b.gpu.handle(), m.to, 0xff, static_cast<size_t>(m.bytes)); });
  figure("copy by the driver", 2 * bytes,
         [&] { b.gpu.gpu().copy(b.gpu.handle(), m.to, m.from, static_cast<size_t>(m.bytes)); });
  figure("copy", 2 * bytes, [&] { kernels.copy(b.gpu.handle(), m); });
  figure("read", bytes, [&] { kernels.read(b.gpu.handle(), m); });
}

uint32_t xor_of(const std::vector<uint32_t>& words) {
  uint32_t all = 0;
  for (const uint32_t w : words) all ^= w;
  return all;
}

void check_memory(Bench& b) {
  b.arena.reset();
  std::vector<uint32_t> from(7 * kStreamTile / 4);
  std::mt19937 rng(9);
  for (uint32_t& w : from) w = static_cast<uint32_t>(rng());
  MemoryStream m;
  m.bytes = 7 * kStreamTile;
  m.blocks = 3;
  m.from = b.arena.put(from);
  m.to = b.arena.take<uint8_t>(m.bytes);
  const auto fetch = [&](size_t words) {
    std::vector<uint32_t> to(words);
    b.gpu.gpu().copy(b.gpu.handle(), to.data(), m.to, words * 4);
    b.gpu.stream().synchronize();
    return to;
  };
  const CeilingsCuda& kernels = ceilings_cuda(b.gpu.kind());
  b.gpu.gpu().fill(b.gpu.handle(), m.to, 0xff, static_cast<size_t>(m.bytes));
  kernels.copy(b.gpu.handle(), m);
  if (fetch(from.size()) != from) failed = true, std::fprintf(stderr, "a copy differs\n");
  kernels.read(b.gpu.handle(), m);
  if (xor_of(fetch(size_t{4} * m.blocks * kStreamThreads)) != xor_of(from))
    failed = true, std::fprintf(stderr, "what was read differs\n");
}

// Between the host's pinned memory and the device.
void bench_host_copies(Bench& b) {
  const size_t bytes = b.quick ? 1 << 16 : size_t{256} << 20;
  const PinnedBuffer host(b.gpu.gpu(), bytes);
  std::memset(host.data(), 1, bytes);
  b.arena.reset();
  uint8_t* const device = b.arena.take<uint8_t>(static_cast<int64_t>(bytes));
  const Work work{static_cast<double>(bytes), 0};
  const auto figure = [&](const char* name, void* to, const void* from) {
    Figure{"host_copy", name, {{"bytes", static_cast<int64_t>(bytes)}}, ""}.print(
        b.measure(1, work, [&](int) { b.gpu.gpu().copy(b.gpu.handle(), to, from, bytes); }), work);
  };
  figure("to the device", device, host.data());
  figure("to the host", host.data(), device);
}

double milliseconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

// An empty kernel, as a node of a graph and launched directly, with the host's time for both.
void bench_launches(Bench& b) {
  const int count = b.quick ? 8 : 512;
  b.arena.reset();
  const ProbeParams params{b.arena.take<int>(1), 1};
  const auto submit = [&] { probe_cuda(b.gpu.kind()).probe(b.gpu.handle(), params); };
  const auto print = [](const char* name, const Timing& t) {
    Figure{"launch", name, {{"nodes", t.calls}}, ""}.print(t, {});
  };
  print("node of a graph", b.measure(count, {}, [&](int) { submit(); }));
  b.gpu.gpu().set_overlap(false);  // each starts when the one before has ended
  print("node of a graph, alone", b.measure(count, {}, [&](int) { submit(); }));
  b.gpu.gpu().set_overlap(true);
  std::vector<double> alone, graphs;
  const GpuGraph graph(b.gpu.stream(), [&] {
    for (int i = 0; i < count; ++i) submit();
  });
  for (int round = 0; round < 9; ++round) {
    auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < count; ++i) submit();
    alone.push_back(milliseconds_since(begin) / count);
    b.gpu.stream().synchronize();
    begin = std::chrono::steady_clock::now();
    graph.launch(b.gpu.stream());
    graphs.push_back(milliseconds_since(begin));
    b.gpu.stream().synchronize();
  }
  std::sort(alone.begin(), alone.end());
  std::sort(graphs.begin(), graphs.end());
  print("host time of a launch", {alone[4], alone[0], 1, 9});
  print("host time of a graph's launch", {graphs[4], graphs[0], count, 9});
}

// The matrix units: the rate of a large product, by the library and by our kernel.
void bench_peak(Bench& b) {
  const int64_t size = b.quick ? 96 : 8192;
  const ProductShape square{"square", size, size, Epilogue::store, true};
  bench_product(b, square, size, false);
  if (device_linear(b.gpu, 0, 0).cublaslt != nullptr) bench_product(b, square, size, true);
}

// Clocks rise when there is work.
void warm_up(Bench& b) {
  b.arena.reset();
  MemoryStream m;
  m.bytes = kStreamTile * 2048;
  m.blocks = b.gpu.limits().multiprocessors * 8;
  m.from = b.arena.take<uint8_t>(m.bytes);
  m.to = b.arena.take<uint8_t>(m.bytes);
  const auto begin = std::chrono::steady_clock::now();
  while (milliseconds_since(begin) < 400) {
    for (int i = 0; i < 100; ++i) ceilings_cuda(b.gpu.kind()).copy(b.gpu.handle(), m);
    b.gpu.stream().synchronize();
  }
}

// A group of figures that fails prints its error, and the others continue.
template <void (*run)(Bench&)>
void group(Bench& b, const char* name) {
  try {
    run(b);
  } catch (const Error& e) {
    Figure{name, "", {}, ""}.print_error(e.what());
    failed = true;
  }
}

struct Part {
  const char* name;
  void (*run)(Bench&);
};

const Part kParts[] = {
    {"ceilings",
     [](Bench& b) {
       group<check_memory>(b, "memory");
       group<bench_memory>(b, "memory");
       group<bench_launches>(b, "launch");
       group<bench_host_copies>(b, "host_copy");
       group<bench_peak>(b, "linear");
     }},
    {"attention", [](Bench& b) { group<bench_attention>(b, "attention"); }},
    {"rope", [](Bench& b) { group<bench_rope>(b, "rope_write_kv"); }},
    {"rows", [](Bench& b) { group<bench_rows>(b, "rows"); }},
    {"linear", [](Bench& b) { group<bench_linear>(b, "linear"); }},
};

struct Arguments {
  GpuKind kind = GpuKind::emulated;
  std::vector<std::string> library_folders;
  bool quick = false;
  std::vector<std::string> parts;
};

bool read_bench_arguments(int argc, char** argv, Arguments& to) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--gpu") {
      to.kind = GpuKind::cuda;
    } else if (name == "--quick") {
      to.quick = true;
    } else if (name == "--what" && i + 1 < argc) {
      to.parts.push_back(argv[++i]);
    } else if (name == "--library" && i + 1 < argc) {
      to.library_folders.push_back(argv[++i]);
    } else {
      std::fprintf(stderr, "argument: got %s, expected --gpu, --quick, --what or --library\n",
                   argv[i]);
      return false;
    }
  }
  for (const std::string& name : to.parts) {
    if (std::any_of(std::begin(kParts), std::end(kParts),
                    [&](const Part& p) { return name == p.name; }))
      continue;
    std::fprintf(stderr, "--what: got %s, expected ceilings, attention, rope, rows or linear\n",
                 name.c_str());
    return false;
  }
  return true;
}

int run(const Arguments& arguments) {
  std::string why;
  if (gpu_count(arguments.kind, &why) == 0) {
    std::fprintf(stderr, "%s\n", why.c_str());
    return 2;
  }
  GpuOptions options;
  options.kind = arguments.kind;
  options.library_folders = arguments.library_folders;
  GpuContext gpu(options);
  gpu.gpu().make_current();
  std::fprintf(stderr, "%s, products by %s\n", gpu.gpu().info().name.c_str(),
               gpu.library_note().c_str());
  const bool quick = arguments.quick || gpu.kind() == GpuKind::emulated;
  const size_t most = std::min<size_t>(gpu.gpu().free_bytes() / 10 * 8, size_t{12} << 30);
  Bench b(gpu, quick ? size_t{8} << 20 : most, quick);
  if (!quick) warm_up(b);
  for (const Part& p : kParts) {
    if (arguments.parts.empty() ||
        std::count(arguments.parts.begin(), arguments.parts.end(), p.name))
      p.run(b);
  }
  return failed ? 1 : 0;
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  turbomind::Arguments arguments;
  if (!turbomind::read_bench_arguments(argc, argv, arguments)) return 2;
  try {
    return turbomind::run(arguments);
  } catch (const turbomind::Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
