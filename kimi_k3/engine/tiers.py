"""Homes of blocks and snapshots below the device: host memory, a folder, a Redis or Valkey server.

A tier is synchronous, thread safe and content-addressed: a key stands for its bytes for ever, nothing is rewritten, and
whatever cannot be read back whole is removed and named, so that the caller counts a miss and computes it again. What a
key covers (tokens, weights revision, dtype, layout, head range) is the caller's matter. `TierStack` adds threads.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from kimi_k3.engine.tier_format import (
    FORMAT,
    LOSSY,
    LossyCodec,
    Payload,
    Precision,
    TierError,
    byte_view,
    check_key,
    check_payload,
    pack,
    unpack,
)


class Tier:
    """What holds entries: the one interface, and what all tiers share (keys, codec, counts). Thread safe, synchronous.

    name: "host", "disk" or "remote".     is_shared: whether other processes see what is stored.
    is_far: whether a question costs a round trip; then `TierStack` asks in a thread, all keys at once.
    codec: LossyCodec() where entries come back bit for bit.
    on_evict: called with a key and a way to read the entry before it leaves to make room; set by `TierStack`.
    """

    name: str
    is_shared: bool
    is_far = False

    def __init__(self, latents: Precision, snapshots: Precision) -> None:
        self.codec = LossyCodec(latents, snapshots).check()
        self.on_evict: Callable[[str, Callable[[], Payload | None]], None] | None = None
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def put(self, key: str, payload: Payload) -> bool:
        """Store a copy of `payload`. True also if `key` is there already; False if it does not fit.

        Raises: ValueError for a key or payload that no tier takes; TierError "io" or "timeout".
        """
        check_payload(payload)
        with self._counting_errors():
            is_stored = self._put(self._stored(key), self.codec.encode(payload))
        self._count("puts" if is_stored else "refused")
        return is_stored

    def get(self, key: str) -> Payload | None:
        """The entry, or None if it is not there. The tensors are to be read, never written: they may be the tier's own.

        Raises: TierError: "damaged" or "foreign" (the entry is then removed), "io", "timeout".
        """
        with self._counting_errors():
            try:
                stored = self._get(self._stored(key))
            except TierError as error:
                if error.reason in ("damaged", "foreign"):
                    self._delete(self._stored(key))
                raise
        self._count("misses" if stored is None else "hits")
        return None if stored is None else self.codec.decode(stored)

    def contains(self, key: str) -> bool:
        """Whether `key` is there, without reading it. Raises: TierError "io" or "timeout"."""
        with self._counting_errors():
            return self._contains(self._stored(key))

    def contains_each(self, keys: Sequence[str]) -> list[bool]:
        """`contains` of each key, in one round trip. Raises: TierError "io" or "timeout"."""
        with self._counting_errors():
            return self._contains_each([self._stored(key) for key in keys])

    def delete(self, key: str) -> None:
        """Remove the entry if it is there. Raises: TierError "io" or "timeout"."""
        with self._counting_errors():
            self._delete(self._stored(key))

    def stats(self) -> dict[str, int]:
        """Counts since the start; of host and disk also the entries and bytes that they hold now."""
        names = ("hits", "misses", "puts", "refused", "evicted", "damaged", "foreign", "io", "timeout")
        with self._lock:
            return dict.fromkeys(names, 0) | self._counts | self._sizes()

    def close(self) -> None:
        """Release what the tier holds open. What lies in a shared tier stays."""

    # A subclass stores, under keys that name the codec.

    def _put(self, key: str, payload: Payload) -> bool:
        raise NotImplementedError

    def _get(self, key: str) -> Payload | None:
        raise NotImplementedError

    def _contains(self, key: str) -> bool:
        raise NotImplementedError

    def _contains_each(self, keys: list[str]) -> list[bool]:
        return [self._contains(key) for key in keys]

    def _delete(self, key: str) -> None:
        raise NotImplementedError

    def _sizes(self) -> dict[str, int]:
        return {}

    def _stored(self, key: str) -> str:
        check_key(key)
        return key + self.codec.suffix

    def _announce(self, stored: str, read: Callable[[], Payload | None]) -> None:
        """Tell `on_evict` of an entry that is about to go, unless another codec wrote it."""
        key = stored.removesuffix(self.codec.suffix)
        if self.on_evict and key + self.codec.suffix == stored and LOSSY not in key:
            self.on_evict(key, lambda: None if (payload := read()) is None else self.codec.decode(payload))

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    @contextmanager
    def _counting_errors(self) -> Iterator[None]:
        try:
            yield
        except TierError as error:
            self._count(error.reason)
            raise
        except OSError as error:
            self._count("io")
            raise TierError("io", f"{self.name}: {error}") from error


class _HostEntry(NamedTuple):
    payload: Payload  # views of buffer
    buffer: Tensor
    version: int  # of buffer when it was filled
    num_bytes: int


class HostTier(Tier):
    """Least recently used entries within `bytes` of this process's memory, pinned where there is CUDA.

    `put` copies; `get` returns views of the stored bytes, which stay valid after eviction and must not be written: an
    in-place torch operation on them is noticed at the next `get` and makes the entry "damaged". Pinned buffers count
    with the power of two that PyTorch's pinned allocator takes for them.
    """

    name, is_shared = "host", False

    def __init__(self, bytes: int, *, latents: Precision = "exact", snapshots: Precision = "exact") -> None:
        super().__init__(latents, snapshots)
        self._limit, self._used = _check_limit(bytes), 0
        self._is_pinned = torch.cuda.is_available()
        self._entries: OrderedDict[str, _HostEntry] = OrderedDict()

    def _put(self, key: str, payload: Payload) -> bool:
        offsets, end = [], 0
        for tensor in payload.values():
            offsets.append(end)
            end += -(-tensor.numel() * tensor.element_size() // 64) * 64  # every tensor starts on a cache line
        num_bytes = 1 << max(end - 1, 0).bit_length() if self._is_pinned else end
        if num_bytes > self._limit:
            return False
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return True
        self._make_room(num_bytes)
        with torch.inference_mode(False), torch.no_grad():  # tensors of inference mode count no writes
            buffer = torch.empty(end, dtype=torch.uint8, pin_memory=self._is_pinned)
            copies = {}
            for (name, tensor), offset in zip(payload.items(), offsets):
                part = buffer[offset : offset + tensor.numel() * tensor.element_size()]
                copies[name] = part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        with self._lock:
            if key in self._entries:  # another thread was faster
                self._used -= num_bytes
            else:
                self._entries[key] = _HostEntry(copies, buffer, buffer._version, num_bytes)
        return True

    def _make_room(self, num_bytes: int) -> None:
        """Reserve `num_bytes`. An entry is announced before it goes, so that it can always be found somewhere."""
        while True:
            with self._lock:
                if self._used + num_bytes <= self._limit or not self._entries:
                    self._used += num_bytes
                    return
                key, entry = next(iter(self._entries.items()))
            self._announce(key, lambda payload=entry.payload: payload)  # type: ignore[misc]
            if self._remove(key, entry):
                self._count("evicted")

    def _remove(self, key: str, entry: _HostEntry) -> bool:
        with self._lock:
            if self._entries.get(key) is not entry:
                return False
            del self._entries[key]
            self._used -= entry.num_bytes
            return True

    def _get(self, key: str) -> Payload | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
        if entry.buffer._version != entry.version:
            raise TierError("damaged", f"{key}: someone wrote into what get() returned")
        return dict(entry.payload)

    def _contains(self, key: str) -> bool:
        with self._lock:
            return key in self._entries

    def _delete(self, key: str) -> None:
        with self._lock:
            if entry := self._entries.pop(key, None):
                self._used -= entry.num_bytes

    def _sizes(self) -> dict[str, int]:
        return {"entries": len(self._entries), "bytes": self._used}

    def keys(self) -> list[str]:
        """Of all entries, the most recently used first."""
        with self._lock:
            return [key.removesuffix(self.codec.suffix) for key in reversed(self._entries)]

    def close(self) -> None:
        with self._lock:
            self._entries.clear()
            self._used = 0


class DiskTier(Tier):
    """Least recently used entries within `bytes` of a folder, one safetensors file each; survives restarts.

    An entry is written under a temporary name and renamed, so that a process killed at any moment leaves whole entries
    only. The temporary file is locked while it is written: one that nobody locks is a dead writer's and is removed by the
    next scan. Several processes may use one folder, each with the same limit: reads and deletes see the files
    themselves, recency is a file's modification time, and every process counts the folder again after writing 1/16 of
    the limit, so the folder exceeds it by at most 1/16 for each further process. Without `fsync` a power cut may lose or
    shorten the newest entries, which the checksum finds.
    """

    name, is_shared = "disk", True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        bytes: int,
        *,
        fsync: bool = False,
        latents: Precision = "exact",
        snapshots: Precision = "exact",
    ) -> None:
        super().__init__(latents, snapshots)
        self._limit, self._fsync = _check_limit(bytes), fsync
        self._folder = Path(folder) / FORMAT  # another format's files are never met
        self._folder.mkdir(parents=True, exist_ok=True)
        self._room_lock = threading.Lock()  # held to count and to evict; self._lock guards the numbers
        self._sizes_by_key: dict[str, int] = {}
        self._by_age: list[tuple[int, str]] = []  # heap of (modification time when last looked at, key)
        self._used, self._written = 0, self._limit  # as if all had been written: the first put scans

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.safetensors"

    def _put(self, key: str, payload: Payload) -> bool:
        path = self._path(key)
        if path.exists():
            _touch(path)
            return True
        pieces = pack(key, payload)
        num_bytes = sum(piece.nbytes for piece in pieces)
        if num_bytes > self._limit or not self._make_room(num_bytes):
            return False
        try:
            self._write(path, pieces)
        except BaseException:
            with self._lock:
                self._used -= num_bytes
            raise
        with self._lock:
            if key in self._sizes_by_key:  # another thread wrote it too
                self._used -= num_bytes
            else:
                self._sizes_by_key[key] = num_bytes
                heapq.heappush(self._by_age, (time.time_ns(), key))
        return True

    def _write(self, path: Path, pieces: list[memoryview]) -> None:
        path.parent.mkdir(exist_ok=True)
        with _open_temporary(path.parent) as file:
            try:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                if self._fsync:
                    os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        if self._fsync:
            descriptor = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _get(self, key: str) -> Payload | None:
        payload = self._read(key)
        if payload is not None:
            _touch(self._path(key))
        return payload

    def _read(self, key: str) -> Payload | None:
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                data = torch.empty(os.fstat(file.fileno()).st_size, dtype=torch.uint8)
                view, done = byte_view(data), 0
                while done < len(view) and (count := file.readinto(view[done:])):
                    done += count
        except FileNotFoundError:
            return None
        return unpack(key, data[:done])

    def _contains(self, key: str) -> bool:
        return self._path(key).exists()

    def _delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)
        with self._lock:
            self._used -= self._sizes_by_key.pop(key, 0)

    def _make_room(self, num_bytes: int) -> bool:
        """Reserve `num_bytes`, evicting the oldest; False if others' unfinished writes hold the rest."""
        with self._room_lock:
            if self._written > self._limit // 16:
                self._scan()
            while True:
                with self._lock:
                    if self._used + num_bytes <= self._limit:
                        self._used += num_bytes
                        self._written += num_bytes
                        return True
                    if not self._by_age:
                        return False
                    seen_ns, key = heapq.heappop(self._by_age)
                    if key not in self._sizes_by_key:
                        continue
                self._evict(key, seen_ns)

    def _evict(self, key: str, seen_ns: int) -> None:
        """Remove the entry, unless it was used since `seen_ns`: then it is only younger than it seemed."""
        try:
            changed_ns = self._path(key).stat().st_mtime_ns
        except FileNotFoundError:  # by another process
            self._delete(key)
            return
        if changed_ns > seen_ns:
            with self._lock:
                heapq.heappush(self._by_age, (changed_ns, key))
            return
        try:
            self._announce(key, lambda: self._read(key))
        except TierError as error:  # it goes either way
            self._count(error.reason)
        self._delete(key)
        self._count("evicted")

    def _scan(self) -> None:
        """Count what the folder holds, whoever wrote it, and remove the temporary files of dead writers."""
        start_ns = time.time_ns()
        found = {}
        for shard in os.scandir(self._folder):
            for file in os.scandir(shard.path) if shard.is_dir() else ():
                key, _, kind = file.name.rpartition(".")
                try:
                    if kind == "safetensors":
                        found[key] = (file.stat().st_mtime_ns, file.stat().st_size)
                    elif kind == "tmp":
                        _remove_leftover(file.path)
                except FileNotFoundError:  # renamed or evicted meanwhile
                    continue
        with self._lock:
            reserved = self._used - sum(self._sizes_by_key.values())  # writes that other threads are at
            for changed_ns, key in self._by_age:
                if changed_ns >= start_ns and key in self._sizes_by_key:
                    found.setdefault(key, (changed_ns, self._sizes_by_key[key]))
            self._sizes_by_key = {key: size for key, (_, size) in found.items()}
            self._by_age = [(changed_ns, key) for key, (changed_ns, _) in found.items()]
            heapq.heapify(self._by_age)
            self._used, self._written = reserved + sum(self._sizes_by_key.values()), 0

    def stats(self) -> dict[str, int]:
        with self._room_lock:
            if self._written >= self._limit:
                self._scan()
        return super().stats()

    def _sizes(self) -> dict[str, int]:
        return {"entries": len(self._sizes_by_key), "bytes": self._used}


