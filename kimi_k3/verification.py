"""`kimi-k3 verify`: whether a folder's shards, index and config agree, from headers alone; and checksums on request."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kimi_k3.configuration_kimi_k3 import KimiK3Config
from kimi_k3.hub import HubOptions, _is_offline, hub_checksums, local_folder
from kimi_k3.inventory import check_stored, check_values, find_index, packed_layers_of
from kimi_k3.shards import (
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointError,
    Index,
    ShardReader,
    StoredTensor,
    read_header,
)
from kimi_k3.tensor_layout import (
    TensorSpec,
    expected_tensors,
    file_name_of,
    is_expert_stack,
    layer_of,
    module_name_of,
)

CHECKSUM_FILE = "SHA256SUMS"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass
class VerificationReport:
    """What `verify_folder` found. The checkpoint is whole if `problems` is empty."""

    folder: Path
    num_shards: int = 0
    num_tensors: int = 0  # in the shards that could be read
    tensor_bytes: int = 0
    file_bytes: int = 0
    tensors_by_dtype: dict[str, int] = field(default_factory=dict)
    checksums: str = "not asked for"
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # worth knowing, not wrong

    @property
    def is_whole(self) -> bool:
        return not self.problems


def verify_folder(path: str | Path, sha256: bool = False) -> VerificationReport:
    """Check every shard of a checkpoint folder against its index, and both against what config.json asks for.

    Reads headers, and of the tensor data only `A_log`, for its padding: E8M0 scales are checked when they are loaded.

    Args:
        sha256: also hash all shards against SHA256SUMS or the names of the Hub's cache; says so if there is neither.
    Raises: FileNotFoundError if there is no folder, config.json or checkpoint at all; ValueError for a wrong config.json.
    """
    folder = local_folder(path)
    if folder is None:
        raise FileNotFoundError(f"{path}: no such folder")
    config = KimiK3Config.from_pretrained(folder)
    report = VerificationReport(folder)
    index = _open_index(folder, report)
    if index is None:
        return report
    shards = sorted(set(index.weight_map.values()))
    report.num_shards = len(shards)
    expected = _expected_by_layout(config, index, report)
    _check_names(config, index, expected, report)

    lacking = Counter(index.weight_map.values())
    dtypes: Counter[str] = Counter()
    with ShardReader() as reader:
        for shard in shards:
            try:
                header = read_header(folder / shard)
            except CheckpointError as error:
                report.problems.append(str(error))
                continue
            report.file_bytes += (folder / shard).stat().st_size
            for name, stored in header.items():
                dtypes[stored.dtype] += 1
                report.tensor_bytes += stored.num_bytes
                home = index.weight_map.get(name)
                if home == shard:
                    lacking[shard] -= 1
                    _check_tensor(config, stored, expected, reader, report)
                elif home is None:
                    report.problems.append(f"{folder / shard}: unexpected tensor {name!r}: the index does not name it")
                else:
                    report.problems.append(
                        f"{folder / shard}: tensor {name!r} stands here and, by the index, in {home}"
                    )
            if lacking[shard]:
                gone = [n for n, home in index.weight_map.items() if home == shard and n not in header]
                report.problems += [f"{folder / shard}: lacks tensor {n!r}, which the index places there" for n in gone]
    report.num_tensors, report.tensors_by_dtype = dtypes.total(), dict(sorted(dtypes.items()))
    if index.total_size not in (None, report.tensor_bytes):
        report.problems.append(
            f"{folder / INDEX_FILE}: metadata.total_size is {index.total_size}, the shards hold {report.tensor_bytes} "
            "bytes of tensors"
        )
    others = sorted(p.name for p in folder.glob("*.safetensors") if p.name not in set(shards))
    if others:
        report.notes.append(f"no part of this checkpoint, and not read: {', '.join(others)}")
    if sha256:
        _verify_checksums(folder, shards, report)
    return report


def _open_index(folder: Path, report: VerificationReport) -> Index | None:
    try:
        return find_index(folder, HubOptions())
    except CheckpointError as error:
        report.problems.append(str(error))
        return None


def _expected_by_layout(config: KimiK3Config, index: Index, report: VerificationReport) -> dict[str, TensorSpec]:
    """The tensors that the config asks for, each layer's experts in the form (packed or plain) that the index names."""
    try:
        packed_layers = packed_layers_of(index)
    except CheckpointError as error:
        report.problems.append(str(error))
        packed_layers = {}
    says_packed = config.quantization_config is not None
    differing = sorted(layer for layer, packed in packed_layers.items() if packed != says_packed)
    if differing:
        held = "plain" if says_packed else "packed"
        report.notes.append(f"config.json and shards disagree: the experts of layers {differing} are {held}")
    forms = {packed: expected_tensors(config, packed) for packed in (True, False)}
    expected = {}
    for packed, tensors in forms.items():
        for name, spec in tensors.items():
            layer = layer_of(name)
            if not is_expert_stack(name) or (layer is not None and packed_layers.get(layer, says_packed) == packed):
                expected[name] = spec
    return expected


