// A client of engine_fuzz: sends random calls to an engine and checks every result.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/engine_checks.h"
#include "tests/engine/fuzz_mix.h"

namespace turbomind::fuzz {

// One user: opens handles, sends requests and checks all their events.
class Client {
 public:
  Client(const Mix& mix, Engine& engine, int64_t max_context, uint64_t seed)
      : mix_(mix),
        engine_(engine),
        max_context_(max_context),
        random_(seed),
        reference_(mix.make_reference()) {}

  void run(int actions) {
    for (int i = 0; i < actions; ++i) act();
    for (auto& [id, tokens] : handles_) engine_.close(id, random_.one_in(2));
  }

  // Tokens of closed handles, for handles that continue them.
  std::vector<Tokens> closed;

 private:
  struct Pending {
    std::shared_ptr<Request> request;
    Tokens prompt;
    SamplingParams params;
    HandleId handle = 0;
    int cancel_after = -1;
    int choice_to_cancel = -1;  // -1: all
  };

  Tokens random_tokens(int64_t count) {
    Tokens tokens(count);
    for (int32_t& t : tokens) t = static_cast<int32_t>(random_.in(0, 49));
    if (count > 0 && random_.one_in(25)) tokens[random_.in(0, count - 1)] = 55;  // poison
    return tokens;
  }

  Tokens random_prompt() {
    Tokens prompt = mix_.openings[random_.in(0, 2)];
    prompt.resize(random_.in(1, static_cast<int64_t>(prompt.size())));
    if (random_.one_in(2)) {
      const Tokens more = random_tokens(random_.in(0, 40));
      prompt.insert(prompt.end(), more.begin(), more.end());
    }
    return prompt;
  }

  int64_t some_of(const Tokens& tokens) {
    return random_.in(0, static_cast<int64_t>(tokens.size()));
  }

  SamplingParams random_params() {
    SamplingParams p;
    p.max_new_tokens = random_.one_in(8) ? -1 : random_.in(1, 70);
    p.temperature = random_.pick({0.0f, 0.7f, 1.3f});
    p.seed = random_.in(0, 3);
    if (random_.one_in(3)) p.top_k = static_cast<int>(random_.in(1, 20));
    if (random_.one_in(3)) p.top_p = 0.8f;
    if (random_.one_in(4)) p.repetition_penalty = 1.2f;
    if (random_.one_in(4)) p.frequency_penalty = 0.3f;
    if (random_.one_in(4)) p.presence_penalty = 0.4f;
    if (random_.one_in(4)) p.logprobs = 2;
    if (random_.one_in(2)) p.eos_token_ids = {static_cast<int32_t>(random_.in(0, 60)), 3};
    if (p.max_new_tokens > 3 && random_.one_in(4)) p.min_new_tokens = 3;
    if (!random_.one_in(4)) p.logit_bias.emplace_back(55, -INFINITY);  // else poison may be sampled
    if (mix_.script.asynchronous && !random_.one_in(3)) leave_to_device(p);
    return p;
  }

  // Clears parameters that need sampling on the host.
  static void leave_to_device(SamplingParams& p) {
    p.repetition_penalty = 1;
    p.frequency_penalty = p.presence_penalty = 0;
    p.min_new_tokens = 0;
    p.logit_bias.clear();
  }

  // Returns whether steps of the mix may fail.
  bool troubled() const {
    return mix_.script.fail_submit > 0 || mix_.script.fail_wait > 0 || mix_.faults;
  }
  // Returns whether such an error may be that of a step: without memory it is internal.
  bool is_of_step(ErrorCode code) const {
    return code == ErrorCode::model || (mix_.faults && code == ErrorCode::internal);
  }

  RequestOptions random_options() {
    RequestOptions o;
    o.priority = static_cast<int>(random_.in(0, 2));
    o.retention_priority = static_cast<float>(random_.in(0, 2));
    o.salt = random_.pick({"", "", "owner"});
    o.exact = random_.one_in(6);
    return o;
  }

