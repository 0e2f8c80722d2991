// Rows times a matrix of each head, for the op and for attention.
#pragma once

#include "../cpu.h"

namespace kimi_k3 {

template <class T>
struct HeadRows {  // [T, H, K], the last dimension contiguous
  T* start;
  int64_t token, head;
};

template <class T>
struct HeadMatrices {  // [H, rows, columns], the columns contiguous
  const T* start;
  int64_t head, row;
};

// y[t, h] = w[h] x[t, h] (w [H, outputs, depth]), or w[h]^T x[t, h] (w [H, depth, outputs]) if `transposed`. For float and
// bfloat16; a row's bits do not depend on the others.
template <class T>
void head_products(HeadRows<const T> x, HeadMatrices<T> w, bool transposed, int64_t tokens, int64_t heads, int64_t depth,
                   int64_t outputs, HeadRows<T> y);

}  // namespace kimi_k3
