"""generate and stream_generate: rows, seeds, ends, stop texts, streamed text and refusals."""

import shutil
from pathlib import Path

import pytest
import torch
from reference_model import random_ids, random_model, small_config

from kimi_k3 import KimiK3ForCausalLM, KimiK3Tokenizer
from kimi_k3.generation import StopText, end_ids, generate, stream_generate

GOLDEN = Path(__file__).parents[1] / "golden" / "golden"


@pytest.fixture(scope="module")
def model():
    return random_model(small_config(), torch.float32)


@pytest.fixture(scope="module")
def golden_model():
    return KimiK3ForCausalLM.from_pretrained(GOLDEN, dtype=torch.float32, progress=False)


@pytest.fixture(scope="module")
def tokenizer():
    return KimiK3Tokenizer.from_pretrained(GOLDEN)


def new_tokens(model, ids, mask=None, **options) -> list[list[int]]:
    options = {"max_new_tokens": 12, "eos_token_id": []} | options
    return model.generate(ids, mask, **options)[:, ids.shape[1] :].tolist()


def padded_batch(rows: list[torch.Tensor], pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(row.shape[1] for row in rows)
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, width - row.shape[1] :], mask[i, width - row.shape[1] :] = row[0], 1
    return ids, mask


@torch.no_grad()
def test_greedy_equals_the_argmax_of_whole_forwards(model):
    ids, grown = random_ids(model.config, 1, 5), random_ids(model.config, 1, 5)
    for _ in range(12):
        grown = torch.cat([grown, model(grown).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(model.generate(ids, max_new_tokens=12, eos_token_id=[]), grown)


SAMPLED = {"temperature": 1.0, "top_p": 0.95, "top_k": 30, "min_p": 0.01}


@pytest.mark.parametrize("options", [{}, {**SAMPLED, "seed": 11}])
def test_a_row_gives_the_same_tokens_alone_and_in_any_batch(options, model):
    rows = [random_ids(model.config, 1, n, seed=n) for n in (1, 9, 70, 9)]
    alone = [new_tokens(model, row, **options)[0] for row in rows]
    assert new_tokens(model, *padded_batch(rows), **options) == alone
    assert new_tokens(model, *padded_batch(rows[::-1], pad=31), **options) == alone[::-1]
    assert new_tokens(model, *padded_batch(rows), prefill_tokens=6, **options) == alone
    assert len({tuple(tokens) for tokens in alone[:3]}) == 3


def test_a_list_has_a_seed_for_each_row(model):
    prompt, seeds = random_ids(model.config, 1, 6), [3, 9, 3]
    got = new_tokens(model, prompt.expand(3, -1), seed=seeds, **SAMPLED)
    alone = {seed: new_tokens(model, prompt, seed=seed, **SAMPLED)[0] for seed in (3, 9)}
    assert got == [alone[3], alone[9], alone[3]] and alone[3] != alone[9]
    for wrong in ([4], "ab"):
        with pytest.raises(ValueError, match="2 rows, got"):
            model.generate(prompt.expand(2, -1), max_new_tokens=1, seed=wrong)


def test_unseeded_draws_are_fresh_and_follow_the_global_seed(model):
    prompt = random_ids(model.config, 1, 6).expand(2, -1)
    torch.manual_seed(0)
    first, second = new_tokens(model, prompt, **SAMPLED), new_tokens(model, prompt, **SAMPLED)
    assert first[0] != first[1] and first != second
    torch.manual_seed(0)
    assert new_tokens(model, prompt, **SAMPLED) == first


def test_generating_leaves_training_and_gradients_alone(model):
    before = [p.requires_grad for p in model.parameters()]
    out = model.generate(random_ids(model.config, 1, 3), max_new_tokens=2)
    assert out.requires_grad is False and before == [p.requires_grad for p in model.parameters()]
    assert torch.is_grad_enabled()


# Ends


def test_rows_end_at_their_own_end_and_are_filled_up(model):
    rows = [random_ids(model.config, 1, n, seed=n) for n in (4, 9, 2)]
    free = new_tokens(model, *padded_batch(rows))
    end = free[1][5]  # row 1 ends after its first appearance at the latest after 6 tokens
    wanted = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in free]
    longest = max(map(len, wanted))
    unused = next(token for token in range(48) if not any(token in tokens for tokens in free))
    for eos in (end, [end], [unused, end]):
        assert new_tokens(model, *padded_batch(rows), eos_token_id=eos) == [
            t + [0] * (longest - len(t)) for t in wanted
        ]
    assert new_tokens(model, rows[1], eos_token_id=end) == [wanted[1]]  # `new` is the longest row


def test_a_finished_rows_padding_does_not_disturb_the_others(model):
    rows = [random_ids(model.config, 1, n, seed=n) for n in (4, 9)]
    free = new_tokens(model, *padded_batch(rows), max_new_tokens=20)
    end = next(token for token in free[0][:10] if token not in free[1])
    assert new_tokens(model, *padded_batch(rows), max_new_tokens=20, eos_token_id=end)[1] == free[1]


def test_the_default_ends_are_those_of_both_configurations(model):
    prompt = random_ids(model.config, 1, 4)
    free = new_tokens(model, prompt, max_new_tokens=20)[0]
    other = random_model(small_config(), torch.float32)
    assert end_ids(other, None) == frozenset()
    assert new_tokens(other, prompt, max_new_tokens=20, eos_token_id=None)[0] == free
    for generation, config_ids, wanted in (
        ({}, 7, {7}), ({"eos_token_id": 9}, 7, {7, 9}), ({"eos_token_id": [9, 10]}, [7, 8], {7, 8, 9, 10}),
        ({"eos_token_id": None}, 7, {7}), ({"eos_token_id": 9}, None, {9}),
    ):  # fmt: skip
        other.generation_config, other.config.text_config.eos_token_id = generation, config_ids
        assert end_ids(other, None) == wanted
        assert end_ids(other, []) == frozenset() and end_ids(other, 5) == {5} and end_ids(other, [5, 6]) == {5, 6}
    other.generation_config, other.config.text_config.eos_token_id = {"eos_token_id": free[8]}, free[3]
    stop = min(free.index(free[3]), free.index(free[8]))
    assert new_tokens(other, prompt, max_new_tokens=20, eos_token_id=None)[0] == free[: stop + 1]
    assert new_tokens(other, prompt, max_new_tokens=20)[0] == free  # [] is never


def test_golden_checkpoint_ends_at_its_configured_id(golden_model):
    (end,) = golden_model.config.eos_token_ids
    prompt = torch.tensor([[1, 2, 3]])
    free = new_tokens(golden_model, prompt, temperature=3.0, seed=1, max_new_tokens=400)[0]
    assert end in free
    stopped = new_tokens(golden_model, prompt, temperature=3.0, seed=1, max_new_tokens=400, eos_token_id=None)[0]
    assert stopped == free[: free.index(end) + 1]


def test_padding_and_new_tokens_keep_the_prompt_as_given(model):
    ids, mask = padded_batch([random_ids(model.config, 1, 3), random_ids(model.config, 1, 8)], pad=33)
    out = model.generate(ids, mask, max_new_tokens=4, eos_token_id=[])
    assert torch.equal(out[:, :8], ids) and out.shape == (2, 12) and out.dtype == ids.dtype


def test_pieces_where_no_row_has_a_token_are_fine(model):
    """All rows padded by more than a piece."""
    row = random_ids(model.config, 1, 5)
    ids = torch.cat([torch.zeros(1, 20, dtype=torch.long), row], dim=1)
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    assert new_tokens(model, ids, mask, prefill_tokens=4) == new_tokens(model, row)


# Refusals


def test_wrong_arguments_are_named(model):
    ids = random_ids(model.config, 2, 4)
    right = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    for arguments, options, message in (
        ((ids, right), {}, "left padding"),
        ((ids, right[:, :3]), {}, "attention_mask"),
        ((ids, torch.ones(2, 6, dtype=torch.long)), {}, r"attention_mask \[2, 4\].*\[2, 6\]"),
        ((ids[0],), {}, "input_ids"),
        ((ids[:, :0],), {}, "input_ids"),
        ((ids, torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]])), {}, "left padding"),
        ((ids,), {"stop": ["x"]}, "tokenizer"),
        ((ids,), {"temperature": -1.0}, "temperature"),
        ((ids,), {"max_new_tokens": 0}, "max_new_tokens"),
        ((ids,), {"prefill_tokens": 0}, "prefill_tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(*arguments, **options)
    with pytest.raises(ValueError, match="input_ids"):
        next(stream_generate(model, []))
    with pytest.raises(ValueError, match="tokenizer"):
        next(stream_generate(model, [1], stop=["x"]))


def test_non_finite_logits_name_the_row(model):
    broken = random_model(small_config(), torch.float32)
    with torch.no_grad():
        broken.model.embed_tokens.weight[5] = torch.nan
    ids = torch.tensor([[1, 2, 3], [1, 5, 3], [4, 4, 4]])
    for options in ({}, {"temperature": 1.0, "seed": 0}):
        with pytest.raises(FloatingPointError, match=r"row 1.*token 0"):
            broken.generate(ids, max_new_tokens=2, **options)
    assert broken.generate(ids[::2], max_new_tokens=2).shape == (2, 5)
    with pytest.raises(FloatingPointError, match="non-finite"):
        list(stream_generate(broken, [1, 5]))


# Stop texts


TEXTS = [
    "",
    "a",
    "abc",
    "hello stop world",
    "ababac",
    "xxaabaabxx",
    "stostop",
    "\nUser:\nUser",
    "日本語のテキスト",
    "aaaaaa",
]
STOPS = [
    ["stop"],
    ["aab"],
    ["abac", "ba"],
    ["\nUser:"],
    ["本語", "テキ"],
    ["a"],
    ["aaa", "aaaa"],
    ["zzz"],
    ["bac", "ab"],
]


def cut_everywhere(text: str):
    """All splits into two and three pieces, and single characters."""
    yield list(text)
    for i in range(len(text) + 1):
        yield [text[:i], text[i:]]
        for j in range(i, len(text) + 1):
            yield [text[:i], text[i:j], text[j:]]


@pytest.mark.parametrize("stop", STOPS)
def test_stop_texts_cut_at_every_position(stop):
    for text in TEXTS:
        found = [at for at in map(text.find, stop) if at >= 0]
        # The stream stops as soon as one of them is complete: the earliest end, then the earliest start of those.
        ends = sorted((text.find(s) + len(s), text.find(s)) for s in stop if s in text)
        for pieces in cut_everywhere(text):
            stopper, shown = StopText(stop), ""
            for piece in pieces:
                gained = stopper.feed(piece)
                shown += gained
                assert not any(s in shown for s in stop)
                assert text.startswith(shown)
            shown += stopper.finish()
            assert stopper.is_stopped == bool(found)
            if not found:
                assert shown == text
            else:
                assert text[: len(shown)] == shown and len(shown) in {text.find(s) for s in stop}
                if pieces == list(text):
                    assert len(shown) == min(start for end, start in ends if end == ends[0][0])


def test_only_what_may_become_a_stop_text_is_held_back():
    stopper = StopText(["stop", "\n\n"])
    assert [stopper.feed(piece) for piece in ("he", "llo s", "t", "a", "ste\n", "x")] == [
        "he",
        "llo ",
        "",
        "sta",
        "ste",
        "\nx",
    ]


def byte_prompt(text: str) -> list[int]:
    return list(text.encode())


class Scripted:
    """A model stand-in for the text path: it says the given tokens, one after another."""

    def __init__(self, model, tokens: list[int]) -> None:
        self.model, self.tokens = model, tokens

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, input_ids=None, past_key_values=None, **options):
        out = self.model(input_ids=input_ids, past_key_values=past_key_values, **options)
        said = past_key_values.get_seq_length() - 1  # the prompt is one token
        out.logits = torch.full_like(out.logits, -10.0)
        out.logits[..., self.tokens[min(said, len(self.tokens) - 1)]] = 10.0
        return out


