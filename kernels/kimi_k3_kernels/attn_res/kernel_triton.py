"""`attn_res_mix` on a GPU: one program for a token, which reads each source once and rescales its sum as scores arrive."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_k3_kernels.gpu import DTYPES, block_of

MAX_WIDTH = 16384  # a token's sum is kept in registers


@triton.jit
def _mix_kernel(
    out_ptr, running_ptr, bank_ptr, num_blocks_ptr, weight_ptr, eps, width,
    running_T, running_D, bank_M, bank_T, bank_D, weight_D, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < width
    weight = tl.load(weight_ptr + channel * weight_D, mask=inside, other=0.0).to(tl.float32)
    num_blocks = tl.load(num_blocks_ptr).to(tl.int32)

    newest = tl.load(running_ptr + token * running_T + channel * running_D, mask=inside, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(newest * newest) / width + eps)
    top = tl.sum(newest * weight) * inverse_rms  # the largest score so far
    total = top * 0 + 1.0
    mixed = newest
    source_ptr = bank_ptr + token * bank_T
    for _ in range(num_blocks):
        source = tl.load(source_ptr + channel * bank_D, mask=inside, other=0.0).to(tl.float32)
        score = tl.sum(source * weight) * tl.rsqrt(tl.sum(source * source) / width + eps)
        new_top = tl.maximum(top, score)
        kept, added = tl.exp(top - new_top), tl.exp(score - new_top)
        mixed = mixed * kept + source * added
        total = total * kept + added
        top = new_top
        source_ptr += bank_M
    mixed = mixed / total
    tl.store(out_ptr + token * width + channel, mixed.to(out_ptr.dtype.element_ty), mask=inside)


def attn_res_mix(running_sum: Tensor, bank: Tensor, num_blocks: Tensor, weight: Tensor, eps: float) -> Tensor:
    tokens, width = running_sum.shape
    if not {running_sum.dtype, weight.dtype} <= set(DTYPES) or width > MAX_WIDTH:
        return torch.ops.kimi_k3.attn_res_mix.reference(running_sum, bank, num_blocks, weight, eps)
    out = torch.empty((tokens, width), dtype=running_sum.dtype, device=running_sum.device)
    if tokens == 0 or width == 0:
        return out
    block = block_of(width)
    with torch.cuda.device_of(running_sum):
        _mix_kernel[(tokens,)](
            out, running_sum, bank, num_blocks, weight, eps, width, *running_sum.stride(), *bank.stride(),
            *weight.stride(), BLOCK=block, num_warps=max(1, min(8, block // 512)),
        )  # fmt: skip
    return out
