#include "model/weight_reader.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace turbomind {

namespace {

constexpr size_t kAlign = 64;            // bytes: segments begin at cache lines
constexpr int64_t kReadBytes = 1 << 20;  // of one pread; a worker takes several

size_t aligned(size_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

int64_t row_bytes(const RowSegment& s) {
  return s.cols * static_cast<int64_t>(dtype_bytes(s.dtype));
}

// The first failure of several workers: an errno, or -1 for the end of the file.
class Failure {
 public:
  void note(int error, int64_t at) {
    int none = 0;
    if (error_.compare_exchange_strong(none, error)) at_ = at;
  }
  void check(const SourceFile& file) const {
    const int error = error_.load();
    if (error > 0)
      throw_error(ErrorCode::model, "cannot read ", file.path, ": ", std::strerror(error));
    if (error < 0)
      throw_error(ErrorCode::model, file.path, ": it ends at byte ", at_.load(),
                  ", expected more, as when it was opened: the file changed while it was read");
  }

 private:
  std::atomic<int> error_{0};
  std::atomic<int64_t> at_{0};
};

void read_bytes(int file, int64_t begin, int64_t end, uint8_t* data, Failure& failure) {
  while (begin < end) {
    const ssize_t count = pread(file, data, static_cast<size_t>(end - begin), begin);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return failure.note(count < 0 ? errno : -1, begin);
    begin += count;
    data += count;
  }
}

}  // namespace

std::vector<RowSegment> WeightReader::read(ThreadPool& pool, std::vector<RowSegment> segments) {
  size_t total = 0;
  for (const RowSegment& s : segments)
    if (s.file) total += aligned(static_cast<size_t>(s.rows * row_bytes(s)));
  if (buffer_.size() < total) buffer_ = {}, buffer_ = HugeBuffer(total);
  uint8_t* place = buffer_.data();
  for (RowSegment& s : segments) {
    if (!s.file) continue;
    const int64_t bytes = s.rows * row_bytes(s);
    const int64_t first = s.file->offset + s.row_begin * row_bytes(s);
    Failure failure;
    pool.parallel_for((bytes + kReadBytes - 1) / kReadBytes, 1, [&](int64_t b, int64_t e, int) {
      const int64_t from = b * kReadBytes, to = std::min(e * kReadBytes, bytes);
      read_bytes(s.file->descriptor, first + from, first + to, place + from, failure);
    });
    failure.check(*s.file);
    s = {place, s.dtype, 0, s.rows, s.cols};
    place += aligned(static_cast<size_t>(bytes));
  }
  return segments;
}

}  // namespace turbomind
