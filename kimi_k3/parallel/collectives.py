"""Collectives with the gradients that go with them, and the words that a failed one is reported with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

functional = torch.ops._c10d_functional


class CollectiveError(RuntimeError):
    """A collective that failed or timed out, with the rank and the collective's name."""


@contextmanager
def named(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Say which rank failed in which collective, and after how long."""
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        seconds = time.monotonic() - start
        ranks = dist.get_process_group_ranks(group)
        raise CollectiveError(
            f"rank {dist.get_rank()}: {what} among ranks {ranks} failed after {seconds:.1f} s; a rank that is dead, or has "
            f"not entered it, is the usual cause: {str(error).splitlines()[0]}"
        ) from error


def all_reduce(x: Tensor, group_name: str) -> Tensor:
    """The sum over the ranks of a group, a new tensor. All ranks get the same bits."""
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group_name))


def all_gather_rows(x: Tensor, group_name: str, size: int) -> Tensor:
    """The ranks' tensors, all of one shape, one after another along dimension 0."""
    return functional.wait_tensor(functional.all_gather_into_tensor(x.contiguous(), size, group_name))


def sum_in_order(x: Tensor, group_name: str, size: int) -> Tensor:
    """`all_reduce` in the order of the ranks for every element: where in a buffer a row stands does not show in its bits."""
    parts = all_gather_rows(x[None], group_name, size)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class _SumOutput(torch.autograd.Function):
    """Row-parallel output: partial sums in, the sum out. What follows is the same on all ranks, so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str, ordered_size: int) -> Tensor:
        return sum_in_order(x, group_name, ordered_size) if ordered_size else all_reduce(x, group_name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _SumGradient(torch.autograd.Function):
    """Column-parallel input: each rank's gradient is of its own columns alone, and the input's is their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group_name), None


class _GatherColumns(torch.autograd.Function):
    """[T, my columns] -> [T, columns]: ranks hold `chunk` columns each, the last ones fewer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: int, rank: int, size: int, group_name: str) -> Tensor:
        chunk = -(-columns // size)
        ctx.first, ctx.count = min(rank * chunk, columns), x.shape[1]
        padded = torch.nn.functional.pad(x, (0, chunk - x.shape[1]))
        gathered = all_gather_rows(padded, group_name, size).unflatten(0, (size, x.shape[0]))
        return gathered.transpose(0, 1).flatten(1)[:, :columns]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad[:, ctx.first : ctx.first + ctx.count], None, None, None, None


def sum_output(x: Tensor, group_name: str, ordered_size: int = 0) -> Tensor:
    """The sum of the ranks' tensors; with `ordered_size` (the number of ranks) by `sum_in_order`."""
    return _SumOutput.apply(x, group_name, ordered_size)


def sum_gradient(x: Tensor, group_name: str) -> Tensor:
    return _SumGradient.apply(x, group_name)


def gather_columns(x: Tensor, columns: int, rank: int, size: int, group_name: str) -> Tensor:
    """Whole rows from the ranks' columns; every rank gets the same."""
    return _GatherColumns.apply(x, columns, rank, size, group_name)
