"""The contract of the KDA ops: schema, fake, gradient, checks; no arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kimi_k3_kernels.kda.reference import (
    kda_chunk_backward_reference,
    kda_chunk_export_reference,
    kda_chunk_reference,
    kda_recurrent_pool_export_reference,
    kda_recurrent_pool_reference,
    kda_step_reference,
)
from kimi_k3_kernels.library import define_gpu_kernel, define_gradient, define_op, require
from kimi_k3_kernels.short_conv.reference import read_pool_rows

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta"
_POOL = "Tensor(a!) state_pool, Tensor read_slots, Tensor write_slots"


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


kda_chunk_op = define_op(
    f"kda_chunk({_INPUTS}, {_POOL}, Tensor cu_seqlens) -> Tensor", kda_chunk_reference, lambda q, k, v, *_: _like(v)
)
kda_chunk_export_op = define_op(
    f"kda_chunk_export({_INPUTS}, {_POOL}, Tensor cu_seqlens, Tensor export_at, Tensor export_slots) -> Tensor",
    kda_chunk_export_reference,
    lambda q, k, v, *_: _like(v),
)
kda_recurrent_op = define_op(
    f"kda_recurrent({_INPUTS}, {_POOL}, Tensor cu_seqlens) -> Tensor",
    kda_recurrent_pool_reference,
    lambda q, k, v, *_: _like(v),
)
kda_recurrent_export_op = define_op(
    f"kda_recurrent_export({_INPUTS}, {_POOL}, Tensor cu_seqlens, Tensor export_at, Tensor export_slots) -> Tensor",
    kda_recurrent_pool_export_reference,
    lambda q, k, v, *_: _like(v),
)
kda_step_op = define_op(f"kda_step_({_INPUTS}, {_POOL}) -> Tensor", kda_step_reference, lambda q, k, v, *_: _like(v))
kda_chunk_backward_op = define_op(
    f"kda_chunk_backward(Tensor grad, {_INPUTS}, Tensor state, Tensor cu_seqlens)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    kda_chunk_backward_reference,
    lambda grad, q, k, v, log_decay, beta, state, cu: tuple(_like(x) for x in (q, k, v, log_decay, beta)),
)


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    *tokens, state_pool, read_slots, _, cu_seqlens = inputs
    ctx.save_for_backward(*tokens, read_pool_rows(state_pool, read_slots), cu_seqlens)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    return kda_chunk_backward_op(grad.contiguous(), *ctx.saved_tensors)


def _refuse(ctx: Any, inputs: tuple[Any, ...]) -> None:
    raise NotImplementedError(
        "kda_recurrent has no gradient: it is for inference, under torch.no_grad(); want kda_chunk"
    )


define_gradient(kda_chunk_op, (0, 1, 2, 3, 4), _save, _backward)
for _op in (kda_recurrent_op, kda_recurrent_export_op):
    define_gradient(_op, (0, 1, 2, 3, 4), _refuse, _backward)


def _check(
    op: str, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    state_pool: Tensor, read_slots: Tensor, write_slots: Tensor,
) -> None:  # fmt: skip
    require(
        q.ndim == 3 and q.shape == k.shape == log_decay.shape and v.ndim == 3 and v.shape[:2] == q.shape[:2]
        and beta.shape == q.shape[:2] and q.dtype == k.dtype == v.dtype,
        op, "q, k, log_decay [T, H, K], v [T, H, V], beta [T, H]; q, k, v of one dtype",
        q=q, k=k, v=v, log_decay=log_decay, beta=beta,
    )  # fmt: skip
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    require(
        log_decay.dtype == wide and beta.dtype == wide and state_pool.dtype in (wide, torch.bfloat16),
        op, f"log_decay, beta and state_pool in {wide}", log_decay=log_decay, beta=beta, state_pool=state_pool,
    )  # fmt: skip
    require(
        state_pool.ndim == 4 and state_pool.shape[1:] == (*q.shape[1:], v.shape[2]),
        op, "state_pool [S, H, K, V]", state_pool=state_pool, q=q, v=v,
    )  # fmt: skip
    require(
        read_slots.ndim == 1 and read_slots.shape == write_slots.shape
        and not read_slots.is_floating_point() and not write_slots.is_floating_point(),
        op, "read_slots and write_slots [N], integers", read_slots=read_slots, write_slots=write_slots,
    )  # fmt: skip


def _check_exports(op: str, cu_seqlens: Tensor, read_slots: Tensor, export_at: Tensor, export_slots: Tensor) -> None:
    require(
        cu_seqlens.shape == (read_slots.shape[0] + 1,) and export_at.ndim == 1 and export_at.shape == export_slots.shape,
        op, "cu_seqlens [N + 1], read_slots [N], export_at and export_slots [X]",
        cu_seqlens=cu_seqlens, read_slots=read_slots, export_at=export_at, export_slots=export_slots,
    )  # fmt: skip


def kda_chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    state_pool: Tensor, read_slots: Tensor, write_slots: Tensor, cu_seqlens: Tensor,
) -> Tensor:  # fmt: skip
    """Run the KDA recurrence over packed sequences, chunk by chunk.

        S_t = (I - beta_t k_t k_t^T) Diag(exp(log_decay_t)) S_{t-1} + beta_t k_t v_t^T,   o_t = S_t^T q_t
        (Kimi Linear, arXiv 2510.26692)

    Args:
        q, k: [T, H, K], any float; expected L2-normalised, and q already scaled.
        v: [T, H, V], the dtype of q.
        log_decay: [T, H, K] float32, natural log, <= 0, without lower bound.     beta: [T, H] float32, in (0, 1).
        state_pool: [S, H, K, V] float32 (bfloat16 rounds each state once, when written). Written at `write_slots`.
        read_slots, write_slots: [N] integers: the slot with the state before a sequence's first token (negative:
            zeros), and the one that receives the state after its last token (negative: none).
        cu_seqlens: [N + 1] int32, from 0 to T.
        float64 q, k, v go with float64 log_decay, beta and state_pool.
    Returns: o [T, H, V] in v's dtype. Gradients flow to q, k, v, log_decay and beta; a state that was read is a constant.
    Raises: ValueError if shapes or dtypes disagree.
    """
    _check("kda_chunk", q, k, v, log_decay, beta, state_pool, read_slots, write_slots)
    require(
        cu_seqlens.shape == (read_slots.shape[0] + 1,), "kda_chunk", "cu_seqlens [N + 1], read_slots [N]",
        cu_seqlens=cu_seqlens, read_slots=read_slots,
    )  # fmt: skip
    return kda_chunk_op(q, k, v, log_decay, beta, state_pool, read_slots, write_slots, cu_seqlens)


def kda_chunk_export(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    state_pool: Tensor, read_slots: Tensor, write_slots: Tensor, cu_seqlens: Tensor,
    export_at: Tensor, export_slots: Tensor,
) -> Tensor:  # fmt: skip
    """`kda_chunk` that also writes states on its way: the one after packed row `export_at[x] - 1` to `export_slots[x]`.

    Args (others as `kda_chunk`):
        export_at: [X] integers in 1..T: how many packed rows have run when the state is taken. A sequence's first row
            belongs to it, so `cu_seqlens[n]` means the end of sequence n - 1.
        export_slots: [X] integers, where the states go (negative: nowhere).
    No gradient: states are exported when serving.
    """
    _check("kda_chunk_export", q, k, v, log_decay, beta, state_pool, read_slots, write_slots)
    _check_exports("kda_chunk_export", cu_seqlens, read_slots, export_at, export_slots)
    return kda_chunk_export_op(
        q, k, v, log_decay, beta, state_pool, read_slots, write_slots, cu_seqlens, export_at, export_slots
    )


def kda_recurrent(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    state_pool: Tensor, read_slots: Tensor, write_slots: Tensor, cu_seqlens: Tensor,
) -> Tensor:  # fmt: skip
    """`kda_chunk` token by token: each token has the arithmetic of `kda_step_`, bit for bit, whatever piece it came in.

    Arguments as `kda_chunk`; the state pool in float32 (float64 for float64), because a narrower one would round the
    state at the end of every piece. No gradient: NotImplementedError where one is wanted.
    """
    _check("kda_recurrent", q, k, v, log_decay, beta, state_pool, read_slots, write_slots)
    _check_wide("kda_recurrent", log_decay, state_pool)
    require(
        cu_seqlens.shape == (read_slots.shape[0] + 1,), "kda_recurrent", "cu_seqlens [N + 1], read_slots [N]",
        cu_seqlens=cu_seqlens, read_slots=read_slots,
    )  # fmt: skip
    return kda_recurrent_op(q, k, v, log_decay, beta, state_pool, read_slots, write_slots, cu_seqlens)


def kda_recurrent_export(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    state_pool: Tensor, read_slots: Tensor, write_slots: Tensor, cu_seqlens: Tensor,
    export_at: Tensor, export_slots: Tensor,
) -> Tensor:  # fmt: skip
    """`kda_recurrent` that also writes states on its way, as `kda_chunk_export` does."""
    _check("kda_recurrent_export", q, k, v, log_decay, beta, state_pool, read_slots, write_slots)
    _check_wide("kda_recurrent_export", log_decay, state_pool)
    _check_exports("kda_recurrent_export", cu_seqlens, read_slots, export_at, export_slots)
    return kda_recurrent_export_op(
        q, k, v, log_decay, beta, state_pool, read_slots, write_slots, cu_seqlens, export_at, export_slots
    )


def _check_wide(op: str, log_decay: Tensor, state_pool: Tensor) -> None:
    require(state_pool.dtype == log_decay.dtype, op, f"state_pool in {log_decay.dtype}", state_pool=state_pool)


def kda_step_(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    state_pool: Tensor, read_slots: Tensor, write_slots: Tensor,
) -> Tensor:  # fmt: skip
    """`kda_chunk` for one token of each sequence, by the recurrence: q [N, H, K], row n belongs to slot n of the lists.

    Equal slots update a state in place; different ones leave the old state, so that the step can be retried.
    """
    _check("kda_step_", q, k, v, log_decay, beta, state_pool, read_slots, write_slots)
    require(q.shape[0] == read_slots.shape[0], "kda_step_", "q [N, H, K], read_slots [N]", q=q, read_slots=read_slots)
    return kda_step_op(q, k, v, log_decay, beta, state_pool, read_slots, write_slots)


for _op in (kda_chunk_op, kda_chunk_export_op, kda_step_op):
    define_gpu_kernel(_op, "kimi_k3_kernels.kda.kernel_triton")
