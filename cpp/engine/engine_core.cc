#include "engine/engine_core.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/error.h"

namespace turbomind {

namespace {

int64_t pool_pages(const EngineOptions& options, const Model& model) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (options.cache_pages > 0) return std::min(options.cache_pages, kMost);
  int64_t page_bytes = 0;
  for (const CacheGroup& group : model.groups())
    page_bytes += static_cast<int64_t>(group.page_bytes);
  if (page_bytes <= 0 || options.cache_bytes < page_bytes)
    throw_error(ErrorCode::invalid_request, "cache_memory: got ", options.cache_bytes,
                " bytes, expected at least one page of ", page_bytes, " bytes");
  return std::min(options.cache_bytes / page_bytes, kMost);
}

const EngineOptions& checked(const EngineOptions& o) {
  const auto require = [](bool ok, const char* name, auto value, const char* expected) {
    if (!ok)
      throw_error(ErrorCode::invalid_request, name, ": got ", value, ", expected ", expected);
  };
  require(o.max_batch_size >= 1 && o.max_batch_size <= 4096, "max_batch_size", o.max_batch_size,
          "1 to 4096");
  require(o.max_context_tokens >= 0, "max_context_tokens", o.max_context_tokens,
          "0 (the model's) or more");
  require(o.cache_pages >= 0, "cache_pages", o.cache_pages, "0 (from cache_memory) or more");
  require(o.prefill_chunk >= 0, "prefill_chunk", o.prefill_chunk, "0 (the default) or more");
  require(std::isfinite(o.step_ms) && o.step_ms > 0, "step_ms", o.step_ms, "a number above 0");
  return o;
}

int64_t context_limit(const EngineOptions& options, const Model& model, const KvCache& kv) {
  const int64_t limit = std::min<int64_t>(model.max_context(), kv.max_context());
  return options.max_context_tokens > 0 ? std::min(limit, options.max_context_tokens) : limit;
}

void check_handle_options(const HandleOptions& o) {
  if (o.adapter != 0)
    throw_error(ErrorCode::invalid_request, "adapter: got ", o.adapter,
                ", expected 0: the model has none");
  if (!std::isfinite(o.keep_value))
    throw_error(ErrorCode::invalid_request, "keep_value: got ", o.keep_value,
                ", expected a finite number");
}

}  // namespace

EngineCore::EngineCore(const EngineOptions& options, Model& model, const std::atomic<bool>& stop)
    : model_(model),
      kv_(model, pool_pages(checked(options), model), options.prefix_reuse),
      max_context_(context_limit(options, model, kv_)),
      scheduler_(kv_, options, [this] { return park_idle(); }),
      table_([this](Run& run) { leave(run); }),
      runner_(model, kv_, scheduler_, table_, stop) {}

EngineCore::Handle& EngineCore::find(HandleId handle) {
  const auto it = handles_.find(handle);
  if (it == handles_.end())
    throw_error(ErrorCode::not_found, "no handle ", handle, ": closed or never opened");
  it->second.last_use = ++clock_;
  return it->second;
}

EngineCore::Handle& EngineCore::find_idle(HandleId handle, const char* verb) {
  Handle& h = find(handle);
  if (h.request)
    throw_error(ErrorCode::busy, "cannot ", verb, " handle ", handle, ": it is generating");
  return h;
}

HandleId EngineCore::open(const HandleOptions& options) {
  check_handle_options(options);
  Sequence seq = kv_.make_sequence(options.adapter, options.salt, options.keep_value);
  Handle& h = handles_[last_handle_ + 1];
  h.seq = std::move(seq);
  h.last_use = ++clock_;
  return ++last_handle_;
}

void EngineCore::append(HandleId handle, const std::vector<int32_t>& token_ids) {
  auto& tokens = find_idle(handle, "append to").seq.tokens;
  tokens.insert(tokens.end(), token_ids.begin(), token_ids.end());
}

