// Kimi Delta Attention: one token of each sequence, or whole sequences in tiles of 16 tokens.
#include "kda.h"

#include "../slots.h"

namespace kimi_k3 {

struct StatePool {  // [S, H, K, V], the last dimension contiguous
  explicit StatePool(const Tensor& t)
      : base(mutable_data<float>(t)), slot(t.stride(0)), head_stride(t.stride(1)), row_stride(t.stride(2)) {}
  float* head(int64_t s, int64_t h) const { return base + s * slot + h * head_stride; }
  float* base;
  int64_t slot, head_stride, row_stride;
};

// Where each sequence's states are read and written. A slot that another sequence writes is read from a copy.
struct StepPlan {
  StepPlan(const Tensor& pool_tensor, Slots slots, int64_t key_dim, int64_t value_dim,
           const std::vector<int64_t>& other_writes = {})
      : pool(pool_tensor), slots(std::move(slots)), value_dim(value_dim), copies(this->slots.read.size()) {
    const int64_t heads = pool_tensor.size(1);
    head_size = key_dim * value_dim;
    for (int64_t n : this->slots.overwritten(other_writes)) {
      copies[n].resize(heads * head_size);
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t d = 0; d < key_dim; ++d)
          std::copy_n(pool.head(this->slots.read[n], h) + d * pool.row_stride, value_dim,
                      &copies[n][h * head_size + d * value_dim]);
    }
  }
  StatePlaces places(int64_t n, int64_t h) const {
    StatePlaces out{nullptr, value_dim, nullptr, pool.row_stride};
    if (!copies[n].empty()) {
      out.from = &copies[n][h * head_size];
    } else if (slots.read[n] >= 0) {
      out.from = pool.head(slots.read[n], h);
      out.from_stride = pool.row_stride;
    }
    if (slots.write[n] >= 0) out.to = pool.head(slots.write[n], h);
    return out;
  }
  StatePool pool;
  Slots slots;
  int64_t value_dim, head_size;
  std::vector<std::vector<float>> copies;
};

struct ChunkPlan : StepPlan {
  using StepPlan::StepPlan;
  int64_t num_sequences = 0;
  std::vector<int64_t> bounds;
  std::vector<std::vector<std::pair<int64_t, int64_t>>> exports;  // of each sequence: (tokens that have run, slot)
};

}  // namespace kimi_k3

#define KIMI_K3_BODY "kda/kernels.h"
#include "../for_each_isa.h"

