"""Another placement of the experts while the old one serves: copies travel in the background, layer by layer.

    staged       a thread receives the copies of one layer that this rank lacks, in chunks, on a process group of its own;
                 of two buffers one fills while the other waits for its step boundary
    committed    between two steps, once every rank has staged a layer: the buffer goes into the slots, and the layer's
                 tables change. Both in place, so graphs stay valid.

Until a layer is committed nothing that serving reads has changed, so a transfer that fails or is late costs nothing.
"""

from __future__ import annotations

import datetime
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kimi_k3.parallel.expert_parallel import (
    Tables,
    expert_layers,
    place_experts,
    tables_from_slots,
    weight_names,
)
from kimi_k3.parallel.mesh import axis
from kimi_k3.parallel.placement import EMPTY, ExpertPlacement

# A chunk, then a pause, so that steps keep cores and links: 0.8 GB/s a rank at most.
CHUNK_BYTES = 16 << 20  # of one message, and of what a rank has on its way at once; a single row may be larger
CHUNK_MESSAGES = 16
PAUSE_SECONDS = 0.02
BUFFERS = 2


def check_placement(model: nn.Module, plan: ExpertPlacement) -> None:
    """Raise ValueError if a placement does not fit the model's experts and its group of ranks."""
    layers, mesh = expert_layers(model), getattr(model, "mesh", None)
    ep = None if mesh is None else axis(mesh, "ep")
    if not layers or ep is None:
        raise ValueError('placement: want a model with experts on "ep": from_pretrained(..., mesh=make_mesh(ep=N))')
    size = ep.size()
    have = (len(layers), size, layers[0].experts.num_experts)
    want = (plan.num_layers, plan.num_workers, plan.num_experts)
    if have != want:
        raise ValueError(f"placement: want (MoE layers, ranks, experts) {have} as the model has, got {want}")
    if not all(plan.alive):
        raise ValueError(f"placement: want {size} living workers, got {sum(plan.alive)}")
    if (plan.host != EMPTY).any():
        raise ValueError(
            "placement: standby copies in host memory are not kept by the ranks: want them in device slots"
        )


def tables_of(plan: ExpertPlacement) -> list[Tables]:
    """Of each layer; as wide as any later placement can need: an expert has one copy on a worker at most."""
    tables = plan.tables(max_copies=plan.num_workers)
    return [
        tables_from_slots(slots, active, plan.capacity)
        for slots, active in zip(tables.logical_to_physical, tables.num_active)
    ]


def is_changing(model: nn.Module) -> bool:
    """Whether a generator has a change of the experts' placement under way."""
    return getattr(model, "expert_transfer", None) is not None


def use_placement(model: nn.Module, plan: ExpertPlacement) -> None:
    """Move all experts to a placement now, between two steps; every rank calls it with the same one.

    It settles how many slots a rank has (`plan.capacity`, spare ones for replicas included), and with them the shapes that
    graphs are compiled for: call it before `compile_blocks`. `KimiK3Generator.replace_experts` then changes the placement
    while it serves. `model.expert_placement` is the placement in use.

    Args:
        model: with routed experts on "ep".     plan: of its layers, ranks and experts.
    Raises: ValueError if they do not fit, the experts are being trained, or `replace_experts` has a change under way.
    """
    if is_changing(model):
        raise ValueError("use_placement: want no change of replace_experts under way: step until it ends, or close it")
    check_placement(model, plan)
    for layer, tables, slots in zip(expert_layers(model), tables_of(plan), plan.slots):
        place_experts(layer, tables, torch.from_numpy(slots))
    model.expert_placement = plan  # type: ignore[assignment]


class _Copy(NamedTuple):
    """One expert of one layer on its way: from a slot of `source` to the slot `slot` of `target`."""

    source: int
    target: int
    source_slot: int
    slot: int


class _Staged(NamedTuple):
    layer: int
    slots: list[int]  # of this rank, in the order of the buffer's rows
    buffer: dict[str, Tensor]
    tables: Tables


