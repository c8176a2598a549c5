// Named cases of a test driver, and the check that each of them makes.
//
//   driver           runs every case
//   driver --list    prints the names of the cases, one a line
//   driver NAME...   runs the cases of these names; a NAME that is no whole name matches as a part
//
// The exit status is 0 when every case passes, 1 when one fails, 2 for a bad argument.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <vector>

namespace turbomind {

struct TestCase {
  std::string name;
  std::function<void()> run;
};

// Returns the name of the case that `function` is: "turbomind::test_many_tokens" -> "many_tokens".
inline std::string case_name(std::string function) {
  if (const size_t scope = function.rfind("::"); scope != std::string::npos)
    function.erase(0, scope + 2);
  for (const std::string prefix : {"test_", "check_"})
    if (function.rfind(prefix, 0) == 0) return function.substr(prefix.size());
  return function;
}

// The case that runs a function without arguments, by the function's name.
#define TM_CASE(function)                               \
  turbomind::TestCase {                                 \
    turbomind::case_name(#function), [] { function(); } \
  }

// Name of the case that runs now.
inline const char*& running_case() {
  static const char* name = "";
  return name;
}

// Ends the process with status 1 when `cond` does not hold. More arguments are printf's, and are
// printed with the place.
#define CHECK(cond, ...)                                                                          \
  do {                                                                                            \
    if (!(cond)) {                                                                                \
      std::printf("FAILED %s: %s:%d: %s ", turbomind::running_case(), __FILE__, __LINE__, #cond); \
      __VA_OPT__(std::printf(__VA_ARGS__);)                                                       \
      std::printf("\n");                                                                          \
      std::exit(1);                                                                               \
    }                                                                                             \
  } while (0)

// Runs the cases that `arguments` select, in their order, and returns the exit status. A case fails
// by CHECK, by an exception, or by a higher count in `failures`, where a driver counts them.
inline int run_cases(const std::vector<std::string>& arguments, const std::vector<TestCase>& cases,
                     const int* failures = nullptr) {
  const auto named = [&](const std::string& name) {
    return std::any_of(cases.begin(), cases.end(),
                       [&](const TestCase& c) { return c.name == name; });
  };
  const auto selects = [&](const std::string& argument, const TestCase& c) {
    return named(argument) ? c.name == argument : c.name.find(argument) != std::string::npos;
  };
  if (arguments.size() == 1 && arguments[0] == "--list") {
    for (const TestCase& c : cases) std::printf("%s\n", c.name.c_str());
    return 0;
  }
  for (const std::string& a : arguments)
    if (std::none_of(cases.begin(), cases.end(),
                     [&](const TestCase& c) { return selects(a, c); })) {
      std::fprintf(stderr, "case: got %s, expected a part of a name that --list prints\n",
                   a.c_str());
      return 2;
    }
  int failed = 0;
  for (const TestCase& c : cases) {
    if (!arguments.empty() && std::none_of(arguments.begin(), arguments.end(),
                                           [&](const std::string& a) { return selects(a, c); }))
      continue;
    running_case() = c.name.c_str();
    const int before = failures != nullptr ? *failures : 0;
    bool ok = true;
    try {
      c.run();
    } catch (const std::exception& e) {
      std::printf("%s: expected %s\n", c.name.c_str(), e.what());
      ok = false;
    }
    ok = ok && (failures == nullptr || *failures == before);
    std::printf("%s %s\n", ok ? "passed" : "FAILED", c.name.c_str());
    std::fflush(stdout);
    failed += !ok;
  }
  return failed != 0;
}

inline int run_cases(int argc, char** argv, const std::vector<TestCase>& cases,
                     const int* failures = nullptr) {
  return run_cases(std::vector<std::string>(argv + 1, argv + argc), cases, failures);
}

}  // namespace turbomind
