// The engine: one thread that owns the scheduler and the KV cache, driven by messages. Requests are
// served by continuous batching with chunked prefill and prefix caching (docs: ARCHITECTURE.md).
//
// This header is all that callers outside cpp/engine need. Ids, options, events and statistics are
// in handle.h, engine_options.h, request_options.h, event.h and stats.h.
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

// A sequence that Engine::forecasts() is asked about.
struct ForecastQuery {
  std::vector<int32_t> token_ids;
  std::string salt;
};

// Any thread may call any method. Calls take effect in their order. Unless a method is said not to
// wait, it waits for the engine thread (at most one step) and throws Error(not_found) for an
// unknown handle, Error(busy) for a handle that is generating, Error(invalid_request) or
// Error(closed). A method that does not wait throws Error(closed), and Error(invalid_request) for
// arguments that are wrong whatever the handle's state is.
class Engine {
 public:
  // Starts the engine with the lower tiers that `options` ask for, or with `tiers`, best first.
  // Throws Error(invalid_request) naming an option out of range, and what the tiers throw.
  Engine(const EngineOptions& options, std::unique_ptr<Model> model);
  Engine(const EngineOptions& options, std::unique_ptr<Model> model, TierPtrs tiers);
  // Cancels all requests, delivers their terminal events, saves the pages of handles that persist
  // (for at most 20 seconds) and joins. A tier whose disk does not respond is waited for 5 seconds
  // more; then its threads are detached.
  ~Engine();

  // Opens a handle without tokens and returns its id. Does not wait. When the engine thread is out
  // of memory the handle does not exist: later calls throw not_found.
  HandleId open(const HandleOptions& options = {});
  // Appends tokens to the handle; computes nothing.
  void append(HandleId handle, std::vector<int32_t> token_ids);
  // Returns the number of the handle's tokens, and the tokens themselves.
  int64_t length(HandleId handle);
  std::vector<int32_t> token_ids(HandleId handle);
  // Shortens the handle to `length` tokens. Drops references; no page is computed or copied.
  void truncate(HandleId handle, int64_t length);
  // Opens a handle with the same tokens and, unless given, the same retention priority, and returns
  // its id. Pages are shared (copy-on-write). Works while the handle generates.
  HandleId fork(HandleId handle, std::optional<float> retention_priority = {});
  // The same, without waiting. If the fork fails, the new handle does not exist.
  HandleId fork_later(HandleId handle, std::optional<float> retention_priority = {});
  // Releases the handle's pages. Full ones stay cached until they are evicted.
  void park(HandleId handle);
  // Sets the handle's retention priority: cached pages of low priority are evicted first.
  void set_retention_priority(HandleId handle, float retention_priority);
  // Closes the handle, after cancelling a request that generates with it. Does not wait. `save`:
  // saves its pages first, as save() does.
  void close(HandleId handle, bool save = false);

  // Copies all full pages that the lowest tier lacks, and the unfinished one, in the background.
  // Does nothing for a handle that does not persist. Does not wait.
  void save(HandleId handle);
  // Loads pages of the handle's tokens from lower tiers, as far as there is room and computing them
  // would not be faster. Does nothing while the handle generates. Does not wait.
  void warm(HandleId handle);
  // Returns a Flush that is finished when everything posted for saving and removal up to now has
  // been done; Flush::unsaved() lists what could not be saved.
  std::shared_ptr<Flush> flush();
  // Returns how many of the first tokens the device and each tier have pages of, including those
  // that open handles hold.
  Residence residence(std::vector<int32_t> token_ids, const std::string& salt = "",
                      int adapter = 0);
  // Returns the seconds to the first token of a turn that appends `added` (>= 1) tokens to
  // `token_ids`, if it ran now and alone.
  double predict_ttft(std::vector<int32_t> token_ids, int64_t added, const std::string& salt = "",
                      int adapter = 0);
  // Returns residence() and predict_ttft() of each sequence, in order. It waits for the engine
  // thread once, and again after every few milliseconds of work, between which steps run.
  std::vector<Forecast> forecasts(std::vector<ForecastQuery> queries, int64_t added,
                                  int adapter = 0);
  // Returns the measured speeds of tiers and prefill.
  Speeds speeds();
  // Returns the block hashes of the full pages of `token_ids`, then that of the unfinished one.
  // Does not involve the engine thread.
  std::vector<BlockHash> page_keys(const std::vector<int32_t>& token_ids,
                                   const std::string& salt = "", int adapter = 0) const;
  // Removes cached pages from the device, and in the background from every tier.
  void remove_pages(std::vector<BlockHash> keys);
  // Reads what other processes have done to shared tiers, on the calling thread.
  void refresh_pages();

  // Generates tokens and appends them to the handle. `waker`, if given, is posted the request's id
  // when it has events. Throws Error(invalid_request) for bad parameters, and for `options` that
  // are the handle's own (salt, adapter, retention priority). A request that can never be served
  // gets a terminal error event at once.
  std::shared_ptr<Request> generate(HandleId handle, const SamplingParams& params,
                                    const RequestOptions& options = {},
                                    std::shared_ptr<Waker> waker = nullptr);
  // Truncates the handle to `prefix_length` tokens, appends `append`, sets the retention priority
  // if one is given, and generates. Does not wait. Either all of it is done, or nothing and the
  // request gets a terminal error event: not_found, busy, invalid_request (a `prefix_length` beyond
  // the handle's length, `continued` beyond the prompt) or context_full.
  std::shared_ptr<Request> advance(HandleId handle, int64_t prefix_length,
                                   std::vector<int32_t> append, const SamplingParams& params,
                                   const RequestOptions& options = {},
                                   std::optional<float> retention_priority = {},
                                   std::shared_ptr<Waker> waker = nullptr);
  // Runs a stateless request: a handle that is closed when the request ends. Does not wait. Score
  // and logits requests use no sampling parameter, compute every position and finish with "stop".
  std::shared_ptr<Request> submit(std::vector<int32_t> token_ids, const SamplingParams& params,
                                  const RequestOptions& options = {},
                                  std::shared_ptr<Waker> waker = nullptr);

  Stats stats();
  // Evicts all cached pages of the device.
  void evict();
  // Switches the profiler of ops; switching it on clears its table.
  void set_profiling(bool on);
  // Throws Error(internal) unless reference counts of pages agree with their holders. For tests,
  // with no request running.
  void check_invariants();
  // Ends the engine as the destructor does and returns how the last saves ended. Later calls of
  // other methods throw closed; a later shutdown() returns the same.
  LastSaves shutdown();

  const Model& model() const;
  // Returns the note of GpuContext on libraries that were not loaded; none on the CPU.
  std::optional<std::string> library_note() const;
  // Returns how much of the warm-up was done when the engine was made.
  const WarmUp& warmed_up() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace turbomind
