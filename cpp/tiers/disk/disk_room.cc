#include "tiers/disk/disk_room.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>

namespace turbomind {

namespace {

constexpr int64_t kMiB = int64_t{1} << 20, kGiB = int64_t{1} << 30;

}  // namespace

std::optional<DiskRoom> disk_room(const std::string& folder) {
  struct statvfs disk;
  if (statvfs(folder.c_str(), &disk) != 0) return std::nullopt;
  const auto block = static_cast<int64_t>(disk.f_frsize);
  return DiskRoom{static_cast<int64_t>(disk.f_blocks) * block,
                  static_cast<int64_t>(disk.f_bavail) * block};
}

int64_t auto_quota(const DiskRoom& room, int64_t own) {
  return std::max(kGiB, (room.free + own) / 10);
}

int64_t least_free(const DiskRoom& room, bool automatic) {
  const int64_t bytes = std::min(automatic ? 5 * kGiB : 64 * kMiB, room.total / 20);
  return bytes + std::min(64 * kMiB, bytes / 2);
}

bool lacks_room(int error) {
  return error == ENOSPC || error == EDQUOT;
}

}  // namespace turbomind
