// A model cut over ranks that compute each step together: a decoder each, a thread each.
#pragma once

#include <memory>
#include <vector>

#include "model/decoder_impl.h"
#include "model/model.h"
#include "model/parallel/rank_exchange.h"

namespace turbomind {

// Makes the decoders of a model's ranks, two or more, and their group.
std::unique_ptr<Model> make_rank_group(const ModelConfig& whole,
                                       std::vector<std::unique_ptr<DecoderResources>> resources,
                                       std::vector<DecoderWeights> weights);

// Joins ranks that are linked by an exchange. Rank 0 runs on the thread of the caller of forward(),
// and its context is the group's.
std::unique_ptr<Model> join_ranks(std::vector<std::unique_ptr<Model>> ranks,
                                  std::unique_ptr<RankExchange> exchange);

}  // namespace turbomind
