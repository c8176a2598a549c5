// Lists for messages.
#pragma once

#include <string>
#include <vector>

namespace turbomind {

// Returns "a", "a or b", "a, b or c".
inline std::string one_of(const std::vector<std::string>& names) {
  std::string all;
  for (size_t i = 0; i < names.size(); ++i)
    all += (i == 0 ? "" : i + 1 < names.size() ? ", " : " or ") + names[i];
  return all;
}

}  // namespace turbomind
