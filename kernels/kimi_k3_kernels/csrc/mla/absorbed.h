// Attention in the latent space: each row of queries over its own latents, every latent read once for all heads.
#pragma once

#include "tile.h"

namespace kimi_k3::mla {

constexpr int64_t kSoftmaxTile = 256;  // tokens of one exact softmax
constexpr int64_t kMaxSplits = 32;     // of a context, merged at the end; bounds what the splits leave behind
constexpr int64_t kContextBytes = int64_t(32) << 20;  // of all splits at once: many rows run in groups

struct Split {
  int64_t row, begin, end;
};

// Asks for the share of a row's attention that each block of its tokens draws, the mean over the heads.
struct BlockMass {
  float* out;  // [rows, columns]; zeros past a row's last block
  int64_t columns, block;
};

inline int64_t blocks_of(const Split& split, int64_t block) { return (split.end - 1) / block - split.begin / block + 1; }

template <class Element>
float sum_of(const Element* p, int64_t count) {
  float parts[kVector] = {};
  int64_t t = 0;
  for (; t + kVector <= count; t += kVector)
    for (int64_t j = 0; j < kVector; ++j) parts[j] += load(p + t + j);
  for (int64_t j = 0; t + j < count; ++j) parts[j] += load(p + t + j);
  for (int64_t half = kVector / 2; half > 0; half /= 2)
    for (int64_t j = 0; j < half; ++j) parts[j] += parts[j + half];
  return parts[0];
}

// One head: `sums` of a split's blocks until now times `factor`, and the probabilities of its tokens begin..end - 1.
template <class Element>
void add_block_sums(const Split& split, int64_t block, int64_t begin, int64_t end, const Element* p, float factor,
                    float* sums) {
  const int64_t first = split.begin / block, known = begin == split.begin ? 0 : (begin - 1) / block - first + 1;
  for (int64_t b = 0; b < known; ++b) sums[b] *= factor;
  for (int64_t t = begin; t < end;) {
    const int64_t b = t / block, stop = std::min(end, (b + 1) * block);
    const float sum = sum_of(p + t - begin, stop - t);
    sums[b - first] = t == split.begin || t == b * block ? sum : sums[b - first] + sum;
    t = stop;
  }
}

// Where a split ends depends on its row's length alone, so no row's result depends on threads or on other rows.
inline int64_t split_size(int64_t length) {
  return kSoftmaxTile * std::max<int64_t>(1, divide_up(length, kSoftmaxTile * kMaxSplits));
}

// queries [lengths.size(), H, width] -> out [.., H, value_dim]. find_latents(row, begin, end, T** out) names the latents
// of a row's tokens begin..end - 1. mass: null, or where to write it; `out` has the same bits either way.
template <class P, class FindLatents>
void attend_group(const typename P::Source* queries, int64_t heads, int64_t width, const int64_t* lengths, int64_t count,
                  const FindLatents& find_latents, int64_t value_dim, float scale, typename P::Source* out,
                  const BlockMass* mass) {
  using Source = typename P::Source;
  using Element = typename P::Element;
  constexpr int64_t kTile = kSoftmaxTile;
  const int64_t depth = lanes<P>(width), values_padded = divide_up(value_dim, kColumns) * kColumns;
  std::vector<Split> splits;
  std::vector<int64_t> starts(count + 1);
  for (int64_t n = 0; n < count; ++n) {
    for (int64_t begin = 0, size = split_size(lengths[n]); begin < lengths[n]; begin += size)
      splits.push_back({n, begin, std::min(begin + size, lengths[n])});
    starts[n + 1] = splits.size();
  }
  const int64_t num_splits = splits.size();
  Buffer<float> contexts(num_splits * heads * values_padded), maxima(num_splits * heads), sums(num_splits * heads);
  std::vector<int64_t> block_starts(num_splits + 1);  // in block_sums, of a split's [H, blocks]
  if (mass)
    for (int64_t s = 0; s < num_splits; ++s) block_starts[s + 1] = block_starts[s] + heads * blocks_of(splits[s], mass->block);
  Buffer<float> block_sums(block_starts[num_splits]);

  parallel(num_splits, 1, [&](int64_t first, int64_t last) {
    Buffer<Element> packed(heads * depth * P::kUnit), panel(panel_elements<P>(std::max(depth, lanes<P>(kTile))));
    Buffer<Element> p(heads * kTile);
    Buffer<float> scores(heads * kTile), factors(heads);
    const Source* rows[kTile];
    for (int64_t s = first; s < last; ++s) {
      const Split& split = splits[s];
      float* context = contexts.start + s * heads * values_padded;
      RunningSoftmax running{maxima.start + s * heads, sums.start + s * heads, factors.start};
      std::fill_n(running.maxima, heads, -std::numeric_limits<float>::infinity());
      std::fill_n(running.sums, heads, 0.0f);
      for (int64_t h = 0; h < heads; ++h)
        P::copy(queries + (split.row * heads + h) * width, width, packed.start + h * depth * P::kUnit);
      for (int64_t begin = split.begin; begin < split.end; begin += kTile) {
        const int64_t tokens = std::min(kTile, split.end - begin);
        find_latents(split.row, begin, begin + tokens, rows);
        for (int64_t t = 0; t < tokens; t += kColumns) {
          const int64_t columns = std::min(kColumns, tokens - t);
          P::transpose(rows + t, columns, width, panel.start);
          P::product(packed.start, depth * P::kUnit, heads, panel.start, depth, divide_up(columns, kVector), nullptr,
                     scores.start + t, kTile);
        }
        P::softmax({scores.start, kTile, heads, divide_up(tokens, kVector) * kVector, tokens, 0, scale}, running, p.start,
                   kTile);
        if (mass)
          for (int64_t h = 0; h < heads; ++h)
            add_block_sums(split, mass->block, begin, begin + tokens, p.start + h * kTile, factors.start[h],
                           block_sums.start + block_starts[s] + h * blocks_of(split, mass->block));
        for (int64_t c = 0; c < value_dim; c += kColumns) {
          const int64_t columns = std::min(kColumns, value_dim - c);
          P::stack(rows, tokens, c, columns, panel.start);
          P::product(p.start, kTile, heads, panel.start, lanes<P>(tokens), divide_up(columns, kVector),
                     begin == split.begin ? nullptr : factors.start, context + c, values_padded);
        }
      }
    }
  });

  parallel(count * heads, 16, [&](int64_t first, int64_t last) {
    std::vector<float> total(value_dim);
    for (int64_t row = first; row < last; ++row) {
      const int64_t n = row / heads, h = row % heads;
      float largest = -std::numeric_limits<float>::infinity(), sum = 0.0f;
      for (int64_t s = starts[n]; s < starts[n + 1]; ++s) largest = std::max(largest, maxima.start[s * heads + h]);
      std::fill(total.begin(), total.end(), 0.0f);
      for (int64_t s = starts[n]; s < starts[n + 1]; ++s) {
        const float factor = std::exp2(maxima.start[s * heads + h] - largest);
        const float* context = contexts.start + (s * heads + h) * values_padded;
        sum += factor * sums.start[s * heads + h];
        for (int64_t c = 0; c < value_dim; ++c) total[c] += factor * context[c];
      }
      // No token, no sum: zeros, as of an empty product.
      const float inverse = starts[n] == starts[n + 1] ? 0.0f : 1.0f / sum;
      for (int64_t c = 0; c < value_dim; ++c) store(out + row * value_dim + c, total[c] * inverse);
    }
  });

  if (!mass) return;
  parallel(count, 1, [&](int64_t first, int64_t last) {
    std::vector<float> total(mass->columns);  // of a head's blocks
    for (int64_t n = first; n < last; ++n) {
      float* to = mass->out + n * mass->columns;
      std::fill_n(to, mass->columns, 0.0f);
      for (int64_t h = 0; h < heads; ++h) {
        float largest = -std::numeric_limits<float>::infinity(), sum = 0.0f;
        for (int64_t s = starts[n]; s < starts[n + 1]; ++s) largest = std::max(largest, maxima.start[s * heads + h]);
        const int64_t used = divide_up(lengths[n], mass->block);
        std::fill_n(total.begin(), used, 0.0f);
        for (int64_t s = starts[n]; s < starts[n + 1]; ++s) {
          const float factor = std::exp2(maxima.start[s * heads + h] - largest);
          const int64_t blocks = blocks_of(splits[s], mass->block);
          const float* from = block_sums.start + block_starts[s] + h * blocks;
          for (int64_t b = 0; b < blocks; ++b) total[splits[s].begin / mass->block + b] += factor * from[b];
        }
        for (int64_t b = 0; b < used; ++b) sum += total[b];
        const float inverse = 1.0f / (sum * heads);
        for (int64_t b = 0; b < used; ++b) to[b] += total[b] * inverse;
      }
    }
  });
}

template <class P, class FindLatents>
void attend_absorbed(const typename P::Source* queries, int64_t heads, int64_t width, const std::vector<int64_t>& lengths,
                     const FindLatents& find_latents, int64_t value_dim, float scale, typename P::Source* out,
                     const BlockMass* mass = nullptr) {
  const int64_t count = lengths.size(), split_bytes = heads * divide_up(value_dim, kColumns) * kColumns * sizeof(float);
  for (int64_t first = 0, last; first < count; first = last) {
    int64_t bytes = 0;
    for (last = first; last < count; ++last) {
      bytes += split_bytes * divide_up(lengths[last], split_size(lengths[last]));
      if (mass) bytes += heads * divide_up(lengths[last], mass->block) * sizeof(float);
      if (last > first && bytes > kContextBytes) break;
    }
    auto find_in_group = [&, first](int64_t row, int64_t begin, int64_t end, const typename P::Source** rows) {
      find_latents(first + row, begin, end, rows);
    };
    BlockMass group_mass{};
    if (mass) group_mass = {mass->out + first * mass->columns, mass->columns, mass->block};
    attend_group<P>(queries + first * heads * width, heads, width, lengths.data() + first, last - first, find_in_group,
                    value_dim, scale, out + first * heads * value_dim, mass ? &group_mass : nullptr);
  }
}

}  // namespace kimi_k3::mla
