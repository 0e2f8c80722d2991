"""What a forward pass reads and writes: MLA latent blocks, KDA states and convolution windows, all in pools.

A pool is a plain tensor; a forward names the slots and blocks it uses. `KimiK3Cache` is the plain API's cache
(`past_key_values`): the same pools with one slot for each row of the batch.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kimi_k3.configuration_kimi_k3 import KimiK3TextConfig

BLOCK_SIZE = 64


class PackedBatch(NamedTuple):
    """Where N packed sequences lie among T rows, and where their pasts lie in the pools. Tensors on the model's device."""

    cu_seqlens: Tensor  # [N + 1] int32
    read_slots: Tensor  # [N] int64: KDA slots before the first row; -1: a fresh sequence
    write_slots: Tensor  # [N] int64: KDA slots after the last row; -1: not kept
    past_lens: Tensor  # [N] int32: tokens in the latent pool before this pass
    kv_lens: Tensor  # [N] int32: and after it
    block_tables: Tensor  # [N, B] int32: each sequence's latent blocks, in order
    latent_rows: Tensor | None  # [T] int64: rows of the flattened latent pool for the new tokens; None: not kept
    is_decode: bool  # exactly one new token for each sequence, and a cache
    # The KDA layers' states and windows after packed row export_at - 1 also go to the slots export_slots.
    export_at: Tensor | None = None  # [X] int64 in 1..T: packed rows that have run; None: no exports
    export_slots: Tensor | None = None  # [X] int64; -1: nowhere
    is_invariant: bool = False  # see `batch_by_tokens`
    # Of a batch of single tokens: each MLA layer adds the share of its attention that each block of the table draws.
    block_mass: Tensor | None = None  # [N, B] float32; None: not asked for


def batch_without_cache(lengths: list[int], device: torch.device) -> PackedBatch:
    count = len(lengths)
    none = torch.full((count,), -1, dtype=torch.int64, device=device)
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    return PackedBatch(
        cu_seqlens=torch.cat([lens.new_zeros(1), lens.cumsum(0, dtype=torch.int32)]),
        read_slots=none,
        write_slots=none,
        past_lens=torch.zeros_like(lens),
        kv_lens=lens,
        block_tables=lens.new_zeros((count, 2)),
        latent_rows=None,
        is_decode=False,
    )


def batch_by_tokens(batch: PackedBatch, num_tokens: int) -> PackedBatch:
    """The same batch for layers in which every token has one arithmetic: `block_tables` and `kv_lens` are each token's.

    Raises: ValueError for a batch without a latent pool: a token's own latent is read from there too.
    """
    if batch.latent_rows is None:
        raise ValueError("batch-invariant mode: want a batch with latent_rows (a cache), got None")
    rows_T = torch.arange(num_tokens, dtype=torch.int32, device=batch.cu_seqlens.device)
    sequence_T = torch.searchsorted(batch.cu_seqlens[1:].contiguous(), rows_T, right=True)
    kv_lens_T = batch.past_lens[sequence_T] + rows_T - batch.cu_seqlens[sequence_T] + 1
    return batch._replace(
        kv_lens=kv_lens_T, block_tables=batch.block_tables[sequence_T], is_decode=False, is_invariant=True
    )


