// Causal depthwise convolution and SiLU: one token of each sequence, or whole packed sequences.
#include "../slots.h"

#define KIMI_K3_BODY "short_conv/kernels.h"
#include "../for_each_isa.h"

namespace kimi_k3 {

namespace {

constexpr int64_t kChannels = 2048;  // of one task: its taps stay in cache
constexpr int64_t kTokens = 32;

bool is_float_or_bfloat16(const Tensor& t) {
  return t.scalar_type() == ScalarType::Float || t.scalar_type() == ScalarType::BFloat16;
}

bool has_kernel(const char* op, const Tensor& x, const Tensor& weight, const Tensor& conv_pool, const Tensor& read_slots,
                const Tensor& write_slots) {
  check_sizes(op, "x", x, {-1, -1});
  check_sizes(op, "weight", weight, {x.size(1), -1});
  check_sizes(op, "conv_pool", conv_pool, {-1, weight.size(1) - 1, x.size(1)});
  check_sizes(op, "read_slots", read_slots, {-1});
  check_sizes(op, "write_slots", write_slots, {read_slots.size(0)});
  return is_float_or_bfloat16(x) && is_float_or_bfloat16(weight) && conv_pool.scalar_type() == x.scalar_type() &&
         (conv_pool.size(2) == 1 || conv_pool.stride(2) == 1);
}

Tensor with_plain_rows(const Tensor& x) { return x.size(1) == 1 || x.stride(1) == 1 ? x : make_contiguous(x); }

template <class F>
void with_types(const Tensor& x, const Tensor& weight, const F& f) {
  const bool bf16_x = x.scalar_type() == ScalarType::BFloat16, bf16_weight = weight.scalar_type() == ScalarType::BFloat16;
  if (bf16_x)
    bf16_weight ? f(bfloat16{}, bfloat16{}) : f(bfloat16{}, float{});
  else
    bf16_weight ? f(float{}, bfloat16{}) : f(float{}, float{});
}

template <class T>
struct Windows {  // [S, W - 1, C], the last dimension contiguous
  explicit Windows(const Tensor& t) : base(mutable_data<T>(t)), slot(t.stride(0)), row_stride(t.stride(1)) {}
  T* row(int64_t s, int64_t w) const { return base + s * slot + w * row_stride; }
  T* base;
  int64_t slot, row_stride;
};

template <class T, class W>
void step(const Tensor& x, const Tensor& weight, const Tensor& conv_pool, const Slots& slots, const Tensor& out) {
  const int64_t rows = x.size(0), channels = x.size(1), num_taps = weight.size(1), before = num_taps - 1;
  const Windows<T> windows(conv_pool);
  const T* tokens = data<T>(x);
  const int64_t token_stride = x.stride(0);
  const W* stored_taps = data<W>(weight);
  T* outputs = mutable_data<T>(out);
  std::vector<std::vector<T>> copies(rows);
  for (int64_t n : slots.overwritten())
    for (int64_t w = 0; w < before; ++w) {
      const T* row = windows.row(slots.read[n], w);
      copies[n].insert(copies[n].end(), row, row + channels);
    }
  const int64_t blocks = (channels + kChannels - 1) / kChannels;
  parallel(blocks, std::max<int64_t>(1, 8 / std::max<int64_t>(1, rows)), [&](int64_t begin, int64_t end) {
    std::vector<float> taps(num_taps * kChannels);
    const std::vector<T> zeros(kChannels);
    std::vector<const T*> inputs(num_taps);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t c = block * kChannels, count = std::min(kChannels, channels - c);
      KIMI_K3_ACTIVE(spread_taps<W>)(stored_taps + c * num_taps, num_taps, count, taps.data(), kChannels);
      for (int64_t n = 0; n < rows; ++n) {
        for (int64_t w = 0; w < before; ++w)
          inputs[w] = !copies[n].empty()   ? &copies[n][w * channels + c]
                      : slots.read[n] >= 0 ? windows.row(slots.read[n], w) + c
                                           : zeros.data();
        inputs[before] = tokens + n * token_stride + c;
        KIMI_K3_ACTIVE(convolve<T>)(inputs.data(), 1, taps.data(), kChannels, num_taps, count,
                                    outputs + n * channels + c, channels);
        if (slots.write[n] < 0) continue;
        // In place, row w takes row w + 1, which is still as it was.
        for (int64_t w = 0; w < before; ++w) std::memmove(windows.row(slots.write[n], w) + c, inputs[w + 1], count * sizeof(T));
      }
    }
  });
}

Tensor short_conv_step(Tensor x, Tensor weight, Tensor conv_pool, Tensor read_slots, Tensor write_slots) {
  if (!has_kernel("short_conv_step_", x, weight, conv_pool, read_slots, write_slots))
    return reference_tensor("short_conv_step_", x, weight, conv_pool, read_slots, write_slots);
  check_sizes("short_conv_step_", "read_slots", read_slots, {x.size(0)});
  x = with_plain_rows(x);
  weight = make_contiguous(weight);
  Tensor out = new_tensor(x, {x.size(0), x.size(1)});
  Slots slots("short_conv_step_", conv_pool, read_slots, write_slots);
  with_types(x, weight, [&](auto t, auto w) { step<decltype(t), decltype(w)>(x, weight, conv_pool, slots, out); });
  return out;
}

struct Export {  // of the window before packed row `at` of a sequence
  int64_t sequence, at, slot;
};

template <class T, class W>
void run(const Tensor& x, const Tensor& weight, const Tensor& conv_pool, const Slots& slots, const std::vector<int64_t>& bounds,
         const std::vector<Export>& exports, const Tensor& out) {
  const int64_t tokens = x.size(0), channels = x.size(1), num_taps = weight.size(1), before = num_taps - 1;
  const int64_t num_sequences = slots.read.size();
  const Windows<T> windows(conv_pool);
  const T* inputs = data<T>(x);
  const int64_t token_stride = x.stride(0);
  const W* stored_taps = data<W>(weight);
  T* outputs = mutable_data<T>(out);
  const std::vector<T> zeros(channels);
  // The row `back` tokens before token t of sequence n, from its window where it has no such token.
  auto row = [&](int64_t n, int64_t t, int64_t back) -> const T* {
    if (t - back >= bounds[n]) return inputs + (t - back) * token_stride;
    return slots.read[n] >= 0 ? windows.row(slots.read[n], before + (t - back - bounds[n])) : zeros.data();
  };

  const int64_t blocks = (channels + kChannels - 1) / kChannels, runs = (tokens + kTokens - 1) / kTokens;
  parallel(blocks * runs, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> taps(num_taps * kChannels);
    std::vector<const T*> rows(kTokens + before);
    for (int64_t task = begin, ready = -1; task < end; ++task) {
      const int64_t block = task / runs, c = block * kChannels, count = std::min(kChannels, channels - c);
      if (block != ready) KIMI_K3_ACTIVE(spread_taps<W>)(stored_taps + c * num_taps, num_taps, count, taps.data(), kChannels);
      ready = block;
      const int64_t first = task % runs * kTokens, last = std::min(tokens, first + kTokens);
      int64_t n = std::upper_bound(bounds.begin(), bounds.end(), first) - bounds.begin() - 1;
      for (int64_t t = first, until; t < last; t = until, ++n) {
        until = std::min(last, bounds[n + 1]);
        for (int64_t i = 0; i < until - t + before; ++i) rows[i] = row(n, t, before - i) + c;
        KIMI_K3_ACTIVE(convolve<T>)(rows.data(), until - t, taps.data(), kChannels, num_taps, count,
                                    outputs + t * channels + c, channels);
      }
    }
  });

