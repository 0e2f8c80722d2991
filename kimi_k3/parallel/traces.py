"""Recorded routing: which experts each token chose in each MoE layer, read from three forms of file, written in one.

    JSONL   {"step": 0, "layer": 1, "top_indices": [[12, 45, ...], ...]} a line: one step, one layer, a row a token.
            Megatron-core's router trace, and what `TraceWriter` writes; ours adds "num_experts", of the layer. Other keys
            are read past.
    JSONL   {"tok": 0, "layers": [[12, 45, ...], ...]} a line: one token, a row a MoE layer (sqliteai/waste).
    .bin    little-endian (uint32 layer, uint32 expert) pairs, layer by layer inside a forward pass (the same).

A load is a count of choices by real tokens: over a layer it adds up to tokens x experts per token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch

# Below this mean count of an expert in a window, chance alone passes twice the median: uniform routing over 896 experts
# is expected to flag 12 of them at a mean of 5, 2.2 at 9 and 0.05 at 18.
MIN_MEAN_COUNT = 18
HOT_ON, HOT_OFF = 2.0, 1.5
FALSE_ALARM = 0.01  # chance that uniform routing flags any expert of any layer in a window
ACCEPTABLE_RATIO = 2.0  # busiest worker over mean: above it is an alarm, not a working point


class RoutingRecord(NamedTuple):
    """Choices of one step's tokens in one layer: topk_ids [T, A] int64."""

    step: int
    layer: int
    topk_ids: np.ndarray


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """Routing records in the order of the file. `layers` are the numbers the file uses: ours count decoder layers from 0.

    Raises: ValueError if a token chooses an expert twice or one that is out of range, or nothing is recorded.
    """

    records: tuple[RoutingRecord, ...]
    num_experts: int

    def __post_init__(self) -> None:
        if not self.records:
            raise ValueError("trace: want at least one record, got none")
        for record in self.records:
            where = f"trace: step {record.step}, layer {record.layer}"
            if record.topk_ids.ndim != 2:
                raise ValueError(f"{where}: want a row of experts for each token, got shape {record.topk_ids.shape}")
            if record.topk_ids.size and not 0 <= record.topk_ids.min() <= record.topk_ids.max() < self.num_experts:
                raise ValueError(f"{where}: want experts below {self.num_experts}, got {record.topk_ids.max()}")
            if (np.diff(np.sort(record.topk_ids, 1), axis=1) == 0).any():
                raise ValueError(f"{where}: a token chose the same expert twice")

    @property
    def layers(self) -> list[int]:
        return sorted({record.layer for record in self.records})

    def topk_ids(self, layer: int) -> np.ndarray:
        """[T, A]: all tokens of one layer, in order."""
        found = [record.topk_ids for record in self.records if record.layer == layer and len(record.topk_ids)]
        return np.concatenate(found) if found else np.zeros((0, 0), np.int64)

    @property
    def num_tokens(self) -> int:
        """Of the layer with fewest."""
        totals = dict.fromkeys(self.layers, 0)
        for record in self.records:
            totals[record.layer] += len(record.topk_ids)
        return min(totals.values())

    def counts(self) -> np.ndarray:
        """[L, E] int64: choices of each expert, a row for each of `layers`."""
        row = {layer: index for index, layer in enumerate(self.layers)}
        counts_LE = np.zeros((len(row), self.num_experts), np.int64)
        for record in self.records:
            counts_LE[row[record.layer]] += np.bincount(record.topk_ids.ravel(), minlength=self.num_experts)
        return counts_LE

    def windows(self, tokens: int) -> np.ndarray:
        """[N, L, E] int64: counts of successive windows of `tokens` tokens; a last, shorter one is left out."""
        number = self.num_tokens // tokens
        counts_NLE = np.zeros((number, len(self.layers), self.num_experts), np.int64)
        for index, layer in enumerate(self.layers):
            ids_TA = self.topk_ids(layer)
            for window in range(number):
                ids = ids_TA[window * tokens : (window + 1) * tokens].ravel()
                counts_NLE[window, index] = np.bincount(ids, minlength=self.num_experts)
        return counts_NLE

    def tokens_for_a_window(self) -> int:
        """Tokens until the mean count of an expert is MIN_MEAN_COUNT: 1,008 for 16 of 896."""
        chosen = max(record.topk_ids.shape[1] for record in self.records)
        return math.ceil(MIN_MEAN_COUNT * self.num_experts / max(chosen, 1))


