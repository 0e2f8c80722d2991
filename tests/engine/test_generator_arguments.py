"""What a caller may pass: wrong arguments are named when they come, and what is wrong with one row ends that request alone."""

import math

import numpy as np
import pytest
import torch

from kimi_k3 import KimiK3Generator, SamplingParams
from kimi_k3.engine.tiers import HostTier

SMALL = {"max_num_seqs": 4, "num_blocks": 20}


@pytest.fixture
def gen(demo, tokenizer):
    with KimiK3Generator(demo, tokenizer, **SMALL) as generator:
        yield generator
        assert not generator.has_unfinished()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": None}, "priority a whole number, got None"), ({"priority": 1.5}, "priority .* got 1.5"),
        ({"snapshot_at": [1.5]}, "snapshot_at .* got 1.5"), ({"snapshot_at": 2}, "snapshot_at .* got 2"),
        ({"snapshot_at": ["a"]}, "snapshot_at .* got 'a'"), ({"snapshot_at": [True]}, "snapshot_at .* got True"),
        ({"extra_key": "x"}, "extra_key to be bytes, got 'x'"), ({"timeout": "x"}, "timeout .* got 'x'"),
        ({"timeout": -1}, "timeout >= 0 .* got -1"), ({"timeout": math.nan}, "timeout .* got nan"),
        ({"params": {"n": 2}}, "params to be SamplingParams or None, got {'n': 2}"),
        ({"pixel_values": [1]}, "pixel_values to be a tensor or None, got list"),
        ({"grid_thws": 3}, "grid_thws to be a tensor or None, got int"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_request_is_said_when_it_is_added(gen, options, message):
    with pytest.raises(ValueError, match=f"^add: want {message}"):
        gen.add([5, 6], **options)


@pytest.mark.parametrize(
    ("prompt", "given"),
    [(5, "5"), ("abc", "'abc'"), (b"ab", "b'ab'"), ({5: 6}, "{5: 6}"), ([True, 5], r"\[True\]"), ([1.0], r"\[1.0\]"),
     ([-1], r"\[-1\]"), (torch.ones(3), r"\[1.0, 1.0, 1.0\]"), (torch.tensor([True]), r"\[True\]"), ([[5, 6]], r"\[\[5, 6\]\]"),
     (np.ones((1, 2), dtype=np.int64), r"\[\[1, 1\]\]")],
)  # fmt: skip
def test_what_is_no_prompt_is_named(gen, prompt, given):
    with pytest.raises(ValueError, match=f"^add: want .*prompt .*got {given}"):
        gen.add(prompt)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((5,), "generate: want prompts .* got 5"), (("ab",), "generate: want prompts .* got 'ab'"),
     (([5, 6, 7],), r"generate: want prompts .* got token ids \[5, 6, 7\]"),
     (([[5]], {"n": 2}), "add: want params .* got {'n': 2}"),
     (([[5]], [SamplingParams()] * 2), "generate: want one SamplingParams or 1, got 2")],
)  # fmt: skip
def test_what_is_wrong_with_a_list_of_prompts_is_said(gen, arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        gen.generate(*arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", 1.5), ("logprobs", True), ("n", 2.0), ("n", 0), ("seed", "a"), ("seed", 1.0), ("max_new_tokens", 1.5),
        ("max_new_tokens", True), ("top_k", 2.5), ("temperature", "x"), ("temperature", None), ("top_p", True),
        ("presence_penalty", "x"), ("repetition_penalty", None), ("stop", 5), ("stop", None), ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.5]), ("stop_token_ids", 7), ("logits_processor", 3), ("ignore_eos", 1),
    ],
)  # fmt: skip
def test_wrong_sampling_parameters_are_named_when_made_and_when_changed_later(gen, name, value):
    with pytest.raises(ValueError, match=rf"^SamplingParams: {name} must be .*got ") as error:
        SamplingParams(**{name: value})
    assert str(error.value).endswith(repr(value))
    params = SamplingParams()
    setattr(params, name, value)
    with pytest.raises(ValueError, match=f"^SamplingParams: {name} must be"):
        gen.add([5, 6], params)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_blocks", "x"), ("num_blocks", 1.5), ("max_num_seqs", 2.0), ("block_size", True), ("heat_every", 0.5),
     ("tiers", [1]), ("tiers", HostTier(1 << 20)), ("prefix_cache", "no"), ("batch_invariant", None),
     ("max_tokens_per_step", "x"), ("memory", 2.5)],
)  # fmt: skip
def test_wrong_settings_are_named(demo, name, value):
    with pytest.raises(ValueError, match=f"KimiK3Generator: want {name}.* got .*"):
        KimiK3Generator(demo, **{name: value})


