// Products of activation rows with MXFP4 weight rows, straight from the packed bytes.
//
// A block is at most kRows weight rows, 16 or 32. Each policy has a layout for a prepared activation row, and `rows` for
//   out[m * kRows + n] = sum_k x_m[k] w_n[k]
// The order of an output's sum depends on K alone: not on how many rows there are, nor on which path they take.
#pragma once

#include <algorithm>

#include "situ.h"

namespace kimi_k3 {

constexpr int64_t kGroup = 32;     // weights under one scale
constexpr int64_t kBlockRows = 16; // weight rows of one call, of most policies

// One matrix [out, in] of packed codes and scales, both row-major.
struct PackedMatrix {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t in;
  const uint8_t* code_row(int64_t n) const { return codes + n * (in / 2); }
  const uint8_t* scale_row(int64_t n) const { return scales + n * (in / kGroup); }
};

// The rows that a thread reads after these of a block, asked for ahead by as many rows: a block lasts longer than memory
// takes to answer, and blocks of two matrices take turns, which a processor's own prefetcher does not follow.
struct Ahead {
  Ahead(const PackedMatrix& next, int64_t first) : codes(next.code_row(first)), scales(next.scale_row(first)) {}
  Ahead from(int64_t n, const PackedMatrix& w) const {
    Ahead later = *this;
    later.codes += n * (w.in / 2), later.scales += n * (w.in / kGroup);
    return later;
  }
  const uint8_t *codes, *scales;
};

#if KIMI_K3_X86
inline __attribute__((always_inline)) void prefetch(const uint8_t* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
}
inline void prefetch_scales(const Ahead& ahead, const PackedMatrix& w, int64_t count) {
  for (int64_t byte = 0; byte < count * (w.in / kGroup); byte += 64) prefetch(ahead.scales + byte);
}
#endif

constexpr float kE2M1[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

inline float scale_value(uint8_t exponent) {
  uint32_t bits = exponent == 0 ? 0x00400000u : exponent == 255 ? 0x7fc00000u : static_cast<uint32_t>(exponent) << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Any machine: float32 sums in 8 lanes.
template <class T>
struct PlainRows {
  using Element = float;
  using Activation = T;
  static constexpr int64_t kRows = kBlockRows;
  static int64_t padded(int64_t k) { return k; }
  static int64_t place(int64_t k) { return k; }
  static void put(float* row, int64_t k, float value) {
    T rounded;
    store(&rounded, value);  // a hidden activation has the dtype of x
    row[k] = load(&rounded);
  }
  static void put_block(Element* row, int64_t k, const float* values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) put(row, k + i, values[i]);
  }
  static void store_block(Activation* out, const float* values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) store(out + i, values[i]);
  }
  static void add_weighted(float* sum, float weight, const Activation* row, int64_t count) {
    for (int64_t i = 0; i < count; ++i) sum[i] += weight * load(row + i);
  }

  static void rows(const PackedMatrix& w, int64_t first, int64_t count, const Ahead&, const float* const* x, int64_t m_count,
                   float* out) {
    std::vector<float> decoded(w.in);
    for (int64_t n = 0; n < count; ++n) {
      const uint8_t *codes = w.code_row(first + n), *scales = w.scale_row(first + n);
      for (int64_t g = 0; g < w.in / kGroup; ++g) {
        float scale = scale_value(scales[g]);
        for (int64_t j = 0; j < kGroup / 2; ++j) {
          uint8_t byte = codes[g * (kGroup / 2) + j];
          decoded[g * kGroup + 2 * j] = kE2M1[byte & 15] * scale;
          decoded[g * kGroup + 2 * j + 1] = kE2M1[byte >> 4] * scale;
        }
      }
      for (int64_t m = 0; m < m_count; ++m) {
        float lanes[8] = {};
        const float* row = x[m];
        for (int64_t k = 0; k < w.in; k += 8)
          for (int64_t lane = 0; lane < 8; ++lane) lanes[lane] += row[k + lane] * decoded[k + lane];
        out[m * kBlockRows + n] = ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
      }
    }
  }
  static void activate(const float* gate, const float* up, int64_t count, const Situ& s, float* hidden) {
    for (int64_t n = 0; n < count; ++n) hidden[n] = situ(gate[n], up[n], s);
  }
};

#if KIMI_K3_X86

// bfloat16 activations. 64 bytes are 32 words of four codes; code j of all words is one table lookup, because the lookup
// reads 5 bits and the table repeats every 16. So lane i of lookup j holds elements 8i + j and 8i + j + 4 of the 128,
// and a prepared row is permuted to match; one scale covers 4 lanes.
struct Bf16Rows {
  using Element = bfloat16;
  using Activation = bfloat16;
  static constexpr int64_t kRows = kBlockRows;
  static constexpr int64_t kBlock = 128;
  static int64_t padded(int64_t k) { return (k + kBlock - 1) / kBlock * kBlock; }
  static int64_t place(int64_t k) {
    int64_t in_block = k % kBlock, lane = in_block / 8, j = in_block % 4, half = in_block / 4 % 2;
    return k - in_block + j * 32 + lane * 2 + half;
  }
  static void put(bfloat16* row, int64_t k, float value) { row[place(k)] = to_bfloat16(value); }
  // 16 values from a multiple of 16: two lanes of each lookup, so four runs of four words.
  KIMI_K3_AVX512 static void put_block(bfloat16* row, int64_t k, const float* values, int64_t count) {
    if (count < 16) {
      for (int64_t i = 0; i < count; ++i) put(row, k + i, values[i]);
      return;
    }
    const __m256i order = _mm256_set_epi16(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    __m256i words = _mm256_permutexvar_epi16(order, (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(values)));
    bfloat16* target = row + place(k);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(words));
    _mm_storeh_pd(reinterpret_cast<double*>(target + 32), _mm_castsi128_pd(_mm256_castsi256_si128(words)));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(target + 64), _mm256_extracti128_si256(words, 1));
    _mm_storeh_pd(reinterpret_cast<double*>(target + 96), _mm_castsi128_pd(_mm256_extracti128_si256(words, 1)));
  }
  KIMI_K3_AVX512 static void store_block(bfloat16* out, const float* values, int64_t count) {
    __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
    _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, values)));
  }
  KIMI_K3_AVX512 static void add_weighted(float* sum, float weight, const bfloat16* row, int64_t count) {
    const __m512 factor = _mm512_set1_ps(weight);
    for (int64_t i = 0; i < count; i += 16) {
      __mmask16 mask = count - i < 16 ? static_cast<__mmask16>((1u << (count - i)) - 1) : 0xffff;
      __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row + i)), 16);
      __m512 total = _mm512_fmadd_ps(factor, _mm512_castsi512_ps(wide), _mm512_maskz_loadu_ps(mask, sum + i));
      _mm512_mask_storeu_ps(sum + i, mask, total);
    }
  }

  struct Decoded {  // one weight row's block: four lookups and the scale of each lane
    __m512i values[4];
    __m512 scale;
  };

  KIMI_K3_AVX512 static inline __m512i table() {
    alignas(64) static const bfloat16 words[32] = {
        0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
        0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
    return _mm512_load_si512(words);
  }

  template <bool kWhole>
  KIMI_K3_AVX512 static inline __attribute__((always_inline)) void decode(const uint8_t* codes, const uint8_t* scales,
                                                                          int64_t left, __m512i lut, Decoded& out) {
    __m512i bytes;
    uint32_t packed_scales;
    if (kWhole) {
      bytes = _mm512_loadu_si512(codes);
      std::memcpy(&packed_scales, scales, 4);
    } else {
      bytes = _mm512_maskz_loadu_epi8((1ull << (left / 2)) - 1, codes);
      packed_scales = 0;
      std::memcpy(&packed_scales, scales, left / kGroup);
    }
    out.values[0] = _mm512_permutexvar_epi16(bytes, lut);
    out.values[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), lut);
    out.values[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 8), lut);
    out.values[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 12), lut);
    // 128-bit lane l takes scale byte l to bits 16..23 of each float, then to the exponent.
    const __m512i spread = _mm512_set_epi8(
        -1, 3, -1, -1, -1, 3, -1, -1, -1, 3, -1, -1, -1, 3, -1, -1, -1, 2, -1, -1, -1, 2, -1, -1, -1, 2, -1, -1, -1, 2, -1, -1,
        -1, 1, -1, -1, -1, 1, -1, -1, -1, 1, -1, -1, -1, 1, -1, -1, -1, 0, -1, -1, -1, 0, -1, -1, -1, 0, -1, -1, -1, 0, -1, -1);
    __m512i exponents = _mm512_shuffle_epi8(_mm512_set1_epi32(static_cast<int>(packed_scales)), spread);
    out.scale = _mm512_castsi512_ps(_mm512_slli_epi32(exponents, 7));
  }

  // The same with the scale in the exponents, for many rows: one add instead of a multiply-add at the end of a block, and
  // equal bits, since a power of two moves no rounding while nothing underflows.
  struct Scaled {
    __m512i values[4];
  };
  static constexpr int kLeastScale = 96, kMostScale = 159;  // 2^-31 .. 2^32

  // Whether all scales of these rows, which lie side by side, are in that range.
  KIMI_K3_AVX512 static bool are_scales_moderate(const PackedMatrix& w, int64_t first, int64_t count) {
    const uint8_t* scales = w.scale_row(first);
    const int64_t bytes = count * (w.in / kGroup);
    const __m512i least = _mm512_set1_epi8(kLeastScale), range = _mm512_set1_epi8(kMostScale - kLeastScale);
    __mmask64 outside = 0;
    for (int64_t i = 0; i < bytes; i += 64) {
      const __mmask64 mask = bytes - i < 64 ? (1ull << (bytes - i)) - 1 : ~0ull;
      const __m512i offsets = _mm512_sub_epi8(_mm512_maskz_loadu_epi8(mask, scales + i), least);
      outside |= _mm512_mask_cmpgt_epu8_mask(mask, offsets, range);
    }
    return outside == 0;
  }

  template <bool kWhole>
  KIMI_K3_AVX512 static inline __attribute__((always_inline)) void decode_scaled(const uint8_t* codes, const uint8_t* scales,
                                                                                 int64_t left, __m512i lut, Scaled& out) {
    Decoded plain;
    decode<kWhole>(codes, scales, left, lut, plain);
    // A float's upper half is its bfloat16, so the exponent lies right; here in both halves, without the bias.
    const __m512i exponents = _mm512_castps_si512(plain.scale);
    const __m512i high = _mm512_sub_epi16(_mm512_or_si512(exponents, _mm512_srli_epi32(exponents, 16)), _mm512_set1_epi16(127 << 7));
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
      out.values[j] = _mm512_mask_add_epi16(plain.values[j], _mm512_test_epi16_mask(plain.values[j], magnitude), plain.values[j], high);
  }

  template <int M>
  KIMI_K3_AVX512 static inline __attribute__((always_inline)) void accumulate(const Scaled* w, int64_t w_stride,
                                                                              const bfloat16* const* x, int64_t k,
                                                                              __m512 (&sums)[M][4]) {
    __m512 block[M][4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __m512bh values[4];
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) values[n] = (__m512bh)w[n * w_stride].values[j];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        __m512bh row = (__m512bh)_mm512_loadu_si512(x[m] + k + j * 32);
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n)
          block[m][n] = _mm512_dpbf16_ps(j == 0 ? _mm512_setzero_ps() : block[m][n], values[n], row);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) sums[m][n] = _mm512_add_ps(block[m][n], sums[m][n]);
  }

  // The lanes' sums of four accumulators; the order is the same wherever an output is computed.
  KIMI_K3_AVX512 static inline __attribute__((always_inline)) void reduce(const __m512 (&sums)[4], float* out) {
    __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(sums[0], sums[1]), _mm512_unpackhi_ps(sums[0], sums[1]));
    __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(sums[2], sums[3]), _mm512_unpackhi_ps(sums[2], sums[3]));
    __m512 all = _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }

  // Few rows: decode in registers.
  template <int M, int N = 4>
  KIMI_K3_AVX512 static void direct(const PackedMatrix& w, int64_t first, const Ahead& ahead, const bfloat16* const* x,
                                    float* out) {
    __m512 sums[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[m][n] = _mm512_setzero_ps();
    const __m512i lut = table();
    const int64_t code_stride = w.in / 2, scale_stride = w.in / kGroup, whole = w.in / kBlock * kBlock;
    const uint8_t *codes = w.code_row(first), *scales = w.scale_row(first), *next = ahead.codes;
    prefetch_scales(ahead, w, N);
    for (int64_t k = 0; k < whole; k += kBlock, codes += kBlock / 2, scales += kBlock / kGroup, next += kBlock / 2)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        prefetch(next + n * code_stride);
        add_block<true, M, N>(codes + n * code_stride, scales + n * scale_stride, kBlock, lut, x, k, n, sums);
      }
    if (whole < w.in)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n)
        add_block<false, M, N>(codes + n * code_stride, scales + n * scale_stride, w.in - whole, lut, x, whole, n, sums);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) reduce(sums[m], out + m * kBlockRows);
  }

  template <bool kWhole, int M, int N>
  KIMI_K3_AVX512 static inline __attribute__((always_inline)) void add_block(const uint8_t* codes, const uint8_t* scales,
                                                                             int64_t left, __m512i lut,
                                                                             const bfloat16* const* x, int64_t k, int n,
                                                                             __m512 (&sums)[M][N]) {
    Decoded row;
    decode<kWhole>(codes, scales, left, lut, row);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      __m512 block = _mm512_setzero_ps();
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
        block = _mm512_dpbf16_ps(block, (__m512bh)row.values[j], (__m512bh)_mm512_loadu_si512(x[m] + k + j * 32));
      sums[m][n] = _mm512_fmadd_ps(block, row.scale, sums[m][n]);
    }
  }

  static void direct_rows(const PackedMatrix& w, int64_t first, const Ahead& ahead, const bfloat16* const* x, int64_t m,
                          float* out) {
    switch (m) {
      case 1: return direct<1>(w, first, ahead, x, out);
      case 2: return direct<2>(w, first, ahead, x, out);
      default: return direct<3>(w, first, ahead, x, out);
    }
  }

  // Many rows: from four weight rows' blocks first .. first + blocks that were decoded once, [4][blocks]. Between the
  // pieces of a long row the sums lie in `partial`.
  template <int M>
  KIMI_K3_AVX512 static void tile(const Scaled* w, int64_t first, int64_t blocks, bool is_last, const bfloat16* const* x,
                                  __m512 (*partial)[kBlockRows], float* out) {
    __m512 sums[M][4];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) sums[m][n] = first == 0 ? _mm512_setzero_ps() : partial[m][n];
    for (int64_t b = 0; b < blocks; ++b) accumulate<M>(w + b, blocks, x, (first + b) * kBlock, sums);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      if (is_last) {
        reduce(sums[m], out + m * kBlockRows);
        continue;
      }
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) partial[m][n] = sums[m][n];
    }
  }

  // Blocks first .. first + blocks of 16 weight rows, [16][blocks].
  KIMI_K3_AVX512 static void decode_rows(const PackedMatrix& w, int64_t row, int64_t count, const Ahead& ahead,
                                         int64_t first, int64_t blocks, Scaled* out) {
    const __m512i lut = table();
    if (first == 0) prefetch_scales(ahead, w, count);
    for (int64_t n = 0; n < count; ++n) {
      const uint8_t* codes = w.code_row(row + n) + first * (kBlock / 2);
      const uint8_t* scales = w.scale_row(row + n) + first * (kBlock / kGroup);
      const uint8_t* next = ahead.codes + n * (w.in / 2) + first * (kBlock / 2);
      int64_t left = std::min(w.in - first * kBlock, blocks * kBlock);
      for (; left >= kBlock; left -= kBlock, codes += kBlock / 2, scales += kBlock / kGroup, next += kBlock / 2) {
        prefetch(next);
        decode_scaled<true>(codes, scales, kBlock, lut, *out++);
      }
      if (left > 0) decode_scaled<false>(codes, scales, left, lut, *out++);
    }
  }

  // What is read again and again stays in the first cache: decoded blocks of 16 weight rows, and three rows of x.
  static constexpr int64_t kPieceBlocks = 6;
  static constexpr int64_t kMostRows = 512;  // whose sums are held between two pieces

  KIMI_K3_AVX512 static void rows(const PackedMatrix& w, int64_t first, int64_t count, const Ahead& ahead,
                                  const bfloat16* const* x, int64_t m_count, float* out) {
    // Widths are multiples of 32 and blocks of 16: `count` is a multiple of 16.
    if (m_count <= 3 || !are_scales_moderate(w, first, count)) {
      for (int64_t n = 0; n < count; n += 4)
        for (int64_t m = 0; m < m_count; m += 3)
          direct_rows(w, first + n, ahead.from(n, w), x + m, m_count - m, out + m * kBlockRows + n);
      return;
    }
    const int64_t blocks = padded(w.in) / kBlock;
    if (blocks > kPieceBlocks && m_count > kMostRows) {
      for (int64_t m = 0; m < m_count; m += kMostRows)
        rows(w, first, count, ahead, x + m, std::min(kMostRows, m_count - m), out + m * kBlockRows);
      return;
    }
    alignas(64) Scaled decoded[kBlockRows * kPieceBlocks];
    static thread_local std::vector<std::array<float, 16 * kBlockRows + 16>> scratch;  // one row more: it is aligned below
    if (blocks > kPieceBlocks) scratch.resize(m_count);
    auto* partial = reinterpret_cast<__m512(*)[kBlockRows]>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) & ~uintptr_t(63));
    for (int64_t block = 0; block < blocks; block += kPieceBlocks) {
      const int64_t piece = std::min(kPieceBlocks, blocks - block);
      const bool is_last = block + piece == blocks;
      decode_rows(w, first, count, ahead, block, piece, decoded);
      for (int64_t m = 0; m < m_count; m += 3)
        for (int64_t n = 0; n < count; n += 4) {
          const Scaled* weights = decoded + n * piece;
          auto* sums = reinterpret_cast<__m512(*)[kBlockRows]>(&partial[m][n]);
          float* target = out + m * kBlockRows + n;
          switch (m_count - m) {
            case 1: tile<1>(weights, block, piece, is_last, x + m, sums, target); break;
            case 2: tile<2>(weights, block, piece, is_last, x + m, sums, target); break;
            default: tile<3>(weights, block, piece, is_last, x + m, sums, target);
          }
        }
    }
  }

  KIMI_K3_AVX512 static void activate(const float* gate, const float* up, int64_t, const Situ& s, float* hidden) {
    _mm512_storeu_ps(hidden, situ16(_mm512_loadu_ps(gate), _mm512_loadu_ps(up), s));
  }
};

