// Each head's rows times that head's matrix: the two absorbed products of MLA. Weights are read from memory once.
#include "head_matvec.h"

#include <algorithm>

#define KIMI_K3_BODY "head_matvec/kernels.h"
#include "../for_each_isa.h"

namespace kimi_k3 {

template <class T>
void head_products(HeadRows<const T> x, HeadMatrices<T> w, bool transposed, int64_t tokens, int64_t heads, int64_t depth,
                   int64_t outputs, HeadRows<T> y) {
  constexpr int64_t kBlock = 64;
  const int64_t blocks = (outputs + kBlock - 1) / kBlock;
  const int64_t work = 1 + tokens * depth * kBlock;
  parallel(heads * blocks, 1 + (1 << 15) / work, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t h = task / blocks, first = task % blocks * kBlock, last = std::min(outputs, first + kBlock);
      const T *rows = x.start + h * x.head, *matrix = w.start + h * w.head;
      T* out = y.start + h * y.head;
      if (transposed)
        KIMI_K3_ACTIVE(spread_rows<T>)(rows, x.token, tokens, matrix, w.row, depth, first, last, out, y.token);
      else
        KIMI_K3_ACTIVE(dot_rows<T>)(rows, x.token, tokens, matrix, w.row, depth, first, last, out, y.token);
    }
  });
}

template void head_products<float>(HeadRows<const float>, HeadMatrices<float>, bool, int64_t, int64_t, int64_t, int64_t,
                                   HeadRows<float>);
template void head_products<bfloat16>(HeadRows<const bfloat16>, HeadMatrices<bfloat16>, bool, int64_t, int64_t, int64_t,
                                      int64_t, HeadRows<bfloat16>);

namespace {

template <class T>
void run(const Tensor& x, const Tensor& weight, bool transposed, const Tensor& out) {
  head_products<T>({data<T>(x), x.stride(0), x.stride(1)}, {data<T>(weight), weight.stride(0), weight.stride(1)}, transposed,
                   x.size(0), x.size(1), x.size(2), out.size(2), {mutable_data<T>(out), out.stride(0), out.stride(1)});
}

Tensor with_plain_rows(const Tensor& t) { return t.size(2) == 1 || t.stride(2) == 1 ? t : make_contiguous(t); }

Tensor head_matvec(Tensor x, Tensor weight, bool transposed) {
  check_sizes("head_matvec", "x", x, {-1, -1, -1});
  if (transposed)
    check_sizes("head_matvec", "weight", weight, {x.size(1), x.size(2), -1});
  else
    check_sizes("head_matvec", "weight", weight, {x.size(1), -1, x.size(2)});
  const bool is_bf16 = x.scalar_type() == ScalarType::BFloat16;
  if (!(is_bf16 || x.scalar_type() == ScalarType::Float) || weight.scalar_type() != x.scalar_type())
    return reference_tensor("head_matvec", x, weight, transposed);
  x = with_plain_rows(x);
  weight = with_plain_rows(weight);
  Tensor out = new_tensor(x, {x.size(0), x.size(1), weight.size(transposed ? 2 : 1)});
  is_bf16 ? run<bfloat16>(x, weight, transposed, out) : run<float>(x, weight, transposed, out);
  return out;
}

}  // namespace

}  // namespace kimi_k3

STABLE_TORCH_LIBRARY_IMPL(kimi_k3, CPU, m) { m.impl("head_matvec", TORCH_BOX(&kimi_k3::head_matvec)); }
