// Predicts how long a step takes, from a running fit, so that prefill chunks can be cut to a target
// time and loading KV can be compared with computing it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

namespace turbomind {

// Work of a step: tokens through the layers, and query-key pairs in attention.
struct StepCost {
  int64_t tokens = 0;
  int64_t pairs = 0;
  // Adds a chunk of q_len tokens after kv_begin others of its sequence; remove() undoes that.
  void add(int64_t q_len, int64_t kv_begin) {
    tokens += q_len;
    pairs += q_len * kv_begin + q_len * (q_len + 1) / 2;
  }
  void remove(int64_t q_len, int64_t kv_begin) {
    tokens -= q_len;
    pairs -= q_len * kv_begin + q_len * (q_len + 1) / 2;
  }
};

// Least squares of milliseconds over (1, tokens, pairs) with coefficients >= 0 and equal weight of
// relative errors. An observation is forgotten only as new ones of about the same size come in, so
// hours of decoding do not change predictions of prefill. Not synchronised; allocates nothing.
class StepTime {
 public:
  static constexpr int kTerms = 3;
  // The fit as numbers that a later process on the same machine can begin with.
  struct Fit {
    std::array<double, kTerms> ms{};  // per step, per 64 tokens in it, per 65536 pairs
    int64_t most_tokens = 0;          // of an observed step
  };
  // Returns the fit; none before the first observation.
  std::optional<Fit> fit() const;
  // Observes a few steps as `fit` predicts them; real steps of their sizes soon outweigh them.
  // Returns false, with nothing changed, when `fit` is not valid, such as with a number below 0.
  bool begin_with(const Fit& fit);

  // Allows chunks of up to `tokens` though no step as large was observed.
  void trust(int64_t tokens) { most_tokens_trusted_ = std::max(most_tokens_trusted_, tokens); }

  // Records that a step took `ms`.
  void observe(const StepCost& cost, double ms);
  // Returns milliseconds; 0 before the first observation.
  double predict(const StepCost& cost) const;

  // Returns the largest chunk, at most `most` tokens, after `kv_begin` others of its sequence, with
  // which a step of cost `rest` takes at most `budget_ms`. At most the tokens that are trusted, or
  // twice those of any observed step.
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
  int64_t most_tokens_trusted_ = 64;
};

}  // namespace turbomind
