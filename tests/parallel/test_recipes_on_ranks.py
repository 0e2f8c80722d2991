"""The recipes that torchrun starts, as their docstrings say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (
    "**PROSPERO**\n\nOur revels now are ended. These our actors,\nAs I foretold you, were all spirits and\nAre melted."
)


def torchrun(ranks: int, recipe: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    # --standalone: torchrun's own free port
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(ROOT / "recipes" / recipe), "--backend", "gloo", "--timeout", "30", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


def score(ranks: int, file: Path, *options: str) -> dict:
    out = torchrun(ranks, "evaluate.py", str(file), "--window", "32", "--dtype", "float32", "--json", *options).stdout
    return json.loads(out.splitlines()[-1])


def test_tensor_parallel_generation_prints_what_one_process_does():
    options = ("--prompt", TEXT, "--max-new-tokens", "8", "--dtype", "float32")
    one, two = torchrun(1, "generate_tp.py", *options), torchrun(2, "generate_tp.py", *options)
    assert two.stdout == one.stdout and len(one.stdout) > 8
    assert "[rank 0 of 2] read 3.9 MB" in two.stderr and "[rank 1 of 2] read 3.9 MB" in two.stderr


def test_the_score_does_not_depend_on_the_ranks(tmp_path):
    file = tmp_path / "play.txt"
    file.write_text(TEXT * 2)
    one, two = score(1, file), score(2, file)
    assert two["nats"] == one["nats"] and two["ranks"] == 2
    spread = score(2, file, "--ep")
    # Other shapes of products; bit for bit only in batch-invariant mode (test_expert_parallel.py).
    assert spread["nats"] == pytest.approx(one["nats"], rel=1e-6) and spread["ep"] == 2
    assert one["bytes"] == len(file.read_bytes()) and one["tokens"] > 50
    assert score(2, file, "--tp", "2")["nats"] == pytest.approx(one["nats"], rel=1e-6)


@pytest.mark.slow
def test_expert_parallel_generation_prints_every_answer():
    options = ("--max-new-tokens", "6", "--dtype", "float32", "--batch-invariant")
    one = torchrun(1, "generate_ep.py", *options).stdout
    assert one.count("--- ") == 5 and "expert load, busiest / mean" in one
    assert torchrun(3, "generate_ep.py", *options).stdout == one
    assert torchrun(4, "generate_ep.py", "--tp", "2", *options).stdout == one


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_with_its_name():
    """One torchrun is one failure domain: the others are stopped, at once."""
    done = torchrun(2, "generate_tp.py", "--model", "/nonexistent", check=False)
    assert done.returncode != 0 and "/nonexistent" in done.stderr
