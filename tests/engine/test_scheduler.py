"""Promises of the schedulers: over random candidate sets, and over whole runs of a small machine that keeps its own books."""

import random
from dataclasses import dataclass, field

import pytest

from kimi_k3.engine.scheduler import SCHEDULERS, Candidate, Policy, Resources, schedule_dependency_aware, schedule_fcfs

BLOCK = 64
BOTH = pytest.mark.parametrize("name", sorted(SCHEDULERS))


def a_candidate(rid: int, **fields) -> Candidate:
    base = {
        "rid": rid, "arrival": rid, "priority": 0, "is_running": False, "done": 0, "total": 100, "is_decoding": False,
        "blocks_held": 0, "blocks_freed": 0, "reuse": 0, "waits_for": None, "fetch": "none", "fetch_bytes": 0,
        "remaining_new": 50, "replay_if_dropped": 0, "idle_steps": 0,
    }  # fmt: skip
    return Candidate(**{**base, **fields})


def decoding(rid: int, done: int, **fields) -> Candidate:
    held = -(-done // BLOCK)
    return a_candidate(
        rid, **{"is_running": True, "is_decoding": True, "done": done, "total": done + 1, "blocks_held": held,
                "blocks_freed": held, "replay_if_dropped": done, "ran_steps": 1000, **fields},
    )  # fmt: skip


def the_resources(**fields) -> Resources:
    base = {
        "room_blocks": 1000, "slot_blocks": 10, "total_blocks": 1000, "block_size": BLOCK, "max_num_seqs": 16,
        "max_tokens_per_step": 512, "can_park": True, "bytes_per_block": 1 << 20,
    }  # fmt: skip
    return Resources(**{**base, **fields})


def random_case(rng: random.Random) -> tuple[list[Candidate], Resources]:
    max_num_seqs, candidates = rng.randint(1, 12), []
    num_running = rng.randint(0, max_num_seqs)
    for rid in range(num_running + rng.randint(0, 10)):
        prompt = rng.randint(1, 600)
        fields = {
            "arrival": 1000 - rid if rng.random() < 0.5 else 2000 + rid, "priority": rng.choice([0, 0, 0, 1, -2]),
            "remaining_new": rng.randint(1, 500), "idle_steps": rng.choice([0, 1, 7, 5000]),
            "experts": tuple(rng.random() for _ in range(4)) if rng.random() < 0.7 else (),
        }  # fmt: skip
        if rid < num_running and rng.random() < 0.6:
            candidates.append(decoding(rid, prompt, **fields))
        elif rid < num_running:
            done = rng.randrange(0, prompt, BLOCK)
            held = done // BLOCK
            candidates.append(
                a_candidate(rid, is_running=True, done=done, total=prompt, blocks_held=held,
                            blocks_freed=rng.randint(0, held), replay_if_dropped=done, ran_steps=rng.choice([1, 900]), **fields)
            )  # fmt: skip
        else:
            fields |= {"fetch": rng.choice(["none", "none", "absent", "pending", "ready"]), "fetch_bytes": 1 << 20}
            fields |= {"waits_for": rng.choice([None, None, rng.randrange(20)])}
            candidates.append(a_candidate(rid, total=prompt, reuse=rng.choice([0, rng.randrange(prompt)]), **fields))
    slot = rng.choice([1, 5, 40])
    room = rng.choice([0, 1, 3, rng.randint(0, 200)])
    return candidates, the_resources(
        room_blocks=room, slot_blocks=slot, max_num_seqs=max_num_seqs, can_park=rng.random() < 0.5,
        max_tokens_per_step=rng.choice([64, 70, 128, 512]), expert_budget=rng.choice([0.0, 2.0]),
    )  # fmt: skip


def check(schedule, candidates, resources) -> None:
    """The contract, from the numbers alone."""
    by_rid = {c.rid: c for c in candidates}
    running = {c.rid for c in candidates if c.is_running}
    preempted = [rid for rid, _ in schedule.preempt]
    run = [rid for rid, _ in schedule.run]
    assert len(set(run)) == len(run) and len(set(preempted)) == len(preempted)
    assert set(preempted) <= running and not set(preempted) & set(run)
    assert schedule.admit == [rid for rid in schedule.admit if rid in run] and set(run) - set(schedule.admit) <= running
    assert not set(schedule.admit) & running
    assert len(running) - len(preempted) + len(schedule.admit) <= resources.max_num_seqs
    assert sum(n for _, n in schedule.run) <= resources.max_tokens_per_step
    assert sorted(set(by_rid) - set(run)) == sorted(schedule.reasons)
    known = {"memory", "waits_for", "fetch", "budget", "max_num_seqs", "experts", "demoted"}
    assert set(schedule.reasons.values()) <= known
    blocks = 0
    for rid, n in schedule.run:
        c = by_rid[rid]
        end = (c.done or c.reuse) + n
        assert n > 0 and end <= c.total and (end == c.total or end % BLOCK == 0)
        assert c.fetch not in ("absent", "pending")
        blocks += max(0, -(-end // BLOCK) - c.blocks_held) + (0 if c.is_running else resources.slot_blocks)
    freed = sum(resources.slot_blocks + by_rid[rid].blocks_freed for rid in preempted)
    assert blocks <= resources.room_blocks + freed
    sizes = [n for _, n in schedule.run]
    decode_rows = [rid in running and by_rid[rid].is_decoding for rid in run]
    assert decode_rows == sorted(decode_rows, reverse=True) or 1 in sizes[: sum(decode_rows)]
    assert all(how == "drop" or resources.can_park for _, how in schedule.preempt)
    assert set(schedule.prefetch) <= {c.rid for c in candidates if c.fetch == "absent"}


@BOTH
def test_every_schedule_keeps_the_contract(name):
    rng = random.Random(1)
    for _ in range(3000):
        candidates, resources = random_case(rng)
        check(SCHEDULERS[name](candidates, resources), candidates, resources)


@BOTH
def test_the_order_of_the_candidates_changes_nothing(name):
    rng = random.Random(2)
    for _ in range(1000):
        candidates, resources = random_case(rng)
        expected = SCHEDULERS[name](candidates, resources)
        rng.shuffle(candidates)
        got = SCHEDULERS[name](candidates, resources)
        assert got == expected and list(got.reasons) is not None
