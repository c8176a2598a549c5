// How a mixer declares its weight slots: their names, shapes, formats and sizes, and where it finds
// each.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "linear/weight_format.h"
#include "model/config.h"
#include "model/parallel/cut.h"

namespace turbomind {

// A place for one weight of a model.
struct SlotSpec {
  std::string name;
  int64_t rows = 0;
  int64_t cols = 0;      // 1 for vectors
  bool linear = false;   // packed in the weight format; otherwise a float32 vector
  bool gate_up = false;  // set with segments gate then up; stored in alternating blocks of 16 rows
  std::string format;    // name of the weight format
  size_t bytes = 0;      // packed, padding included
};

// A slot of one rank. `spec` and `format` are those of the whole model.
struct Slot {
  SlotSpec spec;
  LinearWeight* linear = nullptr;        // linear slots
  const float** vector = nullptr;        // vector slots
  const WeightFormat* format = nullptr;  // linear slots
  Cut cut = Cut::none;
  SlotPart part;                              // what the rank has; no rows: nothing
  const WeightFormat* part_format = nullptr;  // linear slots
  size_t bytes = 0;                           // of the part, packed
  size_t offset = 0;                          // in the arena
  int64_t packed_rows = 0;                    // of the part
  bool filled = false;
};

// The slots of a model in the order in which they are declared.
class SlotList {
 public:
  SlotList(const ModelConfig& config, WeightPlace place, Rank rank)
      : config_(config), place_(place), rank_(rank) {}
  // A matrix that `w` will refer to; rows and columns are those of the whole model. `gate_up`: see
  // SlotSpec. Throws Error(invalid_request) for a format that the place does not have.
  void add_linear(const std::string& name, LinearWeight* w, Cut cut, int64_t rows, int64_t cols,
                  bool gate_up = false);
  // Matrices `prefix`0.`name` and so on. Throws Error(model) where they have several formats.
  void add_group(const std::string& prefix, const std::string& name, int count, WeightGroup* group,
                 Cut cut, int64_t rows, int64_t cols, bool gate_up = false);
  // Biases of a group, `prefix`0.`name` and so on.
  void add_biases(const std::string& prefix, const std::string& name, int count, WeightGroup* group,
                  Cut cut, int64_t rows, bool gate_up = false);
  void add_vector(const std::string& name, const float** v, Cut cut, int64_t rows,
                  bool gate_up = false);
  std::vector<Slot> take() { return std::move(slots_); }

 private:
  void take_part(Slot& slot, Cut cut) const;

  const ModelConfig& config_;
  const WeightPlace place_;
  const Rank rank_;
  std::vector<Slot> slots_;
};

}  // namespace turbomind
