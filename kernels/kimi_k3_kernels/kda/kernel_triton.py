"""KDA on a GPU: the equations of reference.py, in chunks of 64 tokens and tiles of 16.

`_solve_kernel` runs for all chunks at once and leaves, for each token, the parts of R that do not need the state:
R = U - W S_in with U = (I + diag(beta) A)^-1 diag(beta) V and W = (I + diag(beta) A)^-1 diag(beta) exp(G) K. Each
16-token tile is inverted by forward substitution, and the tiles follow one another by forward substitution too.
`_scan_kernel` then carries the state from chunk to chunk: one program for each sequence, head and part of V.

Every exponent is a difference of log-decays that is not positive. Inside a tile it is taken pair by pair, between tiles
through the last token before the later one.
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
    num_places,
    only_if,
    search_steps,
    target_of,
)
from kimi_k3_kernels.short_conv.kernel_triton import copy_overwritten

CHUNK = 64
TILE = 16
# Of W, U, G and B, float32. Longer prompts run a group of heads at a time.
WORKSPACE_BYTES = 1 << 30


@triton.jit
def _read_state(
    copies_ptr, copied_ptr, pool_ptr, read_ptr, n, head, num_slots, num_heads, key_dim, value_dim, key, value, inside,
    pool_S, pool_H, pool_K, pool_V,
):  # fmt: skip
    """[K, V] float32 of sequence n: from its copy, its slot, or zeros."""
    slot = tl.load(read_ptr + n).to(tl.int64)
    is_copied = tl.load(copied_ptr + n) != 0
    is_stored = (slot >= 0) & (slot < num_slots) & (is_copied == 0)
    copy_ptr = copies_ptr + ((n * num_heads + head) * key_dim + key[:, None]) * value_dim + value[None, :]
    slot_ptr = pool_ptr + slot * pool_S + head * pool_H + key[:, None] * pool_K + value[None, :] * pool_V
    from_copy = tl.load(copy_ptr, mask=only_if(inside, is_copied), other=0.0).to(tl.float32)
    from_slot = tl.load(slot_ptr, mask=only_if(inside, is_stored), other=0.0).to(tl.float32)
    return tl.where(is_copied, from_copy, from_slot)


@triton.jit
def _write_state(
    state, pool_ptr, slot, head, num_slots, key, value, inside, pool_S, pool_H, pool_K, pool_V
):  # fmt: skip
    to = pool_ptr + slot * pool_S + head * pool_H + key[:, None] * pool_K + value[None, :] * pool_V
    tl.store(to, state.to(pool_ptr.dtype.element_ty), mask=only_if(inside, (slot >= 0) & (slot < num_slots)))


@triton.jit
def _step_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, pool_ptr, read_ptr, write_ptr, copies_ptr, copied_ptr,
    num_slots, num_heads, key_dim, value_dim,
    q_T, q_H, q_K, k_T, k_H, k_K, v_T, v_H, v_V, decay_T, decay_H, decay_K, beta_T, beta_H,
    pool_S, pool_H, pool_K, pool_V, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_K, inside_V = key < key_dim, value < value_dim
    inside = inside_K[:, None] & inside_V[None, :]
    state = _read_state(
        copies_ptr, copied_ptr, pool_ptr, read_ptr, n, head, num_slots, num_heads, key_dim, value_dim, key, value,
        inside, pool_S, pool_H, pool_K, pool_V,
    )  # fmt: skip
    q = tl.load(q_ptr + n * q_T + head * q_H + key * q_K, mask=inside_K, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + n * k_T + head * k_H + key * k_K, mask=inside_K, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + n * v_T + head * v_H + value * v_V, mask=inside_V, other=0.0).to(tl.float32)
    decay = tl.load(decay_ptr + n * decay_T + head * decay_H + key * decay_K, mask=inside_K, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + n * beta_T + head * beta_H).to(tl.float32)
    state = state * tl.exp(decay)[:, None]
    update = beta * (v - tl.sum(state * k[:, None], axis=0))
    state = state + k[:, None] * update[None, :]
    out = tl.sum(state * q[:, None], axis=0)
    out_ptr += (n * num_heads + head) * value_dim + value
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=inside_V)
    slot = tl.load(write_ptr + n).to(tl.int64)
    _write_state(state, pool_ptr, slot, head, num_slots, key, value, inside, pool_S, pool_H, pool_K, pool_V)


@triton.jit
def _invert_tile(system, TILE: tl.constexpr):
    """(I + system)^-1 of a strictly lower [16, 16], row after row."""
    index = tl.arange(0, TILE)
    inverse = (index[:, None] == index[None, :]).to(tl.float32)
    for i in range(1, TILE):
        row = tl.sum(tl.where((index == i)[:, None], system, 0.0), axis=0)
        known = tl.sum(row[:, None] * inverse, axis=0)
        inverse = tl.where((index == i)[:, None], inverse - known[None, :], inverse)
    return inverse


@triton.jit
def _solve_kernel(
    w_ptr, u_ptr, cumulative_ptr, b_ptr, q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, cu_ptr,
    num_sequences, steps, num_heads, key_dim, value_dim,
    q_T, q_H, q_K, k_T, k_H, k_K, v_T, v_H, v_V, decay_T, decay_H, decay_K, beta_T, beta_H,
    CHUNK: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    SOLVE: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    n = find_sequence(cu_ptr, place, num_sequences, steps, CHUNK, 1, 1)
    start = tl.load(cu_ptr + n).to(tl.int32)
    first = (place - start // CHUNK - n) * CHUNK
    length = tl.load(cu_ptr + n + 1).to(tl.int32) - start - first
    if length <= 0:
        return
    token = start.to(tl.int64) + first  # the packed row of the chunk's first token

    index, key, value = tl.arange(0, TILE), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    inside_K, inside_V = (key < key_dim)[None, :], (value < value_dim)[None, :]
    q_ptr += token * q_T + head * q_H
    k_ptr += token * k_T + head * k_H
    v_ptr += token * v_T + head * v_H
    decay_ptr += token * decay_T + head * decay_H
    beta_ptr += token * beta_T + head * beta_H
    # The workspaces are [T, H, ..].
    w_ptr += (token * num_heads + head) * key_dim
    cumulative_ptr += (token * num_heads + head) * key_dim
    u_ptr += (token * num_heads + head) * value_dim
    b_ptr += (token * num_heads + head) * CHUNK

    edge = tl.zeros((BLOCK_K,), tl.float32)  # G of the token before the tile
    for i in range(0, tl.minimum(length, CHUNK), TILE):
        rows = (i + index).to(tl.int64)
        inside_T = (rows < length)[:, None]
        inside_TK, inside_TV = inside_T & inside_K, inside_T & inside_V
        q = tl.load(q_ptr + rows[:, None] * q_T + key[None, :] * q_K, mask=inside_TK, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + rows[:, None] * k_T + key[None, :] * k_K, mask=inside_TK, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + rows[:, None] * v_T + value[None, :] * v_V, mask=inside_TV, other=0.0).to(tl.float32)
        decay = tl.load(decay_ptr + rows[:, None] * decay_T + key[None, :] * decay_K, mask=inside_TK, other=0.0)
        beta = tl.load(beta_ptr + rows * beta_T, mask=rows < length, other=0.0).to(tl.float32)
        inner = tl.cumsum(decay.to(tl.float32), axis=0)  # from the edge; padding adds nothing
        cumulative = edge[None, :] + inner
        own = rows[:, None] * num_heads
        tl.store(cumulative_ptr + own * key_dim + key[None, :], cumulative, mask=inside_TK)
        tl.debug_barrier()  # rows of G, W and U are read again by other threads

        # A and B inside the tile, one column at a time.
        A = tl.zeros((TILE, TILE), tl.float32)
        B = tl.zeros((TILE, TILE), tl.float32)
        for j in range(tl.minimum(length - i, TILE)):
            column = i + j + tl.zeros((1,), tl.int64)
            inside_column = key < key_dim
            k_j = tl.load(k_ptr + column * k_T + key * k_K, mask=inside_column, other=0.0).to(tl.float32)
            G_j = tl.load(cumulative_ptr + column * num_heads * key_dim + key, mask=inside_column, other=0.0)
            decayed = k_j[None, :] * tl.exp(tl.minimum(cumulative - G_j[None, :], 0.0))
            here = index[None, :] == j
            A = tl.where(here & (index[:, None] > j), tl.sum(k * decayed, axis=1)[:, None], A)
            B = tl.where(here & (index[:, None] >= j), tl.sum(q * decayed, axis=1)[:, None], B)
        b_row_ptr = b_ptr + own * CHUNK
        tl.store(b_row_ptr + i + index[None, :], B, mask=inside_T)

        rest_w = beta[:, None] * k * tl.exp(cumulative)
        rest_u = beta[:, None] * v
        to_rows = tl.exp(inner)  # from the edge to each row
        for j in range(0, i, TILE):
            before = (j + index).to(tl.int64)
            k_j = tl.load(k_ptr + before[:, None] * k_T + key[None, :] * k_K, mask=inside_K, other=0.0).to(tl.float32)
            kept = before[:, None] * num_heads
            G_j = tl.load(cumulative_ptr + kept * key_dim + key[None, :], mask=inside_K, other=0.0)
            earlier = tl.trans(k_j * tl.exp(tl.minimum(edge[None, :] - G_j, 0.0)))
            zero = tl.zeros((TILE, TILE), tl.float32)
            B_j = dot(q * to_rows, earlier, zero, PRECISION)
            tl.store(b_row_ptr + j + index[None, :], B_j, mask=inside_T)
            A_j = beta[:, None] * dot(k * to_rows, earlier, zero, PRECISION)
            w_j = tl.load(w_ptr + kept * key_dim + key[None, :], mask=inside_K, other=0.0)
            u_j = tl.load(u_ptr + kept * value_dim + value[None, :], mask=inside_V, other=0.0)
            rest_w = dot(-A_j, w_j, rest_w, SOLVE)
            rest_u = dot(-A_j, u_j, rest_u, SOLVE)
        inverse = _invert_tile(beta[:, None] * A, TILE)
        w = dot(inverse, rest_w, tl.zeros((TILE, BLOCK_K), tl.float32), SOLVE)
        u = dot(inverse, rest_u, tl.zeros((TILE, BLOCK_V), tl.float32), SOLVE)
        tl.store(w_ptr + own * key_dim + key[None, :], w, mask=inside_TK)
        tl.store(u_ptr + own * value_dim + value[None, :], u, mask=inside_TV)
        edge += tl.sum(decay.to(tl.float32), axis=0)


@triton.jit
def _scan_kernel(
    out_ptr, w_ptr, u_ptr, cumulative_ptr, b_ptr, q_ptr, k_ptr, pool_ptr, read_ptr, write_ptr, copies_ptr, copied_ptr,
    cu_ptr, export_at_ptr, export_slots_ptr, num_exports, num_slots, num_heads, all_heads, first_head, key_dim, value_dim,
    q_T, q_H, q_K, k_T, k_H, k_K, out_T, out_H, pool_S, pool_H, pool_K, pool_V,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, EXPORT: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    pool_head = first_head + head
    index, key = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_K, inside_V = key < key_dim, value < value_dim
    inside = inside_K[:, None] & inside_V[None, :]
    state = _read_state(
        copies_ptr, copied_ptr, pool_ptr, read_ptr, n, pool_head, num_slots, all_heads, key_dim, value_dim, key, value,
        inside, pool_S, pool_H, pool_K, pool_V,
    )  # fmt: skip
    start = tl.load(cu_ptr + n).to(tl.int64)
    length = (tl.load(cu_ptr + n + 1).to(tl.int64) - start).to(tl.int32)
    for first in range(0, length, CHUNK):
        row = start + first + index
        valid = first + index < length
        valid_K, valid_V = valid[:, None] & inside_K[None, :], valid[:, None] & inside_V[None, :]
        own = row[:, None] * num_heads + head
        w = tl.load(w_ptr + own * key_dim + key[None, :], mask=valid_K, other=0.0)
        u = tl.load(u_ptr + own * value_dim + value[None, :], mask=valid_V, other=0.0)
        R = dot(-w, state, u, PRECISION)
        G = tl.load(cumulative_ptr + own * key_dim + key[None, :], mask=valid_K, other=0.0)
        q = tl.load(q_ptr + row[:, None] * q_T + head * q_H + key[None, :] * q_K, mask=valid_K, other=0.0)
        # Columns of B right of a tile are not written by `_solve_kernel`; they are zero.
        seen = (index[None, :] <= index[:, None]) & valid[:, None]
        B = tl.load(b_ptr + own * CHUNK + index[None, :], mask=seen, other=0.0)
        o = dot(q.to(tl.float32) * tl.exp(G), state, tl.zeros((CHUNK, BLOCK_V), tl.float32), PRECISION)
        o = dot(B, R, o, PRECISION)
        to = out_ptr + row[:, None] * out_T + head * out_H + value[None, :]
        tl.store(to, o.to(out_ptr.dtype.element_ty), mask=valid_V)

        k = tl.load(k_ptr + row[:, None] * k_T + head * k_H + key[None, :] * k_K, mask=valid_K, other=0.0)
        k = k.to(tl.float32)
        ran = tl.minimum(length - first, CHUNK)
        if EXPORT:
            for x in range(num_exports):
                at = (tl.load(export_at_ptr + x).to(tl.int64) - start - first).to(tl.int32)
                if (at > 0) & (at <= ran):
                    edge_row = (start + first + at - 1) * num_heads + head
                    edge = tl.load(cumulative_ptr + edge_row * key_dim + key, mask=inside_K, other=0.0)
                    decayed = k * tl.exp(tl.minimum(edge[None, :] - G, 0.0))
                    decayed = tl.where((index < at)[:, None], decayed, 0.0)
                    then = dot(tl.trans(decayed), R, state * tl.exp(edge)[:, None], PRECISION)
                    slot = tl.load(export_slots_ptr + x).to(tl.int64)
                    _write_state(
                        then, pool_ptr, slot, pool_head, num_slots, key, value, inside, pool_S, pool_H, pool_K, pool_V
                    )
        last_row = (start + first + ran - 1) * num_heads + head
        last = tl.load(cumulative_ptr + last_row * key_dim + key, mask=inside_K, other=0.0)
        decayed = k * tl.exp(tl.minimum(last[None, :] - G, 0.0))
        state = dot(tl.trans(decayed), R, state * tl.exp(last)[:, None], PRECISION)
    slot = tl.load(write_ptr + n).to(tl.int64)
    _write_state(state, pool_ptr, slot, pool_head, num_slots, key, value, inside, pool_S, pool_H, pool_K, pool_V)


def _has_kernel(q: Tensor, v: Tensor, state_pool: Tensor) -> bool:
    # 128 is what a program can hold; log_decay and beta are float32 wherever q is not float64.
    return {q.dtype, state_pool.dtype} <= set(DTYPES) and q.shape[2] <= 128 and v.shape[2] <= 128


def kda_step_(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    state_pool: Tensor, read_slots: Tensor, write_slots: Tensor,
) -> Tensor:  # fmt: skip
    if not _has_kernel(q, v, state_pool):
        return torch.ops.kimi_k3.kda_step_.reference(q, k, v, log_decay, beta, state_pool, read_slots, write_slots)
    (count, heads, key_dim), value_dim = q.shape, v.shape[2]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if out.numel() == 0:
        return out
    read_slots, write_slots = indices(read_slots), indices(write_slots)
    block_v = min(32, block_of(value_dim))
    with torch.cuda.device_of(q):
        copies, copied = copy_overwritten(state_pool, read_slots, write_slots)
        _step_kernel[(count, heads, triton.cdiv(value_dim, block_v))](
            out, q, k, v, log_decay, beta, state_pool, read_slots, write_slots, copies, copied, state_pool.shape[0], heads,
            key_dim, value_dim, *q.stride(), *k.stride(), *v.stride(), *log_decay.stride(), *beta.stride(),
            *state_pool.stride(), BLOCK_K=block_of(key_dim), BLOCK_V=block_v, num_warps=4,
        )  # fmt: skip
    return out


def _run_chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor, cu_seqlens: Tensor, export_at: Tensor | None, export_slots: Tensor | None,
) -> Tensor:  # fmt: skip
    (tokens, heads, key_dim), value_dim, count = q.shape, v.shape[2], read_slots.shape[0]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if count == 0 or heads == 0:
        return out
    target = target_of(q.device)
    precision = dot_precision(q.dtype, target)
    read_slots, write_slots, cu_seqlens = map(indices, (read_slots, write_slots, cu_seqlens))
    is_export = export_at is not None and export_slots is not None
    at, to = (read_slots, read_slots) if export_at is None or export_slots is None else (export_at, export_slots)
    at, to = indices(at), indices(to)
    num_exports = at.shape[0] if is_export else 0
    token_bytes = 4 * (2 * key_dim + value_dim + CHUNK) * max(tokens, 1)
    group = max(1, min(heads, WORKSPACE_BYTES // token_bytes))
    block_k, block_v = block_of(key_dim), block_of(value_dim)
    part_v = min(32, block_v)
    with torch.cuda.device_of(q):
        copies, copied = copy_overwritten(state_pool, read_slots, write_slots, to if is_export else None)
        w, cumulative, u, B = (
            torch.empty((tokens, group, width), dtype=torch.float32, device=q.device)
            for width in (key_dim, key_dim, value_dim, CHUNK)
        )
        for first in range(0, heads, group):
            size = min(group, heads - first)
            part = slice(first, first + size)
            q_part, k_part, v_part, decay_part = (x[:, part] for x in (q, k, v, log_decay))
            beta_part, out_part = beta[:, part], out[:, part]
            if tokens:
                _solve_kernel[(num_places(tokens, CHUNK, count), size)](
                    w, u, cumulative, B, q_part, k_part, v_part, decay_part, beta_part, cu_seqlens, count,
                    search_steps(count), size, key_dim, value_dim, *q.stride(), *k.stride(), *v.stride(),
                    *log_decay.stride(), *beta.stride(), CHUNK=CHUNK, TILE=TILE, BLOCK_K=block_k, BLOCK_V=block_v,
                    PRECISION=precision, SOLVE=dot_precision(torch.float32, target), num_warps=4,
                )  # fmt: skip
            _scan_kernel[(count, size, triton.cdiv(value_dim, part_v))](
                out_part, w, u, cumulative, B, q_part, k_part, state_pool, read_slots, write_slots, copies, copied,
                cu_seqlens, at, to, num_exports, state_pool.shape[0], size, heads, first, key_dim, value_dim, *q.stride(),
                *k.stride(), *out.stride()[:2], *state_pool.stride(), CHUNK=CHUNK, BLOCK_K=block_k, BLOCK_V=part_v,
                PRECISION=precision, EXPORT=is_export, num_warps=8, num_stages=1,
            )  # fmt: skip
    return out


def kda_chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    state_pool: Tensor, read_slots: Tensor, write_slots: Tensor, cu_seqlens: Tensor,
) -> Tensor:  # fmt: skip
    if not _has_kernel(q, v, state_pool):
        return torch.ops.kimi_k3.kda_chunk.reference(
            q, k, v, log_decay, beta, state_pool, read_slots, write_slots, cu_seqlens
        )
    return _run_chunks(q, k, v, log_decay, beta, state_pool, read_slots, write_slots, cu_seqlens, None, None)


def kda_chunk_export(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor, cu_seqlens: Tensor, export_at: Tensor, export_slots: Tensor,
) -> Tensor:  # fmt: skip
    """A position outside 1..T writes nothing: the reference refuses it, which would cost a wait for the device here."""
    if not _has_kernel(q, v, state_pool):
        return torch.ops.kimi_k3.kda_chunk_export.reference(
            q, k, v, log_decay, beta, state_pool, read_slots, write_slots, cu_seqlens, export_at, export_slots
        )
    return _run_chunks(
        q, k, v, log_decay, beta, state_pool, read_slots, write_slots, cu_seqlens, export_at, export_slots
    )
