// Binds instruction sets and the ceilings of benchmarks.
#include <sys/utsname.h>

#include <cmath>
#include <fstream>
#include <optional>

#include "bindings/bindings.h"
#include "ceilings/ceilings.h"
#include "ceilings/gpu_ceilings.h"
#include "core/isa.h"
#include "core/process.h"
#include "ops/attention.h"

namespace turbomind::bindings {
namespace {

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t at = line.find_first_not_of(" \t", line.find(':') + 1);
    if (at != std::string::npos) return line.substr(at);
  }
  utsname name{};
  return uname(&name) == 0 ? name.machine : "unknown";
}

void check_seconds(double seconds) {
  if (seconds > 0 && seconds <= 3600) return;
  throw_error(ErrorCode::invalid_request, "seconds: got ", seconds,
              ", expected above 0, at most 3600");
}

TileOrder make_tile_order(int chunk_k_blocks, const std::string& stays, bool stream) {
  if (chunk_k_blocks < 1 || chunk_k_blocks > 1024) {
    throw_error(ErrorCode::invalid_request, "chunk_k_blocks: got ", chunk_k_blocks,
                ", expected 1 to 1024");
  }
  if (stays != "weights" && stays != "rows") {
    throw_error(ErrorCode::invalid_request, "stays: got '", stays,
                "', expected 'weights' or 'rows'");
  }
  return {chunk_k_blocks, stays == "rows" ? TileOrder::Stays::rows : TileOrder::Stays::weights,
          stream};
}

template <typename F>
double measure(const std::string& isa, int threads, double seconds, F&& f) {
  if (threads < 1 || threads > 1024) {
    throw_error(ErrorCode::invalid_request, "threads: got ", threads, ", expected 1 to 1024");
  }
  check_seconds(seconds);
  return without_gil([&] {
    Profiler profiler;
    ThreadPool pool(threads);
    Context ctx{pool, resolve_isa(isa), profiler};
    return f(ctx);
  });
}

void check_size(const char* name, int64_t value) {
  if (value >= 1 && value <= int64_t{1} << 40) return;
  throw_error(ErrorCode::invalid_request, name, ": got ", value, ", expected 1 to 2^40");
}

double read_rate(const std::string& isa, int threads, int64_t buffer_bytes, double seconds) {
  check_size("buffer_bytes", buffer_bytes);
  return measure(isa, threads, seconds,
                 [&](Context& ctx) { return measure_read(ctx, buffer_bytes, seconds); });
}

double tile_rate(const std::string& isa, int threads, double seconds) {
  return measure(isa, threads, seconds, [&](Context& ctx) { return measure_tiles(ctx, seconds); });
}

double int8_rate(const std::string& isa, int threads, double seconds) {
  return measure(isa, threads, seconds, [&](Context& ctx) { return measure_int8(ctx, seconds); });
}

double linear_rate(const std::string& isa, int threads, const std::string& format, int64_t m,
                   int64_t n, int64_t k, double seconds, const std::string& epilogue_name,
                   const std::optional<TileOrder>& order) {
  check_size("m", m);
  check_size("n", n);
  check_size("k", k);
  const Epilogue epilogue = to_epilogue(epilogue_name);
  if (is_gated(epilogue) && n % 32 != 0) {
    throw_error(ErrorCode::invalid_request, "n: got ", n, ", expected a multiple of 32");
  }
  return measure(isa, threads, seconds, [&](Context& ctx) {
    if (order) ctx.tile_order = *order;
    return measure_linear(ctx, format.c_str(), m, n, k, seconds, epilogue);
  });
}

GpuCeilings gpu_rates(const GpuOptions& options, int64_t buffer_bytes, int64_t size,
                      double seconds) {
  check_size("buffer_bytes", buffer_bytes);
  check_seconds(seconds);
  return without_gil([copy = options, buffer_bytes, size, seconds] {
    GpuContext gpu(copy);
    return measure_ceilings(gpu, buffer_bytes, size, seconds);
  });
}

}  // namespace

