"""Between the prefix index and the tiers: what is evicted is stored, what a request misses is fetched and put back.

An entry is a latent block or some heads of a state, under the digest of all tokens up to its end. So a parked request, a
later turn and another process find the same entries, and whatever goes wrong with one is a counted miss and a recompute.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from kimi_k3.engine.agreement import Agreement
from kimi_k3.engine.device_pools import DevicePools
from kimi_k3.engine.page_pool import PagePool
from kimi_k3.engine.prefix_index import Evicted, Node, PrefixIndex, Snapshot, chain
from kimi_k3.engine.request import Request
from kimi_k3.engine.tier_format import Payload
from kimi_k3.engine.tier_transfers import FETCH_SECONDS, TierStack, may_hold

MAX_PROBES = 64  # positions of a prompt that are looked for in the tiers
CLOSE_SECONDS = 60.0
# A read that takes longer than FETCH_SECONDS and this, all reads before it included, is given up: the tokens are computed.
FETCH_SECONDS_PER_BYTE = 1e-8
PAUSE_SECONDS = 0.005  # of a step that has nothing to run but waits for a read


class TierStore:
    """Saves what leaves the index in the tiers, and reads ahead and installs what waiting requests can start from.

    known: name of an entry -> the node or snapshot that it was made from or restored to, as long as that lives: the entry
        is taken to be in a tier, and not stored again.

    Args:
        tiers: nearest first.     pools, pool, index: the generator's.
    """

    def __init__(
        self, tiers: Sequence[Any], pools: DevicePools, pool: PagePool, index: PrefixIndex, agreement: Agreement
    ) -> None:
        self.agreement = agreement
        self.slices = pools.head_slices()  # may raise: before the tiers are taken
        self.stack = TierStack(tiers)
        self.pools, self.pool, self.index = pools, pool, index
        self.block_size = pools.layout.block_size
        self.counts: Counter[str] = Counter()
        # Bound on what is read and not used yet; one read of any size may always be.
        (self.max_reading_bytes,) = agreement.least([self.stack.max_pending_bytes])
        self._reading: list[Request] = []  # whose reads count
        self._refused: list[Request] = []  # for room, since the last `poll`
        self.known = WeakValueDictionary[str, Node | Snapshot]()
        self._tier_index = 0
        self._wait_until = 0.0  # for room in the queue

    # Out: from the index to the tiers.

    def save(self, evicted: Evicted) -> None:
        """Store a snapshot and the blocks before it, where they are not stored yet. Copies first: the memory goes away.

        Where the queue refuses an entry the rest of the path is not stored: without it nothing could be restored.
        """
        self._forget_lost()
        snapshot = evicted.snapshot
        for node in evicted.path:
            end = min(node.end, snapshot.position)
            name = _block_name(_key_in(node, end))
            if name not in self.known:
                payload = self.pools.read_block(self.pool.places[node.block], end - node.start)
                if not self._store(name, payload, node if end == node.end else snapshot):
                    return
                self.counts["stored_blocks"] += 1
        key = _key_in(evicted.node, snapshot.position)
        slices = [heads for heads in self.slices if _slice_name(key, heads) not in self.known]
        if slices:
            if snapshot.blocks:
                self.pools.stage_blocks([self.pool.places[block] for block in snapshot.blocks])
            for heads, payload in zip(slices, self.pools.read_slices(snapshot.slot, slices)):
                if not self._store(_slice_name(key, heads), payload, snapshot):
                    return
            self.counts["stored_snapshots"] += 1

    def _store(self, name: str, payload: Payload, owner: Node | Snapshot) -> bool:
        """Queue an entry; False where the queue is full. At the end, off any step, room in it is waited for."""
        wait_s = max(self._wait_until - time.monotonic(), 0.0)
        is_queued = self.stack.store(name, payload, self._tier_index, ready=self.pools.copied(), wait_s=wait_s)
        if is_queued:
            self.known[name] = owner
        else:
            self.counts["refused"] += 1
        return is_queued

    def _forget_lost(self) -> None:
        """What is in no tier after all is stored again when it is next evicted."""
        while self.stack.lost:
            self.counts["lost"] += self.known.pop(self.stack.lost.popleft(), None) is not None

    # In: from the tiers to the index.

    def look_up(self, request: Request) -> None:
        """Find the deepest state in the tiers that lies beyond what the index has for a waiting request.

        A far tier is asked in a thread: until it answers, or is late, the request waits as for a read.
        """
        positions = [p for p in self._positions(request) if p not in request.missed_positions]
        names = {p: _slice_name(key, self.slices[0]) for p, key in self._keys(request, positions).items()}
        near = self.stack.find(list(names.values()))
        request.near_position = 0 if near is None else positions[near]
        if self.stack.has_far:
            request.far_positions = [p for p in positions[:near] if p not in request.asked_positions]
            if self.agreement.most([len(request.far_positions)])[0]:  # on every rank, or on none
                request.fetch = self.stack.ask([names[p] for p in request.far_positions])
                request.fetch_state = "pending"
                return
        self._choose(request, request.near_position)

    def _positions(self, request: Request) -> list[int]:
        """Where a state may have been left, the deepest first."""
        limit = len(request.tokens) - 1
        edges = {limit} | {b - shift for b in request.boundaries for shift in (0, 1)}
        grid = range(self.block_size, limit + 1, self.block_size)
        deepest = [sorted(p for p in ps if request.reuse < p <= limit)[-MAX_PROBES // 2 :] for ps in (edges, grid)]
        return sorted({*deepest[0], *deepest[1]}, reverse=True)

    def _answered(self, request: Request) -> None:
        place = request.fetch.results.get("")
        self.counts.update(f"miss_{reason}" for reason in request.fetch.failures.values())
        request.asked_positions.update(request.far_positions[: None if place is None else place + 1])
        self._choose(request, request.near_position if place is None else request.far_positions[place])

    def _choose(self, request: Request, position: int) -> None:
        """The state at `position` is to be fetched; 0: none."""
        if self.agreement.least([position, -position]) != [position, -position]:  # not every rank finds the same
            position = 0
        self.cancel(request)
        if position <= request.reuse:
            return
        first = request.reuse // self.block_size  # blocks before it are on the device
        ends = range((first + 1) * self.block_size, position + self.block_size, self.block_size)
        keys = self._keys(request, [min(end, position) for end in ends])
        request.fetch_keys = [_block_name(key) for key in keys.values()]
        request.fetch_keys += [_slice_name(keys[position], heads) for heads in self.slices]
        request.fetch_position, request.fetch_first = position, first
        request.fetch_bytes = len(keys) * self.pools.layout.block_bytes + self.pools.layout.slot_bytes
        request.fetch_state = "absent"

    def _keys(self, request: Request, positions: Iterable[int]) -> dict[int, bytes]:
        """Position -> digest of the tokens before it. Those of generated blocks are hashed once, and kept."""
        tokens, size = request.tokens, self.block_size
        for end in range((len(request.chain) + 1) * size, len(tokens) + 1, size):
            before = request.chain[-1] if request.chain else request.root
            request.chain.append(chain(before, tokens[end - size : end]))
        keys = [request.root, *request.chain]
        whole = {p: keys[p // size] for p in positions}
        return {p: chain(key, tokens[p // size * size : p]) if p % size else key for p, key in whole.items()}

    def prefetch(self, request: Request) -> None:
        """Begin to read what a request needs, unless too much is being read; then it is to be asked for again."""
        if request.fetch_state != "absent":
            return
        reading = self._reading_bytes()
        if reading and reading + request.fetch_bytes > self.max_reading_bytes:
            self._refused.append(request)
            return
        keys, first = request.fetch_keys, request.fetch_first
        heat = dict(zip(keys, request.heat[first:] + [0.0] * len(keys)))
        self._reading.append(request)
        request.fetch = self.stack.fetch(
            sorted(keys, key=lambda key: -heat[key]),  # hot blocks first, states last
            timeout_s=FETCH_SECONDS + FETCH_SECONDS_PER_BYTE * (reading + request.fetch_bytes),
        )
        request.fetch_state = "pending"
        self.counts["fetches"] += 1

    def poll(self, requests: Iterable[Request]) -> int:
        """Take what has been read, and return how many reads ended. One is done where it is done on every rank, and failed
        where it failed on one."""
        self._forget_lost()
        requests = list(requests)
        pending = [r for r in requests if r.fetch_state == "pending"]
        done = self.agreement.least([int(r.fetch.done()) for r in pending])
        ready = [request for request, is_done in zip(pending, done) if is_done]
        for request in [r for r in ready if not r.fetch_keys]:
            self._answered(request)
        ready = [request for request in ready if request.fetch_state == "pending"]
        reasons = [list(r.fetch.failures.values()) for r in ready]
        # 1: something was not read; 2: a tier did not answer in time.
        failed = self.agreement.most([2 if "timeout" in found else int(bool(found)) for found in reasons])
        for request, found, severity in zip(ready, reasons, failed):
            request.fetch_state = "ready"
            self.counts.update(f"miss_{reason}" for reason in found)
            self.stack.lost.extend(request.fetch.failures)
            if severity == 2:  # no second wait for a tier that hangs
                request.missed_positions.update(self._positions(request))
            if severity:
                self._give_up(request)
        self._reading = [r for r in requests if r.fetch_state in ("pending", "ready")]
        self._make_room()
        return sum(done)

    def _reading_bytes(self) -> int:
        return sum(r.fetch_bytes for r in self._reading if r.fetch_state in ("pending", "ready"))

    def _make_room(self) -> None:
        """Whoever was refused takes the room of those after it whose reads are done: they might wait for it."""
        refused, self._refused = sorted(self._refused, key=_turn), []
        for request in refused:
            behind = [r for r in self._reading if r.fetch_state == "ready" and _turn(r) > _turn(request)]
            for other in sorted(behind, key=_turn, reverse=True):
                if request.fetch_state == "absent":
                    self.cancel(other)
                    other.reuse_version = -1
                    self.prefetch(request)

    def pause(self, requests: Iterable[Request]) -> None:
        """For a step with nothing to run: where a read is under way, wait a little for news of it."""
        if any(r.fetch_state == "pending" for r in requests):
            self.stack.wait_for_news(PAUSE_SECONDS)

    def _give_up(self, request: Request) -> None:
        """That position is not to be had: a shallower one may be."""
        request.missed_positions.add(request.fetch_position)
        self.cancel(request)
        request.reuse_version = -1

    def cancel(self, request: Request) -> None:
        if request.fetch is not None:
            request.fetch.cancel()
        request.fetch, request.fetch_keys, request.fetch_state, request.fetch_bytes = None, [], "none", 0

    def install(
        self, request: Request, new_slot: Callable[[], int | None], new_block: Callable[[], int | None]
    ) -> None:
        """Put what was fetched into the index. Where memory is short nothing changes, and the next admission tries again."""
        position, first = request.fetch_position, request.fetch_first
        match = self.index.match(request.root, request.tokens)
        # Another request has brought it back meanwhile, or what lay on the device has been evicted since: look again.
        if match.position >= position or match.position < first * self.block_size:
            self.cancel(request)
            request.reuse_version = -1
            return
        held = [node.block for node in match.path[:first]]  # whole ones: none may go on otherwise than the request
        for block in held:
            self.pool.share_block(block)
        slot = new_slot()
        while slot is not None and len(held) * self.block_size < position:
            added = new_block()
            if added is None:
                self.pool.free_slot(slot)
                slot = None
            else:
                held.append(added)
        if slot is not None:
            reason = self._write(request, held[first:], slot)
            if self.agreement.most([int(bool(reason))])[0]:  # on one rank: then no rank has it
                self.counts[f"miss_{reason or 'elsewhere'}"] += 1
                self.pool.free_slot(slot)
                self._give_up(request)
            else:
                restored = Snapshot(position, slot, is_end=True)
                self.counts["restored_tokens"] += position - request.reuse
                request.restored = Counter()
                for block, name in enumerate(request.fetch_keys[: len(held) - first], start=first):
                    tokens = min((block + 1) * self.block_size, position) - max(block * self.block_size, request.reuse)
                    request.restored[request.fetch.sources[name]] += tokens
                self.index.publish(request.root, request.tokens[:position], held, [restored])
                nodes = {_block_name(n.key): n for n in self.index.match(request.root, request.tokens).path[first:]}
                self.known.update({name: nodes.get(name, restored) for name in request.fetch_keys})
                self.cancel(request)
        for block in held:
            self.pool.free_block(block)

    def _write(self, request: Request, blocks: list[int], slot: int) -> str:
        """Copy what was fetched into memory; returns why that cannot be used, "" where it can."""
        names, fetched = iter(request.fetch_keys), request.fetch.results
        try:
            for block in blocks:
                self.pools.write_block(self.pool.places[block], fetched[next(names)])
            for heads in self.slices:
                self.pools.write_slot(slot, heads, fetched[next(names)])
            return "" if self.pools.is_finite(slot) else "damaged"
        except (KeyError, ValueError):  # of another shape, whatever its name
            return "foreign"
        except RuntimeError:  # a copy that failed
            return "io"

    def close(self, entries: Iterable[Evicted], timeout: float = CLOSE_SECONDS) -> None:
        """Store what is left where a tier outlives this process, for at most `timeout` seconds, and end the threads."""
        deadline = time.monotonic() + timeout
        if self.stack.shared_index is not None:
            self._tier_index, self._wait_until = self.stack.shared_index, deadline
            *nearer, shared = self.stack.tiers[: self.stack.shared_index + 1]
            if not all(may_hold(shared, tier.codec) for tier in nearer):  # what lies there ends with it
                self.known.clear()
            for entry in entries:
                self.save(entry)
                if time.monotonic() >= deadline:
                    break
        self.stack.close(max(deadline - time.monotonic(), 0.0))

    def stats(self) -> dict[str, Any]:
        return {**self.counts, "by_tier": self.stack.stats()}


def _turn(request: Request) -> tuple[int, int]:
    return -request.priority, request.rid


def _key_in(node: Node, position: int) -> bytes:
    if position == node.end:
        return node.key
    assert node.parent is not None
    return chain(node.parent.key, node.tokens[: position - node.start])


def _block_name(key: bytes) -> str:
    return f"{key.hex()}-b"


def _slice_name(key: bytes, heads: tuple[int, int]) -> str:
    return f"{key.hex()}-s-{heads[0]}-{heads[1]}"
