// Products of activation rows in int8 with MXFP4 weight rows: lossy in the activations, exact in the weights.
//
// A group of 32 activations has one scale, its largest magnitude / 127. A group's products are summed in int32, of the
// doubled weights (0, 1, 2, 3, 4, 6, 8, 12), so no bit depends on how; then the groups' sums in float32, in order.
#pragma once

#include <limits>

#include "dot_avx2.h"

namespace kimi_k3 {

struct Int8Group {
  int8_t values[kGroup];
  float scale;    // of a product with a doubled weight: half of the group's own
  int32_t start;  // -12 times the sum of the values: what products with weights + 12 hold too much
};

// The scale of values whose largest magnitude is `most`, 0 where they all become 0; NaN and infinities pass through it.
inline float int8_scale(float most) { return most / 127.0f; }
inline bool is_int8_scale(float scale) { return scale > 0.0f && scale <= std::numeric_limits<float>::max(); }

// Any machine; slower than the lossless products.
template <class T>
struct PlainInt8Rows : PlainRows<T> {
  using Element = Int8Group;
  static constexpr int64_t kRows = kGroup;
  static int64_t padded(int64_t k) { return k / kGroup; }
  static void put_block(Int8Group* row, int64_t k, const float* values, int64_t) {
    Int8Group& group = row[k / kGroup];
    float most = 0.0f;
    for (int64_t i = 0; i < kGroup; ++i) most = std::isnan(values[i]) ? values[i] : std::max(most, std::abs(values[i]));
    const float scale = int8_scale(most);
    for (int64_t i = 0; i < kGroup; ++i) {
      const float steps = is_int8_scale(scale) ? std::nearbyint(values[i] / scale) : 0.0f;
      group.values[i] = static_cast<int8_t>(std::max(-127.0f, std::min(127.0f, steps)));
    }
    group.scale = scale * 0.5f;
  }
  static void rows(const PackedMatrix& w, int64_t first, int64_t count, const Ahead&, const Int8Group* const* x, int64_t m_count,
                   float* out) {
    constexpr int8_t kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    std::vector<int8_t> decoded(w.in);
    for (int64_t n = 0; n < count; ++n) {
      const uint8_t *codes = w.code_row(first + n), *scales = w.scale_row(first + n);
      for (int64_t k = 0; k < w.in / 2; ++k) {
        decoded[2 * k] = kDoubled[codes[k] & 15];
        decoded[2 * k + 1] = kDoubled[codes[k] >> 4];
      }
      for (int64_t m = 0; m < m_count; ++m) {
        float sum = 0.0f;
        for (int64_t g = 0; g < w.in / kGroup; ++g) {
          int32_t products = 0;
          for (int64_t i = 0; i < kGroup; ++i) products += x[m][g].values[i] * decoded[g * kGroup + i];
          sum += static_cast<float>(products) * (scale_value(scales[g]) * x[m][g].scale);
        }
        out[m * kRows + n] = sum;
      }
    }
  }
};

#if KIMI_K3_X86

// AVX-512 VNNI: lane i of a vector belongs to weight row i of 16, so nothing is summed across lanes, and four activations
// are broadcast to all: 6 rows by 32 weight rows fill the registers. A word of a row's codes holds eight; its even and its
// odd ones make a vector's lane each, so the even and the odd of eight activations lie side by side too.
template <class Lossless>
struct VnniRows : Lossless {
  using Element = Int8Group;
  using Activation = typename Lossless::Activation;
  static constexpr int64_t kRows = kGroup, kVectors = kRows / 16, kWords = kGroup / 4;
  static int64_t padded(int64_t k) { return k / kGroup; }

