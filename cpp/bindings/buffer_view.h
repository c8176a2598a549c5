// A contiguous, possibly read-only view of a Python buffer.
#pragma once

#include <string>

#include "bindings/bindings.h"

namespace turbomind::bindings {

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

}  // namespace turbomind::bindings
