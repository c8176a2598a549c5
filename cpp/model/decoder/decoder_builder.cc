// Packing and checking of a decoder's weights.
#include "model/decoder/decoder_builder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <unordered_map>

#include "core/error.h"
#include "linear/row_source.h"
#include "model/decoder/check_ranks.h"
#include "model/decoder/decoder.h"
#include "model/decoder/decoder_slots.h"
#include "model/decoder/memory_plan.h"
#include "model/decoder/rank_group.h"
#include "model/decoder/rank_resources.h"
#include "model/decoder/weight_reader.h"
#include "model/device/device_limits.h"

namespace turbomind {

namespace {

// Source bytes that are in memory at a time, but for a few rows: what loading needs beside the
// packed weights. Of codes they are more, for tensors whose strips have a few bytes of each row.
constexpr int64_t kPieceBytes = 2 << 20;
constexpr int64_t kCodePieceBytes = 8 << 20;

float load_element(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::f32:
      return static_cast<const float*>(data)[i];
    case DType::f16:
      return f16_to_f32(static_cast<const uint16_t*>(data)[i]);
    case DType::bf16:
      return bf16_to_f32(static_cast<const uint16_t*>(data)[i]);
  }
  return 0;
}

void append_rows(const std::vector<RowSegment>& segments, int64_t begin, int64_t count,
                 std::vector<RowSegment>& out) {
  for (const RowSegment& s : some_rows(segments, begin, count)) out.push_back(s);
}

// gate then up -> blocks of 16 rows alternating, the last block of each padded with zeros.
std::vector<RowSegment> interleave_gate_up(const std::vector<RowSegment>& segments, int64_t half,
                                           int64_t cols) {
  std::vector<RowSegment> out;
  for (int64_t b = 0; b < half; b += kGateUpBlock) {
    const int64_t count = std::min(kGateUpBlock, half - b);
    for (int64_t part = 0; part < 2; ++part) {
      append_rows(segments, part * half + b, count, out);
      if (count < kGateUpBlock) out.push_back({nullptr, DType::f32, 0, kGateUpBlock - count, cols});
    }
  }
  return out;
}

// The rows of a slot's part in the order in which they are packed, with all their columns.
std::vector<RowSegment> rows_of_part(const Slot& slot, const std::vector<RowSegment>& segments) {
  std::vector<RowSegment> rows;
  for (const RowRange& range : slot.part.rows)
    append_rows(segments, range.begin, range.size(), rows);
  if (!slot.spec.gate_up) return rows;
  return interleave_gate_up(rows, slot.part.row_count() / 2, slot.spec.cols);
}

// Turns a whole head into the rank's rows of it.
void cut_head(LinearWeight& head, const RowRange& rows) {
  head.data += head.format->packed_bytes(rows.begin, head.k);
  head.n = rows.size();
  head.bytes = head.format->packed_bytes(head.n, head.k);
}

// The bits of the smallest magnitude of a source's type that is not finite in the packed type.
uint32_t first_too_large(DType source, DType target) {
  // 65520 rounds to infinity in float16; bfloat16 has float32's range but rounds up near its end.
  const float limit = target == DType::bf16 ? 3.3961775e38f : 65520.0f;
  uint32_t bits = 0x7f800000;  // infinity
  if (target == DType::f16 || (target == DType::bf16 && source == DType::f32))
    std::memcpy(&bits, &limit, 4);
  if (source == DType::f32) return bits;
  return source == DType::f16 ? 0x7c00 : (bits >> 16) + ((bits & 0xffff) != 0);
}

// The largest of the bits of magnitudes, which are ordered as they are. NaN is the largest.
template <typename Bits>
Bits largest_magnitude(const Bits* values, int64_t count) {
  constexpr Bits kMagnitude = static_cast<Bits>(Bits{0} - 1) >> 1;
  Bits most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Bits magnitude = values[i] & kMagnitude;
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

// True when every source value is finite after rounding to the packed type.
bool all_finite(ThreadPool& pool, const std::vector<RowSegment>& segments, DType target) {
  std::atomic<bool> finite{true};
  for (const RowSegment& s : segments) {
    if (s.data == nullptr) continue;
    const uint32_t limit = first_too_large(s.dtype, target);
    pool.parallel_for(s.rows, std::max<int64_t>(1, 65536 / s.cols), [&](int64_t b, int64_t e, int) {
      const int64_t first = (s.row_begin + b) * s.cols, count = (e - b) * s.cols;
      const uint32_t most =
          s.dtype == DType::f32
              ? largest_magnitude(static_cast<const uint32_t*>(s.data) + first, count)
              : largest_magnitude(static_cast<const uint16_t*>(s.data) + first, count);
      if (most >= limit) finite.store(false, std::memory_order_relaxed);
    });
  }
  return finite.load();
}

// splitmix64: one independent value per counter, so filling may run in any order.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

uint64_t hash_name(uint64_t seed, const std::string& name) {
  for (unsigned char c : name) seed = mix(seed ^ c);
  return seed;
}

bool ends_with(const std::string& s, const char* suffix) {
  const size_t n = std::strlen(suffix);
  return s.size() >= n && s.compare(s.size() - n, n, suffix) == 0;
}

}  // namespace

struct DecoderBuilder::Impl {
  Impl(const ModelConfig& c, Isa isa, int threads, const std::vector<GpuOptions>& gpus, int ranks)
      : config(c), place(gpus.empty() ? WeightPlace::host : WeightPlace::gpu) {
    check_gpu_list(gpus, ranks);
    check_ranks(config, place, ranks);
    resources = make_rank_resources(isa, threads, gpus, ranks);
    if (ranks > 1) packing_pool = std::make_unique<ThreadPool>(threads);
    weights.resize(ranks);
    for (int r = 0; r < ranks; ++r) {
      validate_device({r, ranks});
      slots.push_back(declare_slots(config, place, {r, ranks}, weights[r]));
    }
    for (size_t i = 0; i < slots[0].size(); ++i) {
      specs.push_back(slots[0][i].spec);
      by_name[specs[i].name] = i;
    }
    allocate();
  }

