"""Every Triton kernel against its reference, interpreted on a CPU. Run by test_triton_interpreter.py, in a process with
TRITON_INTERPRET=1.

float32 must agree with the reference in float64 to a few units of rounding. bfloat16 is compared on the same bfloat16
inputs: one rounding of the result, which the interpreter truncates (2^-7), and for the experts a rounding of each product.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from inputs import kda_inputs, packed
from torch import Tensor

from kimi_k3_kernels import mxfp4_quantize
from kimi_k3_kernels.attn_res import kernel_triton as attn_res
from kimi_k3_kernels.attn_res.reference import attn_res_mix_reference
from kimi_k3_kernels.kda import kernel_triton as kda
from kimi_k3_kernels.kda.reference import kda_chunk_export_reference, kda_chunk_reference, kda_step_reference
from kimi_k3_kernels.mla import kernel_triton as mla
from kimi_k3_kernels.mla.reference import mla_decode_reference, mla_prefill_reference
from kimi_k3_kernels.mxfp4_experts import kernel_triton as mxfp4
from kimi_k3_kernels.mxfp4_experts.reference import (
    mxfp4_dequantize_reference,
    mxfp4_experts_reference,
    mxfp4_linear_reference,
)
from kimi_k3_kernels.short_conv import kernel_triton as conv
from kimi_k3_kernels.short_conv.reference import short_conv_reference, short_conv_step_reference

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2**-7}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN: an element that nobody wrote is seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def slots(*values: int) -> Tensor:
    return torch.tensor(values)


def wide(tensors: list[Tensor]) -> list[Tensor]:
    return [t.double() if t.is_floating_point() else t for t in tensors]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def permuted(x: Tensor) -> Tensor:
    """The same values at other strides: every second element of a transposed buffer."""
    buffer = torch.full((*reversed(x.shape), 2), torch.nan if x.is_floating_point() else 0, dtype=x.dtype)
    view = buffer[..., 0].permute(*reversed(range(x.ndim)))
    view.copy_(x)
    return view


def assert_near(got: Tensor, want: Tensor, bound: float) -> None:
    assert got.isfinite().all()
    error = (got.double() - want.double()).abs().max().item() if got.numel() else 0.0
    scale = want.abs().max().item() if got.numel() else 1.0
    assert error <= bound * scale, f"{error / scale:.2e} of the largest, bound {bound:.0e}"


# KDA


def check_kda(inputs: list[Tensor], pool: Tensor, reads: Tensor, writes: Tensor, lengths: list[int]) -> None:
    got_pool, want_pool, dtype = pool.clone(), pool.double(), inputs[0].dtype
    got = kda.kda_chunk(*inputs, got_pool, reads, writes, packed(lengths))
    want = kda_chunk_reference(*wide(inputs), want_pool, reads, writes, packed(lengths))
    assert_near(got, want, TOLERANCE[dtype] * 2)
    assert_near(got_pool, want_pool, 5e-6)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("tokens", [1, 17, 65, *(pytest.param(n, marks=SLOW) for n in (15, 16, 63, 64, 130))])
def test_kda_chunk(tokens: int):
    check_kda(kda_inputs(tokens, 1, 8, 12, torch.float32), normal(2, 1, 8, 12), slots(0), slots(1), [tokens])


@pytest.mark.parametrize("lowest", [-5.0, -200.0, pytest.param(-1e-3, marks=SLOW)])
def test_kda_chunk_at_all_decays(lowest: float):
    inputs = kda_inputs(33, 1, 8, 12, torch.float32, lowest)
    inputs[3][:, :, ::2] = lowest  # some channels always at the bound
    check_kda(inputs, normal(2, 1, 8, 12), slots(0), slots(1), [33])


def test_kda_chunk_in_bfloat16_over_several_sequences():
    """Empty sequences, no slot to read or to write, and a slot that another sequence writes: all reads come first."""
    lengths = [0, 1, 17, 0, 20]
    inputs = kda_inputs(sum(lengths), 2, 8, 12, torch.bfloat16)
    check_kda(inputs, normal(6, 2, 8, 12), slots(0, 1, -1, 3, 2), slots(4, 2, 3, -1, 1), lengths)


def test_kda_chunk_with_repeated_keys_and_full_writes():
    """The system is then as far from the identity as it can be."""
    inputs = kda_inputs(40, 1, 8, 12, torch.float32, -1e-6)
    inputs[1][:] = inputs[1][:1]
    inputs[4][:] = 0.999
    check_kda(inputs, normal(2, 1, 8, 12), slots(0), slots(1), [40])


def test_kda_chunk_of_a_view_in_groups_of_heads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kda, "WORKSPACE_BYTES", 1)  # one head at a time
    inputs = [permuted(x) for x in kda_inputs(20, 3, 8, 12, torch.float32)]
    pool = permuted(normal(4, 3, 8, 12))
    got_pool, want_pool = permuted(pool), pool.double()
    arguments = (slots(0, 1), slots(1, 2), packed([13, 7]))
    got = kda.kda_chunk(*inputs, got_pool, *arguments)
    assert_near(got, kda_chunk_reference(*wide(inputs), want_pool, *arguments), 5e-6)
    assert_near(got_pool, want_pool, 5e-6)


def test_kda_chunk_export():
    """At a first row, in a tile, at tile, chunk and sequence ends, twice at one place, to no slot, to one that is read."""
    lengths = [1, 0, 70]
    inputs = kda_inputs(71, 1, 8, 12, torch.float32)
    at, to = slots(2, 10, 17, 65, 71, 1, 10, 30), slots(4, 5, 6, 7, 8, 9, 10, -1)
    pool = normal(12, 1, 8, 12)
    got_pool, want_pool = pool.clone(), pool.double()
    arguments = (slots(0, 1, 4), slots(2, -1, 3), packed(lengths), at, to)
    got = kda.kda_chunk_export(*inputs, got_pool, *arguments)
    want = kda_chunk_export_reference(*wide(inputs), want_pool, *arguments)
    assert_near(got, want, 5e-6)
    assert_near(got_pool, want_pool, 5e-6)


def test_kda_chunk_of_no_token_moves_the_states():
    inputs = kda_inputs(0, 2, 8, 12, torch.float32)
    pool = normal(4, 2, 8, 12)
    got_pool = pool.clone()
    assert kda.kda_chunk(*inputs, got_pool, slots(0, -1), slots(2, 3), packed([0, 0])).shape == (0, 2, 12)
    assert torch.equal(got_pool[2], pool[0]) and (got_pool[3] == 0).all() and torch.equal(got_pool[:2], pool[:2])
    assert kda.kda_chunk(*inputs, pool, slots(), slots(), packed([])).shape == (0, 2, 12)
    assert kda.kda_step_(*inputs, pool, slots(), slots()).shape == (0, 2, 12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pool_dtype", DTYPES)
def test_kda_step(dtype: torch.dtype, pool_dtype: torch.dtype):
    inputs = [permuted(x) for x in kda_inputs(4, 2, 20, 36, dtype)]  # neither size a power of two
    reads, writes = slots(0, -1, 2, 3), slots(0, 3, -1, 1)
    pool = normal(5, 2, 20, 36, dtype=pool_dtype)
    got_pool, want_pool = pool.clone(), pool.double()
    got = kda.kda_step_(*inputs, got_pool, reads, writes)
    assert_near(got, kda_step_reference(*wide(inputs), want_pool, reads, writes), TOLERANCE[dtype])
    assert_near(got_pool, want_pool, TOLERANCE[pool_dtype])
    assert torch.equal(got_pool[[2, 4]], pool[[2, 4]])


# Short convolutions


@pytest.mark.parametrize("dtype", DTYPES)
def test_short_conv(dtype: torch.dtype):
    lengths = [1, 0, 2, 17, 3]
    x, weight, pool = normal(23, 20, dtype=dtype), normal(20, 4, dtype=dtype), normal(7, 3, 20, dtype=dtype)
    reads, writes = slots(0, 1, -1, 3, 4), slots(0, 5, 2, 4, -1)
    got_pool, want_pool = permuted(pool), pool.double()
    got = conv.short_conv(permuted(x), permuted(weight), got_pool, reads, writes, packed(lengths))
    want = short_conv_reference(*wide([x, weight]), want_pool, reads, writes, packed(lengths))
    assert_near(got, want, TOLERANCE[dtype])
    assert torch.equal(got_pool.double(), want_pool)


@pytest.mark.parametrize("taps", [2, 4])
def test_short_conv_step(taps: int):
    x, weight, pool = normal(4, 20), normal(20, taps), normal(6, taps - 1, 20)
    reads, writes = slots(0, 1, -1, 2), slots(1, 0, 3, -1)  # two sequences change places
    got_pool, want_pool = pool.clone(), pool.double()
    got = conv.short_conv_step_(permuted(x), weight, got_pool, reads, writes)
    assert_near(got, short_conv_step_reference(*wide([x, weight]), want_pool, reads, writes), 5e-6)
    assert torch.equal(got_pool.double(), want_pool)


def test_short_conv_of_nothing():
    pool, weight = normal(4, 3, 20), normal(20, 4)
    before = pool.clone()
    got = conv.short_conv(normal(0, 20), weight, pool, slots(1, -1), slots(2, 3), packed([0, 0]))
    assert got.shape == (0, 20) and torch.equal(pool[2], before[1]) and (pool[3] == 0).all()
    assert conv.short_conv_step_(normal(0, 20), weight, pool, slots(), slots()).shape == (0, 20)
    want = short_conv_reference(normal(2, 20), weight, before[:0], slots(0), slots(-1), packed([2]))
    assert_near(conv.short_conv(normal(2, 20), weight, pool[:0], slots(0), slots(-1), packed([2])), want, 5e-6)


# AttnRes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_blocks", [0, 1, 3])
def test_attn_res_mix(num_blocks: int, dtype: torch.dtype):
    running_sum, bank, weight = normal(3, 40, dtype=dtype), 20 * normal(3, 3, 40, dtype=dtype, seed=1), normal(40)
    bank[num_blocks:] = torch.nan  # not read
    arguments = [permuted(running_sum), permuted(bank), torch.tensor([num_blocks]), permuted(weight)]
    got = attn_res.attn_res_mix(*arguments, 1e-5)
    assert_near(got, attn_res_mix_reference(*wide(arguments), 1e-5), TOLERANCE[dtype])
    if num_blocks == 0:
        assert torch.equal(got, running_sum)
    assert attn_res.attn_res_mix(running_sum[:0], bank[:, :0], *arguments[2:], 1e-5).shape == (0, 40)


def test_attn_res_scores_far_apart():
    bank, weight = normal(4, 2, 40, seed=1), 1e3 * normal(40)
    arguments = [normal(2, 40), bank, torch.tensor(4), weight]
    assert_near(attn_res.attn_res_mix(*arguments, 1e-5), attn_res_mix_reference(*wide(arguments), 1e-5), 5e-6)


# Latent attention


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split_tokens", [16, 256])
def test_mla_decode(split_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Lengths beside page, tile and split ends; a split that gets no token; tables wider than needed, filled with -1."""
    monkeypatch.setattr(mla, "SPLIT_TOKENS", split_tokens)
    lens = torch.tensor([1, 4, 33, 64])
    tables = torch.randperm(68, generator=torch.Generator().manual_seed(0)).view(4, 17)
    for n, length in enumerate(lens.tolist()):
        tables[n, -(-length // 4) :] = -1
    pool, q = normal(70, 4, 14, dtype=dtype), normal(4, 3, 14, dtype=dtype, seed=1)
    got = mla.mla_decode(permuted(q), permuted(pool), permuted(tables), lens, 0.3, 10)
    assert_near(got, mla_decode_reference(*wide([q, pool]), tables, lens, 0.3, 10), TOLERANCE[dtype])


def test_mla_decode_of_large_scores():
    pool, q, lens = 30 * normal(5, 4, 14), 30 * normal(1, 17, 14, seed=1), torch.tensor([20])
    tables = torch.arange(5)[None]
    got = mla.mla_decode(q, pool, tables, lens, 1.0, 14)  # the whole width is summed: no shared channels
    assert_near(got, mla_decode_reference(*wide([q, pool]), tables, lens, 1.0, 14), 5e-6)
    assert mla.mla_decode(q[:0], pool, tables[:0], lens[:0], 1.0, 10).shape == (0, 17, 10)


@pytest.mark.parametrize(("dtype", "pages"), [(torch.float32, 70), (torch.bfloat16, 70), (torch.float32, 0)])
def test_mla_prefill(dtype: torch.dtype, pages: int, monkeypatch: pytest.MonkeyPatch):
    """Sequences with and without earlier tokens, empty and single; heads in two groups; an empty pool."""
    monkeypatch.setattr(mla, "WORKSPACE_BYTES", 2 * 40 * 2 * 22 * dtype.itemsize)
    lengths, past = [3, 0, 35, 1, 1], torch.tensor([5, 3, 0, 33, 0]) * (pages > 0)
    q, latent = normal(40, 3, 12, dtype=dtype), normal(40, 14, dtype=dtype, seed=1)
    weight, pool = normal(3 * (8 + 6), 10, dtype=dtype, seed=2), normal(pages, 4, 14, dtype=dtype, seed=3)
    tables = torch.randperm(70, generator=torch.Generator().manual_seed(0))[:45].view(5, 9)
    got = mla.mla_prefill(permuted(q), permuted(latent), weight, permuted(pool), tables, past, packed(lengths), 0.3)
    want = mla_prefill_reference(*wide([q, latent, weight, pool]), tables, past, packed(lengths), 0.3)
    # The expanded keys are rounded to bfloat16, as a bfloat16 GEMM gives them: one more rounding, in the scores.
    assert_near(got, want, TOLERANCE[dtype] * (1 if dtype == torch.float32 else 4))
    empty = mla.mla_prefill(q[:0], latent[:0], weight, pool, tables[:0], past[:0], packed([]), 0.3)
    assert empty.shape == (0, 3, 6)


# MXFP4


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_and_scale_is_decoded_exactly(dtype: torch.dtype):
    # The interpreter's bfloat16 has no subnormals: scales 0 and 1 are left to float32 there.
    first = 2 if dtype == torch.bfloat16 else 0
    scale = torch.arange(first, 256, dtype=torch.uint8)[:, None].repeat(1, 16)
    packed_codes = torch.arange(256, dtype=torch.uint8).repeat(256 - first, 1)
    got = mxfp4.mxfp4_dequantize(permuted(packed_codes), permuted(scale), dtype)
    want = mxfp4_dequantize_reference(packed_codes, scale, dtype)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got[:-1].signbit(), want[:-1].signbit()) and got[-1].isnan().all()


def expert_arguments(
    tokens: int, choices: int, num_slots: int, width: int, latent: int, dtype: torch.dtype
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_slots, width, latent), (num_slots, width, latent), (num_slots, latent, width))
    stacks = [mxfp4_quantize(0.2 * torch.randn(shape, generator=generator)) for shape in shapes]
    x = torch.randn(tokens, latent, generator=generator).to(dtype)
    ids = torch.randint(0, num_slots, (tokens, choices), generator=generator)
    weights, table = torch.rand(tokens, choices, generator=generator), torch.randperm(num_slots, generator=generator)
    return [x, ids, weights, *(t for stack in stacks for t in stack), table]


