"""Requests of their own on each group of ranks, experts in common: what the groups of a data-parallel generator settle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_k3.parallel.collectives import named
from kimi_k3.parallel.expert_parallel import idle_step
from kimi_k3.parallel.mesh import axis

if TYPE_CHECKING:
    from kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM


class OtherGroups:
    """Of `model.mesh`, whose "dp" ranks hold the groups. All ranks step equally often.

    group: the number of this rank's, from 0.
    is_busy: whether any group had requests at the last step; True until the first one.
    Raises: ValueError for a model whose experts are not on "ep".
    """

    def __init__(self, model: KimiK3ForCausalLM) -> None:
        mesh: Any = getattr(model, "mesh", None)
        if mesh is None or axis(mesh, "ep") is None:
            raise ValueError(
                "KimiK3Generator: data_parallel wants a model on make_mesh(ep=number of ranks), got no such mesh"
            )
        self.model, self.device, self.is_busy = model, model.device, True
        self._dp: dist.ProcessGroup = mesh["dp"].get_group()
        self.group = self._dp.rank()

    def step(self, has_tokens: bool, has_requests: bool) -> None:
        """Before this group's forward, if it has one; without, take part in the others' with no tokens."""
        flags = torch.tensor([has_tokens, has_requests], dtype=torch.int64, device=self.device)
        with named("agreement of the groups on a step (all_reduce)", self._dp):
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._dp)
        is_anyone_running, is_busy = flags.tolist()
        self.is_busy = bool(is_busy)
        if is_anyone_running and not has_tokens:
            idle_step(self.model)

    def sum(self, counts: Tensor) -> Tensor:
        """Over the groups; every rank calls it."""
        total = counts.clone()
        with named("sum of expert counts (all_reduce)", self._dp):
            dist.all_reduce(total, group=self._dp)
        return total
