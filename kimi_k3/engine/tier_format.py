"""What one stored entry is: a key, a dictionary of CPU tensors, and their one form as bytes, used by disk and remote tiers.

The bytes are a safetensors file. Its metadata names the format, the key and a sha256 over everything that decides what
the tensors are: key, names, dtypes, shapes and data. sha256 because it is both the strongest and, on CPUs with SHA
instructions, the fastest digest of the standard library (1.4 GB/s on one EPYC core; blake2b 0.5; crc32 2.2, but 32 bits).
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Payload = dict[str, Tensor]  # name -> CPU tensor; what one entry holds
Precision = Literal["exact", "bf16", "fp8"]

FORMAT = "kimi_k3-tier-1"  # changes when older bytes must not be read any more
FORMS = re.compile(r"kimi_k3-tier-.*")  # any FORMAT, and those of lossy codecs
KEY = re.compile(r"[0-9a-f]{64}(-[a-z0-9]{1,16}){0,8}")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 64  # of the first data byte, so that every tensor can be a view of the bytes read


class TierError(Exception):
    """An entry that cannot be read or written. `reason`: "damaged", "foreign", "io" or "timeout"."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


def check_payload(payload: Payload) -> None:
    """Raise ValueError unless `payload` is one or more named CPU tensors of a dtype that can be stored."""
    if not payload:
        raise ValueError("payload: want at least one tensor, got none")
    for name, tensor in payload.items():
        if not name.isidentifier() or name.startswith("__"):
            raise ValueError(f"payload: want names that are identifiers, got {name!r}")
        if tensor.device.type != "cpu" or tensor.dtype not in DTYPE_NAMES:
            got = f"{tensor.device}, {tensor.dtype}"
            raise ValueError(f"payload: want {name} on the CPU in a storable dtype, got {got}")


def payload_bytes(payload: Payload) -> int:
    """Bytes of the tensors' elements."""
    return sum(tensor.nbytes for tensor in payload.values())


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable if it is."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy between CPU tensors of equal bytes, in this thread alone and without the GIL.

    PyTorch's copy would start a team of OpenMP threads for the calling thread. With more of them than cores the runtime
    stops spinning at barriers, in the model's thread too: steps then take a fifth longer.
    """
    np.copyto(np.asarray(byte_view(target)), np.asarray(byte_view(source.contiguous())))


def pack(key: str, payload: Payload, format: str = FORMAT) -> list[memoryview]:
    """The pieces whose concatenation is the entry's safetensors file; the data pieces are views of the payload."""
    # Widest elements first: then every tensor starts on a multiple of its element size, without holes.
    ordered = sorted(payload.items(), key=lambda item: (-item[1].element_size(), item[0]))
    table: dict[str, Any] = {}
    pieces, position = [], 0
    for name, tensor in ordered:
        data = byte_view(tensor.contiguous())
        span = [position, position + data.nbytes]
        table[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        pieces.append(data)
        position = span[1]
    table["__metadata__"] = {"format": format, "key": key, "sha256": _digest(key, table, pieces)}
    header = json.dumps(table).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    return [memoryview(len(header).to_bytes(8, "little") + header), *pieces]


def unpack(key: str, data: Tensor, format: str = FORMAT) -> Payload:
    """The payload in `data`, [bytes] uint8, as views of it.

    Raises: TierError "damaged" if anything differs from what was packed, "foreign" if it is whole but is another
        format's or another key's.
    """
    try:
        start = 8 + int.from_bytes(data[:8].numpy().tobytes(), "little")
        table = json.loads(data[8 : min(start, len(data))].numpy().tobytes())
        metadata = table.pop("__metadata__", {})
        if metadata.get("format") != format:
            raise TierError("foreign", f"{key}: want format {format}, got {metadata.get('format')!r}")
        if _digest(metadata["key"], table, [byte_view(data[start:])]) != metadata["sha256"]:
            raise ValueError("checksum differs")
        payload = {}
        for name, entry in table.items():
            begin, end = entry["data_offsets"]
            payload[name] = data[start + begin : start + end].view(DTYPES[entry["dtype"]]).view(entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise TierError("damaged", f"{key}: {error}") from error
    if metadata["key"] != key:
        raise TierError("foreign", f"{key}: holds the entry of {metadata['key']}")
    return payload


def _digest(key: str, table: dict[str, Any], pieces: list[memoryview]) -> str:
    """sha256 of key, table and data: a flipped bit in a dtype or shape is as bad as one in the data."""
    digest = hashlib.sha256(json.dumps([FORMAT, key, table], sort_keys=True).encode())
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


@dataclass(frozen=True)
class LossyCodec:
    """What a tier keeps of an entry: everything, or fewer bits of "latents" and of "states" (any other tensor is exact).

    A tensor's name may go on after "_": states_3 are states.

    fp8: float8_e4m3fn with one float32 scale for each row of the last dimension (its largest magnitude / 448): error
    <= 2^-4 of an element, or 2^-10 / 448 of the row's largest where that is more. bf16: error <= 2^-8 of an element.
    A row with a non-finite element comes back non-finite.
    """

    latents: Precision = "exact"
    snapshots: Precision = "exact"

    def __post_init__(self) -> None:
        if self.latents not in ("exact", "fp8") or self.snapshots not in ("exact", "bf16", "fp8"):
            got = f"{self.latents!r}, {self.snapshots!r}"
            raise ValueError(f"LossyCodec: want latents exact|fp8, snapshots exact|bf16|fp8; got {got}")

    @property
    def format(self) -> str:
        """Names the form of the bytes, so that an exact and a lossy entry are never taken for each other."""
        return FORMAT if self == EXACT else f"{FORMAT}-lossy-{self.latents}-{self.snapshots}"

    def encode(self, payload: Payload) -> Payload:
        """What is stored. `name.like`, empty, keeps the original dtype; `name.scale` is float32."""
        stored: Payload = {}
        for name, tensor in payload.items():
            precision = {"latents": self.latents, "states": self.snapshots}.get(name.partition("_")[0], "exact")
            stored[name] = tensor
            if precision != "exact" and tensor.is_floating_point():
                stored[f"{name}.like"] = tensor.new_empty(0)
                if precision == "fp8":
                    scale = tensor.abs().amax(-1, keepdim=True).float() / torch.finfo(torch.float8_e4m3fn).max
                    tensor = tensor / stored.setdefault(f"{name}.scale", torch.where(scale == 0, 1.0, scale))
                stored[name] = tensor.to(torch.bfloat16 if precision == "bf16" else torch.float8_e4m3fn)
        return stored

    def decode(self, stored: Payload) -> Payload:
        """Undo `encode`, up to its rounding."""
        payload: Payload = {}
        for name, tensor in stored.items():
            if "." not in name:
                if f"{name}.scale" in stored:
                    tensor = tensor.float() * stored[f"{name}.scale"]
                payload[name] = tensor.to(stored[f"{name}.like"].dtype) if f"{name}.like" in stored else tensor
        return payload


EXACT = LossyCodec()
