// RMSNorm, plain and output-gated, in one pass over each row.
#include <cmath>

#define KIMI_K3_BODY "norm/kernels.h"
#include "../for_each_isa.h"

namespace kimi_k3 {

namespace {

int64_t grain(int64_t width) { return 1 + (1 << 14) / (1 + width); }

// [.., D] and [D]: the number of rows.
int64_t rows_of(const char* op, const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(x.dim() >= 1, op, ": want x [.., D]");
  check_sizes(op, "weight", weight, {x.size(x.dim() - 1)});
  return weight.size(0) ? x.numel() / weight.size(0) : 0;
}

std::vector<int64_t> sizes_of(const Tensor& t) {
  std::vector<int64_t> sizes;
  for (int64_t dim = 0; dim < t.dim(); ++dim) sizes.push_back(t.size(dim));
  return sizes;
}

template <class T>
void norm(const Tensor& x, const Tensor& weight, int64_t rows, float eps, const Tensor& out) {
  const int64_t width = weight.size(0);
  parallel(rows, grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      KIMI_K3_ACTIVE(norm_row<T>)(data<T>(x) + row * width, data<T>(weight), width, eps, mutable_data<T>(out) + row * width);
  });
}

Tensor rms_norm(Tensor x, Tensor weight, double eps) {
  const int64_t rows = rows_of("rms_norm", x, weight);
  if (!is_narrow(x) || weight.scalar_type() != x.scalar_type()) return reference_tensor("rms_norm", x, weight, eps);
  x = make_contiguous(x);
  weight = make_contiguous(weight);
  Tensor out = new_tensor(x, sizes_of(x));
  if (x.scalar_type() == ScalarType::BFloat16)
    norm<bfloat16>(x, weight, rows, static_cast<float>(eps), out);
  else
    norm<float>(x, weight, rows, static_cast<float>(eps), out);
  return out;
}

template <class T>
void gated_norm(const Tensor& x, const Tensor& gate, const float* weight, int64_t rows, int64_t width, float eps, const Tensor& out) {
  parallel(rows, grain(4 * width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      KIMI_K3_ACTIVE(gated_norm_row<T>)(data<T>(x) + row * width, data<T>(gate) + row * width, weight, width, eps,
                                       mutable_data<T>(out) + row * width);
  });
}

Tensor gated_rms_norm(Tensor x, Tensor gate, Tensor weight, double eps) {
  const int64_t rows = rows_of("gated_rms_norm", x, weight), width = weight.size(0);
  STD_TORCH_CHECK(sizes_of(x) == sizes_of(gate), "gated_rms_norm: want a gate of x's shape");
  if (!is_narrow(x) || gate.scalar_type() != x.scalar_type() || !is_narrow(weight))
    return reference_tensor("gated_rms_norm", x, gate, weight, eps);
  x = make_contiguous(x);
  gate = make_contiguous(gate);
  const std::vector<float> floats = floats_of(weight, width);
  Tensor out = new_tensor(x, sizes_of(x));
  if (x.scalar_type() == ScalarType::BFloat16)
    gated_norm<bfloat16>(x, gate, floats.data(), rows, width, static_cast<float>(eps), out);
  else
    gated_norm<float>(x, gate, floats.data(), rows, width, static_cast<float>(eps), out);
  return out;
}

}  // namespace

}  // namespace kimi_k3

STABLE_TORCH_LIBRARY_IMPL(kimi_k3, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&kimi_k3::rms_norm));
  m.impl("gated_rms_norm", TORCH_BOX(&kimi_k3::gated_rms_norm));
}
