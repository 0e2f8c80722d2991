"""MXFP4 weights and the routed experts in plain PyTorch.

A weight [out, in] is stored as uint8 codes [out, in / 2], element 2j in the low nibble of byte j, and uint8 scales
[out, in / 32]; its value is E2M1[code] * 2^(scale - 127) (OCP Microscaling Formats, MXFP4). Exact in bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_kernels.library import compute_dtype

GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# A library GEMM may round a row differently at other row counts below this; padding makes a row's bits its own.
ROW_MULTIPLE = 8


@functools.cache
def _byte_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256]: the two values of each byte, viewed as one integer, so that one gather decodes both."""
    magnitudes = torch.tensor(E2M1, dtype=dtype)
    codes = torch.cat([magnitudes, -magnitudes])
    pairs = torch.stack([codes.repeat(16), codes.repeat_interleave(16)], dim=1)
    return pairs.view(torch.int32 if dtype.itemsize == 2 else torch.int64).squeeze(1).to(device)


@functools.cache
def _scale_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    exponents = torch.arange(256, dtype=torch.float64) - 127
    values = torch.exp2(exponents)
    values[255] = torch.nan  # OCP reserves it
    return values.to(dtype).to(device)


def mxfp4_dequantize_reference(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[.., out, in / 2] and [.., out, in / 32] uint8 -> [.., out, in]."""
    if dtype == torch.float64:  # a pair does not fit one integer
        return mxfp4_dequantize_reference(packed, scale, torch.float32).double()
    pairs = _byte_values(dtype, packed.device).index_select(0, packed.flatten().int())
    values = pairs.view(dtype).view(*packed.shape[:-1], packed.shape[-1] * 2 // GROUP, GROUP)
    scales = _scale_values(dtype, packed.device).index_select(0, scale.flatten().int()).view(scale.shape)
    return values.mul_(scales[..., None]).flatten(-2)


def mxfp4_quantize_reference(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round [.., out, in] to MXFP4: scale 2^(floor(log2(max |w|)) - 2), then to nearest, ties to the even code."""
    groups = weight.to(torch.float32).unflatten(-1, (-1, GROUP))
    exponents = torch.frexp(groups.abs().amax(-1)).exponent - 3  # frexp's mantissa lies in [0.5, 1)
    exponents = torch.where(groups.abs().amax(-1) == 0, -127, exponents).clamp_(-127, 127)
    scaled = torch.ldexp(groups.abs(), -exponents[..., None]).clamp_(max=6.0)
    midpoints = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1)], device=weight.device)
    below, up_to = torch.bucketize(scaled, midpoints), torch.bucketize(scaled, midpoints, right=True)
    codes = torch.where(below % 2 == 0, below, up_to).to(torch.uint8) | (groups.signbit().to(torch.uint8) << 3)
    codes = codes.flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (exponents + 127).to(torch.uint8)


def mxfp4_linear_reference(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, mxfp4_dequantize_reference(packed, scale, x.dtype))


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta), up itself without linear_beta."""
    compute = compute_dtype(gate)
    gate_wide, up_wide = gate.to(compute), up.to(compute)
    if linear_beta is not None:
        up_wide = linear_beta * torch.tanh(up_wide / linear_beta)
    return (beta * torch.tanh(gate_wide / beta) * torch.sigmoid(gate_wide) * up_wide).to(gate.dtype)


def situ_backward(
    grad: Tensor, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up in the compute dtype."""
    compute = compute_dtype(gate)
    grad, gate, up = grad.to(compute), gate.to(compute), up.to(compute)
    tanh, sigmoid = torch.tanh(gate / beta), torch.sigmoid(gate)
    bounded_up = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    grad_gate = grad * bounded_up * sigmoid * ((1 - tanh.square()) + beta * tanh * (1 - sigmoid))
    grad_up = grad * beta * tanh * sigmoid
    if linear_beta is not None:
        grad_up = grad_up * (1 - (bounded_up / linear_beta).square())
    return grad_gate, grad_up


