#include "cost/step_time.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace turbomind {

namespace {

constexpr double kForget = 0.9;   // per observation of the same size: a memory of about 10
constexpr double kOutlier = 3.0;  // a delayed step counts at most as this many times the prediction
constexpr double kLongestTerm = 1e6;                    // ms; a fit with a longer term is not valid
constexpr int64_t kMostFirst = 4096, kLongPast = 8192;  // tokens
constexpr double kTokenScale = 1.0 / 64, kPairScale = 1.0 / 65536;  // terms of similar size

// Solves the normal equations of the terms in `mask`. Returns false when they are not independent.
template <typename Matrix, typename Vector>
bool solve(const Matrix& a, const Vector& b, unsigned mask, Vector& x) {
  constexpr int n = 3;
  double m[n][n + 1];
  for (int i = 0; i < n; ++i) {
    const bool used = mask >> i & 1;
    for (int j = 0; j < n; ++j) m[i][j] = used && (mask >> j & 1) ? a[i][j] : (i == j);
    m[i][n] = used ? b[i] : 0;
  }
  for (int i = 0; i < n; ++i) {  // positive semidefinite: no pivoting needed
    const double scale = mask >> i & 1 ? a[i][i] : 1;
    if (!(m[i][i] > 1e-9 * scale)) return false;
    for (int r = i + 1; r < n; ++r) {
      const double f = m[r][i] / m[i][i];
      for (int c = i; c <= n; ++c) m[r][c] -= f * m[i][c];
    }
  }
  for (int i = n; i-- > 0;) {
    x[i] = m[i][n];
    for (int j = i + 1; j < n; ++j) x[i] -= m[i][j] * x[j];
    x[i] /= m[i][i];
  }
  return true;
}

}  // namespace

StepTime::Terms StepTime::terms(const StepCost& cost) {
  return {1, cost.tokens * kTokenScale, cost.pairs * kPairScale};
}

std::optional<StepTime::Fit> StepTime::fit() const {
  if (most_tokens_seen_ == 0) return std::nullopt;
  return Fit{coefficients_, most_tokens_seen_};
}

bool StepTime::begin_with(const Fit& fit) {
  const auto good = [](double ms) { return ms >= 0 && ms < kLongestTerm; };
  const auto something = [](double ms) { return ms > 0; };
  if (fit.most_tokens <= 0 || !std::all_of(fit.ms.begin(), fit.ms.end(), good) ||
      !std::any_of(fit.ms.begin(), fit.ms.end(), something))
    return false;
  const int64_t most = std::min(fit.most_tokens, kMostFirst);
  StepTime before;
  before.coefficients_ = fit.ms;
  for (int64_t tokens = 1; tokens <= most; tokens *= 4)
    for (const int64_t past : {int64_t{0}, kLongPast}) {
      StepCost cost;
      cost.add(tokens, past);
      observe(cost, before.predict(cost));
    }
  most_tokens_seen_ = std::max(most_tokens_seen_, most);
  return true;
}

double StepTime::predict(const StepCost& cost) const {
  const Terms x = terms(cost);
  double ms = 0;
  for (int i = 0; i < kTerms; ++i) ms += coefficients_[i] * x[i];
  return ms;
}

void StepTime::observe(const StepCost& cost, double ms) {
  if (cost.tokens <= 0 || !(ms > 0)) return;
  Sums& sums = by_size_[std::min<size_t>(std::bit_width(static_cast<uint64_t>(cost.tokens)),
                                         by_size_.size() - 1)];
  const double expected = predict(cost);
  if (sums.xx[0][0] > 0 && expected > 0) ms = std::min(ms, kOutlier * expected);
  const Terms x = terms(cost);
  const double weight = 1 / (ms * ms);
  for (int i = 0; i < kTerms; ++i) {
    for (int j = 0; j < kTerms; ++j) sums.xx[i][j] = kForget * sums.xx[i][j] + weight * x[i] * x[j];
    sums.xy[i] = kForget * sums.xy[i] + weight * x[i] * ms;
  }
  most_tokens_seen_ = std::max(most_tokens_seen_, cost.tokens);
  refit();
}

void StepTime::refit() {
  Sums all;
  for (const Sums& s : by_size_)
    for (int i = 0; i < kTerms; ++i) {
      for (int j = 0; j < kTerms; ++j) all.xx[i][j] += s.xx[i][j];
      all.xy[i] += s.xy[i];
    }
  // Seven subsets of three terms: the best one without a negative coefficient is the constrained
  // fit.
  double best = 0;
  for (unsigned mask = 1; mask < 8; ++mask) {
    Terms x{};
    if (!solve(all.xx, all.xy, mask, x)) continue;
    if (*std::min_element(x.begin(), x.end()) < 0) continue;
    double error = 0;  // without the constant sum of y^2
    for (int i = 0; i < kTerms; ++i) {
      error -= 2 * x[i] * all.xy[i];
      for (int j = 0; j < kTerms; ++j) error += x[i] * x[j] * all.xx[i][j];
    }
    if (error < best) {
      best = error;
      coefficients_ = x;
    }
  }
}

int64_t StepTime::largest_chunk(const StepCost& rest, int64_t kv_begin, int64_t most,
                                double budget_ms) const {
  const int64_t trusted = std::max(most_tokens_trusted_, 2 * most_tokens_seen_) - rest.tokens;
  int64_t low = 0, high = std::min(most, trusted);
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    StepCost cost = rest;
    cost.add(middle, kv_begin);
    if (predict(cost) <= budget_ms) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return std::max<int64_t>(low, 0);
}

}  // namespace turbomind
