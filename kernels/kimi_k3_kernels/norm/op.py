"""The contract of `rms_norm` and `gated_rms_norm`: schema, fake, checks; no arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kimi_k3_kernels.library import define_op, require
from kimi_k3_kernels.norm.reference import gated_rms_norm_reference, rms_norm_reference


def _contiguous(reference: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs: reference(*inputs).contiguous()


rms_norm_op = define_op(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    _contiguous(rms_norm_reference),
    lambda x, weight, eps: x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype)),
)
gated_rms_norm_op = define_op(
    "gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps) -> Tensor",
    _contiguous(gated_rms_norm_reference),
    lambda x, gate, weight, eps: gate.new_empty(gate.shape),
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * cast(x / sqrt(mean(x^2) + eps)) over the last dimension, in one pass: for eager inference.

    In plain PyTorch it is eight small ops, which torch.compile fuses as well; eager decode pays for each.

    Args: x [.., D], weight [D], any float; statistics in float32 (float64 for float64).
    Returns: x's shape, in the promoted dtype of x and weight. A row's bits do not depend on the others.
    No gradient: for inference.     Raises: ValueError if shapes disagree.
    """
    require(x.ndim > 0 and weight.shape == x.shape[-1:], "rms_norm", "x [.., D], weight [D]", x=x, weight=weight)
    return rms_norm_op(x, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight x / sqrt(mean(x^2) + eps) * sigmoid(gate) in float32, cast once: for eager inference, as `rms_norm`.

    Args: x and gate [.., D], weight [D], any float.     Returns: x's shape in the gate's dtype.
    Raises: ValueError if shapes disagree.
    """
    require(
        x.ndim > 0 and weight.shape == x.shape[-1:] and gate.shape == x.shape,
        "gated_rms_norm", "x and gate [.., D], weight [D]", x=x, gate=gate, weight=weight,
    )  # fmt: skip
    return gated_rms_norm_op(x, gate, weight, eps)
