"""Which experts the tokens chose: counts on the device, and a trace in a file. Neither costs anything while it is off."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kimi_k3.layers.moe import KimiK3SparseMoE
from kimi_k3.parallel.traces import TraceWriter

if TYPE_CHECKING:
    from kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM

SCORES_AT_ONCE = 1 << 24  # elements, of several layers stacked


class ExpertCounts:
    """Makes each router's choice once more from the logits that a forward returns, for several layers at once.

    counts: [MoE layers, E] int64 on the model's device, of all tokens of all forwards since the start, recomputed ones
        included; a row adds up to tokens x experts per token.     layers: the decoder layers of its rows.
    """

    def __init__(self, model: KimiK3ForCausalLM) -> None:
        blocks = [(int(i), getattr(layer, "block_sparse_moe", None)) for i, layer in model.model.layers.items()]
        moe = {i: block for i, block in blocks if isinstance(block, KimiK3SparseMoE)}
        if not moe:
            raise ValueError("expert counts: want a model with MoE layers, got none")
        self.layers, self._routers = list(moe), [block.gate for block in moe.values()]
        self.bytes_per_layer = {i: sum(p.nbytes for p in block.experts.parameters()) for i, block in moe.items()}
        num_experts = self._routers[0].config.num_experts
        self.counts = torch.zeros(len(moe), num_experts, dtype=torch.int64, device=model.device)
        self.num_forwards = 0
        self._trace: TraceWriter | None = None

    def record(self, path: str | Path | None) -> None:
        """Write what follows to `path`, or no more."""
        if self._trace is not None:
            self._trace.close()
        self._trace = None if path is None else TraceWriter(path)

    @torch.no_grad()
    def add(self, router_logits: list[Tensor], num_tokens: int) -> None:
        """router_logits: [>= num_tokens, E] of each MoE layer; rows beyond num_tokens are padding."""
        size = max(1, SCORES_AT_ONCE // max(1, num_tokens * self.counts.shape[1]))
        for first in range(0, len(self.layers), size):
            some = slice(first, first + size)
            ids_MTA = self._choose(router_logits[some], self._routers[some], num_tokens)
            flat_MX = ids_MTA.flatten(1)
            self.counts[some].scatter_add_(1, flat_MX, torch.ones_like(flat_MX))
            if self._trace is not None:
                for layer_idx, ids_TA in zip(self.layers[some], ids_MTA.cpu()):
                    self._trace.write(self.num_forwards, layer_idx, ids_TA)
        self.num_forwards += 1

    @staticmethod
    def _choose(router_logits: list[Tensor], routers: list, num_tokens: int) -> Tensor:
        """[layers, T, A]: the choice of `KimiK3Router`."""
        logits_MTE = torch.stack([logits[:num_tokens] for logits in router_logits])
        bias_M1E = torch.stack([router.e_score_correction_bias for router in routers])[:, None]
        choice_MTE = routers[0]._keep_best_groups(torch.sigmoid(logits_MTE) + bias_M1E)
        return choice_MTE.topk(routers[0].config.num_experts_per_token, dim=-1, sorted=False).indices
