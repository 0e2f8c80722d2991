"""Causal depthwise convolution over packed sequences, then SiLU: plain PyTorch, the definition and the oracle."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_kernels.library import by_rows, compute_dtype


def read_pool_rows(pool: Tensor, slots: Tensor) -> Tensor:
    """Rows of `pool` at `slots`; zeros where a slot is negative."""
    if pool.shape[0] == 0:
        return pool.new_zeros((slots.shape[0], *pool.shape[1:]))
    rows = pool.index_select(0, slots.clamp(min=0))
    return rows.masked_fill_((slots < 0).view(-1, *[1] * (pool.ndim - 1)), 0)


def write_pool_rows(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write `rows` into `pool` at `slots`, except where a slot is negative."""
    kept = slots >= 0
    if bool(kept.all()):
        pool.index_copy_(0, slots.long(), rows.to(pool.dtype))
    else:
        pool.index_copy_(0, slots[kept].long(), rows[kept].to(pool.dtype))


def _windows(x_TC: Tensor, windows_NWC: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Each sequence behind its window, all in one [T + N (W - 1), C], and the row of each token's oldest input."""
    taps_before, lengths = windows_NWC.shape[1], cu_seqlens.diff()
    sequence_T = torch.repeat_interleave(torch.arange(lengths.shape[0], device=x_TC.device), lengths)
    oldest_T = torch.arange(x_TC.shape[0], device=x_TC.device) + sequence_T * taps_before
    extended = x_TC.new_empty((x_TC.shape[0] + windows_NWC.shape[0] * taps_before, x_TC.shape[1]))
    extended[oldest_T + taps_before] = x_TC
    starts_N = cu_seqlens[:-1].long() + torch.arange(lengths.shape[0], device=x_TC.device) * taps_before
    extended[starts_N[:, None] + torch.arange(taps_before, device=x_TC.device)] = windows_NWC.to(x_TC.dtype)
    return extended, oldest_T


def _convolve(extended: Tensor, oldest_T: Tensor, weight_CW: Tensor) -> Tensor:
    compute, taps = compute_dtype(extended), weight_CW.shape[1]
    weight_WC, rows = weight_CW.to(compute).t(), extended.shape[0] - taps + 1
    if rows <= 0:
        return extended.new_zeros((oldest_T.shape[0], extended.shape[1]), dtype=compute)
    summed = extended[:rows].to(compute) * weight_WC[0]
    for tap in range(1, taps):
        summed += extended[tap : tap + rows].to(compute) * weight_WC[tap]
    return summed[oldest_T]


def short_conv_reference(
    x: Tensor, weight: Tensor, conv_pool: Tensor, read_slots: Tensor, write_slots: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """y[t] = silu(sum_w weight[w] x[t - (W - 1) + w]), the inputs before a sequence's first token from its window."""
    taps_before = weight.shape[1] - 1
    extended, oldest_T = _windows(x, read_pool_rows(conv_pool, read_slots), cu_seqlens)
    ends_N = cu_seqlens[1:].long() + torch.arange(1, read_slots.shape[0] + 1, device=x.device) * taps_before
    newest = ends_N[:, None] - taps_before + torch.arange(taps_before, device=x.device)
    write_pool_rows(conv_pool, write_slots, extended[newest])
    return by_rows(F.silu, _convolve(extended, oldest_T, weight)).to(x.dtype)


def short_conv_export_reference(
    x: Tensor, weight: Tensor, conv_pool: Tensor, read_slots: Tensor, write_slots: Tensor, cu_seqlens: Tensor,
    export_at: Tensor, export_slots: Tensor,
) -> Tensor:  # fmt: skip
    num_tokens, taps_before = x.shape[0], weight.shape[1] - 1
    at = export_at.long()
    if at.numel() and not 1 <= int(at.min()) <= int(at.max()) <= num_tokens:
        raise ValueError(f"short_conv_export: want export_at in 1..{num_tokens}, got {at.tolist()}")
    extended, oldest_T = _windows(x, read_pool_rows(conv_pool, read_slots), cu_seqlens)
    # The newest input of an export is row at - 1, which lies W - 1 behind its own oldest input.
    rows = oldest_T[at - 1, None] + 1 + torch.arange(taps_before, device=x.device)
    windows_XWC = extended[rows]
    out = short_conv_reference(x, weight, conv_pool, read_slots, write_slots, cu_seqlens)
    write_pool_rows(conv_pool, export_slots, windows_XWC)
    return out


def short_conv_backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor, windows: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight; the windows [N, W - 1, C] before the first tokens are constants."""
    compute, taps = compute_dtype(x), weight.shape[1]
    extended, oldest_T = _windows(x, windows, cu_seqlens)
    summed = _convolve(extended, oldest_T, weight)
    sigmoid = torch.sigmoid(summed)
    grad_summed = grad.to(compute) * sigmoid * (1 + summed * (1 - sigmoid))
    grad_extended = extended.new_zeros(extended.shape, dtype=compute)
    grad_weight = torch.empty(weight.shape, dtype=compute, device=weight.device)
    for tap in range(taps):
        grad_extended[oldest_T + tap] += grad_summed * weight[:, tap].to(compute)  # one row a token: no index repeats
        grad_weight[:, tap] = (grad_summed * extended[oldest_T + tap].to(compute)).sum(0)
    return grad_extended[oldest_T + taps - 1].to(x.dtype), grad_weight.to(weight.dtype)


def short_conv_step_reference(
    x: Tensor, weight: Tensor, conv_pool: Tensor, read_slots: Tensor, write_slots: Tensor
) -> Tensor:
    """One token for each sequence: the same sum over its window and the token."""
    compute = compute_dtype(x)
    window_NWC = torch.cat([read_pool_rows(conv_pool, read_slots).to(x.dtype), x[:, None]], dim=1)
    write_pool_rows(conv_pool, write_slots, window_NWC[:, 1:])
    weight_WC = weight.to(compute).t()
    summed = window_NWC[:, 0].to(compute) * weight_WC[0]
    for tap in range(1, weight.shape[1]):  # in the order of `_convolve`, so that a token's bits are the same
        summed += window_NWC[:, tap].to(compute) * weight_WC[tap]
    return by_rows(F.silu, summed).to(x.dtype)
