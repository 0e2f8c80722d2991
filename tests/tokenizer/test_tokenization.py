"""Vocabulary, pre-tokeniser, special tokens, limits, and decoding as a whole and id by id."""

import base64
import json
import random
import shutil
import time

import pytest

from kimi_k3.tokenization_kimi_k3 import K3_SPECIALS, KimiK3Tokenizer

GOLDEN_FOLDERS = ("golden", "smooth", "vision")

# Frozen ids under the released vocabulary; the first eight are the spec's own check values.
FIXED_IDS = {
    "think": [39964],
    "response": [12092],
    "message": [2778],
    "tools": [25385],
    "call": [10257],
    "argument": [47185],
    "Hello world, 你好 12345": [19180, 2695, 11, 220, 33845, 220, 6694, 2899],
    "<|open|>": [27, 91, 4454, 91, 29],
    "月之暗面发布了新模型。": [892, 685, 5519, 696, 27613, 776, 15662, 292],
    "混合 mixed ひらがな 한국어 Ελληνικά العربية": [
        *(13935, 15682, 220, 127935, 16800, 10389, 11839, 78560, 54078),
        *(28763, 110125, 61500, 14287, 8711, 125776, 120413, 12441),
    ],
    "def f(x):\n    return x**2  # squared\n": [
        *(1166, 285, 3940, 2360, 274, 745, 1288, 381, 17, 220, 1214, 94297, 198),
    ],
    " \t  \n\n   a  \r\n b   ": [220, 17851, 382, 256, 261, 13435, 291, 274],
    "I'll WE'VE HelloWORLD 1234567": [65447, 40893, 6, 4571, 47771, 155350, 220, 6694, 12972, 22],
    "naïve café A\u030a e\u0301": None,  # combining marks: only against the definition
}

TEXTS = (
    "Plain English text, with punctuation; and 'quotes'.",
    "混合中文、日本語のテキスト、한국어 문장, और हिन्दी, ภาษาไทย, עברית",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 and \U0001f3f3\ufe0f\u200d\U0001f308 joined \U0001f600",
    "안녕하세요, 반갑습니다. 오늘 날씨가 참 좋네요.",
    "tabs\t\tand\r\nlines\n\n\n   end   ",
    '<|open|>message role="system"<|sep|>[EOS][PAD]<|end_of_msg|>',
)


def random_text(rng: random.Random, length: int) -> str:
    alphabets = (
        "abcdefgh ABC'",
        "  \t\n\r\u3000\u00a0", "0123456789", "中文字漢々", "かなカナ", "한국어", "éßǅʰª\u0301\u0e31กख",
        ".,;!?<|>/\\_", "\U0001f600\u200d\U0001f468\ufe0f", "'s't're've'm'll'd'S'LL",
    )  # fmt: skip
    return "".join(rng.choice(rng.choice(alphabets)) for _ in range(length))


@pytest.mark.parametrize("text", FIXED_IDS)
def test_fixed_ids(k3, encode_by_hand, text):
    ids = k3.encode(text)
    assert ids == encode_by_hand(text)
    assert FIXED_IDS[text] is None or ids == FIXED_IDS[text]
    assert k3.decode(ids) == text


def test_random_texts_encode_as_by_hand(k3, encode_by_hand):
    rng = random.Random(0)
    for length in (1, 2, 3, 5, 8, 20, 100) * 40:
        text = random_text(rng, length)
        assert k3.encode(text) == encode_by_hand(text), repr(text)
        assert k3.decode(k3.encode(text)) == text


def test_k3_table_of_special_tokens(k3):
    assert k3.vocab_size == 163_840
    for offset in range(256):
        name = K3_SPECIALS.get(offset, f"<|reserved_token_{163_584 + offset}|>")
        token_id = 163_584 + offset
        assert (k3.token_to_id(name), k3.id_to_token(token_id)) == (token_id, name)
        assert k3.encode(name, allow_special=True) == [token_id]
        assert k3.decode([token_id]) == name
        plain = k3.encode(name)
        assert max(plain) < 163_584 and k3.decode(plain) == name
    expected = {"[BOS]": 163584, "<|end_of_msg|>": 163586, "<|media_pad|>": 163605, "[UNK]": 163838, "[PAD]": 163839}
    assert {name: k3.token_to_id(name) for name in expected} == expected
    assert (k3.bos_token_id, k3.eos_token_id, k3.pad_token_id) == (163_584, 163_585, 163_839)
    assert k3.end_token_ids == {163_585, 163_586, 163_593}  # [EOS], <|end_of_msg|>, [EOT]
    assert k3.token_to_id("think") == 39964 and k3.token_to_id("no such token") is None


