// Activation rows times several weight matrices: every weight is read from memory once.
#include <algorithm>
#include <limits>

#include "../cpu.h"

namespace kimi_k3 {

namespace {

constexpr int64_t kOutputs = 64;     // rows of weights in a block
constexpr int64_t kFewRows = 4;      // up to so many rows of x memory sets the pace,
constexpr int64_t kFewOutputs = 24;  // and blocks are small, so that no thread is left waiting

// Rows of x are multiplied in groups. Six beside two rows of w, or three beside three, fill sixteen registers with sums
// and operands, six beside four fill thirty-two. This many of `left` rows are the next group:
int64_t group_rows(int64_t left) {
  if (left == 7 || left == 8) return 4;  // one or two rows alone would leave adders idle
  return std::min<int64_t>(left, 6);
}

}  // namespace

}  // namespace kimi_k3

#define KIMI_K3_BODY "matvec/kernels.h"
#include "../for_each_isa.h"

namespace kimi_k3 {

namespace {

constexpr int64_t kManyRows = 64;  // from here on a library GEMM is faster
constexpr int64_t kPanel = 96;     // rows of x at once beside one block of weights

// torch's bfloat16 GEMM reaches a tenth of the float32 rate on processors without instructions for it.
int64_t most_rows(bool is_bf16) {
  return is_bf16 && active_isa() == Isa::avx2 ? std::numeric_limits<int64_t>::max() : kManyRows - 1;
}

#if KIMI_K3_X86

// Elements of w asked for ahead, or the next tile where that is farther; in the order of memory, which hardware follows
// better than the rows of a tile.
constexpr int64_t kAhead512 = 4096;

KIMI_K3_AVX512 inline __m512 multiply_add(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// y[n] = the sum of the lanes of sums[n], N sums in one tree that pairs the lanes as _mm512_reduce_add_ps does.
template <int N>
KIMI_K3_AVX512 inline void sum_lanes(const __m512* sums, float* y) {
  if constexpr (N == 1) {
    *y = _mm512_reduce_add_ps(sums[0]);
  } else {
    __m512 halves[N / 2];
    for (int n = 0; n < N; n += 2)
      halves[n / 2] = _mm512_add_ps(_mm512_shuffle_f32x4(sums[n], sums[n + 1], 0x44), _mm512_shuffle_f32x4(sums[n], sums[n + 1], 0xee));
    const __m512 other = halves[N / 2 - 1];  // with two sums each comes twice
    __m512 sum = _mm512_add_ps(_mm512_shuffle_f32x4(halves[0], other, 0x88), _mm512_shuffle_f32x4(halves[0], other, 0xdd));
    sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0x4e));
    sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0xb1));
    y[0] = _mm512_cvtss_f32(sum), y[1] = _mm_cvtss_f32(_mm512_extractf32x4_ps(sum, 1));
    if constexpr (N == 4) y[2] = _mm_cvtss_f32(_mm512_extractf32x4_ps(sum, 2)), y[3] = _mm_cvtss_f32(_mm512_extractf32x4_ps(sum, 3));
  }
}

// y[m * stride + n] = sum_k x[m][k] w[n][k] for a group of M rows of x, whose vectors take turns. The order of a sum
// depends on K alone.
template <int M, int N>
KIMI_K3_AVX512 void tile512(const bfloat16* x, const bfloat16* w, int64_t k_count, float* y, int64_t stride) {
  __m512 sums[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[m][n] = _mm512_setzero_ps();
  const bfloat16* ahead = w + std::max(kAhead512, N * k_count);
  int64_t k = 0;
  for (; k + 32 <= k_count; k += 32, x += 32 * M, ahead += 32 * N) {
    __m512i weights[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead + 32 * n), _MM_HINT_T0);
      weights[n] = _mm512_loadu_si512(w + n * k_count + k);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512i row = _mm512_load_si512(x + 32 * m);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] = multiply_add(sums[m][n], weights[n], row);
    }
  }
  if (k < k_count) {
    const __mmask32 mask = static_cast<__mmask32>((uint64_t(1) << (k_count - k)) - 1);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
        sums[m][n] = multiply_add(sums[m][n], _mm512_maskz_loadu_epi16(mask, w + n * k_count + k), _mm512_load_si512(x + 32 * m));
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) sum_lanes<N>(sums[m], y + m * stride);
}

