// What attention over latents is made of: products of rows with packed panels, softmax of a tile of scores, packing.
//
// A panel is B of a product A B: [depth][64 columns] of 4-byte lanes. A lane is one float, or two bfloat16 that are
// neighbours along the depth; so are the lanes of a row of A. Depths are counted in lanes (`lanes<P>` rounds up, and the
// second half of a last odd lane is zero on both sides). The order of every sum depends on the depth alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>

#include "../cpu.h"

namespace kimi_k3::mla {

constexpr int64_t kColumns = 64;  // of a panel
constexpr int64_t kVector = 16;   // columns are computed in this unit; those past the wanted ones hold anything finite

template <class P>
constexpr int64_t lanes(int64_t elements) {
  return (elements + P::kUnit - 1) / P::kUnit;
}
template <class P>
constexpr int64_t panel_elements(int64_t depth) {
  return depth * kColumns * P::kUnit;
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
struct Buffer {  // aligned to a cache line, not initialised
  explicit Buffer(int64_t count)
      : start(static_cast<T*>(::operator new(std::max<int64_t>(count, 1) * sizeof(T), std::align_val_t(64)))) {}
  ~Buffer() { ::operator delete(start, std::align_val_t(64)); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* start;
};

// The running softmax of each row of a tile of scores, in base 2.
struct RunningSoftmax {
  float* maxima;   // of log2(e) scale score so far; -inf to start
  float* sums;     // of the unnormalised probabilities so far; 0 to start
  float* factors;  // what this tile multiplies earlier sums by
};

struct ScoreTile {
  const float* scores;
  int64_t stride, rows, columns;   // columns: those to compute, a multiple of 16
  int64_t first_visible, step;     // row i sees the first first_visible + i step columns
  float scale;                     // times log2(e)
};

// 2^x for x <= 0, relative error 1e-7: least squares on [-1/2, 1/2]. Below 2^-126 it is flushed to about 2^-126.
constexpr float kExp2[5] = {6.931469776e-01f, 2.402224208e-01f, 5.550733745e-02f, 9.671512812e-03f, 1.326472721e-03f};
constexpr float kLowest = -126.0f;

// Lanes of float32, made from T.
template <class T>
struct PlainPacking {
  static void copy(const T* row, int64_t width, float* out) {
    for (int64_t k = 0; k < width; ++k) out[k] = load(row + k);
  }
  // Rows, at most 64, become columns: panel [width][64]; zeros for columns without a row.
  static void transpose(const T* const* rows, int64_t count, int64_t width, float* panel) {
    // 16 rows of the panel at a time: both sides stay in the first cache.
    for (int64_t first = 0; first < width; first += 16) {
      const int64_t last = std::min(width, first + 16);
      for (int64_t j = 0; j < count; ++j)
        for (int64_t k = first; k < last; ++k) panel[k * kColumns + j] = load(rows[j] + k);
      for (int64_t k = first; k < last; ++k) std::fill(panel + k * kColumns + count, panel + (k + 1) * kColumns, 0.0f);
    }
  }
  // Columns first..first + width - 1 of rows, which stay rows: panel [count][64]; zeros past `width`.
  static void stack(const T* const* rows, int64_t count, int64_t first, int64_t width, float* panel) {
    for (int64_t t = 0; t < count; ++t, panel += kColumns) {
      for (int64_t j = 0; j < width; ++j) panel[j] = load(rows[t] + first + j);
      std::fill(panel + width, panel + kColumns, 0.0f);
    }
  }
  // The same two for the result [count][64] of a product.
  static void transpose_result(const float* result, int64_t count, float* panel) {
    const float* rows[kColumns];
    for (int64_t j = 0; j < count; ++j) rows[j] = result + j * kColumns;
    PlainPacking<float>::transpose(rows, count, kColumns, panel);
  }
  static void stack_result(const float* result, int64_t count, float* panel) {
    std::copy(result, result + count * kColumns, panel);
  }
};

// Any machine, in float32. The softmax is inlined into functions for each instruction set.
template <class T>
struct Plain : PlainPacking<T> {
  using Source = T;
  using Element = float;
  static constexpr int64_t kUnit = 1;

  static inline __attribute__((always_inline)) void softmax_body(const ScoreTile& tile, const RunningSoftmax& running,
                                                                 float* p, int64_t p_stride) {
    for (int64_t i = 0; i < tile.rows; ++i) {
      const float* scores = tile.scores + i * tile.stride;
      float* out = p + i * p_stride;
      const int64_t visible = std::min(tile.columns, tile.first_visible + i * tile.step);
      running.factors[i] = 1.0f;
      for (int64_t j = std::max<int64_t>(0, visible); j < tile.columns; ++j) out[j] = 0.0f;
      if (visible <= 0) continue;
      float largest = running.maxima[i];
      for (int64_t j = 0; j < visible; ++j) largest = std::max(largest, scores[j] * tile.scale);
      for (int64_t j = 0; j < visible; ++j) {
        float x = scores[j] * tile.scale - largest;
        x = x < kLowest ? kLowest : x;  // NaN stays
        const float n = std::nearbyint(x), r = x - n;
        float value = kExp2[4];
        for (int c = 3; c >= 0; --c) value = value * r + kExp2[c];
        value = value * r + 1.0f;
        const int32_t bits = (static_cast<int32_t>(std::max(kLowest, n)) + 127) << 23;
        float power;
        std::memcpy(&power, &bits, 4);
        out[j] = value * power;
      }
      float parts[8] = {};
      for (int64_t j = 0; j < visible; ++j) parts[j % 8] += out[j];
      const float sum = ((parts[0] + parts[4]) + (parts[1] + parts[5])) + ((parts[2] + parts[6]) + (parts[3] + parts[7]));
      running.factors[i] = std::exp2(running.maxima[i] - largest);
      running.sums[i] = running.sums[i] * running.factors[i] + sum;
      running.maxima[i] = largest;
    }
  }

  // out [rows][16 vectors] = factors (out) + a [rows][depth] panel; without factors, out is overwritten.
  static void product_generic(const float* a, int64_t a_stride, int64_t rows, const float* panel, int64_t depth,
                              int64_t vectors, const float* factors, float* out, int64_t out_stride) {
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t v = 0; v < vectors; ++v) {
        float* target = out + m * out_stride + v * kVector;
        float sums[kVector];
        for (int64_t j = 0; j < kVector; ++j) sums[j] = factors ? target[j] * factors[m] : 0.0f;
        for (int64_t k = 0; k < depth; ++k)
          for (int64_t j = 0; j < kVector; ++j)
            sums[j] += a[m * a_stride + k] * panel[k * kColumns + v * kVector + j];
        std::copy(sums, sums + kVector, target);
      }
  }
  static void softmax_generic(const ScoreTile& tile, const RunningSoftmax& running, float* p, int64_t p_stride) {
    softmax_body(tile, running, p, p_stride);
  }

#if KIMI_K3_X86
  template <int M>
  KIMI_K3_AVX2 static void tile_avx2(const float* a, int64_t a_stride, const float* b, int64_t depth,
                                     const float* factors, float* out, int64_t out_stride) {
    __m256 sums[M][2];
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int n = 0; n < 2; ++n)
        sums[m][n] = factors ? _mm256_mul_ps(_mm256_loadu_ps(out + m * out_stride + n * 8), _mm256_set1_ps(factors[m]))
                             : _mm256_setzero_ps();
    for (int64_t k = 0; k < depth; ++k) {
      const __m256 b0 = _mm256_loadu_ps(b + k * kColumns), b1 = _mm256_loadu_ps(b + k * kColumns + 8);
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        const __m256 x = _mm256_broadcast_ss(a + m * a_stride + k);
        sums[m][0] = _mm256_fmadd_ps(x, b0, sums[m][0]);
        sums[m][1] = _mm256_fmadd_ps(x, b1, sums[m][1]);
      }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int n = 0; n < 2; ++n) _mm256_storeu_ps(out + m * out_stride + n * 8, sums[m][n]);
  }
  static void product_avx2(const float* a, int64_t a_stride, int64_t rows, const float* panel, int64_t depth,
                           int64_t vectors, const float* factors, float* out, int64_t out_stride) {
    using Tile = void (*)(const float*, int64_t, const float*, int64_t, const float*, float*, int64_t);
    static constexpr Tile tiles[6] = {tile_avx2<1>, tile_avx2<2>, tile_avx2<3>, tile_avx2<4>, tile_avx2<5>, tile_avx2<6>};
    for (int64_t m = 0; m < rows; m += 6)
      for (int64_t v = 0; v < vectors; ++v)
        tiles[std::min<int64_t>(6, rows - m) - 1](a + m * a_stride, a_stride, panel + v * kVector, depth,
                                                  factors ? factors + m : nullptr, out + m * out_stride + v * kVector,
                                                  out_stride);
  }
  KIMI_K3_AVX2 static void softmax_avx2(const ScoreTile& tile, const RunningSoftmax& running, float* p, int64_t p_stride) {
    softmax_body(tile, running, p, p_stride);
  }
#endif

