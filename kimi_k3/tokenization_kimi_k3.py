"""The K3 tokenizer: the released vocabulary file, its pre-tokeniser, special tokens, and text that comes id by id.

Chat prompts are built in chat_encoding.py, replies are read in chat_parser.py; the tokenizer carries both as methods.
"""

import base64
import binascii
import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Self

import tiktoken

from kimi_k3.chat_encoding import DEFAULT_EFFORT, ChatBodies, ChatEncoding, encode_rendered, render_chat
from kimi_k3.chat_parser import ChatParser
from kimi_k3.hub import HubOptions, resolve_files

VOCAB_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"
FOLDER_FILES = (VOCAB_FILE, CONFIG_FILE, "config.json", "chat_constants.json", "encoding_k3.py")

K3_NUM_RANKS = 163_584
K3_VOCAB_SHA256 = "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103"
K3_NUM_SPECIALS = 256
# Offsets from the first id after the ranks; every other slot is a reserved token.
K3_SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
# In K3's table these are added tokens with special = false: skip_special_tokens leaves them visible.
K3_VISIBLE = ("<|open|>", "<|close|>", "<|sep|>")
K3_END_OF_TURN = ("<|end_of_msg|>", "[EOS]", "[EOT]")

# Tried in this order at each place; the set difference (&&[^...]) needs the engine that tiktoken brings.
_NOT_HAN_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_NOT_HAN_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
K3_PRE_TOKENISER = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_UPPER}*{_NOT_HAN_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_UPPER}+{_NOT_HAN_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# The release cuts here too; the seams change ids, so the numbers are part of the format.
MAX_PIECE_CHARS = 400_000
MAX_RUN_CHARS = 25_000


class KimiK3Tokenizer:
    """Text to ids and back with the vocabulary and rules of the released K3 tokenizer.

    Args:
        vocab_file: tiktoken file, one "base64-of-the-bytes rank" a line, ranks 0..n-1, all 256 single bytes among them.
        special_tokens: id -> name for the ids from n on; gaps become `<|reserved_token_{id}|>` and the highest id given
            ends the vocabulary. None is K3's own table of 256 names, placed at n.
    The internal system messages of chat prompts (`chat_bodies`) are read from the folder of `vocab_file`.
    Raises: ValueError for a damaged vocabulary, an id below n, or a name given twice.
    """

    def __init__(self, vocab_file: str | PathLike[str], special_tokens: Mapping[int, str] | None = None) -> None:
        path = Path(vocab_file)
        ranks = read_vocabulary(path)
        if special_tokens is None:
            last = len(ranks) + K3_NUM_SPECIALS - 1
            special_tokens = {len(ranks) + offset: name for offset, name in K3_SPECIALS.items()}
        else:
            last = max(special_tokens, default=len(ranks) - 1)
        if min(special_tokens, default=len(ranks)) < len(ranks):
            raise ValueError(
                f"special_tokens: want ids from {len(ranks)} on (the vocabulary's size), got {min(special_tokens)}"
            )
        names = {i: special_tokens.get(i, f"<|reserved_token_{i}|>") for i in range(len(ranks), last + 1)}
        self._special_ids = {name: i for i, name in names.items()}
        if len(self._special_ids) != len(names):
            repeated = sorted(name for i, name in names.items() if self._special_ids[name] != i)
            raise ValueError(f"special_tokens: want every name once, got these twice: {repeated}")
        self._ranks = ranks
        self._token_bytes = [*ranks, *(name.encode() for name in names.values())]
        self._hidden_ids = frozenset(i for i, name in names.items() if name not in K3_VISIBLE)
        self._bos, self._eos, self._pad = "[BOS]", "[EOS]", "[PAD]"
        self._encoding = tiktoken.Encoding(
            path.name, pat_str=K3_PRE_TOKENISER, mergeable_ranks=ranks, special_tokens=self._special_ids
        )
        self.chat_bodies = ChatBodies.from_folder(path.parent)

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | Path,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
    ) -> Self:
        """Open the tokenizer of a checkpoint folder, or of a Hub repository (its few small files are downloaded).

        Names, `special` flags and the bos, eos and pad tokens are those of `tokenizer_config.json`. The vocabulary ends
        where `config.json` says (`vocab_size`), or at the highest named id if there is no `config.json`.
        Raises: FileNotFoundError for no such folder or repository; ValueError if a file is missing or wrong, among them
            K2's table of names beside K3's vocabulary.
        """
        options = HubOptions(revision, cache_dir, token, local_files_only)
        folder = resolve_files(path_or_repo, FOLDER_FILES, options)
        for name in (VOCAB_FILE, CONFIG_FILE):
            if not (folder / name).is_file():
                raise ValueError(
                    f"from_pretrained: {folder} has no {name}; with K3's vocabulary file alone, "
                    "KimiK3Tokenizer(vocab_file) uses K3's own table of special tokens"
                )
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        added = {int(i): entry for i, entry in config.get("added_tokens_decoder", {}).items()}
        if not added:
            raise ValueError(f"from_pretrained: {folder / CONFIG_FILE}: want added_tokens_decoder with names, got none")
        names = {i: entry["content"] for i, entry in added.items()}
        vocab_size = _vocab_size(folder)
        if vocab_size is not None:
            if max(names) >= vocab_size:
                raise ValueError(
                    f"from_pretrained: {folder}: tokenizer_config.json names id {max(names)}, "
                    f"config.json has vocab_size {vocab_size}"
                )
            names.setdefault(vocab_size - 1, f"<|reserved_token_{vocab_size - 1}|>")
        tokenizer = cls(folder / VOCAB_FILE, names)
        if len(tokenizer._ranks) == K3_NUM_RANKS:
            _refuse_other_table(folder, names)
        visible = {i for i, entry in added.items() if not entry.get("special", False)}
        tokenizer._hidden_ids = frozenset(tokenizer._special_ids.values()) - visible
        tokenizer._bos = _token_name(config, "bos_token", tokenizer._bos)
        tokenizer._eos = _token_name(config, "eos_token", tokenizer._eos)
        tokenizer._pad = _token_name(config, "pad_token", tokenizer._pad)
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of ids, specials included; ids are 0..vocab_size - 1."""
        return len(self._token_bytes)

    @property
    def special_tokens(self) -> dict[str, int]:
        """Name -> id of every special token, reserved ones included."""
        return dict(self._special_ids)

    @property
    def bos_token_id(self) -> int | None:
        return self._special_ids.get(self._bos)

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own `eos_token`, [EOS] in K3. A turn ends with another id: see `end_token_ids`."""
        return self._special_ids.get(self._eos)

    @property
    def pad_token_id(self) -> int | None:
        return self._special_ids.get(self._pad)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Every id that ends a turn: <|end_of_msg|>, [EOS], [EOT] and the eos_token, those of them that exist."""
        return frozenset(self._special_ids[name] for name in (*K3_END_OF_TURN, self._eos) if name in self._special_ids)

    def token_to_id(self, token: str) -> int | None:
        """Id of a special token's name, or of the vocabulary entry with exactly these UTF-8 bytes; None if neither."""
        special = self._special_ids.get(token)
        return special if special is not None else self._ranks.get(token.encode("utf-8", "surrogatepass"))

    def id_to_token(self, token_id: int) -> str:
        """Name of a special token, or the text of a vocabulary entry (bytes that are no UTF-8 become U+FFFD)."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id stands for; a special token stands for its name."""
        if not 0 <= token_id < len(self._token_bytes):
            raise ValueError(f"token id: want 0..{len(self._token_bytes) - 1}, got {token_id}")
        return self._token_bytes[token_id]

    def is_hidden(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves this id out: tokens with `special: true`, reserved ones included."""
        return token_id in self._hidden_ids

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of a text. Names of special tokens inside it are plain text unless `allow_special`."""
        if not isinstance(text, str):
            raise ValueError(f"encode: text: want str, got {type(text).__name__}")
        ids: list[int] = []
        for piece in _cut(text):
            if allow_special:
                ids += self._encoding.encode(piece, allowed_special="all", disallowed_special=())
            else:
                ids += self._encoding.encode_ordinary(piece)
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD. `skip_special_tokens` leaves out those of `is_hidden`."""
        kept = (self.token_bytes(int(i)) for i in ids if not (skip_special_tokens and self.is_hidden(int(i))))
        return b"".join(kept).decode("utf-8", "replace")

    def stream_decoder(self, skip_special_tokens: bool = False) -> "StreamDecoder":
        """A decoder fed one id at a time, whose pieces joined equal `decode` of all ids."""
        return StreamDecoder(self, skip_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = True,
        thinking_effort: str | None = DEFAULT_EFFORT,
        tool_choice: str | None = None,
        response_format: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> ChatEncoding:
        """Encode a conversation as K3 reads it; arguments, message forms and errors: `chat_encoding.render_chat`."""
        rendered = render_chat(
            messages,
            self.chat_bodies,
            tools=tools,
            thinking=thinking,
            thinking_effort=thinking_effort,
            tool_choice=tool_choice,
            response_format=response_format,
            add_generation_prompt=add_generation_prompt,
            end_token_ids=self.end_token_ids,
        )
        return encode_rendered(rendered, self)

    def render_chat_segments(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[tuple[str, bool]]:
        """The prompt of `encode_chat` (same options) as (text, is_markup) segments, each encoded alone.

        A message given by its `token_ids` shows as one markup segment with their text.
        """
        rendered = render_chat(messages, self.chat_bodies, end_token_ids=self.end_token_ids, **options)
        turns = {i: self.decode(ids) for i, ids in rendered.token_ids.items()}
        return [(turns.get(i, text), is_markup) for i, (text, is_markup) in enumerate(rendered.segments)]

    def chat_parser(self, thinking: bool = True) -> ChatParser:
        """A parser of one reply, fed id by id; `thinking` as in the prompt, which opened that channel."""
        return ChatParser(self, thinking)


class StreamDecoder:
    """Ids in one at a time, text out as soon as its characters are whole; the pieces joined equal one `decode`."""

    def __init__(self, tokenizer: KimiK3Tokenizer, skip_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The text that this id completes; empty while a character is still open."""
        if self._skip_special_tokens and self._tokenizer.is_hidden(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is still open, as U+FFFD; the decoder is then as new."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def read_vocabulary(path: Path) -> dict[bytes, int]:
    """Ranks of a tiktoken file, in rank order.

    Parsed here: tiktoken's own loader caches local files by their path, so a rewritten file gives old ranks.
    Raises: ValueError naming file and line for anything but ranks 0..n-1 with distinct bytes and all 256 single bytes,
        and for a file of K3's length that is not K3's.
    """
    if not path.is_file():
        raise ValueError(f"vocab_file: want a tiktoken vocabulary file, got {path}, which does not exist")
    data = path.read_bytes()
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        fields = line.split()
        if not fields:
            continue
        try:
            encoded, rank = fields
            token = base64.b64decode(encoded, validate=True)
            is_next = int(rank) == len(ranks)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"{path}, line {number}: want 'base64 rank', got {line[:60]!r}") from error
        if not is_next or not token or token in ranks:
            raise ValueError(f"{path}, line {number}: want new bytes with rank {len(ranks)}, got {line[:60]!r}")
        ranks[token] = len(ranks)
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError(f"{path}: want all 256 single bytes in the vocabulary, got {len(ranks)} ranks without some")
    if len(ranks) == K3_NUM_RANKS and (digest := hashlib.sha256(data).hexdigest()) != K3_VOCAB_SHA256:
        raise ValueError(f"{path}: {K3_NUM_RANKS} ranks as K3 has, so want sha256 {K3_VOCAB_SHA256}, got {digest}")
    return ranks


def _cut(text: str) -> Iterator[str]:
    """Pieces of at most MAX_PIECE_CHARS, cut again wherever spaces or non-spaces run on for MAX_RUN_CHARS."""
    if len(text) <= MAX_RUN_CHARS:
        yield text
        return
    for piece_start in range(0, len(text), MAX_PIECE_CHARS):
        piece = text[piece_start : piece_start + MAX_PIECE_CHARS]
        start = 0
        for run in re.finditer(r"\s+|\S+", piece):
            for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield piece[start:cut]
                start = cut
        yield piece[start:]


def _vocab_size(folder: Path) -> int | None:
    if not (folder / "config.json").is_file():
        return None
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config.get("text_config", config).get("vocab_size")


def _token_name(config: Mapping[str, Any], key: str, default: str) -> str:
    value = config.get(key) or default
    return value["content"] if isinstance(value, Mapping) else value


def _refuse_other_table(folder: Path, names: Mapping[int, str]) -> None:
    # K2 has the same ranks and other names at the same ids; with them every prompt would be silently wrong.
    for offset in (2, 3, 4, 5):
        token_id, wanted = K3_NUM_RANKS + offset, K3_SPECIALS[offset]
        if names.get(token_id) != wanted:
            raise ValueError(
                f"from_pretrained: {folder / CONFIG_FILE}: want K3's name {wanted!r} for id {token_id}, "
                f"got {names.get(token_id)!r}; K2 has this vocabulary with another table: "
                "KimiK3Tokenizer(vocab_file) uses K3's own"
            )
