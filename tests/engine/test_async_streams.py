"""asyncio streams: beyond what test_generator_requests.py asks of them, the threads under them."""

import os
import subprocess
import sys

import pytest

COUNT = """
import os, torch
from kimi_k3.engine.async_streams import end_openmp_team

def threads():
    return len(os.listdir("/proc/self/task"))

end_openmp_team()  # without a team: nothing
before = threads()
x = torch.ones(1 << 22)
x.exp_()
with_team = threads()
end_openmp_team()
print(with_team - before, threads() - before, float(x.add_(1).sum()) > 0, threads() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP")
def test_an_openmp_team_ends_and_starts_again():
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    out = subprocess.run(
        [sys.executable, "-c", COUNT], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert out.split() == ["1", "0", "True", "1"]
