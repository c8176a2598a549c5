// A whole decoder on a GPU: its steps allocate nothing once their memory is reserved, replayed ones
// give the bits of those that are not, pages go to the host and back in any batch and in any
// number of parts, the profiler sees every op, and what a GPU lacks is refused when the model is
// built. In emulation, or with "--gpu" and folders of cuBLASLt on the first real one, where nothing
// counts allocations and memory is not made scarce.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "core/error.h"
#include "cuda/emulated_gpu.h"
#include "cuda/gpu_context.h"
#include "engine/engine.h"
#include "tests/check.h"
#include "tests/model/small_decoder.h"

namespace turbomind {
namespace {

using Bytes = std::vector<uint8_t>;

// Prompts, chunks, decode steps and mixtures up to every limit. Where a step is cut into partial
// results depends on its length, so pasts of many lengths are tried.
void test_no_allocation() {
  const StepLimits most{96 + 5, 5, 40, 1700, 9};
  const auto model = make_model(small_config());
  model->reserve(most);
  Bench bench(*model, 5, most.keys);
  const int64_t before = emulator::allocations();
  bench.step({96, 1, 1, 1, 1});
  bench.step({20, 20, 20, 20, 20}, 7);
  bench.step({1, 0, 0, 0, 0});
  for (const int64_t past : {60, 1024, 1500}) {
    bench.all_to(past);
    for (int i = 0; i < 3; ++i) bench.step({1, 1, 1, 1, 1});  // as it is, captured, replayed
    bench.step({1, 1, 1, 0, 0});
    bench.step({1, 40, 1, 0, 2});
    bench.step({60, 0, 0, 0, 0});
  }
  bench.go_to(0, most.keys - 101);
  bench.step({101, 0, 0, 0, 0});
  std::vector<SampleRow> rows(9);
  std::vector<LogprobRow> asked(9);
  std::vector<int32_t> tokens(9);
  std::vector<Logprob> entries(9 * 102);
  bench.all_to(10);
  bench.step({1, 1, 1, 1, 1});
  for (int i = 0; i < 9; ++i) {
    rows[i].logits_row = i % 5, rows[i].out = i;
    asked[i] = {i % 5, i, 101, i * 102};
  }
  model->outputs()->submit_sample(rows.data(), 9);
  model->outputs()->submit_logprobs(asked.data(), 9);
  model->outputs()->read_tokens(tokens.data());
  model->outputs()->read_logprobs(entries.data());
  for (int i = 0; i < 9; ++i)
    EXPECT(entries[i * 102].token == tokens[i] && entries[i * 102].logprob <= 0,
           "a token's log-probability");
  EXPECT(real || emulator::allocations() == before, "steps within their limits have allocated");
  for (const int32_t token : tokens) EXPECT(token >= 0 && token < 101, "a token was sampled");
  // The count is one: a step beyond the limits needs more.
  bench.go_to(0, 0);
  bench.step({400, 0, 0, 0, 0});
  EXPECT(real || emulator::allocations() > before, "a longer step has needed memory");
}

// A replayed step has other tokens, positions and pages than the captured one.
void test_replays() {
  const auto model = make_model(small_config());
  model->reserve({5, 5, 5, 600});
  Bench bench(*model, 5, 600);
  for (const int64_t past : {61, 500}) {
    std::vector<std::vector<float>> plain, replayed;
    for (auto* const logits : {&plain, &replayed}) {
      model->context().profiler.enabled = logits == &plain;  // profiled steps run as they are
      bench.all_to(past);
      for (int i = 0; i < 6; ++i) logits->push_back(bench.step({1, 1, 1, 1, 1}));
    }
    EXPECT(plain == replayed, "replayed after " + std::to_string(past) + " tokens: other bits");
  }
}

Bytes random_bytes(size_t n, uint32_t seed) {
  std::mt19937 random(seed + test_seed);
  Bytes bytes(n);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
  return bytes;
}

// A payload in pinned memory, cut into pieces that lie apart.
struct Payload {
  std::vector<HostBlock> blocks;
  std::vector<PayloadPart> parts;
  Payload(const Model& model, const Bytes& bytes, int pieces) {
    const HostMemory memory = model.pages().host_memory();
    for (size_t at = 0, p = 0; at < bytes.size(); ++p) {
      const size_t even = (bytes.size() / pieces + 15) / 16 * 16;
      const size_t size = std::min(even, bytes.size() - at);
      blocks.push_back(memory.allocate(size));
      std::memcpy(blocks.back().get(), bytes.data() + at, size);
      parts.push_back({blocks.back().get(), size});
      at += size;
    }
  }
  Bytes bytes() const {
    Bytes all;
    for (const PayloadPart& part : parts) all.insert(all.end(), part.data, part.data + part.bytes);
    return all;
  }
};

// Page p has tokens of its own; stored, written elsewhere and read again, whole ones and parts, in
// one batch or alone, each is what it was.
void test_pages() {
  const auto model = make_model(small_config());
  model->pages().allocate_pages(std::vector<int64_t>(model->groups().size(), 12));
  struct Case {
    int count, stored, pieces;
  };
  const std::vector<Case> cases = {{64, 64, 1}, {64, 64, 5}, {13, 13, 1},
                                   {13, 64, 1}, {1, 7, 3},   {63, 64, 4}};
  for (int group = 0; group < 2; ++group) {
    std::vector<Bytes> stored;
    std::vector<Payload> payloads, back;
    std::vector<PageTransfer> up, down;
    for (size_t i = 0; i < cases.size(); ++i) {
      const Case& c = cases[i];
      const size_t bytes = model->pages().stored_page_bytes(group, c.stored);
      stored.push_back(random_bytes(bytes, static_cast<uint32_t>(10 * i + group)));
      payloads.emplace_back(*model, stored[i], c.pieces);
      back.emplace_back(*model, Bytes(model->pages().stored_page_bytes(group, c.count)), c.pieces);
      const int32_t page = static_cast<int32_t>(2 * i);
      up.push_back({group, page, c.count, c.stored, payloads[i].parts});
      down.push_back({group, page, c.count, c.count, back[i].parts});
      // Alone, through memory of any kind.
      model->pages().write_page(group, page + 1, c.count, stored[i].data(), c.stored);
    }
    model->pages().write_pages(up);
    model->pages().read_pages(down);
    for (size_t i = 0; i < cases.size(); ++i) {
      const std::string name = "case " + std::to_string(i);
      Bytes alone(model->pages().stored_page_bytes(group, cases[i].count));
      model->pages().read_page(group, static_cast<int32_t>(2 * i + 1), cases[i].count,
                               alone.data());
      EXPECT(back[i].bytes() == alone, name + ": together as alone");
      if (cases[i].count == cases[i].stored)
        EXPECT(alone == stored[i], name + ": as it was stored");
      Bytes whole(model->pages().stored_page_bytes(group, cases[i].count));
      model->pages().read_page(group, static_cast<int32_t>(2 * i), cases[i].count, whole.data());
      EXPECT(whole == alone, name + ": written together, read alone");
    }
  }
  // The first that a thread does on the GPU may be a copy: the pages have come from a tier.
  std::string error;
  std::thread([&] {
    try {
      model->pages().copy_page(0, 0, 1);
    } catch (const Error& e) {
      error = e.what();
    }
  }).join();
  EXPECT(error.empty(), "a copy first: " + error);
  // A page that is given away while its copy is still to be made.
  const size_t bytes = model->pages().stored_page_bytes(0, kPageTokens);
  const Bytes first = random_bytes(bytes, 100), second = random_bytes(bytes, 101);
  for (const bool together : {false, true}) {
    model->pages().write_page(0, 0, kPageTokens, first.data());
    model->pages().copy_page(0, 0, 1);
    const Payload payload(*model, second, 1);
    if (together)
      model->pages().write_pages({{0, 0, kPageTokens, kPageTokens, payload.parts}});
    else
      model->pages().write_page(0, 0, kPageTokens, second.data());
    model->context().gpu->stream().synchronize();
    Bytes copied(bytes), written(bytes);
    model->pages().read_page(0, 1, kPageTokens, copied.data());
    model->pages().read_page(0, 0, kPageTokens, written.data());
    EXPECT(copied == first && written == second, "a copy of what the page was");
  }
}

// The host gives memory back after an error, so nothing may use it any more.
void test_a_failed_batch_is_waited_for() {
  const auto model = make_model(small_config());
  model->pages().allocate_pages(std::vector<int64_t>(model->groups().size(), 2));
  const size_t bytes = model->pages().stored_page_bytes(0, kPageTokens);
  const Bytes stored = random_bytes(bytes, 200);
  model->pages().write_page(0, 0, kPageTokens, stored.data());
  const Payload back(*model, Bytes(bytes), 1);
  const Payload more(*model, Bytes(2 * bytes), 1);  // than there is of the last page
  std::string error;
  try {
    model->pages().read_pages({{0, 0, kPageTokens, kPageTokens, back.parts},
                               {0, 1, kPageTokens, kPageTokens, more.parts}});
  } catch (const Error& e) {
    error = e.what();
  }
  EXPECT(error.find("copy from") != std::string::npos, "a copy beyond the pages: " + error);
  EXPECT(back.bytes() == stored, "the copy before the one that failed has ended");
}

// Where no graph can be captured, steps are launched as they are, and one message reports it.
void test_captures_fail() {
  const auto decode = [](Bench& bench) {
    std::vector<std::vector<float>> logits;
    bench.step({9, 20});
    for (int i = 0; i < 4; ++i) {
      logits.push_back(bench.step({1, 1}));
      logits.push_back(bench.step({1, 0}));
    }
    return logits;
  };
  const auto model = make_model(small_config()), other = make_model(small_config());
  Bench bench(*model, 2, 200), graphs(*other, 2, 200);
  emulator::set_capture_fails(true);
  const auto plain = decode(bench);
  emulator::set_capture_fails(false);
  EXPECT(plain == decode(graphs), "the same logits with graphs and without");
  const std::string note = model->context().gpu->library_note(), words = "are not captured: ";
  const size_t at = note.find(words);
  EXPECT(at != std::string::npos && note.find("asked to fail") != std::string::npos,
         "noted: " + note);
  EXPECT(at == note.rfind(words), "noted once: " + note);
  EXPECT(other->context().gpu->library_note() == "our own kernels", "nothing else is noted");
}

// The memory of a tier outlives the model when the tier's disk hangs.
void test_memory_outlives_its_model() {
  HostBlock block;
  {
    const auto model = make_model(small_config());
    block = model->pages().host_memory().allocate(100);
  }
  std::memset(block.get(), 1, 100);
}

void test_profile() {
  const auto model = make_model(small_config());
  Bench bench(*model, 2, 200);
  Profiler& profiler = model->context().profiler;
  bench.step({120, 3});
  const std::vector<float> plain = bench.step({1, 1});
  bench.go_to(0, 120), bench.go_to(1, 3);
  profiler.enabled = true;
  EXPECT(bench.step({1, 1}) == plain, "profiled steps give the same bits");
  std::vector<SampleRow> rows(2);
  std::vector<int32_t> tokens(2);
  rows[1].logits_row = rows[1].out = 1;
  model->outputs()->submit_sample(rows.data(), 2);
  model->outputs()->read_tokens(tokens.data());
  profiler.collect();
  for (size_t i = 0; i < profiler.stats.size(); ++i) {
    const Op op = static_cast<Op>(i);
    const OpStat& stat = profiler.stats[i];
    if (op == Op::other) continue;
    if (op == Op::reduce || op == Op::reduce_wait) {
      EXPECT(stat.calls == 0, "one rank adds up nothing");
      continue;
    }
    const int64_t calls = op == Op::embed || op == Op::head || op == Op::sample ? 1
                          : op == Op::norm                                      ? 5
                                                                                : 2;
    EXPECT(stat.calls == calls && stat.ns > 0, std::string(op_name(op)) + ": calls and time");
    EXPECT(stat.bytes > 0, std::string(op_name(op)) + ": bytes");
  }
  // The layer with a window of 100 sees 104 of 121 and 4 keys; K and V are 24 wide.
  const OpStat& attended = profiler.stats[static_cast<size_t>(Op::attention)];
  const double keys = 125 + 104;
  EXPECT(attended.bytes == keys * 48 * 2 * 2, "attention: bytes of K and V");
  EXPECT(attended.flops == keys * 48 * 2 * 4, "attention: FLOPs");
  profiler.enabled = false;
  const OpStats after = profiler.stats;
  bench.step({1, 1});
  profiler.collect();
  EXPECT(profiler.stats[0].ns == after[0].ns, "nothing is timed when it is off");
}

// Each changes what the small model is, in every layer.
using Change = std::function<void(ModelConfig&, LayerConfig&)>;
const std::vector<std::pair<std::string, Change>> kChanges = {
    {"as it is", [](ModelConfig&, LayerConfig&) {}},
    {"as it is, float16", [](ModelConfig&, LayerConfig&) {}},
    {"no rotation", [](ModelConfig&, LayerConfig& l) { l.rope = -1; }},
    {"interleaved", [](ModelConfig& c, LayerConfig&) { c.ropes[0].interleaved = true; }},
    {"caps", [](ModelConfig& c,
                LayerConfig& l) { l.softcap = 2, l.attn_scale = 0.9f, c.final_softcap = 3; }},
    {"scales",
     [](ModelConfig& c, LayerConfig& l) {
       l.residual_scale = 0.7f, c.embed_scale = 3, c.norm_weight_offset = 1, c.logit_scale = 0.4f;
     }},
    {"norms after", [](ModelConfig&, LayerConfig& l) { l.post_norms = true; }},
    {"gelu", [](ModelConfig&, LayerConfig& l) { l.activation = Activation::gelu_tanh; }},
    {"biases and norms",
     [](ModelConfig&, LayerConfig& l) { l.qkv_bias = l.o_bias = l.mlp_bias = l.qk_norm = true; }},
    {"odd widths",
     [](ModelConfig& c, LayerConfig& l) { c.hidden = 51, c.vocab = 77, l.intermediate = 73; }},
    {"experts",
     [](ModelConfig&, LayerConfig& l) { l.intermediate = 0, l.experts = {6, 3, 40, true}; }},
    {"experts not renormalised",
     [](ModelConfig&, LayerConfig& l) { l.intermediate = 0, l.experts = {9, 2, 33, false}; }},
    {"experts beside an MLP with a gate",
     [](ModelConfig&, LayerConfig& l) { l.experts = {6, 3, 40, false}, l.mlp_gate = true; }},
    {"experts beside an MLP", [](ModelConfig&, LayerConfig& l) { l.experts = {6, 3, 40, true}; }},
    {"experts and an MLP with norms of their own",
     [](ModelConfig&, LayerConfig& l) {
       l.experts = {6, 3, 40, true}, l.experts.own_norms = l.experts.scaled = true;
       l.post_norms = true;
     }},
    {"biased experts, swiglu",
     [](ModelConfig&, LayerConfig& l) {
       l.intermediate = 0, l.experts = {6, 3, 40, true, true, true};
       l.activation = Activation::swiglu;
     }},
    {"sinks", [](ModelConfig&, LayerConfig& l) { l.sinks = true; }},
    {"norms across heads", [](ModelConfig&, LayerConfig& l) { l.qk_norm_all = true; }},
    {"its own head", [](ModelConfig& c, LayerConfig&) { c.tied_head = false; }},
    {"other values", [](ModelConfig&, LayerConfig& l) { l.k_dim = 40, l.v_dim = 8; }},
    {"wide heads", [](ModelConfig&, LayerConfig& l) { l.k_dim = l.v_dim = 256; }},
    {"many to one", [](ModelConfig&, LayerConfig& l) { l.heads = 20, l.kv_heads = 1; }},
    {"window of 1", [](ModelConfig&, LayerConfig& l) { l.window = 1; }},
    {"norms of V, and a scale", [](ModelConfig&, LayerConfig& l) { l.v_norm = l.scaled = true; }},
    {"inputs per layer",
     [](ModelConfig& c, LayerConfig& l) {
       c.per_layer = 20, l.activation = Activation::gelu_tanh, l.post_norms = true;
     }},
    {"another layer's KV",
     [](ModelConfig& c, LayerConfig& l) {
       l.window = 0, l.kv_layer = &l == c.layers.data() ? -1 : 0;
     }},
};

void expect_near(const std::string& name, const std::vector<float>& got,
                 const std::vector<float>& want) {
  double off = 0, all = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    off += std::pow(got[i] - want[i], 2);
    all += std::pow(want[i], 2);
  }
  const double relative = std::sqrt(off / all);
  EXPECT(relative < 0.03, name + ": off by " + std::to_string(relative));
}

// Every option of a config gives on the GPU what it gives on the CPU, for prompts and tokens. Every
// second option is tested with the other type.
void test_configs() {
  for (size_t i = 0; i < kChanges.size(); ++i) {
    const auto& [name, change] = kChanges[i];
    ModelConfig config = small_config();
    for (LayerConfig& layer : config.layers) change(config, layer);
    const auto cpu = make_model(config, false);
    Bench on_cpu(*cpu, 2, 200);
    const std::vector<float> prompt = on_cpu.step({70, 3}, 2), token = on_cpu.step({1, 1});
    config.weight_format = i % 2 ? "float16" : "bfloat16";
    config.kv_dtype = i % 2 ? DType::f16 : DType::bf16;
    // In emulation there is no library, so that both ways are one.
    for (const bool deterministic : {false, true}) {
      if (deterministic && real == nullptr) continue;
      const std::string which = name + (deterministic ? ", deterministic" : "");
      const auto gpu = make_model(config, true, deterministic);
      Bench on_gpu(*gpu, 2, 200);
      expect_near(which, on_gpu.step({70, 3}, 2), prompt);
      expect_near(which, on_gpu.step({1, 1}), token);
    }
  }
}

void expect_refusal(const std::string& words, const std::function<void(ModelConfig&)>& change) {
  ModelConfig config = small_config();
  change(config);
  try {
    make_model(config);
    fail("not refused: " + words);
  } catch (const Error& e) {
    const bool named = std::string(e.what()).find(words) != std::string::npos;
    EXPECT(named && e.code() == ErrorCode::model, "refused with: " + std::string(e.what()));
  }
}

void test_refusals() {
  expect_refusal("dtype is float32, expected bfloat16 or float16",
                 [](ModelConfig& c) { c.weight_format = "float32"; });
  expect_refusal("kv_dtype is float16, expected bfloat16, the weights' own",
                 [](ModelConfig& c) { c.kv_dtype = DType::f16; });
  expect_refusal("vocab is 1048577, expected at most 1048576",
                 [](ModelConfig& c) { c.vocab = (1 << 20) + 1; });
  expect_refusal("hidden is 24584, expected at most 24576",
                 [](ModelConfig& c) { c.hidden = 24584; });
  expect_refusal("logit_scale is 0", [](ModelConfig& c) { c.logit_scale = 0; });
  expect_refusal("final_softcap is -1", [](ModelConfig& c) { c.final_softcap = -1; });
  expect_refusal("layers[1].k_dim is 20, expected a multiple of 8 up to 256",
                 [](ModelConfig& c) { c.layers[1].k_dim = 20; });
  expect_refusal("layers[0].v_dim is 264, expected a multiple of 8 up to 256",
                 [](ModelConfig& c) { c.layers[0].v_dim = 264; });
  emulator::set_device_bytes(64 << 10);
  expect_refusal("which are free on emulated GPU", [](ModelConfig& c) { c.hidden = 480; });
  emulator::set_device_bytes(size_t{1} << 30);
}

// Steps take theirs first, and pages get a share of what is left, but for what stays free.
void test_shares() {
  constexpr int64_t kReserve = 256 << 20, kDevice = (8 << 20) + kReserve, kPage = 64 * 400;
  emulator::set_device_bytes(kDevice);
  EngineOptions options;
  options.prefill_chunk = 64;
  for (const double share : {0.01, 1.0}) {
    options.cache_share = share;
    auto model = make_model(small_config());
    const int64_t empty = model->free_bytes();
    Engine engine(options, std::move(model));
    const int64_t left = engine.model().free_bytes(), pages = engine.stats().cache_bytes;
    if (share < 1)
      EXPECT(std::abs(99 * pages - left) < 100 * kPage, "pages have a hundredth");
    else
      EXPECT(left >= kReserve && left < kReserve + kPage, "pages have all but the reserve");
    EXPECT(pages > 1 << 20, "how memory is shared out");
    engine.shutdown();
    EXPECT(engine.model().free_bytes() > empty, "what was shut down has given all of it back");
    EXPECT(engine.model().memory().weights() > 0, "the model is still described");
  }
  const auto expect = [&](const std::string& words) {
    try {
      Engine engine(options, make_model(small_config()));
      fail("not refused: " + words);
    } catch (const Error& e) {
      const bool named = std::string(e.what()).find(words) != std::string::npos;
      EXPECT(named && e.code() == ErrorCode::invalid_request, "refused with: " + words);
    }
  };
  emulator::set_device_bytes(kDevice - kReserve);
  expect(
      "cache_memory: got 0 bytes (a share of the device's free memory, 256 MiB of which are "
      "reserved)");
  options.prefill_chunk = 1 << 16;
  expect("got 65552 tokens, expected at most 65535");
  options.prefill_chunk = 30000;
  expect("of 16 sequences do not fit the device's memory: out of device memory");
  options.prefill_chunk = 64;
  options.cache_share = 0;
  options.cache_bytes = kDevice;
  expect("bytes, the device's free memory");
  options.cache_pages = 1 << 20;
  expect("cache_pages: got pages of ");
  emulator::set_device_bytes(size_t{1} << 30);
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  std::vector<std::string> arguments;
  std::tie(library_folders, arguments) = split_folders(read_arguments(argc, argv));
  std::vector<TestCase> cases = {
      TM_CASE(test_no_allocation), TM_CASE(test_replays),
      TM_CASE(test_pages),         TM_CASE(test_memory_outlives_its_model),
      TM_CASE(test_profile),       TM_CASE(test_configs),
  };
  // These cases need faults that only the emulator can inject.
  if (real == nullptr)
    cases.insert(cases.begin(), {
                                    TM_CASE(test_shares),
                                    TM_CASE(test_refusals),
                                    TM_CASE(test_captures_fail),
                                    TM_CASE(test_a_failed_batch_is_waited_for),
                                });
  return run_cases(arguments, cases, &failures);
}
