#include "core/isa.h"

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "core/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace turbomind {

namespace {

constexpr Isa kAllIsas[] = {Isa::portable,    Isa::avx2, Isa::avx512,
                            Isa::avx512_bf16, Isa::amx,  Isa::amx_emulated};

// Features that the processor has and whose registers the operating system saves.
struct Features {
  bool avx2 = false, avx512 = false, avx512_bf16 = false, amx = false;
  bool has_tiles = false;  // whether or not the system saves their registers
};

#if defined(__x86_64__)
uint64_t read_xcr0() {
  uint32_t lo, hi;
  asm volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return (uint64_t{hi} << 32) | lo;
}

// Bit numbers: Intel SDM volume 2A, CPUID leaves 1 and 7; XCR0 in volume 1, chapter 13.
Features detect() {
  Features f;
  uint32_t a, b, c, d;
  const auto bit = [](uint32_t reg, int i) { return ((reg >> i) & 1u) != 0; };
  if (!__get_cpuid(1, &a, &b, &c, &d)) return f;
  const bool osxsave = bit(c, 27), avx = bit(c, 28), fma = bit(c, 12), f16c = bit(c, 29);
  if (!osxsave || !avx) return f;
  const uint64_t xcr0 = read_xcr0();
  const auto os_saves = [&](uint64_t mask) { return (xcr0 & mask) == mask; };
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
  const uint32_t max_subleaf = a;
  const bool vnni = bit(c, 11);
  const bool tiles = bit(d, 22) && bit(d, 24) && bit(d, 25);  // AMX-BF16, AMX-TILE, AMX-INT8
  f.avx2 = fma && f16c && bit(b, 5) && os_saves(0x6);
  f.avx512 = f.avx2 && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31) && os_saves(0xe6);
  if (max_subleaf < 1 || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) return f;
  f.avx512_bf16 = f.avx512 && vnni && bit(a, 5);
  f.has_tiles = f.avx512_bf16 && tiles;
  f.amx = f.has_tiles && os_saves(0x60000);
  return f;
}
#else
Features detect() {
  return {};
}
#endif

const Features& features() {
  static const Features f = detect();
  return f;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return "portable";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::avx512_bf16:
      return "avx512_bf16";
    case Isa::amx:
      return "amx";
    case Isa::amx_emulated:
      return "amx_emulated";
  }
  return "unknown";
}

namespace {

// Requests the permission once per process and returns the errno, 0 if it was granted.
int amx_permission_error() {
#if defined(__linux__) && defined(__x86_64__)
  // ARCH_REQ_XCOMP_PERM for XTILEDATA (asm/prctl.h, Linux 5.16); threads inherit the permission.
  static const int error = syscall(SYS_arch_prctl, 0x1023, 18) == 0 ? 0 : errno;
  return error;
#else
  return ENOSYS;
#endif
}

}  // namespace

bool request_amx_permission() {
  return amx_permission_error() == 0;
}

void release_tiles() {
#ifdef TM_HAVE_AMX
  asm volatile("tilerelease" ::: "memory");
#endif
}

void (*before_sleep(Isa isa))() {
  return isa == Isa::amx ? release_tiles : nullptr;
}

std::string amx_hindrance(bool processor_has_it, bool saved, int error) {
  if (!processor_has_it || (saved && error == 0)) return {};
  const std::string reason =
      saved ? std::string("the system refuses it to this process (arch_prctl: ") +
                  std::strerror(error) + "); Linux before 5.16 and some sandboxes do"
            : "the system does not save its registers";
  return "this processor has AMX, but " + reason + ": prompts take several times longer";
}

std::string amx_hindrance() {
  const Features& f = features();
  return amx_hindrance(f.has_tiles, f.amx, f.amx ? amx_permission_error() : 0);
}

bool isa_available(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return true;
#ifdef TM_HAVE_AVX2
    case Isa::avx2:
      return features().avx2;
#endif
#ifdef TM_HAVE_AVX512
    case Isa::avx512:
      return features().avx512;
#endif
#ifdef TM_HAVE_AVX512_BF16
    case Isa::avx512_bf16:
      return features().avx512_bf16;
#endif
#ifdef TM_HAVE_AMX
    case Isa::amx:
      return features().amx && request_amx_permission();
#endif
#ifdef TM_HAVE_AMX_EMULATED
    case Isa::amx_emulated:
      return features().avx512_bf16;
#endif
    default:
      return false;
  }
}

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (Isa isa : kAllIsas) {
    if (isa != Isa::amx_emulated && isa_available(isa)) isas.push_back(isa);
  }
  return isas;
}

Isa best_isa() {
  return available_isas().back();
}

Isa resolve_isa(const std::string& name) {
  std::string wanted = name;
  const char* source = "isa";
  if (wanted == "auto") {
    const char* env = std::getenv("TURBOMIND_ISA");
    if (env == nullptr || *env == '\0') return best_isa();
    wanted = env;
    source = "the environment variable TURBOMIND_ISA";
    if (wanted == "auto") return best_isa();
  }
  for (Isa isa : kAllIsas) {
    if (wanted == isa_name(isa) && isa_available(isa)) return isa;
  }
  std::string have;
  for (Isa isa : kAllIsas) {
    if (isa_available(isa)) have += (have.empty() ? "" : ", ") + std::string(isa_name(isa));
  }
  throw_error(ErrorCode::invalid_request, source, " is \"", wanted,
              "\", expected auto or an instruction set that is available here: ", have);
}

bool isa_has_bf16_dot(Isa isa) {
  return isa >= Isa::avx512_bf16;
}

}  // namespace turbomind
