// SiTU-GLU of one row (equation: mxfp4_experts/reference.py).

// To 3 units in the last place: 1 - 2 / (1 + e^2x) cancels near 0, where the odd series serves.
KIMI_K3_INLINE Vec tanh_vec(Vec x) {
  const Vec large = 1.0f - 2.0f / (1.0f + exp_vec(x + x));
  const Vec s = x * x;
  Vec p = splat(-1382.0f / 155925.0f);
  p = p * s + 62.0f / 2835.0f;
  p = p * s - 17.0f / 315.0f;
  p = p * s + 2.0f / 15.0f;
  p = p * s - 1.0f / 3.0f;
  return s < 0.0625f ? x * s * p + x : large;
}

template <class T>
KIMI_K3_TARGET static void situ_row(const T* gate, const T* up, int64_t width, float beta, float linear_beta, T* out) {
  for (int64_t d = 0; d < width; d += kLanes) {
    const Vec g = load_some(gate + d, width - d), u = load_some(up + d, width - d);
    const Vec bounded = linear_beta > 0 ? linear_beta * tanh_vec(u / linear_beta) : u;
    store_some(out + d, beta * tanh_vec(g / beta) / (1.0f + exp_vec(-g)) * bounded, width - d);
  }
}
