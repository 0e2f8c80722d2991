"""The contract of `attn_res_mix` and `attn_res_mix_norm`: schema, fake, gradient, checks; no arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kimi_k3_kernels.attn_res.reference import (
    attn_res_mix_backward_reference,
    attn_res_mix_norm_reference,
    attn_res_mix_reference,
)
from kimi_k3_kernels.library import call, define_gpu_kernel, define_gradient, define_op, require


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


attn_res_mix_op = define_op(
    "attn_res_mix(Tensor running_sum, Tensor bank, Tensor num_blocks, Tensor weight, float eps) -> Tensor",
    attn_res_mix_reference,
    lambda running_sum, bank, num_blocks, weight, eps: _like(running_sum),
)
attn_res_mix_backward_op = define_op(
    "attn_res_mix_backward(Tensor grad, Tensor running_sum, Tensor bank, Tensor num_blocks, Tensor weight, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    attn_res_mix_backward_reference,
    lambda grad, running_sum, bank, num_blocks, weight, eps: (
        _like(running_sum),
        torch.empty_like(bank),
        _like(weight),
    ),
)
attn_res_mix_norm_op = define_op(
    "attn_res_mix_norm(Tensor running_sum, Tensor bank, Tensor num_blocks, Tensor score_norm, Tensor score_proj, float eps,"
    " Tensor norm_weight, float norm_eps) -> Tensor",
    attn_res_mix_norm_reference,
    lambda running_sum, bank, num_blocks, score_norm, score_proj, eps, norm_weight, norm_eps: running_sum.new_empty(
        running_sum.shape, dtype=torch.promote_types(running_sum.dtype, norm_weight.dtype)
    ),
)


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return attn_res_mix_backward_op(grad.contiguous(), *ctx.saved_tensors, ctx.eps)


define_gradient(attn_res_mix_op, (0, 1, 3), _save, _backward)


def attn_res_mix(running_sum: Tensor, bank: Tensor, num_blocks: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Mix the residual streams of a token over depth (Attention Residuals, block form; Kimi K3 technical report).

        s_i = weight . v_i / sqrt(mean(v_i^2) + eps),   out = sum_i softmax(s)_i v_i
        over the sources v = bank[0], .., bank[num_blocks - 1], running_sum

    Args:
        running_sum: [T, D], any float: the newest source.
        bank: [M, T, D], its dtype: sealed depth blocks, oldest first; those from `num_blocks` on are not read.
        num_blocks: one integer, 0..M; a tensor, so that one compiled graph serves every depth.
        weight: [D], the elementwise product of the norm's and the projection's weights.
        eps: of the RMS norm inside the score.
    Returns: [T, D] in running_sum's dtype, scores and sum in float32 (float64 for float64); equal to running_sum when
        num_blocks is 0. Gradients flow to running_sum, bank and weight.
    Raises: ValueError if shapes or dtypes disagree.
    """
    require(
        running_sum.ndim == 2 and bank.ndim == 3 and bank.shape[1:] == running_sum.shape
        and bank.dtype == running_sum.dtype and weight.shape == running_sum.shape[1:] and num_blocks.numel() == 1,
        "attn_res_mix", "running_sum [T, D], bank [M, T, D] of one dtype, num_blocks [1], weight [D]",
        running_sum=running_sum, bank=bank, num_blocks=num_blocks, weight=weight,
    )  # fmt: skip
    return call(attn_res_mix_op, running_sum, bank, num_blocks, weight, eps)


def attn_res_mix_norm(
    running_sum: Tensor, bank: Tensor, num_blocks: Tensor, score_norm: Tensor, score_proj: Tensor, eps: float,
    norm_weight: Tensor, norm_eps: float,
) -> Tensor:  # fmt: skip
    """rms_norm(attn_res_mix(running_sum, bank, num_blocks, score_norm * score_proj, eps), norm_weight, norm_eps): the normed
    input of a sublayer in one op, for eager inference, where each of the six that it replaces costs more than its work.

    Args: as `attn_res_mix` and `rms_norm`; score_norm [D] and score_proj [1, D], any float. With a norm_weight of
        running_sum's dtype the bits are those of the two.
    Returns: [T, D] in the promoted dtype of running_sum and norm_weight.     No gradient: for inference.
    Raises: ValueError if shapes or dtypes disagree.
    """
    width = running_sum.shape[-1:]
    require(
        running_sum.ndim == 2 and bank.ndim == 3 and bank.shape[1:] == running_sum.shape
        and bank.dtype == running_sum.dtype and num_blocks.numel() == 1
        and score_norm.shape == width and score_proj.shape == (1, *width) and norm_weight.shape == width,
        "attn_res_mix_norm",
        "running_sum [T, D], bank [M, T, D] of one dtype, num_blocks [1], score_norm [D], score_proj [1, D], norm_weight [D]",
        running_sum=running_sum, bank=bank, num_blocks=num_blocks, score_norm=score_norm, score_proj=score_proj,
        norm_weight=norm_weight,
    )  # fmt: skip
    return attn_res_mix_norm_op(running_sum, bank, num_blocks, score_norm, score_proj, eps, norm_weight, norm_eps)


define_gpu_kernel(attn_res_mix_op, "kimi_k3_kernels.attn_res.kernel_triton")
