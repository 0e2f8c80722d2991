"""Attention Residuals: the mix over the bank of sealed depth blocks and the running sum, and when the bank grows.

Layer l sees `ceil(l / S)` sealed blocks in its first mix (S = attn_res_block_size). Where l % S == 0, the running sum is
sealed into the bank between the layer's two mixes, and the layer's attention output starts a new sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kimi_k3.configuration_kimi_k3 import KimiK3TextConfig
from kimi_k3.layers.linear import is_bare
from kimi_k3.layers.norm import RMSNorm
from kimi_k3_kernels import attn_res_mix, attn_res_mix_norm
from kimi_k3_kernels.library import compute_dtype, is_eager_inference


class Depth(NamedTuple):
    """A layer's place in the depth: scalars in tensors, so that one compiled graph serves every layer of a kind."""

    sealed_before: Tensor  # int32: blocks that its first mix reads
    sealed_after: Tensor  # int32: blocks that its second mix reads
    starts_sum: Tensor  # bool: its attention output starts a new sum


def mix(running_sum_TD: Tensor, bank_MTD: Tensor, num_blocks: Tensor, norm: RMSNorm, proj: nn.Linear) -> Tensor:
    """The mixed input of a sublayer. The two weights only ever act through their product."""
    wide = compute_dtype(running_sum_TD)
    weight_D = norm.weight.to(wide) * proj.weight[0].to(wide)
    return attn_res_mix(running_sum_TD, bank_MTD, num_blocks, weight_D, norm.eps)


def mix_and_norm(
    running_sum_TD: Tensor, bank_MTD: Tensor, num_blocks: Tensor, norm: RMSNorm, proj: nn.Linear, input_norm: RMSNorm
) -> Tensor:  # fmt: skip
    """input_norm(mix(..)): what a sublayer reads."""
    is_as_defined = _is_rms_norm(input_norm) and all(map(is_bare, (norm, proj, input_norm)))
    if is_as_defined and is_eager_inference(running_sum_TD) and input_norm.weight.dtype == running_sum_TD.dtype:
        return attn_res_mix_norm(
            running_sum_TD, bank_MTD, num_blocks, norm.weight, proj.weight, norm.eps, input_norm.weight, input_norm.eps
        )
    return input_norm(mix(running_sum_TD, bank_MTD, num_blocks, norm, proj))


def _is_rms_norm(module: nn.Module) -> bool:
    return getattr(type(module), "forward", None) is RMSNorm.forward and "forward" not in module.__dict__


def empty_bank(config: KimiK3TextConfig, running_sum_TD: Tensor) -> Tensor:
    """Room for every block that the whole depth seals; what is not yet sealed is never read."""
    return running_sum_TD.new_empty((config.num_sealed_blocks(config.num_hidden_layers), *running_sum_TD.shape))


def seal(bank_MTD: Tensor, index: int, running_sum_TD: Tensor) -> Tensor:
    """The bank with `running_sum` at `index`. Under autograd a new bank, because the old one is saved for backward."""
    if torch.is_grad_enabled() and (running_sum_TD.requires_grad or bank_MTD.requires_grad):
        return torch.cat([bank_MTD[:index], running_sum_TD[None], bank_MTD[index + 1 :]])
    bank_MTD[index].copy_(running_sum_TD)
    return bank_MTD


def depth_table(config: KimiK3TextConfig, device: torch.device) -> list[Depth]:
    """The place of each layer."""

    def place(layer_idx: int) -> Depth:
        sealed, starts = config.num_sealed_blocks(layer_idx), layer_idx % config.attn_res_block_size == 0
        before, after = (torch.tensor(count, dtype=torch.int32, device=device) for count in (sealed, sealed + starts))
        return Depth(before, after, torch.tensor(starts, device=device))

    return [place(layer_idx) for layer_idx in range(config.num_hidden_layers)]
