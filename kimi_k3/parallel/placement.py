"""Experts -> slots on workers. Numbers alone: no tensors of the model, no process group, no clock, no randomness.

Two classes of copies, because balance and survival pull apart (a budget spent on "everything twice" starves the hot ones):

    active    routed to; an expert's tokens are split evenly over its active copies. More of them for hot experts.
    standby   never routed to; on another failure domain than the active ones, ready to take over. In a device slot
              (taking over flips a table entry) or in host memory (taking over loads it into a device slot).

Every rank computes the same plan from the same loads, so ranks agree without messages. Outputs never depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

EMPTY = -1
STANDBY_TIERS = ("device", "host")


class NoRoomForExperts(ValueError):
    """Experts would be left without a copy, or without their standby: a service has to say so, never to answer."""


class Move(NamedTuple):
    """One copy that a new plan has and the old one had not; `slot` is EMPTY for a standby copy in host memory.

    source: "standby" the copy lies in this device slot already, nothing is copied; "host" this worker's own memory;
            "peer" memory of `source_worker`; "checkpoint" nobody in the group has it.
    """

    layer: int
    expert: int
    worker: int
    slot: int
    source: str
    source_worker: int | None


class PlacementTables(NamedTuple):
    """What the dispatch op reads, int64 on the CPU; row l is the l-th MoE layer. Slot p lies on worker p // capacity.

    physical_to_logical [L, P]: the expert in each device slot, EMPTY where none. The loader of weights reads this.
    is_active [L, P] bool: whether tokens may be sent there.
    logical_to_physical [L, E, C]: device slots of each expert, active copies first, then standby, padded with EMPTY.
    num_active [L, E]: >= 1; the dispatcher picks among the first num_active slots and never sees the padding.
    Shapes depend on workers, capacity and C alone: a plan for other loads or for survivors is other data, same code.
    """

    physical_to_logical: Tensor
    is_active: Tensor
    logical_to_physical: Tensor
    num_active: Tensor


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """Where the copies of every expert lie, for each MoE layer; checked when built and never changed.

    The serving dispatcher reads `tables()`; loaders and migration read `moves_from(previous)` and fill slots in that
    order, then switch tables at a step boundary; failover calls `after_loss`, later `balanced(previous=...)` to get
    balance and standby copies back; operators read `workers_of` and `imbalance`. Worker numbers are fixed for the life
    of the service: a lost worker keeps its number, with empty slots, and ranks of a shrunk group are looked up outside.

    Args:
        num_experts: E, of one layer.
        slots: [L, W, S] int32, the expert in each device slot, EMPTY where none; S is the capacity of a worker.
        is_active: [L, W, S] bool; an occupied slot that is not active holds a standby copy.
        host: [L, W, B] int32, the experts whose standby copies host memory holds, EMPTY where none.
        domains: [W], the failure domain of each worker, what dies together (a node, where tp spans it).
        alive: [W], whether a worker takes part.
        survives_a_domain: whether the copies of every expert are promised to span two domains.
    Raises: NoRoomForExperts for an expert without an active copy or, if promised, a second domain; ValueError for two
        copies of an expert on one worker, copies on a lost worker, or arrays that disagree.
    """

    num_experts: int
    slots: np.ndarray
    is_active: np.ndarray
    host: np.ndarray
    domains: tuple[int, ...]
    alive: tuple[bool, ...]
    survives_a_domain: bool = False

    def __post_init__(self) -> None:
        layers, workers = self.slots.shape[:2]
        if self.is_active.shape != self.slots.shape or self.host.shape[:2] != (layers, workers):
            raise ValueError(
                f"placement: want is_active of the shape of slots and host [L, W, B], got {self.slots.shape}, "
                f"{self.is_active.shape}, {self.host.shape}"
            )
        if len(self.domains) != workers or len(self.alive) != workers:
            raise ValueError(f"placement: domains, alive: want {workers}, got {len(self.domains)}, {len(self.alive)}")
        for name, table in (("slots", self.slots), ("host", self.host)):
            if table.size and not -1 <= table.min() <= table.max() < self.num_experts:
                raise ValueError(f"placement: {name}: want experts below {self.num_experts} or {EMPTY}")
        if (self.is_active & (self.slots == EMPTY)).any():
            raise ValueError("placement: an empty slot is active")
        copies = self._copies(self.slots) + self._copies(self.host)
        self._refuse(copies > 1, "has two copies on worker {worker}", ValueError)
        is_lost_W1 = np.logical_not(np.array(self.alive))[:, None]
        self._refuse((copies > 0) & is_lost_W1, "has a copy on worker {worker}, lost", ValueError)
        active = self._copies(np.where(self.is_active, self.slots, EMPTY))
        self._refuse((active.sum(1) == 0)[:, None], "has no active copy", NoRoomForExperts)
        if self.survives_a_domain:
            alone = self._num_domains(copies > 0) < 2
            self._refuse(alone[:, None], "has all its copies in one domain", NoRoomForExperts)

    def _refuse(self, wrong_LWE: np.ndarray, what: str, error: type[ValueError]) -> None:
        if wrong_LWE.any():
            layer, worker, expert = map(int, np.argwhere(wrong_LWE)[0])
            raise error(f"placement: expert {expert} of MoE layer {layer} {what.format(worker=worker)}")

    def _copies(self, table_LWS: np.ndarray) -> np.ndarray:
        """[L, W, E] uint8: copies of each expert on each worker."""
        layers, workers, _ = table_LWS.shape
        layer, worker, slot = np.nonzero(table_LWS != EMPTY)
        copies = np.zeros((layers, workers, self.num_experts), np.uint8)
        np.add.at(copies, (layer, worker, table_LWS[layer, worker, slot]), 1)
        return copies

    def _num_domains(self, has_LWE: np.ndarray) -> np.ndarray:
        """[L, E]: domains that hold a copy."""
        domains = np.array(self.domains)
        spans = [has_LWE[:, domains == domain].any(1) for domain in sorted(set(self.domains))]
        return np.stack(spans).sum(0)

    # Sizes.

    @property
    def num_layers(self) -> int:
        return self.slots.shape[0]

    @property
    def num_workers(self) -> int:
        """Lost ones too."""
        return self.slots.shape[1]

    @property
    def capacity(self) -> int:
        """Device slots of a worker in one layer."""
        return self.slots.shape[2]

    # Ways to get one.

    @classmethod
    def contiguous(
        cls, num_experts: int, num_workers: int, num_layers: int = 1, capacity: int | None = None,
        domains: Sequence[int] | None = None,
    ) -> ExpertPlacement:  # fmt: skip
        """One active copy each, in order: worker 3 of 8 has experts 336 .. 447 of 896. Sizes differ by one at most.

        capacity: device slots of a worker; None: as many as it needs.   domains: None: each worker is its own.
        """
        _check_counts(num_experts=num_experts, num_workers=num_workers, num_layers=num_layers)
        needed = -(-num_experts // num_workers)
        capacity = needed if capacity is None else capacity
        if capacity < needed:
            raise NoRoomForExperts(
                f"contiguous: capacity: want at least {needed} slots for {num_experts} experts on {num_workers} "
                f"workers, got {capacity}"
            )
        slots_WS = np.full((num_workers, capacity), EMPTY, np.int32)
        for worker, experts in enumerate(np.array_split(np.arange(num_experts), num_workers)):
            slots_WS[worker, : len(experts)] = experts
        slots = np.repeat(slots_WS[None], num_layers, 0)
        host = np.full((num_layers, num_workers, 0), EMPTY, np.int32)
        where = tuple(range(num_workers) if domains is None else domains)
        return cls(num_experts, slots, slots != EMPTY, host, where, (True,) * num_workers)

    @classmethod
    def balanced(
        cls, loads: Any, num_workers: int | None = None, *, active_slots: int | None = None, capacity: int | None = None,
        domains: Sequence[int] | None = None, standby: str | None = None, previous: ExpertPlacement | None = None,
        tolerance: float = 1.05,
    ) -> ExpertPlacement:  # fmt: skip
        """Replicate the hottest experts and level the workers; then give each expert a copy in a second domain.

        Args:
            loads: [E] or [L, E], >= 0: tokens each expert got, or any multiple of it. All zero is valid.
            num_workers: left out with `previous`, which then also tells capacity, domains and who is alive.
            active_slots: active copies in one layer, over all workers; None: one for each expert.
            capacity: device slots of a worker in one layer; None: as many as an even share needs.
            standby: "device" or "host": where standby copies go, for experts whose active copies share one domain.
            previous: a plan to move away from as little as possible: a layer whose busiest worker is within
                `tolerance` keeps all copies, others change the copies that bring it there, and no copy changes slot.
            tolerance: busiest worker over mean load that is good enough.
        Raises: NoRoomForExperts if capacity does not suffice; ValueError naming the argument.
        """
        loads_LE = np.atleast_2d(np.asarray(loads, np.float64))
        if loads_LE.ndim != 2 or not loads_LE.size or not (np.isfinite(loads_LE).all() and (loads_LE >= 0).all()):
            raise ValueError(f"balanced: loads: want [E] or [L, E] of finite numbers >= 0, got shape {loads_LE.shape}")
        if (previous is None) == (num_workers is None):
            raise ValueError("balanced: want either num_workers or previous")
        if standby not in (None, *STANDBY_TIERS):
            raise ValueError(f"balanced: standby: want 'device', 'host' or None, got {standby!r}")
        layers, num_experts = loads_LE.shape
        if previous is not None:
            if (previous.num_experts, previous.num_layers) != (num_experts, layers):
                want = (previous.num_layers, previous.num_experts)
                raise ValueError(f"balanced: loads: want {want} as the previous plan, got {loads_LE.shape}")
            num_workers, alive = previous.num_workers, np.array(previous.alive)
            capacity = previous.capacity if capacity is None else capacity
            domains = previous.domains if domains is None else domains
            if capacity < previous.capacity:
                raise ValueError(f"balanced: capacity: want at least {previous.capacity}, as before, got {capacity}")
        else:
            assert num_workers is not None
            _check_counts(num_workers=num_workers)
            alive = np.ones(num_workers, bool)
        where = np.array(range(num_workers) if domains is None else domains)
        if len(where) != num_workers:
            raise ValueError(f"balanced: domains: want {num_workers}, got {len(where)}")
        num_alive = int(alive.sum())
        active_slots = num_experts if active_slots is None else active_slots
        share, even = -(-active_slots // num_alive), -(-num_experts // num_alive)
        if capacity is None:
            capacity = share + (even if standby == "device" else 0)
        if not num_experts <= active_slots <= num_alive * num_experts:
            raise ValueError(
                f"balanced: active_slots: want {num_experts} (one for each expert) to {num_alive * num_experts} "
                f"(one on each worker), got {active_slots}"
            )
        if active_slots > num_alive * capacity:
            raise NoRoomForExperts(
                f"balanced: capacity: want at least {share} slots for {active_slots} active copies on {num_alive} "
                f"workers, got {capacity}"
            )
        limit = max(share, capacity - even) if standby == "device" else capacity

        def plan_layer(load_E: np.ndarray, old: _Layer | None) -> _Layer:
            layer = _Layer(load_E, alive, where, capacity, limit, old)
            layer.spread(active_slots, tolerance)
            layer.replace_standby(standby)
            return layer

        return _assemble(cls, loads_LE, previous, plan_layer, where, alive, capacity, standby is not None)

    def after_loss(self, worker: int, loads: Any = None) -> ExpertPlacement:
        """The plan of the survivors: their copies stay where they are, and each expert without an active copy gets one.

        In this order: a standby copy in a device slot, one in host memory whose worker has a free slot, the least loaded
        worker with a free slot, the slot of a standby or of a replica that others back up. Standby copies are not
        renewed here: `balanced(loads, previous=..., standby=...)` does that when there is time.

        Args:
            loads: [E] or [L, E]: what "least loaded" means; None: the number of active copies.
        Raises: NoRoomForExperts if an expert would be left out. ValueError if the worker is no survivor.
        """
        if not 0 <= worker < self.num_workers or not self.alive[worker]:
            raise ValueError(f"after_loss: worker: want a living one below {self.num_workers}, got {worker}")
        alive = np.array(self.alive)
        alive[worker] = False
        if not alive.any():
            raise NoRoomForExperts(f"after_loss: worker {worker} was the last one")
        shape = self.num_layers, self.num_experts
        loads_LE = np.ones(shape) if loads is None else np.broadcast_to(np.asarray(loads, np.float64), shape)
        where = np.array(self.domains)

        def plan_layer(load_E: np.ndarray, old: _Layer | None) -> _Layer:
            layer = _Layer(load_E, alive, where, self.capacity, self.capacity, old)
            layer.restore_missing(worker)
            return layer

        return _assemble(ExpertPlacement, loads_LE, self, plan_layer, where, alive, self.capacity, False)

    def with_worker(self, worker: int) -> ExpertPlacement:
        """The lost worker is back, its slots empty: `balanced(loads, previous=...)` then fills them."""
        if not 0 <= worker < self.num_workers or self.alive[worker]:
            raise ValueError(f"with_worker: worker: want a lost one below {self.num_workers}, got {worker}")
        return replace(self, alive=(*self.alive[:worker], True, *self.alive[worker + 1 :]))

    def with_layers_of(self, other: ExpertPlacement, num_layers: int) -> ExpertPlacement:
        """This placement, the first `num_layers` layers as in `other`, which has the same shapes: a change under way."""
        slots, is_active = self.slots.copy(), self.is_active.copy()
        slots[:num_layers], is_active[:num_layers] = other.slots[:num_layers], other.is_active[:num_layers]
        is_promised = self.survives_a_domain and other.survives_a_domain
        return replace(self, slots=slots, is_active=is_active, survives_a_domain=is_promised)

    def is_same_in(self, other: ExpertPlacement, layer: int) -> bool:
        """Whether a layer has the same copies in the same slots."""
        return bool(
            (self.slots[layer] == other.slots[layer]).all() and (self.is_active[layer] == other.is_active[layer]).all()
        )

    # What others read.

    def workers_of(self, expert: int, layer: int = 0) -> list[int]:
        """Workers with an active copy, in order."""
        has_WS = (self.slots[layer] == expert) & self.is_active[layer]
        return [int(worker) for worker in np.flatnonzero(has_WS.any(1))]

    def standby_of(self, expert: int, layer: int = 0) -> list[tuple[int, str]]:
        """Workers with a standby copy and where it lies, "device" or "host"."""
        device = ((self.slots[layer] == expert) & ~self.is_active[layer]).any(1)
        host = (self.host[layer] == expert).any(1)
        return [
            (int(worker), tier) for tier, has in zip(STANDBY_TIERS, (device, host)) for worker in np.flatnonzero(has)
        ]

    def worker_loads(self, loads: Any) -> np.ndarray:
        """[L, W]: the load of each worker's active copies, an expert's split evenly over its copies."""
        loads_LE = np.broadcast_to(np.asarray(loads, np.float64), (self.num_layers, self.num_experts))
        active = self._copies(np.where(self.is_active, self.slots, EMPTY)).astype(np.float64)
        return np.einsum("lwe,le->lw", active, loads_LE / active.sum(1))

    def imbalance(self, loads: Any) -> np.ndarray:
        """[L]: load of the busiest worker over the mean of the living ones; 1 where nothing is loaded."""
        worker_loads = self.worker_loads(loads)[:, np.array(self.alive)]
        mean = worker_loads.mean(1)
        return np.where(mean > 0, worker_loads.max(1) / np.where(mean > 0, mean, 1), 1.0)

    def share_on_two_domains(self) -> float:
        """Of all experts of all layers: those that the loss of any one domain leaves with a copy."""
        return float((self._num_domains(self._copies(self.slots) + self._copies(self.host) > 0) >= 2).mean())

    def tables(self, max_copies: int | None = None) -> PlacementTables:
        """See `PlacementTables`. max_copies: C; None: as many as the expert with most has, so a new plan may differ."""
        layers = self.num_layers
        slots_LP = self.slots.reshape(layers, -1).astype(np.int64)
        active_LP = self.is_active.reshape(layers, -1)
        layer, slot = np.nonzero(slots_LP != EMPTY)
        expert, is_standby = slots_LP[layer, slot], ~active_LP[layer, slot]
        order = np.lexsort((slot, is_standby, expert, layer))
        layer, slot, expert = layer[order], slot[order], expert[order]
        counts = np.bincount(layer * self.num_experts + expert, minlength=layers * self.num_experts)
        starts = np.cumsum(counts) - counts
        position = np.arange(len(layer)) - starts[layer * self.num_experts + expert]
        most = int(counts.max())
        if max_copies is not None and max_copies < most:
            raise ValueError(f"tables: max_copies: want at least {most}, got {max_copies}")
        copies = np.full((layers, self.num_experts, max_copies or most), EMPTY, np.int64)
        copies[layer, expert, position] = slot
        num_active = self._copies(np.where(self.is_active, self.slots, EMPTY)).sum(1, dtype=np.int64)
        return PlacementTables(*map(torch.from_numpy, (slots_LP, active_LP.copy(), copies, num_active)))

    def moves_from(self, previous: ExpertPlacement) -> list[Move]:
        """The copies that `previous` lacks, layer by layer: what has to be filled before the tables switch."""
        before_device, before_host = self._copies(previous.slots) > 0, self._copies(previous.host) > 0
        reachable = (before_device | before_host) & np.array(self.alive)[:, None]
        moves = []
        width = previous.slots.shape[2]
        stays = np.zeros(self.slots.shape, bool)  # what is there already, and needs no other class
        stays[..., :width] = (self.slots[..., :width] == previous.slots) & (
            previous.is_active | ~self.is_active[..., :width]
        )
        for table, is_kept in ((self.slots, stays), (self.host, np.zeros(self.host.shape, bool))):
            for layer, worker, slot in np.argwhere((table != EMPTY) & ~is_kept):
                expert = int(table[layer, worker, slot])
                is_device = table is self.slots
                if is_device and slot < width and previous.slots[layer, worker, slot] == expert:
                    source, origin = "standby", None
                elif not is_device and before_host[layer, worker, expert]:
                    continue
                elif before_host[layer, worker, expert] or before_device[layer, worker, expert]:
                    source, origin = "host" if is_device else "peer", int(worker)
                else:
                    holders = np.flatnonzero(reachable[layer, :, expert])
                    source, origin = ("peer", int(holders[0])) if len(holders) else ("checkpoint", None)
                place = int(slot) if is_device else EMPTY
                moves.append(Move(int(layer), expert, int(worker), place, source, origin))
        return sorted(moves, key=lambda move: move.layer)


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"placement: {name}: want at least 1, got {count}")


def _assemble(
    cls: type[ExpertPlacement], loads_LE: np.ndarray, previous: ExpertPlacement | None,
    plan_layer: Callable[[np.ndarray, _Layer | None], _Layer], domains: np.ndarray, alive: np.ndarray, capacity: int,
    survives_a_domain: bool,
) -> ExpertPlacement:  # fmt: skip
    """Plan layer by layer, equal layers once, and stack what came out."""
    known: dict[bytes, _Layer] = {}
    planned = []
    for layer, load_E in enumerate(loads_LE):
        old = None if previous is None else _Layer.of(previous, layer)
        key = load_E.tobytes() + (b"" if old is None else old.key())
        if key not in known:
            known[key] = plan_layer(load_E, old)
        planned.append(known[key])
    width = max(layer.host_WE.sum(1).max() for layer in planned)
    laid_out = [layer.lay_out(int(width)) for layer in planned]
    slots, is_active, host = (np.stack(tables) for tables in zip(*laid_out))
    return cls(
        loads_LE.shape[1], slots, is_active, host, tuple(map(int, domains)), tuple(map(bool, alive)), survives_a_domain
    )


class _Layer:
    """One layer while it is planned: who has which copies, [W, E] bool each; ties go to the lower number."""

    def __init__(
        self,
        load_E: np.ndarray,
        alive_W: np.ndarray,
        domain_W: np.ndarray,
        capacity: int,
        limit: int,
        old: _Layer | None,
    ) -> None:
        self.load_E, self.alive_W, self.domain_W, self.capacity, self.limit = load_E, alive_W, domain_W, capacity, limit
        shape = len(alive_W), len(load_E)
        self.slots_WS = np.full((shape[0], capacity), EMPTY, np.int32)
        self.active_WE, self.standby_WE, self.host_WE = (np.zeros(shape, bool) for _ in range(3))
        self.is_new = old is None
        if old is not None:
            self.slots_WS[:, : old.slots_WS.shape[1]] = old.slots_WS
            for mine, theirs in zip(self._tables(), old._tables()):
                mine[alive_W] = theirs[alive_W]

    @classmethod
    def of(cls, plan: ExpertPlacement, layer: int) -> _Layer:
        found = cls(np.zeros(plan.num_experts), np.array(plan.alive), np.array(plan.domains), plan.capacity, 0, None)
        found.slots_WS, active = plan.slots[layer], plan.is_active[layer]
        for table, experts in zip(
            found._tables(),
            (np.where(active, found.slots_WS, EMPTY), np.where(active, EMPTY, found.slots_WS), plan.host[layer]),
        ):
            worker, slot = np.nonzero(experts != EMPTY)
            table[worker, experts[worker, slot]] = True
        return found

    def _tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.active_WE, self.standby_WE, self.host_WE

    def key(self) -> bytes:
        return self.slots_WS.tobytes() + b"".join(np.packbits(table).tobytes() for table in self._tables())

    def worker_loads(self) -> np.ndarray:
        """[W]; a lost worker is never the least loaded one."""
        shares_E = self.load_E / np.maximum(self.active_WE.sum(0), 1)
        return np.where(self.alive_W, self.active_WE @ shares_E, np.inf)

    # Balance.

    def spread(self, active_slots: int, tolerance: float) -> None:
        """Settle how many active copies each expert has and where they lie."""
        if self.is_new:
            counts_E = self._copy_counts(np.ones(len(self.load_E), int), active_slots)
            missing_E = counts_E
        else:
            before_E = self.active_WE.sum(0)
            enough = before_E.sum() == active_slots and self._imbalance() <= tolerance and before_E.min() > 0
            if enough and self.active_WE.sum(1).max() <= self.limit:
                return
            counts_E = self._copy_counts(np.maximum(before_E, 1), active_slots)
            for expert in np.flatnonzero(before_E > counts_E):
                for _ in range(before_E[expert] - counts_E[expert]):
                    holders = np.where(self.active_WE[:, expert], self.worker_loads(), -np.inf)
                    self.active_WE[int(holders.argmax()), expert] = False
            while self.active_WE.sum(1).max() > self.limit:  # a worker may hold more after a loss than it should
                worker = int(self.active_WE.sum(1).argmax())
                mine = np.flatnonzero(self.active_WE[worker])
                self.active_WE[worker, mine[self.load_E[mine].argmin()]] = False
            missing_E = np.maximum(counts_E - self.active_WE.sum(0), 0)
        shares_E = self.load_E / counts_E
        load_W, count_W = self.active_WE @ shares_E, self.active_WE.sum(1)
        for expert in np.lexsort((np.arange(len(shares_E)), -shares_E)):  # longest first
            for _ in range(missing_E[expert]):
                self._add_active(int(expert), shares_E, load_W, count_W)
        self._level(tolerance)

    def _copy_counts(self, counts_E: np.ndarray, active_slots: int) -> np.ndarray:
        """The next copy goes to the expert with most load a copy, the next to go is the one missed least."""
        counts_E, most = counts_E.copy(), int(self.alive_W.sum())
        load_E = self.load_E + (self.load_E.max() or 1.0) * 1e-12  # among idle experts, to the one with fewest copies

        def hottest() -> int:
            return int(np.where(counts_E < most, load_E / counts_E, -1.0).argmax())

        def idlest() -> int:
            return int(np.where(counts_E > 1, load_E / np.maximum(counts_E - 1, 1), np.inf).argmin())

        while counts_E.sum() < active_slots:
            counts_E[hottest()] += 1
        while counts_E.sum() > active_slots:
            counts_E[idlest()] -= 1
        while (counts_E > 1).any():  # with a previous plan's counts: a copy moves where it helps by a quarter
            hot, idle = hottest(), idlest()
            if counts_E[hot] == most or load_E[hot] / counts_E[hot] <= 1.25 * load_E[idle] / (counts_E[idle] - 1):
                break
            counts_E[hot] += 1
            counts_E[idle] -= 1
        return counts_E

    def _add_active(self, expert: int, shares_E: np.ndarray, load_W: np.ndarray, count_W: np.ndarray) -> None:
        """On the least loaded worker with room and without a copy; of equals, in a domain without one, then emptiest."""
        has_W = self.active_WE[:, expert]
        lacks_W = self.alive_W & ~has_W
        free_W = self.alive_W & (count_W < self.limit)
        score_W = np.where(lacks_W & free_W, load_W, np.inf)
        lowest = score_W.min()
        if lowest < np.inf:
            least = (score_W == lowest).nonzero()[0]
            if len(least) > 1:
                is_taken = (self.domain_W[least, None] == self.domain_W[has_W]).any(1)
                least = least[np.lexsort((count_W[least], is_taken))]  # stable: of equals the first
            worker = int(least[0])
            self.active_WE[worker, expert] = True
            load_W[worker] += shares_E[expert]
            count_W[worker] += 1
            return
        # Only workers that have one have room. Another expert goes there and leaves its place: the lightest that can.
        options = []
        for room in map(int, np.flatnonzero(free_W)):
            for worker in map(int, np.flatnonzero(lacks_W)):
                movable = np.flatnonzero(self.active_WE[worker] & ~self.active_WE[room])
                if len(movable):
                    other = int(movable[shares_E[movable].argmin()])
                    higher = max(load_W[worker] + shares_E[expert] - shares_E[other], load_W[room] + shares_E[other])
                    options.append((higher, worker, room, other))
        _, worker, room, other = min(options)
        self.active_WE[worker, [expert, other]] = True, False
        self.active_WE[room, other] = True
        load_W[worker] += shares_E[expert] - shares_E[other]
        load_W[room] += shares_E[other]
        count_W[room] += 1

    def _imbalance(self) -> float:
        load_W = self.worker_loads()[self.alive_W]
        return float(load_W.max() / load_W.mean()) if load_W.mean() > 0 else 1.0

    def _level(self, tolerance: float) -> None:
        """Move a copy from the busiest worker, or swap two, while that lowers the higher of the two loads."""
        shares_E = self.load_E / self.active_WE.sum(0)
        for _ in range(8 * len(self.alive_W) + 64):
            load_W = self.worker_loads()
            living = load_W[self.alive_W]
            if living.mean() == 0 or living.max() <= tolerance * living.mean():
                return
            busy = int(np.where(self.alive_W, load_W, -np.inf).argmax())
            for idle in np.argsort(load_W, kind="stable")[: len(living)]:
                gap = load_W[busy] - load_W[idle]
                if gap <= 0:
                    return
                gives = np.flatnonzero(self.active_WE[busy] & ~self.active_WE[idle])
                takes = np.flatnonzero(self.active_WE[idle] & ~self.active_WE[busy])
                back = np.append(shares_E[takes], np.inf if self.active_WE[idle].sum() >= self.limit else 0.0)
                change = shares_E[gives][:, None] - back  # the last column gives without taking
                useful = np.where((change > 1e-9 * gap) & (change < gap * (1 - 1e-9)), np.abs(change - gap / 2), np.inf)
                if useful.size and np.isfinite(useful.min()):
                    give, take = np.unravel_index(int(useful.argmin()), useful.shape)
                    self.active_WE[[busy, int(idle)], gives[give]] = False, True
                    if take < len(takes):
                        self.active_WE[[busy, int(idle)], takes[take]] = True, False
                    break
            else:
                return

    # Survival.

    def replace_standby(self, tier: str | None) -> None:
        """Keep the standby copies that still serve, drop others, and add those that are missing in `tier`."""
        old_WE = self.standby_WE if tier == "device" else self.host_WE
        kept_WE = old_WE & ~self.active_WE
        self.standby_WE, self.host_WE = np.zeros_like(self.active_WE), np.zeros_like(self.active_WE)
        if tier is None:
            return
        living = sorted(set(self.domain_W[self.alive_W]))
        if len(living) < 2:
            raise NoRoomForExperts(f"balanced: standby: want workers in two domains at least, got domain {living}")
        span_E = sum(self.active_WE[self.domain_W == domain].any(0).astype(int) for domain in living)
        even = -(-len(self.load_E) // int(self.alive_W.sum()))
        room_W = self.capacity - self.active_WE.sum(1) if tier == "device" else np.full(len(self.alive_W), even)
        room_W = np.where(self.alive_W, room_W, 0)
        standby_WE = self.standby_WE if tier == "device" else self.host_WE
        home_E = self.domain_W[self.active_WE.argmax(0)]
        may_WE = self.alive_W[:, None] & (self.domain_W[:, None] != home_E) & (span_E < 2)
        owner_E, pairs_WW = self.active_WE.argmax(0), np.zeros((len(self.alive_W),) * 2, int)

        def put(expert: int, worker: int, here: bool) -> None:
            standby_WE[worker, expert] = here
            step = 1 if here else -1
            room_W[worker] -= step
            pairs_WW[owner_E[expert], worker] += step

        for worker, expert in np.argwhere(kept_WE & may_WE):
            if room_W[worker] > 0 and not standby_WE[:, expert].any():
                put(int(expert), int(worker), True)
        missing = np.flatnonzero((span_E < 2) & ~standby_WE.any(0))
        for expert in missing[np.argsort(-self.load_E[missing], kind="stable")]:
            workers = np.flatnonzero(may_WE[:, expert] & (room_W > 0))
            if len(workers):  # what one worker loses is spread over the others
                order = np.lexsort((workers, -room_W[workers], pairs_WW[owner_E[expert], workers]))
                put(int(expert), int(workers[order[0]]), True)
            else:
                self._make_room(int(expert), standby_WE, may_WE, room_W, put)

    def _make_room(
        self, expert: int, standby_WE: np.ndarray, may_WE: np.ndarray, room_W: np.ndarray,
        put: Callable[[int, int, bool], None],
    ) -> None:  # fmt: skip
        """Shift standby copies along a shortest chain of workers that ends at one with room."""
        came_from: dict[int, tuple[int, int]] = {
            int(worker): (-1, expert) for worker in np.flatnonzero(may_WE[:, expert])
        }
        queue = list(came_from)
        for worker in queue:
            if room_W[worker] > 0:
                end = worker
                while end != -1:
                    before, moved = came_from[end]
                    if before != -1:
                        put(moved, before, False)
                    put(moved, end, True)
                    end = before
                return
            for other in np.flatnonzero(standby_WE[worker]):
                for target in np.flatnonzero(may_WE[:, other]):
                    if int(target) not in came_from:
                        came_from[int(target)] = (worker, int(other))
                        queue.append(int(target))
        raise NoRoomForExperts(
            f"balanced: capacity: want a slot in another domain for a standby copy of expert {expert}, and "
            f"{int(room_W.sum())} are free, got a capacity of {self.capacity}"
        )

    def restore_missing(self, lost: int) -> None:
        missing = np.flatnonzero(~self.active_WE.any(0))
        load_W, count_W = self.worker_loads(), self.active_WE.sum(1)
        free_W = self.alive_W & (count_W + self.standby_WE.sum(1) < self.capacity)
        for expert in map(int, missing[np.argsort(-self.load_E[missing], kind="stable")]):
            workers = np.flatnonzero(self.standby_WE[:, expert])
            if not len(workers):
                workers = np.flatnonzero(self.host_WE[:, expert] & free_W)
            if not len(workers):
                workers = np.flatnonzero(free_W if free_W.any() else self._expendable().any(1))
            if not len(workers):
                raise NoRoomForExperts(
                    f"after_loss: worker {lost} had the only copies of {len(missing)} experts of a layer, and its "
                    f"survivors have no slot left for expert {expert}: want a capacity above {self.capacity}"
                )
            worker = int(workers[np.lexsort((workers, count_W[workers], load_W[workers]))[0]])
            is_evicting = not self.standby_WE[worker, expert] and not free_W[worker]
            if is_evicting:
                spare = np.flatnonzero(self._expendable()[worker])
                victim = int(spare[self.load_E[spare].argmin()])
                self.active_WE[worker, victim] = self.standby_WE[worker, victim] = False
            self.standby_WE[worker, expert] = self.host_WE[worker, expert] = False
            self.active_WE[worker, expert] = True
            load_W[worker] += self.load_E[expert]  # its first active copy
            count_W[worker] += 1
            if is_evicting:  # what a replica leaves goes to the others of its expert
                load_W, count_W = self.worker_loads(), self.active_WE.sum(1)
            free_W[worker] = count_W[worker] + self.standby_WE[worker].sum() < self.capacity
        # A replica that was put where the worker's own host copy lies replaces it.
        self.host_WE &= ~self.active_WE

    def _expendable(self) -> np.ndarray:
        """[W, E]: copies in device slots whose expert another active copy serves."""
        return (self.standby_WE & self.active_WE.any(0)) | (self.active_WE & (self.active_WE.sum(0) > 1))

    # Slots.

    def lay_out(self, host_width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots [W, S], whether active, and host [W, B]: a copy that was there keeps its slot, others fill the gaps."""
        device_WE = self.active_WE | self.standby_WE
        slots_WS = np.where(self.alive_W[:, None], self.slots_WS, EMPTY)
        host_WB = np.full((len(slots_WS), host_width), EMPTY, np.int32)
        for worker, slots_S in enumerate(slots_WS):
            occupied = np.flatnonzero(slots_S != EMPTY)
            slots_S[occupied[~device_WE[worker, slots_S[occupied]]]] = EMPTY
            is_added_E = device_WE[worker].copy()
            is_added_E[slots_S[slots_S != EMPTY]] = False
            added = np.flatnonzero(is_added_E)
            slots_S[np.flatnonzero(slots_S == EMPTY)[: len(added)]] = added
            experts = np.flatnonzero(self.host_WE[worker])
            host_WB[worker, : len(experts)] = experts
        is_active = (slots_WS != EMPTY) & np.take_along_axis(self.active_WE, np.maximum(slots_WS, 0).astype(int), 1)
        return slots_WS, is_active, host_WB