  // All windows are read before any is written: a slot may be one sequence's past and another one's future.
  std::vector<Export> written(exports);
  for (int64_t n = 0; n < num_sequences; ++n) written.push_back({n, bounds[n + 1], slots.write[n]});
  std::vector<T> newest(written.size() * before * channels);
  for (size_t i = 0; i < written.size(); ++i)
    for (int64_t w = 0; w < before; ++w)
      std::copy_n(row(written[i].sequence, written[i].at, before - w), channels, &newest[(i * before + w) * channels]);
  for (size_t i = 0; i < written.size(); ++i)
    for (int64_t w = 0; w < before && written[i].slot >= 0; ++w)
      std::copy_n(&newest[(i * before + w) * channels], channels, windows.row(written[i].slot, w));
}

Tensor short_conv(Tensor x, Tensor weight, Tensor conv_pool, Tensor read_slots, Tensor write_slots, Tensor cu_seqlens) {
  if (!has_kernel("short_conv", x, weight, conv_pool, read_slots, write_slots))
    return reference_tensor("short_conv", x, weight, conv_pool, read_slots, write_slots, cu_seqlens);
  check_sizes("short_conv", "cu_seqlens", cu_seqlens, {read_slots.size(0) + 1});
  x = with_plain_rows(x);
  weight = make_contiguous(weight);
  Tensor out = new_tensor(x, {x.size(0), x.size(1)});
  Slots slots("short_conv", conv_pool, read_slots, write_slots);
  std::vector<int64_t> bounds = sequence_bounds("short_conv", cu_seqlens, x.size(0));
  with_types(x, weight, [&](auto t, auto w) { run<decltype(t), decltype(w)>(x, weight, conv_pool, slots, bounds, {}, out); });
  return out;
}

