"""The contract of `situ`: schema, fake, checks. Its definition stands in mxfp4_experts/reference.py."""

from __future__ import annotations

from torch import Tensor

from kimi_k3_kernels.library import define_op, require
from kimi_k3_kernels.mxfp4_experts.reference import situ as situ_reference

situ_op = define_op(
    "situ(Tensor gate, Tensor up, float beta, float? linear_beta) -> Tensor",
    lambda gate, up, beta, linear_beta: situ_reference(gate, up, beta, linear_beta).contiguous(),
    lambda gate, up, beta, linear_beta: gate.new_empty(gate.shape),
)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta) in one pass: for eager inference.

    Args: gate, up [T, F], any float; linear_beta None leaves the up branch linear.
    Returns: [T, F] in the gate's dtype, float32 inside (float64 for float64). No gradient.
    Raises: ValueError if shapes disagree.
    """
    require(gate.ndim == 2 and gate.shape == up.shape, "situ", "gate and up [T, F]", gate=gate, up=up)
    return situ_op(gate, up, beta, linear_beta)
