#include "tiers/disk/page_record.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cache/kv_layout.h"
#include "core/xxh64.h"

namespace turbomind {

namespace {

constexpr uint32_t kMagic = 0x52504d54;  // "TMPR"
constexpr uint16_t kVersion = 1;
constexpr uint64_t kDead = 0x4441454447504d54;  // "TMPGDEAD"
constexpr size_t kMaxText = 255;
constexpr size_t kKeysOffset = 16, kShapeOffset = 48;
constexpr size_t kChecksumsOffset = 80;  // of payload and record
constexpr size_t kChecksumOffset = 88;
constexpr size_t kBodyOffset = 128;
constexpr int kMaxIndex = 1 << 20;  // of groups and heads

template <typename T>
void put(uint8_t* at, T value) {
  std::memcpy(at, &value, sizeof(T));
}

template <typename T>
T get(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

size_t record_bytes(size_t tokens, size_t fingerprint, size_t numerics) {
  return (kBodyOffset + 4 * tokens + fingerprint + numerics + 7) / 8 * 8;
}

uint64_t record_checksum(const uint8_t* data, size_t bytes, uint64_t segment, uint64_t offset) {
  const uint64_t head = xxh64(data, kChecksumOffset, segment ^ (offset * 0x9E3779B97F4A7C15u));
  return xxh64(data + kBodyOffset, bytes - kBodyOffset, head);
}

uint64_t use_checksum(const uint8_t* use, const BlockHash& key) {
  return xxh64(use, kUseBytes - 8, key.lo ^ key.hi);
}

void decode_use(const uint8_t* use, PageRecord* record) {
  const bool good = get<uint64_t>(use + 16) == use_checksum(use, record->page.key);
  const float value = good ? get<float>(use) : 0;
  record->page.retention_priority = std::isfinite(value) ? value : 0;
  record->last_use = good ? get<int64_t>(use + 8) : 0;
}

void decode_fields(const uint8_t* data, PageRecord* record) {
  StoredPage& page = record->page;
  page.group = get<int32_t>(data + 12);
  page.key = {get<uint64_t>(data + 16), get<uint64_t>(data + 24)};
  page.parent = {get<uint64_t>(data + 32), get<uint64_t>(data + 40)};
  page.first_head = get<int32_t>(data + 48);
  page.heads = get<int32_t>(data + 52);
  record->payload_offset = get<uint64_t>(data + 64);
  page.payload_bytes = get<uint64_t>(data + 72);
  record->payload_checksum = get<uint64_t>(data + 80);

  const size_t tokens = get<uint16_t>(data + 6);
  page.tokens.resize(tokens);
  std::memcpy(page.tokens.data(), data + kBodyOffset, 4 * tokens);
  const auto* text = reinterpret_cast<const char*>(data + kBodyOffset + 4 * tokens);
  const size_t fingerprint = get<uint16_t>(data + 56);
  page.fingerprint.assign(text, fingerprint);
  page.numerics.assign(text + fingerprint, get<uint16_t>(data + 58));
}

}  // namespace

bool valid_page(const StoredPage& page) {
  const auto index = [](int value) { return value >= 0 && value <= kMaxIndex; };
  return !page.tokens.empty() && page.tokens.size() <= size_t{kPageTokens} &&
         page.fingerprint.size() <= kMaxText && page.numerics.size() <= kMaxText &&
         index(page.group) && index(page.first_head) && index(page.heads) &&
         page.payload_bytes > 0 && page.payload_bytes <= kMaxPayloadBytes &&
         std::isfinite(page.retention_priority) &&
         page.key ==
             next_key(page.parent, page.tokens.data(), static_cast<int>(page.tokens.size()));
}

uint64_t payload_checksum(const StoredPage& page, const uint8_t* payload) {
  const int32_t shape[4] = {page.group, page.first_head, page.heads, 0};
  uint64_t seed = xxh64(&page.key, sizeof(page.key), 0);
  seed = xxh64(shape, sizeof(shape), seed);
  seed = xxh64(page.fingerprint.data(), page.fingerprint.size(), seed);
  seed = xxh64(page.numerics.data(), page.numerics.size(), seed);
  return xxh64(payload, page.payload_bytes, seed);
}

std::vector<uint8_t> encode_record(const PageRecord& record, uint64_t segment, uint64_t offset) {
  const StoredPage& page = record.page;
  const size_t tokens = page.tokens.size();
  std::vector<uint8_t> out(record_bytes(tokens, page.fingerprint.size(), page.numerics.size()));
  uint8_t* data = out.data();
  put(data, kMagic);
  put(data + 4, kVersion);
  put(data + 6, static_cast<uint16_t>(tokens));
  put(data + 8, static_cast<uint32_t>(out.size()));
  put(data + 12, static_cast<int32_t>(page.group));
  put(data + 16, page.key.lo);
  put(data + 24, page.key.hi);
  put(data + 32, page.parent.lo);
  put(data + 40, page.parent.hi);
  put(data + 48, static_cast<int32_t>(page.first_head));
  put(data + 52, static_cast<int32_t>(page.heads));
  put(data + 56, static_cast<uint16_t>(page.fingerprint.size()));
  put(data + 58, static_cast<uint16_t>(page.numerics.size()));
  put(data + 64, record.payload_offset);
  put(data + 72, static_cast<uint64_t>(page.payload_bytes));
  put(data + 80, record.payload_checksum);
  uint8_t* body = data + kBodyOffset;
  std::memcpy(body, page.tokens.data(), 4 * tokens);
  std::memcpy(body + 4 * tokens, page.fingerprint.data(), page.fingerprint.size());
  std::memcpy(body + 4 * tokens + page.fingerprint.size(), page.numerics.data(),
              page.numerics.size());
  if (record.dead) encode_mark(data + kMarkOffset);
  encode_use(data + kUseOffset, page.retention_priority, record.last_use, page.key);
  put(data + kChecksumOffset, record_checksum(data, out.size(), segment, offset));
  return out;
}

size_t decode_record(const uint8_t* data, size_t bytes, uint64_t segment, uint64_t offset,
                     PageRecord* record) {
  if (bytes < kMinRecordBytes || get<uint32_t>(data) != kMagic ||
      get<uint16_t>(data + 4) != kVersion)
    return 0;
  const size_t size = get<uint32_t>(data + 8);
  const size_t want =
      record_bytes(get<uint16_t>(data + 6), get<uint16_t>(data + 56), get<uint16_t>(data + 58));
  if (size != want || size > bytes || size > kMaxRecordBytes) return 0;
  record->dead = marked_dead(data, size);
  if (record->dead) {
    record->payload_offset = get<uint64_t>(data + 64);
    record->page.payload_bytes = get<uint64_t>(data + 72);
    return record->page.payload_bytes <= kMaxPayloadBytes ? size : 0;
  }
  if (get<uint64_t>(data + kChecksumOffset) != record_checksum(data, size, segment, offset))
    return 0;
  decode_fields(data, record);
  decode_use(data + kUseOffset, record);
  return valid_page(record->page) ? size : 0;
}

bool marked_dead(const uint8_t* data, size_t bytes) {
  return bytes >= kMarkOffset + kMarkBytes && get<uint64_t>(data + kMarkOffset) == kDead;
}

void erase_record(uint8_t* data, size_t bytes) {
  std::fill(data + kKeysOffset, data + kShapeOffset, uint8_t{0});
  std::fill(data + kChecksumsOffset, data + kMarkOffset, uint8_t{0});
  encode_mark(data + kMarkOffset);
  std::fill(data + kUseOffset, data + bytes, uint8_t{0});
}

bool is_erased(const uint8_t* data, size_t bytes) {
  const auto zeros = [data](size_t from, size_t to) {
    return std::all_of(data + from, data + to, [](uint8_t byte) { return byte == 0; });
  };
  return zeros(kKeysOffset, kShapeOffset) && zeros(kBodyOffset, bytes);
}

void encode_mark(uint8_t out[kMarkBytes]) {
  put(out, kDead);
}

void encode_use(uint8_t out[kUseBytes], float retention_priority, int64_t last_use,
                const BlockHash& key) {
  put(out, retention_priority);
  put(out + 4, uint32_t{0});
  put(out + 8, last_use);
  put(out + 16, use_checksum(out, key));
}

}  // namespace turbomind
