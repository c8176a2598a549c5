// A small whole decoder on a GPU, and sequences on it; for drivers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "model/decoder/decoder_builder.h"
#include "tests/cuda/driver_gpu.h"

namespace turbomind {

inline int failures = 0;

inline void fail(const std::string& what) {
  if (++failures <= 20) std::printf("FAILED: %s\n", what.c_str());
}
#define EXPECT(ok, what) ((ok) ? void() : fail(what))

// Two layers that keep their past in two ways.
inline ModelConfig small_config() {
  ModelConfig config;
  config.fingerprint = "small";
  config.hidden = 48;
  config.vocab = 101;
  config.max_context = 4096;
  config.tied_head = true;
  RopeTable rope;
  for (int i = 0; i < 8; ++i) rope.inv_freq.push_back(std::pow(10000.0f, -i / 8.0f));
  config.ropes = {rope};
  for (const int window : {0, 100}) {
    LayerConfig layer;
    layer.heads = 4;
    layer.kv_heads = 2;
    layer.k_dim = layer.v_dim = 24;
    layer.window = window;
    layer.intermediate = 72;
    config.layers.push_back(layer);
  }
  return config;
}

inline std::vector<std::string> library_folders;

inline std::unique_ptr<Model> make_model(const ModelConfig& config, bool on_gpu = true,
                                         bool deterministic = false) {
  GpuOptions gpu;
  gpu.kind = kind();
  gpu.deterministic = deterministic;
  gpu.library_folders = library_folders;
  DecoderBuilder builder(config, Isa::portable, 1,
                         on_gpu ? std::vector{gpu} : std::vector<GpuOptions>{});
  builder.fill_dummy(1);
  return builder.finish(true);
}

// Sequences side by side, each on pages of its own for as many keys. Keys and values that were not
// computed are zero, so that a sequence can have any length.
class Bench {
 public:
  Bench(Model& model, int sequences, int64_t keys) : model_(model), written_(sequences, 0) {
    const int64_t pages = (keys + kPageTokens - 1) / kPageTokens;
    model.pages().allocate_pages(std::vector<int64_t>(model.groups().size(), sequences * pages));
    for (int s = 0; s < sequences; ++s) {
      tables_.emplace_back(pages);
      std::iota(tables_.back().begin(), tables_.back().end(), static_cast<int32_t>(s * pages));
    }
    clear();
  }
  void clear() {
    for (int g = 0; g < static_cast<int>(model_.groups().size()); ++g) {
      const std::vector<uint8_t> zeros(model_.pages().stored_page_bytes(g, kPageTokens));
      for (int32_t page = 0; page <= tables_.back().back(); ++page)
        model_.pages().write_page(g, page, kPageTokens, zeros.data());
    }
  }

  // lengths[s] more tokens of sequence s; the logits of each one's last token.
  std::vector<float> step(const std::vector<int64_t>& lengths, int64_t more_samples = 0) {
    StepBatch batch;
    for (size_t s = 0; s < lengths.size(); ++s) {
      if (lengths[s] == 0) continue;
      StepRow& row = batch.rows.emplace_back();
      row.q_begin = static_cast<int64_t>(batch.token_ids.size());
      row.q_len = lengths[s];
      row.kv_begin = written_[s];
      row.pages.assign(model_.groups().size(), tables_[s].data());
      for (int64_t t = 0; t < lengths[s]; ++t) {
        batch.token_ids.push_back(static_cast<int32_t>((7 * s + 3 * (written_[s] + t)) % 70));
        batch.positions.push_back(static_cast<int32_t>(written_[s] + t));
      }
      const auto last = static_cast<int32_t>(batch.token_ids.size() - 1);
      const int64_t samples = std::min(more_samples + 1, lengths[s]);
      for (int64_t i = samples; i > 0; --i)
        batch.sample_rows.push_back(last + 1 - static_cast<int32_t>(i));
      written_[s] += lengths[s];
    }
    std::vector<float> logits(batch.sample_rows.size() * model_.vocab());
    model_.forward(batch, logits.data(), nullptr);
    for (const float logit : logits) EXPECT(std::isfinite(logit), "a logit is not finite");
    return logits;
  }
  void go_to(int s, int64_t written) { written_[s] = written; }
  void all_to(int64_t written) { std::fill(written_.begin(), written_.end(), written); }

 private:
  Model& model_;
  std::vector<int64_t> written_;
  std::vector<std::vector<int32_t>> tables_;
};

}  // namespace turbomind
