"""The compiled KDA, short convolution and depth mix, for every instruction set, against their equations in float64.

Memory that an op allocates starts as NaN here, so an output element that nobody wrote is seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kimi_k3_kernels
from kimi_k3_kernels import attn_res_mix, kda_chunk, kda_chunk_export, kda_step_, short_conv, short_conv_step_
from kimi_k3_kernels.kda.reference import kda_recurrent_reference

sys.path.insert(0, str(Path(__file__).parent))
from inputs import kda_inputs, packed

pytestmark = pytest.mark.skipif(kimi_k3_kernels.native_library is None, reason="no compiled kernels")
EPS = 1e-5
LENGTHS = [130, 1, 0, 64, 65, 17]
READ, WRITE = torch.tensor([0, 1, 2, 3, -1, 5]), torch.tensor([7, 1, 2, 3, 4, -1])
# Whole vectors, a part of one, several panels, K3's own.
SHAPES = [(8, 12), (16, 16), (20, 37), (128, 128)]


@pytest.fixture(autouse=True)
def _poisoned_memory(instructions: str) -> Iterator[None]:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    yield
    torch.use_deterministic_algorithms(False)


def bound_for(dtype: torch.dtype, want: Tensor) -> dict[str, float]:
    """float32: two orders of one sum of 130 terms of order 1. bfloat16: half a unit in the last of 8 bits of the result."""
    if dtype == torch.bfloat16:
        return {"atol": 1e-5 * max(1.0, want.abs().max().item()), "rtol": 2**-8}
    return {"atol": 5e-6, "rtol": 1e-5}


def initial_states(pool: Tensor, read: Tensor) -> Tensor:
    states = pool[read.clamp(min=0)].double()
    states[read < 0] = 0
    return states


def by_recurrence(inputs: list[Tensor], states: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    return kda_recurrent_reference(*(x.double() for x in inputs), states, cu_seqlens)


@pytest.mark.parametrize(("key_dim", "value_dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lowest", [-5.0, -0.01, -30.0, -300.0])
def test_chunk_equals_the_recurrence(key_dim: int, value_dim: int, dtype: torch.dtype, lowest: float):
    inputs = kda_inputs(sum(LENGTHS), 2, key_dim, value_dim, dtype, lowest)
    pool = torch.randn(9, 2, key_dim, value_dim)
    before = pool.clone()
    want, states = by_recurrence(inputs, initial_states(pool, READ), packed(LENGTHS))
    o = kda_chunk(*inputs, pool, READ, WRITE, packed(LENGTHS))
    torch.testing.assert_close(o.double(), want, **bound_for(dtype, want))
    for n, slot in enumerate(WRITE.tolist()):
        if slot >= 0:
            torch.testing.assert_close(pool[slot].double(), states[n], atol=5e-6, rtol=1e-5)
    assert torch.equal(pool[[0, 5, 6, 8]], before[[0, 5, 6, 8]])


@pytest.mark.parametrize("decay", ["bound", "zero", "mixed", "one channel", "just over"])
def test_decays_at_the_ends_of_their_range_stay_right(decay: str):
    inputs = kda_inputs(130, 2, 32, 32, torch.float32)
    g = inputs[3]
    if decay == "bound":
        g.fill_(-5.0)
    elif decay == "zero":
        g.zero_()
    elif decay == "mixed":
        g[::2], g[1::2] = -5.0, 0.0
    elif decay == "one channel":  # a sudden drop inside a tile whose other channels hardly decay
        g.mul_(1e-3)[7::16, :, 3] = -1000.0
    else:  # a tile's sum just beyond the bound of the fast form
        g.fill_(-5.01)
    pool, slots = torch.randn(2, 2, 32, 32), torch.tensor([1])
    want, states = by_recurrence(inputs, pool[1:].double(), packed([130]))
    o = kda_chunk(*inputs, pool, slots, slots, packed([130]))
    torch.testing.assert_close(o.double(), want, atol=5e-6, rtol=1e-5)
    torch.testing.assert_close(pool[1:].double(), states, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize(("key_dim", "value_dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_step_equals_the_recurrence(key_dim: int, value_dim: int, dtype: torch.dtype, index_dtype: torch.dtype):
    inputs = kda_inputs(6, 3, key_dim, value_dim, dtype)
    pool = torch.randn(9, 3, key_dim, value_dim)
    want, states = by_recurrence(inputs, initial_states(pool, READ), packed([1] * 6))
    o = kda_step_(*inputs, pool, READ.to(index_dtype), WRITE.to(index_dtype))
    torch.testing.assert_close(o.double(), want, **bound_for(dtype, want))
    torch.testing.assert_close(pool[WRITE[:5]].double(), states[:5], atol=5e-6, rtol=1e-5)


def test_all_slots_are_read_before_any_is_written():
    inputs = kda_inputs(3, 2, 16, 16, torch.float32)
    read, write = torch.tensor([0, 0, 1]), torch.tensor([1, 0, 2])
    pool = torch.randn(3, 2, 16, 16)
    windows, x, weight = torch.randn(3, 3, 40), torch.randn(3, 40), torch.randn(40, 4)
    want, states = by_recurrence(inputs, pool[read].double(), packed([1] * 3))
    for run in (kda_step_, lambda *args: kda_chunk(*args, packed([1] * 3))):
        after = pool.clone()
        torch.testing.assert_close(run(*inputs, after, read, write).double(), want, atol=5e-6, rtol=1e-5)
        torch.testing.assert_close(after[write].double(), states, atol=5e-6, rtol=1e-5)
    for run in (short_conv_step_, lambda *args: short_conv(*args, packed([1] * 3))):
        after = windows.clone()
        torch.testing.assert_close(
            run(x, weight, after, read, write), convolution(x[:, None], weight, windows[read])[:, 0]
        )
        assert torch.equal(after[write], torch.cat([windows[read][:, 1:], x[:, None]], 1))


def test_export_writes_the_state_of_each_asked_for_prefix():
    lengths, at = [130, 40], [1, 64, 130, 131, 170, 64]
    inputs = kda_inputs(170, 2, 16, 24, torch.float32)
    pool = torch.randn(2 + len(at), 2, 16, 24)
    start, slots = pool.clone(), torch.tensor([0, 1])
    export_slots = torch.tensor([2, 3, 4, 5, -1, 7])
    want, _ = by_recurrence(inputs, start[:2].double(), packed(lengths))
    o = kda_chunk_export(*inputs, pool, slots, slots, packed(lengths), torch.tensor(at), export_slots)
    torch.testing.assert_close(o.double(), want, atol=5e-6, rtol=1e-5)
    for position, slot in zip(at, export_slots.tolist()):
        n, first = (0, 0) if position <= 130 else (1, 130)
        rows = [x[first:position] for x in inputs]
        _, states = by_recurrence(rows, start[n : n + 1].double(), packed([position - first]))
        if slot >= 0:
            torch.testing.assert_close(pool[slot].double(), states[0], atol=5e-6, rtol=1e-5)
    assert torch.equal(pool[6], start[6])
    with pytest.raises(RuntimeError, match="want export_at"):
        kda_chunk_export(*inputs, pool, slots, slots, packed(lengths), torch.tensor([0]), torch.tensor([2]))


def permuted(x: Tensor) -> Tensor:
    """The same values with the dimensions in the opposite order in memory."""
    return x.permute(*reversed(range(x.ndim))).contiguous().permute(*reversed(range(x.ndim)))


def test_strides_and_threads_change_no_bit():
    inputs = kda_inputs(130, 4, 32, 40, torch.bfloat16)
    pool, slots, cu = torch.randn(3, 4, 32, 40), torch.tensor([0, 1]), packed([67, 63])
    x, weight, windows = torch.randn(130, 2500), torch.randn(2500, 4), torch.randn(3, 3, 2500)
    bank, mix_weight, blocks = torch.randn(5, 130, 700), torch.randn(700), torch.tensor(4)
    # v as a model has it: a slice of one tensor for q, k and v
    sliced = [*inputs[:2], torch.stack([inputs[2], inputs[2]], 1)[:, 1], *inputs[3:]]
    results = []
    threads = torch.get_num_threads()
    for tokens, view in ((inputs, Tensor.contiguous), (sliced, Tensor.contiguous), (inputs, permuted)):
        for count in (1, 2):
            torch.set_num_threads(count)
            states = [pool.clone(), permuted(pool), windows.clone(), permuted(windows)]
            tokens = [view(t) for t in tokens] if view is permuted else tokens
            results.append([
                kda_chunk(*tokens, states[0], slots, slots, cu),
                kda_step_(*(t[:2] for t in tokens), states[0], slots, slots),
                short_conv(view(x), view(weight), states[2], slots, slots, cu),
                short_conv_step_(view(x)[:2], view(weight), states[2], slots, slots),
                attn_res_mix(view(bank[4]), view(bank[:4]), blocks, mix_weight, EPS),
                states[0], states[2],
            ])  # fmt: skip
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("permute_pool", [False, True])
@pytest.mark.parametrize("tokens", [0, 1])
def test_empty_and_single_token_inputs(tokens: int, permute_pool: bool):
    inputs = kda_inputs(tokens, 2, 16, 24, torch.float32)
    pool, slots = torch.randn(2, 2, 16, 24), torch.tensor([1])
    want, states = by_recurrence(inputs, pool[1:].double(), packed([tokens]))
    after = permuted(pool) if permute_pool else pool.clone()
    o = kda_chunk(*inputs, after, slots, slots, packed([tokens]))
    torch.testing.assert_close(o.double(), want, atol=5e-6, rtol=1e-5)
    torch.testing.assert_close(after[1:].double(), states, atol=5e-6, rtol=1e-5)
    no_rows = kda_step_(*(x[:0] for x in inputs), after, slots[:0], slots[:0])
    assert no_rows.shape == (0, 2, 24)


def test_a_pool_without_slots_reads_as_zeros():
    inputs = kda_inputs(20, 2, 16, 24, torch.float32)
    nowhere = torch.tensor([-1])
    want, _ = by_recurrence(inputs, torch.zeros(1, 2, 16, 24, dtype=torch.float64), packed([20]))
    o = kda_chunk(*inputs, torch.empty(0, 2, 16, 24), nowhere, nowhere, packed([20]))
    torch.testing.assert_close(o.double(), want, atol=5e-6, rtol=1e-5)


def test_slots_and_boundaries_outside_their_tensors_are_refused():
    inputs = kda_inputs(4, 2, 16, 24, torch.float32)
    pool, slots = torch.randn(2, 2, 16, 24), torch.tensor([0])
    with pytest.raises(RuntimeError, match="slots below 2"):
        kda_chunk(*inputs, pool, slots, torch.tensor([2]), packed([4]))
    with pytest.raises(RuntimeError, match="ends at 4"):
        kda_chunk(*inputs, pool, slots, slots, packed([5]))
    with pytest.raises(RuntimeError, match="num_blocks"):
        attn_res_mix(torch.randn(2, 8), torch.randn(3, 2, 8), torch.tensor(4), torch.randn(8), EPS)


def convolution(x_NTC: Tensor, weight: Tensor, windows: Tensor) -> Tensor:
    """The sum over taps, written as torch's own depthwise convolution."""
    inputs = torch.cat([windows, x_NTC], 1).mT
    return F.silu(F.conv1d(inputs, weight[:, None], groups=weight.shape[0])).mT


