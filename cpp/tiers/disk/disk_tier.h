// The lower tier on disk: a folder of segment files that any number of processes share. A
// log-structured store of pages; the files are in segment_file.h, the index in memory is in
// page_catalog.h.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "tiers/disk/index_mutex.h"
#include "tiers/disk/page_catalog.h"
#include "tiers/disk/segment_file.h"
#include "tiers/lower_tier.h"

namespace turbomind {

// Everything on the disk is a cache: a page that fails verification is dropped and counted. A
// removed page may reappear when the machine crashes right after the removal; it is then merely
// cached.
//
// Each instance appends to a segment that it has locked. All instances read all segments, and
// remove a page by a mark in its record. A partial page is replaced by a longer one with the same
// parent and first tokens, and a foreign page by one of the own numerics fingerprint.
//
// Two locks: `io_` for threads that write or maintain the folder, `index_` (taken after io_) for
// memory alone. Pages and segments leave memory only under both.
class DiskTier : public LowerTier {
 public:
  static constexpr float kPinned = 2.0f;  // retention priority from which on pages are evicted last
  static constexpr int kMaxOpenSegments = 64;

  struct Options {
    std::string folder;    // created if missing, with mode 0700
    int64_t quota = 0;     // bytes; 0: no limit; kAutoQuota: see auto_quota()
    std::string numerics;  // own numerics fingerprint
    int64_t segment = 0;   // bytes of a full segment; 0: 256 MiB, or less under a small quota
  };

  // Throws Error(invalid_request) when the folder cannot be created or read.
  explicit DiskTier(const Options& options);
  ~DiskTier() override;
  DiskTier(const DiskTier&) = delete;
  DiskTier& operator=(const DiskTier&) = delete;

  std::optional<PageRef> find(const BlockHash& key, int group) const override;
  std::optional<PageRef> find_prefix(const BlockHash& parent, int group, const int32_t* tokens,
                                     int count, int* shared) const override;
  bool read(const PageRef& ref, StoredPage* page, uint8_t* payload) override;
  // Also returns false when the page does not fit the quota, or only pinned pages could be evicted.
  bool write(const StoredPage& page, const uint8_t* payload) override;
  void touch(const std::vector<BlockHash>& keys, float retention_priority) override;
  void remove(const std::vector<BlockHash>& keys) override;
  void retain_only(const std::vector<BlockHash>& keys) override;
  void refresh() override;
  void sync() override;
  void maintain() override;
  TierStats stats() const override;

  // Evicts the least valuable pages, but none of `needed` and their parents, until at least `bytes`
  // of them are removed. Returns the bytes removed. For a disk that is full: it waits for the disk
  // alone, and writes only in place.
  int64_t evict_bytes(int64_t bytes, const std::vector<BlockHash>& needed);
  bool verify(const PageRef& ref);                      // as read(), but does not count as a use
  std::vector<PageRef> pages() const;                   // in their order on the disk
  std::vector<int> groups(const BlockHash& key) const;  // cache groups that have the page
  int64_t bytes_of(const std::vector<BlockHash>& keys) const;  // of all groups, with headers
  int64_t segments() const;
  int64_t disk_use() const;  // bytes of blocks, dead pages included
  int64_t passes() const;    // records after which scans let lookups pass

 private:
  struct Segment {
    std::shared_ptr<SegmentFile> file;
    std::map<uint64_t, CatalogPage*> pages;  // by offset of the record
    int64_t live_bytes = 0;
    int64_t damaged = 0;  // as of the last scan
    bool stale = false;   // has live records that are not in the catalog
  };
  // A live record of a page that the catalog has from another place.
  struct StaleCopy {
    int group = 0;
    uint64_t segment = 0, offset = 0, payload_offset = 0;
    size_t payload_bytes = 0, record_bytes = 0;
  };
  // A page that was copied to the own segment and is still alive at its old place.
  struct Move {
    StaleCopy from;
    uint64_t segment = 0, offset = 0;  // its place in the catalog now
  };