def _check_names(
    config: KimiK3Config, index: Index, expected: dict[str, TensorSpec], report: VerificationReport
) -> None:
    weight_map = index.weight_map
    wanted = set()
    for module_name in expected:
        if is_expert_stack(module_name):
            wanted |= {file_name_of(module_name, e) for e in range(config.text_config.num_experts)}
        else:
            wanted.add(file_name_of(module_name))
    where = report.folder / (INDEX_FILE if (report.folder / INDEX_FILE).exists() else SINGLE_FILE)
    report.problems += [f"{where}: missing tensor {name!r}" for name in sorted(wanted - weight_map.keys())]
    report.problems += [
        f"{where}: unexpected tensor {name!r}, placed in {weight_map[name]}"
        for name in sorted(weight_map.keys() - wanted)
    ]


def _check_tensor(
    config: KimiK3Config, stored: StoredTensor, expected: dict[str, TensorSpec], reader: ShardReader,
    report: VerificationReport,
) -> None:  # fmt: skip
    module_name, expert = module_name_of(stored.name)
    spec = expected.get(module_name)
    if spec is None:  # named already, as unexpected
        return
    heads = config.text_config.kda_num_heads
    try:
        check_stored(stored, spec.shape if expert is None else spec.shape[1:], spec.dtype, module_name, heads)
        if module_name.endswith(".A_log"):
            check_values(stored, module_name, reader.read(stored), heads)
    except CheckpointError as error:
        report.problems.append(str(error))


def _verify_checksums(folder: Path, shards: list[str], report: VerificationReport) -> None:
    present = [shard for shard in shards if (folder / shard).exists()]
    known = _local_checksums(folder, present)
    unknown = [shard for shard in present if shard not in known]
    for shard in _mismatches(folder, known):
        report.problems.append(f"{folder / shard}: SHA-256 differs from {known[shard]}")
    report.checksums = f"{len(known)} of {len(present)} shards hashed"
    if unknown:
        report.notes.append(
            f"no SHA-256 is known (no {CHECKSUM_FILE}, not in the Hub's cache) of: {', '.join(unknown)}"
        )


def check_sha256(path_or_repo: str | Path, folder: Path, shards: list[str], hub: HubOptions) -> None:
    """Hash shards against SHA256SUMS, the Hub's metadata or, offline, the names in the Hub's cache.

    Raises: CheckpointError naming a shard whose hash differs; ValueError if no hash is known for one.
    """
    known = _local_checksums(folder, shards)
    if local_folder(path_or_repo) is None and not (hub.local_files_only or _is_offline()):
        known |= hub_checksums(str(path_or_repo), shards, hub)
    unknown = [shard for shard in shards if shard not in known]
    if unknown:
        raise ValueError(
            f"from_pretrained: verify='sha256': no SHA-256 is known of {unknown[0]} and {len(unknown) - 1} more in {folder}: "
            f"want a {CHECKSUM_FILE} there, or a Hub repository"
        )
    for shard in _mismatches(folder, {shard: known[shard] for shard in shards}):
        raise CheckpointError(f"{folder / shard}: SHA-256 differs from {known[shard]}")


def _local_checksums(folder: Path, shards: list[str]) -> dict[str, str]:
    known = {}
    listing = folder / CHECKSUM_FILE
    for line in listing.read_text().splitlines() if listing.exists() else []:
        value, _, name = line.partition(" ")
        name = name.lstrip(" *")
        if _SHA256.fullmatch(value) and name in shards:
            known[name] = value
    for shard in shards:
        # The Hub's cache names a large file by its SHA-256, and a snapshot links to it.
        target = (folder / shard).resolve().name
        if shard not in known and _SHA256.fullmatch(target):
            known[shard] = target
    return known


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mismatches(folder: Path, known: dict[str, str]) -> list[str]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing runs outside the interpreter's lock
        hashes = pool.map(lambda shard: _sha256(folder / shard), known)
        return [shard for shard, value in zip(known, hashes) if value != known[shard]]
