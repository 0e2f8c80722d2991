"""What one request may ask for, what ends it, and that nothing it does reaches the others or stays behind."""

import asyncio
import math
import random
import threading
from contextlib import contextmanager

import pytest
import torch
from solo import Recorder, assert_equals_solo

from kimi_k3 import KimiK3Generator, SamplingParams
from kimi_k3.engine.generator import LOOK_PAST
from kimi_k3.generation import generate, stream_generate


@pytest.fixture
def gen(demo, tokenizer):
    with KimiK3Generator(demo, tokenizer, max_num_seqs=8, num_blocks=200, batch_invariant=True) as generator:
        yield generator
        assert not generator.has_unfinished()
        generator.index.clear()
        assert generator.pool.num_slots == generator.pool.num_blocks == 0


PROMPT = [40, 50, 60, 70]


@contextmanager
def invariant(model):
    """The model's own mode, which generators do not heed, for a while."""
    model.set_batch_invariant(True)
    try:
        yield
    finally:
        model.set_batch_invariant(False)


def finish(gen):
    while gen.has_unfinished():
        gen.step()


def test_it_gives_the_tokens_of_plain_generation(demo, gen):
    for options in ({}, {"temperature": 1.0, "seed": 4, "top_p": 0.9}, {"temperature": 0.8, "seed": 9, "min_p": 0.05}):
        (result,) = gen.generate([PROMPT], SamplingParams(max_new_tokens=15, **options))
        with invariant(demo):
            ids = generate(demo, torch.tensor([PROMPT]), max_new_tokens=15, **options)[0, len(PROMPT) :].tolist()
        assert result.token_ids == ids[: len(result.token_ids)]


def test_text_streams_as_plain_generation_streams_it(demo, tokenizer, gen):
    prompt = tokenizer.encode("**HAMLET**\n\nTo be")
    outputs = list(gen.stream(prompt, SamplingParams(max_new_tokens=40)))
    with invariant(demo):
        plain = list(stream_generate(demo, prompt, tokenizer=tokenizer, max_new_tokens=40))
    assert [o.token_ids[0] for o in outputs] == [p.token_id for p in plain]
    assert "".join(o.text for o in outputs) == "".join(p.text for p in plain)
    assert outputs[-1].finish_reason == plain[-1].finish_reason == "length"


def test_stop_texts_and_stop_ids_end_one_request_and_not_its_neighbour(tokenizer, gen):
    prompt = tokenizer.encode("**HAMLET**\n\nTo be")
    (whole,) = gen.generate([prompt], SamplingParams(max_new_tokens=40))
    stop = whole.text[20:24]
    first_id = whole.token_ids[5]
    by_text, by_id, free = gen.generate(
        [prompt] * 3,
        [
            SamplingParams(max_new_tokens=40, stop=[stop]),
            SamplingParams(max_new_tokens=40, stop_token_ids=[first_id]),
            SamplingParams(max_new_tokens=40),
        ],
    )
    assert by_text.finish_reason == "stop_string" and by_text.text == whole.text[: whole.text.index(stop)]
    assert by_id.finish_reason == "stop" and by_id.token_ids == whole.token_ids[: whole.token_ids.index(first_id) + 1]
    assert free.token_ids == whole.token_ids and free.finish_reason == "length"


def test_samples_of_one_prompt_are_its_seeds_alone(gen):
    options = {"max_new_tokens": 8, "temperature": 1.2}
    (result,) = gen.generate([PROMPT * 20], SamplingParams(**options, seed=7, n=4))
    alone = gen.generate([PROMPT * 20] * 4, [SamplingParams(**options, seed=7 + i) for i in range(4)])
    assert [s.token_ids for s in result.samples] == [r.token_ids for r in alone]
    assert len({tuple(r.token_ids) for r in alone}) > 1


