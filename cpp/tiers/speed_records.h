// Speeds that engines on a page folder have measured, stored beside the pages, so that the next
// engine decides and predicts from its first request on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cost/step_time.h"
#include "cost/transfer_time.h"

namespace turbomind {

class Model;

// Speeds of one model on this machine.
struct SpeedRecord {
  StepTime::Fit steps;
  ReadSpeed disk;  // of one of several concurrent loads
  bool operator==(const SpeedRecord& o) const {
    return steps.ms == o.steps.ms && steps.most_tokens == o.steps.most_tokens &&
           disk.bytes_per_second == o.disk.bytes_per_second &&
           disk.seconds_per_read == o.disk.seconds_per_read;
  }
};

// The file "speeds" of a folder: a record with a checksum for each of the models that were used
// last, at most kMost. Damaged records are ignored. Any thread, several processes: of two
// concurrent writes one is lost.
class SpeedRecords {
 public:
  static constexpr size_t kMost = 32;

  SpeedRecords() = default;  // stores nothing
  SpeedRecords(const std::string& folder, uint64_t key) : folder_(folder), key_(key) {}
  // The key covers what speeds depend on: weights, numerics fingerprint and number of threads.
  SpeedRecords(const std::string& folder, Model& model);

  // Returns the record of this key; none when there is no valid one.
  std::optional<SpeedRecord> read() const;
  // Replaces the record; ignores errors of the disk.
  void write(const SpeedRecord& record) const;

 private:
  std::string folder_;
  uint64_t key_ = 0;
};

}  // namespace turbomind
