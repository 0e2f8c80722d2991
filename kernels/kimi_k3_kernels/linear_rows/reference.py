"""Many rows times several matrices, each row with bits of its own: plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# A library GEMM chooses the order of its sums by its sizes, so all have one: zeros fill the last rows.
ROW_BLOCK = 16
# And by where a row begins in memory: zeros make every row whole cache lines (16 floats).
DEPTH_MULTIPLE = 16


def pad_depth(x: Tensor, dim: int = -1) -> Tensor:
    """Zeros behind the elements of `dim`, up to a multiple of 16: products over it stay as they are."""
    missing = -x.shape[dim] % DEPTH_MULTIPLE
    return F.pad(x.transpose(dim, -1), (0, missing)).transpose(dim, -1) if missing else x


def linear_rows_reference(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    if x.shape[0] == 0:
        return x.new_empty((0, sum(weight.shape[0] for weight in weights)))
    wide = [pad_depth(weight.to(x.dtype)) for weight in weights]
    blocks = F.pad(pad_depth(x), (0, 0, 0, -x.shape[0] % ROW_BLOCK)).split(ROW_BLOCK)
    out = [torch.cat([F.linear(block, weight) for weight in wide], dim=-1) for block in blocks]
    return torch.cat(out)[: x.shape[0]].contiguous()
