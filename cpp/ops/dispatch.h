// How every op chooses its kernels. An op's .cc checks its arguments once, its types among them,
// and then calls dispatch() with one function for the CPU and one for a GPU. These take the kernels
// that were compiled for the context's instruction set (TM_KERNEL_TABLE, cpu/isa_dispatch.h) or
// kind of GPU (TM_GPU_TABLE, cuda/dispatch.h).
#pragma once

#include "core/context.h"
#include "core/dtype_set.h"

namespace turbomind {

// Calls the backend of the context's device: cpu(ctx, args...) or gpu(*ctx.gpu, args...).
template <typename Cpu, typename GpuFn, typename... Args>
void dispatch(Context& ctx, Cpu cpu, GpuFn gpu, Args&&... args) {
  if (ctx.gpu)
    gpu(*ctx.gpu, args...);
  else
    cpu(ctx, args...);
}

// The element types that an op takes for one of its tensors, per device.
struct OpTypes {
  const char* op;
  const char* tensor;
  DTypes cpu;
  DTypes gpu;

  DTypes of(const Context& ctx) const { return ctx.gpu ? gpu : cpu; }
};

// Throws Error(internal) naming the op, the type seen and the types accepted, unless the context's
// device has kernels for `seen`.
void check_dtype(const Context& ctx, const OpTypes& types, DType seen);

}  // namespace turbomind
