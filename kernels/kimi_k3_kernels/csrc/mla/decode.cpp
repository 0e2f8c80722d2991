// One token of each sequence over its latents: every latent is read once for all heads.
#include "latents.h"
#include "tile.h"

namespace kimi_k3::mla {

namespace {

constexpr int64_t kTile = 256;      // tokens of one exact softmax
constexpr int64_t kMaxSplits = 32;  // of a context, merged at the end; bounds what the splits leave behind

struct Split {
  int64_t sequence, begin, end;
};

// Where a split ends depends on its sequence's length alone, so no row's result depends on threads or on other rows.
std::vector<Split> make_splits(const std::vector<int64_t>& lengths) {
  std::vector<Split> splits;
  for (size_t n = 0; n < lengths.size(); ++n) {
    const int64_t size = kTile * std::max<int64_t>(1, divide_up(lengths[n], kTile * kMaxSplits));
    for (int64_t begin = 0; begin < lengths[n]; begin += size)
      splits.push_back({static_cast<int64_t>(n), begin, std::min(begin + size, lengths[n])});
  }
  return splits;
}

template <class P>
void run(const Tensor& q, const LatentPool<typename P::Source>& pool, const std::vector<int64_t>& lengths, float scale,
         const Tensor& out) {
  using Source = typename P::Source;
  using Element = typename P::Element;
  const int64_t heads = q.size(1), width = q.size(2), value_dim = out.size(2);
  const int64_t depth = lanes<P>(width), values_padded = divide_up(value_dim, kColumns) * kColumns;
  const std::vector<Split> splits = make_splits(lengths);
  const int64_t count = splits.size();
  const Source* source = data<Source>(q);
  Source* target = mutable_data<Source>(out);
  Buffer<float> contexts(count * heads * values_padded), maxima(count * heads), sums(count * heads);

  parallel(count, 1, [&](int64_t first, int64_t last) {
    Buffer<Element> queries(heads * depth * P::kUnit), panel(panel_elements<P>(std::max(depth, lanes<P>(kTile))));
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
        P::copy(source + (split.sequence * heads + h) * width, width, queries.start + h * depth * P::kUnit);
      for (int64_t begin = split.begin; begin < split.end; begin += kTile) {
        const int64_t tokens = std::min(kTile, split.end - begin);
        pool.rows(split.sequence, begin, begin + tokens, rows);
        for (int64_t t = 0; t < tokens; t += kColumns) {
          const int64_t columns = std::min(kColumns, tokens - t);
          P::transpose(rows + t, columns, width, panel.start);
          P::product(queries.start, depth * P::kUnit, heads, panel.start, depth, divide_up(columns, kVector), nullptr,
                     scores.start + t, kTile);
        }
        P::softmax({scores.start, kTile, heads, divide_up(tokens, kVector) * kVector, tokens, 0, scale}, running, p.start,
                   kTile);
        for (int64_t c = 0; c < value_dim; c += kColumns) {
          const int64_t columns = std::min(kColumns, value_dim - c);
          P::stack(rows, tokens, c, columns, panel.start);
          P::product(p.start, kTile, heads, panel.start, lanes<P>(tokens), divide_up(columns, kVector),
                     begin == split.begin ? nullptr : factors.start, context + c, values_padded);
        }
      }
    }
  });

  std::vector<int64_t> starts(lengths.size() + 1);
  for (const Split& split : splits) ++starts[split.sequence + 1];
  for (size_t n = 0; n < lengths.size(); ++n) starts[n + 1] += starts[n];
  parallel(lengths.size() * heads, 16, [&](int64_t first, int64_t last) {
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
      for (int64_t c = 0; c < value_dim; ++c) store(target + row * value_dim + c, total[c] * inverse);
    }
  });
}

Tensor mla_decode(Tensor q, Tensor latent_pool, Tensor block_tables, Tensor kv_lens, double scale, int64_t value_dim) {
  const bool is_bf16 = q.scalar_type() == ScalarType::BFloat16;
  check_sizes("mla_decode", "q", q, {-1, -1, -1});
  check_sizes("mla_decode", "latent_pool", latent_pool, {-1, -1, q.size(2)});
  check_sizes("mla_decode", "block_tables", block_tables, {q.size(0), -1});
  check_sizes("mla_decode", "kv_lens", kv_lens, {q.size(0)});
  STD_TORCH_CHECK(value_dim > 0 && value_dim <= q.size(2), "mla_decode: want value_dim in 1..", q.size(2), ", got ", value_dim);
  if (!(is_bf16 || q.scalar_type() == ScalarType::Float) || latent_pool.scalar_type() != q.scalar_type())
    return reference_tensor("mla_decode", q, latent_pool, block_tables, kv_lens, scale, value_dim);
  q = make_contiguous(q);
  Tensor out = new_tensor(q, {q.size(0), q.size(1), value_dim});
  Integers lens(kv_lens);
  std::vector<int64_t> lengths(q.size(0));
  for (size_t n = 0; n < lengths.size(); ++n) lengths[n] = lens[n];
  with_policy(is_bf16, [&](auto policy) {
    using P = decltype(policy);
    LatentPool<typename P::Source> pool("mla_decode", latent_pool, block_tables);
    for (size_t n = 0; n < lengths.size(); ++n) pool.check(n, lengths[n]);
    run<P>(q, pool, lengths, static_cast<float>(scale * 1.4426950408889634), out);
  });
  return out;
}

}  // namespace

}  // namespace kimi_k3::mla

STABLE_TORCH_LIBRARY_IMPL(kimi_k3, CPU, m) { m.impl("mla_decode", TORCH_BOX(&kimi_k3::mla::mla_decode)); }
