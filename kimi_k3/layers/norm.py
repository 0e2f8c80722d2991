"""RMSNorm, plain and output-gated."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kimi_k3_kernels import gated_rms_norm, rms_norm
from kimi_k3_kernels.library import is_eager_inference
from kimi_k3_kernels.norm.reference import gated_rms_norm_reference, rms_norm_reference


class RMSNorm(nn.Module):
    """w * cast(x rsqrt(mean(x^2) + eps)): statistics in float32, the cast back to x's dtype before the weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        norm = rms_norm if is_eager_inference(x) else rms_norm_reference
        return norm(x, self.weight, self.eps)


class GatedRMSNorm(RMSNorm):
    """w rms(x) sigmoid(gate) in float32, cast to the gate's dtype once, at the end."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        norm = gated_rms_norm if is_eager_inference(x) else gated_rms_norm_reference
        return norm(x, gate, self.weight, self.eps)
