// TM_ISA_TABLE: finds the kernels that are compiled for an Isa value. For .cc files that are
// compiled once.
#pragma once

#include "core/error.h"
#include "core/isa.h"

#ifdef TM_HAVE_AVX2
#define TM_IF_AVX2(...) __VA_ARGS__
#else
#define TM_IF_AVX2(...)
#endif
#ifdef TM_HAVE_AVX512
#define TM_IF_AVX512(...) __VA_ARGS__
#else
#define TM_IF_AVX512(...)
#endif
#ifdef TM_HAVE_AVX512_BF16
#define TM_IF_AVX512_BF16(...) __VA_ARGS__
#else
#define TM_IF_AVX512_BF16(...)
#endif
#ifdef TM_HAVE_AMX
#define TM_IF_AMX(...) __VA_ARGS__
#else
#define TM_IF_AMX(...)
#endif
#ifdef TM_HAVE_AMX_EMULATED
#define TM_IF_AMX_EMULATED(...) __VA_ARGS__
#else
#define TM_IF_AMX_EMULATED(...)
#endif

#define TM_DECLARE_TABLE(ns, Table, name) \
  namespace ns {                          \
  const Table& name();                    \
  }

// At namespace turbomind: declares `const Table& name()` of every compiled instruction set and
// defines `static const Table& name(Isa)`, which throws Error(internal) for a
// set that this build lacks.
#define TM_KERNEL_TABLE(Table, name)                                                        \
  TM_DECLARE_TABLE(portable, Table, name)                                                   \
  TM_IF_AVX2(TM_DECLARE_TABLE(avx2, Table, name))                                           \
  TM_IF_AVX512(TM_DECLARE_TABLE(avx512, Table, name))                                       \
  TM_IF_AVX512_BF16(TM_DECLARE_TABLE(avx512_bf16, Table, name))                             \
  TM_IF_AMX(TM_DECLARE_TABLE(amx, Table, name))                                             \
  TM_IF_AMX_EMULATED(TM_DECLARE_TABLE(amx_emulated, Table, name))                           \
  static const Table& name(Isa isa) {                                                       \
    switch (isa) {                                                                          \
      case Isa::portable:                                                                   \
        return portable::name();                                                            \
        TM_IF_AVX2(case Isa::avx2 : return avx2::name();)                                   \
        TM_IF_AVX512(case Isa::avx512 : return avx512::name();)                             \
        TM_IF_AVX512_BF16(case Isa::avx512_bf16 : return avx512_bf16::name();)              \
        TM_IF_AMX(case Isa::amx : return amx::name();)                                      \
        TM_IF_AMX_EMULATED(case Isa::amx_emulated : return amx_emulated::name();)           \
      default:                                                                              \
        throw_error(ErrorCode::internal, "no kernels for instruction set ", isa_name(isa)); \
    }                                                                                       \
  }
