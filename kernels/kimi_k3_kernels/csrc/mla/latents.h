// Where the latents of paged sequences lie.
#pragma once

#include <algorithm>

#include "../cpu.h"

namespace kimi_k3::mla {

template <class T>
struct LatentPool {  // [P, block, width], any strides but the last
  LatentPool(const char* op_name, const Tensor& pool, const Tensor& block_tables)
      : op(op_name), tensor(pool.stride(2) == 1 || pool.size(2) == 1 ? pool : make_contiguous(pool)), tables(block_tables),
        columns(block_tables.size(1)), blocks(pool.size(0)), block(pool.size(1)), start(data<T>(tensor)),
        block_stride(tensor.stride(0)), token_stride(tensor.stride(1)) {}

  // The rows of tokens begin..end - 1 of sequence n.
  void rows(int64_t n, int64_t begin, int64_t end, const T** out) const {
    for (int64_t t = begin; t < end;) {
      const T* row = start + tables[n * columns + t / block] * block_stride + t % block * token_stride;
      for (const int64_t stop = std::min(end, (t / block + 1) * block); t < stop; ++t, row += token_stride) *out++ = row;
    }
  }
  // Out of range would read memory that is not ours.
  void check(int64_t n, int64_t length) const {
    STD_TORCH_CHECK(length >= 0 && length <= columns * block, op, ": sequence ", n, " wants 0..", columns * block,
                    " tokens in its blocks, got ", length);
    for (int64_t b = 0; b * block < length; ++b) {
      const int64_t place = tables[n * columns + b];
      STD_TORCH_CHECK(place >= 0 && place < blocks, op, ": block_tables must be in 0..", blocks - 1, ", got ", place);
    }
  }

  const char* op;
  Tensor tensor;
  Integers tables;
  int64_t columns, blocks, block;
  const T* start;
  int64_t block_stride, token_stride;
};

}  // namespace kimi_k3::mla
