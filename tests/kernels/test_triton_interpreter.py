"""Runs triton_interpreted.py: each Triton kernel against its reference, without a GPU.

In a process of its own: Triton reads TRITON_INTERPRET when a kernel is defined, and what is imported so stays interpreted.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_interpreted_kernels_equal_their_references(marks: str):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marks, "triton_interpreted.py"]
    # The references are the oracle, not the compiled CPU kernels.
    environment = os.environ | {"TRITON_INTERPRET": "1", "KIMI_K3_NATIVE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, cwd=HERE)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout
