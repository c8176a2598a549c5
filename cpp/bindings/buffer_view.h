// Python buffers that C++ reads.
#pragma once

#include <string>

#include "bindings/bindings.h"
#include "linear/codes/code_source.h"

namespace turbomind::bindings {

// A contiguous, possibly read-only view of a buffer.
class BufferView {
 public:
  BufferView(py::handle object, const std::string& what) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) == 0) return;
    PyErr_Clear();
    throw_error(ErrorCode::model, what, ": expected a contiguous buffer, got ",
                std::string(Py_TYPE(object.ptr())->tp_name));
  }
  ~BufferView() { PyBuffer_Release(&view_); }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;
  const void* data() const { return view_.buf; }
  int64_t size() const { return view_.len; }

 private:
  Py_buffer view_{};
};

// A source of codes with the buffers that it is in.
template <typename Source>
struct InBuffers final : Source {
  using Source::Source;
  std::vector<std::unique_ptr<BufferView>> views;

  ByteSpan keep(const py::object& buffer, const char* name) {
    if (buffer.is_none()) return {};
    views.push_back(std::make_unique<BufferView>(buffer, name));
    return {static_cast<const uint8_t*>(views.back()->data()), views.back()->size()};
  }
};

}  // namespace turbomind::bindings
