"""Rows of a batch as packed tokens, and back: padding never reaches a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass
class TokenLayout:
    """N sequences of `lengths` tokens, packed one after another, and their places in a [B, T] batch."""

    lengths: list[int]
    shape: tuple[int, int]
    places: Tensor | None  # [sum(lengths)] int64 into the flattened batch; None: the batch is the packing

    def pack(self, x_BT: Tensor) -> Tensor:
        """[B, T, ...] -> [sum(lengths), ...]."""
        flat = x_BT.flatten(0, 1)
        return flat if self.places is None else flat[self.places]

    def unpack(self, packed: Tensor) -> Tensor:
        """[sum(lengths), ...] -> [B, T, ...], zeros at padding."""
        if self.places is None:
            return packed.unflatten(0, self.shape)
        flat = packed.new_zeros((self.shape[0] * self.shape[1], *packed.shape[1:]))
        return flat.index_copy(0, self.places, packed).unflatten(0, self.shape)

    def next_tokens(self, packed_ids: Tensor, ignore: int) -> Tensor:
        """The token after each one in its own sequence; `ignore` for the last of each."""
        shifted = torch.cat([packed_ids[1:], packed_ids.new_full((1,), ignore)])
        ends = torch.tensor([n for n in self.lengths if n], device=packed_ids.device).cumsum(0) - 1
        shifted[ends] = ignore
        return shifted

    def last(self, count: int) -> tuple[Tensor, TokenLayout]:
        """Packed rows of the last `count` tokens of each sequence, and their layout.

        Rows of a batch end at the right edge of [B, count]; packed sequences stay packed in [1, ...].
        """
        kept = [min(count, length) for length in self.lengths]
        rows: list[int] = []
        end = 0
        for length, keep in zip(self.lengths, kept):
            end += length
            rows += range(end - keep, end)
        device = None if self.places is None else self.places.device
        if self.shape[0] != len(self.lengths):
            return torch.tensor(rows, dtype=torch.int64, device=device), TokenLayout(kept, (1, sum(kept)), None)
        width = max(kept, default=0)
        places = [row * width + width - keep + i for row, keep in enumerate(kept) for i in range(keep)]
        layout = TokenLayout(kept, (self.shape[0], width), torch.tensor(places, dtype=torch.int64, device=device))
        return torch.tensor(rows, dtype=torch.int64, device=device), layout


def layout_from_mask(
    attention_mask: Tensor | None, shape: tuple[int, int], pasts: Sequence[int], device: torch.device
) -> TokenLayout:
    """The layout of a [B, T] batch. A mask is [B, T], or [B, past + T] as Hugging Face hands it to a cached forward,
    the past counted in tokens of the longest row or in columns, padding included: either of `pasts`.
    """
    batch, tokens = shape
    if attention_mask is None:
        return TokenLayout([tokens] * batch, shape, None)
    widths = [0, *pasts]
    if attention_mask.shape not in [(batch, past + tokens) for past in widths]:
        wanted = " or ".join(f"[{batch}, {past} + {tokens}]" for past in sorted(set(widths)))
        raise ValueError(f"attention_mask: want {wanted}, got {list(attention_mask.shape)}")
    mask = attention_mask[:, attention_mask.shape[1] - tokens :].to(device)
    is_token = mask.to(torch.bool)
    if not bool((mask == is_token).all()):
        raise ValueError(f"attention_mask: want zeros and ones, got values in {mask.min().item()}..{mask.max().item()}")
    if tokens and int((is_token[:, 1:] & ~is_token[:, :-1]).sum(1).add(is_token[:, 0].long()).max()) > 1:
        raise ValueError(
            "attention_mask: want each row's ones side by side (left or right padding), got a row with a hole"
        )
    if bool(is_token.all()):
        return TokenLayout([tokens] * batch, shape, None)
    return TokenLayout(is_token.sum(1).tolist(), shape, is_token.flatten().nonzero().squeeze(1))


def layout_from_cu_seqlens(cu_seqlens: Tensor, shape: tuple[int, int]) -> TokenLayout:
    """The layout of packed sequences in [1, T]."""
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype != torch.int32 or shape[0] != 1:
        raise ValueError(
            f"cu_seqlens: want int32 [N + 1] with input of shape [1, T], got {cu_seqlens.dtype} "
            f"{list(cu_seqlens.shape)} with input {list(shape)}"
        )
    bounds = cu_seqlens.tolist()
    lengths = [b - a for a, b in pairwise(bounds)]
    if not lengths or bounds[0] != 0 or bounds[-1] != shape[1] or min(lengths) < 0:
        raise ValueError(f"cu_seqlens: want rising offsets from 0 to T = {shape[1]}, got {bounds}")
    return TokenLayout(lengths, shape, None)
