"""Inputs of the KDA tests: decays over the whole range, K != V, pools with one slot more than is used."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def packed(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def kda_inputs(
    tokens: int, heads: int = 3, key_dim: int = 8, value_dim: int = 12, dtype: torch.dtype = torch.float64,
    lowest: float = -5.0, seed: int = 0,
) -> list[Tensor]:  # fmt: skip
    """q, k, v, log_decay, beta."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q = F.normalize(normal(tokens, heads, key_dim), dim=-1) * key_dim**-0.5
    k = F.normalize(normal(tokens, heads, key_dim), dim=-1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    log_decay, beta = rand(tokens, heads, key_dim) * lowest, rand(tokens, heads)
    return [q.to(dtype), k.to(dtype), normal(tokens, heads, value_dim).to(dtype), log_decay.to(wide), beta.to(wide)]