// All rows of x, in groups, times N rows of w, which stay in the first cache from one group to the next. Each group asks for
// the next rows of w, which x may have pushed out again.
template <int N>
void rows512(const bfloat16* x, int64_t m_count, int64_t padded, const bfloat16* w, int64_t k, float* y, int64_t stride) {
  for (int64_t m = 0, rows; m < m_count; m += rows, x += rows * padded, y += rows * stride) {
    rows = group_rows(m_count - m);
    switch (rows) {
      case 1: tile512<1, N>(x, w, k, y, stride); break;
      case 2: tile512<2, N>(x, w, k, y, stride); break;
      case 3: tile512<3, N>(x, w, k, y, stride); break;
      case 4: tile512<4, N>(x, w, k, y, stride); break;
      case 5: tile512<5, N>(x, w, k, y, stride); break;
      case 6: tile512<6, N>(x, w, k, y, stride); break;
    }
  }
}

void multiply512(const bfloat16* x, int64_t m_count, int64_t padded, const bfloat16* w, int64_t n_count, int64_t k, float* y,
                 int64_t stride) {
  int64_t n = 0;
  if (m_count > kFewRows)  // memory is read faster two rows at a time
    for (; n + 4 <= n_count; n += 4) rows512<4>(x, m_count, padded, w + n * k, k, y + n, stride);
  for (; n + 2 <= n_count; n += 2) rows512<2>(x, m_count, padded, w + n * k, k, y + n, stride);
  for (; n < n_count; ++n) rows512<1>(x, m_count, padded, w + n * k, k, y + n, stride);
}

// A group of rows, whose vectors take turns, each with zeros up to whole vectors.
void take_turns512(const bfloat16* x, int64_t rows, int64_t k_count, bfloat16* out) {
  for (int64_t k = 0; k < k_count; k += 32)
    for (int64_t m = 0; m < rows; ++m, out += 32) {
      const int64_t count = std::min<int64_t>(32, k_count - k);
      std::copy_n(x + m * k_count + k, count, out);
      std::fill_n(out + count, 32 - count, bfloat16{0});
    }
}

#endif

// The rows of x as the active instruction set wants them, in groups: bfloat16 pairs as they are, else floats.
template <class X, class W>
struct Rows {
  Rows(const X* x, int64_t m_count, int64_t k_count) : k_count(k_count), padded((k_count + 31) / 32 * 32) {
    if (has_pairs())
      pairs.resize(m_count * padded);
    else
      floats.resize(m_count * padded);
    std::vector<int64_t> starts{0};  // of the groups of rows, panel by panel
    for (int64_t m = 0; m < m_count; starts.push_back(m))
      m += group_rows(std::min(m_count, m / kPanel * kPanel + kPanel) - m);
    parallel(starts.size() - 1, 1 + (1 << 12) / (1 + k_count), [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) {
        const int64_t first = starts[group], rows = starts[group + 1] - first;
#if KIMI_K3_X86
        if constexpr (sizeof(X) == 2)
          if (has_pairs()) {
            take_turns512(x + first * k_count, rows, k_count, pairs.data() + first * padded);
            continue;
          }
#endif
        KIMI_K3_ACTIVE(spread_group<W, X>)(x + first * k_count, rows, k_count, floats.data() + first * padded);
      }
    });
  }
  static bool has_pairs() { return KIMI_K3_X86 && sizeof(X) == 2 && active_isa() == Isa::avx512; }

  // y[i * stride + n] for rows first .. first + m_count of x.
  void multiply(int64_t first, int64_t m_count, const W* w, int64_t n_count, float* y, int64_t stride) const {
#if KIMI_K3_X86
    if constexpr (sizeof(X) == 2)
      if (has_pairs()) return multiply512(pairs.data() + first * padded, m_count, padded, w, n_count, k_count, y, stride);
#endif
    KIMI_K3_ACTIVE(multiply<W>)(floats.data() + first * padded, m_count, padded, w, n_count, k_count, y, stride);
  }

  int64_t k_count, padded;
  LineVector<bfloat16> pairs;
  LineVector<float> floats;
};