  // disk_tier.cc
  static StaleCopy place_of(const CatalogPage& page);
  PageRef ref_of(const CatalogPage& page) const;
  CatalogPage describe(const StoredPage& page) const;
  CatalogPage* covering(const CatalogPage& page);
  int64_t excess(int64_t added) const;
  bool make_room(const CatalogPage& page, int64_t bytes);
  bool unreachable(const CatalogPage& page, const CatalogPage& victim);
  CatalogPage* next_victim() const;
  void evict_page(CatalogPage* page);
  bool place(PageRecord* record, const uint8_t* payload, CatalogPage* page);
  int64_t tick();
  void check_process();
  bool read_again(const PageRef& ref, StoredPage* page, uint8_t* payload);
  bool read_once(const PageRef& ref, StoredPage* page, uint8_t* payload, bool* again);
  void forget_bad(const PageRef& ref, uint64_t segment, uint64_t offset,
                  SegmentFile::Status status);
  void forget_bad_locked(const PageRef& ref, uint64_t segment, uint64_t offset,
                         SegmentFile::Status status);

  // The rest is called with io_ held.
  // disk_tier_refresh.cc
  void refresh_locked();
  void load(uint64_t id);
  void update(Segment& segment);
  void apply(Segment& segment, SegmentFile::Scan scan);
  void forget_stale_copies(uint64_t segment);
  void take(Segment& segment, const SegmentFile::Found& found);
  CatalogPage* enter(Segment& segment, CatalogPage page);  // with index_ held
  void forget(CatalogPage* page);                          // with index_ held
  void drop(uint64_t id);
  void close_idle_files(const SegmentFile* except);
  int open_files() const;

  // disk_tier_maintenance.cc
  void kill(CatalogPage* page);
  void kill_record(const StaleCopy& record);
  void kill_here(CatalogPage* page);
  void kill_own_stale_copies(uint64_t id);
  bool alive(const CatalogPage& page);
  void evict();
  void save_uses();
  std::shared_ptr<SegmentFile> writable_segment(size_t bytes, bool fresh);
  std::shared_ptr<SegmentFile> create_segment();
  std::shared_ptr<SegmentFile> adopt(size_t bytes);
  bool hold(Segment& segment);
  bool sync_own();
  void release_own();

  // disk_tier_compaction.cc
  void tidy(int64_t budget);
  int64_t compaction_budget() const;
  void tidy_unusable();
  bool has_stale_copies(const Segment& segment) const;
  bool empty_of_pages(const Segment& segment) const;
  bool is_small(const Segment& segment) const;
  bool wants_compaction(const Segment& segment, int small) const;
  int64_t compact(Segment& segment, int64_t budget);
  bool copy_page(CatalogPage page, std::vector<uint8_t>* payload);
  void finish_moves();
  void undo_moves();

  const Options options_;
  int64_t quota_ = 0;       // bytes; 0: no limit
  int64_t least_free_ = 0;  // bytes of the file system that pages leave free
  int64_t segment_bytes_ = 0;
  const uint64_t numerics_;
  pid_t process_;

  std::mutex io_;
  std::shared_ptr<SegmentFile> own_;  // the segment that this instance appends to
  std::vector<Move> moved_;           // to the own segment
  bool cannot_sync_ = false;          // the last sync failed: compaction moves nothing
  bool wrote_ = false;                // pages, since the last maintain()
  std::unordered_set<BlockHash>
      unreachable_;  // pages refused because their parent would be evicted

  mutable IndexMutex index_;
  mutable PageCatalog catalog_;
  std::map<uint64_t, Segment> segments_;
  std::unordered_multimap<BlockHash, StaleCopy> stale_copies_;
  TierStats stats_;
  int64_t clock_ = 0;
};

}  // namespace turbomind
