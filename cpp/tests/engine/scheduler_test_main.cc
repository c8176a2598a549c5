// The scheduler on its own, with step times that follow from the size of a step alone.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cache/pool_sizes.h"
#include "engine/idle_handles.h"
#include "engine/page_memory_of.h"
#include "engine/step/scheduler.h"
#include "tests/check.h"
#include "tests/engine/fuzz_reference.h"
#include "tiers/fetch/page_loads.h"

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

// Requests and steps without a model: only the bookkeeping is done.
class Simulation {
 public:
  Simulation(double step_ms, int max_batch_size, bool asynchronous = false, int chunk = 0,
             bool prefix_reuse = false, std::vector<int> windows = {0},
             std::vector<int64_t> pages = {kPages})
      : model_(script(std::move(windows))),
        kv_(page_memory_of(model_), pages, prefix_reuse),
        scheduler_(
            kv_, options(step_ms, max_batch_size, chunk), [] { return false; }, nullptr,
            asynchronous) {
    Job& first = add(kLive, 2000);  // lets the fit of step times observe all sizes
    while (first.produced < 20) step();
    drop(first);
  }

  Job& add(int priority, int64_t tokens, int32_t token = 7) {
    Job& job = next(priority);
    job.sequence.own_kv = kv_.make_sequence(0, "", 0);
    job.sequence.kv = &job.sequence.own_kv;
    return run(job, tokens, token);
  }

  void stop(Job& job) { scheduler_.remove(&job.sequence); }  // its sequence stays

  // Adds the next turn, of `tokens` tokens, after the stopped job `before`.
  Job& add_turn(int priority, int64_t tokens, Job& before) {
    Job& job = next(priority);
    job.sequence.kv = before.sequence.kv;
    return run(job, tokens);
  }

  void drop(Job& job) {
    stop(job);
    kv_.drop_pages(job.seq());
  }

  // Runs a step and returns its tokens. `follow`: plans the next one before this one ends.
  int64_t step(bool follow = false) {
    if (std::exchange(planned_next_, false)) {
      std::swap(plan_, next_);
    } else {
      scheduler_.plan(plan_);
    }
    planned_next_ = follow && scheduler_.plan_next(plan_, next_);
    steps_overlapped += planned_next_;
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

  // Returns the tokens of each job in the last step.
  std::vector<int64_t> shares() const {
    std::vector<int64_t> shares;
    for (const auto& job : jobs_) shares.push_back(job->planned);
    return shares;
  }
  Job& job(size_t i) { return *jobs_[i]; }
  int64_t preemptions() const { return scheduler_.preemptions(); }

  // Checks the references of all pages, and that windows hold what their next query reaches.
  void check_pages() {
    std::vector<const Sequence*> sequences;
    for (auto& job : jobs_) {
      sequences.push_back(&job->seq());
      for (size_t g = 0; g < kv_.groups(); ++g)
        check(job->seq().first_held[g] <=
                  kv_.first_reachable(static_cast<int>(g), job->seq().written),
              "a window to be held");
    }
    if (!planned_next_) kv_.check(sequences);
  }

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
  static constexpr int kPages = 1700;

  static scripted::Options script(std::vector<int> windows) {
    scripted::Options options;
    options.windows = std::move(windows);
    return options;
  }

  static EngineOptions options(double step_ms, int max_batch_size, int chunk) {
    EngineOptions options;
    options.step_ms = step_ms;
    options.max_batch_size = max_batch_size;
    options.prefill_chunk = chunk;
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

  Job& run(Job& job, int64_t tokens, int32_t token = 7) {
    job.seq().tokens.insert(job.seq().tokens.end(), tokens, token);
    job.state.prompt_tokens = job.seq().length();
    scheduler_.add(&job.sequence);
    return job;
  }

  scripted::ScriptedModel model_;
  KvCache kv_;
  Scheduler scheduler_;
  StepPlan plan_, next_;
  bool planned_next_ = false;               // next_ has the next step
  std::vector<std::unique_ptr<Job>> jobs_;  // by arrival
};

// The next turn of an open handle beside a long prompt of worse priority gets a token within three
// steps, whether others decode or not, and also when worse priorities have every slot.
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
        check(rows < 16 || stranger.planned > 0, "the long prompt to have begun");
        Job& next = simulation.add_turn(kLive, turn, session);
        check(simulation.steps_until_token(next, 3) <= 3, "a token within three steps");
        check(next.seq().written == 1500 + 1 + turn, "a turn after the KV of the handle");
      }
}

