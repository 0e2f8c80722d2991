"""The threads between the engine and its tiers: nothing blocks the caller, nothing is read before it is written."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tier_processes import entry, key, same, stored_files

from kimi_k3.engine import tier_transfers
from kimi_k3.engine.tier_format import TierError, payload_bytes
from kimi_k3.engine.tier_transfers import Fetch, TierStack
from kimi_k3.engine.tiers import DiskTier, HostTier

ENTRY_BYTES = payload_bytes(entry(0))
HOST_BYTES = 2240  # what the host tier takes for one entry, every tensor on a line of its own


class SlowHost(HostTier):
    """A tier that takes `seconds` a read or write, or waits for `gate`."""

    def __init__(self, read_seconds: float = 0.0, write_seconds: float = 0.0, limit: int = 1 << 20) -> None:
        super().__init__(limit)
        self.read_seconds, self.write_seconds = read_seconds, write_seconds
        self.gate = threading.Event()
        self.gate.set()

    def get(self, key):
        self.gate.wait()
        time.sleep(self.read_seconds)
        return super().get(key)

    def put(self, key, payload):
        self.gate.wait()
        time.sleep(self.write_seconds)
        return super().put(key, payload)


class BrokenHost(HostTier):
    """Fails with what it is given."""

    error: Exception = TierError("io", "broken")

    def get(self, *args):
        raise self.error

    put = contains_each = get


@pytest.fixture
def make() -> Iterator[Callable[..., TierStack]]:
    """Makes stacks; afterwards closes them and checks that no thread is left."""
    before, stacks = set(threading.enumerate()), []

    def stack(*tiers, **options):
        stacks.append(TierStack(tiers, **options))
        return stacks[-1]

    yield stack
    for one in stacks:
        for tier in one.tiers:
            if isinstance(tier, SlowHost):
                tier.gate.set()
        one.close()
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) - before == set()


def ask(stack: TierStack, numbers, timeout_s: float = 60.0) -> Fetch:
    return stack.fetch([key(number) for number in numbers], timeout_s=timeout_s)


def ended(fetch: Fetch, seconds: float = 10.0) -> bool:
    """Whether a fetch ends within so many seconds."""
    end = time.monotonic() + seconds
    while not fetch.done() and time.monotonic() < end:
        time.sleep(0.0005)
    return fetch.done()


def fetched(stack: TierStack, numbers) -> Fetch:
    fetch = ask(stack, numbers)
    assert ended(fetch)
    return fetch


def test_what_is_stored_comes_back(make, tmp_path):
    stack = make(HostTier(3 * HOST_BYTES), DiskTier(tmp_path, 1 << 20))
    assert all(stack.store(key(number), entry(number)) for number in range(20)) and stack.flush(10)
    fetch = fetched(stack, range(21))
    assert fetch.done() and fetch.failures == {key(20): "absent"}
    assert all(same(fetch.results[key(number)], entry(number)) for number in range(20))
    assert stack.flush(10)
    stats = stack.stats()
    assert stats["host"]["entries"] == 3 and stats["transfers"]["demoted"] >= 17
    assert stats["transfers"]["fetched_bytes"] == 20 * ENTRY_BYTES and not stack.lost


def test_find_names_the_first_key_that_is_there(make, tmp_path):
    host, disk = HostTier(1 << 20), DiskTier(tmp_path, 1 << 20)
    stack = make(host, disk)
    host.put(key(1), entry(1))
    disk.put(key(1), entry(1))
    disk.put(key(2), entry(2))
    assert stack.find([key(3), key(2), key(1)]) == 1 and stack.find([key(1)]) == 0 and stack.find([key(3)]) is None


def test_a_read_from_below_is_promoted(make, tmp_path):
    host, disk = HostTier(1 << 20), DiskTier(tmp_path, 1 << 20)
    stack = make(host, disk)
    disk.put(key(1), entry(1))
    fetched(stack, [1])
    assert stack.flush(5) and same(host.get(key(1)), entry(1))


def test_evicted_entries_sink_through_all_tiers(make, tmp_path):
    bottom = DiskTier(tmp_path / "bottom", 1 << 20)
    stack = make(HostTier(2 * HOST_BYTES), DiskTier(tmp_path / "top", 10_000), bottom)
    for number in range(30):
        assert stack.store(key(number), entry(number))
    assert stack.flush(10) and len(bottom._held) >= 20
    fetch = fetched(stack, range(30))
    assert not fetch.failures and all(same(fetch.results[key(number)], entry(number)) for number in range(30))


def test_too_big_for_the_host_goes_to_the_disk(make, tmp_path):
    stack = make(HostTier(100), DiskTier(tmp_path, 1 << 20))
    assert stack.store(key(1), entry(1)) and stack.flush(5)
    assert same(stack.tiers[1].get(key(1)), entry(1))
    small = make(HostTier(100))
    assert small.store(key(1), entry(1)) and small.flush(5) and small.stats()["transfers"]["failed_writes"] == 1
    assert list(small.lost) == [key(1)] and not stack.lost


# Whose a tier is


def test_a_tier_belongs_to_one_stack(make, tmp_path):
    host, disk = HostTier(1 << 20), DiskTier(tmp_path, 1 << 20)
    stack = make(host, disk)
    for tiers in ((host,), (HostTier(1 << 20), disk), (disk,)):
        with pytest.raises(ValueError, match=f"^{type(tiers[-1]).__name__}: want .* got one that is in use"):
            TierStack(tiers)
    assert stack.store(key(1), entry(1)) and stack.flush(5) and same(host.get(key(1)), entry(1))
    stack.close()
    for tier in (host, disk):
        with pytest.raises(ValueError, match=f"^{type(tier).__name__}: want .* got one that is closed"):
            TierStack([tier])


def test_a_tier_appears_once_and_a_refusal_leaves_it_free(make, tmp_path):
    host, closed = HostTier(1 << 20), HostTier(1 << 20)
    closed.close()
    for tiers, state in (((host, host), "given twice"), ((host, closed), "closed")):
        with pytest.raises(ValueError, match=f"^HostTier: want a tier that is open and free, got .*{state}"):
            TierStack(tiers)
    assert make(host).store(key(1), entry(1))


def test_two_stacks_share_a_folder(make, tmp_path):
    one, two = make(DiskTier(tmp_path, 1 << 20)), make(DiskTier(tmp_path, 1 << 20))
    assert one.store(key(1), entry(1)) and one.flush(5)
    assert same(fetched(two, [1]).results[key(1)], entry(1))
    two.close()
    assert same(fetched(one, [1]).results[key(1)], entry(1))


# Copies (faults.md 7.1, 5.4)


def test_no_byte_is_read_before_its_producer_is_done(make):
    """A slow copy from the device: the bytes are garbage until `ready` returns."""
    stack, copies = make(HostTier(1 << 20)), []
    for number in range(8):
        target = {name: torch.full_like(tensor, 77) for name, tensor in entry(number).items()}
        copied = threading.Event()

        def copy(number=number, target=target, copied=copied):
            time.sleep(0.02 * (number % 3 + 1))
            for name, tensor in entry(number).items():
                target[name].copy_(tensor)
            copied.set()

        assert stack.store(key(number), target, ready=copied.wait)
        copies.append(threading.Thread(target=copy))
        copies[-1].start()
    fetch = fetched(stack, range(8))  # begins while the copies run
    assert stack.flush(5)
    for thread in copies:
        thread.join()
    assert all(same(fetch.results[key(number)], entry(number)) for number in range(8))
    assert all(same(stack.tiers[0].get(key(number)), entry(number)) for number in range(8))


def test_a_copy_that_fails_publishes_nothing(make):
    stack = make(HostTier(1 << 20))

    def fail():
        raise RuntimeError("the device is lost")

    stack.store(key(1), entry(1), ready=fail)
    stack.store(key(2), {"a.b": torch.zeros(3)})  # no tier takes it
    stack.store(key(3), entry(3))
    assert stack.flush(5)
    assert [stack.find([key(number)]) is not None for number in (1, 2, 3)] == [False, False, True]
    assert stack.stats()["transfers"]["failed_writes"] == 2 and list(stack.lost) == [key(1), key(2)]


def test_an_entry_on_its_way_is_found_and_fetched(make):
    slow = SlowHost()
    stack = make(slow)
    slow.gate.clear()
    stack.store(key(1), entry(1))
    assert stack.find([key(1)]) == 0 and same(fetched(stack, [1]).results[key(1)], entry(1))
    assert not stack.flush(0.05)
    slow.gate.set()
    assert stack.flush(5)


# Bounds


def test_a_full_queue_refuses_at_once(make):
    slow = SlowHost()
    stack = make(slow, max_pending_bytes=3 * ENTRY_BYTES)
    slow.gate.clear()
    start = time.monotonic()
    accepted = [stack.store(key(number), entry(number)) for number in range(6)]
    assert time.monotonic() - start < 1.0 and accepted == [True] * 3 + [False] * 3
    stats = stack.stats()["transfers"]
    assert stats["refused"] == 3 and stats["pending_bytes"] == 3 * ENTRY_BYTES
    slow.gate.set()
    assert stack.flush(5) and stack.store(key(5), entry(5)) and stack.flush(5)
    assert [slow.contains(key(number)) for number in range(6)] == [True, True, True, False, False, True]


def test_a_full_queue_drops_demotions_and_counts_them(make):
    host, slow = HostTier(HOST_BYTES), SlowHost()
    stack = make(host, slow, max_pending_bytes=2 * ENTRY_BYTES)
    slow.gate.clear()
    for number in range(8):
        host.put(key(number), entry(number))  # evicts the one before
    assert stack.stats()["transfers"]["dropped"] == 5 and stack.stats()["transfers"]["demoted"] == 2
    assert list(stack.lost) == [key(number) for number in range(2, 7)]


def test_a_dropped_demotion_of_what_lies_below_is_no_loss(make, tmp_path):
    host, slow = HostTier(HOST_BYTES), SlowHost()
    slow.put(key(1), entry(1))
    stack = make(host, slow, max_pending_bytes=ENTRY_BYTES)
    slow.gate.clear()
    for number in range(4):
        host.put(key(number), entry(number))
    assert stack.stats()["transfers"]["dropped"] == 2 and list(stack.lost) == [key(2)]


def test_what_leaves_the_last_tier_is_lost(make):
    stack = make(HostTier(2 * HOST_BYTES))
    for number in range(5):
        stack.tiers[0].put(key(number), entry(number))
    assert list(stack.lost) == [key(0), key(1), key(2)]


def test_a_store_may_wait_for_room(make):
    slow = SlowHost()
    stack = make(slow, max_pending_bytes=ENTRY_BYTES)
    slow.gate.clear()
    assert stack.store(key(0), entry(0)) and not stack.store(key(1), entry(1), wait_s=0.05)
    threading.Timer(0.05, slow.gate.set).start()
    assert stack.store(key(1), entry(1), wait_s=5)


# Slow, broken and cancelled


def test_reading_ahead_hides_a_slow_tier(make):
    slow = SlowHost(read_seconds=0.05)
    for number in range(8):
        slow.put(key(number), entry(number))
    stack = make(slow)
    fetch = ask(stack, range(8))  # 8 reads of 50 ms in three threads: 150 ms
    time.sleep(0.26)  # the steps that are computed meanwhile
    start = time.monotonic()
    assert ended(fetch) and len(fetch.results) == 8
    assert stack.stats()["transfers"]["read_us"] >= 400_000 and time.monotonic() - start <= 0.2 * 0.4


class HungDisk(DiskTier):
    """Reads wait for `gate`."""

    gate = threading.Event()

    def _get(self, key):
        self.gate.wait()
        return super()._get(key)


def test_a_disk_that_hangs_delays_no_read_from_the_host_and_is_not_offered(make, tmp_path, monkeypatch):
    monkeypatch.setattr(tier_transfers, "FETCH_SECONDS", 0.2, raising=False)
    host, disk = HostTier(1 << 20), HungDisk(tmp_path, 1 << 20)
    for tier, number in ((disk, 1), (disk, 2), (disk, 3), (host, 4)):
        tier.put(key(number), entry(number))
    stack = make(host, disk)
    disk.gate.clear()
    try:
        hung = ask(stack, [1, 2, 3])
        assert same(fetched(stack, [4]).results[key(4)], entry(4)) and not hung.done()
        assert stack.find([key(1), key(4)]) == 0
        time.sleep(0.25)
        assert stack.find([key(1), key(4)]) == 1 and stack.find([key(1)]) is None
        late = ask(stack, [4, 3])
        assert ended(late, 1) and late.failures == {key(3): "timeout"} and late.results.keys() == {key(4)}
    finally:
        disk.gate.set()
    assert ended(hung, 5) and not hung.failures and stack.flush(5)
    assert stack.find([key(1)]) == 0 and not fetched(stack, [1, 2, 3, 4]).failures


def test_a_damaged_entry_of_the_host_is_read_from_below_or_named(make, tmp_path):
    host, disk = HostTier(1 << 20), DiskTier(tmp_path, 1 << 20)
    stack = make(host, disk)
    for number in (1, 2):
        host.put(key(number), entry(number))
        host.read(key(number))["states"].add_(1)
    disk.put(key(1), entry(1))
    fetch = fetched(stack, [1, 2])
    assert same(fetch.results[key(1)], entry(1)) and fetch.failures == {key(2): "damaged"}


def test_a_slow_read_times_out_and_is_cancelled(make):
    slow = SlowHost()
    for number in range(4):
        slow.put(key(number), entry(number))
    stack = make(slow)
    slow.gate.clear()
    late, cancelled = ask(stack, [0, 1], timeout_s=0.05), ask(stack, [2, 3])
    assert not late.done() and not ended(cancelled, 0.01)
    assert ended(late, 1) and late.failures == {key(0): "timeout", key(1): "timeout"} and late.results == {}
    cancelled.cancel()
    assert cancelled.done() and cancelled.failures == {key(2): "cancelled", key(3): "cancelled"}
    slow.gate.set()
    assert len(fetched(stack, range(4)).results) == 4 and late.results == {}
    stats = stack.stats()["transfers"]
    assert (stats["failed_timeout"], stats["failed_cancelled"]) == (2, 2)


@pytest.mark.parametrize("error", [TierError("io", "broken"), TierError("damaged", "bits"), ValueError("a bug")])
def test_a_broken_tier_is_a_counted_miss(make, error):
    broken = BrokenHost(1 << 20)
    broken.error = error
    stack = make(broken)
    reason = getattr(error, "reason", "io")
    assert fetched(stack, [1, 2]).failures == {key(1): reason, key(2): reason}
    assert stack.store(key(1), entry(1)) and stack.flush(5)
    assert stack.stats()["transfers"]["failed_writes"] == 1
    assert stack.stats()["transfers"][f"failed_{reason}"] == 2


def test_a_broken_tier_does_not_hide_the_next(make, tmp_path):
    stack = make(BrokenHost(1 << 20), DiskTier(tmp_path, 1 << 20))
    assert stack.store(key(1), entry(1)) and stack.flush(5) and stack.find([key(1)]) == 0
    assert same(fetched(stack, [1]).results[key(1)], entry(1))


def test_a_damaged_file_is_a_failure_with_its_reason(make, tmp_path):
    stack = make(HostTier(1 << 20), DiskTier(tmp_path, 1 << 20))
    stack.tiers[1].put(key(1), entry(1))
    stored_files(tmp_path)[0].write_bytes(b"short")
    assert fetched(stack, [1]).failures == {key(1): "damaged"} and fetched(stack, [1]).failures == {key(1): "absent"}


# Lossy tiers


def test_lossy_entries_stay_apart(make, tmp_path):
    host, cold = HostTier(HOST_BYTES), DiskTier(tmp_path / "cold", 1 << 20, latents="fp8", snapshots="bf16")
    exact = DiskTier(tmp_path / "exact", 1 << 20)
    stack = make(host, cold, exact)
    for number in range(3):
        stack.store(key(number), entry(number))
        assert stack.flush(5)
    fetch = fetched(stack, [0, 2])
    assert not same(fetch.results[key(0)], entry(0))
    assert stack.flush(5) and not host.contains(key(0)) and same(fetch.results[key(2)], entry(2))
    cold._limit = 100  # everything leaves it, but not as if it were exact
    cold._make_room(90)
    assert stack.flush(5) and cold.get(key(0)) is None and not exact.contains(key(0)) and key(0) in stack.lost


# Far tiers


class FarHost(SlowHost):
    is_far = True

    def contains_each(self, keys):
        self.gate.wait()
        return super().contains_each(keys)


def test_a_far_tier_is_asked_in_a_thread_and_has_nothing_when_it_is_late(make):
    near, far = HostTier(1 << 20), FarHost()
    stack = make(near, far)
    near.put(key(2), entry(2))
    far.put(key(1), entry(1))
    assert stack.find([key(1), key(2)]) == 1  # far ones are not looked into
    far.gate.clear()
    start = time.monotonic()
    question, late = stack.ask([key(3), key(1)], timeout_s=60), stack.ask([key(1)], timeout_s=0.05)
    assert not question.done() and time.monotonic() - start < 0.05
    time.sleep(0.06)
    assert late.done() and late.results == {} and late.failures == {"": "timeout"}
    far.gate.set()
    assert ended(question) and question.results == {"": 1}
    assert stack.stats()["transfers"]["failed_timeout"] == 1
    nothing = stack.ask([key(4), key(2)])
    assert ended(nothing) and nothing.results == {"": None}


def test_a_question_is_ahead_of_all_reads(make):
    far = FarHost(read_seconds=0.05)
    stack = make(far)
    for number in range(8):
        far.put(key(number), entry(number))
    reads, question = ask(stack, range(8)), stack.ask([key(1)], timeout_s=5)
    assert ended(question) and question.results == {"": 0} and not reads.done()


def test_a_far_tier_that_fails_has_nothing(make):
    far = BrokenHost(1 << 20)
    far.is_far = True
    question = make(far).ask([key(1)], timeout_s=5)
    assert ended(question) and question.results == {} and question.failures == {"": "io"}


# The end


def test_what_the_host_holds_goes_to_the_disk_at_the_end(make, tmp_path):
    stack = make(HostTier(1 << 20), DiskTier(tmp_path, 1 << 20), max_pending_bytes=3 * ENTRY_BYTES)
    for number in range(20):
        stack.store(key(number), entry(number))
        stack.flush(5)
    stack.close()
    assert all(same(DiskTier(tmp_path, 1 << 20).get(key(number)), entry(number)) for number in range(20))
    assert stack.stats()["transfers"]["dropped"] == 0


def test_what_the_host_holds_waits_for_nobody_who_hangs(make):
    hanging = SlowHost()
    hanging.is_shared = True
    stack = make(HostTier(1 << 20), hanging, max_pending_bytes=2 * ENTRY_BYTES)
    for number in range(10):
        stack.tiers[0].put(key(number), entry(number))
    hanging.gate.clear()
    start = time.monotonic()
    stack.close(timeout=0.2)
    assert time.monotonic() - start < 5 and stack.stats()["transfers"]["dropped"] >= 7


def test_close_writes_what_is_queued_and_ends_the_threads(make, tmp_path):
    stack = make(SlowHost(write_seconds=0.01), DiskTier(tmp_path, 1 << 20))
    for number in range(5):
        stack.store(key(number), entry(number), tier_index=1)
    fetch = ask(stack, [9])
    stack.close()
    stack.close()
    assert all(same(DiskTier(tmp_path, 1 << 20).get(key(number)), entry(number)) for number in range(5))
    assert fetch.done() and not stack.store(key(6), entry(6)) and ask(stack, [1]).failures == {key(1): "cancelled"}


def test_close_does_not_wait_for_a_tier_that_hangs(make):
    slow = SlowHost()
    stack = make(slow)
    slow.gate.clear()
    for number in range(3):
        stack.store(key(number), entry(number))
    start = time.monotonic()
    stack.close(timeout=0.1)
    assert time.monotonic() - start < 5 and stack.stats()["transfers"]["dropped"] == 2


def test_many_threads_at_once(make, tmp_path: Path):
    """Stores, fetches and cancels from four threads over tiers that are too small: right bytes or a named failure."""
    stack = make(
        HostTier(6 * HOST_BYTES), DiskTier(tmp_path / "a", 30_000), DiskTier(tmp_path / "b", 40_000),
        max_pending_bytes=20 * ENTRY_BYTES,
    )  # fmt: skip
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(60):
                numbers = [(step * 5 + seed * 11 + place) % 50 for place in range(3)]
                stack.store(key(numbers[0]), entry(numbers[0]))
                fetch = ask(stack, numbers, timeout_s=5.0)
                if step % 7 == 3:
                    fetch.cancel()
                    continue
                assert ended(fetch)
                assert fetch.results.keys() | fetch.failures.keys() == {key(number) for number in numbers}
                assert set(fetch.failures.values()) <= {"absent"}
                assert all(same(fetch.results.get(key(n), entry(n)), entry(n)) for n in numbers)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and stack.flush(10)
    stats = stack.stats()["transfers"]
    assert (stats["pending_writes"], stats["pending_bytes"], len(stack._reads)) == (0, 0, 0)