@pytest.mark.parametrize("linear_beta", [25.0, pytest.param(None, marks=SLOW)])
@pytest.mark.parametrize(
    ("tokens", "choices", "num_slots", "width", "latent"),
    [(1, 2, 3, 32, 32), (17, 1, 1, 96, 64), pytest.param(37, 3, 5, 96, 160, marks=SLOW)],
)
def test_mxfp4_experts(tokens: int, choices: int, num_slots: int, width: int, latent: int, linear_beta: float | None):
    arguments = expert_arguments(tokens, choices, num_slots, width, latent, torch.float32)
    got = mxfp4.mxfp4_experts(*arguments, 4.0, linear_beta)
    assert_near(got, mxfp4_experts_reference(*wide(arguments), 4.0, linear_beta), 5e-6)


@pytest.mark.parametrize("scaled", [False, True])
def test_mxfp4_experts_in_bfloat16(scaled: bool, monkeypatch: pytest.MonkeyPatch):
    """Decoded in registers and by tl.dot_scaled."""
    monkeypatch.setattr(mxfp4, "_is_scaled", lambda dtype, device: scaled)
    arguments = expert_arguments(20, 2, 3, 64, 96, torch.bfloat16)
    want = mxfp4_experts_reference(*wide(arguments), 4.0, 25.0)
    # Truncated four times by the interpreter: two products, the hidden vector, the result.
    assert_near(mxfp4.mxfp4_experts(*arguments, 4.0, 25.0), want, 4 * 2**-7)
    packed_codes, scale = arguments[3][0], arguments[4][0]
    linear = mxfp4.mxfp4_linear(arguments[0], packed_codes, scale)
    assert_near(linear, mxfp4_linear_reference(arguments[0].double(), packed_codes, scale), 2**-7)


