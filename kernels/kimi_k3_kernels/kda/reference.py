"""Kimi Delta Attention in plain PyTorch: the token recurrence, and the chunk form with its gradient.

    S' = diag(exp(g_t)) S_{t-1},   u_t = beta_t (v_t - S'^T k_t),   S_t = S' + k_t u_t^T,   o_t = S_t^T q_t

Inside a chunk, with G the inclusive cumulative sum of g from the chunk's first token:

    A_ij = k_i . (exp(G_i - G_j) k_j) for i > j,   B_ij = q_i . (exp(G_i - G_j) k_j) for i >= j
    R = (I + diag(beta) A)^-1 diag(beta) (V - (exp(G) K) S_in),   O = (exp(G) Q) S_in + B R
    S_out = diag(exp(G_C)) S_in + (exp(G_C - G) K)^T R

Every exponent is a difference of log-decays and never positive, so no decay can overflow; R is found by forward
substitution, because products of the inverse lose all accuracy at K3's decays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k3_kernels.library import compute_dtype
from kimi_k3_kernels.short_conv.reference import read_pool_rows, write_pool_rows

CHUNK = 64
TILE = 16
# Elements of the [tiles, 16, 16, K] decay differences held at once: they stay in cache, and a long prompt's are bounded.
TILE_ELEMENTS = 1 << 20


def kda_recurrent_reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state_NHKV: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token: the definition. q, k, log_decay [T, H, K], v [T, H, V], beta [T, H] -> o [T, H, V], states."""
    compute = compute_dtype(q)
    states, outputs = [], []
    for n, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist())):
        state_HKV = state_NHKV[n].to(compute)
        for t in range(start, end):
            k_HK, state_HKV = k[t].to(compute), state_HKV * log_decay[t].to(compute).exp()[..., None]
            seen_HV = torch.einsum("hkv,hk->hv", state_HKV, k_HK)
            update_HV = beta[t].to(compute)[:, None] * (v[t].to(compute) - seen_HV)
            state_HKV = state_HKV + k_HK[..., None] * update_HV[:, None, :]
            outputs.append(torch.einsum("hkv,hk->hv", state_HKV, q[t].to(compute)).to(v.dtype))
        states.append(state_HKV)
    o = torch.stack(outputs) if outputs else v.new_zeros(v.shape)
    return o, torch.stack(states) if states else state_NHKV.to(compute)


def kda_step_reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    state_pool: Tensor, read_slots: Tensor, write_slots: Tensor,
) -> Tensor:  # fmt: skip
    """One token for each sequence, through its slot of the pool."""
    state_NHKV = read_pool_rows(state_pool, read_slots).to(compute_dtype(q))
    o_NHV = _step(q, k, v, log_decay, beta, state_NHKV)
    write_pool_rows(state_pool, write_slots, state_NHKV)
    return o_NHV


def _step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state_NHKV: Tensor) -> Tensor:
    """One token for each state, which it brings up to date."""
    compute = state_NHKV.dtype
    state_NHKV.mul_(log_decay.to(compute).exp()[..., None])
    k_NHK = k.to(compute)
    seen_NHV = (k_NHK[:, :, None] @ state_NHKV)[:, :, 0]
    update_NHV = beta.to(compute)[..., None] * (v.to(compute) - seen_NHV)
    state_NHKV.addcmul_(k_NHK[..., None], update_NHV[:, :, None, :])
    return (q.to(compute)[:, :, None] @ state_NHKV)[:, :, 0].to(v.dtype)


def kda_recurrent_pool_reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    state_pool: Tensor, read_slots: Tensor, write_slots: Tensor, cu_seqlens: Tensor,
) -> Tensor:  # fmt: skip
    none = cu_seqlens[:0]
    return kda_recurrent_pool_export_reference(
        q, k, v, log_decay, beta, state_pool, read_slots, write_slots, cu_seqlens, none, none
    )


