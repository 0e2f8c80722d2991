// Rows of x times rows of w, on vectors. The order of a sum depends on K alone.

// Elements of a row go by pairs of vectors. Two neighbouring bfloat16 lie in one 32-bit word, so a pair of vectors of
// weights is the even elements, then the odd ones; the activations are laid out once in the same order (`spread`).
constexpr int64_t kPair = 2 * kLanes;

KIMI_K3_INLINE void load_pair(const bfloat16* w, Vec& first, Vec& second) {
  typedef uint32_t UnalignedBits __attribute__((vector_size(4 * KIMI_K3_LANES), aligned(2), may_alias));
  const Bits words = *reinterpret_cast<const UnalignedBits*>(w);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  first = reinterpret_cast<Vec>(words << 16), second = reinterpret_cast<Vec>(words & 0xffff0000u);
#else
  first = reinterpret_cast<Vec>(words & 0xffff0000u), second = reinterpret_cast<Vec>(words << 16);
#endif
}
KIMI_K3_INLINE void load_pair(const float* w, Vec& first, Vec& second) {
  first = load_vec(w), second = load_vec(w + kLanes);
}

// One row of x as floats, zeros up to whole pairs, in the order of `load_pair` for weights of type W.
template <class W, class X>
KIMI_K3_TARGET static void spread(const X* x, int64_t k_count, float* out) {
  const int64_t padded = (k_count + kPair - 1) / kPair * kPair;
  for (int64_t k = 0; k < padded; ++k) {
    const int64_t inside = k % kPair;
    const int64_t source = sizeof(W) == 4 ? k : k - inside + inside % kLanes * 2 + inside / kLanes;
    out[k] = source < k_count ? load(x + source) : 0.0f;
  }
}

// y[m * stride + n] = x[m] . w[n] for M rows of spread x and N rows of w.
template <class W, int M, int N>
KIMI_K3_INLINE void tile(const float* x, int64_t padded, const W* w, int64_t k_count, float* y, int64_t stride) {
  Vec sums[M][N];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[m][n] = Vec{};
  int64_t k = 0;
  for (; k + kPair <= k_count; k += kPair) {
    const W* from = w + k;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Vec rows[M];
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) rows[m] = load_vec(x + m * padded + k + half * kLanes);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        if (half == 0) __builtin_prefetch(from + (N + n) * k_count);  // the next rows: more loads than the hardware starts
        Vec halves[2];
        load_pair(from + n * k_count, halves[0], halves[1]);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) sums[m][n] += halves[half] * rows[m];
      }
      asm volatile("" : "+r"(from));  // the second half reads w again: kept in registers, it pushes the sums out
    }
  }
  if (k < k_count) {
    for (int n = 0; n < N; ++n) {
      W rest[kPair] = {};
      std::copy_n(w + n * k_count + k, k_count - k, rest);
      Vec first, second;
      load_pair(rest, first, second);
      for (int m = 0; m < M; ++m) {
        sums[m][n] += first * load_vec(x + m * padded + k);
        sums[m][n] += second * load_vec(x + m * padded + k + kLanes);
      }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) y[m * stride + n] = sum_lanes(sums[m][n]);
}

// Three rows of x and as many of w as fill the registers: with three, nine sums and their operands take sixteen of them.
constexpr int64_t kTileRows = kLanes == 8 ? 3 : 4;

template <class W, int N>
KIMI_K3_INLINE void columns(const float* x, int64_t m_count, int64_t padded, const W* w, int64_t k_count, float* y,
                            int64_t stride) {
  switch (m_count) {
    case 1: return tile<W, 1, N>(x, padded, w, k_count, y, stride);
    case 2: return tile<W, 2, N>(x, padded, w, k_count, y, stride);
    case 3: return tile<W, 3, N>(x, padded, w, k_count, y, stride);
  }
}

// All rows of x times `n_count` rows of w, which stay in cache from one group of rows of x to the next.
template <class W>
KIMI_K3_TARGET static void multiply(const float* x, int64_t m_count, int64_t padded, const W* w, int64_t n_count,
                                    int64_t k_count, float* y, int64_t stride) {
  for (int64_t m = 0, rows; m < m_count; m += rows) {
    rows = m_count - m == 4 ? 2 : std::min<int64_t>(3, m_count - m);  // one row alone leaves half of the adders idle
    int64_t n = 0;
    if (rows == 3)
      for (; n + kTileRows <= n_count && n + 4 != n_count; n += kTileRows)
        columns<W, kTileRows>(x + m * padded, rows, padded, w + n * k_count, k_count, y + m * stride + n, stride);
    for (; n + 4 <= n_count; n += 4)
      columns<W, 4>(x + m * padded, rows, padded, w + n * k_count, k_count, y + m * stride + n, stride);
    for (; n < n_count; ++n)
      columns<W, 1>(x + m * padded, rows, padded, w + n * k_count, k_count, y + m * stride + n, stride);
  }
}
