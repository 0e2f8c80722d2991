// What the KDA recurrence reads of one token (equations: kda_gates/reference.py).

// x / sqrt(sum x^2 + 1e-6), times `scale`.
template <class T>
KIMI_K3_TARGET static void unit_row(const T* x, int64_t width, float scale, T* out) {
  Vec sum{};
  for (int64_t d = 0; d < width; d += kLanes) {
    const Vec v = load_some(x + d, width - d);
    sum += v * v;
  }
  const float inverse = 1.0f / std::sqrt(sum_lanes(sum) + 1e-6f);
  for (int64_t d = 0; d < width; d += kLanes) store_some(out + d, load_some(x + d, width - d) * inverse * scale, width - d);
}

// bound * sigmoid(rate (logit + bias)).
template <class T>
KIMI_K3_TARGET static void decay_row(const T* logit, const float* bias, float rate, float bound, int64_t width, float* out) {
  for (int64_t d = 0; d < width; d += kLanes) {
    const Vec z = rate * (load_some(logit + d, width - d) + load_some(bias + d, width - d));
    store_some(out + d, bound / (1.0f + exp_vec(-z)), width - d);
  }
}

template <class T>
KIMI_K3_TARGET static void sigmoid_row(const T* x, int64_t width, float* out) {
  for (int64_t d = 0; d < width; d += kLanes) store_some(out + d, 1.0f / (1.0f + exp_vec(-load_some(x + d, width - d))), width - d);
}
