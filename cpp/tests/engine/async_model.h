// The scripted model as an asynchronous device: submitted work runs in order when the host waits
// for it, not before. A page that is reused too early ends the process.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "tests/engine/scripted_model.h"

namespace turbomind::scripted {

class AsyncModel : public ScriptedModel, public StepOutputs {
 public:
  using ScriptedModel::ScriptedModel;

  StepOutputs* outputs() override { return this; }

  void copy_page(int group, int32_t src, int32_t dst) override {
    std::vector<Touch> touched = {{group, src, kPageTokens}, {group, dst, 0}};
    push([=, this] { ScriptedModel::copy_page(group, src, dst); }, std::move(touched));
  }

  bool forward(const StepBatch& batch, float* logits, const StepCancel* cancel) override {
    if (logits) {
      run_all();
      return ScriptedModel::forward(batch, logits, cancel);
    }
    fail(options().fail_submit, "submit");
    if (cancel && cancel->requested()) return false;
    const auto step = std::make_shared<Recorded>(batch);
    push([this, step] { compute(*step); }, step->touched());
    return true;
  }

  void reserve(const StepLimits& most) override { most_samples_ = most.sampled; }

  void submit_sample(const SampleRow* rows, int64_t count) override {
    expect(count <= most_samples_, "no more rows than there is memory for");
    push([this, rows = std::vector<SampleRow>(rows, rows + count)] { sample_rows(rows); }, {});
  }

  void read_tokens(int32_t* tokens) override {
    while (sampled_.empty()) run_one();
    fail(options().fail_wait, "wait");
    std::copy(sampled_.front().begin(), sampled_.front().end(), tokens);
    sampled_.pop_front();
  }

  void submit_logprobs(const LogprobRow* rows, int64_t count) override {
    push([this, rows = std::vector<LogprobRow>(rows, rows + count)] { log_rows(rows); }, {});
  }

  void read_logprobs(Logprob* out) override {
    while (logged_.empty()) run_one();
    std::copy(logged_.front().begin(), logged_.front().end(), out);
    logged_.pop_front();
  }

  void read_logits(int64_t first, int64_t count, float* out) override {
    run_all();
    std::copy_n(logits_.data() + first * vocab(), count * vocab(), out);
  }

  void abandon_steps() noexcept override {
    while (!work_.empty()) try {
        run_one();
      } catch (const std::exception&) {  // the device runs the rest
      }
    sampled_.clear();
    logged_.clear();
  }

  void read_page(int group, int32_t page, int count, uint8_t* out) const override {
    check_untouched(group, page, count);
    ScriptedModel::read_page(group, page, count, out);
  }
  void write_page(int group, int32_t page, int count, const uint8_t* in, int stored) override {
    check_untouched(group, page, kPageTokens + 1);
    ScriptedModel::write_page(group, page, count, in, stored);
  }

 private:
  // A page that submitted work uses, and its first slot that the work may write.
  struct Touch {
    int group;
    int32_t page;
    int first_written;
  };
  struct Work {
    std::function<void()> run;
    std::vector<Touch> touched;
  };

  // A step with copies of its page tables, which may change after the submission.
  struct Recorded {
    StepBatch batch;
    std::vector<std::vector<int32_t>> tables;  // per row and group

    explicit Recorded(const StepBatch& b) : batch(b) {
      for (StepRow& row : batch.rows)
        for (const int32_t*& pages : row.pages) {
          const int64_t count = (row.kv_begin + row.q_len + kPageTokens - 1) / kPageTokens;
          pages = tables.emplace_back(pages, pages + count).data();
        }
    }
    std::vector<Touch> touched() const {
      std::vector<Touch> out;
      size_t table = 0;
      for (const StepRow& row : batch.rows)
        for (size_t g = 0; g < row.pages.size(); ++g, ++table)
          for (size_t j = 0; j < tables[table].size(); ++j) {
            const int64_t written = row.kv_begin - static_cast<int64_t>(j) * kPageTokens;
            out.push_back({static_cast<int>(g), tables[table][j],
                           static_cast<int>(std::clamp<int64_t>(written, 0, kPageTokens))});
          }
      return out;
    }
  };

  void push(std::function<void()> run, std::vector<Touch> touched) {
    std::lock_guard lock(mutex_);
    work_.push_back({std::move(run), std::move(touched)});
  }

  void run_one() {
    expect(!work_.empty(), "a step to wait for");
    try {
      work_.front().run();
    } catch (...) {
      pop();
      throw;
    }
    pop();
  }
  void pop() {
    std::lock_guard lock(mutex_);
    work_.pop_front();
  }
  void run_all() {
    while (!work_.empty()) run_one();
  }

  void compute(Recorded& step) {
    StepBatch& batch = step.batch;
    for (size_t i = 0; i < batch.token_from.size(); ++i)
      if (batch.token_from[i] >= 0)
        batch.token_ids[i] = std::max(last_sampled_.at(batch.token_from[i]), 0);
    logits_.clear();
    logits_.resize(batch.sample_rows.size() * vocab());
    ScriptedModel::forward(batch, logits_.data(), nullptr);
  }

  void sample_rows(const std::vector<SampleRow>& rows) {
    last_sampled_.clear();
    for (const SampleRow& row : rows) {
      const size_t end = (row.logits_row + 1) * static_cast<size_t>(vocab());
      expect(end <= logits_.size(), "a row that was computed");  // the step may have failed
      expect(row.out == static_cast<int32_t>(last_sampled_.size()), "rows to be sampled in order");
      last_sampled_.push_back(
          sample_token(logits_.data() + row.logits_row * vocab(), vocab(), row));
    }
    sampled_.push_back(last_sampled_);
  }

  void log_rows(const std::vector<LogprobRow>& rows) {
    std::vector<Logprob>& out = logged_.emplace_back();
    for (const LogprobRow& row : rows) {
      expect(row.out == static_cast<int32_t>(out.size()), "entries without gaps");
      const int32_t token = last_sampled_.at(row.sampled);
      const float* logits = logits_.data() + int64_t{row.logits_row} * vocab();
      const auto entries = logprobs_of(logits, vocab(), std::max(token, 0), row.top);
      out.insert(out.end(), entries.begin(), entries.end());
    }
  }

  // Checks pages that other threads copy: submitted steps neither use a page that is written, nor
  // write slots that are read.
  void check_untouched(int group, int32_t page, int count) const {
    std::lock_guard lock(mutex_);
    for (const Work& work : work_)
      for (const Touch& touch : work.touched)
        if (touch.group == group && touch.page == page && touch.first_written < count) {
          std::fprintf(stderr, "page %d of group %d is moved while a step refers to it\n", page,
                       group);
          std::abort();
        }
  }

  void fail(int per_thousand, const char* where) {
    if (static_cast<int>(random_() % 1000) < per_thousand)
      throw Error(ErrorCode::model, std::string("trouble: ") + where);
  }

  int64_t most_samples_ = 0;  // of a submit_sample() at most
  mutable std::mutex mutex_;  // guards state that other threads read
  std::deque<Work> work_;
  std::deque<std::vector<int32_t>> sampled_;  // not read yet
  std::deque<std::vector<Logprob>> logged_;
  std::vector<int32_t> last_sampled_;
  std::vector<float> logits_;  // of the last step
  std::mt19937 random_{11};
};

}  // namespace turbomind::scripted