@pytest.mark.parametrize("channels", [1, 40, 2500])
@pytest.mark.parametrize("taps", [2, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_short_conv_equals_the_convolution(channels: int, taps: int, dtype: torch.dtype, weight_dtype: torch.dtype):
    lengths = [70, 0, 1, 33]
    read, write = torch.tensor([0, 1, -1, 3], dtype=torch.int32), torch.tensor([4, 1, 2, -1], dtype=torch.int32)
    x, weight = torch.randn(sum(lengths), channels).to(dtype), torch.randn(channels, taps).to(weight_dtype)
    pool = torch.randn(6, taps - 1, channels).to(dtype)
    windows = initial_states(pool, read)
    after, stepped = pool.clone(), pool.clone()
    got = short_conv(x, weight, after, read, write, packed(lengths))
    steps = short_conv_step_(x[:4], weight, stepped, read, write)
    for n, part in enumerate(x.split(lengths)):
        if len(part):
            want = convolution(part[None].double(), weight.double(), windows[n : n + 1])[0]
            rows = slice(sum(lengths[:n]), sum(lengths[: n + 1]))
            torch.testing.assert_close(got[rows].double(), want, **bound_for(dtype, want))
        newest = torch.cat([windows[n], part.double()])[len(part) :]
        step = convolution(x[n].double()[None, None], weight.double(), windows[n : n + 1])[0, 0]
        torch.testing.assert_close(steps[n].double(), step, **bound_for(dtype, step))
        if write[n] >= 0:
            assert torch.equal(after[write[n]].double(), newest)
            assert torch.equal(stepped[write[n]].double(), torch.cat([windows[n], x[n : n + 1].double()])[1:])
    assert torch.equal(after[[0, 3, 5]], pool[[0, 3, 5]])


@pytest.mark.parametrize("value", [-200.0, -87.5, -1.0, 0.0, 1.0, 87.5, 200.0])
def test_silu_holds_over_the_whole_range(value: float):
    x, weight = torch.full((1, 40), value), torch.tensor([[0.0, 1.0]]).expand(40, 2)
    nowhere = torch.tensor([-1])
    got = short_conv_step_(x, weight, torch.zeros(1, 1, 40), nowhere, nowhere)
    torch.testing.assert_close(got.double(), F.silu(x.double()), atol=1e-35, rtol=1e-6)


@pytest.mark.parametrize("width", [1, 70, 1536])
@pytest.mark.parametrize("blocks", [0, 1, 4])
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_mix_equals_the_equation(width: int, blocks: int, tokens: int, dtype: torch.dtype, weight_dtype: torch.dtype):
    running_sum, bank = torch.randn(tokens, width).to(dtype), (3 * torch.randn(4, tokens, width)).to(dtype)
    bank[blocks:] = torch.nan  # what is not sealed is never read
    weight = (torch.randn(width) * width**-0.5).to(weight_dtype)
    sources = torch.stack([*bank[:blocks], running_sum]).double()
    scores = (sources * weight.double()).sum(-1) * torch.rsqrt(sources.square().mean(-1) + EPS)
    want = (torch.softmax(scores, 0)[..., None] * sources).sum(0)
    got = attn_res_mix(running_sum, bank, torch.tensor([blocks], dtype=torch.int32), weight, EPS)
    torch.testing.assert_close(got.double(), want, **bound_for(dtype, want if want.numel() else weight))


def test_offsets_beyond_2_to_the_31_elements():
    # Only the pages that are used exist; filling them all is what this test avoids.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        memory = torch.empty(2**31 + 4096)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    far = memory[2**31 :]
    inputs = kda_inputs(20, 1, 16, 16, torch.float32)
    pool, slots, cu = memory.as_strided((2, 1, 16, 16), (2**31, 256, 16, 1)), torch.tensor([1]), packed([20])
    want, states = by_recurrence(inputs, torch.zeros(1, 1, 16, 16, dtype=torch.float64), cu)
    o = kda_chunk(*inputs, pool, torch.tensor([-1]), slots, cu)
    torch.testing.assert_close(o.double(), want, atol=5e-6, rtol=1e-5)
    torch.testing.assert_close(far[:256].view(1, 1, 16, 16).double(), states, atol=5e-6, rtol=1e-5)
    want, states = by_recurrence([x[:1] for x in inputs], states, packed([1]))
    torch.testing.assert_close(
        kda_step_(*(x[:1] for x in inputs), pool, slots, slots).double(), want, atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(far[:256].view(1, 1, 16, 16).double(), states, atol=1e-5, rtol=1e-5)

    windows, x, weight = memory.as_strided((2, 3, 40), (2**31, 40, 1)), torch.randn(1, 40), torch.randn(40, 4)
    far[:120] = torch.randn(120)
    want = convolution(x[None], weight, windows[1:])[0]
    torch.testing.assert_close(short_conv_step_(x, weight, windows, slots, torch.tensor([-1])), want)
    torch.testing.assert_close(short_conv(x, weight, windows, slots, slots, packed([1])), want)

    bank = memory.as_strided((2, 1, 40), (2**31, 40, 1))
    bank[0], bank[1] = 0.0, 1.0
    mixed = attn_res_mix(x, bank, torch.tensor(2), torch.zeros(40), EPS)
    torch.testing.assert_close(mixed, (x + 1) / 3)  # a weight of zero is the plain average
