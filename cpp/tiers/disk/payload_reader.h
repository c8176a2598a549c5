// How payloads come from an open file: out of the page cache, through it, or past it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

namespace turbomind {

// What the page cache has is taken from there. Other large payloads come past it (O_DIRECT) where
// the system can do that: what fills the cache needs memory, which a virtual machine may have to
// get from its host first, and is copied out of it. Where it cannot, where the disk is slow, and
// for payloads that are likely to be read once more, the cache is filled, by reading ahead.
//
// Any thread.
class PayloadReader {
 public:
  static constexpr size_t kBlock = 4096;  // of places and memory of what is read directly
  // Shorter ones leave a disk too little to do at a time: reading ahead is faster.
  static constexpr size_t kLeastDirect = 1 << 20;
  // A disk that gives a reader less is what the reader waits for, with or without the cache; bytes
  // per second, judged by so many bytes.
  static constexpr double kLeastSpeed = 400e6;
  static constexpr int64_t kJudged = 16 << 20;
  enum class Use : uint8_t { once, often };

  // `file` is `path` and open; it stays the caller's and stays open.
  PayloadReader(int file, std::string path);
  ~PayloadReader();
  PayloadReader(const PayloadReader&) = delete;
  PayloadReader& operator=(const PayloadReader&) = delete;

  // Bytes read, fewer at the end of the file; -1 on an error (errno). Memory that is not aligned to
  // kBlock is filled through the cache.
  ssize_t read(uint8_t* data, size_t bytes, uint64_t offset, Use use);

 private:
  int direct_file();
  bool is_cached(uint64_t offset, size_t bytes);
  bool is_slow() const;
  bool read_direct(int direct, uint8_t* data, size_t bytes, uint64_t offset, size_t* done);
  void advise(uint64_t offset, size_t bytes);

  const int file_;
  const std::string path_;
  const bool advises_;  // the system reads ahead no further than it is asked to
  std::once_flag opened_;
  int direct_ = -1;
  std::atomic<bool> refused_{false};  // direct reads
  std::atomic<int64_t> direct_bytes_{0}, direct_ns_{0};
  std::mutex mapping_;
  uint8_t* map_ = nullptr;  // of the file, never looked at: by it the system says what is cached
  uint64_t mapped_ = 0;
  std::atomic<uint64_t> advised_{0};  // the system was asked for payloads up to here
  std::atomic<uint64_t> read_at_{0};  // where the last read through the cache began
};

// Bytes read from `offset` on, fewer at the end of the file; -1 on an error.
ssize_t read_some(int file, uint8_t* data, size_t bytes, uint64_t offset);

}  // namespace turbomind
