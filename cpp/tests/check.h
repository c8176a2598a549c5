// What must hold in a driver; the process ends with the place where it does not.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(cond)                                                  \
  do {                                                               \
    if (!(cond)) {                                                   \
      std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #cond); \
      std::exit(1);                                                  \
    }                                                                \
  } while (0)