void EngineCore::truncate(HandleId handle, int64_t length) {
  Sequence& seq = find_idle(handle, "truncate").seq;
  if (length < 0 || length > seq.length())
    throw_error(ErrorCode::invalid_request, "length: got ", length, ", expected 0 to ",
                seq.length(), " (the handle's length)");
  kv_.truncate(seq, length);
}

HandleId EngineCore::fork(HandleId handle) {
  const Sequence& seq = find(handle).seq;
  const auto copy = handles_.try_emplace(last_handle_ + 1).first;
  try {
    copy->second.seq = kv_.fork(seq);
  } catch (...) {
    handles_.erase(copy);
    throw;
  }
  copy->second.last_use = ++clock_;
  return ++last_handle_;
}

void EngineCore::park(HandleId handle) {
  kv_.drop_pages(find_idle(handle, "park").seq);
}

void EngineCore::set_keep_value(HandleId handle, float keep_value) {
  if (!std::isfinite(keep_value))
    throw_error(ErrorCode::invalid_request, "keep_value: got ", keep_value,
                ", expected a finite number");
  find(handle).seq.keep_value = keep_value;
}

void EngineCore::close(HandleId handle) {
  Handle& h = find(handle);
  if (h.request) {
    h.request->request->cancel();  // so that it ends even if this call fails
    table_.finish_all(*h.request, FinishReason::cancelled);
    table_.publish();
  }
  kv_.drop_pages(h.seq);
  handles_.erase(handle);
}

void EngineCore::generate(HandleId handle, std::unique_ptr<RequestState> state) {
  Handle& h = find_idle(handle, "generate on");
  const auto refuse = [](const char* name, const char* why) {
    throw_error(ErrorCode::invalid_request, name, " of a handle's request: ", why);
  };
  if (h.seq.length() == 0)
    throw_error(ErrorCode::invalid_request, "handle ", handle, ": got no tokens, expected some");
  if (!state->generates()) refuse("kind", "score and logits are stateless, use submit");
  if (state->params->n != 1) refuse("n", "several choices are stateless, use submit");
  if (!state->options.salt.empty()) refuse("salt", "it is the handle's, set when it is opened");
  if (state->options.adapter != 0) refuse("adapter", "it is the handle's, set when it is opened");
  if (state->options.keep_value != 0)
    refuse("keep_value", "it is the handle's, use set_keep_value");
  state->handle = handle;
  start(std::move(state), &h.seq, {});
}

void EngineCore::submit(std::vector<int32_t> token_ids, std::unique_ptr<RequestState> state) {
  const RequestOptions& o = state->options;
  Sequence own = kv_.make_sequence(o.adapter, o.salt, o.keep_value);
  own.tokens = std::move(token_ids);
  start(std::move(state), nullptr, std::move(own));
}

// Without `seq` the request owns its sequence.
void EngineCore::start(std::unique_ptr<RequestState> state, Sequence* seq, Sequence own) {
  state->prompt_tokens = (seq ? seq : &own)->length();
  state->arrival = ++arrivals_;
  try {
    check_fits(*state);
    const int64_t asked = state->params->max_new_tokens;
    state->limit = asked < 0 ? max_context_ : state->prompt_tokens + asked;
    if (state->options.kind == RequestKind::logits)
      state->request->logits.reserve(state->prompt_tokens * model_.vocab());
  } catch (const Error& e) {
    return table_.refuse(*state, e);
  } catch (const std::exception& e) {
    return table_.refuse(*state, Error(ErrorCode::internal, e.what()));
  }
  auto owned = std::make_unique<Run>();
  Run& run = *owned;
  run.own = std::move(own);
  run.seq = seq ? seq : &run.own;
  if (state->generates())
    run.sampler.emplace(state->params, 0, run.seq->tokens.data(), run.seq->length());
  state->runs.reserve(state->params->n);
  state->runs.push_back(std::move(owned));
  run.request = state.get();
  scheduler_.add(&run);
  try {
    RequestState& s = table_.add(std::move(state));
    if (s.handle) find(s.handle).request = &s;
  } catch (...) {
    scheduler_.remove(&run);
    throw;
  }
}

