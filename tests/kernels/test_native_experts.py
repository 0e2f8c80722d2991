"""The compiled kernels of the experts and of matvec, with each instruction set, against the references in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import kimi_k3_kernels
from kimi_k3_kernels import matvec, mxfp4_dequantize, mxfp4_experts, mxfp4_experts_int8, mxfp4_quantize
from kimi_k3_kernels.mxfp4_experts.reference import situ

pytestmark = pytest.mark.skipif(kimi_k3_kernels.native_library is None, reason="the CPU kernels are not built")
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7}  # of the largest output; bfloat16 rounds hidden and output


both_ops = pytest.mark.parametrize("op", [mxfp4_experts, mxfp4_experts_int8])


def make_experts(tokens: int, latent: int, width: int, experts: int = 6, topk: int = 4):
    generator = torch.Generator().manual_seed(tokens)
    packed = []
    for rows, columns in ((width, latent), (width, latent), (latent, width)):
        packed += mxfp4_quantize(torch.randn((experts, rows, columns), generator=generator) / columns**0.5)
    x = torch.randn((tokens, latent), generator=generator) * 3
    ids = torch.rand((tokens, experts), generator=generator).argsort(1)[:, :topk].contiguous()
    weights = torch.rand((tokens, topk), generator=generator)
    return x, ids, weights, packed, torch.arange(experts, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "latent", "width"), [(1, 32, 32), (2, 96, 160), (9, 256, 64), (70, 128, 288), (0, 32, 32)]
)
def test_experts_equal_the_reference(instructions: str, dtype: torch.dtype, tokens: int, latent: int, width: int):
    x, ids, weights, packed, table = make_experts(tokens, latent, width)
    x = x.to(dtype)
    for linear_beta in (25.0, None):
        want = mxfp4_experts(x.double(), ids, weights, *packed, table, 4.0, linear_beta)
        got = mxfp4_experts(x, ids, weights, *packed, table, 4.0, linear_beta)
        assert got.dtype == dtype and got.shape == want.shape
        if tokens:
            assert (got.double() - want).abs().max() <= ROUNDING[dtype] * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "latent", "width"), [(1, 32, 32), (2, 96, 160), (9, 256, 64), (70, 640, 288), (0, 32, 32)]
)
def test_int8_experts_equal_the_reference(instructions: str, dtype: torch.dtype, tokens: int, latent: int, width: int):
    x, ids, weights, packed, table = make_experts(tokens, latent, width)
    x = x.to(dtype)
    for linear_beta in (25.0, None):
        want = mxfp4_experts_int8(x.double(), ids, weights, *packed, table, 4.0, linear_beta)
        got = mxfp4_experts_int8(x, ids, weights, *packed, table, 4.0, linear_beta)
        assert got.dtype == dtype and got.shape == want.shape
        if tokens:
            error = (got.double() - want).abs().amax(1) / want.abs().max()
            # A hidden value between two int8 steps may fall either way in float32: then a row is off by a step of it.
            assert error.max() <= 2**-7 and (error <= ROUNDING[dtype]).double().mean() >= 0.8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_experts_are_off_by_their_rounding_and_no_more(instructions: str, dtype: torch.dtype):
    x, ids, weights, packed, table = make_experts(50, 192, 96)
    x[7] = 0.0
    x[8, 32:64] = 0.0
    got = mxfp4_experts_int8(x.to(dtype), ids, weights, *packed, table, 4.0, None).double()
    exact = mxfp4_experts(x.to(dtype).double(), ids, weights, *packed, table, 4.0, None)
    x = x.to(dtype).double()

    def half_steps(values: torch.Tensor) -> torch.Tensor:
        return (values.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 254).expand(-1, -1, 32).flatten(-2)

    w1, w3, w2 = (mxfp4_dequantize(packed[i], packed[i + 1], torch.float64) for i in (0, 2, 4))
    bound = torch.zeros_like(x)
    for t in range(50):
        for choice, weight in zip(ids[t], weights[t].double()):
            row, step = x[t : t + 1], half_steps(x[t : t + 1])
            gate, up = row @ w1[choice].t(), row @ w3[choice].t()
            off_gate, off_up = step @ w1[choice].abs().t(), step @ w3[choice].abs().t()
            # The slope of beta tanh(g / beta) sigmoid(g) is below 1.1.
            off = 1.1 * off_gate * (up.abs() + off_up) + situ(gate, torch.ones_like(up), 4.0, None).abs() * off_up
            off = off + half_steps(situ(gate, up, 4.0, None).abs() + off)
            bound[t] += weight * (off @ w2[choice].abs().t())[0]
    error = (got - exact).abs()
    assert (error <= bound + ROUNDING[dtype] * exact.abs().max()).all()
    assert (got[7] == 0).all()
    assert 1e-3 < (got - exact).norm() / exact.norm() < 0.02  # lossy it is


@both_ops
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_stays_so(instructions: str, op, dtype: torch.dtype):
    x, ids, weights, packed, table = make_experts(9, 64, 96)
    x = x.to(dtype)
    want = op(x, ids, weights, *packed, table, 4.0, 25.0)
    # Groups with an infinity become NaN in int8; without, SiTU is bounded.
    for bad in (torch.nan, torch.inf, -torch.inf) if op is mxfp4_experts_int8 else (torch.nan,):
        x[4, 40] = bad
        got = op(x, ids, weights, *packed, table, 4.0, 25.0)
        assert got[4].isnan().all()
        assert torch.equal(torch.cat([got[:4], got[5:]]), torch.cat([want[:4], want[5:]]))


@both_ops
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("latent", "width"), [(160, 96), (1056, 800)])  # a row in one piece of the cache, and in two
@pytest.mark.parametrize("some_scale", [None, 60, 200])  # 2^-67 and 2^73: no longer in a bfloat16 weight's exponent
def test_a_row_has_the_same_bits_in_any_company_and_on_any_threads(
    instructions: str, op, dtype: torch.dtype, latent: int, width: int, some_scale: int | None
):
    x, ids, weights, packed, table = make_experts(70, latent, width)
    x = x.to(dtype)
    if some_scale is not None:
        packed[1][:, 3] = packed[5][:, 35, 1] = some_scale
    together = op(x, ids, weights, *packed, table, 4.0, 25.0)
    for rows in (slice(0, 1), slice(3, 5), slice(10, 50)):
        alone = op(x[rows], ids[rows], weights[rows], *packed, table, 4.0, 25.0)
        assert torch.equal(alone, together[rows])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(op(x, ids, weights, *packed, table, 4.0, 25.0), together)
    finally:
        torch.set_num_threads(threads)


def test_long_prompts_run_in_panels(instructions: str):
    # 128 MiB of hidden and output values: 2,000 tokens x 16 choices x 1,536 values x 4 bytes is more.
    x, ids, weights, packed, table = make_experts(2000, 512, 1024, experts=16, topk=16)
    rows = torch.tensor([0, 1, 777, 1364, 1365, 1366, 1999])
    together = mxfp4_experts(x, ids, weights, *packed, table, 4.0, 25.0)[rows]
    assert torch.equal(mxfp4_experts(x[rows], ids[rows], weights[rows], *packed, table, 4.0, 25.0), together)


@both_ops
def test_slots_and_ids_of_either_width_and_any_stride(instructions: str, op):
    x, ids, weights, packed, table = make_experts(9, 64, 96)
    want = op(x, ids, weights, *packed, table, 4.0, 25.0)
    order = torch.tensor([3, 0, 4, 5, 2, 1])
    strided = [torch.stack([t[order], torch.full_like(t, 7)], 1)[:, 0] for t in packed]
    moved = torch.argsort(order)
    assert torch.equal(op(x.t().contiguous().t(), ids.int(), weights, *strided, moved, 4.0, 25.0), want)
    for bad in (-1, 6):
        with pytest.raises(RuntimeError, match="topk_ids"):
            op(x, torch.full_like(ids, bad), weights, *packed, table, 4.0, 25.0)
        with pytest.raises(RuntimeError, match="slot_table"):
            op(x, ids, weights, *packed, torch.full_like(table, bad), 4.0, 25.0)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
)
@pytest.mark.parametrize(
    ("tokens", "columns", "sizes"),
    [
        (1, 64, (7, 130)),
        (2, 40, (130, 3)),
        (3, 70, (9,)),
        (4, 4130, (67,)),
        (5, 100, (64, 1, 3)),
        (8, 2100, (6, 65)),
        (13, 160, (31,)),
        (33, 33, (5,)),
        (0, 8, (4,)),
    ],
)
def test_matvec_equals_float64(
    instructions: str, dtype, weight_dtype, tokens: int, columns: int, sizes: tuple[int, ...]
):
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn((tokens, columns), generator=generator).to(dtype)
    weights = [torch.randn((size, columns), generator=generator).to(weight_dtype) for size in sizes]
    want = torch.cat([x.double() @ weight.double().t() for weight in weights], -1)
    got = matvec(x, weights)
    assert got.dtype == dtype
    # One rounding of the result, beside float32 sums of `columns` products.
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), want, atol=tolerance * columns**0.5, rtol=tolerance)
    for row in range(tokens):
        assert torch.equal(matvec(x[row : row + 1], weights)[0], got[row])


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_matvec_of_every_count_of_rows_and_threads(instructions: str, threads: int):
    """Rows go in groups of one to six, blocks of weights to whichever thread comes free: a row's bits know of neither."""
    generator = torch.Generator().manual_seed(threads)
    x = torch.randn((20, 96), generator=generator).bfloat16()
    weights = [torch.randn((size, 96), generator=generator).bfloat16() for size in (300, 2, 77)]
    whole, before = matvec(x, weights), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for rows in range(1, 20):
            assert torch.equal(matvec(x[20 - rows :], weights), whole[20 - rows :])
    finally:
        torch.set_num_threads(before)


