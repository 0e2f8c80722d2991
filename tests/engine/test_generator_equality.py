"""A request's tokens never depend on its company, on a cache hit, on preemption, or on where its state has been."""

import random

import pytest
from conftest import Recorder, assert_equals_solo

from kimi_k3 import KimiK3Generator, SamplingParams
from kimi_k3.engine.tiers import HostTier
from kimi_k3.generation import end_ids


def random_requests(rng: random.Random, count: int, vocabulary: int, longest: int):
    """Prompts of 1..longest tokens, many beginning like an earlier one; greedy or sampled."""
    prompts: list[list[int]] = []
    for _ in range(count):
        length = rng.choice([1, 2, 63, 64, 65, 128, rng.randrange(1, longest), rng.randrange(1, longest)])
        start = rng.choice(prompts)[: rng.randrange(1, longest)] if prompts and rng.random() < 0.6 else []
        prompts.append((start + [rng.randrange(vocabulary) for _ in range(length)])[:longest])
    requests = []
    for prompt in prompts:
        options = {"seed": rng.randrange(1000), "max_new_tokens": rng.randrange(1, 20)}
        if rng.random() < 0.6:
            options |= {
                "temperature": rng.choice([0.7, 1.3]),
                "top_p": rng.choice([0.9, 1.0]),
                "top_k": rng.choice([0, 40]),
            }
        requests.append((prompt, SamplingParams(**options, logits_processor=Recorder())))
    return requests


def run(gen, requests, rng):
    """Everything at random times, with priorities and aborts. Returns the results by request."""
    pending, rids, results = list(enumerate(requests)), {}, {}
    while pending or gen.has_unfinished():
        for _ in range(rng.randrange(4)):
            if pending:
                place, (prompt, params) = pending.pop(0)
                rids[gen.add(prompt, params, priority=rng.choice([0, 0, 0, 2]))] = place
        if rids and rng.random() < 0.05:
            gen.abort(rng.choice(list(rids)))
        for output in gen.step():
            if output.finish_reason is not None:
                results[rids[output.rid]] = gen.result(output.rid)
    return results


@pytest.mark.parametrize("scheduler", ["dependency_aware", "fcfs"])
@pytest.mark.parametrize("name", ["demo", "smooth"])
def test_every_request_equals_its_solo_run_bit_for_bit(name, scheduler, request, num_requests=40):
    model = request.getfixturevalue(name)
    rng = random.Random(f"{name} {scheduler}")
    longest = 700 if num_requests > 100 else 300
    requests = random_requests(rng, num_requests, model.config.text_config.vocab_size, longest)
    ends = end_ids(model, None)
    # Room for about 3 long sequences: preemption, eviction and parking are certain.
    gen = KimiK3Generator(
        model, max_num_seqs=8, max_tokens_per_step=192, num_blocks=24, scheduler=scheduler, tiers=(HostTier(1 << 28),),
        batch_invariant=True,
    )  # fmt: skip
    gen_stats_before = (gen.pool.num_slots, gen.pool.num_blocks)
    results = run(gen, requests, rng)
    stats = gen.stats()
    assert len(results) == len(requests) and stats["evictions"] > 0
    for place, result in results.items():
        prompt, params = requests[place]
        rows = params.logits_processor.rows
        if result.finish_reason == "abort":
            if result.token_ids:
                assert_equals_solo(model, prompt, result, rows[: len(result.token_ids)], params)
        else:
            assert_equals_solo(model, prompt, result, rows, params, ends)
    assert sum(r.finish_reason != "abort" for r in results.values()) > len(requests) // 2
    gen.close()
    assert (gen.pool.num_slots, gen.pool.num_blocks) == gen_stats_before == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["dependency_aware", "fcfs"])
@pytest.mark.parametrize("name", ["demo", "smooth"])
def test_two_hundred_requests_equal_their_solo_runs_bit_for_bit(name, scheduler, request):
    test_every_request_equals_its_solo_run_bit_for_bit(name, scheduler, request, num_requests=200)
