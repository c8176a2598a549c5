// A running fit of how long a step takes, so that prefill chunks can be cut to a target time.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

namespace turbomind {

// What a step costs: token rows through the layers, and query-key pairs in attention.
struct StepCost {
  int64_t tokens = 0;
  int64_t pairs = 0;
  void add(int64_t q_len, int64_t kv_begin) {
    tokens += q_len;
    pairs += q_len * kv_begin + q_len * (q_len + 1) / 2;
  }
  void remove(int64_t q_len, int64_t kv_begin) {
    tokens -= q_len;
    pairs -= q_len * kv_begin + q_len * (q_len + 1) / 2;
  }
};

// Least squares of milliseconds over (1, tokens, pairs) with coefficients >= 0, relative errors
// weighted alike. Old observations are forgotten only as new ones of about the same size come in,
// so hours of decoding do not wash out what is known about prefill.
class StepTime {
 public:
  static constexpr int kTerms = 3;
  // What is known, in numbers that a later run on the same machine can begin with.
  struct Fit {
    std::array<double, kTerms> ms{};  // of a step, of 64 tokens in it, of 65536 pairs
    int64_t most_tokens = 0;          // of a step that was seen
  };
  std::optional<Fit> fit() const;  // none before anything was observed
  // As if a few steps had taken what `fit` says; real ones of their sizes soon outweigh them.
  // False, and nothing happens, where it is no fit: a number below 0, say.
  bool begin_with(const Fit& fit);

  void observe(const StepCost& cost, double ms);
  double predict(const StepCost& cost) const;  // ms

  // Most tokens, up to `most`, of a chunk behind `kv_begin` that keep the step within `budget_ms`
  // when it joins `rest`. Careful until steps of about that size were seen.
  int64_t largest_chunk(const StepCost& rest, int64_t kv_begin, int64_t most,
                        double budget_ms) const;

 private:
  using Terms = std::array<double, kTerms>;
  struct Sums {
    std::array<Terms, kTerms> xx{};
    Terms xy{};
  };
  static Terms terms(const StepCost& cost);
  void refit();

  std::array<Sums, 16> by_size_{};  // index: bit width of the step's tokens
  Terms coefficients_{};
  int64_t most_tokens_seen_ = 0;
};

}  // namespace turbomind
