// Causal attention of new tokens: heads expanded from latents a few at a time, scores a tile at a time. A sequence of few
// new tokens and a long past takes the absorbed form instead, which expands nothing.
#include <type_traits>

#include "../head_matvec/head_matvec.h"
#include "absorbed.h"
#include "latents.h"
#include "tile.h"

namespace kimi_k3::mla {

namespace {

constexpr int64_t kQueryTile = 48;
constexpr int64_t kKeyTile = 2 * kColumns;
constexpr int64_t kAbsorbedCost = 2;  // of a product, measured against one of the expanded form
constexpr int64_t kExpandedBytes = int64_t(16) << 20;  // of keys and values at once, or one head for each thread

struct Sequence {
  int64_t first_row, new_tokens, past, first_panel;  // a panel: 64 of its past and new tokens
  int64_t length() const { return past + new_tokens; }
};

struct Panel {
  int64_t sequence, begin, count;  // tokens of the sequence
};

struct Tile {
  int64_t sequence, begin, count;  // new tokens of the sequence
};

struct Work {
  std::vector<Sequence> sequences;
  std::vector<Panel> panels;
  std::vector<Tile> tiles;
  std::vector<int64_t> absorbed;  // the sequences that take the absorbed form
};

struct Dims {
  int64_t heads, nope, rope, rank, value;
  int64_t query() const { return nope + rope; }
  int64_t expanded() const { return nope + value; }
  int64_t latent() const { return rank + rope; }
};

// By products of a head: expanding all latents and attending in the heads' width, or attending in the latents' width.
// Each row of the absorbed form packs all latents for itself, which weighs as much again for few heads.
bool is_absorbed(const Sequence& sequence, const Dims& dims) {
  if (sequence.past == 0) return false;
  const int64_t length = sequence.length(), rows = sequence.new_tokens;
  const int64_t expanded = length * dims.rank * dims.expanded() + rows * length * (dims.query() + dims.value);
  const int64_t absorbed = rows * (dims.rank * dims.expanded() + length * (dims.latent() + dims.rank));
  return kAbsorbedCost * absorbed < expanded;
}

Work plan(const Integers& past_lens, const Integers& cu_seqlens, int64_t count, int64_t num_tokens, const Dims& dims) {
  Work work;
  STD_TORCH_CHECK(cu_seqlens[0] == 0 && cu_seqlens[count] == num_tokens, "mla_prefill: want cu_seqlens from 0 to ",
                  num_tokens, ", got ", cu_seqlens[0], " to ", cu_seqlens[count]);
  for (int64_t n = 0; n < count; ++n) {
    const int64_t begin = cu_seqlens[n], end = cu_seqlens[n + 1];
    STD_TORCH_CHECK(0 <= begin && begin <= end && end <= num_tokens, "mla_prefill: cu_seqlens must rise within 0..",
                    num_tokens, ", got ", begin, ", ", end);
    STD_TORCH_CHECK(past_lens[n] >= 0, "mla_prefill: past_lens must be >= 0, got ", past_lens[n]);
    Sequence sequence{begin, end - begin, past_lens[n], static_cast<int64_t>(work.panels.size())};
    work.sequences.push_back(sequence);
    if (sequence.new_tokens == 0) continue;
    if (is_absorbed(sequence, dims)) {
      work.absorbed.push_back(n);
      continue;
    }
    for (int64_t t = 0; t < sequence.length(); t += kColumns)
      work.panels.push_back({n, t, std::min(kColumns, sequence.length() - t)});
    // Short and long rows of scores in turn, so that equal shares of the tiles are nearly equal work.
    const int64_t tiles = divide_up(sequence.new_tokens, kQueryTile);
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t first = (i % 2 ? tiles - 1 - i / 2 : i / 2) * kQueryTile;
      work.tiles.push_back({n, first, std::min(kQueryTile, sequence.new_tokens - first)});
    }
  }
  return work;
}

template <class P>
void run_expanded(const Tensor& q, const Tensor& latent, const Tensor& kv_b_weight, const LatentPool<typename P::Source>& pool,
         const Work& work, const Dims& dims, float scale, const Tensor& out) {
  using Source = typename P::Source;
  using Element = typename P::Element;
  constexpr int64_t unit = P::kUnit;
  // Each part is rounded up to whole lanes by itself, so that a key's two parts can be packed apart.
  const int64_t rank_lanes = lanes<P>(dims.rank), rope_lanes = lanes<P>(dims.rope), nope_lanes = lanes<P>(dims.nope);
  const int64_t query_lanes = nope_lanes + rope_lanes, num_panels = work.panels.size();
  const int64_t latent_size = panel_elements<P>(rank_lanes + rope_lanes), key_size = panel_elements<P>(query_lanes);
  const int64_t value_panels = divide_up(dims.value, kColumns), values_padded = value_panels * kColumns;
  const int64_t value_size = panel_elements<P>(num_panels * kColumns / unit);  // of 64 channels of all tokens
  const Source *query_rows = data<Source>(q), *latent_rows = data<Source>(latent), *weight = data<Source>(kv_b_weight);
  Source* target = mutable_data<Source>(out);

  Buffer<Element> latents(num_panels * latent_size);
  parallel(num_panels, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const Panel& panel = work.panels[i];
      const Sequence& sequence = work.sequences[panel.sequence];
      const Source* rows[kColumns];
      const int64_t from_pool = std::clamp<int64_t>(sequence.past - panel.begin, 0, panel.count);
      pool.rows(panel.sequence, panel.begin, panel.begin + from_pool, rows);
      for (int64_t j = from_pool; j < panel.count; ++j)
        rows[j] = latent_rows + (sequence.first_row + panel.begin + j - sequence.past) * (dims.rank + dims.rope);
      P::transpose(rows, panel.count, dims.rank, latents.start + i * latent_size);
      for (int64_t j = 0; j < panel.count; ++j) rows[j] += dims.rank;
      P::transpose(rows, panel.count, dims.rope, latents.start + i * latent_size + panel_elements<P>(rank_lanes));
    }
  });

  const int64_t head_size = num_panels * key_size + value_panels * value_size;
  const int64_t group = std::min(dims.heads, std::max<int64_t>(torch::stable::get_num_threads(),
                                                               kExpandedBytes / (head_size * sizeof(Element))));
  const int64_t weight_row = rank_lanes * unit, weight_size = dims.expanded() * weight_row;
  const bool is_packed = std::is_same<Source, Element>::value && dims.rank % unit == 0;
  Buffer<Element> expanded(group * head_size), packed(is_packed ? 0 : group * weight_size);
  for (int64_t first_head = 0; first_head < dims.heads; first_head += group) {
    const int64_t heads = std::min(group, dims.heads - first_head);
    const Source* group_weight = weight + first_head * dims.expanded() * dims.rank;
    const Element* weights = packed.start;
    if (is_packed)
      weights = reinterpret_cast<const Element*>(group_weight);
    else
      parallel(heads * dims.expanded(), 64, [&](int64_t first, int64_t last) {
        for (int64_t o = first; o < last; ++o)
          P::copy(group_weight + o * dims.rank, dims.rank, packed.start + o * weight_row);
      });

    parallel(heads * num_panels, 1, [&](int64_t first, int64_t last) {
      Buffer<float> result((dims.expanded() + 1) * kColumns);
      for (int64_t task = first; task < last; ++task) {
        const int64_t h = task / num_panels, i = task % num_panels;
        const Element* panel = latents.start + i * latent_size;
        Element* keys = expanded.start + h * head_size + i * key_size;
        Element* values = expanded.start + h * head_size + num_panels * key_size;
        P::product(weights + h * weight_size, weight_row, dims.expanded(), panel, rank_lanes,
                   divide_up(work.panels[i].count, kVector), nullptr, result.start, kColumns);
        P::stack_result(result.start, dims.nope, keys);
        std::copy_n(panel + panel_elements<P>(rank_lanes), panel_elements<P>(rope_lanes),
                    keys + panel_elements<P>(nope_lanes));
        for (int64_t v = 0; v < value_panels; ++v)
          P::transpose_result(result.start + (dims.nope + v * kColumns) * kColumns,
                              std::min(kColumns, dims.value - v * kColumns),
                              values + v * value_size + panel_elements<P>(i * kColumns / unit));
      }
    });

    const int64_t num_tiles = work.tiles.size();
    parallel(heads * num_tiles, 1, [&](int64_t first, int64_t last) {
      Buffer<Element> queries(kQueryTile * query_lanes * unit), p(kQueryTile * kKeyTile);
      Buffer<float> scores(kQueryTile * kKeyTile), sums_of_values(kQueryTile * values_padded);
      float maxima[kQueryTile], sums[kQueryTile], factors[kQueryTile];
      const RunningSoftmax running{maxima, sums, factors};
      for (int64_t task = first; task < last; ++task) {
        const int64_t h = task / num_tiles;
        const Tile& tile = work.tiles[task % num_tiles];
        const Sequence& sequence = work.sequences[tile.sequence];
        const Element* keys = expanded.start + h * head_size + sequence.first_panel * key_size;
        const Element* values = expanded.start + h * head_size + num_panels * key_size +
                                panel_elements<P>(sequence.first_panel * kColumns / unit);
        const int64_t first_row = sequence.first_row + tile.begin, row_stride = dims.heads * dims.query();
        for (int64_t r = 0; r < tile.count; ++r) {
          const Source* row = query_rows + (first_row + r) * row_stride + (first_head + h) * dims.query();
          Element* to = queries.start + r * query_lanes * unit;
          P::copy(row, dims.nope, to);
          P::copy(row + dims.nope, dims.rope, to + nope_lanes * unit);
        }
        std::fill_n(maxima, tile.count, -std::numeric_limits<float>::infinity());
        std::fill_n(sums, tile.count, 0.0f);
        std::fill_n(sums_of_values.start, tile.count * values_padded, 0.0f);
        const int64_t visible = sequence.past + tile.begin + tile.count;
        for (int64_t t = 0; t < visible; t += kKeyTile) {
          const int64_t columns = std::min(kKeyTile, visible - t);
          for (int64_t c = 0; c < columns; c += kColumns)
            P::product(queries.start, query_lanes * unit, tile.count, keys + (t + c) / kColumns * key_size, query_lanes,
                       divide_up(std::min(kColumns, columns - c), kVector), nullptr, scores.start + c, kKeyTile);
          P::softmax({scores.start, kKeyTile, tile.count, divide_up(columns, kVector) * kVector,
                      sequence.past + tile.begin + 1 - t, 1, scale},
                     running, p.start, kKeyTile);
          for (int64_t v = 0; v < value_panels; ++v)
            P::product(p.start, kKeyTile, tile.count, values + v * value_size + panel_elements<P>(t / unit),
                       lanes<P>(columns), divide_up(std::min(kColumns, dims.value - v * kColumns), kVector), factors,
                       sums_of_values.start + v * kColumns, values_padded);
        }
        for (int64_t r = 0; r < tile.count; ++r) {
          Source* to = target + ((first_row + r) * dims.heads + first_head + h) * dims.value;
          const float inverse = 1.0f / sums[r];
          for (int64_t c = 0; c < dims.value; ++c) store(to + c, sums_of_values.start[r * values_padded + c] * inverse);
        }
      }
    });
  }
}

