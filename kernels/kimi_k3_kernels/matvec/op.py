"""The contract of `matvec`: schema, fake, checks; no arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_k3_kernels.library import define_op, require
from kimi_k3_kernels.matvec.reference import matvec_reference

matvec_op = define_op(
    "matvec(Tensor x, Tensor[] weights) -> Tensor",
    matvec_reference,
    lambda x, weights: x.new_empty((x.shape[0], sum(weight.shape[0] for weight in weights))),
)


def beats_library_gemm(dtype: torch.dtype) -> bool:
    """Whether `matvec` is faster than torch's GEMM also for many rows: in bfloat16 on an x86 processor that has no
    instructions for it, where torch reaches a tenth of its float32 rate and the kernel about half of it."""
    has_kernels = hasattr(torch.ops.kimi_k3, "cpu_instructions")
    return dtype == torch.bfloat16 and has_kernels and torch.ops.kimi_k3.cpu_instructions() == "avx2"


# What torch.compiler.assume_constant_result does, without its import of the whole compiler: half a second at every start.
beats_library_gemm._dynamo_marked_constant = True  # type: ignore[attr-defined]


def matvec(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x times each of several matrices, side by side: for the few rows of a decode step, which read the same input.

    Args: x [T, K], weights [N_i, K], of x's dtype, or bfloat16 with x float32 (widened exactly).
    Returns: [T, sum N_i] in x's dtype, sums in float32. On a CPU a row's bits do not depend on the others below 64
        rows, and in bfloat16 at any number of rows where `beats_library_gemm`.
    No gradient: for inference.
    Raises: ValueError if shapes disagree.
    """
    require(
        x.ndim == 2 and len(weights) > 0 and all(w.ndim == 2 and w.shape[1] == x.shape[1] for w in weights),
        "matvec", "x [T, K], weights [N_i, K]", x=x, weights=[tuple(w.shape) for w in weights],
    )  # fmt: skip
    return matvec_op(x, list(weights))
