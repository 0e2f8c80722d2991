"""Memory or steps that hold hardly more than one thing at a time: everybody goes on all the same, and the counts are true."""

import pytest
from solo import Recorder, assert_equals_solo
from test_scheduler import BLOCK, BOTH, Life, Machine, a_candidate, decoding, the_resources
from test_small_pools import pages_of, prompt_of, steps_until_done

from kimi_k3 import KimiK3Generator, SamplingParams
from kimi_k3.engine.scheduler import schedule_dependency_aware


@BOTH
def test_an_exact_repeat_goes_on_where_its_prompt_and_two_states_fill_the_memory(demo, name):
    """Nothing runs in the step that admits it: what it starts from must not stay in its way, nor in that of those behind."""
    prompt = prompt_of(192)
    with KimiK3Generator(demo, max_num_seqs=4, memory=pages_of(demo, 3), scheduler=name) as gen:
        gen.generate([prompt], SamplingParams(max_new_tokens=1))
        rid = gen.add(prompt, SamplingParams(max_new_tokens=3, ignore_eos=True))
        behind = gen.add(prompt_of(20, 4), SamplingParams(max_new_tokens=3, ignore_eos=True))
        steps_until_done(gen, 20)
        repeat = gen.result(rid)
        assert len(repeat.token_ids) == 3 and repeat.reused_tokens == 192 and gen.counts["prefill_tokens"] == 192 + 20
        assert len(gen.result(behind).token_ids) == 3


