#include "cost/transfer_time.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "core/memory.h"

namespace turbomind {

namespace {

constexpr double kForget = 0.7;                       // per later load of the same size
constexpr double kFirstSizes[] = {1 << 16, 1 << 24};  // bytes of loads assumed from the first speed
constexpr double kFirstWeight = 0.05;                 // of each, against the latest real one
constexpr int64_t kTrusted = 4;  // loads after which one that differs greatly is an outlier
constexpr double kOutlier =
    4.0;  // a load counts at most as this many times the prediction, or as its inverse
constexpr double kLongestStep = -0.8;    // of a logarithm; the fitted values stay positive
constexpr double kUnpacked = 2.5e9;      // bytes/s that a core verifies and unpacks, about
constexpr double kLeastPerByte = 1e-12;  // seconds: nothing is faster than 1 TB/s

// Weighted sums of the normal equations of t = a + b n.
struct Sums {
  double w = 0, n = 0, nn = 0, t = 0, nt = 0;
  void add(double weight, double bytes, double seconds) {
    w += weight;
    n += weight * bytes;
    nn += weight * bytes * bytes;
    t += weight * seconds;
    nt += weight * bytes * seconds;
  }
};

// Fixed cost and seconds per byte, both at least 0: a fit on the border where the free one is not.
ReadSpeed solve(const Sums& s) {
  const double determinant = s.w * s.nn - s.n * s.n;
  double fixed = 0, per_byte = s.nt / s.nn;
  if (determinant > 1e-12 * s.w * s.nn) {
    fixed = (s.t * s.nn - s.n * s.nt) / determinant;
    per_byte = (s.w * s.nt - s.n * s.t) / determinant;
  }
  if (fixed < 0) fixed = 0, per_byte = s.nt / s.nn;
  if (per_byte < kLeastPerByte) fixed = s.t / s.w, per_byte = kLeastPerByte;
  return {1 / per_byte, fixed};
}

double seconds_of(const ReadSpeed& speed, double bytes) {
  return speed.seconds_per_read + bytes / speed.bytes_per_second;
}

}  // namespace

TransferTime::TransferTime(const ReadSpeed& first) : first_(first), speed_(first) {}

double TransferTime::predict(int64_t bytes) const {
  return bytes > 0 ? seconds_of(speed_, static_cast<double>(bytes)) : 0;
}

void TransferTime::observe(int64_t bytes, double seconds) {
  if (bytes <= 0 || !(seconds > 0) || !std::isfinite(seconds)) return;
  if (observed_ >= kTrusted) {
    const double expected = predict(bytes);
    seconds = std::clamp(seconds, expected / kOutlier, expected * kOutlier);
  }
  const size_t size = std::bit_width(static_cast<uint64_t>(bytes)) / 2;
  Latest& latest = by_size_[std::min(size, by_size_.size() - 1)];
  auto& loads = latest.loads;
  latest.count = std::min(latest.count + 1, kLatest);
  std::move_backward(loads.begin(), loads.begin() + latest.count - 1, loads.begin() + latest.count);
  loads.front() = {static_cast<double>(bytes), seconds};
  ++observed_;
  refit();
}

// Calls visit(load, weight) for the latest loads of every size.
template <typename F>
void TransferTime::each_load(F&& visit) const {
  for (const Latest& latest : by_size_) {
    double weight = 1;
    for (size_t i = 0; i < latest.count; ++i) visit(latest.loads[i], weight), weight *= kForget;
  }
}

void TransferTime::refit() {
  // Sizes without loads take their time from the first speed, scaled by how far that was off for
  // the loads there are.
  double total = 0, logs = 0;
  each_load([&](const Load& load, double weight) {
    total += weight;
    logs += weight * std::log(load.seconds / seconds_of(first_, load.bytes));
  });
  const double scale = std::exp(logs / total);
  ReadSpeed fit{first_.bytes_per_second / scale, first_.seconds_per_read * scale};
  const ReadSpeed guess = fit;
  // Gauss-Newton on squared logarithms: twice and half as long are equal errors, so the fit follows
  // a medium that becomes slow as soon as one that becomes fast.
  for (int round = 0; round < 8; ++round) {
    Sums sums;
    const auto add = [&](const Load& load, double weight) {
      const double expected = seconds_of(fit, load.bytes);
      const double log = std::max(std::log(load.seconds / expected), kLongestStep);
      sums.add(weight / (expected * expected), load.bytes, expected * (1 + log));
    };
    for (double bytes : kFirstSizes) add({bytes, seconds_of(guess, bytes)}, kFirstWeight);
    each_load(add);
    fit = solve(sums);
  }
  speed_ = fit;
}

double compute_seconds(const StepTime& step_time, int64_t tokens, int64_t past, int64_t chunk,
                       double first_speed) {
  chunk = std::max<int64_t>(chunk, 1);
  double ms = 0;
  for (int64_t done = 0; done < tokens; done += chunk) {
    StepCost cost;
    cost.add(std::min(chunk, tokens - done), past + done);
    ms += step_time.predict(cost);
  }
  return ms > 0 ? ms / 1000 : static_cast<double>(std::max<int64_t>(tokens, 0)) / first_speed;
}

ReadSpeed load_speed(const ReadSpeed& medium, int together) {
  const double seconds = together / medium.bytes_per_second + 1 / kUnpacked;
  return {1 / seconds, medium.seconds_per_read};
}

namespace {

constexpr size_t kProbeBytes = 8 << 20, kProbeRead = 1 << 20, kShortRead = 4096;
constexpr size_t kLeastReads = 3;  // one may be delayed
constexpr double kProbeSeconds = 0.25;

// An unnamed file.
class ProbeFile {
 public:
  explicit ProbeFile(const std::string& folder) {
    std::string name = folder + "/.probe-XXXXXX";
    descriptor_ = mkostemp(name.data(), O_CLOEXEC);
    if (descriptor_ < 0) return;
#ifdef O_DIRECT
    direct_ = open(name.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
#endif
    unlink(name.c_str());
  }
  ~ProbeFile() {
    if (descriptor_ >= 0) close(descriptor_);
    if (direct_ >= 0) close(direct_);
  }
  ProbeFile(const ProbeFile&) = delete;
  ProbeFile& operator=(const ProbeFile&) = delete;

  bool fill(const uint8_t* data) {
    size_t done = 0;
    while (descriptor_ >= 0 && done < kProbeBytes) {
      const ssize_t n = write(descriptor_, data + done, kProbeBytes - done);
      if (n <= 0) return false;
      done += static_cast<size_t>(n);
    }
    if (descriptor_ < 0 || fsync(descriptor_) != 0) return false;
#ifdef POSIX_FADV_DONTNEED
    posix_fadvise(descriptor_, 0, 0, POSIX_FADV_DONTNEED);
#endif
    return true;
  }

  bool read_at(size_t at, uint8_t* data, size_t bytes) {
    const auto whole = [&](int descriptor) {
      return descriptor >= 0 &&
             pread(descriptor, data, bytes, static_cast<off_t>(at)) == static_cast<ssize_t>(bytes);
    };
    return whole(direct_) || whole(descriptor_);  // not every file system supports O_DIRECT
  }

 private:
  int descriptor_ = -1, direct_ = -1;
};

}  // namespace

std::optional<ReadSpeed> probe_read_speed(const std::string& folder) {
  using Clock = std::chrono::steady_clock;
  HugeBuffer data(kProbeBytes);  // aligned, as O_DIRECT requires
  uint64_t x = 1;                // random bits: a medium that compresses gains nothing
  for (size_t i = 0; i < kProbeBytes / 8; ++i)
    data.as<uint64_t>()[i] = x = x * 6364136223846793005u + 1442695040888963407u;
  ProbeFile file(folder);
  if (!file.fill(data.data())) return std::nullopt;
  const auto begin = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  const auto timed = [&](size_t at, size_t bytes) {
    const double before = elapsed();
    return file.read_at(at, data.data(), bytes) ? elapsed() - before : -1;
  };
  std::vector<double> lengthy, brief;
  for (size_t at = 0; at < kProbeBytes; at += kProbeRead) {
    if (lengthy.size() >= kLeastReads && elapsed() > kProbeSeconds) break;
    lengthy.push_back(timed(at, kProbeRead));
    if (lengthy.back() <= 0) return std::nullopt;
  }
  for (size_t i = 0; i < 8 && elapsed() < kProbeSeconds; ++i) {
    brief.push_back(timed((i * 5 % 8) * kProbeRead + 3 * kShortRead, kShortRead));
    if (brief.back() <= 0) return std::nullopt;
  }
  const auto fast = [](std::vector<double>& v) {  // the second fastest of eight
    std::nth_element(v.begin(), v.begin() + v.size() / 8, v.end());
    return v[v.size() / 8];
  };
  const double read = fast(lengthy), fixed = brief.empty() ? 0 : fast(brief);
  return ReadSpeed{kProbeRead / std::max(read - fixed, read / 10), fixed};
}

}  // namespace turbomind
