"""`short_conv` on a GPU, and how pools are read before they are written.

Every sequence's window or state is read before any is written, as in the reference. Programs run in no order, so a slot
that one sequence reads and another writes is copied first; the others are read and written in place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_k3_kernels.gpu import DTYPES, block_of, find_sequence, indices, only_if, search_steps
from kimi_k3_kernels.short_conv.reference import read_pool_rows


@triton.jit
def _copy_overwritten_kernel(
    copies_ptr, copied_ptr, pool_ptr, read_ptr, write_ptr, other_ptr, num_slots, num_sequences, num_others,
    row_size, pool_S, BLOCK: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(read_ptr + n).to(tl.int64)
    writers = 0
    for first in range(0, num_sequences, LIST):
        m = first + tl.arange(0, LIST)
        written = tl.load(write_ptr + m, mask=m < num_sequences, other=-1).to(tl.int64)
        writers += tl.sum(((written == slot) & (m != n)).to(tl.int32))
    for first in range(0, num_others, LIST):
        m = first + tl.arange(0, LIST)
        written = tl.load(other_ptr + m, mask=m < num_others, other=-1).to(tl.int64)
        writers += tl.sum((written == slot).to(tl.int32))
    is_copied = (writers > 0) & (slot >= 0) & (slot < num_slots)
    if part == 0:
        tl.store(copied_ptr + n, is_copied.to(tl.int8))
    element = part * BLOCK + tl.arange(0, BLOCK)
    inside = only_if(element < row_size, is_copied)
    tl.store(copies_ptr + n * row_size + element, tl.load(pool_ptr + slot * pool_S + element, mask=inside), mask=inside)


def copy_overwritten(
    pool: Tensor, read_slots: Tensor, write_slots: Tensor, other_writes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Copies [N, ...] of the rows whose slot another sequence writes, and [N] int8: which rows those are.

    The other rows of the copies are not written and must not be read.
    """
    count = read_slots.shape[0]
    copied = torch.zeros(count, dtype=torch.int8, device=pool.device)
    others = 0 if other_writes is None else other_writes.shape[0]
    if count + others <= 1 or pool.shape[0] == 0:  # a sequence alone updates its own slot in place
        return pool.new_empty((1, *pool.shape[1:])), copied
    if not pool[0].is_contiguous():  # a view of a pool: all rows are copied
        return read_pool_rows(pool, read_slots), copied.fill_(1)
    copies = pool.new_empty((count, *pool.shape[1:]))
    row_size, block = pool[0].numel(), 2048
    _copy_overwritten_kernel[(count, triton.cdiv(row_size, block))](
        copies, copied, pool, read_slots, write_slots, write_slots if other_writes is None else other_writes,
        pool.shape[0], count, others, row_size, pool.stride(0), BLOCK=block, LIST=128, num_warps=4,
    )  # fmt: skip
    return copies, copied


@triton.jit
def _tap(windows_ptr, x_ptr, n, start, position, channel, inside, taps_before, num_channels, x_T, x_C):
    """The input at `position` of sequence n, from its window where negative; float32."""
    old = windows_ptr + (n * taps_before + taps_before + position) * num_channels + channel
    new = x_ptr + (start + position) * x_T + channel * x_C
    before = tl.load(old, mask=inside & (position < 0), other=0.0)
    here = tl.load(new, mask=inside & (position >= 0), other=0.0)
    # A pool of another dtype is rounded to that of x, as the reference does.
    return tl.where(position < 0, before.to(x_ptr.dtype.element_ty).to(tl.float32), here.to(tl.float32))


