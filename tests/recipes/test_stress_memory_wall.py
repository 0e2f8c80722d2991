"""The stress recipe on a model of two layers: nothing is lost, and what it reports is what happened."""

import csv
import math

import pytest
import stress_memory_wall
import torch
from stress_memory_wall import Bounds, Setup, Turn, overlap, percentile, users_within

from kimi_k3 import KimiK3Config, KimiK3ForCausalLM
from kimi_k3.configuration_kimi_k3 import KimiK3TextConfig
from kimi_k3.engine.device_pools import PoolLayout


@pytest.fixture(scope="module")
def model():
    text = KimiK3TextConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        linear_attn_config={
            "full_attn_layers": [2], "kda_layers": [1], "num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4,
            "use_full_rank_gate": True, "gate_lower_bound": -5.0,
        },
        attn_res_block_size=2, num_experts=4, num_experts_per_token=2, moe_intermediate_size=32,
        routed_expert_hidden_size=32, max_position_embeddings=4096, bos_token_id=250, eos_token_id=251, pad_token_id=255,
    )  # fmt: skip
    torch.manual_seed(0)
    config = KimiK3Config(
        text, None, bos_token_id=250, eos_token_id=251, pad_token_id=255, media_placeholder_token_id=252,
        tie_word_embeddings=False,
    )  # fmt: skip
    return KimiK3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


SMALL = ["--users", "3", "--turns", "2", "--reply-tokens", "4"]


def test_the_wall_is_climbed_without_a_loss(folder, tmp_path, capsys):
    rows = stress_memory_wall.main(["--model", str(folder), "--out", str(tmp_path), "--loads", "1,2", *SMALL])
    with (tmp_path / "stress_memory_wall.csv").open() as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(rows) == 2 * 2 * 2 * 2 + 1
    assert all(row.lost == 0 and row.requests == 2 * row.users for row in rows)
    assert len({row.memory_bytes for row in rows}) == 1  # load is what grows, memory is not
    by_users = {row.load: row.users for row in rows if row.what == "concurrency"}
    assert by_users == {1: 3, 2: 6} and {row.users for row in rows if row.what == "context"} == {3}
    hardest = [row for row in rows if (row.what, row.load) == ("concurrency", 2)]
    assert all(row.evictions for row in hardest) and any(row.fetches for row in hardest if row.tier == "host")
    assert all(row.tokens == 6 * 2 * 4 for row in hardest)
    out = capsys.readouterr().out
    assert "no memory ran out, no request lost: " in out and "of its peak" in out and "of transfers hidden" in out


def test_a_chat_that_could_never_fit_is_refused(folder, tmp_path):
    with pytest.raises(SystemExit, match="--users above the highest load, got 3 and 4"):
        stress_memory_wall.main(["--model", str(folder), "--out", str(tmp_path), "--loads", "1,4", *SMALL])


def test_tokens_do_not_depend_on_the_memory_or_the_tier(model):
    setup = Setup(model, 8, 128, "wall", 0, Bounds(math.inf, math.inf), {"batch_invariant": True})
    turns = [Turn(50, 4), Turn(30, 4)]
    page = PoolLayout(model).page_bytes
    sessions = [stress_memory_wall.Session(0.0, ("shared", 70), turns) for _ in range(6)]
    runs = [
        setup.run("", sessions, scheduler, tier, 1.0, pages * page)[1].all
        for scheduler, tier, pages in (("fcfs", "off", 1000), ("fcfs", "host", 4), ("dependency_aware", "host", 4))
    ]
    expected, *others = [sorted((a.session, a.turn, a.prompt, a.tokens) for a in asked) for asked in runs]
    assert len(expected) == 12 and others == [expected, expected]


def test_a_lost_request_is_an_error(model, monkeypatch):
    setup = Setup(model, 8, 128, "wall", 0, Bounds(math.inf, math.inf))
    sessions = [stress_memory_wall.Session(0.0, ("a", 8), [Turn(8, 3)])]
    monkeypatch.setattr(stress_memory_wall.Asked, "is_served", property(lambda asked: len(asked.tokens) == 4))
    with pytest.raises(RuntimeError, match="1 of 1 requests lost"):
        setup.run("", sessions, "fcfs", "off", 1.0, 1 << 20)


def test_both_schedulers_meet_the_same_arrivals(folder, tmp_path, capsys):
    arguments = ["--model", str(folder), "--out", str(tmp_path), "--compare", "--sessions", "6", "--clock", "cpu"]
    arguments += ["--traces", "chat,bursts"]
    rows = stress_memory_wall.main(arguments)
    assert [(row.what, row.scheduler) for row in rows[1:3]] == [("chat", "fcfs"), ("chat", "dependency_aware")]
    for name in ("chat", "bursts"):
        enough, *pair = [row for row in rows if row.what.startswith(name)]
        assert len({row.tokens for row in (enough, *pair)}) == 1 and enough.preemptions == 0
        assert pair[0].memory_bytes == pair[1].memory_bytes < enough.memory_bytes
        assert all(0 < row.decision_us < 1e4 and 0 < row.longest_wait_steps < 1000 for row in (enough, *pair))
    printed = capsys.readouterr().out
    assert printed.count("p95 between tokens") == 1 + 2
    for name in ("chat", "bursts"):
        fcfs, ours = [row.goodput_tokens_per_s for row in rows if row.what == name]
        (line,) = [line for line in printed.splitlines() if line.startswith(f"{name}: goodput by the bound")]
        assert f" 1.25: {ours:.1f} against {fcfs:.1f}," in line
    assert (tmp_path / "compare_schedulers.csv").exists()


def test_without_matplotlib_it_runs_and_says_that_there_is_no_png(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stress_memory_wall, "find_spec", lambda name: None)
    arguments = [*SMALL, "--loads", "1,2", "--raise", "concurrency"]
    stress_memory_wall.main(["--model", str(folder), "--out", str(tmp_path), *arguments])
    assert [path.name for path in tmp_path.iterdir()] == ["stress_memory_wall.csv"]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "PNG" in line]
    assert line == 'the CSV alone: no PNG is drawn without matplotlib (pip install "kimi-k3[plot]")'


def test_the_plot_is_a_png(folder, tmp_path):
    arguments = [*SMALL, "--loads", "1,2", "--raise", "concurrency"]
    stress_memory_wall.main(["--model", str(folder), "--out", str(tmp_path), *arguments])
    assert (tmp_path / "stress_memory_wall.png").read_bytes().startswith(b"\x89PNG")


def test_figures():
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0 and percentile(list(map(float, range(1, 101))), 95) == 95.0
    assert percentile([], 95) == 0.0
    # Two reads that overlap cover 0..3, one more 5..6; the engine was idle in 2..4 and 5.5..9.
    assert overlap([(0, 2), (5, 6), (1, 3)], [(2, 4), (5.5, 9)]) == (4, 1.5)

    class Row:
        def __init__(self, load, users, p95):
            self.load, self.users, self.first_token_p95_s = load, users, p95

    rows = [Row(1, 4, 1.0), Row(2, 8, 3.0), Row(4, 16, 9.0)]
    assert users_within(rows, 2.0) == 6 and users_within(rows, 9.5) == 16 and users_within(rows, 1.0) == 4
