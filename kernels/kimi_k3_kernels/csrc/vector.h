// A vector of KIMI_K3_LANES floats in the compiler's own vector types, for one instruction set; see for_each_isa.h.

#define KIMI_K3_INLINE KIMI_K3_TARGET static inline __attribute__((always_inline))

constexpr int kLanes = KIMI_K3_LANES;
typedef float Vec __attribute__((vector_size(4 * KIMI_K3_LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * KIMI_K3_LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * KIMI_K3_LANES)));
typedef float UnalignedVec __attribute__((vector_size(4 * KIMI_K3_LANES), aligned(4), may_alias));
typedef uint16_t UnalignedHalves __attribute__((vector_size(2 * KIMI_K3_LANES), aligned(2), may_alias));

KIMI_K3_INLINE Vec splat(float x) { return x - Vec{}; }

KIMI_K3_INLINE Vec load_vec(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
KIMI_K3_INLINE Vec load_vec(const bfloat16* p) {
#if KIMI_K3_LANES == 16  // what g++ 12 makes of the conversion is four instructions
  const Bits wide = reinterpret_cast<Bits>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif KIMI_K3_LANES == 8
  const Bits wide = reinterpret_cast<Bits>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  const Bits wide = __builtin_convertvector(*reinterpret_cast<const UnalignedHalves*>(p), Bits);
#endif
  return reinterpret_cast<Vec>(wide << 16);
}

KIMI_K3_INLINE void store_vec(float* p, Vec x) { *reinterpret_cast<UnalignedVec*>(p) = x; }
KIMI_K3_INLINE void store_vec(bfloat16* p, Vec x) {  // round to nearest even; NaN stays NaN
  Bits bits = reinterpret_cast<Bits>(x);
  Bits rounded = bits + 0x7fff + ((bits >> 16) & 1);
  rounded = (bits & 0x7fffffff) > 0x7f800000 ? Bits{} + 0x7fc00000 : rounded;
#if KIMI_K3_LANES == 16
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(rounded >> 16)));
#else
  *reinterpret_cast<UnalignedHalves*>(p) = __builtin_convertvector(rounded >> 16, Halves);
#endif
}

// The first `count` lanes; the others are zero and stay unwritten.
template <class T>
KIMI_K3_INLINE Vec load_some(const T* p, int64_t count) {
  if (count >= kLanes) return load_vec(p);
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = load(p + i);
  return load_vec(lanes);
}
template <class T>
KIMI_K3_INLINE void store_some(T* p, Vec x, int64_t count) {
  if (count >= kLanes) return store_vec(p, x);
  float lanes[kLanes];
  store_vec(lanes, x);
  for (int64_t i = 0; i < count; ++i) store(p + i, lanes[i]);
}

// sum + a * b, rounded once where the machine can.
KIMI_K3_INLINE Vec multiply_add(Vec a, Vec b, Vec sum) {
#if KIMI_K3_LANES == 8  // a sum stays in its register: g++ 12 moves sums about until some do not fit
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  return sum;
#else
  return sum + a * b;
#endif
}

KIMI_K3_INLINE float sum_lanes(Vec x) {  // halves onto halves, in registers
#if KIMI_K3_LANES == 8
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
#else
  float lanes[kLanes];
  store_vec(lanes, x);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
#endif
}

// To 2 units in the last place: 2^n times a polynomial on [-ln2 / 2, ln2 / 2]. 0 far below -87, and bounded by exp(88).
KIMI_K3_INLINE Vec exp_vec(Vec x) {
  const Vec lowest = splat(KIMI_K3_LANES == 16 ? -104.0f : -87.0f), highest = splat(88.0f);
  Vec bounded = x < lowest ? lowest : x;
  bounded = bounded > highest ? highest : bounded;
#if KIMI_K3_LANES == 16
  const Vec n = _mm512_roundscale_ps(bounded * 1.44269504088896341f, 8);
#else
  const Vec shift = splat(12582912.0f);
  const Vec shifted = bounded * 1.44269504088896341f + shift;  // its low bits hold the nearest integer
  const Vec n = shifted - shift;
#endif
  Vec r = bounded - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
#if KIMI_K3_LANES == 16
  return _mm512_scalef_ps(p, n);
#else
  const Vec power = reinterpret_cast<Vec>((reinterpret_cast<Bits>(shifted) << 23) + 0x3f800000);
  return x < lowest ? Vec{} : p * power;
#endif
}

KIMI_K3_INLINE Vec silu_vec(Vec x) { return x / (1.0f + exp_vec(-x)); }