def _touch(path: Path) -> None:
    """Mark as used now, in the clock that `time.time_ns` reads (the kernel's own stamp may lag by a tick)."""
    try:
        now_ns = time.time_ns()
        os.utime(path, ns=(now_ns, now_ns))
    except FileNotFoundError:
        pass


def _open_temporary(folder: Path) -> BinaryIO:
    """A new locked file. A scan that came between open and lock has removed it as a leftover: then another."""
    while True:
        file = open(folder / f".{uuid.uuid4().hex}.tmp", "xb")  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def _remove_leftover(path: str) -> None:
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # its writer lives
            return
        os.unlink(path)


class RemoteTier(Tier):
    """Entries on a Redis or Valkey server, which bounds and expires them itself (`maxmemory`, `maxmemory-policy`).

    Args:
        url: redis://host:port/db, rediss:// (TLS), valkey://, valkeys:// or unix://path.
        timeout_s: of connecting and of every read or write on the socket.     retries: of a command that lost its connection.
        pause_s: after a failure every call fails at once for so long, so that a dead server delays nobody.
        ttl_s: life of an entry on the server; None leaves it to the server.
        max_entry_bytes: larger ones are refused; the servers' own limit is 512 MiB.
    Raises: ImportError without the client, TierError if no server answers.
    """

    name, is_shared, is_far = "remote", True, True

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 1.0,
        retries: int = 1,
        pause_s: float = 10.0,
        ttl_s: int | None = None,
        max_entry_bytes: int = 1 << 29,
        latents: Precision = "exact",
        snapshots: Precision = "exact",
    ) -> None:
        super().__init__(latents, snapshots)
        try:
            import valkey
            from valkey.backoff import NoBackoff
            from valkey.retry import Retry
        except ModuleNotFoundError as error:
            raise ImportError('RemoteTier needs the Valkey client: pip install "kimi-k3[remote]"') from error
        self._errors, self._ttl_s = valkey.exceptions, ttl_s
        self._limit, self._pause_s, self._down_until = _check_limit(max_entry_bytes), pause_s, 0.0
        if url.startswith("redis"):  # the client knows its own names only; the protocol is one
            url = "valkey" + url.removeprefix("redis")
        self._client = valkey.Valkey.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), retries, (valkey.ConnectionError,)),  # a pooled connection may be a dead one
        )
        self._call(self._client.ping)

    def _call(self, command: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if time.monotonic() < self._down_until:
            raise TierError("io", "remote: the server did not answer lately")
        try:
            return command(*args, **kwargs)
        except (self._errors.ConnectionError, self._errors.TimeoutError, OSError) as error:
            self._down_until = time.monotonic() + self._pause_s
            reason = "timeout" if isinstance(error, self._errors.TimeoutError) else "io"
            raise TierError(reason, f"remote: {error}") from error
        except self._errors.OutOfMemoryError:
            raise
        except self._errors.ValkeyError as error:
            raise TierError("io", f"remote: {error}") from error

    def _put(self, key: str, payload: Payload) -> bool:
        pieces = pack(key, payload)
        if sum(piece.nbytes for piece in pieces) > self._limit:
            return False
        if self._contains(key):  # cheaper than sending it
            return True
        try:
            self._call(self._client.set, _server_key(key), b"".join(pieces), nx=True, ex=self._ttl_s)
        except self._errors.OutOfMemoryError:
            return False
        return True

    def _get(self, key: str) -> Payload | None:
        data = self._call(self._client.get, _server_key(key))
        if data is None:
            return None
        return unpack(key, torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte())

    def _contains(self, key: str) -> bool:
        return bool(self._call(self._client.exists, _server_key(key)))

    def _contains_each(self, keys: list[str]) -> list[bool]:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(_server_key(key))
        return [bool(count) for count in self._call(pipeline.execute)]

    def _delete(self, key: str) -> None:
        self._call(self._client.delete, _server_key(key))

    def close(self) -> None:
        self._client.close()


def _server_key(key: str) -> str:
    return f"{FORMAT}:{key}"


def _check_limit(limit: int) -> int:
    if limit <= 0:
        raise ValueError(f"bytes: want more than 0, got {limit}")
    return limit
