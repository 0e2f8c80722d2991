"""Attention Residuals: the mix over depth in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3_kernels.library import compute_dtype
from kimi_k3_kernels.norm.reference import rms_norm_reference


def _sources(running_sum: Tensor, bank: Tensor, num_blocks: Tensor) -> list[Tensor]:
    return [*bank[: int(num_blocks)].unbind(0), running_sum]


def _probabilities(sources: list[Tensor], weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over the sources, their inverse RMS and their dot products with `weight`: [M, T] each."""
    compute = compute_dtype(sources[0])
    inverse_rms, dots = [], []
    for source_TD in sources:
        wide_TD = source_TD.to(compute)
        inverse_rms.append(torch.rsqrt(wide_TD.square().mean(-1) + eps))
        dots.append((wide_TD * weight_D.to(compute)).sum(-1))  # a library's product would sum by the number of rows
    inverse_rms_MT, dots_MT = torch.stack(inverse_rms), torch.stack(dots)
    return torch.softmax((inverse_rms_MT * dots_MT).t(), dim=-1).t(), inverse_rms_MT, dots_MT


def attn_res_mix_reference(running_sum: Tensor, bank: Tensor, num_blocks: Tensor, weight: Tensor, eps: float) -> Tensor:
    """out = sum_i softmax_i(weight . v_i / rms(v_i)) v_i over the sealed blocks and the running sum."""
    sources = _sources(running_sum, bank, num_blocks)
    if len(sources) == 1:
        return running_sum.clone(memory_format=torch.contiguous_format)
    probabilities_MT, _, _ = _probabilities(sources, weight, eps)
    mixed_TD = torch.zeros(running_sum.shape, dtype=compute_dtype(running_sum), device=running_sum.device)
    for probability_T, source_TD in zip(probabilities_MT, sources):
        mixed_TD += probability_T[:, None] * source_TD.to(mixed_TD.dtype)
    return mixed_TD.to(running_sum.dtype)


def attn_res_mix_norm_reference(
    running_sum: Tensor, bank: Tensor, num_blocks: Tensor, score_norm: Tensor, score_proj: Tensor, eps: float,
    norm_weight: Tensor, norm_eps: float,
) -> Tensor:  # fmt: skip
    """The mix by the product of a norm's and a projection's weights, then an RMSNorm of it."""
    compute = compute_dtype(running_sum)
    weight_D = score_norm.to(compute) * score_proj[0].to(compute)
    mixed_TD = attn_res_mix_reference(running_sum, bank, num_blocks, weight_D, eps)
    return rms_norm_reference(mixed_TD, norm_weight, norm_eps).contiguous()


def attn_res_mix_backward_reference(
    grad: Tensor, running_sum: Tensor, bank: Tensor, num_blocks: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of running_sum, bank and weight."""
    compute = compute_dtype(running_sum)
    sources, grad_TD, weight_D = _sources(running_sum, bank, num_blocks), grad.to(compute), weight.to(compute)
    probabilities_MT, inverse_rms_MT, dots_MT = _probabilities(sources, weight, eps)
    grad_probabilities_MT = torch.stack([(grad_TD * source_TD.to(compute)).sum(-1) for source_TD in sources])
    expected_T = (probabilities_MT * grad_probabilities_MT).sum(0)
    grad_scores_MT = probabilities_MT * (grad_probabilities_MT - expected_T)
    grad_bank, grad_weight_D = torch.zeros_like(bank), torch.zeros_like(weight_D)
    grad_running_sum = torch.empty_like(running_sum, memory_format=torch.contiguous_format)
    for i, source_TD in enumerate(sources):
        wide_TD, inverse_rms_T1 = source_TD.to(compute), inverse_rms_MT[i, :, None]
        scaled_T1 = grad_scores_MT[i, :, None] * inverse_rms_T1
        grad_weight_D += (scaled_T1 * wide_TD).sum(0)
        # d rsqrt(mean v^2 + eps) / dv = -rsqrt(..)^3 v / D
        along_T1 = scaled_T1 * inverse_rms_T1.square() * dots_MT[i, :, None] / source_TD.shape[-1]
        grad_source_TD = probabilities_MT[i, :, None] * grad_TD + scaled_T1 * weight_D - along_T1 * wide_TD
        (grad_bank[i] if i < len(sources) - 1 else grad_running_sum).copy_(grad_source_TD)
    return grad_running_sum, grad_bank, grad_weight_D.to(weight.dtype)
