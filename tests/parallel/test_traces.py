"""Routing traces: the forms of file, and what is said of load, against counts by loops and figures found elsewhere."""

import json
import os
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from kimi_k3.cli import main
from kimi_k3.parallel.placement import ExpertPlacement
from kimi_k3.parallel.placement_cli import describe_imbalance
from kimi_k3.parallel.traces import (
    HotExperts,
    RoutingRecord,
    RoutingTrace,
    TraceWriter,
    read_trace,
    recommended_copies,
    share_of_top_experts,
)


def public(name: str) -> Path:
    if "KIMI_K3_TEST_DATA" not in os.environ:
        pytest.skip("KIMI_K3_TEST_DATA is not set")
    return Path(os.environ["KIMI_K3_TEST_DATA"]) / name


def random_rows(generator: np.random.Generator, tokens: int, experts: int, topk: int) -> np.ndarray:
    return generator.random((tokens, experts)).argsort(1)[:, :topk]


def test_what_is_written_is_read_again(tmp_path):
    generator = np.random.default_rng(0)
    written = [
        RoutingRecord(step, layer, random_rows(generator, tokens, 64, 4))
        for step, tokens in enumerate((5, 0, 3)) for layer in (1, 2)
    ]  # fmt: skip
    with TraceWriter(tmp_path / "a.jsonl") as trace:
        for step, layer, rows in written[:2]:
            trace.write(step=step, layer=layer, topk_ids=torch.from_numpy(rows).int())
        trace.write_all(written[2:])
    read = read_trace(tmp_path / "a.jsonl", num_experts=64)
    assert [(r.step, r.layer, r.topk_ids.tolist()) for r in read.records] == [
        (r.step, r.layer, r.topk_ids.tolist()) for r in written
    ]
    assert read.layers == [1, 2] and read.num_tokens == 8
    for row, layer in enumerate(read.layers):
        counted = Counter(int(e) for r in written if r.layer == layer for e in r.topk_ids.ravel())
        assert {e: int(n) for e, n in enumerate(read.counts()[row]) if n} == counted
    assert (read.counts().sum(1) == 8 * 4).all()


def test_the_written_form_is_megatrons(tmp_path):
    with TraceWriter(tmp_path / "a.jsonl", rank=2) as trace:
        trace.write(7, 3, torch.tensor([[5, 1], [0, 9]]))
    assert json.loads((tmp_path / "a.jsonl").read_text()) == {
        "step": 7, "block": "decoder", "layer": 3, "rank": 2, "num_tokens": 2, "topk": 2, "top_indices": [[5, 1], [0, 9]],
    }  # fmt: skip


def test_the_number_of_experts_is_written_and_read(tmp_path):
    """Also where nobody chose the last ones; what the caller says comes first; an older file is read as it was."""
    path = tmp_path / "a.jsonl"
    with TraceWriter(path, num_experts=16) as trace:
        trace.write(0, 1, torch.tensor([[5, 1], [0, 9]]))
        trace.write(0, 2, torch.zeros(0, 2))
    assert [json.loads(line)["num_experts"] for line in path.read_text().splitlines()] == [16, 16]
    assert read_trace(path).num_experts == 16 and read_trace(path, num_experts=32).num_experts == 32
    older = path.read_text().replace('"num_experts":16,', "")
    path.write_text(older)
    assert read_trace(path).num_experts == 64
    path.write_text(older.replace('"topk"', '"num_experts":8,"topk"'))
    with pytest.raises(ValueError, match="want experts below 8, got 9"):
        read_trace(path)
    path.write_text(path.read_text() + older.replace('"topk"', '"num_experts":16,"topk"'))
    with pytest.raises(ValueError, match=r"want one number of experts in all lines, got \[8, 16\]"):
        read_trace(path)
    path.write_text(older.replace('"topk"', '"num_experts":"x","topk"'))
    with pytest.raises(ValueError, match="line 1 is no record of routing"):
        read_trace(path)


def test_megatrons_own_lines_are_read(tmp_path):
    lines = [
        {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0, "num_tokens": 1, "topk": 2,
         "top_indices": [[12, 45]]},
        {"step": 0, "layer": 3, "mtp_idx": 0, "top_indices": [[1, 2]]},
        {"step": 1, "layer": 3, "top_indices": [[1, 12]]},
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    trace = read_trace(tmp_path / "a.jsonl")
    assert trace.num_experts == 64 and trace.topk_ids(3).tolist() == [[12, 45], [1, 12]]


def test_a_pass_that_runs_a_prefix_again_counts_its_new_tokens(tmp_path):
    passes = [{1: [[0, 1]], 2: [[2, 3]]}, {1: [[1, 0], [4, 5]], 2: [[2, 3], [6, 7]]}]  # order inside a token is free
    pairs = [(layer, e) for one in passes for layer, rows in one.items() for row in rows for e in row]
    (tmp_path / "a.bin").write_bytes(b"".join(struct.pack("<II", *pair) for pair in pairs))
    trace = read_trace(tmp_path / "a.bin", num_experts=8, topk=2)
    assert trace.topk_ids(1).tolist() == [[0, 1], [4, 5]] and trace.topk_ids(2).tolist() == [[2, 3], [6, 7]]


def test_the_trace_of_the_release_has_twelve_tokens():
    trace = read_trace(public("expert_trace.bin"))
    assert trace.layers == list(range(1, 93)) and trace.num_experts == 896 and trace.num_tokens == 12
    assert (trace.counts().sum(1) == 12 * 16).all()


@pytest.mark.parametrize("workers, ratio", [(8, "1.61"), (16, "2.17"), (32, "3.37")])
def test_skew_of_kimi_linear_is_as_measured_before(workers, ratio):
    counts = read_trace(public("traces/trace_kimi.jsonl")).counts()
    plan = ExpertPlacement.contiguous(256, workers, len(counts))
    assert f"{plan.imbalance(counts).mean():.2f}" == ratio


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"step": 0, "layer": 1, "top_indices": [[1, 1]]}', "chose the same expert twice"),
        ('{"step": 0, "layer": 1, "top_indices": [[1, 70]]}', "want experts below 64"),
        ('{"step": 0, "layer": 1, "top_indices": [[1, 2], [3]]}', "line 1 is no record"),
        ('{"step": 0, "layer": 1, "top_indices": [[1.5, 2]]}', "line 1 is no record"),
        ('{"other": 1}', "line 1 is no record"),
        ("not json", "line 1 is no record"),
        ("", "want at least one record"),
    ],
)
def test_broken_files_are_refused(tmp_path, text, message):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(tmp_path / "a.jsonl", num_experts=64)


