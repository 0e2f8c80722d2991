"""MXFP4 decoding against the table and torchao; the routed experts against loops in float64."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_kernels import dense_experts, mxfp4_dequantize, mxfp4_experts, mxfp4_linear, mxfp4_quantize
from kimi_k3_kernels.mxfp4_experts.op import (
    dense_experts_op,
    mxfp4_dequantize_op,
    mxfp4_experts_op,
    mxfp4_linear_op,
)
from kimi_k3_kernels.mxfp4_experts.reference import situ

CODES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
BETA, LINEAR_BETA = 4.0, 25.0


def uint8(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_byte_and_scale_decodes_by_the_table(dtype: torch.dtype):
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(1, 256)
    for exponent in (1, 100, 121, 127, 128, 200):
        scale = torch.full((1, 16), exponent, dtype=torch.uint8)
        want = [v * 2.0 ** (exponent - 127) for byte in range(256) for v in (CODES[byte & 15], CODES[byte >> 4])]
        got = mxfp4_dequantize(packed, scale, dtype)
        assert got.double().tolist() == [want]
        assert torch.equal(got[0].signbit(), torch.tensor(want, dtype=torch.float64).signbit())


def test_low_nibble_first_and_scale_is_an_exponent():
    packed = uint8([[0x71] * 16])
    assert mxfp4_dequantize(packed, uint8([[127]]))[0, :2].tolist() == [0.5, 6.0]
    assert mxfp4_dequantize(packed, uint8([[128]]))[0, :2].tolist() == [1.0, 12.0]
    assert mxfp4_dequantize(packed, uint8([[255]])).isnan().all()
    assert mxfp4_dequantize(packed, uint8([[0]]), torch.float32)[0, 1] == 6 * 2.0**-127


def test_released_bytes_decode_to_the_recorded_values():
    folder = os.environ.get("KIMI_K3_TEST_DATA")
    if folder is None:
        pytest.skip("KIMI_K3_TEST_DATA is not set")
    record = json.loads((Path(folder) / "mxfp4.json").read_text())
    packed, scale, want = (
        torch.tensor(record[key]["data"]).view(record[key]["shape"]) for key in ("packed", "scales", "expected")
    )
    got = mxfp4_dequantize(packed.to(torch.uint8), scale.to(torch.uint8), torch.float32)
    assert torch.equal(got, want.float())
    swapped = torch.tensor(record["expected_swapped_nibbles"]["first64"])
    assert not torch.equal(got.flatten()[:64], swapped)


def test_quantizing_equals_torchao_and_keeps_what_mxfp4_holds():
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 16)[:, None]
    weight[0], weight[1, :32] = 0, 0.75 * 2.0**-4  # an all-zero group; ties
    packed, scale = mxfp4_quantize(weight)
    want_scale, want_packed = to_mx(weight, torch.float4_e2m1fn_x2, 32)
    filled = weight.unflatten(-1, (-1, 32)).abs().amax(-1) > 0
    assert torch.equal(scale[filled], want_scale.view(torch.uint8).view_as(scale)[filled])
    want = mxfp4_dequantize(want_packed.view(torch.uint8), want_scale.view(torch.uint8).view_as(scale), torch.float32)
    got = mxfp4_dequantize(packed, scale, torch.float32)
    assert torch.equal(got, want)
    again = mxfp4_quantize(got)
    assert torch.equal(mxfp4_dequantize(*again, torch.float32), got)


def test_situ_is_bounded_and_linear_without_its_second_beta():
    gate, up = torch.logspace(-1, 3, 50, dtype=torch.float64), -torch.logspace(-1, 3, 50, dtype=torch.float64)
    out = situ(gate, up, BETA, LINEAR_BETA)
    want = 4 * torch.tanh(gate / 4) / (1 + torch.exp(-gate)) * 25 * torch.tanh(up / 25)
    torch.testing.assert_close(out, want)
    assert out.abs().max() <= 100
    torch.testing.assert_close(situ(gate, up, 1.0, None), torch.tanh(gate) * torch.sigmoid(gate) * up)


def make_experts(tokens: int = 7, experts: int = 5, latent: int = 32, width: int = 64, topk: int = 3):
    generator = torch.Generator().manual_seed(tokens)
    stacks = []
    for rows, columns in ((width, latent), (width, latent), (latent, width)):
        weight = torch.randn((experts, rows, columns), generator=generator) / columns**0.5
        stacks.append(mxfp4_quantize(weight))
    x = torch.randn((tokens, latent), generator=generator, dtype=torch.float64)
    ids = torch.stack(
        [torch.randperm(experts, generator=generator)[:topk] for _ in range(tokens)] or [torch.empty(0, topk)]
    )
    weights = torch.rand((tokens, topk), generator=generator, dtype=torch.float64)
    return x, ids.long().view(tokens, topk), weights, stacks, torch.arange(experts, dtype=torch.int32)


def by_loops(x: Tensor, ids: Tensor, weights: Tensor, dense: list[Tensor], table: Tensor) -> Tensor:
    w1, w3, w2 = dense
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for expert, weight in zip(ids[t].tolist(), weights[t]):
            slot = int(table[expert])
            out[t] += weight * (w2[slot] @ situ(w1[slot] @ x[t], w3[slot] @ x[t], BETA, LINEAR_BETA))
    return out


@pytest.mark.parametrize("tokens", [0, 1, 7, 40])
def test_packed_and_dense_experts_equal_loops(tokens: int):
    x, ids, weights, stacks, table = make_experts(tokens)
    dense = [mxfp4_dequantize(*stack, torch.float64) for stack in stacks]
    want = by_loops(x, ids, weights, dense, table)
    packed = [tensor for stack in stacks for tensor in stack]
    torch.testing.assert_close(mxfp4_experts(x, ids, weights, *packed, table, BETA, LINEAR_BETA), want)
    torch.testing.assert_close(dense_experts(x, ids, weights, *dense, table, BETA, LINEAR_BETA), want)


def test_slots_can_be_permuted_strided_and_shared():
    x, ids, weights, stacks, table = make_experts()
    packed = [tensor for stack in stacks for tensor in stack]
    want = mxfp4_experts(x, ids, weights, *packed, table, BETA, LINEAR_BETA)
    order = torch.tensor([3, 0, 4, 2, 1])
    strided = [torch.stack([t[order], torch.full_like(t, 7)], 1)[:, 0] for t in packed]
    assert not strided[0].is_contiguous()
    moved = torch.argsort(order).int()
    assert torch.equal(mxfp4_experts(x, ids, weights, *strided, moved, BETA, LINEAR_BETA), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype):
    x, ids, weights, stacks, table = make_experts(tokens=64, latent=96, width=128)
    packed = [tensor for stack in stacks for tensor in stack]
    x, weights = x.to(dtype), weights.float()
    together = mxfp4_experts(x, ids, weights, *packed, table, BETA, LINEAR_BETA)
    for rows in (slice(0, 1), slice(5, 8), slice(17, 40)):
        alone = mxfp4_experts(x[rows], ids[rows], weights[rows], *packed, table, BETA, LINEAR_BETA)
        assert torch.equal(alone, together[rows])


def test_gradients_and_registration():
    x, ids, weights, stacks, table = make_experts(tokens=3, experts=3, latent=32, width=32, topk=2)
    packed = [tensor for stack in stacks for tensor in stack]
    dense = [mxfp4_dequantize(*stack, torch.float64).requires_grad_() for stack in stacks]
    x.requires_grad_()
    weights.requires_grad_()
    rest = (table, BETA, LINEAR_BETA)
    assert torch.autograd.gradcheck(lambda x, w: mxfp4_experts(x, ids, w, *packed, *rest), (x, weights))
    # Through packed experts the same gradients arrive as through plain ones, whose own are checked numerically.
    upstream = torch.randn_like(x)
    through_packed = torch.autograd.grad(mxfp4_experts(x, ids, weights, *packed, *rest), (x, weights), upstream)
    through_dense = torch.autograd.grad(dense_experts(x, ids, weights, *dense, *rest), (x, weights), upstream)
    for a, b in zip(through_packed, through_dense):
        torch.testing.assert_close(a, b)
    small = [w.detach()[:, :2, :2].clone().requires_grad_() for w in dense]
    thin = x.detach()[:, :2].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w, *m: dense_experts(x, ids, w, *m, *rest), (thin, weights, *small))
    torch.library.opcheck(mxfp4_experts_op, (x, ids, weights, *packed, *rest))
    torch.library.opcheck(dense_experts_op, (thin, ids, weights, *small, *rest))
    torch.library.opcheck(mxfp4_linear_op, (x, packed[0][0], packed[1][0]))
    torch.library.opcheck(mxfp4_dequantize_op, (packed[0], packed[1], torch.bfloat16))


def test_linear_equals_the_decoded_matrix_and_passes_its_gradient():
    x, _, _, stacks, _ = make_experts()
    packed, scale = (t[0] for t in stacks[0])
    weight = mxfp4_dequantize(packed, scale, torch.float64)
    x.requires_grad_()
    out = mxfp4_linear(x, packed, scale)
    torch.testing.assert_close(out, F.linear(x, weight))
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], weight.sum(0).expand_as(x))


def test_wrong_shapes_and_dtypes_are_refused():
    x, ids, weights, stacks, table = make_experts()
    packed = [tensor for stack in stacks for tensor in stack]
    with pytest.raises(ValueError, match="scales"):
        mxfp4_dequantize(packed[0], packed[1][..., :0])
    with pytest.raises(ValueError, match="dtype"):
        mxfp4_dequantize(packed[0], packed[1], torch.float16)
    with pytest.raises(ValueError, match="mxfp4_experts: want w1"):
        mxfp4_experts(x[:, :16], ids, weights, *packed, table, BETA, LINEAR_BETA)
    with pytest.raises(ValueError, match="topk_ids"):
        mxfp4_experts(x, ids[:2], weights, *packed, table, BETA, LINEAR_BETA)
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp4_quantize(torch.randn(4, 48))
