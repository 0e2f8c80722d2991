"""Multi-head latent attention over paged latents in plain PyTorch: expanded for many tokens, absorbed for one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_kernels.library import compute_dtype

# Query rows and expanded key elements held at once: a long prompt costs memory in its length, not its square.
QUERY_TILE = 512
EXPANDED_ELEMENTS = 1 << 26
MASS_TOKENS = 4096  # whose scores `mla_block_mass_reference` holds at once


def gather_latents(latent_pool: Tensor, block_table: Tensor, length: int) -> Tensor:
    """The first `length` latents of one sequence, [length, R + rope]."""
    block = latent_pool.shape[1]
    return latent_pool[block_table[: -(-length // block)].long()].flatten(0, 1)[:length]


def _head_groups(num_heads: int, elements_a_head: int) -> Iterator[slice]:
    size = max(1, EXPANDED_ELEMENTS // max(1, elements_a_head))
    return (slice(start, min(start + size, num_heads)) for start in range(0, num_heads, size))


def _expand(latent_LR: Tensor, weight_HOR: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """Keys [H, L, nope + rope] and values [H, L, V] of some heads."""
    rank = weight_HOR.shape[2]
    expanded_HLO = torch.einsum("lr,hor->hlo", latent_LR[:, :rank], weight_HOR)
    shared_HLr = latent_LR[:, rank:].expand(weight_HOR.shape[0], -1, -1)
    return torch.cat([expanded_HLO[..., :nope], shared_HLr], dim=-1), expanded_HLO[..., nope:]


def _mask(rows: slice, past: int, num_keys: int, device: torch.device) -> Tensor:
    """True where query row i, at position past + i, may see key j."""
    positions = torch.arange(rows.start, rows.stop, device=device) + past
    return positions[:, None] >= torch.arange(num_keys, device=device)


def _tiles(num_rows: int) -> Iterator[slice]:
    return (slice(start, min(start + QUERY_TILE, num_rows)) for start in range(0, num_rows, QUERY_TILE))


def _sequences(
    latent: Tensor, latent_pool: Tensor, block_tables: Tensor, past_lens: Tensor, cu_seqlens: Tensor
) -> Iterator[tuple[slice, int, Tensor]]:
    """Of each sequence: its packed rows, the number of tokens before them, and all its latents, past and new."""
    bounds = cu_seqlens.tolist()
    for n, past in enumerate(past_lens.tolist()):
        rows = slice(bounds[n], bounds[n + 1])
        if rows.start == rows.stop:
            continue
        new = latent[rows]
        yield rows, past, torch.cat([gather_latents(latent_pool, block_tables[n], past), new]) if past else new


def mla_prefill_reference(
    q: Tensor, latent: Tensor, kv_b_weight: Tensor, latent_pool: Tensor, block_tables: Tensor, past_lens: Tensor,
    cu_seqlens: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    heads, rank = q.shape[1], kv_b_weight.shape[1]
    nope = q.shape[2] - (latent.shape[1] - rank)
    weight_HOR = kv_b_weight.view(heads, -1, rank)
    value_dim = weight_HOR.shape[1] - nope
    o = torch.empty((q.shape[0], heads, value_dim), dtype=q.dtype, device=q.device)
    for rows, past, latents in _sequences(latent, latent_pool, block_tables, past_lens, cu_seqlens):
        for group in _head_groups(heads, latents.shape[0] * (q.shape[2] + weight_HOR.shape[1])):
            keys, values = _expand(latents, weight_HOR[group], nope)
            # Equal widths keep torch on its tiled path; zero columns change nothing and are cut off again.
            padded_values = F.pad(values, (0, q.shape[2] - value_dim)) if value_dim < q.shape[2] else values
            queries = q[rows, group].transpose(0, 1)
            for tile in _tiles(queries.shape[1]):
                seen = past + tile.stop
                out = F.scaled_dot_product_attention(
                    queries[None, :, tile], keys[None, :, :seen], padded_values[None, :, :seen],
                    attn_mask=_mask(tile, past, seen, q.device), scale=scale,
                )  # fmt: skip
                o[rows.start + tile.start : rows.start + tile.stop, group] = out[0, ..., :value_dim].transpose(0, 1)
    return o


def mla_prefill_backward_reference(
    grad: Tensor, q: Tensor, latent: Tensor, kv_b_weight: Tensor, latent_pool: Tensor, block_tables: Tensor,
    past_lens: Tensor, cu_seqlens: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, latent and kv_b_weight; latents read from the pool are constants."""
    compute = compute_dtype(q)
    heads, rank = q.shape[1], kv_b_weight.shape[1]
    nope = q.shape[2] - (latent.shape[1] - rank)
    weight_HOR = kv_b_weight.view(heads, -1, rank).to(compute)
    grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grad_latent = torch.zeros(latent.shape, dtype=compute, device=q.device)
    grad_weight = torch.zeros_like(weight_HOR)
    for rows, past, stored in _sequences(latent, latent_pool, block_tables, past_lens, cu_seqlens):
        latents = stored.to(compute)
        for group in _head_groups(heads, 2 * latents.shape[0] * (q.shape[2] + weight_HOR.shape[1])):
            keys, values = _expand(latents, weight_HOR[group], nope)
            grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
            queries, grads = (x[rows, group].transpose(0, 1).to(compute) for x in (q, grad))
            for tile in _tiles(queries.shape[1]):
                seen = past + tile.stop
                scores = (queries[:, tile] @ keys[:, :seen].mT) * scale
                probabilities = scores.masked_fill_(~_mask(tile, past, seen, q.device), -torch.inf).softmax(-1)
                grad_values[:, :seen] += probabilities.mT @ grads[:, tile]
                grad_probabilities = grads[:, tile] @ values[:, :seen].mT
                expected = (grad_probabilities * probabilities).sum(-1, keepdim=True)
                grad_scores = probabilities * (grad_probabilities - expected) * scale
                grad_keys[:, :seen] += grad_scores.mT @ queries[:, tile]
                target = grad_q[rows.start + tile.start : rows.start + tile.stop, group]
                target.copy_((grad_scores @ keys[:, :seen]).transpose(0, 1))
            grad_expanded = torch.cat([grad_keys[..., :nope], grad_values], dim=-1)
            grad_weight[group] += torch.einsum("hlo,lr->hor", grad_expanded, latents[:, :rank])
            grad_latent[rows, :rank] += torch.einsum("hlo,hor->lr", grad_expanded, weight_HOR[group])[past:]
            grad_latent[rows, rank:] += grad_keys[..., nope:].sum(0)[past:]
    return grad_q, grad_latent.to(latent.dtype), grad_weight.flatten(0, 1).to(kv_b_weight.dtype)


