"""Whose results and outputs are whose: what `generate` and `stream` add is theirs, and nothing of it stays behind."""

import pytest
from test_failed_steps import fail_once

from kimi_k3 import KimiK3Generator, SamplingParams
from kimi_k3.engine import generator as module

PROMPT = [40, 50, 60, 70]


@pytest.fixture
def gen(demo):
    with KimiK3Generator(demo, max_num_seqs=8, num_blocks=60) as generator:
        yield generator
        assert not generator.has_unfinished() and not generator._listeners and not generator._own_results
        generator.index.clear()
        assert generator.pool.num_slots == generator.pool.num_blocks == 0


def some(new: int = 4, **options) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, ignore_eos=True, **options)


def finish(gen):
    outputs = []
    while gen.has_unfinished():
        outputs += gen.step()
    return outputs


def test_a_prompt_that_is_refused_leaves_none_of_the_others_queued(gen):
    with pytest.raises(ValueError, match=r"got \[10000000\]"):
        gen.generate([PROMPT, PROMPT[:2], [10**7]], some(n=3))
    assert not gen.has_unfinished() and gen.step() == [] and not gen._results
    with pytest.raises(ValueError, match="want one SamplingParams or 1, got 2"):
        gen.generate([PROMPT], [some(), some()])


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_step_that_fails_ends_what_generate_added_and_nothing_else(demo, gen, error):
    mine = gen.add([1, 2, 3], some(6))
    with pytest.raises(type(error)):
        gen.generate(
            [PROMPT, [*PROMPT, 3]], some(5, logits_processor=lambda ids, row: fail_once(demo, 2, error) or row)
        )
    while demo.model.layers["2"]._forward_pre_hooks:
        demo.model.layers["2"]._forward_pre_hooks.popitem()
    assert list(gen._requests) == [mine] and not gen._results
    outputs = finish(gen)
    assert {o.rid for o in outputs} == {mine} and sum(len(o.token_ids) for o in outputs) == 6
    assert len(gen.result(mine).token_ids) == 6


def test_an_interrupted_add_of_many_samples_queues_none(gen, monkeypatch):
    queue = gen._queue

    def at_the_third(*args):
        if gen._next_rid % 4 == 2:
            raise KeyboardInterrupt
        queue(*args)

    monkeypatch.setattr(gen, "_queue", at_the_third)
    with pytest.raises(KeyboardInterrupt):
        gen.add(PROMPT, some(n=4))
    assert not gen._requests and not gen.has_unfinished()


def test_the_latest_results_are_kept_and_no_more(gen, monkeypatch):
    monkeypatch.setattr(module, "KEPT_RESULTS", 5)
    rids = [gen.add([3 + i], some(1)) for i in range(12)]
    results = gen.generate([[100 + i] for i in range(12)], some(1, n=2))  # its own are not among them
    assert all(len(result.samples) == 2 for result in results)
    finish(gen)
    assert len(gen._results) == 5
    kept = [rid for rid in rids if rid in gen._results]
    assert gen.result(kept[-1]).rid == kept[-1]
    for rid in (kept[-1], rids[0], 10**6, "x"):
        with pytest.raises(KeyError, match=rf"result: want rid of a finished request.* got {rid!r}"):
            gen.result(rid)
    assert gen.result(kept[0]).finish_reason == "length" and len(gen._results) == 3


def test_of_many_that_nobody_asks_after_a_thousand_are_kept(demo):
    with KimiK3Generator(demo, max_num_seqs=64, num_blocks=100, prefix_cache=False) as gen:
        for i in range(1500):
            gen.abort(gen.add([i % 900 + 1], some(1)))
        assert len(gen._results) == module.KEPT_RESULTS == 1024 and len(finish(gen)) == 1500


def test_outputs_of_requests_added_by_hand_wait_for_the_next_step(gen):
    mine = gen.add(PROMPT, some(5))
    gen.generate([[1, 2, 3]], some(3))
    streamed = [o.rid for o in gen.stream([4, 5, 6], some(4))]
    outputs = finish(gen)
    assert mine not in streamed and [o.rid for o in outputs] == [mine] * 5
    assert [t for o in outputs for t in o.token_ids] == gen.result(mine).token_ids


def test_a_step_by_hand_takes_nothing_from_a_stream(gen):
    (alone,) = gen.generate([PROMPT], some(6))
    stream = gen.stream(PROMPT, some(6))
    outputs = [next(stream)]
    assert gen.step() == gen.step() == []
    outputs += stream
    assert [t for o in outputs for t in o.token_ids] == alone.token_ids and outputs[-1].finish_reason == "length"


def test_an_unknown_request_has_no_heat(demo):
    gen = KimiK3Generator(demo, max_num_seqs=1, num_blocks=8, heat_every=1)
    with gen, pytest.raises(KeyError, match=r"heat_map: want request_id .* got 99"):
        gen.heat_map(99)
