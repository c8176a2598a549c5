// Instruction sets the CPU ops are compiled for, and which of them this machine has.
#pragma once

#include <string>
#include <vector>

namespace turbomind {

// Ordered: each set contains the one before it. `amx_emulated` runs the AMX kernels with the tile
// instructions computed in plain C++ (same layout and order of operations); it exists so that tests
// cover those kernels on machines without AMX, and is never chosen by itself.
enum class Isa : int { portable, avx2, avx512, avx512_bf16, amx, amx_emulated };

const char* isa_name(
    Isa isa);                 // "portable", "avx2", "avx512", "avx512_bf16", "amx", "amx_emulated"
bool isa_available(Isa isa);  // by this build and this machine (CPUID, OS state; AMX permission)
std::vector<Isa> available_isas();  // without amx_emulated
Isa best_isa();
// "auto" -> TURBOMIND_ISA if set, else best_isa(). Throws Error(invalid_request) for a name that is
// unknown or not available here, naming those that are.
Isa resolve_isa(const std::string& name);

// True when matrix products of bf16 weights take bf16 activations (AVX512-BF16, AMX).
bool isa_has_bf16_dot(Isa isa);

// AMX needs the kernel's permission once per process before any thread touches tile state;
// called by isa_available(). Every thread that runs tile kernels configures its own tiles.
bool request_amx_permission();

}  // namespace turbomind