def test_skip_special_tokens_leaves_the_visible_markers(k3):
    text = "<|open|>think<|sep|>a<|close|><|end_of_msg|>[EOS][PAD]<|reserved_token_163600|>"
    ids = k3.encode(text, allow_special=True)
    assert k3.decode(ids, skip_special_tokens=True) == "<|open|>think<|sep|>a<|close|>"


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_equal_one_decode(k3, small, text):
    for tokenizer in (k3, small):
        ids = tokenizer.encode(text)
        decoder = tokenizer.stream_decoder()
        pieces = [decoder.feed(token_id) for token_id in ids]
        assert "\ufffd" not in "".join(pieces) and decoder.finish() == ""
        assert "".join(pieces) == tokenizer.decode(ids) == text


def test_streamed_pieces_equal_one_decode_for_any_ids(small):
    rng = random.Random(1)
    leads = [0x41, 0x80, 0xBF, 0xC3, 0xE2, 0xED, 0xA0, 0xF0, 0x9F, 0xF4, 0x90, 0xFF, *small.end_token_ids]
    for skip in (False, True):
        decoder = small.stream_decoder(skip_special_tokens=skip)
        for _ in range(2000):
            ids = [rng.choice(leads) for _ in range(rng.randrange(12))]
            streamed = "".join(decoder.feed(token_id) for token_id in ids) + decoder.finish()
            assert streamed == small.decode(ids, skip_special_tokens=skip), ids


def test_lone_surrogates_and_empty_text(small):
    assert small.encode("") == [] and small.decode([]) == ""
    assert small.decode(small.encode("a\ud800b")) == "a\ufffdb"


def test_decode_refuses_ids_outside_the_vocabulary(small):
    for token_id in (-1, small.vocab_size):
        with pytest.raises(ValueError, match=f"0..383, got {token_id}"):
            small.decode([token_id])
    with pytest.raises(ValueError, match="want str, got bytes"):
        small.encode(b"bytes")


@pytest.mark.parametrize("length", [24_999, 25_000, 25_001, 50_000, 50_001])
@pytest.mark.parametrize("char", ["a", " ", "\u3000"])
def test_runs_are_cut_every_25000_characters(k3, char, length):
    run = char * length
    pieces = [run[i : i + 25_000] for i in range(0, length, 25_000)]
    assert k3.encode(run) == [token_id for piece in pieces for token_id in k3.encode(piece)]


def test_only_runs_are_cut_and_they_count_from_their_start(k3):
    words, run = "word " * 6_000, "b" * 30_000  # 30,000 characters without a long run; then one
    assert len(k3.encode(words)) == 6_001  # every " word" is one id, the last space its own: no seam
    assert k3.encode(words + run) == k3.encode(words + run[:25_000]) + k3.encode(run[25_000:])


def test_text_is_cut_at_400000_characters(k3):
    text = "ab cd " * 70_000
    assert text[399_999:400_001] == "cd"
    whole = k3.encode(text)
    assert whole == k3.encode(text[:400_000]) + k3.encode(text[400_000:])
    assert len(whole) == 140_002  # "ab" and " cd" are one id each, the last space is one; the seam makes one more


def test_pathological_input_takes_linear_time(k3):
    # 10 MB each, 1 to 2 s here; a quadratic merge or match would take hours
    for text in ("a" * 10_000_000, " " * 10_000_000, "x中1!" * 2_500_000):
        start = time.perf_counter()
        k3.encode(text)
        assert time.perf_counter() - start < 60


def test_5000_tokens_are_quick(k3):
    text = "The quick brown fox jumps over the lazy dog; 敏捷的棕色狐狸跳过懒狗。\n" * 270
    ids = k3.encode(text)
    assert len(ids) > 5_000
    start = time.perf_counter()
    k3.encode(text)
    k3.decode(ids)
    assert time.perf_counter() - start < 0.5  # about 5 ms here


@pytest.mark.parametrize("name", GOLDEN_FOLDERS)
def test_folder_names_end_with_the_models_vocabulary(golden, name):
    tokenizer = KimiK3Tokenizer.from_pretrained(golden / name)
    assert tokenizer.vocab_size == 384
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.token_to_id("<|end_of_msg|>")) == (256, 257, 258)
    assert tokenizer.id_to_token(300) == "<|reserved_token_300|>"
    assert tokenizer.end_token_ids == {257, 258}
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]


def test_vision_folder_has_flags_and_names_of_its_file(golden):
    tokenizer = KimiK3Tokenizer.from_pretrained(str(golden / "vision"))
    markers = ["<|open|>", "<|close|>", "<|sep|>", "<|media_begin|>", "<|media_pad|>", "[PAD]"]
    assert [tokenizer.token_to_id(name) for name in markers] == [259, 260, 261, 274, 277, 383]
    assert tokenizer.decode([259, 97, 274, 383], skip_special_tokens=True) == "<|open|>a"
    assert tokenizer.pad_token_id == 383


def test_a_folder_without_chat_markers_says_so(golden):
    tokenizer = KimiK3Tokenizer.from_pretrained(golden / "golden")
    with pytest.raises(ValueError, match=r"has no \['<\|open\|>'"):
        tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    with pytest.raises(ValueError, match=r"no special tokens <\|open\|>"):
        tokenizer.chat_parser()


