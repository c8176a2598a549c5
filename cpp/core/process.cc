#include "core/process.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace turbomind {

namespace fs = std::filesystem;

namespace {

// Whether `controller` is one of the names of a comma-separated list.
bool names(const std::string& list, const std::string& controller) {
  std::istringstream words(list);
  for (std::string word; std::getline(words, word, ',');) {
    if (word == controller) return true;
  }
  return false;
}

// Adds the group at `path` below `base`, all above it, and `base`.
void add_groups(const fs::path& base, const std::string& path, int version,
                std::vector<ControlGroup>& found) {
  fs::path below = fs::path(path).relative_path().lexically_normal();
  // A group outside of what this process sees is shown as "/../…".
  if (below.empty() || below == "." || *below.begin() == "..") below.clear();
  for (; !below.empty(); below = below.parent_path()) {
    const std::string folder = (base / below).string();
    if (folder.back() != '/') found.push_back({folder, version});
  }
  found.push_back({base.string(), version});
}

// Returns the quota of a group in CPUs, or none.
std::optional<double> quota_of(const ControlGroup& group) {
  double quota = 0, period = 0;
  const fs::path folder = group.folder;
  if (group.version == 2) {
    std::ifstream file(folder / "cpu.max");  // "max 100000" where there is none
    file >> quota >> period;
  } else {
    std::ifstream(folder / "cpu.cfs_quota_us") >> quota;  // -1 where there is none
    std::ifstream(folder / "cpu.cfs_period_us") >> period;
  }
  if (!(quota > 0 && period > 0)) return {};
  return quota / period;
}

}  // namespace

std::vector<ControlGroup> control_groups(const std::string& controller, const std::string& root) {
  const fs::path groups = fs::path(root) / "sys/fs/cgroup";
  std::string version1 = "/", version2 = "/";
  std::ifstream own(fs::path(root) / "proc/self/cgroup");
  for (std::string line; std::getline(own, line);) {  // "4:cpu,cpuacct:/path", "0::/path"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (controllers.empty()) version2 = line.substr(second + 1);
    if (names(controllers, controller)) version1 = line.substr(second + 1);
  }
  std::vector<ControlGroup> found;
  add_groups(groups, version2, 2, found);
  add_groups(groups / controller, version1, 1, found);
  return found;
}

std::optional<int64_t> cpu_quota(const std::string& root) {
  std::optional<double> least;
  for (const ControlGroup& group : control_groups("cpu", root)) {
    const auto quota = quota_of(group);
    if (quota && (!least || *quota < *least)) least = quota;
  }
  if (!least) return {};
  return std::max<int64_t>(1, static_cast<int64_t>(std::floor(*least)));
}

std::thread start_thread(std::function<void()> work) {
  try {
    return std::thread(std::move(work));
  } catch (const std::system_error& error) {
    throw_error(ErrorCode::internal, "the system refused to start a thread: ", error.what());
  }
}

}  // namespace turbomind