def test_a_cut_binary_trace_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(struct.pack("<II", 1, 5) * 15)
    with pytest.raises(ValueError, match="15 choices, not 16 a token"):
        read_trace(tmp_path / "a.bin")


# Hot experts.


def test_uniform_routing_has_no_hot_expert():
    """At a mean of 18 a bare 2 x median would flag about 5 of these 82,432 counts in each window."""
    generator, bare = np.random.default_rng(0), 0
    for _ in range(20):
        counts = generator.poisson(18, (92, 896))
        assert not HotExperts(92, 896).update(counts).any()
        bare += int((counts > 2 * np.median(counts, axis=1, keepdims=True)).sum())
    assert bare > 20


def test_hysteresis_and_the_noise_guard():
    base = np.full((1, 100), 40)

    def window(count: int, scale: float = 1) -> np.ndarray:
        counts = base.copy()
        counts[0, 7] = count
        return (counts * scale).astype(int)

    hot = HotExperts(1, 100)
    assert not hot.update(window(80)).any()  # not above 2 x
    assert not hot.update(window(400, scale=0.25)).any()  # mean 10: too few to say
    assert np.flatnonzero(hot.update(window(90))).tolist() == [7]
    assert hot.update(window(70)).any() and hot.update(window(61)).any()  # between 1.5 x and 2 x it stays
    assert hot.update(window(40, scale=0.25)).any()  # too few to say that it is over
    assert not hot.update(window(59)).any() and not hot.update(window(70)).any()


def test_recommended_copies_bring_every_copy_under_the_bound():
    counts = np.array([[10, 10, 10, 10, 31, 16]])
    is_hot = np.array([[False] * 4 + [True, True]])
    copies = recommended_copies(counts, is_hot)
    assert copies.tolist() == [[1, 1, 1, 1, 3, 2]]
    assert (counts[0, 4:] / copies[0, 4:] <= 1.5 * np.median(counts)).all()


def test_share_of_the_top_fifth():
    assert share_of_top_experts(np.ones((1, 10)))[0] == 0.2
    assert share_of_top_experts(np.array([[8, 0, 0, 2, 10, 0, 0, 0, 0, 0]]))[0] == 18 / 20


def skewed_trace(hot: int | None) -> RoutingTrace:
    generator = np.random.default_rng(3)
    rows = random_rows(generator, 2000, 64, 4)
    if hot is not None:
        rows[:, 0] = np.where((rows == hot).any(1), rows[:, 0], np.where(generator.random(2000) < 0.5, hot, rows[:, 0]))
    return RoutingTrace((RoutingRecord(0, 1, rows),), 64)


def test_imbalance_finds_the_hot_expert_and_says_how_many_replicas():
    values = describe_imbalance(skewed_trace(hot=9), workers=8)
    (layer,) = values["layers"]
    assert values["enough_tokens"] and [one["expert"] for one in layer["hot"]] == [9]
    assert layer["hot"][0]["copies"] > 2 and layer["worker_max_over_mean"] > 1.5
    assert values["replicas_to_level_workers"] is not None
    assert describe_imbalance(skewed_trace(hot=None), workers=8)["hot_experts"] == 0


def test_imbalance_of_few_tokens_judges_no_expert(capsys):
    path = str(public("traces/trace_kimi.jsonl"))
    assert main(["placement", "imbalance", "--trace", path, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["enough_tokens"] is False and values["hot_experts"] == 0 and values["window_tokens"] == 576
    assert values["acceptable_ratio"] == 2.0 and len(values["layers"]) == 26
    assert main(["placement", "imbalance", "--trace", path]) == 0
    assert "too few tokens" in capsys.readouterr().out


def test_imbalance_of_our_own_trace_knows_its_experts(tmp_path, capsys):
    path, rows = tmp_path / "a.jsonl", np.stack([np.arange(8), np.arange(8) + 1], 1)
    with TraceWriter(path, num_experts=16) as trace:
        trace.write(0, 1, rows)
    printed = []
    for more in ([], ["--experts", "16"]):
        assert main(["placement", "imbalance", "--trace", str(path), "--workers", "4", *more]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and printed[0].startswith("8 tokens, 1 layers of 16 experts\n")
