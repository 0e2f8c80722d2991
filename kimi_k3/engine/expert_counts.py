"""Which experts the tokens chose: counts on the device, a trace in a file, and what each request has been choosing of late.

None of it costs anything while it is off.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kimi_k3.engine.request import Request
from kimi_k3.layers.moe import KimiK3SparseMoE
from kimi_k3.parallel.placement import ExpertPlacement
from kimi_k3.parallel.traces import TraceWriter
from kimi_k3_kernels import choose_experts
from kimi_k3_kernels.choose_experts.reference import choose_experts_reference
from kimi_k3_kernels.library import is_eager_inference

if TYPE_CHECKING:
    from kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM

SCORES_AT_ONCE = 1 << 24  # elements, of several layers stacked
CHOICES_KEPT = 0.9  # of what is known of a request when its next tokens have run


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
        self._experts: list[Any] = [block.experts for block in moe.values()]
        num_experts = self._routers[0].config.num_experts
        self.counts = torch.zeros(len(moe), num_experts, dtype=torch.int64, device=model.device)
        self.num_forwards = 0
        self._trace: TraceWriter | None = None
        self.share_MEW: Tensor | None = (
            None  # what each worker takes of an expert's tokens, where requests are followed
        )

    @property
    def bytes_per_layer(self) -> dict[int, int]:
        """What this rank holds of the experts of each of `layers`, by now."""
        held = [[p.to_local() if hasattr(p, "to_local") else p for p in e.parameters()] for e in self._experts]
        return {layer: sum(p.nbytes for p in parts) for layer, parts in zip(self.layers, held)}

    def owners(self) -> Tensor:
        """[MoE layers, E] on the CPU: the "ep" rank of each expert's first active copy by now; 0 where there is no "ep"."""
        if not hasattr(self._experts[0], "copy_ranks"):
            return torch.zeros(self.counts.shape, dtype=torch.int64)
        return torch.stack([experts.copy_ranks[:, 0] for experts in self._experts]).cpu()

    def record(self, path: str | Path | None) -> None:
        """Write what follows to `path`, or no more; ranks that run the same requests need one file."""
        if self._trace is not None:
            self._trace.close()
        self._trace = None if path is None else TraceWriter(path, num_experts=self.counts.shape[1])

    def follow(self, placement: ExpertPlacement | None) -> None:
        """Keep `Request.experts` and `Request.expert_loads` from now on, for workers that hold experts so; None: no more."""
        self.share_MEW = None
        if placement is None:
            return
        shape = (placement.num_layers, placement.num_experts)
        if shape != tuple(self.counts.shape):
            raise ValueError(
                f"experts: want a placement of {tuple(self.counts.shape)} (MoE layers, experts), got {shape}"
            )
        layer, worker, slot = np.nonzero(placement.is_active)
        share = torch.zeros(*shape, placement.num_workers)
        share[layer, placement.slots[layer, worker, slot], worker] = 1.0
        self.share_MEW = (share / share.sum(-1, keepdim=True)).to(self.counts.device)

    @torch.no_grad()
    def add(self, router_logits: list[Tensor], rows: Sequence[tuple[Request, int]]) -> None:
        """router_logits: [>= T, E] of each MoE layer; rows beyond T are padding.     rows: T, by request."""
        num_tokens = sum(count for _, count in rows)
        recent = []
        size = max(1, SCORES_AT_ONCE // max(1, num_tokens * self.counts.shape[1]))
        for first in range(0, len(self.layers), size):
            some = slice(first, first + size)
            ids_MTA = self._choose(router_logits[some], self._routers[some], num_tokens)
            flat_MX = ids_MTA.flatten(1)
            self.counts[some].scatter_add_(1, flat_MX, torch.ones_like(flat_MX))
            if self.share_MEW is not None:
                recent.append(self._recent(ids_MTA, [count for _, count in rows]))
            if self._trace is not None:
                for layer_idx, ids_TA in zip(self.layers[some], ids_MTA.cpu()):
                    self._trace.write(self.num_forwards, layer_idx, ids_TA)
        self.num_forwards += 1
        if self.share_MEW is not None:
            for (request, _), new_ME in zip(rows, torch.cat(recent).transpose(0, 1)):
                old_ME = new_ME if request.experts is None else request.experts
                request.experts = CHOICES_KEPT * old_ME + (1 - CHOICES_KEPT) * new_ME
            known_NME = torch.stack([request.experts for request, _ in rows if request.experts is not None])
            loads_NW = torch.einsum("nme,mew->nw", known_NME, self.share_MEW) / len(self.layers)
            for (request, _), loads in zip(rows, loads_NW.tolist()):
                request.expert_loads = tuple(loads)

    def _recent(self, ids_MTA: Tensor, counts: list[int]) -> Tensor:
        """[layers, N, E]: how often a token of each request chose each expert, on average."""
        num_experts, tokens_N = self.counts.shape[1], torch.tensor(counts, device=ids_MTA.device)
        places_T = torch.arange(len(counts), device=ids_MTA.device).repeat_interleave(tokens_N) * num_experts
        flat_MX = (places_T[:, None] + ids_MTA).flatten(1)
        chosen_MX = torch.zeros(len(ids_MTA), len(counts) * num_experts, device=ids_MTA.device)
        chosen_MX.scatter_add_(1, flat_MX, torch.ones_like(flat_MX, dtype=torch.float32))
        return chosen_MX.unflatten(1, (len(counts), num_experts)) / tokens_N[:, None]

    @staticmethod
    def _choose(router_logits: list[Tensor], routers: list, num_tokens: int) -> Tensor:
        """[layers, T, A]: the choice of `KimiK3Router`, of equal ones the same."""
        logits_MTE = torch.stack([logits[:num_tokens] for logits in router_logits])
        bias_M1E = torch.stack([router.e_score_correction_bias for router in routers])[:, None]
        choice_XE = routers[0]._keep_best_groups(torch.sigmoid(logits_MTE) + bias_M1E).flatten(0, 1)
        choose = choose_experts if is_eager_inference(choice_XE) else choose_experts_reference
        ids_XA, _ = choose(choice_XE, choice_XE, routers[0].config.num_experts_per_token, False, 1.0)
        return ids_XA.unflatten(0, logits_MTE.shape[:2])
