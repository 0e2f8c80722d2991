"""The recipes that torchrun starts, as their docstrings say."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (
    "**PROSPERO**\n\nOur revels now are ended. These our actors,\nAs I foretold you, were all spirits and\nAre melted."
)


def command(ranks: int, recipe: str, *arguments: str, timeout: int = 30, restarts: int = 0) -> list[str]:
    # --standalone: torchrun's own free port
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    torchrun += ["--max-restarts", str(restarts)]
    return [*torchrun, str(ROOT / "recipes" / recipe), "--backend", "gloo", "--timeout", str(timeout), *arguments]


def torchrun(ranks: int, recipe: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    done = subprocess.run(command(ranks, recipe, *arguments), capture_output=True, text=True, cwd=ROOT)
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


@pytest.mark.slow
def test_tensor_parallel_generation_on_four_ranks_prints_what_one_process_does():
    options = ("--prompt", TEXT, "--max-new-tokens", "8", "--dtype", "float32")
    assert torchrun(4, "generate_tp.py", *options).stdout == torchrun(1, "generate_tp.py", *options).stdout


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
def test_896_experts_on_any_number_of_ranks_print_the_same(wide_folder):
    options = ("--model", str(wide_folder), "--max-new-tokens", "12", "--dtype", "float32", "--batch-invariant")
    one = torchrun(1, "generate_ep.py", *options).stdout
    assert one.count("--- ") == 5
    for ranks in (2, 3, 4, 8):
        assert torchrun(ranks, "generate_ep.py", *options).stdout == one


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_with_its_name():
    """One torchrun is one failure domain: the others are stopped, at once."""
    done = torchrun(2, "generate_tp.py", "--model", "/nonexistent", check=False)
    assert done.returncode != 0 and "/nonexistent" in done.stderr


def test_replication_while_serving_levels_the_ranks(wide_folder):
    out = torchrun(2, "replicate_experts.py", "--model", str(wide_folder), "--spare", "32", "--steps", "15").stdout
    report = json.loads(out.splitlines()[-1])
    assert report["completed"] and report["copies_moved"] > 0 and report["steps_during"] >= 1
    assert report["rank_load_before"] > 1.15 > report["rank_load_after"]
    assert report["rows_before"] > report["rows_after"] >= 1


def signal_rank_1(
    ranks: int, signal_number: int, *options: str, restarts: int = 0, timeout: int = 30
) -> tuple[int, str, str]:
    """Run generate_ep under torchrun; once it generates, send rank 1 a signal. A stopped rank goes on when another failed."""
    options = ("--max-new-tokens", "400", "--dtype", "float32", "--batch-invariant", *options)
    environment = {
        **os.environ,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # restarts with gloo want it, see the recipe
    arguments = command(ranks, "generate_ep.py", *options, restarts=restarts, timeout=timeout)
    run = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )  # fmt: skip
    assert run.stdout is not None and run.stderr is not None
    lines, pid = [], None
    killer = threading.Timer(150, run.kill)
    killer.start()
    for line in run.stderr:
        lines.append(line)
        started = re.search(r"\[rank 1 of \d+\] process (\d+), group", line)
        if started and pid is None:
            pid = int(started[1])
            threading.Timer(1.0, os.kill, (pid, signal_number)).start()
        if "CollectiveError" in line and signal_number == signal.SIGSTOP and pid is not None:
            os.kill(pid, signal.SIGCONT)
    out = run.stdout.read()
    killer.cancel()
    return run.wait(), out, "".join(lines)


@pytest.mark.slow
def test_a_killed_rank_restarts_the_run(tmp_path):
    expected = torchrun(
        2, "generate_ep.py", "--max-new-tokens", "400", "--dtype", "float32", "--batch-invariant"
    ).stdout
    code, out, errors = signal_rank_1(2, signal.SIGKILL, restarts=1)
    assert code == 0 and errors.count("[rank 1 of 2] process") == 2, errors[-3000:]
    assert out == expected


@pytest.mark.slow
def test_a_stopped_rank_is_named(tmp_path):
    code, _, errors = signal_rank_1(3, signal.SIGSTOP, timeout=3)
    assert code != 0
    for rank in (0, 2):
        assert re.search(rf"CollectiveError: rank {rank}: .*\(all_\w+\) among ranks .* missing: rank 1 \(", errors), (
            errors[-3000:]
        )
