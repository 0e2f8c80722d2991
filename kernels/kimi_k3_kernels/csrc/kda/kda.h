// What the KDA kernels of every instruction set work on.
#pragma once

#include "../cpu.h"

namespace kimi_k3 {

constexpr int64_t kTile = 16;  // tokens of one tile of the chunk form

// [T, H, D] with any stride between tokens and heads.
template <class T>
struct TokenRows {
  TokenRows(const Tensor& t, int64_t width)
      : tensor(t.stride(2) == 1 || width == 1 ? t : make_contiguous(t)), token(tensor.stride(0)),
        head(tensor.stride(1)), base(data<T>(tensor)) {}
  const T* row(int64_t t, int64_t h) const { return base + t * token + h * head; }
  Tensor tensor;
  int64_t token, head;
  const T* base;
};

template <class T>
struct KdaInputs {
  KdaInputs(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay, const Tensor& beta)
      : heads(q.size(1)), key_dim(q.size(2)), value_dim(v.size(2)), q(q, key_dim), k(k, key_dim), v(v, value_dim),
        log_decay(log_decay, key_dim), beta_tensor(make_contiguous(beta)), betas(data<float>(beta_tensor)) {}
  float beta(int64_t t, int64_t h) const { return betas[t * heads + h]; }
  int64_t heads, key_dim, value_dim;
  TokenRows<T> q, k, v;
  TokenRows<float> log_decay;
  Tensor beta_tensor;
  const float* betas;
};

// One head's state in a pool, [K, V]: rows of V floats. A null `from` reads as zeros, a null `to` is not written.
struct StatePlaces {
  const float* from;
  int64_t from_stride;
  float* to;
  int64_t to_stride;
};

inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// Zeroed floats on a cache line's boundary.
struct Scratch {
  explicit Scratch(int64_t count) : memory(count), floats(memory.data()) {}
  Scratch(const Scratch&) = delete;
  LineVector<float> memory;
  float* floats;
};

}  // namespace kimi_k3