def test_mxfp4_experts_of_strided_slots_and_no_token():
    arguments = expert_arguments(5, 2, 4, 64, 32, torch.float32)
    want = mxfp4_experts_reference(*wide(arguments), 4.0, 25.0)
    strided = [permuted(t) for t in arguments[:-1]] + arguments[-1:]
    assert_near(mxfp4.mxfp4_experts(*strided, 4.0, 25.0), want, 5e-6)
    empty = [t[:0] for t in arguments[:3]] + arguments[3:]
    assert mxfp4.mxfp4_experts(*empty, 4.0, 25.0).shape == (0, 32)
    assert mxfp4.mxfp4_linear(normal(2, 3, 32), arguments[3][0], arguments[4][0]).shape == (2, 3, 64)


def test_a_row_has_the_same_bits_beside_other_rows():
    arguments = expert_arguments(70, 2, 2, 64, 64, torch.float32)
    together = mxfp4.mxfp4_experts(*arguments, 4.0, 25.0)
    alone = mxfp4.mxfp4_experts(*(t[3:4] for t in arguments[:3]), *arguments[3:], 4.0, 25.0)
    assert torch.equal(together[3:4], alone)


def test_an_expert_without_a_slot_gives_nan():
    arguments = expert_arguments(4, 2, 3, 32, 32, torch.float32)
    arguments[1][:] = torch.tensor([[0, 1], [1, 2], [0, 2], [1, 1]])
    arguments[-1] = torch.tensor([-1, 0, 1])
    got = mxfp4.mxfp4_experts(*arguments, 4.0, 25.0)
    assert got.isnan().all(1).tolist() == [True, False, True, False]


def test_float64_goes_to_the_references():
    inputs = kda_inputs(5, 1, 8, 12, torch.float64)
    pool = normal(2, 1, 8, 12).double()
    want_pool = pool.clone()
    got = kda.kda_chunk(*inputs, pool, slots(0), slots(1), packed([5]))
    assert torch.equal(got, kda_chunk_reference(*inputs, want_pool, slots(0), slots(1), packed([5])))
    assert torch.equal(pool, want_pool)
    arguments = expert_arguments(3, 2, 3, 32, 32, torch.float64)
    assert mxfp4.mxfp4_experts(*arguments, 4.0, 25.0).dtype == torch.float64
