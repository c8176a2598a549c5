// The interface of cuda/kernel.h for the emulator. Include cuda/kernel.h instead.
#pragma once

#include <algorithm>
#include <string>

#include "core/dtype.h"
#include "cuda/emulator.h"
#include "cuda/kernel_name.h"

#define TM_KERNEL(max_threads, min_blocks)
#define TM_GRID_CONSTANT
#define TM_DEVICE inline

#define threadIdx (::turbomind::emulator::current_lane->thread_index)
#define blockIdx (::turbomind::emulator::current_lane->block->index)
#define blockDim (::turbomind::emulator::current_lane->block->threads)
#define gridDim (::turbomind::emulator::current_lane->block->grid)

namespace turbomind::TM_CUDA_NS {

using dim3 = emulator::Dim3;

#define TM_EMULATED_VECTORS(type, name)                           \
  struct alignas(2 * sizeof(type)) name##2 {                      \
    type x, y;                                                    \
  };                                                              \
  struct alignas(4 * sizeof(type)) name##4 {                      \
    type x, y, z, w;                                              \
  };                                                              \
  inline name##2 make_##name##2(type x, type y) {                 \
    return {x, y};                                                \
  }                                                               \
  inline name##4 make_##name##4(type x, type y, type z, type w) { \
    return {x, y, z, w};                                          \
  }
TM_EMULATED_VECTORS(unsigned, uint)
TM_EMULATED_VECTORS(int, int)
TM_EMULATED_VECTORS(float, float)
#undef TM_EMULATED_VECTORS

using std::max;
using std::min;

template <typename To, typename From>
inline To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float v) {
  return same_bits<unsigned>(v);
}
inline float __uint_as_float(unsigned v) {
  return same_bits<float>(v);
}
inline int __float_as_int(float v) {
  return same_bits<int>(v);
}
inline float __int_as_float(int v) {
  return same_bits<float>(v);
}
inline int __popc(unsigned v) {
  return __builtin_popcount(v);
}
inline int __ffs(int v) {
  return __builtin_ffs(v);
}
inline int __clz(int v) {
  return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v));
}

inline void __syncthreads() {
  emulator::sync_block();
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulator::check_mask(mask);
  emulator::sync_warp();
}

namespace shuffles {
template <typename T>
T from_lane(unsigned mask, T value, int source) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  emulator::check_mask(mask);
  T result;
  emulator::shuffle(&value, &result, sizeof(T), source);
  return result;
}
inline int lane() {
  return static_cast<int>(threadIdx.x % 32);
}
}  // namespace shuffles

// Shuffles among groups of `width` lanes, a power of two.
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return shuffles::from_lane(mask, value,
                             (shuffles::lane() & ~(width - 1)) | (source & (width - 1)));
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int lane = shuffles::lane(), source = lane ^ bits;
  return shuffles::from_lane(mask, value, source / width > lane / width ? lane : source);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = shuffles::lane(), source = lane - static_cast<int>(delta);
  return shuffles::from_lane(mask, value, source < (lane & ~(width - 1)) ? lane : source);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = shuffles::lane(), source = lane + static_cast<int>(delta);
  return shuffles::from_lane(mask, value, source > (lane | (width - 1)) ? lane : source);
}
inline unsigned __ballot_sync(unsigned mask, bool vote) {
  emulator::check_mask(mask);
  return emulator::ballot(vote);
}
inline bool __any_sync(unsigned mask, bool vote) {
  return __ballot_sync(mask, vote) != 0;
}
inline bool __all_sync(unsigned mask, bool vote) {
  return __ballot_sync(mask, vote) == 0xffffffffu;
}

template <typename T>
T* shared_memory() {
  return reinterpret_cast<T*>(emulator::current_lane->block->shared);
}

inline void wait_for_previous() {
  emulator::current_lane->waited = true;
}
inline void let_next_start() {}  // kernels run one after another

