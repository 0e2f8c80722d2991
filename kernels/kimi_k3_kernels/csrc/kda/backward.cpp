// The gradient of `kda_chunk`: each head of each sequence on its own, in tiles of 16 tokens.
#include <algorithm>
#include <tuple>

#include "../slots.h"

namespace kimi_k3 {

constexpr int64_t kGradTile = 16;
constexpr int64_t kSegmentTiles = 64;  // tiles whose states a thread holds at once: 4 MiB for heads of 128 x 128

template <class T>
struct BackwardInputs {  // contiguous [T, H, ..]; states [N, H, K, V]
  int64_t heads, key_dim, value_dim;
  const T *grad, *q, *k, *v;
  const float *log_decay, *beta, *states;
  T *grad_q, *grad_k, *grad_v;
  float *grad_log_decay, *grad_beta;
};

}  // namespace kimi_k3

#define KIMI_K3_BODY "kda/backward_kernels.h"
#include "../for_each_isa.h"

namespace kimi_k3 {

namespace {

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients kda_chunk_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta, Tensor state,
                             Tensor cu_seqlens) {
  const ScalarType dtype = q.scalar_type();
  const bool one_dtype = grad.scalar_type() == dtype && k.scalar_type() == dtype && v.scalar_type() == dtype;
  if (!(dtype == ScalarType::Float || dtype == ScalarType::BFloat16) || !one_dtype ||
      log_decay.scalar_type() != ScalarType::Float || beta.scalar_type() != ScalarType::Float ||
      state.scalar_type() != ScalarType::Float) {
    auto stack = call_reference("kda_chunk_backward", grad, q, k, v, log_decay, beta, state, cu_seqlens);
    return {torch::stable::detail::to<Tensor>(stack[0]), torch::stable::detail::to<Tensor>(stack[1]),
            torch::stable::detail::to<Tensor>(stack[2]), torch::stable::detail::to<Tensor>(stack[3]),
            torch::stable::detail::to<Tensor>(stack[4])};
  }
  check_sizes("kda_chunk_backward", "q", q, {-1, -1, -1});
  check_sizes("kda_chunk_backward", "cu_seqlens", cu_seqlens, {-1});
  const int64_t tokens = q.size(0), heads = q.size(1), key_dim = q.size(2), sequences = cu_seqlens.size(0) - 1;
  check_sizes("kda_chunk_backward", "k", k, {tokens, heads, key_dim});
  check_sizes("kda_chunk_backward", "v", v, {tokens, heads, -1});
  const int64_t value_dim = v.size(2);
  check_sizes("kda_chunk_backward", "grad", grad, {tokens, heads, value_dim});
  check_sizes("kda_chunk_backward", "log_decay", log_decay, {tokens, heads, key_dim});
  check_sizes("kda_chunk_backward", "beta", beta, {tokens, heads});
  check_sizes("kda_chunk_backward", "state", state, {sequences, heads, key_dim, value_dim});
  const std::vector<int64_t> bounds = sequence_bounds("kda_chunk_backward", cu_seqlens, tokens);
  for (Tensor* t : {&grad, &q, &k, &v, &log_decay, &beta, &state}) *t = make_contiguous(*t);
  Tensor grad_q = new_tensor(q, {tokens, heads, key_dim}), grad_k = new_tensor(k, {tokens, heads, key_dim});
  Tensor grad_v = new_tensor(v, {tokens, heads, value_dim}), grad_beta = new_tensor(beta, {tokens, heads});
  Tensor grad_log_decay = new_tensor(log_decay, {tokens, heads, key_dim});
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const BackwardInputs<T> in{heads, key_dim, value_dim, data<T>(grad), data<T>(q), data<T>(k), data<T>(v),
                               data<float>(log_decay), data<float>(beta), data<float>(state), mutable_data<T>(grad_q),
                               mutable_data<T>(grad_k), mutable_data<T>(grad_v), mutable_data<float>(grad_log_decay),
                               mutable_data<float>(grad_beta)};
    parallel(heads * sequences, 1,
             [&](int64_t begin, int64_t end) { KIMI_K3_ACTIVE(gradient_heads<T>)(in, bounds, begin, end); });
  };
  dtype == ScalarType::BFloat16 ? run(bfloat16{}) : run(float{});
  return {grad_q, grad_k, grad_v, grad_log_decay, grad_beta};
}

}  // namespace

}  // namespace kimi_k3

STABLE_TORCH_LIBRARY_IMPL(kimi_k3, CPU, m) { m.impl("kda_chunk_backward", TORCH_BOX(&kimi_k3::kda_chunk_backward)); }