// Losing a slot to live turns again and again does not make a sequence wait for more free pages.
void check_displaced_often() {
  Simulation simulation(100, 2);
  Job& reply = simulation.add(kStranger, 100);
  simulation.steps_until_token(reply, 10);
  Job& other = simulation.add(kLive, 20);
  for (int i = 0; i < 12; ++i) {
    Job& turn = simulation.add(kLive, 20);
    simulation.steps_until_token(turn, 3);
    check(reply.planned == 0 && other.planned > 0, "the reply to lose its slot");
    simulation.drop(turn);
    simulation.step();
    check(reply.planned == 1, "the reply to continue at once, with its KV");
  }
}

// A live turn gets a slot though sequences of worse priority hold nearly all pages.
void check_live_turn_without_pages() {
  Simulation simulation(100, 4, false, 4096);
  Job& stranger = simulation.add(kStranger, 106000);
  simulation.steps_until_token(stranger, 400);
  Job& turn = simulation.add(kLive, 200);
  check(simulation.steps_until_token(turn, 3) <= 3, "a token within three steps");
}

// A short turn gets its token after one step, however long the other prompts are.
void check_brief_turn() {
  Simulation simulation(0.5, 16);
  for (int i = 0; i < 6; ++i) simulation.add(kLive, 20);
  for (int i = 0; i < 20; ++i) simulation.step();
  Job& stranger = simulation.add(kStranger, 3000);
  simulation.step();
  check(stranger.planned == 16, "the least chunk of a long prompt");
  Job& turn = simulation.add(kLive, 64);
  check(simulation.steps_until_token(turn, 1) == 1, "a short turn in one step");
}

// A short prompt is computed without the decoding of worse priority where that makes its step much
// shorter, but not twice in a row.
void check_ahead_of_decoding() {
  for (const bool follow : {false, true}) {
    Simulation simulation(100, 32, follow);
    std::vector<Job*> strangers;
    for (int i = 0; i < 15; ++i) strangers.push_back(&simulation.add(kStranger, 20, 10 + i));
    for (int i = 0; i < 20; ++i) simulation.step();
    const auto progress = [&] { return strangers[0]->planned + strangers[14]->planned; };
    Job& first = simulation.add(kLive, 12);
    check(simulation.step() == 12 && first.produced == 1, "the prompt alone");
    Job& second = simulation.add(kLive, 12);
    check(simulation.step(follow) == 12 + 1 + 15 && progress() == 2, "decoding in between");
    check(second.produced == 1, "a short prompt beside decoding in one step");
    simulation.step(follow);
    check(progress() == 2, "all to decode");
    Job& longer = simulation.add(kLive, 60);
    for (int i = 0; longer.produced == 0; ++i) {
      check(i < 3, "a token of the longer prompt");
      simulation.step();
      check(progress() == 2, "no step without them for a gain of a quarter or less");
    }
    Job& equal = simulation.add(kStranger, 12);
    while (equal.produced == 0) {
      simulation.step();
      check(progress() == 2, "no step without those of equal priority");
    }
  }
}

// A step after which a sequence gets a token is not made longer by other prompts.
void check_step_time() {
  constexpr int64_t kTarget = 90, kAlone = 390;  // tokens of 10 and of 40 ms
  Simulation simulation(10, 16);
  Job& stranger = simulation.add(kStranger, 6000);
  int64_t tokens = simulation.step();
  check(tokens > 2 * kTarget && tokens <= kAlone, "a longer step while no sequence gets a token");
  Job& brief = simulation.add(kLive, 12);
  tokens = simulation.step();
  check(brief.produced == 1, "the brief prompt's token");
  check(tokens <= kTarget && stranger.planned > kTarget / 2,
        "the rest of the target for the long prompt");
  tokens = simulation.step();
  check(brief.produced == 2 && tokens <= kTarget, "the target while one decodes");
  simulation.drop(brief);
  Job& longer = simulation.add(kLive, 300);
  tokens = simulation.step();
  check(longer.produced == 1 && tokens <= 300 + 16, "nothing beyond the least chunk");
  simulation.drop(longer);
  check(simulation.step() > 2 * kTarget, "a longer step again");
}

// A prompt gets its least chunk per step while prompts of better priority arrive without end.
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
      check(tokens > stranger.planned, "the prompts of better priority to progress");
    }
  }
}

// A short prompt does not wait for a long one of its priority, which keeps half of each step while
// short ones come without end.
void check_short_beside_long() {
  for (const double step_ms : {1.0, 10.0, 100.0}) {
    Simulation simulation(step_ms, 8);
    Job& longest = simulation.add(kStranger, 100000, 8);
    int64_t alone = 0;
    for (int i = 0; i < 3; ++i) alone = simulation.step();
    for (int i = 0; i < 20; ++i) {
      Job& brief = simulation.add(kStranger, 100);
      for (int steps = 1; brief.produced == 0; ++steps) {
        check(steps <= 8, "a short prompt to be answered within 8 steps");
        const int64_t tokens = simulation.step();
        check(longest.planned >= std::min<int64_t>(tokens / 2 - 16, 16) && longest.planned > 0,
              "the long prompt to keep moving");
        check(4 * tokens + 64 >= (step_ms == 1 ? 0 : alone / 4), "full steps");
      }
      simulation.drop(brief);
    }
  }
}

