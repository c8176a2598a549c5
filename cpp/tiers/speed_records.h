// What engines on a page folder have measured, kept beside the pages, so that the first decisions
// and predictions of the next one are not blind.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cost/step_time.h"
#include "cost/transfer_time.h"

namespace turbomind {

class Model;

// Of one model, as it is computed here.
struct SpeedRecord {
  StepTime::Fit steps;
  ReadSpeed disk;  // of one load among others
  bool operator==(const SpeedRecord& o) const {
    return steps.ms == o.steps.ms && steps.most_tokens == o.steps.most_tokens &&
           disk.bytes_per_second == o.disk.bytes_per_second &&
           disk.seconds_per_read == o.disk.seconds_per_read;
  }
};

// The file "speeds" of a folder: a record with a checksum for each of the models that were used
// last, at most kMost. It costs nothing to lose; what is damaged is not there. Any thread, several
// processes: of two that write at once one is forgotten.
class SpeedRecords {
 public:
  static constexpr size_t kMost = 32;

  SpeedRecords() = default;  // remembers nothing
  SpeedRecords(const std::string& folder, uint64_t key) : folder_(folder), key_(key) {}
  // The key is of what the speeds depend on: the weights, who computes, and on how many threads.
  SpeedRecords(const std::string& folder, Model& model);

  std::optional<SpeedRecord> read() const;
  void write(const SpeedRecord& note) const;  // says nothing when the disk refuses

 private:
  std::string folder_;
  uint64_t key_ = 0;
};

}  // namespace turbomind
