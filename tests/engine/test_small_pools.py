"""Memory for hardly more than one request: everybody is served, nothing leaks, and the tokens are those of a run alone."""

import random

import pytest
from solo import Recorder, assert_equals_solo

from kimi_k3 import KimiK3Generator, SamplingParams
from kimi_k3.engine.device_pools import PoolLayout
from kimi_k3.engine.tiers import DiskTier, HostTier
from kimi_k3.generation import end_ids


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(length)]


def pages_of(model, pages: int, block_size: int = 64) -> int:
    return pages * PoolLayout(model, block_size).page_bytes


def steps_until_done(gen, most: int) -> int:
    for step in range(most):
        if not gen.has_unfinished():
            return step
        gen.step()
    raise AssertionError(f"not done after {most} steps: {gen.stats()}")


@pytest.mark.parametrize("scheduler", ["dependency_aware", "fcfs"])
def test_a_hit_that_leaves_no_room_for_the_next_token_gives_way(demo, scheduler):
    """State, prompt and the copy of its state fill the memory: the request that goes on from there must not wait for ever."""
    prompt = prompt_of(192)
    with KimiK3Generator(demo, max_num_seqs=1, memory=pages_of(demo, 3), scheduler=scheduler) as gen:
        gen.generate([prompt], SamplingParams(max_new_tokens=1))
        (longer,) = gen.generate([[*prompt, 5]], SamplingParams(max_new_tokens=3, ignore_eos=True))
        assert len(longer.token_ids) == 3


@pytest.mark.parametrize("scheduler", ["dependency_aware", "fcfs"])
def test_a_chat_goes_on_in_the_slot_of_its_last_turn(demo, scheduler):
    """Four pages hold another request, a state that it left, the blocks and the state of the last turn: it is taken over."""
    with KimiK3Generator(
        demo, max_num_seqs=2, memory=pages_of(demo, 4), scheduler=scheduler, batch_invariant=True
    ) as gen:
        prompt = prompt_of(40)
        (turn,) = gen.generate([prompt], SamplingParams(max_new_tokens=4, ignore_eos=True))
        gen.add(prompt_of(30, 1), SamplingParams(max_new_tokens=40, ignore_eos=True))
        gen.step()
        kept = {entry.snapshot.slot: entry.snapshot.position for entry in gen.index.entries()}
        assert len(kept) == 2 and gen.pool.free_pages == 0
        recorder, before = Recorder(), gen.counts["prefill_tokens"]
        params = SamplingParams(max_new_tokens=2, ignore_eos=True, logits_processor=recorder)
        going_on = [*prompt, *turn.token_ids, 7, 8, 9]
        rid = gen.add(going_on, params)
        gen.step()
        assert kept[gen._requests[rid].slot] == len(going_on) - (gen.counts["prefill_tokens"] - before) >= 40
        steps_until_done(gen, 60)
        assert gen.counts["preemptions_drop"] == 0
        assert_equals_solo(demo, going_on, gen.result(rid), recorder.rows, params)


def test_states_are_kept_while_a_short_prompt_decodes(demo):
    """A branch inside an answer, and a preemption, cost no more than a stride, also where the prompt is under one."""
    with KimiK3Generator(demo, max_num_seqs=1, num_blocks=400) as gen:
        prompt = prompt_of(10)
        (answer,) = gen.generate([prompt], SamplingParams(max_new_tokens=300, ignore_eos=True))
        branch = [*prompt, *answer.token_ids[:200], 5]
        (other,) = gen.generate([branch], SamplingParams(max_new_tokens=1))
        assert len(branch) - other.reused_tokens <= 64
        low = gen.add(prompt_of(10, 1), SamplingParams(max_new_tokens=200, ignore_eos=True))
        for _ in range(170):
            gen.step()
        gen.add([7], SamplingParams(max_new_tokens=1), priority=5)
        steps_until_done(gen, 400)
        metrics = gen.result(low).metrics
        assert metrics["preemptions"] == 1 and metrics["replayed_tokens"] <= 64


