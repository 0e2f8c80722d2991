// Few activation rows times several weight matrices: every weight is read from memory once.
#include "../cpu.h"

namespace kimi_k3 {

namespace {

constexpr int kRows = 4;         // weight rows at once, so that loads are always in flight
constexpr int64_t kManyRows = 64; // from here on a library GEMM is faster

// y[m * stride + n] = sum_k x[m][k] w[n][k]. The order of a sum depends on K alone.
template <class X, class W>
struct Plain {
  static inline __attribute__((always_inline)) void body(const X* x, int64_t m_count, const W* w, int64_t n_count,
                                                         int64_t k_count, float* y, int64_t stride) {
    for (int64_t n = 0; n < n_count; ++n)
      for (int64_t m = 0; m < m_count; ++m) {
        float lanes[8] = {}, rest = 0;
        int64_t k = 0;
        for (; k + 8 <= k_count; k += 8)
          for (int64_t lane = 0; lane < 8; ++lane)
            lanes[lane] += load(x + m * k_count + k + lane) * load(w + n * k_count + k + lane);
        for (; k < k_count; ++k) rest += load(x + m * k_count + k) * load(w + n * k_count + k);
        y[m * stride + n] = ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7])) + rest;
      }
  }
  static void generic(const X* x, int64_t m, const W* w, int64_t n, int64_t k, float* y, int64_t stride) {
    body(x, m, w, n, k, y, stride);
  }
#if KIMI_K3_X86
  KIMI_K3_AVX2 static void avx2(const X* x, int64_t m, const W* w, int64_t n, int64_t k, float* y, int64_t stride) {
    body(x, m, w, n, k, y, stride);
  }
#endif
  static void run(const X* x, int64_t m, const W* w, int64_t n, int64_t k, float* y, int64_t stride) {
#if KIMI_K3_X86
    if (active_isa() >= Isa::avx2) return avx2(x, m, w, n, k, y, stride);
#endif
    generic(x, m, w, n, k, y, stride);
  }
};

#if KIMI_K3_X86

template <class X, class W>
struct Avx512;

template <>
struct Avx512<bfloat16, bfloat16> {
  static constexpr int64_t kStep = 32;
  KIMI_K3_AVX512 static inline __m512i read(const bfloat16* p, __mmask32 mask) { return _mm512_maskz_loadu_epi16(mask, p); }
  KIMI_K3_AVX512 static inline __m512i read(const bfloat16* p) { return _mm512_loadu_si512(p); }
  KIMI_K3_AVX512 static inline __m512 multiply_add(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  static __mmask32 tail(int64_t left) { return static_cast<__mmask32>((uint64_t(1) << left) - 1); }
};

template <>
struct Avx512<float, float> {
  static constexpr int64_t kStep = 16;
  KIMI_K3_AVX512 static inline __m512i read(const float* p, __mmask16 mask) { return _mm512_maskz_loadu_epi32(mask, p); }
  KIMI_K3_AVX512 static inline __m512i read(const float* p) { return _mm512_loadu_si512(p); }
  KIMI_K3_AVX512 static inline __m512 multiply_add(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
  static __mmask16 tail(int64_t left) { return static_cast<__mmask16>((1u << left) - 1); }
};

template <>
struct Avx512<float, bfloat16> : Avx512<float, float> {
  using Avx512<float, float>::read;
  KIMI_K3_AVX512 static inline __m512i widen(__m256i bits) { return _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16); }
  KIMI_K3_AVX512 static inline __m512i read(const bfloat16* p, __mmask16 mask) {
    return widen(_mm256_maskz_loadu_epi16(mask, p));
  }
  KIMI_K3_AVX512 static inline __m512i read(const bfloat16* p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
};

template <class X, class W, int M, int N>
KIMI_K3_AVX512 void tile512(const X* x, const W* w, int64_t k_count, float* y, int64_t stride) {
  using Ops = Avx512<X, W>;
  __m512 sums[M][N];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) sums[m][n] = _mm512_setzero_ps();
  int64_t k = 0;
  for (; k + Ops::kStep <= k_count; k += Ops::kStep) {
    __m512i weights[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      _mm_prefetch(reinterpret_cast<const char*>(w + (N + n) * k_count + k), _MM_HINT_T0);
      weights[n] = Ops::read(w + n * k_count + k);
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      __m512i row = Ops::read(x + m * k_count + k);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] = Ops::multiply_add(sums[m][n], weights[n], row);
    }
  }
  if (k < k_count) {
    auto mask = Ops::tail(k_count - k);
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n)
        sums[m][n] = Ops::multiply_add(sums[m][n], Ops::read(w + n * k_count + k, mask), Ops::read(x + m * k_count + k, mask));
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) y[m * stride + n] = _mm512_reduce_add_ps(sums[m][n]);
}

