// RMSNorm of one row (equations: norm/reference.py). The order of a sum depends on the width alone.

// What a value of type T keeps of a float.
template <class T>
KIMI_K3_INLINE Vec rounded(Vec x) {
  if (sizeof(T) == 4) return x;
  const Bits bits = reinterpret_cast<Bits>(x);
  const Bits kept = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  return reinterpret_cast<Vec>((bits & 0x7fffffff) > 0x7f800000 ? Bits{} + 0x7fc00000 : kept);
}

template <class T>
KIMI_K3_INLINE float inverse_rms(const T* x, int64_t width, float eps) {
  constexpr int kSums = 4;  // enough to hide the latency of a sum
  Vec sums[kSums];
#pragma GCC unroll 4
  for (int n = 0; n < kSums; ++n) sums[n] = Vec{};
  int64_t d = 0;
  for (; d + kSums * kLanes <= width; d += kSums * kLanes)
#pragma GCC unroll 4
    for (int n = 0; n < kSums; ++n) {
      const Vec v = load_vec(x + d + n * kLanes);
      sums[n] += v * v;
    }
  for (; d < width; d += kLanes) {
    const Vec v = load_some(x + d, width - d);
    sums[0] += v * v;
  }
  return 1.0f / std::sqrt(sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(width) + eps);
}

template <class T>
KIMI_K3_TARGET static void norm_row(const T* x, const T* weight, int64_t width, float eps, T* out) {
  const Vec scale = splat(inverse_rms(x, width, eps));
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes)
    store_vec(out + d, load_vec(weight + d) * rounded<T>(load_vec(x + d) * scale));
  if (d < width)
    store_some(out + d, load_some(weight + d, width - d) * rounded<T>(load_some(x + d, width - d) * scale), width - d);
}

template <class T>
KIMI_K3_TARGET static void gated_norm_row(const T* x, const T* gate, const float* weight, int64_t width, float eps, T* out) {
  const Vec scale = splat(inverse_rms(x, width, eps));
  for (int64_t d = 0; d < width; d += kLanes) {
    const Vec normed = load_some(x + d, width - d) * scale * load_some(weight + d, width - d);
    store_some(out + d, normed / (1.0f + exp_vec(-load_some(gate + d, width - d))), width - d);
  }
}
