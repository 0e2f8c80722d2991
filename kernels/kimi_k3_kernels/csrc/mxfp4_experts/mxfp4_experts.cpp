// The routed experts from packed weights: choices sorted by slot, each packed tile decoded once for all its rows.
#include "dot_int8.h"

namespace kimi_k3 {

namespace {

// Bytes of hidden activations and outputs held at once: a longer prompt runs in panels of tokens.
constexpr int64_t kPanelBytes = int64_t(128) << 20;

constexpr int64_t kShare = 4;  // blocks that a thread takes at least: the first of a share is not asked for ahead

struct Stack {  // [S, out, in] in MXFP4; any stride between slots
  Stack(const Tensor& packed, const Tensor& scale)
      : packed_tensor(with_plain_slots(packed)), scale_tensor(with_plain_slots(scale)), out(packed.size(1)), in(packed.size(2) * 2) {}

  static Tensor with_plain_slots(const Tensor& t) {
    return t.stride(2) == 1 && t.stride(1) == t.size(2) ? t : make_contiguous(t);
  }
  PackedMatrix matrix(int64_t slot) const {
    return {data<uint8_t>(packed_tensor) + slot * packed_tensor.stride(0),
            data<uint8_t>(scale_tensor) + slot * scale_tensor.stride(0), in};
  }
  Tensor packed_tensor, scale_tensor;
  int64_t out, in;
};

struct Choices {  // the choices of a panel of tokens, in runs of one slot
  std::vector<int64_t> order;   // places in the flattened [T, A] of the panel
  std::vector<int64_t> slots;   // the slot of each run
  std::vector<int64_t> starts;  // its first place in `order`; one more than runs
};

Choices sort_by_slot(const Integers& ids, int64_t first, int64_t count, const Integers& slot_table, int64_t num_experts,
                     int64_t num_slots) {
  std::vector<int64_t> slot_of(count), counts(num_slots + 1);
  for (int64_t i = 0; i < count; ++i) {
    int64_t expert = ids[first + i];
    STD_TORCH_CHECK(expert >= 0 && expert < num_experts, "mxfp4_experts: topk_ids must be in 0..", num_experts - 1, ", got ", expert);
    int64_t slot = slot_table[expert];
    STD_TORCH_CHECK(slot >= 0 && slot < num_slots, "mxfp4_experts: slot_table must name slots in 0..", num_slots - 1, ", got ", slot);
    slot_of[i] = slot;
    ++counts[slot + 1];
  }
  for (int64_t s = 0; s < num_slots; ++s) counts[s + 1] += counts[s];
  Choices out;
  for (int64_t s = 0; s < num_slots; ++s)
    if (counts[s + 1] > counts[s]) {
      out.slots.push_back(s);
      out.starts.push_back(counts[s]);
    }
  out.starts.push_back(count);
  out.order.resize(count);
  for (int64_t i = 0; i < count; ++i) out.order[counts[slot_of[i]]++] = i;
  return out;
}

// out[t] = sum_a weights[t, a] outputs[t, a], in the order of a.
template <class Rows>
void combine(const typename Rows::Activation* outputs, const float* weights, int64_t tokens, int64_t topk, int64_t latent,
             typename Rows::Activation* out) {
  parallel(tokens, 8, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(latent);
    for (int64_t t = begin; t < end; ++t) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t a = 0; a < topk; ++a)
        Rows::add_weighted(sum.data(), weights[t * topk + a], outputs + (t * topk + a) * latent, latent);
      for (int64_t k = 0; k < latent; ++k) store(out + t * latent + k, sum[k]);
    }
  });
}

template <class Rows>
void run_panel(const typename Rows::Activation* x, const Integers& ids, const float* weights, int64_t first, int64_t tokens,
               int64_t topk, const Stack& w1, const Stack& w3, const Stack& w2, const Integers& slot_table,
               int64_t num_experts, const Situ& situ_betas, typename Rows::Activation* out) {
  using Element = typename Rows::Element;
  using Activation = typename Rows::Activation;
  constexpr int64_t kRows = Rows::kRows;
  const int64_t latent = w1.in, width = w1.out, count = tokens * topk;
  const int64_t latent_padded = Rows::padded(latent), width_padded = Rows::padded(width);
  Choices choices = sort_by_slot(ids, first * topk, count, slot_table, num_experts, w1.packed_tensor.size(0));
  const int64_t runs = choices.slots.size();

  LineVector<Element> prepared(tokens * latent_padded);
  parallel(tokens, 8, [&](int64_t begin, int64_t end) {
    float values[kRows];
    for (int64_t t = begin; t < end; ++t)
      for (int64_t k = 0; k < latent; k += kRows) {
        const int64_t block = std::min(kRows, latent - k);
        for (int64_t i = 0; i < block; ++i) values[i] = load(x + (first + t) * latent + k + i);
        Rows::put_block(&prepared[t * latent_padded], k, values, block);
      }
  });

  LineVector<Element> hidden(count * width_padded);  // by place in `order`
  const int64_t width_blocks = (width + kRows - 1) / kRows;
  parallel_balanced(runs * width_blocks, kShare, [&](int64_t begin, int64_t end) {
    std::vector<const Element*> rows;
    std::vector<float> gate, up;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t run = task / width_blocks, n = task % width_blocks * kRows;
      const int64_t start = choices.starts[run], m = choices.starts[run + 1] - start;
      const int64_t block = std::min(kRows, width - n);
      rows.resize(m);
      gate.resize(m * kRows);
      up.resize(m * kRows);
      for (int64_t i = 0; i < m; ++i) rows[i] = &prepared[choices.order[start + i] / topk * latent_padded];
      const int64_t next = std::min(task + 1, end - 1), next_n = next % width_blocks * kRows;
      const int64_t slot = choices.slots[run], next_slot = choices.slots[next / width_blocks];
      Rows::rows(w1.matrix(slot), n, block, {w1.matrix(next_slot), next_n}, rows.data(), m, gate.data());
      Rows::rows(w3.matrix(slot), n, block, {w3.matrix(next_slot), next_n}, rows.data(), m, up.data());
      for (int64_t i = 0; i < m; ++i) {
        float values[kRows];
        Rows::activate(&gate[i * kRows], &up[i * kRows], block, situ_betas, values);
        Rows::put_block(&hidden[(start + i) * width_padded], n, values, block);
      }
    }
  });

  std::vector<Activation> outputs(count * latent);  // by place in the flattened choices
  const int64_t latent_blocks = (latent + kRows - 1) / kRows;
  parallel_balanced(runs * latent_blocks, kShare, [&](int64_t begin, int64_t end) {
    std::vector<const Element*> rows;
    std::vector<float> values;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t run = task / latent_blocks, n = task % latent_blocks * kRows;
      const int64_t start = choices.starts[run], m = choices.starts[run + 1] - start;
      const int64_t block = std::min(kRows, latent - n);
      rows.resize(m);
      values.resize(m * kRows);
      for (int64_t i = 0; i < m; ++i) rows[i] = &hidden[(start + i) * width_padded];
      const int64_t next = std::min(task + 1, end - 1), next_n = next % latent_blocks * kRows;
      const PackedMatrix next_matrix = w2.matrix(choices.slots[next / latent_blocks]);
      Rows::rows(w2.matrix(choices.slots[run]), n, block, {next_matrix, next_n}, rows.data(), m, values.data());
      for (int64_t i = 0; i < m; ++i)
        Rows::store_block(&outputs[choices.order[start + i] * latent + n], &values[i * kRows], block);
    }
  });

  combine<Rows>(outputs.data(), weights + first * topk, tokens, topk, latent, out + first * latent);
}

template <class Rows>
void run(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights, const Stack& w1, const Stack& w3,
         const Stack& w2, const Tensor& slot_table, const Situ& situ_betas, const Tensor& out) {
  using Activation = typename Rows::Activation;
  const int64_t tokens = x.size(0), topk = topk_ids.size(1);
  Integers ids(topk_ids), table(slot_table);
  const int64_t token_bytes = topk * (w1.out + w1.in) * sizeof(Activation);
  const int64_t panel = std::max<int64_t>(64, kPanelBytes / std::max<int64_t>(1, token_bytes));
  for (int64_t first = 0; first < tokens; first += panel)
    run_panel<Rows>(data<Activation>(x), ids, data<float>(topk_weights), first, std::min(panel, tokens - first), topk, w1,
                    w3, w2, table, slot_table.size(0), situ_betas, mutable_data<Activation>(out));
}

void check_stack(const std::string& op, const char* name, const Tensor& packed, const Tensor& scale, int64_t num_slots,
                 int64_t out, int64_t in) {
  check_sizes(op.c_str(), name, packed, {num_slots, out, in / 2});
  check_sizes((op + ": scales").c_str(), name, scale, {num_slots, out, in / 32});
  STD_TORCH_CHECK(packed.scalar_type() == ScalarType::Byte && scale.scalar_type() == ScalarType::Byte, op, ": want ", name,
                  " and its scales in uint8");
}

// Calls use(policy) with the policy for the dtype and the instruction set in use.
template <class Use>
void with_lossless_rows(bool is_bf16, const Use& use) {
#if KIMI_K3_X86
  if (active_isa() == Isa::avx512) return is_bf16 ? use(Bf16Rows{}) : use(Float32Rows{});
  if (active_isa() == Isa::avx2) return is_bf16 ? use(Avx2Rows<bfloat16>{}) : use(Avx2Rows<float>{});
#endif
  is_bf16 ? use(PlainRows<bfloat16>{}) : use(PlainRows<float>{});
}

template <class Use>
void with_int8_rows(bool is_bf16, const Use& use) {
#if KIMI_K3_X86
  if (active_isa() == Isa::avx512 && has_int8_dot()) return is_bf16 ? use(VnniRows<Bf16Rows>{}) : use(VnniRows<Float32Rows>{});
#endif
  is_bf16 ? use(PlainInt8Rows<bfloat16>{}) : use(PlainInt8Rows<float>{});
}

template <bool kInt8>
Tensor experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w1_packed, Tensor w1_scale, Tensor w3_packed,
               Tensor w3_scale, Tensor w2_packed, Tensor w2_scale, Tensor slot_table, double beta,
               std::optional<double> linear_beta) {
  const char* op = kInt8 ? "mxfp4_experts_int8" : "mxfp4_experts";
  const bool is_bf16 = x.scalar_type() == ScalarType::BFloat16;
  if (!(is_bf16 || x.scalar_type() == ScalarType::Float) || topk_weights.scalar_type() != ScalarType::Float)
    return reference_tensor(op, x, topk_ids, topk_weights, w1_packed, w1_scale, w3_packed, w3_scale, w2_packed, w2_scale,
                            slot_table, beta, linear_beta);
  const int64_t tokens = x.size(0), latent = x.size(1), num_slots = w1_packed.size(0), width = w1_packed.size(1);
  STD_TORCH_CHECK(latent % 32 == 0 && width % 32 == 0, op, ": want widths of whole groups of 32, got ", latent, " and ", width);
  check_sizes(op, "x", x, {-1, -1});
  check_sizes(op, "topk_ids", topk_ids, {tokens, -1});
  check_sizes(op, "topk_weights", topk_weights, {tokens, topk_ids.size(1)});
  check_sizes(op, "slot_table", slot_table, {-1});
  check_stack(op, "w1", w1_packed, w1_scale, num_slots, width, latent);
  check_stack(op, "w3", w3_packed, w3_scale, num_slots, width, latent);
  check_stack(op, "w2", w2_packed, w2_scale, num_slots, latent, width);
  x = make_contiguous(x);
  topk_weights = make_contiguous(topk_weights);
  Tensor out = new_tensor(x, {x.size(0), x.size(1)});
  Stack w1(w1_packed, w1_scale), w3(w3_packed, w3_scale), w2(w2_packed, w2_scale);
  Situ betas{static_cast<float>(beta), linear_beta ? static_cast<float>(*linear_beta) : 0.0f};
  auto call = [&](auto rows) {
    run<decltype(rows)>(x, topk_ids, topk_weights, w1, w3, w2, slot_table, betas, out);
  };
  kInt8 ? with_int8_rows(is_bf16, call) : with_lossless_rows(is_bf16, call);
  return out;
}

Tensor mxfp4_combine(Tensor outputs, Tensor topk_weights) {
  const bool is_bf16 = outputs.scalar_type() == ScalarType::BFloat16;
  if (!(is_bf16 || outputs.scalar_type() == ScalarType::Float) || topk_weights.scalar_type() != ScalarType::Float)
    return reference_tensor("mxfp4_combine", outputs, topk_weights);
  check_sizes("mxfp4_combine", "outputs", outputs, {-1, -1, -1});
  check_sizes("mxfp4_combine", "topk_weights", topk_weights, {outputs.size(0), outputs.size(1)});
  outputs = make_contiguous(outputs);
  topk_weights = make_contiguous(topk_weights);
  Tensor out = new_tensor(outputs, {outputs.size(0), outputs.size(2)});
  with_lossless_rows(is_bf16, [&](auto rows) {
    using Activation = typename decltype(rows)::Activation;
    combine<decltype(rows)>(data<Activation>(outputs), data<float>(topk_weights), outputs.size(0), outputs.size(1),
                            outputs.size(2), mutable_data<Activation>(out));
  });
  return out;
}

}  // namespace

}  // namespace kimi_k3

STABLE_TORCH_LIBRARY_IMPL(kimi_k3, CPU, m) {
  m.impl("mxfp4_experts", TORCH_BOX(&kimi_k3::experts<false>));
  m.impl("mxfp4_experts_int8", TORCH_BOX(&kimi_k3::experts<true>));
  m.impl("mxfp4_combine", TORCH_BOX(&kimi_k3::mxfp4_combine));
}
