#include "model/device/device_step_arrays.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "core/error.h"
#include "cuda/gpu_context.h"
#include "cuda/seq_arrays.h"
#include "linear/linear_cuda.h"
#include "ops/attention_cuda.h"
#include "ops/next_tokens.h"

namespace turbomind {

namespace {

constexpr int kFewestPages = 8;  // of a bucket: 512 tokens
constexpr int64_t kAlign = 64;   // int32 elements: each array begins at 256 bytes

// Offset of each array of one step in the block, in int32 elements.
struct Places {
  int64_t token_ids = 0, token_from = 0, positions = 0, seq_of_token = 0, sample_rows = 0;
  int64_t q_begin = 0, q_len = 0, kv_begin = 0, first_count = 0;
  std::vector<int64_t> pages;  // per group
  int64_t end = 0;

  int64_t take(int64_t count) {
    const int64_t at = end;
    end += round_up(std::max<int64_t>(count, 1), kAlign);
    return at;
  }
};

// What decides how a step is padded and launched.
struct StepShape {
  int64_t tokens = 0, samples = 0, seqs = 0;  // with padding
  int64_t most_keys = 0;                      // of a sequence
  bool decode = false, chunks = false;        // as in LaunchKind
  StepKey key;
};

StepShape shape_of(const StepBatch& batch) {
  StepShape shape;
  shape.tokens = static_cast<int64_t>(batch.token_ids.size());
  shape.samples = static_cast<int64_t>(batch.sample_rows.size());
  shape.seqs = static_cast<int64_t>(batch.rows.size());
  for (const StepRow& row : batch.rows) {
    shape.most_keys = std::max(shape.most_keys, row.kv_begin + row.q_len);
    (row.q_len == 1 ? shape.decode : shape.chunks) = true;
  }
  if (!shape.chunks && shape.tokens == shape.seqs && shape.samples == shape.seqs) {
    const int64_t pages = (shape.most_keys + kPageTokens - 1) / kPageTokens;
    shape.key = {row_bucket(static_cast<int>(shape.seqs)), page_bucket(static_cast<int>(pages))};
    shape.tokens = shape.samples = shape.seqs = shape.key.rows;
    shape.most_keys = int64_t{shape.key.pages} * kPageTokens;
  }
  return shape;
}

// Our own kernels are chosen by tiles of 16 rows and by how many blocks there are.
int64_t rounded_rows(int64_t rows, bool library) {
  if (library && rows > kSkinnyRows) return rows;
  const auto power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)));
  return round_up(rows, std::max<int64_t>(16, power / 8));
}

class StepArrays final : public DeviceStepArrays {
 public:
  StepArrays(Context& ctx, const ModelConfig& config, const CachePlan& plan)
      : ctx_(ctx), gpu_(*ctx.gpu), groups_(plan.groups.size()), arrays_(plan.groups.size()) {
    for (Staging& staging : staging_) staging.copied = GpuEvent(gpu_.gpu());
    inputs_.groups.resize(groups_);
    upload_ropes(config);
  }

  void reserve(const StepLimits& most) override {
    const int64_t pages = (most.keys + kPageTokens - 1) / kPageTokens;
    tokens_ = most.tokens, samples_ = most.samples, seqs_ = most.rows;
    max_pages_ = page_bucket(static_cast<int>(pages));
    place();
    const size_t bytes = places_.end * sizeof(int32_t);
    make_room(bytes);
    for (size_t i = 0; i < staging_.size(); ++i) next_staging(bytes);
  }

  const StepInputs& set(const StepBatch& batch, const int32_t* sampled,
                        uint32_t first_count) override {
    measure(batch);
    place();
    const size_t bytes = places_.end * sizeof(int32_t);
    if (bytes > device_.size()) make_room(2 * bytes);
    int32_t* const block = next_staging(bytes);
    fill(batch, block);
    block[places_.first_count] = static_cast<int32_t>(first_count);
    gpu_.gpu().copy(gpu_.handle(), device_.data(), staging_[last_].memory.data(), bytes);
    staging_[last_].copied.record(gpu_.stream());
    if (!batch.token_from.empty()) take_tokens(static_cast<int>(batch.token_ids.size()), sampled);
    point();
    return inputs_;
  }
  StepKey key() const override { return key_; }

