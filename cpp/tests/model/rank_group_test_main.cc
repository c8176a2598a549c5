// A whole decoder cut over ranks, against the same one in one piece.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "model/decoder/decoder_builder.h"
#include "model/decoder/decoder_slots.h"
#include "model/decoder/memory_plan.h"
#include "model/parallel/cut.h"
#include "model/parallel/rank_exchange.h"
#include "tests/check.h"
#include "tests/model/rank_models.h"

namespace turbomind {
namespace {

std::unique_ptr<Model> build(const ModelConfig& config, int ranks, int threads = 2) {
  DecoderBuilder builder(config, resolve_isa("auto"), threads, {}, ranks);
  builder.fill_dummy(3);
  return builder.finish(true);
}

void test_logits_are_those_of_one_rank() {
  for (const Variant& variant : variants())
    for (const int kv_heads : {1, 2, 4}) {
      ModelConfig config = small(kv_heads);
      variant.change(config);
      const auto whole = build(config, 1);
      const std::vector<float> want = Bench(*whole).all(kTokens);
      for (const int ranks : {2, 4}) {
        const auto group = build(config, ranks);
        const float error = difference(Bench(*group).all(kTokens), want);
        CHECK(error < 1e-4f, "%s, %d KV heads, %d ranks: %g", variant.name, kv_heads, ranks,
              double(error));
      }
    }
}

void test_bits_depend_on_the_degree_alone() {
  for (const char* format : {"float32", "bfloat16", "int8"})
    for (const Variant& variant : variants()) {
      ModelConfig config = small(2, format);
      variant.change(config);
      const auto group = build(config, 2, 2);
      const std::vector<float> want = Bench(*group).all(kTokens);
      for (const int threads : {1, 4}) {
        const auto other = build(config, 2, threads);
        CHECK(other->numerics_fingerprint() == group->numerics_fingerprint());
        CHECK(same_bits(Bench(*other).all(kTokens), want), "%s, %d threads", variant.name, threads);
      }
      for (const int chunk : {1, 7, 64})
        CHECK(same_bits(Bench(*group).all(chunk), want), "%s, chunks of %d", variant.name, chunk);
      Bench batch(*group, 3);  // beside two others
      std::vector<float> rows = batch.step({100, 20, 1});
      rows.resize(100 * group->vocab());
      const std::vector<float> rest = batch.step({50, 0, 30});
      rows.insert(rows.end(), rest.begin(), rest.begin() + 50 * group->vocab());
      CHECK(same_bits(rows, want), "%s, beside others", variant.name);
    }
}

std::vector<uint8_t> payload(Model& model, int group, int32_t page, int count) {
  std::vector<uint8_t> bytes(model.pages().stored_page_bytes(group, count), 0xA5);
  model.pages().read_page(group, page, count, bytes.data());
  return bytes;
}

// Pages go through groups of any size, byte for byte, and the next tokens continue with them.
void test_pages_move_between_degrees() {
  for (const int kv_heads : {1, 2, 4}) {
    const ModelConfig config = small(kv_heads);
    const auto first = build(config, 1);
    Bench source(*first);
    source.step({128});
    const std::vector<float> want = source.step({kTokens - 128});
    for (const int ranks : {1, 2, 4}) {
      const auto model = build(config, ranks);
      Bench bench(*model);
      for (size_t g = 0; g < model->groups().size(); ++g) {
        const int group = static_cast<int>(g);
        CHECK(model->groups()[g].page_bytes >= first->groups()[g].page_bytes);
        for (int32_t page = 0; page < 2; ++page) {
          const auto bytes = payload(*first, group, page, kPageTokens);
          model->pages().write_page(group, page, kPageTokens, bytes.data());
          CHECK(payload(*model, group, page, kPageTokens) == bytes, "%d ranks", ranks);
          CHECK(payload(*model, group, page, 17) == payload(*first, group, page, 17));
        }
      }
      bench.go_to(128);
      const float error = difference(bench.step({kTokens - 128}), want);
      CHECK(error < 1e-4f, "%d KV heads, %d ranks: %g", kv_heads, ranks, double(error));
    }
  }
}

// The KV of the first layer needs no sum, so it is the same on ranks, bit for bit.
void test_ranks_compute_the_same_kv() {
  ModelConfig config = small(2);
  config.layers.resize(1);
  const auto whole = build(config, 1);
  Bench(*whole).all(kTokens);
  for (const int ranks : {2, 4}) {
    const auto group = build(config, ranks);
    Bench(*group).all(kTokens);
    for (int32_t page = 0; page < 3; ++page) {
      const int count = page < 2 ? kPageTokens : kTokens - 2 * kPageTokens;
      CHECK(payload(*group, 0, page, count) == payload(*whole, 0, page, count));
    }
  }
}

// A group whose ranks call `hook` with the number of their exchange in a step.
struct Hooked {
  std::function<void(int rank, int number)> hook;
  std::vector<int> counts = std::vector<int>(8);
  std::unique_ptr<Model> model;

