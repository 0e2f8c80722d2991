"""Joining and leaving the process group."""

from pathlib import Path

import torch
import torch.distributed as dist
from ranks import run_ranks

import kimi_k3
from kimi_k3 import KimiK3ForCausalLM, KimiK3Generator, SamplingParams
from kimi_k3.parallel import make_mesh, start, stop

DEMO = Path(kimi_k3.__file__).parent / "demo"


def gloo_threads() -> list[str]:
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def threads_around_stop(tp: int, ep: int | None) -> tuple[int, int]:
    make_mesh(tp=tp, ep=ep)
    mesh = make_mesh(tp=tp, ep=ep)  # equal to the other, with groups of its own
    model = KimiK3ForCausalLM.from_pretrained(DEMO, mesh=mesh, progress=False)
    with KimiK3Generator(model, data_parallel=tp == 1) as gen:
        gen.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))
    del gen
    before = len(gloo_threads())
    stop()
    return before, len(gloo_threads())


def test_no_thread_of_a_group_outlives_stop():
    """One that does may be the last to drop a tensor while the interpreter ends, which aborts the process.

    Seen with `destroy_process_group` alone: threads of 1 or 2 groups are left, because of DTensor's caches, of the experts'
    table of groups, and of default arguments in torch.distributed.nn. A run whose gloo threads were slowed by 3 ms then
    ended with "terminate called without an active exception".
    """
    for tp, ep in ((2, None), (2, 2), (1, 2)):
        for before, after in run_ranks(2, threads_around_stop, tp, ep):
            assert before > 0 and after == 0


def test_a_process_starts_again_after_stop():
    stop()  # without a group: nothing
    for _ in range(2):
        start("gloo")
        ones = torch.ones(3)
        dist.all_reduce(ones)
        assert ones.tolist() == [1, 1, 1] and make_mesh().size() == 1
        stop()
        assert not dist.is_initialized()
