// Conversions from Python values that several files use.
#include <limits>

#include "bindings/bindings.h"

namespace turbomind::bindings {

std::vector<int32_t> to_token_ids(py::handle value, const std::string& name) {
  const auto wrong = [&](const std::string& where, py::handle seen) {
    return py::type_error(where + ": expected " +
                          (seen.is(value) ? "a sequence of token ids" : "an integer") + ", got " +
                          std::string(Py_TYPE(seen.ptr())->tp_name));
  };
  const bool text = PyUnicode_Check(value.ptr()) || PyBytes_Check(value.ptr());
  if (text || !PySequence_Check(value.ptr())) throw wrong(name, value);
  const auto items = py::reinterpret_steal<py::object>(
      PySequence_Fast(value.ptr(), "expected a sequence of token ids"));
  if (!items) throw py::error_already_set();
  // A list may change size while __index__ of an element runs, so its length is read every time.
  std::vector<int32_t> ids;
  ids.reserve(PySequence_Fast_GET_SIZE(items.ptr()));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.ptr()); ++i) {
    const auto item = py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(items.ptr(), i));
    const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(item.ptr()));
    if (!index) {
      PyErr_Clear();
      throw wrong(name + "[" + std::to_string(i) + "]", item);
    }
    int overflow = 0;
    const long long id = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (overflow || id < std::numeric_limits<int32_t>::min() ||
        id > std::numeric_limits<int32_t>::max()) {
      throw_error(ErrorCode::invalid_request, name, "[", i, "]: got ",
                  py::repr(index).cast<std::string>(), ", expected a token id of 32 bits");
    }
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

DType to_dtype(const std::string& name, const std::string& what, ErrorCode code) {
  for (int i = 0; i < kDTypeCount; ++i) {
    if (name == kDTypes[i].name) return static_cast<DType>(i);
  }
  throw_error(code, what, ": got '", name, "', expected 'float32', 'float16' or 'bfloat16'");
}

Model& ModelRef::get() const {
  if (!model) throw_error(ErrorCode::invalid_request, "model: it was given to an engine");
  return *model;
}

Epilogue to_epilogue(const std::string& name) {
  if (name == "store") return Epilogue::store;
  if (name == "add") return Epilogue::add;
  if (name == "silu_mul") return Epilogue::silu_mul;
  if (name == "gelu_mul") return Epilogue::gelu_mul;
  if (name == "swiglu_mul") return Epilogue::swiglu_mul;
  throw_error(ErrorCode::invalid_request, "epilogue: got '", name,
              "', expected 'store', 'add', 'silu_mul', 'gelu_mul' or 'swiglu_mul'");
}

}  // namespace turbomind::bindings
