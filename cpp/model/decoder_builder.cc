// Slots, packing and checking of a decoder's weights.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "model/decoder.h"
#include "model/decoder_impl.h"
#include "model/device/device_limits.h"
#include "model/weight_reader.h"

namespace turbomind {

namespace {

constexpr int64_t kGateUpBlock = 16;
// Source bytes that are in memory at a time, but for a few rows: what loading needs beside the
// packed weights.
constexpr int64_t kPieceBytes = 2 << 20;
constexpr int64_t kSlotAlign = 256;  // bytes: a cache line of the CPU, what cuBLASLt likes best

struct Slot {
  SlotSpec spec;
  LinearWeight* linear = nullptr;  // linear slots
  const float** vector = nullptr;  // vector slots
  size_t offset = 0;               // in the arena
  size_t bytes = 0;
  int64_t packed_rows = 0;
  bool filled = false;
};

int64_t packed_rows(const SlotSpec& spec) {
  return spec.gate_up ? 2 * round_up(spec.rows / 2, kGateUpBlock) : spec.rows;
}

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

// Rows [begin, begin + count) of the matrix that `segments` stack up to, appended to `out`.
void slice_rows(const std::vector<RowSegment>& segments, int64_t begin, int64_t count,
                std::vector<RowSegment>& out) {
  int64_t first = 0;
  for (const RowSegment& s : segments) {
    const int64_t lo = std::max(begin, first), hi = std::min(begin + count, first + s.rows);
    if (lo < hi) {
      RowSegment part = s;
      part.row_begin = s.row_begin + (lo - first);
      part.rows = hi - lo;
      out.push_back(part);
    }
    first += s.rows;
  }
}

// gate then up -> blocks of 16 rows alternating, the last block of each padded with `zeros`.
std::vector<RowSegment> interleave_gate_up(const std::vector<RowSegment>& segments,
                                           const SlotSpec& spec, const std::vector<float>& zeros) {
  const int64_t half = spec.rows / 2;
  std::vector<RowSegment> out;
  for (int64_t b = 0; b < half; b += kGateUpBlock) {
    const int64_t count = std::min(kGateUpBlock, half - b);
    for (int64_t part = 0; part < 2; ++part) {
      slice_rows(segments, part * half + b, count, out);
      if (count < kGateUpBlock)
        out.push_back({zeros.data(), DType::f32, 0, kGateUpBlock - count, spec.cols});
    }
  }
  return out;
}

// True when every source value is finite after rounding to the packed type.
bool all_finite(ThreadPool& pool, const std::vector<RowSegment>& segments, DType target) {
  std::atomic<bool> finite{true};
  // 65520 rounds to infinity in float16; bfloat16 has float32's range but rounds up near its end.
  const float limit = target == DType::f16    ? 65520.0f
                      : target == DType::bf16 ? 3.3961775e38f
                                              : HUGE_VALF;
  for (const RowSegment& s : segments) {
    pool.parallel_for(s.rows, std::max<int64_t>(1, 65536 / s.cols), [&](int64_t b, int64_t e, int) {
      bool ok = true;
      for (int64_t i = (s.row_begin + b) * s.cols; i < (s.row_begin + e) * s.cols; ++i)
        ok &= std::fabs(load_element(s.data, s.dtype, i)) < limit;  // false for NaN
      if (!ok) finite.store(false, std::memory_order_relaxed);
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
  Impl(const ModelConfig& c, Isa isa, int threads, const GpuOptions* gpu)
      : config(c), resources(std::make_unique<DecoderResources>(isa, threads, gpu)) {
    validate(config);
    validate_device();
    weights.layers.resize(config.layers.size());
    format = &weight_format(config.weight_format, gpu ? WeightPlace::gpu : WeightPlace::host);
    declare_slots();
    allocate();
  }

  void validate_device() const {
    if (resources->gpu) return check_device_limits(config, resources->gpu->gpu().info());
    if (!kHostKvTypes.has(config.kv_dtype))
      throw_error(ErrorCode::model, "kv_dtype is ", dtype_name(config.kv_dtype), ", expected ",
                  kHostKvTypes.names());
  }

  void add_linear(const std::string& name, LinearWeight* w, int64_t rows, int64_t cols,
                  bool gate_up = false) {
    Slot slot;
    slot.spec = {name, rows, cols, true, gate_up};
    slot.linear = w;
    slot.packed_rows = packed_rows(slot.spec);
    slot.bytes = format->packed_bytes(slot.packed_rows, cols);
    slots.push_back(slot);
  }

  void add_vector(const std::string& name, const float** v, int64_t rows, bool gate_up = false) {
    Slot slot;
    slot.spec = {name, rows, 1, false, gate_up};
    slot.vector = v;
    slot.packed_rows = packed_rows(slot.spec);
    slot.bytes = round_up(slot.packed_rows, kKBlock) * sizeof(float);
    slots.push_back(slot);
  }

  void declare_slots() {
    add_linear("embed", &weights.embed, config.vocab, config.hidden);
    if (!config.tied_head) add_linear("head", &weights.head, config.vocab, config.hidden);
    add_vector("final_norm", &weights.final_norm, config.hidden);
    for (size_t i = 0; i < config.layers.size(); ++i) declare_layer(i);
    for (size_t i = 0; i < slots.size(); ++i) {
      specs.push_back(slots[i].spec);
      by_name[slots[i].spec.name] = i;
    }
  }

  void declare_layer(size_t i) {
    const LayerConfig& c = config.layers[i];
    LayerWeights& w = weights.layers[i];
    const std::string p = "layers." + std::to_string(i) + ".";
    const int64_t qkv = int64_t{c.heads + c.kv_heads} * c.k_dim + int64_t{c.kv_heads} * c.v_dim;
    add_vector(p + "attn_norm", &w.attn_norm, config.hidden);
    add_linear(p + "qkv", &w.qkv, qkv, config.hidden);
    if (c.qkv_bias) add_vector(p + "qkv_bias", &w.qkv_bias, qkv);
    if (c.qk_norm) {
      add_vector(p + "q_norm", &w.q_norm, c.k_dim);
      add_vector(p + "k_norm", &w.k_norm, c.k_dim);
    }
    add_linear(p + "o", &w.o, config.hidden, int64_t{c.heads} * c.v_dim);
    if (c.o_bias) add_vector(p + "o_bias", &w.o_bias, config.hidden);
    add_vector(p + "mlp_norm", &w.mlp_norm, config.hidden);
    add_linear(p + "gate_up", &w.gate_up, 2 * int64_t{c.intermediate}, config.hidden, true);
    if (c.mlp_bias)
      add_vector(p + "gate_up_bias", &w.gate_up_bias, 2 * int64_t{c.intermediate}, true);
    add_linear(p + "down", &w.down, config.hidden, c.intermediate);
    if (c.mlp_bias) add_vector(p + "down_bias", &w.down_bias, config.hidden);
  }

  void allocate() {
    size_t total = 0;
    for (Slot& s : slots) {
      s.offset = total;
      total += round_up(static_cast<int64_t>(s.bytes), kSlotAlign);
    }
    if (resources->gpu) {
      const size_t have = resources->gpu->gpu().free_bytes();
      if (total > have)
        throw_error(ErrorCode::model, "the weights need ", total, " bytes as ",
                    config.weight_format, ", expected at most ", have, ", which are free on ",
                    resources->gpu->gpu().info().name);
    }
    weights.arena = Buffer(resources->context, total);
    for (Slot& s : slots) {
      uint8_t* at = weights.arena.data() + s.offset;
      if (s.linear)
        *s.linear = {format, s.packed_rows, s.spec.cols, at, s.bytes};
      else
        *s.vector = reinterpret_cast<const float*>(at);
    }
    if (config.tied_head) weights.head = weights.embed;
  }

  Slot& find(const std::string& name) {
    const auto it = by_name.find(name);
    if (it == by_name.end())
      throw_error(ErrorCode::model, "the model has no weight slot '", name, "'");
    return slots[it->second];
  }

  void check_shape(const Slot& slot, const std::vector<RowSegment>& segments) const {
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

  void set(Slot& slot, const std::vector<RowSegment>& segments) {
    check_shape(slot, segments);
    std::vector<float> zeros;
    if (slot.spec.gate_up) zeros.assign(kGateUpBlock * slot.spec.cols, 0.0f);
    const std::vector<RowSegment> ordered =
        slot.spec.gate_up ? interleave_gate_up(segments, slot.spec, zeros) : segments;
    uint8_t* place = weights.arena.data() + slot.offset;
    GpuContext* gpu = resources->context.gpu;
    if (gpu && staging.size() < slot.bytes) staging = PinnedBuffer(gpu->gpu(), slot.bytes);
    uint8_t* at = gpu ? staging.data() : place;
    const int64_t piece =
        round_up(std::max<int64_t>(1, kPieceBytes / (slot.spec.cols * 4)), kPackRows);
    for (int64_t row = 0; row < slot.packed_rows; row += piece)
      set_piece(slot, ordered, row, std::min(piece, slot.packed_rows - row), at);
    if (gpu) {
      gpu->gpu().copy(gpu->handle(), place, at, slot.bytes);
      gpu->stream().synchronize();
    }
    slot.filled = true;
  }

  // Packs rows [begin, begin + count) of a slot into its place `at`.
  void set_piece(const Slot& slot, const std::vector<RowSegment>& ordered, int64_t begin,
                 int64_t count, uint8_t* at) {
    std::vector<RowSegment> rows;
    slice_rows(ordered, begin, count, rows);
    rows = reader.read(resources->pool, std::move(rows));
    if (slot.linear)
      format->pack(resources->pool, rows, count, slot.spec.cols,
                   at + format->packed_bytes(begin, slot.spec.cols));
    else
      copy_vector(rows, reinterpret_cast<float*>(at) + begin);
    const DType target = slot.linear ? format->source_dtype() : DType::f32;
    if (first_not_finite.empty() && !all_finite(resources->pool, rows, target))
      first_not_finite = slot.spec.name;
  }

  static void copy_vector(const std::vector<RowSegment>& segments, float* out) {
    for (const RowSegment& s : segments)
      for (int64_t i = 0; i < s.rows; ++i) *out++ = load_element(s.data, s.dtype, s.row_begin + i);
  }

  // Unit-variance embeddings and 1/sqrt(fan in) elsewhere keep activations of order one at any
  // depth.
  void fill_dummy(Slot& slot, uint64_t seed, uint16_t* source) {
    const int64_t rows = slot.spec.rows, cols = slot.spec.cols;
    const uint64_t key = hash_name(seed, slot.spec.name);
    const bool norm = ends_with(slot.spec.name, "norm");
    const float spread = !slot.linear ? 0.05f
                         : slot.spec.name == "embed" && !config.tied_head
                             ? 1.7320508f
                             : std::sqrt(3.0f / static_cast<float>(cols));
    resources->pool.parallel_for(rows * cols, 1 << 16, [&](int64_t b, int64_t e, int) {
      for (int64_t i = b; i < e; ++i) {
        const float u = static_cast<float>(static_cast<int32_t>(mix(key + i) >> 32)) * 0x1p-31f;
        source[i] = f32_to_bf16((norm ? 1.0f : 0.0f) + spread * u);
      }
    });
    set(slot, {{source, DType::bf16, 0, rows, cols}});
  }

  ModelConfig config;
  std::unique_ptr<DecoderResources> resources;
  DecoderWeights weights;
  PinnedBuffer staging;  // of one slot on its way to a GPU
  WeightReader reader;
  const WeightFormat* format = nullptr;
  std::vector<Slot> slots;
  std::vector<SlotSpec> specs;
  std::unordered_map<std::string, size_t> by_name;
  std::string first_not_finite;
};

DecoderBuilder::DecoderBuilder(const ModelConfig& config, Isa isa, int threads,
                               const GpuOptions* gpu)
    : impl_(std::make_unique<Impl>(config, isa, threads, gpu)) {}
DecoderBuilder::~DecoderBuilder() = default;

void DecoderBuilder::set_tile_order(const TileOrder& order) {
  impl_->resources->context.tile_order = order;
}

const std::vector<SlotSpec>& DecoderBuilder::slots() const {
  return impl_->specs;
}

void DecoderBuilder::set(const std::string& slot, const std::vector<RowSegment>& segments) {
  impl_->set(impl_->find(slot), segments);
}

void DecoderBuilder::fill_dummy(uint64_t seed) {
  const auto elements = [](const Slot* slot) { return slot->spec.rows * slot->spec.cols; };
  std::vector<Slot*> slots;
  for (Slot& slot : impl_->slots)
    if (!slot.filled) slots.push_back(&slot);
  // The largest come first, while few weights take memory. Smaller ones share a block, whose pages
  // are touched once.
  std::stable_sort(slots.begin(), slots.end(),
                   [&](const Slot* a, const Slot* b) { return elements(a) > elements(b); });
  std::unique_ptr<uint16_t[]> source;
  int64_t size = 0;
  for (Slot* slot : slots) {
    if (!source || elements(slot) < size / 2) {
      source.reset();
      size = elements(slot);
      source.reset(new uint16_t[size]);
    }
    impl_->fill_dummy(*slot, seed, source.get());
  }
}

std::unique_ptr<Model> DecoderBuilder::finish(bool check_finite) {
  std::string missing;
  for (const Slot& slot : impl_->slots)
    if (!slot.filled) missing += (missing.empty() ? "" : ", ") + slot.spec.name;
  if (!missing.empty()) throw_error(ErrorCode::model, "weights never set: ", missing);
  if (check_finite && !impl_->first_not_finite.empty())
    throw_error(ErrorCode::model, "weight ", impl_->first_not_finite,
                " has a NaN, or a value beyond the range of ", impl_->config.weight_format);
  impl_->staging = {};
  return make_decoder(impl_->config, std::move(impl_->resources), std::move(impl_->weights));
}

}  // namespace turbomind
