// What the system gives this process: control groups, CPU time, threads.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace turbomind {

// A control group that this process is in, or one above it.
struct ControlGroup {
  std::string folder;  // its files
  int version;         // 1 or 2
};

// Returns the groups that limit `controller` ("cpu", "memory") for this process: its own and all
// above it, the innermost first, of version 1 and 2. A container that sees its own group as the
// root, but the path that it has outside, gets that root. `root` holds `proc` and `sys`.
std::vector<ControlGroup> control_groups(const std::string& controller,
                                         const std::string& root = "/");

// Returns how many CPUs the groups of this process pay for: the smallest quota, rounded down, at
// least 1, because threads beyond it wait for each other while the group is throttled. None where
// nothing limits them.
std::optional<int64_t> cpu_quota(const std::string& root = "/");

// Starts a thread. An Error with code `internal` says that the system refused it.
std::thread start_thread(std::function<void()> work);

}  // namespace turbomind
