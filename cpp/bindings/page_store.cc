// Binds the disk tier for use without an engine: lists, removal, checks, export and import.
#include <cmath>
#include <cstring>
#include <optional>

#include "bindings/bindings.h"
#include "cache/kv_layout.h"
#include "tiers/disk/disk_tier.h"
#include "tiers/disk/page_record.h"

namespace turbomind::bindings {
namespace {

py::bytes from_key(const BlockHash& key) {
  char bytes[sizeof(BlockHash)];
  std::memcpy(bytes, &key, sizeof(bytes));
  return py::bytes(bytes, sizeof(bytes));
}

BlockHash to_key(py::handle value, const std::string& name) {
  if (!PyBytes_Check(value.ptr()) ||
      PyBytes_GET_SIZE(value.ptr()) != static_cast<Py_ssize_t>(sizeof(BlockHash))) {
    throw_error(ErrorCode::invalid_request, name, ": got ", py::repr(value).cast<std::string>(),
                ", expected a key: bytes of length 16");
  }
  BlockHash key;
  std::memcpy(&key, PyBytes_AS_STRING(value.ptr()), sizeof(key));
  return key;
}

std::vector<BlockHash> to_keys(const py::iterable& values) {
  std::vector<BlockHash> keys;
  for (py::handle value : values)
    keys.push_back(to_key(value, "keys[" + std::to_string(keys.size()) + "]"));
  return keys;
}

// Returns the page's fields by name, its payload included.
py::dict from_page(const StoredPage& page, const std::vector<uint8_t>& payload) {
  py::dict out;
  out["key"] = from_key(page.key);
  out["parent"] = from_key(page.parent);
  out["group"] = page.group;
  out["fingerprint"] = page.fingerprint;
  out["numerics"] = page.numerics;
  out["first_head"] = page.first_head;
  out["heads"] = page.heads;
  out["token_ids"] = page.tokens;
  out["retention_priority"] = page.retention_priority;
  out["payload"] = py::bytes(reinterpret_cast<const char*>(payload.data()), payload.size());
  return out;
}

class PageStore {
 public:
  PageStore(const std::string& folder, int64_t quota, const std::string& numerics,
            int64_t segment) {
    DiskTier::Options options;
    options.folder = folder;
    options.quota = quota;
    options.numerics = numerics;
    options.segment = segment;
    tier_ = without_gil([&] { return std::make_shared<DiskTier>(options); });
  }

  py::dict stats() const {
    const auto tier = get();
    const auto [stats, segments, disk] =
        without_gil([&] { return std::tuple(tier->stats(), tier->segments(), tier->disk_use()); });
    py::dict out;
    out["pages"] = stats.pages;
    out["bytes"] = stats.bytes;
    out["quota"] = stats.quota;
    out["reads"] = stats.reads;
    out["writes"] = stats.writes;
    out["evicted"] = stats.evicted;
    out["damaged"] = stats.damaged;
    out["write_errors"] = stats.write_errors;
    out["segments"] = segments;
    out["disk_bytes"] = disk;
    return out;
  }

  bool contains(py::handle key, int group) const {
    return get()->find(to_key(key, "key"), group).has_value();
  }

  int64_t bytes_of(const py::iterable& keys) const { return get()->bytes_of(to_keys(keys)); }

  py::list pages() const {
    py::list out;
    for (const PageRef& ref : get()->pages())
      out.append(py::make_tuple(from_key(ref.key), ref.group));
    return out;
  }

  py::object find_prefix(py::handle parent, py::handle token_ids, int group) const {
    const auto tokens = to_token_ids(token_ids, "token_ids");
    int shared = 0;
    const auto ref = get()->find_prefix(to_key(parent, "parent"), group, tokens.data(),
                                        static_cast<int>(tokens.size()), &shared);
    if (!ref) return py::none();
    return py::make_tuple(from_key(ref->key), shared);
  }

