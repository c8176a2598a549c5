// The interface of cuda/kernel.h for nvcc: thin wrappers, and the only inline PTX of the project.
// Include cuda/kernel.h instead.
#pragma once

#include <cuda_runtime.h>

#include "cuda/toolkit/launcher.h"

#define TM_KERNEL(max_threads, min_blocks) __global__ __launch_bounds__(max_threads, min_blocks)
#define TM_GRID_CONSTANT __grid_constant__
#define TM_DEVICE __device__ __forceinline__

namespace turbomind::TM_CUDA_NS {

template <typename T>
TM_DEVICE T* shared_memory() {
  extern __shared__ __align__(128) unsigned char dynamic_shared_memory[];
  return reinterpret_cast<T*>(dynamic_shared_memory);
}

TM_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

template <int kBytes>
struct Words;
template <>
struct Words<2> {
  using Type = unsigned short;
};
template <>
struct Words<4> {
  using Type = unsigned;
};
template <>
struct Words<8> {
  using Type = uint2;
};
template <>
struct Words<16> {
  using Type = uint4;
};

TM_DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
TM_DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// With the assumption the compiler emits ld.global and st.global, not generic accesses.
template <typename T>
TM_DEVICE T load(const T* p) {
  using W = typename Words<sizeof(T)>::Type;
  __builtin_assume(__isGlobal(p));
  const W words = *reinterpret_cast<const W*>(p);
  T value;
  memcpy(&value, &words, sizeof(T));
  return value;
}
template <typename T>
TM_DEVICE void store(T* p, std::type_identity_t<T> value) {
  using W = typename Words<sizeof(T)>::Type;
  __builtin_assume(__isGlobal(p));
  W words;
  memcpy(&words, &value, sizeof(T));
  *reinterpret_cast<W*>(p) = words;
}

template <typename T>
TM_DEVICE T load_constant(const T* p) {
  return load(p);
}

// Not .nc: a kernel may be resident before its predecessor has written the memory.
TM_DEVICE void load_words(const void* p, unsigned short& w) {
  asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(w) : "l"(p) : "memory");
}
TM_DEVICE void load_words(const void* p, unsigned& w) {
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(w) : "l"(p) : "memory");
}
TM_DEVICE void load_words(const void* p, uint2& w) {
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(w.x), "=r"(w.y)
               : "l"(p)
               : "memory");
}
TM_DEVICE void load_words(const void* p, uint4& w) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "l"(p)
               : "memory");
}
template <typename T>
TM_DEVICE T load_streaming(const T* p) {
  typename Words<sizeof(T)>::Type words;
  load_words(p, words);
  T value;
  memcpy(&value, &words, sizeof(T));
  return value;
}

// For cuda/device_wait.h: accesses that order those of this thread for threads of other devices.
TM_DEVICE void store_release_system(uint32_t* p, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
TM_DEVICE uint32_t load_acquire_system(const uint32_t* p) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
TM_DEVICE uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Kernels copy rows of at least 64 bytes and then their neighbours, so the second-level cache may
// fetch the whole line of 128 bytes.
TM_DEVICE void copy_async16(void* shared, const void* global, bool valid) {
  asm volatile(
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
      "l"(global), "r"(valid ? 16 : 0)
      : "memory");
}
TM_DEVICE void copy_constant16(void* shared, const void* global, bool valid) {
  copy_async16(shared, global, valid);
}
TM_DEVICE void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N>
TM_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

TM_DEVICE float to_float(Bf16 v) {
  return __uint_as_float(static_cast<unsigned>(v.bits) << 16);
}
TM_DEVICE float to_float(F16 v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.bits));
  return f;
}
template <typename T>
TM_DEVICE T from_float(float v) {
  static_assert(std::is_same_v<T, Bf16> || std::is_same_v<T, F16>);
  T t;
  if constexpr (std::is_same_v<T, Bf16>)
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(t.bits) : "f"(v));
  else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(t.bits) : "f"(v));
  return t;
}
template <typename T>
TM_DEVICE float2 unpack2(uint32_t v) {
  if constexpr (std::is_same_v<T, Bf16>)
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
  else
    return make_float2(to_float(T{static_cast<uint16_t>(v)}),
                       to_float(T{static_cast<uint16_t>(v >> 16)}));
}
template <typename T>
TM_DEVICE uint32_t pack2(float lo, float hi) {
  static_assert(std::is_same_v<T, Bf16> || std::is_same_v<T, F16>);
  uint32_t v;
  if constexpr (std::is_same_v<T, Bf16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
  return v;
}

template <typename T>
TM_DEVICE void mma16816(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(std::is_same_v<T, Bf16> || std::is_same_v<T, F16>);
  if constexpr (std::is_same_v<T, Bf16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

TM_DEVICE void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}
TM_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
TM_DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}
TM_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

TM_DEVICE float fma(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
TM_DEVICE float rsqrt(float v) {
  return ::rsqrtf(v);
}
TM_DEVICE float tanh(float v) {
  return ::tanhf(v);
}
TM_DEVICE float fast_exp2(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
TM_DEVICE float fast_exp(float v) {
  return fast_exp2(v * 1.4426950408889634f);
}
TM_DEVICE float max_number(float a, float b) {
  return ::fmaxf(a, b);
}

// Launches a kernel; an empty grid launches nothing. Throws Error(internal) with the kernel's name
// if the launch is refused.
template <auto kernel, typename Params>
void launch(StreamHandle stream, dim3 grid, int threads, size_t shared_bytes,
            const Params& params) {
  static_assert(std::is_trivially_copyable_v<Params> && sizeof(Params) <= 4096);
  static KernelSetup setup;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  launch_kernel({reinterpret_cast<const void*>(kernel), &params, stream, grid, threads,
                 shared_bytes, __PRETTY_FUNCTION__},
                setup);
}

}  // namespace turbomind::TM_CUDA_NS
