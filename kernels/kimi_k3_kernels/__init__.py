"""Kimi K3's ops, registered as `torch.ops.kimi_k3.*`: tensors and numbers in, tensors out."""

from kimi_k3_kernels import native
from kimi_k3_kernels.attn_res import attn_res_mix, attn_res_mix_norm
from kimi_k3_kernels.choose_experts import choose_experts
from kimi_k3_kernels.head_matvec import head_matvec
from kimi_k3_kernels.kda import kda_chunk, kda_chunk_export, kda_recurrent, kda_recurrent_export, kda_step_
from kimi_k3_kernels.kda_gates import kda_gates
from kimi_k3_kernels.linear_rows import linear_rows
from kimi_k3_kernels.matvec import matvec
from kimi_k3_kernels.mla import mla_decode, mla_decode_mass, mla_prefill
from kimi_k3_kernels.mxfp4_experts import (
    dense_experts,
    mxfp4_combine,
    mxfp4_dequantize,
    mxfp4_experts,
    mxfp4_experts_int8,
    mxfp4_linear,
    mxfp4_quantize,
)
from kimi_k3_kernels.norm import gated_rms_norm, rms_norm
from kimi_k3_kernels.short_conv import short_conv, short_conv_export, short_conv_step_
from kimi_k3_kernels.situ import situ

native_library = native.load()

__all__ = [
    "attn_res_mix",
    "attn_res_mix_norm",
    "choose_experts",
    "dense_experts",
    "gated_rms_norm",
    "head_matvec",
    "kda_chunk",
    "kda_chunk_export",
    "kda_gates",
    "kda_recurrent",
    "kda_recurrent_export",
    "kda_step_",
    "linear_rows",
    "matvec",
    "mla_decode",
    "mla_decode_mass",
    "mla_prefill",
    "mxfp4_combine",
    "mxfp4_dequantize",
    "mxfp4_experts",
    "mxfp4_experts_int8",
    "mxfp4_linear",
    "mxfp4_quantize",
    "native_library",
    "rms_norm",
    "short_conv",
    "short_conv_export",
    "short_conv_step_",
    "situ",
]
