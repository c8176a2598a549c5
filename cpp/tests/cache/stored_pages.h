// Pages whose contents follow from their block hashes, and a disk tier for them.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cache/kv_layout.h"
#include "tests/check.h"
#include "tiers/disk/disk_tier.h"

namespace turbomind {

namespace fs = std::filesystem;
using Tokens = std::vector<int32_t>;
using Payload = std::vector<uint8_t>;

class Folder {
 public:
  Folder() {
    std::string name = fs::temp_directory_path() / "pages-XXXXXX";
    CHECK(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Folder() { fs::remove_all(path_); }
  std::string pages() const { return path_ + "/pages"; }

 private:
  std::string path_;
};

constexpr const char* kOwn = "cpu/test/1";

inline std::unique_ptr<DiskTier> open(const Folder& folder, int64_t quota = 0, int64_t segment = 0,
                                      const char* numerics = kOwn) {
  DiskTier::Options options;
  options.folder = folder.pages();
  options.quota = quota;
  options.numerics = numerics;
  options.segment = segment;
  return std::make_unique<DiskTier>(options);
}

inline StoredPage make_page(const BlockHash& parent, const Tokens& tokens, size_t bytes = 5000,
                            int group = 0) {
  StoredPage page;
  page.parent = parent;
  page.tokens = tokens;
  page.key = next_key(parent, tokens.data(), static_cast<int>(tokens.size()));
  page.group = group;
  page.fingerprint = "a model";
  page.numerics = kOwn;
  page.heads = 2;
  page.payload_bytes = bytes;
  return page;
}

// Returns a payload that is a function of the page alone.
inline Payload payload_of(const StoredPage& page) {
  Payload out(page.payload_bytes);
  std::minstd_rand random(static_cast<uint32_t>(page.key.lo + page.group));
  for (uint8_t& byte : out) byte = static_cast<uint8_t>(random());
  return out;
}

inline bool write(DiskTier& tier, const StoredPage& page) {
  return tier.write(page, payload_of(page).data());
}

inline bool has(const DiskTier& tier, const StoredPage& page) {
  return tier.find(page.key, page.group).has_value();
}

// Reads the page and compares all of it. Returns false when it is missing.
inline bool read(DiskTier& tier, const StoredPage& want) {
  const auto ref = tier.find(want.key, want.group);
  if (!ref) return false;
  StoredPage page;
  Payload payload(ref->payload_bytes);
  if (!tier.read(*ref, &page, payload.data())) {
    CHECK(!has(tier, want));
    return false;
  }
  CHECK(page.key == want.key && page.parent == want.parent && page.group == want.group);
  CHECK(page.tokens == want.tokens && page.fingerprint == want.fingerprint);
  CHECK(page.heads == want.heads && page.first_head == want.first_head);
  CHECK(page.payload_bytes == want.payload_bytes && payload == payload_of(want));
  return true;
}

inline std::vector<StoredPage> make_chain(int salt, int pages, size_t bytes = 5000) {
  std::vector<StoredPage> chain;
  BlockHash parent = root_key("a model", 0, std::to_string(salt));
  for (int i = 0; i < pages; ++i) {
    chain.push_back(make_page(parent, Tokens(kPageTokens, i + 1), bytes));
    parent = chain.back().key;
  }
  return chain;
}

inline std::vector<BlockHash> keys_of(const std::vector<StoredPage>& pages) {
  std::vector<BlockHash> keys;
  for (const StoredPage& page : pages) keys.push_back(page.key);
  return keys;
}

}  // namespace turbomind
