"""Requests that are ended from inside a step, in groups, and by closing: each ends once, and cleanly."""

import asyncio
import threading

import pytest
from solo import Recorder, assert_equals_solo

from kimi_k3 import KimiK3Generator, SamplingParams

PROMPT = [40, 50, 60, 70]


@pytest.fixture
def gen(demo):
    with KimiK3Generator(demo, max_num_seqs=8, num_blocks=60, batch_invariant=True) as generator:
        yield generator


def some(new: int = 6, **options) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, ignore_eos=True, **options)


def finish(gen):
    outputs = []
    while gen.has_unfinished():
        outputs += gen.step()
    gen.index.clear()
    assert gen.pool.num_slots == gen.pool.num_blocks == 0
    return outputs


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("length", [4, 6, 9], ids=["prefill", "third", "last"])
def test_a_hook_may_abort_its_own_request_and_any_other(demo, gen, place, length):
    """The first, itself, one behind it, one that waits; in its first, third and last row, which its length ends too."""
    targets = []

    def hook(token_ids, logits_V):
        if len(token_ids) == length:
            gen.abort(targets[place])
            gen.abort(targets[place])
        return logits_V

    recorder = Recorder()
    params = [some(logits_processor=recorder), some(logits_processor=hook), some(), some(50)]
    targets += [gen.add([*PROMPT[:3], 9 + i], one) for i, one in enumerate(params)]
    targets.insert(3, gen.add(PROMPT, some(50), priority=-5))
    outputs = finish(gen)
    ends = [(o.rid, o.finish_reason) for o in outputs if o.finish_reason]
    is_over = length == 9 and place < 3  # all three end in that step by their length
    assert sorted(rid for rid, _ in ends) == sorted(targets)
    assert [rid for rid, reason in ends if reason == "abort"] == ([] if is_over else [targets[place]])
    for rid in targets:
        assert [t for o in outputs if o.rid == rid for t in o.token_ids] == gen.result(rid).token_ids
    if place:
        result = type("Result", (), {"token_ids": [], "finish_reason": "length"})
        result.token_ids = [t for o in outputs if o.rid == targets[0] for t in o.token_ids]
        assert_equals_solo(demo, [*PROMPT[:3], 9], result, recorder.rows, params[0])


def test_an_abort_in_a_step_that_fails_takes_effect_all_the_same(gen):
    def hook(token_ids, logits_V):
        gen.abort(rid)
        raise KeyboardInterrupt

    rid = gen.add(PROMPT, some(logits_processor=hook))
    with pytest.raises(KeyboardInterrupt):
        gen.step()
    assert [(o.rid, o.finish_reason) for o in finish(gen)] == [(rid, "abort")]


@pytest.mark.parametrize("call", ["step", "close", "generate"])
def test_a_hook_may_not_step_or_close(gen, call):
    def hook(token_ids, logits_V):
        if call == "generate":
            gen.generate([PROMPT])
        getattr(gen, call)()

    bad, good = gen.generate([PROMPT, PROMPT], [some(logits_processor=hook), some()])
    name = "close" if call == "close" else "step"
    assert bad.error.startswith(f"logits_processor: ValueError: {name}: want no call from inside a step")
    assert good.finish_reason == "length" and finish(gen) == []


@pytest.mark.parametrize("moment", range(3))
def test_the_number_of_the_first_sample_aborts_them_all(gen, moment):
    other = gen.add(PROMPT, some())
    first = gen.add(PROMPT, some(50, n=4, temperature=1.0, seed=1))
    outputs = [output for _ in range(moment) for output in gen.step()]
    gen.abort(first + 2)  # that one alone
    assert len(gen._requests) == 4
    gen.abort(first)
    assert list(gen._requests) == [other]
    outputs += finish(gen)
    ends = [(o.rid, o.finish_reason) for o in outputs if o.finish_reason == "abort"]
    assert sorted(ends) == [(first + i, "abort") for i in range(4)] and gen.result(other).finish_reason == "length"


def test_closing_ends_streams_with_an_abort(demo):
    gen = KimiK3Generator(demo, max_num_seqs=2, num_blocks=60)
    streams = [gen.stream(PROMPT, some(50)), gen.stream(PROMPT[:2], some(50))]
    for stream in streams:
        next(stream)
    gen.close()
    for stream in streams:
        outputs = list(stream)
        assert outputs[-1].finish_reason == "abort" and all(o.finish_reason is None for o in outputs[:-1])
    assert not gen._listeners and not gen._own_results
    with pytest.raises(ValueError, match="it is closed"):
        next(gen.stream(PROMPT))


def test_closing_ends_async_streams_with_an_abort(demo):
    gen = KimiK3Generator(demo, max_num_seqs=2, num_blocks=60)

    async def collect(prompt):
        return [output async for output in gen.astream(prompt, some(3000))]

    async def main():
        tasks = [asyncio.create_task(collect([i + 5, *PROMPT])) for i in range(2)]
        while gen.num_steps < 3:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(gen.close)
        return await asyncio.gather(*tasks)

    for outputs in asyncio.run(main()):
        assert outputs[-1].finish_reason == "abort" and len(outputs) > 1


def test_closing_ends_generate_with_what_there_is(demo):
    gen, results = KimiK3Generator(demo, max_num_seqs=2, num_blocks=120), []
    thread = threading.Thread(target=lambda: results.extend(gen.generate([PROMPT] * 3, some(3000))))
    thread.start()
    while gen.num_steps < 3:
        pass
    gen.close()
    thread.join()
    assert [result.finish_reason for result in results] == ["abort"] * 3 and len(results[0].token_ids) > 1
