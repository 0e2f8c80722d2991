"""The contract of `kda_gates`: schema, fake, checks; no arithmetic."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kimi_k3_kernels.kda_gates.reference import kda_gates_reference
from kimi_k3_kernels.library import compute_dtype, define_op, require


def _reference(qkv: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(out.contiguous() for out in kda_gates_reference(qkv.contiguous(), *rest))


def _fake(qkv: Tensor, decay: Tensor, beta_logit: Tensor, *_: Any) -> tuple[Tensor, ...]:
    tokens, heads = beta_logit.shape
    sizes, wide = (tokens, heads, decay.shape[1] // heads), compute_dtype(qkv)
    return (
        qkv.new_empty(sizes), qkv.new_empty(sizes), qkv.new_empty(sizes, dtype=wide),
        qkv.new_empty((tokens, heads), dtype=wide),
    )  # fmt: skip


kda_gates_op = define_op(
    "kda_gates(Tensor qkv, Tensor decay, Tensor beta_logit, Tensor A_log, Tensor dt_bias, float? lower_bound) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _reference,
    _fake,
)


def kda_gates(
    qkv: Tensor, decay: Tensor, beta_logit: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `kda_step_` and `kda_chunk` read, from a token's projections, in one pass: for eager inference.

        q = l2norm(q) K^-0.5,   k = l2norm(k),   beta = sigmoid(beta_logit)
        log_decay = lower_bound sigmoid(exp(A_log) (decay + dt_bias)), or -exp(A_log) softplus(decay + dt_bias) without one
        (l2norm(x) = x / sqrt(sum(x^2) + 1e-6))

    Args:
        qkv: [T, 3 H K], any float: queries, keys and values side by side; the values are not read.
        decay: [T, H K] and beta_logit: [T, H], logits.     A_log: [>= H].     dt_bias: [H K].
    Returns: q and k [T, H, K] in qkv's dtype, log_decay [T, H, K] and beta [T, H] in float32 (float64 for float64).
        A row's bits do not depend on the others. No gradient.
    Raises: ValueError if shapes disagree.
    """
    require(
        decay.ndim == beta_logit.ndim == qkv.ndim == 2 and decay.shape[0] == beta_logit.shape[0] == qkv.shape[0]
        and beta_logit.shape[1] > 0 and decay.shape[1] % beta_logit.shape[1] == 0
        and qkv.shape[1] == 3 * decay.shape[1] and dt_bias.shape == decay.shape[1:]
        and A_log.ndim == 1 and A_log.shape[0] >= beta_logit.shape[1],
        "kda_gates", "qkv [T, 3 H K], decay [T, H K], beta_logit [T, H], A_log [>= H], dt_bias [H K]",
        qkv=qkv, decay=decay, beta_logit=beta_logit, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip
    return kda_gates_op(qkv, decay, beta_logit, A_log, dt_bias, lower_bound)