  static void product(const float* a, int64_t a_stride, int64_t rows, const float* panel, int64_t depth, int64_t vectors,
                      const float* factors, float* out, int64_t out_stride) {
#if KIMI_K3_X86
    if (active_isa() >= Isa::avx2)
      return product_avx2(a, a_stride, rows, panel, depth, vectors, factors, out, out_stride);
#endif
    product_generic(a, a_stride, rows, panel, depth, vectors, factors, out, out_stride);
  }
  // Probabilities of a tile, [rows][columns], and the running maxima and sums brought up to it.
  static void softmax(const ScoreTile& tile, const RunningSoftmax& running, float* p, int64_t p_stride) {
#if KIMI_K3_X86
    if (active_isa() >= Isa::avx2) return softmax_avx2(tile, running, p, p_stride);
#endif
    softmax_generic(tile, running, p, p_stride);
  }
};

#if KIMI_K3_X86

KIMI_K3_AVX512 inline __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? 0xffff : static_cast<__mmask16>((1u << std::max<int64_t>(0, count)) - 1);
}

KIMI_K3_AVX512 inline __m512 exp2_16(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(kLowest), x);  // in this order NaN stays
  const __m512 n = _mm512_roundscale_ps(x, 8), r = _mm512_sub_ps(x, n);
  __m512 value = _mm512_set1_ps(kExp2[4]);
