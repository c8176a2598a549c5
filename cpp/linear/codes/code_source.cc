#include "linear/codes/code_source.h"

#include <cstring>
#include <vector>

#include "core/error.h"

namespace turbomind {

void check_bytes(const char* name, const ByteSpan& span, int64_t bytes) {
  if (span.bytes != bytes)
    throw_error(ErrorCode::model, name, " has ", span.bytes, " bytes, expected ", bytes);
}

void check_columns(const ByteSpan& columns, int64_t cols, const CodeLayout& layout) {
  check_bytes("columns", columns, layout.ordered ? cols * 4 : 0);
  std::vector<bool> seen(layout.ordered ? cols : 0);
  for (size_t i = 0; i < seen.size(); ++i) {
    int32_t column;
    std::memcpy(&column, columns.data + i * 4, 4);
    if (column < 0 || column >= cols || seen[column])
      throw_error(ErrorCode::model, "columns has ", column, " at ", i, ", expected each of 0 to ",
                  cols - 1, " once");
    seen[column] = true;
  }
}

}  // namespace turbomind
