// A whole decoder cut over ranks on one GPU, which with "--gpu" is a real one: ranks that wait for
// each other, with a stream each, compute the bits of ranks that take turns on one stream; also
// tokens that are sampled on the GPU, pages, cancelled steps and errors of a rank.
#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cuda/emulator.h"
#include "model/parallel/rank_exchange.h"
#include "tests/model/rank_runs.h"

namespace turbomind {
namespace {

using Lists = std::vector<std::vector<int>>;
const std::vector<int> kTwo{0, 0}, kFour{0, 0, 0, 0};

std::unique_ptr<Model> build_waiting(const ModelConfig& config, const std::vector<int>& indices) {
  const RankWaits waits;
  return build(config, indices);
}

void test_ranks_that_wait_compute_what_ranks_in_turns_do() {
  uint64_t seed = test_seed;
  for (const Variant& variant : variants()) {
    const std::string name = variant.name;
    const bool plain = name == "plain";
    if (!real && !plain && name != "per-layer inputs") continue;
    ModelConfig config = small_gpu();
    variant.change(config);
    for (const auto& ranks : plain ? Lists{kTwo, kFour} : Lists{kTwo}) {
      const std::vector<float> want = prompt_and_tokens(*build(config, ranks));
      for (int i = 0; i < (plain ? 2 : 1); ++i) {
        emulator::set_schedule_seed(++seed);
        const auto group = build_waiting(config, ranks);
        CHECK(same_bits(prompt_and_tokens(*group), want), "%s, %zu ranks, seed %d", variant.name,
              ranks.size(), int(seed));
      }
    }
  }
}

// They cannot differ: what computes does not.
void test_the_mode_is_noted_and_not_of_the_fingerprint() {
  const auto turns = build(small_gpu(), kTwo), waiting = build_waiting(small_gpu(), kTwo);
  CHECK(turns->context().gpu->library_note() == "our own kernels");
  CHECK(waiting->context().gpu->library_note() == "our own kernels; TM_CUDA_RANK_WAITS is 1");
  CHECK(!waiting->context().gpu->switches().overlap);
  CHECK(turns->numerics_fingerprint() == waiting->numerics_fingerprint());
}

void test_sampled_tokens() {
  const ModelConfig config = small_gpu();
  const std::vector<int32_t> want = sampled(*build(config, kTwo), 3, 6);
  CHECK(std::set<int32_t>(want.begin(), want.end()).size() > 3);
  for (uint64_t seed = 0; seed < 2; ++seed) {
    emulator::set_schedule_seed(seed);
    CHECK(sampled(*build_waiting(config, kTwo), 3, 6) == want, "seed %d", int(seed));
  }
}

// Pages that ranks in turns have written are read back and given to ranks that wait.
void test_pages() {
  const ModelConfig config = small_gpu();
  const auto turns = build(config, kTwo), waiting = build_waiting(config, kTwo);
  Bench from(*turns);
  from.step({70});
  const std::vector<float> want = from.step({20});
  Bench to(*waiting);
  to.step({3});  // its page is overwritten
  for (int group = 0; group < static_cast<int>(turns->groups().size()); ++group)
    for (const int page : {0, 1}) {
      const int tokens = page == 0 ? kPageTokens : 70 - kPageTokens;
      std::vector<uint8_t> payload(turns->pages().stored_page_bytes(group, tokens)), again(payload);
      turns->pages().read_page(group, page, tokens, payload.data());
      waiting->pages().write_page(group, page, tokens, payload.data(), tokens);
      waiting->pages().read_page(group, page, tokens, again.data());
      CHECK(again == payload, "group %d, page %d", group, page);
    }
  to.go_to(70);
  CHECK(same_bits(to.step({20}), want));
}

void test_a_cancelled_step_does_not_run() {
  const auto group = build_waiting(small_gpu(), kTwo);
  Bench bench(*group);
  const std::atomic<bool> flag{true};
  const StepCancel cancel{{&flag}};
  for (int i = 0; i < 2; ++i) {  // in turns, and not
    bench.step({10}, &cancel);
    CHECK(!bench.complete);
    CHECK(same_bits(bench.step({20}), Bench(*build(small_gpu(), kTwo)).step({20})));
    bench.go_to(0);
  }
}

// The first rank has its graph when the second one fails; later steps are captured again.
void test_a_rank_that_throws_at_a_capture() {
  bool fails = false;
  RankExchange::test_hook = [&fails](int rank) {
    if (fails && rank == 1) throw_error(ErrorCode::model, "this rank was asked to fail");
  };
  const auto group = build_waiting(small_gpu(), kTwo);
  RankExchange::test_hook = nullptr;
  reserve(*group);
  Bench bench(*group);
  std::vector<float> logits = bench.step({20});
  const auto add = [&] {
    const std::vector<float> next = bench.step({1});
    logits.insert(logits.end(), next.begin(), next.end());
  };
  add();
  fails = true;
  std::string error;
  try {
    bench.step({1});
  } catch (const Error& e) {
    error = e.what();
  }
  CHECK(error == "this rank was asked to fail", "%s", error.c_str());
  fails = false;
  for (int i = 0; i < 4; ++i) add();
  const auto turns = build(small_gpu(), kTwo);
  Bench other(*turns);
  std::vector<float> want = other.step({20});
  for (int i = 0; i < 5; ++i) {
    const std::vector<float> next = other.step({1});
    want.insert(want.end(), next.begin(), next.end());
  }
  CHECK(same_bits(logits, want));
}

void test_a_rank_that_throws_fails_the_step_alone() {
  if (real) check_a_rank_that_throws(kTwo);
  const RankWaits waits;
  check_a_rank_that_throws(kTwo);
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(read_arguments(argc, argv),
                   {
                       TM_CASE(test_ranks_that_wait_compute_what_ranks_in_turns_do),
                       TM_CASE(test_the_mode_is_noted_and_not_of_the_fingerprint),
                       TM_CASE(test_sampled_tokens),
                       TM_CASE(test_pages),
                       TM_CASE(test_a_cancelled_step_does_not_run),
                       TM_CASE(test_a_rank_that_throws_fails_the_step_alone),
                       TM_CASE(test_a_rank_that_throws_at_a_capture),
                   });
}
