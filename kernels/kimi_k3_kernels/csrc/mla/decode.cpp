// One token of each sequence over its latents: every latent is read once for all heads.
#include "absorbed.h"
#include "latents.h"

namespace kimi_k3::mla {

namespace {

void check(const char* op, const Tensor& q, const Tensor& latent_pool, const Tensor& block_tables, const Tensor& kv_lens,
           int64_t value_dim) {
  check_sizes(op, "q", q, {-1, -1, -1});
  check_sizes(op, "latent_pool", latent_pool, {-1, -1, q.size(2)});
  check_sizes(op, "block_tables", block_tables, {q.size(0), -1});
  check_sizes(op, "kv_lens", kv_lens, {q.size(0)});
  STD_TORCH_CHECK(value_dim > 0 && value_dim <= q.size(2), op, ": want value_dim in 1..", q.size(2), ", got ", value_dim);
}

bool has_kernel(const Tensor& q, const Tensor& latent_pool) {
  return (q.scalar_type() == ScalarType::BFloat16 || q.scalar_type() == ScalarType::Float) &&
         latent_pool.scalar_type() == q.scalar_type();
}

// mass: null, or [N, B] float32 to be written.
Tensor run(const char* op, Tensor q, const Tensor& latent_pool, const Tensor& block_tables, const Tensor& kv_lens,
           double scale, int64_t value_dim, float* mass) {
  q = make_contiguous(q);
  Tensor out = new_tensor(q, {q.size(0), q.size(1), value_dim});
  Integers lens(kv_lens);
  std::vector<int64_t> lengths(q.size(0));
  for (size_t n = 0; n < lengths.size(); ++n) lengths[n] = lens[n];
  with_policy(q.scalar_type() == ScalarType::BFloat16, [&](auto policy) {
    using P = decltype(policy);
    LatentPool<typename P::Source> pool(op, latent_pool, block_tables);
    for (size_t n = 0; n < lengths.size(); ++n) pool.check(n, lengths[n]);
    using Source = typename P::Source;
    auto find_latents = [&](int64_t n, int64_t begin, int64_t end, const Source** rows) { pool.rows(n, begin, end, rows); };
    const BlockMass block_mass{mass, pool.columns, std::max<int64_t>(1, pool.block)};
    attend_absorbed<P>(data<Source>(q), q.size(1), q.size(2), lengths, find_latents, value_dim,
                       static_cast<float>(scale * 1.4426950408889634), mutable_data<Source>(out),
                       mass ? &block_mass : nullptr);
  });
  return out;
}

Tensor mla_decode(Tensor q, Tensor latent_pool, Tensor block_tables, Tensor kv_lens, double scale, int64_t value_dim) {
  check("mla_decode", q, latent_pool, block_tables, kv_lens, value_dim);
  if (!has_kernel(q, latent_pool))
    return reference_tensor("mla_decode", q, latent_pool, block_tables, kv_lens, scale, value_dim);
  return run("mla_decode", q, latent_pool, block_tables, kv_lens, scale, value_dim, nullptr);
}

std::tuple<Tensor, Tensor> mla_decode_mass(Tensor q, Tensor latent_pool, Tensor block_tables, Tensor kv_lens, double scale,
                                           int64_t value_dim) {
  check("mla_decode_mass", q, latent_pool, block_tables, kv_lens, value_dim);
  if (!has_kernel(q, latent_pool)) {
    const auto results = call_reference("mla_decode_mass", q, latent_pool, block_tables, kv_lens, scale, value_dim);
    return {torch::stable::detail::to<Tensor>(results[0]), torch::stable::detail::to<Tensor>(results[1])};
  }
  Tensor mass = new_tensor(q, {q.size(0), block_tables.size(1)}, ScalarType::Float);
  Tensor out = run("mla_decode_mass", q, latent_pool, block_tables, kv_lens, scale, value_dim, mutable_data<float>(mass));
  return {out, mass};
}

}  // namespace

}  // namespace kimi_k3::mla

STABLE_TORCH_LIBRARY_IMPL(kimi_k3, CPU, m) {
  m.impl("mla_decode", TORCH_BOX(&kimi_k3::mla::mla_decode));
  m.impl("mla_decode_mass", TORCH_BOX(&kimi_k3::mla::mla_decode_mass));
}