WORDS = "naïve 日本語 한국어 👩‍👩‍👧‍👦 🇯🇵 é\u0301 end"


def test_streamed_text_joined_equals_one_decode(golden_model, tokenizer):
    tokens = byte_prompt(WORDS)
    steps = list(stream_generate(
        Scripted(golden_model, tokens), [65], tokenizer=tokenizer, max_new_tokens=len(tokens), eos_token_id=[]
    ))  # fmt: skip
    assert [step.token_id for step in steps] == tokens
    assert "".join(step.text for step in steps) == tokenizer.decode(tokens) == WORDS
    assert not any("\ufffd" in step.text for step in steps)
    assert [step.finish_reason for step in steps] == [None] * (len(tokens) - 1) + ["length"]


def test_a_character_cut_by_the_end_is_shown_as_decode_shows_it(golden_model, tokenizer):
    tokens = byte_prompt("日本")[:-1]
    steps = stream_generate(
        Scripted(golden_model, tokens), [65], tokenizer=tokenizer, max_new_tokens=len(tokens), eos_token_id=[]
    )
    assert "".join(step.text for step in steps) == tokenizer.decode(tokens)


def test_streams_give_the_tokens_of_generate(golden_model, tokenizer):
    ids = torch.randint(256, (1, 20), generator=torch.Generator().manual_seed(0))
    for options in ({}, {"temperature": 1.0, "top_p": 0.9, "seed": 4}):
        wanted = new_tokens(golden_model, ids, max_new_tokens=30, **options)[0]
        steps = list(stream_generate(golden_model, ids[0].tolist(), tokenizer=tokenizer, max_new_tokens=30, eos_token_id=[],
                                     prefill_tokens=7, **options))  # fmt: skip
        assert [step.token_id for step in steps] == wanted
        assert "".join(step.text for step in steps) == tokenizer.decode(wanted)


