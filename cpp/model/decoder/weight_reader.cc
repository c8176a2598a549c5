#include "model/decoder/weight_reader.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "core/error.h"

namespace turbomind {

namespace {

constexpr size_t kAlign = 64;            // bytes: segments begin at cache lines
constexpr int64_t kReadBytes = 1 << 20;  // of one pread

size_t aligned(size_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

int64_t row_bytes(const RowSegment& s) {
  return s.all_cols() * static_cast<int64_t>(dtype_bytes(s.dtype));
}

// Bytes of a file and where they go.
struct Piece {
  const SourceFile* file;
  int64_t begin;
  int64_t bytes;
  uint8_t* data;
};

// The first failure of several workers: an errno, or -1 for the end of the file.
class Failure {
 public:
  void note(int error, const SourceFile& file, int64_t at) {
    std::lock_guard lock(mutex_);
    if (error_ == 0) error_ = error, file_ = &file, at_ = at;
  }
  void check() const {
    if (error_ > 0)
      throw_error(ErrorCode::model, "cannot read ", file_->path, ": ", std::strerror(error_));
    if (error_ < 0)
      throw_error(ErrorCode::model, file_->path, ": it ends at byte ", at_,
                  ", expected more, as when it was opened: the file changed while it was read");
  }

 private:
  std::mutex mutex_;
  int error_ = 0;
  const SourceFile* file_ = nullptr;
  int64_t at_ = 0;
};

void read_piece(Piece piece, Failure& failure) {
  while (piece.bytes > 0) {
    const auto bytes = static_cast<size_t>(piece.bytes);
    const ssize_t count = pread(piece.file->descriptor, piece.data, bytes, piece.begin);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return failure.note(count < 0 ? errno : -1, *piece.file, piece.begin);
    piece.begin += count;
    piece.bytes -= count;
    piece.data += count;
  }
}

void make_rows(ThreadPool& pool, const RowSegment& s, uint8_t* to) {
  const int64_t first = s.row_begin * s.all_cols();
  pool.parallel_for(s.rows * s.all_cols(), 1 << 16, [&](int64_t b, int64_t e, int) {
    (*s.make)(first + b, first + e, to + b * dtype_bytes(s.dtype));
  });
}

// Bytes of memory for what is read next.
class Places {
 public:
  // Returns where `bytes` will lie.
  size_t add(int64_t bytes) {
    const size_t at = total_;
    total_ += aligned(static_cast<size_t>(bytes));
    return at;
  }
  size_t total() const { return total_; }

 private:
  size_t total_ = 0;
};

// Rows of a source of codes that segments ask for, close to each other: gates and ups alternate.
struct CodeRange {
  static constexpr int64_t kGap = 64;  // rows that are read though no segment asks for them
  const CodeSource* source;
  int64_t begin, end;

  bool takes(const RowSegment& s) const {
    return s.codes == source && s.row_begin >= begin && s.row_begin <= end + kGap;
  }
};

// Returns the ranges, and of each segment the number of its range.
std::vector<CodeRange> code_ranges(const std::vector<RowSegment>& segments,
                                   std::vector<size_t>& range_of) {
  std::vector<CodeRange> ranges;
  for (size_t i = 0; i < segments.size(); ++i) {
    const RowSegment& s = segments[i];
    if (s.codes == nullptr || s.codes->tensors.empty()) continue;
    auto range =
        std::find_if(ranges.begin(), ranges.end(), [&](const CodeRange& r) { return r.takes(s); });
    if (range == ranges.end())
      range = ranges.insert(
          ranges.end(), {s.codes, s.row_begin / CodePiece::kRows * CodePiece::kRows, s.row_begin});
    range->end = std::max(range->end, s.row_begin + s.rows);
    range_of[i] = range - ranges.begin();
  }
  return ranges;
}

// Bytes of the rows of a range in each strip of a tensor.
int64_t bytes_of(const CodeTensor& t, const CodeRange& range) {
  return (t.units(range.end) - range.begin / t.unit_rows) * t.unit_bytes;
}

// Bytes from one strip in memory to the next: an odd number of cache lines, so that the same rows
// of many strips lie in different sets of a cache.
int64_t strip_bytes(const CodeTensor& t, const CodeRange& range) {
  const auto lines = static_cast<int64_t>(aligned(bytes_of(t, range)) / kAlign);
  return (lines | 1) * static_cast<int64_t>(kAlign);
}

// Adds what is read of a tensor for a range.
void add_pieces(const CodeTensor& t, const CodeRange& range, uint8_t* to,
                std::vector<Piece>& pieces) {
  const int64_t in_file = t.file.bytes / t.strips, bytes = bytes_of(t, range);
  int64_t from = t.file.offset + range.begin / t.unit_rows * t.unit_bytes;
  for (int64_t strip = 0; strip < t.strips; ++strip) {
    for (int64_t at = 0; at < bytes; at += kReadBytes)
      pieces.push_back({&t.file, from + at, std::min(kReadBytes, bytes - at), to + at});
    from += in_file;
    to += strip_bytes(t, range);
  }
}

}  // namespace

std::vector<RowSegment> WeightReader::read(ThreadPool& pool, std::vector<RowSegment> segments) {
  Places places;
  std::vector<size_t> place_of(segments.size()), range_of(segments.size());
  for (size_t i = 0; i < segments.size(); ++i)
    if (segments[i].file || segments[i].make)
      place_of[i] = places.add(segments[i].rows * row_bytes(segments[i]));
  const std::vector<CodeRange> ranges = code_ranges(segments, range_of);
  std::vector<std::vector<size_t>> tensor_places(ranges.size());
  for (size_t i = 0; i < ranges.size(); ++i)
    for (const CodeTensor& t : ranges[i].source->tensors)
      tensor_places[i].push_back(places.add(t.strips * strip_bytes(t, ranges[i])));
  if (buffer_.size() < places.total()) buffer_ = {}, buffer_ = HugeBuffer(places.total());

  std::vector<Piece> pieces;  // of all segments: those of interleaved weights are short
  pieces_.clear();
  for (size_t i = 0; i < ranges.size(); ++i) {
    const CodeRange& range = ranges[i];
    CodePiece& piece = pieces_.emplace_back(CodePiece{range.begin, range.end, {}});
    for (size_t j = 0; j < range.source->tensors.size(); ++j) {
      const CodeTensor& t = range.source->tensors[j];
      uint8_t* to = buffer_.data() + tensor_places[i][j];
      add_pieces(t, range, to, pieces);
      piece.parts.push_back({to, strip_bytes(t, range)});
    }
  }
  for (size_t i = 0; i < segments.size(); ++i) {
    RowSegment& s = segments[i];
    if (s.codes && !s.codes->tensors.empty()) s.piece = &pieces_[range_of[i]];
    if (!s.file && !s.make) continue;
    const int64_t bytes = s.rows * row_bytes(s), first = s.row_begin * row_bytes(s);
    uint8_t* to = buffer_.data() + place_of[i];
    for (int64_t at = 0; s.file && at < bytes; at += kReadBytes)
      pieces.push_back(
          {s.file, s.file->offset + first + at, std::min(kReadBytes, bytes - at), to + at});
    if (s.make) make_rows(pool, s, to);
    s.data = to;
    s.file = nullptr;
    s.make = nullptr;
    s.row_begin = 0;
  }
  Failure failure;
  const int64_t grain = pieces.size() > 4096 ? 64 : 1;  // strips are short
  pool.parallel_for(static_cast<int64_t>(pieces.size()), grain, [&](int64_t b, int64_t e, int) {
    for (int64_t i = b; i < e; ++i) read_piece(pieces[i], failure);
  });
  failure.check();
  return segments;
}

}  // namespace turbomind
