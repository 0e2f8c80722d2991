// Attention Residuals: each token's softmax mix of its sealed depth blocks and its running sum.
#include <algorithm>
#include <cmath>

#define KIMI_K3_BODY "attn_res/kernels.h"
#include "../for_each_isa.h"

namespace kimi_k3 {

namespace {

Tensor with_plain_rows(const Tensor& t) {
  return t.size(t.dim() - 1) == 1 || t.stride(t.dim() - 1) == 1 ? t : make_contiguous(t);
}

template <class T>
void mix(const Tensor& running_sum, const Tensor& bank, int64_t blocks, const float* weight, float eps, const Tensor& out) {
  const int64_t width = running_sum.size(1);
  const T *newest = data<T>(running_sum), *sealed = data<T>(bank);
  const int64_t newest_token = running_sum.stride(0), block = bank.stride(0), sealed_token = bank.stride(1);
  T* rows = mutable_data<T>(out);
  parallel(running_sum.size(0), 1 + (1 << 14) / (1 + width * (blocks + 1)), [&](int64_t begin, int64_t end) {
    std::vector<const T*> sources(blocks + 1);
    std::vector<float> probabilities(blocks + 1);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < blocks; ++i) sources[i] = sealed + i * block + t * sealed_token;
      sources[blocks] = newest + t * newest_token;
      if (blocks == 0)
        std::copy_n(sources[0], width, rows + t * width);
      else
        KIMI_K3_ACTIVE(mix_token<T>)(sources.data(), blocks + 1, weight, width, eps, probabilities.data(), rows + t * width);
    }
  });
}

Tensor attn_res_mix(Tensor running_sum, Tensor bank, Tensor num_blocks, Tensor weight, double eps) {
  const bool is_bf16 = running_sum.scalar_type() == ScalarType::BFloat16;
  const bool bf16_weight = weight.scalar_type() == ScalarType::BFloat16;
  check_sizes("attn_res_mix", "running_sum", running_sum, {-1, -1});
  check_sizes("attn_res_mix", "bank", bank, {-1, running_sum.size(0), running_sum.size(1)});
  check_sizes("attn_res_mix", "weight", weight, {running_sum.size(1)});
  STD_TORCH_CHECK(num_blocks.numel() == 1, "attn_res_mix: want one num_blocks, got ", num_blocks.numel());
  if (!(is_bf16 || running_sum.scalar_type() == ScalarType::Float) || bank.scalar_type() != running_sum.scalar_type() ||
      !(bf16_weight || weight.scalar_type() == ScalarType::Float))
    return reference_tensor("attn_res_mix", running_sum, bank, num_blocks, weight, eps);
  const int64_t blocks = Integers(num_blocks)[0];
  STD_TORCH_CHECK(blocks >= 0 && blocks <= bank.size(0), "attn_res_mix: want num_blocks in 0..", bank.size(0), ", got ", blocks);
  running_sum = with_plain_rows(running_sum);
  bank = with_plain_rows(bank);
  weight = make_contiguous(weight);
  const int64_t width = running_sum.size(1);
  std::vector<float> widened(bf16_weight ? width : 0);
  for (int64_t d = 0; d < static_cast<int64_t>(widened.size()); ++d) widened[d] = to_float(data<bfloat16>(weight)[d]);
  const float* floats = bf16_weight ? widened.data() : data<float>(weight);
  Tensor out = new_tensor(running_sum, {running_sum.size(0), width});
  if (is_bf16)
    mix<bfloat16>(running_sum, bank, blocks, floats, static_cast<float>(eps), out);
  else
    mix<float>(running_sum, bank, blocks, floats, static_cast<float>(eps), out);
  return out;
}

}  // namespace

}  // namespace kimi_k3

STABLE_TORCH_LIBRARY_IMPL(kimi_k3, CPU, m) { m.impl("attn_res_mix", TORCH_BOX(&kimi_k3::attn_res_mix)); }
