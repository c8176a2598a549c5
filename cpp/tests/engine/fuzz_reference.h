// The expected result of a request, computed without the engine under test.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "sampling/sampler.h"
#include "tests/engine/scripted_model.h"

namespace turbomind::fuzz {

inline void check(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error(what);
}

inline std::atomic<uint64_t> current_seed{0};  // of the mix that runs

// Ends the process: an engine that hangs cannot be closed.
[[noreturn]] inline void end_of_a_hang() {
  std::fprintf(stderr, "engine_fuzz: a request of --seed %llu had no event for a minute\n",
               static_cast<unsigned long long>(current_seed.load()));
  std::_Exit(1);
}

// The result of one choice.
struct Outcome {
  std::vector<int32_t> tokens;
  std::vector<TokenLogprobs> logprobs;
  FinishReason reason = FinishReason::none;
  ErrorCode error_code = ErrorCode::internal;
  std::string error;
};

// Everything a request reported; collect() checks the rules of the event stream.
struct Report {
  std::vector<Outcome> choices;
  int64_t reused_tokens = 0, loaded_tokens = 0, foreign_tokens = 0;
};

// Reads a request to its end; cancels it, or one `choice` of it, once `cancel_after` events were
// seen (< 0: never).
inline Report collect(Request& request, int n, int cancel_after, int choice_to_cancel = -1) {
  Report report;
  report.choices.resize(n);
  int seen = 0, open = n;
  int64_t progress = 0;
  bool terminal = false;
  const auto cancel = [&] {
    choice_to_cancel < 0 ? request.cancel() : request.cancel_choice(choice_to_cancel);
  };
  if (cancel_after == 0) cancel();
  while (!request.done()) {
    if (!request.wait(60)) end_of_a_hang();
    for (Event& event : request.drain()) {
      check(!terminal, "an event after the terminal one");
      check(event.choice >= 0 && event.choice < n, "an event of an unknown choice");
      Outcome& choice = report.choices[event.choice];
      check(choice.reason == FinishReason::none, "an event of a finished choice");
      if (event.progress_total > 0) {
        check(event.progress_done >= progress && event.progress_done <= event.progress_total,
              "progress up to the length of the prompt");
        progress = event.progress_done;
      }
      choice.tokens.insert(choice.tokens.end(), event.token_ids.begin(), event.token_ids.end());
      for (TokenLogprobs& l : event.logprobs) choice.logprobs.push_back(std::move(l));
      choice.reason = event.finish;
      if (event.finish != FinishReason::none) {
        choice.error_code = event.error_code;
        choice.error = event.error;
        check((event.finish == FinishReason::error) == !event.error.empty(), "an error's text");
        check(event.reused_tokens <= event.prompt_tokens, "more tokens reused than the prompt has");
        report.reused_tokens = event.reused_tokens;
        report.loaded_tokens = event.loaded_tokens;
        report.foreign_tokens = event.foreign_tokens;
        check(event.loaded_tokens <= event.reused_tokens &&
                  event.foreign_tokens <= event.reused_tokens,
              "loaded and foreign tokens to be reused ones");
        check(event.terminal == (--open == 0), "the last choice's end alone to be terminal");
      }
      terminal = event.terminal;
      if (++seen == cancel_after) cancel();
    }
  }
  check(terminal && open == 0, "a terminal event");
  return report;
}

class Reference {
 public:
  virtual ~Reference() = default;
  virtual std::vector<Outcome> generate(const std::vector<int32_t>& prompt,
                                        const SamplingParams& params, int64_t max_context) = 0;
  // [len, vocab]; with NaN where the model gives NaN.
  virtual std::vector<float> logits(const std::vector<int32_t>& tokens) = 0;
};

// Applies the rule of the scripted model and the sampler, one token after another.
class ScriptedReference : public Reference {
 public:
  explicit ScriptedReference(scripted::Options options)
      : rule_(std::move(options)),
        context_{pool_, Isa::portable, profiler_},
        sampler_(context_, rule_.options().vocab) {}

