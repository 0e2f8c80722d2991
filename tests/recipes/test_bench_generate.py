"""The speed recipe runs every way it offers, and its JSON says what was asked."""

import json
import subprocess
import sys
from pathlib import Path

import kimi_k3

ROOT = Path(__file__).parents[2]
DEMO = Path(kimi_k3.__file__).parent / "demo"


def test_every_figure_is_there():
    options = ["--prompt-tokens", "8,16", "--new-tokens", "9", "--batch", "1,2", "--depth", "8,70", "--threads", "1"]
    command = [
        sys.executable,
        "recipes/bench_generate.py",
        "--model",
        str(DEMO),
        *options,
        "--engine",
        "--explain",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["prefill_by_prompt_tokens"].keys() == {"8", "16"}
    assert result["decode_by_batch"].keys() == {"1", "2"} and result["decode_by_depth"].keys() == {"8", "70"}
    assert result["engine"].keys() == {"greedy, 1", "greedy, 2", "sampled, 1", "sampled, 2"}
    speeds = [result["decode_tokens_per_s"], result["prefill_tokens_per_s"], *result["decode_by_depth"].values()]
    assert min(speeds) > 0 and result["ceiling_decode_tokens_per_s"] > 0 and result["ceiling_prefill_tokens_per_s"] > 0
    # Every decode figure has a ceiling measured beside it.
    assert result["ceiling_decode_by_batch"].keys() == {"1", "2"}
    assert result["ceiling_decode_by_depth"].keys() == {"8", "70"}
    assert min(speed["ceiling_tokens_per_s"] for speed in result["engine"].values()) > 0
    # A decoded token also passes the lm_head.
    assert 0 < result["ceiling_many_rows_tokens_per_s"] < result["ceiling_prefill_tokens_per_s"]
    parts = result["explain"]
    assert parts["projections"]["calls"] > 0 and parts["experts"]["calls"] > 0 and result["graphs"] == 0