template <class X, class W>
void run(const Tensor& x, const std::vector<Tensor>& weights, const std::vector<int64_t>& ends, const Tensor& out) {
  const int64_t m = x.size(0), k = x.size(1), total = ends.back();
  const Rows<X, W> rows(data<X>(x), m, k);
  X* result = mutable_data<X>(out);
  // Blocks of outputs across the borders of the matrices: even shares for the threads, whatever the matrices' sizes.
  // With many rows a block stays in the second cache.
  const int64_t block_rows = m <= kFewRows ? kFewOutputs
                             : m <= kPanel ? kOutputs
                                           : std::max<int64_t>(8, std::min<int64_t>(kOutputs, (1 << 17) / (1 + k) / 4 * 4));
  const int64_t least = 1 + (1 << 14) / (1 + block_rows * k);  // a second thread for less costs more than it saves
  parallel_balanced((total + block_rows - 1) / block_rows, least, [&](int64_t begin, int64_t end) {
    std::vector<float> values(std::min(m, kPanel) * block_rows);
    size_t matrix = 0;
    for (int64_t block = begin; block < end; ++block) {
      int64_t first = block * block_rows;
      const int64_t last = std::min(total, first + block_rows);
      while (first < last) {
        while (ends[matrix] <= first) ++matrix;
        const int64_t start = matrix ? ends[matrix - 1] : 0, count = std::min(last, ends[matrix]) - first;
        for (int64_t row = 0; row < m; row += kPanel) {
          const int64_t panel = std::min(kPanel, m - row);
          rows.multiply(row, panel, data<W>(weights[matrix]) + (first - start) * k, count, values.data(), block_rows);
          for (int64_t i = 0; i < panel; ++i)
            for (int64_t n = 0; n < count; ++n) store(result + (row + i) * total + first + n, values[i * block_rows + n]);
        }
        first += count;
      }
    }
  });
}

Tensor matvec(Tensor x, std::vector<Tensor> weights) {
  const ScalarType type = x.scalar_type(), weight_type = weights.empty() ? type : weights[0].scalar_type();
  const bool is_bf16 = type == ScalarType::BFloat16 && weight_type == type;
  const bool is_float = type == ScalarType::Float && (weight_type == type || weight_type == ScalarType::BFloat16);
  if (!(is_bf16 || is_float) || weights.empty() || x.size(0) > most_rows(is_bf16)) return reference_tensor("matvec", x, weights);
  std::vector<int64_t> ends;
  int64_t total = 0;
  check_sizes("matvec", "x", x, {-1, -1});
  for (Tensor& weight : weights) {
    check_sizes("matvec", "weight", weight, {-1, x.size(1)});
    STD_TORCH_CHECK(weight.scalar_type() == weight_type, "matvec: want weights of one dtype");
    weight = make_contiguous(weight);
    ends.push_back(total += weight.size(0));
  }
  x = make_contiguous(x);
  Tensor out = new_tensor(x, {x.size(0), total});
  if (is_bf16)
    run<bfloat16, bfloat16>(x, weights, ends, out);
  else if (weight_type == ScalarType::Float)
    run<float, float>(x, weights, ends, out);
  else
    run<float, bfloat16>(x, weights, ends, out);
  return out;
}

}  // namespace

}  // namespace kimi_k3

STABLE_TORCH_LIBRARY_IMPL(kimi_k3, CPU, m) { m.impl("matvec", TORCH_BOX(&kimi_k3::matvec)); }