@pytest.mark.parametrize("end_source", ["config", "tokenizer", "argument"])
def test_an_end_id_ends_the_stream_and_is_not_shown(end_source, golden_model, tokenizer):
    known = set(end_ids(golden_model, None))
    own = [token for token in tokenizer.end_token_ids if token not in known]
    end = {"config": min(known), "tokenizer": (own or [min(known)])[0], "argument": 70}[end_source]
    options = {"eos_token_id": 70} if end_source == "argument" else {}
    tokens = [*byte_prompt("hey"), end, *byte_prompt("never")]
    steps = list(
        stream_generate(Scripted(golden_model, tokens), [65], tokenizer=tokenizer, max_new_tokens=9, **options)
    )
    assert [step.token_id for step in steps] == tokens[:4]
    assert "".join(step.text for step in steps) == "hey" and steps[-1].finish_reason == "stop"
    if end_source == "tokenizer" and own:  # without a tokenizer it is a token like any other
        steps = list(stream_generate(Scripted(golden_model, tokens), [65], max_new_tokens=9))
        assert len(steps) == 9 and steps[-1].text == ""


@pytest.mark.parametrize("stop", ["日本", "stop", "p me", "é", "xyz"])
def test_stop_texts_in_streams_and_batches(stop, golden_model, tokenizer):
    text = "please é stop me 日本語 now"
    tokens = byte_prompt(text)
    scripted = Scripted(golden_model, tokens)
    steps = list(stream_generate(
        scripted, [65], tokenizer=tokenizer, stop=[stop], max_new_tokens=len(tokens), eos_token_id=[]
    ))  # fmt: skip
    shown = "".join(step.text for step in steps)
    if stop not in text:
        assert shown == text and steps[-1].finish_reason == "length"
        used = len(tokens)
    else:
        assert shown == text[: text.index(stop)] and steps[-1].finish_reason == "stop_string"
        used = len(text[: text.index(stop) + len(stop)].encode())
    assert len(steps) == used
    out = generate(
        scripted, torch.tensor([[65]]), tokenizer=tokenizer, stop=[stop], max_new_tokens=len(tokens), eos_token_id=[]
    )
    assert out[0, 1:].tolist() == tokens[:used]


def test_closing_a_stream_early_is_clean(golden_model):
    stream = stream_generate(golden_model, [1, 2, 3], max_new_tokens=50, eos_token_id=[])
    first = [next(stream).token_id for _ in range(3)]
    stream.close()
    assert first == new_tokens(golden_model, torch.tensor([[1, 2, 3]]), max_new_tokens=3)[0]


def test_generation_config_of_a_checkpoint_is_read(tmp_path, golden_model):
    folder = tmp_path / "golden"
    shutil.copytree(GOLDEN, folder)
    (folder / "generation_config.json").write_text('{"max_length": 4096, "eos_token_id": [97, 98]}')
    model = KimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float32, progress=False)
    assert end_ids(model, None) == set(golden_model.config.eos_token_ids) | {97, 98}
