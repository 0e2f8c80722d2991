"""Copies between the engine and its tiers, in threads: reads ahead, writes behind, demotion from tier to tier.

Nothing here blocks the caller on a tier, except `flush`, `close` and a `store` that is told to wait; `find` looks into near
tiers, but reads nothing, and far ones are asked in a thread. What goes wrong in a thread is counted and becomes a key's
failure or a lost entry, never an exception in the engine's step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from kimi_k3.engine.tier_format import EXACT, LossyCodec, Payload, TierError, payload_bytes
from kimi_k3.engine.tiers import HostTier, Tier
from kimi_k3.preflight import available_memory

READ_THREADS = 2
FETCH_SECONDS = 10.0  # a read that takes longer is given up; where no thread comes back from one, the tier hangs
GRACE_S = 1.0  # that threads get to end in, all together
ASK_SECONDS = 0.25  # a far tier that has not said by then whether it has something has not
logger = logging.getLogger(__name__)


class Fetch:
    """What is got in threads, key by key. All methods return at once; once done, nothing changes any more.

    results: key -> payload.     failures: key -> "absent", "damaged", "foreign", "io", "timeout" or "cancelled".
    sources: key -> name of the tier that the payload lay in.
    """

    def __init__(
        self, stack: TierStack, keys: Sequence[str], get: Callable[[_Read, bool], tuple[Any, str]], timeout_s: float
    ) -> None:
        self._stack, self._get, self._deadline = stack, get, time.monotonic() + timeout_s
        self._open = dict.fromkeys(keys)  # without an outcome
        self.results: dict[str, Any] = {}
        self.failures: dict[str, str] = {}
        self.sources: dict[str, str] = {}

    def done(self) -> bool:
        """Whether every key has a result or a failure; after the deadline what has none fails with "timeout"."""
        with self._stack._changed:
            if time.monotonic() >= self._deadline:
                self._fail("timeout", *self._open)
            return not self._open

    def cancel(self) -> None:
        """Fail what has no outcome yet, and let go of the results."""
        with self._stack._changed:
            self._fail("cancelled", *self._open)
            self.results = {}

    def _fail(self, reason: str, *keys: str) -> None:  # with the stack's lock held
        for key in keys:
            del self._open[key]
            self.failures[key] = reason
            self._stack._counts[f"failed_{reason}"] += 1
        self._stack._changed.notify_all()

    def _run(self, read: _Read, is_near: bool) -> None:
        """In a thread: get one key, unless that is no longer wanted; is_near: not from what may hang."""
        key = read.key
        if self.done() or key not in self._open:
            return
        start = time.monotonic()
        try:
            result, reason = self._get(read, is_near)
        except Exception:
            logger.exception("tiers: could not read %s", key)
            result, reason = None, "io"
        with self._stack._changed:
            self._stack._counts["read_us"] += int((time.monotonic() - start) * 1e6)
            if self.done() or key not in self._open:  # cancelled or too late
                return
            if reason and is_near and self._stack._may_read_on():
                self._stack._reads.append(read._replace(first=self._stack.num_near, reason=reason))
                self._stack._changed.notify_all()
            elif reason:
                self._fail("timeout" if is_near and self._stack._hangs() else reason, key)
            else:
                del self._open[key]
                self.results[key] = result
                self._stack._changed.notify_all()


class _Read(NamedTuple):
    fetch: Fetch
    key: str
    first: int = 0  # of the tiers that are left to look into
    reason: str = "absent"  # why it was not got from those before


class _Write(NamedTuple):
    payload: Payload
    ready: Callable[[], None] | None = None
    codec: LossyCodec = EXACT  # that the bytes went through already

    @property
    def num_bytes(self) -> int:
        return payload_bytes(self.payload)

    def whole(self) -> Payload:
        """The payload, once its producer has finished."""
        if self.ready:
            self.ready()
        return self.payload


class TierStack:
    """Tiers from the nearest to the farthest, with threads that move entries between them and the engine.

    Args:
        tiers: nearest first, e.g. (HostTier(...), DiskTier(...), RemoteTier(...)). What a tier evicts or refuses goes to
            the next; what is read from a lower one is put into the first, too. Each once, and in use nowhere else; they are
            closed together with the stack.
        max_pending_bytes: bound on what waits to be written; one entry of any size may always wait. None: a 32nd of the
            memory that is free now, at least 1 GiB.
    shared_index: of the first tier that outlives this process; None where none does.
    lost: keys, oldest first, that were stored and are in no tier that this process knows of: a write that failed, an
        entry that left the last tier. Whoever needs to know takes them from it.
    An entry that waits to be written is found and fetched as if it had arrived. Entries of a lossy tier are never moved
    into a tier with another codec.
    Raises: ValueError for a tier that is in use, given twice or closed.
    """

    def __init__(self, tiers: Sequence[Tier], *, max_pending_bytes: int | None = None) -> None:
        if max_pending_bytes is None:
            max_pending_bytes = max(1 << 30, available_memory(torch.device("cpu")) // 32)
        self.tiers, self.max_pending_bytes = tuple(tiers), max_pending_bytes
        self.has_far = any(tier.is_far for tier in self.tiers)
        self.shared_index = next((i for i, tier in enumerate(self.tiers) if tier.is_shared), None)
        self.num_near = len(self.tiers) if self.shared_index is None else self.shared_index  # of those that cannot hang
        self.lost: deque[str] = deque()
        self._changed = threading.Condition(threading.RLock())  # guards all below; no tier is called with it held
        self._counts: Counter[str] = Counter()
        # All reads begin in the first queue, which one thread serves from the near tiers alone; what is not there goes on
        # to the second. So a tier that hangs delays nothing that lies in memory.
        self._near_reads: deque[_Read] = deque()
        self._reads: deque[_Read] = deque()
        self._reading_since: dict[int, float] = {}  # thread -> start of the read that it is in
        self._writes: OrderedDict[tuple[str, int], _Write] = OrderedDict()  # (key, tier) ->; the first is being written
        self._pending_bytes = 0
        self._is_closed = False
        for index, tier in enumerate(self.tiers):
            try:
                tier.take(partial(self._make_way, index=index))
            except ValueError:
                for earlier in self.tiers[:index]:
                    earlier.on_evict = None
                raise
        self._threads = [threading.Thread(target=self._write_loop, name="kimi_k3-tiers_write_loop", daemon=True)]
        self._threads += [
            threading.Thread(target=self._read_loop, args=(number,), name="kimi_k3-tiers_read_loop", daemon=True)
            for number in range(READ_THREADS + 1)
        ]
        for thread in self._threads:
            thread.start()

    def find(self, keys: Sequence[str]) -> int | None:
        """The place in `keys` of the first that a near tier has, or that any tier is about to have; None if there is none.

        While every read has been stuck for FETCH_SECONDS, shared tiers are taken to have nothing.
        """
        return self._first(keys, is_far=False)[0]

    def ask(self, keys: Sequence[str], timeout_s: float = ASK_SECONDS) -> Fetch:
        """`find` in far tiers, ahead of all reads: results {"": what `find` would return}, or failures {"": reason}."""
        fetch = Fetch(self, [""], lambda *_: self._first(keys, is_far=True), timeout_s)
        return self._begin(fetch, self._reads.extendleft)

    def fetch(self, keys: Sequence[str], *, timeout_s: float) -> Fetch:
        """Begin to read `keys`, in this order; after `timeout_s` what is left fails with "timeout"."""
        fetch = Fetch(self, keys, self._read, timeout_s)
        return self._begin(fetch, self._near_reads.extend)

    def _begin(self, fetch: Fetch, queue: Callable[[list[_Read]], None]) -> Fetch:
        with self._changed:
            if self._is_closed:
                fetch._fail("cancelled", *fetch._open)
            queue([_Read(fetch, key) for key in fetch._open])
            self._changed.notify_all()
        return fetch

    def _first(self, keys: Sequence[str], is_far: bool) -> tuple[int | None, str]:
        """The place in `keys` of the first that is there, and the reason if some tier could not be asked."""
        found, reason, hangs = len(keys), "", self._hangs()
        for index, tier in enumerate(self.tiers):
            with self._changed:
                found = next((place for place in range(found) if (keys[place], index) in self._writes), found)
            try:
                if tier.is_far == is_far and not (tier.is_shared and hangs):
                    found = [*tier.contains_each(keys[:found]), True].index(True)
            except TierError as error:
                reason = error.reason
        return (found, "") if found < len(keys) else (None, reason)

    def store(
        self, key: str, payload: Payload, tier_index: int = 0, *, ready: Callable[[], None] | None = None,
        wait_s: float = 0.0,
    ) -> bool:  # fmt: skip
        """Queue an entry to be written; False if the queue is closed, or still full after `wait_s`.

        Args:
            payload: owned by the stack from now on.
            ready: called in threads before any byte is read, perhaps more than once, and may block: the `synchronize` of
                an event recorded after the copy from the device. Until it returns the bytes are taken to be unwritten.
        """
        return self._enqueue(key, tier_index, _Write(payload, ready), "refused", wait_s)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything queued is written (or failed), demotions too. False if `timeout` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._writes, timeout)

    def wait_for_news(self, timeout: float) -> None:
        """Wait until something is read, written or asked for, at most `timeout` seconds."""
        with self._changed:
            self._changed.wait(timeout)

    def stats(self) -> dict[str, dict[str, int]]:
        """Counts by tier name, and under "transfers" those of the stack itself; `*_us` are microseconds."""
        with self._changed:
            own = {**self._counts, "pending_writes": len(self._writes), "pending_bytes": self._pending_bytes}
        return {tier.name: tier.stats() for tier in self.tiers} | {"transfers": own}

    def close(self, timeout: float = 10.0) -> None:
        """Write what is queued, and what the tiers that end with the process hold, to one that outlives it, for at most
        `timeout` seconds in all; drop the rest (counted), end the threads, which get a second for it, and the tiers.
        """
        if self._is_closed:
            return
        deadline = time.monotonic() + timeout
        self.flush(timeout)
        for index, tier in enumerate(self.tiers[: self.shared_index or 0]):
            for key in tier.recent() if isinstance(tier, HostTier) else ():
                self._demote(key, index, max(deadline - time.monotonic(), 0.0))
            self.flush(max(deadline - time.monotonic(), 0.0))
        with self._changed:
            self._is_closed = True
            for reads in (self._near_reads, self._reads):
                for read in reads:
                    read.fetch._fail("cancelled", *read.fetch._open)
                reads.clear()
            dropped = list(self._writes)[1:]
            self._counts["dropped"] += len(dropped)
            for place in dropped:
                self._pending_bytes -= self._writes.pop(place).num_bytes
            self._changed.notify_all()
        deadline = max(deadline, time.monotonic() + GRACE_S)
        for thread in self._threads:  # a thread that hangs in a tier is a daemon: it cannot keep the process
            thread.join(max(deadline - time.monotonic(), 0.0))
        for tier in self.tiers:
            tier.close()

    # In the threads.

    def _count(self, name: str, number: int) -> None:
        with self._changed:
            self._counts[name] += number

    def _enqueue(self, key: str, index: int, write: _Write, if_full: str, wait_s: float = 0.0) -> bool:
        """Queue a write; False if there is no room, which is counted under `if_full`."""

        def may_go() -> bool:
            is_full = self._pending_bytes and self._pending_bytes + write.num_bytes > self.max_pending_bytes
            return (key, index) in self._writes or not is_full

        with self._changed:
            has_room = self._changed.wait_for(may_go, wait_s)
            if (key, index) in self._writes:  # the same content is on its way
                return True
            if not has_room or self._is_closed:
                self._counts[if_full] += 1
                return False
            self._writes[key, index] = write
            self._pending_bytes += write.num_bytes
            self._changed.notify_all()
            return True

    def _make_way(self, key: str, index: int) -> None:
        """Tier `index` evicts an entry: it goes to the next one, lies below already, or is lost."""
        if self._demote(key, index):
            return
        for lower in self.tiers[index + 1 :]:
            with suppress(TierError):  # counted by the tier
                if lower.contains(key):
                    return
        self.lost.append(key)

    def _demote(self, key: str, index: int, wait_s: float = 0.0) -> bool:
        """Queue an entry of tier `index` for the next one, unless that would pass a lossy entry off as another."""
        tier, is_queued = self.tiers[index], False
        with suppress(TierError):  # counted by the tier
            payload = tier.read(key) if any(may_hold(lower, tier.codec) for lower in self.tiers[index + 1 :]) else None
            if payload:
                is_queued = self._enqueue(key, index + 1, _Write(payload, codec=tier.codec), "dropped", wait_s)
        self._count("demoted", is_queued)
        return is_queued

    def _write_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._writes or self._is_closed)
                if not self._writes:
                    return
                (key, index), write = next(iter(self._writes.items()))
            is_stored = False
            try:
                is_stored = self._write(key, index, write)
            except Exception:
                logger.exception("tiers: could not store %s", key)
            if not is_stored:
                self.lost.append(key)
            with self._changed:
                del self._writes[key, index]
                self._pending_bytes -= write.num_bytes
                self._counts["stored" if is_stored else "failed_writes"] += 1
                self._counts["stored_bytes"] += write.num_bytes if is_stored else 0
                self._changed.notify_all()

    def _write(self, key: str, index: int, write: _Write) -> bool:
        """Into its tier, or where that refuses or fails, into the next one down."""
        payload = write.whole()
        for tier in self.tiers[index:]:
            with suppress(TierError):  # counted by the tier
                if may_hold(tier, write.codec) and tier.put(key, payload):
                    return True
        return False

    def _hangs(self) -> bool:
        """Whether all threads that read from every tier have been in one read each for FETCH_SECONDS."""
        with self._changed:
            since = self._reading_since.values()
            return len(since) == READ_THREADS and max(since) < time.monotonic() - FETCH_SECONDS

    def _may_read_on(self) -> bool:
        """Whether what is not near may be looked for in the other tiers."""
        return self.num_near < len(self.tiers) and not self._is_closed and not self._hangs()

    def _read_loop(self, number: int) -> None:
        """Number 0 serves the first queue alone, the others the second one before it."""
        queues = (self._reads, self._near_reads) if number else (self._near_reads,)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: any(queues) or self._is_closed)
                queue = next(filter(None, queues), None)
                if queue is None:
                    return
                read = queue.popleft()
                if number:
                    self._reading_since[number] = time.monotonic()
            read.fetch._run(read, is_near=not number)
            with self._changed:
                self._reading_since.pop(number, None)

    def _read(self, read: _Read, is_near: bool) -> tuple[Payload | None, str]:
        """(payload, reason if there is none): of each tier first what waits to be written there, which is in memory."""
        key, reason, sources = read.key, read.reason, read.fetch.sources
        for index, tier in enumerate(self.tiers[read.first :], read.first):
            with self._changed:
                write = self._writes.get((key, index))
            if is_near and not write and index >= self.num_near:
                continue
            try:
                payload = write.whole() if write else tier.get(key)
            except TierError as error:
                reason = error.reason
                continue
            if payload is None:
                continue
            is_better_near = index > 0 and not write and may_hold(self.tiers[0], tier.codec)
            is_promoted = is_better_near and self._enqueue(key, 0, _Write(payload, codec=tier.codec), "dropped")
            self._count("promoted", is_promoted)
            self._count("fetched_bytes", payload_bytes(payload))
            sources[key] = tier.name
            return payload, ""
        return None, reason


def may_hold(tier: Tier, codec: LossyCodec) -> bool:
    """Whether bytes that went through `codec` may lie in `tier` under its keys."""
    return codec in (EXACT, tier.codec)
