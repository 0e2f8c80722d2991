"""Checkpoints that are made outside the repository, beside the shared test data (KIMI_K3_TEST_DATA)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    data = os.environ.get("KIMI_K3_TEST_DATA")
    if data is None:
        pytest.skip("KIMI_K3_TEST_DATA is not set")
    return Path(data).parent


@pytest.fixture(scope="session")
def released_config(shared_folder: Path) -> Path:
    return shared_folder / "spec" / "config.json"


def _make(shared_folder: Path, tool: str, *arguments: str) -> None:
    subprocess.run([sys.executable, shared_folder / "tools" / tool, *arguments], check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="session")
def mid_folder(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `mid` checkpoint, 1.99 GB in 13 shards."""
    folder = tmp_path_factory.mktemp("checkpoints") / "mid"
    _make(shared_folder, "make_checkpoint.py", "--preset", "mid", "--out", str(folder))
    return folder


@pytest.fixture(scope="session")
def twin_folder(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release's 96 shards as sparse files: real headers and index, tensor bytes that read as zeros."""
    folder = tmp_path_factory.mktemp("checkpoints") / "twin"
    _make(shared_folder, "make_release_twin.py", str(folder))
    return folder
