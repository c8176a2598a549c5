// What the ranks of a group on GPUs share: memory for their parts of sums and logits, the counters
// by which their kernels wait for each other, and the flags that end such waits.
//
// The memory is device memory of each rank where all GPUs can use each other's, which is tried
// (model/parallel/peer_trial.h), else pinned memory of the host.
//
// Ranks take turns, which means that their host threads wait for each other instead of the kernels
// (model/parallel/rank_exchange.h)
// - in the first step of each kind. A kernel is loaded at its first launch, which may wait for the
//   GPU, and may keep other threads from launching meanwhile; another rank's kernel that waits for
//   what such a thread launches later would then not end before its limit;
// - on one GPU, for checks, in all steps: their kernels follow each other in one stream. Where
//   GpuSwitches::rank_waits is on, each rank has a stream of its own instead, and its kernels wait
//   as on several GPUs.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "cuda/gpu_context.h"
#include "linear/weight_format.h"
#include "model/launch_kind.h"
#include "model/parallel/rank_exchange.h"
#include "ops/rank_sum_cuda.h"

namespace turbomind {

class GpuExchange {
 public:
  // The contexts stay alive. They are of different GPUs, or all of one. `widest`: columns of a sum;
  // `vocabulary`: the columns of the logits that each rank computes. A reason not to use the memory
  // of other GPUs is noted in the first context.
  GpuExchange(std::vector<GpuContext*> gpus, int64_t widest, std::vector<RowRange> vocabulary);

  int ranks() const { return static_cast<int>(ranks_.size()); }
  bool one_gpu() const { return one_gpu_; }
  // Has memory for steps of so many tokens and sampled rows. Waits for all ranks where it has to
  // grow.
  void reserve(int64_t tokens, int64_t samples);

  // ---- Between steps.
  // Starts a step, in turns where it is the first of its kind since memory that kernels were given
  // has moved.
  void begin_step(const LaunchKind& kind);
  // Begins again with all kinds of steps, as if memory had moved: a step has failed, which not all
  // ranks have launched or captured.
  void forget_kinds();
  // The count before the first one of the step.
  uint32_t first_count() const { return step_ * kCountsPerStep; }
  // `done` passes when the first rank has sampled, and so all ranks have ended the step; `tokens`,
  // if any, are then in pinned memory.
  void set_sampled(const int32_t* tokens, EventHandle done);
  // Makes a rank's stream wait for them, and returns them; null before the first.
  const int32_t* sampled(int rank) const;

  // ---- In a step, by each rank. `number` is that of an exchange, from 1.
  Mat part(int rank, uint32_t number, int64_t rows, int64_t cols) const;
  Mat logits(int rank, int64_t rows) const;
  // Fill in what the kernels of an exchange take.
  DeviceRankSum sum_of(int rank, uint32_t number, int64_t rows, int64_t cols) const;
  DeviceRankColumns columns_of(int rank, uint32_t number, int64_t rows) const;
  DeviceExchange meeting(int rank, uint32_t number) const;
  // Whether ranks may capture this step: they do together, or none does.
  bool captures() const { return captures_; }
  // Whether ranks take turns in this step.
  bool hosts_wait() const { return hosts_wait_; }
  // Called before an exchange is submitted. Where ranks take turns, it returns when what all have
  // submitted before it has been computed, or on one stream will be. Throws RankReleased when
  // another one has failed.
  void take_turn(int rank, const ThreadPool& pool);
  // Returns when all ranks have called it; throws as take_turn() does.
  void meet_hosts(int rank, const ThreadPool& pool) { turns_.add(rank, {}, false, pool); }

  // ---- Errors.
  // Ends all waits of this step once the one before it has ended; by any thread.
  void fail() noexcept;
  // Waits until no rank has work, and returns its error: that of a rank's own, else the one of a
  // wait that took too long, else null. Afterwards a next step can run.
  std::exception_ptr drain() noexcept;
  // Throws what drain() returns where a wait was ended; for after the host has waited for a rank.
  void check();
  void release() noexcept;

 private:
  static constexpr uint32_t kCountsPerStep = 1 << 12;  // a step has fewer exchanges

  // Memory that all ranks read.
  class Shared {
   public:
    Shared() = default;
    Shared(Gpu& gpu, size_t bytes, bool peers);
    uint8_t* data() const { return device_ ? device_.data() : pinned_.data(); }

   private:
    DeviceBuffer device_;
    PinnedBuffer pinned_;
  };
  struct RankState {
    GpuContext* gpu;
    Shared parts[2], logits, counter;
  };

  bool is_first(const LaunchKind& kind);
  std::string name_of(int rank) const;
  uint32_t& flag(int index) const { return flags_.as<uint32_t>()[index]; }  // 0: stop; 1 + rank
  std::exception_ptr wait_error() const noexcept;

  std::vector<RankState> ranks_;
  const int64_t widest_;
  const std::vector<RowRange> vocabulary_;
  const bool one_gpu_, one_stream_;
  const bool peers_;
  RankExchange turns_;
  bool captures_ = false, hosts_wait_ = false;  // in this step
  std::set<LaunchKind> kinds_;                  // of steps that have run
  uint64_t moves_ = 0;                          // the epochs of all contexts, at the last step
  PinnedBuffer flags_;
  int64_t tokens_ = 0, samples_ = 0;
  uint32_t step_ = 0;
  const int32_t* sampled_ = nullptr;
  EventHandle last_done_ = nullptr;
};

}  // namespace turbomind
