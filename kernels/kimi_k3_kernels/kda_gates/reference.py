"""What the KDA recurrence reads, from a token's projections: plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_kernels.library import compute_dtype


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension, in float32: the epsilon is on the sum, inside the root."""
    wide = x.to(compute_dtype(x))
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def log_decay_gate(logit_THK: Tensor, A_log_H: Tensor, lower_bound: float | None) -> Tensor:
    """The natural log of the forget gate, <= 0, from the decay logit with its bias added.

    K3 (a bound is set): bound * sigmoid(exp(A_log) z), in (bound, 0). Kimi Linear (none): -exp(A_log) softplus(z).
    Two functions, not one and its clamp.
    """
    rate_H1 = A_log_H.exp()[:, None]
    if lower_bound is None:
        return -rate_H1 * F.softplus(logit_THK)
    return lower_bound * torch.sigmoid(rate_H1 * logit_THK)


def kda_gates_reference(
    qkv: Tensor, decay: Tensor, beta_logit: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads, wide = beta_logit.shape[1], compute_dtype(qkv)
    q_THK, k_THK, _ = qkv.view(qkv.shape[0], 3, heads, decay.shape[1] // heads).unbind(1)
    q_THK = (l2_normalize(q_THK) * q_THK.shape[-1] ** -0.5).to(qkv.dtype)
    logit_TC = decay.to(wide) + dt_bias.to(wide)
    log_decay_THK = log_decay_gate(logit_TC.view(q_THK.shape), A_log[:heads].to(wide), lower_bound)
    return q_THK, l2_normalize(k_THK).to(qkv.dtype), log_decay_THK, torch.sigmoid(beta_logit.to(wide))
