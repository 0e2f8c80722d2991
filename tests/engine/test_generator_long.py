"""Long prompts: pieces equal the whole, and memory grows with the tokens alone."""

import random

import pytest
import torch
from solo import Recorder

from kimi_k3 import KimiK3Generator, SamplingParams


def prompt_of(model, length):
    rng = random.Random(length)
    return [rng.randrange(model.config.text_config.vocab_size) for _ in range(length)]


def last_row_in_pieces(model, prompt, tokens_per_step, **options):
    recorder = Recorder()
    blocks = len(prompt) // 64 + 64
    with KimiK3Generator(
        model, max_num_seqs=1, num_blocks=blocks, max_tokens_per_step=tokens_per_step, **options
    ) as gen:
        gen.generate([prompt], SamplingParams(max_new_tokens=1, logits_processor=recorder))
        return recorder.rows[0], gen.stats()["bytes_total"]


def assert_pieces_equal_whole(model, length):
    """Float32 sums in another order: the golden bound on the largest difference, 1.2e-4."""
    prompt = prompt_of(model, length)
    with torch.no_grad():
        whole = model(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1]
    row, _ = last_row_in_pieces(model, prompt, 1024)
    assert float((row - whole).abs().max()) < 1.2e-4 and float((row - whole).abs().mean()) < 1e-5


def test_four_thousand_tokens_in_pieces_equal_the_whole(smooth):
    assert_pieces_equal_whole(smooth, 4096)


@pytest.mark.slow
def test_thirty_two_thousand_tokens_in_pieces_equal_the_whole(smooth):
    assert_pieces_equal_whole(smooth, 32_768)


@pytest.mark.slow
def test_a_quarter_of_a_million_tokens_take_memory_linear_in_them(smooth):
    sizes = {}
    for length in (65_536, 262_144):
        row, sizes[length] = last_row_in_pieces(smooth, prompt_of(smooth, length), 2048, prefix_cache=False)
        assert torch.isfinite(row).all()
    assert sizes[262_144] / sizes[65_536] == pytest.approx(4, rel=0.05)
