#include "model/parallel/gpu_exchange.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "model/parallel/peer_trial.h"

namespace turbomind {

namespace {

constexpr uint64_t kWaitNanoseconds = 10'000'000'000;
constexpr size_t kCounterBytes = 256;  // of a line of its own
// Of ranks on one GPU: fewer than its multiprocessors, so that the kernels that are waited for find
// some of them free.
constexpr int kMostWaitingBlocks = 64;

std::atomic_ref<uint32_t> shared_flag(uint32_t& flag) {
  return std::atomic_ref<uint32_t>(flag);
}

}  // namespace

GpuExchange::Shared::Shared(Gpu& gpu, size_t bytes, bool peers) {
  if (peers)
    device_ = DeviceBuffer(gpu, bytes);
  else
    pinned_ = PinnedBuffer(gpu, bytes);
}

GpuExchange::GpuExchange(std::vector<GpuContext*> gpus, int64_t widest,
                         std::vector<RowRange> vocabulary)
    : widest_(widest),
      vocabulary_(std::move(vocabulary)),
      one_gpu_(&gpus[0]->gpu() == &gpus[1]->gpu()),
      one_stream_(gpus[0]->handle() == gpus[1]->handle()),
      peers_(connect_peers(gpus)),
      turns_(static_cast<int>(gpus.size())),
      flags_(gpus[0]->gpu(), (1 + gpus.size()) * sizeof(uint32_t)) {
  for (GpuContext* gpu : gpus) {
    RankState& rank = ranks_.emplace_back();
    rank.gpu = gpu;
    rank.counter = Shared(gpu->gpu(), kCounterBytes, peers_);
    if (peers_) {
      gpu->gpu().fill(gpu->handle(), rank.counter.data(), 0, kCounterBytes);
      gpu->stream().synchronize();
    } else {
      std::memset(rank.counter.data(), 0, kCounterBytes);
    }
  }
  for (int i = 0; i <= ranks(); ++i) flag(i) = 0;
}

void GpuExchange::reserve(int64_t tokens, int64_t samples) {
  if (tokens <= tokens_ && samples <= samples_) return;
  const auto error = drain();
  if (error) std::rethrow_exception(error);
  const int64_t most_tokens = std::max(tokens, tokens_), most_samples = std::max(samples, samples_);
  tokens_ = samples_ = 0;  // where memory is short
  const auto bytes = [](int64_t rows, int64_t cols) {
    return static_cast<size_t>(rows * padded_cols(cols)) * sizeof(float);
  };
  for (int r = 0; r < ranks(); ++r) {
    RankState& rank = ranks_[r];
    for (Shared* old : {&rank.parts[0], &rank.parts[1], &rank.logits}) *old = {};
    for (Shared& part : rank.parts)
      part = Shared(rank.gpu->gpu(), bytes(most_tokens, widest_), peers_);
    rank.logits = Shared(rank.gpu->gpu(), bytes(most_samples, vocabulary_[r].size()), peers_);
    rank.gpu->moved();
  }
  tokens_ = most_tokens;
  samples_ = most_samples;
}

void GpuExchange::begin_step(const LaunchKind& kind) {
  ++step_;
  turns_.begin_step();
  captures_ = !one_stream_ && !kind.profiled;
  hosts_wait_ = one_stream_ || is_first(kind);
}

// Ranks allocate for a step and capture it together: where the memory of one has moved, all begin
// again.
bool GpuExchange::is_first(const LaunchKind& kind) {
  uint64_t moves = 0;
  for (const RankState& rank : ranks_) moves += rank.gpu->epoch();
  if (moves != moves_) {
    forget_kinds();
    moves_ = moves + ranks_.size();
    kinds_.clear();
  }
  return kinds_.insert(kind).second;
}

void GpuExchange::forget_kinds() {
  for (const RankState& rank : ranks_) rank.gpu->moved();
}

void GpuExchange::set_sampled(const int32_t* tokens, EventHandle done) {
  if (tokens) sampled_ = tokens;
  last_done_ = done;
}

const int32_t* GpuExchange::sampled(int rank) const {
  const GpuContext& gpu = *ranks_[rank].gpu;
  if (sampled_ && rank > 0) gpu.gpu().wait(gpu.handle(), last_done_);
  return sampled_;
}

Mat GpuExchange::part(int rank, uint32_t number, int64_t rows, int64_t cols) const {
  if (rows > tokens_ || cols > widest_)
    throw_error(ErrorCode::internal, "a sum over ranks: got [", rows, ", ", cols,
                "], expected at most [", tokens_, ", ", widest_, "]");
  return {ranks_[rank].parts[number % 2].data(), DType::f32, rows, cols, padded_cols(cols)};
}

Mat GpuExchange::logits(int rank, int64_t rows) const {
  const int64_t cols = vocabulary_[rank].size();
  return {ranks_[rank].logits.data(), DType::f32, rows, cols, padded_cols(cols)};
}

DeviceExchange GpuExchange::meeting(int rank, uint32_t number) const {
  DeviceExchange e;
  e.ranks = ranks();
  e.own = rank;
  for (int r = 0; r < ranks(); ++r)
    e.counters[r] = reinterpret_cast<uint32_t*>(ranks_[r].counter.data());
  e.waits = !hosts_wait_;
  e.number = number;
  e.stop = &flag(0);
  e.missing = &flag(1 + rank);
  e.limit_ns = kWaitNanoseconds;
  e.most_waiting = one_gpu_ && !one_stream_ ? kMostWaitingBlocks : 0;
  return e;
}

DeviceRankSum GpuExchange::sum_of(int rank, uint32_t number, int64_t rows, int64_t cols) const {
  DeviceRankSum sum;
  sum.exchange = meeting(rank, number);
  for (int r = 0; r < ranks(); ++r) {
    const Mat m = part(r, number, rows, cols);
    sum.parts[r] = m.f32(0);
    sum.part_stride = m.stride;
  }
  sum.rows = static_cast<int32_t>(rows);
  sum.cols = static_cast<int32_t>(cols);
  return sum;
}

DeviceRankColumns GpuExchange::columns_of(int rank, uint32_t number, int64_t rows) const {
  DeviceRankColumns columns;
  columns.exchange = meeting(rank, number);
  for (int r = 0; r < ranks(); ++r) {
    const Mat m = logits(r, rows);
    columns.parts[r] = m.f32(0);
    columns.part_strides[r] = m.stride;
    columns.begin[r] = static_cast<int32_t>(vocabulary_[r].begin);
    columns.begin[r + 1] = static_cast<int32_t>(vocabulary_[r].end);
  }
  columns.rows = static_cast<int32_t>(rows);
  return columns;
}

void GpuExchange::take_turn(int rank, const ThreadPool& pool) {
  if (!hosts_wait_) return;
  if (!one_stream_) ranks_[rank].gpu->stream().synchronize();
  meet_hosts(rank, pool);
}

void GpuExchange::fail() noexcept {
  turns_.fail();
  try {
    if (last_done_) ranks_[0].gpu->gpu().synchronize(last_done_);
  } catch (...) {  // whoever reads that step gets its error
  }
  shared_flag(flag(0)).store(1);
}

std::string GpuExchange::name_of(int rank) const {
  return "rank " + std::to_string(rank) + " (GPU " +
         std::to_string(ranks_[rank].gpu->gpu().index()) + ")";
}

std::exception_ptr GpuExchange::wait_error() const noexcept {
  for (int r = 0; r < ranks(); ++r) {
    const uint32_t missing = shared_flag(flag(1 + r)).load();
    if (missing == 0) continue;
    return std::make_exception_ptr(
        Error(ErrorCode::internal, name_of(static_cast<int>(missing) - 1) +
                                       " did not come to a sum within 10 s, while " + name_of(r) +
                                       " waited for it"));
  }
  return nullptr;
}

std::exception_ptr GpuExchange::drain() noexcept {
  std::exception_ptr own;
  for (int r = 0; r < ranks(); ++r) {
    try {
      ranks_[r].gpu->stream().synchronize();
    } catch (const Error& e) {
      if (!own) own = std::make_exception_ptr(Error(e.code(), name_of(r) + ": " + e.what()));
      shared_flag(flag(0)).store(1);  // the others need not wait for it
    } catch (...) {
      if (!own) own = std::current_exception();
    }
  }
  const std::exception_ptr waited = wait_error();
  for (int i = 0; i <= ranks(); ++i) shared_flag(flag(i)).store(0);
  return own ? own : waited;
}

void GpuExchange::check() {
  if (shared_flag(flag(0)).load() == 0) return;
  const std::exception_ptr error = drain();
  if (error) std::rethrow_exception(error);
}

void GpuExchange::release() noexcept {
  drain();
  for (RankState& rank : ranks_) {
    for (Shared& part : rank.parts) part = {};
    rank.logits = {};
  }
  tokens_ = samples_ = 0;
}

}  // namespace turbomind
