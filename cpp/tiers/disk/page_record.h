// Format of a page's record in the index file of a segment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tiers/lower_tier.h"

namespace turbomind {

// All words are little-endian; a record starts at a multiple of 8 bytes and is one long:
//
//     0  u32 magic, u16 version, u16 tokens      64  u64 payload's offset, bytes, checksum
//     8  u32 bytes of the record, u32 group      88  u64 checksum of the record
//    16  u64 key [2], parent [2]                 96  u64 mark: zero, or that the page is dead
//    48  u32 first head, heads                  104  f32 retention priority, u32 0, i64 last use,
//    56  u16 bytes of fingerprint, numerics;         u64 checksum of the use
//        u32 0                                  128  i32 tokens, fingerprint, numerics, zeros
//
// Mark and use change in place and are not covered by the record's checksum, which also covers
// segment and offset: a record at another place is invalid. The payload's checksum also covers the
// page's identity. Of a dead record only sizes and the place of its payload are left: tokens, block
// hashes and checksums are overwritten with zeros, so that nothing can be read from it.
struct PageRecord {
  StoredPage page;
  uint64_t payload_offset = 0;
  uint64_t payload_checksum = 0;
  int64_t last_use = 0;  // microseconds since 1970
  bool dead = false;
};

constexpr size_t kMarkOffset = 96;
constexpr size_t kUseOffset = 104;
constexpr size_t kMarkBytes = 8;
constexpr size_t kUseBytes = 24;
constexpr size_t kMinRecordBytes = 136;   // one token, empty texts
constexpr size_t kMaxRecordBytes = 1024;  // 64 tokens and two texts of 255 bytes fit
constexpr size_t kMaxPayloadBytes = size_t{1} << 30;

// Returns false when a field is out of range, or the block hash is not that of parent and tokens.
bool valid_page(const StoredPage& page);

uint64_t payload_checksum(const StoredPage& page, const uint8_t* payload);

// Returns the bytes of a record; `record.page` is valid.
std::vector<uint8_t> encode_record(const PageRecord& record, uint64_t segment, uint64_t offset);

// Reads the record at `data` [bytes]. Returns its length in bytes; 0 when there is no valid one. Of
// a dead one only the place of the payload is read.
size_t decode_record(const uint8_t* data, size_t bytes, uint64_t segment, uint64_t offset,
                     PageRecord* record);

// Returns whether the record at `data` [bytes] is marked as dead, complete or not.
bool marked_dead(const uint8_t* data, size_t bytes);

// Overwrites the record at `data` [bytes] by that of a dead page. is_erased() returns whether that
// was done: older versions only set the mark.
void erase_record(uint8_t* data, size_t bytes);
bool is_erased(const uint8_t* data, size_t bytes);

// Write the bytes at kMarkOffset of a dead record, and at kUseOffset of a record of `key`.
void encode_mark(uint8_t out[kMarkBytes]);
void encode_use(uint8_t out[kUseBytes], float retention_priority, int64_t last_use,
                const BlockHash& key);

}  // namespace turbomind
