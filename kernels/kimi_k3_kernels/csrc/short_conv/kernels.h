// silu of the sum over W taps, for a run of channels of one token (equation: short_conv/op.py).

// R tokens in a row with K3's four taps: inputs are the R + 3 rows that they see, outputs R rows.
template <int R, class T>
KIMI_K3_INLINE void convolve_four(const T* const* inputs, const float* taps, int64_t stride, int64_t c, int64_t left, T* out,
                                  int64_t out_stride) {
  Vec rows[R + 3], tap[4];
#pragma GCC unroll 8
  for (int i = 0; i < R + 3; ++i) rows[i] = load_some(inputs[i] + c, left);
#pragma GCC unroll 4
  for (int w = 0; w < 4; ++w) tap[w] = load_some(taps + w * stride + c, left);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    Vec sum = rows[r] * tap[0];
    sum += rows[r + 1] * tap[1];
    sum += rows[r + 2] * tap[2];
    sum += rows[r + 3] * tap[3];
    store_some(out + r * out_stride + c, silu_vec(sum), left);
  }
}

template <int R, class T>
KIMI_K3_INLINE void convolve_four_rows(const T* const* inputs, const float* taps, int64_t stride, int64_t channels, T* out,
                                       int64_t out_stride) {
  int64_t c = 0;
  for (; c + kLanes <= channels; c += kLanes) convolve_four<R>(inputs, taps, stride, c, kLanes, out, out_stride);
  if (c < channels) convolve_four<R>(inputs, taps, stride, c, channels - c, out, out_stride);
}

// Tokens of one sequence: inputs are the count + W - 1 rows that they see, oldest first. taps: [W][channels] with
// `stride` between taps.
template <class T>
KIMI_K3_TARGET static void convolve(const T* const* inputs, int64_t count, const float* taps, int64_t stride, int64_t num_taps,
                                    int64_t channels, T* out, int64_t out_stride) {
  int64_t t = 0;
  if (num_taps == 4) {
    for (; t + 4 <= count; t += 4) convolve_four_rows<4>(inputs + t, taps, stride, channels, out + t * out_stride, out_stride);
    for (; t < count; ++t) convolve_four_rows<1>(inputs + t, taps, stride, channels, out + t * out_stride, out_stride);
    return;
  }
  for (; t < count; ++t)
    for (int64_t c = 0; c < channels; c += kLanes) {
      const int64_t left = channels - c;
      Vec sum{};
      for (int64_t w = 0; w < num_taps; ++w) sum += load_some(inputs[t + w] + c, left) * load_some(taps + w * stride + c, left);
      store_some(out + t * out_stride + c, silu_vec(sum), left);
    }
}

// [channels, W] as stored -> [W][channels] in float32.
template <class W>
KIMI_K3_TARGET static void spread_taps(const W* weight, int64_t num_taps, int64_t channels, float* taps, int64_t stride) {
  int64_t c = 0;
#if !defined(__clang__)
  for (; num_taps == 4 && c + kLanes <= channels; c += kLanes) {
    Bits even, odd;
    for (int i = 0; i < kLanes; ++i) even[i] = 2 * i, odd[i] = 2 * i + 1;
    const W* from = weight + 4 * c;
    const Vec a = load_vec(from), b = load_vec(from + kLanes), d = load_vec(from + 2 * kLanes), e = load_vec(from + 3 * kLanes);
    const Vec even_low = __builtin_shuffle(a, b, even), even_high = __builtin_shuffle(d, e, even);
    const Vec odd_low = __builtin_shuffle(a, b, odd), odd_high = __builtin_shuffle(d, e, odd);
    store_vec(taps + c, __builtin_shuffle(even_low, even_high, even));
    store_vec(taps + stride + c, __builtin_shuffle(odd_low, odd_high, even));
    store_vec(taps + 2 * stride + c, __builtin_shuffle(even_low, even_high, odd));
    store_vec(taps + 3 * stride + c, __builtin_shuffle(odd_low, odd_high, odd));
  }
#endif
  for (; c < channels; ++c)
    for (int64_t w = 0; w < num_taps; ++w) taps[w * stride + c] = load(weight + c * num_taps + w);
}
