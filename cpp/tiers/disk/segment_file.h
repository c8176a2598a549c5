// A piece of the disk tier: two files, and whoever appends to them.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tiers/disk/page_record.h"
#include "tiers/disk/payload_reader.h"

namespace turbomind {

// "ID.idx" has a header and a record per page (page_record.h), "ID.kv" the payloads, each from a
// multiple of 4 KiB on. Both are only appended to, but for marks and uses of records and for holes
// where payloads of dead pages were. A payload lies on the disk before its record is written.
// Who appends holds a lock (flock) on the index file; the lock ends with its process.
//
// read() may be called from any thread; the rest from one at a time. Errors are return values.
class SegmentFile {
 public:
  static constexpr size_t kAlignment = 4096;
  static constexpr uint64_t kMaxIndexBytes = 4 << 20;

  enum class Status {
    good,
    gone,     // files or page have left
    damaged,  // torn, changed or not ours
    failed,   // the system says no
  };
  struct Found {
    uint64_t offset = 0;  // in the index file
    size_t bytes = 0;
    PageRecord record;
  };
  struct Scan {
    std::vector<Found> records;  // by offset
    int64_t damaged = 0;         // places with something that is no record
  };
  enum class Kind { ours, unfinished, damaged, newer };

  SegmentFile(std::string folder, uint64_t id);
  // New, empty files under a lock. Null when the system says no (errno).
  static std::shared_ptr<SegmentFile> create(const std::string& folder);
  // Of "ID.idx"; 0 for any other name.
  static uint64_t id_of(const std::string& name);

  uint64_t id() const { return id_; }
  Kind kind() const { return kind_; }
  uint64_t index_bytes() const { return index_end_; }
  uint64_t payload_end() const { return payload_end_; }
  bool owned() const { return owned_; }
  static size_t disk_bytes(size_t payload_bytes) {
    return (payload_bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // Whether the index file is another one or was written since the last scan().
  Status changed() const;
  Status scan(Scan* scan);
  // Takes the lock. False when another process or instance has it, or for lack of rights.
  bool own();
  // After own() and scan(): what a dead writer left behind the last good record goes.
  void cut_tail();
  void disown();
  // In a forked child: the lock is the parent's. Closes the files and leaves the lock alone.
  void disinherit();

  // Owner only. Fills in the record's place and checksum; `offset` is that of the record.
  bool append(PageRecord* record, const uint8_t* payload, uint64_t* offset, size_t* bytes);
  // What was written is on the disk. Once that has failed it fails for ever: the system forgets
  // what it could not write, and would say yes the next time.
  bool sync();
  bool sync_failed() const { return sync_failed_; }
  void unlink_files();  // owner only; ends its being one

  // All of one page, verified. `payload` has room for `payload_bytes`.
  Status read(uint64_t offset, const BlockHash& key, int group, size_t payload_bytes,
              PayloadReader::Use use, PageRecord* record, uint8_t* payload);
  bool alive(uint64_t offset, const BlockHash& key, int group);  // by its record alone
  bool mark_dead(uint64_t offset);
  bool save_use(uint64_t offset, float retention_priority, int64_t last_use, const BlockHash& key);
  // Gives a dead payload's blocks back. False where files cannot have holes.
  bool punch(uint64_t offset, size_t bytes);

  void close_files();  // they are opened again when needed
  bool is_open() const;
  int64_t disk_use() const;  // bytes of blocks

 private:
  struct Files {
    ~Files();
    int index = -1, payload = -1;
    std::optional<PayloadReader> reader;  // once payloads are open
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
  bool named_ = true;  // the folder's entries of the files outlive the machine
  bool sync_failed_ = false;
  uint64_t index_end_ = 0;      // behind the last good record
  uint64_t payload_end_ = 0;    // aligned
  std::vector<uint64_t> torn_;  // live records whose payload is not all there, at the last scan
  struct stat seen_ = {};       // of the index file, at the last scan
  bool unsure_ = true;          // written so shortly before that scan that its time may stay
};

}  // namespace turbomind
