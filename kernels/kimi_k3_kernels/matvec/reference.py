"""A few rows times several matrices: plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def matvec_reference(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return torch.cat([F.linear(x, weight.to(x.dtype)) for weight in weights], dim=-1)