// float32 activations: per group of 32 the 16 even elements, then the 16 odd ones.
struct Float32Rows {
  using Element = float;
  using Activation = float;
  static constexpr int64_t kRows = kBlockRows;
  static int64_t padded(int64_t k) { return k; }
  static int64_t place(int64_t k) { return k - k % kGroup + k % 2 * 16 + k % kGroup / 2; }
  static void put(float* row, int64_t k, float value) { row[place(k)] = value; }
  static void put_block(float* row, int64_t k, const float* values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) put(row, k + i, values[i]);
  }
  static void store_block(float* out, const float* values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) store(out + i, values[i]);
  }
  static void add_weighted(float* sum, float weight, const float* row, int64_t count) {
    for (int64_t i = 0; i < count; ++i) sum[i] += weight * load(row + i);
  }

  template <int M>
  KIMI_K3_AVX512 static void dot(const PackedMatrix& w, int64_t n, const float* const* x, float* out) {
    const __m512 lut = _mm512_loadu_ps(kE2M1);
    __m512 sums[M];
    for (int m = 0; m < M; ++m) sums[m] = _mm512_setzero_ps();
    const uint8_t *codes = w.code_row(n), *scales = w.scale_row(n);
    for (int64_t g = 0; g < w.in / kGroup; ++g) {
      __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + g * 16)));
      __m512 even = _mm512_permutexvar_ps(bytes, lut), odd = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), lut);
      __m512 scale = _mm512_set1_ps(scale_value(scales[g]));
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const float* row = x[m] + g * kGroup;
        __m512 block = _mm512_fmadd_ps(odd, _mm512_loadu_ps(row + 16), _mm512_mul_ps(even, _mm512_loadu_ps(row)));
        sums[m] = _mm512_fmadd_ps(block, scale, sums[m]);
      }
    }
    for (int m = 0; m < M; ++m) out[m * kBlockRows] = _mm512_reduce_add_ps(sums[m]);
  }

  static void rows(const PackedMatrix& w, int64_t first, int64_t count, const Ahead&, const float* const* x, int64_t m_count,
                   float* out) {
    for (int64_t n = 0; n < count; ++n) {
      int64_t m = 0;
      for (; m + 8 <= m_count; m += 8) dot<8>(w, first + n, x + m, out + m * kBlockRows + n);
      for (; m < m_count; ++m) dot<1>(w, first + n, x + m, out + m * kBlockRows + n);
    }
  }

  KIMI_K3_AVX512 static void activate(const float* gate, const float* up, int64_t, const Situ& s, float* hidden) {
    _mm512_storeu_ps(hidden, situ16(_mm512_loadu_ps(gate), _mm512_loadu_ps(up), s));
  }
};

#endif

}  // namespace kimi_k3