def test_rows_of_one_batch_have_their_own_filters(gen):
    many = [
        SamplingParams(max_new_tokens=6, temperature=1.0, top_k=1, top_p=0.8, seed=1),
        SamplingParams(max_new_tokens=6),
        SamplingParams(max_new_tokens=6, temperature=5.0, seed=2),
        SamplingParams(max_new_tokens=6, temperature=1.0),  # no seed: makes nobody else's void
    ]
    first = gen.generate([PROMPT] * 4, many)
    second = gen.generate([PROMPT] * 4, many)
    assert first[0].token_ids == first[1].token_ids  # top_k=1 keeps one token, whatever top_p does after it
    assert [r.token_ids for r in first[:3]] == [r.token_ids for r in second[:3]]


def test_penalties_act_as_their_formulas_say(gen):
    seen = []

    def hook(token_ids, logits_V):
        seen.append((list(token_ids), logits_V.clone()))
        return logits_V

    params = SamplingParams(
        max_new_tokens=8, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25, logits_processor=hook
    )
    (result,) = gen.generate([PROMPT], params)
    for position, (ids, logits_V) in enumerate(seen):
        expected = logits_V.clone()
        for token in set(ids):
            expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
        for token in ids[len(PROMPT) :]:
            expected[token] -= 0.25
        for token in set(ids[len(PROMPT) :]):
            expected[token] -= 0.5
        assert int(expected.argmax()) == result.token_ids[position]
    assert len(set(result.token_ids)) > 4


@pytest.mark.parametrize("how", ["park", "drop"])
def test_penalties_count_each_token_once_whatever_is_preempted(demo, how):
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.6}
    prompts = [[rng.randrange(3, 200) for _ in range(90)] for rng in map(random.Random, range(3))]
    recorders = [Recorder() for _ in prompts]
    with KimiK3Generator(demo, max_num_seqs=4, num_blocks=30, batch_invariant=True) as gen:
        rids = [
            gen.add(prompt, SamplingParams(max_new_tokens=40, ignore_eos=True, logits_processor=recorder, **penalties))
            for prompt, recorder in zip(prompts, recorders)
        ]
        while gen.has_unfinished():
            gen.step()
            for request in [r for r in gen._requests.values() if r.is_running and gen.num_steps % 5 == r.rid]:
                gen._preempt(request, how)
        results = [gen.result(rid) for rid in rids]
    assert all(result.metrics["preemptions"] > 3 for result in results)
    for prompt, recorder, result in zip(prompts, recorders, results):
        assert len(recorder.rows) == 40
        for position, (row, token) in enumerate(zip(recorder.rows, result.token_ids)):
            expected, generated = row.clone(), result.token_ids[:position]
            for seen in {*prompt, *generated}:
                expected[seen] = expected[seen] / 1.2 if expected[seen] > 0 else expected[seen] * 1.2
            for seen in set(generated):
                expected[seen] -= 0.3 + 0.6 * generated.count(seen)
            assert float(expected.max() - expected[token]) <= 1e-5  # float32, the same sums in another order


def test_logprobs_are_those_of_the_unfiltered_rows(gen):
    recorder = Recorder()
    params = SamplingParams(max_new_tokens=5, temperature=0.5, seed=1, top_k=2, logprobs=3, logits_processor=recorder)
    (result,) = gen.generate([PROMPT], params)
    for token, row, given in zip(result.token_ids, recorder.rows, result.logprobs):
        expected = row.double().log_softmax(-1)
        assert given.token == pytest.approx(float(expected[token]), abs=1e-9) and len(given.top) == 3
        assert max(given.top.values()) == pytest.approx(float(expected.max()), abs=1e-9)


