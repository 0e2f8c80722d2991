"""Attention Residuals: the mix over the bank of sealed depth blocks and the running sum, and when the bank grows.

Layer l sees `ceil(l / S)` sealed blocks in its first mix (S = attn_res_block_size). Where l % S == 0, the running sum is
sealed into the bank between the layer's two mixes, and the layer's attention output starts a new sum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kimi_k3.configuration_kimi_k3 import KimiK3TextConfig
from kimi_k3.layers.norm import RMSNorm
from kimi_k3_kernels import attn_res_mix
from kimi_k3_kernels.library import compute_dtype


def mix(running_sum_TD: Tensor, bank_MTD: Tensor, num_blocks: Tensor, norm: RMSNorm, proj: nn.Linear) -> Tensor:
    """The mixed input of a sublayer. The two weights only ever act through their product."""
    wide = compute_dtype(running_sum_TD)
    weight_D = norm.weight.to(wide) * proj.weight[0].to(wide)
    return attn_res_mix(running_sum_TD, bank_MTD, num_blocks, weight_D, norm.eps)


def empty_bank(config: KimiK3TextConfig, running_sum_TD: Tensor) -> Tensor:
    """Room for every block that the whole depth seals; what is not yet sealed is never read."""
    return running_sum_TD.new_empty((config.num_sealed_blocks(config.num_hidden_layers), *running_sum_TD.shape))


def seal(bank_MTD: Tensor, index: int, running_sum_TD: Tensor) -> Tensor:
    """The bank with `running_sum` at `index`. Under autograd a new bank, because the old one is saved for backward."""
    if torch.is_grad_enabled() and (running_sum_TD.requires_grad or bank_MTD.requires_grad):
        return torch.cat([bank_MTD[:index], running_sum_TD[None], bank_MTD[index + 1 :]])
    bank_MTD[index].copy_(running_sum_TD)
    return bank_MTD


def depth_table(config: KimiK3TextConfig, device: torch.device) -> Tensor:
    """[layers, 3] int32: sealed blocks in each layer's first and second mix, and whether the layer starts a new sum.

    A tensor, so that one compiled graph serves every depth.
    """
    layers = range(config.num_hidden_layers)
    starts = [layer_idx % config.attn_res_block_size == 0 for layer_idx in layers]
    rows = [[config.num_sealed_blocks(i), config.num_sealed_blocks(i) + starts[i], starts[i]] for i in layers]
    return torch.tensor(rows, dtype=torch.int32, device=device)