  py::object read(py::handle key, int group) const {
    const auto tier = get();
    const auto ref = tier->find(to_key(key, "key"), group);
    if (!ref) return py::none();
    StoredPage page;
    std::vector<uint8_t> payload(ref->payload_bytes);
    const bool good = without_gil([&] { return tier->read(*ref, &page, payload.data()); });
    return good ? py::object(from_page(page, payload)) : py::none();
  }

  bool verify(py::handle key, int group) const {
    const auto tier = get();
    const auto ref = tier->find(to_key(key, "key"), group);
    return ref && without_gil([&] { return tier->verify(*ref); });
  }

  std::vector<int> groups(py::handle key) const { return get()->groups(to_key(key, "key")); }

  bool write(py::handle parent, py::handle token_ids, const py::bytes& payload, int group,
             const std::string& fingerprint, const std::string& numerics, int first_head, int heads,
             float retention_priority) const {
    StoredPage page;
    page.parent = to_key(parent, "parent");
    page.tokens = to_token_ids(token_ids, "token_ids");
    page.key = next_key(page.parent, page.tokens.data(), static_cast<int>(page.tokens.size()));
    page.group = group;
    page.fingerprint = fingerprint;
    page.numerics = numerics;
    page.first_head = first_head;
    page.heads = heads;
    page.retention_priority = retention_priority;
    char* data = nullptr;
    Py_ssize_t size = 0;
    if (PyBytes_AsStringAndSize(payload.ptr(), &data, &size) != 0) throw py::error_already_set();
    page.payload_bytes = static_cast<size_t>(size);
    if (!valid_page(page)) {
      throw_error(
          ErrorCode::invalid_request, "page: got ", page.tokens.size(), " tokens, ", size,
          " bytes, group ", group, ", heads ", first_head, "+", heads, ", retention_priority ",
          retention_priority, "; expected 1 to ", kPageTokens, " tokens, 1 to ", kMaxPayloadBytes,
          " bytes, numbers of at least 0, a finite retention_priority, and a fingerprint and "
          "numerics of at most 255 bytes");
    }
    const auto tier = get();
    return without_gil([&] { return tier->write(page, reinterpret_cast<const uint8_t*>(data)); });
  }

  void touch(const py::iterable& keys, float retention_priority) const {
    if (!std::isfinite(retention_priority)) {
      throw_error(ErrorCode::invalid_request, "retention_priority: got ", retention_priority,
                  ", expected a finite number");
    }
    const auto list = to_keys(keys);
    const auto tier = get();
    without_gil([&] { tier->touch(list, retention_priority); });
  }

  void remove(const py::iterable& keys) const {
    const auto list = to_keys(keys);
    const auto tier = get();
    without_gil([&] { tier->remove(list); });
  }

  void retain_only(const py::iterable& keys) const {
    const auto list = to_keys(keys);
    const auto tier = get();
    without_gil([&] { tier->retain_only(list); });
  }

  int64_t evict(int64_t bytes, const py::iterable& needed) const {
    const auto list = to_keys(needed);
    const auto tier = get();
    return without_gil([&] { return tier->evict_bytes(bytes, list); });
  }

  void refresh() const {
    const auto tier = get();
    without_gil([&] { tier->refresh(); });
  }
  void sync() const {
    const auto tier = get();
    without_gil([&] { tier->sync(); });
  }
  void maintain() const {
    const auto tier = get();
    without_gil([&] { tier->maintain(); });
  }

  void close() {
    auto tier = std::move(tier_);
    tier_ = nullptr;
    without_gil([&] { tier.reset(); });
  }

 private:
  std::shared_ptr<DiskTier> get() const {
    if (!tier_) throw_error(ErrorCode::closed, "the page store has been closed");
    return tier_;
  }

