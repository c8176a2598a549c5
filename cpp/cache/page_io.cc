#include "cache/page_io.h"

#include <cstring>

namespace turbomind {

void PageIo::read_pages(const std::vector<PageTransfer>& transfers) const {
  std::vector<uint8_t> whole;
  for (const PageTransfer& t : transfers) {
    if (t.parts.size() == 1) {
      read_page(t.group, t.page, t.count, t.parts[0].data);
      continue;
    }
    whole.resize(stored_page_bytes(t.group, t.count));
    read_page(t.group, t.page, t.count, whole.data());
    const uint8_t* from = whole.data();
    for (const PayloadPart& part : t.parts) {
      std::memcpy(part.data, from, part.bytes);
      from += part.bytes;
    }
  }
}

void PageIo::write_pages(const std::vector<PageTransfer>& transfers) {
  std::vector<uint8_t> whole;
  for (const PageTransfer& t : transfers) {
    if (t.parts.size() != 1) {
      whole.clear();
      for (const PayloadPart& part : t.parts)
        whole.insert(whole.end(), part.data, part.data + part.bytes);
    }
    const uint8_t* from = t.parts.size() == 1 ? t.parts[0].data : whole.data();
    write_page(t.group, t.page, t.count, from, t.stored);
  }
}

}  // namespace turbomind