  void validate_device(Rank rank) const {
    if (place == WeightPlace::gpu)
      return check_device_limits(config_of(config, rank), gpu(rank.index)->gpu().info());
    if (!kHostKvTypes.has(config.kv_dtype))
      throw_error(ErrorCode::model, "kv_dtype is ", dtype_name(config.kv_dtype), ", expected ",
                  kHostKvTypes.names());
  }

  GpuContext* gpu(int rank) const { return resources[rank]->gpu.get(); }
  ThreadPool& pool() { return packing_pool ? *packing_pool : resources[0]->pool; }
  int ranks() const { return static_cast<int>(resources.size()); }

  void allocate() {
    const ModelMemory memory = place_slots(slots, place);
    if (place == WeightPlace::host) weights[0].arena = host_arena(memory.weights());
    for (int r = 0; r < ranks(); ++r) {
      DecoderWeights& w = weights[r];
      w.bytes = memory.ranks[r].weights;
      w.shared_bytes = memory.shared_weights;
      w.arena = place == WeightPlace::host ? weights[0].arena : gpu_arena(r, w.bytes);
      place_weights({r, ranks()});
    }
  }

  std::shared_ptr<Buffer> host_arena(size_t bytes) const {
    try {
      return std::make_shared<Buffer>(resources[0]->context, bytes);
    } catch (const Error& e) {
      throw_error(ErrorCode::model, "the weights need ", bytes, " bytes: ", e.what());
    }
  }

  std::shared_ptr<Buffer> gpu_arena(int rank, size_t bytes) const {
    Gpu& device = gpu(rank)->gpu();
    const size_t have = device.free_bytes();
    if (bytes > have)
      throw_error(ErrorCode::model, "the weights need ", bytes, " bytes as ", config.weight_format,
                  ", expected at most ", have, ", which are free on ", device.info().name,
                  ranks() > 1 ? ", GPU " : "", ranks() > 1 ? std::to_string(device.index()) : "");
    return std::make_shared<Buffer>(resources[rank]->context, bytes);
  }

  void place_weights(Rank rank) {
    DecoderWeights& w = weights[rank.index];
    for (Slot& s : slots[rank.index]) {
      uint8_t* at = w.arena->data() + s.offset;
      if (s.linear)
        *s.linear = {s.part_format, s.packed_rows, s.part.cols, at, s.bytes};
      else if (s.packed_rows > 0)
        *s.vector = reinterpret_cast<const float*>(at);
    }
    if (config.tied_head) w.head = w.embed;
    if (rank.count == 1) return;
    const RowRange rows = vocabulary_part(config.vocab, rank);
    w.head_begin = rows.begin;
    if (place == WeightPlace::host)
      cut_head(w.head, rows);
    else
      w.embed_begin = w.per_layer.embed_begin = rows.begin;
  }

  size_t find(const std::string& name) {
    const auto it = by_name.find(name);
    if (it == by_name.end())
      throw_error(ErrorCode::model, "the model has no weight slot '", name, "'");
    return it->second;
  }

