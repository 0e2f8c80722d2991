// Which instructions the CPU kernels use.
#include "cpu.h"

#include <string>

namespace kimi_k3 {

namespace {

Isa detect() {
#if KIMI_K3_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16"))
    return Isa::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::avx2;
#endif
  return Isa::generic;
}

Isa chosen = detect();

const char* name_of(Isa isa) { return isa == Isa::avx512 ? "avx512" : isa == Isa::avx2 ? "avx2" : "generic"; }

std::string set_cpu_instructions(std::string name) {
  const char* before = name_of(chosen);
  Isa wanted = name == "avx512" ? Isa::avx512 : name == "avx2" ? Isa::avx2 : Isa::generic;
  STD_TORCH_CHECK(name == name_of(wanted), "set_cpu_instructions: want 'avx512', 'avx2' or 'generic', got '", name, "'");
  STD_TORCH_CHECK(wanted <= detect(), "set_cpu_instructions: this machine has no ", name);
  chosen = wanted;
  return before;
}

std::string cpu_instructions() { return name_of(chosen); }

}  // namespace

Isa active_isa() { return chosen; }

bool has_int8_dot() {
#if KIMI_K3_X86
  static const bool is_there = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
  return is_there;
#else
  return false;
#endif
}

}  // namespace kimi_k3

STABLE_TORCH_LIBRARY_FRAGMENT(kimi_k3, m) {
  m.def("set_cpu_instructions(str name) -> str");
  m.def("cpu_instructions() -> str");
}
STABLE_TORCH_LIBRARY_IMPL(kimi_k3, CompositeExplicitAutograd, m) {
  m.impl("set_cpu_instructions", TORCH_BOX(&kimi_k3::set_cpu_instructions));
  m.impl("cpu_instructions", TORCH_BOX(&kimi_k3::cpu_instructions));
}
