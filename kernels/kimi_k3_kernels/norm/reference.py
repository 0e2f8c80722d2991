"""RMSNorm, plain and output-gated: plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3_kernels.library import compute_dtype


def _normed(x: Tensor, eps: float) -> Tensor:
    wide = x.to(compute_dtype(x))
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w * cast(x rsqrt(mean(x^2) + eps)): the cast back to x's dtype comes before the weight."""
    return weight * _normed(x, eps).to(x.dtype)


def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w rms(x) sigmoid(gate) in float32, cast to the gate's dtype once, at the end."""
    normed = _normed(x, eps) * weight
    return (normed * torch.sigmoid(gate.to(compute_dtype(x)))).to(gate.dtype)
