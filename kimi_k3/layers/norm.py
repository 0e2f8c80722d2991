"""RMSNorm, plain and output-gated."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kimi_k3_kernels.library import compute_dtype


class RMSNorm(nn.Module):
    """w * cast(x rsqrt(mean(x^2) + eps)): statistics in float32, the cast back to x's dtype before the weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(compute_dtype(x))
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class GatedRMSNorm(RMSNorm):
    """w rms(x) sigmoid(gate) in float32, cast to the gate's dtype once, at the end."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        wide = x.to(compute_dtype(x))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return (normed * torch.sigmoid(gate.to(wide.dtype))).to(gate.dtype)
