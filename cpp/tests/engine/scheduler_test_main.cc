// What the scheduler puts into a step, where the time of a step follows from its size alone.
#include <cstdio>
#include <exception>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/page_memory_of.h"
#include "engine/step/scheduler.h"
#include "tests/engine/fuzz_reference.h"

namespace turbomind::fuzz {
namespace {

constexpr int kLive = 0, kStranger = 1;  // priorities

struct Job {
  RequestState state;
  SequenceState sequence;
  int64_t produced = 0;
  int64_t planned = 0;  // tokens in the last step
  Sequence& seq() { return *sequence.kv; }
};

// Requests, and steps that are carried out in the books only.
class Simulation {
 public:
  Simulation(double step_ms, int max_batch_size)
      : model_(scripted::Options{}),
        kv_(page_memory_of(model_), 500, false),
        scheduler_(kv_, options(step_ms, max_batch_size), [] { return false; }) {
    Job& first = add(kLive, 2000);  // so that the estimate of a step's time has seen all sizes
    while (first.produced < 20) step();
    drop(first);
  }

  Job& add(int priority, int64_t tokens) {
    Job& job = next(priority);
    job.sequence.own_kv = kv_.make_sequence(0, "", 0);
    job.sequence.kv = &job.sequence.own_kv;
    return run(job, tokens);
  }

  void stop(Job& job) { scheduler_.remove(&job.sequence); }  // its sequence stays

  // The next turn of what `kept`, stopped, has left: `tokens` more.
  Job& add_turn(int priority, int64_t tokens, Job& kept) {
    Job& job = next(priority);
    job.sequence.kv = kept.sequence.kv;
    return run(job, tokens);
  }

  void drop(Job& job) {
    stop(job);
    kv_.drop_pages(job.seq());
  }

  // The step's tokens in all. `follow`: the one behind it is planned before it ends.
  int64_t step(bool follow = false) {
    if (std::exchange(ahead_, false)) {
      std::swap(plan_, next_);
    } else {
      scheduler_.plan(plan_);
    }
    ahead_ = follow && scheduler_.plan_next(plan_, next_);
    steps_overlapped += ahead_;
    for (auto& job : jobs_) job->planned = 0;
    for (const PlannedSequence& row : plan_.sequences) {
      kv_.commit_write(*row.sequence->kv, row.tokens);
      Job& job = *jobs_[row.sequence->request->arrival];
      job.planned = row.tokens;
      if (job.seq().pending() > 0) continue;
      job.seq().tokens.push_back(7);
      ++job.produced;
    }
    if (learns) scheduler_.observe(plan_, 1 + 0.1 * static_cast<double>(plan_.cost.tokens));
    return plan_.cost.tokens;
  }

  // What each job has in the last step.
  std::vector<int64_t> shares() const {
    std::vector<int64_t> shares;
    for (const auto& job : jobs_) shares.push_back(job->planned);
    return shares;
  }
  Job& job(size_t i) { return *jobs_[i]; }

  int64_t steps_overlapped = 0;
  bool learns = true;  // what steps take

  int steps_until_token(const Job& job, int most) {
    for (int steps = 0; steps < most; ++steps) {
      step();
      if (job.produced > 0) return steps + 1;
    }
    throw std::runtime_error("no token in " + std::to_string(most) + " steps");
  }

 private:
  static EngineOptions options(double step_ms, int max_batch_size) {
    EngineOptions options;
    options.step_ms = step_ms;
    options.max_batch_size = max_batch_size;
    return options;
  }

  Job& next(int priority) {
    Job& job = *jobs_.emplace_back(std::make_unique<Job>());
    job.state.options.priority = priority;
    job.state.arrival = jobs_.size() - 1;
    job.state.limit = 1 << 20;
    job.state.params = std::make_shared<SamplingParams>();
    job.state.request = std::make_shared<Request>(jobs_.size(), nullptr);
    job.sequence.request = &job.state;
    return job;
  }

  Job& run(Job& job, int64_t tokens) {
    job.seq().tokens.insert(job.seq().tokens.end(), tokens, 7);
    scheduler_.add(&job.sequence);
    return job;
  }

