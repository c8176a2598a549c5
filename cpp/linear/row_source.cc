#include "linear/row_source.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"

namespace turbomind {

namespace {

// Checkpoints align tensors to their element at best, so sources are read bytewise.
template <typename T>
T read_at(const uint8_t* p, int64_t i) {
  T v;
  std::memcpy(&v, p + i * sizeof(T), sizeof(T));
  return v;
}

}  // namespace

void convert_block(const uint8_t* src, DType from, int64_t begin, int64_t count, DType to,
                   void* dst) {
  std::memset(dst, 0, kKBlock * dtype_bytes(to));
  if (src == nullptr) return;
  if (from == to) {
    std::memcpy(dst, src + begin * dtype_bytes(from), count * dtype_bytes(from));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float f = from == DType::f32   ? read_at<float>(src, begin + i)
                    : from == DType::f16 ? f16_to_f32(read_at<uint16_t>(src, begin + i))
                                         : bf16_to_f32(read_at<uint16_t>(src, begin + i));
    if (to == DType::f32)
      static_cast<float*>(dst)[i] = f;
    else
      static_cast<uint16_t*>(dst)[i] = to == DType::f16 ? f32_to_f16(f) : f32_to_bf16(f);
  }
}

std::vector<RowSegment> some_rows(const std::vector<RowSegment>& segments, int64_t begin,
                                  int64_t count) {
  std::vector<RowSegment> out;
  int64_t first = 0;
  for (RowSegment s : segments) {
    const int64_t lo = std::max(begin, first), hi = std::min(begin + count, first + s.rows);
    first += s.rows;
    if (lo >= hi) continue;
    s.row_begin += lo - (first - s.rows);
    s.rows = hi - lo;
    out.push_back(s);
  }
  return out;
}

std::vector<RowSegment> some_columns(std::vector<RowSegment> segments, int64_t begin,
                                     int64_t count) {
  for (RowSegment& s : segments) {
    s.source_cols = s.all_cols();
    s.col_begin += begin;
    s.cols = count;
  }
  return segments;
}

SourceRows::SourceRows(const std::vector<RowSegment>& segments, int64_t n, int64_t k) : k_(k) {
  rows_.reserve(n);
  for (const RowSegment& s : segments) {
    if (s.cols != k)
      throw_error(ErrorCode::internal, "pack: a segment has ", s.cols, " columns, expected ", k);
    const size_t element = dtype_bytes(s.dtype), bytes = s.all_cols() * element;
    const auto* data = static_cast<const uint8_t*>(s.data);
    if (data) data += s.col_begin * element;
    for (int64_t r = s.row_begin; r < s.row_begin + s.rows; ++r)
      rows_.push_back({data ? data + r * bytes : nullptr, s.dtype});
  }
  if (static_cast<int64_t>(rows_.size()) != n)
    throw_error(ErrorCode::internal, "pack: the segments have ", rows_.size(), " rows, expected ",
                n);
}

void SourceRows::convert(int64_t r, DType to, uint8_t* dst) const {
  for (int64_t k = 0; k < k_; k += kKBlock)
    convert_block(rows_[r].data, rows_[r].dtype, k, std::min(kKBlock, k_ - k), to,
                  dst + k * dtype_bytes(to));
}

}  // namespace turbomind
