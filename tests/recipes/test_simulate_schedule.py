import json
import random
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import simulate_schedule
from simulate_schedule import (
    BLOCK,
    EXPERTS,
    KDA_STATE_BYTES,
    LATENT_BYTES,
    MOE_LAYERS,
    TOPK,
    TRACES,
    ExpertLoad,
    Machine,
    Session,
    Simulation,
    Turn,
    compose,
    read_routing,
    recorded_shares,
    simulate,
    step_seconds,
    zipf_shares,
)

import kimi_k3
from kimi_k3 import KimiK3ForCausalLM, KimiK3Generator, SamplingParams
from kimi_k3.engine.scheduler import SCHEDULERS
from kimi_k3.planning import STATE_BYTES

MACHINE = Machine()
LOAD = ExpertLoad(zipf_shares(0.5, 0), MACHINE)


def test_the_sizes_are_those_of_k3():
    assert KDA_STATE_BYTES == 69 * 96 * 128 * 128 * STATE_BYTES == 434_110_464 and LATENT_BYTES == 27_648


def test_shares_add_up_and_none_is_above_one():
    for exponent in (0, 0.5, 2):
        shares = zipf_shares(exponent, 0)
        assert shares.shape == (MOE_LAYERS, EXPERTS) and shares.max() <= 1
        np.testing.assert_allclose(shares.sum(1), TOPK)


def test_distinct_experts_match_a_draw():
    """16 of 896 for each of 64 tokens, drawn without replacement, against 1 - (1 - p) ** 64."""
    rng, uniform = np.random.default_rng(0), ExpertLoad(zipf_shares(0, 0), MACHINE)
    drawn = [len({e for _ in range(64) for e in rng.choice(EXPERTS, TOPK, replace=False)}) for _ in range(50)]
    assert uniform.at(64)[0] == pytest.approx(np.mean(drawn), rel=0.02)
    assert uniform.at(1)[0] == pytest.approx(TOPK, rel=1e-6) and LOAD.at(64)[0] < uniform.at(64)[0]


def test_a_step_costs_more_with_every_load():
    base = step_seconds(MACHINE, LOAD, 32, 256, 1, 10**5, 10**6)
    more = [
        (64, 256, 1, 10**5, 10**6),
        (32, 2048, 1, 10**5, 10**6),
        (32, 256, 9, 10**5, 10**6),
        (32, 256, 1, 10**6, 10**6),
    ]
    assert all(step_seconds(MACHINE, LOAD, *case) > base for case in more)
    # The state of one sequence is read and written: 868 MB over 8 ranks at 6.4 TB/s.
    state = step_seconds(MACHINE, LOAD, 1, 0, 1, 0, 0) - step_seconds(MACHINE, LOAD, 1, 0, 0, 0, 0)
    assert state == pytest.approx(2 * 434_110_464 / 8 / 6.4e12)


def run(sessions, name, blocks=10**6, **options):
    simulation = Simulation(sessions, SCHEDULERS[name], MACHINE, LOAD, blocks, 0, **options)
    simulation.run()
    return simulation


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_every_turn_gets_its_tokens_and_memory_is_given_back(name):
    sessions = [Session(0.1 * i, ("shared", 100), [Turn(50, 20, 0.5), Turn(30, 10, 0.5)]) for i in range(12)]
    simulation = run(sessions, name, blocks=150)
    assert sorted(r.generated for r in simulation.finished) == [10] * 12 + [20] * 12
    assert simulation.live_blocks == 0 and simulation.used <= 150
    # What is still used is what the cache keeps.
    nodes = [simulation.root]
    for node in nodes:
        nodes += node.children.values()
    kept = sum(n.blocks for n in nodes if n.is_kept)
    assert simulation.used >= kept and (simulation.used - kept) % simulation.slot_blocks == 0


def test_a_shared_prefix_is_computed_once_by_the_one_and_more_often_by_the_other():
    sessions = [Session(0, ("document", 1000), [Turn(64, 4, 0)]) for _ in range(8)]
    aware, fcfs = run(sessions, "dependency_aware"), run(sessions, "fcfs")
    assert aware.counts["computed"] == 1000 + 8 * 64
    assert fcfs.counts["computed"] > aware.counts["computed"]


