// A segment of the disk tier: an index file and a payload file, and the lock of their writer.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tiers/disk/direct_reader.h"
#include "tiers/disk/page_record.h"

namespace turbomind {

// "ID.idx" has a header and a record per page (page_record.h), "ID.kv" the payloads, each at a
// multiple of 4 KiB. Both are append-only, except for marks and uses in records and for holes
// punched where payloads of dead pages were. A payload is written before its record. The writer
// holds a lock (flock) on the index file; the lock ends with its process.
//
// read() may be called from any thread; the rest from one at a time. Errors are return values.
class SegmentFile {
 public:
  static constexpr size_t kAlignment = 4096;
  static constexpr uint64_t kMaxIndexBytes = 4 << 20;

  enum class Status {
    good,
    gone,     // files or page were removed
    damaged,  // torn, changed or not a segment
    failed,   // the system reported an error
  };
  struct Found {
    uint64_t offset = 0;  // in the index file
    size_t bytes = 0;
    PageRecord record;
  };
  struct Scan {
    std::vector<Found> records;  // by offset
    int64_t damaged = 0;         // places without a valid record
  };
  enum class Kind { ours, unfinished, damaged, newer };

  SegmentFile(std::string folder, uint64_t id);
  // Creates empty files and locks them. Returns null on an error (errno).
  static std::shared_ptr<SegmentFile> create(const std::string& folder);
  // Returns the id in "ID.idx"; 0 for any other name.
  static uint64_t id_of(const std::string& name);

  uint64_t id() const { return id_; }
  Kind kind() const { return kind_; }
  uint64_t index_bytes() const { return index_end_; }
  uint64_t payload_end() const { return payload_end_; }
  bool owned() const { return owned_; }
  static size_t disk_bytes(size_t payload_bytes) {
    return (payload_bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // Returns good when the index file has not changed since the last scan(), damaged when it was
  // written, gone when it was removed or replaced.
  Status changed() const;
  Status scan(Scan* scan);
  // Takes the lock. Returns false when another process or instance has it, or without permission.
  bool own();
  // After own() and scan(): cuts off what a crashed writer left after the last valid record.
  void cut_tail();
  void disown();
  // In a forked child, whose parent has the lock: closes the files without unlocking.
  void disinherit();

  // Owner only: appends a page. Sets the record's payload place and checksum; returns the record's
  // `offset` and length in `bytes`.
  bool append(PageRecord* record, const uint8_t* payload, uint64_t* offset, size_t* bytes);
  // Syncs what was written (fsync). After a failure it always fails: the system drops what it could
  // not write, so a later fsync would succeed wrongly.
  bool sync();
  bool sync_failed() const { return sync_failed_; }
  void unlink_files();  // owner only; ends the ownership

  // Reads and verifies a page. `payload`: [payload_bytes].
  Status read(uint64_t offset, const BlockHash& key, int group, size_t payload_bytes,
              DirectReader::Use use, PageRecord* record, uint8_t* payload);
  bool alive(uint64_t offset, const BlockHash& key,
             int group);  // by its record, without the payload
  // Marks the record [bytes] as dead and overwrites its tokens and block hashes.
  bool mark_dead(uint64_t offset, size_t bytes);
  bool save_use(uint64_t offset, float retention_priority, int64_t last_use, const BlockHash& key);
  // Frees the blocks of a dead payload. Returns false when the file system has no holes.
  bool punch(uint64_t offset, size_t bytes);

  void close_files();  // opened again when needed
  bool is_open() const;
  int64_t disk_use() const;  // bytes of blocks

 private:
  struct Files {
    ~Files();
    int index = -1, payload = -1;
    std::optional<DirectReader> reader;  // set once payloads are open
    bool writable = false;
  };
  std::shared_ptr<Files> files(int* error = nullptr);
  std::shared_ptr<Files> open_files(int* error) const;
  bool lock(const Files& open);
  bool sync_name();
  std::string path(const char* suffix) const;
  bool write_header(int fd) const;

  const std::string folder_;
  const uint64_t id_;
  mutable std::mutex mutex_;  // files_
  std::shared_ptr<Files> files_;
  std::atomic<bool> owned_{false};
  Kind kind_ = Kind::ours;
  bool named_ = true;  // the folder's entries of the files have been synced
  bool sync_failed_ = false;
  uint64_t index_end_ = 0;    // after the last valid record
  uint64_t payload_end_ = 0;  // aligned
  // Live records with an incomplete payload, at the last scan: offset and bytes.
  std::vector<std::pair<uint64_t, size_t>> torn_;
  struct stat seen_ = {};  // of the index file, at the last scan
  bool unsure_ =
      true;  // written so shortly before that scan that a change may not show in its time
};

}  // namespace turbomind
