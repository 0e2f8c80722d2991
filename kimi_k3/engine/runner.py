"""From scheduled pieces to tensors: one forward over decode tokens and prefill pieces together."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kimi_k3.cache import PackedBatch
from kimi_k3.engine.device_pools import DevicePools
from kimi_k3.engine.expert_counts import ExpertCounts
from kimi_k3.engine.page_pool import PagePool
from kimi_k3.engine.request import Request

if TYPE_CHECKING:
    from kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM


HEAT_KEPT = 0.75  # of a block's heat when new figures come in


class Piece(NamedTuple):
    """The next `tokens` tokens of one request. exports: (position, slot), where states are taken on the way."""

    request: Request
    tokens: int
    exports: list[tuple[int, int]]

    @property
    def end(self) -> int:
        return self.request.done + self.tokens


Outputs = tuple[
    Tensor, Tensor, list[Tensor]
]  # running sum [T, D], bank [M, T, D], router logits [T, E] of each MoE layer
Recorder = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]


class CudaRecorder:
    """Records what a function launches as a CUDA graph: returns what replays it, and its outputs, which replays rewrite."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()  # graphs never run side by side: they share their working memory

    def __call__(self, function: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # Triton compiles and libraries set up before anything is recorded
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            outputs = function()
        return graph.replay, outputs


class RecordingError(Exception):
    """A decode step could not be recorded. No sequence has moved."""


def bucket(count: int) -> int:
    """Rows of the smallest recorded batch that holds `count`: 1, 2, 4, 8, then multiples of 8."""
    return 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8


class DecodeGraphs:
    """Decode steps that are recorded once for each bucket of rows and of table widths (powers of two), and replayed.

    What a step reads is copied into tensors that stay; the pools stay anyway. Rows that fill up a bucket begin afresh,
    keep no state and write their latent to the pools' scrap block.
    """

    def __init__(self, model: KimiK3ForCausalLM, pools: DevicePools, record: Recorder) -> None:
        self.model, self.pools, self.record = model.model, pools, record
        self._steps: dict[tuple[int, int], tuple[Tensor, PackedBatch, Callable[[], None], Outputs]] = {}

    def run(self, ids_N: Tensor, batch: PackedBatch) -> Outputs:
        """What the model gives for one token of each sequence. The outputs are valid until the next call.

        Raises: RecordingError.
        """
        (count, width), size = batch.block_tables.shape, self.pools.layout.block_size
        key = bucket(count), 1 << (width - 1).bit_length()
        if key not in self._steps:
            try:
                self._steps[key] = self._record(*key)
            except Exception as error:
                raise RecordingError(f"{key[0]} rows, {key[1]} blocks: {type(error).__name__}: {error}") from error
        ids, static, replay, (running_sum, bank, router_logits) = self._steps[key]
        scrap = self.pools.scrap_block
        fillers = {"read_slots": -1, "write_slots": -1, "past_lens": 0, "kv_lens": 1, "block_tables": scrap,
                   "latent_rows": scrap * size}  # fmt: skip
        _fill(ids, ids_N, 0)
        for name, filler in fillers.items():  # the boundaries are a range
            _fill(getattr(static, name), getattr(batch, name), filler)
        replay()
        return running_sum[:count], bank[:, :count], [logits[:count] for logits in router_logits]

    def _record(self, rows: int, width: int) -> tuple[Tensor, PackedBatch, Callable[[], None], Outputs]:
        """Nothing but fillers runs while it is recorded: no sequence moves."""
        device, scrap = self.pools.buffer.device, self.pools.scrap_block
        ids = torch.zeros(rows, dtype=torch.int64, device=device)
        lens = torch.zeros(rows, dtype=torch.int32, device=device)
        batch = PackedBatch(
            cu_seqlens=torch.arange(rows + 1, dtype=torch.int32, device=device),
            read_slots=torch.full_like(ids, -1),
            write_slots=torch.full_like(ids, -1),
            past_lens=lens,
            kv_lens=torch.ones_like(lens),
            block_tables=torch.full((rows, width), scrap, dtype=torch.int32, device=device),
            latent_rows=torch.full_like(ids, scrap * self.pools.layout.block_size),
            is_decode=True,
        )

        def step() -> Outputs:
            running_sum, bank, _, router_logits = self.model(
                self.model.embed_tokens(ids), batch, self.pools.pools, keep_sums=False, is_invariant=False
            )
            return running_sum, bank, router_logits

        return ids, batch, *self.record(step)


def _fill(target: Tensor, source: Tensor, filler: int) -> None:
    """Copy into the first places of each dimension, `filler` into the others."""
    target.fill_(filler)
    target[tuple(slice(size) for size in source.shape)].copy_(source)


class Runner:
    """Runs a model over pieces whose slots and blocks are allotted.

    Args:
        heat_every: after so many steps of decoding alone one records each block's share of the attention, the mean over
            heads and MLA layers, into `Request.heat`, a decaying average; 0: never.
        counts: where "failed_recordings" are counted.
        is_invariant: the mode of every run, whatever the model's own is.
    graphs: set where decode steps are recorded and replayed; None: every step is launched anew, as after a recording that
        failed.
    """

    def __init__(
        self, model: KimiK3ForCausalLM, pool: PagePool, pools: DevicePools, heat_every: int, counts: Counter[str],
        is_invariant: bool,
    ) -> None:  # fmt: skip
        self.is_invariant = is_invariant
        self.model, self.pool, self.pools = model, pool, pools
        self.block_size, self.device = pools.layout.block_size, model.device
        self.experts: ExpertCounts | None = None  # where they are counted
        self.heat_every, self._steps_to_heat = heat_every, heat_every
        self.counts = counts
        self.graphs: DecodeGraphs | None = None

    @torch.no_grad()
    def run(self, pieces: list[Piece]) -> tuple[Tensor, Tensor]:
        """Run the pieces. Returns (hidden [R, D], logits [R, V]) after the last token of each piece that ends its request's
        known tokens, in the order of `pieces`.
        """
        model = self.model.model
        batch = self._batch(pieces)
        is_by_token = batch.is_decode or self.is_invariant  # MLA records in the form that it uses there
        if self.heat_every and is_by_token and all(piece.tokens == 1 for piece in pieces):
            self._steps_to_heat -= 1
            if self._steps_to_heat == 0:
                batch = batch._replace(block_mass=torch.zeros(batch.block_tables.shape, device=self.device))
        has_images = any(r.embeds is not None and r.done < len(r.prompt) for r, _, _ in pieces)
        outputs = None
        if self.graphs is not None and batch.is_decode and batch.block_mass is None and not has_images:
            outputs = self._replayed(self.graphs, pieces, batch)
        if outputs is None:
            running_sum, bank, _, router_logits = model(
                self._embeds(pieces), batch, self.pools.pools, keep_sums=False, is_invariant=self.is_invariant
            )
        else:
            running_sum, bank, router_logits = outputs
        if self.experts is not None:
            self.experts.add(router_logits, [(piece.request, piece.tokens) for piece in pieces])
        if batch.block_mass is not None:
            self._keep_heat(pieces, batch.block_mass)
        ends, at = [], 0
        for piece in pieces:
            at += piece.tokens
            if piece.end == len(piece.request.tokens):
                ends.append(at - 1)
        rows = torch.tensor(ends, dtype=torch.int64, device=self.device)
        hidden_RD = model.final_hidden(running_sum[rows], bank[:, rows])
        return hidden_RD, self.logits(hidden_RD)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """[R, V]."""
        return self.model.head_logits(hidden_RD, self.is_invariant)

    def _replayed(self, graphs: DecodeGraphs, pieces: list[Piece], batch: PackedBatch) -> Outputs | None:
        """None where the step cannot be recorded: from then on none is."""
        try:
            return graphs.run(self._ids(pieces), batch)
        except RecordingError as error:
            self.counts["failed_recordings"] += 1
            self.graphs = None
            warnings.warn(
                f"decode steps run without CUDA graphs from now on: recording failed at {error}", stacklevel=2
            )
            return None

    def _keep_heat(self, pieces: list[Piece], mass_NB: Tensor) -> None:
        self._steps_to_heat = self.heat_every
        for (request, _, _), new in zip(pieces, (mass_NB / len(self.pools.layout.block_parts)).tolist()):
            old = request.heat + [0.0] * (len(request.table) - len(request.heat))
            kept = HEAT_KEPT if request.heat else 0.0
            request.heat = [kept * a + (1 - kept) * b for a, b in zip(old, new)]

    def _ids(self, pieces: list[Piece]) -> Tensor:
        return torch.tensor([t for r, n, _ in pieces for t in r.tokens[r.done : r.done + n]], device=self.device)

    def _embeds(self, pieces: list[Piece]) -> Tensor:
        embeds_TD = self.model.model.embed_tokens(self._ids(pieces))
        at = 0
        for request, count, _ in pieces:
            if request.embeds is not None and request.done < len(request.prompt):
                given = request.embeds[request.done : request.done + count]
                embeds_TD[at : at + given.shape[0]] = given
            at += count
        return embeds_TD

    def _batch(self, pieces: list[Piece]) -> PackedBatch:
        size, places = self.block_size, self.pool.places
        tables = [[places[handle] for handle in piece.request.table] for piece in pieces]
        width = max(2, *map(len, tables))
        rows = [
            table[position // size] * size + position % size
            for piece, table in zip(pieces, tables)
            for position in range(piece.request.done, piece.end)
        ]
        starts, at = [], 0
        for piece in pieces:
            starts.append(at - piece.request.done)  # packed row of a position, minus the position
            at += piece.tokens
        exports = [(start + position, slot) for piece, start in zip(pieces, starts) for position, slot in piece.exports]
        reads = [p.request.slot if p.request.read_from is None else p.request.read_from.slot for p in pieces]
        reads = [-1 if p.request.done == 0 else slot for p, slot in zip(pieces, reads)]

        def tensor(values: list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        return PackedBatch(
            cu_seqlens=tensor([0, *(p.tokens for p in pieces)], torch.int32).cumsum(0, dtype=torch.int32),
            read_slots=tensor(reads, torch.int64),
            write_slots=tensor([p.request.slot for p in pieces], torch.int64),
            past_lens=tensor([p.request.done for p in pieces], torch.int32),
            kv_lens=tensor([p.end for p in pieces], torch.int32),
            block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32).to(self.device),
            latent_rows=tensor(rows, torch.int64),
            is_decode=all(p.tokens == 1 for p in pieces) and not exports and not self.is_invariant,
            export_at=tensor([at for at, _ in exports], torch.int64) if exports else None,
            export_slots=tensor([slot for _, slot in exports], torch.int64) if exports else None,
        )
