"""Placement against its promises, counted here anew from the tables, and against figures worked out elsewhere."""

import itertools
import json
import re
from collections import Counter

import numpy as np
import pytest

from kimi_k3.cli import main
from kimi_k3.parallel.placement import EMPTY, ExpertPlacement, NoRoomForExperts

EXPERTS = 896


def zipf(exponent: float, experts: int = EXPERTS, seed: int = 0) -> np.ndarray:
    """Hot experts anywhere."""
    return np.random.default_rng(seed).permutation(np.arange(1, experts + 1) ** -exponent)


def copies_by_loops(plan: ExpertPlacement, layer: int = 0) -> dict[int, list[tuple[int, str]]]:
    """Expert -> (worker, "active", "device" or "host"), read slot by slot."""
    found: dict[int, list[tuple[int, str]]] = {expert: [] for expert in range(plan.num_experts)}
    for worker in range(plan.num_workers):
        for slot in range(plan.capacity):
            expert = int(plan.slots[layer, worker, slot])
            if expert != EMPTY:
                found[expert].append((worker, "active" if plan.is_active[layer, worker, slot] else "device"))
        for expert in plan.host[layer, worker]:
            if expert != EMPTY:
                found[int(expert)].append((worker, "host"))
    return found


def assert_promises(plan: ExpertPlacement, two_domains: bool = False) -> None:
    for layer in range(plan.num_layers):
        for expert, copies in copies_by_loops(plan, layer).items():
            workers = [worker for worker, _ in copies]
            assert "active" in {kind for _, kind in copies}, f"expert {expert} is nowhere active"
            assert len(set(workers)) == len(workers), f"expert {expert} twice on one worker"
            assert all(plan.alive[worker] for worker in workers)
            if two_domains:
                assert len({plan.domains[worker] for worker in workers}) >= 2
    assert (plan.slots != EMPTY).sum(-1).max() <= plan.capacity


def loads_by_loops(plan: ExpertPlacement, loads: np.ndarray) -> list[float]:
    of_workers = [0.0] * plan.num_workers
    for expert, copies in copies_by_loops(plan).items():
        active = [worker for worker, kind in copies if kind == "active"]
        for worker in active:
            of_workers[worker] += loads[expert] / len(active)
    return [load for load, alive in zip(of_workers, plan.alive) if alive]


