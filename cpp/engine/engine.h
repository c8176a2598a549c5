// The engine: one thread that owns scheduler and cache state. Everyone else talks to it by
// messages.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine_options.h"
#include "engine/event.h"
#include "engine/handle.h"
#include "engine/request_options.h"
#include "engine/stats.h"
#include "model/model.h"
#include "sampling/sampling_params.h"
#include "tiers/tier_types.h"

namespace turbomind {

// All methods may be called from any thread; what is asked for takes effect in the order of the
// calls. Where nothing else is said they wait for the engine thread (at most one step) and throw
// Error: not_found, busy (the handle is generating), invalid_request, closed. Those that do not
// wait throw closed and, for what can be seen without the engine thread, invalid_request.
class Engine {
 public:
  // With the tiers below the device that the options ask for, or with those given, best first.
  Engine(const EngineOptions& options, std::unique_ptr<Model> model);
  Engine(const EngineOptions& options, std::unique_ptr<Model> model, TierPtrs tiers);
  // Cancels everything, delivers terminal events, saves what persists (within 20 seconds), joins. A
  // tier whose disk hangs is waited for 5 seconds more, then left behind with its threads.
  ~Engine();

  // Does not wait. If memory ends on the engine thread there is no such handle.
  HandleId open(const HandleOptions& options = {});
  void append(HandleId handle, std::vector<int32_t> token_ids);  // commits tokens, computes nothing
  int64_t length(HandleId handle);                               // committed tokens
  std::vector<int32_t> token_ids(HandleId handle);
  void truncate(HandleId handle,
                int64_t length);  // drops references; no page is computed or copied
  // A handle with the same committed tokens and, unless given, retention priority; also while it
  // generates.
  HandleId fork(HandleId handle, std::optional<float> retention_priority = {});
  // Does not wait. If it cannot be made there is no such handle.
  HandleId fork_later(HandleId handle, std::optional<float> retention_priority = {});
  void park(HandleId handle);  // gives up its pages; sealed ones stay cached
  void set_retention_priority(HandleId handle, float retention_priority);
  // Cancels a running request first; does not wait. `save`: as save() does, if it persists.
  void close(HandleId handle, bool save = false);

  // Does not wait. Copies all full pages that the lowest tier lacks, and the unfinished one, in the
  // background; nothing of a handle that does not persist.
  void save(HandleId handle);
  // Does not wait. Brings what lower tiers have of the handle's tokens up to the device, as far as
  // there is room and computing would not be faster. Not while it generates.
  void warm(HandleId handle);
  // Of what was posted for saving and removal up to now. Does not wait: the result does, and knows
  // what could not be saved.
  std::shared_ptr<Flush> flush();
  // Pages of the sequence `token_ids`, by tier; what it would take to go on with it.
  Residence residence(std::vector<int32_t> token_ids, const std::string& salt = "",
                      int adapter = 0);
  // Seconds to the first token of a turn of `added` tokens behind `token_ids`, if it ran now and
  // alone. 0 while nothing was computed or loaded yet.
  double predict_ttft(std::vector<int32_t> token_ids, int64_t added, const std::string& salt = "",
                      int adapter = 0);
  Speeds speeds();
  // block hashes of full pages, then of the unfinished one. Does not ask the engine thread.
  std::vector<BlockHash> page_keys(const std::vector<int32_t>& token_ids,
                                   const std::string& salt = "", int adapter = 0) const;
  // Cached pages of the device and those of every tier below; does not wait for these.
  void remove_pages(std::vector<BlockHash> keys);
  void refresh_pages();  // takes over what other processes did to shared tiers, in this thread

  // Generated tokens are committed to the handle. A request that can never be served gets its
  // terminal error event at once; bad parameters throw invalid_request. Salt, adapter and keep
  // value are the handle's: those of `options` keep their defaults.
  std::shared_ptr<Request> generate(HandleId handle, const SamplingParams& params,
                                    const RequestOptions& options = {},
                                    std::shared_ptr<Waker> waker = nullptr);
  // Does not wait. Truncates the handle to `keep` tokens, appends, sets its retention priority if
  // one is given, and generates: all of it, or nothing and a terminal error event (not_found, busy,
  // invalid_request for a `keep` beyond the length or `continued` beyond the prompt, context_full).
  std::shared_ptr<Request> advance(HandleId handle, int64_t keep, std::vector<int32_t> append,
                                   const SamplingParams& params, const RequestOptions& options = {},
                                   std::optional<float> retention_priority = {},
                                   std::shared_ptr<Waker> waker = nullptr);
  // A stateless request: a session that closes itself. Does not wait.
  // Score and logits requests use no parameter, compute every position, and finish with "stop".
  std::shared_ptr<Request> submit(std::vector<int32_t> token_ids, const SamplingParams& params,
                                  const RequestOptions& options = {},
                                  std::shared_ptr<Waker> waker = nullptr);

  Stats stats();
  void evict();                 // drops all cached pages
  void set_profiling(bool on);  // on: also clears the table
  void check_invariants();      // throws Error(internal); tests call it when idle
  LastSaves shutdown();         // as the destructor; later calls throw closed, but for this one

  const Model& model() const;
  std::optional<std::string> library_note() const;  // the GpuContext's; none on the CPU
  const WarmUp& warmed_up() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace turbomind