 private:
  // Pinned, where a step's block is made ready. The copy of the step before may still read its own,
  // so the two take turns.
  struct Staging {
    PinnedBuffer memory;
    GpuEvent copied;  // from here to the device
  };

  void upload_ropes(const ModelConfig& config) {
    for (const RopeTable& table : config.ropes) {
      const size_t bytes = table.inv_freq.size() * sizeof(float);
      DeviceBuffer& buffer = inv_freq_.emplace_back(gpu_.gpu(), bytes);
      gpu_.gpu().copy(gpu_.handle(), buffer.data(), table.inv_freq.data(), bytes);
      StepRope& rope = inputs_.ropes.emplace_back();
      rope.table = &table;
      rope.inv_freq = buffer.as<float>();
    }
    gpu_.stream().synchronize();
  }

  void measure(const StepBatch& batch) {
    const StepShape shape = shape_of(batch);
    tokens_ = shape.tokens, samples_ = shape.samples, seqs_ = shape.seqs;
    key_ = shape.key;
    max_pages_ = (shape.most_keys + kPageTokens - 1) / kPageTokens;
    bounds_ = {static_cast<int>(seqs_), static_cast<int>(tokens_), shape.most_keys, shape.decode,
               shape.chunks};
  }

  void place() {
    places_ = {};
    places_.token_ids = places_.take(tokens_);
    places_.token_from = places_.take(tokens_);
    places_.positions = places_.take(tokens_);
    places_.seq_of_token = places_.take(tokens_);
    places_.sample_rows = places_.take(samples_);
    places_.q_begin = places_.take(seqs_);
    places_.q_len = places_.take(seqs_);
    places_.kv_begin = places_.take(seqs_);
    places_.first_count = places_.take(1);
    for (size_t g = 0; g < groups_; ++g) places_.pages.push_back(places_.take(seqs_ * max_pages_));
  }

  // The device's block needs no turns: steps follow each other in the stream.
  void make_room(size_t bytes) {
    gpu_.stream().synchronize();
    device_ = DeviceBuffer();
    device_ = DeviceBuffer(gpu_.gpu(), bytes);
    gpu_.moved();
  }

  int32_t* next_staging(size_t bytes) {
    last_ ^= 1;
    Staging& staging = staging_[last_];
    staging.copied.synchronize();  // two steps ago: long done
    if (staging.memory.size() < bytes) staging.memory = PinnedBuffer(gpu_.gpu(), device_.size());
    return staging.memory.as<int32_t>();
  }

  void take_tokens(int count, const int32_t* sampled) {
    if (!sampled) throw_error(ErrorCode::internal, "token_from: no earlier step sampled a token");
    int32_t* block = device_.as<int32_t>();
    next_tokens(ctx_, block + places_.token_from, sampled, block + places_.token_ids, count);
  }

  void fill(const StepBatch& batch, int32_t* block) {
    std::memset(block, 0, places_.end * sizeof(int32_t));
    seqs_known_.assign(seqs_, {});
    std::copy(batch.token_ids.begin(), batch.token_ids.end(), block + places_.token_ids);
    std::copy(batch.token_from.begin(), batch.token_from.end(), block + places_.token_from);
    std::copy(batch.positions.begin(), batch.positions.end(), block + places_.positions);
    std::copy(batch.sample_rows.begin(), batch.sample_rows.end(), block + places_.sample_rows);
    for (int64_t s = 0; s < seqs_; ++s) {
      const bool real = s < static_cast<int64_t>(batch.rows.size());
      if (real)
        fill_seq(batch.rows[s], s, block);
      else  // padding: its one token row belongs to a sequence of no queries
        fill_padding(s, block);
    }
  }

