"""Safetensors files: headers and index in, bytes straight into tensors, whole folders out.

Plain reads instead of memory maps: a map's pages count as the process's own memory for as long as the file is mapped.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
PIECE_BYTES = 1 << 26  # of a read that goes through a buffer, or of a copy from file to file
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_OWN_SHARDS = re.compile(r"model(-\d{5}-of-\d{6})?\.safetensors")
_SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class CheckpointError(ValueError):
    """A checkpoint that is incomplete or contradicts itself or its config. Names the file and the tensor."""


class StoredTensor(NamedTuple):
    """Where a tensor's bytes lie."""

    file: Path
    name: str
    dtype: str  # the format's name, a key of DTYPES where torch can read it
    shape: tuple[int, ...]
    start: int  # of the first byte in the file
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class Region(NamedTuple):
    """A part of a tensor: `length` places from `start` on along dimension `dim`, and all of the others."""

    dim: int
    start: int
    length: int

    def shape_in(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])


class Index(NamedTuple):
    weight_map: dict[str, str]  # tensor name -> file name
    total_size: int | None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise CheckpointError(f"the name {next(n for n in values if names.count(n) > 1)!r} stands there twice")
    return values


def read_index(path: Path) -> Index:
    """Read `model.safetensors.index.json`."""
    try:
        values = json.loads(path.read_bytes(), object_pairs_hook=_unique_keys)
    except ValueError as error:
        raise CheckpointError(f"{path}: not a readable index: {error}") from error
    weight_map = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: want a non-empty weight_map")
    for file in set(weight_map.values()):
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{path}: want names of files beside the index, got {file!r}")
    return Index(weight_map, values.get("metadata", {}).get("total_size"))


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Where each tensor of a safetensors file lies. The file must be exactly as long as its header says."""
    if not path.exists():
        raise CheckpointError(f"{path}: this shard is missing")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{path}: truncated or not safetensors: {size} bytes, header of {length} bytes")
        try:
            entries = json.loads(file.read(length), object_pairs_hook=_unique_keys)
        except ValueError as error:
            raise CheckpointError(f"{path}: unreadable header: {error}") from error
    entries.pop("__metadata__", None)
    tensors = {}
    for name, entry in entries.items():
        try:
            first, last = entry["data_offsets"]
            shape = tuple(int(n) for n in entry["shape"])
            dtype = str(entry["dtype"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: tensor {name!r}: unreadable entry {entry!r}") from error
        known = DTYPES.get(dtype)
        if known is not None and last - first != math.prod(shape) * known.itemsize:
            wanted = f"{math.prod(shape) * known.itemsize} bytes for {dtype} {list(shape)}"
            raise CheckpointError(f"{path}: tensor {name!r}: want {wanted}, got {last - first}")
        tensors[name] = StoredTensor(path, name, dtype, shape, 8 + length + first, last - first)
    end = 8 + length
    for stored in sorted(tensors.values(), key=lambda t: (t.start, t.num_bytes)):
        if stored.start != end:
            raise CheckpointError(f"{path}: tensor {stored.name!r}: starts at byte {stored.start}, want {end}")
        end += stored.num_bytes
        if end > size:
            raise CheckpointError(
                f"{path}: truncated: holds {size} bytes, but tensor {stored.name!r} ends at byte {end}"
            )
    if end != size:
        raise CheckpointError(f"{path}: holds {size} bytes, its header describes {end}")
    return tensors


def byte_view(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class ShardReader:
    """Reads stored tensors; holds one file open at a time. `close` also drops its pages from the page cache if told so."""

    def __init__(self, drop_cache: bool = False) -> None:
        self._drop_cache = drop_cache
        self._path: Path | None = None
        self._fd = -1
        self.bytes_read = 0  # of tensors, headers apart
        self._buffer: Tensor | None = None

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self._path is not None:
            if self._drop_cache and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(self._fd)
            self._path = None

    def _open(self, path: Path) -> int:
        if self._path != path:
            self.close()
            self._fd, self._path = os.open(path, os.O_RDONLY), path
        return self._fd

    def read_bytes_into(self, stored: StoredTensor, offset: int, memory: memoryview) -> None:
        """Fill `memory` with the tensor's bytes from `offset` on."""
        fd, position, left = self._open(stored.file), stored.start + offset, memory
        self.bytes_read += len(memory)
        while left:
            count = os.preadv(fd, [left], position)
            if count == 0:
                raise CheckpointError(f"{stored.file}: truncated: ends inside tensor {stored.name!r}")
            position, left = position + count, left[count:]

    def read_into(self, stored: StoredTensor, destination: Tensor) -> None:
        """Copy a tensor into one of the same shape, of any device and dtype: on the CPU in the same dtype, one read."""
        dtype = DTYPES[stored.dtype]
        if destination.device.type == "cpu" and destination.dtype == dtype and destination.is_contiguous():
            self.read_bytes_into(stored, 0, byte_view(destination))
            return
        if self._buffer is None:
            self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        flat, per_piece = destination.view(-1), PIECE_BYTES // dtype.itemsize
        for first in range(0, stored.num_elements, per_piece):
            count = min(per_piece, stored.num_elements - first)
            piece = self._buffer[: count * dtype.itemsize]
            self.read_bytes_into(stored, first * dtype.itemsize, byte_view(piece))
            flat[first : first + count].copy_(piece.view(dtype))

    def read_region(self, stored: StoredTensor, region: Region) -> Tensor:
        """A part of a tensor on the CPU, as stored. Only its own bytes are read."""
        dtype = DTYPES[stored.dtype]
        part = torch.empty(region.shape_in(stored.shape), dtype=dtype)
        memory, inner = byte_view(part), math.prod(stored.shape[region.dim + 1 :]) * dtype.itemsize
        run, stride = region.length * inner, stored.shape[region.dim] * inner
        for row in range(math.prod(stored.shape[: region.dim]) if run else 0):
            offset = row * stride + region.start * inner
            self.read_bytes_into(stored, offset, memory[row * run : (row + 1) * run])
        return part

    def read(self, stored: StoredTensor) -> Tensor:
        """The tensor on the CPU, as stored."""
        tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        self.read_into(stored, tensor)
        return tensor

    def pieces(self, stored: StoredTensor) -> Iterator[memoryview]:
        """The tensor's bytes, at most PIECE_BYTES at a time; each piece is overwritten by the next."""
        buffer = memoryview(bytearray(min(PIECE_BYTES, stored.num_bytes)))
        for first in range(0, stored.num_bytes, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, stored.num_bytes - first)]
            self.read_bytes_into(stored, first, piece)
            yield piece


