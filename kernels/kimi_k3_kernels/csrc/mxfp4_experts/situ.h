// SiTU-GLU of 16 gate and up values, in float32.
#pragma once

#include <cmath>

#include "../cpu.h"

namespace kimi_k3 {

struct Situ {
  float beta;
  float linear_beta;  // 0: the up branch is linear
};

inline float situ(float gate, float up, const Situ& s) {
  float bounded = s.linear_beta > 0 ? s.linear_beta * std::tanh(up / s.linear_beta) : up;
  return s.beta * std::tanh(gate / s.beta) / (1.0f + std::exp(-gate)) * bounded;
}

#if KIMI_K3_X86
// exp to 2 units in the last place: 2^n times a polynomial on [-ln2 / 2, ln2 / 2].
KIMI_K3_AVX512 inline __m512 exp16(__m512 x) {
  x = _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(_mm512_set1_ps(-104.0f), x));  // of NaN and a number the second
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

KIMI_K3_AVX512 inline __m512 sigmoid16(__m512 x) {
  __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(one, _mm512_add_ps(one, exp16(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

KIMI_K3_AVX512 inline __m512 tanh16(__m512 x) {
  __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
  __m512 large = _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(one, exp16(_mm512_add_ps(x, x)))));
  // 1 - 2 / (1 + e^2x) cancels near 0; the odd series is exact there.
  __m512 s = _mm512_mul_ps(x, x);
  __m512 p = _mm512_set1_ps(-1382.0f / 155925.0f);
  p = _mm512_fmadd_ps(p, s, _mm512_set1_ps(62.0f / 2835.0f));
  p = _mm512_fmadd_ps(p, s, _mm512_set1_ps(-17.0f / 315.0f));
  p = _mm512_fmadd_ps(p, s, _mm512_set1_ps(2.0f / 15.0f));
  p = _mm512_fmadd_ps(p, s, _mm512_set1_ps(-1.0f / 3.0f));
  __m512 small = _mm512_fmadd_ps(_mm512_mul_ps(x, s), p, x);
  __mmask16 is_small = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(0.25f), _CMP_LT_OQ);
  return _mm512_mask_blend_ps(is_small, large, small);
}

KIMI_K3_AVX512 inline __m512 situ16(__m512 gate, __m512 up, const Situ& s) {
  __m512 beta = _mm512_set1_ps(s.beta);
  __m512 value = _mm512_mul_ps(_mm512_mul_ps(beta, tanh16(_mm512_div_ps(gate, beta))), sigmoid16(gate));
  if (s.linear_beta > 0) {
    __m512 linear = _mm512_set1_ps(s.linear_beta);
    up = _mm512_mul_ps(linear, tanh16(_mm512_div_ps(up, linear)));
  }
  return _mm512_mul_ps(value, up);
}
#endif

}  // namespace kimi_k3
