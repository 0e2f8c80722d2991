"""The contract of the MXFP4 and expert ops: schema, fake, gradient, checks; no arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kimi_k3_kernels.library import call, define_gpu_kernel, define_gradient, define_op, require
from kimi_k3_kernels.mxfp4_experts.reference import (
    GROUP,
    combine_backward_reference,
    combine_reference,
    dense_experts_backward_reference,
    dense_experts_reference,
    mxfp4_dequantize_reference,
    mxfp4_experts_backward_reference,
    mxfp4_experts_int8_reference,
    mxfp4_experts_reference,
    mxfp4_linear_reference,
    mxfp4_quantize_reference,
)

_ROUTED = "Tensor x, Tensor topk_ids, Tensor topk_weights"
_PACKED = (
    "Tensor w1_packed, Tensor w1_scale, Tensor w3_packed, Tensor w3_scale, Tensor w2_packed, Tensor w2_scale, "
    "Tensor slot_table, float beta, float? linear_beta"
)
_DENSE = "Tensor w1, Tensor w3, Tensor w2, Tensor slot_table, float beta, float? linear_beta"


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


mxfp4_dequantize_op = define_op(
    "mxfp4_dequantize(Tensor packed, Tensor scale, ScalarType dtype) -> Tensor",
    mxfp4_dequantize_reference,
    lambda packed, scale, dtype: packed.new_empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=dtype),
)
mxfp4_linear_op = define_op(
    "mxfp4_linear(Tensor x, Tensor packed, Tensor scale) -> Tensor",
    mxfp4_linear_reference,
    lambda x, packed, scale: x.new_empty((*x.shape[:-1], packed.shape[0])),
)
mxfp4_experts_op = define_op(
    f"mxfp4_experts({_ROUTED}, {_PACKED}) -> Tensor", mxfp4_experts_reference, lambda x, *_: _like(x)
)
mxfp4_experts_int8_op = define_op(
    f"mxfp4_experts_int8({_ROUTED}, {_PACKED}) -> Tensor", mxfp4_experts_int8_reference, lambda x, *_: _like(x)
)
mxfp4_experts_backward_op = define_op(
    f"mxfp4_experts_backward(Tensor grad, {_ROUTED}, {_PACKED}) -> (Tensor, Tensor)",
    mxfp4_experts_backward_reference,
    lambda grad, x, topk_ids, topk_weights, *_: (_like(x), _like(topk_weights)),
)
mxfp4_combine_op = define_op(
    "mxfp4_combine(Tensor outputs, Tensor topk_weights) -> Tensor",
    combine_reference,
    lambda outputs, topk_weights: outputs.new_empty((outputs.shape[0], outputs.shape[2])),
)
mxfp4_combine_backward_op = define_op(
    "mxfp4_combine_backward(Tensor grad, Tensor outputs, Tensor topk_weights) -> (Tensor, Tensor)",
    combine_backward_reference,
    lambda grad, outputs, topk_weights: (_like(outputs), _like(topk_weights)),
)
dense_experts_op = define_op(
    f"dense_experts({_ROUTED}, {_DENSE}) -> Tensor", dense_experts_reference, lambda x, *_: _like(x)
)
dense_experts_backward_op = define_op(
    f"dense_experts_backward(Tensor grad, {_ROUTED}, {_DENSE}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    dense_experts_backward_reference,
    lambda grad, x, ids, weights, w1, w3, w2, *_: (_like(x), _like(weights), *map(torch.empty_like, (w1, w3, w2))),
)


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    *tensors, ctx.beta, ctx.linear_beta = inputs
    ctx.save_for_backward(*tensors)


def _packed_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    return mxfp4_experts_backward_op(grad.contiguous(), *ctx.saved_tensors, ctx.beta, ctx.linear_beta)


def _int8_refuse(ctx: Any, inputs: tuple[Any, ...]) -> None:
    raise NotImplementedError(
        "mxfp4_experts_int8 has no gradient: it is for inference, under torch.no_grad(); want mxfp4_experts"
    )


def _dense_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    return dense_experts_backward_op(grad.contiguous(), *ctx.saved_tensors, ctx.beta, ctx.linear_beta)


def _combine_save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*inputs)


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    return mxfp4_combine_backward_op(grad.contiguous(), *ctx.saved_tensors)


def _linear_save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*inputs[1:])


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
    return (grad @ mxfp4_dequantize_op(*ctx.saved_tensors, grad.dtype),)


define_gradient(mxfp4_experts_op, (0, 2), _save, _packed_backward)
define_gradient(mxfp4_experts_int8_op, (0, 2), _int8_refuse, _packed_backward)
define_gradient(dense_experts_op, (0, 2, 3, 4, 5), _save, _dense_backward)
define_gradient(mxfp4_combine_op, (0, 1), _combine_save, _combine_backward)
define_gradient(mxfp4_linear_op, (0,), _linear_save, _linear_backward)


def _check_packed(op: str, packed: Tensor, scale: Tensor) -> None:
    require(
        packed.dtype == scale.dtype == torch.uint8 and packed.ndim >= 2 and packed.shape[:-1] == scale.shape[:-1]
        and packed.shape[-1] * 2 == scale.shape[-1] * GROUP,
        op, f"uint8 codes [.., out, in / 2] and scales [.., out, in / {GROUP}]", packed=packed, scale=scale,
    )  # fmt: skip


def _check_routed(op: str, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, slot_table: Tensor) -> None:
    require(
        x.ndim == 2 and topk_ids.ndim == 2 and topk_ids.shape == topk_weights.shape and topk_ids.shape[0] == x.shape[0]
        and not topk_ids.is_floating_point() and slot_table.ndim == 1 and not slot_table.is_floating_point(),
        op, "x [T, L], topk_ids and topk_weights [T, A], slot_table [E] integers",
        x=x, topk_ids=topk_ids, topk_weights=topk_weights, slot_table=slot_table,
    )  # fmt: skip


def _check_experts(
    op: str, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w1_packed: Tensor, w1_scale: Tensor, w3_packed: Tensor,
    w3_scale: Tensor, w2_packed: Tensor, w2_scale: Tensor, slot_table: Tensor,
) -> None:  # fmt: skip
    _check_routed(op, x, topk_ids, topk_weights, slot_table)
    for packed, scale in ((w1_packed, w1_scale), (w3_packed, w3_scale), (w2_packed, w2_scale)):
        _check_packed(op, packed, scale)
    width = w1_packed.shape[1]
    require(
        w1_packed.ndim == 3 and w1_packed.shape == w3_packed.shape and w1_packed.shape[2] * 2 == x.shape[1]
        and w2_packed.shape == (w1_packed.shape[0], x.shape[1], width // 2),
        op, "w1 and w3 [S, F, L / 2], w2 [S, L, F / 2]", x=x, w1=w1_packed, w3=w3_packed, w2=w2_packed,
    )  # fmt: skip


def mxfp4_dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode MXFP4 exactly: value = E2M1[code] 2^(scale - 127), element 2j in the low nibble of byte j.

    Args: packed [.., out, in / 2] and scale [.., out, in / 32], uint8; dtype bfloat16, float32 or float64.
    Returns: [.., out, in]. A scale of 255 decodes to NaN (OCP reserves it).
    Raises: ValueError if shapes or dtypes disagree.
    """
    _check_packed("mxfp4_dequantize", packed, scale)
    wanted = (torch.bfloat16, torch.float32, torch.float64)  # exact in these; float16 lacks the exponents
    require(dtype in wanted, "mxfp4_dequantize", f"dtype in {wanted}", dtype=dtype)
    return mxfp4_dequantize_op(packed, scale, dtype)