  Hooked(const ModelConfig& config, int ranks, int threads) {
    RankExchange::test_hook = [this](int rank) {
      if (hook) hook(rank, counts[rank]++);
    };
    model = build(config, ranks, threads);
    RankExchange::test_hook = nullptr;
  }
  void set(std::function<void(int rank, int number)> other) {
    std::fill(counts.begin(), counts.end(), 0);
    hook = std::move(other);
  }
};

// Two exchanges a layer; a rank that throws in any of them fails the step, and the next one runs.
void test_a_rank_that_throws_fails_the_step_alone() {
  constexpr int kRanks = 4, kExchanges = 6;
  Hooked group(small(2), kRanks, 4);
  Model* const model = group.model.get();
  const std::vector<float> want = Bench(*model).all(kTokens);
  for (int rank = 0; rank < kRanks; ++rank)
    for (int at = 0; at < kExchanges; ++at) {
      Bench bench(*model);
      std::string error;
      group.set([&](int r, int number) {
        if (r == rank && number == at) throw_error(ErrorCode::model, "rank ", r);
      });
      try {
        bench.step({kTokens});
      } catch (const Error& e) {
        error = e.what();
      }
      CHECK(error == "rank " + std::to_string(rank), "%s", error.c_str());
      group.set({});
      CHECK(same_bits(bench.all(kTokens), want));
    }
}

// Each rank has a table of its own, in which a wait for others is not part of the sum. Rank 0 comes
// first to every exchange and waits for rank 1.
void test_the_profiler_tells_waiting_from_adding() {
  constexpr int kRanks = 2, kExchanges = 6, kWait = 2;  // milliseconds at least
  const ModelConfig config = small(2);
  Hooked group(config, kRanks, kRanks);
  Model& model = *group.model;
  const std::vector<Context*> contexts = model.contexts();
  CHECK(contexts.size() == kRanks && contexts[0] == &model.context());
  const auto stat = [&](int rank, Op op) { return contexts[rank]->profiler.stats[size_t(op)]; };
  Bench bench(model);
  bench.step({kTokens - 1});
  for (int r = 0; r < kRanks; ++r)
    CHECK(stat(r, Op::reduce_wait).calls == 0, "the profiler is off");
  std::atomic<int> arrived{0};
  group.set([&](int rank, int number) {
    CHECK(stat(rank, Op::reduce_wait).calls == number + 1, "a wait begins");
    CHECK(stat(rank, Op::reduce).calls == number, "and no sum");
    if (rank == 0) ++arrived;
    while (rank == 1 && arrived <= number) std::this_thread::yield();
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(kWait));
  });
  for (Context* context : contexts) context->profiler.enabled = true;
  bench.step({1});
  for (int r = 0; r < kRanks; ++r) {
    const OpStat sum = stat(r, Op::reduce), wait = stat(r, Op::reduce_wait);
    CHECK(sum.calls == kExchanges && wait.calls == kExchanges && sum.ns > 0);
    // Parts and x are read and x is written; parts are added, and their sum to x.
    CHECK(sum.bytes == 4.0 * kExchanges * config.hidden * (kRanks + 2));
    CHECK(sum.flops == 1.0 * kExchanges * config.hidden * (kRanks + 1));
    CHECK(wait.bytes == 0 && wait.flops == 0);
    CHECK(stat(r, Op::attention).calls == 3 && stat(r, Op::down).calls == 3);
  }
  CHECK(stat(0, Op::reduce_wait).ns >= int64_t{kExchanges} * kWait * 1000000);
}

void test_joined_tables_are_those_of_the_slowest_rank() {
  OpStats first{}, second{};
  first[size_t(Op::down)] = {3, 500, 10, 20};
  second[size_t(Op::down)] = {4, 700, 1, 2};
  first[size_t(Op::sample)] = {1, 0, 5, 0};  // too short to be measured
  second[size_t(Op::head)] = {1, 9, 0, 7};
  for (const auto& ranks : {std::vector{first, second}, std::vector{second, first}}) {
    const OpStats joined = join_stats(ranks);
    const OpStat down = joined[size_t(Op::down)], sample = joined[size_t(Op::sample)];
    CHECK(down.calls == 4 && down.ns == 700 && down.bytes == 11 && down.flops == 22);
    CHECK(sample.calls == 1 && sample.bytes == 5);
    CHECK(joined[size_t(Op::head)].ns == 9 && joined[size_t(Op::embed)].calls == 0);
  }
}

// Rank 0 sees the flag in its exchanges; all leave before the next layer.
void test_a_cancel_ends_the_step_between_layers() {
  Hooked group(small(2), 2, 2);
  Model* const model = group.model.get();
  const std::vector<float> want = Bench(*model).all(kTokens);
  for (int at = 0; at < 6; ++at) {
    std::atomic<bool> flag{false};
    const StepCancel cancel{{&flag}};
    Bench bench(*model);
    int posted = 0;
    group.set([&](int rank, int number) {
      if (rank != 0) return;
      posted = number + 1;
      if (number == at) flag = true;
    });
    bench.step({kTokens}, &cancel);
    group.set({});
    // The flag is read before the hook runs, so the next exchange carries it.
    const int last = std::min(6, (at + 1) / 2 * 2 + 2);
    CHECK(posted == last, "%d exchanges, flag in %d", posted, at);
    CHECK(bench.complete == (last == 6));
    if (!bench.complete) CHECK(same_bits(bench.all(kTokens), want));
  }
  std::atomic<bool> flag{true};
  const StepCancel cancel{{&flag}};
  Bench bench(*model);
  bench.step({kTokens}, &cancel);
  CHECK(!bench.complete);
}

void test_ranks_share_what_is_not_cut() {
  const ModelConfig config = small(4);
  // Ends of the names of weights that are not cut.
  const std::vector<std::string> uncut = {"embed", "head", "norm"};
  size_t whole = 0, shared = 0;
  for (const SlotSpec& slot : weight_slots(config, WeightPlace::host)) {
    const size_t bytes = (slot.bytes + 255) / 256 * 256;
    whole += bytes;
    for (const std::string& end : uncut)
      if (slot.name.size() >= end.size() &&
          slot.name.compare(slot.name.size() - end.size(), end.size(), end) == 0)
        shared += bytes;
  }
  const ModelMemory one = build(config, 1)->memory();
  CHECK(one.weights() == whole && one.ranks[0].weights == whole && one.shared_weights == 0);
  for (const int ranks : {2, 4}) {
    const ModelMemory memory = build(config, ranks)->memory();
    CHECK(memory.shared_weights == shared);
    CHECK(memory.ranks.size() == static_cast<size_t>(ranks));
    // Rows are padded per rank: 18 gates to 32, 24 columns to 32.
    CHECK(memory.weights() > whole && memory.weights() < whole * (ranks == 2 ? 1.3 : 1.6));
    for (const RankMemory& rank : memory.ranks) {
      CHECK(rank.weights * ranks == memory.weights() - shared, "all have the same parts");
      for (size_t g = 0; g < rank.page_bytes.size(); ++g)
        CHECK(rank.page_bytes[g] * ranks == one.ranks[0].page_bytes[g]);
    }
  }
}

void test_the_plan_is_the_memory_of_the_model() {
  for (const Variant& variant : variants())
    for (const int ranks : {1, 2, 4}) {
      ModelConfig config = small(2);
      variant.change(config);
      const ModelMemory plan = plan_memory(config, WeightPlace::host, ranks);
      const ModelMemory memory = build(config, ranks)->memory();
      CHECK(plan.shared_weights == memory.shared_weights, "%s", variant.name);
      CHECK(plan.ranks.size() == memory.ranks.size(), "%s", variant.name);
      for (int r = 0; r < ranks; ++r) {
        CHECK(plan.ranks[r].weights == memory.ranks[r].weights, "%s, rank %d", variant.name, r);
        CHECK(plan.ranks[r].page_bytes == memory.ranks[r].page_bytes, "%s", variant.name);
      }
    }
}

// Calls build() with this many ranks and returns the error.
std::string refusal(const ModelConfig& config, int ranks) {
  try {
    build(config, ranks);
  } catch (const Error& e) {
    CHECK(e.code() == ErrorCode::invalid_request);
    return e.what();
  }
  return "";
}

void test_degrees_that_are_refused() {
  const auto expect = [](const ModelConfig& config, int ranks, const std::string& error) {
    const std::string got = refusal(config, ranks);
    CHECK(got == error, "%s", got.c_str());
  };
  ModelConfig config = small(2);
  expect(config, 3, "tp is 3, but layer 0 has 4 heads; expected 1, 2 or 4 for this model");
  expect(config, 1 << 20,
         "tp is 1048576, but layer 0 has 4 heads; expected 1, 2 or 4 for this model");
  expect(config, 0, "tp is 0, expected 1 or more");
  expect(config, -1, "tp is -1, expected 1 or more");
  config.layers[1].intermediate = 70;
  expect(config, 4,
         "tp is 4, but layer 1 has an intermediate size of 70; expected 1 or 2 for this model");
  config.layers[1].intermediate = 71;
  expect(config, 2,
         "tp is 2, but layer 1 has an intermediate size of 71; expected 1 for this model");
  config = small(2);
  config.layers[2].experts = {4, 1, 50, false, false, false};
  expect(config, 4,
         "tp is 4, but layer 2 has experts with an intermediate size of 50; expected 1 or 2 for "
         "this model");
  config = small(2);
  for (LayerConfig& layer : config.layers) layer.heads = 6, layer.kv_heads = 3;
  expect(config, 2, "tp is 2, but layer 0 has 3 KV heads; expected 1, 3 or 6 for this model");
  config = small(2);
  config.layers[0].qk_norm_all = true;
  expect(config, 2,
         "tp is 2, but layer 0 has norms across all heads of q and k; expected 1 for this model");
  config = small(2, "int4-g32-bfloat16-minimum");
  expect(
      config, 2,
      "tp is 2, but weight layers.0.down is int4-g32-bfloat16-minimum, which is cut at multiples "
      "of 32 columns, not of 36; expected 1 for this model");
  config = small(2);
  config.slot_formats["layers.1.o"] = "int4-g32-float16-ordered";
  expect(config, 2,
         "tp is 2, but weight layers.1.o is int4-g32-float16-ordered, which cannot be cut by "
         "columns; expected 1 for this model");
  config = small(2);
  config.slot_formats["layers.1.qkv"] = "96 int8 + 80 bfloat16";
  expect(config, 2, "");
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(
      argc, argv,
      {TM_CASE(test_logits_are_those_of_one_rank), TM_CASE(test_bits_depend_on_the_degree_alone),
       TM_CASE(test_pages_move_between_degrees), TM_CASE(test_ranks_compute_the_same_kv),
       TM_CASE(test_a_rank_that_throws_fails_the_step_alone),
       TM_CASE(test_the_profiler_tells_waiting_from_adding),
       TM_CASE(test_joined_tables_are_those_of_the_slowest_rank),
       TM_CASE(test_a_cancel_ends_the_step_between_layers),
       TM_CASE(test_ranks_share_what_is_not_cut), TM_CASE(test_the_plan_is_the_memory_of_the_model),
       TM_CASE(test_degrees_that_are_refused)});
}
