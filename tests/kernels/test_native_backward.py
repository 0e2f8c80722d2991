"""The compiled gradients, with each instruction set, against the references in float64 (whose own are checked numerically)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kimi_k3_kernels

sys.path.insert(0, str(Path(__file__).parent))
from inputs import kda_inputs, packed

OPS = torch.ops.kimi_k3
pytestmark = pytest.mark.skipif(kimi_k3_kernels.native_library is None, reason="the CPU kernels are not built")
# Of a gradient's largest value. float32: sums of up to 1,100 terms in another order; bfloat16: one rounding of the
# result, where the inputs are the rounded ones for both.
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2**-8}


def widened(arguments: list) -> list:
    return [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]


def assert_gradients_equal(op, arguments: list, dtype: torch.dtype) -> None:
    with torch.no_grad():
        got, want = op(*arguments), op.reference(*widened(arguments))
    for position, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape and a.is_contiguous()
        if b.numel():
            error = (a.double() - b).abs().max()
            assert error <= ROUNDING[dtype if a.dtype == dtype else torch.float32] * b.abs().max(), position


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def kda_arguments(lengths: list[int], key: int, value: int, dtype: torch.dtype, lowest: float) -> list:
    tokens, heads = sum(lengths), 2
    inputs = kda_inputs(tokens, heads, key, value, torch.float32, lowest)
    inputs[:3] = [x.to(dtype) for x in inputs[:3]]
    state = normal(len(lengths), heads, key, value, dtype=torch.float32)
    return [normal(tokens, heads, value, dtype=dtype, seed=1), *inputs, state, packed(lengths)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lengths", "key", "value"),
    [([1], 8, 12), ([0, 15, 17], 16, 8), ([70], 20, 33), ([1100], 4, 4), ([], 8, 8)],  # 1100: two segments of tiles
)
@pytest.mark.parametrize("lowest", [-5.0, -0.05, -60.0, 0.0])
def test_kda_chunk_backward(instructions: str, lengths: list[int], key: int, value: int, dtype, lowest: float):
    assert_gradients_equal(OPS.kda_chunk_backward, kda_arguments(lengths, key, value, dtype, lowest), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[1], [2, 0, 3], [300, 5, 700], []])
@pytest.mark.parametrize("channels", [1, 70])
def test_short_conv_backward(instructions: str, lengths: list[int], channels: int, dtype):
    tokens = sum(lengths)
    for weight_dtype, taps in ((torch.float32, 4), (dtype, 2)):
        arguments = [
            normal(tokens, channels, dtype=dtype), normal(tokens, channels, dtype=dtype, seed=1),
            normal(channels, taps, dtype=weight_dtype), normal(len(lengths), taps - 1, channels, dtype=dtype), packed(lengths),
        ]  # fmt: skip
        assert_gradients_equal(OPS.short_conv_backward, arguments, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 40), (130, 33), (0, 8)])
@pytest.mark.parametrize("blocks", [0, 2, 3])
def test_attn_res_mix_backward(instructions: str, tokens: int, width: int, blocks: int, dtype):
    arguments = [
        normal(tokens, width, dtype=dtype), normal(tokens, width, dtype=dtype, seed=1), normal(3, tokens, width, dtype=dtype),
        torch.tensor(blocks), normal(width, dtype=torch.float32), 1e-5,
    ]  # fmt: skip
    assert_gradients_equal(OPS.attn_res_mix_backward, arguments, dtype)


def test_gradients_do_not_depend_on_the_number_of_threads(instructions: str):
    calls = [
        (OPS.kda_chunk_backward, kda_arguments([70, 33], 16, 16, torch.float32, -5.0)),
        (OPS.short_conv_backward, [normal(90, 200, dtype=torch.float32), normal(90, 200, dtype=torch.float32, seed=1),
                                   normal(200, 4, dtype=torch.float32), normal(1, 3, 200, dtype=torch.float32), packed([90])]),
        (OPS.attn_res_mix_backward, [normal(200, 32, dtype=torch.float32), normal(200, 32, dtype=torch.float32, seed=1),
                                     normal(2, 200, 32, dtype=torch.float32), torch.tensor(2),
                                     normal(32, dtype=torch.float32), 1e-5]),
    ]  # fmt: skip
    threads = torch.get_num_threads()
    try:
        for op, arguments in calls:
            torch.set_num_threads(1)
            want = op(*arguments)
            torch.set_num_threads(2)
            assert all(torch.equal(a, b) for a, b in zip(op(*arguments), want, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_a_row_of_padding_is_not_read():
    # Tiles reach past a sequence's end: what stands there is another sequence's, and must not show.
    arguments = kda_arguments([20, 12], 8, 8, torch.float32, -5.0)
    want = OPS.kda_chunk_backward(*arguments)
    poisoned = [x.clone() for x in arguments]
    for x in poisoned[:6]:
        x[20:] = torch.nan
    got = OPS.kda_chunk_backward(*poisoned)
    assert all(torch.equal(a[:20], b[:20]) for a, b in zip(got, want, strict=True))


def test_sizes_that_disagree_are_refused():
    arguments = kda_arguments([5], 8, 12, torch.float32, -5.0)
    for position in range(len(arguments)):
        wrong = list(arguments)
        wrong[position] = wrong[position][:-1]
        with pytest.raises(RuntimeError):
            OPS.kda_chunk_backward(*wrong)
