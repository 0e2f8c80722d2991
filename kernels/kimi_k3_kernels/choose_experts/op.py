"""The contract of `choose_experts`: schema, fake, checks; no arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3_kernels.choose_experts.reference import choose_experts_reference
from kimi_k3_kernels.library import define_op, require

choose_experts_op = define_op(
    "choose_experts(Tensor scores, Tensor choice, int topk, bool renormalize, float scaling_factor) -> (Tensor, Tensor)",
    choose_experts_reference,
    lambda scores, choice, topk, renormalize, scaling_factor: (
        scores.new_empty((scores.shape[0], topk), dtype=torch.int64), scores.new_empty((scores.shape[0], topk)),
    ),
)  # fmt: skip


def choose_experts(
    scores: Tensor, choice: Tensor, topk: int, renormalize: bool, scaling_factor: float
) -> tuple[Tensor, Tensor]:
    """The router's choice in one op: for eager inference, where each of the six that it replaces costs more than its work.

        ids = topk(choice),   weights = scaling_factor scores[ids] / (1e-20 + sum scores[ids])

    Args:
        scores: [T, E] float32 or float64, after the sigmoid.     choice: [T, E], their dtype: scores with the bias.
        topk: how many experts a token takes, 1..E.     renormalize: whether a token's weights are divided by their sum.
    Returns: ids [T, A] int64 and weights [T, A] in scores' dtype, from the highest choice on. On a CPU a row's bits do not
        depend on the others, and of equal choices the lower id comes first. No gradient: for inference.
    Raises: ValueError if shapes or dtypes disagree.
    """
    require(
        scores.ndim == 2 and choice.shape == scores.shape and choice.dtype == scores.dtype and 0 < topk <= scores.shape[1],
        "choose_experts", "scores and choice [T, E] of one dtype, topk in 1..E", scores=scores, choice=choice, topk=topk,
    )  # fmt: skip
    return choose_experts_op(scores, choice, topk, renormalize, scaling_factor)