def test_matvec_of_many_rows(instructions: str):
    """From 64 rows on torch's GEMM serves it, except in bfloat16 on AVX2, where panels of 96 rows go through the kernel."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((230, 100), generator=generator).bfloat16()
    weights = [torch.randn((size, 100), generator=generator).bfloat16() for size in (64, 1, 131)]
    got, want = matvec(x, weights), torch.cat([x.double() @ weight.double().t() for weight in weights], -1)
    torch.testing.assert_close(got.double(), want, atol=2**-8 * 10, rtol=2**-8)
    if instructions == "avx2":
        for rows in (slice(0, 1), slice(95, 97), slice(100, 229)):
            assert torch.equal(matvec(x[rows], weights), got[rows])


def test_registration():
    x, weights = torch.randn(3, 8), [torch.randn(4, 8), torch.randn(5, 8)]
    torch.library.opcheck(torch.ops.kimi_k3.matvec.default, (x, weights))
    x, ids, weights, packed, table = make_experts(3, 32, 64)
    for op in (torch.ops.kimi_k3.mxfp4_experts.default, torch.ops.kimi_k3.mxfp4_experts_int8.default):
        torch.library.opcheck(op, (x, ids, weights, *packed, table, 4.0, 25.0))
    with pytest.raises(NotImplementedError, match="mxfp4_experts_int8 has no gradient"):
        mxfp4_experts_int8(x.requires_grad_(), ids, weights, *packed, table, 4.0, 25.0)


def test_wrong_instruction_sets_are_refused():
    with pytest.raises(RuntimeError, match="want 'avx512', 'avx2' or 'generic'"):
        torch.ops.kimi_k3.set_cpu_instructions("sse")
    with pytest.raises(ValueError, match="matvec: want"):
        matvec(torch.randn(2, 3), [torch.randn(4, 5)])


def test_wrong_sizes_of_int8_experts_are_refused():
    x, ids, weights, packed, table = make_experts(3, 64, 96)
    with pytest.raises(ValueError, match="mxfp4_experts_int8: want w1"):
        mxfp4_experts_int8(x[:, :32], ids, weights, *packed, table, 4.0, 25.0)
    with pytest.raises(RuntimeError, match="mxfp4_experts_int8: want w2"):
        torch.ops.kimi_k3.mxfp4_experts_int8(x, ids, weights, *packed[:4], *packed[:2], table, 4.0, 25.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_has_the_bits_of_the_whole_op(instructions: str, dtype: torch.dtype):
    """Rows computed elsewhere, one choice at a time, sum to what the whole op makes of them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(37, 64, generator=generator).to(dtype)
    ids = torch.rand(37, 6, generator=generator).argsort(1)[:, :3].contiguous()
    weights = torch.rand(37, 3, generator=generator)
    sizes = ((6, 96, 64), (6, 96, 64), (6, 64, 96))
    packed = [t for size in sizes for t in mxfp4_quantize(torch.randn(size, generator=generator) * 0.2)]
    run = partial(torch.ops.kimi_k3.mxfp4_experts, x)
    rest = (*packed, torch.arange(6), 4.0, 25.0)
    single = [run(ids[:, a : a + 1], torch.ones(37, 1), *rest) for a in range(3)]
    combined = torch.ops.kimi_k3.mxfp4_combine(torch.stack(single, 1), weights)
    assert torch.equal(combined, run(ids, weights, *rest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 5, 33])
def test_combine_of_any_width(instructions: str, dtype: torch.dtype, width: int):
    generator = torch.Generator().manual_seed(0)
    outputs, weights = torch.randn(9, 3, width, generator=generator).to(dtype), torch.rand(9, 3, generator=generator)
    got = torch.ops.kimi_k3.mxfp4_combine(outputs, weights)
    want = (outputs.double() * weights.double()[..., None]).sum(1)
    torch.testing.assert_close(got.double(), want, atol=2**-7 if dtype == torch.bfloat16 else 1e-6, rtol=2**-7)


def test_more_rows_than_are_held_at_once(instructions: str):
    """One expert for a thousand tokens, rows of several pieces."""
    x, _, weights, packed, table = make_experts(1100, 1056, 64, topk=1)
    ids = torch.zeros(1100, 1, dtype=torch.int64)
    x, rows = x.bfloat16(), torch.tensor([0, 511, 512, 1023, 1024, 1099])
    together = mxfp4_experts(x, ids, weights, *packed, table, 4.0, 25.0)
    assert torch.equal(mxfp4_experts(x[rows], ids[rows], weights[rows], *packed, table, 4.0, 25.0), together[rows])
