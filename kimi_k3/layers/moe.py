"""Stable LatentMoE: the router reads the full width, the routed experts work in the latent, shared experts beside them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimi_k3.configuration_kimi_k3 import KimiK3TextConfig
from kimi_k3.layers.linear import project
from kimi_k3.layers.mlp import KimiK3MLP
from kimi_k3.layers.norm import RMSNorm
from kimi_k3_kernels import choose_experts, dense_experts, linear_rows, matvec, mxfp4_experts, mxfp4_experts_int8
from kimi_k3_kernels.choose_experts.reference import choose_experts_reference
from kimi_k3_kernels.library import at_once, by_rows, compute_dtype, is_eager_inference


class Routing(NamedTuple):
    topk_ids: Tensor  # [T, A] int64, from the highest choice on
    topk_weights: Tensor  # [T, A] float32
    logits: Tensor  # [T, E] float32, before the sigmoid and the bias


class KimiK3Router(nn.Module):
    """sigmoid scores in float32; the bias takes part in the choice, never in the weights."""

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False)

    def forward(self, x_TD: Tensor, is_decode: bool = False, is_invariant: bool = False) -> Routing:
        wide = compute_dtype(x_TD)
        if is_invariant:
            logits_TE = linear_rows(x_TD.to(wide), [self.weight])
        elif is_decode and x_TD.device.type == "cpu" and not torch.is_grad_enabled():
            logits_TE = matvec(x_TD.to(wide), [self.weight])  # widens the weight as it reads it
        else:
            logits_TE = F.linear(x_TD.to(wide), self.weight.to(wide))
        return (by_rows if is_invariant else at_once)(self._choose, logits_TE)

    def _choose(self, logits_TE: Tensor) -> Routing:
        topk = self.config.num_experts_per_token
        scores_TE = torch.sigmoid(logits_TE)
        choice_TE = self._keep_best_groups(scores_TE + self.e_score_correction_bias)
        choose = choose_experts if is_eager_inference(logits_TE) else choose_experts_reference
        renormalize = self.config.moe_renormalize and topk > 1
        return Routing(*choose(scores_TE, choice_TE, topk, renormalize, self.config.routed_scaling_factor), logits_TE)

    def _keep_best_groups(self, choice_TE: Tensor) -> Tensor:
        """Leave only the experts of the `topk_group` groups whose two best experts score highest together."""
        groups, kept = self.config.num_expert_group, self.config.topk_group
        if not self.config.use_grouped_topk or groups <= kept:
            return choice_TE
        grouped_TGE = choice_TE.unflatten(-1, (groups, -1))
        best_TG = grouped_TGE.topk(min(2, grouped_TGE.shape[-1]), dim=-1).values.sum(-1)
        dropped_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter(-1, best_TG.topk(kept, dim=-1).indices, False)
        return grouped_TGE.masked_fill(dropped_TG[..., None], -torch.inf).flatten(-2)


class KimiK3Experts(nn.Module):
    """The routed experts as stacks over expert ids: packed MXFP4 (frozen) or plain matrices."""

    w1: Tensor
    w2: Tensor
    w3: Tensor
    w1_packed: Tensor
    w2_packed: Tensor
    w3_packed: Tensor
    w1_scale: Tensor
    w2_scale: Tensor
    w3_scale: Tensor

    def __init__(self, config: KimiK3TextConfig, packed: bool) -> None:
        super().__init__()
        self.packed, self.num_experts = packed, config.num_experts
        self.has_int8_activations = False  # lossy: quantization.quantize_expert_activations_int8_
        self.beta, self.linear_beta = config.situ_betas
        self._slots: Tensor | None = None
        width, latent = config.moe_intermediate_size, config.routed_expert_hidden_size
        for name, rows, columns in (("w1", width, latent), ("w2", latent, width), ("w3", width, latent)):
            if packed:
                codes = torch.empty(self.num_experts, rows, columns // 2, dtype=torch.uint8)
                scales = torch.empty(self.num_experts, rows, columns // 32, dtype=torch.uint8)
                self.register_parameter(f"{name}_packed", nn.Parameter(codes, requires_grad=False))
                self.register_parameter(f"{name}_scale", nn.Parameter(scales, requires_grad=False))
            else:
                self.register_parameter(name, nn.Parameter(torch.empty(self.num_experts, rows, columns)))

    def _all_slots(self, x: Tensor) -> Tensor:
        """0 .. num_experts - 1: expert e lies in slot e. Eager inference keeps the tensor."""
        if not is_eager_inference(x):
            return torch.arange(self.num_experts, dtype=torch.int32, device=x.device)
        if self._slots is None:
            with torch.inference_mode(False):
                self._slots = torch.arange(self.num_experts, dtype=torch.int32, device=x.device)
        return self._slots

    def forward(self, latent_TL: Tensor, routing: Routing) -> Tensor:
        slot_table = self._all_slots(latent_TL)
        if self.packed:
            return (mxfp4_experts_int8 if self.has_int8_activations else mxfp4_experts)(
                latent_TL, routing.topk_ids, routing.topk_weights, self.w1_packed, self.w1_scale, self.w3_packed,
                self.w3_scale, self.w2_packed, self.w2_scale, slot_table, self.beta, self.linear_beta,
            )  # fmt: skip
        return dense_experts(
            latent_TL, routing.topk_ids, routing.topk_weights, self.w1, self.w3, self.w2, slot_table,
            self.beta, self.linear_beta,
        )  # fmt: skip


class KimiK3SparseMoE(nn.Module):
    """y = up( norm( sum_a p_a expert_a(down(h)) ) ) + shared(h)."""

    def __init__(self, config: KimiK3TextConfig, packed_experts: bool) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = KimiK3Router(config)
        self.experts = KimiK3Experts(config, packed_experts)
        self.routed_expert_down_proj = nn.Linear(hidden, latent, bias=False)
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps) if config.latent_moe_use_norm else nn.Identity()
        self.routed_expert_up_proj = nn.Linear(latent, hidden, bias=False)
        self.shared_experts = KimiK3MLP(config, config.num_shared_experts * config.moe_intermediate_size)

    def forward(self, x_TD: Tensor, is_decode: bool = False, is_invariant: bool = False) -> tuple[Tensor, Tensor]:
        """[T, D] -> [T, D], and the router's logits [T, E]."""
        routing = self.gate(x_TD, is_decode, is_invariant)
        (latent_TL,) = project(x_TD, [self.routed_expert_down_proj], is_decode, is_invariant)
        routed_TL = self.routed_expert_norm(self.experts(latent_TL, routing))
        (routed_TD,) = project(routed_TL, [self.routed_expert_up_proj], is_decode, is_invariant)
        return routed_TD + self.shared_experts(x_TD, is_decode, is_invariant), routing.logits