template <class X, class W, int N>
void rows512(const X* x, int64_t m_count, const W* w, int64_t k, float* y, int64_t stride) {
  int64_t m = 0;
  for (; m + 4 <= m_count; m += 4) tile512<X, W, 4, N>(x + m * k, w, k, y + m * stride, stride);
  switch (m_count - m) {
    case 3: return tile512<X, W, 3, N>(x + m * k, w, k, y + m * stride, stride);
    case 2: return tile512<X, W, 2, N>(x + m * k, w, k, y + m * stride, stride);
    case 1: return tile512<X, W, 1, N>(x + m * k, w, k, y + m * stride, stride);
  }
}

#endif

template <class X, class W>
void multiply(const X* x, int64_t m, const W* w, int64_t n_count, int64_t k, float* y, int64_t stride) {
#if KIMI_K3_X86
  if (active_isa() == Isa::avx512) {
    int64_t n = 0;
    for (; n + kRows <= n_count; n += kRows) rows512<X, W, kRows>(x, m, w + n * k, k, y + n, stride);
    for (; n < n_count; ++n) rows512<X, W, 1>(x, m, w + n * k, k, y + n, stride);
    return;
  }
#endif
  Plain<X, W>::run(x, m, w, n_count, k, y, stride);
}

template <class X, class W>
void run(const Tensor& x, const std::vector<Tensor>& weights, const std::vector<int64_t>& ends, const Tensor& out) {
  const int64_t m = x.size(0), k = x.size(1), total = ends.back();
  const X* rows = data<X>(x);
  X* result = mutable_data<X>(out);
  // Blocks of 64 outputs across the borders of the matrices: even shares for the threads, whatever the matrices' sizes.
  constexpr int64_t kBlock = 64;
  parallel((total + kBlock - 1) / kBlock, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> values(m * kBlock);
    size_t matrix = 0;
    for (int64_t block = begin; block < end; ++block) {
      int64_t first = block * kBlock;
      const int64_t last = std::min(total, first + kBlock);
      while (first < last) {
        while (ends[matrix] <= first) ++matrix;
        const int64_t start = matrix ? ends[matrix - 1] : 0, count = std::min(last, ends[matrix]) - first;
        multiply<X, W>(rows, m, data<W>(weights[matrix]) + (first - start) * k, count, k, values.data(), kBlock);
        for (int64_t i = 0; i < m; ++i)
          for (int64_t n = 0; n < count; ++n) store(result + i * total + first + n, values[i * kBlock + n]);
        first += count;
      }
    }
  });
}

Tensor matvec(Tensor x, std::vector<Tensor> weights) {
  const ScalarType type = x.scalar_type(), weight_type = weights.empty() ? type : weights[0].scalar_type();
  const bool is_bf16 = type == ScalarType::BFloat16 && weight_type == type;
  const bool is_float = type == ScalarType::Float && (weight_type == type || weight_type == ScalarType::BFloat16);
  if (!(is_bf16 || is_float) || weights.empty() || x.size(0) >= kManyRows) return reference_tensor("matvec", x, weights);
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
