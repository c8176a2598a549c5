#include "linear/codes/packed_codes.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/dtype.h"
#include "core/error.h"
#include "linear/codes/code_panel.h"

namespace turbomind {

namespace {

constexpr int kOutputs = 8;                                       // of a word of AWQ
constexpr int kInterleaved[kOutputs] = {0, 2, 4, 6, 1, 3, 5, 7};  // the output of each field

uint32_t read_u32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

// ---- many codes at a time: 16 bytes in a register of any processor

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint64_t Words __attribute__((vector_size(16)));

Bytes load(const uint8_t* p) {
  Bytes v;
  std::memcpy(&v, p, 16);
  return v;
}

Bytes load_half(const uint8_t* p) {
  Bytes v = {};
  std::memcpy(&v, p, 8);
  return v;
}

void store(uint8_t* p, Bytes v) {
  std::memcpy(p, &v, 16);
}

// The bytes of the lower, or upper, halves in turn.
Bytes lower(Bytes a, Bytes b) {
  return __builtin_shuffle(a, b, Bytes{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
}
Bytes upper(Bytes a, Bytes b) {
  return __builtin_shuffle(a, b,
                           Bytes{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
}

// Bytes of 16 strips of 8 bytes -> x[c] has byte c of each. A step makes the highest bit of a
// register's number the lowest of the byte's: seven bits that are rotated.
void transpose(const uint8_t* from, int64_t stride, Bytes (&x)[8]) {
  for (int i = 0; i < 8; ++i)
    x[i] = lower(load_half(from + i * stride), load_half(from + (i + 8) * stride));
  for (int step = 0; step < 3; ++step) {
    Bytes y[8];
    for (int i = 0; i < 4; ++i) {
      y[2 * i] = lower(x[i], x[i + 4]);
      y[2 * i + 1] = upper(x[i], x[i + 4]);
    }
    std::copy(y, y + 8, x);
  }
}

// Codes that are int8. Throws Error(model) for values of more than `bits` bits.
void read_bytes(const std::string& tensor, int bits, const uint8_t* from, int64_t count,
                uint8_t* out) {
  const auto* values = reinterpret_cast<const int8_t*>(from);
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<uint8_t>(values[i] + (1 << (bits - 1)));
  const int middle = 1 << (bits - 1);
  if (bits == 8 || count == 0) return;
  const auto [low, high] = std::minmax_element(values, values + count);
  if (*low < -middle || *high >= middle)
    throw_error(ErrorCode::model, "tensor ", tensor, " has values from ", int{*low}, " to ",
                int{*high}, ", expected from ", -middle, " to ", middle - 1);
}

// Integer i of row r, counted from the first row of the part's units, of n in a row.
int field(const PackedIntegers& from, int bits, const CodePiece::Part& part, int64_t n, int64_t r,
          int64_t i) {
  const int64_t count = 32 / bits;
  const uint8_t* word = nullptr;
  int64_t at = 0;  // field of the word
  switch (from.packing) {
    case Packing::bytes:  // read_bytes()
    case Packing::inputs:
      word = part.data + (r * ((n + count - 1) / count) + i / count) * 4;
      at = i % count;
      break;
    case Packing::inputs_first:
      word = part.data + i / count * part.strip_bytes + r * 4;
      at = i % count;
      break;
    case Packing::outputs:
      word = part.data + (r / count * n + i) * 4;
      at = r % count;
      break;
    case Packing::outputs_last:
      word = part.data + i * part.strip_bytes + r / count * 4;
      at = r % count;
      if (from.interleaved) at = at % 2 * 4 + at / 2;
      break;
  }
  return static_cast<int>((read_u32(word) + from.add) >> (at * bits) & ((1u << bits) - 1));
}

// Codes of words along the inputs, of whole rows.
void read_inputs(const uint8_t* row, int bits, int64_t cols, uint8_t* out) {
  if (bits == 8)
    std::memcpy(out, row, cols);
  else
    read_halves(row, cols, out);
}

// Codes of a panel of words along the outputs: 16 outputs of 16 columns at a time.
void read_outputs(const CodePiece::Part& part, int64_t first, int64_t columns, bool interleaved,
                  CodePanel& panel) {
  const uint8_t* from = part.data + first / 2;
  for (int64_t k = 0; k + 16 <= columns; k += 16) {
    Bytes x[8];
    transpose(from + k * part.strip_bytes, part.strip_bytes, x);
    for (int c = 0; c < 8; ++c) {
      // Byte c has fields 2 * c and 2 * c + 1 of the two words.
      const int field = c % 4 * 2, word = c / 4 * kOutputs;
      const int low = interleaved ? kInterleaved[field] : field;
      const int high = interleaved ? kInterleaved[field + 1] : field + 1;
      store(panel.codes(word + low) + k, x[c] & 15);
      store(panel.codes(word + high) + k, x[c] >> 4);
    }
  }
}

// Codes of a panel of words along the inputs, one word of 16 outputs after the other: the columns
// of two words at a time.
void read_inputs_first(const CodePiece::Part& part, int64_t first, int64_t columns,
                       CodePanel& panel) {
  for (int64_t k = 0; k + 16 <= columns; k += 16) {
    const uint8_t* from = part.data + k / 8 * part.strip_bytes + first * 4;
    for (int64_t r = 0; r < kPanel; r += 4) {
      const Bytes a = load(from + r * 4), b = load(from + part.strip_bytes + r * 4);
      const Bytes halves[2][2] = {{lower(a & 15, a >> 4), upper(a & 15, a >> 4)},
                                  {lower(b & 15, b >> 4), upper(b & 15, b >> 4)}};
      for (int pair = 0; pair < 2; ++pair) {
        const auto low = (Words)halves[0][pair], high = (Words)halves[1][pair];
        store(panel.codes(r + 2 * pair) + k, (Bytes)__builtin_shuffle(low, high, Words{0, 2}));
        store(panel.codes(r + 2 * pair + 1) + k, (Bytes)__builtin_shuffle(low, high, Words{1, 3}));
      }
    }
  }
}

int64_t words(int64_t n, int bits) {
  return (n * bits + 31) / 32;
}

}  // namespace

PackedCodes::PackedCodes(int64_t row_count, int64_t col_count, int bits, int64_t group,
                         PackedIntegers codes, PackedScales scales,
                         std::optional<PackedIntegers> zeros, ByteSpan order)
    : bits_(bits),
      group_(group),
      codes_(std::move(codes)),
      scales_(std::move(scales)),
      zeros_(std::move(zeros)) {
  if (bits != 4 && bits != 8)
    throw_error(ErrorCode::model, "codes have ", bits, " bits, expected 4 or 8");
  if (codes_.packing == Packing::outputs || (codes_.packing == Packing::outputs_last && bits != 4))
    throw_error(ErrorCode::internal, "codes of ", bits, " bits are packed by outputs");
  if (codes_.add != 0) throw_error(ErrorCode::internal, "words of codes are stored less 1");
  rows = row_count;
  cols = col_count;
  columns = order;
  add_integers(codes_, cols);
  const int64_t size = scale_bytes(scales_.type), strips = scales_.groups_first ? groups() : 1;
  add_tensor(scales_.tensor, scales_.file, {{}, {}, strips, 1, groups() / strips * size},
             rows * groups() * size);
  if (zeros_) add_integers(*zeros_, groups());
}

void PackedCodes::add_tensor(const std::string& name, const SourceFile& file, CodeTensor place,
                             int64_t expected) {
  if (file.bytes != expected)
    throw_error(ErrorCode::model, "tensor ", name, " has ", file.bytes, " bytes, expected ",
                expected, " for ", rows, " rows of ", cols, " columns");
  place.name = name;
  place.file = file;
  tensors.push_back(place);
}

void PackedCodes::add_integers(const PackedIntegers& integers, int64_t n) {
  const int64_t count = 32 / bits_;
  CodeTensor place;
  switch (integers.packing) {
    case Packing::bytes:
      place.unit_bytes = n;
      break;
    case Packing::inputs:
      place.unit_bytes = words(n, bits_) * 4;
      break;
    case Packing::inputs_first:
      place.strips = words(n, bits_);
      place.unit_bytes = 4;
      break;
    case Packing::outputs:
      place.unit_rows = count;
      place.unit_bytes = n * 4;
      break;
    case Packing::outputs_last:
      place.strips = n;
      place.unit_rows = count;
      place.unit_bytes = 4;
      break;
  }
  add_tensor(integers.tensor, integers.file, place,
             place.strips * place.units(rows) * place.unit_bytes);
}

void PackedCodes::check(const CodeLayout& layout) const {
  const bool converted = layout.row_scales && group_ == 0;
  const bool fits = layout.bits == bits_ && (converted || layout.scales == scales_.type) &&
                    layout.offsets == (zeros_ ? Offsets::zero : Offsets::none) &&
                    (layout.row_scales ? group_ == 0 : group_ % layout.group == 0);
  if (!fits)
    throw_error(ErrorCode::model, "tensor ", codes_.tensor, " has codes of ", bits_,
                " bits in groups of ", group_, ", expected those of its format");
  check_columns(columns, cols, layout);
}

void PackedCodes::decode(const CodePiece& piece, int64_t begin, int64_t count, int64_t at,
                         CodePanel& panel) const {
  decode_codes(piece, begin, count, at, panel);
  decode_scales(piece, begin, count, at, panel);
  if (zeros_) decode_zeros(piece, begin, count, at, panel);
  if (columns.bytes == 0) return;
  for (int64_t r = at; r < at + count; ++r) {
    std::memcpy(panel.scratch(), panel.codes(r), cols);
    for (int64_t i = 0; i < cols; ++i)
      panel.codes(r)[i] = panel.scratch()[read_u32(columns.data + i * 4)];
  }
}

void PackedCodes::decode_codes(const CodePiece& piece, int64_t begin, int64_t count, int64_t at,
                               CodePanel& panel) const {
  const CodePiece::Part& part = piece.parts[0];
  const int64_t first = begin - piece.begin, row_bytes = tensors[0].unit_bytes;
  int64_t done = 0;  // columns
  if (codes_.packing == Packing::bytes || codes_.packing == Packing::inputs) {
    for (int64_t r = 0; r < count; ++r) {
      const uint8_t* from = part.data + (first + r) * row_bytes;
      if (codes_.packing == Packing::bytes)
        read_bytes(codes_.tensor, bits_, from, cols, panel.codes(at + r));
      else
        read_inputs(from, bits_, cols, panel.codes(at + r));
    }
    done = cols;
  } else if (bits_ == 8) {  // inputs first: a word has four columns
    done = cols / 4 * 4;
    for (int64_t k = 0; k < done; k += 4)
      for (int64_t r = 0; r < count; ++r)
        std::memcpy(panel.codes(at + r) + k, part.data + k / 4 * part.strip_bytes + (first + r) * 4,
                    4);
  } else if (count == kPanel && first % kOutputs == 0) {
    done = cols / 16 * 16;
    if (codes_.packing == Packing::outputs_last)
      read_outputs(part, first, cols, codes_.interleaved, panel);
    else
      read_inputs_first(part, first, cols, panel);
  }
  for (int64_t r = 0; r < count; ++r)
    for (int64_t k = done; k < cols; ++k)
      panel.codes(at + r)[k] = static_cast<uint8_t>(field(codes_, bits_, part, cols, first + r, k));
}

void PackedCodes::decode_scales(const CodePiece& piece, int64_t begin, int64_t count, int64_t at,
                                CodePanel& panel) const {
  const CodeLayout& layout = panel.layout();
  const CodePiece::Part& part = piece.parts[1];
  const int64_t size = scale_bytes(scales_.type);
  const int64_t own = layout.row_scales ? 1 : (cols + layout.group - 1) / layout.group;
  for (int64_t r = 0; r < count; ++r) {
    const int64_t row = begin - piece.begin + r;
    for (int64_t g = 0; g < own; ++g) {
      const int64_t stored = stored_group(layout, g);
      const uint8_t* from = scales_.groups_first
                                ? part.data + stored * part.strip_bytes + row * size
                                : part.data + (row * groups() + stored) * size;
      if (size == 2 && !layout.row_scales) {
        std::memcpy(panel.scales(at + r) + g * 2, from, 2);
        continue;
      }
      uint32_t bits = 0;
      std::memcpy(&bits, from, size);
      const auto half = static_cast<uint16_t>(bits);
      const float value = scales_.type == ScaleType::f16 ? f16_to_f32(half) : bf16_to_f32(half);
      std::memcpy(panel.scales(at + r) + g * 4,
                  size == 4 ? from : reinterpret_cast<const uint8_t*>(&value), 4);
    }
  }
}

void PackedCodes::decode_zeros(const CodePiece& piece, int64_t begin, int64_t count, int64_t at,
                               CodePanel& panel) const {
  const CodeLayout& layout = panel.layout();
  const int64_t own = (cols + layout.group - 1) / layout.group;
  const CodePiece::Part& part = piece.parts[2];
  std::vector<uint8_t> stored(groups());
  for (int64_t r = 0; r < count; ++r) {
    const int64_t row = begin - piece.begin + r;
    if (zeros_->packing == Packing::bytes)
      read_bytes(zeros_->tensor, bits_, part.data + row * groups(), groups(), stored.data());
    else
      for (int64_t g = 0; g < groups(); ++g)
        stored[g] = static_cast<uint8_t>(field(*zeros_, bits_, part, groups(), row, g));
    for (int64_t g = 0; g < own; ++g) panel.offsets(at + r)[g] = stored[stored_group(layout, g)];
  }
}

}  // namespace turbomind