def test_a_schedule_is_repeated_until_something_happens(demo):
    with KimiK3Generator(demo, max_num_seqs=2, num_blocks=100) as gen:
        gen.add(prompt_of(10), SamplingParams(max_new_tokens=60, ignore_eos=True))
        for _ in range(12):
            gen.step()
        assert gen.counts["repeated_schedules"] > 6
        late = gen.add(prompt_of(5, 1), SamplingParams(max_new_tokens=1))
        assert [output.rid for output in gen.step() if output.finish_reason] == [late]  # in the very next step
        gen.add(prompt_of(5, 2), SamplingParams(max_new_tokens=60, ignore_eos=True))
        last = gen.add(prompt_of(5, 3), SamplingParams(max_new_tokens=1))
        gen.step()
        gen.abort(0)
        assert [output.rid for output in gen.step() if output.finish_reason] == [0, last]


def serve_at_random(model, seed: int, folder) -> dict[str, int]:
    """Some requests, related or not, over a pool just large enough for the longest of them. Returns the counts."""
    rng = random.Random(seed)
    block_size = rng.choice([64, 64, 16, 100])
    longest, most_new = rng.choice([40, 130, 300]), rng.choice([8, 24, 140])
    layout = PoolLayout(model, block_size)
    needed = -(-(longest + most_new) // block_size)
    pages = 1 + -(-needed // layout.blocks_per_page) + rng.choice([0, 0, 1, 2, 4])
    bytes_of_tiers = rng.choice([1000, 300_000, 1 << 28])
    tiers = [HostTier(bytes_of_tiers)] * rng.randrange(2) + [DiskTier(folder, bytes_of_tiers)] * rng.randrange(2)
    gen = KimiK3Generator(
        model, max_num_seqs=rng.choice([1, 2, 3, 8]), max_tokens_per_step=max(block_size, rng.choice([64, 200])),
        memory=pages * layout.page_bytes, block_size=block_size, scheduler=rng.choice(["fcfs", "dependency_aware"]),
        tiers=tiers, batch_invariant=True, prefix_cache=rng.random() < 0.85,
    )  # fmt: skip
    prompts, asked, done = [], {}, {}
    left = rng.randrange(4, 12)
    for _ in range(8000):
        while left and rng.random() < 0.5:
            left -= 1
            start = rng.choice(prompts)[: rng.randrange(1, longest + 1)] if prompts and rng.random() < 0.7 else []
            new = rng.choice([0, 1, 2, block_size, block_size + 1, rng.randrange(1, longest)])
            prompt = (start + [rng.randrange(3, 1000) for _ in range(new)])[:longest] or [5]
            prompts.append(prompt)
            params = SamplingParams(
                max_new_tokens=rng.randrange(1, most_new + 1), seed=rng.randrange(100), ignore_eos=rng.random() < 0.5,
                temperature=rng.choice([0.0, 0.0, 1.3]), top_p=rng.choice([0.9, 1.0]), logits_processor=Recorder(),
            )  # fmt: skip
            places = [rng.randrange(1, len(prompt) + 1) for _ in range(rng.choice([0, 0, 2]))]
            rid = gen.add(prompt, params, priority=rng.choice([0, 0, 0, 1, 3]), snapshot_at=places)
            asked[rid] = prompt, params
        if asked and rng.random() < 0.03:
            gen.abort(rng.choice(list(asked)))
        for output in gen.step():
            if output.finish_reason:
                assert output.rid not in done
                done[output.rid] = gen.result(output.rid)
                prompts.append((asked[output.rid][0] + done[output.rid].token_ids)[:longest])
        if not left and not gen.has_unfinished():
            break
    assert len(done) == len(asked) and not left, (seed, gen.stats())
    gen.close()
    assert (gen.pool.num_slots, gen.pool.num_blocks) == (0, 0)
    for rid, result in done.items():
        prompt, params = asked[rid]
        assert result.finish_reason in ("length", "stop", "abort"), (seed, rid, result.error)
        if result.token_ids:
            rows = params.logits_processor.rows[: len(result.token_ids)]
            assert_equals_solo(model, prompt, result, rows, params, end_ids(model, None))
    return dict(gen.counts)


def test_random_requests_in_a_pool_for_one(demo, tmp_path, num_rounds=12):
    """No preemption is asked for here: what happens comes of the memory alone."""
    counts = [serve_at_random(demo, seed, tmp_path / str(seed)) for seed in range(num_rounds)]
    for event in ("preemptions_drop", "replayed_tokens"):
        assert sum(c.get(event, 0) for c in counts) > 0


@pytest.mark.slow
def test_random_requests_in_a_pool_for_one_many_times(demo, tmp_path):
    test_random_requests_in_a_pool_for_one(demo, tmp_path, num_rounds=150)