def mla_decode_reference(
    q: Tensor, latent_pool: Tensor, block_tables: Tensor, kv_lens: Tensor, scale: float, value_dim: int
) -> Tensor:
    out = torch.empty((*q.shape[:2], value_dim), dtype=q.dtype, device=q.device)
    for n, length in enumerate(kv_lens.tolist()):
        latents_LR = gather_latents(latent_pool, block_tables[n], length).to(q.dtype)
        scores_HL = (q[n] @ latents_LR.t()).to(compute_dtype(q)) * scale
        out[n] = scores_HL.softmax(-1).to(q.dtype) @ latents_LR[:, :value_dim]
    return out


def mla_block_mass_reference(
    q: Tensor, latent_pool: Tensor, block_tables: Tensor, kv_lens: Tensor, scale: float
) -> Tensor:
    """The mass alone, [N, B]."""
    page = latent_pool.shape[1]
    mass_NB = torch.zeros(block_tables.shape, dtype=compute_dtype(q), device=q.device)
    at_once = max(1, MASS_TOKENS // page)
    for n, length in enumerate(kv_lens.tolist()):
        parts = []
        for table in block_tables[n, : -(-length // page)].split(at_once):
            latents_LR = gather_latents(latent_pool, table, min(length, len(table) * page)).to(q.dtype)
            length -= len(latents_LR)
            scores_HL = (q[n] @ latents_LR.t()).to(compute_dtype(q)) * scale
            scores_HL = F.pad(scores_HL, (0, -len(latents_LR) % page), value=-torch.inf)
            parts.append(scores_HL.unflatten(-1, (-1, page)).logsumexp(-1))
        if parts:
            mass_B = torch.cat(parts, -1).softmax(-1).mean(0)
            mass_NB[n, : len(mass_B)] = mass_B
    return mass_NB


def mla_decode_mass_reference(
    q: Tensor, latent_pool: Tensor, block_tables: Tensor, kv_lens: Tensor, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    out = mla_decode_reference(q, latent_pool, block_tables, kv_lens, scale, value_dim)
    return out, mla_block_mass_reference(q, latent_pool, block_tables, kv_lens, scale)
