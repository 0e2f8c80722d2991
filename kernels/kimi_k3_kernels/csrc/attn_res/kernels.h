// attn_res_mix of one token (equation: attn_res/reference.py), and the RMSNorm of a row.
#include "../norm/kernels.h"

// weight . v and sum v^2.
template <class T>
KIMI_K3_INLINE void score_parts(const T* v, const float* weight, int64_t width, float& dot, float& square) {
  constexpr int kSums = 4;  // enough to hide the latency of a sum
  Vec dots[kSums], squares[kSums];
#pragma GCC unroll 4
  for (int n = 0; n < kSums; ++n) dots[n] = squares[n] = Vec{};
  int64_t d = 0;
  for (; d + kSums * kLanes <= width; d += kSums * kLanes)
#pragma GCC unroll 4
    for (int n = 0; n < kSums; ++n) {
      const Vec x = load_vec(v + d + n * kLanes);
      dots[n] += x * load_vec(weight + d + n * kLanes);
      squares[n] += x * x;
    }
  for (; d < width; d += kLanes) {
    const Vec x = load_some(v + d, width - d);
    dots[0] += x * load_some(weight + d, width - d);
    squares[0] += x * x;
  }
  dot = sum_lanes((dots[0] + dots[1]) + (dots[2] + dots[3]));
  square = sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]));
}

// `probabilities`: room for one float a source. The sources' rows stay in cache between the two passes.
template <class T>
KIMI_K3_TARGET static void mix_token(const T* const* sources, int64_t count, const float* weight, int64_t width, float eps,
                                     float* probabilities, T* out) {
  float highest = 0, total = 0;
  for (int64_t i = 0; i < count; ++i) {
    float dot, square;
    score_parts(sources[i], weight, width, dot, square);
    probabilities[i] = dot / std::sqrt(square / static_cast<float>(width) + eps);
    highest = i == 0 ? probabilities[0] : std::max(highest, probabilities[i]);
  }
  for (int64_t i = 0; i < count; ++i) total += probabilities[i] = std::exp(probabilities[i] - highest);
  for (int64_t i = 0; i < count; ++i) probabilities[i] /= total;

  constexpr int kSums = 4;
  int64_t d = 0;
  for (; d + kSums * kLanes <= width; d += kSums * kLanes) {
    Vec sums[kSums];
#pragma GCC unroll 4
    for (int n = 0; n < kSums; ++n) sums[n] = Vec{};
    for (int64_t i = 0; i < count; ++i) {
      const Vec probability = splat(probabilities[i]);
#pragma GCC unroll 4
      for (int n = 0; n < kSums; ++n) sums[n] += probability * load_vec(sources[i] + d + n * kLanes);
    }
#pragma GCC unroll 4
    for (int n = 0; n < kSums; ++n) store_vec(out + d + n * kLanes, sums[n]);
  }
  for (; d < width; d += kLanes) {
    Vec sum{};
    for (int64_t i = 0; i < count; ++i) sum += splat(probabilities[i]) * load_some(sources[i] + d, width - d);
    store_some(out + d, sum, width - d);
  }
}
