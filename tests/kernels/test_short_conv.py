"""The short convolution against its sum written as loops."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kimi_k3_kernels import short_conv, short_conv_step_
from kimi_k3_kernels.short_conv.op import short_conv_op, short_conv_step_op

sys.path.insert(0, str(Path(__file__).parent))
from inputs import packed


def make_inputs(tokens: int, channels: int = 6, taps: int = 4, slots: int = 3):
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, channels), (channels, taps), (slots, taps - 1, channels)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def by_loops(x, weight, window):
    taps = weight.shape[1]
    inputs = torch.cat([window, x])
    out = torch.empty_like(x)
    for t in range(x.shape[0]):
        for c in range(x.shape[1]):
            out[t, c] = F.silu(sum(weight[c, w] * inputs[t + w, c] for w in range(taps)))
    return out, inputs[len(inputs) - taps + 1 :]


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 5, 9])
def test_one_sequence_equals_the_sum(tokens: int):
    x, weight, pool = make_inputs(tokens)
    want, window = by_loops(x, weight, pool[1])
    got = short_conv(x, weight, pool, torch.tensor([1]), torch.tensor([2]), packed([tokens]))
    torch.testing.assert_close(got, want)
    assert torch.equal(pool[2], window)


def test_packed_sequences_and_steps_equal_the_sum():
    lengths = [5, 0, 1, 7]
    x, weight, pool = make_inputs(13, slots=5)
    slots, stepped = torch.tensor([0, 1, -1, 3]), pool.clone()
    before = pool.clone()
    got = short_conv(x, weight, pool, slots, torch.tensor([0, 1, 2, 3]), packed(lengths))
    windows = [before[0], before[1], torch.zeros_like(before[0]), before[3]]
    for n, part in enumerate(x.split(lengths)):
        want, window = by_loops(part, weight, windows[n])
        torch.testing.assert_close(got[sum(lengths[:n]) : sum(lengths[: n + 1])], want)
        assert torch.equal(pool[n], window)
    assert torch.equal(pool[4], before[4])
    rows = [short_conv_step_(x[t : t + 1], weight, stepped, torch.tensor([0]), torch.tensor([0])) for t in range(5)]
    torch.testing.assert_close(torch.cat(rows), got[:5])
    assert torch.equal(stepped[0], pool[0])


def test_gradcheck_and_registration():
    x, weight, pool = make_inputs(6)
    slots, nowhere = torch.tensor([0, -1]), torch.tensor([-1, -1])
    x.requires_grad_()
    weight.requires_grad_()
    args = (pool, slots, nowhere, packed([4, 2]))
    assert torch.autograd.gradcheck(lambda x, weight: short_conv(x, weight, *args), (x, weight))
    torch.library.opcheck(short_conv_op, (x, weight, *args))
    step = (x.detach()[:2], weight.detach(), pool, torch.tensor([0, 1]), torch.tensor([0, 1]))
    torch.library.opcheck(short_conv_step_op, step)


def test_wrong_shapes_are_refused():
    x, weight, pool = make_inputs(4)
    with pytest.raises(ValueError, match="short_conv: want x"):
        short_conv(x[:, :2], weight, pool, torch.tensor([0]), torch.tensor([0]), packed([4]))
    with pytest.raises(ValueError, match="cu_seqlens"):
        short_conv(x, weight, pool, torch.tensor([0]), torch.tensor([0]), packed([2, 2]))
    with pytest.raises(ValueError, match="integers"):
        short_conv(x, weight, pool, torch.tensor([0.0]), torch.tensor([0.0]), packed([4]))
