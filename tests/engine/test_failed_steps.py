"""A step that an exception ends, wherever it does: no token, no output and no memory is lost, and nothing wrong is kept."""

from contextlib import suppress

import pytest
import torch
from solo import Recorder, assert_equals_solo

from kimi_k3 import KimiK3Generator, SamplingParams

PROMPT = [(7 * i) % 900 + 1 for i in range(150)]


@pytest.fixture
def gen(demo):
    with KimiK3Generator(
        demo, max_num_seqs=4, num_blocks=60, max_tokens_per_step=68, batch_invariant=True
    ) as generator:  # a block of a prompt and a token of each other one: all take part in each step
        yield generator
        assert not generator.has_unfinished()
        generator.index.clear()
        assert generator.pool.num_slots == generator.pool.num_blocks == 0


def sampled(seed: int, new: int = 8) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, temperature=1.0, seed=seed, ignore_eos=True, logits_processor=Recorder())


def fail_once(model, layer: int, error: BaseException):
    """The next forward ends at the entrance of a layer, once those before it have written their states and latents."""

    def hook(*_):
        handle.remove()
        raise error

    handle = model.model.layers[str(layer)].register_forward_pre_hook(hook)


def finish(gen, outputs):
    while gen.has_unfinished():
        outputs += gen.step()
    return outputs


def assert_whole(model, gen, rids, prompts, params, outputs):
    for rid, prompt, one in zip(rids, prompts, params, strict=True):
        result = gen.result(rid)
        assert_equals_solo(model, prompt, result, one.logits_processor.rows, one)
        assert [t for o in outputs if o.rid == rid for t in o.token_ids] == result.token_ids
        assert [o.finish_reason for o in outputs if o.rid == rid and o.finish_reason] == ["length"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()], ids=["oom", "interrupt"])
@pytest.mark.parametrize("moment", range(7))
def test_a_forward_that_fails_is_run_again_and_leaves_no_wrong_state(demo, gen, moment, error):
    """In each step from the first piece of a prefill, which leaves states on its way, to the third token."""
    prompts, params, outputs = [PROMPT, PROMPT[:40] + [5, 6]], [sampled(1), sampled(2)], []
    rids = [gen.add(prompt, one, snapshot_at=[20, 41]) for prompt, one in zip(prompts, params)]
    for _ in range(moment):
        outputs += gen.step()
    slots, blocks = gen.index.num_snapshots, gen.index.num_blocks
    fail_once(demo, len(demo.model.layers) - 1, error)
    with pytest.raises(type(error)):
        gen.step()
    assert (gen.pool.num_slots, gen.pool.num_blocks) == (slots, blocks)
    assert gen.stats()["failed_steps"] == 1 and gen.stats()["running"] == 0
    finish(gen, outputs)
    assert_whole(demo, gen, rids, prompts, params, outputs)
    later, params = [PROMPT[:length] + [9] for length in (20, 41, 64, 128, 150)], [sampled(9, 3) for _ in range(5)]
    results = gen.generate(later, params)
    assert sum(result.reused_tokens for result in results) > 250
    for prompt, one, result in zip(later, params, results, strict=True):
        assert_equals_solo(demo, prompt, result, one.logits_processor.rows, one)


def test_what_others_gained_in_a_step_that_fails_is_told_by_the_next(demo, gen):
    """The first of three finishes in the step in which the second one's hook is interrupted; a fourth was aborted before."""
    params = [sampled(seed, new) for seed, new in ((1, 3), (2, 6), (3, 6))]
    prompts = [[seed, 8, 9] for seed in (4, 5, 6)]
    keep = params[1].logits_processor
    is_due = True

    def hook(token_ids, logits_V):
        nonlocal is_due
        if is_due and len(token_ids) == 5:
            is_due = False
            raise KeyboardInterrupt
        return keep(token_ids, logits_V)

    hook.rows = keep.rows
    params[1].logits_processor = hook
    rids, outputs = [gen.add(prompt, one) for prompt, one in zip(prompts, params)], []
    aborted = gen.add([1, 2, 3], sampled(4))
    for _ in range(2):
        outputs += gen.step()
    gen.abort(aborted)
    with pytest.raises(KeyboardInterrupt):
        gen.step()
    finish(gen, outputs)
    assert_whole(demo, gen, rids, prompts, params, outputs)
    assert [o.finish_reason for o in outputs if o.rid == aborted][-1] == "abort"


