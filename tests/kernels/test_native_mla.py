"""The compiled MLA kernels, with each instruction set, against plain causal attention in float64."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kimi_k3_kernels
from kimi_k3_kernels import mla_decode, mla_decode_mass, mla_prefill
from kimi_k3_kernels.mla.op import mla_decode_mass_op, mla_decode_op, mla_prefill_op
from kimi_k3_kernels.mla.reference import mla_block_mass_reference, mla_decode_reference, mla_prefill_reference

sys.path.insert(0, str(Path(__file__).parent))
from inputs import packed

pytestmark = pytest.mark.skipif(kimi_k3_kernels.native_library is None, reason="the CPU kernels are not built")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def poisoned_outputs() -> Iterator[None]:
    """New tensors are full of NaN: an element that no kernel wrote is seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def paged(latents: list[Tensor], block: int) -> tuple[Tensor, Tensor]:
    """Latents of each sequence in blocks of a shuffled pool, NaN wherever nothing was stored."""
    counts = [-(-len(x) // block) for x in latents]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(1)).tolist()
    pool = torch.full((len(order), block, latents[0].shape[1]), torch.nan, dtype=latents[0].dtype)
    tables = torch.zeros(len(latents), max([2, *counts]), dtype=torch.int32)
    for n, x in enumerate(latents):
        for b, piece in enumerate(x.split(block)):
            tables[n, b] = place = order.pop()
            pool[place, : len(piece)] = piece
    return pool, tables


def largest_error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return (got.double() - want).abs().nan_to_num(torch.inf).max().item()


# Heads, R, rope, block size, lengths: odd widths; beside every block, tile (256) and split (8192) boundary.
DECODE = [
    (3, 8, 4, 4, [1, 4, 9, 6]),
    (7, 33, 3, 5, [255, 3, 513]),
    (20, 64, 16, 64, [63, 64, 65, 256, 257]),
    (2, 130, 16, 64, [8192, 8193]),
]


def make_decode(heads: int, rank: int, rope: int, block: int, lengths: list[int], dtype: torch.dtype):
    latents = [normal(length, rank + rope, seed=n).to(dtype) for n, length in enumerate(lengths)]
    pool, tables = paged(latents, block)
    queries = (normal(len(lengths), heads, rank + rope, seed=99) * 3).to(dtype)
    return latents, (queries, pool, tables, torch.tensor(lengths, dtype=torch.int32), rank**-0.5, rank)


def decode_by_sums(latents: list[Tensor], q: Tensor, scale: float, value_dim: int) -> Tensor:
    rows = []
    for query, latent in zip(q.double(), latents):
        probabilities = (torch.einsum("hc,lc->hl", query, latent.double()) * scale).softmax(-1)
        rows.append(torch.einsum("hl,lr->hr", probabilities, latent[:, :value_dim].double()))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rank", "rope", "block", "lengths"), DECODE)
def test_decode_equals_float64(instructions, poisoned_outputs, dtype, heads, rank, rope, block, lengths):
    latents, args = make_decode(heads, rank, rope, block, lengths, dtype)
    want = decode_by_sums(latents, args[0], args[4], rank)
    got = mla_decode(*args)
    assert got.dtype == dtype and got.is_contiguous()
    # Sums in one run instead of torch's blocks lose a little in float32; bfloat16 rounds less often than torch does.
    assert largest_error(got, want) <= 4 * largest_error(mla_decode_reference(*args), want) + 1e-6


def mass_by_sums(latents: list[Tensor], q: Tensor, scale: float, block: int, num_blocks: int) -> Tensor:
    rows = []
    for query, latent in zip(q.double(), latents):
        probabilities = (torch.einsum("hc,lc->hl", query, latent.double()) * scale).softmax(-1)
        sums = [part.sum() for part in probabilities.mean(0).split(block)]
        rows.append(torch.stack(sums + [torch.zeros((), dtype=torch.float64)] * (num_blocks - len(sums))))
    return torch.stack(rows)


# Blocks of one token, and of more than a tile: several parts of a split, several splits, or both.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "rank", "rope", "block", "lengths"),
    [*DECODE, (3, 8, 4, 1, [1, 300]), (2, 8, 4, 700, [256, 700, 701, 1500]), (2, 16, 8, 300, [8500])],
)
def test_decode_mass_equals_float64(instructions, poisoned_outputs, dtype, heads, rank, rope, block, lengths):
    latents, args = make_decode(heads, rank, rope, block, lengths, dtype)
    q, pool, tables, lens, scale, _ = args
    out, mass = mla_decode_mass(*args)
    assert torch.equal(out, mla_decode(*args))
    assert mass.dtype == torch.float32 and mass.is_contiguous()
    want = mass_by_sums(latents, q, scale, block, tables.shape[1])
    assert torch.equal(mass == 0, want == 0)
    assert largest_error(mass.sum(1), torch.ones(len(lengths), dtype=torch.float64)) <= 1e-6
    reference = mla_block_mass_reference(q, pool, tables, lens, scale)
    assert largest_error(mass, want) <= 4 * largest_error(reference, want) + 1e-6


# Heads, nope, rope, V, R, block size, past and new tokens of each sequence.
PREFILL = [
    (3, 6, 4, 5, 8, 4, [6, 0, 0, 3], [5, 0, 1, 7]),
    (3, 7, 5, 9, 11, 5, [0, 77], [9, 130]),
    (2, 128, 64, 128, 64, 64, [0, 64, 300], [200, 1, 65]),
    (1, 24, 8, 72, 33, 64, [513], [300]),
]


def make_prefill(heads, nope, rope, value, rank, block, pasts, news, dtype: torch.dtype):
    totals = [past + new for past, new in zip(pasts, news)]
    latents = [normal(total, rank + rope, seed=n).to(dtype) for n, total in enumerate(totals)]
    pool, tables = paged([x[:past] for x, past in zip(latents, pasts)], block)
    queries = (normal(sum(news), heads, nope + rope, seed=98) * 2).to(dtype)
    weight = (normal(heads * (nope + value), rank, seed=99) * rank**-0.5).to(dtype)
    new_latents = torch.cat([x[past:] for x, past in zip(latents, pasts)])
    lens = torch.tensor(pasts, dtype=torch.int32)
    return latents, (queries, new_latents, weight, pool, tables, lens, packed(news), (nope + rope) ** -0.5)


def prefill_by_sums(latents: list[Tensor], q: Tensor, weight: Tensor, news: list[int], scale: float) -> Tensor:
    """The whole matrix of scores of each sequence."""
    heads, rank = q.shape[1], weight.shape[1]
    nope = q.shape[2] - (latents[0].shape[1] - rank)
    rows = []
    for queries, latent in zip(q.double().split(news), latents):
        expanded = torch.einsum("lr,hor->lho", latent[:, :rank].double(), weight.double().view(heads, -1, rank))
        scores = torch.einsum("thc,lhc->htl", queries[..., :nope], expanded[..., :nope])
        scores += torch.einsum("thc,lc->htl", queries[..., nope:], latent[:, rank:].double())
        past = len(latent) - len(queries)
        hidden = torch.ones(len(queries), len(latent), dtype=torch.bool).triu(past + 1)
        probabilities = (scores * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        rows.append(torch.einsum("htl,lhv->thv", probabilities, expanded[..., nope:]))
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "nope", "rope", "value", "rank", "block", "pasts", "news"), PREFILL)
def test_prefill_equals_float64(
    instructions, poisoned_outputs, dtype, heads, nope, rope, value, rank, block, pasts, news
):
    latents, args = make_prefill(heads, nope, rope, value, rank, block, pasts, news, dtype)
    want = prefill_by_sums(latents, args[0], args[2], news, args[-1])
    got = mla_prefill(*args)
    assert got.dtype == dtype and got.is_contiguous()
    assert largest_error(got, want) <= 4 * largest_error(mla_prefill_reference(*args), want) + 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company_and_on_any_threads(instructions: str, dtype: torch.dtype):
    _, (q, pool, tables, lens, *rest) = make_decode(5, 40, 8, 16, [700, 1, 64, 8300], dtype)
    together = mla_decode(q, pool, tables, lens, *rest)
    for n in range(4):
        alone = mla_decode(q[n : n + 1], pool, tables[n : n + 1], lens[n : n + 1], *rest)
        assert torch.equal(alone[0], together[n])
    masses = mla_decode_mass(q, pool, tables, lens, *rest)[1]
    for n in range(4):
        alone = mla_decode_mass(q[n : n + 1], pool, tables[n : n + 1], lens[n : n + 1], *rest)[1]
        assert torch.equal(alone[0], masses[n])
    _, args = make_prefill(3, 24, 8, 16, 20, 16, [0, 100, 37], [130, 1, 99], dtype)
    prefilled = mla_prefill(*args)
    q, latent, weight, pool, tables, pasts, cu, scale = args
    for n in range(3):
        own = slice(cu[n], cu[n + 1])
        lens_n = packed([int(own.stop - own.start)])
        alone = mla_prefill(q[own], latent[own], weight, pool, tables[n : n + 1], pasts[n : n + 1], lens_n, scale)
        assert torch.equal(alone, prefilled[own])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(mla_prefill(*args), prefilled)
            _, decode_args = make_decode(5, 40, 8, 16, [700, 1, 64, 8300], dtype)
            assert torch.equal(mla_decode(*decode_args), together)
            assert torch.equal(mla_decode_mass(*decode_args)[1], masses)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_in_pieces_equals_the_whole(instructions: str, dtype: torch.dtype):
    _, whole = make_prefill(2, 24, 8, 16, 20, 16, [0], [300], dtype)
    want = mla_prefill(*whole)
    for past in (1, 64, 131, 299):
        q, latent, weight, *_, scale = whole
        pool, tables = paged([latent[:past]], 16)
        lens = torch.tensor([past], dtype=torch.int32)
        got = mla_prefill(q[past:], latent[past:], weight, pool, tables, lens, packed([300 - past]), scale)
        if past < 299:
            assert torch.equal(got, want[past:])
        else:  # one token and a long past: the absorbed form, which rounds a query in the latent space
            tolerance = 1e-6 if dtype == torch.float32 else 2.0**-6
            torch.testing.assert_close(got, want[past:], atol=tolerance, rtol=tolerance)


