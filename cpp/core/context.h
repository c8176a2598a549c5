// The context of every op: the device that it runs on and its threads.
#pragma once

#include "core/isa.h"
#include "core/profiler.h"
#include "core/thread_pool.h"
#include "core/tile_order.h"

namespace turbomind {

class GpuContext;

struct Context {
  ThreadPool& pool;
  Isa isa;
  Profiler& profiler;
  GpuContext* gpu = nullptr;  // where ops run and their pointers lead; null: on the CPU
  TileOrder tile_order = {};
};

}  // namespace turbomind
