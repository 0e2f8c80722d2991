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

// With `norm`, weights of T, each mixed row is normed as well.
template <class T>
void mix(const Tensor& running_sum, const Tensor& bank, int64_t blocks, const float* weight, float eps, const Tensor& out,
         const T* norm = nullptr, float norm_eps = 0) {
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
      if (norm) KIMI_K3_ACTIVE(norm_row<T>)(rows + t * width, norm, width, norm_eps, rows + t * width);
    }
  });
}

int64_t checked_blocks(const char* op, const Tensor& running_sum, const Tensor& bank, const Tensor& num_blocks) {
  check_sizes(op, "running_sum", running_sum, {-1, -1});
  check_sizes(op, "bank", bank, {-1, running_sum.size(0), running_sum.size(1)});
  STD_TORCH_CHECK(num_blocks.numel() == 1, op, ": want one num_blocks, got ", num_blocks.numel());
  const int64_t blocks = Integers(num_blocks)[0];
  STD_TORCH_CHECK(blocks >= 0 && blocks <= bank.size(0), op, ": want num_blocks in 0..", bank.size(0), ", got ", blocks);
  return blocks;
}

Tensor attn_res_mix(Tensor running_sum, Tensor bank, Tensor num_blocks, Tensor weight, double eps) {
  const int64_t blocks = checked_blocks("attn_res_mix", running_sum, bank, num_blocks);
  check_sizes("attn_res_mix", "weight", weight, {running_sum.size(1)});
  if (!is_narrow(running_sum) || bank.scalar_type() != running_sum.scalar_type() || !is_narrow(weight))
    return reference_tensor("attn_res_mix", running_sum, bank, num_blocks, weight, eps);
  running_sum = with_plain_rows(running_sum);
  bank = with_plain_rows(bank);
  const std::vector<float> floats = floats_of(weight, running_sum.size(1));
  Tensor out = new_tensor(running_sum, {running_sum.size(0), running_sum.size(1)});
  if (running_sum.scalar_type() == ScalarType::BFloat16)
    mix<bfloat16>(running_sum, bank, blocks, floats.data(), static_cast<float>(eps), out);
  else
    mix<float>(running_sum, bank, blocks, floats.data(), static_cast<float>(eps), out);
  return out;
}

Tensor attn_res_mix_norm(Tensor running_sum, Tensor bank, Tensor num_blocks, Tensor score_norm, Tensor score_proj, double eps,
                         Tensor norm_weight, double norm_eps) {
  const int64_t blocks = checked_blocks("attn_res_mix_norm", running_sum, bank, num_blocks), width = running_sum.size(1);
  check_sizes("attn_res_mix_norm", "score_norm", score_norm, {width});
  check_sizes("attn_res_mix_norm", "score_proj", score_proj, {1, width});
  check_sizes("attn_res_mix_norm", "norm_weight", norm_weight, {width});
  const ScalarType type = running_sum.scalar_type();
  if (!is_narrow(running_sum) || bank.scalar_type() != type || norm_weight.scalar_type() != type || !is_narrow(score_norm) ||
      !is_narrow(score_proj))
    return reference_tensor("attn_res_mix_norm", running_sum, bank, num_blocks, score_norm, score_proj, eps, norm_weight, norm_eps);
  running_sum = with_plain_rows(running_sum);
  bank = with_plain_rows(bank);
  norm_weight = make_contiguous(norm_weight);
  std::vector<float> weight = floats_of(score_norm, width);
  const std::vector<float> factors = floats_of(score_proj, width);
  for (int64_t d = 0; d < width; ++d) weight[d] *= factors[d];
  Tensor out = new_tensor(running_sum, {running_sum.size(0), width});
  const float first = static_cast<float>(eps), second = static_cast<float>(norm_eps);
  if (type == ScalarType::BFloat16)
    mix(running_sum, bank, blocks, weight.data(), first, out, data<bfloat16>(norm_weight), second);
  else
    mix(running_sum, bank, blocks, weight.data(), first, out, data<float>(norm_weight), second);
  return out;
}

}  // namespace

}  // namespace kimi_k3

STABLE_TORCH_LIBRARY_IMPL(kimi_k3, CPU, m) {
  m.impl("attn_res_mix", TORCH_BOX(&kimi_k3::attn_res_mix));
  m.impl("attn_res_mix_norm", TORCH_BOX(&kimi_k3::attn_res_mix_norm));
}
