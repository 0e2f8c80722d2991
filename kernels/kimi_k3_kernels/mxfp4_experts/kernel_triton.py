"""MXFP4 weights on a GPU: exact decode, one packed matrix, and the routed experts from packed bytes.

The experts run as two grouped products over the choices sorted by slot: gate and up with SiTU, then down, then the
weighted sum of each token's choices in their order. Weights stay packed in memory; a program decodes its tile in registers
and holds it as the left operand, so that a few tokens still fill the matrix unit. Where the chip multiplies MXFP4 itself,
`tl.dot_scaled` takes the packed tile; both decode exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_k3_kernels.gpu import DTYPES, dot, dot_precision, only_if, target_of

INPUTS = (torch.float32, torch.bfloat16)  # float16 lacks the exponents
SCALED_TARGETS = ("sm_100", "sm_103", "sm_120", "gfx950")  # chips with a product of scaled FP4


@triton.jit
def _code_values(codes):
    """E2M1 codes as float32: sign, two exponent bits with bias 1, one mantissa bit; 0.5 is the one subnormal."""
    magnitude = (codes & 7).to(tl.int32)
    bits = tl.where(magnitude == 1, 126 << 23, (magnitude << 22) + (126 << 23))
    bits = tl.where(magnitude == 0, 0, bits) | ((codes & 8).to(tl.int32) << 28)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _scale_values(scales):
    """2^(scale - 127) as float32; 0 is subnormal there, 255 is NaN (OCP reserves it)."""
    exponent = scales.to(tl.int32)
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _decode(packed, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS / 2] codes and [ROWS, COLUMNS / 32] scales as [ROWS, COLUMNS] float32."""
    values = tl.join(_code_values(packed & 15), _code_values(packed >> 4))  # [.., 2]: the low nibble first
    values = tl.reshape(values, (ROWS, COLUMNS // 32, 32)) * _scale_values(scales)[:, :, None]
    return tl.reshape(values, (ROWS, COLUMNS))


@triton.jit
def _add_product(
    acc, packed_ptr, scale_ptr, x, first, row, inside, columns, packed_O, packed_I, scale_O, scale_I,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc [N, M] + w[rows, first : first + BLOCK_K] x, x [M, BLOCK_K], zero beyond `columns`."""
    byte = first // 2 + tl.arange(0, BLOCK_K // 2)
    group = first // 32 + tl.arange(0, BLOCK_K // 32)
    held = inside[:, None] & (byte < columns // 2)[None, :]
    packed = tl.load(packed_ptr + row[:, None] * packed_O + byte[None, :] * packed_I, mask=held, other=0)
    held = inside[:, None] & (group < columns // 32)[None, :]
    scales = tl.load(scale_ptr + row[:, None] * scale_O + group[None, :] * scale_I, mask=held, other=127)
    if SCALED:
        acc = tl.dot_scaled(packed, scales, "e2m1", tl.trans(x), None, "bf16", acc)
    else:
        weights = _decode(packed, scales, BLOCK_N, BLOCK_K).to(x.dtype)
        acc = dot(weights, tl.trans(x), acc, PRECISION)
    return acc


@triton.jit
def _dequantize_kernel(
    out_ptr, packed_ptr, scale_ptr, rows, num_bytes, packed_O, packed_I, scale_O, scale_I, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = byte < num_bytes
    packed = tl.load(packed_ptr + row * packed_O + byte * packed_I, mask=inside, other=0)
    scales = tl.load(scale_ptr + row * scale_O + byte // 16 * scale_I, mask=inside, other=0)
    values = tl.join(_code_values(packed & 15), _code_values(packed >> 4)) * _scale_values(scales)[:, None]
    values = tl.reshape(values, (2 * BLOCK,))
    element = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    out_ptrs = out_ptr + row * num_bytes * 2 + element
    tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=element < 2 * num_bytes)


@triton.jit
def _linear_kernel(
    out_ptr, x_ptr, packed_ptr, scale_ptr, rows, num_out, num_in, x_T, x_I, packed_O, packed_I, scale_O, scale_I,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    channel = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    valid, inside = token < rows, channel < num_out
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(0, num_in, BLOCK_K):
        column = first + tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + token[:, None] * x_T + column[None, :] * x_I
        x = tl.load(x_ptrs, mask=valid[:, None] & (column < num_in)[None, :], other=0.0)
        acc = _add_product(
            acc, packed_ptr, scale_ptr, x, first, channel, inside, num_in, packed_O, packed_I, scale_O, scale_I,
            BLOCK_N, BLOCK_K, SCALED, PRECISION,
        )  # fmt: skip
    out_ptrs = out_ptr + token[None, :] * num_out + channel[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=valid[None, :] & inside[:, None])


@triton.jit
def _tanh(x):
    """By exp of a number that is not positive; exact in its sign, 1 far out."""
    decayed = tl.exp(-2.0 * tl.abs(x))
    # Near zero the difference 1 - exp(-2x) would lose digits: the odd series to x^7 (error below 1e-8 there).
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    far = tl.where(x < 0, -1.0, 1.0) * (1.0 - decayed) / (1.0 + decayed)
    return tl.where(tl.abs(x) < 0.125, near, far)


@triton.jit
def _gate_up_kernel(
    hidden_ptr, x_ptr, place_ptr, starts_ptr, block_slot_ptr, block_first_ptr, w1_ptr, s1_ptr, w3_ptr, s3_ptr,
    choices, width, latent, beta, linear_beta, x_T, x_L, w1_S, w1_O, w1_I, s1_S, s1_O, s1_I, w3_S, w3_O, w3_I,
    s3_S, s3_O, s3_I, HAS_LINEAR_BETA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """hidden [T A, F], in the order of slots."""
    block = tl.program_id(1)
    slot = tl.load(block_slot_ptr + block).to(tl.int64)
    if slot < 0:
        return
    row = (tl.load(block_first_ptr + block) + tl.arange(0, BLOCK_M)).to(tl.int64)
    valid = row < tl.load(starts_ptr + slot + 1)
    token = tl.load(place_ptr + row, mask=valid, other=0).to(tl.int64) // choices
    channel = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inside = channel < width
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(0, latent, BLOCK_K):
        column = first + tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + token[:, None] * x_T + column[None, :] * x_L
        x = tl.load(x_ptrs, mask=valid[:, None] & (column < latent)[None, :], other=0.0)
        gate = _add_product(
            gate, w1_ptr + slot * w1_S, s1_ptr + slot * s1_S, x, first, channel, inside, latent, w1_O, w1_I, s1_O, s1_I,
            BLOCK_N, BLOCK_K, SCALED, PRECISION,
        )  # fmt: skip
        up = _add_product(
            up, w3_ptr + slot * w3_S, s3_ptr + slot * s3_S, x, first, channel, inside, latent, w3_O, w3_I, s3_O, s3_I,
            BLOCK_N, BLOCK_K, SCALED, PRECISION,
        )  # fmt: skip
    # Products are rounded to the dtype of x, as the reference's are.
    dtype = hidden_ptr.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if HAS_LINEAR_BETA:
        up = linear_beta * _tanh(up / linear_beta)
    hidden = beta * _tanh(gate / beta) / (1.0 + tl.exp(-gate)) * up
    hidden_ptrs = hidden_ptr + row[None, :] * width + channel[:, None]
    tl.store(hidden_ptrs, hidden.to(dtype), mask=valid[None, :] & inside[:, None])


@triton.jit
def _down_kernel(
    outputs_ptr, hidden_ptr, place_ptr, starts_ptr, block_slot_ptr, block_first_ptr, w2_ptr, s2_ptr, width, latent,
    w2_S, w2_O, w2_I, s2_S, s2_O, s2_I,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """outputs [T A, L], in the order of the choices."""
    block = tl.program_id(1)
    slot = tl.load(block_slot_ptr + block).to(tl.int64)
    if slot < 0:
        return
    row = (tl.load(block_first_ptr + block) + tl.arange(0, BLOCK_M)).to(tl.int64)
    valid = row < tl.load(starts_ptr + slot + 1)
    channel = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inside = channel < latent
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(0, width, BLOCK_K):
        column = first + tl.arange(0, BLOCK_K)
        hidden_ptrs = hidden_ptr + row[:, None] * width + column[None, :]
        hidden = tl.load(hidden_ptrs, mask=valid[:, None] & (column < width)[None, :], other=0.0)
        acc = _add_product(
            acc, w2_ptr + slot * w2_S, s2_ptr + slot * s2_S, hidden, first, channel, inside, width, w2_O, w2_I, s2_O, s2_I,
            BLOCK_N, BLOCK_K, SCALED, PRECISION,
        )  # fmt: skip
    place = tl.load(place_ptr + row, mask=valid, other=0).to(tl.int64)
    outputs_ptrs = outputs_ptr + place[None, :] * latent + channel[:, None]
    tl.store(outputs_ptrs, acc.to(outputs_ptr.dtype.element_ty), mask=valid[None, :] & inside[:, None])


@triton.jit
def _weighted_sum_kernel(
    out_ptr, outputs_ptr, weights_ptr, slots_ptr, choices, latent, num_slots, weights_T, weights_A, BLOCK: tl.constexpr
):
    """A token's choices in their order; a choice without a slot gives NaN rather than a wrong sum."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < latent
    total = tl.zeros((BLOCK,), tl.float32)
    for a in range(choices):
        slot = tl.load(slots_ptr + token * choices + a)
        weight = tl.load(weights_ptr + token * weights_T + a * weights_A).to(tl.float32)
        has_slot = (slot >= 0) & (slot < num_slots)
        held = only_if(inside, has_slot)
        value = tl.load(outputs_ptr + (token * choices + a) * latent + channel, mask=held, other=float("nan"))
        total += value.to(tl.float32) * weight
    tl.store(out_ptr + token * latent + channel, total.to(out_ptr.dtype.element_ty), mask=inside)


def _tiles(rows_each: float, dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes from the mean rows of a matrix. Only BLOCK_M changes: a row's sums run in the same order in each."""
    if dtype == torch.float32:
        return {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 2}
    rows = 16 if rows_each <= 16 else 32 if rows_each <= 64 else 64
    return {"BLOCK_M": rows, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}


def _is_scaled(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype == torch.bfloat16 and target_of(device) in SCALED_TARGETS


def mxfp4_dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype not in INPUTS:
        return torch.ops.kimi_k3.mxfp4_dequantize.reference(packed, scale, dtype)
    out = torch.empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=dtype, device=packed.device)
    if out.numel() == 0:
        return out
    packed, scale = packed.flatten(0, -2), scale.flatten(0, -2)
    rows, num_bytes = packed.shape
    block = min(1024, triton.next_power_of_2(num_bytes))
    with torch.cuda.device_of(packed):
        _dequantize_kernel[(rows, triton.cdiv(num_bytes, block))](
            out, packed, scale, rows, num_bytes, *packed.stride(), *scale.stride(), BLOCK=block, num_warps=4
        )
    return out


def mxfp4_linear(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    if x.dtype not in INPUTS:
        return torch.ops.kimi_k3.mxfp4_linear.reference(x, packed, scale)
    out = torch.empty((*x.shape[:-1], packed.shape[0]), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows_TI = x.reshape(-1, x.shape[-1])
    tiles = _tiles(rows_TI.shape[0], x.dtype)
    grid = (triton.cdiv(packed.shape[0], tiles["BLOCK_N"]), triton.cdiv(rows_TI.shape[0], tiles["BLOCK_M"]))
    with torch.cuda.device_of(x):
        _linear_kernel[grid](
            out, rows_TI, packed, scale, rows_TI.shape[0], packed.shape[0], x.shape[-1], *rows_TI.stride(),
            *packed.stride(), *scale.stride(), **tiles, SCALED=_is_scaled(x.dtype, x.device), PRECISION=dot_precision(x.dtype, target_of(x.device)),
        )  # fmt: skip
    return out


def _blocks(slots: Tensor, num_slots: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort the choices by slot and cut each slot's run into blocks of `rows`. All on the device.

    Returns: places [T A], the choices in the order of their slots; starts [S + 1] of the runs; and of each block its
    slot (-1: none) and its first row. There are at most as many blocks as the shapes allow.
    """
    ordered, places = torch.sort(slots, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(num_slots + 1, device=slots.device, dtype=slots.dtype))
    ends = ((starts.diff() + rows - 1) // rows).cumsum(0)  # of each slot's blocks
    limit = slots.shape[0] // rows + min(num_slots, slots.shape[0])
    block = torch.arange(limit, device=slots.device)
    slot = torch.searchsorted(ends, block, right=True)
    before = torch.cat([ends.new_zeros(1), ends])
    is_used = slot < num_slots
    slot = torch.where(is_used, slot, 0)
    first = starts[slot] + (block - before[slot]) * rows
    return places, starts, torch.where(is_used, slot, -1), first


def mxfp4_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w1_packed: Tensor, w1_scale: Tensor, w3_packed: Tensor,
    w3_scale: Tensor, w2_packed: Tensor, w2_scale: Tensor, slot_table: Tensor, beta: float, linear_beta: float | None,
) -> Tensor:  # fmt: skip
    if x.dtype not in INPUTS or topk_weights.dtype not in DTYPES:
        return torch.ops.kimi_k3.mxfp4_experts.reference(
            x, topk_ids, topk_weights, w1_packed, w1_scale, w3_packed, w3_scale, w2_packed, w2_scale, slot_table, beta,
            linear_beta,
        )  # fmt: skip
    (tokens, latent), choices, (num_slots, width) = x.shape, topk_ids.shape[1], w1_packed.shape[:2]
    out = torch.empty((tokens, latent), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    slots = slot_table[topk_ids.flatten().long()].long()
    tiles = _tiles(slots.shape[0] / max(1, min(num_slots, slots.shape[0])), x.dtype)
    places, starts, block_slots, block_firsts = _blocks(slots, num_slots, tiles["BLOCK_M"])
    hidden = torch.empty((slots.shape[0], width), dtype=x.dtype, device=x.device)
    outputs = torch.empty((slots.shape[0], latent), dtype=x.dtype, device=x.device)
    precision = dot_precision(x.dtype, target_of(x.device))
    scaled, blocks = _is_scaled(x.dtype, x.device), block_slots.shape[0]
    with torch.cuda.device_of(x):
        if blocks:
            _gate_up_kernel[(triton.cdiv(width, tiles["BLOCK_N"]), blocks)](
                hidden, x, places, starts, block_slots, block_firsts, w1_packed, w1_scale, w3_packed, w3_scale, choices,
                width, latent, beta, 1.0 if linear_beta is None else linear_beta, *x.stride(), *w1_packed.stride(),
                *w1_scale.stride(), *w3_packed.stride(), *w3_scale.stride(), HAS_LINEAR_BETA=linear_beta is not None,
                **tiles, SCALED=scaled, PRECISION=precision,
            )  # fmt: skip
            _down_kernel[(triton.cdiv(latent, tiles["BLOCK_N"]), blocks)](
                outputs, hidden, places, starts, block_slots, block_firsts, w2_packed, w2_scale, width, latent,
                *w2_packed.stride(), *w2_scale.stride(), **tiles, SCALED=scaled, PRECISION=precision,
            )  # fmt: skip
        block = min(1024, triton.next_power_of_2(latent))
        _weighted_sum_kernel[(tokens, triton.cdiv(latent, block))](
            out,
            outputs,
            topk_weights,
            slots,
            choices,
            latent,
            num_slots,
            *topk_weights.stride(),
            BLOCK=block,
            num_warps=4,
        )
    return out
