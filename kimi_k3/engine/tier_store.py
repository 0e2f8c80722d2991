"""Between the prefix index and the tiers: what is evicted is stored, what a request misses is fetched and put back.

An entry is a latent block or some heads of a state, under the digest of all tokens up to its end. So a parked request, a
later turn and another process find the same entries, and whatever goes wrong with one is a counted miss and a recompute.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kimi_k3.engine.agreement import Agreement
from kimi_k3.engine.device_pools import DevicePools
from kimi_k3.engine.page_pool import PagePool
from kimi_k3.engine.prefix_index import Evicted, Node, PrefixIndex, Snapshot, chain
from kimi_k3.engine.request import Request
from kimi_k3.engine.tier_format import Payload
from kimi_k3.engine.tier_transfers import Question, TierStack

MAX_PROBES = 64  # positions of a prompt that are looked for in the tiers
CLOSE_SECONDS = 60.0
# A read that takes longer, all reads before it included, is given up: the tokens are computed.
FETCH_SECONDS = 10.0
FETCH_SECONDS_PER_BYTE = 1e-8
PAUSE_SECONDS = 0.005  # of a step that has nothing to run but waits for a read


class TierStore:
    """
    Args:
        tiers: nearest first.     pools, pool, index: the generator's.
    """

    def __init__(
        self, tiers: Sequence[Any], pools: DevicePools, pool: PagePool, index: PrefixIndex, agreement: Agreement
    ) -> None:
        self.agreement = agreement
        self.stack = TierStack(tiers)
        self.pools, self.pool, self.index = pools, pool, index
        self.block_size = pools.layout.block_size
        self.slices = pools.head_slices()
        self.counts: Counter[str] = Counter()
        self._tier_index = 0
        self._wait_until = 0.0  # for room in the queue
        self._reading_bytes = 0  # of the reads under way

    # Out: from the index to the tiers.

    def save(self, evicted: Evicted) -> None:
        """Store a snapshot and the blocks before it, where they are not stored yet. Copies first: the memory goes away.

        Where the queue refuses an entry the rest of the path is not stored: without it nothing could be restored.
        """
        snapshot = evicted.snapshot
        for node in evicted.path:
            is_whole = node.end <= snapshot.position  # else stored up to the snapshot's position
            if node.is_stored if is_whole else snapshot.is_stored:
                continue
            if not self._store_block(node, snapshot.position):
                return
            node.is_stored = node.is_stored or is_whole
        if not snapshot.is_stored:
            key = _key_in(evicted.node, snapshot.position)
            if snapshot.blocks:
                self.pools.stage_blocks([self.pool.places[block] for block in snapshot.blocks])
            for heads in self.slices:
                if not self._store(_slice_name(key, heads), self.pools.read_slot(snapshot.slot, heads)):
                    return
            snapshot.is_stored = True
            self.counts["stored_snapshots"] += 1

    def _store_block(self, node: Node, position: int) -> bool:
        """Queue a node's block, up to `position` at most."""
        end = min(node.end, position)
        payload = self.pools.read_block(self.pool.places[node.block], end - node.start)
        is_stored = self._store(_block_name(_key_in(node, end)), payload)
        self.counts["stored_blocks"] += is_stored
        return is_stored

    def _store(self, name: str, payload: Payload) -> bool:
        """Queue an entry; False where the queue is full. At the end, off any step, room in it is waited for."""
        while not self.stack.store(name, payload, self._tier_index):
            if not self.stack.flush(max(self._wait_until - time.monotonic(), 0.0)):
                self.counts["refused"] += 1
                return False
        return True

    # In: from the tiers to the index.

    def look_up(self, request: Request) -> None:
        """Find the deepest state in the tiers that lies beyond what the index has for a waiting request.

        A far tier is asked in a thread: until it answers, or is late, the request waits as for a read.
        """
        keys = self._keys(request)
        positions = [p for p in self._positions(request) if p not in request.missed_positions]
        names = [_slice_name(self._key_at(request, keys, p), self.slices[0]) for p in positions]
        near = self.stack.find(names)
        request.near_position = 0 if near is None else positions[near]
        if self.stack.has_far:
            far = {p: name for p, name in zip(positions[:near], names) if p not in request.asked_positions}
            if self.agreement.most([len(far)])[0]:  # on every rank, or on none
                request.asked_positions |= far.keys()
                request.far_positions, request.fetch = list(far), self.stack.ask(list(far.values()))
                request.fetch_state = "pending"
                return
        self._choose(request, request.near_position)

    def _positions(self, request: Request) -> list[int]:
        """Where a state may have been left, the deepest first."""
        limit = len(request.tokens) - 1
        edges = {b - shift for b in request.boundaries for shift in (0, 1)}
        edges.add(limit)
        near = range(limit // self.block_size * self.block_size, 0, -self.block_size)
        positions = sorted({p for p in edges if request.reuse < p <= limit}, reverse=True)[: MAX_PROBES // 2]
        positions += [p for p in near if p > request.reuse][: MAX_PROBES // 2]
        return sorted(set(positions), reverse=True)

    def _choose(self, request: Request, position: int) -> None:
        """The state at `position` is to be fetched; 0: none."""
        if self.agreement.least([position, -position]) != [position, -position]:  # not every rank finds the same
            position = 0
        if position <= request.reuse:
            self.cancel(request)
            return
        keys = self._keys(request)
        key = self._key_at(request, keys, position)
        first = request.reuse // self.block_size  # blocks before it are on the device
        names = [_block_name(keys[i]) for i in range(first, position // self.block_size)]
        if position % self.block_size:
            names.append(_block_name(key))
        request.fetch_keys = names + [_slice_name(key, heads) for heads in self.slices]
        request.fetch_position, request.fetch_first = position, first
        request.fetch_bytes = len(names) * self.pools.layout.block_bytes + self.pools.layout.slot_bytes
        request.fetch, request.fetch_state = None, "absent"

    def _keys(self, request: Request) -> list[bytes]:
        """Digests of the whole blocks of all tokens known."""
        keys = list(request.chain)
        for start in range(len(keys) * self.block_size, len(request.tokens) - self.block_size + 1, self.block_size):
            keys.append(chain(keys[-1] if keys else request.root, request.tokens[start : start + self.block_size]))
        return keys

    def _key_at(self, request: Request, keys: list[bytes], position: int) -> bytes:
        whole = position // self.block_size
        key = keys[whole - 1] if whole else request.root
        rest = request.tokens[whole * self.block_size : position]
        return chain(key, rest) if rest else key

    def prefetch(self, request: Request) -> None:
        if request.fetch_state == "absent":
            keys, first = request.fetch_keys, request.fetch_first
            heat = dict(zip(keys, request.heat[first:] + [0.0] * len(keys)))
            self._reading_bytes += request.fetch_bytes
            request.fetch = self.stack.fetch(
                sorted(keys, key=lambda key: -heat[key]),  # hot blocks first, states last
                timeout_s=FETCH_SECONDS + FETCH_SECONDS_PER_BYTE * self._reading_bytes,
            )
            request.fetch_state = "pending"
            self.counts["fetches"] += 1

    def poll(self, requests: Iterable[Request]) -> int:
        """Take what has been read, and return how many reads ended. One is done where it is done on every rank, and failed
        where it failed on one."""
        pending = [r for r in requests if r.fetch_state == "pending"]
        done = self.agreement.least([int(r.fetch.done()) for r in pending])
        ready = [request for request, is_done in zip(pending, done) if is_done]
        for request in [r for r in ready if isinstance(r.fetch, Question)]:
            question = request.fetch
            far = 0 if question.found is None else request.far_positions[question.found]
            if question.failure:
                self.counts[f"miss_{question.failure}"] += 1
            self._choose(request, max(far, request.near_position))
        ready = [request for request in ready if request.fetch_state == "pending"]
        for request in ready:
            request.fetch_state, request.fetched = "ready", request.fetch.results()
            self.counts.update(f"miss_{reason}" for reason in request.fetch.failures.values())
        failed = self.agreement.most([_severity(r.fetch.failures) for r in ready])
        for request, severity in zip(ready, failed):
            if severity == 2:  # no second wait for a tier that hangs
                request.missed_positions.update(self._positions(request))
            if severity:
                self._give_up(request)
        self._reading_bytes = sum(r.fetch_bytes for r in pending if r.fetch_state == "pending")
        return sum(done)

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
        request.fetch, request.fetch_keys, request.fetched = None, [], {}
        request.fetch_state, request.fetch_bytes = "none", 0

    def install(
        self, request: Request, new_slot: Callable[[], int | None], new_block: Callable[[], int | None]
    ) -> None:
        """Put what was fetched into the index. Where memory is short nothing changes, and the next admission tries again."""
        position, first = request.fetch_position, request.fetch_first
        match = self.index.match(request.root, request.tokens)
        if match.position >= position:  # another request brought it back meanwhile
            self.cancel(request)
            return
        if match.position < first * self.block_size:  # what lay on the device has been evicted since: look again
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
                restored = Snapshot(position, slot, is_end=True, is_stored=True)
                self.counts["restored_tokens"] += position - request.reuse
                self.index.publish(request.root, request.tokens[:position], held, [restored])
                self.cancel(request)
        for block in held:
            self.pool.free_block(block)

    def _write(self, request: Request, blocks: list[int], slot: int) -> str:
        """Copy what was fetched into memory; returns why that cannot be used, "" where it can."""
        names = iter(request.fetch_keys)
        try:
            for block in blocks:
                self.pools.write_block(self.pool.places[block], request.fetched[next(names)])
            for heads in self.slices:
                self.pools.write_slot(slot, heads, request.fetched[next(names)])
        except (KeyError, ValueError):  # of another shape, whatever its name
            return "foreign"
        except RuntimeError:  # a copy that failed
            return "io"
        return "" if self.pools.is_finite(slot) else "damaged"

    def close(self, entries: Iterable[Evicted], timeout: float = CLOSE_SECONDS) -> None:
        """Store what is left where a tier outlives this process, for at most `timeout` seconds, and end the threads."""
        deadline = time.monotonic() + timeout
        shared = next((i for i, tier in enumerate(self.stack.tiers) if tier.is_shared), None)
        if shared is not None:
            self._tier_index, self._wait_until = shared, deadline
            for entry in entries:
                self.save(entry)
                if time.monotonic() >= deadline:
                    break
        self.stack.close(max(deadline - time.monotonic(), 0.0))

    def stats(self) -> dict[str, Any]:
        return {**self.counts, "by_tier": self.stack.stats()}


def _severity(failures: Mapping[str, str]) -> int:
    """0: all was read; 1: something was not; 2: a tier did not answer in time."""
    return 2 if "timeout" in failures.values() else int(bool(failures))


def _key_in(node: Node, position: int) -> bytes:
    if position == node.end:
        return node.key
    assert node.parent is not None
    return chain(node.parent.key, node.tokens[: position - node.start])


def _block_name(key: bytes) -> str:
    return f"{key.hex()}-b"


def _slice_name(key: bytes, heads: tuple[int, int]) -> str:
    return f"{key.hex()}-s-{heads[0]}-{heads[1]}"
