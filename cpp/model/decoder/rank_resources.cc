#include "model/decoder/rank_resources.h"

#include <algorithm>
#include <set>

#include "core/error.h"
#include "ops/rank_sum_cuda.h"

namespace turbomind {

namespace {

using Resources = std::vector<std::unique_ptr<DecoderResources>>;

int threads_of(int threads, int rank, int ranks) {
  return std::max(1, threads / ranks + (rank < threads % ranks ? 1 : 0));
}

// Returns the context of an earlier rank on the same GPU; null: there is none.
const GpuContext* same_gpu(const Resources& resources, int index) {
  for (const auto& rank : resources)
    if (rank->gpu->gpu().index() == index) return rank->gpu.get();
  return nullptr;
}

void check_equal(const Resources& resources) {
  const Gpu& first = resources[0]->gpu->gpu();
  for (const auto& rank : resources) {
    const Gpu& gpu = rank->gpu->gpu();
    const GpuInfo &a = first.info(), &b = gpu.info();
    if (a.name == b.name && a.major == b.major && a.minor == b.minor &&
        a.multiprocessors == b.multiprocessors)
      continue;
    throw_error(ErrorCode::invalid_request, "device: GPU ", gpu.index(), " is ", b.name, " with ",
                b.multiprocessors, " multiprocessors, expected ", a.name, " with ",
                a.multiprocessors, ", as GPU ", first.index());
  }
}

}  // namespace

void check_gpu_list(const std::vector<GpuOptions>& gpus, int ranks) {
  if (gpus.empty()) return;
  if (ranks != static_cast<int>(gpus.size()))
    throw_error(ErrorCode::invalid_request, "tp is ", ranks, ", expected ", gpus.size(),
                ", the number of GPUs");
  if (ranks > kMostGpuRanks)
    throw_error(ErrorCode::invalid_request, "tp is ", ranks, ", expected at most ", kMostGpuRanks,
                " on GPUs");
  std::set<int> different;
  for (const GpuOptions& gpu : gpus) different.insert(gpu.index);
  if (different.size() > 1 && different.size() < gpus.size())
    throw_error(ErrorCode::invalid_request, "device: got ", different.size(), " GPUs for ", ranks,
                " ranks, expected one for all or one for each");
}

Resources make_rank_resources(Isa isa, int threads, const std::vector<GpuOptions>& gpus,
                              int ranks) {
  Resources resources;
  for (int r = 0; r < ranks; ++r) {
    const int own = !gpus.empty() ? (r == 0 ? threads : 1) : threads_of(threads, r, ranks);
    const GpuOptions* gpu = gpus.empty() ? nullptr : &gpus[r];
    const GpuContext* same = gpu ? same_gpu(resources, gpu->index) : nullptr;
    resources.push_back(std::make_unique<DecoderResources>(isa, own, gpu, same));
  }
  if (!gpus.empty()) check_equal(resources);
  return resources;
}

}  // namespace turbomind
