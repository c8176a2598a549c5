// Binds DecoderBuilder, which packs weights into a model.
#include <mutex>
#include <optional>

#include "bindings/bindings.h"
#include "bindings/buffer_view.h"
#include "cuda/gpu_context.h"
#include "linear/codes/code_source.h"
#include "model/decoder/decoder_builder.h"
#include "model/decoder/decoder_slots.h"
#include "model/decoder/memory_plan.h"

namespace turbomind::bindings {
namespace {

// A builder with a lock: its calls run without the interpreter's lock.
struct BuilderRef {
  std::mutex mutex;
  DecoderBuilder builder;
  bool finished = false;

  BuilderRef(const ModelConfig& config, Isa isa, int threads, const std::vector<GpuOptions>& gpus,
             int ranks)
      : builder(config, isa, threads, gpus, ranks) {}

  template <typename F>
  auto call(F&& f) {
    std::lock_guard lock(mutex);
    if (finished) throw_error(ErrorCode::invalid_request, "builder: its model is finished");
    return f(builder);
  }
};

// The source is a buffer or a SourceFile.
using SegmentTuple = std::tuple<py::object, std::string, int64_t, int64_t, int64_t>;

RowSegment to_segment(const SegmentTuple& t, int64_t size, const std::string& what) {
  const auto& [source, dtype, row_begin, rows, cols] = t;
  const DType type = to_dtype(dtype, what, ErrorCode::model);
  if (row_begin < 0 || rows < 0 || cols < 1) {
    throw_error(ErrorCode::model, what, ": got first row ", row_begin, ", rows ", rows,
                ", columns ", cols, ", expected at least 0, 0 and 1");
  }
  int64_t end = 0, bytes = 0;
  const bool too_big =
      __builtin_add_overflow(row_begin, rows, &end) || __builtin_mul_overflow(end, cols, &bytes) ||
      __builtin_mul_overflow(bytes, static_cast<int64_t>(dtype_bytes(type)), &bytes);
  if (too_big || bytes > size) {
    throw_error(ErrorCode::model, what, ": rows ", row_begin, " to ", end, " of ", cols, " ", dtype,
                " need ", too_big ? "more than 2^63" : std::to_string(bytes),
                " bytes, the source has ", size);
  }
  return {nullptr, type, row_begin, rows, cols};
}

// A source of codes, its first row and the rows.
using CodesTuple = std::tuple<std::shared_ptr<CodeSource>, int64_t, int64_t>;

RowSegment to_segment(const CodesTuple& t, const std::string& what) {
  const auto& [source, begin, rows] = t;
  if (source == nullptr || begin < 0 || rows < 0 || begin > source->rows - rows)
    throw_error(ErrorCode::model, what, ": rows ", begin, " to ", begin + rows,
                " of codes, expected some of ", source ? source->rows : 0);
  RowSegment segment{nullptr, DType::f32, begin, rows, source->cols};
  segment.codes = source.get();
  return segment;
}

void set_slot(BuilderRef& self, const std::string& slot, const py::sequence& sources) {
  std::vector<std::unique_ptr<BufferView>> views;
  std::vector<RowSegment> rows;
  for (size_t i = 0; i < sources.size(); ++i) {
    const std::string what = "weight " + slot + ", segment " + std::to_string(i);
    if (py::len(sources[i]) == 3) {
      rows.push_back(to_segment(sources[i].cast<CodesTuple>(), what));
      continue;
    }
    const auto segment = sources[i].cast<SegmentTuple>();
    const py::object& source = std::get<0>(segment);
    if (py::isinstance<SourceFile>(source)) {
      const auto* file = source.cast<const SourceFile*>();
      rows.push_back(to_segment(segment, file->bytes, what));
      rows.back().file = file;
    } else {
      views.push_back(std::make_unique<BufferView>(source, what));
      rows.push_back(to_segment(segment, views.back()->size(), what));
      rows.back().data = views.back()->data();
    }
  }
  without_gil([&] { self.call([&](DecoderBuilder& b) { b.set(slot, rows); }); });
}

std::unique_ptr<ModelRef> finish(BuilderRef& self, bool check_finite) {
  auto model = without_gil([&] {
    return self.call([&](DecoderBuilder& b) {
      auto built = b.finish(check_finite);
      self.finished = true;
      return built;
    });
  });
  return std::make_unique<ModelRef>(ModelRef{std::move(model)});
}

std::unique_ptr<BuilderRef> make_builder(const ModelConfig& config, const std::string& isa,
                                         int threads, const std::vector<GpuOptions>& gpus,
                                         const std::optional<TileOrder>& order, int ranks) {
  if (threads < 1 || threads > 1024) {
    throw_error(ErrorCode::invalid_request, "threads: got ", threads, ", expected 1 to 1024");
  }
  const Isa resolved = resolve_isa(isa);
  return without_gil([copy = config, resolved, threads, gpus, order, ranks] {
    auto made = std::make_unique<BuilderRef>(copy, resolved, threads, gpus, ranks);
    if (order) made->builder.set_tile_order(*order);
    return made;
  });
}

}  // namespace

void bind_builder(py::module_& m) {
  py::class_<SlotSpec>(m, "Slot", "A place for one weight of a model.")
      .def_property_readonly("name", [](const SlotSpec& s) { return s.name; })
      .def_property_readonly("rows", [](const SlotSpec& s) { return s.rows; })
      .def_property_readonly("cols", [](const SlotSpec& s) { return s.cols; })
      .def_property_readonly("linear", [](const SlotSpec& s) { return s.linear; })
      .def_property_readonly("format", [](const SlotSpec& s) { return s.format; })
      .def_property_readonly("bytes", [](const SlotSpec& s) { return s.bytes; });
  m.def(
      "weight_slots",
      [](const ModelConfig& config, bool gpu) {
        return weight_slots(config, gpu ? WeightPlace::gpu : WeightPlace::host);
      },
      py::arg("config"), py::arg("gpu") = false,
      "Returns the slots of a model with their formats and sizes, without making one. Raises "
      "ModelError for a config out of range.");

  m.def(
      "plan_memory",
      [](const ModelConfig& config, bool gpu, int ranks) {
        const ModelMemory memory =
            plan_memory(config, gpu ? WeightPlace::gpu : WeightPlace::host, ranks);
        py::list all;
        for (const RankMemory& rank : memory.ranks)
          all.append(py::make_tuple(rank.weights, rank.page_bytes));
        return py::make_tuple(memory.shared_weights, all);
      },
      py::arg("config"), py::arg("gpu") = false, py::arg("ranks") = 1,
      "Returns (bytes of weights that ranks share, [(bytes of weights, [bytes of a page of each "
      "cache group]) of each rank]) of a model, without making one. Raises what weight_slots() and "
      "plan_cache() raise.");

  py::class_<ModelRef>(m, "Model", "Packed weights, until an Engine takes them.")
      .def_property_readonly("vocab", [](const ModelRef& r) { return r.get().vocab(); })
      .def_property_readonly("max_context", [](const ModelRef& r) { return r.get().max_context(); })
      .def_property_readonly("weight_bytes",
                             [](const ModelRef& r) { return r.get().memory().weights(); })
      .def_property_readonly("groups", [](const ModelRef& r) { return r.get().groups(); });

  py::class_<GpuOptions>(m, "GpuOptions",
                         "The GPU of a rank of a model, and the mode of its kernels.")
      .def(py::init([](const std::string& kind, int index, bool deterministic,
                       std::vector<std::string> library_folders) {
             if (kind != "cuda" && kind != "emulated")
               throw_error(ErrorCode::invalid_request, "kind: got '", kind,
                           "', expected 'cuda' or 'emulated'");
             return GpuOptions{kind == "cuda" ? GpuKind::cuda : GpuKind::emulated, index,
                               deterministic, std::move(library_folders)};
           }),
           py::arg("kind"), py::arg("index"), py::arg("deterministic"), py::arg("library_folders"))
      .def_property_readonly("kind", [](const GpuOptions& o) { return gpu_kind_name(o.kind); })
      .def_readonly("index", &GpuOptions::index)
      .def_readonly("deterministic", &GpuOptions::deterministic);

  py::class_<BuilderRef>(
      m, "DecoderBuilder",
      "Packs weights. Segments are (buffer or SourceFile, dtype name, first row, rows, columns) of "
      "row-major tensors, or (CodeSource, first row, rows).")
      .def(py::init(&make_builder), py::arg("config"), py::arg("isa"), py::arg("threads"),
           py::arg("gpus") = std::vector<GpuOptions>(), py::arg("tile_order") = py::none(),
           py::arg("ranks") = 1)
      .def_property_readonly("slots", [](const BuilderRef& r) { return r.builder.slots(); })
      .def("set", &set_slot, py::arg("slot"), py::arg("segments"),
           "Fills a slot from row segments; the buffers are read during the call only. ModelError "
           "names the slot.")
      .def(
          "fill_dummy",
          [](BuilderRef& self, uint64_t seed) {
            without_gil([&] { self.call([&](DecoderBuilder& b) { b.fill_dummy(seed); }); });
          },
          py::arg("seed"), "Fills the slots not set yet with reproducible small values.")
      .def(
          "finish", &finish, py::arg("check_finite"),
          "Returns the model. Raises ModelError for slots not set or a weight that is not finite.");
}

}  // namespace turbomind::bindings