// Equal prompts are completed one after the other, not all at the end.
void check_equal_prompts() {
  Simulation simulation(10, 8);
  std::vector<Job*> jobs;
  for (int i = 0; i < 4; ++i) jobs.push_back(&simulation.add(kStranger, 3000, 10 + i));
  for (size_t i = 0; i < jobs.size(); ++i) {
    simulation.steps_until_token(*jobs[i], 200);
    for (size_t j = i + 1; j < jobs.size(); ++j)
      check(jobs[j]->produced == 0, "prompts in order of arrival");
    if (i + 1 < jobs.size())
      check(jobs[i + 1]->seq().written < 600, "the next prompt to have hardly begun");
    simulation.drop(*jobs[i]);
  }
}

// On a device with two steps in flight a prompt alone is not cut where it fits a chunk.
void check_lone_prompt() {
  Simulation simulation(25, 8, true, 700);  // 0.1 ms per token: half of 100 ms is 490 tokens
  Job& lone = simulation.add(kStranger, 700);
  check(simulation.step() == 700 && lone.produced == 1, "a prompt alone in one step");
  simulation.drop(lone);
  simulation.add(kStranger, 700, 8);
  simulation.add(kStranger, 700, 9);
  check(simulation.step() < 500, "shorter steps while another one waits for them");
}

// The longest cached prefix gets the next slot, but none waits for more than 8 others.
void check_cached_first() {
  Simulation simulation(100, 1, false, 0, true);
  Job& first = simulation.add(kStranger, 640, 5);
  simulation.steps_until_token(first, 20);
  Job& patient = simulation.add(kStranger, 640, 6);
  std::vector<Job*> cached;
  for (int i = 0; i < 12; ++i) cached.push_back(&simulation.add(kStranger, 640, 5));
  simulation.drop(first);
  int before = 0;
  while (patient.produced == 0) {
    simulation.step();
    for (Job*& job : cached) {
      if (!job || job->produced == 0) continue;
      simulation.drop(*job);
      job = nullptr;
      ++before;
    }
  }
  check(before == 8, "eight sequences with a cached prefix first, got " + std::to_string(before));
}

// plan_next() before the end of a step gives the same plan as plan() after it, whatever sequences
// come and go.
void check_overlapped() {
  for (uint32_t seed = 1; seed <= 8; ++seed) {
    std::mt19937 random(seed);
    const double step_ms = seed % 2 == 0 ? 10 : 2;
    Simulation waits(step_ms, 6), overlapped(step_ms, 6);
    waits.learns = overlapped.learns = false;  // else the two would have observed different steps
    std::vector<size_t> present;
    for (size_t i = 0; i < 400; ++i) {
      const bool coming = random() % 6 == 0;
      waits.step();
      overlapped.step(!coming);
      check(waits.shares() == overlapped.shares(), "equal steps, seed " + std::to_string(seed));
      if (!coming) continue;
      for (size_t j = 0; j < present.size();)  // some that decode end
        if (waits.job(present[j]).produced > 5 && random() % 2 == 0) {
          waits.drop(waits.job(present[j]));
          overlapped.drop(overlapped.job(present[j]));
          present.erase(present.begin() + static_cast<int64_t>(j));
        } else {
          ++j;
        }
      if (present.size() >= 8) continue;
      const int priority = static_cast<int>(random() % 2);
      const auto tokens = static_cast<int64_t>(1 + random() % (random() % 2 ? 60 : 1500));
      present.push_back(static_cast<size_t>(waits.add(priority, tokens).state.arrival));
      overlapped.add(priority, tokens);
    }
    check(overlapped.steps_overlapped > 200, "most steps to be planned by plan_next(), got " +
                                                 std::to_string(overlapped.steps_overlapped));
  }
}

