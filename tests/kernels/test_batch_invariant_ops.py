"""What batch-invariant inference asks of the ops: a row's bits do not depend on its company, its piece or its form."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_kernels import (
    head_matvec,
    kda_recurrent,
    kda_recurrent_export,
    linear_rows,
    mxfp4_quantize,
    native_library,
    short_conv_export,
)
from kimi_k3_kernels.head_matvec.op import head_matvec_op
from kimi_k3_kernels.kda.op import kda_recurrent_export_op, kda_recurrent_op
from kimi_k3_kernels.kda.reference import kda_recurrent_reference
from kimi_k3_kernels.library import by_rows
from kimi_k3_kernels.linear_rows.op import linear_rows_op
from kimi_k3_kernels.short_conv.op import short_conv_export_op

sys.path.insert(0, str(Path(__file__).parent))
from inputs import kda_inputs, packed

DTYPES = [torch.float32, torch.bfloat16]
COUNTS = (1, 7, 64, 500)
Op = Callable[[str], Callable[..., Any]]


@pytest.fixture(params=["avx512", "avx2", "generic", "reference"])
def op(request: pytest.FixtureRequest) -> Iterator[Op]:
    """Ops by name: the compiled kernels with one set of instructions, or the plain definitions."""
    if request.param == "reference":
        yield lambda name: getattr(torch.ops.kimi_k3, name).reference
        return
    if native_library is None:
        pytest.skip("the CPU kernels are not built")
    try:
        before = torch.ops.kimi_k3.set_cpu_instructions(request.param)
    except RuntimeError as error:
        pytest.skip(str(error).splitlines()[0])
    yield lambda name: getattr(torch.ops.kimi_k3, name).default
    torch.ops.kimi_k3.set_cpu_instructions(before)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def poisoned_outputs() -> Iterator[None]:
    """New tensors are full of NaN: an element that no kernel wrote is seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_rows_are_their_own(run: Callable[..., Tensor], *tensors: Tensor) -> None:
    """run(rows of tensors) gives each row the same bits in parts of 1, 7, 64 and all rows, wherever a part begins."""
    whole = run(*tensors)
    for count in COUNTS:
        for first in (3, 129):
            part = run(*(x[first : first + count] for x in tensors))
            assert torch.equal(part, whole[first : first + count]), (count, first)


# --- KDA


def test_recurrent_equals_float64(op: Op, poisoned_outputs: None) -> None:
    lengths = [1, 0, 37, 5]
    inputs = kda_inputs(43, 3, 20, 37, torch.float32)
    pool = normal(6, 3, 20, 37)
    slots = torch.tensor([0, 1, -1, 3])
    states = torch.cat([pool[:2], torch.zeros(1, 3, 20, 37), pool[3:4]]).double()
    want, want_states = kda_recurrent_reference(*(x.double() for x in inputs), states, packed(lengths))
    got = op("kda_recurrent")(*inputs, pool, slots, torch.tensor([0, 1, 2, 4]), packed(lengths))
    torch.testing.assert_close(got.double(), want, atol=5e-6, rtol=1e-5)  # as kda_step_ in test_native_kda.py
    torch.testing.assert_close(pool[[0, 1, 2, 4]].double(), want_states, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(4, 128, 128), (3, 20, 37)])
