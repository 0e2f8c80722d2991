// Products of activation rows with MXFP4 weight rows on AVX2: float32 sums in 8 lanes, for bfloat16 and float32 rows.
//
// 32 bytes are 64 codes, and each 128-bit half lies under one scale. Two byte lookups, in tables that hold the scaled
// codes, give the low and the high half of a weight's bfloat16 (scaling is exact); interleaving them gives pairs of
// bfloat16 in 32 bits, and a shift and a mask make two vectors of float32 of each. So vector (nibble, half, parity) holds
// in lane 4 g + d element 32 g + 16 half + 4 d + 2 parity + nibble of the 64, and a prepared row is permuted to match.
#pragma once

#include "dot.h"

#if KIMI_K3_X86

namespace kimi_k3 {

namespace avx2 {
#define KIMI_K3_TARGET KIMI_K3_AVX2
#define KIMI_K3_LANES 8
#include "../vector.h"

// tanh(x) = 1 - 2 / (1 + e^2x), which cancels near 0; the odd series is exact there.
KIMI_K3_INLINE Vec tanh_vec(Vec x) {
  const Vec large = 1.0f - 2.0f / (1.0f + exp_vec(x + x)), s = x * x;
  Vec p = splat(-1382.0f / 155925.0f);
  p = p * s + 62.0f / 2835.0f;
  p = p * s + -17.0f / 315.0f;
  p = p * s + 2.0f / 15.0f;
  p = p * s + -1.0f / 3.0f;
  const Vec small = x * s * p + x, size = x < 0.0f ? -x : x;
  return size < 0.25f ? small : large;
}

KIMI_K3_INLINE Vec situ_vec(Vec gate, Vec up, const Situ& s) {
  const Vec bounded = s.linear_beta > 0 ? s.linear_beta * tanh_vec(up / s.linear_beta) : up;
  return s.beta * tanh_vec(gate / s.beta) / (1.0f + exp_vec(-gate)) * bounded;
}
}  // namespace avx2
#undef KIMI_K3_TARGET
#undef KIMI_K3_LANES

// The bfloat16 of each code under each scale, as the low and the high bytes of 16 codes: lookup tables for one group.
struct ScaledCodes {
  ScaledCodes() {
    for (int scale = 0; scale < 256; ++scale)
      for (int code = 0; code < 16; ++code) {
        const bfloat16 value = to_bfloat16(scale == 255 ? std::nanf("") : kE2M1[code] * scale_value(scale));
        reinterpret_cast<uint8_t*>(&bytes[scale][0])[code] = static_cast<uint8_t>(value);
        reinterpret_cast<uint8_t*>(&bytes[scale][1])[code] = static_cast<uint8_t>(value >> 8);
      }
  }
  __m128i bytes[256][2];
};
inline const ScaledCodes kScaledCodes;

template <class T>
struct Avx2Rows {
  using Element = float;
  using Activation = T;
  static constexpr int64_t kRows = kBlockRows;
  static constexpr int64_t kBlock = 64;
  static int64_t padded(int64_t k) { return (k + kBlock - 1) / kBlock * kBlock; }
  static int64_t place(int64_t k) {
    const int64_t in_block = k % kBlock, group = in_block / 32, half = in_block / 16 % 2, d = in_block / 4 % 4;
    const int64_t parity = in_block / 2 % 2, nibble = in_block % 2;
    return k - in_block + ((nibble * 2 + half) * 2 + parity) * 8 + group * 4 + d;
  }
  static void put(float* row, int64_t k, float value) {
    T rounded;
    store(&rounded, value);  // a hidden activation has the dtype of x
    row[place(k)] = load(&rounded);
  }
  // 16 values from a multiple of 16 are 4 lanes of the 4 vectors of one half.
  KIMI_K3_AVX2 static void put_block(float* row, int64_t k, const float* values, int64_t count) {
    if (count < 16) {
      for (int64_t i = 0; i < count; ++i) put(row, k + i, values[i]);
      return;
    }
    T rounded[16];
    store_block(rounded, values, 16);
    float* target = row + place(k);
    for (int64_t d = 0; d < 4; ++d)
      for (int64_t parity = 0; parity < 2; ++parity)
        for (int64_t nibble = 0; nibble < 2; ++nibble)
          target[nibble * 32 + parity * 8 + d] = load(rounded + 4 * d + 2 * parity + nibble);
  }
  KIMI_K3_AVX2 static void store_block(T* out, const float* values, int64_t count) {
    for (int64_t i = 0; i < count; i += 8) avx2::store_some(out + i, avx2::load_some(values + i, count - i), count - i);
  }
  KIMI_K3_AVX2 static void add_weighted(float* sum, float weight, const T* row, int64_t count) {
    for (int64_t i = 0; i < count; i += 8) {
      const avx2::Vec total = avx2::load_some(sum + i, count - i) + weight * avx2::load_some(row + i, count - i);
      avx2::store_some(sum + i, total, count - i);
    }
  }
  KIMI_K3_AVX2 static void activate(const float* gate, const float* up, int64_t, const Situ& s, float* hidden) {
    for (int64_t i = 0; i < kBlockRows; i += 8)
      avx2::store_vec(hidden + i, avx2::situ_vec(avx2::load_vec(gate + i), avx2::load_vec(up + i), s));
  }