  static void check_shape(const Slot& slot, const std::vector<RowSegment>& segments) {
    int64_t rows = 0;
    for (const RowSegment& s : segments) {
      rows += s.rows;
      if (s.cols != slot.spec.cols || s.rows < 0 || s.row_begin < 0)
        throw_error(ErrorCode::model, "weight ", slot.spec.name, ": source has ", s.cols,
                    " columns, expected ", slot.spec.cols);
    }
    if (rows != slot.spec.rows)
      throw_error(ErrorCode::model, "weight ", slot.spec.name, ": sources have ", rows,
                  " rows, expected ", slot.spec.rows);
  }

  // A rank's slot that is being filled.
  struct Part {
    int rank;
    const Slot* slot;
  };

  void set(size_t index, const std::vector<RowSegment>& segments) {
    Slot& whole = slots[0][index];
    check_shape(whole, segments);
    if (whole.linear) check_sources(whole, segments);
    // Ranks that have the same rows are filled from one read of them.
    const bool same_rows = whole.cut.kind == Cut::columns || whole.cut.kind == Cut::none;
    std::vector<Part> parts;
    for (int r = 0; r < ranks(); ++r) {
      const Slot& slot = slots[r][index];
      if (slot.packed_rows == 0 || (r > 0 && slot.cut.shared(place))) continue;
      if (!same_rows) parts.clear();
      parts.push_back({r, &slot});
      if (!same_rows) fill(parts, rows_of_part(slot, segments));
    }
    if (same_rows) fill(parts, rows_of_part(whole, segments));
    whole.filled = true;
  }

  // Fills slots that have the same rows, each with its columns of them.
  void fill(const std::vector<Part>& parts, const std::vector<RowSegment>& rows) {
    const Slot& slot = *parts[0].slot;
    std::vector<uint8_t*> at;
    for (const Part& part : parts) at.push_back(memory_of(part));
    const int64_t piece = piece_rows(rows, slot.spec.cols);
    const std::vector<RowRange> ranges = slot.linear ? slot.part_format->ranges(slot.packed_rows)
                                                     : std::vector<RowRange>{{0, slot.packed_rows}};
    for (const RowRange& range : ranges)
      for (int64_t row = range.begin; row < range.end; row += piece)
        fill_piece(parts, at, rows, {row, std::min(row + piece, range.end)});
    if (place == WeightPlace::gpu) upload(parts);
  }

  // Returns how many rows are in memory at a time.
  static int64_t piece_rows(const std::vector<RowSegment>& rows, int64_t cols) {
    int64_t count = kPieceBytes / (cols * 4), code_bytes = 0;
    for (const RowSegment& s : rows)
      if (s.codes) code_bytes = std::max(code_bytes, s.codes->row_bytes());
    if (code_bytes > 0) count = kCodePieceBytes / code_bytes;
    return round_up(std::max<int64_t>(1, count), kPackRows);
  }

  // Where a part is packed: in its place, or in staging memory of its GPU.
  uint8_t* memory_of(const Part& part) {
    if (place == WeightPlace::host) return weights[part.rank].arena->data() + part.slot->offset;
    PinnedBuffer& memory = staging[part.rank];
    if (memory.size() < part.slot->bytes)
      memory = PinnedBuffer(gpu(part.rank)->gpu(), part.slot->bytes);
    return memory.data();
  }
  void upload(const std::vector<Part>& parts) {
    for (const Part& part : parts)
      gpu(part.rank)->gpu().copy(gpu(part.rank)->handle(),
                                 weights[part.rank].arena->data() + part.slot->offset,
                                 staging[part.rank].data(), part.slot->bytes);
    for (const Part& part : parts) gpu(part.rank)->stream().synchronize();
  }

  static void check_sources(const Slot& slot, const std::vector<RowSegment>& segments) {
    with_name(slot, [&] { slot.format->check(segments, slot.spec.cols); });
  }

  // Calls f; its errors name the slot.
  template <typename F>
  static void with_name(const Slot& slot, F&& f) {
    try {
      f();
    } catch (const Error& e) {
      throw_error(e.code(), "weight ", slot.spec.name, ": ", e.what());
    }
  }

  // Packs a piece of `ordered` into the memory of each part.
  void fill_piece(const std::vector<Part>& parts, const std::vector<uint8_t*>& memory,
                  const std::vector<RowSegment>& ordered, const RowRange& piece) {
    const std::vector<RowSegment> rows =
        reader.read(pool(), some_rows(ordered, piece.begin, piece.size()));
    for (size_t i = 0; i < parts.size(); ++i) {
      const Slot& slot = *parts[i].slot;
      const SlotPart& part = slot.part;
      if (slot.linear)
        with_name(slot, [&] {
          slot.part_format->pack_rows(pool(), some_columns(rows, part.col_begin, part.cols), piece,
                                      slot.packed_rows, part.cols, memory[i]);
        });
      else
        copy_vector(rows, reinterpret_cast<float*>(memory[i]) + piece.begin);
    }
    const Slot& slot = *parts[0].slot;
    const DType target = slot.linear ? slot.format->source_dtype() : DType::f32;
    if (first_not_finite.empty() && !all_finite(pool(), rows, target))
      first_not_finite =
          slot.spec.name + " has a NaN, or a value beyond the range of " + dtype_name(target);
  }