def test_the_next_turn_computes_only_what_is_new():
    simulation = run([Session(0, ("system", 300), [Turn(200, 10, 1), Turn(70, 10, 1)])], "dependency_aware")
    # The last token of a reply has been sampled, but has not run.
    assert simulation.counts["computed"] == 500 + 70 + 0 and simulation.counts["replayed"] == 0
    assert simulation.finished[1].prompt == 300 + 200 + 10 + 70


@pytest.mark.parametrize("trace", sorted(TRACES))
def test_traces_are_the_same_for_a_seed(trace):
    first, again = (TRACES[trace](random.Random(3), 10) for _ in range(2))
    assert first == again and first != TRACES[trace](random.Random(4), 10)


def test_short_of_memory_the_aware_one_keeps_tokens_flowing(monkeypatch):
    """The figure that the scheduler is for, on a third of a burst: p95 between tokens and recomputed tokens."""
    monkeypatch.setitem(TRACES, "a third", lambda rng, seconds: TRACES["bursts"](rng, seconds)[::3])
    rows = {
        row["scheduler"]: row
        for row in simulate("a third", ["fcfs", "dependency_aware"], 2, 10, 0, LOAD, MACHINE, (10, 0.05), seed=0)
    }
    fcfs, aware = rows["fcfs"], rows["dependency_aware"]
    assert fcfs["requests"] == aware["requests"]
    assert aware["gap_p95_ms"] < 0.7 * fcfs["gap_p95_ms"] and aware["computed"] < fcfs["computed"]


def test_recordings_are_read_in_all_forms(tmp_path):
    ids = np.arange(2 * 3 * 16).reshape(2, 3, 16)  # layers, tokens, chosen
    binary, megatron, by_token = (tmp_path / name for name in ("a.bin", "b.jsonl", "c.jsonl"))
    binary.write_bytes(b"".join(struct.pack("<II", layer + 1, e) for layer in range(2) for e in ids[layer].ravel()))
    lines = [{"step": s, "layer": layer, "top_indices": ids[layer, part].tolist()}
             for s, part in enumerate((slice(0, 2), slice(2, 3))) for layer in range(2)]  # fmt: skip
    megatron.write_text("\n".join(map(json.dumps, lines)))
    by_token.write_text("\n".join(json.dumps({"tok": t, "layers": ids[:, t].tolist()}) for t in range(3)))
    for path in (binary, megatron, by_token):
        np.testing.assert_array_equal(read_routing(path, "--compose", 3)[0], ids)
    assert recorded_shares(binary, 0).shape == (2, EXPERTS) and recorded_shares(binary, 0).max() == pytest.approx(1 / 3)


def test_a_trace_of_the_demo_model_gives_the_shape_of_its_popularity(tmp_path, monkeypatch, capsys):
    path = tmp_path / "demo.jsonl"
    model = KimiK3ForCausalLM.from_pretrained(Path(kimi_k3.__file__).parent / "demo", progress=False)
    with KimiK3Generator(model, max_num_seqs=1, num_blocks=8) as gen:
        gen.record_trace(path)
        gen.generate([list(range(3, 90))], SamplingParams(max_new_tokens=2, ignore_eos=True))
        counts = np.sort(gen.expert_counts().numpy())[:, ::-1]
    layers, experts = counts.shape
    shares = recorded_shares(path, 0)
    assert shares.shape == (MOE_LAYERS, EXPERTS) and shares.max() <= 1
    np.testing.assert_allclose(shares.sum(1), TOPK)
    # 56 of K3's experts for each of the demo model's, which together have its part of the choices.
    for layer in range(MOE_LAYERS):
        wanted = counts[layer * layers // MOE_LAYERS]
        parts = np.sort(shares[layer])[::-1].reshape(experts, -1).sum(1)
        np.testing.assert_allclose(parts, wanted / wanted.sum() * TOPK, atol=1e-6)
    arguments = ["--traces", "chat", "--policies", "dependency_aware", "--seconds", "4", "--experts", str(path)]
    monkeypatch.setattr(sys, "argv", ["simulate_schedule.py", *arguments])
    simulate_schedule.main()
    assert "| chat | dependency_aware |" in capsys.readouterr().out


@pytest.mark.parametrize("experts", [16, 2000])
def test_a_trace_with_one_expert_chosen_still_gives_sixteen(tmp_path, experts):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"step": 0, "layer": 1, "top_indices": [[3]] * 5, "num_experts": experts}))
    shares = recorded_shares(path, 0)
    assert shares.shape == (MOE_LAYERS, EXPERTS) and shares.max() <= 1
    np.testing.assert_allclose(shares.sum(1), TOPK)


