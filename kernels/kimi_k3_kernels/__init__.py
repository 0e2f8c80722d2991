"""Kimi K3's ops, registered as `torch.ops.kimi_k3.*`: tensors and numbers in, tensors out."""

from kimi_k3_kernels import native
from kimi_k3_kernels.attn_res import attn_res_mix
from kimi_k3_kernels.kda import kda_chunk, kda_chunk_export, kda_step_
from kimi_k3_kernels.matvec import matvec
from kimi_k3_kernels.mla import mla_decode, mla_prefill
from kimi_k3_kernels.mxfp4_experts import (
    dense_experts,
    mxfp4_combine,
    mxfp4_dequantize,
    mxfp4_experts,
    mxfp4_linear,
    mxfp4_quantize,
)
from kimi_k3_kernels.short_conv import short_conv, short_conv_step_

native_library = native.load()

__all__ = [
    "attn_res_mix",
    "dense_experts",
    "kda_chunk",
    "kda_chunk_export",
    "kda_step_",
    "matvec",
    "mla_decode",
    "mla_prefill",
    "mxfp4_combine",
    "mxfp4_dequantize",
    "mxfp4_experts",
    "mxfp4_linear",
    "mxfp4_quantize",
    "native_library",
    "short_conv",
    "short_conv_step_",
]