  static void copy_vector(const std::vector<RowSegment>& segments, float* out) {
    for (const RowSegment& s : segments)
      for (int64_t i = 0; i < s.rows; ++i)
        *out++ = s.data ? load_element(s.data, s.dtype, s.row_begin + i) : 0.0f;
  }

  // Unit-variance embeddings and 1/sqrt(fan in) elsewhere keep activations of order one at any
  // depth.
  void fill_dummy(size_t index, uint64_t seed) {
    const Slot& slot = slots[0][index];
    const int64_t rows = slot.spec.rows, cols = slot.spec.cols;
    const uint64_t key = hash_name(seed, slot.spec.name);
    const bool factor = ends_with(slot.spec.name, "norm") || ends_with(slot.spec.name, ".scale");
    const float spread = !slot.linear ? 0.05f
                         : slot.spec.name == "embed" && !config.tied_head
                             ? 1.7320508f
                             : std::sqrt(3.0f / static_cast<float>(cols));
    const std::function<void(int64_t, int64_t, void*)> make = [&](int64_t b, int64_t e, void* out) {
      for (int64_t i = b; i < e; ++i) {
        const float u = static_cast<float>(static_cast<int32_t>(mix(key + i) >> 32)) * 0x1p-31f;
        static_cast<uint16_t*>(out)[i - b] = f32_to_bf16((factor ? 1.0f : 0.0f) + spread * u);
      }
    };
    RowSegment segment{nullptr, DType::bf16, 0, rows, cols};
    segment.make = &make;
    set(index, {segment});
  }

  const ModelConfig config;
  const WeightPlace place;
  // Per rank:
  std::vector<std::unique_ptr<DecoderResources>> resources;
  std::vector<DecoderWeights> weights;
  std::vector<std::vector<Slot>> slots;  // the same ones of each

  std::unique_ptr<ThreadPool> packing_pool;  // where the ranks have parts of the threads
  std::map<int, PinnedBuffer> staging;       // by rank: of one slot on its way to a GPU
  WeightReader reader;
  std::vector<SlotSpec> specs;
  std::unordered_map<std::string, size_t> by_name;
  std::string first_not_finite;  // a slot and what is wrong with it
};

DecoderBuilder::DecoderBuilder(const ModelConfig& config, Isa isa, int threads,
                               const std::vector<GpuOptions>& gpus, int ranks)
    : impl_(std::make_unique<Impl>(config, isa, threads, gpus, ranks)) {}
DecoderBuilder::~DecoderBuilder() = default;

void DecoderBuilder::set_tile_order(const TileOrder& order) {
  for (auto& resources : impl_->resources) resources->context.tile_order = order;
}

const std::vector<SlotSpec>& DecoderBuilder::slots() const {
  return impl_->specs;
}

void DecoderBuilder::set(const std::string& slot, const std::vector<RowSegment>& segments) {
  impl_->set(impl_->find(slot), segments);
}

void DecoderBuilder::fill_dummy(uint64_t seed) {
  for (size_t i = 0; i < impl_->slots[0].size(); ++i)
    if (!impl_->slots[0][i].filled) impl_->fill_dummy(i, seed);
}

std::unique_ptr<Model> DecoderBuilder::finish(bool check_finite) {
  std::string missing;
  for (const Slot& slot : impl_->slots[0])
    if (!slot.filled) missing += (missing.empty() ? "" : ", ") + slot.spec.name;
  if (!missing.empty()) throw_error(ErrorCode::model, "weights never set: ", missing);
  if (check_finite && !impl_->first_not_finite.empty())
    throw_error(ErrorCode::model, "weight ", impl_->first_not_finite);
  impl_->staging.clear();
  impl_->packing_pool.reset();
  if (impl_->ranks() == 1)
    return make_decoder(impl_->config, std::move(impl_->resources[0]), std::move(impl_->weights[0]),
                        {});
  const auto make = impl_->place == WeightPlace::gpu ? make_gpu_rank_group : make_rank_group;
  return make(impl_->config, std::move(impl_->resources), std::move(impl_->weights));
}

}  // namespace turbomind