  // Hands the 8 vectors of a block of N rows, scaled, to use(row, index, values). The rows take turns, so that no sum waits
  // for its own last addition.
  template <bool kWhole, int N, class Use>
  KIMI_K3_AVX2 static inline __attribute__((always_inline)) void decode(const uint8_t* codes, int64_t code_stride,
                                                                        const uint8_t* scales, int64_t scale_stride,
                                                                        const Use& use) {
    const __m256i nibbles = _mm256_set1_epi8(15), upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    __m256i low_table[N], high_table[N], bytes[N];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n, codes += code_stride, scales += scale_stride) {
      const auto* first = &kScaledCodes.bytes[scales[0]];
      const auto* second = &kScaledCodes.bytes[scales[kWhole ? 1 : 0]];
      low_table[n] = _mm256_loadu2_m128i(&(*second)[0], &(*first)[0]);
      high_table[n] = _mm256_loadu2_m128i(&(*second)[1], &(*first)[1]);
      bytes[n] = kWhole ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes))
                        : _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    }
#pragma GCC unroll 2
    for (int nibble = 0; nibble < 2; ++nibble) {
      __m256i low[N], high[N];
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) {
        const __m256i code = _mm256_and_si256(nibble ? _mm256_srli_epi16(bytes[n], 4) : bytes[n], nibbles);
        low[n] = _mm256_shuffle_epi8(low_table[n], code), high[n] = _mm256_shuffle_epi8(high_table[n], code);
      }
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        __m256i pairs[N];
        const int index = nibble * 4 + half * 2;
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
          pairs[n] = half ? _mm256_unpackhi_epi8(low[n], high[n]) : _mm256_unpacklo_epi8(low[n], high[n]);
          use(n, index, _mm256_castsi256_ps(_mm256_slli_epi32(pairs[n], 16)));
        }
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) use(n, index + 1, _mm256_castsi256_ps(_mm256_and_si256(pairs[n], upper)));
      }
    }
  }

  KIMI_K3_AVX2 static inline __attribute__((always_inline)) float reduce(__m256 x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }

  // sum + a * b. In assembly, because g++ 12 moves sums between registers until some do not fit.
  KIMI_K3_AVX2 static inline __attribute__((always_inline)) __m256 multiply_add(__m256 a, const float* b, __m256 sum) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "m"(*reinterpret_cast<const __m256_u*>(b)));
    return sum;
  }

  // Few rows: decode in registers.
  template <int M, int N>
  KIMI_K3_AVX2 static void direct(const PackedMatrix& w, int64_t first, const Ahead& ahead, const float* const* x,
                                  float* out) {
    __m256 sums[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[m][n] = _mm256_setzero_ps();
    const int64_t code_stride = w.in / 2, scale_stride = w.in / kGroup, whole = w.in / kBlock * kBlock;
    const uint8_t *codes = w.code_row(first), *scales = w.scale_row(first), *next = ahead.codes;
    prefetch_scales(ahead, w, N);
    for (int64_t k = 0; k < whole; k += kBlock, codes += kBlock / 2, scales += kBlock / kGroup, next += kBlock / 2) {
#pragma GCC unroll 8
      for (int n = 0; n < N; n += 2) {
        prefetch(next + n * code_stride);
        prefetch(next + (n + 1) * code_stride);
        add_blocks<true, M, N>(codes + n * code_stride, code_stride, scales + n * scale_stride, scale_stride, x, k, n, sums);
      }
    }
    if (whole < w.in)
#pragma GCC unroll 8
      for (int n = 0; n < N; n += 2)
        add_blocks<false, M, N>(codes + n * code_stride, code_stride, scales + n * scale_stride, scale_stride, x, whole, n, sums);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) out[m * kBlockRows + n] = reduce(sums[m][n]);
  }

  // The blocks of rows n and n + 1.
  template <bool kWhole, int M, int N>
  KIMI_K3_AVX2 static inline __attribute__((always_inline)) void add_blocks(const uint8_t* codes, int64_t code_stride,
                                                                            const uint8_t* scales, int64_t scale_stride,
                                                                            const float* const* x, int64_t k, int n,
                                                                            __m256 (&sums)[M][N]) {
    const float* rows[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      rows[m] = x[m] + k;
      asm volatile("" : "+r"(rows[m]));  // read them again for each n: kept in registers, they push the sums out
    }
    const auto add = [&](int row, int index, __m256 values) KIMI_K3_AVX2 __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) sums[m][n + row] = multiply_add(values, rows[m] + index * 8, sums[m][n + row]);
    };
    decode<kWhole, 2>(codes, code_stride, scales, scale_stride, add);
  }

  // Four rows of w, two at once.
  template <int M>
  KIMI_K3_AVX2 static void direct_pairs(const PackedMatrix& w, int64_t first, const Ahead& ahead, const float* const* x,
                                        float* out) {
    direct<M, 2>(w, first, ahead, x, out);
    direct<M, 2>(w, first + 2, ahead.from(2, w), x, out + 2);
  }

  // Many rows: from weight rows that were decoded once, [N][columns]; each lane adds in the order of `direct`.
  template <int M, int N>
  KIMI_K3_AVX2 static void tile(const float* w, int64_t columns, const float* const* x, float* out) {
    __m256 sums[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[m][n] = _mm256_setzero_ps();
    for (int64_t k = 0; k < columns; k += 8) {
      __m256 rows[M];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) rows[m] = _mm256_loadu_ps(x[m] + k);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        const __m256 values = _mm256_loadu_ps(w + n * columns + k);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) sums[m][n] = avx2::multiply_add(values, rows[m], sums[m][n]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) out[m * kBlockRows + n] = reduce(sums[m][n]);
  }

  template <int N>
  KIMI_K3_AVX2 static void tiles(const PackedMatrix& w, int64_t first, const float* const* x, int64_t m_count, float* out) {
    const int64_t columns = padded(w.in);
    static thread_local LineVector<float> decoded;
    decoded.resize(N * columns);
    for (int n = 0; n < N; ++n) {
      const uint8_t *codes = w.code_row(first + n), *scales = w.scale_row(first + n);
      float* target = &decoded[n * columns];
      const auto put8 = [&](int, int index, __m256 values) KIMI_K3_AVX2 __attribute__((always_inline)) {
        _mm256_storeu_ps(target + index * 8, values);
      };
      int64_t k = 0;
      for (; k + kBlock <= w.in; k += kBlock, target += kBlock)
        decode<true, 1>(codes + k / 2, 0, scales + k / kGroup, 0, put8);
      if (k < w.in) decode<false, 1>(codes + k / 2, 0, scales + k / kGroup, 0, put8);
    }
    for (int64_t m = 0, rows; m < m_count; m += rows) {
      rows = m_count - m == 4 ? 2 : std::min<int64_t>(3, m_count - m);  // one row alone leaves half of the adders idle
      switch (rows) {
        case 3: tile<3, N>(decoded.data(), columns, x + m, out + m * kBlockRows); break;
        case 2: tile<2, N>(decoded.data(), columns, x + m, out + m * kBlockRows); break;
        case 1: tile<1, N>(decoded.data(), columns, x + m, out + m * kBlockRows);
      }
    }
  }

  static void rows(const PackedMatrix& w, int64_t first, int64_t count, const Ahead& ahead, const float* const* x, int64_t m,
                   float* out) {
    // Widths are multiples of 32 and blocks of 16: `count` is a multiple of 16.
    for (int64_t n = 0; n < count; n += 4) {
      switch (m) {
        case 1: direct<1, 4>(w, first + n, ahead.from(n, w), x, out + n); break;
        case 2: direct_pairs<2>(w, first + n, ahead.from(n, w), x, out + n); break;
        case 3: direct_pairs<3>(w, first + n, ahead.from(n, w), x, out + n); break;
        case 4: direct_pairs<4>(w, first + n, ahead.from(n, w), x, out + n); break;
        default: tiles<4>(w, first + n, x, m, out + n);
      }
    }
  }
};

}  // namespace kimi_k3

#endif
