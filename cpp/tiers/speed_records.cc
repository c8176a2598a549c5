#include "tiers/speed_records.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <vector>

#include "core/xxh64.h"
#include "model/model.h"

namespace turbomind {

namespace {

constexpr uint64_t kVersion = 1;                                              // seeds the checksum
constexpr double kSlowestRead = 1e4, kFastestRead = 1e12, kLongestRead = 10;  // bytes/s, seconds

struct Record {
  uint64_t key = 0;
  double ms[StepTime::kTerms] = {};
  int64_t most_tokens = 0;
  double bytes_per_second = 0, seconds_per_read = 0;
  uint64_t checksum = 0;
};
static_assert(sizeof(Record) == 64, "no byte of a record is left unset");

uint64_t checksum_of(const Record& record) {
  return xxh64(&record, sizeof(Record) - sizeof(record.checksum), kVersion);
}

Record record_of(uint64_t key, const SpeedRecord& speeds) {
  Record record;
  record.key = key;
  for (int i = 0; i < StepTime::kTerms; ++i) record.ms[i] = speeds.steps.ms[i];
  record.most_tokens = speeds.steps.most_tokens;
  record.bytes_per_second = speeds.disk.bytes_per_second;
  record.seconds_per_read = speeds.disk.seconds_per_read;
  record.checksum = checksum_of(record);
  return record;
}

SpeedRecord speeds_of(const Record& record) {
  SpeedRecord speeds;
  for (int i = 0; i < StepTime::kTerms; ++i) speeds.steps.ms[i] = record.ms[i];
  speeds.steps.most_tokens = record.most_tokens;
  speeds.disk = {record.bytes_per_second, record.seconds_per_read};
  return speeds;
}

bool sound(const Record& r) {
  return r.checksum == checksum_of(r) && r.bytes_per_second >= kSlowestRead &&
         r.bytes_per_second <= kFastestRead && r.seconds_per_read >= 0 &&
         r.seconds_per_read <= kLongestRead;
}

// Returns the valid records of the file, the newest first.
std::vector<Record> records(const std::string& path) {
  std::vector<Record> found(SpeedRecords::kMost);
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  const ssize_t got = fd >= 0 ? ::read(fd, found.data(), found.size() * sizeof(Record)) : 0;
  if (fd >= 0) close(fd);
  found.resize(got > 0 ? static_cast<size_t>(got) / sizeof(Record) : 0);
  std::erase_if(found, [](const Record& r) { return !sound(r); });
  return found;
}

uint64_t key_of(Model& model) {
  const std::string& weights = model.fingerprint();
  const std::string& numerics = model.numerics_fingerprint();
  const auto threads = static_cast<uint64_t>(model.context().pool.size());
  const uint64_t key = xxh64(weights.data(), weights.size(), threads);
  return xxh64(numerics.data(), numerics.size(), key);
}

}  // namespace

SpeedRecords::SpeedRecords(const std::string& folder, Model& model)
    : SpeedRecords(folder, key_of(model)) {}

std::optional<SpeedRecord> SpeedRecords::read() const {
  if (folder_.empty()) return std::nullopt;
  for (const Record& record : records(folder_ + "/speeds"))
    if (record.key == key_) return speeds_of(record);
  return std::nullopt;
}

void SpeedRecords::write(const SpeedRecord& record) const {
  if (folder_.empty()) return;
  const std::string path = folder_ + "/speeds", made = path + ".new";
  std::vector<Record> all = records(path);
  std::erase_if(all, [this](const Record& r) { return r.key == key_; });
  all.insert(all.begin(), record_of(key_, record));
  if (all.size() > kMost) all.resize(kMost);
  const int fd =
      open(made.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
  if (fd < 0) return;
  const size_t bytes = all.size() * sizeof(Record);
  const bool whole = ::write(fd, all.data(), bytes) == static_cast<ssize_t>(bytes);
  close(fd);
  if (!whole || std::rename(made.c_str(), path.c_str()) != 0) unlink(made.c_str());
}

}  // namespace turbomind
