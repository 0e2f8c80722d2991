"""Every Triton kernel compiles ahead of time for four GPUs at K3's sizes, and fits their shared memory.

No GPU is needed, and nothing runs: this shows that the compilers take the kernels as they would be launched, not that
results are right (test_triton_interpreter.py does) or fast.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from triton_targets import SHARED_LIMIT, TARGETS, recorded

from kimi_k3_kernels.attn_res import kernel_triton as attn_res
from kimi_k3_kernels.kda import kernel_triton as kda
from kimi_k3_kernels.library import GPU_KERNELS
from kimi_k3_kernels.mla import kernel_triton as mla
from kimi_k3_kernels.mxfp4_experts import kernel_triton as mxfp4
from kimi_k3_kernels.short_conv import kernel_triton as short_conv

MODULES = (attn_res, kda, mla, mxfp4, short_conv)
BF16, T, N = torch.bfloat16, 2048, 4


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def fp32(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.float32)


def int32(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


def mxfp4_weight(*shape: int) -> tuple[Tensor, Tensor]:
    *rows, columns = shape
    return meta(*rows, columns // 2, dtype=torch.uint8), meta(*rows, columns // 32, dtype=torch.uint8)


def kda_tokens(count: int) -> tuple[Tensor, ...]:
    q = meta(count, 96, 128)
    return q, q, q, fp32(count, 96, 128), fp32(count, 96)


def run_experts(tokens: int) -> None:
    stacks = (mxfp4_weight(896, 3072, 3584), mxfp4_weight(896, 3072, 3584), mxfp4_weight(896, 3584, 3072))
    routed = (meta(tokens, 3584), meta(tokens, 16, dtype=torch.int64), fp32(tokens, 16))
    mxfp4.mxfp4_experts(*routed, *(t for stack in stacks for t in stack), int32(896), 4.0, 25.0)


POOL, SLOTS, CU = fp32(8, 96, 128, 128), (int32(N), int32(N)), int32(N + 1)
CONV = (meta(3 * 96 * 128, 4), meta(8, 3, 3 * 96 * 128), *SLOTS)
LATENTS, TABLES = meta(4096, 64, 576), int32(N, 512)
# K3's sizes: 96 heads of 128, latents of 512 + 64, experts of 3584 x 3072.
CASES: dict[str, Callable[[], object]] = {
    "attn_res_mix": lambda: attn_res.attn_res_mix(meta(T, 7168), meta(9, T, 7168), int32(1), meta(7168), 1e-5),
    "kda_chunk": lambda: kda.kda_chunk(*kda_tokens(T), POOL, *SLOTS, CU),
    "kda_chunk_export": lambda: kda.kda_chunk_export(*kda_tokens(T), POOL, *SLOTS, CU, int32(40), int32(40)),
    "kda_step_": lambda: kda.kda_step_(*kda_tokens(N), POOL, *SLOTS),
    "mla_decode": lambda: mla.mla_decode(meta(N, 96, 576), LATENTS, TABLES, int32(N), 192**-0.5, 512),
    "mla_prefill": lambda: mla.mla_prefill(
        meta(T, 96, 192), meta(T, 576), meta(96 * 256, 512), LATENTS, TABLES, int32(N), CU, 192**-0.5
    ),
    "mxfp4_dequantize": lambda: mxfp4.mxfp4_dequantize(*mxfp4_weight(3072, 3584), BF16),
    "mxfp4_experts": lambda: [run_experts(tokens) for tokens in (1, 512, 8192)],
    "mxfp4_linear": lambda: mxfp4.mxfp4_linear(meta(N, 3584), *mxfp4_weight(3072, 3584)),
    "short_conv": lambda: short_conv.short_conv(meta(T, 3 * 96 * 128), *CONV, CU),
    "short_conv_step_": lambda: short_conv.short_conv_step_(meta(N, 3 * 96 * 128), *CONV),
}
QUICK = {("kda_step_", "sm_90"), ("kda_step_", "gfx950"), ("attn_res_mix", "sm_100"), ("attn_res_mix", "gfx942")}


def test_every_op_with_a_gpu_kernel_is_compiled():
    assert set(CASES) == set(GPU_KERNELS)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", CASES)
def test_launches_are_well_formed(op: str, target: str):
    """Grids within the hardware's limits, each argument given once; for the longest prompts too."""
    with recorded(target, *MODULES) as launches:
        CASES[op]()
    assert launches and all(launch.options["num_warps"] in (1, 2, 4, 8) for launch in launches)


def compile_cases() -> list[object]:
    """A few seconds' worth by default; some of the others take up to a minute."""
    pairs = [(op, target) for op in CASES for target in TARGETS]
    return [pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(("op", "target"), compile_cases())
def test_kernels_compile_and_fit(op: str, target: str):
    with recorded(target, *MODULES) as launches:
        CASES[op]()
    for launch in launches:
        compiled = launch.compile(target)
        assert compiled.metadata.shared <= SHARED_LIMIT[target], launch.kernel.__name__
        assert "cubin" in compiled.asm if target.startswith("sm_") else "hsaco" in compiled.asm
