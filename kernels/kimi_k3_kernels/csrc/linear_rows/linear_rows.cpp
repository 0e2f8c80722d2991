// matvec for any number of rows, a few at a time: its sums have one order below the count where a library GEMM takes over.
#include <algorithm>

#include "../cpu.h"

namespace kimi_k3 {

namespace {

constexpr int64_t kRowsAtOnce = 32;

Tensor call_matvec(const Tensor& x, const std::vector<Tensor>& weights) {
  std::array<StableIValue, 2> stack{torch::stable::detail::from(x), torch::stable::detail::from(weights)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("kimi_k3::matvec", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor linear_rows(Tensor x, std::vector<Tensor> weights) {
  const ScalarType type = x.scalar_type(), weight_type = weights.empty() ? type : weights[0].scalar_type();
  const bool is_bf16 = type == ScalarType::BFloat16 && weight_type == type;
  const bool is_float = type == ScalarType::Float && (weight_type == type || weight_type == ScalarType::BFloat16);
  if (!(is_bf16 || is_float) || weights.empty()) return reference_tensor("linear_rows", x, weights);
  check_sizes("linear_rows", "x", x, {-1, -1});
  const int64_t count = x.size(0);
  if (count <= kRowsAtOnce) return call_matvec(x, weights);
  int64_t total = 0;
  for (const Tensor& weight : weights) {
    check_sizes("linear_rows", "weight", weight, {-1, x.size(1)});
    total += weight.size(0);
  }
  Tensor out = new_tensor(x, {count, total});
  const int64_t row_bytes = total * (type == ScalarType::Float ? 4 : 2);
  for (int64_t first = 0; first < count; first += kRowsAtOnce) {
    const int64_t rows = std::min(kRowsAtOnce, count - first);
    const Tensor part = call_matvec(torch::stable::narrow(x, 0, first, rows), weights);
    std::memcpy(mutable_data<char>(out) + first * row_bytes, part.const_data_ptr(), rows * row_bytes);
  }
  return out;
}

}  // namespace

}  // namespace kimi_k3

STABLE_TORCH_LIBRARY_IMPL(kimi_k3, CPU, m) { m.impl("linear_rows", TORCH_BOX(&kimi_k3::linear_rows)); }
