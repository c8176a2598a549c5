// Room on a disk: what is free, and how much of it pages may take.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace turbomind {

struct DiskRoom {
  int64_t total = 0;  // bytes of the file system
  int64_t free = 0;   // for this user
};

constexpr int64_t kAutoQuota = -1;  // a quota that auto_quota() chooses

// Returns the room of the file system that has `folder`; none when the system reports an error.
std::optional<DiskRoom> disk_room(const std::string& folder);

// Returns a tenth of the bytes that are free or belong to pages already, so that it is the same
// after a restart, and at least 1 GiB.
int64_t auto_quota(const DiskRoom& room, int64_t own);

// Returns the bytes that pages leave free, whatever their quota. `automatic`: 5 GiB, or a twentieth
// of a smaller file system. Else only room for the store of sessions: 64 MiB, or a twentieth. A
// margin is added for what other files take between two writes of pages.
int64_t least_free(const DiskRoom& room, bool automatic);

// Returns whether an error of a write means that the disk, or its quota for this user, is full.
bool lacks_room(int error);

}  // namespace turbomind
