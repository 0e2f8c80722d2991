import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # ranks.py, also for the processes that it starts


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    data = os.environ.get("KIMI_K3_TEST_DATA")
    if data is None:
        pytest.skip("KIMI_K3_TEST_DATA is not set")
    return Path(data).parent


@pytest.fixture(scope="session")
def wide_folder(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `wide` checkpoint: 896 experts, top-16, toy widths, 6.8 MB."""
    folder = tmp_path_factory.mktemp("checkpoints") / "wide"
    tool = shared_folder / "tools" / "make_checkpoint.py"
    subprocess.run([sys.executable, tool, "--preset", "wide", "--out", folder], check=True, stdout=subprocess.DEVNULL)
    return folder