def test_contiguous_gives_expert_347_to_worker_3():
    plan = ExpertPlacement.contiguous(EXPERTS, 8, num_layers=2)
    assert plan.workers_of(347) == plan.workers_of(347, layer=1) == [3]
    assert [plan.workers_of(e)[0] for e in range(EXPERTS)] == [e // 112 for e in range(EXPERTS)]
    assert_promises(plan)


@pytest.mark.parametrize("workers", [1, 3, 7, 15, 63, 896])
def test_contiguous_shares_unevenly_by_one_at_most(workers):
    plan = ExpertPlacement.contiguous(EXPERTS, workers)
    sizes = (plan.slots[0] != EMPTY).sum(-1)
    assert sizes.sum() == EXPERTS and sizes.max() - sizes.min() <= 1
    owners = [plan.workers_of(expert)[0] for expert in range(EXPERTS)]
    assert owners == sorted(owners)


@pytest.mark.parametrize("standby", [None, "device", "host"])
@pytest.mark.parametrize("exponent", [0, 0.5, 0.8, 1.2])
@pytest.mark.parametrize("workers", [8, 16, 32, 64])
def test_extra_slots_level_every_skew_and_survive(workers, exponent, standby):
    loads = zipf(exponent)
    plan = ExpertPlacement.balanced(loads, workers, active_slots=EXPERTS + 128, standby=standby)
    assert_promises(plan, two_domains=standby is not None)
    assert plan.is_active.sum() == EXPERTS + 128
    expected = loads_by_loops(plan, loads)
    ratio = max(expected) / (sum(expected) / workers)
    assert ratio <= 1.05
    assert plan.imbalance(loads)[0] == pytest.approx(ratio, rel=1e-12)
    assert standby is None or plan.share_on_two_domains() == 1


def test_at_zipf_1_2_contiguous_is_fifteen_times_the_mean():
    """14.9: the hottest expert has 23 % of the load, and 13 of the coldest beside it: no plan without replicas is better."""
    loads = zipf(1.2)
    assert 14.9 <= ExpertPlacement.contiguous(EXPERTS, 64).imbalance(loads)[0] <= 15.1
    ordered = np.sort(loads)
    least = 64 * (ordered[-1] + ordered[:13].sum()) / loads.sum()
    assert ExpertPlacement.balanced(loads, 64).imbalance(loads)[0] == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("workers", [7, 15, 31, 63])
def test_numbers_that_do_not_divide(workers):
    plan = ExpertPlacement.balanced(zipf(1.2), workers, active_slots=EXPERTS + 128, standby="device")
    assert_promises(plan, two_domains=True)
    assert plan.imbalance(zipf(1.2))[0] <= 1.05


def test_uniform_load_with_every_expert_twice_puts_the_two_on_two_workers():
    """Packing without anti-affinity puts both copies of all 896 experts on one rank here."""
    plan = ExpertPlacement.balanced(np.ones(EXPERTS), 64, active_slots=2 * EXPERTS)
    assert {len(copies) for copies in copies_by_loops(plan).values()} == {2}
    assert plan.share_on_two_domains() == 1


def test_no_load_and_no_spare_slot_are_valid():
    plan = ExpertPlacement.balanced(np.zeros(EXPERTS), 64)
    assert_promises(plan)
    assert plan.capacity == 14 and plan.imbalance(np.zeros(EXPERTS)).tolist() == [1.0]
    spread = ExpertPlacement.balanced(np.zeros(EXPERTS), 64, active_slots=2 * EXPERTS)
    assert {len(copies) for copies in copies_by_loops(spread).values()} == {2}


def test_domains_are_kept_apart_where_workers_share_them():
    domains = [worker // 8 for worker in range(32)]
    plan = ExpertPlacement.balanced(zipf(0.8), 32, active_slots=EXPERTS + 64, standby="device", domains=domains)
    assert_promises(plan, two_domains=True)
    with pytest.raises(NoRoomForExperts, match="two domains"):
        ExpertPlacement.balanced(zipf(0.8), 8, standby="device", domains=[0] * 8)


@pytest.mark.parametrize("domains", [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 2]])
def test_standby_copies_fit_where_they_just_fit(domains):
    """No slot to spare, and with domains of unequal size the last copies need others to make room."""
    for seed in range(10):
        loads = zipf(1.0, 24, seed)
        plan = ExpertPlacement.balanced(loads, 6, active_slots=24, capacity=8, standby="device", domains=domains)
        assert_promises(plan, two_domains=True)
        assert (plan.slots != EMPTY).all()
    with pytest.raises(NoRoomForExperts, match="standby copy of expert"):  # half of the copies cannot be in domain 1
        ExpertPlacement.balanced(loads, 6, capacity=8, standby="device", domains=[0, 0, 0, 0, 1, 1])


def test_small_plans_exhaustively():
    """Dead ends of the packing: as many copies as places, all shapes."""
    for workers, experts in itertools.product(range(1, 6), range(1, 8)):
        for active in range(experts, experts * workers + 1):
            for loads in (np.ones(experts), zipf(2.0, experts), np.zeros(experts)):
                plan = ExpertPlacement.balanced(loads, workers, active_slots=active)
                assert_promises(plan)
                assert plan.is_active.sum() == active and plan.capacity == -(-active // workers)


def test_the_same_loads_give_the_same_plan():
    first, second = (ExpertPlacement.balanced(zipf(1.2), 64, active_slots=1024, standby="host") for _ in range(2))
    assert np.array_equal(first.slots, second.slots) and np.array_equal(first.host, second.host)


# A previous plan.


def moved(plan: ExpertPlacement, previous: ExpertPlacement) -> int:
    """Copies on workers that had none, by sets."""
    after = {
        (layer, e, w) for layer in range(plan.num_layers) for e, c in copies_by_loops(plan, layer).items() for w, _ in c
    }
    before = {
        (layer, e, w)
        for layer in range(plan.num_layers)
        for e, c in copies_by_loops(previous, layer).items()
        for w, _ in c
    }
    return len(after - before)


def test_a_plan_that_is_good_enough_stays():
    plan = ExpertPlacement.balanced(zipf(1.2), 64, active_slots=1024, standby="device")
    again = ExpertPlacement.balanced(zipf(1.2), previous=plan, active_slots=1024, standby="device")
    assert again.moves_from(plan) == [] and np.array_equal(again.slots, plan.slots)


@pytest.mark.parametrize("workers", [8, 64])
def test_other_loads_move_little(workers):
    plan = ExpertPlacement.balanced(zipf(1.2), workers, active_slots=1024, standby="device")
    noise = np.exp(1.0 * np.random.default_rng(1).standard_normal(EXPERTS))
    loads = zipf(1.2) * noise
    later = ExpertPlacement.balanced(loads, previous=plan, active_slots=1024, standby="device")
    fresh = ExpertPlacement.balanced(loads, workers, active_slots=1024, standby="device")
    assert_promises(later, two_domains=True)
    assert later.imbalance(loads)[0] <= 1.05 < plan.imbalance(loads)[0]
    assert moved(later, plan) < moved(fresh, plan) / 10
    stayed = (later.slots == plan.slots) & (plan.slots != EMPTY)
    for layer, worker, slot in np.argwhere(~stayed & (plan.slots != EMPTY)):
        # A copy that stays on its worker stays in its slot.
        assert plan.slots[layer, worker, slot] not in later.slots[layer, worker]


def test_moves_are_the_difference_of_two_plans():
    plan = ExpertPlacement.balanced(np.stack([zipf(1.2), zipf(0.5)]), 16, active_slots=960, standby="host")
    loads = np.stack([zipf(1.2, seed=5), zipf(0.5)])
    later = ExpertPlacement.balanced(loads, previous=plan, active_slots=960, standby="host")
    moves = later.moves_from(plan)
    assert {move.layer for move in moves} == {0}  # the other layer is as it was
    device = {(m.worker, m.slot): m.expert for m in moves if m.slot != EMPTY}
    rebuilt = plan.slots[0].copy()
    rebuilt[later.slots[0] == EMPTY] = EMPTY
    for (worker, slot), expert in device.items():
        rebuilt[worker, slot] = expert
    assert np.array_equal(rebuilt, later.slots[0])
    before = copies_by_loops(plan)
    for move in moves:
        assert move.source in ("peer", "host") and move.source_worker in {w for w, _ in before[move.expert]}


# Losses.


def test_a_lost_worker_of_eight_is_shared_by_seven():
    before = ExpertPlacement.contiguous(EXPERTS, 8, num_layers=3, capacity=128)
    after = before.after_loss(3)
    assert_promises(after)
    moves = after.moves_from(before)
    assert Counter((move.layer, move.worker) for move in moves) == {
        (layer, worker): 16 for layer in range(3) for worker in (0, 1, 2, 4, 5, 6, 7)
    }
    assert {move.source for move in moves} == {"checkpoint"} and {m.expert for m in moves} == set(range(336, 448))
    survivors = [0, 1, 2, 4, 5, 6, 7]
    kept = before.slots[:, survivors] != EMPTY
    assert np.array_equal(after.slots[:, survivors][kept], before.slots[:, survivors][kept])


@pytest.mark.parametrize("workers", [8, 64])
@pytest.mark.parametrize("tier, sources", [("device", {"standby"}), ("host", {"host", "peer"})])
def test_standby_copies_take_over(workers, tier, sources):
    loads = zipf(0.8)
    spare = 4 * EXPERTS // workers
    plan = ExpertPlacement.balanced(loads, workers, active_slots=1024, capacity=spare, standby=tier)
    for worker in (0, workers // 2, workers - 1):
        after = plan.after_loss(worker, loads)
        assert_promises(after)
        moves = after.moves_from(plan)
        lost = [e for e, c in copies_by_loops(plan).items() if [w for w, kind in c if kind == "active"] == [worker]]
        assert {move.expert for move in moves} == set(lost) and len(moves) == len(lost)
        assert {move.source for move in moves} <= sources
    # What the worker had is taken over by many, not by one neighbour.
    assert len({move.worker for move in moves}) >= min(workers - 1, len(lost) // 2)


def test_losses_one_after_another_until_there_is_no_room():
    loads = zipf(0.8, 56)
    plan = ExpertPlacement.balanced(loads, 8, active_slots=64, capacity=32, standby="device")
    for lost in range(4):
        after = plan.after_loss(lost, loads)
        plan = ExpertPlacement.balanced(loads, previous=after, active_slots=64, standby="device")
        assert_promises(plan, two_domains=True)
        assert plan.alive.count(False) == lost + 1 and plan.num_workers == 8
    for lost in range(4, 6):
        plan = plan.after_loss(lost, loads)
        assert_promises(plan)
    with pytest.raises(NoRoomForExperts, match="after_loss: worker 6"):
        plan.after_loss(6)  # one worker of 32 slots for 56 experts


def test_replicas_give_way_to_experts_that_would_be_lost():
    loads = zipf(1.2, 56)
    plan = ExpertPlacement.balanced(loads, 8, active_slots=72)  # no free slot, 16 replicas
    assert (plan.slots != EMPTY).all()
    after = plan.after_loss(2, loads)
    assert_promises(after)
    assert after.is_active.sum() == 63


def test_no_room_is_told_not_hidden():
    plan = ExpertPlacement.contiguous(EXPERTS, 8)
    with pytest.raises(NoRoomForExperts, match=r"worker 3 had the only copies of 112 experts.*above 112"):
        plan.after_loss(3)
    with pytest.raises(ValueError, match="after_loss: worker: want a living one below 8, got 9"):
        plan.after_loss(9)


def test_a_worker_that_comes_back_is_filled_again():
    loads = zipf(0.8)
    plan = ExpertPlacement.balanced(loads, 8, active_slots=1024, capacity=300, standby="device")
    back = plan.after_loss(3).with_worker(3)
    assert (back.slots[0, 3] == EMPTY).all()
    full = ExpertPlacement.balanced(loads, previous=back, active_slots=1024, standby="device")
    assert_promises(full, two_domains=True)
    assert full.imbalance(loads)[0] <= 1.05


# What the dispatcher reads.


def test_tables_say_what_the_plan_says():
    loads = np.stack([zipf(1.2), zipf(0.5)])
    plan = ExpertPlacement.balanced(loads, 16, active_slots=1024, standby="device")
    tables = plan.tables()
    assert tables.physical_to_logical.shape == tables.is_active.shape == (2, 16 * plan.capacity)
    for layer in range(2):
        for expert, copies in copies_by_loops(plan, layer).items():
            slots = [slot for slot in tables.logical_to_physical[layer, expert].tolist() if slot != EMPTY]
            number = int(tables.num_active[layer, expert])
            assert all(tables.physical_to_logical[layer, slot] == expert for slot in slots)
            assert tables.is_active[layer, slots].tolist() == [True] * number + [False] * (len(slots) - number)
            active = sorted(worker for worker, kind in copies if kind == "active")
            assert [slot // plan.capacity for slot in slots[:number]] == active and len(slots) == len(copies)


def test_tables_keep_their_shapes_when_a_worker_is_lost():
    plan = ExpertPlacement.balanced(zipf(0.8), 8, active_slots=1024, standby="device")
    before, after = plan.tables(max_copies=8), plan.after_loss(5).tables(max_copies=8)
    assert [table.shape for table in before] == [table.shape for table in after]
    assert not after.is_active[0, 5 * plan.capacity : 6 * plan.capacity].any()
    with pytest.raises(ValueError, match="tables: max_copies: want at least"):
        plan.tables(max_copies=1)


# Broken plans.


def broken(**changes: object) -> ExpertPlacement:
    plan = ExpertPlacement.contiguous(4, 2, capacity=3)
    values = {name: getattr(plan, name) for name in ExpertPlacement.__dataclass_fields__}
    return ExpertPlacement(**(values | changes))


@pytest.mark.parametrize(
    "slots, changes, message",
    [
        ([[0, 1, 0], [2, 3, -1]], {}, "expert 0 of MoE layer 0 has two copies on worker 0"),
        ([[0, 1, -1], [2, 2, -1]], {}, "two copies on worker 1"),
        ([[0, 1, -1], [2, -1, -1]], {}, "expert 3 of MoE layer 0 has no active copy"),
        ([[0, 1, -1], [2, 3, -1]], {"alive": (True, False)}, "has a copy on worker 1, lost"),
        ([[0, 1, 2], [2, 3, -1]], {"survives_a_domain": True}, "has all its copies in one domain"),
        ([[0, 1, 4], [2, 3, -1]], {}, "want experts below 4"),
    ],
)
def test_a_broken_plan_is_refused(slots, changes, message):
    slots = np.array([slots], np.int32)
    with pytest.raises(ValueError, match=message):
        broken(slots=slots, is_active=slots != EMPTY, **changes)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"loads": [1.0, -1.0], "num_workers": 2}, "balanced: loads"),
        ({"loads": [1.0, float("nan")], "num_workers": 2}, "balanced: loads"),
        ({"loads": [1.0, 1.0]}, "num_workers or previous"),
        ({"loads": [1.0, 1.0], "num_workers": 2, "active_slots": 5}, "active_slots: want 2.*to 4.*got 5"),
        ({"loads": [1.0, 1.0], "num_workers": 1, "capacity": 1}, "capacity: want at least 2"),
        ({"loads": [1.0, 1.0], "num_workers": 2, "standby": "disk"}, "standby: want 'device', 'host' or None"),
        ({"loads": [1.0, 1.0], "num_workers": 2, "domains": [0]}, "domains: want 2, got 1"),
    ],
)
def test_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ExpertPlacement.balanced(**options)


# The command.


def test_explain_of_expert_347(capsys):
    command = "placement explain --experts 896 --workers 8 --expert 347 --fail 3"
    assert main([*command.split(), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["owner"] == 3 and values["new_owners"] == [5] and values["source"] == "checkpoint"
    assert values["bytes"] == 92 * 17_547_264
    assert values["restored"]["experts"] == 10_304
    assert f"{values['restored']['bytes'] / 1e9:.1f}" == "180.8"
    assert f"{values['restored']['bytes_of_the_busiest_survivor'] / 1e9:.1f}" == "25.8"
    assert main(command.split()) == 0
    assert "owner 3" in capsys.readouterr().out


@pytest.mark.parametrize("standby, source", [("device", "standby"), ("host", "host")])
def test_explain_with_standby_copies(capsys, standby, source):
    command = f"placement explain --workers 8 --expert 347 --fail 3 --layers 2 --standby {standby} --json"
    assert main(command.split()) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["source"] == source and values["new_owners"] == [values["standby"][0]["worker"]]
    assert values["bytes"] == (0 if standby == "device" else 2 * 17_547_264)


def test_explain_without_room_fails_with_the_reason(capsys):
    command = "placement explain --workers 8 --expert 347 --fail 3 --layers 1 --capacity 112"
    assert main(command.split()) == 2
    assert "no slot left" in capsys.readouterr().err


def test_check_holds_and_its_exit_code_tells_when_not(capsys):
    command = "placement check --workers 8,64 --loads uniform,zipf1.2,zero --json"
    assert main(command.split()) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["holds"] and len(values["plans"]) == 6
    assert all(plan["on_two_domains"] == 1 and plan["ratios"]["extra"] <= 1.05 for plan in values["plans"])
    command = "placement check --workers 64 --loads zipf1.2 --extra 0"
    assert main(command.split()) == 1
    assert "problem: extra: busiest worker 14.9" in capsys.readouterr().out
    # 1.05 of loads with a name, whatever is accepted of files.
    command = "placement check --workers 8 --loads zipf1.2 --experts 64 --extra 1"
    assert main(command.split()) == 1
    problem = re.search(r"problem: extra: busiest worker (\S+) x mean, above 1.05", capsys.readouterr().out)
    assert problem is not None and 1.05 < float(problem[1]) < 2
