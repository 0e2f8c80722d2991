"""The contract of `matvec`: schema, fake, checks; no arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kimi_k3_kernels.library import define_op, require
from kimi_k3_kernels.matvec.reference import matvec_reference

matvec_op = define_op(
    "matvec(Tensor x, Tensor[] weights) -> Tensor",
    matvec_reference,
    lambda x, weights: x.new_empty((x.shape[0], sum(weight.shape[0] for weight in weights))),
)


def matvec(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x times each of several matrices, side by side: for the few rows of a decode step, which read the same input.

    Args: x [T, K], weights [N_i, K], of x's dtype, or bfloat16 with x float32 (widened exactly).
    Returns: [T, sum N_i] in x's dtype, sums in float32. On a CPU a row's bits do not depend on the others below 64 rows.
    No gradient: for inference.
    Raises: ValueError if shapes disagree.
    """
    require(
        x.ndim == 2 and len(weights) > 0 and all(w.ndim == 2 and w.shape[1] == x.shape[1] for w in weights),
        "matvec", "x [T, K], weights [N_i, K]", x=x, weights=[tuple(w.shape) for w in weights],
    )  # fmt: skip
    return matvec_op(x, list(weights))
