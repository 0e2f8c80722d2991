"""Models small enough to run hundreds of requests."""

import pytest

from kimi_k3 import KimiK3Tokenizer

pytest.register_assert_rewrite("solo")  # before its first import: a failure then shows the values
from solo import DEMO, SMOOTH, load  # noqa: E402


@pytest.fixture(scope="session")
def demo():
    return load(DEMO)


@pytest.fixture(scope="session")
def smooth():
    return load(SMOOTH)


@pytest.fixture(scope="session")
def tokenizer():
    return KimiK3Tokenizer.from_pretrained(DEMO)
