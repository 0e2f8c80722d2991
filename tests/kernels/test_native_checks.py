"""The compiled kernels read raw memory: inputs that disagree are refused also where an op is called directly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from inputs import kda_inputs, packed
from torch import Tensor

from kimi_k3_kernels import mxfp4_quantize, native_library

OPS = torch.ops.kimi_k3
pytestmark = pytest.mark.skipif(native_library is None, reason="no compiled kernels here")


def slots(*values: int) -> Tensor:
    return torch.tensor(values)


def kda_chunk_inputs() -> list[Tensor]:
    return [*kda_inputs(5, 2, 8, 12, torch.float32), torch.zeros(2, 2, 8, 12), slots(0), slots(1), packed([5])]


def expert_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    stacks = [
        mxfp4_quantize(torch.randn(size, generator=generator)) for size in ((3, 64, 32), (3, 64, 32), (3, 32, 64))
    ]
    x, weights = torch.randn(5, 32, generator=generator), torch.rand(5, 2, generator=generator)
    ids = torch.randint(0, 3, (5, 2), generator=generator)
    return [x, ids, weights, *(t for stack in stacks for t in stack), torch.arange(3)]


def short_conv_inputs() -> list[Tensor]:
    return [torch.randn(5, 6), torch.randn(6, 4), torch.zeros(2, 3, 6), slots(0), slots(1), packed([5])]


CASES: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]], tuple[object, ...]]] = {
    "kda_chunk": (OPS.kda_chunk, kda_chunk_inputs, ()),
    "kda_chunk_export": (OPS.kda_chunk_export, lambda: [*kda_chunk_inputs(), slots(2), slots(-1)], ()),
    "kda_step_": (
        OPS.kda_step_,
        lambda: [*kda_inputs(1, 2, 8, 12, torch.float32), torch.zeros(2, 2, 8, 12), slots(0), slots(1)],
        (),
    ),
    "short_conv": (OPS.short_conv, short_conv_inputs, ()),
    "short_conv_step_": (
        OPS.short_conv_step_,
        lambda: [torch.randn(1, 6), torch.randn(6, 4), torch.zeros(2, 3, 6), slots(0), slots(1)],
        (),
    ),
    "attn_res_mix": (
        lambda running_sum, bank, weight, *rest: OPS.attn_res_mix(running_sum, bank, torch.tensor(2), weight, *rest),
        lambda: [torch.randn(5, 8), torch.randn(3, 5, 8), torch.randn(8)],
        (1e-5,),
    ),
    "attn_res_mix_norm": (
        lambda running_sum, bank, norm, proj, weight: OPS.attn_res_mix_norm(
            running_sum, bank, torch.tensor(2), norm, proj, 1e-5, weight, 1e-5
        ),
        lambda: [torch.randn(5, 8), torch.randn(3, 5, 8), torch.randn(8), torch.randn(1, 8), torch.randn(8)],
        (),
    ),
    "mla_prefill": (
        OPS.mla_prefill,
        lambda: [
            torch.randn(5, 2, 10), torch.randn(5, 12), torch.randn(2 * (6 + 5), 8), torch.randn(3, 4, 12),
            torch.tensor([[0, 1]]), slots(3), packed([5]),
        ],
        (0.3,),
    ),
    "mla_decode": (
        OPS.mla_decode,
        lambda: [torch.randn(2, 2, 12), torch.randn(3, 4, 12), torch.tensor([[0, 1], [2, 0]]), slots(5, 3)],
        (0.3, 8),
    ),
    "mla_decode_mass": (
        lambda *inputs: torch.cat([x.flatten() for x in OPS.mla_decode_mass(*inputs)]),
        lambda: [torch.randn(2, 2, 12), torch.randn(3, 4, 12), torch.tensor([[0, 1], [2, 0]]), slots(5, 3)],
        (0.3, 8),
    ),
    "mxfp4_experts": (OPS.mxfp4_experts, expert_inputs, (4.0, 25.0)),
    "matvec": (
        lambda x, first, second: OPS.matvec(x, [first, second]),
        lambda: [torch.randn(2, 8), torch.randn(3, 8), torch.randn(4, 8)],
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_sizes_that_disagree_are_refused(name: str):
    op, make_inputs, rest = CASES[name]
    assert op(*make_inputs(), *rest).isfinite().all()
    # A tensor cut in any one dimension belongs to another problem. Free are the sizes that no other tensor repeats.
    free = {
        "attn_res_mix": {(1, 0)}, "attn_res_mix_norm": {(1, 0)},
        "mla_prefill": {(0, 1), (0, 2), (2, 1), (3, 0), (3, 1), (4, 1)},
        "mla_decode": {(0, 1), (1, 0), (1, 1), (2, 1)}, "mla_decode_mass": {(0, 1), (1, 0), (1, 1), (2, 1)},
        "mxfp4_experts": {(9, 0)}, "matvec": {(0, 0), (1, 0), (2, 0)},
        "short_conv": {(2, 0)}, "short_conv_step_": {(2, 0)},
    }.get(name, {(5, 0)})  # fmt: skip
    refused = 0
    for position, tensor in enumerate(make_inputs()):
        for dim in range(tensor.ndim):
            if (position, dim) in free:
                continue
            inputs = make_inputs()
            inputs[position] = tensor.narrow(dim, 0, tensor.shape[dim] - 1).clone()
            with pytest.raises(RuntimeError):
                op(*inputs, *rest)
            refused += 1
    assert refused > 1


@pytest.mark.parametrize("position", [1, 2, 3, 4])
def test_mixed_dtypes_are_not_read_as_others(position: int):
    inputs = kda_chunk_inputs()
    inputs[position] = inputs[position].to(torch.bfloat16)
    got = OPS.kda_chunk(*inputs)
    want = OPS.kda_chunk(*(t.float() if i == position else t for i, t in enumerate(inputs)))
    torch.testing.assert_close(got.float(), want, atol=2**-7 * want.abs().max().item(), rtol=0)


def test_rows_that_no_sequence_holds_are_refused():
    op, make_inputs, rest = CASES["mla_prefill"]
    *inputs, _ = make_inputs()
    with pytest.raises(RuntimeError, match="cu_seqlens"):
        op(*inputs, packed([4]), *rest)
