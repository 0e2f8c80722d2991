"""Kimi K3 for PyTorch."""

from importlib.metadata import PackageNotFoundError, version

from kimi_k3.configuration_kimi_k3 import KimiK3Config
from kimi_k3.engine.generator import KimiK3Generator
from kimi_k3.engine.tiers import DiskTier, HostTier, RemoteTier
from kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM, KimiK3ForConditionalGeneration
from kimi_k3.sampling import SamplingParams
from kimi_k3.tokenization_kimi_k3 import KimiK3Tokenizer

try:
    __version__ = version("kimi-k3")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "DiskTier",
    "HostTier",
    "KimiK3Config",
    "KimiK3ForCausalLM",
    "KimiK3ForConditionalGeneration",
    "KimiK3Generator",
    "KimiK3Tokenizer",
    "RemoteTier",
    "SamplingParams",
    "__version__",
]
