// Sets of element types, for checks of what a kernel or a format accepts.
#pragma once

#include <initializer_list>
#include <string>

#include "core/dtype.h"
#include "core/text.h"

namespace turbomind {

// A set of element types.
class DTypes {
 public:
  constexpr DTypes(std::initializer_list<DType> types) {
    for (DType t : types) bits_ |= 1u << static_cast<int>(t);
  }
  constexpr bool has(DType t) const { return (bits_ >> static_cast<int>(t) & 1) != 0; }
  // Returns the names in the order of DType, such as "float32 or bfloat16".
  std::string names() const {
    std::vector<std::string> all;
    for (int i = 0; i < kDTypeCount; ++i)
      if (has(static_cast<DType>(i))) all.push_back(kDTypes[i].name);
    return one_of(all);
  }

 private:
  uint32_t bits_ = 0;
};

}  // namespace turbomind
