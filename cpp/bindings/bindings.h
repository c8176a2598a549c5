// Declarations that the files of the binding share. Each file binds one group of classes; module.cc
// lists them.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "core/error.h"
#include "core/text.h"
#include "engine/engine.h"
#include "linear/epilogue.h"
#include "model/model.h"

namespace turbomind::bindings {

namespace py = pybind11;

void bind_errors(py::module_& m);
void bind_config(py::module_& m);
void bind_options(py::module_& m);
void bind_builder(py::module_& m);
void bind_codes(py::module_& m);
void bind_request(py::module_& m);
void bind_engine(py::module_& m);
void bind_page_store(py::module_& m);
void bind_bench(py::module_& m);
void bind_gpu(py::module_& m);
void bind_testing(py::module_& m);

// Returns an instance of the Python class of `code`.
py::object make_exception(ErrorCode code, const std::string& message);

// Converts any sequence of integers, numpy arrays included. Throws TypeError for another type and
// InvalidRequest, with the index, for a value that does not fit 32 bits.
std::vector<int32_t> to_token_ids(py::handle value, const std::string& name);

// Converts "float32", "float16" or "bfloat16"; throws Error(code) naming `what` for any other name.
DType to_dtype(const std::string& name, const std::string& what, ErrorCode code);

// Converts "store", "add", "silu_mul", "gelu_mul" or "swiglu_mul"; throws Error(invalid_request)
// for any other name.
Epilogue to_epilogue(const std::string& name);

// Returns the enumerator of a name: their names in order.
template <typename Enum, size_t N>
Enum to_choice(const char* what, const std::string& name, const std::array<const char*, N>& names) {
  const auto it = std::find(names.begin(), names.end(), name);
  if (it == names.end())
    throw_error(ErrorCode::invalid_request, what, ": got '", name, "', expected ",
                one_of({names.begin(), names.end()}));
  return static_cast<Enum>(it - names.begin());
}

// A loaded model, until an engine takes it.
struct ModelRef {
  std::unique_ptr<Model> model;
  Model& get() const;
};

// A request, and the width its logits have.
struct RequestRef {
  std::shared_ptr<Request> request;
  int vocab = 0;
};

// Runs `f` without the interpreter's lock. `f` touches no Python object.
template <typename F>
auto without_gil(F&& f) {
  py::gil_scoped_release release;
  return std::forward<F>(f)();
}

template <typename T>
std::string expected_value() {
  if constexpr (std::is_same_v<T, bool>)
    return "True or False";
  else if constexpr (std::is_integral_v<T>)
    return std::string(std::is_signed_v<T> ? "an integer of " : "a non-negative integer of ") +
           std::to_string(8 * sizeof(T)) + " bits";
  else if constexpr (std::is_floating_point_v<T>)
    return "a number";
  else if constexpr (std::is_same_v<T, std::string>)
    return "a string";
  else if constexpr (std::is_same_v<T, std::vector<float>>)
    return "a list of numbers";
  else
    return "a struct of this module, or a list of them";
}

// Converts `value` to a T; throws TypeError with the field's name otherwise. Integers take no
// fractions, flags no integers.
template <typename T>
T to_field(py::handle value, const std::string& name) {
  py::detail::make_caster<T> caster;
  if (!caster.load(value, !std::is_integral_v<T>)) {
    throw py::type_error(name + ": expected " + expected_value<T>() + ", got " +
                         py::repr(value).template cast<std::string>());
  }
  return py::detail::cast_op<T>(std::move(caster));
}

// Binds a data member by value.
template <typename C, typename T>
void field(py::class_<C>& cls, const char* name, T C::* member) {
  const std::string full = py::cast<std::string>(cls.attr("__name__")) + "." + name;
  cls.def_property(
      name, [member](const C& self) { return self.*member; },
      [member, full](C& self, py::handle value) { self.*member = to_field<T>(value, full); });
}

}  // namespace turbomind::bindings
