// The gradient of `short_conv`: blocks of channels on their own, each over all sequences in pieces of tokens.
#include <tuple>

#include "../slots.h"

namespace kimi_k3 {

constexpr int64_t kGradChannels = 64;
constexpr int64_t kGradTokens = 256;  // of a piece: its gradients stay in cache

}  // namespace kimi_k3

#define KIMI_K3_BODY "short_conv/backward_kernels.h"
#include "../for_each_isa.h"

namespace kimi_k3 {

namespace {

std::vector<float> as_floats(const Tensor& t) {
  const Tensor whole = make_contiguous(t);
  std::vector<float> out(whole.numel());
  const bool is_bf16 = whole.scalar_type() == ScalarType::BFloat16;
  for (size_t i = 0; i < out.size(); ++i) out[i] = is_bf16 ? to_float(data<bfloat16>(whole)[i]) : data<float>(whole)[i];
  return out;
}

template <class T>
void run(const Tensor& grad, const Tensor& x, const std::vector<float>& weight, const Tensor& windows,
         const std::vector<int64_t>& bounds, int64_t num_taps, const Tensor& grad_x, std::vector<float>& grad_weight) {
  const int64_t channels = x.size(1), before = num_taps - 1;
  const T *grads = data<T>(grad), *inputs = data<T>(x), *past = data<T>(windows);
  T* out = mutable_data<T>(grad_x);
  parallel((channels + kGradChannels - 1) / kGradChannels, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> taps(num_taps * kGradChannels), grad_taps(taps.size());
    std::vector<float> gradients((kGradTokens + before) * kGradChannels);
    std::vector<const T*> rows, grad_rows;
    for (int64_t block = begin; block < end; ++block) {
      const int64_t c = block * kGradChannels, count = std::min(kGradChannels, channels - c);
      std::fill(taps.begin(), taps.end(), 0.0f);
      std::fill(grad_taps.begin(), grad_taps.end(), 0.0f);
      for (int64_t w = 0; w < num_taps; ++w)
        for (int64_t i = 0; i < count; ++i) taps[w * kGradChannels + i] = weight[(c + i) * num_taps + w];
      for (int64_t n = 0; n + 1 < static_cast<int64_t>(bounds.size()); ++n)
        for (int64_t t = bounds[n]; t < bounds[n + 1]; t += kGradTokens) {
          const int64_t tokens = std::min(kGradTokens, bounds[n + 1] - t);
          const int64_t known = std::min(tokens + before, bounds[n + 1] - t);  // an input reaches `before` tokens on
          rows.clear();
          grad_rows.clear();
          for (int64_t at = t - before; at < t + known; ++at)
            rows.push_back((at >= bounds[n] ? inputs + at * channels : past + (n * before + before + at - bounds[n]) * channels) + c);
          for (int64_t at = t; at < t + known; ++at) grad_rows.push_back(grads + at * channels + c);
          KIMI_K3_ACTIVE(sum_gradients<T>)(rows.data(), grad_rows.data(), known, tokens, taps.data(), num_taps, count,
                                           gradients.data(), grad_taps.data());
          KIMI_K3_ACTIVE(input_gradients<T>)(gradients.data(), known, tokens, taps.data(), num_taps, count,
                                             out + t * channels + c, channels);
        }
      for (int64_t w = 0; w < num_taps; ++w)
        for (int64_t i = 0; i < count; ++i) grad_weight[(c + i) * num_taps + w] = grad_taps[w * kGradChannels + i];
    }
  });
}

std::tuple<Tensor, Tensor> short_conv_backward(Tensor grad, Tensor x, Tensor weight, Tensor windows, Tensor cu_seqlens) {
  const ScalarType dtype = x.scalar_type();
  const auto is_known = [](ScalarType t) { return t == ScalarType::Float || t == ScalarType::BFloat16; };
  if (!is_known(dtype) || !is_known(weight.scalar_type()) || grad.scalar_type() != dtype || windows.scalar_type() != dtype) {
    auto stack = call_reference("short_conv_backward", grad, x, weight, windows, cu_seqlens);
    return {torch::stable::detail::to<Tensor>(stack[0]), torch::stable::detail::to<Tensor>(stack[1])};
  }
  check_sizes("short_conv_backward", "x", x, {-1, -1});
  check_sizes("short_conv_backward", "grad", grad, {x.size(0), x.size(1)});
  check_sizes("short_conv_backward", "weight", weight, {x.size(1), -1});
  check_sizes("short_conv_backward", "cu_seqlens", cu_seqlens, {-1});
  check_sizes("short_conv_backward", "windows", windows, {cu_seqlens.size(0) - 1, weight.size(1) - 1, x.size(1)});
  const std::vector<int64_t> bounds = sequence_bounds("short_conv_backward", cu_seqlens, x.size(0));
  for (Tensor* t : {&grad, &x, &windows}) *t = make_contiguous(*t);
  Tensor grad_x = new_tensor(x, {x.size(0), x.size(1)}), grad_weight = new_tensor(weight, {weight.size(0), weight.size(1)});
  std::vector<float> taps = as_floats(weight), grad_taps(taps.size());
  if (dtype == ScalarType::BFloat16)
    run<bfloat16>(grad, x, taps, windows, bounds, weight.size(1), grad_x, grad_taps);
  else
    run<float>(grad, x, taps, windows, bounds, weight.size(1), grad_x, grad_taps);
  for (size_t i = 0; i < grad_taps.size(); ++i) {
    if (weight.scalar_type() == ScalarType::BFloat16)
      store(mutable_data<bfloat16>(grad_weight) + i, grad_taps[i]);
    else
      mutable_data<float>(grad_weight)[i] = grad_taps[i];
  }
  return {grad_x, grad_weight};
}

}  // namespace

}  // namespace kimi_k3

STABLE_TORCH_LIBRARY_IMPL(kimi_k3, CPU, m) { m.impl("short_conv_backward", TORCH_BOX(&kimi_k3::short_conv_backward)); }
