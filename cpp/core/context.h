// What every op gets: where it runs and with which threads.
#pragma once

#include "core/profiler.h"
#include "core/thread_pool.h"
#include "cpu/isa.h"

namespace turbomind {

struct Context {
  ThreadPool& pool;
  Isa isa;
  Profiler& profiler;
};

}  // namespace turbomind