  void act() {
    switch (random_.in(0, mix_.make_tiers ? 19 : 16)) {
      case 0:
      case 1:
      case 2:
        return requests();
      case 3:
        return score();
      case 4:
        return logits();
      case 5:
        return open();
      case 6:
      case 7:
        return turn();
      case 8:
        return rewind();
      case 9:
        return fork();
      case 10:
        return refuse();
      case 11:
        return close_while_busy();
      case 12:
        return fork_while_busy();
      case 13:
      case 14:
        return advance();
      case 15:
        return advance_while_busy();
      case 17:
      case 18:
        return reopen();
      case 19:
        return tiers();
      default:
        return housekeeping();
    }
  }

  void requests() {
    std::vector<Pending> pending(random_.in(1, 5));
    for (Pending& p : pending) {
      p.prompt = random_prompt();
      p.params = random_params();
      if (random_.one_in(4)) p.params.n = static_cast<int>(random_.in(2, 4));
      if (random_.one_in(5)) p.cancel_after = static_cast<int>(random_.in(0, 12));
      if (random_.one_in(2)) p.choice_to_cancel = static_cast<int>(random_.in(0, p.params.n - 1));
      if (random_.one_in(3)) p.params.continued = some_of(p.prompt);
      p.request = engine_.submit(p.prompt, p.params, random_options());
    }
    for (Pending& p : pending) verify(p);
  }

  bool fits(const Pending& p) const {
    const int64_t length = static_cast<int64_t>(p.prompt.size());
    return length + std::max<int64_t>(1, p.params.max_new_tokens) <= max_context_;
  }

  void verify(Pending& p) {
    const Report report = collect(*p.request, p.params.n, p.cancel_after, p.choice_to_cancel);
    if (!fits(p)) {
      for (const Outcome& o : report.choices)
        check(o.tokens.empty() &&
                  (o.reason == FinishReason::cancelled ||
                   (o.reason == FinishReason::error && o.error_code == ErrorCode::context_full)),
              "context_full for a request that cannot fit, got: " + o.error);
      return;
    }
    const auto expected = reference_->generate(p.prompt, p.params, max_context_);
    bool may_fail = troubled();
    for (const Outcome& e : expected) may_fail = may_fail || e.reason == FinishReason::error;
    for (size_t i = 0; i < expected.size(); ++i) {
      const int choice = static_cast<int>(i);
      const bool cancelled = p.choice_to_cancel < 0 || p.choice_to_cancel == choice;
      compare(report.choices[i], expected[i], p.cancel_after >= 0 && cancelled, may_fail);
    }
    if (p.handle) {
      Tokens& tokens = handles_.at(p.handle);
      tokens.insert(tokens.end(), report.choices[0].tokens.begin(), report.choices[0].tokens.end());
      check(engine_.token_ids(p.handle) == tokens, "a handle to have the reported tokens");
    }
  }

  void compare(const Outcome& got, const Outcome& want, bool may_cancel, bool may_fail) {
    const bool cut = (may_cancel && got.reason == FinishReason::cancelled) ||
                     (may_fail && got.reason == FinishReason::error);
    check(got.tokens.size() <= want.tokens.size() &&
              std::equal(got.tokens.begin(), got.tokens.end(), want.tokens.begin()),
          "the tokens of the solo run; error: " + got.error);
    if (got.reason == FinishReason::error)
      check(is_of_step(got.error_code), "no error but the model's, got: " + got.error);
    if (cut) return;
    check(got.reason == want.reason, "the finish reason of the solo run; error: " + got.error);
    check(got.tokens.size() == want.tokens.size(), "all tokens of the solo run");
    check(got.logprobs.size() == want.logprobs.size(), "as many logprobs as tokens");
    for (size_t i = 0; i < got.logprobs.size(); ++i)
      check(got.logprobs[i].logprob == want.logprobs[i].logprob &&
                got.logprobs[i].top == want.logprobs[i].top,
            "the logprobs of the solo run");
  }