// With fewer pages for windows than its sequences need, the first one gets what it needs and the
// others follow; with as many as an engine allocates, none is preempted and no chunk is cut.
void check_pages_of_windows() {
  constexpr int kWindow = 200, kRows = 4, kChunk = 512;
  const int64_t least = pages_of_window(kWindow) + 1;
  const int64_t enough = kRows * pages_of_window(kWindow) + 2 * kChunk / kPageTokens;
  for (const bool prefix_reuse : {false, true})
    for (const bool follow : {false, true})
      for (const int64_t pages : {least, least + 3, enough}) {
        Simulation simulation(1000, kRows, follow, kChunk, prefix_reuse, {kWindow, 0},
                              {pages, 1700});
        std::vector<Job*> jobs;
        for (int i = 0; i < kRows; ++i)
          jobs.push_back(&simulation.add(kStranger, 3000 - 500 * i, 10 + i));
        int64_t most = 0;
        for (int steps = 0; !jobs.empty(); ++steps) {
          check(steps < 3000, "all to be done by now");
          const bool ends = std::any_of(jobs.begin(), jobs.end(),
                                        [](const Job* job) { return job->produced >= 98; });
          most = std::max(most, simulation.step(follow && !ends));
          simulation.check_pages();
          std::erase_if(jobs, [&](Job* job) {
            if (job->produced < 100) return false;
            simulation.drop(*job);
            return true;
          });
        }
        if (pages < enough) continue;
        check(simulation.preemptions() == 0, "no preemption");
        check(most >= kChunk, "whole chunks, got " + std::to_string(most));
      }
}

// Idle handles come by retention priority and then by last use, also after both have changed.
void check_idle_handles() {
  IdleHandles idle;
  std::vector<IdleHandles::Entry> entries(5);
  const auto order = [&] {
    std::vector<HandleId> found;
    for (const auto& rank : idle) found.push_back(IdleHandles::handle_of(rank));
    return found;
  };
  for (HandleId id = 0; id < 5; ++id) idle.add(entries[id], id, id == 1 ? -1.0f : 0.0f, 10 - id);
  check(order() == std::vector<HandleId>{1, 4, 3, 2, 0}, "the lowest priority, then the oldest");
  idle.list(entries[4], 4, 0, 20);
  idle.list(entries[1], 1, 2, 20);
  idle.unlist(entries[3]);
  check(!entries[3].listed() && entries[4].listed(), "what is listed");
  check(order() == std::vector<HandleId>{2, 0, 4, 1}, "the new places");
  idle.list(entries[3], 3, 0, 1);
  check(order() == std::vector<HandleId>{3, 2, 0, 4, 1}, "a handle that is idle again");
}

// Loads are found by identity, group and exactness, and leave no trace.
void check_page_loads() {
  PageLoads loads(2);
  PageLoads::List fresh;
  for (int i = 0; i < 40; ++i) {
    PageLoad& load = fresh.emplace_back();
    load.identity.tokens[0] = i / 2;
    load.identity.key = next_key({}, load.identity.tokens.data(), kPageTokens);
    load.full = i < 38;
    load.group = i % 2;
    load.tier = i % 2;
    load.bytes = 100;
    load.move = std::make_shared<PageMove>();
  }
  std::vector<PageLoad*> all;
  for (PageLoad& load : fresh) all.push_back(&load);
  PageLoads::Index index = loads.prepare(fresh);
  loads.add(std::move(fresh), std::move(index));
  const auto found = [&](int i, bool exact) { return loads.find(i % 2, all[i]->identity, exact); };
  for (int i = 0; i < 38; ++i) check(found(i, false) == all[i] && !found(i, true), "a load");
  check(!found(38, false), "no load of a page that is not full");
  check(loads.totals()[1].pages == 20 && loads.totals()[1].bytes == 2000, "totals");
  const PageIdentity gone = all[7]->identity;
  loads.erase(*all[7]);
  check(!loads.find(1, gone, false) && loads.find(0, gone, false) == all[6], "one of two groups");
  check(loads.totals()[1].pages == 19, "totals without it");
}

}  // namespace
}  // namespace turbomind::fuzz

int main(int argc, char** argv) {
  return turbomind::run_cases(argc, argv,
                              {
                                  TM_CASE(turbomind::fuzz::check_live_turn),
                                  TM_CASE(turbomind::fuzz::check_brief_turn),
                                  TM_CASE(turbomind::fuzz::check_ahead_of_decoding),
                                  TM_CASE(turbomind::fuzz::check_displaced_often),
                                  TM_CASE(turbomind::fuzz::check_live_turn_without_pages),
                                  TM_CASE(turbomind::fuzz::check_step_time),
                                  TM_CASE(turbomind::fuzz::check_progress),
                                  TM_CASE(turbomind::fuzz::check_short_beside_long),
                                  TM_CASE(turbomind::fuzz::check_equal_prompts),
                                  TM_CASE(turbomind::fuzz::check_lone_prompt),
                                  TM_CASE(turbomind::fuzz::check_cached_first),
                                  TM_CASE(turbomind::fuzz::check_pages_of_windows),
                                  TM_CASE(turbomind::fuzz::check_idle_handles),
                                  TM_CASE(turbomind::fuzz::check_page_loads),
                                  TM_CASE(turbomind::fuzz::check_overlapped),
                              });
}
