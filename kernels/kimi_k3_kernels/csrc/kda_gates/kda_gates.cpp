// Queries, keys, decays and write strengths of KDA in one pass over a token's projections.
#include <algorithm>
#include <cmath>
#include <tuple>

#define KIMI_K3_BODY "kda_gates/kernels.h"
#include "../for_each_isa.h"

namespace kimi_k3 {

namespace {

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <class T>
void run(const Tensor& qkv, const Tensor& decay, const Tensor& beta_logit, const std::vector<float>& rates,
         const std::vector<float>& bias, float bound, const Result& out) {
  const int64_t heads = beta_logit.size(1), width = decay.size(1), dim = width / heads;
  const float scale = static_cast<float>(std::pow(static_cast<double>(dim), -0.5));
  const T *tokens_qkv = data<T>(qkv), *tokens_decay = data<T>(decay), *tokens_beta = data<T>(beta_logit);
  T *q = mutable_data<T>(std::get<0>(out)), *k = mutable_data<T>(std::get<1>(out));
  float *log_decay = mutable_data<float>(std::get<2>(out)), *beta = mutable_data<float>(std::get<3>(out));
  parallel(qkv.size(0), 1 + (1 << 13) / (1 + width), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        const T* head = tokens_qkv + t * 3 * width + h * dim;
        const int64_t at = t * width + h * dim;
        KIMI_K3_ACTIVE(unit_row<T>)(head, dim, scale, q + at);
        KIMI_K3_ACTIVE(unit_row<T>)(head + width, dim, 1.0f, k + at);
        KIMI_K3_ACTIVE(decay_row<T>)(tokens_decay + at, &bias[h * dim], rates[h], bound, dim, log_decay + at);
      }
      KIMI_K3_ACTIVE(sigmoid_row<T>)(tokens_beta + t * heads, heads, beta + t * heads);
    }
  });
}

Result kda_gates(Tensor qkv, Tensor decay, Tensor beta_logit, Tensor A_log, Tensor dt_bias, std::optional<double> lower_bound) {
  check_sizes("kda_gates", "beta_logit", beta_logit, {-1, -1});
  const int64_t tokens = beta_logit.size(0), heads = beta_logit.size(1);
  check_sizes("kda_gates", "decay", decay, {tokens, -1});
  const int64_t width = decay.size(1);
  check_sizes("kda_gates", "qkv", qkv, {tokens, 3 * width});
  check_sizes("kda_gates", "dt_bias", dt_bias, {width});
  check_sizes("kda_gates", "A_log", A_log, {-1});
  STD_TORCH_CHECK(heads > 0 && width % heads == 0 && A_log.size(0) >= heads, "kda_gates: want heads that divide ", width,
                  " and a rate for each, got ", heads, " and ", A_log.size(0));
  const ScalarType type = qkv.scalar_type();
  if (!lower_bound || !is_narrow(qkv) || decay.scalar_type() != type || beta_logit.scalar_type() != type ||
      !is_narrow(A_log) || !is_narrow(dt_bias)) {
    auto stack = call_reference("kda_gates", qkv, decay, beta_logit, A_log, dt_bias, lower_bound);
    using torch::stable::detail::to;
    return {to<Tensor>(stack[0]), to<Tensor>(stack[1]), to<Tensor>(stack[2]), to<Tensor>(stack[3])};
  }
  qkv = make_contiguous(qkv);
  decay = make_contiguous(decay);
  beta_logit = make_contiguous(beta_logit);
  std::vector<float> rates = floats_of(A_log, heads), bias = floats_of(dt_bias, width);
  for (float& rate : rates) rate = std::exp(rate);
  const std::vector<int64_t> sizes{tokens, heads, width / heads};
  Result out{new_tensor(qkv, sizes), new_tensor(qkv, sizes), new_tensor(qkv, sizes, ScalarType::Float),
             new_tensor(qkv, {tokens, heads}, ScalarType::Float)};
  if (type == ScalarType::BFloat16)
    run<bfloat16>(qkv, decay, beta_logit, rates, bias, static_cast<float>(*lower_bound), out);
  else
    run<float>(qkv, decay, beta_logit, rates, bias, static_cast<float>(*lower_bound), out);
  return out;
}

}  // namespace

}  // namespace kimi_k3

STABLE_TORCH_LIBRARY_IMPL(kimi_k3, CPU, m) { m.impl("kda_gates", TORCH_BOX(&kimi_k3::kda_gates)); }
