// For files compiled once per instruction set (*_cpu.cc). Everything such a file defines must live
// in namespace turbomind::TM_ISA_NS or be static: an inline function or template instance shared
// with another translation unit could be linked from the AVX-512 copy and run on a machine without
// it. So: raw pointers in kernels, no std containers or std::function there.
#pragma once

#define TM_LEVEL_PORTABLE 0
#define TM_LEVEL_AVX2 1
#define TM_LEVEL_AVX512 2
#define TM_LEVEL_AVX512_BF16 3
#define TM_LEVEL_AMX 4
#define TM_LEVEL_AMX_EMULATED 5

#define TM_HAS_AVX2 (TM_ISA_LEVEL >= TM_LEVEL_AVX2)
#define TM_HAS_AVX512 (TM_ISA_LEVEL >= TM_LEVEL_AVX512)
#define TM_HAS_BF16_DOT (TM_ISA_LEVEL >= TM_LEVEL_AVX512_BF16)
#define TM_HAS_TILES (TM_ISA_LEVEL >= TM_LEVEL_AMX)

#if TM_HAS_AVX2
// GCC 12 warns about the deliberately undefined operands inside its own intrinsics.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif
