// The router's choice: the ids of the highest of `choice`, and their scores as weights.
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "../cpu.h"

namespace kimi_k3 {

namespace {

using Result = std::tuple<Tensor, Tensor>;

Result choose_experts(Tensor scores, Tensor choice, int64_t topk, bool renormalize, double scaling_factor) {
  check_sizes("choose_experts", "scores", scores, {-1, -1});
  const int64_t tokens = scores.size(0), experts = scores.size(1);
  check_sizes("choose_experts", "choice", choice, {tokens, experts});
  STD_TORCH_CHECK(topk > 0 && topk <= experts, "choose_experts: want topk in 1..", experts, ", got ", topk);
  if (scores.scalar_type() != ScalarType::Float || choice.scalar_type() != ScalarType::Float) {
    auto stack = call_reference("choose_experts", scores, choice, topk, renormalize, scaling_factor);
    return {torch::stable::detail::to<Tensor>(stack[0]), torch::stable::detail::to<Tensor>(stack[1])};
  }
  scores = make_contiguous(scores);
  choice = make_contiguous(choice);
  Result out{new_tensor(scores, {tokens, topk}, ScalarType::Long), new_tensor(scores, {tokens, topk})};
  const float *all_scores = data<float>(scores), *all_choices = data<float>(choice), factor = static_cast<float>(scaling_factor);
  int64_t* ids = mutable_data<int64_t>(std::get<0>(out));
  float* weights = mutable_data<float>(std::get<1>(out));
  parallel(tokens, 1 + (1 << 13) / experts, [&](int64_t begin, int64_t end) {
    std::vector<std::pair<float, int64_t>> ranked(experts);  // ascending: the highest choice, then the lowest id
    for (int64_t t = begin; t < end; ++t) {
      const float *row = all_scores + t * experts, *values = all_choices + t * experts;
      for (int64_t e = 0; e < experts; ++e)  // NaN is the highest, as in torch.topk
        ranked[e] = {std::isnan(values[e]) ? -std::numeric_limits<float>::infinity() : -values[e], e};
      std::nth_element(ranked.begin(), ranked.begin() + topk - 1, ranked.end());
      std::sort(ranked.begin(), ranked.begin() + topk);
      float total = 0;
      for (int64_t a = 0; a < topk; ++a) {
        ids[t * topk + a] = ranked[a].second;
        total += row[ranked[a].second];
      }
      for (int64_t a = 0; a < topk; ++a) {
        const float score = row[ids[t * topk + a]];
        weights[t * topk + a] = (renormalize ? score / (total + 1e-20f) : score) * factor;
      }
    }
  });
  return out;
}

}  // namespace

}  // namespace kimi_k3

STABLE_TORCH_LIBRARY_IMPL(kimi_k3, CPU, m) { m.impl("choose_experts", TORCH_BOX(&kimi_k3::choose_experts)); }