template <typename T>
T load_constant(const T* p) {
  static_assert(std::is_trivially_copyable_v<T>);
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  emulator::count_constant_load(p, sizeof(T));
  T value;
  std::memcpy(&value, static_cast<const void*>(p), sizeof(T));
  return value;
}
template <typename T>
T load(const T* p) {
  static_assert(std::is_trivially_copyable_v<T>);
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  emulator::count_load(p, sizeof(T));
  T value;
  emulator::load_device(&value, p, sizeof(T));
  return value;
}
template <typename T>
T load_streaming(const T* p) {
  return load(p);
}
template <typename T>
void store(T* p, std::type_identity_t<T> value) {
  static_assert(std::is_trivially_copyable_v<T>);
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  emulator::count_store(p, sizeof(T));
  emulator::store_device(p, &value, sizeof(T));
}

inline void copy_async16(void* shared, const void* global, bool valid) {
  uint4 bytes{};
  if (valid) bytes = load(static_cast<const uint4*>(global));
  emulator::copy_async16(shared, &bytes);
}
inline void copy_constant16(void* shared, const void* global, bool valid) {
  uint4 bytes{};
  if (valid) bytes = load_constant(static_cast<const uint4*>(global));
  emulator::copy_async16(shared, &bytes);
}
inline void copy_async_commit() {
  emulator::copy_async_commit();
}
template <int N>
void copy_async_wait() {
  static_assert(N >= 0);
  emulator::copy_async_wait(N);
}

template <typename T>
inline constexpr bool kIs16Bit = std::is_same_v<T, Bf16> || std::is_same_v<T, F16>;

inline float to_float(Bf16 v) {
  return bf16_to_f32(v.bits);
}
inline float to_float(F16 v) {
  return f16_to_f32(v.bits);
}
template <typename T>
T from_float(float v) {
  static_assert(kIs16Bit<T>);
  if constexpr (std::is_same_v<T, Bf16>)
    return {f32_to_bf16(v)};
  else
    return {f32_to_f16(v)};
}
template <typename T>
float2 unpack2(uint32_t v) {
  return {to_float(T{static_cast<uint16_t>(v)}), to_float(T{static_cast<uint16_t>(v >> 16)})};
}
template <typename T>
uint32_t pack2(float lo, float hi) {
  return from_float<T>(lo).bits | static_cast<uint32_t>(from_float<T>(hi).bits) << 16;
}

template <typename T>
void mma16816(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(kIs16Bit<T>);
  emulator::mma16816(std::is_same_v<T, Bf16>, c, a, b);
}
inline void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
  emulator::ldmatrix(r, row, 2, false);
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  emulator::ldmatrix(r, row, 4, false);
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) {
  emulator::ldmatrix(r, row, 2, true);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  emulator::ldmatrix(r, row, 4, true);
}

inline float fma(float a, float b, float c) {
  return ::fmaf(a, b, c);
}
inline float rsqrt(float v) {
  return 1.0f / ::sqrtf(v);
}
inline float tanh(float v) {
  return ::tanhf(v);
}
inline float fast_exp2(float v) {
  return ::exp2f(v);
}
inline float fast_exp(float v) {
  return ::exp2f(v * 1.4426950408889634f);
}
inline float max_number(float a, float b) {
  return ::fmaxf(a, b);
}

template <auto kernel>
const std::string& name_of_kernel() {
  static const std::string name = kernel_name(__PRETTY_FUNCTION__);
  return name;
}

// Launches a kernel; an empty grid launches nothing. Throws Error(internal) for a launch that a
// device would refuse and, on the default stream, for errors of the kernel.
template <auto kernel, typename Params>
void launch(StreamHandle stream, dim3 grid, int threads, size_t shared_bytes,
            const Params& params) {
  static_assert(std::is_trivially_copyable_v<Params> && sizeof(Params) <= 4096);
  emulator::Launch launch{
      name_of_kernel<kernel>().c_str(), grid, threads, shared_bytes, nullptr, {}};
  launch.entry = [](const void* p) { kernel(*static_cast<const Params*>(p)); };
  launch.set_params(&params, sizeof params);
  emulator::submit(stream, std::move(launch));
}

}  // namespace turbomind::TM_CUDA_NS
