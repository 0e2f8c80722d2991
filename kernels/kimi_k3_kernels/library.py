"""Where the ops of `torch.ops.kimi_k3` are declared: schema, fake, reference, and a gradient where training needs one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("kimi_k3", "DEF")


def define_op(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Declare one op and return its overload. `reference` serves every device that has no kernel of its own.

    It stays callable as the overload `reference`: the oracle, and what a kernel calls for a dtype that it does not have.
    """
    name, arguments = schema.split("(", 1)
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    for overload in (name, f"{name}.reference"):
        LIBRARY.define(f"{overload}({arguments}", tags=tags)
        LIBRARY.impl(overload, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kimi_k3::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.kimi_k3, name).default


def define_gradient(
    op: Any,
    differentiable: Sequence[int],
    setup_context: Callable[[Any, tuple[Any, ...]], None],
    backward: Callable[..., tuple[Tensor | None, ...]],
) -> None:
    """Give `op` a backward with respect to the arguments at the positions `differentiable`.

    torch.library.register_autograd refuses ops that write to an argument, and these write their state pools; so the
    Autograd kernel is registered here. `setup_context(ctx, inputs)` runs before the op, hence before a pool is
    written; `backward(ctx, grad)` returns one gradient for each differentiable argument.
    """

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            setup_context(ctx, inputs)
            with torch._C._AutoDispatchBelowAutograd():
                return op(*inputs)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            gradients: list[Tensor | None] = [None] * len(op._schema.arguments)
            for position, gradient in zip(differentiable, backward(ctx, *grads), strict=True):
                gradients[position] = gradient
            return tuple(gradients)

    def autograd_kernel(*inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(inputs[i].requires_grad for i in differentiable):
            return Gradient.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    LIBRARY.impl(op._schema.name.split("::")[1], autograd_kernel, "Autograd")


def call(op: Any, *inputs: Any) -> Any:
    """op(*inputs); without gradients straight below autograd: `define_gradient`'s kernel is in Python and would only
    pass on, at some microseconds a call."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return op(*inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*inputs)


GPU_KERNELS: dict[str, str] = {}  # op -> the module with its Triton kernels


def define_gpu_kernel(op: Any, module: str) -> None:
    """Serve `op` on CUDA and on ROCm, which share a dispatch key, by the function of its name in `module`.

    The module is imported at the first call, so that only a GPU needs Triton.
    """
    name = op._schema.name.split("::")[1]
    GPU_KERNELS[name] = module
    LIBRARY.impl(name, lambda *inputs: gpu_function(name)(*inputs), "CUDA")


def gpu_function(name: str) -> Callable[..., Any]:
    """The Triton kernels' entry for an op.

    Raises: RuntimeError without Triton: the reference would be many times slower, and nobody would be told.
    """
    try:
        return getattr(importlib.import_module(GPU_KERNELS[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "triton":
            raise
        raise RuntimeError(f"kimi_k3::{name}: want Triton on a GPU (pip install triton), it is not here") from error


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic inside an op: float32, or float64 for float64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)


# Below this many elements torch runs an elementwise function on one thread (at::internal::GRAIN_SIZE).
_ONE_THREAD = 1 << 15
# It computes two vectors at a time, at most 64 elements (bfloat16, AVX-512), and what is left by scalar code, whose exp
# and tanh round differently.
_TWO_VECTORS = 64


def at_once(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """function(*tensors): what `by_rows` is compared with."""
    return function(*tensors)


def by_rows(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """`function` of rows [T, ...], so that a row's bits do not depend on T, nor on the number of threads below 32,768
    elements a row.

    torch's own elementwise functions do not promise that: a row's elements may fall to vector or to scalar code,
    wherever the threads' shares and the last vector end. Here they run in pieces that end with a row and a vector.

    Args: function: of each row alone, from tensors [t, ...] to a tensor or a tuple of tensors [t, ...].
    """
    num_rows = tensors[0].shape[0]
    widths = [tensor[0].numel() for tensor in tensors] if num_rows else [1]
    is_whole = all(width % _TWO_VECTORS == 0 for width in widths)
    count = max(1, (_ONE_THREAD - 1) // max(widths)) if is_whole else 1
    if num_rows <= count:
        return function(*tensors)
    pieces = [function(*piece) for piece in zip(*(tensor.split(count) for tensor in tensors), strict=True)]
    if isinstance(pieces[0], tuple):
        columns = map(torch.cat, zip(*pieces))
        return pieces[0]._make(columns) if hasattr(pieces[0], "_make") else tuple(columns)
    return torch.cat(pieces)


def is_eager_inference(x: Tensor) -> bool:
    """Whether small steps are worth an op of their own: on a CPU, where no compiler fuses them and no gradient is asked for."""
    return x.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def require(condition: bool, op: str, wanted: str, **given: Any) -> None:
    """Raise the one form of error that the public functions use: the op, what was wanted, what came."""
    if not condition:
        came = ", ".join(
            f"{k} {tuple(v.shape)} {v.dtype}" if isinstance(v, Tensor) else f"{k} {v}" for k, v in given.items()
        )
        raise ValueError(f"{op}: want {wanted}; got {came}")
