// The state of an engine and the operations on it: handles, requests, scheduler, KV cache and
// tiers. Engine (engine.h) adds the thread and the messages.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "cache/kv_cache.h"
#include "engine/engine.h"
#include "engine/idle_handles.h"
#include "engine/request_table.h"
#include "engine/step/scheduler.h"
#include "engine/step/step_runner.h"
#include "tiers/tiers.h"

namespace turbomind {

// Used by the engine thread. Methods of Engine with the same name document arguments and errors.
class EngineCore {
 public:
  // `stop` ends steps early. `tiers` may be empty; `wake` is called on another thread when step()
  // has something to collect from them. Throws Error(invalid_request) naming an option out of
  // range.
  EngineCore(const EngineOptions& options, Model& model, const std::atomic<bool>& stop,
             SharedTiers tiers, std::function<void()> wake);

  // The caller chooses ids and uses each once.
  void open(HandleId handle, const HandleOptions& options);
  void append(HandleId handle, const std::vector<int32_t>& token_ids);
  int64_t length(HandleId handle) { return find(handle).seq.length(); }
  std::vector<int32_t> token_ids(HandleId handle) { return find(handle).seq.tokens; }
  void truncate(HandleId handle, int64_t length);
  void fork(HandleId handle, HandleId copy, std::optional<float> retention_priority);
  void park(HandleId handle);
  void set_retention_priority(HandleId handle, float retention_priority);
  // Ignores an unknown handle. Can be called again if it throws.
  void close(HandleId handle, bool save);

  // These use the lower tiers; without any they do nothing or find nothing.
  void save(HandleId handle);
  void warm(HandleId handle);
  void flush(std::shared_ptr<Flush> flush);
  void remove_pages(const std::vector<BlockHash>& keys);
  Residence residence(const std::vector<int32_t>& token_ids, int adapter, const std::string& salt);
  Forecast forecast(const std::vector<int32_t>& token_ids, int64_t added, int adapter,
                    const std::string& salt);
  Speeds speeds() const;
  // Saves every handle that persists, for at most `seconds`. No other call follows.
  LastSaves finish_saves(double seconds) noexcept;

  // `state` carries the request, its parameters and options. When these throw, the request has had
  // no event: they throw for lack of memory, and generate() also not_found, busy, and
  // invalid_request for a handle without tokens.
  void generate(HandleId handle, std::unique_ptr<RequestState> state);
  void advance(HandleId handle, int64_t prefix_length, const std::vector<int32_t>& append,
               std::optional<float> retention_priority, std::unique_ptr<RequestState> state);
  void submit(std::vector<int32_t> token_ids, std::unique_ptr<RequestState> state);

  const WarmUp& warmed_up() const { return warmed_up_; }  // any thread
  Stats stats();
  void evict() { kv_.evict_all(); }
  void set_profiling(bool on);
  void check_invariants();

  bool idle() const { return table_.empty() && table_.published(); }
  // Returns whether there are requests, all of which wait for a lower tier.
  bool stalled() const { return !idle() && table_.published() && stalled_; }
  // Runs one step, if there is any, and publishes the events since the last one. With an
  // asynchronous model the next step may be left in flight, unless `has_messages()`. May throw
  // std::bad_alloc; the next call continues.
  template <typename HasMessages>
  void step(HasMessages&& has_messages);
  // Waits for steps in flight and commits them. Called before any other method: only step() changes
  // what steps in flight refer to. Throws as step() does.
  void settle();
  // Finishes every request with a terminal event.
  void cancel_everything();

 private:
  struct Handle {
    Sequence seq;
    RequestState* request = nullptr;  // null: idle
    uint64_t last_use = 0;
    int64_t answered = 0;     // tokens when its last request ended, as far as they are still there
    IdleHandles::Entry idle;  // listed where it may hold pages and no request runs it
  };

  Handle& find(HandleId handle);
  Handle& find_idle(HandleId handle, const char* verb);
  template <typename F>
  bool accepted(const RequestState& state, F&& checks);
  void check_prompt(const RequestState& state) const;
  void reserve_logits(RequestState& state) const;
  void start(std::unique_ptr<RequestState> state, Sequence* seq, Sequence own);
  void leave(SequenceState& sequence);
  void list_idle(HandleId id, Handle& handle) noexcept;
  bool park_idle();
  bool begin_step();
  void run_step();
  void run_overlapped();
  void end_step();
  template <typename F>
  void guarded(F&& f);
  void collect();
  void set_priority(Sequence& seq, float retention_priority) noexcept;
  static void begin_turn(Sequence& seq, int64_t prefix, const RequestState& state);
  void begin_speeds(const std::optional<SpeedRecord>& recorded);
  bool begin_as_recorded(StepTime::Fit fit, int64_t tokens, double ms);
  void observe_step(int64_t tokens, double ms);
  double measured_step(int64_t tokens);
  void record_speeds();
  Sequence sequence_of(const std::vector<int32_t>& token_ids, int adapter,
                       const std::string& salt) const;
  int64_t longest_held(const Sequence& seq) const;
  void finish_failed_step(const char* what);

  Model& model_;
  KvCache kv_;
  const int64_t max_context_;
  const SpeedRecords speed_records_;
  std::unique_ptr<Tiers> tiers_;
  Scheduler scheduler_;
  RequestTable table_;
  StepRunner runner_;
  WarmUp warmed_up_;  // set by the constructor
  std::map<HandleId, Handle> handles_;
  IdleHandles idle_;
  uint64_t arrivals_ = 0;
  uint64_t clock_ = 0;
  StepPlan plan_;
  int64_t unrecorded_steps_ = 0;
  bool stalled_ = false;      // no sequence could take part in the last step planned
  bool step_failed_ = false;  // and some requests have not been finished
};

template <typename HasMessages>
void EngineCore::step(HasMessages&& has_messages) {
  if (!begin_step()) return;
  guarded([&] {
    run_step();
    if (!has_messages()) run_overlapped();
    end_step();
  });
  table_.publish();
}

// Calls `f`. When it throws, all steps in flight are dropped and all requests fail.
template <typename F>
void EngineCore::guarded(F&& f) {
  try {
    f();
  } catch (const std::exception& e) {
    runner_.abandon();
    finish_failed_step(e.what());
  }
}

}  // namespace turbomind
