"""Homes of blocks and snapshots below the device: host memory, a folder, a Redis or Valkey server.

A tier is synchronous, thread safe and content-addressed: a key stands for its bytes for ever, nothing is rewritten, and
whatever cannot be read back whole is removed and named, so that the caller counts a miss and computes it again. What a
key covers (tokens, weights revision, dtype, layout, head range) is the caller's matter. `TierStack` adds threads.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from kimi_k3.engine.tier_format import (
    FORMS,
    KEY,
    LossyCodec,
    Payload,
    Precision,
    TierError,
    check_payload,
    copy_bytes,
    pack,
    unpack,
)
from kimi_k3.sampling import as_float, as_int

SCAN_SECONDS = 10.0
SERVER_BYTES = 1 << 29  # the servers' own limit to an entry


class Tier:
    """What holds entries: the one interface, and what all tiers share (keys, codec, counts). Thread safe, synchronous.

    A tier belongs to one `TierStack`, so to one generator, which closes it; one that is in use or closed is refused.

    name: "host", "disk" or "remote".     is_shared: whether other processes see what is stored, and it outlives this one.
    is_far: whether a question costs a round trip; then `TierStack` asks in a thread.
    codec: LossyCodec() where entries come back bit for bit.
    on_evict: called with a key before its entry leaves to make room, while it can be read; set while the tier is in use.
    """

    name: str
    is_shared = True
    is_far = False

    def __init__(self, limit: int, latents: Precision, snapshots: Precision) -> None:
        size = as_int(limit)
        if size is None or size <= 0:
            raise ValueError(f"{type(self).__name__}: want bytes a whole number > 0, got {limit!r}")
        self.codec = LossyCodec(latents, snapshots)
        self.on_evict: Callable[[str], None] | None = None
        self._limit, self._is_closed = size, False
        self._put_lock = threading.Lock()  # a process stores one entry at a time
        self._lock = threading.Lock()  # guards the numbers; nothing waits with it held
        self._counts: Counter[str] = Counter()

    def put(self, key: str, payload: Payload) -> bool:
        """Store a copy of `payload`. True also if `key` is there already; False if it does not fit.

        Raises: ValueError for a key or payload that no tier takes; TierError "io" or "timeout".
        """
        check_payload(payload)
        with self._checked([key]), self._put_lock:
            is_stored = self._put(key, self.codec.encode(payload))
        self._count("puts" if is_stored else "refused")
        return is_stored

    def get(self, key: str) -> Payload | None:
        """The entry, or None if it is not there. The tensors are to be read, never written: they may be the tier's own.

        Raises: TierError: "damaged" or "foreign" (the entry is then removed), "io", "timeout".
        """
        payload = self.read(key)
        self._count("misses" if payload is None else "hits")
        return payload

    def read(self, key: str) -> Payload | None:
        """`get` of what moves from tier to tier: neither a hit nor a miss."""
        with self._checked([key]):
            try:
                stored = self._get(key)
            except TierError as error:
                if error.reason in ("damaged", "foreign"):
                    self._delete(key)
                raise
        return None if stored is None else self.codec.decode(stored)

    def contains(self, key: str) -> bool:
        """Whether `key` is there, without reading it. Raises: TierError "io" or "timeout"."""
        return self.contains_each([key])[0]

    def contains_each(self, keys: Sequence[str]) -> list[bool]:
        """`contains` of each key, in one round trip."""
        with self._checked(keys):
            return self._contains_each(keys)

    def delete(self, key: str) -> None:
        """Remove the entry if it is there. Raises: TierError "io" or "timeout"."""
        with self._checked([key]):
            self._delete(key)

    def stats(self) -> dict[str, int]:
        """Counts since the start; of host and disk also the entries and bytes that they hold now."""
        names = ("hits", "misses", "puts", "refused", "evicted", "damaged", "foreign", "io", "timeout")
        with self._lock:
            return dict.fromkeys(names, 0) | self._counts

    def take(self, on_evict: Callable[[str], None]) -> None:
        """Put the tier to use. Raises: ValueError if it is in use, or closed."""
        with self._lock:
            if self._is_closed or self.on_evict is not None:
                state = "closed" if self._is_closed else "in use (given twice, or to another generator that is open)"
                raise ValueError(f"{type(self).__name__}: want a tier that is open and free, got one that is {state}")
            self.on_evict = on_evict

    def close(self) -> None:
        """Release what the tier holds open, for good. What lies in a shared tier stays."""
        self.on_evict, self._is_closed = None, True

    # What a subclass does. `_put` runs in one thread at a time.

    def _put(self, key: str, payload: Payload) -> bool:
        raise NotImplementedError

    def _get(self, key: str) -> Payload | None:
        raise NotImplementedError

    def _contains_each(self, keys: Sequence[str]) -> list[bool]:
        raise NotImplementedError

    def _delete(self, key: str) -> None:
        raise NotImplementedError

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    @contextmanager
    def _checked(self, keys: Sequence[str]) -> Iterator[None]:
        """Raises ValueError for what is no key; failures inside are counted."""
        for key in keys:
            if not isinstance(key, str) or not KEY.fullmatch(key):
                raise ValueError(f"key: want 64 lower-case hex characters and suffixes like -s-0-12, got {key!r}")
        try:
            yield
        except TierError as error:
            self._count(error.reason)
            raise
        except OSError as error:
            self._count("io")
            raise TierError("io", f"{self.name}: {error}") from error


class LocalTier(Tier):
    """A tier that keeps to its bytes itself: the least recently used entries make room."""

    def __init__(self, limit: int, latents: Precision, snapshots: Precision) -> None:
        super().__init__(limit, latents, snapshots)
        # Key -> bytes, content; the next to go first. What is no key counts, and goes, but is nobody's to be told of.
        self._held: OrderedDict[str, tuple[int, Any]] = OrderedDict()
        self._bytes = 0

    def _make_room(self, num_bytes: int) -> bool:
        """Evict until `num_bytes` more fit; False if they never can.

        `on_evict` is told first, so that an entry can always be found somewhere.
        """
        while num_bytes <= self._limit:
            with self._lock:
                if self._bytes + num_bytes <= self._limit:
                    return True
                key = next(iter(self._held))
            if self.on_evict and KEY.fullmatch(key):
                self.on_evict(key)
            try:
                self._delete(key)
            except OSError:  # it stays where it is, and is counted no more, so that it bars no other
                LocalTier._delete(self, key)
            self._count("evicted")
        return False

    def _use(self, key: str) -> Any:
        """Make an entry the last to go; its content, or None if it is not known."""
        with self._lock:
            if key not in self._held:
                return None
            self._held.move_to_end(key)
            return self._held[key][1]

    def _add(self, key: str, num_bytes: int, content: Any) -> None:
        with self._lock:
            self._bytes += num_bytes - self._held.pop(key, (0, None))[0]
            self._held[key] = (num_bytes, content)

    def _delete(self, key: str) -> None:
        with self._lock:
            self._bytes -= self._held.pop(key, (0, None))[0]

    def stats(self) -> dict[str, int]:
        return super().stats() | {"entries": len(self._held), "bytes": self._bytes}


class HostTier(LocalTier):
    """Least recently used entries within `bytes` of this process's memory, pinned where there is CUDA.

    `put` copies; `get` returns views of the stored bytes, which stay valid after eviction and must not be written: an
    in-place torch operation on them is noticed at the next `get` and makes the entry "damaged". Pinned buffers count
    with the power of two that PyTorch's pinned allocator takes for them. latents: "exact" or "fp8"; snapshots: "exact",
    "bf16" or "fp8": how entries are kept, see LossyCodec. It belongs to one generator at a time and ends
    with it: `close` deletes the entries, and a closed one is refused.
    """

    name, is_shared = "host", False

    def __init__(self, bytes: int, *, latents: Precision = "exact", snapshots: Precision = "exact") -> None:
        super().__init__(bytes, latents, snapshots)
        self._is_pinned = torch.cuda.is_available()

    def _put(self, key: str, payload: Payload) -> bool:
        if self._use(key):
            return True
        sizes = [-(-tensor.nbytes // 64) * 64 for tensor in payload.values()]  # every tensor starts on a cache line
        num_bytes = 1 << max(sum(sizes) - 1, 0).bit_length() if self._is_pinned else sum(sizes)
        if not self._make_room(num_bytes):
            return False
        with torch.inference_mode(False), torch.no_grad():  # tensors of inference mode count no writes
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._is_pinned)
            copies = {
                name: part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                for (name, tensor), part in zip(payload.items(), buffer.split(sizes))
            }
        for name, tensor in payload.items():
            copy_bytes(copies[name], tensor)
        self._add(key, num_bytes, (copies, buffer, buffer._version))
        return True

    def _get(self, key: str) -> Payload | None:
        content = self._use(key)
        if content is None:
            return None
        payload, buffer, version = content
        if buffer._version != version:
            raise TierError("damaged", f"{key}: someone wrote into what get() returned")
        return dict(payload)

    def _contains_each(self, keys: Sequence[str]) -> list[bool]:
        with self._lock:
            return [key in self._held for key in keys]

    def recent(self) -> list[str]:
        """Keys of all entries, the most recently used first."""
        with self._lock:
            return list(reversed(self._held))

    def close(self) -> None:
        super().close()
        for key in self.recent():
            self.delete(key)


class DiskTier(LocalTier):
    """Least recently used entries within `bytes` of a folder, one safetensors file each; survives restarts.

    The object belongs to one generator at a time and is closed with it; each other gets a DiskTier of its own, over the
    same folder if so wished. latents and snapshots: as HostTier's. Entries of other codecs and of older formats count
    as well: they are never read, and leave when they are the least recently used.

    An entry is written under a temporary name and renamed, so that a process killed at any moment leaves whole entries
    only. The temporary file is locked while it is written: one that nobody locks is a dead writer's and is removed by the
    next scan. Several processes may use one folder, each with the same limit: reads and deletes see the files
    themselves, recency is a file's modification time, and every process scans the folder again after writing 1/16 of the
    limit, so the folder exceeds it by at most 1/16 for each further process, and before it evicts by a scan that is older
    than SCAN_SECONDS and 100 times as long as it took. A power cut may lose or shorten the newest entries, which the
    checksum finds.
    """

    name = "disk"

    def __init__(
        self, folder: str | Path, bytes: int, *, latents: Precision = "exact", snapshots: Precision = "exact"
    ) -> None:
        super().__init__(bytes, latents, snapshots)
        if not isinstance(folder, (str, os.PathLike)):
            raise ValueError(f"DiskTier: want folder a path, got {folder!r}")
        self._root = Path(folder)
        self._folder = self._root / self.codec.format  # another form's files are never read
        self._scan()
        self._make_room(0)

    def _path(self, key: str) -> Path:
        """Of an entry, or of a file of another form, which is held under its path within the folder."""
        return self._root / key if "/" in key else self._folder / key[:2] / f"{key}.safetensors"

    def _put(self, key: str, payload: Payload) -> bool:
        path = self._path(key)
        if path.is_file():
            self._touch(key)
            return True
        pieces = pack(key, payload, self.codec.format)
        num_bytes = sum(piece.nbytes for piece in pieces)
        is_old = self._bytes + num_bytes > self._limit and time.monotonic() > self._is_old_at
        if self._written > self._limit // 16 or is_old:
            self._scan()
        if not self._make_room(num_bytes):
            return False
        path.parent.mkdir(parents=True, exist_ok=True)  # someone may have removed them all
        with _open_temporary(path.parent) as file:
            try:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        self._written += num_bytes
        self._add(key, num_bytes, None)
        self._touch(key)
        return True

    def _get(self, key: str) -> Payload | None:
        try:
            with open(self._path(key), "rb") as file:
                data = torch.from_numpy(np.fromfile(file, dtype=np.uint8))
        except FileNotFoundError:
            super()._delete(key)
            return None
        payload = unpack(key, data, self.codec.format)
        self._touch(key)
        return payload

    def _contains_each(self, keys: Sequence[str]) -> list[bool]:
        return [self._path(key).is_file() for key in keys]

    def _delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)
        super()._delete(key)

    def _touch(self, key: str) -> None:
        """Mark as used now, for all processes, in the clock of `time.time_ns` (the kernel's own stamps may lag)."""
        self._use(key)
        with suppress(FileNotFoundError):
            os.utime(self._path(key), ns=(time.time_ns(),) * 2)

    def _scan(self) -> None:
        """Count what the folder holds, whoever wrote it in whatever form, and remove the temporary files of dead writers."""
        found, start = [], time.monotonic()
        self._folder.mkdir(parents=True, exist_ok=True)
        forms = [form for form in os.scandir(self._root) if FORMS.fullmatch(form.name) and form.is_dir()]
        shards = [(form.name, shard) for form in forms for shard in os.scandir(form) if shard.is_dir()]
        for form, file in ((form, file) for form, shard in shards for file in os.scandir(shard)):
            key, _, kind = file.name.rpartition(".")
            with suppress(OSError):  # renamed or evicted meanwhile, or another user's
                if kind == "safetensors" and KEY.fullmatch(key) and file.is_file(follow_symlinks=False):
                    status = file.stat()
                    name = key if form == self.codec.format else os.path.relpath(file.path, self._root)
                    found.append((status.st_mtime_ns, status.st_size, name))
                elif kind == "tmp":
                    _remove_leftover(file.path)
        with self._lock:
            self._held = OrderedDict((key, (size, None)) for _, size, key in sorted(found))
            self._bytes, self._written = sum(size for _, size, _ in found), 0
        self._is_old_at = time.monotonic() + max(SCAN_SECONDS, 100 * (time.monotonic() - start))


def _open_temporary(folder: Path) -> BinaryIO:
    """A new locked file. A scan that came between open and lock has removed it as a leftover: then another."""
    while True:
        file = open(folder / f".{uuid.uuid4().hex}.tmp", "xb")  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def _remove_leftover(path: str) -> None:
    with open(path, "rb") as file, suppress(BlockingIOError):  # its writer lives
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)


