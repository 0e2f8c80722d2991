"""What `kimi-k3 env` prints: versions, devices, and which kernel serves each op on them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from typing import Any

import torch

import kimi_k3_kernels  # noqa: F401  (registers the ops)
from kimi_k3_kernels.library import GPU_KERNELS

PACKAGES = ("kimi-k3", "torch", "torchao", "safetensors", "huggingface_hub", "accelerate", "tiktoken", "numpy")
# Every variable of our own; none of them changes results.
VARIABLES = {
    "KIMI_K3_LOG_LEVEL": "level of the log on stderr: DEBUG, INFO, WARNING (default), ERROR",
    "KIMI_K3_NATIVE": "0: leave the compiled CPU kernels alone, plain PyTorch serves every op",
    "KIMI_K3_CACHE": "folder of built CPU kernels and compiled graphs (default: ~/.cache/kimi_k3)",
    "KIMI_K3_TEST_DATA": "folder of the large fixtures that some tests need",
}
DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


def environment() -> dict[str, Any]:
    """One object for `env --json`; a package that is not installed has the version None."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": {
            "capability": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "cuda": {"version": torch.version.cuda, "devices": _cuda_devices()},
        "ops": {op: op_kernels(op) for op in op_names()},
        "variables": {name: os.environ.get(name) for name in VARIABLES},
    }


def op_names() -> list[str]:
    """Every op of `torch.ops.kimi_k3` with a definition in plain PyTorch, its overload `reference`; backward ops included."""
    names = torch._C._dispatch_get_all_op_names()
    prefix, suffix = "kimi_k3::", ".reference"
    return sorted(
        n.removeprefix(prefix).removesuffix(suffix) for n in names if n.startswith(prefix) and n.endswith(suffix)
    )


def op_kernels(op: str) -> dict[str, str | None]:
    """What the dispatcher runs for an op on each device type: "kernel (its source)", "reference", or None.

    "cuda" stands for ROCm too. A Triton kernel where Triton is not installed is named as such: calling it is an error.
    """
    name = f"kimi_k3::{op}"
    has_reference = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeExplicitAutograd")
    kernels: dict[str, str | None] = {}
    for device, key in DISPATCH_KEYS.items():
        if device == "cuda" and op in GPU_KERNELS:
            missing = "" if importlib.util.find_spec("triton") else ", but Triton is not installed"
            kernels[device] = f"kernel ({GPU_KERNELS[op]}{missing})"
        elif torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            source = re.search(rf"^{key}: registered at (\S+?):\d+", torch._C._dispatch_dump(name), re.MULTILINE)
            kernels[device] = "kernel" if source is None else f"kernel ({os.path.basename(source[1])})"
        else:
            kernels[device] = "reference" if has_reference else None
    return kernels


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_devices() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {"name": each.name, "memory_bytes": each.total_memory, "capability": f"{each.major}.{each.minor}"}
        for each in found
    ]