  // Computes logits of the solo run; returns whether all of them are finite.
  bool solo_logits(const Tokens& tokens, std::vector<float>& out) {
    out = reference_->logits(tokens);
    for (float v : out)
      if (std::isnan(v)) return false;
    return true;
  }

  std::shared_ptr<Request> whole(RequestKind kind, const Tokens& tokens, Outcome& outcome) {
    RequestOptions options = random_options();
    options.kind = kind;
    auto request = engine_.submit(tokens, {}, options);
    outcome = collect(*request, 1, random_.one_in(8) ? 1 : -1).choices[0];
    if (outcome.reason == FinishReason::cancelled) return nullptr;
    if (troubled() && outcome.reason == FinishReason::error) return nullptr;
    if (static_cast<int64_t>(tokens.size()) > max_context_) {
      check(outcome.error_code == ErrorCode::context_full, "context_full, got: " + outcome.error);
      return nullptr;
    }
    return request;
  }

  void logits() {
    const Tokens tokens = random_prompt();
    Outcome outcome;
    const auto request = whole(RequestKind::logits, tokens, outcome);
    std::vector<float> want;
    if (!request) return;
    if (!solo_logits(tokens, want)) {
      check(outcome.error_code == ErrorCode::model, "an error for logits that are NaN");
    } else {
      check(outcome.reason == FinishReason::stop, "logits, got: " + outcome.error);
      check(request->logits == want, "the logits of the solo run");
    }
  }

  void score() {
    const Tokens tokens = random_prompt();
    Outcome outcome;
    const auto request = whole(RequestKind::score, tokens, outcome);
    std::vector<float> rows;
    if (!request) return;
    solo_logits(tokens, rows);
    rows.resize((tokens.size() - 1) * mix_.vocab);  // the last token predicts nothing
    for (float v : rows)
      if (std::isnan(v)) return check(outcome.error_code == ErrorCode::model, "an error for NaN");
    check(outcome.reason == FinishReason::stop, "scores, got: " + outcome.error);
    check(request->scores.size() + 1 == tokens.size(), "a score per token but the first");
    for (size_t i = 0; i + 1 < tokens.size(); ++i) {
      const float* row = rows.data() + i * mix_.vocab;
      double sum = 0;
      for (int v = 0; v < mix_.vocab; ++v) sum += std::exp(static_cast<double>(row[v]));
      const double want = row[tokens[i + 1]] - std::log(sum);
      check(std::abs(request->scores[i] - want) < 1e-4, "the score of the solo run");
    }
  }

  std::pair<const HandleId, Tokens>& some_handle() {
    if (handles_.empty()) open();
    auto it = handles_.begin();
    std::advance(it, random_.in(0, static_cast<int64_t>(handles_.size()) - 1));
    return *it;
  }

  void open() {
    if (handles_.size() >= 4) close_one();
    open_with(random_prompt());
  }

  void close_one() {
    const auto it = handles_.begin();
    engine_.close(it->first, random_.one_in(2));
    closed.push_back(it->second);
    handles_.erase(it);
  }

  HandleId open_with(const Tokens& tokens) {
    HandleOptions options;
    options.salt = random_.pick({"", "owner"});
    options.retention_priority = static_cast<float>(random_.in(0, 2));
    options.persist = mix_.make_tiers && !random_.one_in(4);
    const HandleId id = engine_.open(options);
    handles_[id] = tokens;
    engine_.append(id, tokens);
    return id;
  }

  // Continues the tokens of a closed handle, or a prefix of them.
  void reopen() {
    if (closed.empty() || handles_.size() >= 6) return close_and_evict();
    Tokens tokens = closed[random_.in(0, static_cast<int64_t>(closed.size()) - 1)];
    if (random_.one_in(3)) tokens.resize(some_of(tokens));
    const HandleId id = open_with(tokens);
    if (random_.one_in(2)) engine_.warm(id);
    if (!random_.one_in(4)) turn(*handles_.find(id));
  }

  void close_and_evict() {
    if (!handles_.empty()) close_one();
    engine_.evict();
  }

