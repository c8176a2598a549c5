// The one exception type of the core. The binding maps each code to a Python class.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace turbomind {

enum class ErrorCode {
  invalid_request,  // an argument is wrong; the message has name, value and expected value
  context_full,     // the request can never fit the context or the page pool
  busy,             // the handle is generating
  not_found,        // no such handle
  model,            // config, checkpoint or non-finite arithmetic
  closed,           // the engine has been shut down
  internal,         // a bug or too little memory; the engine continues
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& what) : std::runtime_error(what), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

// throw_error(ErrorCode::model, "layer ", i, ": expected ", a, ", got ", b)
template <typename... Args>
[[noreturn]] void throw_error(ErrorCode code, const Args&... args) {
  std::ostringstream s;
  (s << ... << args);
  throw Error(code, s.str());
}

}  // namespace turbomind