namespace kimi_k3 {

namespace {

bool has_kernel(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay,
                const Tensor& beta, const Tensor& state_pool, const Tensor& read_slots, const Tensor& write_slots) {
  check_sizes(op, "q", q, {-1, -1, -1});
  const int64_t tokens = q.size(0), heads = q.size(1), key_dim = q.size(2);
  check_sizes(op, "k", k, {tokens, heads, key_dim});
  check_sizes(op, "v", v, {tokens, heads, -1});
  check_sizes(op, "log_decay", log_decay, {tokens, heads, key_dim});
  check_sizes(op, "beta", beta, {tokens, heads});
  check_sizes(op, "state_pool", state_pool, {-1, heads, key_dim, v.size(2)});
  check_sizes(op, "read_slots", read_slots, {-1});
  check_sizes(op, "write_slots", write_slots, {read_slots.size(0)});
  const ScalarType type = q.scalar_type();
  return (type == ScalarType::Float || type == ScalarType::BFloat16) && k.scalar_type() == type &&
         v.scalar_type() == type && log_decay.scalar_type() == ScalarType::Float &&
         beta.scalar_type() == ScalarType::Float && state_pool.scalar_type() == ScalarType::Float &&
         (state_pool.size(3) == 1 || state_pool.stride(3) == 1);
}

template <class F>
void with_type(const Tensor& t, const F& f) {
  if (t.scalar_type() == ScalarType::BFloat16)
    f(bfloat16{});
  else
    f(float{});
}

Tensor kda_step(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta, Tensor state_pool, Tensor read_slots,
                Tensor write_slots) {
  if (!has_kernel("kda_step_", q, k, v, log_decay, beta, state_pool, read_slots, write_slots))
    return reference_tensor("kda_step_", q, k, v, log_decay, beta, state_pool, read_slots, write_slots);
  check_sizes("kda_step_", "read_slots", read_slots, {q.size(0)});
  Tensor out = new_tensor(v, {v.size(0), v.size(1), v.size(2)});
  const int64_t heads = q.size(1), key_dim = q.size(2), value_dim = v.size(2);
  StepPlan plan(state_pool, Slots("kda_step_", state_pool, read_slots, write_slots), key_dim, value_dim);
  with_type(q, [&](auto zero) {
    using T = decltype(zero);
    KdaInputs<T> in(q, k, v, log_decay, beta);
    T* o = mutable_data<T>(out);
    const int64_t grain = 1 + (1 << 14) / (1 + key_dim * value_dim);
    parallel_balanced(q.size(0) * heads, grain,
                      [&](int64_t begin, int64_t end) { KIMI_K3_ACTIVE(step_heads<T>)(in, plan, begin, end, o); });
  });
  return out;
}

enum class Form { chunk, recurrent };

Tensor run_sequences(Form form, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay,
                     const Tensor& beta, const ChunkPlan& plan) {
  Tensor out = new_tensor(v, {v.size(0), v.size(1), v.size(2)});
  with_type(q, [&](auto zero) {
    using T = decltype(zero);
    KdaInputs<T> in(q, k, v, log_decay, beta);
    T* o = mutable_data<T>(out);
    parallel_balanced(in.heads * plan.num_sequences, 1, [&](int64_t begin, int64_t end) {
      if (form == Form::chunk)
        KIMI_K3_ACTIVE(chunk_heads<T>)(in, plan, begin, end, o);
      else
        KIMI_K3_ACTIVE(recurrent_heads<T>)(in, plan, begin, end, o);
    });
  });
  return out;
}

Tensor run_form(const char* op, Form form, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay,
                const Tensor& beta, const Tensor& state_pool, const Tensor& read_slots, const Tensor& write_slots,
                const Tensor& cu_seqlens) {
  if (!has_kernel(op, q, k, v, log_decay, beta, state_pool, read_slots, write_slots))
    return reference_tensor(op, q, k, v, log_decay, beta, state_pool, read_slots, write_slots, cu_seqlens);
  check_sizes(op, "cu_seqlens", cu_seqlens, {read_slots.size(0) + 1});
  ChunkPlan plan(state_pool, Slots(op, state_pool, read_slots, write_slots), q.size(2), v.size(2));
  plan.bounds = sequence_bounds(op, cu_seqlens, q.size(0));
  plan.num_sequences = read_slots.size(0);
  plan.exports.resize(plan.num_sequences);
  return run_sequences(form, q, k, v, log_decay, beta, plan);
}

Tensor run_form_export(const char* op, Form form, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay,
                       const Tensor& beta, const Tensor& state_pool, const Tensor& read_slots, const Tensor& write_slots,
                       const Tensor& cu_seqlens, const Tensor& export_at, const Tensor& export_slots) {
  check_sizes(op, "export_at", export_at, {-1});
  check_sizes(op, "export_slots", export_slots, {export_at.size(0)});
  check_sizes(op, "cu_seqlens", cu_seqlens, {read_slots.size(0) + 1});
  Integers at(export_at), to(export_slots);
  const int64_t num_exports = export_at.size(0);
  for (int64_t x = 0; x < num_exports; ++x)
    STD_TORCH_CHECK(at[x] >= 1 && at[x] <= q.size(0), op, ": want export_at in 1..", q.size(0), ", got ", at[x]);
  if (!has_kernel(op, q, k, v, log_decay, beta, state_pool, read_slots, write_slots))
    return reference_tensor(op, q, k, v, log_decay, beta, state_pool, read_slots, write_slots, cu_seqlens, export_at,
                            export_slots);
  Slots slots(op, state_pool, read_slots, write_slots);
  std::vector<int64_t> targets;
  for (int64_t x = 0; x < num_exports; ++x) targets.push_back(slots.check(op, to[x]));
  ChunkPlan plan(state_pool, slots, q.size(2), v.size(2), targets);
  plan.bounds = sequence_bounds(op, cu_seqlens, q.size(0));
  plan.num_sequences = read_slots.size(0);
  plan.exports.resize(plan.num_sequences);
  for (int64_t x = 0; x < num_exports; ++x) {
    const int64_t n = std::lower_bound(plan.bounds.begin(), plan.bounds.end(), at[x]) - plan.bounds.begin() - 1;
    plan.exports[n].emplace_back(at[x], targets[x]);
  }
  for (auto& exports : plan.exports) std::sort(exports.begin(), exports.end());
  return run_sequences(form, q, k, v, log_decay, beta, plan);
}

Tensor kda_chunk(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta, Tensor state_pool, Tensor read_slots,
                 Tensor write_slots, Tensor cu_seqlens) {
  return run_form("kda_chunk", Form::chunk, q, k, v, log_decay, beta, state_pool, read_slots, write_slots, cu_seqlens);
}

Tensor kda_recurrent(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta, Tensor state_pool, Tensor read_slots,
                     Tensor write_slots, Tensor cu_seqlens) {
  return run_form("kda_recurrent", Form::recurrent, q, k, v, log_decay, beta, state_pool, read_slots, write_slots, cu_seqlens);
}

Tensor kda_chunk_export(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta, Tensor state_pool, Tensor read_slots,
                        Tensor write_slots, Tensor cu_seqlens, Tensor export_at, Tensor export_slots) {
  return run_form_export("kda_chunk_export", Form::chunk, q, k, v, log_decay, beta, state_pool, read_slots, write_slots,
                         cu_seqlens, export_at, export_slots);
}

Tensor kda_recurrent_export(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta, Tensor state_pool,
                            Tensor read_slots, Tensor write_slots, Tensor cu_seqlens, Tensor export_at, Tensor export_slots) {
  return run_form_export("kda_recurrent_export", Form::recurrent, q, k, v, log_decay, beta, state_pool, read_slots,
                         write_slots, cu_seqlens, export_at, export_slots);
}

}  // namespace

}  // namespace kimi_k3

STABLE_TORCH_LIBRARY_IMPL(kimi_k3, CPU, m) {
  m.impl("kda_step_", TORCH_BOX(&kimi_k3::kda_step));
  m.impl("kda_chunk", TORCH_BOX(&kimi_k3::kda_chunk));
  m.impl("kda_chunk_export", TORCH_BOX(&kimi_k3::kda_chunk_export));
  m.impl("kda_recurrent", TORCH_BOX(&kimi_k3::kda_recurrent));
  m.impl("kda_recurrent_export", TORCH_BOX(&kimi_k3::kda_recurrent_export));
}
