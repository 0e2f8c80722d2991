// Rows times one head's matrix. A sum runs over the depth in one order, whatever rows and outputs stand beside it.

// y[t][m + n] = sum_k x[t][k] w[m + n][k] for M tokens and N outputs.
template <int M, int N, class T>
KIMI_K3_INLINE void dot_block(const T* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t depth, T* y,
                              int64_t y_stride) {
  Vec sums[M][N];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m][n] = Vec{};
  int64_t k = 0;
  for (; k + kLanes <= depth; k += kLanes) {
    Vec weights[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) weights[n] = load_vec(w + n * w_stride + k);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const Vec row = load_vec(x + m * x_stride + k);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[m][n] += row * weights[n];
    }
  }
  if (k < depth)
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n)
        sums[m][n] += load_some(x + m * x_stride + k, depth - k) * load_some(w + n * w_stride + k, depth - k);
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) store(y + m * y_stride + n, sum_lanes(sums[m][n]));
}

// y[t][c] = sum_k x[t][k] w[k][c] for M tokens and the first `columns` of N vectors.
template <int M, int N, class T>
KIMI_K3_INLINE void spread_block(const T* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t depth, int64_t columns,
                                 T* y, int64_t y_stride) {
  Vec sums[M][N];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m][n] = Vec{};
  for (int64_t k = 0; k < depth; ++k) {
    Vec weights[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) weights[n] = load_some(w + k * w_stride + n * kLanes, columns - n * kLanes);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const Vec row = splat(load(x + m * x_stride + k));
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[m][n] += row * weights[n];
    }
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) store_some(y + m * y_stride + n * kLanes, sums[m][n], columns - n * kLanes);
}

constexpr int kTokens = 4;
constexpr int kOutputs = kLanes == 16 ? 4 : 2;  // 4 x kOutputs sums stay in registers
constexpr int kVectors = kLanes == 16 ? 4 : 2;

// Outputs [first, last) of `tokens` rows.
template <class T>
KIMI_K3_TARGET static void dot_rows(const T* x, int64_t x_stride, int64_t tokens, const T* w, int64_t w_stride,
                                    int64_t depth, int64_t first, int64_t last, T* y, int64_t y_stride) {
  int64_t n = first;
  for (; n + kOutputs <= last; n += kOutputs) {
    int64_t t = 0;
    for (; t + kTokens <= tokens; t += kTokens)
      dot_block<kTokens, kOutputs>(x + t * x_stride, x_stride, w + n * w_stride, w_stride, depth, y + t * y_stride + n, y_stride);
    for (; t < tokens; ++t)
      dot_block<1, kOutputs>(x + t * x_stride, x_stride, w + n * w_stride, w_stride, depth, y + t * y_stride + n, y_stride);
  }
  for (; n < last; ++n)
    for (int64_t t = 0; t < tokens; ++t)
      dot_block<1, 1>(x + t * x_stride, x_stride, w + n * w_stride, w_stride, depth, y + t * y_stride + n, y_stride);
}

template <int N, class T>
KIMI_K3_INLINE void spread_tokens(const T* x, int64_t x_stride, int64_t tokens, const T* w, int64_t w_stride, int64_t depth,
                                  int64_t columns, T* y, int64_t y_stride) {
  int64_t t = 0;
  for (; t + kTokens <= tokens; t += kTokens)
    spread_block<kTokens, N>(x + t * x_stride, x_stride, w, w_stride, depth, columns, y + t * y_stride, y_stride);
  for (; t < tokens; ++t) spread_block<1, N>(x + t * x_stride, x_stride, w, w_stride, depth, columns, y + t * y_stride, y_stride);
}

template <class T>
KIMI_K3_TARGET static void spread_rows(const T* x, int64_t x_stride, int64_t tokens, const T* w, int64_t w_stride,
                                       int64_t depth, int64_t first, int64_t last, T* y, int64_t y_stride) {
  int64_t c = first;
  for (; c + kVectors * kLanes <= last; c += kVectors * kLanes)
    spread_tokens<kVectors>(x, x_stride, tokens, w + c, w_stride, depth, kVectors * kLanes, y + c, y_stride);
  for (; c < last; c += kLanes)
    spread_tokens<1>(x, x_stride, tokens, w + c, w_stride, depth, std::min<int64_t>(kLanes, last - c), y + c, y_stride);
}
