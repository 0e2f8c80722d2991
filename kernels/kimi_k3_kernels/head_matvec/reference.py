"""Rows times a matrix of each head: plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_kernels.linear_rows.reference import pad_depth

ROW_BLOCK = 8  # one size for all products: see linear_rows/reference.py


def head_matvec_reference(x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    weight_HKM = pad_depth(weight if transposed else weight.mT, 1)
    blocks = F.pad(pad_depth(x), (0, 0, 0, 0, 0, -x.shape[0] % ROW_BLOCK)).split(ROW_BLOCK) if x.shape[0] else ()
    out = [torch.bmm(block.transpose(0, 1).contiguous(), weight_HKM).transpose(0, 1) for block in blocks]
    return torch.cat(out)[: x.shape[0]].contiguous() if out else x.new_empty((0, x.shape[1], weight_HKM.shape[2]))