@BOTH
@pytest.mark.parametrize("snapshots", ["exact", "bf16"])
@pytest.mark.parametrize(("length", "added"), [(192, 1), (192, 0), (191, 1), (130, 60), (160, 32)])
@pytest.mark.parametrize("pages", [2, 3, 4])
def test_what_is_told_of_a_hit_is_what_ran(demo, name, snapshots, length, added, pages):
    """A hit that gives way for want of room was none, one that is taken over was one, and neither is a replay."""
    prompt = prompt_of(length)
    with KimiK3Generator(
        demo,
        max_num_seqs=1,
        memory=pages_of(demo, pages),
        scheduler=name,
        snapshots=snapshots,
        batch_invariant=snapshots == "exact",
    ) as gen:
        needed = -(-(length + added + 3) // 64)
        if needed > (pages - 1) * gen.pool.blocks_per_page:
            with pytest.raises(ValueError, match="latent blocks"):
                gen.add(prompt + prompt_of(added, 1), SamplingParams(max_new_tokens=3))
            return
        gen.generate([prompt], SamplingParams(max_new_tokens=1))
        before = gen.counts.copy()
        recorder, longer = Recorder(), prompt + prompt_of(added, 1)
        params = SamplingParams(max_new_tokens=3, ignore_eos=True, logits_processor=recorder)
        rid = gen.add(longer, params)
        steps_until_done(gen, 20)
        result, counts = gen.result(rid), gen.counts - before
        assert len(result.token_ids) == 3
        assert result.reused_tokens == length + added - counts["prefill_tokens"]
        assert counts["hit_tokens"] == result.reused_tokens and counts["prompt_tokens"] == length + added
        assert counts["replayed_tokens"] == result.metrics["replayed_tokens"] == 0
        if snapshots == "exact":
            assert result.reused_tokens == length
            assert_equals_solo(demo, longer, result, recorder.rows, params)


def test_what_others_hold_of_a_table_is_counted_anew_after_a_preemption(demo):
    with KimiK3Generator(demo, max_num_seqs=3, max_tokens_per_step=384, num_blocks=60, scheduler="fcfs") as gen:
        prompt = prompt_of(256)
        gen.add([*prompt, 1], SamplingParams(max_new_tokens=40, ignore_eos=True))
        rid = gen.add(prompt + prompt_of(700, 5), SamplingParams(max_new_tokens=4, ignore_eos=True))
        gen.step()
        request = gen._requests[rid]
        gen._decide()  # counts
        gen._preempt(request, "drop")
        for _ in range(4):
            gen.step()
            held = sum(gen.pool.references[block] == 1 for block in request.table)
            assert gen.memory.unshared_blocks(request) == held


# Steps of few tokens.


@pytest.mark.parametrize("tokens", [BLOCK, BLOCK + 1, BLOCK * 3 // 2, BLOCK * 2 - 1, BLOCK * 2, BLOCK * 3])
@pytest.mark.parametrize("num_decoding", [1, 16, 63, 64, 65, 100, 200])
def test_neither_decodes_nor_a_prefill_wait_long_where_a_step_is_too_small_for_both(tokens, num_decoding):
    """Of a prompt of 40 blocks a piece runs once in ceil(n / tokens) + 1 steps; a token waits at most twice as long."""
    lives = [Life(rid, 0, 2, 10_000) for rid in range(num_decoding)]
    machine = Machine(
        lives,
        schedule_dependency_aware,
        total_blocks=100_000,
        slot_blocks=1,
        max_num_seqs=1000,
        max_tokens_per_step=tokens,
    )
    while not all(life.generated for life in lives):
        machine.step()
    long = Life(999, machine.step_number, BLOCK * 40, 1, last_step=machine.step_number)
    lives.append(long)
    for life in lives:
        life.longest_wait = 0
    before, first = sum(life.generated for life in lives), machine.step_number
    while long in machine.lives and machine.step_number - first < 1000:
        machine.step()
    turns, steps = -(-num_decoding // tokens), machine.step_number - first
    assert long.longest_wait <= turns + 1 and steps <= 40 * (turns + 1)
    assert max(life.longest_wait for life in lives) <= 2 * turns
    # Nor are steps wasted: but for the last one, each is filled by decodes or has a block of the prompt and decodes beside.
    assert sum(life.generated for life in lives) - before >= (steps - 40) * min(tokens, num_decoding)


@pytest.mark.parametrize("tokens", [BLOCK, BLOCK + 10, BLOCK * 2])
def test_decodes_leave_nothing_to_a_prefill_that_cannot_use_it(tokens):
    case = [decoding(rid, 100, idle_steps=1) for rid in range(64)]
    resources = the_resources(max_num_seqs=99, max_tokens_per_step=tokens, room_blocks=20)
    for waiting in (
        a_candidate(99, total=64 * 30),
        a_candidate(99, fetch="pending"),
        a_candidate(99, waits_for=3),
    ):
        plan = schedule_dependency_aware([*case, waiting], resources)
        assert len(plan.run) == 64 and set(plan.reasons) == {99}
    short = schedule_dependency_aware([*case, a_candidate(99, total=5)], resources._replace(room_blocks=1000))
    assert (99, 5) in short.run and len(short.run) == min(64, tokens - 5) + 1


def test_in_a_small_step_somebody_who_takes_a_place_gets_in_at_once():
    """Though it is the turn of those who decode: else their place would be given away for nothing."""
    case = [decoding(rid, 100, idle_steps=5, priority=-1) for rid in range(16)]
    plan = schedule_dependency_aware(
        [*case, a_candidate(99, total=64)], the_resources(max_tokens_per_step=BLOCK, room_blocks=2)
    )
    assert plan.preempt and plan.admit == [99]


# What an unfinished prefill leaves.


def positions(gen) -> list[int]:
    return sorted(entry.snapshot.position for entry in gen.index.entries())


@pytest.mark.parametrize("how", ["drop", "park"])
@pytest.mark.parametrize("is_running_again", [False, True])
def test_a_prefill_that_was_preempted_and_is_then_aborted_leaves_nothing(demo, how, is_running_again):
    with KimiK3Generator(demo, max_num_seqs=2, max_tokens_per_step=64, num_blocks=60) as gen:
        rid = gen.add(prompt_of(300), SamplingParams(max_new_tokens=2))
        gen.step()
        gen.step()
        gen._preempt(gen._requests[rid], how)
        assert positions(gen)[-1] == 128
        if is_running_again:
            gen.step()
            assert gen._requests[rid].done == 192
        gen.abort(rid)
        assert (positions(gen), gen.pool.num_slots, gen.pool.num_blocks) == ([], 0, 0)


def test_what_another_has_used_of_a_preempted_prefill_stays_when_that_is_aborted(demo):
    with KimiK3Generator(demo, max_num_seqs=2, max_tokens_per_step=128, num_blocks=60) as gen:
        rid = gen.add(prompt_of(300), SamplingParams(max_new_tokens=2), snapshot_at=[100])
        gen.step()
        gen._preempt(gen._requests[rid], "drop")
        other = gen.add([*prompt_of(300)[:110], 5], SamplingParams(max_new_tokens=1), priority=1)
        while other in gen._requests:
            gen.step()
        gen.abort(rid)
        assert gen.result(other).reused_tokens == 100 and 100 in positions(gen) and 128 not in positions(gen)


def test_what_a_preempted_prefill_left_stays_when_its_prompt_is_through(demo):
    with KimiK3Generator(demo, max_num_seqs=2, max_tokens_per_step=64, num_blocks=60) as gen:
        rid = gen.add(prompt_of(300), SamplingParams(max_new_tokens=20, ignore_eos=True))
        gen.step()
        gen._preempt(gen._requests[rid], "drop")
        while not gen._requests[rid].generated:
            gen.step()
        gen.abort(rid)
        assert {64, 300} <= set(positions(gen))
