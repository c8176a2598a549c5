#include "model/weight_reader.h"

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

}  // namespace

std::vector<RowSegment> WeightReader::read(ThreadPool& pool, std::vector<RowSegment> segments) {
  size_t total = 0;
  for (const RowSegment& s : segments)
    if (s.file) total += aligned(static_cast<size_t>(s.rows * row_bytes(s)));
  if (buffer_.size() < total) buffer_ = {}, buffer_ = HugeBuffer(total);
  std::vector<Piece> pieces;  // of all segments: those of interleaved weights are short
  uint8_t* place = buffer_.data();
  for (RowSegment& s : segments) {
    if (!s.file) continue;
    const int64_t bytes = s.rows * row_bytes(s);
    const int64_t first = s.file->offset + s.row_begin * row_bytes(s);
    for (int64_t at = 0; at < bytes; at += kReadBytes)
      pieces.push_back({s.file, first + at, std::min(kReadBytes, bytes - at), place + at});
    s.data = place;
    s.file = nullptr;
    s.row_begin = 0;
    place += aligned(static_cast<size_t>(bytes));
  }
  Failure failure;
  pool.parallel_for(static_cast<int64_t>(pieces.size()), 1, [&](int64_t b, int64_t e, int) {
    for (int64_t i = b; i < e; ++i) read_piece(pieces[i], failure);
  });
  failure.check();
  return segments;
}

}  // namespace turbomind
