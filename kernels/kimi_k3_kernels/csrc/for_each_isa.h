// Compiles the file KIMI_K3_BODY once for each instruction set, in the namespaces generic, avx2 and avx512.
//
// The body is plain C++ on vectors of KIMI_K3_LANES floats (vector.h). It is included and not a template, because a
// function's target is an attribute of its declaration, and code is lowered for it before anything is inlined.
#include "cpu.h"

#define KIMI_K3_TARGET
#define KIMI_K3_LANES 4
namespace kimi_k3::generic {
#include "vector.h"
#include KIMI_K3_BODY
}  // namespace kimi_k3::generic
#undef KIMI_K3_TARGET
#undef KIMI_K3_LANES

#if KIMI_K3_X86
#define KIMI_K3_TARGET KIMI_K3_AVX2
#define KIMI_K3_LANES 8
namespace kimi_k3::avx2 {
#include "vector.h"
#include KIMI_K3_BODY
}  // namespace kimi_k3::avx2
#undef KIMI_K3_TARGET
#undef KIMI_K3_LANES

#define KIMI_K3_TARGET KIMI_K3_AVX512
#define KIMI_K3_LANES 16
namespace kimi_k3::avx512 {
#include "vector.h"
#include KIMI_K3_BODY
}  // namespace kimi_k3::avx512
#undef KIMI_K3_TARGET
#undef KIMI_K3_LANES

// The version of a function that the active instruction set runs.
#define KIMI_K3_ACTIVE(...)                                              \
  (::kimi_k3::active_isa() == ::kimi_k3::Isa::avx512 ? avx512::__VA_ARGS__ \
   : ::kimi_k3::active_isa() == ::kimi_k3::Isa::avx2 ? avx2::__VA_ARGS__   \
                                                     : generic::__VA_ARGS__)
#else
#define KIMI_K3_ACTIVE(...) (generic::__VA_ARGS__)
#endif
