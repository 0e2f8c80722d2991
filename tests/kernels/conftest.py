"""Each compiled kernel runs with each instruction set that the machine has."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=["avx512", "avx2", "generic"])
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        before = torch.ops.kimi_k3.set_cpu_instructions(request.param)
    except RuntimeError as error:
        pytest.skip(str(error).splitlines()[0])
    yield request.param
    torch.ops.kimi_k3.set_cpu_instructions(before)
