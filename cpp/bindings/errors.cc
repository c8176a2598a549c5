// Binds the exception classes and the translation of C++ exceptions to them.
#include <array>
#include <new>

#include "bindings/bindings.h"

namespace turbomind::bindings {
namespace {

constexpr size_t kCodes = static_cast<size_t>(ErrorCode::internal) + 1;

// Owned references that are never released, as the extension is never unloaded.
std::array<PyObject*, kCodes> classes{};

PyObject* class_of(ErrorCode code) {
  return classes[static_cast<size_t>(code)];
}

PyObject* add_class(py::module_& m, const char* name, PyObject* base, const char* doc) {
  const std::string full = "turbomind._C." + std::string(name);
  PyObject* cls = PyErr_NewExceptionWithDoc(full.c_str(), doc, base, nullptr);
  if (!cls) throw py::error_already_set();
  m.attr(name) = py::handle(cls);
  return cls;
}

void translate(std::exception_ptr p) {
  if (!p) return;
  try {
    std::rethrow_exception(p);
  } catch (const Error& e) {
    PyErr_SetString(class_of(e.code()), e.what());
  } catch (const std::bad_alloc&) {
    PyErr_SetString(class_of(ErrorCode::internal), "out of memory");
  } catch (const py::error_already_set&) {
    throw;
  } catch (const py::builtin_exception&) {
    throw;
  } catch (const std::exception& e) {
    PyErr_SetString(class_of(ErrorCode::internal), e.what());
  }
}

}  // namespace

void bind_errors(py::module_& m) {
  PyObject* base = add_class(m, "Error", PyExc_Exception, "Base of the core's errors.");
  const auto add = [&](ErrorCode code, const char* name, PyObject* parent, const char* doc) {
    return classes[static_cast<size_t>(code)] = add_class(m, name, parent, doc);
  };
  PyObject* invalid =
      add(ErrorCode::invalid_request, "InvalidRequest", base,
          "An argument is wrong; the message has its name, value and expected value.");
  add(ErrorCode::context_full, "ContextFull", invalid,
      "The request can never fit the context or the page pool.");
  add(ErrorCode::busy, "Busy", base, "The handle is generating.");
  add(ErrorCode::not_found, "NotFound", base, "No such handle, folder or hub repository.");
  add(ErrorCode::model, "ModelError", base,
      "A config or weight cannot be used, or arithmetic was not finite.");
  add(ErrorCode::closed, "EngineClosed", base, "The engine has been shut down.");
  add(ErrorCode::internal, "InternalError", base,
      "A bug, or too little memory or open files; the engine continues.");
  py::register_local_exception_translator(&translate);
}

py::object make_exception(ErrorCode code, const std::string& message) {
  return py::reinterpret_borrow<py::object>(class_of(code))(message);
}

}  // namespace turbomind::bindings