def test_k2_names_beside_the_k3_vocabulary_are_refused(data_folder):
    with pytest.raises(ValueError, match=r"want K3's name '<\|end_of_msg\|>' for id 163586, got '<\|im_end\|>'"):
        KimiK3Tokenizer.from_pretrained(data_folder / "tokenizer")


def test_k3_folder_with_its_own_names_is_the_default_table(k3, vocab_file, tmp_path):
    shutil.copy(vocab_file, tmp_path)
    added = {
        163_584 + offset: {"content": name, "special": name not in ("<|open|>", "<|close|>", "<|sep|>")}
        for offset, name in K3_SPECIALS.items()
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, "bos_token": "[BOS]"}))
    tokenizer = KimiK3Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.special_tokens == k3.special_tokens
    assert all(tokenizer.is_hidden(token_id) == k3.is_hidden(token_id) for token_id in range(163_584, 163_840))


def test_from_the_hub_cache(golden, tmp_path):
    # the layout that huggingface_hub keeps: refs/<revision> names a commit, snapshots/<commit> holds the files
    repo = tmp_path / "models--someone--small-k3"
    commit = "0" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit).mkdir(parents=True)
    for name in ("tiktoken.model", "tokenizer_config.json", "config.json"):
        shutil.copy(golden / "vision" / name, repo / "snapshots" / commit)
    tokenizer = KimiK3Tokenizer.from_pretrained("someone/small-k3", cache_dir=tmp_path, local_files_only=True)
    assert tokenizer.vocab_size == 384 and tokenizer.token_to_id("<|media_pad|>") == 277
    with pytest.raises(FileNotFoundError, match=r"someone/other: .* not in the cache"):
        KimiK3Tokenizer.from_pretrained("someone/other", cache_dir=tmp_path, local_files_only=True)


def test_from_pretrained_names_what_is_missing(golden, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        KimiK3Tokenizer.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no tiktoken\.model"):
        KimiK3Tokenizer.from_pretrained(tmp_path)
    shutil.copy(golden / "vision" / "tiktoken.model", tmp_path)
    with pytest.raises(ValueError, match=r"has no tokenizer_config\.json"):
        KimiK3Tokenizer.from_pretrained(tmp_path)
    shutil.copy(golden / "vision" / "tokenizer_config.json", tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    with pytest.raises(ValueError, match=r"names id 383, config\.json has vocab_size 300"):
        KimiK3Tokenizer.from_pretrained(tmp_path)


def byte_lines() -> list[str]:
    return [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:-1], "all 256 single bytes"),
        (lambda lines: [*lines, "YWI= 300"], "line 257: want new bytes with rank 256"),
        (lambda lines: [*lines, "YQ== 256"], "line 257: want new bytes with rank 256"),
        (lambda lines: [*lines, "YWI="], "line 257: want 'base64 rank'"),
        (lambda lines: [*lines, "Y*I= 256"], "line 257: want 'base64 rank'"),
        (lambda lines: [*lines, "YWI= x"], "line 257: want 'base64 rank'"),
    ],
)
def test_damaged_vocabulary_names_the_line(tmp_path, change, message):
    path = tmp_path / "tiktoken.model"
    path.write_text("\n".join(change(byte_lines())))
    with pytest.raises(ValueError, match=message):
        KimiK3Tokenizer(path)


def test_a_rewritten_vocabulary_is_read_anew(tmp_path):
    path = tmp_path / "tiktoken.model"
    path.write_text("\n".join([*byte_lines(), "YWI= 256"]))  # "ab"
    assert KimiK3Tokenizer(path).encode("abcd") == [256, 99, 100]
    path.write_text("\n".join([*byte_lines(), "Y2Q= 256"]))  # "cd"
    assert KimiK3Tokenizer(path).encode("abcd") == [97, 98, 256]


def test_a_k3_vocabulary_with_one_byte_changed_is_refused(vocab_file, tmp_path):
    data = vocab_file.read_bytes()
    lines = data.splitlines()
    lines[-1], lines[-2] = lines[-2].split()[0] + b" 163583", lines[-1].split()[0] + b" 163582"  # two tokens swapped
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match="want sha256 b6c497a7"):
        KimiK3Tokenizer(tmp_path / "tiktoken.model")


def test_given_special_tokens_fill_up_to_their_last(tmp_path):
    path = tmp_path / "tiktoken.model"
    path.write_text("\n".join(byte_lines()))
    assert KimiK3Tokenizer(path).vocab_size == 512
    tokenizer = KimiK3Tokenizer(path, {257: "<|end_of_msg|>", 259: "<x>"})
    assert tokenizer.vocab_size == 260 and tokenizer.id_to_token(256) == "<|reserved_token_256|>"
    assert tokenizer.encode("<x>", allow_special=True) == [259] and tokenizer.bos_token_id is None
    with pytest.raises(ValueError, match="ids from 256 on"):
        KimiK3Tokenizer(path, {255: "x"})
    with pytest.raises(ValueError, match=r"got these twice: \['x'\]"):
        KimiK3Tokenizer(path, {256: "x", 257: "x"})