void bind_bench(py::module_& m) {
  py::class_<TileOrder>(
      m, "TileOrder",
      "The order in which the AMX kernel of many rows walks a product. Every order "
      "gives the same bits.")
      .def(py::init(&make_tile_order), py::arg("chunk_k_blocks"), py::arg("stays"),
           py::arg("stream"))
      .def_readonly("chunk_k_blocks", &TileOrder::chunk_k_blocks)
      .def_property_readonly(
          "stays",
          [](const TileOrder& o) { return o.stays == TileOrder::Stays::rows ? "rows" : "weights"; })
      .def_readonly("stream", &TileOrder::stream);
  m.def(
      "available_isas",
      [] {
        std::vector<std::string> names;
        for (Isa isa : available_isas()) names.emplace_back(isa_name(isa));
        return names;
      },
      "Returns the instruction sets of this build that this machine has, weakest first.");
  m.def(
      "resolve_isa", [](const std::string& name) { return isa_name(resolve_isa(name)); },
      py::arg("name"),
      "\"auto\" is TURBOMIND_ISA if set, else the best; InvalidRequest if not here.");
  m.def(
      "amx_hindrance", [] { return amx_hindrance(); },
      "Returns why AMX is not used although the processor has it; empty where nothing hinders.");
  m.def(
      "amx_hindrance_of",
      [](bool has, bool saved, int error) { return amx_hindrance(has, saved, error); },
      py::arg("processor_has_it"), py::arg("saved"), py::arg("error"),
      "The same for given facts, for tests.");
  m.def(
      "attention_scratch_bytes",
      [](const std::string& isa, int threads, int k_dim, int v_dim) {
        return attention_scratch_bytes(resolve_isa(isa), threads, k_dim, v_dim);
      },
      py::arg("isa"), py::arg("threads"), py::arg("k_dim"), py::arg("v_dim"),
      "Returns the bytes of work memory of attention on the CPU, for any step.");
  m.def("cpu_name", &cpu_name, "Returns the processor's name as the system reports it.");
  m.def(
      "control_groups",
      [](const std::string& controller, const std::string& root) {
        std::vector<std::pair<std::string, int>> found;
        for (const auto& group : control_groups(controller, root)) {
          found.emplace_back(group.folder, group.version);
        }
        return found;
      },
      py::arg("controller"), py::arg("root"),
      "Returns folder and version of the control groups that limit this process, the innermost "
      "first.");
  m.def("cpu_quota", &cpu_quota, py::arg("root"),
        "Returns the CPUs that the control groups pay for, rounded down, at least 1, or None.");
  m.def("measure_read", &read_rate, py::arg("isa"), py::arg("threads"), py::arg("buffer_bytes"),
        py::arg("seconds"), "Measures the bytes per second of a streaming sum.");
  m.def("measure_tiles", &tile_rate, py::arg("isa"), py::arg("threads"), py::arg("seconds"),
        "FLOP per second of register-only products.");
  m.def("measure_int8", &int8_rate, py::arg("isa"), py::arg("threads"), py::arg("seconds"),
        "Operations per second of register-only products of bytes.");
  m.def(
      "measure_linear", &linear_rate, py::arg("isa"), py::arg("threads"), py::arg("weight_format"),
      py::arg("m"), py::arg("n"), py::arg("k"), py::arg("seconds"), py::arg("epilogue") = "store",
      py::arg("order") = py::none(),
      "FLOP per second of `linear` on a resident weight. `order`: of the AMX kernel of many rows.");
  py::class_<GpuCeilings>(m, "GpuCeilings", "Highest measured rates of a GPU, per second.")
      .def_readonly("read", &GpuCeilings::read)
      .def_readonly("copy", &GpuCeilings::copy)
      .def_readonly("flops", &GpuCeilings::flops);
  m.def("measure_gpu", &gpu_rates, py::arg("gpu"), py::arg("buffer_bytes"), py::arg("size"),
        py::arg("seconds"),
        "Measures reads, copies and a bfloat16 product of size^3; takes about 6 * seconds.");
}

}  // namespace turbomind::bindings