def make_pools(
    config: KimiK3TextConfig, layer_idx: int, num_slots: int, num_blocks: int, block_size: int,
    dtype: torch.dtype, device: torch.device,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The pools of one layer: KDA (states [S, H, K, V], windows [S, W - 1, 3 H K]) or MLA (latents [P, block, R + rope])."""
    if not config.is_kda_layer(layer_idx):
        return (torch.zeros((num_blocks, block_size, config.latent_kv_dim), dtype=dtype, device=device),)
    heads, dim = config.kda_num_heads, config.kda_head_dim
    wide = torch.promote_types(dtype, torch.float32)
    states = torch.zeros((num_slots, heads, dim, dim), dtype=wide, device=device)
    windows = (num_slots, config.short_conv_kernel_size - 1, 3 * heads * dim)
    return states, torch.zeros(windows, dtype=dtype, device=device)


class KimiK3Cache:
    """The past of each row of a batch. `forward` mutates it; latent blocks are added as rows grow.

    Args:
        config: the text configuration.     num_rows: rows of the batch.
        layers: the layers that the model holds.     dtype, device: of the model.
    """

    def __init__(
        self, config: KimiK3TextConfig, num_rows: int, layers: range, dtype: torch.dtype, device: torch.device,
        block_size: int = BLOCK_SIZE,
    ) -> None:  # fmt: skip
        self.config, self.num_rows, self.block_size, self.device = config, num_rows, block_size, device
        self.lengths = [0] * num_rows
        self.num_columns = 0  # of all batches seen, padding included: the past of a Hugging Face mask
        self._tables: list[list[int]] = [[] for _ in range(num_rows)]
        # Sizes of 1 would specialise a compiled graph: one slot more than rows, and never fewer than two blocks.
        self._num_blocks = max(2, num_rows)
        self.pools = {
            i: make_pools(config, i, num_rows + 1, self._num_blocks, block_size, dtype, device) for i in layers
        }

    def get_seq_length(self) -> int:
        """Tokens in the longest row."""
        return max(self.lengths, default=0)

    def memory_bytes(self) -> int:
        return sum(pool.nbytes for pools in self.pools.values() for pool in pools)

    def prepare(self, new_tokens: list[int]) -> PackedBatch:
        """Reserve room for `new_tokens[row]` more tokens and say where everything lies. `commit` makes them the past."""
        if len(new_tokens) != self.num_rows:
            raise ValueError(f"past_key_values: want a batch of {self.num_rows} rows, got {len(new_tokens)}")
        kv_lens = [past + new for past, new in zip(self.lengths, new_tokens)]
        self._reserve(kv_lens)
        tables = torch.zeros((self.num_rows, max(2, *map(len, self._tables))), dtype=torch.int32)
        for row, table in enumerate(self._tables):
            tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        rows = [
            self._tables[row][position // self.block_size] * self.block_size + position % self.block_size
            for row, (past, end) in enumerate(zip(self.lengths, kv_lens))
            for position in range(past, end)
        ]
        slots = torch.arange(self.num_rows, device=self.device)

        def as_int32(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        lens = as_int32([0, *new_tokens])
        return PackedBatch(
            cu_seqlens=lens.cumsum(0, dtype=torch.int32),
            read_slots=slots,
            write_slots=slots,
            past_lens=as_int32(self.lengths),
            kv_lens=as_int32(kv_lens),
            block_tables=tables.to(self.device),
            latent_rows=torch.tensor(rows, dtype=torch.int64, device=self.device),
            is_decode=all(new == 1 for new in new_tokens),
        )

    def commit(self, new_tokens: list[int]) -> None:
        self.lengths = [past + new for past, new in zip(self.lengths, new_tokens)]

    def _reserve(self, kv_lens: list[int]) -> None:
        used = sum(map(len, self._tables))
        for table, length in zip(self._tables, kv_lens):
            while len(table) * self.block_size < length:
                table.append(used)
                used += 1
        if used <= self._num_blocks:
            return
        # A quarter more than needed: growth copies a pool a logarithmic number of times.
        added = max(used, self._num_blocks * 5 // 4) - self._num_blocks
        self._num_blocks += added
        for layer_idx, pools in self.pools.items():
            if not self.config.is_kda_layer(layer_idx):
                (pool,) = pools
                self.pools[layer_idx] = (torch.cat([pool, pool.new_zeros((added, *pool.shape[1:]))]),)

    def copy(self) -> KimiK3Cache:
        """An independent cache with the same contents."""
        return self.select_rows(range(self.num_rows))

    def select_rows(self, rows: Any) -> KimiK3Cache:
        """A new cache whose row i is a copy of row `rows[i]`; rows may repeat (beams, several samples of one prompt)."""
        rows = rows.tolist() if isinstance(rows, Tensor) else list(rows)
        if not rows or not all(isinstance(row, int) and 0 <= row < self.num_rows for row in rows):
            raise ValueError(f"select_rows: want row numbers in 0..{self.num_rows - 1}, got {rows}")
        out = copy.copy(self)
        out.num_rows, out.lengths, out._tables = len(rows), [self.lengths[row] for row in rows], []
        sources: list[int] = []
        for row in rows:
            out._tables.append(list(range(len(sources), len(sources) + len(self._tables[row]))))
            sources += self._tables[row]
        sources += [0] * (max(2, len(rows)) - len(sources))
        out._num_blocks = len(sources)
        blocks = torch.tensor(sources, device=self.device)
        slots = torch.tensor([*rows, self.num_rows], device=self.device)
        out.pools = {
            i: tuple(pool[slots if self.config.is_kda_layer(i) else blocks] for pool in pools)
            for i, pools in self.pools.items()
        }
        return out

    def crop(self, *_: Any) -> None:
        raise NotImplementedError(
            "KimiK3Cache cannot be cropped: a KDA state holds all tokens before it and cannot be cut back. "
            "Keep a copy() from before the tokens that may have to go"
        )