# Reading.


def read_trace(path: str | Path, num_experts: int | None = None, topk: int = 16) -> RoutingTrace:
    """Read a trace in any of the three forms.

    Args:
        num_experts: None: as the file says; where it does not (older and other writers), one more than the highest expert
            in it, up to a multiple of 64, and 896 for .bin.
        topk: experts of a token in .bin, which does not tell.
    Raises: ValueError naming file and line for what is none of the forms, or says different numbers of experts.
    """
    path = Path(path)
    if path.suffix == ".bin":
        return RoutingTrace(tuple(_read_pairs(path, topk)), num_experts or 896)
    told = set[int]()
    records = tuple(_read_lines(path, told))
    if num_experts is None and len(told) > 1:
        raise ValueError(f"trace: {path}: want one number of experts in all lines, got {sorted(told)}")
    highest = max((int(record.topk_ids.max()) for record in records if record.topk_ids.size), default=0)
    return RoutingTrace(records, num_experts or max(told, default=-(-(highest + 1) // 64) * 64))


def _read_pairs(path: Path, topk: int) -> Iterator[RoutingRecord]:
    """A pass that starts with all rows of the pass before it has run them again: only its new rows are tokens."""
    pairs = np.fromfile(path, "<u4").astype(np.int64)
    if not pairs.size or pairs.size % 2:
        raise ValueError(f"trace: {path}: want (layer, expert) pairs of uint32, got {path.stat().st_size} bytes")
    layers, experts = pairs.reshape(-1, 2).T
    starts = np.flatnonzero(np.diff(layers, prepend=layers[0] - 1))
    step, previous, earlier = 0, -1, dict[int, np.ndarray]()
    for begin, end in zip(starts, [*starts[1:], len(layers)]):
        layer = int(layers[begin])
        if layer < previous:
            step += 1
        previous = layer
        if (end - begin) % topk:
            raise ValueError(
                f"trace: {path}: layer {layer} of pass {step} has {end - begin} choices, not {topk} a token"
            )
        rows_TA = experts[begin:end].reshape(-1, topk)
        known = earlier.get(layer, rows_TA[:0])
        again = len(known) if np.array_equal(np.sort(rows_TA[: len(known)], 1), np.sort(known, 1)) else 0
        earlier[layer] = rows_TA
        yield RoutingRecord(step, layer, rows_TA[again:])


def _read_lines(path: Path, told: set[int]) -> Iterator[RoutingRecord]:
    """told: gets the numbers of experts that the lines say."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
                if "top_indices" in values:
                    if "mtp_idx" in values:  # a draft layer, numbered apart from the decoder's
                        continue
                    if "num_experts" in values:
                        told.add(int(values["num_experts"]))
                    yield RoutingRecord(int(values["step"]), int(values["layer"]), _rows(values["top_indices"]))
                else:
                    for layer, row in enumerate(values["layers"]):
                        yield RoutingRecord(int(values["tok"]), layer, _rows([row]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"trace: {path}: line {number} is no record of routing: {error}") from error


def _rows(rows: Sequence[Sequence[int]]) -> np.ndarray:
    ids_TA = np.asarray(rows)
    if ids_TA.size and (ids_TA.ndim != 2 or ids_TA.dtype.kind != "i"):
        raise ValueError("want rows of whole numbers, all of one length")
    return ids_TA.astype(np.int64).reshape(len(rows), -1 if len(rows) else 0)


# Writing.


class TraceWriter:
    """Write routing as it happens, one line for a step and layer; `gen.record_trace` and tests use it.

        with TraceWriter("routing.jsonl") as trace:
            trace.write(step=0, layer=1, topk_ids=ids)      # [T, A], of real tokens only: no padding

    A file is written by one rank. Layers are decoder layers from 0. num_experts: of a layer; None: the file does not say.
    """

    def __init__(self, path: str | Path, rank: int = 0, num_experts: int | None = None) -> None:
        self.rank, self._told = rank, {} if num_experts is None else {"num_experts": num_experts}
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  (closed by close())

    def write(self, step: int, layer: int, topk_ids: Any) -> None:
        """topk_ids: [T, A] whole numbers, a tensor on any device or an array; T may be 0."""
        if isinstance(topk_ids, torch.Tensor):
            topk_ids = topk_ids.tolist()
        rows_TA = _rows(topk_ids)
        record = {
            "step": step, "block": "decoder", "layer": layer, "rank": self.rank, "num_tokens": len(rows_TA),
            "topk": rows_TA.shape[1], **self._told, "top_indices": rows_TA.tolist(),
        }  # fmt: skip
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def write_all(self, records: Iterable[RoutingRecord]) -> None:
        for record in records:
            self.write(*record)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


# What a trace says about load.


class HotExperts:
    """Which experts are hot, window by window, with a guard against noise and hysteresis.

    An expert becomes hot above HOT_ON x the median of its layer and stays so until it falls below HOT_OFF x. A layer
    whose mean count is below MIN_MEAN_COUNT changes nothing, and neither does a count that uniform routing would reach,
    anywhere in the table, once in 1 / FALSE_ALARM windows (Poisson): at a mean of 18 in 92 layers that is 2.6 x.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.is_hot = np.zeros((num_layers, num_experts), bool)

    def update(self, counts_LE: np.ndarray) -> np.ndarray:
        """Take the counts of one window. Returns: [L, E] bool, hot from now on."""
        median_L1 = np.median(counts_LE, axis=1, keepdims=True)
        mean_L1 = counts_LE.mean(axis=1, keepdims=True)
        counts, mean = (
            torch.from_numpy(np.broadcast_to(x, counts_LE.shape).astype(float)) for x in (counts_LE, mean_L1)
        )
        # P(count or more | Poisson(mean)) is the lower incomplete gamma function.
        chance_LE = torch.special.gammainc(counts.clamp(min=1e-300), mean.clamp(min=1e-300)).numpy()
        is_sure = chance_LE < FALSE_ALARM / counts_LE.size
        turned_on = (counts_LE > HOT_ON * median_L1) & is_sure
        stays_on = self.is_hot & (counts_LE >= HOT_OFF * median_L1)
        self.is_hot = np.where(mean_L1 >= MIN_MEAN_COUNT, turned_on | stays_on, self.is_hot)
        return self.is_hot


def share_of_top_experts(counts_LE: np.ndarray, fraction: float = 0.2) -> np.ndarray:
    """[L]: of all choices, those that went to the busiest `fraction` of the experts; 0.2 if uniform."""
    top = max(1, round(fraction * counts_LE.shape[1]))
    ordered = np.sort(counts_LE, axis=1)[:, ::-1]
    return ordered[:, :top].sum(1) / np.maximum(counts_LE.sum(1), 1)


def recommended_copies(counts_LE: np.ndarray, is_hot_LE: np.ndarray) -> np.ndarray:
    """[L, E] int: active copies with which no hot expert's copy has more than HOT_OFF x the median; 1 for the others."""
    bound = np.maximum(HOT_OFF * np.median(counts_LE, axis=1, keepdims=True), 1)
    return np.where(is_hot_LE, np.maximum(np.ceil(counts_LE / bound), 2), 1).astype(int)
