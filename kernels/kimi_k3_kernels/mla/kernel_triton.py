"""Multi-head latent attention on a GPU, over paged latents.

`_latent_kernel` attends in the latent space: it serves `mla_decode`, split over the context with a merge, and the earlier
tokens of `mla_prefill`, whose queries are first multiplied by the key expansion. `_new_tokens_kernel` adds the new
tokens, whose keys and values one GEMM has expanded, and starts from what the earlier tokens gave: their output and the
logarithm of their weights' sum. So no expanded key or value of an earlier token is ever stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_k3_kernels.gpu import (
    DTYPES,
    block_of,
    dot,
    dot_precision,
    find_sequence,
    indices,
    is_amd,
    num_places,
    search_steps,
    target_of,
)

LOG2_E = 1.4426950408889634
SPLIT_TOKENS = 256  # a split of the context is at least this long
PROGRAMS = 1024  # splits are made until there are about so many
WORKSPACE_BYTES = 1 << 28  # of queries and results in the latent space: longer prompts run a group of heads at a time


@triton.jit
def _latent_kernel(
    out_ptr, lse_ptr, q_ptr, pool_ptr, table_ptr, lens_ptr, cu_ptr, scale_log2, num_sequences, steps, heads, rank, width,
    page, table_width, pool_pages, splits, q_T, q_H, q_C, pool_P, pool_B, pool_C, table_N, table_B,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, DECODE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows are (token, head) pairs of one sequence. out [T, H, splits, R], lse [T, H, splits] in powers of two."""
    place, split = tl.program_id(0), tl.program_id(1)
    if DECODE:
        blocks = tl.cdiv(heads, BLOCK_M)
        n = place // blocks
        first = (place - n * blocks) * BLOCK_M
        start, num_rows = n, heads
    else:
        n = find_sequence(cu_ptr, place, num_sequences, steps, BLOCK_M, 1, heads)
        start = tl.load(cu_ptr + n).to(tl.int32)
        first = (place - start * heads // BLOCK_M - n) * BLOCK_M
        num_rows = (tl.load(cu_ptr + n + 1).to(tl.int32) - start) * heads
    if first >= num_rows:
        return
    row = first + tl.arange(0, BLOCK_M)
    valid = row < num_rows
    token, head = (start + row // heads).to(tl.int64), row % heads
    channel, shared = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_S)
    inside_R, inside_S = channel < rank, shared < width - rank
    q_ptrs = q_ptr + token[:, None] * q_T + head[:, None] * q_H
    q = tl.load(q_ptrs + channel[None, :] * q_C, mask=valid[:, None] & inside_R[None, :], other=0.0)
    q_shared = tl.load(q_ptrs + (rank + shared[None, :]) * q_C, mask=valid[:, None] & inside_S[None, :], other=0.0)

    length = tl.load(lens_ptr + n).to(tl.int32)
    # Whole tiles of the sequence's own length, shared out over the splits.
    share = tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N
    begin = split * share
    end = tl.minimum(begin + share, length)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for j in range(begin, end, BLOCK_N):
        key = j + tl.arange(0, BLOCK_N)
        seen = key < end
        held = seen & (key // page < table_width)
        block = tl.load(table_ptr + n.to(tl.int64) * table_N + key // page * table_B, mask=held, other=0).to(tl.int64)
        held = held & (block >= 0) & (block < pool_pages)
        latent_ptrs = pool_ptr + (block * pool_P + (key % page).to(tl.int64) * pool_B)[:, None]
        latent = tl.load(latent_ptrs + channel[None, :] * pool_C, mask=held[:, None] & inside_R[None, :], other=0.0)
        shared_ptrs = latent_ptrs + (rank + shared[None, :]) * pool_C
        key_shared = tl.load(shared_ptrs, mask=held[:, None] & inside_S[None, :], other=0.0)
        latent = latent.to(q.dtype)
        scores = dot(q, tl.trans(latent), tl.zeros((BLOCK_M, BLOCK_N), tl.float32), PRECISION)
        scores = dot(q_shared, tl.trans(key_shared.to(q.dtype)), scores, PRECISION)
        scores = tl.where(seen[None, :], scores * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        kept = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * kept + tl.sum(weights, axis=1)
        acc = dot(weights.to(q.dtype), latent, acc * kept[:, None], PRECISION)
        top = new_top
    # A split without tokens has weight zero.
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    to = (token * heads + head) * splits + split
    tl.store(lse_ptr + to, lse, mask=valid)
    out_ptrs = out_ptr + to[:, None] * rank + channel[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=valid[:, None] & inside_R[None, :])


@triton.jit
def _merge_kernel(out_ptr, parts_ptr, lse_ptr, splits, rank, BLOCK_R: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_R)
    inside = channel < rank
    top = tl.load(lse_ptr + row * splits)
    for split in range(1, splits):
        top = tl.maximum(top, tl.load(lse_ptr + row * splits + split))
    top = tl.maximum(top, -1e38)  # a sequence without tokens: zeros
    total = top * 0
    acc = tl.zeros((BLOCK_R,), tl.float32)
    for split in range(splits):  # in order: the sum does not depend on which program was first
        weight = tl.exp2(tl.load(lse_ptr + row * splits + split) - top)
        part = tl.load(parts_ptr + (row * splits + split) * rank + channel, mask=inside, other=0.0)
        acc += part * weight
        total += weight
    acc = acc / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * rank + channel, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _new_tokens_kernel(
    out_ptr, q_ptr, expanded_ptr, latent_ptr, past_ptr, lse_ptr, cu_ptr, scale_log2, num_sequences, steps, heads, first_head,
    nope, shared_dim, value_dim, rank, q_T, q_H, q_C, latent_T, latent_C, past_T, past_H, past_V, out_T, out_H,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_PAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Causal attention of one head over the new tokens of a sequence, on top of its earlier ones."""
    place = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    n = find_sequence(cu_ptr, place, num_sequences, steps, BLOCK_M, 1, 1)
    start = tl.load(cu_ptr + n).to(tl.int32)
    first = (place - start // BLOCK_M - n) * BLOCK_M
    length = tl.load(cu_ptr + n + 1).to(tl.int32) - start
    if first >= length:
        return
    row = first + tl.arange(0, BLOCK_M)
    valid = row < length
    token = (start + row).to(tl.int64)
    channel, shared, value = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_V)
    inside_K, inside_S, inside_V = channel < nope, shared < shared_dim, value < value_dim
    q_ptrs = q_ptr + token[:, None] * q_T + head * q_H
    q = tl.load(q_ptrs + channel[None, :] * q_C, mask=valid[:, None] & inside_K[None, :], other=0.0)
    q_shared = tl.load(q_ptrs + (nope + shared[None, :]) * q_C, mask=valid[:, None] & inside_S[None, :], other=0.0)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    if HAS_PAST:
        top = tl.load(lse_ptr + token * heads + head, mask=valid, other=float("-inf"))
        total = tl.where(top > float("-inf"), 1.0, 0.0)
        past_ptrs = past_ptr + token[:, None] * past_T + head * past_H + value[None, :] * past_V
        acc = tl.load(past_ptrs, mask=valid[:, None] & inside_V[None, :], other=0.0).to(tl.float32)
    expanded = nope + value_dim  # expanded is [T, H, nope + V]
    for j in range(0, tl.minimum(first + BLOCK_M, length), BLOCK_N):
        key = j + tl.arange(0, BLOCK_N)
        held = (key < length)[:, None]
        key_token = (start + key).to(tl.int64)[:, None]
        key_ptrs = expanded_ptr + (key_token * heads + head) * expanded
        k = tl.load(key_ptrs + channel[None, :], mask=held & inside_K[None, :], other=0.0)
        shared_ptrs = latent_ptr + key_token * latent_T + (rank + shared[None, :]) * latent_C
        k_shared = tl.load(shared_ptrs, mask=held & inside_S[None, :], other=0.0)
        v = tl.load(key_ptrs + nope + value[None, :], mask=held & inside_V[None, :], other=0.0)
        scores = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32), PRECISION)
        scores = dot(q_shared, tl.trans(k_shared.to(q.dtype)), scores, PRECISION)
        # The first tile holds a key that each row sees, so the largest score is finite from then on.
        scores = tl.where(key[None, :] <= row[:, None], scores * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        kept = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * kept + tl.sum(weights, axis=1)
        acc = dot(weights.to(q.dtype), v, acc * kept[:, None], PRECISION)
        top = new_top
    acc = acc / total[:, None]
    out_ptrs = out_ptr + token[:, None] * out_T + (first_head + head) * out_H + value[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=valid[:, None] & inside_V[None, :])


def _tile(dtype: torch.dtype, target: str) -> tuple[int, int]:
    """Rows and keys of a `_latent_kernel` program at rank 512: what its shared memory holds."""
    if is_amd(target) or dtype == torch.float32:
        return 16, 16
    return 32, 32


def _has_kernel(*tensors: Tensor) -> bool:
    return {t.dtype for t in tensors} <= set(DTYPES)


def mla_decode(
    q: Tensor, latent_pool: Tensor, block_tables: Tensor, kv_lens: Tensor, scale: float, value_dim: int
) -> Tensor:
    if not _has_kernel(q, latent_pool):
        return torch.ops.kimi_k3.mla_decode.reference(q, latent_pool, block_tables, kv_lens, scale, value_dim)
    (count, heads, width), page = q.shape, latent_pool.shape[1]
    out = torch.empty((count, heads, value_dim), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    target = target_of(q.device)
    (rows, keys), precision = _tile(q.dtype, target), dot_precision(q.dtype, target)
    blocks = count * triton.cdiv(heads, rows)
    # From the tables' width alone: the lengths are on the device.
    splits = max(1, min(triton.cdiv(block_tables.shape[1] * page, SPLIT_TOKENS), PROGRAMS // blocks))
    parts = torch.empty((count, heads, splits, value_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((count, heads, splits), dtype=torch.float32, device=q.device)
    block_r, kv_lens = block_of(value_dim), indices(kv_lens)
    with torch.cuda.device_of(q):
        _latent_kernel[(blocks, splits)](
            parts, lse, q, latent_pool, block_tables, kv_lens, kv_lens, scale * LOG2_E, count, 0, heads, value_dim, width,
            page, block_tables.shape[1], latent_pool.shape[0], splits, *q.stride(), *latent_pool.stride(),
            *block_tables.stride(), BLOCK_M=rows, BLOCK_N=keys, BLOCK_R=block_r, BLOCK_S=block_of(width - value_dim),
            DECODE=True, PRECISION=precision, num_warps=8, num_stages=2,
        )  # fmt: skip
        _merge_kernel[(count * heads,)](out, parts, lse, splits, value_dim, BLOCK_R=block_r, num_warps=4)
    return out


def _earlier_tokens(
    q: Tensor, weight_HOR: Tensor, nope: int, latent_pool: Tensor, block_tables: Tensor, past_lens: Tensor,
    cu_seqlens: Tensor, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the tokens in the pool give to each new one: [T, H, V], and the logarithm of their weights' sum, [T, H]."""
    (tokens, heads, width_q), rank, page = q.shape, weight_HOR.shape[2], latent_pool.shape[1]
    absorbed_THR = torch.einsum("thn,hnr->thr", q[..., :nope], weight_HOR[:, :nope])
    queries = torch.cat([absorbed_THR, q[..., nope:]], dim=-1)
    context_THR = torch.empty((tokens, heads, rank), dtype=q.dtype, device=q.device)
    lse_TH = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    target = target_of(q.device)
    rows, keys = _tile(q.dtype, target)
    count = past_lens.shape[0]
    _latent_kernel[(num_places(tokens * heads, rows, count), 1)](
        context_THR, lse_TH, queries, latent_pool, block_tables, past_lens, cu_seqlens, scale * LOG2_E, count,
        search_steps(count), heads, rank, rank + width_q - nope, page, block_tables.shape[1], latent_pool.shape[0], 1,
        *queries.stride(), *latent_pool.stride(), *block_tables.stride(), BLOCK_M=rows, BLOCK_N=keys,
        BLOCK_R=block_of(rank), BLOCK_S=block_of(width_q - nope), DECODE=False, PRECISION=dot_precision(q.dtype, target), num_warps=8, num_stages=2,
    )  # fmt: skip
    return torch.einsum("thr,hvr->thv", context_THR, weight_HOR[:, nope:]), lse_TH


def mla_prefill(
    q: Tensor, latent: Tensor, kv_b_weight: Tensor, latent_pool: Tensor, block_tables: Tensor, past_lens: Tensor,
    cu_seqlens: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    if not _has_kernel(q, latent, kv_b_weight, latent_pool):
        return torch.ops.kimi_k3.mla_prefill.reference(
            q, latent, kv_b_weight, latent_pool, block_tables, past_lens, cu_seqlens, scale
        )
    (tokens, heads, width_q), rank, count = q.shape, kv_b_weight.shape[1], past_lens.shape[0]
    shared = latent.shape[1] - rank
    nope = width_q - shared
    weight_HOR = kv_b_weight.to(q.dtype).view(heads, -1, rank)
    value_dim = weight_HOR.shape[1] - nope
    out = torch.empty((tokens, heads, value_dim), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    past_lens, cu_seqlens = indices(past_lens), indices(cu_seqlens)
    has_past = latent_pool.shape[0] > 0 and block_tables.shape[1] > 0
    group = max(1, min(heads, WORKSPACE_BYTES // (tokens * 2 * (rank + width_q) * q.element_size())))
    precision = dot_precision(q.dtype, target_of(q.device))
    rows, keys = (32, 32) if q.dtype == torch.float32 else (64, 64)
    with torch.cuda.device_of(q):
        for first in range(0, heads, group):
            part = slice(first, min(first + group, heads))
            q_part, weight_part = q[:, part], weight_HOR[part]
            size = q_part.shape[1]
            expanded = latent[:, :rank].to(q.dtype) @ weight_part.flatten(0, 1).t()
            past, lse = expanded.view(tokens, size, -1), expanded  # not read without a past
            if has_past:
                past, lse = _earlier_tokens(
                    q_part, weight_part, nope, latent_pool, block_tables, past_lens, cu_seqlens, scale
                )
            _new_tokens_kernel[(num_places(tokens, rows, count), size)](
                out, q_part, expanded, latent, past, lse, cu_seqlens, scale * LOG2_E, count, search_steps(count), size,
                first, nope, shared, value_dim, rank, *q.stride(), *latent.stride(), *past.stride(), *out.stride()[:2],
                BLOCK_M=rows, BLOCK_N=keys, BLOCK_K=block_of(nope), BLOCK_S=block_of(shared),
                BLOCK_V=block_of(value_dim), HAS_PAST=has_past, PRECISION=precision, num_warps=4, num_stages=2,
            )  # fmt: skip
    return out
