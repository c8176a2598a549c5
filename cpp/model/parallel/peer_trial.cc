#include "model/parallel/peer_trial.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "model/parallel/rank_sums.h"
#include "ops/rank_sum_cuda.h"

namespace turbomind {

namespace {

constexpr uint64_t kTrialLimit = 100'000'000;  // nanoseconds
constexpr int kFloats = 4096;                  // of a pattern
constexpr int kRounds = 2;

// What a GPU writes and reads in the trial.
struct TrialPlace {
  TrialPlace(GpuContext& context, size_t gpus)
      : gpu(context),
        pattern(gpu.gpu(), kFloats * sizeof(float)),
        counter(gpu.gpu(), 256),
        base(gpu.gpu(), 256),
        patterns(gpu.gpu(), kRounds * pattern.size()),
        seen(gpu.gpu(), gpus * pattern.size()) {
    gpu.gpu().fill(gpu.handle(), counter.data(), 0, counter.size());
    gpu.gpu().fill(gpu.handle(), base.data(), 0, base.size());
  }
  float* of_round(int round) const { return patterns.as<float>() + round * kFloats; }

  GpuContext& gpu;
  DeviceBuffer pattern, counter, base;
  PinnedBuffer patterns, seen;
};

class Trial {
 public:
  explicit Trial(const std::vector<GpuContext*>& gpus)
      : words_(gpus[0]->gpu(), (1 + gpus.size()) * sizeof(uint32_t)) {
    std::memset(words_.data(), 0, words_.size());
    for (GpuContext* gpu : gpus) places_.emplace_back(*gpu, gpus.size());
    float value = 1;  // all differ
    for (const TrialPlace& place : places_)
      for (int i = 0; i < kRounds * kFloats; ++i) place.of_round(0)[i] = value++;
  }

  // Returns what is wrong; empty: nothing is.
  std::string run() {
    // Nothing waits, so the kernels are loaded one after another.
    for (const TrialPlace& place : places_) write(place, 0);
    synchronize();
    for (int g = 0; g < count(); ++g) {
      read(g, false);
      synchronize();
    }
    if (std::string fault = wrong(0); !fault.empty()) return fault;
    for (int g = 0; g < count(); ++g) {
      write(places_[g], 1);
      read(g, true);
    }
    synchronize();
    if (std::string fault = late(); !fault.empty()) return fault;
    return wrong(1);
  }

 private:
  int count() const { return static_cast<int>(places_.size()); }
  void synchronize() const {
    for (const TrialPlace& place : places_) place.gpu.stream().synchronize();
  }
  std::string name_of(int g) const { return "GPU " + std::to_string(places_[g].gpu.gpu().index()); }

  static void write(const TrialPlace& place, int round) {
    place.gpu.gpu().copy(place.gpu.handle(), place.pattern.data(), place.of_round(round),
                         place.pattern.size());
  }

  void read(int reader, bool waits) const {
    const TrialPlace& own = places_[reader];
    DeviceRankColumns c;
    c.exchange.ranks = count();
    c.exchange.own = reader;
    c.exchange.waits = waits;
    c.exchange.number = 1;
    c.exchange.base = own.base.as<uint32_t>();
    c.exchange.stop = words_.as<uint32_t>();
    c.exchange.missing = words_.as<uint32_t>() + 1 + reader;
    c.exchange.limit_ns = kTrialLimit;
    for (int g = 0; g < count(); ++g) {
      c.exchange.counters[g] = places_[g].counter.as<uint32_t>();
      c.parts[g] = places_[g].pattern.as<float>();
      c.part_strides[g] = kFloats;
      c.begin[g + 1] = (g + 1) * kFloats;
    }
    c.y = own.seen.as<float>();
    c.y_stride = count() * kFloats;
    c.rows = 1;
    own.gpu.gpu().make_current();
    rank_sum_kernels(own.gpu.kind()).columns(own.gpu.handle(), c);
  }

  std::string wrong(int round) const {
    for (int reader = 0; reader < count(); ++reader)
      for (int owner = 0; owner < count(); ++owner)
        if (std::memcmp(places_[reader].seen.as<float>() + owner * kFloats,
                        places_[owner].of_round(round), kFloats * sizeof(float)) != 0)
          return name_of(reader) + " reads wrong values in the memory of " + name_of(owner);
    return "";
  }
  std::string late() const {
    for (int reader = 0; reader < count(); ++reader)
      if (const uint32_t missing = words_.as<uint32_t>()[1 + reader]; missing != 0)
        return name_of(reader) + " does not see within 0.1 s what " +
               name_of(static_cast<int>(missing) - 1) + " writes to its memory";
    return "";
  }

  std::vector<TrialPlace> places_;
  const PinnedBuffer words_;  // a stop, and for each GPU one that it misses
};

std::string fault_of(const std::vector<GpuContext*>& gpus) {
  for (const GpuContext* gpu : gpus)
    for (const GpuContext* other : gpus)
      if (!gpu->gpu().enable_access(other->gpu()))
        return "GPU " + std::to_string(gpu->gpu().index()) +
               " has no access to the memory of GPU " + std::to_string(other->gpu().index());
  return Trial(gpus).run();
}

}  // namespace

bool connect_peers(const std::vector<GpuContext*>& gpus) {
  const bool one = std::all_of(gpus.begin(), gpus.end(),
                               [&](const GpuContext* g) { return &g->gpu() == &gpus[0]->gpu(); });
  const std::string fault = one ? "" : fault_of(gpus);
  if (!fault.empty()) gpus[0]->add_note(fault + ": sums over ranks go through the host's memory");
  return fault.empty();
}

}  // namespace turbomind
