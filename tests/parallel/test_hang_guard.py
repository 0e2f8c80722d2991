"""A rank that stops in the middle of generation: the others end within the timeout, and say who is missing from what."""

import os
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import kimi_k3
from kimi_k3 import KimiK3ForCausalLM, KimiK3Generator, SamplingParams
from kimi_k3.parallel import make_mesh
from kimi_k3.parallel.collectives import CollectiveError, named

DEMO = Path(kimi_k3.__file__).parent / "demo"
STOPPED = 1


def stop_myself(seconds: float) -> None:
    """SIGSTOP, and SIGCONT after a while so that the test ends."""
    subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def generate_until_one_stops(kind: str, timeout: float) -> tuple[str, list[int] | None, float]:
    size = dist.get_world_size()
    mesh = make_mesh(tp=size) if kind.startswith("tp") else make_mesh(ep=size)
    model = KimiK3ForCausalLM.from_pretrained(DEMO, dtype=torch.float32, progress=False, mesh=mesh)
    if kind == "tp, compiled":
        for layer in model.model.layers.values():
            layer.compile(backend="aot_eager", fullgraph=True)
        model.model.has_compiled_layers = True
    with KimiK3Generator(model, max_num_seqs=2, num_blocks=8) as gen:
        gen.add(list(range(5, 30)), SamplingParams(max_new_tokens=40, ignore_eos=True))
        for _ in range(5):
            gen.step()
        began = time.monotonic()
        if dist.get_rank() == STOPPED:
            seconds = timeout + 4  # until the others have reported
            if kind == "ep, later":  # in the middle of a step
                model.model.layers["4"].register_forward_pre_hook(lambda *_: stop_myself(seconds))
            elif kind == "tp, compiled":  # the next collective is in a graph
                model.model.embed_tokens.register_forward_hook(lambda *_: stop_myself(seconds))
            else:
                stop_myself(seconds)
        try:
            for _ in range(20):
                gen.step()
        except CollectiveError as error:
            return str(error), error.missing, time.monotonic() - began
        finally:
            gen._is_closed = True  # the group is broken: closing would want it
    return "", None, 0.0


@pytest.mark.parametrize(
    ("kind", "size", "timeout", "collective"),
    [
        ("ep", 3, 3, "exchange of expert counts (all_to_all_single) among ranks [0, 1, 2]"),
        ("ep, later", 3, 3, "exchange of expert counts (all_to_all_single) among ranks [0, 1, 2]"),
        ("tp", 2, 3, "sum over ranks (all_reduce) among ranks [0, 1]"),
        ("tp, compiled", 2, 8, "a collective of the forward pass among ranks [0, 1]"),
    ],
)
def test_the_others_name_the_rank_that_stopped_and_the_collective(kind, size, timeout, collective):
    results = run_ranks(size, generate_until_one_stops, kind, timeout, timeout=timeout)
    for rank, (message, missing, seconds) in enumerate(results):
        if rank != STOPPED:
            assert message.startswith(f"rank {rank}: {collective} failed after {timeout}."), message
            assert missing == [STOPPED] and f"missing: rank {STOPPED} (" in message, message
            assert seconds < timeout + 4


def sum_until_one_leaves(timeout: float) -> tuple[str, list[int] | None]:
    """The rank that stops closes its connections instead; the ring's far side does not see that."""
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    dist.all_reduce(torch.zeros(1 << 16), group=group)
    if dist.get_rank() == STOPPED:
        dist.destroy_process_group(group)
        return "", None
    try:
        with named("sum", group):
            dist.all_reduce(torch.zeros(1 << 16), group=group)
    except CollectiveError as error:
        return str(error), error.missing
    raise AssertionError("want an error")


def test_a_closed_connection_accuses_no_healthy_rank():
    results = run_ranks(4, sum_until_one_leaves, 4)
    closed = [rank for rank, (message, _) in enumerate(results) if "not heard from" in message]
    assert closed  # neighbours of the one that left
    for rank, (message, missing) in enumerate(results):
        if rank != STOPPED:
            assert STOPPED in missing, message
            assert ("missing: rank" in message) == (rank not in closed), message