def kda_recurrent_pool_export_reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    state_pool: Tensor, read_slots: Tensor, write_slots: Tensor, cu_seqlens: Tensor,
    export_at: Tensor, export_slots: Tensor,
) -> Tensor:  # fmt: skip
    """Every token by itself, so that its products have the same shapes in any company."""
    state_NHKV = read_pool_rows(state_pool, read_slots).to(compute_dtype(q))
    exports: dict[int, list[int]] = {}
    for at, slot in zip(export_at.tolist(), export_slots.tolist()):
        if not 1 <= at <= q.shape[0]:
            raise ValueError(f"kda_recurrent_export: want export_at in 1..{q.shape[0]}, got {at}")
        exports.setdefault(at, []).append(slot)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    bounds = cu_seqlens.tolist()
    for n in range(len(bounds) - 1):
        state = state_NHKV[n : n + 1]
        for t in range(bounds[n], bounds[n + 1]):
            row = slice(t, t + 1)
            o[row] = _step(q[row], k[row], v[row], log_decay[row], beta[row], state)
            for slot in exports.get(t + 1, ()):
                if slot >= 0:
                    state_pool[slot] = state[0].to(state_pool.dtype)
    write_pool_rows(state_pool, write_slots, state_NHKV)
    return o


@dataclass
class _Chunks:
    """Packed tokens as equal chunks [X, H, C, ...], in rounds: round r holds the r-th chunk of every long enough sequence.

    Padding has k = v = q = beta = log_decay = 0, which leaves a state as it is.
    """

    rows: Tensor  # [X, C]: the packed row of each place; T for padding
    round_sizes: list[int]  # sequences are sorted longest first, so each round's are a prefix of the last one's
    order: Tensor  # the sequences in that order


def _make_chunks(cu_seqlens: Tensor, num_tokens: int) -> _Chunks:
    lengths = cu_seqlens.diff().long()
    order = torch.argsort(lengths, descending=True, stable=True)
    starts, lengths = cu_seqlens[:-1].long()[order], lengths[order]
    counts = (lengths + CHUNK - 1) // CHUNK
    round_sizes = [int((counts > r).sum()) for r in range(int(counts.max()) if counts.numel() else 0)]
    places = torch.arange(CHUNK, device=cu_seqlens.device)
    rows = []
    for r, size in enumerate(round_sizes):
        offsets_C = r * CHUNK + places
        rows.append(torch.where(offsets_C < lengths[:size, None], starts[:size, None] + offsets_C, num_tokens))
    rows_XC = torch.cat(rows) if rows else places.new_empty((0, CHUNK))
    return _Chunks(rows_XC, round_sizes, order)


