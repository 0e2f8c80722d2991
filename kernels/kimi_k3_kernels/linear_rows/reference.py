"""Many rows times several matrices, each row with bits of its own: plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# A library GEMM chooses the order of its sums by its sizes, so all have one: zeros fill the last rows.
ROW_BLOCK = 16


def row_blocks(x_TK: Tensor) -> list[Tensor]:
    """[T, K] as blocks of 16 rows, each a copy of its own: a GEMM may also look at where its rows lie in memory."""
    padded = F.pad(x_TK, (0, 0, 0, -x_TK.shape[0] % ROW_BLOCK))
    return [block.clone(memory_format=torch.contiguous_format) for block in padded.split(ROW_BLOCK)]


def linear_rows_reference(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    if x.shape[0] == 0:
        return x.new_empty((0, sum(weight.shape[0] for weight in weights)))
    wide = [weight.to(x.dtype) for weight in weights]
    blocks = [torch.cat([F.linear(block, weight) for weight in wide], dim=-1) for block in row_blocks(x)]
    return torch.cat(blocks)[: x.shape[0]].contiguous()
