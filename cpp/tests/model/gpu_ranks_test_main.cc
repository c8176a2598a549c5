// A whole decoder cut over ranks on emulated GPUs, against the same one on a GPU and in float32 on
// the CPU: sums in memory of peers or of the host, which is tried, sampled tokens that all ranks
// read, kernels that are loaded late, and errors of a rank. Ranks on one GPU: cuda_ranks_test.
#define TM_CUDA_NS cuda_emulated
#define TM_CUDA_EMULATED 1
#include <atomic>
#include <cmath>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda/device_wait.h"
#include "cuda/emulated_gpu.h"
#include "cuda/gpu_context.h"
#include "model/decoder/decoder_builder.h"
#include "tests/check.h"
#include "tests/cuda/emulator_kernels.h"
#include "tests/model/rank_runs.h"

namespace turbomind {
namespace {

// The root of the mean square, as a share of that of `want`.
double rms_error(const std::vector<float>& got, const std::vector<float>& want) {
  CHECK(got.size() == want.size());
  double errors = 0, all = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    CHECK(std::isfinite(got[i]));
    errors += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
    all += double{want[i]} * want[i];
  }
  return std::sqrt(errors / all);
}

void test_logits_are_as_near_as_those_of_one_gpu() {
  for (const Variant& variant : variants()) {
    const bool plain = variant.name == std::string("plain");
    for (const int kv_heads : plain ? std::vector<int>{1, 2, 4} : std::vector<int>{2}) {
      ModelConfig exact = small(kv_heads), config = small_gpu(kv_heads);
      variant.change(exact);
      variant.change(config);
      const std::vector<float> want = Bench(*build(exact, {})).all(kTokens);
      const double one = rms_error(Bench(*build(config, {0})).all(kTokens), want);
      for (const int ranks : plain ? std::vector<int>{2, 4} : std::vector<int>{2}) {
        const auto group = build(config, first(ranks));
        reserve(*group);
        const double error = rms_error(Bench(*group).all(50), want);  // once in turns
        CHECK(error <= 1.1 * one, "%s, %d KV heads, %d ranks: %g, one GPU %g", variant.name,
              kv_heads, ranks, error, one);
      }
    }
  }
}

// The order in which the devices proceed, the memory of the sums and one GPU in place of two.
void test_bits_depend_on_the_degree_alone() {
  const ModelConfig config = small_gpu();
  const std::vector<float> want = prompt_and_tokens(*build(config, first(2)));
  for (uint64_t seed = 0; seed < 6; ++seed) {
    emulator::set_schedule_seed(seed);
    CHECK(same_bits(prompt_and_tokens(*build(config, first(2))), want), "seed %d", int(seed));
  }
  CHECK(same_bits(prompt_and_tokens(*build(config, {1, 0})), want));
  CHECK(same_bits(prompt_and_tokens(*build(config, {2, 2})), want), "two ranks on one GPU");
  emulator::set_peer_access(false);
  for (uint64_t seed = 0; seed < 4; ++seed) {
    emulator::set_schedule_seed(seed);
    CHECK(same_bits(prompt_and_tokens(*build(config, first(2))), want), "memory of the host");
  }
  emulator::set_peer_access(true);
  const auto profiled = build(config, first(2));
  for (Context* context : profiled->contexts()) context->profiler.enabled = true;
  CHECK(same_bits(prompt_and_tokens(*profiled), want), "not captured");
  CHECK(build(config, {0, 0})->numerics_fingerprint() == profiled->numerics_fingerprint());
  CHECK(build(config, {0})->numerics_fingerprint() + "/tp2" == profiled->numerics_fingerprint());
}

// The driver reports access, but a kernel reads wrong values or waits in vain.
void test_access_to_peers_is_tried() {
  using emulator::PeerFault;
  const ModelConfig config = small_gpu();
  const auto healthy = build(config, first(2));
  const std::vector<float> want = prompt_and_tokens(*healthy);
  const auto note = [](Model& model) { return model.context().gpu->library_note(); };
  CHECK(note(*healthy) == "our own kernels", "%s", note(*healthy).c_str());
  const std::string host = ": sums over ranks go through the host's memory";
  for (const PeerFault fault : {PeerFault::wrong, PeerFault::late})
    for (const int reader : {0, 1}) {
      const std::string a = "GPU " + std::to_string(reader);
      const std::string b = "GPU " + std::to_string(1 - reader);
      emulator::set_peer_fault(fault, reader, 1 - reader);
      emulator::set_wait_limit(fault == PeerFault::late ? 0 : 10);
      const auto group = build(config, first(2));
      emulator::set_wait_limit(10);
      CHECK(note(*group) ==
                "our own kernels; " +
                    (fault == PeerFault::wrong
                         ? a + " reads wrong values in the memory of " + b
                         : a + " does not see within 0.1 s what " + b + " writes to its memory") +
                    host,
            "%s", note(*group).c_str());
      CHECK(same_bits(prompt_and_tokens(*group), want), "%s", a.c_str());
    }
  emulator::set_peer_fault(PeerFault::wrong, 3, 1);
  const auto four = build(config, first(4));
  CHECK(
      note(*four).find("; GPU 3 reads wrong values in the memory of GPU 1: ") != std::string::npos,
      "%s", note(*four).c_str());
  emulator::set_peer_fault(PeerFault::none);
  emulator::set_peer_access(false);
  CHECK(note(*build(config, first(2))) ==
        "our own kernels; GPU 0 has no access to the memory of GPU 1" + host);
  emulator::set_peer_access(true);
}

// Prompts, batches, single tokens and profiled steps; their pages come first.
void run_steps(Model& group) {
  reserve(group);
  Bench batch(group, 3);
  batch.step({100, 20, 1});
  for (int i = 0; i < 4; ++i) batch.step({1, 1, 1});
  for (Context* context : group.contexts()) context->profiler.enabled = true;
  for (int i = 0; i < 2; ++i) batch.step({4, 0, 1});
}

// To load a kernel may wait for what another rank launches later (emulator::set_lazy_loading).
void test_no_kernel_is_loaded_while_another_one_waits() {
  for (const Variant& variant : variants()) {
    const std::string name = variant.name;
    if (name != "experts" && name != "per-layer inputs") continue;
    ModelConfig config = small_gpu();
    variant.change(config);
    for (const bool one_gpu : {false, true}) {
      const RankWaits waits;
      const std::vector<int> indices = one_gpu ? std::vector<int>{0, 0} : first(2);
      emulator::set_lazy_loading(true);
      const auto group = build(config, indices);
      run_steps(*group);
      for (const Context* rank : group->contexts()) {
        const std::string note = rank->gpu->library_note();
        CHECK(note.find("captured") == std::string::npos, "%s", note.c_str());
      }
      emulator::set_lazy_loading(true);
      sampled(*build(config, indices), 3, 4);
    }
  }
  emulator::set_lazy_loading(false);
}

// Their kernels are those of one GPU, which give a row the same bits in any batch.
void test_chunks_and_batches_change_no_bits() {
  for (const Variant& variant : variants()) {
    const std::string name = variant.name;
    if (name != "plain" && name != "tied head" && name != "per-layer inputs") continue;
    ModelConfig config = small_gpu();
    variant.change(config);
    const auto group = build(config, first(2));
    const std::vector<float> want = Bench(*group).all(kTokens);
    for (const int chunk : {13, 64})
      CHECK(same_bits(Bench(*group).all(chunk), want), "%s, chunks of %d", variant.name, chunk);
    Bench batch(*group, 3);
    std::vector<float> rows = batch.step({100, 20, 1});
    rows.resize(100 * group->vocab());
    const std::vector<float> rest = batch.step({50, 0, 30});
    rows.insert(rows.end(), rest.begin(), rest.begin() + 50 * group->vocab());
    CHECK(same_bits(rows, want), "%s, beside others", variant.name);
  }
}

// Steps within the limits allocate nothing, on any rank.
void test_no_allocation() {
  const auto group = build(small_gpu(), first(2));
  reserve(*group);
  Bench bench(*group, 3);
  const int64_t before = emulator::allocations();
  bench.step({100, 20, 1});
  for (int i = 0; i < 3; ++i) bench.step({1, 1, 1});
  CHECK(emulator::allocations() == before);
}

void test_sampled_tokens_reach_all_ranks() {
  const ModelConfig config = small_gpu();
  const std::vector<int32_t> want = sampled(*build(config, {0, 0}), 3, 12);
  CHECK(std::set<int32_t>(want.begin(), want.end()).size() > 3);
  for (uint64_t seed = 0; seed < 6; ++seed) {
    emulator::set_schedule_seed(seed);
    emulator::set_peer_access(seed % 2 == 0);
    CHECK(sampled(*build(config, first(2)), 3, 12) == want, "seed %d", int(seed));
  }
  emulator::set_peer_access(true);
}

void test_a_rank_that_throws_fails_the_step_alone() {
  check_a_rank_that_throws({0, 1});
  emulator::set_peer_access(false);
  check_a_rank_that_throws({0, 1});
  emulator::set_peer_access(true);
}

}  // namespace

