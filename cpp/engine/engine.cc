#include "engine/engine.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "core/process.h"
#include "cuda/gpu_context.h"
#include "engine/engine_core.h"
#include "engine/make_tiers.h"
#include "tiers/tiers.h"

namespace turbomind {

namespace {

constexpr double kLastSaves = 20;  // seconds for saves when the engine ends
constexpr std::chrono::milliseconds kStalled(
    5);  // between checks for cancels while all requests wait
constexpr std::chrono::milliseconds kPiece(3);  // of a long call, between two steps
constexpr char kNoMemory[] = "out of memory";   // short: its std::string allocates nothing

Error closed_error() {
  return Error(ErrorCode::closed, "the engine has been shut down");
}

// Calls `f` until it has the memory it needs: a shortage must not make the engine thread skip work.
template <typename F>
void until_done(F&& f) {
  for (;;) {
    try {
      return f();
    } catch (const std::exception&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

// A call to the engine thread and the wait for its result. Errors are passed as code and text, so
// that no exception object is shared between threads.
template <typename R>
class Call {
 public:
  template <typename F>
  void run(F& f) {
    std::optional<R> result;
    ErrorCode code = ErrorCode::internal;
    std::string what;
    try {
      try {
        result.emplace(f());
      } catch (const Error& e) {
        code = e.code();
        what = e.what();
      } catch (const std::exception& e) {
        what = e.what();
      }
    } catch (const std::bad_alloc&) {
      what = kNoMemory;
    }
    finish(std::move(result), code, std::move(what));
  }
  void refuse() { finish(std::nullopt, ErrorCode::closed, {}); }
  R wait() {
    std::unique_lock lock(mutex_);
    ready_.wait(lock, [this] { return done_; });
    if (result_) return std::move(*result_);
    if (code_ == ErrorCode::closed) throw closed_error();
    throw Error(code_, what_);
  }

 private:
  void finish(std::optional<R> result, ErrorCode code, std::string what) noexcept {
    std::lock_guard lock(mutex_);
    result_ = std::move(result);
    code_ = code;
    what_ = std::move(what);
    done_ = true;
    ready_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable ready_;
  bool done_ = false;
  std::optional<R> result_;
  ErrorCode code_ = ErrorCode::internal;
  std::string what_;
};

void check_tokens(const std::vector<int32_t>& token_ids, int vocab) {
  for (size_t i = 0; i < token_ids.size(); ++i)
    if (token_ids[i] < 0 || token_ids[i] >= vocab)
      throw_error(ErrorCode::invalid_request, "token_ids[", i, "]: got token id ", token_ids[i],
                  ", expected 0 to ", vocab - 1);
}

void check_retention_priority(float retention_priority) {
  if (!std::isfinite(retention_priority))
    throw_error(ErrorCode::invalid_request, "retention_priority: got ", retention_priority,
                ", expected a finite number");
}

void check_adapter(int adapter) {
  if (adapter != 0)
    throw_error(ErrorCode::invalid_request, "adapter: got ", adapter,
                ", expected 0: the model has no adapters");
}

void check_options(const RequestOptions& o, const SamplingParams& params) {
  check_adapter(o.adapter);
  check_retention_priority(o.retention_priority);
  if (o.kind != RequestKind::generate && params.n != 1)
    throw_error(ErrorCode::invalid_request, "n: got ", params.n,
                ", expected 1 for score and logits requests");
  if (o.first_row < 0 || (o.first_row > 0 && o.kind != RequestKind::logits))
    throw_error(ErrorCode::invalid_request, "first_row: got ", o.first_row,
                ", expected 0, or more for a logits request");
}

void check_for_handle(const RequestOptions& o, const SamplingParams& params) {
  const auto refuse = [](const char* name, const char* why) {
    throw_error(ErrorCode::invalid_request, name, " of a request on a handle: ", why);
  };
  if (o.kind == RequestKind::score) refuse("kind", "score requests are stateless, use submit()");
  if (params.n != 1) refuse("n", "requests of several choices are stateless, use submit()");
  if (!o.salt.empty()) refuse("salt", "set it when the handle is opened");
  if (o.adapter != 0) refuse("adapter", "set it when the handle is opened");
  if (o.retention_priority != 0)
    refuse("retention_priority", "use set_retention_priority() on the handle");
}

}  // namespace

class Engine::Impl {
 public:
  Impl(const EngineOptions& options, std::unique_ptr<Model> model, SharedTiers tiers)
      : model_(std::move(model)),
        has_tiers_(!tiers->empty()),
        tiers_(tiers),
        core_(options, *model_, stop_, std::move(tiers), [this] { moved(); }),
        thread_(start_thread([this] { loop(); })) {}

  ~Impl() { shutdown(); }

  // Returns whether this is a forked child, which has none of the engine's threads. Its locks may
  // be held by them for ever.
  bool is_in_child() const { return getpid() != process_; }

  // Runs f on the engine thread, between two steps, and returns what it returns.
  template <typename F>
  auto call(F&& f) {
    using Result = std::invoke_result_t<F&>;
    if constexpr (std::is_void_v<Result>) {
      call([&f] {
        f();
        return true;
      });
    } else {
      auto pending = std::make_shared<Call<Result>>();
      post([pending, &f](bool closed) {
        if (closed) {
          pending->refuse();
        } else {
          pending->run(f);
        }
      });
      return pending->wait();
    }
  }

  // Runs `message` on the engine thread, with closed = true when the engine is ending.
  void post(std::function<void(bool closed)> message) {
    if (is_in_child()) throw closed_error();
    {
      std::lock_guard lock(mutex_);
      if (stop_.load(std::memory_order_relaxed)) throw closed_error();
      inbox_.push_back(std::move(message));
    }
    changed_.notify_one();
  }

  std::unique_ptr<RequestState> make_state(const SamplingParams& params,
                                           const RequestOptions& options,
                                           std::shared_ptr<Waker> waker) {
    validate(params, model_->vocab());
    check_options(options, params);
    auto state = std::make_unique<RequestState>();
    state->request = std::make_shared<Request>(++last_request_, std::move(waker), options.priority);
    state->params = std::make_shared<const SamplingParams>(params);
    state->options = options;
    return state;
  }

  // Calls `start` with the state on the engine thread; does not wait. If it throws, for lack of
  // memory, the request ends with an error.
  template <typename F>
  std::shared_ptr<Request> post_request(std::unique_ptr<RequestState> state, F start) {
    struct Parcel {
      F start;
      std::unique_ptr<RequestState> state;
      std::vector<Event> failure;  // made here, for when the engine thread has no memory
    };
    auto request = state->request;
    std::vector<Event> failure(state->params->n);
    for (size_t choice = 0; choice < failure.size(); ++choice) {
      failure[choice].choice = static_cast<int>(choice);
      failure[choice].finish = FinishReason::error;
      failure[choice].error = kNoMemory;
    }
    failure.back().terminal = true;
    auto parcel =
        std::make_shared<Parcel>(Parcel{std::move(start), std::move(state), std::move(failure)});
    post([parcel, request](bool) {  // also when closed: cancel_everything() follows
      try {
        parcel->start(std::move(parcel->state));
      } catch (const std::exception&) {  // nothing else throws there
        until_done([&] { request->publish(std::move(parcel->failure)); });
      }
    });
    return request;
  }

  // Calls `make` with a new id on the engine thread; does not wait. If it throws, the handle does
  // not exist.
  template <typename F>
  HandleId post_handle(F make) {
    const HandleId id = ++last_handle_;
    post([id, make = std::move(make)](bool closed) {
      if (closed) return;
      try {
        make(id);
      } catch (const std::exception&) {  // calls on the handle throw not_found
      }
    });
    return id;
  }

  // Calls `f` on the engine thread; does not wait. Ignores an unknown handle and lack of memory.
  template <typename F>
  void post_try(F f) {
    post([this, f](bool closed) {
      if (closed) return;
      try {
        f(core_);
      } catch (const std::exception&) {
      }
    });
  }

  HandleId next_handle() { return ++last_handle_; }

  // Lets close() cancel a request that generates with a handle, without the engine thread.
  void note_request(HandleId handle, const std::shared_ptr<Request>& request) {
    if (is_in_child()) throw closed_error();
    std::lock_guard lock(mutex_);
    auto& requests = generating_[handle];
    std::erase_if(requests, [](const auto& known) { return known.expired(); });
    requests.push_back(request);
  }

  // The step in flight is abandoned, as by Request::cancel().
  void close(HandleId handle, bool save) {
    if (is_in_child()) throw closed_error();
    {
      std::lock_guard lock(mutex_);
      const auto known = generating_.extract(handle);
      if (known)
        for (const auto& request : known.mapped())
          if (const auto open = request.lock()) open->cancel();
    }
    post([this, handle, save](bool closed) {
      if (!closed) until_done([&] { core_.close(handle, save); });
    });
  }

  void refresh_tiers() {
    if (is_in_child()) throw closed_error();
    if (const SharedTiers tiers = tiers_.lock())
      for (const auto& tier : *tiers) tier->refresh();
  }

  LastSaves shutdown() {
    if (is_in_child()) return {};
    {
      std::lock_guard lock(mutex_);
      stop_.store(true, std::memory_order_relaxed);
    }
    changed_.notify_one();
    std::lock_guard lock(join_mutex_);
    if (thread_.joinable()) {
      thread_.join();
      model_->release();  // frees its memory for another engine while this object lives
    }
    return last_saves_;
  }

  Model& model() { return *model_; }
  bool has_tiers() const { return has_tiers_; }
  EngineCore& core() { return core_; }

 private:
  void loop() {
    std::vector<std::function<void(bool)>> messages;
    for (;;) {
      const bool stopping = take(messages);
      if (stopping || !messages.empty()) until_done([this] { core_.settle(); });
      for (auto& message : messages) message(stopping);
      messages.clear();
      if (stopping) break;
      until_done([this] { core_.step([this] { return has_messages(); }); });
    }
    until_done([this] { core_.cancel_everything(); });
    last_saves_ = core_.finish_saves(kLastSaves);
  }

  bool has_messages() {
    std::lock_guard lock(mutex_);
    return stop_.load(std::memory_order_relaxed) || !inbox_.empty();
  }

  // Wakes the engine thread; called by a thread that moves pages.
  void moved() {
    {
      std::lock_guard lock(mutex_);
      moved_ = true;
    }
    changed_.notify_one();
  }

  // Sleeps while there is nothing to do, then takes the messages. Returns whether the engine ends.
  bool take(std::vector<std::function<void(bool)>>& messages) {
    std::unique_lock lock(mutex_);
    const auto stopping = [this] { return stop_.load(std::memory_order_relaxed); };
    const auto ready = [&] { return stopping() || moved_ || !inbox_.empty(); };
    if (core_.idle()) {
      changed_.wait(lock, ready);
    } else if (core_.stalled()) {
      changed_.wait_for(lock, kStalled, ready);
    }
    moved_ = false;
    std::swap(messages, inbox_);
    return stopping();
  }

  const pid_t process_ = getpid();
  std::unique_ptr<Model> model_;
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> last_request_{0};
  std::atomic<HandleId> last_handle_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::function<void(bool)>> inbox_;
  std::unordered_map<HandleId, std::vector<std::weak_ptr<Request>>> generating_;  // by mutex_
  bool moved_ = false;
  const bool has_tiers_;
  const std::weak_ptr<const TierPtrs> tiers_;  // owned by the core
  LastSaves last_saves_;
  EngineCore core_;
  std::mutex join_mutex_;
  std::thread thread_;
};

Engine::Engine(const EngineOptions& options, std::unique_ptr<Model> model, TierPtrs tiers)
    : impl_(std::make_unique<Impl>(options, std::move(model),
                                   std::make_shared<const TierPtrs>(std::move(tiers)))) {}
Engine::Engine(const EngineOptions& options, std::unique_ptr<Model> model) {
  auto tiers = std::make_shared<const TierPtrs>(make_tiers(options, *model));
  impl_ = std::make_unique<Impl>(options, std::move(model), std::move(tiers));
}
Engine::~Engine() {
  // The destructors of its members would wait for threads that a forked child does not have.
  if (impl_ && impl_->is_in_child()) static_cast<void>(impl_.release());
}

HandleId Engine::open(const HandleOptions& options) {
  check_adapter(options.adapter);
  check_retention_priority(options.retention_priority);
  if (options.persist && !impl_->has_tiers())
    throw_error(ErrorCode::invalid_request,
                "persist: got true, expected false: the engine has no host_memory or page_folder");
  return impl_->post_handle(
      [&core = impl_->core(), options](HandleId id) { core.open(id, options); });
}

void Engine::append(HandleId handle, std::vector<int32_t> token_ids) {
  check_tokens(token_ids, impl_->model().vocab());
  impl_->call([&] { impl_->core().append(handle, token_ids); });
}

int64_t Engine::length(HandleId handle) {
  return impl_->call([&] { return impl_->core().length(handle); });
}

std::vector<int32_t> Engine::token_ids(HandleId handle) {
  return impl_->call([&] { return impl_->core().token_ids(handle); });
}

void Engine::truncate(HandleId handle, int64_t length) {
  impl_->call([&] { impl_->core().truncate(handle, length); });
}

HandleId Engine::fork(HandleId handle, std::optional<float> retention_priority) {
  if (retention_priority) check_retention_priority(*retention_priority);
  const HandleId copy = impl_->next_handle();
  impl_->call([&] { impl_->core().fork(handle, copy, retention_priority); });
  return copy;
}

HandleId Engine::fork_later(HandleId handle, std::optional<float> retention_priority) {
  if (retention_priority) check_retention_priority(*retention_priority);
  return impl_->post_handle([&core = impl_->core(), handle, retention_priority](HandleId copy) {
    core.fork(handle, copy, retention_priority);
  });
}

void Engine::park(HandleId handle) {
  impl_->call([&] { impl_->core().park(handle); });
}

void Engine::set_retention_priority(HandleId handle, float retention_priority) {
  check_retention_priority(retention_priority);
  impl_->call([&] { impl_->core().set_retention_priority(handle, retention_priority); });
}

void Engine::close(HandleId handle, bool save) {
  impl_->close(handle, save);
}

void Engine::save(HandleId handle) {
  impl_->post_try([handle](EngineCore& core) { core.save(handle); });
}

void Engine::warm(HandleId handle) {
  impl_->post_try([handle](EngineCore& core) { core.warm(handle); });
}

std::shared_ptr<Flush> Engine::flush() {
  auto flush = std::make_shared<Flush>();
  impl_->call([&] { impl_->core().flush(flush); });
  return flush;
}

Residence Engine::residence(std::vector<int32_t> token_ids, const std::string& salt, int adapter) {
  check_tokens(token_ids, impl_->model().vocab());
  check_adapter(adapter);
  return impl_->call([&] { return impl_->core().residence(token_ids, adapter, salt); });
}

double Engine::predict_ttft(std::vector<int32_t> token_ids, int64_t added, const std::string& salt,
                            int adapter) {
  check_tokens(token_ids, impl_->model().vocab());
  check_adapter(adapter);
  if (added < 1)
    throw_error(ErrorCode::invalid_request, "new_tokens: got ", added, ", expected 1 or more");
  return impl_->call([&] { return impl_->core().forecast(token_ids, added, adapter, salt).ttft; });
}

std::vector<Forecast> Engine::forecasts(std::vector<ForecastQuery> queries, int64_t added,
                                        int adapter) {
  for (const ForecastQuery& query : queries) check_tokens(query.token_ids, impl_->model().vocab());
  check_adapter(adapter);
  if (added < 1)
    throw_error(ErrorCode::invalid_request, "new_tokens: got ", added, ", expected 1 or more");
  std::vector<Forecast> found;
  found.reserve(queries.size());
  while (found.size() < queries.size()) {
    impl_->call([&] {
      const auto end = std::chrono::steady_clock::now() + kPiece;
      do {
        const ForecastQuery& query = queries[found.size()];
        found.push_back(impl_->core().forecast(query.token_ids, added, adapter, query.salt));
      } while (found.size() < queries.size() && std::chrono::steady_clock::now() < end);
    });
  }
  return found;
}

Speeds Engine::speeds() {
  return impl_->call([&] { return impl_->core().speeds(); });
}

std::vector<BlockHash> Engine::page_keys(const std::vector<int32_t>& token_ids,
                                         const std::string& salt, int adapter) const {
  std::vector<BlockHash> keys;
  BlockHash parent = root_key(model().fingerprint(), adapter, salt);
  for (size_t begin = 0; begin < token_ids.size(); begin += kPageTokens) {
    const size_t count = std::min<size_t>(kPageTokens, token_ids.size() - begin);
    parent = keys.emplace_back(next_key(parent, token_ids.data() + begin, static_cast<int>(count)));
  }
  return keys;
}

void Engine::remove_pages(std::vector<BlockHash> keys) {
  impl_->call([&] { impl_->core().remove_pages(keys); });
}

void Engine::refresh_pages() {
  impl_->refresh_tiers();
}

std::shared_ptr<Request> Engine::generate(HandleId handle, const SamplingParams& params,
                                          const RequestOptions& options,
                                          std::shared_ptr<Waker> waker) {
  check_for_handle(options, params);
  auto state = impl_->make_state(params, options, std::move(waker));
  auto request = state->request;
  impl_->call([&] { impl_->core().generate(handle, std::move(state)); });
  impl_->note_request(handle, request);
  return request;
}

std::shared_ptr<Request> Engine::advance(HandleId handle, int64_t prefix_length,
                                         std::vector<int32_t> append, const SamplingParams& params,
                                         const RequestOptions& options,
                                         std::optional<float> retention_priority,
                                         std::shared_ptr<Waker> waker) {
  if (prefix_length < 0)
    throw_error(ErrorCode::invalid_request, "prefix_length: got ", prefix_length,
                ", expected 0 or more");
  check_tokens(append, impl_->model().vocab());
  if (retention_priority) check_retention_priority(*retention_priority);
  check_for_handle(options, params);
  if (options.kind != RequestKind::generate)
    throw_error(ErrorCode::invalid_request, "kind: advance() generates; use generate() for logits");
  auto state = impl_->make_state(params, options, std::move(waker));
  impl_->note_request(handle, state->request);
  return impl_->post_request(
      std::move(state), [&core = impl_->core(), handle, prefix_length, tokens = std::move(append),
                         retention_priority](std::unique_ptr<RequestState> made) {
        core.advance(handle, prefix_length, tokens, retention_priority, std::move(made));
      });
}

std::shared_ptr<Request> Engine::submit(std::vector<int32_t> token_ids,
                                        const SamplingParams& params, const RequestOptions& options,
                                        std::shared_ptr<Waker> waker) {
  if (token_ids.empty())
    throw_error(ErrorCode::invalid_request, "token_ids: got no tokens, expected some");
  check_tokens(token_ids, impl_->model().vocab());
  return impl_->post_request(impl_->make_state(params, options, std::move(waker)),
                             [&core = impl_->core(), tokens = std::move(token_ids)](
                                 std::unique_ptr<RequestState> state) mutable {
                               core.submit(std::move(tokens), std::move(state));
                             });
}

Stats Engine::stats() {
  return impl_->call([&] { return impl_->core().stats(); });
}

void Engine::evict() {
  impl_->call([&] { impl_->core().evict(); });
}

void Engine::set_profiling(bool on) {
  impl_->call([&] { impl_->core().set_profiling(on); });
}

void Engine::check_invariants() {
  impl_->call([&] { impl_->core().check_invariants(); });
}

LastSaves Engine::shutdown() {
  return impl_->shutdown();
}

const Model& Engine::model() const {
  return impl_->model();
}

const WarmUp& Engine::warmed_up() const {
  return impl_->core().warmed_up();
}

std::optional<std::string> Engine::library_note() const {
  const GpuContext* gpu = impl_->model().context().gpu;
  if (!gpu) return std::nullopt;
  return gpu->library_note();
}

}  // namespace turbomind
