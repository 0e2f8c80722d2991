"""The router's choice from its scores: plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def choose_experts_reference(
    scores: Tensor, choice: Tensor, topk: int, renormalize: bool, scaling_factor: float
) -> tuple[Tensor, Tensor]:
    """The ids of the `topk` highest of `choice`, from the highest on, and their scores as weights."""
    ids_TA = choice.topk(topk, dim=-1).indices
    weights_TA = scores.gather(-1, ids_TA)
    if renormalize:
        weights_TA = weights_TA / (weights_TA.sum(-1, keepdim=True) + 1e-20)
    return ids_TA, weights_TA * scaling_factor
