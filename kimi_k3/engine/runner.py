"""From scheduled pieces to tensors: one forward over decode tokens and prefill pieces together."""

from __future__ import annotations

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


class Runner:
    """Runs a model over pieces whose slots and blocks are allotted.

    Args:
        heat_every: after so many steps of decoding alone one records each block's share of the attention, the mean over
            heads and MLA layers, into `Request.heat`, a decaying average; 0: never.
    """

    def __init__(self, model: KimiK3ForCausalLM, pool: PagePool, pools: DevicePools, heat_every: int = 0) -> None:
        self.model, self.pool, self.pools = model, pool, pools
        self.block_size, self.device = pools.layout.block_size, model.device
        self.experts: ExpertCounts | None = None  # where they are counted
        self.heat_every, self._steps_to_heat = heat_every, heat_every

    @torch.no_grad()
    def run(self, pieces: list[Piece]) -> tuple[Tensor, Tensor]:
        """Run the pieces. Returns (hidden [R, D], logits [R, V]) after the last token of each piece that ends its request's
        known tokens, in the order of `pieces`.
        """
        model = self.model.model
        batch = self._batch(pieces)
        if self.heat_every and all(piece.tokens == 1 for piece in pieces):
            self._steps_to_heat -= 1
            if self._steps_to_heat == 0:
                batch = batch._replace(block_mass=torch.zeros(batch.block_tables.shape, device=self.device))
        running_sum, bank, _, router_logits = model(self._embeds(pieces), batch, self.pools.pools)
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
        return hidden_RD, self.model.head_logits(hidden_RD)

    def _keep_heat(self, pieces: list[Piece], mass_NB: Tensor) -> None:
        self._steps_to_heat = self.heat_every
        for (request, _, _), new in zip(pieces, (mass_NB / len(self.pools.layout.block_parts)).tolist()):
            old = request.heat + [0.0] * (len(request.table) - len(request.heat))
            kept = HEAT_KEPT if request.heat else 0.0
            request.heat = [kept * a + (1 - kept) * b for a, b in zip(old, new)]

    def _embeds(self, pieces: list[Piece]) -> Tensor:
        ids = [t for r, n, _ in pieces for t in r.tokens[r.done : r.done + n]]
        embeds_TD = self.model.model.embed_tokens(torch.tensor(ids, device=self.device))
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

        is_invariant = self.model.model.is_batch_invariant
        return PackedBatch(
            cu_seqlens=tensor([0, *(p.tokens for p in pieces)], torch.int32).cumsum(0, dtype=torch.int32),
            read_slots=tensor(reads, torch.int64),
            write_slots=tensor([p.request.slot for p in pieces], torch.int64),
            past_lens=tensor([p.request.done for p in pieces], torch.int32),
            kv_lens=tensor([p.end for p in pieces], torch.int32),
            block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32).to(self.device),
            latent_rows=tensor(rows, torch.int64),
            is_decode=all(p.tokens == 1 for p in pieces) and not exports and not is_invariant,
            export_at=tensor([at for at, _ in exports], torch.int64) if exports else None,
            export_slots=tensor([slot for _, slot in exports], torch.int64) if exports else None,
        )
