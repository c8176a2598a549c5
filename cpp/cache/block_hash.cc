#include "cache/block_hash.h"

#include <bit>
#include <cstring>

namespace turbomind {

namespace {

struct SipState {
  uint64_t v0, v1, v2, v3;

  void round() {
    v0 += v1, v1 = std::rotl(v1, 13), v1 ^= v0, v0 = std::rotl(v0, 32);
    v2 += v3, v3 = std::rotl(v3, 16), v3 ^= v2;
    v0 += v3, v3 = std::rotl(v3, 21), v3 ^= v0;
    v2 += v1, v1 = std::rotl(v1, 17), v1 ^= v2, v2 = std::rotl(v2, 32);
  }
  void absorb(uint64_t word) {
    v3 ^= word;
    round(), round();
    v0 ^= word;
  }
  uint64_t squeeze() {
    for (int i = 0; i < 4; ++i) round();
    return v0 ^ v1 ^ v2 ^ v3;
  }
};

void append_string(std::string& out, const std::string& s) {
  const uint64_t size = s.size();
  out.append(reinterpret_cast<const char*>(&size), sizeof(size));
  out += s;
}

}  // namespace

BlockHash siphash128(const BlockHash& key, const void* data, size_t bytes) {
  SipState s{key.lo ^ 0x736f6d6570736575u, key.hi ^ 0x646f72616e646f6du ^ 0xee,
             key.lo ^ 0x6c7967656e657261u, key.hi ^ 0x7465646279746573u};
  const auto* p = static_cast<const unsigned char*>(data);
  uint64_t word;
  size_t i = 0;
  for (; i + 8 <= bytes; i += 8) {
    std::memcpy(&word, p + i, 8);
    s.absorb(word);
  }
  word = 0;
  if (i < bytes) std::memcpy(&word, p + i, bytes - i);
  s.absorb(word | (static_cast<uint64_t>(bytes) << 56));
  BlockHash out;
  s.v2 ^= 0xee;
  out.lo = s.squeeze();
  s.v1 ^= 0xdd;
  out.hi = s.squeeze();
  return out;
}

BlockHash root_key(const std::string& fingerprint, int adapter, const std::string& salt) {
  // Lengths are part of the message, so ("ab", "c") and ("a", "bc") differ.
  std::string message;
  append_string(message, fingerprint);
  append_string(message, std::to_string(adapter));
  append_string(message, salt);
  return siphash128({}, message.data(), message.size());
}

BlockHash next_key(const BlockHash& parent, const int32_t* tokens, int count) {
  return siphash128(parent, tokens, static_cast<size_t>(count) * sizeof(int32_t));
}

}  // namespace turbomind