#pragma GCC unroll 4
  for (int c = 3; c >= 0; --c) value = _mm512_fmadd_ps(value, r, _mm512_set1_ps(kExp2[c]));
  return _mm512_scalef_ps(_mm512_fmadd_ps(value, r, _mm512_set1_ps(1.0f)), n);
}

KIMI_K3_AVX512 inline void store16(float* to, __m512 values) { _mm512_storeu_ps(to, values); }
KIMI_K3_AVX512 inline void store16(bfloat16* to, __m512 values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(values));
}

template <class E>
KIMI_K3_AVX512 void softmax_avx512(const ScoreTile& tile, const RunningSoftmax& running, E* p, int64_t p_stride) {
  const __m512 scale = _mm512_set1_ps(tile.scale);
  for (int64_t i = 0; i < tile.rows; ++i) {
    const float* scores = tile.scores + i * tile.stride;
    E* out = p + i * p_stride;
    const int64_t visible = std::min(tile.columns, tile.first_visible + i * tile.step);
    if (visible <= 0) {
      running.factors[i] = 1.0f;
      std::fill(out, out + tile.columns, E(0));
      continue;
    }
    __m512 largest = _mm512_set1_ps(running.maxima[i]);
    for (int64_t j = 0; j < visible; j += kVector)
      largest = _mm512_mask_max_ps(largest, first_lanes(visible - j), largest,
                                   _mm512_mul_ps(scale, _mm512_loadu_ps(scores + j)));
    const float maximum = _mm512_reduce_max_ps(largest);
    largest = _mm512_set1_ps(maximum);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < tile.columns; j += kVector) {
      const __m512 x = _mm512_fmsub_ps(scale, _mm512_loadu_ps(scores + j), largest);
      const __m512 value = _mm512_maskz_mov_ps(first_lanes(visible - j), exp2_16(x));
      sum = _mm512_add_ps(sum, value);
      store16(out + j, value);
    }
    running.factors[i] = std::exp2(running.maxima[i] - maximum);
    running.sums[i] = running.sums[i] * running.factors[i] + _mm512_reduce_add_ps(sum);
    running.maxima[i] = maximum;
  }
}

// 16 rows of up to 16 lanes each become `count` rows of 16 lanes.
KIMI_K3_AVX512 inline void transpose16(__m512i (&x)[16], int64_t count, void* out, int64_t out_stride) {
  __m512i y[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
    y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
    x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xdd);
  }
  auto* to = static_cast<uint8_t*>(out);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i)
    if (i < count) _mm512_storeu_si512(to + i * out_stride, x[i]);
}

