// One token of each sequence over its latents: every latent is read once for all heads.
#include "absorbed.h"
#include "latents.h"

namespace kimi_k3::mla {

namespace {

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
    using Source = typename P::Source;
    auto find_latents = [&](int64_t n, int64_t begin, int64_t end, const Source** rows) { pool.rows(n, begin, end, rows); };
    attend_absorbed<P>(data<Source>(q), q.size(1), q.size(2), lengths, find_latents, value_dim,
                       static_cast<float>(scale * 1.4426950408889634), mutable_data<Source>(out));
  });
  return out;
}

}  // namespace

}  // namespace kimi_k3::mla

STABLE_TORCH_LIBRARY_IMPL(kimi_k3, CPU, m) { m.impl("mla_decode", TORCH_BOX(&kimi_k3::mla::mla_decode)); }
