"""The contract of `linear_rows`: schema, fake, checks; no arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kimi_k3_kernels.library import define_op, require
from kimi_k3_kernels.linear_rows.reference import linear_rows_reference

linear_rows_op = define_op(
    "linear_rows(Tensor x, Tensor[] weights) -> Tensor",
    linear_rows_reference,
    lambda x, weights: x.new_empty((x.shape[0], sum(weight.shape[0] for weight in weights))),
)


def linear_rows(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """`matvec` of any number of rows: a row's bits do not depend on how many rows stand beside it, nor on which.

    Args: x [T, K], weights [N_i, K], of x's dtype, or bfloat16 with x float32 (widened exactly).
    Returns: [T, sum N_i] in x's dtype, sums in float32 (float64 for float64). No gradient: for inference.
    Raises: ValueError if shapes disagree.
    """
    require(
        x.ndim == 2 and len(weights) > 0 and all(w.ndim == 2 and w.shape[1] == x.shape[1] for w in weights),
        "linear_rows", "x [T, K], weights [N_i, K]", x=x, weights=[tuple(w.shape) for w in weights],
    )  # fmt: skip
    return linear_rows_op(x, list(weights))
