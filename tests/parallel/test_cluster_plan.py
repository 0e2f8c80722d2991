"""The plan past one machine, against the figures of the specification, loops over choices, and DTensor's shapes."""

import json
import math
import os
from pathlib import Path

import pytest
import torch

from kimi_k3.cli import main
from kimi_k3.configuration_kimi_k3 import KimiK3Config
from kimi_k3.parallel import cluster_plan
from kimi_k3.parallel.cluster_plan import ClusterPlan, fake_group_bytes
from kimi_k3.planning import DEVICE_MEMORY_BYTES, MeshShape, Plan

GOLDEN = Path(__file__).parent.parent / "golden" / "golden"


def spec_folder() -> Path:
    if "KIMI_K3_TEST_DATA" not in os.environ:
        pytest.skip("KIMI_K3_TEST_DATA is not set")
    return Path(os.environ["KIMI_K3_TEST_DATA"]).parent / "spec"


@pytest.fixture
def released() -> KimiK3Config:
    return KimiK3Config.from_pretrained(spec_folder())


def cluster(config: KimiK3Config, tp: int, ep: int, hardware: str | None = None, **options: int) -> ClusterPlan:
    memory = DEVICE_MEMORY_BYTES[hardware] if hardware else None
    return ClusterPlan(Plan(config, MeshShape(tp, ep), memory, **options))


@pytest.mark.parametrize(
    "ep, copies, lost, each, touched",
    [
        (8, ("180.8", "193.7", "206.6", "361.6"), "180.8", "25.8", "0.884"),
        (16, ("90.4", "96.9", "103.3", "180.8"), "90.4", "6.03", "0.647"),
        (32, ("45.2", "48.4", "51.7", "90.4"), "45.2", "1.46", "0.401"),
        (64, ("22.6", "24.2", "25.8", "45.2"), "22.6", "0.36", "0.224"),
    ],
)
def test_routed_bytes_and_losses_of_the_release(released, ep, copies, lost, each, touched):
    plan = cluster(released, 8, ep)
    assert tuple(f"{one.routed_bytes / 1e9:.1f}" for one in plan.copies()) == copies
    loss = plan.to_dict()["loss_of_a_rank"]
    assert f"{loss['bytes'] / 1e9:.1f}" == lost and f"{loss['tokens_touched_per_layer']:.3f}" == touched
    digits = len(each.split(".")[1])
    assert f"{loss['bytes_per_survivor'] / 1e9:.{digits}f}" == each


def test_bytes_of_a_token_of_the_release(released):
    plan = cluster(released, 8, 64)
    of_call = {one.what: one.bytes_per_token for one in plan.collectives()}
    assert of_call["attention, in"] == of_call["attention, out"] == 7 * 2 * 7168 // 8  # 12.5 KB
    assert of_call["dispatch"] == 59_136 and of_call["combine"] == 114_688
    values = plan.to_dict()
    assert f"{values['bytes_per_token']['ep'] / 1e6:.1f}" == "16.0"  # 32.0 without the latent
    assert f"{values['ranks_per_token_and_layer']:.1f}" == "14.4"
    assert f"{cluster(released, 8, 8).to_dict()['ranks_per_token_and_layer']:.1f}" == "7.1"
    calls = {one.what: one.calls for one in plan.collectives()}
    assert calls["attention, in"] == 93 and calls["dispatch"] == 92 and calls["dense MLP, in"] == 1


def test_one_axis_of_one_rank_sends_nothing_over_it(released):
    assert {one.axis for one in cluster(released, 1, 64).collectives()} == {"ep"}
    assert cluster(released, 1, 64).to_dict()["bytes_per_token"]["tp"] == 0


def test_two_copies_fit_from_where_the_table_says(released):
    """On H200 from 32 ranks, on B300 from 16, at 8 on nothing."""

    def fits(hardware: str, ep: int) -> bool | None:
        return cluster(released, 8, ep, hardware).copies()[-1].fits

    assert not any(fits(hardware, 8) for hardware in DEVICE_MEMORY_BYTES)
    assert fits("b300", 16) and fits("mi355x", 16) and not fits("h200", 16) and not fits("b200", 16)
    assert fits("h200", 32) and fits("b200", 32)


def test_the_largest_batch_and_context_just_fit(released):
    plan = cluster(released, 8, 64, "h200")
    for context in cluster_plan.CONTEXTS:
        each = plan.largest_batch(context) // 8
        assert each * plan.sequence_bytes(context) <= plan.free_bytes < (each + 1) * plan.sequence_bytes(context)
    tight = cluster(released, 8, 16, "h200")
    context = tight.largest_context(batch=8)  # 4 in each of two groups
    assert 4 * tight.sequence_bytes(context) <= tight.free_bytes < 4 * tight.sequence_bytes(context + 1)
    by_hand = int(0.92 * 141e9) - 4 * 10**9 - tight.plan.device_weight_bytes
    assert tight.free_bytes == by_hand
    assert tight.sequence_bytes(1000) == 2 * (434_110_464 + 15_261_696) // 8 + 1000 * 27_648


def test_spare_slots_just_fit_beside_the_batch(released):
    plan = cluster(released, 8, 64, "h200", context=131_072, batch=64)
    slot = 92 * 17_547_264
    room = plan.free_bytes - 8 * plan.sequence_bytes(131_072)
    assert plan.spare_slots * slot <= room < (plan.spare_slots + 1) * slot
    assert cluster(released, 8, 8, "h200").spare_slots == 0


@pytest.mark.parametrize("tp, ep", [(1, 7), (2, 4), (4, 8), (1, 64)])
def test_dtensor_has_the_bytes_that_the_plan_counts(tp, ep):
    """On the first rank, which has most of what does not divide: 16 experts on 7 ranks."""
    plan = Plan(KimiK3Config.from_pretrained(GOLDEN), MeshShape(tp, ep))
    assert fake_group_bytes(plan) == plan.device_weight_bytes
    assert not torch.distributed.is_initialized()


def test_a_count_that_dtensor_does_not_share_is_an_error(monkeypatch):
    monkeypatch.setattr(cluster_plan, "fake_group_bytes", lambda plan: plan.device_weight_bytes + 1)
    with pytest.raises(RuntimeError, match="DTensor has"):
        cluster(KimiK3Config.from_pretrained(GOLDEN), 1, 4)


def test_touched_is_the_share_of_choices_with_an_expert_of_the_rank():
    import itertools

    config = KimiK3Config.tiny()  # top-4 of 24 experts
    plan = cluster(config, 1, 6)
    choices = list(itertools.combinations(range(24), 4))
    assert plan.touched() == pytest.approx(sum(min(choice) < 4 for choice in choices) / len(choices))
    assert math.comb(24, 4) == len(choices)


def test_plan_command_on_64_ranks(capsys):
    command = f"plan {spec_folder()} --mesh tp=8,ep=64 --hardware h200"
    assert main([*command.split(), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["mesh"]["ranks"] == 64 and values["device"]["fits"] is True
    assert values["components"]["routed_experts"]["device_bytes"] == 22_600_876_032
    assert values["cluster"]["weight_bytes_on_fake_group"] == values["device"]["weight_bytes"]
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    assert "22,600,876,032" in out and "largest batch" in out and "dispatch" in out
