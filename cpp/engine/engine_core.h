// Scheduler and cache state of the engine, and what can be done to it. Used by one thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "cache/kv_cache.h"
#include "engine/engine.h"
#include "engine/request_table.h"
#include "engine/step/scheduler.h"
#include "engine/step/step_runner.h"
#include "tiers/tiers.h"

namespace turbomind {

class EngineCore {
 public:
  // Throws Error(invalid_request) naming an option out of range. `tiers` may be none; `wake` is
  // called, on another thread, when one of them has news for step().
  EngineCore(const EngineOptions& options, Model& model, const std::atomic<bool>& stop,
             SharedTiers tiers, std::function<void()> wake);

  // Ids are the caller's, each used once.
  void open(HandleId handle, const HandleOptions& options);
  void append(HandleId handle, const std::vector<int32_t>& token_ids);
  int64_t length(HandleId handle) { return find(handle).seq.length(); }
  std::vector<int32_t> token_ids(HandleId handle) { return find(handle).seq.tokens; }
  void truncate(HandleId handle, int64_t length);
  void fork(HandleId handle, HandleId copy, std::optional<float> retention_priority);
  void park(HandleId handle);
  void set_retention_priority(HandleId handle, float retention_priority);
  // One that is not there is closed; can be called again if it throws.
  void close(HandleId handle, bool save);

  // Of the tiers below the device; without any these do nothing, or find nothing.
  void save(HandleId handle);
  void warm(HandleId handle);
  void flush(std::shared_ptr<Flush> flush);
  void remove_pages(const std::vector<BlockHash>& keys);
  Residence residence(const std::vector<int32_t>& token_ids, int adapter, const std::string& salt);
  double predict_ttft(const std::vector<int32_t>& token_ids, int64_t added, int adapter,
                      const std::string& salt);
  Speeds speeds() const;
  // The end: every handle that persists is saved, for at most `seconds`.
  LastSaves finish_saves(double seconds) noexcept;

  // `state` carries the request, its parameters and options. Where these throw, for lack of memory
  // (generate also not_found, busy and for a handle without tokens), the request has had no event.
  void generate(HandleId handle, std::unique_ptr<RequestState> state);
  void advance(HandleId handle, int64_t keep, const std::vector<int32_t>& append,
               std::optional<float> retention_priority, std::unique_ptr<RequestState> state);
  void submit(std::vector<int32_t> token_ids, std::unique_ptr<RequestState> state);

  const WarmUp& warmed_up() const { return warmed_up_; }  // any thread
  Stats stats();
  void evict() { kv_.evict_all(); }
  void set_profiling(bool on);
  void check_invariants();

  bool idle() const { return table_.empty() && table_.published(); }
  // Not idle, but every request waits for a lower tier.
  bool stalled() const { return !idle() && table_.published() && stalled_; }
  // One step, if there is anything to do, and the events of what happened since the last one. Where
  // the model is asynchronous the step behind it may be left in flight, unless `news()`.
  // Throws when memory ends where nothing can be given up; the next call takes up what is left to
  // do.
  template <typename News>
  void step(News&& news);
  // Ends what is in flight. Called before anything but step(): what steps in flight refer to is
  // changed by step() alone. Throws as step() does.
  void settle();
  // Every request gets its terminal event.
  void cancel_everything();

 private:
  struct Handle {
    Sequence seq;
    RequestState* request = nullptr;  // generating
    uint64_t last_use = 0;
  };

  Handle& find(HandleId handle);
  Handle& find_idle(HandleId handle, const char* verb);
  template <typename F>
  bool accepted(const RequestState& state, F&& checks);
  void check_prompt(const RequestState& state) const;
  void start(std::unique_ptr<RequestState> state, Sequence* seq, Sequence own);
  void leave(SequenceState& sequence);
  bool park_idle();
  bool begin_step();
  void run_step();
  void run_overlapped();
  void end_step();
  template <typename F>
  void guarded(F&& f);
  void collect();
  void value(Sequence& seq, float retention_priority) noexcept;
  void begin_speeds(const std::optional<SpeedRecord>& noted);
  double measured_step(int64_t tokens);
  void record_speeds();
  Sequence sequence_of(const std::vector<int32_t>& token_ids, int adapter,
                       const std::string& salt) const;
  int64_t held_of(const Sequence& seq) const;
  void finish_failed_step(const char* what);

  Model& model_;
  KvCache kv_;
  const int64_t max_context_;
  const SpeedRecords speed_records_;
  std::unique_ptr<Tiers> tiers_;
  Scheduler scheduler_;
  RequestTable table_;
  StepRunner runner_;
  WarmUp warmed_up_;  // before the first request
  std::map<HandleId, Handle> handles_;
  uint64_t arrivals_ = 0;
  uint64_t clock_ = 0;
  StepPlan plan_;
  int64_t unrecorded_steps_ = 0;
  bool stalled_ = false;      // no request could take part in the last step planned
  bool step_failed_ = false;  // and not every request has heard of it
};

template <typename News>
void EngineCore::step(News&& news) {
  if (!begin_step()) return;
  guarded([&] {
    run_step();
    if (!news()) run_overlapped();
    end_step();
  });
  table_.publish();
}

// Nothing is left in flight where `f` throws.
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
