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

// One row of x as floats, zeros up to whole pairs, in the order of `load_pair` for weights of type W: a vector every
// `step` floats.
template <class W, class X>
KIMI_K3_INLINE void spread(const X* x, int64_t k_count, int64_t step, float* out) {
  int64_t k = 0;
  if constexpr (sizeof(X) == sizeof(W))
    for (; k + kPair <= k_count; k += kPair) {
      Vec first, second;
      load_pair(x + k, first, second);
      store_vec(out + k / kLanes * step, first), store_vec(out + (k / kLanes + 1) * step, second);
    }
  const int64_t padded = (k_count + kPair - 1) / kPair * kPair;
  for (; k < padded; ++k) {
    const int64_t inside = k % kPair;
    const int64_t source = sizeof(W) == 4 ? k : k - inside + inside % kLanes * 2 + inside / kLanes;
    out[k / kLanes * step + k % kLanes] = source < k_count ? load(x + source) : 0.0f;
  }
}

// A group of rows, whose vectors take turns.
template <class W, class X>
KIMI_K3_TARGET static void spread_group(const X* x, int64_t rows, int64_t k_count, float* out) {
  for (int64_t m = 0; m < rows; ++m) spread<W>(x + m * k_count, k_count, rows * kLanes, out + m * kLanes);
}

constexpr int64_t kPiece = 768;  // elements of a row at once: of a group of x they stay in the first cache
constexpr int64_t kAhead = 6;    // rows of w asked for ahead: more loads than the hardware starts by itself

// Adds to partial[m * N + n] what `count` elements of M rows of x and N rows of w give. Not inlined: among other code g++
// finds no registers for the sums.
template <class W, int M, int N>
KIMI_K3_TARGET __attribute__((noinline)) static void tile(const float* x, const W* w, int64_t k_count, int64_t count,
                                                          Vec* partial) {
  Vec sums[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[m][n] = partial[m * N + n];
  constexpr bool in_order = M <= 2;  // whole rows of w, so in the order of memory; more rows of x leave no time for it
  const W* ahead = w + std::max<int64_t>(4096, N * k_count);
  int64_t k = 0;
  for (; k + kPair <= count; k += kPair, w += kPair, x += 2 * M * kLanes) {
    if (in_order) {
#pragma GCC unroll 8
      for (int64_t i = 0; i < N * kPair; i += 64 / sizeof(W)) __builtin_prefetch(ahead + i);
      ahead += N * kPair;
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Vec weights[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        if (!in_order && half == 0) __builtin_prefetch(w + (kAhead + n) * k_count);
        Vec halves[2];
        load_pair(w + n * k_count, halves[0], halves[1]);
        weights[n] = halves[half];
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const Vec row = load_vec(x + (half * M + m) * kLanes);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[m][n] = multiply_add(weights[n], row, sums[m][n]);
      }
      asm volatile("" : "+r"(w));  // the second half reads w again: kept in registers, it pushes the sums out
    }
  }
  if (k < count) {
    W rest[N][kPair] = {};
    for (int n = 0; n < N; ++n) std::copy_n(w + n * k_count, count - k, rest[n]);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      Vec first, second;
      load_pair(rest[n], first, second);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        sums[m][n] = multiply_add(first, load_vec(x + m * kLanes), sums[m][n]);
        sums[m][n] = multiply_add(second, load_vec(x + (M + m) * kLanes), sums[m][n]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) partial[m * N + n] = sums[m][n];
}

// y[m * stride + n] = x[m] . w[n] for a group of M rows and at most kOutputs rows of w, N at once.
template <class W, int M, int N>
KIMI_K3_INLINE void multiply_group(const float* x, const W* w, int64_t n_count, int64_t k_count, float* y, int64_t stride) {
  // With few rows memory sets the pace, and it is read faster in long pieces.
  const int64_t piece = M < 4 ? k_count : M == 4 ? 2 * kPiece : kPiece, whole = n_count / N * N;
  alignas(64) Vec partial[kOutputs * M];
  std::fill_n(partial, n_count * M, Vec{});
  for (int64_t k = 0; k < k_count; k += piece) {
    const int64_t count = std::min(piece, k_count - k);
    int64_t n = 0;
    for (; n < whole; n += N) tile<W, M, N>(x + k * M, w + n * k_count + k, k_count, count, partial + n * M);
    for (; n < n_count; ++n) tile<W, M, 1>(x + k * M, w + n * k_count + k, k_count, count, partial + n * M);
  }
  for (int64_t n = 0; n < n_count; ++n) {
    const int64_t columns = n < whole ? N : 1, first = n / columns * columns;
    for (int64_t m = 0; m < M; ++m) y[m * stride + n] = sum_lanes(partial[first * M + m * columns + n - first]);
  }
}

// All rows of x, in groups, times `n_count` rows of w, which stay in cache from one group to the next.
template <class W>
KIMI_K3_TARGET static void multiply(const float* x, int64_t m_count, int64_t padded, const W* w, int64_t n_count,
                                    int64_t k_count, float* y, int64_t stride) {
  for (int64_t m = 0, rows; m < m_count; m += rows, x += rows * padded, y += rows * stride) {
    rows = group_rows(m_count - m);
    switch (rows) {
      case 1: multiply_group<W, 1, 4>(x, w, n_count, k_count, y, stride); break;
      case 2: multiply_group<W, 2, 4>(x, w, n_count, k_count, y, stride); break;
      case 3: multiply_group<W, 3, 3>(x, w, n_count, k_count, y, stride); break;
      case 4: multiply_group<W, 4, 2>(x, w, n_count, k_count, y, stride); break;
      case 5: multiply_group<W, 5, 2>(x, w, n_count, k_count, y, stride); break;
      case 6: multiply_group<W, 6, 2>(x, w, n_count, k_count, y, stride); break;
    }
  }
}
