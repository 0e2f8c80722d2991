"""Collectives with the gradients that go with them, and the words that a failed one is reported with."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

functional = torch.ops._c10d_functional

# After a failure, how long a rank waits for the others to report theirs: all that wait for a rank which does not come time
# out within the skew of a step; a closed connection is noticed in milliseconds.
GRACE_AFTER_TIMEOUT, GRACE_AFTER_CLOSE = 2.0, 0.3
STALE_SECONDS = 5.0


class CollectiveError(RuntimeError):
    """A collective that failed or timed out: which rank says so, the collective's name, and the ranks that are missing.

    missing: ranks of the whole process group that have not reported a failure too: stopped, dead or elsewhere. After a
        closed connection, which is noticed at once, also those that wait for healthy ranks: the dead one is among them.
        None where the store that ranks report to does not answer.
    """

    missing: list[int] | None = None


@contextmanager
def named(what: str, group: dist.ProcessGroup, *, only_collectives: bool = False) -> Iterator[None]:
    """Say which rank failed in which collective, after how long, and who is missing.

    only_collectives: other errors pass as they are; for a block that does more than one collective.
    """
    start = time.monotonic()
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        text = str(error)
        if only_collectives and not (isinstance(error, dist.DistError) or "gloo" in text):
            raise
        seconds = time.monotonic() - start
        is_timeout = "imed out" in text or "timeout" in text
        missing, elsewhere = _missing_ranks(what, seconds, GRACE_AFTER_TIMEOUT if is_timeout else GRACE_AFTER_CLOSE)
        if missing is None:
            who = "the store does not answer, so who is missing is unknown"
        elif missing and is_timeout:
            who = f"missing: rank {', '.join(map(str, missing))} (stopped, dead, or not in a collective)"
        elif missing:  # a rank without a connection to the one that died learns of it only when its own collective ends
            who = f"not heard from: rank {', '.join(map(str, missing))} (dead, or not touched by the closed connection yet)"
        else:
            who = "no rank is missing"
        places = "".join(f"; rank {rank} failed in: {where}" for rank, where in elsewhere.items())
        failure = CollectiveError(
            f"rank {dist.get_rank()}: {what} among ranks {dist.get_process_group_ranks(group)} failed after "
            f"{seconds:.1f} s; {who}{places}; {text.splitlines()[0]}"
        )
        failure.missing = missing
        raise failure from error


def _missing_ranks(what: str, seconds: float, grace: float) -> tuple[list[int] | None, dict[int, str]]:
    """Report this rank's failure; then the ranks that did not report theirs in time, and where others failed, if not here."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    reports: dict[int, str] = {}
    has_answered = threading.Event()

    def exchange() -> None:  # in a thread, because a store whose host has stopped does not answer
        store.set(f"failed/{rank}", json.dumps([time.time(), what]))
        reports[rank] = what
        oldest, until = time.time() - seconds - STALE_SECONDS, time.monotonic() + grace
        while time.monotonic() < until and len(reports) < dist.get_world_size():
            for other in range(dist.get_world_size()):
                if other not in reports and store.check([f"failed/{other}"]):
                    at, where = json.loads(store.get(f"failed/{other}"))
                    if at > oldest:
                        reports[other] = where
            time.sleep(0.02)
        has_answered.set()

    threading.Thread(target=exchange, name="report of a failure", daemon=True).start()
    if not has_answered.wait(grace + 1.0):
        return None, {}
    elsewhere = {other: where for other, where in sorted(reports.items()) if where != what}
    return [other for other in range(dist.get_world_size()) if other not in reports], elsewhere


def _group(name: Any) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)


def all_reduce(x: Tensor, group_name: str) -> Tensor:
    """The sum over the ranks of a group, a new tensor. All ranks get the same bits."""
    if torch.compiler.is_compiling():
        return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group_name))
    with named("sum over ranks (all_reduce)", _group(group_name)):
        return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group_name))


def all_gather_rows(x: Tensor, group_name: str, size: int) -> Tensor:
    """The ranks' tensors, all of one shape, one after another along dimension 0."""
    if torch.compiler.is_compiling():
        return functional.wait_tensor(functional.all_gather_into_tensor(x.contiguous(), size, group_name))
    with named("gather over ranks (all_gather)", _group(group_name)):
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