  void tiers() {
    auto& [id, tokens] = some_handle();
    switch (random_.in(0, 6)) {
      case 0:
        return engine_.warm(id);
      case 1: {
        const Residence where = engine_.residence(tokens, "owner");
        int64_t last = where.device;
        for (const int64_t tokens : where.tiers)
          check(tokens >= std::exchange(last, tokens), "order");
        return check(last <= static_cast<int64_t>(tokens.size()),
                     "no more tokens than the sequence has");
      }
      case 2:
        return check(engine_.predict_ttft(tokens, 5) >= 0, "an estimate");
      case 3:
        return engine_.remove_pages(engine_.page_keys(tokens, random_.pick({"", "owner"})));
      case 4:
        return check(engine_.flush()->wait(60), "saves to end");
      case 5:
        engine_.refresh_pages();
        return check(engine_.speeds().bytes_per_token > 0, "bytes of a token's KV");
      default:
        engine_.save(id);
    }
  }

  Pending start_turn(HandleId id, Tokens& tokens) {
    const Tokens more = random_tokens(random_.in(tokens.empty() ? 1 : 0, 30));
    engine_.append(id, more);
    tokens.insert(tokens.end(), more.begin(), more.end());
    Pending p;
    p.params = random_params();
    p.prompt = tokens;
    p.handle = id;
    RequestOptions options;
    options.priority = static_cast<int>(random_.in(0, 2));
    options.exact = random_.one_in(6);
    p.request = engine_.generate(id, p.params, options);
    return p;
  }

  void turn() { turn(some_handle()); }

  void turn(std::pair<const HandleId, Tokens>& handle) {
    auto& [id, tokens] = handle;
    Pending p = start_turn(id, tokens);
    if (random_.one_in(4)) p.cancel_after = static_cast<int>(random_.in(0, 10));
    verify(p);
  }

  void advance() {
    auto& [id, tokens] = some_handle();
    const Tokens before = tokens;
    Pending p;
    tokens.resize(some_of(tokens));
    const int64_t prefix_length = static_cast<int64_t>(tokens.size());
    const Tokens more = random_tokens(random_.in(prefix_length == 0 ? 1 : 0, 30));
    tokens.insert(tokens.end(), more.begin(), more.end());
    p.prompt = tokens;
    p.params = random_params();
    if (random_.one_in(2)) p.params.continued = some_of(tokens);
    if (random_.one_in(4)) p.cancel_after = static_cast<int>(random_.in(0, 10));
    p.handle = id;
    RequestOptions options;
    options.priority = static_cast<int>(random_.in(0, 2));
    p.request =
        engine_.advance(id, prefix_length, more, p.params, options, random_retention_priority());
    verify(p);
    if (!fits(p)) tokens = before;
    check(engine_.token_ids(id) == tokens, "all of advance() or nothing");
  }

  void advance_while_busy() {
    auto& [id, tokens] = some_handle();
    Pending p = start_turn(id, tokens);
    const Tokens prompt = {1, 2};
    const auto request = engine_.advance(id, 0, prompt, random_params());
    const Outcome late = collect(*request, 1, -1).choices[0];
    const bool refused = late.reason == FinishReason::error && !is_of_step(late.error_code);
    check(!refused || late.error_code == ErrorCode::busy || max_context_ < 72,
          "advance() to be refused as busy, got: " + late.error);
    if (!refused) p.handle = 0;  // its turn had ended before
    verify(p);
    if (refused) return;
    tokens = prompt;
    tokens.insert(tokens.end(), late.tokens.begin(), late.tokens.end());
    check(engine_.token_ids(id) == tokens,
          "a handle to have the tokens of the call after its turn");
  }

  std::optional<float> random_retention_priority() {
    if (random_.one_in(2)) return std::nullopt;
    return static_cast<float>(random_.in(0, 3));
  }

  void rewind() {
    auto& [id, tokens] = some_handle();
    tokens.resize(random_.in(0, static_cast<int64_t>(tokens.size())));
    engine_.truncate(id, static_cast<int64_t>(tokens.size()));
  }