def _gather(x_T: Tensor, rows_XC: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, H, ...] -> [X, H, C, ...] with zeros at padding."""
    padded = torch.cat([x_T.to(dtype), x_T.new_zeros((1, *x_T.shape[1:]), dtype=dtype)])
    return padded[rows_XC].transpose(1, 2).contiguous()


def _scatter(x_XHC: Tensor, rows_XC: Tensor, num_tokens: int) -> Tensor:
    out = x_XHC.new_empty((num_tokens + 1, x_XHC.shape[1], *x_XHC.shape[3:]))
    out[rows_XC.flatten()] = x_XHC.transpose(1, 2).flatten(0, 1)
    return out[:num_tokens]


def _groups(num_chunks: int, elements_a_chunk: int) -> Iterator[slice]:
    size = max(1, TILE_ELEMENTS // max(1, elements_a_chunk))
    return (slice(start, min(start + size, num_chunks)) for start in range(0, num_chunks, size))


def _tile_decays(cumulative_XHCK: Tensor) -> Tensor:
    """exp(G_i - G_j) inside each 16-token tile, [X, H, C / 16, 16 i, 16 j, K], zero above the diagonal."""
    tiles = cumulative_XHCK.unflatten(2, (CHUNK // TILE, TILE))
    differences = tiles[:, :, :, :, None] - tiles[:, :, :, None, :]
    above = torch.ones(TILE, TILE, dtype=torch.bool, device=tiles.device).triu(1)
    return differences.masked_fill_(above[..., None], -torch.inf).exp_()


def _decayed_products(q: Tensor, k: Tensor, cumulative: Tensor) -> tuple[Tensor, Tensor]:
    """A (strictly lower) and B (lower), [X, H, C, C], from [X, H, C, K]."""
    num_tiles = CHUNK // TILE
    both = q.new_zeros((2, *k.shape[:2], CHUNK, CHUNK))
    k_tiles, q_tiles = k.unflatten(2, (num_tiles, TILE)), q.unflatten(2, (num_tiles, TILE))
    decayed_k = _tile_decays(cumulative).mul_(k_tiles[:, :, :, None])  # [.., i, j, K]
    rows = torch.stack([k_tiles, q_tiles], dim=-1)  # [.., i, K, 2]
    inside = torch.matmul(decayed_k, rows)  # [X, H, tile, i, j, 2]
    for tile in range(num_tiles):
        span = slice(tile * TILE, (tile + 1) * TILE)
        both[:, :, :, span, span] = inside[:, :, tile].permute(4, 0, 1, 2, 3)
        if tile:
            # Both exponents are <= 0: from the tile's first token to row i, and from column j to the tile's first token.
            edge = cumulative[:, :, tile * TILE - 1, None]
            to_rows = (cumulative[:, :, span] - edge).exp()
            earlier = k[:, :, : span.start] * (edge - cumulative[:, :, : span.start]).exp()
            both[0, :, :, span, : span.start] = (k[:, :, span] * to_rows) @ earlier.mT
            both[1, :, :, span, : span.start] = (q[:, :, span] * to_rows) @ earlier.mT
    return both[0].tril_(-1), both[1].tril_()


def _decayed_products_backward(
    q: Tensor, k: Tensor, cumulative: Tensor, grad_A: Tensor, grad_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and G through `_decayed_products`; grad_A and grad_B are zero where A and B are."""
    num_tiles = CHUNK // TILE
    k_tiles, q_tiles = k.unflatten(2, (num_tiles, TILE)), q.unflatten(2, (num_tiles, TILE))
    decays = _tile_decays(cumulative)  # [X, H, tile, i, j, K]
    inside = torch.stack(
        [
            torch.stack([grad[:, :, t * TILE : (t + 1) * TILE, t * TILE : (t + 1) * TILE] for t in range(num_tiles)], 2)
            for grad in (grad_A, grad_B)
        ],
        dim=-2,
    )  # [X, H, tile, i, 2, j]
    row_parts = torch.matmul(inside, decays * k_tiles[:, :, :, None])  # [X, H, tile, i, 2, K]
    rows_k, rows_q = row_parts[..., 0, :].flatten(2, 3), row_parts[..., 1, :].flatten(2, 3)
    columns_from = torch.stack([k_tiles, q_tiles], dim=-2)  # [.., i, 2, K]
    columns = torch.einsum("xhtisj,xhtisk,xhtijk->xhtjk", inside, columns_from, decays).flatten(2, 3).contiguous()
    for tile in range(1, num_tiles):
        span, before = slice(tile * TILE, (tile + 1) * TILE), slice(0, tile * TILE)
        edge = cumulative[:, :, tile * TILE - 1, None]
        to_rows, from_columns = (cumulative[:, :, span] - edge).exp(), (edge - cumulative[:, :, before]).exp()
        earlier = k[:, :, before] * from_columns
        rows_k[:, :, span] += to_rows * (grad_A[:, :, span, before] @ earlier)
        rows_q[:, :, span] += to_rows * (grad_B[:, :, span, before] @ earlier)
        from_k = grad_A[:, :, span, before].mT @ (k[:, :, span] * to_rows)
        from_q = grad_B[:, :, span, before].mT @ (q[:, :, span] * to_rows)
        columns[:, :, before] += from_columns * (from_k + from_q)
    grad_cumulative = k * rows_k + q * rows_q - k * columns
    return rows_q, rows_k + columns, grad_cumulative


