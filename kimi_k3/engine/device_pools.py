"""The cache memory itself: one buffer, seen by each layer as a pool of states, windows or latent blocks.

    page p:   | states of all KDA layers | windows of all KDA layers |  or  | block | block | ... |
    block:    | latents of all MLA layers, [block_size, R + rope] each |

    bf16 snapshot:    states rounded to bfloat16, windows as they are, spread over as many blocks as they need

A slot or a block of all layers is one run of bytes: copying one is one copy. To a layer its pool looks like any other,
`[S, H, K, V]` or `[P, block, R + rope]`, with the page or the block as the stride of dimension 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kimi_k3.cache import BLOCK_SIZE

if TYPE_CHECKING:
    from kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM

ALIGNMENT = 64  # bytes
# A stored state is cut into so many slices of heads, so that other parallel degrees can read their part. Of K3's 96 each
# has 3: 13.6 MB.
HEAD_SLICES = 32
STAGED = -1  # instead of a slot: the state in the staging buffer


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class PoolLayout:
    """Sizes in bytes, and where each layer's part lies, for one model and block size."""

    def __init__(
        self, model: KimiK3ForCausalLM, block_size: int = BLOCK_SIZE, *, has_bf16_snapshots: bool = False
    ) -> None:
        self.block_size, self.has_bf16_snapshots = block_size, has_bf16_snapshots
        config, pools = model.config.text_config, model.make_cache(1).pools
        self.slot_parts: list[tuple[int, int, Tensor]] = []  # layer, offset in a page, a sample [1, ...]
        self.block_parts: list[tuple[int, int, Tensor]] = []
        offset = 0
        kda_layers = [i for i in pools if config.is_kda_layer(i)]
        for index in (0, 1):  # all states, then all windows
            for layer_idx in kda_layers:
                sample = pools[layer_idx][index][:1].to("meta")
                self.slot_parts.append((layer_idx, offset, sample))
                offset += _aligned(sample.nbytes)
        self.slot_bytes = offset
        offset = 0
        for layer_idx, pool in pools.items():
            if layer_idx not in kda_layers:
                sample = torch.empty((1, block_size, pool[0].shape[2]), dtype=pool[0].dtype, device="meta")
                self.block_parts.append((layer_idx, offset, sample))
                offset += _aligned(sample.nbytes)
        self.block_bytes = max(offset, ALIGNMENT)
        # A page is a whole number of blocks: blocks then have one stride through the whole buffer.
        self.blocks_per_page = max(1, -(-self.slot_bytes // self.block_bytes))
        self.page_bytes = self.blocks_per_page * self.block_bytes
        # A bf16 snapshot, in blocks; never more of them than a page has.
        self.packed_parts = [
            (layer_idx, sample.bfloat16() if number < len(kda_layers) else sample)
            for number, (layer_idx, _, sample) in enumerate(self.slot_parts)
        ]
        self.packed_blocks = -(-sum(_aligned(sample.nbytes) for _, sample in self.packed_parts) // self.block_bytes)
        self.snapshot_bytes = self.packed_blocks * self.block_bytes if has_bf16_snapshots else self.slot_bytes


class DevicePools:
    """`num_pages` pages on the model's device, zeroed. `pools` is what the model's forward takes."""

    def __init__(
        self,
        layout: PoolLayout,
        num_pages: int,
        device: torch.device,
        first_head: int = 0,
        num_heads: int | None = None,
    ) -> None:
        self.layout, self.num_pages = layout, num_pages
        self.local_heads = layout.slot_parts[0][2].shape[1] if layout.slot_parts else 0
        self.first_head = first_head  # of `num_heads` in all: another rank holds the others
        self.num_heads = self.local_heads if num_heads is None else num_heads
        # One block more than the pages hold, for rows that only fill up a batch.
        self.scrap_block = num_pages * layout.blocks_per_page
        num_bytes = num_pages * layout.page_bytes
        self.buffer = torch.zeros(num_bytes + layout.block_bytes, dtype=torch.uint8, device=device)
        self._pages = self.buffer[:num_bytes].view(num_pages, layout.page_bytes)
        self._blocks = self.buffer.view(-1, layout.block_bytes)
        parts: dict[int, list[Tensor]] = {}
        for layer_idx, offset, sample in layout.slot_parts:
            parts.setdefault(layer_idx, []).append(self._view(sample, num_pages, layout.page_bytes, offset))
        for layer_idx, offset, sample in layout.block_parts:
            parts[layer_idx] = [self._view(sample, self.scrap_block + 1, layout.block_bytes, offset)]
        self.pools = {layer_idx: tuple(views) for layer_idx, views in sorted(parts.items())}
        self._staging = torch.zeros(
            layout.packed_blocks * layout.block_bytes if layout.has_bf16_snapshots else 0,
            dtype=torch.uint8,
            device=device,
        )
        self._staged: dict[int, list[Tensor]] = {}  # layer -> its states and windows in the staging buffer
        offset = 0
        for layer_idx, sample in layout.packed_parts if layout.has_bf16_snapshots else ():
            part = self._staging[offset : offset + sample.nbytes].view(sample.dtype).view(sample.shape)
            self._staged.setdefault(layer_idx, []).append(part)
            offset += _aligned(sample.nbytes)

    def _view(self, sample: Tensor, count: int, stride_bytes: int, offset_bytes: int) -> Tensor:
        size = sample.element_size()
        typed = self.buffer.view(sample.dtype)
        shape, inner = (count, *sample.shape[1:]), sample.stride()[1:]
        view = typed.as_strided(shape, (stride_bytes // size, *inner), offset_bytes // size)
        # A storage of its own over the same memory: to torch.compile the pools are tensors that do not overlap.
        return torch.from_dlpack(view)

    def copy_slot(self, source: int, target: int) -> None:
        self._pages[target].copy_(self._pages[source])

    def copy_block(self, source: int, target: int) -> None:
        self._blocks[target].copy_(self._blocks[source])

    # A bf16 snapshot passes through the staging buffer: between a slot and it, and between it and blocks.

    def stage_slot(self, slot: int) -> None:
        for i, views in self._staged.items():
            for part, pool in zip(views, self.pools[i]):
                part[0].copy_(pool[slot])

    def unstage_slot(self, slot: int) -> None:
        for i, views in self._staged.items():
            for part, pool in zip(views, self.pools[i]):
                pool[slot].copy_(part[0])

    def stage_blocks(self, places: list[int]) -> None:
        for place, part in zip(places, self._staging.view(-1, self.layout.block_bytes)):
            part.copy_(self._blocks[place])

    def unstage_blocks(self, places: list[int]) -> None:
        for place, part in zip(places, self._staging.view(-1, self.layout.block_bytes)):
            self._blocks[place].copy_(part)

    def clear_slot(self, slot: int) -> None:
        self._pages[slot].zero_()

    def clear_block(self, place: int, first: int = 0) -> None:
        """Zero a block, or its latents from row `first` on."""
        if first == 0:
            self._blocks[place].zero_()
            return
        for i, _, _ in self.layout.block_parts:
            self.pools[i][0][place, first:].zero_()

    def is_finite(self, slot: int, places: Sequence[int] = (), rows: int = 0) -> Tensor:
        """Whether a state (in a slot, or STAGED) and the latents in `places`, of the last one `rows`, are finite throughout."""
        views, at = (self._staged, 0) if slot == STAGED else (self.pools, slot)
        flags = [part[at].isfinite().all() for i in {i for i, _, _ in self.layout.slot_parts} for part in views[i]]
        for i, _, _ in self.layout.block_parts if places else ():
            latents = self.pools[i][0]
            flags += [latents[list(places[:-1])].isfinite().all(), latents[places[-1], :rows].isfinite().all()]
        return torch.stack(flags).all() if flags else torch.tensor(True)

    def head_slices(self) -> list[tuple[int, int]]:
        """The ranges of KDA heads in which states are stored, counted over all ranks, that lie here."""
        count = min(HEAD_SLICES, self.num_heads) or 1
        edges = [self.num_heads * i // count for i in range(count + 1)]
        here = (self.first_head, self.first_head + self.local_heads)
        if not set(here) <= set(edges):
            raise ValueError(f"tiers: want heads {here} of {self.num_heads} to be whole slices, with edges {edges}")
        return [(a, b) for a, b in pairwise(edges) if here[0] <= a and b <= here[1]]

    def _local(self, heads: tuple[int, int]) -> slice:
        return slice(heads[0] - self.first_head, heads[1] - self.first_head)

    def _to_cpu(self, source: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A copy; from a GPU in pinned memory, and not whole before `copied` says so."""
        target = torch.empty(source.shape, dtype=dtype or source.dtype, pin_memory=self.buffer.is_cuda)
        return target.copy_(source, non_blocking=True)

    def copied(self) -> Callable[[], None] | None:
        """What waits until all that was read so far is whole; None where it is already. Memory may be written at once:
        the copies stand before that in the stream."""
        if not self.buffer.is_cuda:
            return None
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.buffer.device))
        return event.synchronize

    def read_block(self, place: int, rows: int) -> dict[str, Tensor]:
        """Copies on the CPU, see `copied`, of a block's first `rows` latents: latents_<layer> [rows, R + rope]."""
        return {f"latents_{i}": self._to_cpu(self.pools[i][0][place, :rows]) for i, _, _ in self.layout.block_parts}

    def write_block(self, place: int, payload: dict[str, Tensor]) -> None:
        for i, _, sample in self.layout.block_parts:
            latents = payload[f"latents_{i}"]
            _check(latents, (latents.shape[0], sample.shape[2]), sample.dtype, f"latents of layer {i}")
            self.pools[i][0][place, : latents.shape[0]].copy_(latents, non_blocking=True)

    def read_slices(self, slot: int, slices: Sequence[tuple[int, int]]) -> list[dict[str, Tensor]]:
        """Of each range of heads views of one copy of a state on the CPU, see `copied`: states_<layer> [H, K, V],
        windows_<layer> [W - 1, 3, H, K].

        slot: or STAGED.
        """
        payloads: list[dict[str, Tensor]] = [{} for _ in slices]
        dtype = torch.bfloat16 if self.layout.has_bf16_snapshots else None
        for i in {i for i, _, _ in self.layout.slot_parts}:
            states, windows = self._staged[i] if slot == STAGED else self.pools[i]
            at = 0 if slot == STAGED else slot
            copied_states = self._to_cpu(states[at], dtype)
            copied_windows = self._to_cpu(windows[at]).unflatten(-1, (3, states.shape[1], -1))
            for payload, heads in zip(payloads, slices):
                payload[f"states_{i}"] = copied_states[self._local(heads)]
                payload[f"windows_{i}"] = copied_windows[:, :, self._local(heads)]
        return payloads

    def write_slot(self, slot: int, heads: tuple[int, int], payload: dict[str, Tensor]) -> None:
        for i in {i for i, _, _ in self.layout.slot_parts}:
            states, windows = self.pools[i]
            target = states[slot, self._local(heads)]
            dtype = torch.bfloat16 if self.layout.has_bf16_snapshots else target.dtype
            _check(payload[f"states_{i}"], tuple(target.shape), dtype, f"states of layer {i}")
            target.copy_(payload[f"states_{i}"], non_blocking=True)
            target = windows[slot].unflatten(-1, (3, states.shape[1], -1))[:, :, self._local(heads)]
            _check(payload[f"windows_{i}"], tuple(target.shape), target.dtype, f"windows of layer {i}")
            target.copy_(payload[f"windows_{i}"], non_blocking=True)


def _check(given: Tensor, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> None:
    if tuple(given.shape) != shape or given.dtype != dtype:
        raise ValueError(f"stored {what}: want {shape} {dtype}, got {tuple(given.shape)} {given.dtype}")