def test_composing_by_what_will_come_beats_chance(tmp_path):
    """Two kinds of tokens, each with its own half of the experts: an oracle mixes them, chance does so less well."""
    rng = random.Random(0)
    kinds = [rng.randrange(2) for _ in range(200)]
    path = tmp_path / "trace.jsonl"
    rows = [{"tok": t, "layers": [rng.sample(range(32 * k, 32 * k + 32), 4)]} for t, k in enumerate(kinds)]
    path.write_text("\n".join(map(json.dumps, rows)))
    result = compose(path, ranks=2, batch=8, trials=30, seed=0)
    assert result["oracle"] < 1.05 < result["random"]


def test_the_recipe_prints_a_table_and_json(monkeypatch, capsys):
    arguments = ["--traces", "chat", "--policies", "dependency_aware", "--seconds", "4", "--json"]
    monkeypatch.setattr(sys, "argv", ["simulate_schedule.py", *arguments])
    simulate_schedule.main()
    lines = capsys.readouterr().out.splitlines()
    rows = json.loads(lines[-1])["rows"]
    assert [row["scheduler"] for row in rows] == ["fcfs, no limit", "dependency_aware"] and len(lines) == 5
    assert BLOCK == 64 and rows[1]["requests"] == rows[0]["requests"] > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--traces", "foo"], "--traces: want some of chat, bursts, mixed, talk, got 'foo'"),
        (["--traces", "chat,"], "--traces: want some of chat, bursts, mixed, talk, got ''"),
        (["--policies", "lifo"], "--policies: want some of .*fcfs.*, got 'lifo'"),
        (["--experts", "trace:NO"], "--experts: want zipf:EXPONENT or the file of a recording, got 'trace:NO'"),
        (["--experts", "zipf:x"], "--experts: want a number as exponent, such as zipf:0.5, got 'zipf:x'"),
        (["--experts", "broken.jsonl"], "--experts: want a recording of routing, got .*: line 1 is no record.*"),
        (["--compose", "short.jsonl"], "--compose: want a recording of routing, got short.jsonl: 9 tokens, want .* 17"),
        (["--compose", "MISSING"], "--compose: want a recording of routing, got MISSING: .*No such file.*"),
        (["--compose", "broken.jsonl"], "--compose: want a recording of routing, got .*: line 1 is no record.*"),
        (["--oversubscription", "0"], "--oversubscription: want more than 0, got 0"),
        (["--traces", "chat", "--seconds", "0"], "--seconds: want time for an arrival of chat, got 0"),
        (
            ["--traces", "chat", "--seconds", "2"],
            "--oversubscription: want memory for .* tokens of chat at least, .* blocks, got .*: want more --seconds.*",
        ),
    ],
)
def test_a_wrong_argument_is_named_in_one_line(monkeypatch, tmp_path, arguments, message):
    lines = [json.dumps({"tok": t, "layers": [[t % 3, 3]]}) for t in range(9)]
    (tmp_path / "short.jsonl").write_text("\n".join(lines))
    (tmp_path / "broken.jsonl").write_text("{")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["simulate_schedule.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        simulate_schedule.main()
    assert re.fullmatch(message, caught.value.code)  # its dot is no line's end
