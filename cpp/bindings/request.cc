// Binds requests, their events, and the waker of an asyncio loop.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>

#include "bindings/bindings.h"

namespace turbomind::bindings {
namespace {

std::optional<const char*> finish_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::none:
      return std::nullopt;
    case FinishReason::stop:
      return "stop";
    case FinishReason::length:
      return "length";
    case FinishReason::cancelled:
      return "cancelled";
    case FinishReason::error:
      return "error";
  }
  return std::nullopt;
}

// Waits in slices, so that a signal (Ctrl-C) reaches Python soon.
bool wait(const RequestRef& self, double seconds) {
  using Clock = std::chrono::steady_clock;
  constexpr double kSlice = 0.1;
  if (std::isnan(seconds)) {
    throw_error(ErrorCode::invalid_request,
                "seconds: got nan, expected a number (negative: no limit)");
  }
  const auto start = Clock::now();
  for (;;) {
    const double spent = std::chrono::duration<double>(Clock::now() - start).count();
    const double left = seconds < 0 ? kSlice : std::max(0.0, seconds - spent);
    if (without_gil([&] { return self.request->wait(std::min(left, kSlice)); })) return true;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (seconds >= 0 && left <= kSlice) return false;
  }
}

void check_done(const RequestRef& self, const char* what) {
  if (self.request->done()) return;
  throw_error(ErrorCode::invalid_request, what,
              ": the request has not finished (drain its events first)");
}

// A view of the request's own memory; the array keeps the request alive.
py::array_t<float> logits(const RequestRef& self) {
  check_done(self, "logits");
  auto owner = std::make_unique<std::shared_ptr<Request>>(self.request);
  const py::capsule base(owner.get(),
                         [](void* p) { delete static_cast<std::shared_ptr<Request>*>(p); });
  std::vector<float>& values = (*owner.release())->logits;
  const auto rows = static_cast<py::ssize_t>(values.size() / self.vocab);
  return py::array_t<float>({rows, static_cast<py::ssize_t>(self.vocab)}, values.data(), base);
}

std::vector<float> scores(const RequestRef& self) {
  check_done(self, "scores");
  return self.request->scores;
}

void bind_event(py::module_& m) {
  py::class_<TokenLogprobs>(m, "TokenLogprobs", "Log-probabilities of one produced token.")
      .def_property_readonly("logprob", [](const TokenLogprobs& t) { return t.logprob; })
      .def_property_readonly("top", [](const TokenLogprobs& t) { return t.top; });

  using Progress = std::optional<std::pair<int64_t, int64_t>>;
  py::class_<Event>(m, "Event", "The outcome of one step for one choice of a request.")
      .def_property_readonly("choice", [](const Event& e) { return e.choice; })
      .def_property_readonly("token_ids", [](const Event& e) { return e.token_ids; })
      .def_property_readonly("logprobs", [](const Event& e) { return e.logprobs; })
      .def_property_readonly("progress",
                             [](const Event& e) {
                               return e.progress_total > 0
                                          ? Progress({e.progress_done, e.progress_total})
                                          : Progress();
                             })
      .def_property_readonly("finish_reason", [](const Event& e) { return finish_name(e.finish); })
      .def_property_readonly("terminal", [](const Event& e) { return e.terminal; })
      .def_property_readonly("error",
                             [](const Event& e) -> py::object {
                               if (e.finish != FinishReason::error) return py::none();
                               return make_exception(e.error_code, e.error);
                             })
      .def_property_readonly("prompt_tokens", [](const Event& e) { return e.prompt_tokens; })
      .def_property_readonly("seconds", [](const Event& e) { return e.seconds; })
      .def_property_readonly("reused_tokens", [](const Event& e) { return e.reused_tokens; })
      .def_property_readonly("loaded_tokens", [](const Event& e) { return e.loaded_tokens; })
      .def_property_readonly("foreign_tokens", [](const Event& e) { return e.foreign_tokens; });
}

}  // namespace

void bind_request(py::module_& m) {
  bind_event(m);
  py::class_<Waker, std::shared_ptr<Waker>>(
      m, "Waker",
      "A file descriptor that becomes readable when any of its requests has new events.")
      .def(py::init<>())
      .def_property_readonly("fd", &Waker::fd)
      .def("drain", &Waker::drain, py::call_guard<py::gil_scoped_release>(),
           "Clears the descriptor. Returns the ids of requests with new events, in their order, "
           "without "
           "repeats.")
      .def("wake", &Waker::wake, py::call_guard<py::gil_scoped_release>(),
           "Makes the descriptor readable without events. Any thread.");

  py::class_<RequestRef>(m, "Request", "A submitted request.")
      .def_property_readonly("id", [](const RequestRef& r) { return r.request->id(); })
      .def_property_readonly("done", [](const RequestRef& r) { return r.request->done(); })
      .def(
          "cancel", [](const RequestRef& r) { r.request->cancel(); },
          "Cancels the request; its terminal event still follows. Any thread, any number of times.")
      .def(
          "cancel_choice",
          [](const RequestRef& r, int choice) { r.request->cancel_choice(choice); },
          py::arg("choice"),
          "Cancels one choice of the request; its finish event still follows. Any thread, any "
          "number of times.")
      .def(
          "set_priority",
          [](const RequestRef& r, int priority) { r.request->set_priority(priority); },
          py::arg("priority"),
          "Changes the priority from the next step on; lower is served first. Any thread.")
      .def("wait", &wait, py::arg("seconds"),
           "Waits until there are events or the terminal one was drained; negative seconds are no "
           "limit. Returns False after the time.")
      .def(
          "drain",
          [](const RequestRef& r) { return without_gil([&] { return r.request->drain(); }); },
          "Returns the events since the last call.")
      .def("scores", &scores,
           "Returns len - 1 log-probabilities of a \"score\" request that is done.")
      .def("logits", &logits,
           "Returns the float32 logits [len, vocab] of a \"logits\" request that is done, a view "
           "of its "
           "memory.");
}

}  // namespace turbomind::bindings
