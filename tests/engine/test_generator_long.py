"""Long prompts: pieces equal the whole, and memory grows with the tokens alone."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from solo import SMOOTH, Recorder, load

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


def memory_of(length):
    """What a prompt of so many tokens takes in a fresh process: the pools, and the rise of the resident set to its peak over
    what it is after a short prompt. In bytes.
    """
    model = load(SMOOTH)
    last_row_in_pieces(model, prompt_of(model, 4096), 2048, prefix_cache=False)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    row, pools = last_row_in_pieces(model, prompt_of(model, length), 2048, prefix_cache=False)
    assert torch.isfinite(row).all()
    return pools, resident("VmHWM") - before


def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def growth_of_pools(length):
    """With four times the tokens, as a factor. The peak rises by that of the pools at least, and to less than four times."""
    figures = []
    for tokens in (length, 4 * length):
        code = f"from test_generator_long import memory_of; print(*memory_of({tokens}))"
        done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        figures.append([int(number) for number in done.stdout.split()])
    (pools, peak), (pools_of_four, peak_of_four) = figures
    print(f"{length} and {4 * length} tokens: pools and rise of the peak, bytes: {figures}")
    assert pools_of_four < peak_of_four < 4 * peak
    return pools_of_four / pools


def test_four_thousand_tokens_in_pieces_equal_the_whole(smooth):
    assert_pieces_equal_whole(smooth, 4096)


@pytest.mark.slow
def test_thirty_two_thousand_tokens_in_pieces_equal_the_whole(smooth):
    assert_pieces_equal_whole(smooth, 32_768)


@pytest.mark.slow
def test_a_quarter_of_a_million_tokens_take_memory_linear_in_them():
    assert growth_of_pools(65_536) == pytest.approx(4, rel=0.05)


@pytest.mark.slow
def test_sixty_five_thousand_tokens_take_memory_linear_in_them():
    assert 3 < growth_of_pools(16_384) < 4
