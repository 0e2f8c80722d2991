// SiTU-GLU in one pass over gate and up.
#define KIMI_K3_BODY "situ/kernels.h"
#include "../for_each_isa.h"

namespace kimi_k3 {

namespace {

Tensor with_plain_rows(const Tensor& t) { return t.size(1) == 1 || t.stride(1) == 1 ? t : make_contiguous(t); }

template <class T>
void run(const Tensor& gate, const Tensor& up, float beta, float linear_beta, const Tensor& out) {
  const int64_t width = gate.size(1), gate_row = gate.stride(0), up_row = up.stride(0);
  // Pieces of rows: one wide row is work for all threads.
  constexpr int64_t kPiece = 2048;
  const int64_t pieces = (width + kPiece - 1) / kPiece;
  parallel(gate.size(0) * pieces, 2, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / pieces, first = i % pieces * kPiece;
      KIMI_K3_ACTIVE(situ_row<T>)(data<T>(gate) + row * gate_row + first, data<T>(up) + row * up_row + first,
                                  width - first < kPiece ? width - first : kPiece, beta, linear_beta,
                                  mutable_data<T>(out) + row * width + first);
    }
  });
}

Tensor situ(Tensor gate, Tensor up, double beta, std::optional<double> linear_beta) {
  check_sizes("situ", "gate", gate, {-1, -1});
  check_sizes("situ", "up", up, {gate.size(0), gate.size(1)});
  const ScalarType type = gate.scalar_type();
  if (!(type == ScalarType::BFloat16 || type == ScalarType::Float) || up.scalar_type() != type)
    return reference_tensor("situ", gate, up, beta, linear_beta);
  gate = with_plain_rows(gate);
  up = with_plain_rows(up);
  Tensor out = new_tensor(gate, {gate.size(0), gate.size(1)});
  const float bound = linear_beta ? static_cast<float>(*linear_beta) : 0.0f;
  if (type == ScalarType::BFloat16)
    run<bfloat16>(gate, up, static_cast<float>(beta), bound, out);
  else
    run<float>(gate, up, static_cast<float>(beta), bound, out);
  return out;
}

}  // namespace

}  // namespace kimi_k3

STABLE_TORCH_LIBRARY_IMPL(kimi_k3, CPU, m) { m.impl("situ", TORCH_BOX(&kimi_k3::situ)); }
