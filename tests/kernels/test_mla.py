"""MLA: the expanded and the absorbed form against plain causal attention in float64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kimi_k3_kernels.mla.reference as reference
from kimi_k3_kernels import mla_decode, mla_decode_mass, mla_prefill
from kimi_k3_kernels.mla.op import mla_decode_mass_op, mla_decode_op, mla_prefill_op

sys.path.insert(0, str(Path(__file__).parent))
from inputs import packed

HEADS, NOPE, ROPE, VALUE, RANK, BLOCK = 3, 6, 4, 5, 8, 4
SCALE = (NOPE + ROPE) ** -0.5


def make_sequences(lengths: list[int], seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return normal(total, HEADS, NOPE + ROPE), normal(total, RANK + ROPE), normal(HEADS * (NOPE + VALUE), RANK)


def plain_attention(q: Tensor, latent: Tensor, weight: Tensor) -> Tensor:
    """Row by row of one sequence: keys and values of all earlier tokens, softmax, sum."""
    expanded = torch.einsum("tr,hor->tho", latent[:, :RANK], weight.view(HEADS, -1, RANK))
    rows = []
    for t in range(len(q)):
        keys = torch.cat([expanded[: t + 1, :, :NOPE], latent[: t + 1, None, RANK:].expand(-1, HEADS, -1)], -1)
        scores = (keys * q[t]).sum(-1) * SCALE
        rows.append((scores.softmax(0)[..., None] * expanded[: t + 1, :, NOPE:]).sum(0))
    return torch.stack(rows) if rows else q.new_zeros(0, HEADS, VALUE)


def paged(latents: list[Tensor]):
    """Latents of each sequence in blocks of a shuffled pool, NaN wherever nothing was stored."""
    counts = [-(-len(x) // BLOCK) for x in latents]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(1))
    pool = torch.full((len(order), BLOCK, RANK + ROPE), torch.nan, dtype=torch.float64)
    tables, used = torch.zeros(len(latents), max([2, *counts]), dtype=torch.int32), 0
    for n, x in enumerate(latents):
        for b in range(counts[n]):
            tables[n, b] = order[used]
            piece = x[b * BLOCK : (b + 1) * BLOCK]
            pool[order[used], : len(piece)] = piece
            used += 1
    return pool, tables


@pytest.mark.parametrize("lengths", [[1], [4], [9], [5, 0, 1, 7]])
@pytest.mark.parametrize("past", [0, 1, 4, 6])
def test_prefill_equals_plain_attention(lengths: list[int], past: int):
    totals = [past + n if n else 0 for n in lengths]
    q, latent, weight = make_sequences(totals)
    wants, news = [], []
    pool, tables = paged([x[:past] for x in latent.split(totals)])
    for x, y in zip(q.split(totals), latent.split(totals)):
        wants.append(plain_attention(x, y, weight)[past:])
        news.append((x[past:], y[past:]))
    past_lens = torch.tensor([past if n else 0 for n in lengths], dtype=torch.int32)
    q_new, latent_new = (torch.cat(parts) for parts in zip(*news))
    got = mla_prefill(q_new, latent_new, weight, pool, tables, past_lens, packed(lengths), SCALE)
    torch.testing.assert_close(got, torch.cat(wants), atol=1e-12, rtol=1e-10)


def test_decode_equals_plain_attention():
    lengths = [1, 4, 9, 6]
    q, latent, weight = make_sequences(lengths)
    pool, tables = paged(list(latent.split(lengths)))
    to_keys, to_values = weight.view(HEADS, -1, RANK).split([NOPE, VALUE], 1)
    last = torch.tensor(lengths).cumsum(0) - 1
    absorbed = torch.cat([torch.einsum("thn,hnr->thr", q[last][..., :NOPE], to_keys), q[last][..., NOPE:]], -1)
    context = mla_decode(absorbed, pool, tables, torch.tensor(lengths, dtype=torch.int32), SCALE, RANK)
    got = torch.einsum("thr,hvr->thv", context, to_values)
    want = [plain_attention(a, b, weight)[-1] for a, b in zip(q.split(lengths), latent.split(lengths))]
    torch.testing.assert_close(got, torch.stack(want), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("tokens_at_once", [1, 8, 4096])
def test_block_mass_equals_a_loop(tokens_at_once: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reference, "MASS_TOKENS", tokens_at_once)
    lengths = [1, 4, 9, 22]
    _, latent, _ = make_sequences(lengths)
    pool, tables = paged(list(latent.split(lengths)))
    queries = torch.randn(len(lengths), HEADS, RANK + ROPE, dtype=torch.float64)
    args = (queries, pool, tables, torch.tensor(lengths, dtype=torch.int32), SCALE, RANK)
    out, got = mla_decode_mass(*args)
    assert torch.equal(out, mla_decode(*args))
    want = torch.zeros(tables.shape, dtype=torch.float64)
    for n, latents in enumerate(latent.split(lengths)):
        for head in range(HEADS):
            weights = [float((SCALE * queries[n, head] @ key).exp()) for key in latents]
            for token, weight in enumerate(weights):
                want[n, token // BLOCK] += weight / sum(weights) / HEADS
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)
    _, single = mla_decode_mass(queries.float(), pool.float(), tables, torch.tensor(lengths), SCALE, RANK)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), want, atol=1e-5, rtol=0)  # float32 scores of order 1


def test_tiles_and_head_groups_change_nothing(monkeypatch: pytest.MonkeyPatch):
    lengths = [9, 5]
    q, latent, weight = make_sequences(lengths)
    pool, tables = paged([latent[:0], latent[:0]])
    args = (q, latent, weight, pool, tables, torch.zeros(2, dtype=torch.int32), packed(lengths), SCALE)
    want = mla_prefill(*args)
    monkeypatch.setattr(reference, "QUERY_TILE", 4)
    monkeypatch.setattr(reference, "EXPANDED_ELEMENTS", 1)
    torch.testing.assert_close(mla_prefill(*args), want, atol=1e-12, rtol=1e-10)


def test_gradcheck_and_registration():
    lengths = [4, 3]
    q, latent, weight = (x.requires_grad_() for x in make_sequences(lengths))
    pool, tables = paged([torch.randn(5, RANK + ROPE, dtype=torch.float64), latent.detach()[:0]])
    rest = (pool, tables, torch.tensor([5, 0], dtype=torch.int32), packed(lengths), SCALE)
    assert torch.autograd.gradcheck(lambda *x: mla_prefill(*x, *rest), (q, latent, weight))
    torch.library.opcheck(mla_prefill_op, (q, latent, weight, *rest))
    queries = torch.randn(1, HEADS, RANK + ROPE, dtype=torch.float64)
    lens = torch.tensor([5], dtype=torch.int32)
    torch.library.opcheck(mla_decode_op, (queries, pool, tables[:1], lens, SCALE, RANK))
    torch.library.opcheck(mla_decode_mass_op, (queries, pool, tables[:1], lens, SCALE, RANK))


def test_wrong_shapes_are_refused():
    q, latent, weight = make_sequences([4])
    pool, tables = paged([latent[:0]])
    lens, cu = torch.zeros(1, dtype=torch.int32), packed([4])
    with pytest.raises(ValueError, match="mla_prefill: want q"):
        mla_prefill(q, latent[:2], weight, pool, tables, lens, cu, SCALE)
    with pytest.raises(ValueError, match="latent_pool"):
        mla_prefill(q, latent, weight, pool[..., 1:], tables, lens, cu, SCALE)
    with pytest.raises(ValueError, match="mla_decode: want"):
        mla_decode(q, pool, tables, lens, SCALE, RANK)
    with pytest.raises(ValueError, match="mla_decode_mass: want"):
        mla_decode_mass(q, pool, tables, lens, SCALE, RANK)
