"""The contract of `short_conv` and `short_conv_step_`: schema, fake, gradient, checks; no arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kimi_k3_kernels.library import define_gpu_kernel, define_gradient, define_op, require
from kimi_k3_kernels.short_conv.reference import (
    read_pool_rows,
    short_conv_backward_reference,
    short_conv_export_reference,
    short_conv_reference,
    short_conv_step_reference,
)


def _like_x(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


short_conv_op = define_op(
    "short_conv(Tensor x, Tensor weight, Tensor(a!) conv_pool, Tensor read_slots, Tensor write_slots, "
    "Tensor cu_seqlens) -> Tensor",
    short_conv_reference,
    _like_x,
)
short_conv_export_op = define_op(
    "short_conv_export(Tensor x, Tensor weight, Tensor(a!) conv_pool, Tensor read_slots, Tensor write_slots, "
    "Tensor cu_seqlens, Tensor export_at, Tensor export_slots) -> Tensor",
    short_conv_export_reference,
    _like_x,
)
short_conv_step_op = define_op(
    "short_conv_step_(Tensor x, Tensor weight, Tensor(a!) conv_pool, Tensor read_slots, Tensor write_slots) -> Tensor",
    short_conv_step_reference,
    _like_x,
)
short_conv_backward_op = define_op(
    "short_conv_backward(Tensor grad, Tensor x, Tensor weight, Tensor windows, Tensor cu_seqlens) -> (Tensor, Tensor)",
    short_conv_backward_reference,
    lambda grad, x, weight, windows, cu_seqlens: (_like_x(x), _like_x(weight)),
)


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    x, weight, conv_pool, read_slots, _, cu_seqlens = inputs
    ctx.save_for_backward(x, weight, read_pool_rows(conv_pool, read_slots), cu_seqlens)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return short_conv_backward_op(grad.contiguous(), *ctx.saved_tensors)


define_gradient(short_conv_op, (0, 1), _save, _backward)


def _check(op: str, x: Tensor, weight: Tensor, conv_pool: Tensor, slots: tuple[Tensor, Tensor]) -> None:
    require(
        x.ndim == 2 and weight.ndim == 2 and weight.shape[0] == x.shape[1] and weight.shape[1] >= 2
        and conv_pool.ndim == 3 and conv_pool.shape[1:] == (weight.shape[1] - 1, x.shape[1]),
        op, "x [T, C], weight [C, W], conv_pool [S, W - 1, C]", x=x, weight=weight, conv_pool=conv_pool,
    )  # fmt: skip
    read, write = slots
    require(
        read.ndim == 1 and read.shape == write.shape and not read.is_floating_point() and not write.is_floating_point(),
        op, "read_slots and write_slots [N], integers", read_slots=read, write_slots=write,
    )  # fmt: skip


def short_conv(
    x: Tensor, weight: Tensor, conv_pool: Tensor, read_slots: Tensor, write_slots: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Causal depthwise convolution and SiLU over packed sequences, carrying each one's window of inputs.

        y[t] = silu( sum_{w<W} weight[w] x[t - (W - 1) + w] )        (tap W - 1 multiplies the current token)

    Args:
        x: [T, C], any float, N sequences one after another.
        weight: [C, W], any float.
        conv_pool: [S, W - 1, C], the last inputs of each slot's sequence, newest last. Written at `write_slots`.
        read_slots, write_slots: [N] integers: the slot that holds the inputs before a sequence's first token (negative:
            zeros), and the one that receives those after its last token (negative: none).
        cu_seqlens: [N + 1] int32, from 0 to T.
    Returns: [T, C] in x's dtype; float32 inside (float64 for float64). Gradients flow to x and weight.
    Raises: ValueError if shapes disagree.
    """
    _check("short_conv", x, weight, conv_pool, (read_slots, write_slots))
    require(
        cu_seqlens.shape == (read_slots.shape[0] + 1,), "short_conv", "cu_seqlens [N + 1], read_slots [N]",
        cu_seqlens=cu_seqlens, read_slots=read_slots,
    )  # fmt: skip
    return short_conv_op(x, weight, conv_pool, read_slots, write_slots, cu_seqlens)


def short_conv_export(
    x: Tensor, weight: Tensor, conv_pool: Tensor, read_slots: Tensor, write_slots: Tensor, cu_seqlens: Tensor,
    export_at: Tensor, export_slots: Tensor,
) -> Tensor:  # fmt: skip
    """`short_conv` that also writes windows on its way: the last W - 1 inputs before packed row `export_at[x]`, those
    before the sequence's first token included, to `export_slots[x]`.

    Args (others as `short_conv`):
        export_at: [X] integers in 1..T: how many packed rows have run; `cu_seqlens[n]` means the end of sequence n - 1.
        export_slots: [X] integers (negative: nowhere), apart from `write_slots`.
    No gradient: windows are exported when serving.
    """
    _check("short_conv_export", x, weight, conv_pool, (read_slots, write_slots))
    require(
        cu_seqlens.shape == (read_slots.shape[0] + 1,) and export_at.ndim == 1 and export_at.shape == export_slots.shape,
        "short_conv_export", "cu_seqlens [N + 1], read_slots [N], export_at and export_slots [X]",
        cu_seqlens=cu_seqlens, read_slots=read_slots, export_at=export_at, export_slots=export_slots,
    )  # fmt: skip
    return short_conv_export_op(x, weight, conv_pool, read_slots, write_slots, cu_seqlens, export_at, export_slots)


def short_conv_step_(x: Tensor, weight: Tensor, conv_pool: Tensor, read_slots: Tensor, write_slots: Tensor) -> Tensor:
    """`short_conv` for one token of each sequence: x [N, C], row n belongs to slot n of the lists."""
    _check("short_conv_step_", x, weight, conv_pool, (read_slots, write_slots))
    require(
        x.shape[0] == read_slots.shape[0], "short_conv_step_", "x [N, C], read_slots [N]", x=x, read_slots=read_slots
    )
    return short_conv_step_op(x, weight, conv_pool, read_slots, write_slots)


for _op in (short_conv_op, short_conv_step_op):
    define_gpu_kernel(_op, "kimi_k3_kernels.short_conv.kernel_triton")
