"""Batch-invariant and plain generators on one model: each runs in its own mode, whatever else is set."""

import copy
import random
import threading

import pytest
import torch
from solo import Recorder, assert_equals_solo

from kimi_k3 import KimiK3Generator, SamplingParams
from kimi_k3.engine.tiers import DiskTier

SMALL = {"max_num_seqs": 4, "num_blocks": 20, "max_tokens_per_step": 128}


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(length)]


def recorded(new: int = 6) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, ignore_eos=True, logits_processor=Recorder())


def finish(*gens):
    while any(gen.has_unfinished() for gen in gens):
        for gen in gens:
            gen.step()


@pytest.mark.parametrize("is_invariant", [False, True])
def test_the_models_own_mode_stays_as_the_user_left_it(demo, is_invariant):
    def mode():
        return demo.model.is_batch_invariant

    demo.set_batch_invariant(is_invariant)
    try:
        gens = [KimiK3Generator(demo, batch_invariant=mode, **SMALL) for mode in (True, True, False)]
        assert mode() == is_invariant
        for gen in gens:
            gen.generate([[5, 6, 7]], SamplingParams(max_new_tokens=2))
            assert mode() == is_invariant
        for gen in gens:
            gen.close()
            assert mode() == is_invariant
    finally:
        demo.set_batch_invariant(False)


def test_generators_of_both_modes_take_turns_on_one_model(demo, tmp_path):
    """What the invariant one gives, and what it stores, is bit for bit that of a sequence alone."""
    prompt, other = prompt_of(300, 1), prompt_of(200, 2)
    inner = KimiK3Generator(demo, batch_invariant=True, tiers=(DiskTier(tmp_path, 1 << 28),), **SMALL)
    plain = KimiK3Generator(demo, tiers=(DiskTier(tmp_path, 1 << 28),), **SMALL)
    many = [recorded() for _ in range(2)]
    rids = [inner.add(one, params) for one, params in zip((prompt, other), many)]
    plain_rids = [plain.add(one, recorded()) for one in (prompt, other)]
    finish(inner, plain)
    results = [inner.result(rid) for rid in rids]
    for one, params, result in zip((prompt, other), many, results):
        assert_equals_solo(demo, one, result, params.logits_processor.rows, params)
    assert all(len(plain.result(rid).token_ids) == 6 for rid in plain_rids)
    inner.close()  # in the order in which they were made
    plain.close()
    with KimiK3Generator(demo, batch_invariant=True, tiers=(DiskTier(tmp_path, 1 << 28),), **SMALL) as gen:
        params, longer = recorded(), [*prompt, 9]
        (result,) = gen.generate([longer], params)
        assert result.reused_tokens == 300
        assert_equals_solo(demo, longer, result, params.logits_processor.rows, params)


def test_generators_of_both_modes_step_at_once_in_threads(demo):
    prompts = [prompt_of(100, seed) for seed in range(4)]
    with (
        KimiK3Generator(demo, batch_invariant=True, prefix_cache=False, **SMALL) as inner,
        KimiK3Generator(demo, prefix_cache=False, **SMALL) as plain,
    ):
        thread = threading.Thread(target=lambda: [plain.generate(prompts, recorded()) for _ in range(3)])
        thread.start()
        while thread.is_alive():
            many = [recorded() for _ in prompts]
            for prompt, params, result in zip(prompts, many, inner.generate(prompts, many)):
                assert_equals_solo(demo, prompt, result, params.logits_processor.rows, params)
        thread.join()


def test_compiled_blocks_are_refused_whichever_comes_first(smooth):
    model = copy.deepcopy(smooth)
    gen = KimiK3Generator(model, batch_invariant=True, **SMALL)
    gen.generate([[5, 6]], SamplingParams(max_new_tokens=1))
    model.compile_blocks()
    gen.add([5, 6, 7])
    with pytest.raises(NotImplementedError, match="without compile_blocks"):
        gen.step()
    gen.close()
    with pytest.raises(
        NotImplementedError, match="KimiK3Generator: batch_invariant wants a model without compile_blocks"
    ):
        KimiK3Generator(model, batch_invariant=True, **SMALL)


def test_a_plain_generator_on_a_model_in_batch_invariant_mode_says_so_in_its_keys(demo, tmp_path):
    prompt = prompt_of(200, 3)
    demo.set_batch_invariant(True)
    try:
        with KimiK3Generator(demo, tiers=(DiskTier(tmp_path, 1 << 28),), **SMALL) as gen:
            rows = recorded()
            gen.generate([prompt], rows)
            plain_row = rows.logits_processor.rows[0]
    finally:
        demo.set_batch_invariant(False)
    with KimiK3Generator(demo, tiers=(DiskTier(tmp_path, 1 << 28),), **SMALL) as gen:
        (result,) = gen.generate([prompt], SamplingParams(max_new_tokens=1))
        assert result.reused_tokens == 192  # the same mode: the same keys
    with KimiK3Generator(demo, **SMALL) as gen:
        rows = recorded()
        gen.generate([prompt], rows)
        assert torch.equal(rows.logits_processor.rows[0], plain_row)
    with KimiK3Generator(demo, batch_invariant=True, tiers=(DiskTier(tmp_path, 1 << 28),), **SMALL) as gen:
        (result,) = gen.generate([prompt], SamplingParams(max_new_tokens=1))
        assert result.reused_tokens == 0