void EngineCore::check_fits(const RequestState& state) const {
  const int64_t prompt = state.prompt_tokens;
  const int64_t asked = state.generates() ? std::max<int64_t>(1, state.params->max_new_tokens) : 0;
  if (asked <= max_context_ - prompt) return;
  throw_error(ErrorCode::context_full, "a prompt of ", prompt, " tokens and ", asked,
              " new ones: expected at most ", max_context_,
              " together (the model's context, max_context_tokens and the page pool)");
}

void EngineCore::leave(Run& run) {
  scheduler_.remove(&run);
  kv_.abandon_write(*run.seq);
  if (run.request->handle) {
    const auto it = handles_.find(run.request->handle);
    it->second.request = nullptr;
    it->second.last_use = ++clock_;
  } else {
    kv_.drop_pages(*run.seq);
  }
}

bool EngineCore::park_idle() {
  Handle* least = nullptr;
  const auto worth = [](const Handle& h) { return std::make_pair(h.seq.keep_value, h.last_use); };
  for (auto& [id, h] : handles_)
    if (!h.request && kv_.holds_pages(h.seq) && (!least || worth(h) < worth(*least))) least = &h;
  if (least) kv_.drop_pages(least->seq);
  return least;
}

void EngineCore::step() {
  if (step_failed_) finish_failed_step("the machine's memory");
  table_.finish_cancelled();
  table_.publish();  // before the step: whoever cancelled does not wait for it
  if (table_.empty()) return;
  try {
    scheduler_.plan(plan_);
    runner_.run(plan_);
  } catch (const std::exception& e) {
    finish_failed_step(e.what());
  }
  table_.publish();
}

void EngineCore::finish_failed_step(const char* what) {
  step_failed_ = true;
  table_.finish_everything(FinishReason::error, ErrorCode::internal, what);
  step_failed_ = false;
}

void EngineCore::cancel_everything() {
  table_.finish_everything(FinishReason::cancelled, ErrorCode::internal, "");
  table_.publish();
}

Stats EngineCore::stats() {
  Stats s;
  s.pages_total = kv_.total();
  s.pages_free = kv_.free();
  s.pages_cached = kv_.cached();
  s.pages_referenced = s.pages_total - s.pages_free - s.pages_cached;
  s.tokens_prefilled = runner_.tokens_prefilled();
  s.tokens_decoded = runner_.tokens_decoded();
  s.tokens_reused = scheduler_.tokens_reused();
  s.steps = runner_.steps();
  s.preemptions = scheduler_.preemptions();
  s.rows = scheduler_.rows_in_use();
  s.waiting = scheduler_.waiting();
  s.handles = static_cast<int64_t>(handles_.size());
  s.max_context = max_context_;
  s.last_step_ms = runner_.last_step_ms();
  const Profiler& profiler = model_.context().profiler;
  for (size_t i = 0; i < profiler.stats.size(); ++i)
    if (profiler.stats[i].calls > 0)
      s.ops.emplace_back(op_name(static_cast<Op>(i)), profiler.stats[i]);
  return s;
}

void EngineCore::set_profiling(bool on) {
  Profiler& profiler = model_.context().profiler;
  if (on) profiler.reset();
  profiler.enabled = on;
}

void EngineCore::check_invariants() {
  std::vector<const Sequence*> sequences;
  for (const auto& [id, h] : handles_) sequences.push_back(&h.seq);
  table_.for_each_run([&](const Run& run) {
    if (run.seq == &run.own) sequences.push_back(run.seq);
  });
  kv_.check(sequences);
}

}  // namespace turbomind
