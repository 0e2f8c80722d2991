"""Compiles Triton launches for GPUs that are not here: records what a `forward` would launch, and compiles that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kimi_k3_kernels import gpu

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64), "gfx950": GPUTarget("hip", "gfx950", 64),
}  # fmt: skip
# Of one program, bytes: what the hardware gives a thread block (NVIDIA) or a compute unit (AMD).
SHARED_LIMIT = {"sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024, "gfx950": 160 * 1024}
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8", torch.int8: "i8",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
OPTIONS = {"num_warps", "num_stages"}


@dataclass
class Launch:
    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]

    def compile(self, target: str) -> Any:
        """As a launch specialises its arguments: 1 is a constant, pointers and multiples of 16 are known as such."""
        signature, constants, attributes = {}, {}, {}
        for position, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if parameter.is_constexpr or (value == 1 if type(value) is int else False):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, Tensor):
                signature[parameter.name] = "*" + TYPES[value.dtype]
                attributes[(position,)] = [["tt.divisibility", 16]]
            elif isinstance(value, int):
                signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
                if value % 16 == 0:
                    attributes[(position,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "fp32"
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=TARGETS[target], options=self.options)


class _Recorder:
    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            options = {k: v for k, v in kwargs.items() if k in OPTIONS}
            arguments = dict(zip(self.kernel.arg_names, args))
            arguments |= {k: v for k, v in kwargs.items() if k not in OPTIONS}
            assert set(arguments) == set(self.kernel.arg_names), "a launch names each argument once"
            assert len(args) + len(kwargs) == len(arguments) + len(options)
            assert all(size > 0 for size in grid)
            assert grid[0] < 2**31 and all(size < 2**16 for size in grid[1:]), "a grid's limits on NVIDIA"
            self.launches.append(Launch(self.kernel, grid, arguments, options))

        return launch


@contextmanager
def recorded(target: str, *modules: ModuleType) -> Iterator[list[Launch]]:
    """The launches that the modules' functions make on `target`, given tensors on the meta device."""
    launches: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, triton.runtime.jit.JITFunction) and value.module == module.__name__:
                    patch.setattr(module, name, _Recorder(value, launches))
            patch.setattr(module, "target_of", lambda device: target, raising=False)
        yield launches


__all__ = ["SHARED_LIMIT", "TARGETS", "Launch", "gpu", "recorded"]