  KIMI_K3_AVX512_INT8 static void put_block(Int8Group* row, int64_t k, const float* values, int64_t) {
    Int8Group& group = row[k / kGroup];
    const __m512 halves[2] = {_mm512_loadu_ps(values), _mm512_loadu_ps(values + 16)};
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);  // as integers, magnitudes keep their order and NaN is the most
    const __m512i most = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(halves[0]), magnitude),
                                          _mm512_and_si512(_mm512_castps_si512(halves[1]), magnitude));
    const float scale = int8_scale(_mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(most)))));
    const __mmask16 mask = is_int8_scale(scale) ? 0xffff : 0;
    const __m512i most_steps = _mm512_set1_epi32(127), least_steps = _mm512_set1_epi32(-127);
    const __m128i order = _mm_set_epi8(15, 13, 11, 9, 14, 12, 10, 8, 7, 5, 3, 1, 6, 4, 2, 0);
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < 2; ++i) {
      __m512i rounded = _mm512_maskz_cvtps_epi32(mask, _mm512_div_ps(halves[i], _mm512_set1_ps(scale)));
      rounded = _mm512_max_epi32(_mm512_min_epi32(rounded, most_steps), least_steps);
      sum = _mm512_add_epi32(sum, rounded);
      const __m128i bytes = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(rounded), order);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(group.values + 16 * i), bytes);
    }
    group.scale = scale * 0.5f;
    group.start = -12 * _mm512_reduce_add_epi32(sum);
  }
  static void store_block(Activation* out, const float* values, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) Lossless::store_block(out + i, values + i, 16);
  }
  static void activate(const float* gate, const float* up, int64_t count, const Situ& s, float* hidden) {
    for (int64_t i = 0; i < count; i += 16) Lossless::activate(gate + i, up + i, 16, s, hidden + i);
  }

  struct Decoded {  // one group of 16 weight rows: doubled weights + 12, and scales
    __m512i words[kWords];
    __m512 scale;
  };

  // 16 rows of 16 bytes to 4 vectors of one word of each row. part(n): row n.
  template <class Part>
  KIMI_K3_AVX512_INT8 static inline __attribute__((always_inline)) void transpose(const Part& part, __m512i (&words)[4]) {
    __m512i quads[4];  // 128-bit lane l of quad n: row 4l + n
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      quads[n] = _mm512_inserti32x4(_mm512_castsi128_si512(part(n)), part(4 + n), 1);
      quads[n] = _mm512_inserti32x4(_mm512_inserti32x4(quads[n], part(8 + n), 2), part(12 + n), 3);
    }
    const __m512i low01 = _mm512_unpacklo_epi32(quads[0], quads[1]), high01 = _mm512_unpackhi_epi32(quads[0], quads[1]);
    const __m512i low23 = _mm512_unpacklo_epi32(quads[2], quads[3]), high23 = _mm512_unpackhi_epi32(quads[2], quads[3]);
    words[0] = _mm512_unpacklo_epi64(low01, low23), words[1] = _mm512_unpackhi_epi64(low01, low23);
    words[2] = _mm512_unpacklo_epi64(high01, high23), words[3] = _mm512_unpackhi_epi64(high01, high23);
  }

  // Hands groups first .. first + groups, at most 16, of the 16 weight rows from `row` to use(index, words, scale).
  template <class Use>
  KIMI_K3_AVX512_INT8 static inline __attribute__((always_inline)) void decode(const PackedMatrix& w, int64_t row,
                                                                               const Ahead& ahead, int64_t first,
                                                                               int64_t groups, const Use& use) {
    // A byte lookup reads 6 bits, and the table repeats every 16: what stands above a code does not matter.
    const __m512i table = _mm512_broadcast_i32x4(_mm_set_epi8(0, 4, 6, 8, 9, 10, 11, 12, 24, 20, 18, 16, 15, 14, 13, 12));
    const int64_t stride = w.in / 2, scale_stride = w.in / kGroup;
    const uint8_t *codes = w.code_row(row) + first * (kGroup / 2), *scales = w.scale_row(row) + first;
    const uint8_t* next = ahead.codes + first * (kGroup / 2);
    const __mmask16 mask = static_cast<__mmask16>((1u << groups) - 1);
    __m512i scale_words[4];
    transpose([&](int n) KIMI_K3_AVX512_INT8 { return _mm_maskz_loadu_epi8(mask, scales + n * scale_stride); }, scale_words);
    for (int64_t quad = 0; quad < groups; quad += 4) {
      __m512i exponents = scale_words[quad / 4];
      for (int n = 0; n < 16; ++n) prefetch(next + n * stride + quad * (kGroup / 2));
      for (int64_t g = quad; g < std::min(groups, quad + 4); ++g, exponents = _mm512_srli_epi32(exponents, 8)) {
        __m512i packed[4], words[kWords];
        const uint8_t* here = codes + g * (kGroup / 2);
        transpose([&](int n) KIMI_K3_AVX512_INT8 { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(here + n * stride)); }, packed);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          words[2 * i] = _mm512_permutexvar_epi8(packed[i], table);
          words[2 * i + 1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(packed[i], 4), table);
        }
        use(g, words, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_and_si512(exponents, _mm512_set1_epi32(255)), 23)));
      }
    }
  }

  KIMI_K3_AVX512_INT8 static inline __attribute__((always_inline)) __m512i four(const Int8Group& group, int j) {
    int32_t word;
    std::memcpy(&word, group.values + 4 * j, 4);
    return _mm512_set1_epi32(word);
  }
  KIMI_K3_AVX512_INT8 static inline __attribute__((always_inline)) __m512 add_scaled(__m512 sum, __m512i products, __m512 scale,
                                                                                     const Int8Group& group) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), _mm512_mul_ps(scale, _mm512_set1_ps(group.scale)), sum);
  }

  // Few rows: 16 weight rows, decoded in registers.
  template <int M>
  KIMI_K3_AVX512_INT8 static void direct(const PackedMatrix& w, int64_t row, const Ahead& ahead, const Int8Group* const* x,
                                         float* out) {
    __m512 sums[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) sums[m] = _mm512_setzero_ps();
    const int64_t groups = w.in / kGroup;
    for (int64_t first = 0; first < groups; first += kPieceGroups)
      decode(w, row, ahead, first, std::min(kPieceGroups, groups - first),
             [&](int64_t g, const __m512i(&words)[kWords], __m512 scale) KIMI_K3_AVX512_INT8 __attribute__((always_inline)) {
#pragma GCC unroll 4
               for (int m = 0; m < M; ++m) {
                 const Int8Group& group = x[m][first + g];
                 __m512i block = _mm512_set1_epi32(group.start);
#pragma GCC unroll 8
                 for (int j = 0; j < kWords; ++j) block = _mm512_dpbusd_epi32(block, words[j], four(group, j));
                 sums[m] = add_scaled(sums[m], block, scale, group);
               }
             });
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) _mm512_storeu_ps(out + m * kRows, sums[m]);
  }

  // Adds groups first .. first + groups to the sums of M rows, which lie in `out` from one piece to the next.
  template <int M>
  KIMI_K3_AVX512_INT8 static void tile(const Decoded* w, int64_t first, int64_t groups, const Int8Group* const* x, float* out) {
    __m512 sums[M][kVectors];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        sums[m][v] = first == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(out + m * kRows + v * 16);
    for (int64_t g = 0; g < groups; ++g, w += kVectors) {
      __m512i block[M][kVectors];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) block[m][v] = _mm512_set1_epi32(x[m][first + g].start);
#pragma GCC unroll 8
      for (int j = 0; j < kWords; ++j)
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const __m512i values = four(x[m][first + g], j);
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) block[m][v] = _mm512_dpbusd_epi32(block[m][v], w[v].words[j], values);
        }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sums[m][v] = add_scaled(sums[m][v], block[m][v], w[v].scale, x[m][first + g]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(out + m * kRows + v * 16, sums[m][v]);
  }

  KIMI_K3_AVX512_INT8 static void decode_rows(const PackedMatrix& w, int64_t row, const Ahead& ahead, int64_t first,
                                              int64_t groups, Decoded* out) {
    decode(w, row, ahead, first, groups,
           [&](int64_t g, const __m512i(&words)[kWords], __m512 scale) KIMI_K3_AVX512_INT8 __attribute__((always_inline)) {
#pragma GCC unroll 8
             for (int j = 0; j < kWords; ++j) out[g * kVectors].words[j] = words[j];
             out[g * kVectors].scale = scale;
           });
  }

  // Decoded groups stay in the first cache, beside the rows of a tile; and their scales, a byte each, fill 128 bits.
  static constexpr int64_t kPieceGroups = 16;

  static void rows(const PackedMatrix& w, int64_t first, int64_t count, const Ahead& ahead, const Int8Group* const* x,
                   int64_t m_count, float* out) {
    prefetch_scales(ahead, w, count);
    if (m_count <= 3) {
      for (int64_t n = 0; n < count; n += 16) switch (m_count) {
          case 1: direct<1>(w, first + n, ahead.from(n, w), x, out + n); break;
          case 2: direct<2>(w, first + n, ahead.from(n, w), x, out + n); break;
          default: direct<3>(w, first + n, ahead.from(n, w), x, out + n);
        }
      return;
    }
    alignas(64) Decoded decoded[kPieceGroups * kVectors];
    const int64_t groups = w.in / kGroup;
    for (int64_t group = 0; group < groups; group += kPieceGroups) {
      const int64_t piece = std::min(kPieceGroups, groups - group);
      for (int64_t v = 0; v < kVectors; ++v) decode_rows(w, first + 16 * v, ahead.from(16 * v, w), group, piece, decoded + v);
      for (int64_t m = 0; m < m_count; m += 6) {
        float* target = out + m * kRows;
        switch (m_count - m) {
          case 1: tile<1>(decoded, group, piece, x + m, target); break;
          case 2: tile<2>(decoded, group, piece, x + m, target); break;
          case 3: tile<3>(decoded, group, piece, x + m, target); break;
          case 4: tile<4>(decoded, group, piece, x + m, target); break;
          case 5: tile<5>(decoded, group, piece, x + m, target); break;
          default: tile<6>(decoded, group, piece, x + m, target);
        }
      }
    }
  }
};

#endif

}  // namespace kimi_k3
