"""Real processes for tests: `run_ranks` calls a function of a test module on each of N gloo ranks."""

import multiprocessing
import os
import re
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kimi_k3.parallel import stop
from kimi_k3.parallel.tensor_parallel import local_part

TIMEOUT_SECONDS = 60.0  # a loaded machine; what must end fast has its own
PRELOADED = [
    "torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint",
    "torch.testing", "pytest",
    "kimi_k3", "kimi_k3.checkpoint", "kimi_k3.generation", "kimi_k3.parallel", "kimi_k3.parallel.expert_parallel",
]  # fmt: skip


def expert_figures(gen: Any) -> tuple[set[int], dict[tuple[int, int], int], int]:
    """Of this rank's Prometheus text: its numbers as a worker, tokens by (layer, expert), and bytes of a layer's experts."""
    found = re.findall(r'kimi_k3_expert_(\w+){layer="(\d+)",worker="(\d+)"(?:,expert="(\d+)")?} (\d+)',
                       gen.prometheus(all_experts=True))  # fmt: skip
    tokens = {(int(layer), int(expert)): int(n) for name, layer, _, expert, n in found if name == "tokens_total"}
    (held,) = {int(n) for name, *_, n in found if name == "bytes"}  # a layer like another
    return {int(worker) for _, _, worker, _, _ in found}, tokens, held


def check_expert_figures(gen: Any, counts: torch.Tensor) -> list[int]:
    """Every rank calls it, with what all chose, [MoE layers, E]: the workers' tokens add up to it, and are told once by the
    ranks that run the same requests. Returns how many experts of all layers each rank tells."""
    figures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(figures, expert_figures(gen))
    layers, total = gen.runner.experts.layers, torch.zeros_like(counts)
    for rank, (workers, tokens, held) in enumerate(figures):
        assert workers == {rank}
        for (layer, expert), value in tokens.items():
            total[layers.index(layer), expert] += value
        experts: Any = gen.model.model.layers[str(layers[0])].block_sparse_moe.experts
        if rank == dist.get_rank():
            assert held == sum(local_part(weight).nbytes for weight in experts.parameters())
    assert torch.equal(total, counts)
    return [len(tokens) for _, tokens, _ in figures]


def _entry(
    rank: int, size: int, folder: str, timeout: float, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # A file is the meeting place: no port to be raced for.
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    try:
        result = function(*arguments)
        torch.save(result, f"{folder}/{rank}.pt")
    except BaseException:
        Path(f"{folder}/{rank}.error").write_text(traceback.format_exc())
        raise
    finally:
        stop()


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT_SECONDS) -> list[Any]:
    """What `function(*arguments)`, a module-level function, returns on each rank. A rank's exception is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            # Forked from a process that has imported everything and run nothing: a fresh rank in a tenth of a second.
            multiprocessing.set_forkserver_preload(PRELOADED)
            ranks = (size, folder, timeout, function, arguments)
            mp.start_processes(_entry, ranks, nprocs=size, start_method="forkserver")
        except Exception as error:
            texts = [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
            raise AssertionError("\n".join(texts) or str(error)) from None
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(size)]
