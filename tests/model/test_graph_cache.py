"""Compiled graphs outlive their process: `kimi-k3 compile` fills the library's cache folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from kimi_k3.compilation import keep_graphs


def test_graphs_are_kept_in_the_library_s_folder_unless_one_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    monkeypatch.setenv("KIMI_K3_CACHE", str(tmp_path))
    assert keep_graphs() == tmp_path / "mine"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert keep_graphs() == tmp_path / "graphs"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # what importing torch leaves
    assert keep_graphs() == tmp_path / "graphs"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "graphs")


@pytest.mark.slow
def test_a_second_process_finds_the_graphs_of_the_first(tmp_path: Path):
    environ = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    environ["KIMI_K3_CACHE"] = str(tmp_path)

    def compile_demo() -> tuple[int, float]:
        command = [sys.executable, "-m", "kimi_k3.cli", "compile"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        found = re.fullmatch(r"(\d+) graphs in ([\d.]+) s, kept in (.+) for .*\n", done.stdout)
        assert found is not None and Path(found[3]) == tmp_path / "graphs"
        return int(found[1]), float(found[2])

    first, second = compile_demo(), compile_demo()
    files = {path for path in (tmp_path / "graphs").rglob("*") if path.is_file()}
    assert first[0] == second[0] > 0 and files
    assert second[1] < first[1] / 2  # tracing stays, the C++ compiler does not
