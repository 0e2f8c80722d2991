"""What simple models reach on the demo corpus: the numbers the demo model stands beside.

    python recipes/demo_baselines.py

Bits per UTF-8 byte of the held-out plays, the training plays known: a byte 6-gram model with Witten-Bell smoothing, and
xz and bz2 as compressed size of (training + held out) minus that of (training). The last line is the same as JSON.
"""

import argparse
import bz2
import json
import lzma
from collections.abc import Callable

import numpy as np
from demo_corpus import load_plays

ORDER = 6


class WittenBell:
    """Interpolated byte n-gram model: p(c|h) = (count(hc) + types(h) p(c|shorter h)) / (count(h) + types(h)).

    `types(h)` is the number of distinct bytes seen after h; below the unigram stands the uniform 1/256; a context never
    seen leaves the shorter one's probability as it is (Witten and Bell 1991, the form of Chen and Goodman 1998).
    """

    def __init__(self, text: bytes, order: int) -> None:
        if not 1 <= order <= 8 or len(text) < order:
            raise ValueError(f"WittenBell: want order 1..8 and at least as many bytes; got {order}, {len(text)} bytes")
        self.levels: list[tuple[np.ndarray, ...]] = []
        for length in range(1, order + 1):
            grams, counts = np.unique(_codes(text, length), return_counts=True)
            contexts, first, types = np.unique(grams >> np.uint64(8), return_index=True, return_counts=True)
            self.levels.append((grams, counts, contexts, np.add.reduceat(counts, first), types))

    def probabilities(self, text: bytes) -> np.ndarray:
        """float64 [len(text)]: each byte's probability after the (at most order - 1) bytes before it."""
        p = np.full(len(text), 1 / 256)
        for level, (grams, counts, contexts, totals, types) in enumerate(self.levels[: len(text)]):
            wanted = _codes(text, level + 1)
            count = _look_up(grams, counts, wanted)
            total = _look_up(contexts, totals, wanted >> np.uint64(8))
            distinct = _look_up(contexts, types, wanted >> np.uint64(8))
            shorter = p[level:]
            p[level:] = np.where(total > 0, (count + distinct * shorter) / np.maximum(total + distinct, 1), shorter)
        return p

    def bits_per_byte(self, text: bytes) -> float:
        return float(-np.log2(self.probabilities(text)).mean())


def _codes(text: bytes, length: int) -> np.ndarray:
    """The byte n-grams of `text`, each as one big-endian number; the n-gram at i ends at byte i + length - 1."""
    data = np.frombuffer(text, dtype=np.uint8).astype(np.uint64)
    codes = np.zeros(max(len(data) - length + 1, 0), dtype=np.uint64)
    for offset in range(length):
        codes = (codes << np.uint64(8)) | data[offset : offset + len(codes)]
    return codes


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """values[i] where keys[i] is the wanted key, 0 where there is none; keys are sorted."""
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)


def compressed_bits_per_byte(compress: Callable[[bytes], bytes], train: bytes, held_out: bytes) -> float:
    """(C(train + held out) - C(train)) in bits, for each byte held out."""
    return 8 * (len(compress(train + held_out)) - len(compress(train))) / len(held_out)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    train_plays, held_out_plays = load_plays()
    train, held_out = "".join(train_plays.values()).encode(), "".join(held_out_plays.values()).encode()
    print(f"training {len(train):,} bytes, held out {len(held_out):,} bytes ({', '.join(held_out_plays)})")
    results = {
        f"{ORDER}-gram Witten-Bell": WittenBell(train, ORDER).bits_per_byte(held_out),
        "xz -9e": compressed_bits_per_byte(
            lambda data: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME), train, held_out
        ),
        "bz2 -9": compressed_bits_per_byte(bz2.compress, train, held_out),
    }
    for name, bits in results.items():
        print(f"{name:22} {bits:.3f} bits per byte")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