@dataclass
class _Prepared:
    """What the scan over chunks needs, each [X, H, C, ...] in the compute dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    cumulative: Tensor
    A: Tensor
    B: Tensor

    @property
    def decayed_q(self) -> Tensor:
        return self.q * self.cumulative.exp()

    @property
    def decayed_k(self) -> Tensor:
        return self.k * self.cumulative.exp()

    @property
    def k_to_end(self) -> Tensor:
        return self.k * (self.cumulative[:, :, -1:] - self.cumulative).exp()

    @property
    def end_decay(self) -> Tensor:
        return self.cumulative[:, :, -1].exp()[..., None]

    def solve(self, right: Tensor) -> Tensor:
        """(I + diag(beta) A)^-1 right, by forward substitution; the diagonal of ones is implied."""
        return torch.linalg.solve_triangular(self.beta[..., None] * self.A, right, upper=False, unitriangular=True)

    def solve_transposed(self, right: Tensor) -> Tensor:
        return torch.linalg.solve_triangular((self.beta[..., None] * self.A).mT, right, upper=True, unitriangular=True)


def _prepare(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunks: _Chunks) -> _Prepared:
    compute = compute_dtype(q)
    q, k, v, log_decay = (_gather(x, chunks.rows, compute) for x in (q, k, v, log_decay))
    beta = _gather(beta, chunks.rows, compute)
    cumulative = log_decay.cumsum(2)
    A, B = q.new_empty((*q.shape[:3], CHUNK)), q.new_empty((*q.shape[:3], CHUNK))
    for group in _groups(q.shape[0], q[0].numel() * TILE if q.shape[0] else 0):
        A[group], B[group] = _decayed_products(q[group], k[group], cumulative[group])
    return _Prepared(q, k, v, beta, cumulative, A, B)


def _scan(prepared: _Prepared, chunks: _Chunks, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the chunks in order. `state` [N, H, K, V] in `chunks.order` becomes the final one, in place.

    Returns: o and R [X, H, C, V], the states before each chunk [X, H, K, V], and `state`.
    """
    solved = prepared.solve(prepared.beta[..., None] * torch.cat([prepared.v, prepared.decayed_k], dim=-1))
    value_part, key_part = solved.split([prepared.v.shape[-1], prepared.k.shape[-1]], dim=-1)
    k_to_end, end_decay = prepared.k_to_end, prepared.end_decay
    start, entered, updates = 0, [], []
    for size in chunks.round_sizes:
        part, start = slice(start, start + size), start + size
        current = state[:size].clone()
        update = value_part[part] - key_part[part] @ current
        state[:size] = end_decay[part] * current + k_to_end[part].mT @ update
        entered.append(current)
        updates.append(update)
    if not updates:
        return prepared.v, prepared.v, state[:0], state
    entered_XHKV, update_XHCV = torch.cat(entered), torch.cat(updates)
    o = prepared.decayed_q @ entered_XHKV + prepared.B @ update_XHCV
    return o, update_XHCV, entered_XHKV, state


def _run_chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state_NHKV: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """The chunk form over packed sequences: o [T, H, V] in v's dtype and the states after the last tokens."""
    chunks = _make_chunks(cu_seqlens, q.shape[0])
    prepared = _prepare(q, k, v, log_decay, beta, chunks)
    o_XHCV, _, _, ordered = _scan(prepared, chunks, state_NHKV.to(prepared.q.dtype)[chunks.order])
    state = torch.empty_like(ordered)
    state[chunks.order] = ordered
    return _scatter(o_XHCV, chunks.rows, q.shape[0]).to(v.dtype), state


def kda_chunk_reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    state_pool: Tensor, read_slots: Tensor, write_slots: Tensor, cu_seqlens: Tensor,
) -> Tensor:  # fmt: skip
    state = read_pool_rows(state_pool, read_slots)
    o, state = _run_chunks(q, k, v, log_decay, beta, state, cu_seqlens)
    write_pool_rows(state_pool, write_slots, state)
    return o


def kda_chunk_export_reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    state_pool: Tensor, read_slots: Tensor, write_slots: Tensor, cu_seqlens: Tensor,
    export_at: Tensor, export_slots: Tensor,
) -> Tensor:  # fmt: skip
    """Each sequence in pieces that end at its export positions; piece p of all sequences runs together."""
    state = read_pool_rows(state_pool, read_slots).to(compute_dtype(q))
    exports = sorted(zip(export_at.tolist(), export_slots.tolist()))
    bounds = list(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()))
    cuts = [[e for e in exports if start < e[0] <= end] for start, end in bounds]
    if sum(map(len, cuts)) != len(exports):
        raise ValueError(f"kda_chunk_export: want export_at in 1..{q.shape[0]}, got {export_at.tolist()}")
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    done = [start for start, _ in bounds]
    for piece in range(max((len(c) for c in cuts), default=0) + 1):
        pieces = []
        for n, (_, end) in enumerate(bounds):
            until = cuts[n][piece][0] if piece < len(cuts[n]) else end
            pieces.append((n, done[n], until))
            done[n] = until
        rows = torch.cat([torch.arange(a, b, device=q.device) for _, a, b in pieces])
        lengths = torch.tensor([0] + [b - a for _, a, b in pieces], device=q.device)
        o[rows], state = _run_chunks(q[rows], k[rows], v[rows], log_decay[rows], beta[rows], state, lengths.cumsum(0))
        for n, cut in enumerate(cuts):
            if piece < len(cut) and cut[piece][1] >= 0:
                state_pool[cut[piece][1]] = state[n].to(state_pool.dtype)
    write_pool_rows(state_pool, write_slots, state)
    return o