  std::vector<Outcome> generate(const std::vector<int32_t>& prompt, const SamplingParams& params,
                                int64_t max_context) override {
    std::vector<Outcome> out(params.n);
    const auto shared = std::make_shared<const SamplingParams>(params);
    for (int choice = 0; choice < params.n; ++choice)
      run(prompt, shared, choice, max_context, out[choice]);
    return out;
  }

  std::vector<float> logits(const std::vector<int32_t>& tokens) override {
    const size_t vocab = rule_.options().vocab;
    std::vector<float> out(tokens.size() * vocab);
    for (size_t i = 0; i < tokens.size(); ++i)
      rule_.logits(tokens, static_cast<int64_t>(i), out.data() + i * vocab);
    return out;
  }

 private:
  void run(std::vector<int32_t> tokens, const std::shared_ptr<const SamplingParams>& params,
           int choice, int64_t max_context, Outcome& out) {
    SamplerState state(params, choice, tokens.data(), static_cast<int64_t>(tokens.size()));
    std::vector<float> logits(rule_.options().vocab);
    while (out.reason == FinishReason::none) {
      rule_.logits(tokens, static_cast<int64_t>(tokens.size()) - 1, logits.data());
      SampleJob job;
      job.logits = logits.data();
      job.state = &state;
      job.position = static_cast<int64_t>(tokens.size());
      if (rule_.options().asynchronous && state.device_samples()) {
        job.token =
            scripted::sample_token(logits.data(), rule_.options().vocab, state.device_row(job, 0));
        job.finite = job.token >= 0;
        if (job.finite && params->logprobs >= 0)
          job.logprobs = told_by_device(logits, job.token, params->logprobs);
      } else {
        sampler_.sample(&job, 1);
      }
      if (!job.finite) {
        out.reason = FinishReason::error;
        out.error_code = ErrorCode::model;
        return;
      }
      out.reason = state.finish_of(job.token);
      state.accept(job.token);
      tokens.push_back(job.token);
      out.tokens.push_back(job.token);
      if (params->logprobs >= 0) out.logprobs.push_back(job.logprobs);
      const bool full = static_cast<int64_t>(out.tokens.size()) == params->max_new_tokens ||
                        static_cast<int64_t>(tokens.size()) >= max_context;
      if (out.reason == FinishReason::none && full) out.reason = FinishReason::length;
    }
  }

  static TokenLogprobs told_by_device(const std::vector<float>& logits, int32_t token, int top) {
    TokenLogprobs out;
    const auto vocab = static_cast<int>(logits.size());
    for (const auto& [id, value] : scripted::logprobs_of(logits.data(), vocab, token, top))
      out.top.emplace_back(id, value);
    out.logprob = out.top.front().second;
    out.top.erase(out.top.begin());
    return out;
  }

  scripted::Rule rule_;
  ThreadPool pool_{1};
  Profiler profiler_;
  Context context_;
  Sampler sampler_;
};

// Runs one request at a time on an engine with enough pages and no prefix reuse.
class SoloEngineReference : public Reference {
 public:
  explicit SoloEngineReference(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

  std::vector<Outcome> generate(const std::vector<int32_t>& prompt, const SamplingParams& params,
                                int64_t max_context) override {
    SamplingParams p = params;
    const int64_t room = max_context - static_cast<int64_t>(prompt.size());
    if (p.max_new_tokens < 0) p.max_new_tokens = room;
    return collect(*engine_->submit(prompt, p), p.n, -1).choices;
  }
  std::vector<float> logits(const std::vector<int32_t>& tokens) override {
    RequestOptions options;
    options.kind = RequestKind::logits;
    const auto request = engine_->submit(tokens, {}, options);
    check(collect(*request, 1, -1).choices[0].reason == FinishReason::stop, "a finished solo run");
    return request->logits;
  }

 private:
  std::shared_ptr<Engine> engine_;
};

}  // namespace turbomind::fuzz