Tensor short_conv_export(Tensor x, Tensor weight, Tensor conv_pool, Tensor read_slots, Tensor write_slots, Tensor cu_seqlens,
                         Tensor export_at, Tensor export_slots) {
  const char* op = "short_conv_export";
  check_sizes(op, "cu_seqlens", cu_seqlens, {read_slots.size(0) + 1});
  check_sizes(op, "export_at", export_at, {-1});
  check_sizes(op, "export_slots", export_slots, {export_at.size(0)});
  if (!has_kernel(op, x, weight, conv_pool, read_slots, write_slots))
    return reference_tensor(op, x, weight, conv_pool, read_slots, write_slots, cu_seqlens, export_at, export_slots);
  x = with_plain_rows(x);
  weight = make_contiguous(weight);
  Tensor out = new_tensor(x, {x.size(0), x.size(1)});
  Slots slots(op, conv_pool, read_slots, write_slots);
  std::vector<int64_t> bounds = sequence_bounds(op, cu_seqlens, x.size(0));
  Integers at(export_at), to(export_slots);
  std::vector<Export> exports;
  for (int64_t i = 0; i < export_at.size(0); ++i) {
    STD_TORCH_CHECK(at[i] >= 1 && at[i] <= x.size(0), op, ": want export_at in 1..", x.size(0), ", got ", at[i]);
    const int64_t n = std::lower_bound(bounds.begin(), bounds.end(), at[i]) - bounds.begin() - 1;
    exports.push_back({n, at[i], slots.check(op, to[i])});
  }
  with_types(x, weight, [&](auto t, auto w) { run<decltype(t), decltype(w)>(x, weight, conv_pool, slots, bounds, exports, out); });
  return out;
}

}  // namespace

}  // namespace kimi_k3

STABLE_TORCH_LIBRARY_IMPL(kimi_k3, CPU, m) {
  m.impl("short_conv", TORCH_BOX(&kimi_k3::short_conv));
  m.impl("short_conv_export", TORCH_BOX(&kimi_k3::short_conv_export));
  m.impl("short_conv_step_", TORCH_BOX(&kimi_k3::short_conv_step));
}
