// The gradient of `short_conv` for a block of channels; included once for each instruction set (for_each_isa.h).

// rows[i], i in 0 .. count + taps - 2: the channels' inputs, the oldest of the first token first. gradients[t]: of the
// convolution's sum, [count][kGradChannels]; the first `counted` tokens are added to grad_taps [taps][kGradChannels].
template <class T>
KIMI_K3_TARGET static void sum_gradients(const T* const* rows, const T* const* grads, int64_t count, int64_t counted,
                                         const float* taps, int64_t num_taps, int64_t channels, float* gradients,
                                         float* grad_taps) {
  for (int64_t c = 0; c < channels; c += kLanes) {
    for (int64_t t = 0; t < count; ++t) {
      Vec sum = {};
      for (int64_t w = 0; w < num_taps; ++w)
        sum += load_vec(taps + w * kGradChannels + c) * load_some(rows[t + w] + c, channels - c);
      const Vec sigmoid = 1.0f / (1.0f + exp_vec(-sum));
      const Vec gradient = load_some(grads[t] + c, channels - c) * (sigmoid * (1.0f + sum * (1.0f - sigmoid)));
      store_vec(gradients + t * kGradChannels + c, gradient);
    }
    for (int64_t w = 0; w < num_taps; ++w) {
      Vec total = {};
      for (int64_t t = 0; t < counted; ++t)
        total += load_vec(gradients + t * kGradChannels + c) * load_some(rows[t + w] + c, channels - c);
      float* target = grad_taps + w * kGradChannels + c;
      store_vec(target, load_vec(target) + total);
    }
  }
}

// out[t] = sum_w taps[w] gradients[t + num_taps - 1 - w], no gradients after the last of `known`.
template <class T>
KIMI_K3_TARGET static void input_gradients(const float* gradients, int64_t known, int64_t count, const float* taps,
                                           int64_t num_taps, int64_t channels, T* out, int64_t out_stride) {
  for (int64_t c = 0; c < channels; c += kLanes)
    for (int64_t t = 0; t < count; ++t) {
      Vec sum = {};
      for (int64_t w = 0; w < num_taps; ++w) {
        const int64_t later = t + num_taps - 1 - w;
        if (later < known) sum += load_vec(taps + w * kGradChannels + c) * load_vec(gradients + later * kGradChannels + c);
      }
      store_some(out + t * out_stride + c, sum, channels - c);
    }
}
