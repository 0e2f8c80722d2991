"""What a checkpoint holds: its index, its shards' headers, and whether each tensor is what the config asks for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kimi_k3.configuration_kimi_k3 import MXFP4_GROUP
from kimi_k3.hub import HubOptions, resolve_file, resolve_files
from kimi_k3.shards import (
    DTYPE_NAMES,
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointError,
    Index,
    StoredTensor,
    read_header,
    read_index,
)
from kimi_k3.tensor_layout import layer_of, module_name_of


@dataclass
class CheckpointSource:
    """Where a loaded model came from: what saving needs to give untrained tensors their bytes back."""

    folder: Path
    stored: dict[str, StoredTensor]  # by file name: what was loaded, and `carried`
    carried: tuple[str, ...]  # names that the class does not hold and saving streams through
    signatures: dict[Path, tuple[int, int]]  # size and mtime of each shard when it was loaded
    bytes_read: int = 0  # of tensors, by this process

    def is_intact(self, name: str) -> bool:
        """Whether the shard of a tensor is still the file that was loaded."""
        file = self.stored[name].file
        return file.exists() and signature_of(file) == self.signatures[file]


def signature_of(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def find_index(path_or_repo: str | Path, hub: HubOptions) -> Index:
    """The index of a folder or repository, or one made from the header of its only shard, `model.safetensors`."""
    try:
        return read_index(resolve_file(path_or_repo, INDEX_FILE, **hub._asdict()))
    except FileNotFoundError:
        pass
    try:
        folder = resolve_files(path_or_repo, [SINGLE_FILE], hub)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path_or_repo}: neither {INDEX_FILE} nor {SINGLE_FILE}: {error}") from error
    if not (folder / SINGLE_FILE).exists():
        raise FileNotFoundError(f"{path_or_repo}: neither {INDEX_FILE} nor {SINGLE_FILE}")
    return Index(dict.fromkeys(read_header(folder / SINGLE_FILE), SINGLE_FILE), None)


def packed_layers_of(index: Index) -> dict[int, bool]:
    """For each layer with routed experts, whether the shards hold them packed. Raises CheckpointError for a mixed layer."""
    weight_map = index.weight_map
    packed_layers: dict[int, bool] = {}
    first: dict[int, str] = {}
    for name in weight_map:
        module_name, expert = module_name_of(name)
        layer = layer_of(module_name)
        if expert is None or layer is None:
            continue
        packed = module_name.endswith(("_packed", "_scale"))
        if packed_layers.setdefault(layer, packed) != packed:
            raise CheckpointError(
                f"layer {layer} mixes packed and plain experts: tensor {first[layer]!r} in {weight_map[first[layer]]}, "
                f"tensor {name!r} in {weight_map[name]}"
            )
        first.setdefault(layer, name)
    return packed_layers


def some_of(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def read_headers(
    folder: Path, index: Index, shards: Collection[str], is_whole: bool, verify: str | None
) -> dict[str, StoredTensor]:
    """Where the tensors of these shards lie. Each shard must hold exactly what the index says it does."""
    by_shard: dict[str, set[str]] = defaultdict(set)
    for name, shard in index.weight_map.items():
        by_shard[shard].add(name)
    stored: dict[str, StoredTensor] = {}
    for shard in sorted(shards):
        header = read_header(folder / shard)
        lacking = by_shard[shard] - header.keys()
        if lacking:
            raise CheckpointError(
                f"{folder / shard}: lacks tensors that the index places there: {some_of(sorted(lacking))}"
            )
        for name in header.keys() - by_shard[shard]:
            if name in index.weight_map:
                other = index.weight_map[name]
                raise CheckpointError(f"{folder / shard}: tensor {name!r} stands here and, by the index, in {other}")
            raise CheckpointError(f"{folder / shard}: unexpected tensor {name!r}: the index does not name it")
        stored |= header
    total = sum(tensor.num_bytes for tensor in stored.values())
    if verify is not None and is_whole and index.total_size not in (None, total):
        raise CheckpointError(
            f"{folder / INDEX_FILE}: metadata.total_size is {index.total_size}, the shards hold {total} bytes of tensors"
        )
    return stored


def check_stored(
    stored: StoredTensor, shape: tuple[int, ...], dtype: torch.dtype, module_name: str, a_log_heads: int
) -> None:
    """Raise CheckpointError if a tensor does not have this shape (of one expert, in a stack) and dtype."""
    where = f"{stored.file}: tensor {stored.name!r}"
    if stored.dtype != DTYPE_NAMES[dtype]:
        raise CheckpointError(f"{where}: want dtype {DTYPE_NAMES[dtype]}, got {stored.dtype}")
    if module_name.endswith(".A_log"):
        if len(stored.shape) != 1 or stored.shape[0] < a_log_heads:
            raise CheckpointError(f"{where}: want at least {a_log_heads} values (heads), got {list(stored.shape)}")
    elif stored.shape != shape:
        hint = f" (groups of {MXFP4_GROUP})" if module_name.endswith("_scale") else ""
        raise CheckpointError(f"{where}: want shape {list(shape)}{hint}, got {list(stored.shape)}")


def check_values(stored: StoredTensor, module_name: str, values: Tensor, a_log_heads: int) -> None:
    if module_name.endswith("_scale"):
        if values.max() == 255:
            raise CheckpointError(f"{stored.file}: tensor {stored.name!r}: E8M0 scale 255 (not a number)")
    elif module_name.endswith(".A_log") and values[a_log_heads:].any():
        place = a_log_heads + int(values[a_log_heads:].nonzero()[0])
        raise CheckpointError(
            f"{stored.file}: tensor {stored.name!r}: want zeros after the {a_log_heads} heads, got "
            f"{values[place].item()} at {place}"
        )


def open_source(folder: Path, carried: tuple[str, ...] = ()) -> CheckpointSource:
    """Every tensor of a folder, after checking that its shards and index agree."""
    index = find_index(folder, HubOptions())
    shards = set(index.weight_map.values())
    stored = read_headers(folder, index, shards, is_whole=True, verify="size")
    return CheckpointSource(folder, stored, carried, {folder / s: signature_of(folder / s) for s in shards})