  void fill_seq(const StepRow& row, int64_t s, int32_t* block) {
    block[places_.q_begin + s] = static_cast<int32_t>(row.q_begin);
    block[places_.q_len + s] = static_cast<int32_t>(row.q_len);
    block[places_.kv_begin + s] = static_cast<int32_t>(row.kv_begin);
    seqs_known_[s] = {row.q_begin, row.q_len, row.kv_begin, nullptr};
    std::fill_n(block + places_.seq_of_token + row.q_begin, row.q_len, static_cast<int32_t>(s));
    const int64_t pages = (row.kv_begin + row.q_len + kPageTokens - 1) / kPageTokens;
    for (size_t g = 0; g < groups_; ++g)
      std::copy_n(row.pages[g], pages, block + places_.pages[g] + s * max_pages_);
  }

  void fill_padding(int64_t s, int32_t* block) {
    block[places_.q_begin + s] = static_cast<int32_t>(s);
    block[places_.seq_of_token + s] = static_cast<int32_t>(s);
    block[places_.sample_rows + s] = static_cast<int32_t>(s);
  }

  void point() {
    const int32_t* block = device_.as<int32_t>();
    inputs_.tokens = tokens_;
    inputs_.samples = samples_;
    inputs_.token_ids = block + places_.token_ids;
    inputs_.sample_rows = block + places_.sample_rows;
    inputs_.all_sampled = key_.rows > 0;
    inputs_.first_count = reinterpret_cast<const uint32_t*>(block + places_.first_count);
    for (StepRope& rope : inputs_.ropes) rope.positions = block + places_.positions;
    for (size_t g = 0; g < groups_; ++g) {
      arrays_[g] = {block + places_.q_begin,      block + places_.q_len,
                    block + places_.kv_begin,     block + places_.pages[g],
                    block + places_.seq_of_token, static_cast<int>(seqs_),
                    static_cast<int>(max_pages_), static_cast<int>(tokens_)};
      inputs_.groups[g].seqs = seqs_known_.data();
      inputs_.groups[g].arrays = &arrays_[g];
      inputs_.groups[g].bounds = &bounds_;
      inputs_.groups[g].count = seqs_;
    }
  }

  Context& ctx_;
  GpuContext& gpu_;
  const size_t groups_;
  std::vector<DeviceBuffer> inv_freq_;
  DeviceBuffer device_;
  std::array<Staging, 2> staging_;
  int last_ = 0;  // of them
  Places places_;
  StepInputs inputs_;
  StepKey key_;
  AttentionBounds bounds_{};
  std::vector<SeqArrays> arrays_;
  std::vector<AttentionSeq> seqs_known_;
  int64_t tokens_ = 0, samples_ = 0, seqs_ = 0, max_pages_ = 0;
};

}  // namespace

int row_bucket(int rows) {
  if (rows <= 8) return static_cast<int>(std::bit_ceil(static_cast<unsigned>(rows)));
  const int step = rows <= 32 ? 8 : rows <= 128 ? 16 : 64;
  return static_cast<int>(round_up(rows, step));
}

int page_bucket(int pages) {
  return std::max(kFewestPages, static_cast<int>(std::bit_ceil(static_cast<unsigned>(pages))));
}

LaunchKind launch_kind(const StepBatch& batch, bool library, bool profiled) {
  const StepShape shape = shape_of(batch);
  const int64_t pages = (shape.most_keys + kPageTokens - 1) / kPageTokens;
  return {rounded_rows(shape.tokens, library),
          rounded_rows(shape.samples, library),
          row_bucket(static_cast<int>(shape.seqs)),
          page_bucket(static_cast<int>(pages)),
          shape.decode,
          shape.chunks,
          !batch.token_from.empty(),
          profiled};
}

StepLimits padded_limits(const StepLimits& most) {
  const int64_t rows = row_bucket(static_cast<int>(most.rows));  // steps of one token each
  return {std::max(most.tokens, rows), rows, std::max(most.samples, rows), most.keys,
          std::max(most.sampled, rows)};
}

std::unique_ptr<DeviceStepArrays> make_device_step_arrays(Context& ctx, const ModelConfig& config,
                                                          const CachePlan& plan) {
  return std::make_unique<StepArrays>(ctx, config, plan);
}

}  // namespace turbomind
