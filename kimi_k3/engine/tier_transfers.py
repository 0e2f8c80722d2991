"""Copies between the engine and its tiers, in threads: reads ahead, writes behind, demotion from tier to tier.

Nothing here blocks the caller on a tier, except `Fetch.wait`, `flush` and `close`; `find` looks into near tiers, but reads
nothing, and far ones are asked in a thread. What goes wrong in a thread is counted and becomes a key's failure, never an
exception in the engine's step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kimi_k3.engine.tier_format import LossyCodec, Payload, TierError, check_key, check_payload, payload_bytes
from kimi_k3.engine.tiers import HostTier, Tier
from kimi_k3.preflight import available_memory

EXACT = LossyCodec()
ASK_SECONDS = 0.25  # a far tier that has not said by then whether it has something has not
logger = logging.getLogger(__name__)


class Fetch:
    """Entries being read. All methods return at once but `wait`; the caller ends with `results` or `cancel`.

    failures: key -> "absent", "damaged", "foreign", "io", "timeout" or "cancelled".
    lossy_keys: keys of results that came through a lossy tier.
    """

    def __init__(self, stack: TierStack, keys: Sequence[str], timeout_s: float | None) -> None:
        self._stack = stack
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._queue = deque(dict.fromkeys(keys))  # not yet begun
        self._open = set(self._queue)  # without an outcome
        self._results: dict[str, Payload] = {}
        self._held_bytes = 0  # of results, until the caller has taken them
        self._has_waiter = False
        self.failures: dict[str, str] = {}
        self.lossy_keys: set[str] = set()

    def done(self) -> bool:
        """Whether every key has a result or a failure."""
        with self._stack._changed:
            self._expire()
            return not self._open

    def wait(self, timeout: float | None = None) -> bool:
        """Block until done, at most `timeout` seconds; returns `done()`. Reading goes on after a False."""
        start = time.monotonic()
        with self._stack._changed:
            self._has_waiter = True
            self._stack._changed.notify_all()
            while self._open:
                self._expire()
                ends = [
                    end for end in (self._deadline, None if timeout is None else start + timeout) if end is not None
                ]
                left = min(ends) - time.monotonic() if ends else None
                if not self._open or (left is not None and left <= 0):
                    break
                self._stack._changed.wait(left)
            self._has_waiter = False
            self._stack._counts["waited_us"] += int((time.monotonic() - start) * 1e6)
            return not self._open

    def cancel(self) -> None:
        """Fail what has no outcome yet, and let go of the results."""
        with self._stack._changed:
            self._fail_open("cancelled")
            self._results = {}
            self._release()

    def results(self) -> dict[str, Payload]:
        """What has been read so far. Once done, this hands the results over. They are to be read, never written."""
        with self._stack._changed:
            self._expire()
            results = dict(self._results)
            if not self._open:
                self._release()
            return results

    # The rest is called with the stack's lock held.

    def _expire(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._fail_open("timeout")

    def _fail_open(self, reason: str) -> None:
        self.failures.update(dict.fromkeys(self._open, reason))
        self._stack._counts[f"failed_{reason}"] += len(self._open)
        self._open.clear()
        self._queue.clear()
        self._settle()

    def _settle(self) -> None:
        """After an outcome: wake who waits, and forget a fetch that ended with nothing to take."""
        if not self._open and not self._held_bytes:
            self._release()
        self._stack._changed.notify_all()

    def _release(self) -> None:
        self._stack._held_bytes -= self._held_bytes
        self._held_bytes = 0
        if self in self._stack._fetches:
            self._stack._fetches.remove(self)
        self._stack._changed.notify_all()


class Question:
    """Which of some keys a far tier has. All methods return at once.

    found: once done, the place in `keys` of the first that is there, or None.     failure: "", "io" or "timeout".
    """

    def __init__(self, stack: TierStack, keys: Sequence[str], timeout_s: float) -> None:
        self._stack, self.keys = stack, list(keys)
        self._deadline = time.monotonic() + timeout_s
        self._is_done = False
        self.found: int | None = None
        self.failure = ""

    def done(self) -> bool:
        with self._stack._changed:
            if time.monotonic() >= self._deadline:
                self._settle(None, "timeout")
            return self._is_done

    def cancel(self) -> None:
        with self._stack._changed:
            self._settle(None, "")

    def _settle(self, found: int | None, failure: str) -> None:  # with the stack's lock held
        if not self._is_done:
            self._is_done, self.found, self.failure = True, found, failure
            if failure:
                self._stack._counts[f"asks_{failure}"] += 1


@dataclass
class _Write:
    key: str
    tier_index: int
    num_bytes: int
    make: Callable[[], Payload] | None
    payload: Payload | None = None
    ready: Callable[[], None] | None = None
    released: Callable[[], None] | None = None
    codec: LossyCodec = EXACT  # that the bytes went through already
    lock: threading.Lock = field(default_factory=threading.Lock)
    error: Exception | None = None

    def read(self) -> Payload:
        """The payload, once its producer has finished: `ready`, then `make`, each once, then `released`."""
        with self.lock:
            if self.error:
                raise self.error
            try:
                self._wait_for_producer()
                if self.payload is None:
                    assert self.make is not None
                    self.payload = self.make()
                check_payload(self.payload)
            except Exception as error:
                self.error = error
                raise
            finally:
                self._release()
            return self.payload

    def drop(self) -> None:
        """Give the source back unread, though not while its producer may still copy from it."""
        with self.lock:
            try:
                if self.released:
                    self._wait_for_producer()
            finally:
                self._release()

    def _wait_for_producer(self) -> None:
        ready, self.ready = self.ready, None
        if ready:
            ready()

    def _release(self) -> None:
        released, self.released = self.released, None
        if released:
            released()


class TierStack:
    """Tiers from the nearest to the farthest, with threads that move entries between them and the engine.

    Args:
        tiers: nearest first, e.g. (HostTier(...), DiskTier(...), RemoteTier(...)). What a tier evicts or refuses goes to
            the next. Closed together with the stack.
        max_pending_bytes: bound on what waits to be written, and apart from that on what was read and not yet taken; one
            entry of any size may always wait. None: a 32nd of the memory that is free now, at least 1 GiB.
        promote: put what was found in a lower tier into the first, too, where that is exact.
    An entry that waits to be written is found and fetched as if it had arrived. Entries of a lossy tier are never moved
    into a tier with another codec.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        read_threads: int = 2,
        write_threads: int = 1,
        max_pending_bytes: int | None = None,
        promote: bool = True,
    ) -> None:
        if max_pending_bytes is None:
            max_pending_bytes = max(1 << 30, available_memory(torch.device("cpu")) // 32)
        if read_threads < 1 or write_threads < 1 or max_pending_bytes < 1:
            raise ValueError(f"TierStack: want >= 1, got {read_threads=}, {write_threads=}, {max_pending_bytes=}")
        self.tiers = tuple(tiers)
        self._max_pending_bytes, self._promote = max_pending_bytes, promote
        self._changed = threading.Condition()  # guards all below; no tier is called with it held
        self._counts: Counter[str] = Counter()
        self._writes: deque[_Write] = deque()
        self._pending: dict[tuple[str, int], _Write] = {}  # what a read finds there: queued or being written
        self._pending_writes = self._pending_bytes = 0
        self._questions: deque[Question] = deque()
        self._fetches: list[Fetch] = []  # oldest first, until taken or cancelled
        self._held_bytes = 0
        self._is_closed = self._is_stopped = False
        for index, tier in enumerate(self.tiers[:-1]):
            tier.on_evict = lambda key, read, index=index: self._demote(index, key, read)
        self._threads = [
            threading.Thread(target=target, name=f"kimi_k3-tiers-{target.__name__[1:]}-{number}", daemon=True)
            for target, count in ((self._read_loop, read_threads), (self._write_loop, write_threads))
            for number in range(count if self.tiers else 0)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def has_far(self) -> bool:
        return any(tier.is_far for tier in self.tiers)

    def find(self, keys: Sequence[str]) -> int | None:
        """The place in `keys` of the first that a near tier has, or that any tier is about to have; None if there is none."""
        for place, key in enumerate(keys):
            check_key(key)
            for index, tier in enumerate(self.tiers):
                with self._changed:
                    is_pending = (key, index) in self._pending
                try:
                    if is_pending or (not tier.is_far and tier.contains(key)):
                        return place
                except TierError:  # counted by the tier, which then has not
                    continue
        return None

    def ask(self, keys: Sequence[str], timeout_s: float = ASK_SECONDS) -> Question:
        """Begin to ask the far tiers for the first of `keys` that they have."""
        question = Question(self, keys, timeout_s)
        with self._changed:
            if self._is_closed or not self.has_far:
                question._settle(None, "")
            else:
                self._counts["asked"] += 1
                self._questions.append(question)
                self._changed.notify_all()
        return question

    def fetch(self, keys: Sequence[str], *, timeout_s: float | None = None) -> Fetch:
        """Begin to read `keys`, in this order; after `timeout_s` what is left fails with "timeout".

        Reads pause while results that nobody took weigh `max_pending_bytes`, except for the oldest fetch and for one
        that is waited for.
        """
        for key in keys:
            check_key(key)
        fetch = Fetch(self, keys, timeout_s)
        with self._changed:
            if self._is_closed or not self.tiers:
                fetch._fail_open("cancelled" if self._is_closed else "absent")
            else:
                self._fetches.append(fetch)
                self._changed.notify_all()
        return fetch

    def store(
        self,
        key: str,
        payload: Payload | Callable[[], Payload],
        tier_index: int = 0,
        *,
        num_bytes: int | None = None,
        ready: Callable[[], None] | None = None,
        released: Callable[[], None] | None = None,
    ) -> bool:
        """Queue an entry to be written; returns at once, False if the queue is full or closed (then nothing is called).

        Args:
            payload: owned by the stack from now on, or what makes it, called once in a thread (then `num_bytes`, its
                size, is needed).
            ready: called in the thread before any byte is read, and may block: the `synchronize` of an event recorded
                after the copy from the device. Until it returns the bytes are taken to be unwritten.
            released: called in a thread once the source of the bytes may be reused, also after a failure.
        """
        check_key(key)
        if not 0 <= tier_index < max(len(self.tiers), 1):
            raise ValueError(f"tier_index: want 0..{len(self.tiers) - 1}, got {tier_index}")
        if not callable(payload):
            check_payload(payload)
            write = _Write(key, tier_index, payload_bytes(payload), None, payload, ready, released)
        elif num_bytes is None:
            raise ValueError("num_bytes: want the size of a payload that is made later")
        else:
            write = _Write(key, tier_index, num_bytes, payload, None, ready, released)
        return self._enqueue(write, "refused")

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything queued is written (or failed), demotions too. False if `timeout` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending_writes, timeout)

    def wait_for_news(self, timeout: float) -> None:
        """Wait until something is read, written or asked for, at most `timeout` seconds."""
        with self._changed:
            self._changed.wait(timeout)

    def stats(self) -> dict[str, dict[str, int]]:
        """Counts by tier name, and under "transfers" those of the stack itself; `*_us` are microseconds."""
        with self._changed:
            transfers = dict(self._counts)
            transfers |= {"pending_writes": self._pending_writes, "pending_bytes": self._pending_bytes}
            transfers |= {"fetches": len(self._fetches), "held_bytes": self._held_bytes}
        return {tier.name: tier.stats() for tier in self.tiers} | {"transfers": transfers}

    def close(self, timeout: float = 10.0) -> None:
        """Write what is queued, and what the tiers that end with the process hold, to those that outlive it, for at most
        `timeout` seconds in all; drop the rest (counted), end the threads and the tiers.
        """
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True  # nothing new comes in, except demotions
            self._questions.clear()
            for fetch in list(self._fetches):
                fetch._fail_open("cancelled")
            self._changed.notify_all()
        deadline = time.monotonic() + timeout
        self.flush(timeout)
        self._hand_down(deadline)
        self.flush(max(deadline - time.monotonic(), 0.0))
        with self._changed:
            dropped, self._is_stopped = list(self._writes), True
            self._writes.clear()
            self._counts["dropped"] += len(dropped)
            self._changed.notify_all()
        for write in dropped:
            self._finish(write)
        for thread in self._threads:  # a thread that hangs in a tier is a daemon: it cannot keep the process
            thread.join(max(deadline - time.monotonic(), 1.0))
        for tier in self.tiers:
            tier.on_evict = None
            tier.close()

    def _hand_down(self, deadline: float) -> None:
        """Demote what a host tier holds if something below outlives it, the most recently used first."""
        for index, tier in enumerate(self.tiers[:-1]):
            if isinstance(tier, HostTier) and any(below.is_shared for below in self.tiers[index + 1 :]):
                keys = tier.keys()
                for done, key in enumerate(keys):
                    left = max(deadline - time.monotonic(), 0.0)
                    with self._changed:  # room in the queue, as nobody else waits for it now
                        is_full = not self._changed.wait_for(
                            lambda: 2 * self._pending_bytes <= self._max_pending_bytes, left
                        )
                        if is_full or not left:
                            self._counts["dropped"] += len(keys) - done
                            return
                    self._demote(index, key, lambda key=key, tier=tier: tier.get(key))  # type: ignore[misc]

    def _enqueue(self, write: _Write, if_full: str) -> bool:
        """Queue a write; False if there is no room or no time left, which is counted under `if_full`."""
        place, has_source = (write.key, write.tier_index), write.ready or write.released
        with self._changed:
            if place in self._pending and not has_source:  # the same content is on its way
                return True
            is_late = self._is_stopped or (self._is_closed and if_full == "refused")
            is_full = self._pending_bytes and self._pending_bytes + write.num_bytes > self._max_pending_bytes
            if is_late or not self.tiers or is_full:
                self._counts[if_full] += 1
                return False
            self._pending.setdefault(place, write)
            self._pending_writes += 1
            self._pending_bytes += write.num_bytes
            self._writes.append(write)
            self._changed.notify_all()
            return True

    def _finish(self, write: _Write) -> None:
        try:
            write.drop()
        except Exception:
            logger.exception("tiers: the source of %s could not be given back", write.key)
        with self._changed:
            if self._pending.get((write.key, write.tier_index)) is write:
                del self._pending[write.key, write.tier_index]
            self._pending_writes -= 1
            self._pending_bytes -= write.num_bytes
            self._changed.notify_all()

    def _demote(self, index: int, key: str, read: Callable[[], Payload | None]) -> None:
        """What tier `index` evicts goes to the next one, unless that would pass a lossy entry off as another."""
        upper, lower = self.tiers[index], self.tiers[index + 1]
        if not _may_hold(lower, upper.codec):
            return
        try:
            if lower.contains(key) or (payload := read()) is None:
                return
        except TierError:  # counted by the tier
            return
        write = _Write(key, index + 1, payload_bytes(payload), None, payload, codec=upper.codec)
        if self._enqueue(write, "dropped"):
            with self._changed:
                self._counts["demoted"] += 1

    def _write_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._writes or self._is_stopped)
                if not self._writes:
                    return
                write = self._writes.popleft()
            try:
                self._write(write)
            except Exception as error:
                if not isinstance(error, TierError):
                    logger.exception("tiers: could not store %s", write.key)
                with self._changed:
                    self._counts["failed_writes"] += 1
            finally:
                self._finish(write)

    def _write(self, write: _Write) -> None:
        """Into its tier, or where that refuses or fails, into the next one down."""
        failure: TierError | None = None
        for tier in self.tiers[write.tier_index :]:
            if not _may_hold(tier, write.codec):
                continue
            try:
                if tier.contains(write.key) or tier.put(write.key, write.read()):
                    with self._changed:
                        self._counts["stored"] += 1
                        self._counts["stored_bytes"] += write.num_bytes
                    return
            except TierError as error:
                failure = error
        raise failure or TierError("full", f"{write.key}: no tier has room for {write.num_bytes} bytes")

    def _read_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._questions or self._next_fetch() or self._is_closed)
                question = self._questions.popleft() if self._questions else None
                fetch = None if question is not None else self._next_fetch()
                if fetch is not None:
                    key = fetch._queue.popleft()
            if question is not None:
                self._answer(question)
                continue
            if fetch is None:
                return
            start = time.monotonic()
            try:
                payload, reason, codec = self._read(key)
            except Exception:
                logger.exception("tiers: could not read %s", key)
                payload, reason, codec = None, "io", EXACT
            with self._changed:
                self._counts["read_us"] += int((time.monotonic() - start) * 1e6)
                fetch._expire()
                if key not in fetch._open:  # cancelled or too late
                    continue
                fetch._open.remove(key)
                if payload is None:
                    fetch.failures[key] = reason
                    self._counts[f"failed_{reason}"] += 1
                else:
                    size = payload_bytes(payload)
                    fetch._results[key] = payload
                    fetch._held_bytes += size
                    self._held_bytes += size
                    self._counts["fetched"] += 1
                    self._counts["fetched_bytes"] += size
                    if codec != EXACT:
                        fetch.lossy_keys.add(key)
                fetch._settle()

    def _answer(self, question: Question) -> None:
        found, failure = len(question.keys), ""
        for tier in self.tiers if not question.done() else ():
            try:
                if tier.is_far:
                    found = [*tier.contains_each(question.keys[:found]), True].index(True)
            except TierError as error:
                failure = error.reason
            except Exception:
                logger.exception("tiers: could not ask %s", tier.name)
                failure = "io"
        with self._changed:
            question._settle(found if found < len(question.keys) else None, failure)

    def _next_fetch(self) -> Fetch | None:
        """The oldest fetch with something to read, if there is room for the result."""
        is_full = self._held_bytes >= self._max_pending_bytes
        for fetch in self._fetches:
            if fetch._queue and (not is_full or fetch is self._fetches[0] or fetch._has_waiter):
                return fetch
        return None

    def _read(self, key: str) -> tuple[Payload | None, str, LossyCodec]:
        """(payload, reason if there is none, codec that it went through): first what waits to be written, then the tiers."""
        reason = "absent"
        for index, tier in enumerate(self.tiers):
            with self._changed:
                write = self._pending.get((key, index))
            try:
                if write is not None:
                    return write.read(), "", write.codec
                payload = tier.get(key)
            except TierError as error:
                reason = error.reason
                continue
            if payload is None:
                continue
            if index > 0 and self._promote and _may_hold(self.tiers[0], tier.codec):
                write = _Write(key, 0, payload_bytes(payload), None, payload, codec=tier.codec)
                if self._enqueue(write, "dropped"):
                    with self._changed:
                        self._counts["promoted"] += 1
            return payload, "", tier.codec
        return None, reason, EXACT


def _may_hold(tier: Tier, codec: LossyCodec) -> bool:
    """Whether bytes that went through `codec` may lie in `tier` under its keys."""
    return codec in (EXACT, tier.codec)
