// Namespace and intrinsics of files that are compiled once per instruction set (*_cpu.cc).
//
// All definitions of such a file are in namespace turbomind::TM_ISA_NS or static. The linker could
// otherwise take an inline function or template instance of the AVX-512 copy and run it on a
// machine without AVX-512. So kernels use raw pointers, and no std containers or std::function.
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
