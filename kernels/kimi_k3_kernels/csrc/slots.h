// The slots of a pool that each sequence reads and writes.
#pragma once

#include <algorithm>

#include "cpu.h"

namespace kimi_k3 {

// A negative slot reads zeros or writes nothing.
struct Slots {
  Slots(const char* op, const Tensor& pool, const Tensor& read_slots, const Tensor& write_slots) : pool_size(pool.size(0)) {
    Integers reads(read_slots), writes(write_slots);
    for (int64_t n = 0; n < read_slots.size(0); ++n) {
      // A pool without slots reads as zeros, whatever the slot.
      read.push_back(pool_size == 0 ? -1 : check(op, reads[n]));
      write.push_back(check(op, writes[n]));
    }
  }
  int64_t check(const char* op, int64_t slot) const {
    STD_TORCH_CHECK(slot < pool_size, op, ": want slots below ", pool_size, ", got ", slot);
    return slot;
  }

  // The sequences whose slot another one writes: they need a copy of it, because all reads come first.
  std::vector<int64_t> overwritten(const std::vector<int64_t>& other_writes = {}) const {
    std::vector<int64_t> sorted(write), found;
    sorted.insert(sorted.end(), other_writes.begin(), other_writes.end());
    std::sort(sorted.begin(), sorted.end());
    for (int64_t n = 0; n < static_cast<int64_t>(read.size()); ++n) {
      auto range = std::equal_range(sorted.begin(), sorted.end(), read[n]);
      if (read[n] >= 0 && range.second - range.first > (write[n] == read[n] ? 1 : 0)) found.push_back(n);
    }
    return found;
  }

  int64_t pool_size;
  std::vector<int64_t> read, write;
};

// Where the sequences begin: [N + 1], from 0 to T.
inline std::vector<int64_t> sequence_bounds(const char* op, const Tensor& cu_seqlens, int64_t tokens) {
  Integers cu(cu_seqlens);
  std::vector<int64_t> bounds;
  for (int64_t n = 0; n < cu_seqlens.size(0); ++n) {
    bounds.push_back(cu[n]);
    STD_TORCH_CHECK(n == 0 ? bounds[0] == 0 : bounds[n] >= bounds[n - 1], op,
                    ": want cu_seqlens that rises from 0, got ", cu[n], " at ", n);
  }
  STD_TORCH_CHECK(bounds.back() == tokens, op, ": want cu_seqlens that ends at ", tokens, ", got ", bounds.back());
  return bounds;
}

}  // namespace kimi_k3
