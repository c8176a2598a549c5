#include "engine/make_tiers.h"

#include <algorithm>

#include "core/error.h"
#include "tiers/disk/disk_room.h"
#include "tiers/disk/disk_tier.h"
#include "tiers/host_tier.h"
#include "tiers/page_mover.h"

namespace turbomind {

namespace {

std::unique_ptr<LowerTier> make_host_tier(const EngineOptions& options, const Model& model) {
  HostTier::Options host;
  host.quota = options.host_bytes;
  host.numerics = model.numerics_fingerprint();
  host.memory = model.pages().host_memory();
  host.groups.clear();
  for (size_t g = 0; g < model.groups().size(); ++g) {
    const size_t bytes = model.pages().stored_page_bytes(static_cast<int>(g), kPageTokens);
    host.page_bytes = g == 0 ? bytes : std::min(host.page_bytes, bytes);
    host.groups.push_back(model.groups()[g].kind);
  }
  return std::make_unique<HostTier>(host);
}

std::unique_ptr<LowerTier> make_disk_tier(const EngineOptions& options, const Model& model) {
  DiskTier::Options disk;
  disk.folder = options.page_folder;
  disk.quota = options.disk_quota;
  disk.numerics = model.numerics_fingerprint();
  return std::make_unique<DiskTier>(disk);
}

}  // namespace

TierPtrs make_tiers(const EngineOptions& options, const Model& model) {
  const auto refuse = [](const char* name, auto value, const char* expected) {
    throw_error(ErrorCode::invalid_request, name, ": got ", value, ", expected ", expected);
  };
  if (options.host_bytes < 0) refuse("host_memory", options.host_bytes, "0 (none) or more bytes");
  if (options.disk_quota < 0 && options.disk_quota != kAutoQuota)
    refuse("disk_quota", options.disk_quota, "-1 (automatic), 0 (no limit) or more");
  if (options.disk_quota > 0 && options.page_folder.empty())
    refuse("disk_quota", options.disk_quota, "0 without a page_folder");
  TierPtrs tiers;
  if (options.host_bytes > 0) tiers.push_back(make_host_tier(options, model));
  if (!options.page_folder.empty()) tiers.push_back(make_disk_tier(options, model));
  if (!tiers.empty() && !options.prefix_reuse)
    refuse("prefix_reuse", "false", "true with host_memory or a page_folder");
  return tiers;
}

std::vector<ReadSpeed> first_speeds(const EngineOptions& options, const Model& model, size_t tiers,
                                    const std::optional<SpeedRecord>& recorded) {
  // Copies by one thread, and by a GPU over its bus. The first loads correct a guess that is too
  // high; a guess that is too low would never be corrected, since nothing would be loaded.
  constexpr ReadSpeed kCopied{4e9, 2e-5}, kFetched{2e10, 5e-5};
  constexpr double kMuch = 4;  // a record slower than the disk is now by this factor is ignored
  std::vector<ReadSpeed> speeds(tiers);
  if (tiers > 0 && options.host_bytes > 0)
    speeds.front() = model.pages().page_batch() > 1 ? kFetched : kCopied;
  if (tiers > 0 && !options.page_folder.empty()) {
    const ReadSpeed medium = probe_read_speed(options.page_folder).value_or(ReadSpeed{});
    const ReadSpeed found = load_speed(medium, PageMover::kLoaders);
    // A record that is too fast is corrected by the first loads; the disk may just be busy now.
    const bool good = recorded && kMuch * recorded->disk.bytes_per_second > found.bytes_per_second;
    speeds.back() = good ? recorded->disk : found;
  }
  return speeds;
}

}  // namespace turbomind
