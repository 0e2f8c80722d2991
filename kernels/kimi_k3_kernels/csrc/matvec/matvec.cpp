// Activation rows times several weight matrices: every weight is read from memory once.
#include <algorithm>
#include <limits>

#include "../cpu.h"

namespace kimi_k3 {

namespace {

constexpr int64_t kOutputs = 64;  // rows of weights in a block

// Rows of x are multiplied in groups. Six beside two rows of w, or three beside three, fill sixteen registers with sums
// and operands. This many of `left` rows are the next group:
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

KIMI_K3_AVX512 inline __m512 multiply_add(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// y[m * stride + n] = sum_k x[m][k] w[n][k]. The order of a sum depends on K alone.
template <int M, int N>
KIMI_K3_AVX512 void tile512(const bfloat16* x, const bfloat16* w, int64_t k_count, float* y, int64_t stride) {
  __m512 sums[M][N];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) sums[m][n] = _mm512_setzero_ps();
  int64_t k = 0;
  for (; k + 32 <= k_count; k += 32) {
    __m512i weights[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      _mm_prefetch(reinterpret_cast<const char*>(w + (N + n) * k_count + k), _MM_HINT_T0);
      weights[n] = _mm512_loadu_si512(w + n * k_count + k);
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      __m512i row = _mm512_loadu_si512(x + m * k_count + k);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] = multiply_add(sums[m][n], weights[n], row);
    }
  }
  if (k < k_count) {
    const __mmask32 mask = static_cast<__mmask32>((uint64_t(1) << (k_count - k)) - 1);
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n)
        sums[m][n] = multiply_add(sums[m][n], _mm512_maskz_loadu_epi16(mask, w + n * k_count + k),
                                  _mm512_maskz_loadu_epi16(mask, x + m * k_count + k));
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) y[m * stride + n] = _mm512_reduce_add_ps(sums[m][n]);
}

template <int N>
void rows512(const bfloat16* x, int64_t m_count, const bfloat16* w, int64_t k, float* y, int64_t stride) {
  int64_t m = 0;
  for (; m + 4 <= m_count; m += 4) tile512<4, N>(x + m * k, w, k, y + m * stride, stride);
  switch (m_count - m) {
    case 3: return tile512<3, N>(x + m * k, w, k, y + m * stride, stride);
    case 2: return tile512<2, N>(x + m * k, w, k, y + m * stride, stride);
    case 1: return tile512<1, N>(x + m * k, w, k, y + m * stride, stride);
  }
}

#endif

// The rows of x as the active instruction set wants them: bfloat16 pairs as they are, else groups of floats.
template <class X, class W>
struct Rows {
  Rows(const X* x, int64_t m_count, int64_t k_count) : x(x), k_count(k_count) {
#if KIMI_K3_X86
    if (has_pairs()) return;
#endif
    padded = (k_count + 31) / 32 * 32;
    floats.resize(m_count * padded);
    std::vector<int64_t> starts{0};  // of the groups of rows, panel by panel
    for (int64_t m = 0; m < m_count; starts.push_back(m))
      m += group_rows(std::min(m_count, m / kPanel * kPanel + kPanel) - m);
    parallel(starts.size() - 1, 1 + (1 << 12) / (1 + k_count), [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group)
        KIMI_K3_ACTIVE(spread_group<W, X>)
        (x + starts[group] * k_count, starts[group + 1] - starts[group], k_count, &floats[starts[group] * padded]);
    });
  }
  static bool has_pairs() { return sizeof(X) == 2 && active_isa() == Isa::avx512; }

  // y[i * stride + n] for rows first .. first + m_count of x.
  void multiply(int64_t first, int64_t m_count, const W* w, int64_t n_count, float* y, int64_t stride) const {
#if KIMI_K3_X86
    if constexpr (sizeof(X) == 2)
      if (has_pairs()) {
        int64_t n = 0;
        for (; n + 4 <= n_count; n += 4) rows512<4>(x + first * k_count, m_count, w + n * k_count, k_count, y + n, stride);
        for (; n < n_count; ++n) rows512<1>(x + first * k_count, m_count, w + n * k_count, k_count, y + n, stride);
        return;
      }
#endif
    KIMI_K3_ACTIVE(multiply<W>)(&floats[first * padded], m_count, padded, w, n_count, k_count, y, stride);
  }

  const X* x;
  int64_t k_count, padded = 0;
  LineVector<float> floats;
};

template <class X, class W>
void run(const Tensor& x, const std::vector<Tensor>& weights, const std::vector<int64_t>& ends, const Tensor& out) {
  const int64_t m = x.size(0), k = x.size(1), total = ends.back();
  const Rows<X, W> rows(data<X>(x), m, k);
  X* result = mutable_data<X>(out);
  // Blocks of outputs across the borders of the matrices: even shares for the threads, whatever the matrices' sizes.
  // With many rows a block stays in the second cache.
  const int64_t block_rows = m <= kPanel ? kOutputs : std::max<int64_t>(8, std::min<int64_t>(kOutputs, (1 << 17) / (1 + k) / 4 * 4));
  parallel_balanced((total + block_rows - 1) / block_rows, 1, [&](int64_t begin, int64_t end) {
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