class RemoteTier(Tier):
    """Entries on a Redis or Valkey server, which bounds and expires them itself (`maxmemory`, `maxmemory-policy`).

    The object belongs to one generator at a time and is closed with it; each other gets a RemoteTier of its own.

    Args:
        url: redis://host:port/db, rediss:// (TLS), valkey://, valkeys:// or unix://path.
        timeout_s: of connecting and of every read or write on the socket.
        pause_s: after a failure every call fails at once for so long, so that a dead server delays nobody.
        latents, snapshots: as HostTier's.
    Raises: ValueError for other arguments, ImportError without the client, TierError if no server answers.
    """

    name, is_far = "remote", True

    def __init__(
        self, url: str, *, timeout_s: float = 1.0, pause_s: float = 10.0, latents: Precision = "exact",
        snapshots: Precision = "exact",
    ) -> None:  # fmt: skip
        super().__init__(SERVER_BYTES, latents, snapshots)
        timeout, pause = as_float(timeout_s), as_float(pause_s)
        if timeout is None or pause is None or not timeout > 0 or not pause >= 0:
            got = f"{timeout_s!r} and {pause_s!r}"
            raise ValueError(f"RemoteTier: want timeout_s > 0 and pause_s >= 0 seconds, got {got}")
        try:
            import valkey
            from valkey.backoff import NoBackoff
            from valkey.retry import Retry
        except ModuleNotFoundError as error:
            raise ImportError('RemoteTier needs the Valkey client: pip install "kimi-k3[remote]"') from error
        self._errors = valkey.exceptions
        self._pause_s, self._down_until = pause_s, 0.0
        try:
            self._client = valkey.Valkey.from_url(
                re.sub("^redis", "valkey", url),  # the client knows its own names only; the protocol is one
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 1, (valkey.ConnectionError,)),  # a pooled connection may be a dead one
            )
        except (TypeError, ValueError):
            shown = re.sub("//.*@", "//...@", url) if isinstance(url, str) else url  # without its password
            want = "redis[s]:// or valkey[s]://host:port/db, or unix://path"
            raise ValueError(f"RemoteTier: want url {want}, got {shown!r}") from None
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
            reason = "foreign" if str(error).startswith("WRONGTYPE") else "io"
            raise TierError(reason, f"remote: {error}") from error

    def _put(self, key: str, payload: Payload) -> bool:
        pieces = pack(key, payload, self.codec.format)
        if sum(piece.nbytes for piece in pieces) > self._limit:
            return False
        if self._contains_each([key])[0]:  # cheaper than sending it
            return True
        try:
            self._call(self._client.set, self._name(key), b"".join(pieces), nx=True)
        except self._errors.OutOfMemoryError:
            return False
        return True

    def _get(self, key: str) -> Payload | None:
        data = self._call(self._client.get, self._name(key))
        if data is None:
            return None
        return unpack(key, torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8)), self.codec.format)

    def _contains_each(self, keys: Sequence[str]) -> list[bool]:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(self._name(key))
        return [bool(count) for count in self._call(pipeline.execute)]

    def _delete(self, key: str) -> None:
        self._call(self._client.delete, self._name(key))

    def close(self) -> None:
        super().close()
        self._client.close()

    def _name(self, key: str) -> str:
        return f"{self.codec.format}:{key}"
