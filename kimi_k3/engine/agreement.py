"""What ranks that run the same requests must decide alike, though a clock, a tier or a random seed differs between them.

Under tensor and expert parallelism every rank has its own KimiK3Generator, gets the same calls in the same order, and holds
the same requests, index and schedule; logits are equal on all ranks, so tokens are too. What is left is settled here.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_k3.parallel.collectives import named

if TYPE_CHECKING:
    from kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM

SAMPLES = 64  # values of each weight that its digest reads
EXPERT_SAMPLES = 8  # of each expert in a stack [E, ...], where that is more


class Agreement:
    """Of the ranks of `model.mesh`, or of its "tp" alone (of_tp); without a mesh, of this process alone, at no cost."""

    def __init__(self, model: KimiK3ForCausalLM, *, of_tp: bool = False) -> None:
        mesh: Any = getattr(model, "mesh", None)
        self.size = 1 if mesh is None else mesh.size()
        self.all: dist.ProcessGroup | None = None if mesh is None else dist.group.WORLD
        self.group = self.all
        self.device = model.device
        self.tp_rank, self.tp_size = 0, 1
        if mesh is not None:
            from kimi_k3.parallel.mesh import axis

            if mesh.size() != dist.get_world_size():
                raise ValueError(
                    f"KimiK3Generator: want a mesh of all {dist.get_world_size()} ranks, got {mesh.size()}"
                )
            tp = axis(mesh, "tp")
            if tp is not None:
                self.tp_rank, self.tp_size = tp.get_local_rank(), tp.size()
            if of_tp:
                self.size, self.group = self.tp_size, None if tp is None else tp.get_group()

    def naming(self, what: str) -> AbstractContextManager[None]:
        """A collective that fails inside, compiled ones too, is an error that names ranks."""
        return nullcontext() if self.all is None else named(what, self.all, only_collectives=True)

    def least(self, values: list[int]) -> list[int]:
        """The smallest of each value over the ranks."""
        if self.size == 1 or not values:
            return values
        tensor = torch.tensor(values, dtype=torch.int64, device=self.device)
        _reduce(tensor, dist.ReduceOp.MIN, self.group)
        return tensor.tolist()

    def most(self, values: list[int]) -> list[int]:
        return [-value for value in self.least([-value for value in values])]

    def weights_digest(self, model: KimiK3ForCausalLM) -> str:
        """Tells models apart that differ in weights or adapters: names, shapes, dtypes and 64 values of each parameter, 8 of
        each expert.

        The same on every rank and for every parallel degree. Parameters that are offloaded are told by shape alone.
        """
        parameters = sorted(model.named_parameters())
        sampled: list[Tensor] = []
        digest = hashlib.sha256()
        for name, parameter in parameters:
            owner: Any = model.get_submodule(name.rpartition(".")[0])
            # Slots of a placement hold experts in any order; what is told is each expert.
            is_placed = hasattr(owner, "copy_ranks") and not hasattr(parameter, "to_local")
            shape = (owner.num_experts, *parameter.shape[1:]) if is_placed else tuple(parameter.shape)
            digest.update(f"{name} {shape} {parameter.dtype}".encode())
            count = max(SAMPLES, EXPERT_SAMPLES * shape[0]) if len(shape) == 3 else SAMPLES
            sampled.append(torch.full((count,), -torch.inf, dtype=torch.float64))
            if is_placed:
                _sample_slots(parameter.detach(), owner, sampled[-1])
            elif not parameter.is_meta and parameter.numel():
                _sample_local(parameter.detach(), sampled[-1])
        values = torch.cat(sampled)
        if self.all is not None:
            shared = values.to(self.device)
            _reduce(shared, dist.ReduceOp.MAX, self.all)
            values = shared.cpu()
        digest.update(values.numpy().tobytes())
        return digest.hexdigest()


def _reduce(tensor: Tensor, kind: Any, group: dist.ProcessGroup | None) -> None:
    assert group is not None
    with named("agreement of the engine (all_reduce)", group):
        dist.all_reduce(tensor, kind, group=group)


def _places(shape: list[int], count: int) -> list[Tensor]:
    """[count] indices for each dimension: values spread over a tensor, one anywhere in each equal part."""
    size = math.prod(shape)
    rest = torch.arange(count) * size // count + torch.arange(count) * 7919 % max(size // count, 1)
    places: list[Tensor] = []
    for size in reversed(shape):
        places.insert(0, rest % size)
        rest = rest // size
    return places


def _sample_slots(slots: Tensor, experts: Any, out_S: Tensor) -> None:
    """`_sample_local` for slots that a placement fills: of each expert, its first copy's rank writes."""
    expert, *rest = _places([experts.num_experts, *slots.shape[1:]], len(out_S))
    owner, slot = experts.copy_ranks[:, 0].cpu()[expert], experts.copy_slots[:, 0].cpu()[expert]
    is_here = owner == dist.get_rank()
    picked = tuple(place[is_here].to(slots.device) for place in (slot, *rest))
    out_S[is_here] = slots[picked].double().cpu()


def _sample_local(parameter: Tensor, out_S: Tensor) -> None:
    """Write those of the evenly spread values of the whole parameter that this rank holds."""
    shape = list(parameter.shape)
    first, local = [0] * len(shape), parameter
    for mesh_dim, placement in enumerate(getattr(parameter, "placements", ())):
        if placement.is_shard():
            mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
            chunk = -(-shape[placement.dim] // mesh.size(mesh_dim))
            first[placement.dim] += chunk * mesh.get_local_rank(mesh_dim)
    if hasattr(parameter, "to_local"):
        local = parameter.to_local()
    places = [place - start for place, start in zip(_places(shape, len(out_S)), first)]
    is_here = torch.ones(len(out_S), dtype=torch.bool)
    for place, size in zip(places, local.shape):
        is_here &= (place >= 0) & (place < size)
    picked = tuple(place[is_here].to(local.device) for place in places)
    out_S[is_here] = (local[picked] if picked else local.expand(int(is_here.sum()))).double().cpu()