def test_a_hook_that_fails_ends_its_own_request(gen):
    def hook(token_ids, logits_V):
        if len(token_ids) > len(PROMPT) + 2:
            raise RuntimeError("no more")
        return logits_V

    bad, good = gen.generate(
        [PROMPT, PROMPT], [SamplingParams(max_new_tokens=6, logits_processor=hook), SamplingParams(max_new_tokens=6)]
    )
    assert bad.finish_reason == "error" and "no more" in bad.error and len(bad.token_ids) == 3
    assert good.finish_reason == "length" and len(good.token_ids) == 6


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (lambda row: row[None], "torch.float32 [1, V]"), (lambda row: row[:5], "torch.float32 [5]"),
        (lambda row: row.long(), "torch.int64 [V]"), (lambda row: None, "NoneType"), (list, "list"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("logprobs", [None, 3])
def test_a_hook_that_gives_no_row_of_logits_ends_its_own_request(demo, gen, change, given, logprobs):
    hook = SamplingParams(max_new_tokens=6, logits_processor=lambda ids, row: change(row), logprobs=logprobs)
    bad, good = gen.generate([PROMPT, PROMPT], [hook, SamplingParams(max_new_tokens=6)])
    assert bad.finish_reason == "error" and bad.token_ids == []
    error = bad.error.replace(str(demo.config.text_config.vocab_size), "V")
    assert error == f"logits_processor: want floating-point logits [V] from it, got {given}"
    assert good.finish_reason == "length" and len(good.token_ids) == 6


def test_what_fails_after_the_hook_is_not_said_to_be_the_hook(gen, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of range")

    monkeypatch.setattr("kimi_k3.engine.row_sampling.sample", broken)
    many = [SamplingParams(max_new_tokens=3, logits_processor=lambda ids, row: row), SamplingParams(max_new_tokens=3)]
    bad, good = gen.generate([PROMPT, PROMPT], many)
    assert bad.error == "sampling: RuntimeError: out of range" and good.finish_reason == "length"


def test_latencies_are_kept_for_a_while(demo, monkeypatch):
    monkeypatch.setattr("kimi_k3.engine.generator.KEPT_LATENCIES", 3)
    with KimiK3Generator(demo, max_num_seqs=2, num_blocks=20) as gen:
        gen.generate([PROMPT] * 5, SamplingParams(max_new_tokens=4, ignore_eos=True))
        assert {name: len(values) for name, values in gen._latencies.items()} == dict.fromkeys(gen._latencies, 3)
        assert gen.stats()["between_tokens_s"][99] == max(gen._latencies["between_tokens_s"])


@pytest.mark.parametrize("where", ["state", "latent"])
def test_a_nan_ends_its_request_and_poisons_nobody(demo, gen, where):
    """In one request's past: neighbours are bitwise unchanged, and what held it is clean when it is used again."""
    recorder = Recorder()
    good_params = SamplingParams(max_new_tokens=12, logits_processor=recorder)
    bad = gen.add([9, 8, 7], SamplingParams(max_new_tokens=12))
    good = gen.add(PROMPT, good_params)
    for _ in range(4):
        gen.step()
    request = gen._requests[bad]
    layer = next(i for i, pools in gen.pools.pools.items() if len(pools) == (2 if where == "state" else 1))
    if where == "state":
        gen.pools.pools[layer][0][request.slot].fill_(math.nan)
    else:
        gen.pools.pools[layer][0][gen.pool.places[request.table[0]], 4].fill_(math.nan)
    while bad in gen._requests:
        gen.step()
    for pools in gen.pools.pools.values():
        assert not any(torch.isnan(pool).any() for pool in pools)
    finish(gen)
    result = gen.result(bad)
    assert result.finish_reason == "error" and "non-finite" in result.error and len(result.token_ids) == 4
    assert_equals_solo(demo, PROMPT, gen.result(good), recorder.rows, good_params)
    # The prompt of the failed one was published before it went wrong; what went wrong was not.
    again = Recorder()
    params = SamplingParams(max_new_tokens=12, logits_processor=again)
    (result,) = gen.generate([[9, 8, 7]], params)
    assert_equals_solo(demo, [9, 8, 7], result, again.rows, params)
    for pools in gen.pools.pools.values():
        assert not any(torch.isnan(pool).any() for pool in pools)


@pytest.mark.parametrize("snapshots", ["exact", "bf16"])
@pytest.mark.parametrize("where", ["state", "latent"])
@pytest.mark.parametrize("how", ["park", "drop"])
def test_a_preempted_prefill_publishes_nothing_that_is_not_finite(demo, where, how, snapshots):
    """A NaN that came and went while a prompt ran: the request computes again from before it, and does not fail."""
    prompt = [*range(100, 500)]
    options = {"max_num_seqs": 2, "num_blocks": 60, "max_tokens_per_step": 128, "snapshots": snapshots}
    with KimiK3Generator(demo, **options) as gen:
        (expected,) = gen.generate([prompt], SamplingParams(max_new_tokens=4))
        gen.index.clear()
        rid = gen.add(prompt, SamplingParams(max_new_tokens=4), snapshot_at=[64, 200])
        gen.step()
        request = gen._requests[rid]
        layers = [i for i, pools in gen.pools.pools.items() if len(pools) == (2 if where == "state" else 1)]
        if where == "state":
            gen.pools.pools[layers[0]][0][request.slot, 0, 0, 0] = math.nan
        else:  # of the last layer: no later state has it
            gen.pools.pools[layers[-1]][0][gen.pool.places[request.table[1]], 60] = math.nan
        gen.step()
        assert (request.done, [s.position for s in request.saved if s.position in (64, 200)]) == (256, [64, 200])
        gen._preempt(request, how)
        assert gen.counts["dropped_nonfinite"] > 0
        assert gen.index.match(request.root, prompt).position == (128 if where == "state" else 64)
        for pools in gen.pools.pools.values():
            assert not any(torch.isnan(pool).any() for pool in pools)
        finish(gen)
        result = gen.result(rid)
        assert result.finish_reason == "length" and (snapshots == "bf16" or result.token_ids == expected.token_ids)
        (again,) = gen.generate([[*prompt, 5]], SamplingParams(max_new_tokens=1))
        assert again.finish_reason == "length" and again.reused_tokens == 400


def test_what_a_failed_request_started_from_is_dropped(demo):
    prompt = [*range(100, 300)]
    with KimiK3Generator(demo, max_num_seqs=2, num_blocks=60, max_tokens_per_step=256) as gen:
        gen.generate([prompt], SamplingParams(max_new_tokens=1))
        (snapshot,) = [e.snapshot for e in gen.index.entries() if e.snapshot.position == 200]
        layer = next(i for i, pools in gen.pools.pools.items() if len(pools) == 2)
        gen.pools.pools[layer][0][snapshot.slot].fill_(math.nan)
        results = [gen.generate([[*prompt, 5]], SamplingParams(max_new_tokens=2))[0] for _ in range(2)]
        assert [r.finish_reason for r in results] == ["error", "length"] and results[0].reused_tokens == 200
        assert results[1].reused_tokens < 200 and gen.counts["dropped_distrusted"] == 1


def test_a_request_that_takes_too_long_times_out_and_leaves_the_rest(gen):
    late = gen.add(PROMPT, SamplingParams(max_new_tokens=50), timeout=0.0)
    good = gen.add(PROMPT, SamplingParams(max_new_tokens=3))
    outputs = []
    while gen.has_unfinished():
        outputs += gen.step()
    assert gen.result(late).finish_reason == "timeout" and len(gen.result(good).token_ids) == 3
    assert [o.finish_reason for o in outputs if o.rid == late] == ["timeout"]


@pytest.mark.parametrize("moment", range(6))
def test_an_abort_at_any_moment_frees_everything(gen, moment):
    rid = gen.add(PROMPT * 40, SamplingParams(max_new_tokens=20))
    for _ in range(moment):
        gen.step()
    gen.abort(rid)
    gen.abort(rid)  # again, and unknown ones: nothing
    gen.abort(12345)
    assert [o.finish_reason for o in gen.step()] == ["abort"]
    assert gen.stats()["running"] == gen.stats()["waiting"] == 0
    assert gen.pool.num_slots == gen.index.num_snapshots


def test_closing_a_stream_aborts_its_request(gen):
    stream = gen.stream(PROMPT, SamplingParams(max_new_tokens=50))
    next(stream)
    stream.close()
    assert not gen.has_unfinished()


def test_async_streams_share_steps(gen):
    async def collect(prompt, new):
        return [o async for o in gen.astream(prompt, SamplingParams(max_new_tokens=new))]

    async def main():
        return await asyncio.gather(*(collect([9 + i, *PROMPT], 5 + i) for i in range(4)))

    streams = asyncio.run(main())
    for i, outputs in enumerate(streams):
        (expected,) = gen.generate([[9 + i, *PROMPT]], SamplingParams(max_new_tokens=5 + i))
        assert [t for o in outputs for t in o.token_ids] == expected.token_ids
    assert gen.num_steps < 40


def test_requests_may_be_added_from_another_thread_while_it_steps(gen):
    rids = []

    def add_some():
        for i in range(10):
            rids.append(gen.add([i + 1, *PROMPT], SamplingParams(max_new_tokens=3)))

    thread = threading.Thread(target=add_some)
    thread.start()
    while thread.is_alive() or gen.has_unfinished():
        gen.step()
    assert len({gen.result(rid).rid for rid in rids}) == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "not empty"), (([1, 99999],), "99999"), (([1], SamplingParams(max_new_tokens=10**6)), "latent blocks"),
    ],
)  # fmt: skip
def test_what_can_never_run_is_refused_when_it_is_added(gen, arguments, message):
    with pytest.raises(ValueError, match=message):
        gen.add(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"), ({"scheduler": "best"}, "fcfs"), ({"memory": 10}, "memory"),
        ({"num_blocks": 0}, "num_blocks"), ({"max_tokens_per_step": 3}, "max_tokens_per_step"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(demo, options, message):
    with pytest.raises(ValueError, match=message):
        KimiK3Generator(demo, **options)


def test_one_slot_serves_many_requests_one_after_another(demo):
    """A slot that is used again is no history, and a request that must wait for it loses nothing."""
    with KimiK3Generator(demo, max_num_seqs=1, num_blocks=40, prefix_cache=False, batch_invariant=True) as gen:
        recorders = [Recorder() for _ in range(6)]
        prompts = [[5 + i] * (1 + 20 * i) for i in range(6)]
        many = [SamplingParams(max_new_tokens=4, logits_processor=r) for r in recorders]
        for prompt, result, params in zip(prompts, gen.generate(prompts, many), many):
            assert_equals_solo(demo, prompt, result, params.logits_processor.rows, params)


@pytest.mark.parametrize("how", ["park", "drop"])
def test_preemption_at_every_step_changes_nothing(demo, how):
    prompt = [(7 * i) % 900 + 1 for i in range(150)]
    for moment in range(1, 9):
        with KimiK3Generator(demo, max_num_seqs=2, num_blocks=100, max_tokens_per_step=64, batch_invariant=True) as gen:
            recorder = Recorder()
            params = SamplingParams(max_new_tokens=6, temperature=1.0, seed=3, logits_processor=recorder)
            rid = gen.add(prompt, params)
            for _ in range(moment):
                gen.step()
            if rid in gen._requests and gen._requests[rid].is_running:
                gen._preempt(gen._requests[rid], how)
                assert gen.pool.num_slots == gen.index.num_snapshots
            finish(gen)
            assert_equals_solo(demo, prompt, gen.result(rid), recorder.rows, params)


def test_a_decision_over_a_long_queue_looks_at_those_next_in_line(demo):
    """However many wait: at most the free seats and LOOK_PAST more; the urgent come in, and all are served at last."""
    seen = []
    with KimiK3Generator(demo, max_num_seqs=4, num_blocks=20) as gen:
        schedule = gen._schedule
        gen._schedule = lambda candidates, resources: seen.append(candidates) or schedule(candidates, resources)
        rids = [gen.add([i % 900 + 1, 7, i // 900], SamplingParams(max_new_tokens=1)) for i in range(300)]
        late = gen.add([5, 6], SamplingParams(max_new_tokens=1), priority=9)
        gen.step()
        assert len(seen[0]) == 4 + LOOK_PAST and late in {c.rid for c in seen[0]}
        assert gen.counts["held_line"] == 301 - len(seen[0]) and late not in gen._requests
        finish(gen)
        assert {gen.result(rid).finish_reason for rid in rids} == {"length"}
        assert max(map(len, seen)) <= 4 + LOOK_PAST


def test_who_waits_for_whom_equals_a_search_through_the_prompts(demo):
    """Of those before it that run or will, the first that computes a block beyond what a request would reuse."""
    rng = random.Random(4)
    for _ in range(20):
        with KimiK3Generator(demo, max_num_seqs=3, num_blocks=60, max_tokens_per_step=64) as gen:
            prompts = []
            for _ in range(10):
                start = rng.choice(prompts)[: rng.randrange(1, 260)] if prompts else []
                prompts.append((start + [rng.randrange(3) for _ in range(rng.randrange(1, 200))])[:260])
                gen.add(prompts[-1], SamplingParams(max_new_tokens=20), priority=rng.choice([0, 0, 1]))
            for _ in range(rng.randrange(6)):
                gen.step()
            live = list(gen._requests.values())
            for request in live:
                request.waited_for.clear()
                if not request.is_running:
                    gen.memory.look_up(request, 0)
            gen._find_dependencies([r for r in live if r.is_running], [r for r in live if not r.is_running])
            leaders = [r for r in live if r.is_running and not r.has_prefilled]
            for request in sorted((r for r in live if not r.is_running), key=lambda r: (-r.priority, r.rid)):
                known = -(-request.reuse // 64) * 64 + 64
                found = [
                    leader.rid for leader in leaders
                    if known <= min(len(request.prompt), len(leader.prompt)) and not request.has_prefilled
                    and request.prompt[:known] == leader.prompt[:known]
                ]  # fmt: skip
                assert request.waits_for == (found[0] if found else None)
                leaders += [] if found else [request]


@pytest.mark.slow
def test_ten_thousand_short_requests_leak_nothing(demo):
    import resource

    with KimiK3Generator(demo, max_num_seqs=32, num_blocks=60, batch_invariant=True) as gen:
        peak = []
        for batch in range(100):
            gen.generate([[batch + 1, i + 1, 3] for i in range(100)], SamplingParams(max_new_tokens=2))
            gen.index.clear()
            assert gen.pool.num_slots == gen.pool.num_blocks == 0 and not gen._results | gen._own_results
            peak.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        assert peak[-1] - peak[20] < 8 * 1024  # KiB


def test_the_event_loop_waits_for_no_forward(gen, monkeypatch):
    """While a forward runs others add, read, abort and listen; requests that come meanwhile join the next step together."""
    run, may_go_on, is_running = gen.runner.run, threading.Event(), threading.Event()

    def slow(pieces):
        is_running.set()
        assert may_go_on.wait(60)
        return run(pieces)

    async def collect(prompt, new):
        return [o async for o in gen.astream(prompt, SamplingParams(max_new_tokens=new))]

    async def main():
        monkeypatch.setattr(gen.runner, "run", slow)
        tasks = [asyncio.create_task(collect(PROMPT, 6))]
        while not is_running.is_set():
            await asyncio.sleep(0.001)
        tasks += [asyncio.create_task(collect([9 + i, *PROMPT], 6)) for i in range(3)]
        cancelled = asyncio.create_task(collect([99, *PROMPT], 6))
        rid = gen.add([7, *PROMPT], SamplingParams(max_new_tokens=6))
        await asyncio.sleep(0.01)
        assert gen.stats()["waiting"] == 5 and gen.has_unfinished()
        cancelled.cancel()
        gen.abort(rid)  # both when the step ends
        await asyncio.sleep(0.01)
        monkeypatch.setattr(gen.runner, "run", run)
        may_go_on.set()
        streams = await asyncio.gather(*tasks)
        assert cancelled.cancelled() and gen.result(rid).finish_reason == "abort"
        return streams

    before = gen.num_steps
    streams = asyncio.run(main())
    assert gen.num_steps - before <= 8 and not gen._listeners
    assert [o.finish_reason for o in gen.step()] == ["abort"] and not gen.has_unfinished()
    for prompt, outputs in zip([PROMPT, *([9 + i, *PROMPT] for i in range(3))], streams):
        (expected,) = gen.generate([prompt], SamplingParams(max_new_tokens=6))
        assert [t for o in outputs for t in o.token_ids] == expected.token_ids


def test_async_streams_step_in_one_thread_and_leave_none(gen, monkeypatch):
    threads, run = set(), gen.runner.run

    def told(pieces):
        threads.add(threading.current_thread())
        return run(pieces)

    async def main():
        async def collect(i):
            return [o async for o in gen.astream([9 + i, *PROMPT], SamplingParams(max_new_tokens=5))]

        await asyncio.gather(*(collect(i) for i in range(5)))

    monkeypatch.setattr(gen.runner, "run", told)
    asyncio.run(main())
    (thread,) = threads
    thread.join(10)
    assert thread is not threading.main_thread() and not thread.is_alive() and gen._step_thread is None


def test_a_failing_step_ends_the_async_streams_with_its_exception(gen, monkeypatch):
    def broken(pieces):
        raise RuntimeError("no forward today")

    async def collect(i):
        return [o async for o in gen.astream([9 + i, *PROMPT], SamplingParams(max_new_tokens=5))]

    async def main():
        return await asyncio.gather(*(collect(i) for i in range(3)), return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(gen.runner, "run", broken)
        assert [str(error) for error in asyncio.run(main())] == ["no forward today"] * 3
    assert not gen.has_unfinished() and not gen._listeners
    assert all(len(outputs) == 5 for outputs in asyncio.run(main()))  # and the next ones are served


def test_streams_whose_loop_was_closed_are_aborted(gen):
    loop = asyncio.new_event_loop()
    stream = gen.astream(PROMPT, SamplingParams(max_new_tokens=3000))
    loop.run_until_complete(anext(stream))
    thread = gen._step_thread
    loop.close()
    thread.join(30)
    assert not thread.is_alive() and not gen.has_unfinished() and not gen._listeners


def test_an_aborted_request_keeps_the_text_of_its_tokens(gen, tokenizer):
    tokens = gen.generate([PROMPT], SamplingParams(max_new_tokens=8))[0].token_ids
    text = tokenizer.decode(tokens)
    rid = gen.add(PROMPT, SamplingParams(max_new_tokens=20, stop=[text + "and what never comes"]))
    outputs = [output for _ in range(8) for output in gen.step()]
    assert "".join(output.text for output in outputs) == ""  # it may all be the stop text
    gen.abort(rid)
    outputs += gen.step()
    assert gen.result(rid).text == "".join(output.text for output in outputs) == text


def test_a_hook_without_numbers_costs_nobody_a_hit(gen):
    gen.generate([PROMPT], SamplingParams(max_new_tokens=1))
    hook = SamplingParams(max_new_tokens=1, logits_processor=lambda ids, row: row * float("nan"))
    (result,) = gen.generate([PROMPT], hook)
    assert result.finish_reason == "error"
    (again,) = gen.generate([PROMPT], SamplingParams(max_new_tokens=1))
    assert again.reused_tokens == len(PROMPT)
