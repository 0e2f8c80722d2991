"""The contract of `mla_prefill`, `mla_decode` and `mla_decode_mass`: schema, fake, gradient, checks; no arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kimi_k3_kernels.library import LIBRARY, compute_dtype, define_gpu_kernel, define_gradient, define_op, require
from kimi_k3_kernels.mla.reference import (
    mla_block_mass_reference,
    mla_decode_mass_reference,
    mla_decode_reference,
    mla_prefill_backward_reference,
    mla_prefill_reference,
)

_PREFILL = (
    "Tensor q, Tensor latent, Tensor kv_b_weight, Tensor latent_pool, Tensor block_tables, Tensor past_lens, "
    "Tensor cu_seqlens, float scale"
)


_DECODE = "Tensor q, Tensor latent_pool, Tensor block_tables, Tensor kv_lens, float scale, int value_dim"


def _value_dim(q: Tensor, latent: Tensor, kv_b_weight: Tensor) -> int:
    nope = q.shape[2] - (latent.shape[1] - kv_b_weight.shape[1])
    return kv_b_weight.shape[0] // q.shape[1] - nope


def _prefill_fake(q: Tensor, latent: Tensor, kv_b_weight: Tensor, *_: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], _value_dim(q, latent, kv_b_weight)))


def _backward_fake(grad: Tensor, q: Tensor, latent: Tensor, kv_b_weight: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, latent, kv_b_weight))


mla_prefill_op = define_op(f"mla_prefill({_PREFILL}) -> Tensor", mla_prefill_reference, _prefill_fake)
mla_prefill_backward_op = define_op(
    f"mla_prefill_backward(Tensor grad, {_PREFILL}) -> (Tensor, Tensor, Tensor)",
    mla_prefill_backward_reference,
    _backward_fake,
)
mla_decode_op = define_op(
    f"mla_decode({_DECODE}) -> Tensor",
    mla_decode_reference,
    lambda q, pool, tables, lens, scale, value_dim: q.new_empty((q.shape[0], q.shape[1], value_dim)),
)
mla_decode_mass_op = define_op(
    f"mla_decode_mass({_DECODE}) -> (Tensor, Tensor)",
    mla_decode_mass_reference,
    lambda q, pool, tables, lens, scale, value_dim: (
        q.new_empty((q.shape[0], q.shape[1], value_dim)),
        q.new_empty(tables.shape, dtype=compute_dtype(q)),
    ),
)


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return mla_prefill_backward_op(grad.contiguous(), *ctx.saved_tensors, ctx.scale)


define_gradient(mla_prefill_op, (0, 1, 2), _save, _backward)


def mla_prefill(
    q: Tensor, latent: Tensor, kv_b_weight: Tensor, latent_pool: Tensor, block_tables: Tensor, past_lens: Tensor,
    cu_seqlens: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """Causal attention of new tokens over their own latents and those of earlier tokens, heads expanded from latents.

        [k_n | v] = kv_b_weight c,   score = scale (q_n . k_n + q_r . k_r),   o = softmax(score) v
        (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434; K3 has no rotary embedding)

    Args:
        q: [T, H, nope + rope], N sequences one after another, each head's q_n before its q_r.
        latent: [T, R + rope], the new tokens' normed latent c and shared key channels k_r.
        kv_b_weight: [H (nope + V), R].
        latent_pool: [P, block, R + rope]; sequence n's earlier tokens lie in the blocks `block_tables[n]`, in order.
        block_tables: [N, B] integers.     past_lens: [N] integers, earlier tokens of each sequence; 0: none.
        cu_seqlens: [N + 1] int32, from 0 to T.     scale: of the scores, (nope + rope)^-0.5.
    Returns: [T, H, V] in q's dtype. Gradients flow to q, latent and kv_b_weight, not into the pool.
    Raises: ValueError if shapes disagree.
    """
    require(
        q.ndim == 3 and latent.ndim == 2 and latent.shape[0] == q.shape[0] and kv_b_weight.ndim == 2
        and kv_b_weight.shape[0] % q.shape[1] == 0 and latent.shape[1] > kv_b_weight.shape[1]
        and _value_dim(q, latent, kv_b_weight) > 0,
        "mla_prefill", "q [T, H, nope + rope], latent [T, R + rope], kv_b_weight [H (nope + V), R]",
        q=q, latent=latent, kv_b_weight=kv_b_weight,
    )  # fmt: skip
    require(
        latent_pool.ndim == 3 and latent_pool.shape[2] == latent.shape[1] and block_tables.ndim == 2
        and past_lens.shape == block_tables.shape[:1] and cu_seqlens.shape == (past_lens.shape[0] + 1,),
        "mla_prefill", "latent_pool [P, block, R + rope], block_tables [N, B], past_lens [N], cu_seqlens [N + 1]",
        latent_pool=latent_pool, block_tables=block_tables, past_lens=past_lens, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return mla_prefill_op(q, latent, kv_b_weight, latent_pool, block_tables, past_lens, cu_seqlens, scale)


def mla_decode(
    q: Tensor, latent_pool: Tensor, block_tables: Tensor, kv_lens: Tensor, scale: float, value_dim: int
) -> Tensor:
    """Attention of one token of each sequence in the latent space (absorbed form).

        score = scale q . latent,   ctx = softmax(score) latent[:value_dim]

    Args:
        q: [N, H, R + rope], each head's query already multiplied by its key expansion, then its q_r.
        latent_pool: [P, block, R + rope].     block_tables: [N, B] integers.
        kv_lens: [N] integers >= 1: tokens of each sequence in the pool, the new one included.
        scale: (nope + rope)^-0.5 as in `mla_prefill`, although the inner product is R + rope wide.
        value_dim: R, the channels that are summed.
    Returns: [N, H, value_dim] in q's dtype; softmax in float32 (float64 for float64).
    Raises: ValueError if shapes disagree.
    """
    _check_decode("mla_decode", q, latent_pool, block_tables, kv_lens, value_dim)
    return mla_decode_op(q, latent_pool, block_tables, kv_lens, scale, value_dim)


def mla_decode_mass(
    q: Tensor, latent_pool: Tensor, block_tables: Tensor, kv_lens: Tensor, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """`mla_decode`, and the share of its attention that each block draws, the mean over the heads.

        mass[n, b] = mean_h sum_(t in block b) softmax_t(scale q_h . latent_t)

    Args: as `mla_decode`.
    Returns: what `mla_decode` does, with the same bits, and the mass, [N, B] float32 (float64 for float64): 0 beyond a
        sequence's blocks, and a row sums to 1.
    Raises: ValueError if shapes disagree.
    """
    _check_decode("mla_decode_mass", q, latent_pool, block_tables, kv_lens, value_dim)
    return mla_decode_mass_op(q, latent_pool, block_tables, kv_lens, scale, value_dim)


def _check_decode(
    op: str, q: Tensor, latent_pool: Tensor, block_tables: Tensor, kv_lens: Tensor, value_dim: int
) -> None:
    require(
        q.ndim == 3 and latent_pool.ndim == 3 and latent_pool.shape[2] == q.shape[2] and block_tables.ndim == 2
        and kv_lens.shape == block_tables.shape[:1] == q.shape[:1] and 0 < value_dim <= q.shape[2],
        op, "q [N, H, R + rope], latent_pool [P, block, R + rope], block_tables [N, B], kv_lens [N], value_dim R",
        q=q, latent_pool=latent_pool, block_tables=block_tables, kv_lens=kv_lens, value_dim=value_dim,
    )  # fmt: skip


def _decode_mass_on_gpu(
    q: Tensor, latent_pool: Tensor, block_tables: Tensor, kv_lens: Tensor, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """The bits of `mla_decode`'s own kernel there; the mass has none yet."""
    out = mla_decode_op(q, latent_pool, block_tables, kv_lens, scale, value_dim)
    return out, mla_block_mass_reference(q, latent_pool, block_tables, kv_lens, scale)


for _op in (mla_prefill_op, mla_decode_op):
    define_gpu_kernel(_op, "kimi_k3_kernels.mla.kernel_triton")
LIBRARY.impl("mla_decode_mass", _decode_mass_on_gpu, "CUDA")