def _by_slot(topk_ids: Tensor, slot_table: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each slot that was chosen, with its places in the flattened [T, A] choices in token order."""
    slots = slot_table[topk_ids.flatten().long()]
    places = torch.argsort(slots, stable=True)
    used, counts = torch.unique_consecutive(slots[places], return_counts=True)
    return zip(used.tolist(), places.split(counts.tolist()))


def _linear(rows: Tensor, weight: Tensor) -> Tensor:
    count = rows.shape[0]
    padding = -count % ROW_MULTIPLE
    return F.linear(F.pad(rows, (0, 0, 0, padding)) if padding else rows, weight)[:count]


def _experts_forward(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, slot_table: Tensor, weights_of: _WeightsOf,
    beta: float, linear_beta: float | None,
) -> Tensor:  # fmt: skip
    experts_a_token = topk_ids.shape[1]
    # Each choice has a row of its own, and the sum runs over a token's choices in order: no order of experts shows.
    outputs = x.new_empty((topk_ids.numel(), x.shape[1]))
    for slot, places in _by_slot(topk_ids, slot_table):
        w1, w3, w2 = weights_of(slot, x.dtype)
        rows = x[places // experts_a_token]
        outputs[places] = _linear(situ(_linear(rows, w1), _linear(rows, w3), beta, linear_beta), w2)
    return combine_reference(outputs.view(*topk_ids.shape, x.shape[1]), topk_weights)


def combine_reference(outputs: Tensor, topk_weights: Tensor) -> Tensor:
    compute = compute_dtype(outputs)
    return (outputs.to(compute) * topk_weights.to(compute)[..., None]).sum(1).to(outputs.dtype)


def combine_backward_reference(grad: Tensor, outputs: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    compute = compute_dtype(outputs)
    wide = grad.to(compute)[:, None]
    grad_outputs = (wide * topk_weights.to(compute)[..., None]).to(outputs.dtype)
    return grad_outputs, (wide * outputs.to(compute)).sum(-1).to(topk_weights.dtype)


class _WeightsOf:
    """w1, w3, w2 of one slot as matrices of a dtype, from packed or plain stacks."""

    def __init__(self, w1: tuple[Tensor, ...], w3: tuple[Tensor, ...], w2: tuple[Tensor, ...]) -> None:
        self.stacks = (w1, w3, w2)

    def __call__(self, slot: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        w1, w3, w2 = (
            mxfp4_dequantize_reference(stack[0][slot], stack[1][slot], dtype) if len(stack) == 2 else stack[0][slot]
            for stack in self.stacks
        )
        return w1, w3, w2


def mxfp4_experts_reference(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w1_packed: Tensor, w1_scale: Tensor, w3_packed: Tensor,
    w3_scale: Tensor, w2_packed: Tensor, w2_scale: Tensor, slot_table: Tensor, beta: float, linear_beta: float | None,
) -> Tensor:  # fmt: skip
    weights_of = _WeightsOf((w1_packed, w1_scale), (w3_packed, w3_scale), (w2_packed, w2_scale))
    return _experts_forward(x, topk_ids, topk_weights, slot_table, weights_of, beta, linear_beta)


def _round_to_int8(x: Tensor) -> Tensor:
    """[.., K] -> the same in float64 (of float64) or float32, each group of 32 as int8 times one float32 scale."""
    groups = x.to(torch.float32).unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    is_number = scale.isfinite() & (scale > 0)
    codes = torch.where(is_number, (groups / scale).round().clamp(-127, 127), 0.0)  # round: ties to even
    return (codes.to(compute_dtype(x)) * scale.to(compute_dtype(x))).flatten(-2)


def mxfp4_experts_int8_reference(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w1_packed: Tensor, w1_scale: Tensor, w3_packed: Tensor,
    w3_scale: Tensor, w2_packed: Tensor, w2_scale: Tensor, slot_table: Tensor, beta: float, linear_beta: float | None,
) -> Tensor:  # fmt: skip
    weights_of = _WeightsOf((w1_packed, w1_scale), (w3_packed, w3_scale), (w2_packed, w2_scale))
    outputs, rounded = x.new_empty((topk_ids.numel(), x.shape[1])), _round_to_int8(x)
    for slot, places in _by_slot(topk_ids, slot_table):
        w1, w3, w2 = weights_of(slot, rounded.dtype)
        rows = rounded[places // topk_ids.shape[1]]
        hidden = situ(_linear(rows, w1), _linear(rows, w3), beta, linear_beta)
        outputs[places] = _linear(_round_to_int8(hidden), w2).to(x.dtype)
    return combine_reference(outputs.view(*topk_ids.shape, x.shape[1]), topk_weights)


def dense_experts_reference(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, slot_table: Tensor,
    beta: float, linear_beta: float | None,
) -> Tensor:  # fmt: skip
    weights_of = _WeightsOf((w1,), (w3,), (w2,))
    return _experts_forward(x, topk_ids, topk_weights, slot_table, weights_of, beta, linear_beta)


def _experts_backward(
    grad: Tensor, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, slot_table: Tensor, weights_of: _WeightsOf,
    beta: float, linear_beta: float | None, weight_grads: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x and topk_weights; those of the slots' matrices are added to `weight_grads`."""
    compute, experts_a_token = compute_dtype(x), topk_ids.shape[1]
    grad_x = torch.zeros(x.shape, dtype=compute, device=x.device)
    grad_weights = torch.zeros(topk_weights.numel(), dtype=compute, device=x.device)
    flat_weights, wide_grad = topk_weights.flatten().to(compute), grad.to(compute)
    for slot, places in _by_slot(topk_ids, slot_table):
        w1, w3, w2 = weights_of(slot, x.dtype)
        tokens = places // experts_a_token
        rows, upstream = x[tokens], wide_grad[tokens]
        gate, up = F.linear(rows, w1), F.linear(rows, w3)
        hidden = situ(gate, up, beta, linear_beta)
        grad_weights[places] = (upstream * F.linear(hidden, w2).to(compute)).sum(-1)
        grad_out = (upstream * flat_weights[places, None]).to(x.dtype)
        grad_gate, grad_up = (g.to(x.dtype) for g in situ_backward(grad_out @ w2, gate, up, beta, linear_beta))
        # A token may choose a slot twice (two logical experts on one physical copy), hence index_add.
        grad_x.index_add_(0, tokens, (grad_gate @ w1).to(compute) + (grad_up @ w3).to(compute))
        if weight_grads is not None:
            for total, matrix in zip(weight_grads, (grad_gate.t() @ rows, grad_up.t() @ rows, grad_out.t() @ hidden)):
                total[slot] += matrix
    return grad_x.to(x.dtype), grad_weights.view(topk_weights.shape).to(topk_weights.dtype)


def mxfp4_experts_backward_reference(
    grad: Tensor, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w1_packed: Tensor, w1_scale: Tensor,
    w3_packed: Tensor, w3_scale: Tensor, w2_packed: Tensor, w2_scale: Tensor, slot_table: Tensor, beta: float,
    linear_beta: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    weights_of = _WeightsOf((w1_packed, w1_scale), (w3_packed, w3_scale), (w2_packed, w2_scale))
    return _experts_backward(grad, x, topk_ids, topk_weights, slot_table, weights_of, beta, linear_beta, None)


def dense_experts_backward_reference(
    grad: Tensor, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor,
    slot_table: Tensor, beta: float, linear_beta: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    totals = (torch.zeros_like(w1), torch.zeros_like(w3), torch.zeros_like(w2))
    weights_of = _WeightsOf((w1,), (w3,), (w2,))
    grad_x, grad_topk = _experts_backward(
        grad, x, topk_ids, topk_weights, slot_table, weights_of, beta, linear_beta, totals
    )
    return grad_x, grad_topk, *totals
