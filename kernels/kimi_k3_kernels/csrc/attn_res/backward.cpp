// The gradient of `attn_res_mix`: tokens on their own; those of the weight are added in fixed blocks of tokens.
#include <algorithm>
#include <cmath>
#include <tuple>

#include "../cpu.h"

namespace kimi_k3 {

constexpr int64_t kWeightTokens = 64;  // tokens whose part of the weight's gradient is summed first

template <class T>
struct MixToken {
  int64_t width, num_sources;
  float eps;
  const T* grad;
  const T* const* sources;
  T* const* targets;
  float* scratch;  // [4 num_sources]
};

}  // namespace kimi_k3

#define KIMI_K3_BODY "attn_res/backward_kernels.h"
#include "../for_each_isa.h"

namespace kimi_k3 {

namespace {

template <class T>
void run(const Tensor& grad, const Tensor& running_sum, const Tensor& bank, int64_t blocks, const std::vector<float>& weight,
         float eps, const Tensor& grad_sum, const Tensor& grad_bank, std::vector<float>& grad_weight) {
  const int64_t tokens = grad.size(0), width = grad.size(1), parts = (tokens + kWeightTokens - 1) / kWeightTokens;
  std::vector<float> partial(parts * width);
  parallel(parts, 1, [&](int64_t begin, int64_t end) {
    std::vector<const T*> sources(blocks + 1);
    std::vector<T*> targets(blocks + 1);
    std::vector<float> scratch(4 * (blocks + 1));
    for (int64_t part = begin; part < end; ++part)
      for (int64_t t = part * kWeightTokens; t < std::min(tokens, (part + 1) * kWeightTokens); ++t) {
        for (int64_t i = 0; i < blocks; ++i) {
          sources[i] = data<T>(bank) + (i * tokens + t) * width;
          targets[i] = mutable_data<T>(grad_bank) + (i * tokens + t) * width;
        }
        sources[blocks] = data<T>(running_sum) + t * width;
        targets[blocks] = mutable_data<T>(grad_sum) + t * width;
        const MixToken<T> token{width, blocks + 1, eps, data<T>(grad) + t * width, sources.data(), targets.data(), scratch.data()};
        KIMI_K3_ACTIVE(mix_gradient<T>)(token, weight.data(), &partial[part * width]);
      }
  });
  std::fill_n(mutable_data<T>(grad_bank) + blocks * tokens * width, (bank.size(0) - blocks) * tokens * width, T(0));
  for (int64_t part = 0; part < parts; ++part)
    for (int64_t d = 0; d < width; ++d) grad_weight[d] += partial[part * width + d];
}

std::tuple<Tensor, Tensor, Tensor> attn_res_mix_backward(Tensor grad, Tensor running_sum, Tensor bank, Tensor num_blocks,
                                                         Tensor weight, double eps) {
  const ScalarType dtype = running_sum.scalar_type();
  const auto is_known = [](ScalarType t) { return t == ScalarType::Float || t == ScalarType::BFloat16; };
  // A bank of other strides gets a gradient of its strides, which the reference makes.
  if (!is_known(dtype) || !is_known(weight.scalar_type()) || grad.scalar_type() != dtype || bank.scalar_type() != dtype ||
      !is_contiguous(bank)) {
    auto stack = call_reference("attn_res_mix_backward", grad, running_sum, bank, num_blocks, weight, eps);
    return {torch::stable::detail::to<Tensor>(stack[0]), torch::stable::detail::to<Tensor>(stack[1]),
            torch::stable::detail::to<Tensor>(stack[2])};
  }
  check_sizes("attn_res_mix_backward", "running_sum", running_sum, {-1, -1});
  const int64_t tokens = running_sum.size(0), width = running_sum.size(1);
  check_sizes("attn_res_mix_backward", "grad", grad, {tokens, width});
  check_sizes("attn_res_mix_backward", "bank", bank, {-1, tokens, width});
  check_sizes("attn_res_mix_backward", "weight", weight, {width});
  STD_TORCH_CHECK(num_blocks.numel() == 1, "attn_res_mix_backward: want one num_blocks, got ", num_blocks.numel());
  const int64_t blocks = Integers(num_blocks)[0];
  STD_TORCH_CHECK(blocks >= 0 && blocks <= bank.size(0), "attn_res_mix_backward: want num_blocks in 0..", bank.size(0), ", got ", blocks);
  for (Tensor* t : {&grad, &running_sum, &weight}) *t = make_contiguous(*t);
  const bool bf16_weight = weight.scalar_type() == ScalarType::BFloat16;
  std::vector<float> floats(width), grad_floats(width);
  for (int64_t d = 0; d < width; ++d) floats[d] = bf16_weight ? to_float(data<bfloat16>(weight)[d]) : data<float>(weight)[d];
  Tensor grad_sum = new_tensor(running_sum, {tokens, width}), grad_bank = new_tensor(bank, {bank.size(0), tokens, width});
  Tensor grad_weight = new_tensor(weight, {width});
  if (dtype == ScalarType::BFloat16)
    run<bfloat16>(grad, running_sum, bank, blocks, floats, static_cast<float>(eps), grad_sum, grad_bank, grad_floats);
  else
    run<float>(grad, running_sum, bank, blocks, floats, static_cast<float>(eps), grad_sum, grad_bank, grad_floats);
  for (int64_t d = 0; d < width; ++d) {
    if (bf16_weight)
      store(mutable_data<bfloat16>(grad_weight) + d, grad_floats[d]);
    else
      mutable_data<float>(grad_weight)[d] = grad_floats[d];
  }
  return {grad_sum, grad_bank, grad_weight};
}

}  // namespace

}  // namespace kimi_k3

STABLE_TORCH_LIBRARY_IMPL(kimi_k3, CPU, m) { m.impl("attn_res_mix_backward", TORCH_BOX(&kimi_k3::attn_res_mix_backward)); }
