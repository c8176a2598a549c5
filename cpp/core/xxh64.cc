#include "core/xxh64.h"

#include <bit>
#include <cstring>

namespace turbomind {

namespace {

static_assert(std::endian::native == std::endian::little, "words are read in native byte order");

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87u;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9u;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63u;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5u;

template <typename T>
uint64_t load(const uint8_t* p) {
  T word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

uint64_t round(uint64_t lane, uint64_t word) {
  return std::rotl(lane + word * kPrime2, 31) * kPrime1;
}

uint64_t merge(uint64_t hash, uint64_t lane) {
  return (hash ^ round(0, lane)) * kPrime1 + kPrime4;
}

// Hashes whole stripes of 32 bytes, four lanes of 8 bytes each.
uint64_t stripes(const uint8_t*& p, const uint8_t* end, uint64_t seed) {
  uint64_t lane[4] = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
  for (; end - p >= 32; p += 32) {
    for (int i = 0; i < 4; ++i) lane[i] = round(lane[i], load<uint64_t>(p + 8 * i));
  }
  uint64_t hash = std::rotl(lane[0], 1) + std::rotl(lane[1], 7) + std::rotl(lane[2], 12) +
                  std::rotl(lane[3], 18);
  for (const uint64_t l : lane) hash = merge(hash, l);
  return hash;
}

uint64_t tail(const uint8_t* p, const uint8_t* end, uint64_t hash) {
  for (; end - p >= 8; p += 8) {
    hash = std::rotl(hash ^ round(0, load<uint64_t>(p)), 27) * kPrime1 + kPrime4;
  }
  if (end - p >= 4) {
    hash = std::rotl(hash ^ (load<uint32_t>(p) * kPrime1), 23) * kPrime2 + kPrime3;
    p += 4;
  }
  for (; p < end; ++p) hash = std::rotl(hash ^ (*p * kPrime5), 11) * kPrime1;
  return hash;
}

}  // namespace

uint64_t xxh64(const void* data, size_t bytes, uint64_t seed) {
  const auto* p = static_cast<const uint8_t*>(data);
  const uint8_t* end = p + bytes;
  uint64_t hash = bytes >= 32 ? stripes(p, end, seed) : seed + kPrime5;
  hash = tail(p, end, hash + bytes);
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace turbomind