class TensorToWrite(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[memoryview]]  # its bytes, produced when their turn comes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def parse_size(size: str | int) -> int:
    """Bytes of "5GB" and the like (KB, MB, GB, TB: powers of 1000) or of a plain number."""
    if isinstance(size, int) and size > 0:
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)", str(size).strip().upper())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"max_shard_size: want a positive number of bytes or one like '5GB', got {size!r}")
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


def _plan(tensors: Iterable[TensorToWrite], max_bytes: int) -> list[list[TensorToWrite]]:
    shards: list[list[TensorToWrite]] = [[]]
    room = max_bytes
    for tensor in tensors:
        if tensor.num_bytes > room and shards[-1]:
            shards.append([])
            room = max_bytes
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    return shards


def _in_file_order(tensors: list[TensorToWrite]) -> list[TensorToWrite]:
    """Widest dtype first keeps every tensor aligned for readers that map the file."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def _write_shard(path: Path, tensors: list[TensorToWrite], on_bytes: Callable[[int], object]) -> None:
    tensors = _in_file_order(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for tensor in tensors:
            written = 0
            for piece in tensor.pieces():
                file.write(piece)
                written += len(piece)
                on_bytes(len(piece))
            assert written == tensor.num_bytes, (tensor.name, written, tensor.num_bytes)


def produce_pieces(tensors: Iterable[TensorToWrite], max_shard_size: str | int) -> None:
    """Ask for every tensor's bytes in the order of `write_shards`, and drop them: for a rank whose part another writes."""
    for shard in _plan(tensors, parse_size(max_shard_size)):
        for tensor in _in_file_order(shard):
            for _ in tensor.pieces():
                pass


def write_shards(
    folder: Path,
    tensors: Iterable[TensorToWrite],
    max_shard_size: str | int,
    on_bytes: Callable[[int], object] = lambda count: None,
) -> None:
    """Write tensors in the given order as one `model.safetensors`, or, above `max_shard_size`, as shards and an index.

    Everything is written under other names first; shards of an earlier checkpoint in the folder go when all is complete.
    """
    shards = _plan(tensors, parse_size(max_shard_size))
    count = len(shards)
    names = [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05d}-of-{count:06d}.safetensors" for i in range(count)]
    weight_map = {tensor.name: name for name, shard in zip(names, shards) for tensor in shard}
    total = sum(tensor.num_bytes for shard in shards for tensor in shard)
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f".{name}.part" for name in names]
    try:
        for path, shard in zip(written, shards):
            _write_shard(path, shard, on_bytes)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    # From here until the index stands, the folder is no checkpoint, and loading it says so.
    (folder / INDEX_FILE).unlink(missing_ok=True)
    for path in folder.iterdir():
        if _OWN_SHARDS.fullmatch(path.name):
            path.unlink()
    for path, name in zip(written, names):
        os.replace(path, folder / name)
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        partial = folder / f".{INDEX_FILE}.part"
        partial.write_text(json.dumps(index, indent=2) + "\n")
        os.replace(partial, folder / INDEX_FILE)