def mxfp4_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight [.., out, in] to MXFP4 with the scales of the OCP rule, 2^(floor(log2(max |w|)) - 2).

    Returns: codes [.., out, in / 2] and scales [.., out, in / 32], uint8. Values that MXFP4 holds come back exactly.
    Raises: ValueError if `in` is no multiple of 32.
    """
    require(
        weight.is_floating_point() and weight.ndim >= 2 and weight.shape[-1] % GROUP == 0,
        "mxfp4_quantize", f"a floating-point weight [.., out, in], in a multiple of {GROUP}", weight=weight,
    )  # fmt: skip
    return mxfp4_quantize_reference(weight)


def mxfp4_linear(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """x [.., in] times one packed matrix [out, in]: [.., out] in x's dtype. The gradient flows to x."""
    _check_packed("mxfp4_linear", packed, scale)
    require(packed.ndim == 2 and x.shape[-1] == packed.shape[1] * 2, "mxfp4_linear", "x [.., in]", x=x, packed=packed)
    return mxfp4_linear_op(x, packed, scale)


def mxfp4_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w1_packed: Tensor, w1_scale: Tensor, w3_packed: Tensor,
    w3_scale: Tensor, w2_packed: Tensor, w2_scale: Tensor, slot_table: Tensor, beta: float, linear_beta: float | None,
) -> Tensor:  # fmt: skip
    """The routed experts of a token from packed weights, weighted and summed.

        y = sum_a topk_weights[a] w2_s( situ(w1_s x, w3_s x) ),  s = slot_table[topk_ids[a]]
        situ(g, u) = beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta)

    Args:
        x: [T, L], bfloat16, float32 or float64.
        topk_ids: [T, A] integers, logical experts.     topk_weights: [T, A], any float.
        w1_packed, w3_packed: [S, F, L / 2] uint8, w1_scale, w3_scale: [S, F, L / 32]; w2_packed: [S, L, F / 2],
            w2_scale: [S, L, F / 32]: S physical slots, any stride in dimension 0.
        slot_table: [E] integers, the slot of each logical expert.
        beta, linear_beta: of SiTU; linear_beta None leaves the up branch linear.
    Returns: [T, L] in x's dtype: products in x's dtype, the weighted sum in float32 (float64 for float64).
        A row's bits do not depend on the other rows. Gradients flow to x and topk_weights.
    Raises: ValueError if shapes or dtypes disagree.
    """
    _check_experts(
        "mxfp4_experts", x, topk_ids, topk_weights, w1_packed, w1_scale, w3_packed, w3_scale, w2_packed, w2_scale,
        slot_table,
    )  # fmt: skip
    return call(
        mxfp4_experts_op,
        x, topk_ids, topk_weights, w1_packed, w1_scale, w3_packed, w3_scale, w2_packed, w2_scale, slot_table, beta,
        linear_beta,
    )  # fmt: skip


