#include "engine/engine_core.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "cache/pool_sizes.h"
#include "core/error.h"
#include "engine/make_tiers.h"
#include "engine/page_memory_of.h"

namespace turbomind {

namespace {

constexpr int64_t kRecordSteps = 256;  // steps between two records of the measured speeds

// Memory in bytes of each GPU, reserved for CUDA graphs, cuBLASLt workspaces and lazily loaded
// kernels.
constexpr int64_t kGpuReserve = 256 << 20;

int64_t page_bytes(const Model& model) {
  int64_t bytes = 0;
  for (const CacheGroup& group : model.groups()) bytes += static_cast<int64_t>(group.page_bytes);
  return bytes;
}

constexpr double kWarmUpSeconds = 5;  // about the most that a warm-up takes

int64_t prefill_chunk_of(const EngineOptions& options) {
  return options.prefill_chunk > 0 ? options.prefill_chunk : kDefaultPrefillChunk;
}

// Returns the limits of all steps that the scheduler plans and the core measures.
StepLimits step_limits(const EngineOptions& options, const Model& model) {
  StepLimits most;
  most.rows = options.max_batch_size;
  most.keys = model.max_context();
  if (options.max_context_tokens > 0) most.keys = std::min(most.keys, options.max_context_tokens);
  most.tokens = std::min(prefill_chunk_of(options), most.rows * most.keys) + most.rows;
  most.tokens = std::max<int64_t>(most.tokens, kPageTokens);
  most.samples = std::min(most.tokens, kMostLogitRows + most.rows);
  most.sampled = most_samples(most.rows);
  return most;
}

void reserve_steps(const EngineOptions& options, Model& model) {
  const StepLimits most = step_limits(options, model);
  try {
    model.reserve(most);
  } catch (const Error& e) {
    throw_error(ErrorCode::invalid_request, "prefill_chunk, max_batch_size: steps of ", most.tokens,
                " tokens of ", most.rows, " sequences do not fit the device's memory: ", e.what());
  }
}

// Returns the number of pages of each group. Steps reserve their memory first; pages get of the
// rest.
std::vector<int64_t> pool_pages(const EngineOptions& options, Model& model) {
  reserve_steps(options, model);
  const int64_t each = page_bytes(model), free = model.free_bytes();
  const auto ranks = static_cast<int64_t>(model.memory().ranks.size());
  const bool shares = options.cache_share > 0;
  PoolDemand demand;
  demand.pages = options.cache_pages;
  demand.rows = options.max_batch_size;
  demand.chunk = prefill_chunk_of(options);
  demand.bytes = options.cache_bytes;
  if (shares) {
    demand.bytes = static_cast<int64_t>(options.cache_share * static_cast<double>(free));
    if (model.context().gpu)
      demand.bytes = std::min(demand.bytes, std::max<int64_t>(free - kGpuReserve * ranks, 0));
  }
  if (options.cache_pages == 0 && (each <= 0 || demand.bytes < each))
    throw_error(
        ErrorCode::invalid_request, "cache_memory: got ", demand.bytes, " bytes",
        shares ? " (a share of the device's free memory, 256 MiB of which are reserved)" : "",
        ", expected at least one page of ", each, " bytes");
  const std::vector<int64_t> pages = pool_sizes(model.groups(), demand);
  int64_t bytes = 0;
  for (size_t g = 0; g < pages.size(); ++g)
    bytes += pages[g] * static_cast<int64_t>(model.groups()[g].page_bytes);
  if (model.context().gpu && bytes > free)
    throw_error(ErrorCode::invalid_request,
                options.cache_pages > 0 ? "cache_pages: got pages of " : "cache_memory: got ",
                bytes, " bytes, expected at most ", free, " bytes, the device's free memory");
  return pages;
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
  require(o.cache_share >= 0 && o.cache_share <= 1, "cache_memory", o.cache_share,
          "a share of 0 to 1");
  require(o.cache_pages >= 0, "cache_pages", o.cache_pages, "0 (from cache_memory) or more");
  require(o.prefill_chunk >= 0, "prefill_chunk", o.prefill_chunk, "0 (the default) or more");
  require(std::isfinite(o.step_ms) && o.step_ms > 0, "step_ms", o.step_ms, "a number above 0");
  return o;
}

int64_t context_limit(const EngineOptions& options, const Model& model, const KvCache& kv) {
  const int64_t limit = std::min<int64_t>(model.max_context(), kv.max_context());
  return options.max_context_tokens > 0 ? std::min(limit, options.max_context_tokens) : limit;
}

void add_memory(const ModelMemory& memory, const KvCache& kv, Stats& s) {
  s.weight_bytes = static_cast<int64_t>(memory.weights());
  for (const RankMemory& rank : memory.ranks) {
    RankStats& own = s.ranks.emplace_back();
    own.weight_bytes = static_cast<int64_t>(rank.weights);
    for (size_t g = 0; g < rank.page_bytes.size(); ++g)
      own.cache_bytes +=
          static_cast<int64_t>(rank.page_bytes[g]) * kv.pool(static_cast<int>(g)).total();
  }
}

OpTable op_table(const OpStats& stats) {
  OpTable table;
  for (size_t i = 0; i < stats.size(); ++i)
    if (stats[i].calls > 0) table.emplace_back(op_name(static_cast<Op>(i)), stats[i]);
  return table;
}

void add_ops(const std::vector<Context*>& contexts, Stats& s) {
  std::vector<OpStats> ranks;
  for (size_t r = 0; r < contexts.size(); ++r) {
    contexts[r]->profiler.collect();
    ranks.push_back(contexts[r]->profiler.stats);
    s.ranks[r].ops = op_table(ranks[r]);
  }
  s.ops = op_table(join_stats(ranks));
}

}  // namespace

EngineCore::EngineCore(const EngineOptions& options, Model& model, const std::atomic<bool>& stop,
                       SharedTiers tiers, std::function<void()> wake)
    : model_(model),
      kv_(page_memory_of(model), pool_pages(checked(options), model), options.prefix_reuse),
      max_context_(context_limit(options, model, kv_)),
      speed_records_(options.page_folder, model),
      tiers_(tiers->empty() ? nullptr
                            : std::make_unique<Tiers>(kv_, model, tiers,
                                                      first_speeds(options, model, tiers->size(),
                                                                   speed_records_.read()),
                                                      std::move(wake))),
      scheduler_(
          kv_, options, [this] { return park_idle(); }, tiers_.get(), model.outputs() != nullptr),
      table_([this](SequenceState& sequence) { leave(sequence); }),
      runner_(model, kv_, scheduler_, table_, stop) {
  if (options.warm_up) {
    StepLimits most = step_limits(options, model);
    most.keys = max_context_;
    warmed_up_ = model.warm_up(most, kWarmUpSeconds);
  }
  if (tiers_) tiers_->prepare_memory(model_);
  if (tiers_ || options.warm_up) begin_speeds(speed_records_.read());
}

EngineCore::Handle& EngineCore::find(HandleId handle) {
  const auto it = handles_.find(handle);
  if (it == handles_.end())
    throw_error(ErrorCode::not_found, "no handle ", handle, ": closed or never opened");
  Handle& h = it->second;
  h.last_use = ++clock_;
  if (h.idle.listed()) list_idle(handle, h);
  return h;
}

EngineCore::Handle& EngineCore::find_idle(HandleId handle, const char* verb) {
  Handle& h = find(handle);
  if (h.request)
    throw_error(ErrorCode::busy, "cannot ", verb, " handle ", handle, ": it is generating");
  return h;
}

void EngineCore::open(HandleId handle, const HandleOptions& options) {
  Sequence seq = kv_.make_sequence(options.adapter, options.salt, options.retention_priority);
  seq.persist = options.persist;
  Handle& h = handles_[handle];
  h.seq = std::move(seq);
  h.last_use = ++clock_;
  try {
    idle_.add(h.idle, handle, options.retention_priority, h.last_use);
  } catch (...) {
    handles_.erase(handle);
    throw;
  }
}

void EngineCore::append(HandleId handle, const std::vector<int32_t>& token_ids) {
  auto& tokens = find_idle(handle, "append to").seq.tokens;
  tokens.insert(tokens.end(), token_ids.begin(), token_ids.end());
}

void EngineCore::truncate(HandleId handle, int64_t length) {
  Handle& h = find_idle(handle, "truncate");
  Sequence& seq = h.seq;
  if (length < 0 || length > seq.length())
    throw_error(ErrorCode::invalid_request, "length: got ", length, ", expected 0 to ",
                seq.length(), " (the handle's length)");
  kv_.truncate(seq, length);
  h.answered = std::min(h.answered, length);
}

void EngineCore::fork(HandleId handle, HandleId copy, std::optional<float> retention_priority) {
  const Handle& original = find(handle);
  const Sequence& seq = original.seq;
  Handle& made = handles_.try_emplace(copy).first->second;
  made.answered = original.answered;
  made.last_use = ++clock_;
  const float priority = retention_priority.value_or(seq.retention_priority);
  try {
    idle_.add(made.idle, copy, priority, made.last_use);
    made.seq = kv_.fork(seq);
  } catch (...) {
    idle_.unlist(made.idle);
    handles_.erase(copy);
    throw;
  }
  made.seq.retention_priority = priority;
}

void EngineCore::park(HandleId handle) {
  Sequence& seq = find_idle(handle, "park").seq;
  if (tiers_) tiers_->cancel(seq);
  kv_.drop_pages(seq);
}

void EngineCore::set_retention_priority(HandleId handle, float retention_priority) {
  Handle& h = find(handle);
  set_priority(h.seq, retention_priority);
  if (h.idle.listed()) list_idle(handle, h);
}

// Sets the retention priority, also of the sequence's pages in lower tiers.
void EngineCore::set_priority(Sequence& seq, float retention_priority) noexcept {
  if (std::exchange(seq.retention_priority, retention_priority) == retention_priority) return;
  if (tiers_ && seq.persist) try {
      tiers_->touch(seq);
    } catch (const std::exception&) {  // out of memory: the tiers have the old priority
    }
}

void EngineCore::close(HandleId handle, bool save) {
  const auto it = handles_.find(handle);
  if (it == handles_.end()) return;
  Handle& h = it->second;
  if (h.request) table_.finish_all(*h.request, FinishReason::cancelled);
  table_.publish();
  if (tiers_ && save && h.seq.persist) tiers_->save(h.seq);
  if (tiers_) tiers_->cancel(h.seq);
  kv_.drop_pages(h.seq);
  idle_.unlist(h.idle);
  handles_.erase(it);
}

void EngineCore::generate(HandleId handle, std::unique_ptr<RequestState> state) {
  Handle& h = find_idle(handle, "generate on");
  Sequence& seq = h.seq;
  if (seq.length() == 0)
    throw_error(ErrorCode::invalid_request, "handle ", handle, ": got no tokens, expected some");
  state->handle = handle;
  state->prompt_tokens = seq.length();
  const bool fine = accepted(*state, [&] {
    check_prompt(*state);
    reserve_logits(*state);
  });
  if (!fine) return;
  begin_turn(seq, h.answered, *state);
  start(std::move(state), &seq, {});
}

void EngineCore::advance(HandleId handle, int64_t prefix_length, const std::vector<int32_t>& append,
                         std::optional<float> retention_priority,
                         std::unique_ptr<RequestState> state) {
  Sequence* seq = nullptr;
  const bool fine = accepted(*state, [&] {
    seq = &find_idle(handle, "advance").seq;
    if (prefix_length > seq->length())
      throw_error(ErrorCode::invalid_request, "prefix_length: got ", prefix_length,
                  ", expected 0 to ", seq->length(), " (the handle's length)");
    state->prompt_tokens = prefix_length + static_cast<int64_t>(append.size());
    check_prompt(*state);
  });
  if (!fine) return;
  auto& tokens = seq->tokens;
  const std::vector<int32_t> dropped(tokens.begin() + prefix_length, tokens.end());
  // Reserves room for either ending, so that undoing needs no memory; doubled, as push_back does.
  const size_t most = std::max<size_t>(tokens.size(), state->prompt_tokens);
  if (most > tokens.capacity()) tokens.reserve(std::max(most, 2 * tokens.size()));
  const auto end_with = [&](const std::vector<int32_t>& end) {
    kv_.truncate(*seq, prefix_length);
    tokens.insert(tokens.end(), end.begin(), end.end());
  };
  end_with(append);
  begin_turn(*seq, prefix_length, *state);
  state->handle = handle;
  try {
    start(std::move(state), seq, {});
  } catch (...) {
    end_with(dropped);
    throw;
  }
  if (retention_priority) set_priority(*seq, *retention_priority);
}

// Records where the request's turn and its reply begin. The sequence had the first `prefix` tokens
// of the prompt before. A prompt that changes within the last one is another version of that turn:
// an edited question, a retry, a reply that is continued.
void EngineCore::begin_turn(Sequence& seq, int64_t prefix, const RequestState& state) {
  LastTurn& turn = seq.last_turn;
  const int64_t reply = state.prompt_tokens - state.params->continued;
  const int64_t begin = std::min(prefix, reply);
  if (begin < turn.begin || begin > turn.reply) turn.begin = begin;
  turn.reply = reply;
}

void EngineCore::submit(std::vector<int32_t> token_ids, std::unique_ptr<RequestState> state) {
  const RequestOptions& o = state->options;
  Sequence own = kv_.make_sequence(o.adapter, o.salt, o.retention_priority);
  own.tokens = std::move(token_ids);
  state->prompt_tokens = own.length();
  const bool fine = accepted(*state, [&] {
    check_prompt(*state);
    reserve_logits(*state);
  });
  if (fine) start(std::move(state), nullptr, std::move(own));
}

// Returns false when `checks` threw; the request has then got its terminal event.
template <typename F>
bool EngineCore::accepted(const RequestState& state, F&& checks) {
  try {
    checks();
    return true;
  } catch (const Error& e) {
    table_.refuse(state, e);
  } catch (const std::exception& e) {
    table_.refuse(state, Error(ErrorCode::internal, e.what()));
  }
  return false;
}

// Begins a request on the handle's sequence `seq`, or if that is null on `own`.
void EngineCore::start(std::unique_ptr<RequestState> state, Sequence* seq, Sequence own) {
  state->arrival = ++arrivals_;
  const int64_t asked = state->params->max_new_tokens;
  state->limit = asked < 0 ? max_context_ : state->prompt_tokens + asked;
  auto owned = std::make_unique<SequenceState>();
  SequenceState& sequence = *owned;
  sequence.own_kv = std::move(own);
  sequence.kv = seq ? seq : &sequence.own_kv;
  if (state->generates())
    sequence.sampler.emplace(state->params, 0, sequence.kv->tokens.data(), sequence.kv->length());
  state->sequences.reserve(state->params->n);
  state->sequences.push_back(std::move(owned));
  sequence.request = state.get();
  scheduler_.add(&sequence);
  try {
    RequestState& s = table_.add(std::move(state));
    if (s.handle) {
      Handle& h = find(s.handle);
      h.request = &s;
      idle_.unlist(h.idle);
    }
  } catch (...) {
    scheduler_.remove(&sequence);
    throw;
  }
}

void EngineCore::check_prompt(const RequestState& state) const {
  const int64_t prompt = state.prompt_tokens;
  if (prompt == 0)
    throw_error(ErrorCode::invalid_request, "the prompt: got no tokens, expected some");
  if (state.params->continued > prompt)
    throw_error(ErrorCode::invalid_request, "continued: got ", state.params->continued,
                ", expected 0 to ", prompt, " (the length of the prompt)");
  const int64_t asked = state.generates() ? std::max<int64_t>(1, state.params->max_new_tokens) : 0;
  if (asked <= max_context_ - prompt) return;
  throw_error(ErrorCode::context_full, "a prompt of ", prompt, " tokens and ", asked,
              " new ones, expected at most ", max_context_,
              " together: this model's maximum context length is ", max_context_,
              " tokens (the model's context, max_context_tokens and the page pool)");
}

void EngineCore::reserve_logits(RequestState& state) const {
  if (state.options.kind != RequestKind::logits) return;
  const int64_t first = state.options.first_row;
  if (first >= state.prompt_tokens)
    throw_error(ErrorCode::invalid_request, "first_row: got ", first, ", expected less than ",
                state.prompt_tokens, " (the length of the prompt)");
  state.request->logits.reserve((state.prompt_tokens - first) * model_.vocab());
  state.delivered = first;
}

void EngineCore::leave(SequenceState& sequence) {
  scheduler_.remove(&sequence);
  runner_.leave(sequence);
  if (tiers_) tiers_->cancel(*sequence.kv);
  kv_.abandon_write(*sequence.kv);
  if (sequence.request->handle) {
    const auto it = handles_.find(sequence.request->handle);
    it->second.request = nullptr;
    it->second.answered = sequence.kv->length();
    it->second.last_use = ++clock_;
    list_idle(it->first, it->second);
  } else {
    kv_.drop_pages(*sequence.kv);
  }
}

void EngineCore::list_idle(HandleId id, Handle& handle) noexcept {
  idle_.list(handle.idle, id, handle.seq.retention_priority, handle.last_use);
}

bool EngineCore::park_idle() {
  for (auto next = idle_.begin(); next != idle_.end();) {
    Handle& h = handles_.at(IdleHandles::handle_of(*next++));
    const bool holds = kv_.holds_pages(h.seq);
    // Pages that are being loaded make it hold some later.
    if (holds || !tiers_ || !tiers_->fetching(h.seq)) idle_.unlist(h.idle);
    if (!holds) continue;
    kv_.drop_pages(h.seq);
    return true;
  }
  return false;
}

// Returns whether there is a request to run a step for.
bool EngineCore::begin_step() {
  if (step_failed_) finish_failed_step("the machine is out of memory");
  table_.finish_cancelled();
  table_.publish();  // before the step: a cancel does not wait for it
  table_.for_each_changed_priority([this](RequestState& r) { scheduler_.reprioritize(r); });
  collect();
  return !table_.empty();
}

// Puts a step in flight, unless one is or no sequence can take part in one.
void EngineCore::run_step() {
  if (runner_.in_flight() > 0) return;
  scheduler_.plan(plan_);
  stalled_ = plan_.sequences.empty();
  if (!stalled_) runner_.submit(plan_);
}

// Plans and submits the next step while the device computes the one in flight.
void EngineCore::run_overlapped() {
  const StepPlan* before = runner_.to_follow();
  if (before && scheduler_.plan_next(*before, plan_)) runner_.submit(plan_);
}

void EngineCore::end_step() {
  if (runner_.in_flight() == 0) return;
  const StepPlan& plan = runner_.collect();
  if (tiers_) try {
      if (++unrecorded_steps_ >= kRecordSteps) record_speeds();
      for (const PlannedSequence& planned : plan.sequences)
        if (planned.sequence) tiers_->save_sealed(*planned.sequence->kv);
    } catch (const std::exception&) {  // out of memory: what is not posted is posted later
    }
}

void EngineCore::settle() {
  if (step_failed_) finish_failed_step("the machine is out of memory");
  if (runner_.in_flight() == 0) return;
  guarded([this] {
    while (runner_.in_flight() > 0) end_step();
  });
  table_.publish();
}

// Exchanges results and requests with the lower tiers. It takes no page: steps in flight may refer
// to pages that were released after their submission.
void EngineCore::collect() {
  if (tiers_ && !kv_.discarded().empty()) tiers_->remove(kv_.discarded());
  kv_.discarded().clear();
  if (tiers_) tiers_->collect();
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
  for (size_t g = 0; g < kv_.groups(); ++g) {
    const CacheGroup& group = kv_.group(static_cast<int>(g));
    const PagePool& pool = kv_.pool(static_cast<int>(g));
    const auto bytes = static_cast<int64_t>(group.page_bytes);
    s.groups.push_back(
        {group.window, bytes, pool.total(), pool.free(), pool.cached(), pool.out_of_reach()});
    s.cache_bytes += bytes * pool.total();
  }
  add_memory(model_.memory(), kv_, s);
  s.pages_free = kv_.free();
  s.pages_cached = kv_.cached();
  s.pages_referenced = s.pages_total - s.pages_free - s.pages_cached;
  s.tokens_prefilled = runner_.tokens_prefilled();
  s.tokens_decoded = runner_.tokens_decoded();
  s.tokens_reused = scheduler_.tokens_reused();
  s.steps = runner_.steps();
  s.steps_overlapped = runner_.steps_overlapped();
  s.tokens_loaded = scheduler_.tokens_loaded();
  s.preemptions = scheduler_.preemptions();
  s.tokens_missed = scheduler_.prompt_tokens() - scheduler_.tokens_reused();
  s.tokens_recomputed = runner_.tokens_recomputed();
  s.requests_started = scheduler_.requests_started();
  s.queue_seconds = scheduler_.queue_seconds();
  s.prefixes_awaited = scheduler_.prefixes_awaited();
  s.slots = scheduler_.slots_in_use();
  s.waiting = scheduler_.waiting();
  s.handles = static_cast<int64_t>(handles_.size());
  s.max_context = max_context_;
  s.last_step_ms = runner_.last_step_ms();
  if (tiers_) {
    s.tiers = tiers_->stats();
    s.pages_loaded = tiers_->pages_loaded();
    s.pages_saved = tiers_->pages_saved();
    s.failed_loads = tiers_->failed_loads();
    s.failed_saves = tiers_->failed_saves();
  }
  add_ops(model_.contexts(), s);
  return s;
}

void EngineCore::set_profiling(bool on) {
  for (Context* context : model_.contexts()) {
    if (on) context->profiler.reset();
    context->profiler.enabled = on;
  }
}

void EngineCore::check_invariants() {
  std::vector<const Sequence*> sequences;
  for (const auto& [id, h] : handles_) {
    sequences.push_back(&h.seq);
    if (!h.request && kv_.holds_pages(h.seq) && !h.idle.listed())
      throw_error(ErrorCode::internal, "handle ", id, " is idle, holds pages and is not listed");
  }
  table_.for_each_sequence([&](const SequenceState& sequence) {
    if (sequence.kv == &sequence.own_kv) sequences.push_back(sequence.kv);
  });
  kv_.check(sequences, tiers_ ? tiers_->held() : std::vector<HeldPage>{});
}

}  // namespace turbomind
