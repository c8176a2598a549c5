// The random engines that engine_fuzz runs its clients on.
#pragma once

#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/make_tiers.h"
#include "model/decoder/decoder_builder.h"
#include "tests/engine/async_model.h"
#include "tests/engine/engine_checks.h"
#include "tests/engine/faulty_group.h"
#include "tests/engine/fuzz_reference.h"
#include "tests/tiers/test_tier.h"
#include "tiers/disk/disk_tier.h"

namespace turbomind::fuzz {

// One random engine and what its clients need for it.
struct Mix {
  EngineOptions options;
  scripted::Options script;
  int vocab = 0;
  int longest_prompt = 0;
  int actions = 12;              // of a client
  std::vector<Tokens> openings;  // prompts begin with one of these, so they share pages
  std::function<std::unique_ptr<Model>()> make_model;
  std::function<TierPtrs(const Model&)> make_tiers;  // lower tiers; empty: none
  std::function<void(Random&)> trouble;              // run between two engines; empty: none
  std::function<std::unique_ptr<Reference>()> make_reference;
  std::shared_ptr<FaultPlan> faults;  // of the ranks of a group; null: none
  // Whether faults are on: not while an engine is opened.
  std::shared_ptr<std::atomic<bool>> open = std::make_shared<std::atomic<bool>>(false);
};

inline ModelConfig tiny_config(DType kv_dtype) {
  ModelConfig config;
  config.fingerprint = "tiny";
  config.hidden = 64;
  config.vocab = 61;
  config.max_context = 450;
  config.weight_format = "bfloat16";
  config.kv_dtype = kv_dtype;
  config.ropes.emplace_back();
  for (int i = 0; i < 8; ++i) config.ropes[0].inv_freq.push_back(std::pow(100.0f, -i / 8.0f));
  for (int i = 0; i < 2; ++i) {
    LayerConfig& layer = config.layers.emplace_back();
    layer.heads = 4;
    layer.kv_heads = 2;
    layer.k_dim = layer.v_dim = 16;
    layer.window = i == 0 ? 0 : 70;
    layer.intermediate = 96;
  }
  return config;
}

inline std::unique_ptr<Model> tiny_decoder(DType kv_dtype, int threads, int ranks = 1) {
  DecoderBuilder builder(tiny_config(kv_dtype), resolve_isa("auto"), threads, {}, ranks);
  builder.fill_dummy(5);
  return builder.finish(true);
}

// A rank on each of some emulated GPUs, or two that take turns on one.
inline std::unique_ptr<Model> tiny_gpu_decoder(int ranks, bool turns) {
  std::vector<GpuOptions> gpus(ranks);
  for (int r = 0; r < ranks; ++r) {
    gpus[r].kind = GpuKind::emulated;
    gpus[r].index = turns ? 0 : r;
  }
  DecoderBuilder builder(tiny_config(DType::bf16), Isa::portable, 1, gpus, ranks);
  builder.fill_dummy(5);
  return builder.finish(true);
}

// Returns a new temporary folder, which is removed with its last reference.
inline std::shared_ptr<const std::string> temporary_folder() {
  std::string name = std::filesystem::temp_directory_path() / "fuzz-XXXXXX";
  check(mkdtemp(name.data()) != nullptr, "a temporary folder");
  return {new std::string(std::move(name)), [](const std::string* folder) {
            std::filesystem::remove_all(*folder);
            delete folder;
          }};
}

// Flips a bit in some payloads, as a failing disk does.
inline void damage(const std::string& folder, Random& random) {
  for (const auto& file : std::filesystem::recursive_directory_iterator(folder)) {
    if (file.path().extension() != ".kv" || file.file_size() == 0) continue;
    std::fstream stream(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    for (int i = 0; i < 3; ++i) {
      const auto at = random.in(0, static_cast<int64_t>(file.file_size()) - 1) / 4096 * 4096;
      stream.seekg(at);
      const int byte = stream.get();
      stream.seekp(at);
      stream.put(static_cast<char>(byte ^ 4));
    }
  }
}

// The real tiers: host memory, and a disk with small segments or a quota.
inline void add_real_tiers(Mix& mix, Random& random) {
  const auto folder = temporary_folder();
  const int64_t host_pages = random.pick<int64_t>({0, 3, 30});
  const int64_t quota = random.pick<int64_t>({0, 0, 1 << 20, 100000});
  const int64_t segment = random.pick<int64_t>({0, 20000});
  mix.make_tiers = [folder, host_pages, quota, segment](const Model& model) {
    EngineOptions host;
    host.host_bytes =
        host_pages * static_cast<int64_t>(model.pages().stored_page_bytes(0, kPageTokens));
    TierPtrs tiers = make_tiers(host, model);
    tiers.push_back(std::make_unique<DiskTier>(
        DiskTier::Options{*folder + "/pages", quota, model.numerics_fingerprint(), segment}));
    return tiers;
  };
  if (random.one_in(3)) mix.trouble = [folder](Random& dice) { damage(*folder, dice); };
}

// Test tiers that outlive their engine, with faults. `numerics`: fingerprint of the pages.
inline void add_tiers(Mix& mix, Random& random) {
  mix.options.prefix_reuse = true;
  if (random.one_in(3)) return add_real_tiers(mix, random);
  const auto shelf = std::make_shared<Shelf>();
  shelf->vanish = random.pick({0, 0, 20, 200});
  shelf->mistake = random.pick({0, 0, 20, 200});
  shelf->refuse = random.pick({0, 0, 100});
  shelf->delay_us = random.pick({0, 0, 50, 2000});
  const int64_t host_pages = random.pick<int64_t>({0, 3, 30});
  mix.make_tiers = [shelf, host_pages](const Model& model) {
    EngineOptions host;
    host.host_bytes =
        host_pages * static_cast<int64_t>(model.pages().stored_page_bytes(0, kPageTokens));
    TierPtrs tiers = make_tiers(host, model);
    tiers.push_back(std::make_unique<TestTier>(shelf, model.numerics_fingerprint()));
    return tiers;
  };
}

inline std::unique_ptr<Engine> make_engine(const Mix& mix) {
  auto model = mix.make_model();
  TierPtrs tiers = mix.make_tiers ? mix.make_tiers(*model) : TierPtrs{};
  mix.open->store(false);  // it measures its first steps
  auto engine = std::make_unique<Engine>(mix.options, std::move(model), std::move(tiers));
  mix.open->store(true);
  return engine;
}

// The model that the engines of a mix run; `group`: a decoder cut over ranks, `gpus`: on GPUs.
enum class Kind { scripted, async, decoder, group, gpus };

constexpr bool is_decoder(Kind kind) {
  return kind == Kind::decoder || kind == Kind::group || kind == Kind::gpus;
}

constexpr int kMostOps = 32;  // of a rank in a step of the tiny decoder, exchanges included

// Faults of some kinds at any op of any rank, in one of `every` steps of an open engine on average.
inline std::function<Fault()> random_faults(uint64_t seed, int ranks, int every,
                                            std::vector<Fault::Kind> kinds,
                                            std::shared_ptr<std::atomic<bool>> open) {
  return [dice = std::make_shared<Random>(seed), ranks, every, kinds = std::move(kinds),
          open = std::move(open)] {
    Fault fault;
    if (!open->load() || !dice->one_in(every)) return fault;
    fault.kind = kinds[dice->in(0, static_cast<int64_t>(kinds.size()) - 1)];
    fault.rank = static_cast<int>(dice->in(0, ranks - 1));
    fault.op = static_cast<int>(dice->in(-1, kMostOps - 1));
    fault.skip = static_cast<int>(dice->in(0, 3));
    return fault;
  };
}

// In some mixes ranks fail.
inline void add_faults(Mix& mix, Random& random, int ranks, std::vector<Fault::Kind> kinds) {
  const int every = ranks > 1 ? random.pick({0, 40, 6}) : 0;
  if (every == 0) return;
  mix.faults = std::make_shared<FaultPlan>();
  mix.faults->next = random_faults(static_cast<uint64_t>(random.in(0, 1 << 30)), ranks, every,
                                   std::move(kinds), mix.open);
  mix.make_model = [ranks, make = mix.make_model, faults = mix.faults] {
    return std::make_unique<FaultyGroup>(ranks, make, faults);
  };
}

// An engine that runs each request alone.
inline void add_solo_reference(Mix& mix, std::function<std::unique_ptr<Model>()> make) {
  mix.make_reference = [make = std::move(make)]() -> std::unique_ptr<Reference> {
    EngineOptions solo;
    solo.cache_pages = 64;
    solo.max_batch_size = 1;
    solo.prefix_reuse = false;
    return std::make_unique<SoloEngineReference>(std::make_shared<Engine>(solo, make()));
  };
}

// Decoders of the mix, cut over ranks.
inline void add_decoders(Mix& mix, Random& random, int ranks) {
  const DType kv = random.pick({DType::f32, DType::bf16, DType::f16});
  const int threads = static_cast<int>(random.in(1, 2 * ranks));
  mix.make_model = [kv, threads, ranks] { return tiny_decoder(kv, threads, ranks); };
  add_faults(mix, random, ranks, {Fault::error, Fault::memory, Fault::allocation, Fault::mapping});
  add_solo_reference(mix, [kv, ranks] { return tiny_decoder(kv, 1, ranks); });
}

// The same on GPUs. The reference has a rank on each GPU, where the mix may have turns. The
// emulator itself is not made to run out of memory.
inline void add_gpu_decoders(Mix& mix, Random& random) {
  const bool turns = random.one_in(3);
  mix.make_model = [turns] { return tiny_gpu_decoder(2, turns); };
  add_faults(mix, random, 2, {Fault::error, Fault::memory});
  add_solo_reference(mix, [] { return tiny_gpu_decoder(2, false); });
}

inline std::unique_ptr<Model> make_scripted(const scripted::Options& script) {
  if (script.asynchronous) return std::make_unique<scripted::AsyncModel>(script);
  return std::make_unique<scripted::ScriptedModel>(script);
}

inline Mix make_mix(Random& random, Kind kind) {
  Mix mix;
  EngineOptions& o = mix.options;
  o.cache_pages = random.pick<int64_t>({4, 4, 5, 7, 12, 40});
  o.max_batch_size = random.pick({1, 2, 3, 8, 16});
  o.prefill_chunk = random.pick({0, 0, 1, 7, 64, 100, 512});
  o.step_ms = random.pick({0.01, 1.0, 100.0});
  o.prefix_reuse = !random.one_in(5);
  if (random.one_in(4)) o.max_context_tokens = random.in(20, 300);
  mix.vocab = mix.script.vocab;
  const int64_t most = kind == Kind::gpus ? 90 : 420;
  if (kind == Kind::gpus) mix.actions = 4;  // the emulator is slow
  mix.longest_prompt = static_cast<int>(std::min<int64_t>(o.cache_pages * kPageTokens + 5, most));
  for (int i = 0; i < 3; ++i) {
    Tokens& opening = mix.openings.emplace_back();
    for (int64_t n = random.in(1, mix.longest_prompt); n > 0; --n)
      opening.push_back(static_cast<int32_t>(random.in(0, 49)));
  }
  if (is_decoder(kind)) {
    if (kind == Kind::gpus)
      add_gpu_decoders(mix, random);
    else
      add_decoders(mix, random, kind == Kind::group ? random.pick({2, 2, 4}) : 1);
    if (!random.one_in(3)) add_tiers(mix, random);
    return mix;
  }
  mix.script.page_batch = random.pick({1, 1, 3, 8});
  using Windows = std::vector<int>;
  mix.script.windows = random.pick<Windows>(
      {{0}, {0}, {0, 70}, {0, 1}, {100}, {130}, {2, 0}, {0, 64, 130}, {65, 128}, {400, 0}});
  mix.script.layers = random.pick({0, 3});
  mix.script.layer_us = random.pick({0, 0, 50});
  mix.script.poison = 55;
  if (kind == Kind::async) {
    mix.script.asynchronous = true;
    mix.script.poison = random.pick({-1, -1, 55});  // else few requests would be long
    mix.script.fail_submit = random.pick({0, 0, 0, 10});
    mix.script.fail_wait = random.pick({0, 0, 0, 10});
  }
  mix.make_model = [script = mix.script] { return make_scripted(script); };
  mix.make_reference = [script = mix.script] {
    return std::make_unique<ScriptedReference>(script);
  };
  if (!random.one_in(3)) add_tiers(mix, random);
  return mix;
}

}  // namespace turbomind::fuzz
