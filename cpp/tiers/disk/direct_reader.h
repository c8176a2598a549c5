// Reads payloads of pages from an open file, and bypasses the system's page cache (O_DIRECT) where
// that is faster.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

namespace turbomind {

// Payloads in the page cache are read from there. Other large ones bypass it (O_DIRECT) where the
// system supports that: filling the cache takes memory, which a virtual machine may have to get
// from its host first, and a copy. Where it does not, where the disk is slow, and for payloads that
// are likely to be read again, reads fill the cache, with readahead.
//
// Any thread.
class DirectReader {
 public:
  static constexpr size_t kBlock = 4096;  // alignment of offsets and memory for O_DIRECT
  // Shorter payloads do not fill the queue of a disk: readahead is faster.
  static constexpr size_t kLeastDirect = 1 << 20;
  // Bytes/s: with a slower disk O_DIRECT gains nothing. Measured over kJudged bytes.
  static constexpr double kLeastSpeed = 400e6;
  static constexpr int64_t kJudged = 16 << 20;
  enum class Use : uint8_t { once, often };

  // `file`: the descriptor of `path`. The caller owns it and leaves it open.
  DirectReader(int file, std::string path);
  ~DirectReader();
  DirectReader(const DirectReader&) = delete;
  DirectReader& operator=(const DirectReader&) = delete;

  // Returns the bytes read, fewer at the end of the file; -1 on an error (errno). Memory that is
  // not aligned to kBlock is filled through the cache.
  ssize_t read(uint8_t* data, size_t bytes, uint64_t offset, Use use);

 private:
  int direct_file();
  bool is_cached(uint64_t offset, size_t bytes);
  bool is_slow() const;
  bool read_direct(int direct, uint8_t* data, size_t bytes, uint64_t offset, size_t* done);
  void advise(uint64_t offset, size_t bytes);

  const int file_;
  const std::string path_;
  const bool advises_;  // readahead of the system is small: ask for more
  std::once_flag opened_;
  int direct_ = -1;
  std::atomic<bool> refused_{false};  // by O_DIRECT reads
  std::atomic<int64_t> direct_bytes_{0}, direct_ns_{0};
  std::mutex mapping_;
  uint8_t* map_ = nullptr;  // of the file, never read: mincore() reports through it what is cached
  uint64_t mapped_ = 0;
  std::atomic<uint64_t> advised_{0};  // readahead was requested up to here
  std::atomic<uint64_t> read_at_{0};  // where the last read through the cache began
};

// Returns the bytes read from `offset` on, fewer at the end of the file; -1 on an error.
ssize_t read_some(int file, uint8_t* data, size_t bytes, uint64_t offset);

}  // namespace turbomind