  std::shared_ptr<DiskTier> tier_;
};

py::bytes root(const std::string& fingerprint, const std::string& salt, int adapter) {
  return from_key(root_key(fingerprint, adapter, salt));
}

py::bytes page_key(py::handle parent, py::handle token_ids) {
  const auto tokens = to_token_ids(token_ids, "token_ids");
  return from_key(
      next_key(to_key(parent, "parent"), tokens.data(), static_cast<int>(tokens.size())));
}

py::list page_keys(const std::string& fingerprint, py::handle token_ids, const std::string& salt,
                   int adapter) {
  const auto tokens = to_token_ids(token_ids, "token_ids");
  BlockHash key = root_key(fingerprint, adapter, salt);
  py::list keys;
  for (size_t i = 0; i < tokens.size(); i += kPageTokens) {
    const size_t count = std::min(size_t{kPageTokens}, tokens.size() - i);
    key = next_key(key, tokens.data() + i, static_cast<int>(count));
    keys.append(from_key(key));
  }
  return keys;
}

}  // namespace

void bind_page_store(py::module_& m) {
  py::class_<PageStore>(m, "PageStore",
                        "The disk tier of pages, wrapped by turbomind.engine.pages.PageStore.")
      .def(py::init<const std::string&, int64_t, const std::string&, int64_t>(), py::arg("folder"),
           py::arg("quota"), py::arg("numerics"), py::arg("segment"))
      .def("stats", &PageStore::stats, "Returns counters since opening and the sizes of the store.")
      .def("contains", &PageStore::contains, py::arg("key"), py::arg("group"),
           "Returns True if the store has the page.")
      .def("bytes_of", &PageStore::bytes_of, py::arg("keys"),
           "Returns the bytes of these pages, all groups together.")
      .def("pages", &PageStore::pages,
           "Returns (key, group) of each page, in the order of the disk.")
      .def(
          "find_prefix", &PageStore::find_prefix, py::arg("parent"), py::arg("token_ids"),
          py::arg("group"),
          "Returns (key, shared tokens) of the page after `parent` with the longest common prefix, "
          "or None.")
      .def("groups", &PageStore::groups, py::arg("key"), "Returns the groups that have the page.")
      .def("verify", &PageStore::verify, py::arg("key"), py::arg("group"),
           "Reads the whole page. Returns False if it is missing or damaged.")
      .def("read", &PageStore::read, py::arg("key"), py::arg("group"),
           "Returns the page's fields and payload, or None if it is missing or damaged.")
      .def("write", &PageStore::write, py::arg("parent"), py::arg("token_ids"), py::arg("payload"),
           py::arg("group"), py::arg("fingerprint"), py::arg("numerics"), py::arg("first_head"),
           py::arg("heads"), py::arg("retention_priority"),
           "Writes a page. Returns False if the disk or quota has no room.")
      .def("touch", &PageStore::touch, py::arg("keys"), py::arg("retention_priority"),
           "Sets the retention priority and marks the pages as used now.")
      .def("remove", &PageStore::remove, py::arg("keys"),
           "Removes pages of all groups, and all pages that follow them.")
      .def("retain_only", &PageStore::retain_only, py::arg("keys"),
           "Removes all pages but these and the partial pages that follow them.")
      .def("evict", &PageStore::evict, py::arg("bytes"), py::arg("needed"),
           "Evicts the least valuable pages, but none of these keys. Returns the bytes removed.")
      .def("refresh", &PageStore::refresh, "Reads what other processes have written and removed.")
      .def("sync", &PageStore::sync, "Makes written pages durable (fsync).")
      .def("maintain", &PageStore::maintain, "Evicts and compacts for a bounded time.")
      .def("close", &PageStore::close, "Releases the segment and saves the times of use.");
  m.def("root_key", &root, py::arg("fingerprint"), py::arg("salt"), py::arg("adapter"),
        "Returns the parent key of the first page of a sequence, 16 bytes.");
  m.def("page_key", &page_key, py::arg("parent"), py::arg("token_ids"),
        "Returns the block hash of a page, 16 bytes.");
  m.def("page_keys", &page_keys, py::arg("fingerprint"), py::arg("token_ids"), py::arg("salt"),
        py::arg("adapter"),
        "Returns the keys of the full pages, then that of a partial last page.");
}

}  // namespace turbomind::bindings