def test_numbers_of_numpy_and_torch_are_numbers(demo):
    options = {name: np.int64(value) for name, value in SMALL.items()}
    with KimiK3Generator(demo, **options) as gen:
        params = SamplingParams(
            max_new_tokens=torch.tensor(3), temperature=np.float32(1.0), seed=np.int64(4), logprobs=np.int32(1),
            stop_token_ids=np.array([7]), top_k=np.int64(50), n=torch.tensor(1),
        )  # fmt: skip
        prompts = [[5, 6], np.array([5, 6]), torch.tensor([5, 6]), [np.int64(5), torch.tensor(6)], (5, 6), range(5, 7)]
        same = gen.generate(prompts, params, priority=np.int64(1), snapshot_at=[np.int64(1)], timeout=np.float64(60.0))
        plain = gen.generate([[5, 6]], SamplingParams(max_new_tokens=3, temperature=1.0, seed=4, top_k=50))
        assert {tuple(result.token_ids) for result in same} == {tuple(plain[0].token_ids)}
        assert type(params.seed) is type(params.max_new_tokens) is int


@pytest.mark.parametrize("fault", ["logprobs", "decoder", "stop"])
def test_what_is_wrong_with_one_row_ends_that_request_alone(gen, fault):
    """Broken after it was added, at its third token."""

    def broken(*_):
        raise RuntimeError("broken")

    options = {"max_new_tokens": 6, "ignore_eos": True}
    bad = gen.add([40, 50], SamplingParams(**options, logprobs=1, stop=["\0"]))
    good = gen.add([40, 50, 60], SamplingParams(**options))
    outputs = gen.step() + gen.step()
    request = gen._requests[bad]
    if fault == "logprobs":
        request.params.logprobs = 1.5
    elif fault == "decoder":
        request.decoder.feed = broken
    else:
        request.shown.feed = broken
    while gen.has_unfinished():
        outputs += gen.step()
    failed, fine = gen.result(bad), gen.result(good)
    assert failed.finish_reason == "error" and failed.error.startswith("logprobs and text: ")
    assert len(failed.token_ids) == len(failed.logprobs) == 2
    assert [t for o in outputs if o.rid == bad for t in o.token_ids] == failed.token_ids
    assert fine.finish_reason == "length" and len(fine.token_ids) == 6
    gen.index.clear()
    assert gen.pool.num_slots == gen.pool.num_blocks == 0


@pytest.mark.parametrize("position", [0, -3, 4, -100])
def test_positions_are_those_of_the_given_ids(gen, position):
    with pytest.raises(ValueError, match=f"^add: want snapshot_at in 1..3, got .{position}"):
        gen.add([5, 6, 7], snapshot_at=[position])


def test_what_is_no_model_or_tokenizer_is_named(demo):
    with pytest.raises(ValueError, match="want model to be a KimiK3ForCausalLM, got str"):
        KimiK3Generator("kimi_k3/demo")
    with pytest.raises(ValueError, match="want tokenizer to be a KimiK3Tokenizer, got str"):
        KimiK3Generator(demo, "x")
    with pytest.raises(ValueError, match="want memory or num_blocks, got both: 1000 and 20"):
        KimiK3Generator(demo, memory=1000, num_blocks=20)


def test_a_budget_of_experts_wants_a_placement(gen):
    with pytest.raises(ValueError, match="limit_experts: want budget >= 0, and 0 where placement is None"):
        gen.limit_experts(None, 1.0)