// Each new token is a row: q_n through the keys' half of the weight, attention over latents, the values' half.
template <class P>
void run_absorbed(const Tensor& q, const Tensor& latent, const Tensor& kv_b_weight, const LatentPool<typename P::Source>& pool,
                  const Work& work, const Dims& dims, float scale, const Tensor& out) {
  using Source = typename P::Source;
  struct Row {
    int64_t sequence, token;  // the packed row
  };
  std::vector<Row> rows;
  std::vector<int64_t> lengths;
  for (int64_t n : work.absorbed)
    for (int64_t i = 0; i < work.sequences[n].new_tokens; ++i) {
      rows.push_back({n, work.sequences[n].first_row + i});
      lengths.push_back(work.sequences[n].past + i + 1);
    }
  const int64_t count = rows.size(), heads = dims.heads;
  const Source *q_rows = data<Source>(q), *latent_rows = data<Source>(latent), *weight = data<Source>(kv_b_weight);
  Source* target = mutable_data<Source>(out);
  Buffer<Source> nope(count * heads * dims.nope), queries(count * heads * dims.latent());
  Buffer<Source> contexts(count * heads * dims.rank), values(count * heads * dims.value);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t h = 0; h < heads; ++h) {
      const Source* from = q_rows + (rows[i].token * heads + h) * dims.query();
      std::copy_n(from, dims.nope, nope.start + (i * heads + h) * dims.nope);
      std::copy_n(from + dims.nope, dims.rope, queries.start + (i * heads + h) * dims.latent() + dims.rank);
    }
  const int64_t head_size = dims.expanded() * dims.rank;
  head_products<Source>({nope.start, heads * dims.nope, dims.nope}, {weight, head_size, dims.rank}, true, count, heads, dims.nope,
                        dims.rank, {queries.start, heads * dims.latent(), dims.latent()});
  auto find_latents = [&](int64_t row, int64_t begin, int64_t end, const Source** found) {
    const Sequence& sequence = work.sequences[rows[row].sequence];
    const int64_t stored = std::clamp(sequence.past, begin, end);
    pool.rows(rows[row].sequence, begin, stored, found);
    for (int64_t t = stored; t < end; ++t)
      found[t - begin] = latent_rows + (sequence.first_row + t - sequence.past) * dims.latent();
  };
  attend_absorbed<P>(queries.start, heads, dims.latent(), lengths, find_latents, dims.rank, scale, contexts.start);
  head_products<Source>({contexts.start, heads * dims.rank, dims.rank}, {weight + dims.nope * dims.rank, head_size, dims.rank},
                        false, count, heads, dims.rank, dims.value, {values.start, heads * dims.value, dims.value});
  for (int64_t i = 0; i < count; ++i)
    std::copy_n(values.start + i * heads * dims.value, heads * dims.value, target + rows[i].token * heads * dims.value);
}

