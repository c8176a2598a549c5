// Attention over the pages of a sequence: projection, norms of q and k, rotation, KV write,
// attention, output projection.
#pragma once

#include <string>

#include "model/mixers/mixer.h"
#include "model/mixers/mixer_weights.h"
#include "model/mixers/slot_list.h"
#include "model/workspace.h"
#include "ops/attention.h"
#include "ops/rope_kv.h"

namespace turbomind {

// Work memory that the attention of all layers shares.
struct AttentionWork {
  Workspace qkv, q, out;
  AttentionScratch scratch;
};

class AttentionMixer final : public Mixer {
 public:
  // Declares the slots "qkv", "o" and so on, whose names begin with `prefix`.
  static void declare(SlotList& slots, const std::string& prefix, int hidden,
                      const LayerConfig& layer, AttentionWeights& weights);

  AttentionMixer(const MixerContext& shared, int layer, const AttentionWeights& weights,
                 AttentionWork& work);
  void reserve(const StepLimits& most) override;
  DType input_dtype() const override { return shared_.x_dtype(weights_.qkv); }
  Mat run(const StepInputs& in, const Mat& x, const Mat& h, bool kv_only) override;
  void finish(const Mat& mixed, Epilogue epilogue, const Mat& y) override;

 private:
  void norm_all_heads(const Mat& qkv);

  const MixerContext& shared_;
  const LayerConfig& layer_;
  const KvLayout& layout_;
  const int group_;
  const AttentionWeights& weights_;
  AttentionWork& work_;
  AttentionShape shape_;
  HeadNorms norms_;
};

}  // namespace turbomind
