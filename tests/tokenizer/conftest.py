"""Fixtures of the tokenizer tests: the released vocabulary and prompts (KIMI_K3_TEST_DATA), and a byte-pair encoder of
our own to check against."""

import base64
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import regex

from kimi_k3.tokenization_kimi_k3 import KimiK3Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"

# The eight alternatives of spec section 9, for the regex module (V1: && between classes).
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PRE_TOKENISER = regex.compile(
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    regex.V1,
)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    folder = os.environ.get("KIMI_K3_TEST_DATA")
    if folder is None:
        pytest.skip("KIMI_K3_TEST_DATA is not set")
    return Path(folder)


@pytest.fixture(scope="session")
def vocab_file(data_folder: Path) -> Path:
    return data_folder / "tokenizer" / "tiktoken.model"


@pytest.fixture(scope="session")
def k3(vocab_file: Path) -> KimiK3Tokenizer:
    """K3's vocabulary and table, without the bodies of internal messages."""
    return KimiK3Tokenizer(vocab_file)


@pytest.fixture(scope="session")
def xtml_cases(data_folder: Path) -> dict[str, list[tuple[str, bool]]]:
    cases = json.loads((data_folder / "xtml_golden.json").read_text(encoding="utf-8"))["cases"]
    return {name: [(text, is_markup) for text, is_markup in segments] for name, segments in cases.items()}


@pytest.fixture(scope="session")
def released_bodies(xtml_cases: dict[str, list[tuple[str, bool]]]) -> dict[str, str]:
    """The nine released bodies, cut out of the golden prompts by the type of the message they stand in."""

    def body(case: str, kind: str, nth: int = 0) -> str:
        texts = [text for text, _ in xtml_cases[case]]
        at = [place for place, text in enumerate(texts) if text == kind][nth]
        return texts[at + 3]  # kind, closing quote, <|sep|>, body

    schema = body("response_format_json_schema", "response-format")
    return {
        "effort_low": body("thinking_effort_low", "thinking-effort"),
        "effort_high": body("kitchen_sink", "thinking-effort"),
        "effort_max": body("thinking_effort_max", "thinking-effort"),
        "tools_prefix": body("dynamic_tools", "tool-declare").partition("[")[0],
        "dynamic_tools_prefix": body("dynamic_tools", "tool-declare", 1).partition("[")[0],
        "tool_choice_required": body("tool_choice_required", "tool-choice"),
        "tool_choice_none": body("tool_choice_none", "tool-choice"),
        "json_object": body("response_format_json_object", "response-format"),
        "json_schema_prefix": schema.partition('{"properties"')[0],
    }


@pytest.fixture(scope="session")
def k3_chat(
    vocab_file: Path, released_bodies: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> KimiK3Tokenizer:
    """K3's tokenizer with the released bodies, supplied through chat_constants.json."""
    folder = tmp_path_factory.mktemp("k3")
    shutil.copy(vocab_file, folder)
    (folder / "chat_constants.json").write_text(json.dumps(released_bodies), encoding="utf-8")
    return KimiK3Tokenizer(folder / vocab_file.name)


@pytest.fixture(scope="session")
def small() -> KimiK3Tokenizer:
    """256 single bytes and K3's markers at 256..: for what does not depend on the vocabulary."""
    return KimiK3Tokenizer.from_pretrained(GOLDEN / "vision")


@pytest.fixture(scope="session")
def encode_by_hand(vocab_file: Path) -> Callable[[str], list[int]]:
    """Byte-pair encoding by its definition: merge the pair of lowest rank, until none is left."""
    ranks = {}
    for line in vocab_file.read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)

    def encode(text: str) -> list[int]:
        ids = []
        for word in PRE_TOKENISER.findall(text):
            parts = [bytes([byte]) for byte in word.encode()]
            while True:
                pairs = [(ranks.get(parts[i] + parts[i + 1]), i) for i in range(len(parts) - 1)]
                best = min((pair for pair in pairs if pair[0] is not None), default=None)
                if best is None:
                    break
                parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
            ids += [ranks[part] for part in parts]
        return ids

    return encode


@pytest.fixture(scope="session")
def golden() -> Path:
    return GOLDEN