Tensor mla_prefill(Tensor q, Tensor latent, Tensor kv_b_weight, Tensor latent_pool, Tensor block_tables, Tensor past_lens,
                   Tensor cu_seqlens, double scale) {
  const bool is_bf16 = q.scalar_type() == ScalarType::BFloat16;
  check_sizes("mla_prefill", "q", q, {-1, -1, -1});
  check_sizes("mla_prefill", "latent", latent, {q.size(0), -1});
  check_sizes("mla_prefill", "kv_b_weight", kv_b_weight, {-1, -1});
  check_sizes("mla_prefill", "latent_pool", latent_pool, {-1, -1, latent.size(1)});
  check_sizes("mla_prefill", "past_lens", past_lens, {-1});
  check_sizes("mla_prefill", "block_tables", block_tables, {past_lens.size(0), -1});
  check_sizes("mla_prefill", "cu_seqlens", cu_seqlens, {past_lens.size(0) + 1});
  if (!(is_bf16 || q.scalar_type() == ScalarType::Float) || latent.scalar_type() != q.scalar_type() ||
      kv_b_weight.scalar_type() != q.scalar_type() || latent_pool.scalar_type() != q.scalar_type())
    return reference_tensor("mla_prefill", q, latent, kv_b_weight, latent_pool, block_tables, past_lens, cu_seqlens, scale);
  q = make_contiguous(q);
  latent = make_contiguous(latent);
  kv_b_weight = make_contiguous(kv_b_weight);
  Dims dims;
  dims.heads = q.size(1);
  dims.rank = kv_b_weight.size(1);
  dims.rope = latent.size(1) - dims.rank;
  dims.nope = q.size(2) - dims.rope;
  STD_TORCH_CHECK(dims.heads > 0 && dims.rope > 0 && dims.nope > 0 && kv_b_weight.size(0) % dims.heads == 0 &&
                      kv_b_weight.size(0) / dims.heads > dims.nope,
                  "mla_prefill: want q [T, H, nope + rope], latent [T, R + rope], kv_b_weight [H (nope + V), R]");
  dims.value = kv_b_weight.size(0) / dims.heads - dims.nope;
  Tensor out = new_tensor(q, {q.size(0), dims.heads, dims.value});
  const Work work = plan(Integers(past_lens), Integers(cu_seqlens), past_lens.size(0), q.size(0), dims);
  with_policy(is_bf16, [&](auto policy) {
    using P = decltype(policy);
    LatentPool<typename P::Source> pool("mla_prefill", latent_pool, block_tables);
    for (size_t n = 0; n < work.sequences.size(); ++n)
      if (work.sequences[n].new_tokens > 0) pool.check(n, work.sequences[n].past);
    const float scale2 = static_cast<float>(scale * 1.4426950408889634);
    if (!work.tiles.empty()) run_expanded<P>(q, latent, kv_b_weight, pool, work, dims, scale2, out);
    if (!work.absorbed.empty()) run_absorbed<P>(q, latent, kv_b_weight, pool, work, dims, scale2, out);
  });
  return out;
}

}  // namespace

}  // namespace kimi_k3::mla

STABLE_TORCH_LIBRARY_IMPL(kimi_k3, CPU, m) { m.impl("mla_prefill", TORCH_BOX(&kimi_k3::mla::mla_prefill)); }
