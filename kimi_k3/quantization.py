"""torchao at the edges: packed experts in and out of MXTensor, the trunk in int8; the experts' activations in int8."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kimi_k3.configuration_kimi_k3 import MXFP4_GROUP
from kimi_k3.layers.moe import KimiK3Experts

if TYPE_CHECKING:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

logger = logging.getLogger("kimi_k3")

# Left as they are: weights that the layers read directly (kv_b_proj, AttnRes), the decay and write gates of KDA, whose
# errors a recurrence accumulates, and the head.
_KEPT = ("kv_b_proj", "self_attention_res_proj", "mlp_res_proj", "output_attn_res_proj", "f_a_proj", "f_b_proj", "b_proj",
         "lm_head")  # fmt: skip


def experts_to_mxtensor(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> MXTensor:
    """View packed experts as torchao's MXTensor: the same memory, exact.

    Args:
        packed: [.., out, in / 2] uint8, element 2j in the low nibble.     scale: [.., out, in / 32] uint8, E8M0.
        dtype: the high-precision dtype that the result stands for.
    Raises: ValueError if shapes or dtypes disagree.
    """
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    groups = (*packed.shape[:-1], packed.shape[-1] * 2 // MXFP4_GROUP)
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8 or tuple(scale.shape) != groups:
        raise ValueError(
            f"experts_to_mxtensor: want uint8 codes [.., out, in / 2] and scales [.., out, in / {MXFP4_GROUP}], got "
            f"{packed.dtype} {list(packed.shape)} and {scale.dtype} {list(scale.shape)}"
        )
    exponents = scale.view(torch.float8_e8m0fnu)
    return MXTensor(packed, exponents, torch.float4_e2m1fn_x2, MXFP4_GROUP, dtype, None, None, False)


def experts_from_mxtensor(tensor: MXTensor) -> tuple[Tensor, Tensor]:
    """Codes [.., out, in / 2] and scales [.., out, in / 32], uint8, of an MXTensor in MXFP4: its own memory, exact.

    Raises: ValueError for another element type or group size, or swizzled scales.
    """
    if tensor.elem_dtype != torch.float4_e2m1fn_x2 or tensor.block_size != MXFP4_GROUP or tensor.is_swizzled_scales:
        raise ValueError(
            f"experts_from_mxtensor: want float4_e2m1fn_x2 in groups of {MXFP4_GROUP} with plain scales, got "
            f"{tensor.elem_dtype} in groups of {tensor.block_size}, swizzled: {tensor.is_swizzled_scales}"
        )
    return tensor.qdata.view(torch.uint8), tensor.scale.view(torch.uint8)


def quantize_trunk_int8_(model: nn.Module) -> None:
    """Quantise the linear layers outside experts, router and head to int8, weight only, in place. Lossy.

    Each output channel gets one scale (torchao's Int8WeightOnlyConfig). On the demo model's held-out plays it costs 0.00003
    bits per byte (2.04208 to 2.04211, perplexity per byte x 1.00002); a larger model may lose more, so compare on your own
    text. Such a model cannot be saved.
    """
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    chosen = []

    def is_trunk(module: nn.Module, name: str) -> bool:
        hit = isinstance(module, nn.Linear) and name.rpartition(".")[2] not in _KEPT
        hit = hit and not name.startswith(("vision_tower.", "mm_projector."))
        if hit:
            chosen.append(name)
        return hit

    config: Any = Int8WeightOnlyConfig()
    quantize_(model, config, filter_fn=is_trunk)
    model.lossy_trunk = "int8"  # type: ignore[assignment]
    logger.warning(
        "trunk='int8' is lossy (perplexity x 1.00002 on the demo model, measure your own): %d linear layers now have int8 "
        "weights, and this model cannot be saved",
        len(chosen),
    )


def quantize_expert_activations_int8_(model: nn.Module) -> None:
    """From now on the packed experts compute with activations in int8 by groups of 32 (`mxfp4_experts_int8`). Lossy.

    The weights stay as they are stored, so such a model is saved byte for byte. It pays for prompts and large batches on
    a CPU with AVX-512 VNNI, and nowhere else. On the demo model's held-out plays it costs 0.00001 bits per byte (2.04212
    to 2.04213, perplexity per byte x 1.00001); a larger model may lose more, so compare on your own text.

    Raises: ValueError if no layer has packed experts, or they are on a GPU: there is no kernel for it yet.
    """
    chosen = [m for m in model.modules() if isinstance(m, KimiK3Experts) and m.packed]
    devices = {parameter.device.type for experts in chosen for parameter in experts.parameters()} - {"cpu", "meta"}
    if devices:
        raise ValueError(f"expert_activations='int8': want a model on a CPU, got {', '.join(sorted(devices))}")
    if not chosen:
        raise ValueError("expert_activations='int8': want packed experts (MXFP4), this model has only plain ones")
    for experts in chosen:
        experts.has_int8_activations = True
    model.lossy_expert_activations = "int8"  # type: ignore[assignment]
    logger.warning(
        "expert_activations='int8' is lossy (perplexity x 1.00001 on the demo model, measure your own): the routed experts of "
        "%d layers now round what they read to int8, which is faster only for many tokens and with AVX-512 VNNI",
        len(chosen),
    )