class Transfer:
    """The copies that `plan` needs and `now` has not, staged by a thread; `commit` is the caller's, between two steps.

    group: of all ranks, for this alone, so that nothing here stands between the collectives of a step.
    num_ready: layers staged on this rank, those that need nothing included.     error: why no more will be.
    """

    def __init__(
        self, model: nn.Module, now: ExpertPlacement, plan: ExpertPlacement, group: dist.ProcessGroup, deadline: float
    ) -> None:
        self._experts: list[Any] = [layer.experts for layer in expert_layers(model)]
        self._now, self._plan, self._group, self._deadline = now, plan, group, deadline
        self._staged: dict[int, _Staged] = {}
        self._free = threading.Semaphore(BUFFERS)
        self._is_stopped = False
        device = self._experts[0].num_active.device
        # On a GPU: copies have a stream of their own, and a buffer is filled again after its rows went into the slots.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._committed = torch.Event(device)
        self.num_ready, self.num_committed, self.copied = 0, 0, 0
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="expert transfer", daemon=True)
        self._thread.start()

    def commit(self, until: int) -> None:
        """Let the layers before `until`, ready on every rank, serve from their new places."""
        for layer in range(self.num_committed, until):
            staged = self._staged.pop(layer, None)
            if staged is None:
                continue
            experts = self._experts[layer]
            with torch.no_grad():
                for name, rows in staged.buffer.items():
                    getattr(experts, name).data[staged.slots] = rows[: len(staged.slots)]
                for name, table in staged.tables._asdict().items():
                    getattr(experts, name).copy_(table)
            if self._stream is not None:
                self._committed.record()
            self.copied += len(staged.slots)
            self._free.release()
        self.num_committed = until

    def placement(self) -> ExpertPlacement:
        """The one in use: the new one for committed layers, the old one for the others."""
        if self.num_committed == self._plan.num_layers:
            return self._plan
        return self._now.with_layers_of(self._plan, self.num_committed)

    def stop(self) -> None:
        """End the thread, after the chunk that is on its way if need be; what is not committed is dropped."""
        self._is_stopped = True
        self._free.release()

    # In the thread.

    def _run(self) -> None:
        try:
            self._stage_all()
        except Exception as error:  # told to the ranks at the next step boundary
            self.error = error

    def _stage_all(self) -> None:
        copies = self._copies()
        tables, rank = tables_of(self._plan), self._group.rank()
        most = max((sum(copy.target == rank for copy in layer) for layer in copies), default=0)
        buffers = [self._buffer(most) for _ in range(BUFFERS)]
        device, stream, filled = self._experts[0].num_active.device, self._stream, 0
        if stream is not None:
            stream.wait_stream(torch.cuda.default_stream(device))
        for layer, wanted in enumerate(copies):
            if self._is_same(layer):
                self.num_ready = layer + 1
                continue
            self._free.acquire()
            if self._is_stopped:
                return
            buffer, filled = buffers[filled % BUFFERS], filled + 1
            mine = [copy.slot for copy in wanted if copy.target == rank]
            with torch.cuda.stream(stream):  # None: no stream
                if stream is not None:
                    self._committed.synchronize()
                self._stage(layer, wanted, buffer)
                if stream is not None:
                    stream.synchronize()
            if self._is_stopped:
                return
            self._staged[layer] = _Staged(layer, mine, buffer, Tables(*(table.to(device) for table in tables[layer])))
            self.num_ready = layer + 1

    def _is_same(self, layer: int) -> bool:
        return self._now.is_same_in(self._plan, layer)

    def _copies(self) -> list[list[_Copy]]:
        """Of each layer, in the order in which every rank sends and receives them."""
        now = self._now
        copies: list[list[_Copy]] = [[] for _ in range(now.num_layers)]
        for move in self._plan.moves_from(now):
            if move.source == "standby":
                continue
            assert move.source_worker is not None  # every expert has an active copy on a living worker
            (source_slot,) = (now.slots[move.layer, move.source_worker] == move.expert).nonzero()[0].tolist()
            copies[move.layer].append(_Copy(move.source_worker, move.worker, source_slot, move.slot))
        return [sorted(layer) for layer in copies]

    def _buffer(self, rows: int) -> dict[str, Tensor]:
        experts = self._experts[0]
        stacks = {name: getattr(experts, name) for name in weight_names(experts.packed)}
        return {name: stack.new_empty((rows, *stack.shape[1:])) for name, stack in stacks.items()}

    def _stage(self, layer: int, wanted: list[_Copy], buffer: dict[str, Tensor]) -> None:
        """Receive this rank's rows of one layer, and send others theirs. All ranks go through the copies in one order and
        each waits only for earlier ones, so the earliest one that is not done can always be done."""
        pending: list[dist.Work | None] = []
        pending_bytes = 0
        for work, num_bytes in self._messages(layer, wanted, buffer):
            pending.append(work)
            pending_bytes += num_bytes
            if pending_bytes >= CHUNK_BYTES or len(pending) >= CHUNK_MESSAGES:
                self._wait(pending)
                pending, pending_bytes = [], 0
        self._wait(pending)

    def _messages(
        self, layer: int, wanted: list[_Copy], buffer: dict[str, Tensor]
    ) -> Iterator[tuple[dist.Work | None, int]]:  # fmt: skip
        experts, rank = self._experts[layer], self._group.rank()
        for name, rows in buffer.items():
            stack, at = getattr(experts, name).detach(), 0
            most = max(1, CHUNK_BYTES // (stack.nbytes // len(stack)))  # the same on every rank
            for (source, target), pair in itertools.groupby(wanted, key=lambda copy: copy[:2]):
                slots = [copy.source_slot for copy in pair]
                for first in range(0, len(slots), most):
                    some = slots[first : first + most]
                    if rank == target:
                        place = rows[at : at + len(some)]
                        at += len(some)
                        if source == target:
                            place.copy_(stack[some])
                        else:
                            yield dist.irecv(place, group=self._group, group_src=source), place.nbytes
                    elif rank == source:
                        sent = stack[some]
                        yield dist.isend(sent, group=self._group, group_dst=target), sent.nbytes

    def _wait(self, pending: list[dist.Work | None]) -> None:
        for work in pending:
            left = self._deadline - time.monotonic()
            if left <= 0 or self._is_stopped:
                raise TimeoutError("transfer of experts: its deadline has passed")
            assert work is not None  # this rank is in the group
            work.wait(datetime.timedelta(seconds=left))
        time.sleep(PAUSE_SECONDS)
