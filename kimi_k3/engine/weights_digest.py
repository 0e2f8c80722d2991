"""What tells one model's weights from another's: of each parameter a sum over all its bytes, weighted by their places.

A sum of parts is the sum of the whole, so ranks that hold parts of a parameter add theirs up, and no part moves.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

CPU_WORDS = 1 << 18  # that are summed at once: in the cache
GPU_WORDS = 1 << 24


class Part(NamedTuple):
    """What this rank holds of a parameter.

    shape: of the whole one, its experts in their order where a placement holds them in slots.
    tag: where the part begins; parts with the same tag are copies of each other. -1: nothing is held.
    total: [] int64, see `weighted_sum`.
    """

    shape: tuple[int, ...]
    tag: int
    total: Tensor


@torch.no_grad()
def part_of(parameter: nn.Parameter, owner: nn.Module) -> Part:
    """owner: the module that the parameter is of. An offloaded one is told by its shape alone."""
    if hasattr(owner, "copy_ranks") and not hasattr(parameter, "to_local"):
        return _of_slots(parameter.detach(), owner)
    shape: Any = tuple(parameter.shape)
    if parameter.is_meta or not parameter.numel():
        return Part(shape, -1, torch.zeros((), dtype=torch.int64))
    local, first = _local(parameter.detach())
    tag = sum(start * math.prod(shape[dim + 1 :]) for dim, start in enumerate(first))
    return Part(shape, tag if local.numel() else -1, weighted_sum(local, shape, first))


def _local(parameter: Any) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part, and the place in the whole that it begins at."""
    if not hasattr(parameter, "to_local"):
        return parameter, (0,) * parameter.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = parameter.device_mesh, parameter.placements
    cuts = math.prod(mesh.size(i) for i, placed in enumerate(placements) if placed.is_shard(parameter.ndim - 1))
    if cuts > 1 and parameter.shape[-1] * parameter.element_size() % (4 * cuts):  # a cut may go through a word
        return parameter.full_tensor(), (0,) * parameter.ndim
    _, first = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return parameter.to_local(), first


def _of_slots(slots: Tensor, experts: Any) -> Part:
    """Of the experts whose first copy lies here: which slot holds one changes nothing."""
    shape = (experts.num_experts, *slots.shape[1:])
    total = torch.zeros((), dtype=torch.int64, device=slots.device)
    owners, places = experts.copy_ranks[:, 0].tolist(), experts.copy_slots[:, 0].tolist()
    rank = dist.get_rank()
    for expert, slot in enumerate(places):
        if owners[expert] == rank:
            total = total + weighted_sum(slots[slot : slot + 1], shape, (expert,) + (0,) * (slots.ndim - 1))
    return Part(shape, rank, total)


def weighted_sum(part: Tensor, shape: tuple[int, ...], first: tuple[int, ...]) -> Tensor:
    """sum_rc a(r) b(c) word(r, c) modulo 2^64, [] int64. Rows run over all dimensions but the last, columns over that.

    A word is 32 bits, or one element where it is shorter and rows are no multiple of 64 bytes. a and b are odd and without
    pattern: a change of one word is always seen, one of several words but for a chance of 2^-32 at most (what it adds to
    a word is below 2^32, so that 32 bits of a and b take part). On the part's device, in chunks, without a copy of
    it unless it is strided or lies askew.

    Args:
        part: of a tensor of `shape`, beginning at its place `first`.
    """
    if part.ndim < 2:
        size = shape[0] if shape else 1
        return weighted_sum(part.reshape(1, -1), (1, size), (0, first[0] if first else 0))
    rows, bytes_each = part.contiguous().flatten(0, -2), part.element_size()
    if rows.storage_offset() * bytes_each % 4:  # no view of it has words
        rows = rows.clone()
    if bytes_each >= 4 or shape[-1] * bytes_each % 64 == 0:
        words, column = rows.view(torch.int32), first[-1] * bytes_each // 4
    else:
        words, column = rows.view({1: torch.int8, 2: torch.int16}[bytes_each]), first[-1]
    places = torch.zeros(1, dtype=torch.int64, device=part.device)
    for local, start, size in zip(part.shape[:-1], first, shape):
        places = (places[:, None] * size + torch.arange(start, start + local, device=part.device)).flatten()
    weights_R = _weights(places, seed=1)
    weights_C = _weights(torch.arange(column, column + words.shape[1], device=part.device), seed=2)
    step = max(1, (GPU_WORDS if part.is_cuda else CPU_WORDS) // max(1, words.shape[1]))
    product = torch.empty((min(step, len(words)), words.shape[1]), dtype=torch.int64, device=part.device)
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for start in range(0, len(words), step):
        chunk = words[start : start + step]
        torch.mul(chunk, weights_C, out=product[: len(chunk)])
        total += (product[: len(chunk)].sum(1) * weights_R[start : start + step]).sum()
    return total


def _weights(places: Tensor, seed: int) -> Tensor:
    """An odd number for each place, int64: the mixing of splitmix64."""
    mixed = (places + (seed << 48) + 1) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    return (mixed ^ (mixed >> 27)) | 1
