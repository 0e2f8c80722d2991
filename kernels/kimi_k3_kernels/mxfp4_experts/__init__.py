from kimi_k3_kernels.mxfp4_experts.op import (
    dense_experts,
    mxfp4_combine,
    mxfp4_dequantize,
    mxfp4_experts,
    mxfp4_experts_int8,
    mxfp4_linear,
    mxfp4_quantize,
)

__all__ = [
    "dense_experts",
    "mxfp4_combine",
    "mxfp4_dequantize",
    "mxfp4_experts",
    "mxfp4_experts_int8",
    "mxfp4_linear",
    "mxfp4_quantize",
]
