"""The simulator: its constants against the plan, its costs against sums by hand, its errors always printed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import simulate_cluster as sim

from kimi_k3.configuration_kimi_k3 import KimiK3Config
from kimi_k3.parallel.cluster_plan import ClusterPlan
from kimi_k3.parallel.placement import ExpertPlacement
from kimi_k3.parallel.traces import TraceWriter
from kimi_k3.planning import MeshShape, Plan

RECIPE = Path(sim.__file__)


def test_constants_are_those_of_the_plan():
    if "KIMI_K3_TEST_DATA" not in os.environ:
        pytest.skip("KIMI_K3_TEST_DATA is not set")
    config = KimiK3Config.from_pretrained(Path(os.environ["KIMI_K3_TEST_DATA"]).parent / "spec")
    for tp, trunk in sim.TRUNK_BYTES.items():
        plan = ClusterPlan(Plan(config, MeshShape(tp, 64)))
        assert plan.trunk_bytes == trunk and plan.expert_bytes == sim.EXPERT_BYTES and plan.moe_layers == sim.LAYERS
    assert plan.plan.kda_state_bytes_per_sequence == sim.STATE_BYTES
    assert plan.plan.latent_cache_bytes_per_token == sim.LATENT_BYTES
    of_call = {one.what: one.bytes_per_token for one in plan.collectives()}
    assert of_call["dispatch"] == 16 * sim.DISPATCH_BYTES and of_call["combine"] == 16 * sim.COMBINE_BYTES


@pytest.mark.parametrize("exponent", [0, 0.8, 1.2, 3])
def test_chances_are_of_distinct_choices(exponent):
    chance = sim.choice_chances(exponent, 896, 16, seed=0)
    assert chance.sum() == pytest.approx(16) and chance.max() <= 1 + 1e-9 and chance.min() > 0


def test_a_trace_gives_the_chances_that_it_recorded(tmp_path):
    generator = np.random.default_rng(0)
    chosen = [np.stack([generator.choice(40 + layer, 16, replace=False) for _ in range(30)]) for layer in range(3)]
    with TraceWriter(tmp_path / "trace.jsonl") as trace:
        for layer, ids_TA in enumerate(chosen):
            trace.write(step=0, layer=layer + 1, topk_ids=ids_TA)
    chances = sim.trace_chances(str(tmp_path / "trace.jsonl"), samples=3)
    for chance, ids_TA in zip(chances, chosen, strict=True):
        assert chance.tolist() == [(ids_TA == expert).sum() / 30 for expert in range(896)]
    plan = ExpertPlacement.contiguous(896, 8, capacity=128)
    cost = sim.simulate(8, sim.DEVICES["h200"], batch=4, chances=chances)
    assert cost.imbalance == pytest.approx(np.mean([plan.imbalance(chance).max() for chance in chances]))
    assert cost.imbalance > 5 > sim.simulate(8, sim.DEVICES["h200"], batch=4, chances=chances, extra=128).imbalance


def test_rows_and_hit_slots_are_those_of_drawn_tokens():
    """Two experts a token of eight, replicas of one: the mean over draws."""
    chance = np.full(8, 0.25)
    plan = ExpertPlacement.balanced(np.array([4.0, 1, 1, 1, 1, 1, 1, 1]), 4, active_slots=10)
    rows, hit = sim.rows_and_slots(plan, chance, tokens=6)
    generator, seen_rows, seen_hit, draws = np.random.default_rng(0), np.zeros(4), np.zeros(4), 1500
    for _ in range(draws):
        slots = set()
        for _token in range(6):
            for expert in generator.choice(8, 2, replace=False):
                worker = int(generator.choice(plan.workers_of(int(expert))))
                seen_rows[worker] += 1
                slots.add((worker, int(expert)))
        for worker, _ in slots:
            seen_hit[worker] += 1
    assert rows == pytest.approx(seen_rows / draws, rel=0.05) and hit == pytest.approx(seen_hit / draws, rel=0.05)


def test_uniform_step_is_the_sum_by_hand():
    device = sim.Device(memory=8e12, operations=1e18)
    cost = sim.simulate(64, device, batch=16, context=1000, efficiency=1.0, link=1e11, latency=0.0, tp=8)
    trunk = (25_144_323_072 + 16 * (2 * 434_110_464 + 8 * 27_648 * 1000)) / 8e12
    hit = 14 * (1 - (1 - 16 / 896) ** 1024)
    network = 92 * 16 * 16 * 63 / 64 * (3_696 + 7_168) / 1e11
    assert cost.trunk == pytest.approx(trunk, rel=1e-9)
    assert cost.experts == pytest.approx(92 * hit * 17_547_264 / 8e12, rel=1e-9)
    assert cost.network == pytest.approx(network, rel=1e-9) and cost.imbalance == pytest.approx(1)


def test_routing_to_every_second_copy_costs_what_their_bytes_cost():
    """28 slots instead of 15 at 8 TB/s: 2.6 ms more of a step on 64 ranks, the reason why standby copies stay cold."""
    device = sim.Device(memory=8e12, operations=1e18)
    few, all_twice = (
        sim.simulate(64, device, batch=16, efficiency=1.0, zipf=0.5, extra=extra, samples=1).experts
        for extra in (64, 896)
    )
    assert 1e3 * (all_twice - few) == pytest.approx(13 * 17_547_264 * 92 / 8e12 * 1e3, rel=0.1)


def test_what_is_done_to_the_ranks_shows():
    options = {"batch": 64, "zipf": 1.2, "samples": 1}
    device = sim.DEVICES["h200"]
    skewed = sim.simulate(16, device, **options)
    level = sim.simulate(16, device, extra=128, **options)
    slow = sim.simulate(16, device, extra=128, slow=3.0, **options)
    dead = sim.simulate(16, device, extra=128, dead=True, **options)
    again = sim.simulate(16, device, extra=128, dead=True, rebalanced=True, **options)
    assert skewed.imbalance > 1.5 > 1.05 >= level.imbalance and level.network < skewed.network
    assert slow.trunk + slow.experts == pytest.approx(3 * (level.trunk + level.experts), rel=0.1)
    assert again.imbalance <= dead.imbalance and level.step < again.step <= dead.step


def test_prediction_of_a_gloo_case_by_hand():
    case = sim.Case("x", rows=400, row_bytes=100, row_seconds=1e-3, slow=2.0)
    assert sim.predict(case, 4, (1e-3, 1e-8)) == pytest.approx(2 * 100 * 1e-3 + 2 * (1e-3 + 100 * 100 * 1e-8))


def test_every_result_shows_the_errors():
    run = subprocess.run(
        [sys.executable, RECIPE, "--ranks", "8"], capture_output=True, text=True, check=True, timeout=300
    )  # fmt: skip
    validation = json.loads(sim.VALIDATION.read_text())
    assert {case["case"] for case in validation["cases"]} == {case.name for case in sim.UNSEEN}
    for case in validation["cases"]:
        assert case["error"] == pytest.approx(case["predicted_ms"] / case["measured_ms"] - 1)
        assert f"error {case['error']:+.0%}" in run.stdout
    assert validation["where"] in run.stdout and "were not measured" in run.stdout


@pytest.mark.slow
def test_validation_runs_on_gloo():
    """A slow rank adds its delay: the structure holds whatever the machine's speed."""
    found = sim.validate(2, steps=5)
    errors = {case["case"]: case["error"] for case in found["cases"]}
    assert set(errors) == {case.name for case in sim.UNSEEN} and abs(errors["rank 0 takes 3 x"]) < 0.5
