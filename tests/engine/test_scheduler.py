"""Promises of the schedulers: over random candidate sets, and over whole runs of a small machine that keeps its own books."""

import random
from dataclasses import dataclass

import pytest

from kimi_k3.engine.scheduler import (
    SCHEDULERS,
    Candidate,
    Pace,
    Policy,
    Resources,
    schedule_dependency_aware,
    schedule_fcfs,
)

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
        "max_tokens_per_step": 512,
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
        room_blocks=room, slot_blocks=slot, max_num_seqs=max_num_seqs,
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
        assert (
            (n > 0 or (n == 0 and rid in schedule.admit and end == c.total))
            and end <= c.total
            and (end == c.total or end % BLOCK == 0)
        )
        assert c.fetch not in ("absent", "pending")
        blocks += max(0, -(-end // BLOCK) - c.blocks_held) + (0 if c.is_running else resources.slot_blocks)
    freed = sum(resources.slot_blocks + by_rid[rid].blocks_freed for rid in preempted)
    assert blocks <= resources.room_blocks + freed
    sizes = [n for _, n in schedule.run]
    decode_rows = [rid in running and by_rid[rid].is_decoding for rid in run]
    assert decode_rows == sorted(decode_rows, reverse=True) or 1 in sizes[: sum(decode_rows)]
    assert {how for _, how in schedule.preempt} <= {"park", "drop"}
    assert set(schedule.prefetch) <= {c.rid for c in candidates if c.fetch == "absent"}


@BOTH
def test_every_schedule_keeps_the_contract(name):
    rng = random.Random(1)
    for _ in range(1500):
        candidates, resources = random_case(rng)
        check(SCHEDULERS[name](candidates, resources), candidates, resources)


@BOTH
def test_the_order_of_the_candidates_changes_nothing(name):
    rng = random.Random(2)
    for _ in range(500):
        candidates, resources = random_case(rng)
        expected = SCHEDULERS[name](candidates, resources)
        rng.shuffle(candidates)
        got = SCHEDULERS[name](candidates, resources)
        assert got == expected and list(got.reasons) is not None


# Whole runs.


@dataclass(eq=False)
class Life:
    rid: int
    arrives: int
    prompt: int
    new: int
    priority: int = 0
    group: int = -1  # shares its first `shared` tokens with others of the group
    shared: int = 0
    is_running: bool = False
    done: int = 0
    generated: int = 0
    kept: int = 0  # tokens that a snapshot of its own covers
    computed: int = 0
    last_step: int = 0
    admitted: int = 0
    preempted: int = 0
    longest_wait: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.generated


class Machine:
    """Applies schedules and keeps the books: blocks are not shared, a group's prefix is known once one has prefilled it."""

    def __init__(self, lives: list[Life], schedule, total_blocks: int, **resources):
        self.lives, self.schedule, self.step_number = lives, schedule, 0
        self.resources = the_resources(total_blocks=total_blocks, **resources)
        self.known: dict[int, int] = {}
        self.finished: list[Life] = []

    def used(self) -> int:
        return sum(self.resources.slot_blocks + -(-life.done // BLOCK) for life in self.lives if life.is_running)

    def candidates(self) -> list[Candidate]:
        out, leaders = [], {}
        here = [life for life in self.lives if life.arrives <= self.step_number]
        for life in sorted(here, key=lambda life: not life.is_running):
            is_first = life.group >= 0 and life.generated == 0 and life.group not in self.known
            waits_for = leaders.setdefault(life.group, life.rid) if is_first else None
            held = -(-life.done // BLOCK)
            out.append(
                a_candidate(
                    life.rid, priority=life.priority, is_running=life.is_running, done=life.done, total=life.total,
                    is_decoding=life.is_running and life.generated > 0 and life.total - life.done == 1, blocks_held=held,
                    blocks_freed=held, reuse=0 if life.is_running else max(life.kept, self.known.get(life.group, 0)),
                    waits_for=None if waits_for == life.rid or life.is_running else waits_for,
                    remaining_new=life.new - life.generated, replay_if_dropped=life.done - life.kept,
                    idle_steps=self.step_number - life.last_step, ran_steps=self.step_number - life.admitted,
                )
            )  # fmt: skip
        return out

    def step(self) -> bool:
        """Whether anything ran, or nothing was there to run."""
        candidates = self.candidates()
        resources = self.resources._replace(room_blocks=self.resources.total_blocks - self.used())
        plan = self.schedule(candidates, resources)
        check(plan, candidates, resources)
        by_rid = {life.rid: life for life in self.lives}
        for rid, how in plan.preempt:
            life = by_rid[rid]
            life.kept = life.done if how == "park" else life.kept
            life.is_running, life.done, life.last_step = False, 0, self.step_number
            life.preempted += 1
        for rid in plan.admit:
            life = by_rid[rid]
            life.is_running, life.admitted = True, self.step_number
            life.done = max(life.kept, self.known.get(life.group, 0))
        for rid, count in plan.run:
            life = by_rid[rid]
            life.done += count
            life.computed += count
            life.longest_wait = max(life.longest_wait, self.step_number - life.last_step)
        assert self.used() <= self.resources.total_blocks
        for rid, _ in plan.run:
            life = by_rid[rid]
            life.last_step = self.step_number
            if life.done == life.total:
                if life.generated == 0:
                    life.kept = life.prompt
                    self.known[life.group] = life.shared
                    self.known.pop(-1, None)
                life.generated += 1
                if life.generated == life.new:
                    self.lives.remove(life)
                    self.finished.append(life)
        self.step_number += 1
        return bool(plan.run) or not candidates

    def run(self, steps: int) -> None:
        while self.lives:
            assert self.step_number < steps, f"{len(self.lives)} requests are not finished after {steps} steps"
            assert self.step() or any(life.arrives >= self.step_number for life in self.lives)


def some_lives(rng: random.Random, count: int) -> list[Life]:
    lives, arrives = [], 0
    for rid in range(count):
        arrives += rng.randint(0, 6)
        group = rng.choice([-1, -1, 0, 1])
        shared = 128 if group >= 0 else 0
        prompt = shared + rng.choice([rng.randint(1, 90), rng.randint(1, 90), rng.randint(200, 900)])
        life = Life(rid, arrives, prompt, rng.randint(1, 120), rng.choice([0, 0, 0, 1, -1]), group, shared)
        life.last_step = arrives
        lives.append(life)
    return lives


@BOTH
@pytest.mark.parametrize("seed", range(8))
def test_every_request_finishes_and_something_runs_in_every_step(name, seed):
    """Memory for two to four requests of the larger kind; each step's schedule is checked against the books."""
    rng = random.Random(seed)
    machine = Machine(
        some_lives(rng, 40), SCHEDULERS[name], total_blocks=rng.choice([40, 60, 100]), slot_blocks=rng.choice([1, 8, 16]),
        max_tokens_per_step=rng.choice([80, 128, 512]),
    )  # fmt: skip
    machine.run(20_000)
    assert len(machine.finished) == 40 and machine.used() == 0
    assert all(life.generated == life.new for life in machine.finished)


@BOTH
def test_of_two_that_do_not_fit_together_the_earlier_one_goes_on(name):
    """Each grows to 20 of 30 blocks. fcfs takes the later one in again, and out, for each block the earlier one grows by."""
    lives = [Life(0, 0, 64, 1100), Life(1, 0, 64, 1100)]
    machine = Machine(list(lives), SCHEDULERS[name], total_blocks=30, slot_blocks=1)
    machine.run(3000)
    assert lives[0].preempted == 0 and (name == "fcfs" or lives[1].preempted <= 2)


def test_one_of_several_computes_a_shared_prefix():
    def computed(schedule) -> int:
        lives = [Life(rid, 0, 512 + 20, 5, group=0, shared=512) for rid in range(12)]
        machine = Machine(list(lives), schedule, total_blocks=1000, max_tokens_per_step=2048)
        machine.run(200)
        return sum(life.computed for life in lives)

    once = 512 + 12 * (20 + 4)
    assert computed(schedule_dependency_aware) == once
    assert computed(schedule_fcfs) >= once + 512


QUICK = Policy(patience=40, quantum=20)


def quick(candidates, resources):
    return schedule_dependency_aware(candidates, resources, QUICK)


def test_an_endless_request_gives_way_to_one_that_waits():
    """Memory for one: each waits no longer than patience + 2 quanta, and both go on."""
    lives = [Life(0, 0, 64, 400), Life(1, 0, 64, 400)]
    machine = Machine(list(lives), quick, total_blocks=20, slot_blocks=10)
    for _ in range(600):
        machine.step()
    assert min(life.generated for life in lives) > 100
    assert max(life.longest_wait for life in lives) <= QUICK.patience + 2 * QUICK.quantum


def test_a_low_request_runs_beside_an_endless_stream_of_urgent_ones():
    """Urgent requests arrive at twice the rate that memory carries; not more than the order allows go before a low one."""
    urgent = [Life(rid, rid * 10, 64, 40, priority=1) for rid in range(3, 100)]
    low = [Life(rid, 0, 200, 30, priority=-1) for rid in range(3)]
    for life in urgent:
        life.last_step = life.arrives
    policy = QUICK._replace(priority_worth=8)
    machine = Machine(
        [*low, *urgent], lambda c, r: schedule_dependency_aware(c, r, policy), total_blocks=24, slot_blocks=10
    )
    while not all(life in machine.finished for life in low):
        assert machine.step_number < 1000
        machine.step()
    ahead = 3 + 2 * policy.priority_worth + policy.length_worth * 2  # a prompt of 200 tokens is two doublings longer
    assert sum(life in urgent for life in machine.finished) <= ahead + 3
    assert max(life.longest_wait for life in low) <= policy.patience + (1 + ahead) * policy.quantum
    assert len([life for life in machine.lives if life.arrives <= machine.step_number]) > 10  # the stream was too much


def test_nobody_slips_past_an_old_request_that_needs_much():
    """Small requests keep memory busy; a large one gets in once it is old, though it never fits beside four small ones."""
    small = [Life(rid, rid * 8, 64, 40) for rid in range(1, 200)]
    for life in small:
        life.last_step = life.arrives
    large = Life(0, 0, 64 * 30, 5)
    small[0].arrives = 0
    machine = Machine([*small[:1], large, *small[1:]], quick, total_blocks=60, slot_blocks=10)
    large.arrives = large.last_step = 20
    for _ in range(400):
        machine.step()
    before = [life.rid for life in small if life.computed and life.admitted < large.admitted]
    assert (
        large in machine.finished and max(before) <= QUICK.length_worth * 4
    )  # 32 times the prefill: five doublings, less one


# Single decisions.


def reasons(schedule) -> dict[int, str]:
    return schedule.reasons


def test_pieces_end_on_blocks_counted_from_the_start():
    candidate = a_candidate(0, is_running=True, done=70, total=400, blocks_held=2)
    for schedule in SCHEDULERS.values():
        assert schedule([candidate], the_resources(max_tokens_per_step=200)).run == [(0, 256 - 70)]
        assert schedule([candidate], the_resources(max_tokens_per_step=512)).run == [(0, 330)]


def test_a_prompt_that_is_known_whole_runs_with_no_token():
    for schedule in SCHEDULERS.values():
        plan = schedule([a_candidate(0, total=128, reuse=128)], the_resources())
        assert plan.run == [(0, 0)] and plan.admit == [0]


def test_prefill_is_spread_while_others_decode():
    """Over 16 steps beside many, less far the more wait for it: by how many wait for each that decodes."""
    resources = the_resources(max_tokens_per_step=2048, max_num_seqs=99, room_blocks=900, total_blocks=999)

    def pieces(prompts, decoders, schedule=schedule_dependency_aware):
        cases = [decoding(rid, 100) for rid in range(decoders)]
        cases += [a_candidate(100 + i, total=total) for i, total in enumerate(prompts)]
        return [tokens for rid, tokens in schedule(cases, resources).run if rid >= 100]

    assert pieces([5000], 0) == [2048]
    assert pieces([5000], 16) == [5000 * 17 // (16 * 16) // BLOCK * BLOCK] and pieces([700], 16) == [BLOCK]
    assert pieces([5000], 1) == [2048 // 4] and pieces([700], 1) == [BLOCK]
    assert pieces([600] * 8, 2) == [600, 600, 256]  # 4,800 tokens, four wait for each that decodes: 1,500 a step
    assert pieces([5000], 1, schedule_fcfs) == [1984]


def test_prefill_beside_decodes_is_what_a_step_has_time_for():
    """As many tokens as are known to keep it within a few decode steps."""

    def pieces(prompts, decoders, stall_tokens):
        cases = [decoding(rid, 100) for rid in range(decoders)]
        cases += [a_candidate(100 + i, total=total) for i, total in enumerate(prompts)]
        resources = the_resources(max_tokens_per_step=2048, max_num_seqs=99, room_blocks=900, stall_tokens=stall_tokens)
        return [tokens for rid, tokens in schedule_dependency_aware(cases, resources).run if rid >= 100]

    assert pieces([5000], 16, 512) == [512] and pieces([700], 16, 512) == [512] and pieces([700], 16, 5) == [BLOCK]
    assert pieces([600] * 8, 2, 512) == [512] and pieces([600] * 8, 8, 1300) == [600, 600, 64]
    assert pieces([5000], 4, 1 << 20) == [2044 // BLOCK * BLOCK] and pieces([5000], 0, 64) == [2048]
    # A piece that begins inside a block also fills that where else it would be a sliver.
    case = [decoding(0, 100), a_candidate(1, total=500, reuse=100)]
    assert (1, 92) in schedule_dependency_aware(case, the_resources(stall_tokens=64)).run
    assert (1, 44) in schedule_dependency_aware(
        [case[0], a_candidate(1, total=500, reuse=84)], the_resources(stall_tokens=64)
    ).run


def test_the_pace_is_learnt_from_steps_and_follows_them():
    pace = Pace()
    for _ in range(Pace.LEAST):
        assert pace.tokens(3.0) == 0
        pace.add(4, 0, 0.010)
        pace.add(0, 512, 9.0)  # nobody waited for a token
        pace.add(4, 64, 0.010 + 64 * 0.0001)
    assert pace.tokens(3.0) == pytest.approx(200, abs=1) and pace.tokens(2.0) == pytest.approx(100, abs=1)
    for n in range(64, 1600, 64):  # now with a fixed part, which only different sizes tell
        pace.add(4, n, 0.010 + 0.004 + n * 0.0001)
    assert pace.tokens(3.0) == pytest.approx(160, abs=25)
    for _ in range(300):  # memory-bound: prompts cost next to nothing
        pace.add(4, 64, 0.010)
    assert pace.tokens(3.0) > 100_000


def test_admission_leaves_room_for_growth():
    """300 tokens to come in the prompt and 64 per request, against a first piece that fits at once."""
    room = 10 + 6 + 1  # a slot, the blocks of 300 + 50 tokens, the block that the other one grows by
    case = [decoding(0, 128), a_candidate(1, total=300)]
    assert 1 in schedule_dependency_aware(case, the_resources(room_blocks=room)).admit
    assert reasons(schedule_dependency_aware(case, the_resources(room_blocks=room - 1))) == {1: "memory"}
    assert 1 in schedule_fcfs(case, the_resources(room_blocks=room - 1)).admit


def test_who_computes_a_prefix_takes_the_place_of_the_most_urgent_who_waits_for_it():
    case = [
        a_candidate(0, total=640), a_candidate(1, total=640), a_candidate(2, total=640),
        a_candidate(3, total=640, priority=2, waits_for=4), a_candidate(4, total=640, waits_for=2),
    ]  # fmt: skip
    plan = schedule_dependency_aware(case, the_resources(max_tokens_per_step=128))
    assert plan.run == [(2, 128)]
    assert plan.reasons[4] == "waits_for"


def test_waiting_in_a_circle_stops_nobody():
    case = [a_candidate(0, waits_for=1), a_candidate(1, waits_for=2), a_candidate(2, waits_for=0)]
    plan = schedule_dependency_aware(case, the_resources())
    assert plan.run == [(2, 100)] or len(plan.run) >= 1
    assert len(plan.run) + len(plan.reasons) == 3


@pytest.mark.parametrize(("replay", "how"), [(5000, "park"), (100, "drop")])
def test_a_state_is_parked_where_that_costs_less_than_its_replay(replay, how):
    case = [decoding(0, 640), decoding(1, 640, replay_if_dropped=replay)]
    plan = schedule_dependency_aware(case, the_resources(room_blocks=1))
    assert plan.preempt == [(1, how)] and plan.run == [(0, 1)] and plan.reasons == {1: "memory"}


def test_an_urgent_request_takes_the_place_of_a_lower_one_and_an_equal_one_does_not():
    case = [decoding(0, 100), decoding(1, 100, priority=-1), a_candidate(2, total=60)]
    plan = schedule_dependency_aware(case, the_resources(room_blocks=2))
    assert [rid for rid, _ in plan.preempt] == [1] and plan.admit == [2] and plan.reasons == {1: "demoted"}
    plan = schedule_dependency_aware([case[0], decoding(1, 100), case[2]], the_resources(room_blocks=2))
    assert not plan.preempt and plan.reasons == {2: "memory"}


def test_tier_data_is_asked_for_ahead_and_not_by_all_at_once():
    parked = [a_candidate(rid, fetch="absent", fetch_bytes=1) for rid in range(20)]
    case = [decoding(30 + i, 100) for i in range(4)] + parked
    ahead = schedule_dependency_aware(case, the_resources(room_blocks=0 + 5))
    assert ahead.prefetch == list(range(Policy().lookahead)) and not ahead.admit
    assert schedule_fcfs(case, the_resources(room_blocks=5)).prefetch == []
    pending = [c._replace(fetch="pending") for c in parked[:8]] + parked[8:]
    assert schedule_dependency_aware(case[:4] + pending, the_resources(room_blocks=5)).prefetch == []


def test_the_expert_budget_holds_back_who_would_load_the_busiest_rank():
    case = [
        decoding(0, 100, experts=(1.0, 0.0)),
        a_candidate(1, total=30, experts=(0.6, 0.1)),
        a_candidate(2, total=30, experts=(0.1, 0.9)),
    ]
    plan = schedule_dependency_aware(case, the_resources(expert_budget=1.5))
    assert plan.admit == [2] and plan.reasons == {1: "experts"} and plan.expert_load == pytest.approx(1.1)
    assert schedule_dependency_aware(case, the_resources()).admit == [1, 2]
    alone = schedule_dependency_aware(case[1:2], the_resources(expert_budget=0.1))  # overloaded, but it is the only one
    assert alone.admit == [1] and alone.expert_load > 0.1


def test_a_step_too_small_for_a_block_is_refused():
    for schedule in SCHEDULERS.values():
        with pytest.raises(ValueError, match="max_tokens_per_step >= block_size"):
            schedule([], the_resources(max_tokens_per_step=63))