@triton.jit
def _conv_kernel(
    out_ptr, x_ptr, weight_ptr, windows_ptr, cu_ptr, tokens, num_channels, num_sequences, steps,
    x_T, x_C, weight_C, weight_W, TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    channel = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    row = tl.minimum(row, tokens - 1)  # the last rows of the last program repeat a row, with the same result
    if STEP:
        n, start = row, row
    else:
        n = find_sequence(cu_ptr, row, num_sequences, steps, 1, 0, 1)
        start = tl.load(cu_ptr + n).to(tl.int64)
    inside = channel < num_channels
    position = (row - start)[:, None]
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for tap in tl.static_range(TAPS):
        value = _tap(
            windows_ptr, x_ptr, n[:, None], start[:, None], position + (tap - TAPS + 1), channel, inside, TAPS - 1,
            num_channels, x_T, x_C,
        )  # fmt: skip
        weight = tl.load(weight_ptr + channel * weight_C + tap * weight_W, mask=inside, other=0.0)
        total += value * weight.to(tl.float32)
    out = total / (1.0 + tl.exp(-total))
    tl.store(out_ptr + row[:, None] * num_channels + channel, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _read_windows_kernel(
    windows_ptr, pool_ptr, read_ptr, num_slots, num_channels, pool_S, pool_W, pool_C,
    TAPS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    slot = tl.load(read_ptr + n).to(tl.int64)
    inside = channel < num_channels
    kept = only_if(inside, (slot >= 0) & (slot < num_slots))
    for i in tl.static_range(TAPS - 1):
        value = tl.load(pool_ptr + slot * pool_S + i * pool_W + channel * pool_C, mask=kept, other=0.0)
        tl.store(windows_ptr + (n * (TAPS - 1) + i) * num_channels + channel, value, mask=inside)


@triton.jit
def _write_windows_kernel(
    pool_ptr, windows_ptr, x_ptr, write_ptr, cu_ptr, num_slots, num_channels, pool_S, pool_W, pool_C, x_T, x_C,
    TAPS: tl.constexpr, BLOCK_C: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    slot = tl.load(write_ptr + n).to(tl.int64)
    if STEP:
        start, length = n, n * 0 + 1
    else:
        start = tl.load(cu_ptr + n).to(tl.int64)
        length = tl.load(cu_ptr + n + 1).to(tl.int64) - start
    inside = only_if(channel < num_channels, (slot >= 0) & (slot < num_slots))
    for i in tl.static_range(TAPS - 1):
        position = length - (TAPS - 1) + i + channel * 0  # the same for each channel
        value = _tap(windows_ptr, x_ptr, n, start, position, channel, inside, TAPS - 1, num_channels, x_T, x_C)
        out_ptr = pool_ptr + slot * pool_S + i * pool_W + channel * pool_C
        tl.store(out_ptr, value.to(pool_ptr.dtype.element_ty), mask=inside)


def _run(x: Tensor, weight: Tensor, pool: Tensor, reads: Tensor, writes: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    (tokens, channels), taps, count, is_step = x.shape, weight.shape[1], reads.shape[0], cu_seqlens is None
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    if count == 0 or channels == 0:
        return out
    # All windows are read before one is written: a few rows for each sequence.
    windows = pool.new_empty((count, taps - 1, channels))
    reads, writes, bounds = indices(reads), indices(writes), reads if cu_seqlens is None else indices(cu_seqlens)
    wide = min(1024, block_of(channels))
    grid = (count, triton.cdiv(channels, wide))
    with torch.cuda.device_of(x):
        _read_windows_kernel[grid](
            windows, pool, reads, pool.shape[0], channels, *pool.stride(), TAPS=taps, BLOCK_C=wide, num_warps=4
        )
        if tokens:
            block_t, block_c = (1, min(256, wide)) if is_step else (16, min(128, wide))
            _conv_kernel[(triton.cdiv(tokens, block_t), triton.cdiv(channels, block_c))](
                out, x, weight, windows, bounds, tokens, channels, count, search_steps(count), *x.stride(),
                *weight.stride(), TAPS=taps, BLOCK_T=block_t, BLOCK_C=block_c, STEP=is_step, num_warps=4,
            )  # fmt: skip
        _write_windows_kernel[grid](
            pool, windows, x, writes, bounds, pool.shape[0], channels, *pool.stride(), *x.stride(), TAPS=taps,
            BLOCK_C=wide, STEP=is_step, num_warps=4,
        )  # fmt: skip
    return out


def _has_kernel(*tensors: Tensor) -> bool:
    return {t.dtype for t in tensors} <= set(DTYPES)


def short_conv(
    x: Tensor, weight: Tensor, conv_pool: Tensor, read_slots: Tensor, write_slots: Tensor, cu_seqlens: Tensor
) -> Tensor:
    if not _has_kernel(x, weight, conv_pool):
        return torch.ops.kimi_k3.short_conv.reference(x, weight, conv_pool, read_slots, write_slots, cu_seqlens)
    return _run(x, weight, conv_pool, read_slots, write_slots, cu_seqlens)


def short_conv_step_(x: Tensor, weight: Tensor, conv_pool: Tensor, read_slots: Tensor, write_slots: Tensor) -> Tensor:
    if not _has_kernel(x, weight, conv_pool):
        return torch.ops.kimi_k3.short_conv_step_.reference(x, weight, conv_pool, read_slots, write_slots)
    return _run(x, weight, conv_pool, read_slots, write_slots, None)
