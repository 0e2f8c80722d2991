// The gradient of `attn_res_mix` for one token; included once for each instruction set (for_each_isa.h).
//
//   s_i = r_i (w . v_i), r_i = 1 / sqrt(mean(v_i^2) + eps), p = softmax(s), ds_i = p_i (g . v_i - sum_j p_j g . v_j)
//   dv_i = p_i g + ds_i r_i w - ds_i s_i r_i^2 v_i / D,   dw += ds_i r_i v_i

template <class T>
KIMI_K3_TARGET static void mix_gradient(const MixToken<T>& token, const float* weight, float* grad_weight) {
  const int64_t width = token.width, sources = token.num_sources;
  float *dots = token.scratch, *inverse_rms = dots + sources, *along = inverse_rms + sources, *probability = along + sources;
  float highest = -1e30f;
  for (int64_t i = 0; i < sources; ++i) {
    Vec squares = {}, dot = {}, upstream = {};
    for (int64_t d = 0; d < width; d += kLanes) {
      const Vec value = load_some(token.sources[i] + d, width - d);
      squares += value * value;
      dot += value * load_some(weight + d, width - d);
      upstream += value * load_some(token.grad + d, width - d);
    }
    inverse_rms[i] = 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(width) + token.eps);
    dots[i] = sum_lanes(dot) * inverse_rms[i];
    along[i] = sum_lanes(upstream);
    highest = std::max(highest, dots[i]);
  }
  float total = 0, expected = 0;
  for (int64_t i = 0; i < sources; ++i) total += probability[i] = std::exp(dots[i] - highest);
  for (int64_t i = 0; i < sources; ++i) expected += (probability[i] /= total) * along[i];
  for (int64_t i = 0; i < sources; ++i) {
    const float scaled = probability[i] * (along[i] - expected) * inverse_rms[i];
    const float back = scaled * inverse_rms[i] * dots[i] / static_cast<float>(width);
    for (int64_t d = 0; d < width; d += kLanes) {
      const Vec value = load_some(token.sources[i] + d, width - d), grad = load_some(token.grad + d, width - d);
      store_some(token.targets[i] + d, probability[i] * grad + scaled * load_some(weight + d, width - d) - back * value,
                 width - d);
      store_some(grad_weight + d, load_some(grad_weight + d, width - d) + scaled * value, width - d);
    }
  }
}