def kda_chunk_backward_reference(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_decay and beta; `state` [N, H, K, V] before the first tokens is a constant."""
    chunks = _make_chunks(cu_seqlens, q.shape[0])
    p = _prepare(q, k, v, log_decay, beta, chunks)
    _, update, entered, _ = _scan(p, chunks, state.to(p.q.dtype)[chunks.order])
    grad_o = _gather(grad, chunks.rows, p.q.dtype)
    decayed_q, decayed_k, k_to_end, end_decay = p.decayed_q, p.decayed_k, p.k_to_end, p.end_decay
    grad_state = p.q.new_zeros((len(chunks.order), *entered.shape[1:]))
    grad_update, grad_state_out = p.B.mT @ grad_o, torch.empty_like(entered)
    grad_right = torch.empty_like(update)
    end = sum(chunks.round_sizes)
    for size in reversed(chunks.round_sizes):
        part, end = slice(end - size, end), end - size
        grad_state_out[part] = grad_state[:size]
        # R and S_out = diag(exp(G_C)) S_in + k_to_end^T R
        total = grad_update[part] + k_to_end[part] @ grad_state[:size]
        beta_part = p.beta[part, :, :, None]
        grad_right[part] = torch.linalg.solve_triangular(
            (beta_part * p.A[part]).mT, total, upper=True, unitriangular=True
        )
        grad_state[:size] = (
            decayed_q[part].mT @ grad_o[part]
            + end_decay[part] * grad_state[:size]
            - decayed_k[part].mT @ (beta_part * grad_right[part])
        )
    # right = beta (V - decayed_k S_in), (I + diag(beta) A) R = right
    grad_system = -(grad_right @ update.mT).tril(-1)
    grad_beta = (grad_system * p.A).sum(-1) + (grad_right * (p.v - decayed_k @ entered)).sum(-1)
    grad_v = p.beta[..., None] * grad_right
    grad_A, grad_B = p.beta[..., None] * grad_system, (grad_o @ update.mT).tril()
    grad_decayed_q, grad_decayed_k = grad_o @ entered.mT, -grad_v @ entered.mT
    grad_k_to_end = update @ grad_state_out.mT
    grad_q, grad_k, grad_G = torch.empty_like(p.q), torch.empty_like(p.k), torch.empty_like(p.cumulative)
    for group in _groups(p.q.shape[0], 2 * p.q[0].numel() * TILE if p.q.shape[0] else 0):
        grad_q[group], grad_k[group], grad_G[group] = _decayed_products_backward(
            p.q[group], p.k[group], p.cumulative[group], grad_A[group], grad_B[group]
        )
    decays = p.cumulative.exp()
    grad_q += decays * grad_decayed_q
    grad_k += decays * grad_decayed_k + (p.cumulative[:, :, -1:] - p.cumulative).exp() * grad_k_to_end
    through_end = k_to_end * grad_k_to_end
    grad_G += decayed_q * grad_decayed_q + decayed_k * grad_decayed_k - through_end
    grad_G[:, :, -1] += through_end.sum(2) + (end_decay * entered * grad_state_out).sum(-1)
    grad_log_decay = grad_G.flip(2).cumsum(2).flip(2)
    rows, tokens = chunks.rows, q.shape[0]
    return (
        _scatter(grad_q, rows, tokens).to(q.dtype),
        _scatter(grad_k, rows, tokens).to(k.dtype),
        _scatter(grad_v, rows, tokens).to(v.dtype),
        _scatter(grad_log_decay, rows, tokens).to(log_decay.dtype),
        _scatter(grad_beta, rows, tokens).to(beta.dtype),
    )
