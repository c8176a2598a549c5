// Handles, requests and statistics of an engine.
#include <optional>

#include "bindings/bindings.h"
#include "engine/engine.h"

namespace turbomind::bindings {
namespace {

// The destructor joins the engine thread.
struct EngineDeleter {
  void operator()(Engine* engine) const {
    without_gil([engine] { delete engine; });
  }
};
using EnginePtr = std::unique_ptr<Engine, EngineDeleter>;

EnginePtr make_engine(const EngineOptions& options, ModelRef& ref) {
  ref.get();  // refuses an empty one
  return without_gil([copy = options, model = std::move(ref.model)]() mutable {
    return EnginePtr(new Engine(copy, std::move(model)));
  });
}

RequestRef generate(Engine& e, HandleId handle, const SamplingParams& params,
                    const RequestOptions& options, std::shared_ptr<Waker> waker) {
  return without_gil([&e, handle, p = params, o = options, w = std::move(waker)]() mutable {
    return RequestRef{e.generate(handle, p, o, std::move(w)), e.model().vocab()};
  });
}

RequestRef advance(Engine& e, HandleId handle, int64_t keep, py::handle append,
                   const SamplingParams& params, const RequestOptions& options,
                   std::optional<float> keep_value, std::shared_ptr<Waker> waker) {
  auto ids = to_token_ids(append, "append");
  return without_gil([&e, handle, keep, keep_value, t = std::move(ids), p = params, o = options,
                      w = std::move(waker)]() mutable {
    return RequestRef{e.advance(handle, keep, std::move(t), p, o, keep_value, std::move(w)),
                      e.model().vocab()};
  });
}

RequestRef submit(Engine& e, py::handle token_ids, const SamplingParams& params,
                  const RequestOptions& options, std::shared_ptr<Waker> waker) {
  auto ids = to_token_ids(token_ids, "token_ids");
  return without_gil(
      [&e, t = std::move(ids), p = params, o = options, w = std::move(waker)]() mutable {
        return RequestRef{e.submit(std::move(t), p, o, std::move(w)), e.model().vocab()};
      });
}

py::dict to_dict(const Stats& s) {
  using namespace py::literals;
  py::dict ops;
  for (const auto& [name, op] : s.ops) {
    ops[py::str(name)] =
        py::dict("calls"_a = op.calls, "ns"_a = op.ns, "bytes"_a = op.bytes, "flops"_a = op.flops);
  }
  return py::dict("pages_total"_a = s.pages_total, "pages_free"_a = s.pages_free,
                  "pages_referenced"_a = s.pages_referenced, "pages_cached"_a = s.pages_cached,
                  "tokens_prefilled"_a = s.tokens_prefilled, "tokens_decoded"_a = s.tokens_decoded,
                  "tokens_reused"_a = s.tokens_reused, "steps"_a = s.steps,
                  "preemptions"_a = s.preemptions, "rows"_a = s.rows, "waiting"_a = s.waiting,
                  "handles"_a = s.handles, "max_context"_a = s.max_context,
                  "last_step_ms"_a = s.last_step_ms, "ops"_a = ops);
}

using NoGil = py::call_guard<py::gil_scoped_release>;
using EngineClass = py::class_<Engine, EnginePtr>;

void bind_handles(EngineClass& cls) {
  cls.def(
         "open",
         [](Engine& e, const HandleOptions& options) {
           return without_gil([&e, copy = options] { return e.open(copy); });
         },
         py::arg("options"), "A new, empty handle. Does not wait.")
      .def(
          "append",
          [](Engine& e, HandleId handle, py::handle token_ids) {
            auto ids = to_token_ids(token_ids, "token_ids");
            without_gil([&] { e.append(handle, std::move(ids)); });
          },
          py::arg("handle"), py::arg("token_ids"), "Commits tokens; computes nothing.")
      .def("length", &Engine::length, py::arg("handle"), NoGil(), "Committed tokens.")
      .def("token_ids", &Engine::token_ids, py::arg("handle"), NoGil())
      .def("truncate", &Engine::truncate, py::arg("handle"), py::arg("length"), NoGil())
      .def("fork", &Engine::fork, py::arg("handle"), py::arg("keep_value"), NoGil(),
           "A handle with the same committed tokens; shares the pages.")
      .def("fork_later", &Engine::fork_later, py::arg("handle"), py::arg("keep_value"), NoGil(),
           "The same without waiting; if it cannot be made there is no such handle.")
      .def("park", &Engine::park, py::arg("handle"), NoGil(), "Gives up the handle's pages.")
      .def("set_keep_value", &Engine::set_keep_value, py::arg("handle"), py::arg("keep_value"),
           NoGil())
      .def("close", &Engine::close, py::arg("handle"), NoGil(),
           "Cancels a running request first. Does not wait.");
}

}  // namespace

void bind_engine(py::module_& m) {
  EngineClass cls(m, "Engine", "One engine thread that owns scheduler and cache. Takes the model.");
  cls.def(py::init(&make_engine), py::arg("options"), py::arg("model"));
  bind_handles(cls);
  cls.def("generate", &generate, py::arg("handle"), py::arg("params"), py::arg("options"),
          py::arg("waker"), "Generated tokens are committed to the handle.")
      .def("advance", &advance, py::arg("handle"), py::arg("keep"), py::arg("append"),
           py::arg("params"), py::arg("options"), py::arg("keep_value"), py::arg("waker"),
           "Truncates, appends and generates in one message; does not wait.")
      .def("submit", &submit, py::arg("token_ids"), py::arg("params"), py::arg("options"),
           py::arg("waker"), "A stateless request.")
      .def(
          "stats", [](Engine& e) { return to_dict(without_gil([&e] { return e.stats(); })); },
          "Counters, what is in use, and the profiler's table under \"ops\".")
      .def("evict", &Engine::evict, NoGil(), "Drops all cached pages.")
      .def("set_profiling", &Engine::set_profiling, py::arg("on"), NoGil())
      .def("check_invariants", &Engine::check_invariants, NoGil())
      .def("shutdown", &Engine::shutdown, NoGil(),
           "Cancels everything; later calls raise EngineClosed.");
}

}  // namespace turbomind::bindings
