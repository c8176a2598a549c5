// Binds Engine: handles, requests, tiers and statistics.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
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
  ref.get();  // throws if it is empty
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

RequestRef advance(Engine& e, HandleId handle, int64_t prefix_length, py::handle append,
                   const SamplingParams& params, const RequestOptions& options,
                   std::optional<float> retention_priority, std::shared_ptr<Waker> waker) {
  auto ids = to_token_ids(append, "append");
  return without_gil([&e, handle, prefix_length, retention_priority, t = std::move(ids), p = params,
                      o = options, w = std::move(waker)]() mutable {
    return RequestRef{
        e.advance(handle, prefix_length, std::move(t), p, o, retention_priority, std::move(w)),
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

py::dict to_dict(const TierStats& t) {
  using namespace py::literals;
  return py::dict("pages"_a = t.pages, "bytes"_a = t.bytes, "quota"_a = t.quota,
                  "reads"_a = t.reads, "writes"_a = t.writes, "evicted"_a = t.evicted,
                  "damaged"_a = t.damaged, "write_errors"_a = t.write_errors);
}

py::dict to_dict(const OpTable& table) {
  using namespace py::literals;
  py::dict ops;
  for (const auto& [name, op] : table)
    ops[py::str(name)] =
        py::dict("calls"_a = op.calls, "ns"_a = op.ns, "bytes"_a = op.bytes, "flops"_a = op.flops);
  return ops;
}

py::dict to_dict(const Stats& s) {
  using namespace py::literals;
  py::list tiers;
  for (const TierStats& tier : s.tiers) tiers.append(to_dict(tier));
  py::list groups;
  for (const GroupStats& g : s.groups)
    groups.append(py::dict("window"_a = g.window, "page_bytes"_a = g.page_bytes,
                           "total"_a = g.total, "free"_a = g.free, "cached"_a = g.cached,
                           "out_of_reach"_a = g.out_of_reach));
  py::list ranks;
  for (const RankStats& r : s.ranks)
    ranks.append(py::dict("weight_bytes"_a = r.weight_bytes, "cache_bytes"_a = r.cache_bytes,
                          "ops"_a = to_dict(r.ops)));
  return py::dict("cache_bytes"_a = s.cache_bytes, "groups"_a = groups,
                  "pages_total"_a = s.pages_total, "pages_free"_a = s.pages_free,
                  "pages_referenced"_a = s.pages_referenced, "pages_cached"_a = s.pages_cached,
                  "tokens_prefilled"_a = s.tokens_prefilled, "tokens_decoded"_a = s.tokens_decoded,
                  "tokens_reused"_a = s.tokens_reused, "tokens_loaded"_a = s.tokens_loaded,
                  "tokens_missed"_a = s.tokens_missed, "tokens_recomputed"_a = s.tokens_recomputed,
                  "steps"_a = s.steps, "steps_overlapped"_a = s.steps_overlapped, "tiers"_a = tiers,
                  "pages_loaded"_a = s.pages_loaded, "pages_saved"_a = s.pages_saved,
                  "failed_loads"_a = s.failed_loads, "failed_saves"_a = s.failed_saves,
                  "preemptions"_a = s.preemptions, "requests_started"_a = s.requests_started,
                  "queue_seconds"_a = s.queue_seconds, "prefixes_awaited"_a = s.prefixes_awaited,
                  "slots"_a = s.slots, "waiting"_a = s.waiting, "handles"_a = s.handles,
                  "max_context"_a = s.max_context, "last_step_ms"_a = s.last_step_ms,
                  "weight_bytes"_a = s.weight_bytes, "ranks"_a = ranks, "ops"_a = to_dict(s.ops));
}

py::bytes to_bytes(const BlockHash& key) {
  char bytes[sizeof(BlockHash)];
  std::memcpy(bytes, &key, sizeof(bytes));
  return py::bytes(bytes, sizeof(bytes));
}

// Waits in slices, so that a signal (Ctrl-C) reaches Python soon. A negative timeout is no
// limit. Returns (all saves and removals have ended, keys of pages that could not be saved).
py::tuple flush_pages(Engine& e, double seconds) {
  using Clock = std::chrono::steady_clock;
  constexpr double kSlice = 0.1;
  if (std::isnan(seconds)) {
    throw_error(ErrorCode::invalid_request,
                "timeout: got nan, expected a number of seconds (negative: for ever)");
  }
  const auto start = Clock::now();
  const auto flush = without_gil([&e] { return e.flush(); });
  for (;;) {
    const double spent = std::chrono::duration<double>(Clock::now() - start).count();
    const double left = seconds < 0 ? kSlice : std::max(0.0, seconds - spent);
    const bool done = without_gil([&] { return flush->wait(std::min(left, kSlice)); });
    if (done || flush->over() || (seconds >= 0 && left <= kSlice)) {
      py::list unsaved;
      for (const BlockHash& key : flush->unsaved()) unsaved.append(to_bytes(key));
      return py::make_tuple(done, unsaved);
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

std::vector<BlockHash> to_keys(const std::vector<std::string>& values) {
  std::vector<BlockHash> keys(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].size() != sizeof(BlockHash)) {
      throw_error(ErrorCode::invalid_request, "keys[", i, "]: got ", values[i].size(),
                  " bytes, expected ", sizeof(BlockHash));
    }
    std::memcpy(&keys[i], values[i].data(), sizeof(BlockHash));
  }
  return keys;
}

py::list page_keys(const Engine& e, py::handle token_ids, const std::string& salt) {
  py::list out;
  for (const BlockHash& key : e.page_keys(to_token_ids(token_ids, "token_ids"), salt))
    out.append(to_bytes(key));
  return out;
}

// Returns (prefix on the device, [prefix down to each lower tier]), in tokens.
py::tuple residence(Engine& e, py::handle token_ids, const std::string& salt) {
  auto ids = to_token_ids(token_ids, "token_ids");
  const Residence where = without_gil([&] { return e.residence(std::move(ids), salt); });
  return py::make_tuple(where.device, where.tiers);
}

double predict_ttft(Engine& e, py::handle token_ids, int64_t new_tokens, const std::string& salt) {
  auto ids = to_token_ids(token_ids, "token_ids");
  return without_gil([&] { return e.predict_ttft(std::move(ids), new_tokens, salt); });
}

// Returns [(prefix on the device, [prefix down to each lower tier], seconds)].
py::list forecasts(Engine& e, const py::list& queries, int64_t new_tokens) {
  std::vector<ForecastQuery> found;
  for (const py::handle& query : queries) {
    const auto pair = py::cast<py::tuple>(query);
    found.push_back({to_token_ids(pair[0], "token_ids"), py::cast<std::string>(pair[1])});
  }
  const auto answers = without_gil([&] { return e.forecasts(std::move(found), new_tokens); });
  py::list out;
  for (const Forecast& answer : answers)
    out.append(py::make_tuple(answer.where.device, answer.where.tiers, answer.ttft));
  return out;
}

// Returns ([bytes/s of reading each lower tier], tokens/s of prefill, bytes of KV per token).
py::tuple speeds(Engine& e) {
  const Speeds s = without_gil([&e] { return e.speeds(); });
  return py::make_tuple(s.reads, s.prefill, s.bytes_per_token);
}

using NoGil = py::call_guard<py::gil_scoped_release>;
using EngineClass = py::class_<Engine, EnginePtr>;

void bind_handles(EngineClass& cls) {
  cls.def(
         "open",
         [](Engine& e, const HandleOptions& options) {
           return without_gil([&e, copy = options] { return e.open(copy); });
         },
         py::arg("options"), "Opens an empty handle without waiting. Returns its id.")
      .def(
          "append",
          [](Engine& e, HandleId handle, py::handle token_ids) {
            auto ids = to_token_ids(token_ids, "token_ids");
            without_gil([&] { e.append(handle, std::move(ids)); });
          },
          py::arg("handle"), py::arg("token_ids"), "Appends token ids; computes nothing.")
      .def("length", &Engine::length, py::arg("handle"), NoGil(), "Number of committed tokens.")
      .def("token_ids", &Engine::token_ids, py::arg("handle"), NoGil(), "The committed token ids.")
      .def("truncate", &Engine::truncate, py::arg("handle"), py::arg("length"), NoGil(),
           "Drops the tokens from position `length` on.")
      .def("fork", &Engine::fork, py::arg("handle"), py::arg("retention_priority"), NoGil(),
           "Opens a handle with the same committed tokens, which shares the pages.")
      .def("fork_later", &Engine::fork_later, py::arg("handle"), py::arg("retention_priority"),
           NoGil(), "Forks without waiting; if it fails, later calls raise NotFound.")
      .def("park", &Engine::park, py::arg("handle"), NoGil(),
           "Releases the handle's pages; the tokens stay.")
      .def("set_retention_priority", &Engine::set_retention_priority, py::arg("handle"),
           py::arg("retention_priority"), NoGil(), "Sets the eviction order of its pages.")
      .def("save", &Engine::save, py::arg("handle"), NoGil(),
           "Posts copies of pages that the lowest tier lacks.")
      .def("warm", &Engine::warm, py::arg("handle"), NoGil(),
           "Posts loads of pages from lower tiers; does not wait.")
      .def("close", &Engine::close, py::arg("handle"), py::arg("save"), NoGil(),
           "Cancels a running request and closes the handle; does not wait.");
}

void bind_pages(EngineClass& cls) {
  cls.def("flush_pages", &flush_pages, py::arg("timeout"),
          "Waits for the saves and removals posted before. Returns (all have ended, keys of pages "
          "that could not be saved).")
      .def("residence", &residence, py::arg("token_ids"), py::arg("salt"),
           "Returns (prefix on the device, [prefix down to each lower tier]), in tokens.")
      .def("predict_ttft", &predict_ttft, py::arg("token_ids"), py::arg("new_tokens"),
           py::arg("salt"), "Estimates the seconds to the first token; 0.0 before measurements.")
      .def("forecasts", &forecasts, py::arg("queries"), py::arg("new_tokens"),
           "Returns residence and predicted seconds of each (token ids, salt), in order.")
      .def("speeds", &speeds,
           "Returns ([bytes/s of reading each lower tier], tokens/s of prefill, KV bytes per "
           "token).")
      .def("page_keys", &page_keys, py::arg("token_ids"), py::arg("salt"),
           "Returns the block hash of each page, 16 bytes.")
      .def(
          "remove_pages",
          [](Engine& e, const std::vector<std::string>& keys) {
            without_gil([&] { e.remove_pages(to_keys(keys)); });
          },
          py::arg("keys"), "Removes pages from the cache and all lower tiers.")
      .def("refresh_pages", &Engine::refresh_pages, NoGil(),
           "Reads what other processes have written to the page folder or removed.")
      .def_property_readonly("numerics_fingerprint",
                             [](const Engine& e) { return e.model().numerics_fingerprint(); })
      .def_property_readonly("library_note", &Engine::library_note)
      .def_property_readonly("warmed_up",
                             [](const Engine& e) {
                               const WarmUp& w = e.warmed_up();
                               return py::make_tuple(w.done, w.of, w.seconds);
                             })
      .def_property_readonly("fingerprint",
                             [](const Engine& e) { return e.model().fingerprint(); });
}

}  // namespace

void bind_engine(py::module_& m) {
  EngineClass cls(m, "Engine",
                  "An engine thread that owns scheduler and cache. It takes over the model.");
  cls.def(py::init(&make_engine), py::arg("options"), py::arg("model"));
  bind_handles(cls);
  bind_pages(cls);
  cls.def("generate", &generate, py::arg("handle"), py::arg("params"), py::arg("options"),
          py::arg("waker"), "Starts a request that appends its tokens to the handle.")
      .def("advance", &advance, py::arg("handle"), py::arg("prefix_length"), py::arg("append"),
           py::arg("params"), py::arg("options"), py::arg("retention_priority"), py::arg("waker"),
           "Truncates, appends and generates in one message; does not wait.")
      .def("submit", &submit, py::arg("token_ids"), py::arg("params"), py::arg("options"),
           py::arg("waker"), "Starts a request without a handle.")
      .def(
          "stats", [](Engine& e) { return to_dict(without_gil([&e] { return e.stats(); })); },
          "Returns counters, sizes in use, and the profiler's table as \"ops\".")
      .def("evict", &Engine::evict, NoGil(), "Evicts all pages that nothing refers to.")
      .def("set_profiling", &Engine::set_profiling, py::arg("on"), NoGil(),
           "Starts the profiler with an empty table, or stops it.")
      .def("check_invariants", &Engine::check_invariants, NoGil(),
           "Raises InternalError if page counts and references disagree.")
      .def(
          "shutdown",
          [](Engine& e) {
            const LastSaves last = without_gil([&e] { return e.shutdown(); });
            return py::make_tuple(last.done, last.unsaved, last.stuck);
          },
          "Cancels all requests; later calls raise EngineClosed. Returns (the last saves have "
          "ended, "
          "number of pages not saved, a tier hangs and was abandoned).");
}

}  // namespace turbomind::bindings
