// TM_GPU_TABLE: finds the kernels that are compiled for a GpuKind. For .cc files that are compiled
// once.
#pragma once

#include "core/error.h"
#include "cuda/gpu.h"

#ifdef TM_HAVE_CUDA
#define TM_IF_CUDA(...) __VA_ARGS__
#else
#define TM_IF_CUDA(...)
#endif

// At namespace turbomind: declares the `extern const Table object` that each build of a *_cuda.cu
// defines in its namespace, and defines `static const Table& name(GpuKind)`, which throws
// Error(internal) for a kind that this build lacks.
#define TM_GPU_TABLE(Table, object, name)                                        \
  namespace cuda_emulated {                                                      \
  extern const Table object;                                                     \
  }                                                                              \
  TM_IF_CUDA(namespace cuda { extern const Table object; })                      \
  static const Table& name(GpuKind kind) {                                       \
    if (kind == GpuKind::emulated) return cuda_emulated::object;                 \
    TM_IF_CUDA(if (kind == GpuKind::cuda) return cuda::object;)                  \
    throw_error(ErrorCode::internal, "no kernels of kind ", gpu_kind_name(kind), \
                ": built without CUDA");                                         \
  }