def test_heads_expanded_in_groups_change_nothing(instructions: str):
    # 16 MiB of keys and values is 4 heads of 4,096 tokens x 256 channels x 4 bytes: 5 heads are two groups.
    _, (q, latent, weight, pool, tables, lens, cu, scale) = make_prefill(
        5, 96, 32, 128, 8, 64, [4032], [64], torch.float32
    )
    together = mla_prefill(q, latent, weight, pool, tables, lens, cu, scale)
    for h in (0, 3, 4):
        own = weight.unflatten(0, (5, -1))[h]
        alone = mla_prefill(q[:, h : h + 1], latent, own, pool, tables, lens, cu, scale)
        assert torch.equal(alone, together[:, h : h + 1])


def test_large_and_rising_scores_stay_stable(instructions: str):
    # The shared channel adds 2^11 to the score of the last key, less for each one before: exp would overflow, and
    # every tile raises the maximum. float32 holds such a score to 2^-13, so the probabilities to about 2^-12.
    heads, nope, rope, value, rank, length = 2, 8, 1, 8, 8, 600
    latent = normal(length, rank + rope)
    latent[:, rank] = torch.linspace(0.995, 1, length, dtype=torch.float64)
    q, weight = normal(length, heads, nope + rope, seed=1), normal(heads * (nope + value), rank, seed=2)
    q[..., nope] = 2.0**11
    empty, tables = paged([latent[:0]], 64)
    lens = torch.zeros(1, dtype=torch.int32)
    want = prefill_by_sums([latent], q, weight, [length], 1.0)
    args = (x.float() for x in (q, latent, weight, empty))
    got = mla_prefill(*args, tables, lens, packed([length]), 1.0)
    # Inputs rounded to float32 move a score by up to 2^-12 as well.
    torch.testing.assert_close(got.double(), want, atol=4e-3, rtol=4e-3)
    pool, tables = paged([latent], 64)
    queries = torch.cat([normal(1, heads, rank, seed=3), torch.full((1, heads, 1), 2.0**11, dtype=torch.float64)], -1)
    lens = torch.tensor([length], dtype=torch.int32)
    got = mla_decode(queries.float(), pool.float(), tables, lens, 1.0, rank)
    torch.testing.assert_close(got.double(), decode_by_sums([latent], queries, 1.0, rank), atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides_and_either_width_of_integers(instructions: str, dtype: torch.dtype):
    _, args = make_prefill(3, 6, 4, 5, 8, 4, [6, 3], [5, 7], dtype)
    q, latent, weight, pool, tables, lens, cu, scale = args

    def spread(x: Tensor) -> Tensor:
        return torch.stack([x, torch.full_like(x, torch.nan)], 1)[:, 0]

    want = mla_prefill(*args)
    permuted = q.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    got = mla_prefill(
        permuted,
        spread(latent),
        weight.t().contiguous().t(),
        spread(pool),
        tables.long(),
        lens.long(),
        cu.long(),
        scale,
    )
    assert torch.equal(got, want)
    assert torch.equal(mla_prefill(q, latent, weight, pool.mT.contiguous().mT, tables, lens, cu, scale), want)
    _, (q, pool, tables, lens, scale, rank) = make_decode(3, 8, 4, 4, [5, 9], dtype)
    want = mla_decode(q, pool, tables, lens, scale, rank)
    assert torch.equal(mla_decode(spread(q), spread(pool), tables.long(), lens.long(), scale, rank), want)
    assert torch.equal(mla_decode(q, pool.mT.contiguous().mT, tables, lens, scale, rank), want)
    want = mla_decode_mass(q, pool, tables, lens, scale, rank)[1]
    assert torch.equal(mla_decode_mass(spread(q), spread(pool), tables.long(), lens.long(), scale, rank)[1], want)
    assert torch.equal(mla_decode_mass(q, pool.mT.contiguous().mT, tables, lens, scale, rank)[1], want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_gives_nothing(instructions: str, dtype: torch.dtype):
    _, (q, latent, weight, pool, tables, lens, _, scale) = make_prefill(2, 6, 4, 5, 8, 4, [3, 0], [1, 0], dtype)
    assert mla_prefill(q[:0], latent[:0], weight, pool, tables, lens, packed([0, 0]), scale).shape == (0, 2, 5)
    assert mla_prefill(q[:0], latent[:0], weight, pool, tables[:0], lens[:0], packed([]), scale).shape == (0, 2, 5)
    queries = torch.zeros(0, 2, 12, dtype=dtype)
    assert mla_decode(queries, pool, tables[:0], lens[:0], scale, 8).shape == (0, 2, 8)
    out, mass = mla_decode_mass(queries, pool, tables[:0], lens[:0], scale, 8)
    assert out.shape == (0, 2, 8) and mass.shape == (0, tables.shape[1])
    queries = normal(2, 2, 12).to(dtype)
    for some_pool in (pool, pool[:, :0]):  # sequences without tokens
        out, mass = mla_decode_mass(queries, some_pool, tables, torch.zeros_like(lens), scale, 8)
        assert torch.equal(out, torch.zeros_like(out)) and torch.equal(mass, torch.zeros(tables.shape))


def test_places_outside_the_pool_are_refused(instructions: str):
    _, (q, pool, tables, lens, scale, rank) = make_decode(2, 8, 4, 4, [5, 9], torch.float32)
    for op in (mla_decode, mla_decode_mass):
        for bad in (-1, len(pool)):
            with pytest.raises(RuntimeError, match=rf"{op.__name__}: block_tables"):
                op(q, pool, torch.full_like(tables, bad), lens, scale, rank)
        for bad in (-1, tables.shape[1] * 4 + 1):
            with pytest.raises(RuntimeError, match=rf"{op.__name__}: .* tokens in its blocks"):
                op(q, pool, tables, torch.full_like(lens, bad), scale, rank)
    _, (q, latent, weight, pool, tables, lens, cu, scale) = make_prefill(2, 6, 4, 5, 8, 4, [3], [2], torch.float32)
    with pytest.raises(RuntimeError, match="block_tables"):
        mla_prefill(q, latent, weight, pool, tables - 9, lens, cu, scale)
    with pytest.raises(RuntimeError, match="past_lens"):
        mla_prefill(q, latent, weight, pool, tables, lens - 9, cu, scale)
    with pytest.raises(RuntimeError, match="cu_seqlens"):
        mla_prefill(q, latent, weight, pool, tables, lens, cu + 1, scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_registration_and_gradients(instructions: str, dtype: torch.dtype):
    _, args = make_prefill(2, 6, 4, 5, 8, 4, [3, 0], [2, 4], dtype)
    inputs = [x.clone().requires_grad_() for x in args[:3]]
    torch.library.opcheck(mla_prefill_op, (*inputs, *args[3:]))
    torch.library.opcheck(mla_decode_op, make_decode(2, 8, 4, 4, [5, 9], dtype)[1])
    torch.library.opcheck(mla_decode_mass_op, make_decode(2, 8, 4, 4, [5, 9], dtype)[1])
    cotangent = normal(6, 2, 5, seed=5)
    got = torch.autograd.grad(mla_prefill(*inputs, *args[3:]), inputs, cotangent.to(dtype))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want = torch.autograd.grad(mla_prefill(*exact, args[3].double(), *args[4:]), exact, cotangent)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # bfloat16: roundings of the cotangent and of each gradient
    for a, b in zip(got, want):
        torch.testing.assert_close(a.double(), b, atol=tolerance * b.abs().max().item(), rtol=0)