def test_recurrent_has_the_bits_of_steps(op: Op, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    heads, key_dim, value_dim = sizes
    lengths, slots = [1, 40, 0, 23], torch.tensor([2, -1, 1, 0])
    inputs, cu = kda_inputs(64, *sizes, dtype), packed(lengths)
    pool = normal(6, heads, key_dim, value_dim)
    stepped, in_pieces = pool.clone(), pool.clone()
    o = op("kda_recurrent")(*inputs, pool, slots, torch.tensor([2, 3, 1, 4]), cu)
    for n, write in enumerate([2, 3, 1, 4]):
        read = int(slots[n])
        for t in range(int(cu[n]), int(cu[n + 1])):
            row = [x[t : t + 1] for x in inputs]
            got = op("kda_step_")(*row, stepped, torch.tensor([read]), torch.tensor([write]))
            assert torch.equal(got[0], o[t]), (n, t)
            read = write
    assert torch.equal(stepped, pool)
    # in two pieces, side by side with other rows
    cut, write = int(cu[1]) + 17, torch.tensor([3, 5])
    first = [torch.cat([x[1:18], x[41:64]]) for x in inputs]
    got = op("kda_recurrent")(*first, in_pieces, torch.tensor([-1, 0]), write, packed([17, 23]))
    assert torch.equal(got, torch.cat([o[1:cut], o[41:64]]))
    got = op("kda_recurrent")(*(x[cut:41] for x in inputs), in_pieces, write[:1], write[:1], packed([23]))
    assert torch.equal(got, o[cut:41]) and torch.equal(in_pieces[3], pool[3]) and torch.equal(in_pieces[5], pool[4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_lone_token_in_a_chunk_batch_has_the_bits_of_the_step(instructions: str, dtype: torch.dtype) -> None:
    inputs, pool = kda_inputs(25, 3, 20, 37, dtype), normal(6, 3, 20, 37)
    stepped, slots = pool.clone(), torch.tensor([0, 1, -1, 1])
    writes = torch.tensor([0, 2, 3, -1])  # in place, between long neighbours, fresh, and not kept
    cu = packed([1, 22, 1, 1])
    o = torch.ops.kimi_k3.kda_chunk(*inputs, pool, slots, writes, cu)
    rows = torch.tensor([0, 23, 24])
    lone = torch.tensor([0, 2, 3])
    got = torch.ops.kimi_k3.kda_step_(*(x[rows] for x in inputs), stepped, slots[lone], writes[lone])
    assert torch.equal(o[rows], got) and torch.equal(pool[[0, 3]], stepped[[0, 3]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(20, 128, 64, 128, 256), (3, 24, 8, 16, 20)])
def test_a_lone_token_in_a_prefill_batch_has_the_bits_of_the_decode_step(instructions: str, dtype, sizes) -> None:
    heads, nope, rope, value, rank = sizes
    pasts, news = torch.tensor([130, 0, 64, 511]), [1, 70, 1, 1]
    cu, tables = packed(news), torch.arange(40, dtype=torch.int32).view(4, 10)
    pool = normal(40, 64, rank + rope, dtype=dtype)
    weight = normal(heads * (nope + value), rank, seed=1, dtype=dtype) * rank**-0.5
    q, latent = normal(73, heads, nope + rope, seed=2, dtype=dtype), normal(73, rank + rope, seed=3, dtype=dtype)
    stored = pool.clone()
    got = torch.ops.kimi_k3.mla_prefill(q, latent, weight, pool, tables, pasts, cu, 0.1)
    assert torch.equal(pool, stored)  # the new latents need not be in the pool: these are read from the argument
    lone, rows = torch.tensor([0, 2, 3]), torch.tensor([0, 71, 72])
    pool.view(-1, rank + rope)[tables[lone, pasts[lone] // 64].long() * 64 + pasts[lone] % 64] = latent[rows]
    to_keys, to_values = weight.view(heads, -1, rank).split([nope, value], dim=1)
    queries = torch.cat([head_matvec(q[rows, :, :nope], to_keys, transposed=True), q[rows, :, nope:]], dim=-1)
    context = torch.ops.kimi_k3.mla_decode(queries, pool, tables[lone], pasts[lone] + 1, 0.1, rank)
    assert torch.equal(head_matvec(context, to_values), got[rows])
    alone = torch.ops.kimi_k3.mla_prefill(
        q[1:71], latent[1:71], weight, pool, tables[1:2], pasts[1:2], packed([70]), 0.1
    )
    assert torch.equal(alone, got[1:71])


@pytest.mark.parametrize("scan", ["kda_recurrent", "kda_chunk"])
def test_an_exported_state_is_that_of_a_run_that_ends_there(op: Op, scan: str) -> None:
    lengths = [1, 30, 0, 12]
    inputs, cu, pool = kda_inputs(43, 2, 16, 16, torch.float32), packed(lengths), normal(10, 2, 16, 16)
    before, slots = pool.clone(), torch.tensor([0, -1, 2, 3])
    # the end of one token, inside, at an end, and over a slot that a sequence reads
    at, to = torch.tensor([20, 1, 31, 43, 33, 2, 25]), torch.tensor([5, 6, 7, 0, 8, 9, -1])
    plain = before.clone()
    want = op(scan)(*inputs, plain, slots, torch.tensor([1, 4, 2, 3]), cu)
    got = op(f"{scan}_export")(*inputs, pool, slots, torch.tensor([1, 4, 2, 3]), cu, at, to)
    exact = {"atol": 0, "rtol": 0} if scan == "kda_recurrent" else {"atol": 2e-6, "rtol": 1e-5}  # tiles end elsewhere
    torch.testing.assert_close(got, want, **exact)
    torch.testing.assert_close(pool[[1, 4, 2, 3]], plain[[1, 4, 2, 3]], **exact)
    for position, slot in zip(at.tolist(), to.tolist()):
        n = 0 if position == 1 else 1 if position <= 31 else 3
        part, alone = [x[int(cu[n]) : position] for x in inputs], before.clone()
        op(scan)(*part, alone, slots[n : n + 1], torch.tensor([9]), packed([len(part[0])]))
        if slot >= 0:
            torch.testing.assert_close(pool[slot], alone[9], **exact)


def test_recurrent_refuses_what_it_cannot_keep() -> None:
    inputs, slot = kda_inputs(3, 2, 8, 12, torch.float32), torch.tensor([0])
    pool = torch.zeros(2, 2, 8, 12)
    with pytest.raises(ValueError, match=r"kda_recurrent: want state_pool in torch.float32"):
        kda_recurrent(*inputs, pool.bfloat16(), slot, slot, packed([3]))
    inputs[0].requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradient"):
        kda_recurrent(*inputs, pool, slot, slot, packed([3]))
    with pytest.raises(NotImplementedError, match="no gradient"):
        kda_recurrent_export(*inputs, pool, slot, slot, packed([3]), slot + 1, slot)
    with torch.no_grad():
        kda_recurrent(*inputs, pool, slot, slot, packed([3]))
        for at in (0, 4):
            with pytest.raises((ValueError, RuntimeError), match=r"want export_at in 1\.\.3"):
                kda_recurrent_export(*inputs, pool, slot, slot, packed([3]), torch.tensor([at]), slot)
        with pytest.raises(ValueError, match="export_at and export_slots"):
            kda_recurrent_export(*inputs, pool, slot, slot, packed([3]), torch.tensor([1, 2]), slot)


# --- short convolution


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "taps"), [(96, 4), (37, 4), (20, 3)])
def test_convolution_of_many_has_the_bits_of_steps(op: Op, threads: int, dtype, channels: int, taps: int) -> None:
    x, weight = normal(50, channels, dtype=dtype), normal(channels, taps, seed=1, dtype=dtype)
    pool = normal(3, taps - 1, channels, seed=2, dtype=dtype)
    stepped, slot = pool.clone(), torch.tensor([0])
    out = op("short_conv")(x, weight, pool, slot, slot, packed([50]))
    rows = [op("short_conv_step_")(x[t : t + 1], weight, stepped, slot, slot) for t in range(50)]
    assert torch.equal(torch.cat(rows), out) and torch.equal(stepped, pool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_exported_window_holds_the_inputs_before_it(op: Op, dtype: torch.dtype) -> None:
    lengths = [2, 9, 0, 1, 5]
    x, weight = normal(17, 24, dtype=dtype), normal(24, 4, seed=1, dtype=dtype)
    cu, slots, writes = packed(lengths), torch.tensor([0, -1, 2, 3, 4]), torch.tensor([0, 1, 2, 3, 5])
    pool = normal(25, 3, 24, seed=2, dtype=dtype)
    before, plain = pool.clone(), pool.clone()
    want = op("short_conv")(x, weight, plain, slots, writes, cu)
    at = torch.arange(1, 18)
    to = at + 7
    to[0], to[9] = -1, 4  # nowhere; a slot that another sequence reads
    assert torch.equal(op("short_conv_export")(x, weight, pool, slots, writes, cu, at, to), want)
    assert torch.equal(pool[writes], plain[writes])
    for position, slot in zip(at.tolist(), to.tolist()):
        n = max(n for n in range(5) if cu[n] < position)
        past = before[slots[n]] if slots[n] >= 0 else torch.zeros(3, 24, dtype=dtype)
        window = torch.cat([past, x[int(cu[n]) : position]])[-3:]
        if slot >= 0:
            assert torch.equal(pool[slot], window), position
    untouched = [i for i in range(25) if i not in {*writes.tolist(), *to.tolist()}]
    assert torch.equal(pool[untouched], before[untouched])


def test_exports_that_do_not_fit_are_refused() -> None:
    x, weight, pool, slot = normal(4, 6), normal(6, 4), normal(3, 3, 6), torch.tensor([0])
    for at in (0, 5):
        with pytest.raises((ValueError, RuntimeError), match=r"want export_at in 1\.\.4"):
            short_conv_export(x, weight, pool, slot, slot, packed([4]), torch.tensor([at]), slot)
    with pytest.raises(ValueError, match="export_at and export_slots"):
        short_conv_export(x, weight, pool, slot, slot, packed([4]), torch.tensor([1, 2]), slot)


# --- products


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("depth", "outputs"), [(192, (70, 4)), (37, (5,)), (1536, (130,))])
def test_linear_rows_are_right_and_their_own(
    op: Op, threads: int, poisoned_outputs: None, dtype, depth, outputs
) -> None:
    x = normal(629, depth, dtype=dtype)
    weights = [normal(n, depth, seed=n, dtype=dtype) for n in outputs]
    run = op("linear_rows")
    want = torch.cat([x.double() @ weight.double().t() for weight in weights], dim=1)
    # float32: sums of 1,536 products of order 1. bfloat16 rounds the result once, to 2^-9 of it.
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-4, torch.bfloat16: 2e-4}[dtype]
    torch.testing.assert_close(
        run(x, weights).double(), want, atol=tolerance, rtol=4e-3 if dtype.itemsize == 2 else 1e-6
    )
    assert_rows_are_their_own(lambda rows: run(rows, weights), x)
    spread = torch.stack([x, x], 1)[:, 0]
    assert torch.equal(run(spread, weights), run(x, weights))


def test_linear_rows_widens_a_weight(op: Op) -> None:
    x, weight = normal(70, 64), normal(9, 64, seed=1, dtype=torch.bfloat16)
    assert_rows_are_their_own(lambda rows: op("linear_rows")(rows, [weight]), x.repeat(8, 1)[:520])
    # The same sums, of up to 64 products of size 1, in another order.
    torch.testing.assert_close(
        op("linear_rows")(x, [weight]), op("linear_rows")(x, [weight.float()]), atol=2e-5, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("heads", "depth", "outputs"), [(4, 32, 64), (3, 37, 75), (2, 256, 128)])
def test_head_matvec_is_right_and_its_rows_their_own(
    op: Op, threads: int, poisoned_outputs: None, dtype, transposed: bool, heads: int, depth: int, outputs: int
) -> None:
    x = normal(629, heads, depth + 3, dtype=dtype)[..., :depth]  # as the layer's q_nope lies in q
    stored = normal(heads, outputs + depth, outputs + depth + 1, seed=1, dtype=dtype)
    weight = stored[:, :depth, :outputs] if transposed else stored[:, depth:, :depth]
    run = op("head_matvec")
    want = torch.einsum("thk,hkm->thm" if transposed else "thk,hmk->thm", x.double(), weight.double())
    tolerance = {torch.float64: 1e-12, torch.float32: 5e-5, torch.bfloat16: 5e-5}[dtype]
    torch.testing.assert_close(
        run(x, weight, transposed).double(), want, atol=tolerance, rtol=4e-3 if dtype.itemsize == 2 else 1e-6
    )
    assert_rows_are_their_own(lambda rows: run(rows, weight, transposed), x)
    assert run(x[:0], weight, transposed).shape == (0, heads, outputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packing", ["mxfp4_experts", "dense_experts"])
def test_experts_rows_are_their_own(op: Op, threads: int, dtype: torch.dtype, packing: str) -> None:
    slots, latent, width = 5, 64, 96
    stacks = [
        normal(slots, *s, seed=i, dtype=dtype)
        for i, s in enumerate([(width, latent), (width, latent), (latent, width)])
    ]
    if packing == "mxfp4_experts":
        stacks = [tensor for stack in stacks for tensor in mxfp4_quantize(stack * 0.1)]
    x, weights = normal(629, latent, dtype=dtype), torch.rand(629, 2, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(0, slots, (629, 2), generator=torch.Generator().manual_seed(0))
    run = op(packing)
    assert_rows_are_their_own(
        lambda x, ids, p: run(x, ids, p, *stacks, torch.arange(slots), 4.0, 25.0), x, ids, weights
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [192, 37, 1536])
def test_depth_mixes_are_their_own(op: Op, threads: int, dtype: torch.dtype, width: int) -> None:
    rows, weight = normal(629, 4, width, dtype=dtype), normal(width, seed=1)
    run = op("attn_res_mix")

    def mix(rows: Tensor) -> Tensor:
        return run(rows[:, 0], rows[:, 1:].transpose(0, 1), torch.tensor(3), weight, 1e-5)

    assert_rows_are_their_own(mix, rows)


# --- torch's own functions


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "softplus": F.softplus, "silu": F.silu,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("width", [4, 20, 96, 640, 4096, 40000])
def test_functions_by_rows_are_their_own(threads: int, dtype: torch.dtype, name: str, width: int) -> None:
    x = normal(max(10, 20000 // width), width, dtype=dtype) * 3
    whole = by_rows(FUNCTIONS[name], x)
    torch.testing.assert_close(whole, FUNCTIONS[name](x))
    for count in (1, 2, 7, 8):
        assert torch.equal(by_rows(FUNCTIONS[name], x[1 : 1 + count]), whole[1 : 1 + count])


def test_by_rows_takes_several_tensors_and_gives_several() -> None:
    x, y = normal(9, 3, 5), normal(9, 2)
    product, total = by_rows(lambda a, b: (a[:, 0, :2] * b, a.sum((1, 2))), x, y)
    torch.testing.assert_close(product, x[:, 0, :2] * y)
    torch.testing.assert_close(total, x.sum((1, 2)))
    assert by_rows(torch.sigmoid, x[:0]).shape == (0, 3, 5)


# --- registration


def test_registrations_and_errors() -> None:
    slot, cu = torch.tensor([0, 1]), packed([4, 2])
    inputs, pool = kda_inputs(6, 2, 8, 12, torch.float32), torch.zeros(4, 2, 8, 12)
    at, to = torch.tensor([2, 5]), torch.tensor([2, 3])
    torch.library.opcheck(kda_recurrent_op, (*inputs, pool, slot, slot, cu))
    torch.library.opcheck(kda_recurrent_export_op, (*inputs, pool, slot, slot, cu, at, to))
    torch.library.opcheck(short_conv_export_op, (normal(6, 8), normal(8, 4), normal(4, 3, 8), slot, slot, cu, at, to))
    torch.library.opcheck(linear_rows_op, (normal(40, 8), [normal(3, 8), normal(4, 8)]))
    for transposed, weight in ((False, normal(3, 5, 8)), (True, normal(3, 8, 5))):
        torch.library.opcheck(head_matvec_op, (normal(4, 3, 8), weight, transposed))
    with pytest.raises(ValueError, match=r"linear_rows: want x \[T, K\]"):
        linear_rows(normal(2, 8), [normal(3, 7)])
    with pytest.raises(ValueError, match=r"head_matvec: want .* weight \[H, K, M\]"):
        head_matvec(normal(2, 3, 8), normal(3, 5, 8), transposed=True)
    with pytest.raises(ValueError, match="of one dtype"):
        head_matvec(normal(2, 3, 8), normal(3, 5, 8).bfloat16())


def test_ops_are_one_graph_for_all_sizes() -> None:
    weight, heads = [normal(5, 8), normal(3, 8)], normal(2, 8, 6)

    def run(x: Tensor) -> Tensor:
        return head_matvec(linear_rows(x, weight)[:, None].expand(-1, 2, -1), heads, transposed=True)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 9, 40):
        x = normal(tokens, 8)
        assert torch.equal(compiled(x), run(x))
