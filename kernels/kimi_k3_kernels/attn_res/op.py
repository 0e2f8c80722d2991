"""The contract of `attn_res_mix`: schema, fake, gradient, checks; no arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kimi_k3_kernels.attn_res.reference import attn_res_mix_backward_reference, attn_res_mix_reference
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


define_gpu_kernel(attn_res_mix_op, "kimi_k3_kernels.attn_res.kernel_triton")
