"""The contract of `head_matvec`: schema, fake, checks; no arithmetic."""

from __future__ import annotations

from torch import Tensor

from kimi_k3_kernels.head_matvec.reference import head_matvec_reference
from kimi_k3_kernels.library import define_op, require

head_matvec_op = define_op(
    "head_matvec(Tensor x, Tensor weight, bool transposed) -> Tensor",
    head_matvec_reference,
    lambda x, weight, transposed: x.new_empty((x.shape[0], x.shape[1], weight.shape[2 if transposed else 1])),
)


def head_matvec(x: Tensor, weight: Tensor, transposed: bool = False) -> Tensor:
    """Each head's rows times that head's matrix: the two absorbed products of MLA.

        y[t, h] = weight[h] x[t, h], or weight[h]^T x[t, h] if `transposed`

    Args:
        x: [T, H, K].     weight: [H, M, K] ([H, K, M] if transposed) in x's dtype, any stride between heads and rows.
    Returns: [T, H, M] in x's dtype, sums in float32 (float64 for float64). A row's bits do not depend on the others.
    No gradient: for inference.
    Raises: ValueError if shapes or dtypes disagree.
    """
    require(
        x.ndim == 3 and weight.ndim == 3 and weight.shape[0] == x.shape[1] and x.dtype == weight.dtype
        and weight.shape[1 if transposed else 2] == x.shape[2],
        "head_matvec", f"x [T, H, K], weight {'[H, K, M]' if transposed else '[H, M, K]'} of one dtype",
        x=x, weight=weight,
    )  # fmt: skip
    return head_matvec_op(x, weight, transposed)
