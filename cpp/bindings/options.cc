// Binds the option structs of engine, request and handle.
#include "bindings/bindings.h"

namespace turbomind::bindings {
namespace {

constexpr std::pair<RequestKind, const char*> kKinds[] = {{RequestKind::generate, "generate"},
                                                          {RequestKind::score, "score"},
                                                          {RequestKind::logits, "logits"}};

const char* kind_name(RequestKind kind) {
  for (const auto& [k, name] : kKinds) {
    if (k == kind) return name;
  }
  return "unknown";
}

RequestKind to_kind(py::handle value) {
  const auto given = to_field<std::string>(value, "RequestOptions.kind");
  for (const auto& [k, name] : kKinds) {
    if (given == name) return k;
  }
  throw_error(ErrorCode::invalid_request, "RequestOptions.kind: got '", given,
              "', expected 'generate', 'score' or 'logits'");
}

std::vector<std::vector<int32_t>> to_bad_words(py::handle value) {
  if (py::isinstance<py::str>(value) || !py::isinstance<py::sequence>(value)) {
    throw py::type_error("SamplingParams.bad_words: expected a list of lists of token ids");
  }
  std::vector<std::vector<int32_t>> words;
  for (py::handle word : py::reinterpret_borrow<py::sequence>(value)) {
    words.push_back(to_token_ids(word, "bad_words[" + std::to_string(words.size()) + "]"));
  }
  return words;
}

std::vector<std::pair<int32_t, float>> to_logit_bias(py::handle value) {
  if (py::isinstance<py::str>(value) || !py::isinstance<py::sequence>(value)) {
    throw py::type_error("SamplingParams.logit_bias: expected a list of (token id, number)");
  }
  std::vector<std::pair<int32_t, float>> bias;
  for (py::handle item : py::reinterpret_borrow<py::sequence>(value)) {
    const std::string name = "logit_bias[" + std::to_string(bias.size()) + "]";
    if (!py::isinstance<py::sequence>(item) || py::len(item) != 2) {
      throw py::type_error(name + ": expected (token id, number)");
    }
    const auto pair = py::reinterpret_borrow<py::sequence>(item);
    const int32_t id = to_field<int32_t>(py::object(pair[0]), name + " token id");
    bias.emplace_back(id, to_field<float>(py::object(pair[1]), name + " value"));
  }
  return bias;
}

void token_list(py::class_<SamplingParams>& cls, const char* name,
                std::vector<int32_t> SamplingParams::* member) {
  cls.def_property(
      name, [member](const SamplingParams& p) { return p.*member; },
      [member, name](SamplingParams& p, py::handle value) {
        p.*member = to_token_ids(value, name);
      });
}

void bind_sampling(py::module_& m) {
  py::class_<SamplingParams> p(
      m, "SamplingParams",
      "Names of Hugging Face; defaults mean \"off\". Lists are copied in and out: "
      "assign them whole.");
  p.def(py::init<>());
  field(p, "max_new_tokens", &SamplingParams::max_new_tokens);
  field(p, "min_new_tokens", &SamplingParams::min_new_tokens);
  field(p, "temperature", &SamplingParams::temperature);
  field(p, "top_k", &SamplingParams::top_k);
  field(p, "top_p", &SamplingParams::top_p);
  field(p, "min_p", &SamplingParams::min_p);
  field(p, "repetition_penalty", &SamplingParams::repetition_penalty);
  field(p, "presence_penalty", &SamplingParams::presence_penalty);
  field(p, "frequency_penalty", &SamplingParams::frequency_penalty);
  p.def_property(
      "logit_bias", [](const SamplingParams& s) { return s.logit_bias; },
      [](SamplingParams& s, py::handle value) { s.logit_bias = to_logit_bias(value); });
  p.def_property(
      "bad_words", [](const SamplingParams& s) { return s.bad_words; },
      [](SamplingParams& s, py::handle value) { s.bad_words = to_bad_words(value); });
  token_list(p, "stop_token_ids", &SamplingParams::stop_token_ids);
  token_list(p, "eos_token_ids", &SamplingParams::eos_token_ids);
  field(p, "ignore_eos", &SamplingParams::ignore_eos);
  field(p, "seed", &SamplingParams::seed);
  field(p, "attempt", &SamplingParams::attempt);
  field(p, "continued", &SamplingParams::continued);
  field(p, "n", &SamplingParams::n);
  field(p, "logprobs", &SamplingParams::logprobs);
}

}  // namespace

void bind_options(py::module_& m) {
  py::class_<EngineOptions> engine(m, "EngineOptions", "Sizes and targets of an engine.");
  engine.def(py::init<>());
  field(engine, "max_batch_size", &EngineOptions::max_batch_size);
  field(engine, "max_context_tokens", &EngineOptions::max_context_tokens);
  field(engine, "cache_bytes", &EngineOptions::cache_bytes);
  field(engine, "cache_share", &EngineOptions::cache_share);
  field(engine, "cache_pages", &EngineOptions::cache_pages);
  field(engine, "prefill_chunk", &EngineOptions::prefill_chunk);
  field(engine, "step_ms", &EngineOptions::step_ms);
  field(engine, "prefix_reuse", &EngineOptions::prefix_reuse);
  field(engine, "warm_up", &EngineOptions::warm_up);
  field(engine, "host_bytes", &EngineOptions::host_bytes);
  field(engine, "page_folder", &EngineOptions::page_folder);
  field(engine, "disk_quota", &EngineOptions::disk_quota);

  bind_sampling(m);

  py::class_<RequestOptions> request(m, "RequestOptions",
                                     "Kind, priority and owner of one request.");
  request.def(py::init<>());
  request.def_property(
      "kind", [](const RequestOptions& o) { return kind_name(o.kind); },
      [](RequestOptions& o, py::handle value) { o.kind = to_kind(value); });
  field(request, "priority", &RequestOptions::priority);
  field(request, "retention_priority", &RequestOptions::retention_priority);
  field(request, "exact", &RequestOptions::exact);
  field(request, "salt", &RequestOptions::salt);
  field(request, "adapter", &RequestOptions::adapter);
  field(request, "first_row", &RequestOptions::first_row);

  py::class_<HandleOptions> handle(m, "HandleOptions",
                                   "Owner and persistence of a handle's pages.");
  handle.def(py::init<>());
  field(handle, "salt", &HandleOptions::salt);
  field(handle, "adapter", &HandleOptions::adapter);
  field(handle, "retention_priority", &HandleOptions::retention_priority);
  field(handle, "persist", &HandleOptions::persist);
}

}  // namespace turbomind::bindings
