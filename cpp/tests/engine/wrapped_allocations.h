// Asks failing_memory.h before each allocation. The driver is linked with --wrap for the functions
// below, so calls from the core and from the driver go through them; those inside of shared
// libraries do not. Include it in one file of a driver.
#pragma once

#include <sys/mman.h>
#include <sys/types.h>

#include <cerrno>
#include <cstddef>
#include <new>

#include "tests/engine/failing_memory.h"

extern "C" {
void* __real__Znwm(size_t bytes);
void* __wrap__Znwm(size_t bytes) {
  if (turbomind::fuzz::fails(turbomind::fuzz::Allocation::object)) throw std::bad_alloc();
  return __real__Znwm(bytes);
}
void* __real_mmap(void* at, size_t bytes, int protection, int flags, int file, off_t offset);
void* __wrap_mmap(void* at, size_t bytes, int protection, int flags, int file, off_t offset) {
  if (!turbomind::fuzz::fails(turbomind::fuzz::Allocation::mapping))
    return __real_mmap(at, bytes, protection, flags, file, offset);
  errno = ENOMEM;
  return MAP_FAILED;
}
}