namespace cuda_emulated {
namespace {

struct Gate {
  const uint32_t* open;
  const uint32_t* stop;
};

TM_KERNEL(32, 1) void wait_for_gate(const Gate p) {
  wait_for_previous();
  if (threadIdx.x == 0) wait_for_count(p.open, 1, p.stop, 1000);
}

}  // namespace
}  // namespace cuda_emulated

namespace {

// Keeps the GPU of a rank busy with something else for too long.
void block(Model& group, int rank, const PinnedBuffer& words) {
  const GpuContext& gpu = *group.contexts()[rank]->gpu;
  std::fill_n(words.as<uint32_t>(), 16, 0u);
  gpu.gpu().make_current();
  cuda_emulated::launch<cuda_emulated::wait_for_gate>(
      gpu.handle(), cuda_emulated::dim3(1), 32, 0,
      cuda_emulated::Gate{words.as<uint32_t>(), words.as<uint32_t>() + 1});
}

std::string missing_on(int gpu) {
  return "rank 1 (GPU " + std::to_string(gpu) +
         ") did not come to a sum within 10 s, while rank 0 (GPU 0) waited for it";
}

// A step of a kind that ranks have computed in turns.
std::vector<float> second_run(Model& group) {
  reserve(group);
  Bench(group).step({20});
  return Bench(group).step({20});
}

// A step whose results are read after a later one has failed for another reason.
void test_an_error_is_kept_until_its_step_is_read() {
  const auto group = build(small_gpu(), first(2));
  const std::vector<float> want = second_run(*group);
  const std::vector<int32_t> pages{0, 1, 2};
  StepBatch batch;
  batch.token_ids = {5, 6, 7};
  batch.positions = {0, 1, 2};
  batch.sample_rows = {2};
  StepRow& row = batch.rows.emplace_back();
  row.q_len = 3;
  row.pages.assign(group->groups().size(), pages.data());
  const SampleRow greedy{.temperature = 0};
  int32_t token = 0;
  Profiler& profiler = group->contexts()[0]->profiler;
  for (const bool profiled : {true, false}) {  // no later step is computed in turns
    profiler.enabled = profiled;
    group->forward(batch, nullptr, nullptr);
    group->outputs()->submit_sample(&greedy, 1);
    group->outputs()->read_tokens(&token);
  }
  const PinnedBuffer words(group->contexts()[1]->gpu->gpu(), 64);
  emulator::set_wait_limit(0);
  block(*group, 1, words);
  group->forward(batch, nullptr, nullptr);
  group->outputs()->submit_sample(&greedy, 1);
  Thrower thrower(2);
  DeviceTimer* const timer = std::exchange(profiler.device, &thrower);
  profiler.enabled = true;
  CHECK(cuda_emulated::throws("this rank was asked to fail",
                              [&] { group->forward(batch, nullptr, nullptr); }));
  profiler.enabled = false;
  profiler.device = timer;
  CHECK(cuda_emulated::throws(missing_on(1), [&] { group->outputs()->read_tokens(&token); }));
  group->outputs()->abandon_steps();
  emulator::set_wait_limit(10);
  CHECK(same_bits(Bench(*group).step({20}), want));
}

// Those of movers neither, whose threads copy pages at any time.
void test_pages_move_while_ranks_wait() {
  for (const int gpu : {1, 0}) {
    const RankWaits waits;
    emulator::set_lazy_loading(true);
    const auto group = build(small_gpu(), {0, gpu});
    const std::vector<float> want = second_run(*group);
    Bench bench(*group);
    const PinnedBuffer words(group->contexts()[1]->gpu->gpu(), 64);
    block(*group, 1, words);
    StepBatch batch = bench.batch({20});
    group->forward(batch, nullptr, nullptr);
    std::vector<uint8_t> payload(group->pages().stored_page_bytes(0, 5)), again(payload);
    group->pages().write_page(0, 1, 5, payload.data(), 5);
    group->pages().read_page(0, 1, 5, again.data());
    CHECK(again == payload);
    words.as<uint32_t>()[0] = 1;
    std::vector<float> logits(want.size());
    group->outputs()->read_logits(0, 20, logits.data());
    CHECK(same_bits(logits, want));
  }
  emulator::set_lazy_loading(false);
}

void test_a_rank_that_does_not_come_is_named() {
  for (const int gpu : {1, 0}) {
    const RankWaits waits;
    const auto group = build(small_gpu(), {0, gpu});
    const std::vector<float> want = second_run(*group);
    const PinnedBuffer words(group->contexts()[1]->gpu->gpu(), 64);
    Bench bench(*group);
    emulator::set_wait_limit(0);
    block(*group, 1, words);
    CHECK(cuda_emulated::throws(missing_on(gpu), [&] { bench.step({20}); }));
    emulator::set_wait_limit(10);
    CHECK(same_bits(Bench(*group).step({20}), want));
  }
}

void test_pages_are_those_of_the_fullest_gpu() {
  emulator::set_device_bytes(64 << 20);
  emulator::set_device_bytes(1, 32 << 20);
  const ModelConfig config = small_gpu();
  const auto group = build(config, first(2)), one = build(config, {1}),
             twice = build(config, {2, 2});
  CHECK(group->free_bytes() > one->free_bytes() && group->free_bytes() <= 2 * (32 << 20));
  CHECK(twice->free_bytes() > 32 << 20 && twice->free_bytes() <= 64 << 20);
  emulator::set_device_bytes(size_t{1} << 30);
}

void test_a_cancelled_step_does_not_run() {
  const auto group = build(small_gpu(), first(2));
  Bench bench(*group);
  const std::atomic<bool> flag{true};
  const StepCancel cancel{{&flag}};
  bench.step({10}, &cancel);
  CHECK(!bench.complete);
  CHECK(same_bits(bench.all(kTokens), Bench(*build(small_gpu(), first(2))).all(kTokens)));
}

void test_what_is_refused() {
  const auto refuses = [](const std::string& text, const std::function<void()>& f) {
    CHECK(cuda_emulated::throws(text, f));
  };
  const ModelConfig config = small_gpu();
  refuses("tp is 3, but layer 0 has 4 heads; expected 1, 2 or 4",
          [&] { build(config, {0, 1, 2}); });
  refuses("device: got 2 GPUs for 4 ranks, expected one for all or one for each",
          [&] { build(config, {0, 1, 0, 1}); });
  refuses("tp is 2, expected 1, the number of GPUs",
          [&] { DecoderBuilder(config, Isa::portable, 1, gpus({0}), 2); });
  emulator::set_device_bytes(1, 1 << 16);
  refuses("which are free on emulated GPU, GPU 1", [&] { build(config, first(2)); });
  emulator::set_device_bytes(size_t{1} << 30);
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(argc, argv,
                   {
                       TM_CASE(test_logits_are_as_near_as_those_of_one_gpu),
                       TM_CASE(test_bits_depend_on_the_degree_alone),
                       TM_CASE(test_access_to_peers_is_tried),
                       TM_CASE(test_no_kernel_is_loaded_while_another_one_waits),
                       TM_CASE(test_chunks_and_batches_change_no_bits),
                       TM_CASE(test_no_allocation),
                       TM_CASE(test_sampled_tokens_reach_all_ranks),
                       TM_CASE(test_a_rank_that_throws_fails_the_step_alone),
                       TM_CASE(test_pages_move_while_ranks_wait),
                       TM_CASE(test_a_rank_that_does_not_come_is_named),
                       TM_CASE(test_an_error_is_kept_until_its_step_is_read),
                       TM_CASE(test_pages_are_those_of_the_fullest_gpu),
                       TM_CASE(test_a_cancelled_step_does_not_run),
                       TM_CASE(test_what_is_refused),
                   });
}