// Rows of 4-byte lanes, at most 64, become columns: panel [width][64], zeros for columns without a row.
template <class T>
KIMI_K3_AVX512 void transpose_lanes(const T* const* rows, int64_t count, int64_t width, void* panel) {
  for (int64_t j = 0; j < kColumns; j += 16)
    for (int64_t k = 0; k < width; k += 16) {
      const __mmask16 mask = first_lanes(width - k);
      __m512i x[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i)
        x[i] = j + i < count ? _mm512_maskz_loadu_epi32(mask, reinterpret_cast<const uint8_t*>(rows[j + i]) + k * 4)
                             : _mm512_setzero_si512();
      transpose16(x, width - k, static_cast<uint8_t*>(panel) + (k * kColumns + j) * 4, kColumns * 4);
    }
}

struct Float32Lanes {
  using Element = float;
  using Register = __m512;
  static constexpr int64_t kUnit = 1;
  KIMI_K3_AVX512 static inline Register load_lanes(const float* x) { return _mm512_loadu_ps(x); }
  KIMI_K3_AVX512 static inline Register repeat_lane(const float* x) { return _mm512_set1_ps(*x); }
  KIMI_K3_AVX512 static inline void accumulate(__m512& sum, Register a, Register b) { sum = _mm512_fmadd_ps(a, b, sum); }
};

struct Bf16Lanes {
  using Element = bfloat16;
  using Register = __m512bh;
  static constexpr int64_t kUnit = 2;
  KIMI_K3_AVX512 static inline Register load_lanes(const bfloat16* x) { return (__m512bh)_mm512_loadu_si512(x); }
  KIMI_K3_AVX512 static inline Register repeat_lane(const bfloat16* x) {
    int32_t pair;
    std::memcpy(&pair, x, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  KIMI_K3_AVX512 static inline void accumulate(__m512& sum, Register a, Register b) { sum = _mm512_dpbf16_ps(sum, a, b); }
};

// Products of up to 6 rows and 64 columns at a time: 24 sums in registers.
template <class Lanes>
struct Avx512Product : Lanes {
  using typename Lanes::Element;
  using typename Lanes::Register;

  template <int M, int N>
  KIMI_K3_AVX512 static void tile(const Element* a, int64_t a_stride, const Element* b, int64_t depth,
                                  const float* factors, float* out, int64_t out_stride) {
    __m512 sums[M][N];
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
        sums[m][n] = factors ? _mm512_mul_ps(_mm512_loadu_ps(out + m * out_stride + n * kVector), _mm512_set1_ps(factors[m]))
                             : _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; ++k) {
      Register columns[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) columns[n] = Lanes::load_lanes(b + (k * kColumns + n * kVector) * Lanes::kUnit);
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        const Register x = Lanes::repeat_lane(a + m * a_stride + k * Lanes::kUnit);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) Lanes::accumulate(sums[m][n], x, columns[n]);
      }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) _mm512_storeu_ps(out + m * out_stride + n * kVector, sums[m][n]);
  }

  static void product(const Element* a, int64_t a_stride, int64_t rows, const Element* panel, int64_t depth,
                      int64_t vectors, const float* factors, float* out, int64_t out_stride) {
    using Tile = void (*)(const Element*, int64_t, const Element*, int64_t, const float*, float*, int64_t);
    static constexpr Tile tiles[6][4] = {
        {tile<1, 1>, tile<1, 2>, tile<1, 3>, tile<1, 4>}, {tile<2, 1>, tile<2, 2>, tile<2, 3>, tile<2, 4>},
        {tile<3, 1>, tile<3, 2>, tile<3, 3>, tile<3, 4>}, {tile<4, 1>, tile<4, 2>, tile<4, 3>, tile<4, 4>},
        {tile<5, 1>, tile<5, 2>, tile<5, 3>, tile<5, 4>}, {tile<6, 1>, tile<6, 2>, tile<6, 3>, tile<6, 4>}};
    for (int64_t m = 0; m < rows;) {
      // Even shares: 20 rows as 5 5 5 5, not as 6 6 6 2.
      const int64_t share = divide_up(rows - m, divide_up(rows - m, 6));
      tiles[share - 1][vectors - 1](a + m * a_stride, a_stride, panel, depth, factors ? factors + m : nullptr,
                                    out + m * out_stride, out_stride);
      m += share;
    }
  }
};