def mxfp4_experts_int8(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w1_packed: Tensor, w1_scale: Tensor, w3_packed: Tensor,
    w3_scale: Tensor, w2_packed: Tensor, w2_scale: Tensor, slot_table: Tensor, beta: float, linear_beta: float | None,
) -> Tensor:  # fmt: skip
    """`mxfp4_experts` with activations in int8 (W4A8): lossy, the weights are those that are stored.

    x and situ(..) are rounded to int8 by groups of 32 with one float32 scale, max |x| / 127, ties to even. Products are
    exact; their sums, SiTU and the weighted sum run in float32 (float64 for float64). Arguments and errors are those of
    `mxfp4_experts`. A row's bits do not depend on the other rows. No gradient: training wants the lossless op.
    """
    _check_experts(
        "mxfp4_experts_int8", x, topk_ids, topk_weights, w1_packed, w1_scale, w3_packed, w3_scale, w2_packed, w2_scale,
        slot_table,
    )  # fmt: skip
    return call(
        mxfp4_experts_int8_op,
        x, topk_ids, topk_weights, w1_packed, w1_scale, w3_packed, w3_scale, w2_packed, w2_scale, slot_table, beta,
        linear_beta,
    )  # fmt: skip


def mxfp4_combine(outputs: Tensor, topk_weights: Tensor) -> Tensor:
    """The last sum of `mxfp4_experts` alone, in the order of the choices: outputs [T, A, L], topk_weights [T, A] -> [T, L].

    Bit for bit what `mxfp4_experts` makes of its choices' rows: for rows that were computed elsewhere. Gradients flow to
    both.
    """
    require(
        outputs.ndim == 3 and outputs.shape[:2] == topk_weights.shape, "mxfp4_combine",
        "outputs [T, A, L], topk_weights [T, A]", outputs=outputs, topk_weights=topk_weights,
    )  # fmt: skip
    return mxfp4_combine_op(outputs, topk_weights)


def dense_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, slot_table: Tensor,
    beta: float, linear_beta: float | None,
) -> Tensor:  # fmt: skip
    """`mxfp4_experts` from plain weights w1, w3 [S, F, L] and w2 [S, L, F] in x's dtype, which get gradients too."""
    _check_routed("dense_experts", x, topk_ids, topk_weights, slot_table)
    require(
        w1.ndim == 3 and w1.shape == w3.shape and w1.shape[2] == x.shape[1] and w2.shape == w1.mT.shape
        and w1.dtype == w3.dtype == w2.dtype == x.dtype,
        "dense_experts", "w1 and w3 [S, F, L], w2 [S, L, F] in x's dtype", x=x, w1=w1, w3=w3, w2=w2,
    )  # fmt: skip
    return dense_experts_op(x, topk_ids, topk_weights, w1, w3, w2, slot_table, beta, linear_beta)


for _op in (mxfp4_dequantize_op, mxfp4_linear_op, mxfp4_experts_op):
    define_gpu_kernel(_op, "kimi_k3_kernels.mxfp4_experts.kernel_triton")