  void fork() {
    auto& [id, tokens] = some_handle();
    if (handles_.size() >= 6) return;
    const auto retention_priority = random_retention_priority();
    const HandleId copy = random_.one_in(2) ? engine_.fork(id, retention_priority)
                                            : engine_.fork_later(id, retention_priority);
    handles_.emplace(copy, tokens);
  }

  void fork_while_busy() {
    auto& [id, tokens] = some_handle();
    Pending p = start_turn(id, tokens);
    const size_t before = tokens.size();
    const HandleId copy = random_.one_in(2) ? engine_.fork(id) : engine_.fork_later(id);
    const Tokens copied = engine_.token_ids(copy);
    verify(p);
    check(copied.size() >= before && copied.size() <= tokens.size() &&
              std::equal(copied.begin(), copied.end(), tokens.begin()),
          "a fork to have the committed tokens");
    handles_.emplace(copy, copied);
    Pending second = start_turn(copy, handles_.at(copy));
    verify(second);
    engine_.close(copy);
    handles_.erase(copy);
  }

  void close_while_busy() {
    auto& [id, tokens] = some_handle();
    Pending p = start_turn(id, tokens);
    engine_.close(id);
    handles_.erase(id);
    p.handle = 0;
    p.cancel_after = 1 << 20;  // ends by itself or cancelled
    verify(p);
  }

  template <typename F>
  void expect_error(ErrorCode code, F&& f) {
    try {
      f();
    } catch (const Error& e) {
      return check(e.code() == code, std::string("another error than ") + e.what());
    }
    check(false, "an error");
  }

  void refuse() {
    SamplingParams bad;
    bad.top_p = 2;
    expect_error(ErrorCode::invalid_request, [&] { engine_.submit({}, {}); });
    expect_error(ErrorCode::invalid_request, [&] { engine_.submit({1, mix_.vocab}, {}); });
    expect_error(ErrorCode::invalid_request, [&] { engine_.submit({1}, bad); });
    expect_error(ErrorCode::not_found, [&] { engine_.length(1 << 30); });
    expect_error(ErrorCode::not_found, [&] { engine_.length(engine_.fork_later(1 << 30)); });
    expect_error(ErrorCode::invalid_request, [&] { engine_.open({"", 0, NAN, false}); });
    engine_.close(1 << 30);  // nothing to close
    auto& [id, tokens] = some_handle();
    expect_error(ErrorCode::invalid_request, [&] { engine_.append(id, {-1}); });
    expect_error(ErrorCode::invalid_request, [&] { engine_.advance(id, 0, {-1}, {}); });
    expect_error(ErrorCode::invalid_request, [&] { engine_.advance(id, -1, {1}, {}); });
    expect_error(ErrorCode::invalid_request, [&] { engine_.advance(id, 0, {1}, bad); });
    expect_error(ErrorCode::invalid_request, [&] { engine_.advance(id, 0, {1}, {}, {}, NAN); });
    expect_error(ErrorCode::invalid_request,
                 [&] { engine_.truncate(id, static_cast<int64_t>(tokens.size()) + 1); });
    expect_error(ErrorCode::invalid_request, [&] {
      SamplingParams two;
      two.n = 2;
      engine_.append(id, {1});
      tokens.push_back(1);
      engine_.generate(id, two);
    });
  }

  void housekeeping() {
    auto& [id, tokens] = some_handle();
    switch (random_.in(0, 4)) {
      case 0:
        return engine_.evict();
      case 1:
        return engine_.park(id);
      case 2:
        return engine_.set_retention_priority(id, static_cast<float>(random_.in(0, 3)));
      case 3:
        return check(engine_.length(id) == static_cast<int64_t>(tokens.size()), "a length");
      default:
        return engine_.check_invariants();
    }
  }

  const Mix& mix_;
  Engine& engine_;
  const int64_t max_context_;
  Random random_;
  std::unique_ptr<Reference> reference_;
  std::map<HandleId, Tokens> handles_;
};

}  // namespace turbomind::fuzz