struct Float32Avx512 : Avx512Product<Float32Lanes>, PlainPacking<float> {
  using Source = float;

  static void transpose(const float* const* rows, int64_t count, int64_t width, float* panel) {
    transpose_lanes(rows, count, width, panel);
  }
  static void transpose_result(const float* result, int64_t count, float* panel) {
    const float* rows[kColumns];
    for (int64_t j = 0; j < count; ++j) rows[j] = result + j * kColumns;
    transpose_lanes(rows, count, kColumns, panel);
  }
  static void softmax(const ScoreTile& tile, const RunningSoftmax& running, float* p, int64_t p_stride) {
    softmax_avx512(tile, running, p, p_stride);
  }
};

struct Bf16Avx512 : Avx512Product<Bf16Lanes> {
  using Source = bfloat16;

  static void copy(const bfloat16* row, int64_t width, bfloat16* out) {
    std::copy(row, row + width, out);
    if (width % 2) out[width] = 0;
  }
  static void transpose(const bfloat16* const* rows, int64_t count, int64_t width, bfloat16* panel) {
    transpose_lanes(rows, count, width / 2, panel);
    if (width % 2 == 0) return;
    bfloat16* last = panel + panel_elements<Bf16Avx512>(width / 2);
    std::fill(last, last + 2 * kColumns, bfloat16(0));
    for (int64_t j = 0; j < count; ++j) last[2 * j] = rows[j][width - 1];
  }
  // Two registers of 32 elements, neighbours along the depth, as two registers of lanes.
  KIMI_K3_AVX512 static inline void store_pairs(__m512i even, __m512i odd, bfloat16* out) {
    alignas(64) static const uint16_t low[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i first = _mm512_load_si512(low), second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(even, first, odd));
    _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi16(even, second, odd));
  }
  KIMI_K3_AVX512 static void stack(const bfloat16* const* rows, int64_t count, int64_t first, int64_t width, bfloat16* panel) {
    for (int64_t t = 0; t < count; t += 2)
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t left = width - half * 32, column = first + half * 32;
        const __mmask32 mask = left >= 32 ? ~0u : (1u << std::max<int64_t>(0, left)) - 1;
        const __m512i even = _mm512_maskz_loadu_epi16(mask, rows[t] + column);
        const __m512i odd = t + 1 < count ? _mm512_maskz_loadu_epi16(mask, rows[t + 1] + column) : _mm512_setzero_si512();
        store_pairs(even, odd, panel + t * kColumns + half * 64);
      }
  }
  KIMI_K3_AVX512 static inline __m512i round32(const float* x) {
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x));
  }
  KIMI_K3_AVX512 static void transpose_result(const float* result, int64_t count, bfloat16* panel) {
    alignas(64) bfloat16 rounded[kColumns * kColumns];
    const bfloat16* rows[kColumns];
    for (int64_t j = 0; j < count; ++j) {
      rows[j] = rounded + j * kColumns;
      for (int64_t half = 0; half < kColumns; half += 32)
        _mm512_store_si512(rounded + j * kColumns + half, round32(result + j * kColumns + half));
    }
    transpose_lanes(rows, count, kColumns / 2, panel);
  }
  KIMI_K3_AVX512 static void stack_result(const float* result, int64_t count, bfloat16* panel) {
    for (int64_t t = 0; t < count; t += 2)
      for (int64_t half = 0; half < kColumns; half += 32) {
        const float* row = result + t * kColumns + half;
        store_pairs(round32(row), t + 1 < count ? round32(row + kColumns) : _mm512_setzero_si512(),
                    panel + t * kColumns + half * 2);
      }
  }
  static void softmax(const ScoreTile& tile, const RunningSoftmax& running, bfloat16* p, int64_t p_stride) {
    softmax_avx512(tile, running, p, p_stride);
  }
};

#endif

// Run f with the policy for a dtype and the instruction set in use.
template <class F>
void with_policy(bool is_bf16, const F& f) {
#if KIMI_K3_X86
  if (active_isa() == Isa::avx512) return is_bf16 ? f(Bf16Avx512{}) : f(Float32Avx512{});
#endif
  is_bf16 ? f(Plain<bfloat16>{}) : f(Plain<float>{});
}

}  // namespace kimi_k3::mla
