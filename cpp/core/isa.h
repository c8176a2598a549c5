// Instruction sets that CPU ops are compiled for, and the choice among those of this machine. The
// kernels themselves are in *_cpu.cc files (cpu/isa_build.h).
#pragma once

#include <string>
#include <vector>

namespace turbomind {

// Ordered: each set contains the one before it. `amx_emulated` runs the AMX kernels with the tile
// instructions computed in plain C++ (same layout and order of operations); it exists so that tests
// cover those kernels on machines without AMX; "auto" never chooses it.
enum class Isa : int { portable, avx2, avx512, avx512_bf16, amx, amx_emulated };

const char* isa_name(
    Isa isa);                 // "portable", "avx2", "avx512", "avx512_bf16", "amx", "amx_emulated"
bool isa_available(Isa isa);  // in this build and on this machine (CPUID, OS state, AMX permission)
std::vector<Isa> available_isas();  // without amx_emulated
Isa best_isa();
// Returns the set of a name; "auto" is TURBOMIND_ISA if set, else best_isa(). Throws
// Error(invalid_request), which lists the available sets, for an unknown or unavailable name.
Isa resolve_isa(const std::string& name);

// Returns true if matrix products of bf16 weights take bf16 activations (AVX512-BF16, AMX).
bool isa_has_bf16_dot(Isa isa);

// Asks the kernel for permission to use tiles, which a process needs once before any thread touches
// tile state; isa_available() calls it. Every thread that runs tile kernels configures its own
// tiles.
bool request_amx_permission();

// Clears the tiles of the calling thread, whose 8 KiB the system otherwise saves and loads at every
// switch to another thread. Only after request_amx_permission().
void release_tiles();
// What a worker thread does before it sleeps: release_tiles where `isa` uses them, else null.
void (*before_sleep(Isa isa))();

// Why AMX is not used although the processor has it. `saved`: the system saves tile registers;
// `error`: errno of the request for permission, 0 if granted. Empty where nothing hinders.
std::string amx_hindrance(bool processor_has_it, bool saved, int error);
// The same for this machine and process.
std::string amx_hindrance();

}  // namespace turbomind
