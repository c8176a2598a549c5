// Parts of gpu_bench's figures: memory with random contents, times by events around graph replays,
// and a line of JSON per figure.
#pragma once

#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ceilings/gpu_ceilings.h"
#include "core/dtype.h"
#include "core/error.h"
#include "cuda/gpu_context.h"

namespace turbomind {

// Device memory full of random numbers, allocated from its start for every figure.
class Arena {
 public:
  Arena(GpuContext& gpu, size_t bytes)
      : gpu_(gpu),
        block_(std::min(bytes, size_t{16} << 20)),
        source_(gpu.gpu(), block_),
        memory_(gpu.gpu(), bytes) {
    fill_random(gpu, source_.data(), block_);
    used_ = bytes;
    reset();
  }

  // Releases all and restores the first contents.
  void reset() {
    Gpu& gpu = gpu_.gpu();
    gpu.copy(gpu_.handle(), memory_.data(), source_.data(), std::min(block_, used_));
    for (size_t done = block_; done < used_; done *= 2)
      gpu.copy(gpu_.handle(), memory_.data() + done, memory_.data(), std::min(done, used_ - done));
    used_ = 0;
  }
  size_t left() const { return memory_.size() - used_; }

  template <typename T>
  T* take(int64_t count) {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
    if (bytes > left())
      throw_error(ErrorCode::internal, "the figure needs ", bytes, " bytes more, ", left(),
                  " are left");
    T* p = reinterpret_cast<T*>(memory_.data() + used_);
    used_ += bytes;
    return p;
  }
  template <typename T>
  T* put(const std::vector<T>& values) {
    T* p = take<T>(static_cast<int64_t>(values.size()));
    upload(p, values.data(), values.size() * sizeof(T));
    return p;
  }

 private:
  void upload(void* to, const void* from, size_t bytes) {
    gpu_.gpu().copy(gpu_.handle(), to, from, bytes);
    gpu_.stream().synchronize();
  }

  GpuContext& gpu_;
  const size_t block_;
  DeviceBuffer source_, memory_;
  size_t used_ = 0;
};

// The work of one call, by the op's cost model.
struct Work {
  double bytes = 0;
  double flops = 0;
};

struct Timing {
  double ms = 0;  // of a call: median of the replays
  double best_ms = 0;
  int calls = 0;  // of a replay
  int replays = 0;
};

class Bench {
 public:
  Bench(GpuContext& gpu, size_t arena_bytes, bool quick)
      : gpu(gpu), arena(gpu, arena_bytes), quick(quick) {}

  // Returns the number of copies of a call's operands that makes replays miss the L2 cache.
  int sets(double bytes) const {
    if (quick) return 2;
    const double past = 3.0 * static_cast<double>(gpu.gpu().info().l2_bytes);
    return static_cast<int>(std::clamp(past / bytes + 1, 2.0, 48.0));
  }

  // Measures submit(set) for set 0 to sets - 1, repeatedly.
  Timing measure(int sets, const Work& work, const std::function<void(int)>& submit) {
    for (int set = 0; set < sets; ++set) submit(set);  // does one-time work first
    gpu.stream().synchronize();
    const int calls = sets * rounds(sets, work);
    const GpuGraph graph(gpu.stream(), [&] {
      for (int i = 0; i < calls; ++i) submit(i % sets);
    });
    const double first = replay(graph);
    const int replays = quick ? 2 : static_cast<int>(std::clamp(30 / first, 5.0, 40.0));
    if (!quick) replay(graph);
    std::vector<double> times;
    for (int i = 0; i < replays; ++i) times.push_back(replay(graph) / calls);
    std::sort(times.begin(), times.end());
    return {times[times.size() / 2], times[0], calls, replays};
  }

  GpuContext& gpu;
  Arena arena;
  bool quick;

 private:
  // A replay has many small calls, so that its start and end do not count.
  int rounds(int sets, const Work& work) const {
    if (quick) return 1;
    const double large = std::max(work.bytes / 1e9, work.flops / 3e11);  // about 0.4 ms
    const double calls = std::clamp(1 / std::max(large, 1e-9), 1.0, 256.0);
    return std::max(1, static_cast<int>(calls / sets));
  }

  double replay(const GpuGraph& graph) {
    const GpuEvent begin(gpu.gpu(), true), end(gpu.gpu(), true);
    begin.record(gpu.stream());
    graph.launch(gpu.stream());
    end.record(gpu.stream());
    end.synchronize();
    return gpu.gpu().elapsed_ms(begin.handle(), end.handle());
  }
};

// {"op": ..., "case": ..., "dims": {...}, "path": ...; then the figure or "error"}. Names are ours;
// only messages of errors need escaping.
struct Figure {
  std::string op, name;
  std::vector<std::pair<const char*, int64_t>> dims;
  std::string path;  // which of several kernels

  void print(const Timing& t, const Work& w) const {
    begin();
    std::printf(", \"ms\": %.6g, \"best_ms\": %.6g, \"calls\": %d, \"replays\": %d", t.ms,
                t.best_ms, t.calls, t.replays);
    std::printf(", \"bytes\": %.0f, \"flops\": %.0f}\n", w.bytes, w.flops);
    std::fflush(stdout);
  }
  void print_error(const std::string& what) const {
    begin();
    std::printf(", \"error\": \"");
    for (const char c : what) {
      if (c == '"' || c == '\\') std::putchar('\\');
      std::putchar(c < ' ' ? ' ' : c);
    }
    std::printf("\"}\n");
    std::fflush(stdout);
  }

 private:
  void begin() const {
    std::printf("{\"op\": \"%s\", \"case\": \"%s\", \"dims\": {", op.c_str(), name.c_str());
    for (size_t i = 0; i < dims.size(); ++i)
      std::printf("%s\"%s\": %lld", i ? ", " : "", dims[i].first,
                  static_cast<long long>(dims[i].second));
    std::printf("}, \"path\": \"%s\"", path.c_str());
  }
};

}  // namespace turbomind