def test_a_request_that_goes_on_from_anothers_state_leaves_it_as_it_was(demo, gen):
    gen.generate([PROMPT], sampled(1, 1))
    prompt, params = PROMPT + [3] * 20, sampled(2)
    rid = gen.add(prompt, params)
    fail_once(demo, 2, RuntimeError("lost"))
    with pytest.raises(RuntimeError, match="lost"):
        gen.step()
    assert not any(snapshot.pins for snapshot in gen.index._snapshots)
    outputs = finish(gen, [])
    assert_whole(demo, gen, [rid], [prompt], [params], outputs)


SITES = {
    "is_finite": lambda gen: gen.pools, "copy_block": lambda gen: gen.pools, "copy_slot": lambda gen: gen.pools,
    "logits": lambda gen: gen.runner,
}  # fmt: skip


@pytest.mark.parametrize(
    "name, moments", [("is_finite", (1, 2, 5, 8, 9)), ("copy_block", (1, 2)), ("copy_slot", (1, 2)), ("logits", (1, 4))]
)
def test_a_step_may_end_anywhere_beside_its_forward(demo, tokenizer, name, moments, monkeypatch):
    """One call of a function fails, each in turn; then nothing leaks, and what is told and kept is as undisturbed."""
    for due in moments:
        with KimiK3Generator(
            demo, tokenizer, max_num_seqs=3, num_blocks=20, max_tokens_per_step=68, batch_invariant=True
        ) as gen:
            site, calls = SITES[name](gen), []
            real = getattr(site, name)

            def fake(*args, real=real, calls=calls, due=due):
                calls.append(1)
                if len(calls) == due:
                    raise torch.OutOfMemoryError("no memory")
                return real(*args)

            monkeypatch.setattr(site, name, fake)
            prompts = [PROMPT, PROMPT[:90] + [5, 6], PROMPT[:128], PROMPT, [*PROMPT, 7]]
            params, outputs, rids = [sampled(place, 1 + place) for place in range(5)], [], []
            for prompt, one in zip(prompts, params):  # the later ones start from what the first ones left
                rids.append(gen.add(prompt, one, snapshot_at=[20, 41]))
                for _ in range(3):
                    with suppress(torch.OutOfMemoryError):
                        outputs += gen.step()
            while gen.has_unfinished():
                with suppress(torch.OutOfMemoryError):
                    outputs += gen.step()
            assert len(calls) >= due
            assert_whole(demo, gen, rids, prompts, params, outputs)
            gen.index.clear()
            assert gen.pool.num_slots == gen.pool.num_blocks == 0


def test_the_text_of_a_token_is_read_once_though_its_step_fails(demo, tokenizer, monkeypatch):
    """Read twice, it would make the stop text, which is nowhere."""
    with KimiK3Generator(demo, tokenizer, max_num_seqs=1, num_blocks=60) as gen:
        (one,) = gen.generate([PROMPT], SamplingParams(max_new_tokens=1, ignore_eos=True))
    with KimiK3Generator(demo, tokenizer, max_num_seqs=1, num_blocks=60) as gen:
        rid = gen.add(PROMPT, SamplingParams(max_new_tokens=4, ignore_eos=True, stop=[one.text * 2]))
        real = gen.pools.is_finite

        def fake(*args):
            monkeypatch.setattr(gen.pools, "is_finite", real)
            raise torch.OutOfMemoryError("no memory")

        monkeypatch.setattr(gen.pools, "is_finite", fake)
        with pytest.raises(torch.OutOfMemoryError):
            gen.step()
        finish(gen, [])
        result = gen.result(rid)
        assert result.finish_reason == "length" and result.text.startswith(one.text)