  scripted::ScriptedModel model_;
  KvCache kv_;
  Scheduler scheduler_;
  StepPlan plan_, next_;
  bool ahead_ = false;                      // next_ is the step to come
  std::vector<std::unique_ptr<Job>> jobs_;  // by arrival
};

// A kept handle's next turn beside a stranger's long prompt: at most three steps, whether others
// decode or not, and also when strangers have every row.
void check_live_turn() {
  for (const int decoding : {0, 4})
    for (const int rows : {16, decoding + 1})
      for (const int64_t turn : {1, 12, 200, 700}) {
        Simulation simulation(100, rows);
        Job& session = simulation.add(kLive, 1500);
        simulation.steps_until_token(session, 10);
        simulation.stop(session);
        for (int i = 0; i < decoding; ++i) simulation.add(kStranger, 20);
        Job& stranger = simulation.add(kStranger, 6000);
        for (int i = 0; i < 2; ++i) simulation.step();
        check(rows < 16 || stranger.planned > 0, "the stranger's prompt to be under way");
        Job& next = simulation.add_turn(kLive, turn, session);
        check(simulation.steps_until_token(next, 3) <= 3, "a token within three steps");
        check(next.seq().written == 1500 + 1 + turn, "a turn behind what was kept");
      }
}

// A brief turn is answered by one step, however long the others alone take.
void check_brief_turn() {
  Simulation simulation(0.5, 16);
  for (int i = 0; i < 6; ++i) simulation.add(kLive, 20);
  for (int i = 0; i < 20; ++i) simulation.step();
  Job& stranger = simulation.add(kStranger, 3000);
  simulation.step();
  check(stranger.planned == 16, "the least chunk of a long prompt");
  Job& turn = simulation.add(kLive, 64);
  check(simulation.steps_until_token(turn, 1) == 1, "a brief turn in one step");
}

// A step that gives somebody a token is not made longer by the prompts behind it.
void check_step_time() {
  constexpr int64_t kTarget = 90, kAlone = 390;  // tokens of 10 and of 40 ms
  Simulation simulation(10, 16);
  Job& stranger = simulation.add(kStranger, 6000);
  int64_t tokens = simulation.step();
  check(tokens > 2 * kTarget && tokens <= kAlone, "a longer step while nobody waits for a token");
  Job& brief = simulation.add(kLive, 12);
  tokens = simulation.step();
  check(brief.produced == 1, "the brief prompt's token");
  check(tokens <= kTarget && stranger.planned > kTarget / 2, "the target's rest for the stranger");
  tokens = simulation.step();
  check(brief.produced == 2 && tokens <= kTarget, "the target while one decodes");
  simulation.drop(brief);
  Job& longer = simulation.add(kLive, 300);
  tokens = simulation.step();
  check(longer.produced == 1 && tokens <= 300 + 16, "nothing beyond the least chunk");
  simulation.drop(longer);
  check(simulation.step() > 2 * kTarget, "a longer step again");
}

// Prompts of a better priority that come without end leave a prompt its least chunk per step.
void check_progress() {
  constexpr int64_t kPrompt = 400, kLeast = 16;
  for (const double step_ms : {1.0, 10.0, 100.0}) {
    Simulation simulation(step_ms, 8);
    Job& stranger = simulation.add(kStranger, kPrompt);
    std::vector<Job*> live;
    for (int i = 0; i < 3; ++i) live.push_back(&simulation.add(kLive, 2000));
    for (int steps = 0; stranger.produced == 0; ++steps) {
      check(steps <= kPrompt / kLeast, "the prompt to be done by now");
      const int64_t tokens = simulation.step();
      int64_t rest = tokens;
      for (Job*& job : live) {
        rest -= job->planned;
        if (job->produced == 0) continue;
        simulation.drop(*job);
        job = &simulation.add(kLive, 2000);
      }
      check(stranger.planned >= kLeast, "the least chunk of the one that waits longest");
      check(rest == stranger.planned && tokens <= 512, "no more than a chunk in all");
      check(tokens > stranger.planned, "live prompts to go on");
    }
  }
}

// A step that is planned before the one in front of it has ended is the one that would be planned
// behind it, whoever comes and goes.
void check_ahead() {
  for (uint32_t seed = 1; seed <= 8; ++seed) {
    std::mt19937 random(seed);
    const double step_ms = seed % 2 == 0 ? 10 : 2;
    Simulation waits(step_ms, 6), ahead(step_ms, 6);
    waits.learns = ahead.learns = false;  // else one would know of a step more than the other
    std::vector<size_t> present;
    for (size_t i = 0; i < 400; ++i) {
      const bool coming = random() % 6 == 0;
      waits.step();
      ahead.step(!coming);
      check(waits.shares() == ahead.shares(), "equal steps, seed " + std::to_string(seed));
      if (!coming) continue;
      for (size_t j = 0; j < present.size();)  // some that decode end
        if (waits.job(present[j]).produced > 5 && random() % 2 == 0) {
          waits.drop(waits.job(present[j]));
          ahead.drop(ahead.job(present[j]));
          present.erase(present.begin() + static_cast<int64_t>(j));
        } else {
          ++j;
        }
      if (present.size() >= 8) continue;
      const int priority = static_cast<int>(random() % 2);
      const auto tokens = static_cast<int64_t>(1 + random() % (random() % 2 ? 60 : 1500));
      present.push_back(static_cast<size_t>(waits.add(priority, tokens).state.arrival));
      ahead.add(priority, tokens);
    }
    check(ahead.steps_overlapped > 200,
          "most steps to be planned ahead, got " + std::to_string(ahead.steps_overlapped));
  }
}

}  // namespace
}  // namespace turbomind::fuzz

int main() {
  try {
    turbomind::fuzz::check_live_turn();
    turbomind::fuzz::check_brief_turn();
    turbomind::fuzz::check_step_time();
    turbomind::fuzz::check_progress();
    turbomind::fuzz::check_ahead();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "scheduler_test: expected %s\n", e.what());
    return 1;
  }
  std::puts("scheduler_test: passed");
  return 0;
}
