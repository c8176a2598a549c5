// Pages on a disk: a folder of segments that any number of processes share.
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

#include "tiers/disk/page_catalog.h"
#include "tiers/disk/segment_file.h"
#include "tiers/lower_tier.h"

namespace turbomind {

// Everything on the disk is a cache: what does not verify is forgotten and counted. A page that was
// removed may come back when the machine dies at once after that; it is then merely cached.
//
// Each instance appends to a segment that it holds; all read all, and remove by a mark in the
// page's record. A partial page that is the beginning of a longer one with the same parent gives
// way to it. A page of the own numerics fingerprint replaces a foreign one.
//
// Two locks: `io_` for whoever writes or looks after the folder, `index_` (after io_) for memory
// alone. A page and a segment leave memory only under both.
class DiskTier : public LowerTier {
 public:
  static constexpr float kPinned = 2.0f;  // pages from here on are evicted last of all
  static constexpr int kMaxOpenSegments = 64;

  struct Options {
    std::string folder;    // made when missing, for its owner only
    int64_t quota = 0;     // bytes; 0: no limit
    std::string numerics;  // the own numerics fingerprint
    int64_t segment = 0;   // bytes of a full one; 0: 256 MiB, or less under a small quota
  };

  // Throws Error(invalid_request) when the folder cannot be made or read.
  explicit DiskTier(const Options& options);
  ~DiskTier() override;
  DiskTier(const DiskTier&) = delete;
  DiskTier& operator=(const DiskTier&) = delete;

  std::optional<PageRef> find(const BlockHash& key, int group) const override;
  std::optional<PageRef> find_beginning(const BlockHash& parent, int group, const int32_t* tokens,
                                        int count, int* shared) const override;
  bool read(const PageRef& ref, StoredPage* page, uint8_t* payload) override;
  // False without an error too: the page does not fit the quota, or only pinned ones could go.
  bool write(const StoredPage& page, const uint8_t* payload) override;
  void touch(const std::vector<BlockHash>& keys, float retention_priority) override;
  void remove(const std::vector<BlockHash>& keys) override;
  // A partial page also stays when its parent is among the keys.
  void keep_only(const std::vector<BlockHash>& keys) override;
  void refresh() override;
  void sync() override;
  void maintain() override;
  TierStats stats() const override;

  bool verify(const PageRef& ref);     // as read(), and no use of the page
  std::vector<PageRef> pages() const;  // in the order in which they lie on the disk
  std::vector<int> groups(const BlockHash& key) const;         // that have the page
  int64_t bytes_of(const std::vector<BlockHash>& keys) const;  // headers included, of all groups
  int64_t segments() const;
  int64_t disk_use() const;  // bytes of blocks, dead ones included

 private:
  struct Segment {
    std::shared_ptr<SegmentFile> file;
    std::map<uint64_t, CatalogPage*> pages;  // by offset of the record
    int64_t live_bytes = 0;
    int64_t damaged = 0;  // as of the last scan
    bool stale = false;   // has live records that nothing here knows of
  };
  // A live record of a page that the catalog has from elsewhere.
  struct Shadow {
    int group = 0;
    uint64_t segment = 0, offset = 0, payload_offset = 0;
    size_t payload_bytes = 0;
  };
  // A page that was copied to the own segment and is still alive where it was.
  struct Move {
    Shadow from;
    uint64_t segment = 0, offset = 0;  // where it is known now
  };

  // disk_tier.cc
  PageRef ref_of(const CatalogPage& page) const;
  CatalogPage describe(const StoredPage& page) const;
  CatalogPage* covering(const CatalogPage& page);
  bool make_room(const CatalogPage& page);
  bool severed(const CatalogPage& page, const CatalogPage& victim);
  CatalogPage* next_victim(float* retention_priority) const;
  bool place(PageRecord* record, const uint8_t* payload, CatalogPage* page);
  int64_t tick();
  void check_process();
  bool read_again(const PageRef& ref, StoredPage* page, uint8_t* payload);
  bool read_once(const PageRef& ref, StoredPage* page, uint8_t* payload, bool* again);
  void forget_bad(const PageRef& ref, uint64_t segment, uint64_t offset,
                  SegmentFile::Status status);
  void forget_bad_locked(const PageRef& ref, uint64_t segment, uint64_t offset,
                         SegmentFile::Status status);

  // The rest is called under io_.
  // disk_tier_refresh.cc
  void refresh_locked();
  void load(uint64_t id);
  void update(Segment& segment);
  void apply(Segment& segment, SegmentFile::Scan scan);
  void take(Segment& segment, const SegmentFile::Found& found);
  CatalogPage* enter(Segment& segment, CatalogPage page);  // under index_
  void forget(CatalogPage* page);                          // under index_
  void drop(uint64_t id);
  void close_idle_files(const SegmentFile* except);
  int open_files() const;

  // disk_tier_upkeep.cc
  void kill(CatalogPage* page);
  void kill_record(uint64_t segment, uint64_t offset, uint64_t payload_offset, size_t bytes);
  void kill_here(CatalogPage* page);
  void kill_own_shadows(uint64_t id);
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
  void tidy();
  void tidy_unusable();
  bool has_shadows(const Segment& segment) const;
  bool empty_of_pages(const Segment& segment) const;
  bool is_small(const Segment& segment) const;
  bool wants_compaction(const Segment& segment, int small) const;
  int64_t compact(Segment& segment, int64_t budget);
  bool copy_page(CatalogPage page, std::vector<uint8_t>* payload);
  void finish_moves();
  void take_moves_back();

  const Options options_;
  const int64_t segment_bytes_;
  const uint64_t numerics_;
  pid_t process_;

  std::mutex io_;
  std::shared_ptr<SegmentFile> own_;       // that this instance appends to
  std::vector<Move> moved_;                // to it
  bool cannot_sync_ = false;               // the last sync failed: nothing is moved
  std::unordered_set<BlockHash> severed_;  // pages refused since the one before them is not here

  mutable std::mutex index_;
  mutable PageCatalog catalog_;
  std::map<uint64_t, Segment> segments_;
  std::unordered_multimap<BlockHash, Shadow> shadows_;
  TierStats stats_;
  int64_t clock_ = 0;
};

}  // namespace turbomind
