// Small models of every kind of weight that a cut meets, and sequences on them; for drivers.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "model/decoder/decoder_builder.h"
#include "tests/check.h"

namespace turbomind {

inline constexpr int kTokens = 150;  // three pages, and more than the window

// The vocabulary is no multiple of anything.
inline ModelConfig small(int kv_heads, const std::string& format = "float32") {
  ModelConfig config;
  config.fingerprint = "small";
  config.hidden = 64;
  config.vocab = 1003;
  config.max_context = 400;
  config.weight_format = format;
  config.kv_dtype = format == "float32" ? DType::f32 : DType::bf16;
  config.ropes.emplace_back();
  for (int i = 0; i < 8; ++i) config.ropes[0].inv_freq.push_back(std::pow(100.0f, -i / 8.0f));
  for (int i = 0; i < 3; ++i) {
    LayerConfig& layer = config.layers.emplace_back();
    layer.rope = 0;
    layer.heads = 4;
    layer.kv_heads = kv_heads;
    layer.k_dim = 24;
    layer.v_dim = 16;
    layer.window = i == 1 ? 70 : 0;
    layer.intermediate = 72;
  }
  return config;
}

struct Variant {
  const char* name;
  std::function<void(ModelConfig&)> change;
};

inline std::vector<Variant> variants() {
  const auto all = [](auto change) {
    return [change](ModelConfig& c) {
      for (LayerConfig& layer : c.layers) change(layer);
    };
  };
  return {
      {"plain", [](ModelConfig&) {}},
      {"biases", all([](LayerConfig& l) { l.qkv_bias = l.o_bias = l.mlp_bias = true; })},
      {"scaled residuals", all([](LayerConfig& l) { l.residual_scale = 0.22f; })},
      {"norms after", all([](LayerConfig& l) { l.post_norms = l.scaled = l.qk_norm = true; })},
      {"sinks", all([](LayerConfig& l) { l.sinks = true; })},
      {"scaled layers", all([](LayerConfig& l) { l.scaled = true; })},
      {"tied head",
       [](ModelConfig& c) {
         c.tied_head = true;
         c.logit_scale = 0.5f;
         c.final_softcap = 3;
       }},
      {"experts", all([](LayerConfig& l) {
         l.intermediate = 0;
         l.activation = Activation::swiglu;
         l.experts = {5, 2, 40, true, true, true};
       })},
      {"experts beside an MLP", all([](LayerConfig& l) {
         l.mlp_gate = true;
         l.experts = {4, 2, 24, false, false, false};
       })},
      {"experts with norms of their own", all([](LayerConfig& l) {
         l.post_norms = true;
         l.experts = {4, 2, 24, true, false, false, true, true};
       })},
      {"per-layer inputs",
       [](ModelConfig& c) {
         c.per_layer = 12;
         for (LayerConfig& l : c.layers) l.post_norms = l.v_norm = true;
         c.layers[2].kv_layer = 0;
       }},
  };
}

inline std::vector<int32_t> some_tokens(int seed) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < kTokens; ++i) tokens.push_back((i * 37 + seed * 11 + 5) % 1003);
  return tokens;
}

// Sequences of one model, each on pages of its own.
class Bench {
 public:
  explicit Bench(Model& model, int sequences = 1) : model_(model) {
    const int64_t each = (kTokens + kPageTokens - 1) / kPageTokens;
    model.pages().allocate_pages(std::vector<int64_t>(model.groups().size(), sequences * each));
    for (int s = 0; s < sequences; ++s) {
      tables_.emplace_back(each);
      std::iota(tables_[s].begin(), tables_[s].end(), static_cast<int32_t>(s * each));
    }
    written_.resize(sequences);
  }

  // The step that computes counts[s] more tokens of each sequence, with the logits of all of them.
  StepBatch batch(const std::vector<int>& counts) const {
    StepBatch batch;
    for (size_t s = 0; s < counts.size(); ++s) {
      if (counts[s] == 0) continue;
      const std::vector<int32_t> tokens = some_tokens(static_cast<int>(s));
      StepRow& row = batch.rows.emplace_back();
      row.q_begin = static_cast<int64_t>(batch.token_ids.size());
      row.q_len = counts[s];
      row.kv_begin = written_[s];
      row.pages.assign(model_.groups().size(), tables_[s].data());
      for (int i = 0; i < counts[s]; ++i) {
        batch.sample_rows.push_back(static_cast<int32_t>(batch.token_ids.size()));
        batch.token_ids.push_back(tokens[written_[s] + i]);
        batch.positions.push_back(static_cast<int32_t>(written_[s] + i));
      }
    }
    return batch;
  }

  // Computes it and returns the logits.
  std::vector<float> step(const std::vector<int>& counts, const StepCancel* cancel = nullptr) {
    const StepBatch batch = this->batch(counts);
    std::vector<float> logits(batch.sample_rows.size() * model_.vocab(), NAN);
    complete = model_.forward(batch, logits.data(), cancel);
    if (complete)
      for (size_t s = 0; s < counts.size(); ++s) written_[s] += counts[s];
    return logits;
  }
  // All of sequence 0, in chunks.
  std::vector<float> all(int chunk) {
    std::vector<float> logits;
    for (int at = 0; at < kTokens; at += chunk) {
      const auto part = step({std::min(chunk, kTokens - at)});
      logits.insert(logits.end(), part.begin(), part.end());
    }
    return logits;
  }
  void go_to(int64_t written) { written_[0] = written; }

  bool complete = false;

 private:
  Model& model_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<int64_t> written_;
};

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// The largest difference as a share of the largest logit.
inline float difference(const std::vector<float>& got, const std::vector<float>& want) {
  CHECK(got.size() == want.size());
  float most = 0, largest = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    CHECK(std::isfinite(got[i]));
    most = std::max(most, std::fabs(got[i] - want[i]));
    largest = std::max(largest, std::fabs(want[i]));
  }
  return most / largest;
}

}  // namespace turbomind
