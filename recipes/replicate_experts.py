"""Replicate hot experts while decoding goes on, and print what it cost and what it brought.

    torchrun --standalone --nproc-per-node 4 recipes/replicate_experts.py --model /models/kimi-k3 --spare 8

Ranks are expert parallel. --rows requests decode side by side, made of a few distinct tokens, so that few experts have
most of the load. After --steps steps their counts make a new placement, which uses half of the --spare free slots of each
rank; the copies travel while the steps go on. Then as many steps again. Two hosts of 4 (the same command on both):

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST0:29500 --rdzv-id k3 \
        recipes/replicate_experts.py --model /models/kimi-k3 --spare 8

Rank 0 prints one JSON object: load of the busiest rank over the mean, of the worst layer, before and after, by counts of
the tokens that ran then (rank_load); the same of the rows that the ranks received, over all layers (rows); milliseconds of
the steps before, during and after the change; copies that travelled. Without --model it runs the bundled demo model.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

import kimi_k3
from kimi_k3 import KimiK3ForCausalLM, KimiK3Generator, SamplingParams
from kimi_k3.parallel import log_of_rank, make_mesh, start, stop, use_placement
from kimi_k3.parallel.expert_parallel import GROUP, ROWS_RECEIVED, expert_layers
from kimi_k3.parallel.placement import ExpertPlacement

DEMO = Path(kimi_k3.__file__).parent / "demo"


def step_ms(gen: KimiK3Generator, is_over) -> list[float]:
    """Step until is_over(steps so far); the milliseconds of each step."""
    times: list[float] = []
    while not is_over(len(times)):
        began = time.perf_counter()
        gen.step()
        times.append(1e3 * (time.perf_counter() - began))
    return times


def busiest_over_mean(rows: int, device: torch.device) -> float:
    all_rows = [torch.zeros(1, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(all_rows, torch.tensor([float(rows)], device=device))
    return float(torch.cat(all_rows).max() / torch.cat(all_rows).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO, help="checkpoint folder or Hub repository")
    parser.add_argument("--rows", type=int, default=8, help="requests that decode side by side")
    parser.add_argument("--steps", type=int, default=40, help="decode steps before the change, and after it")
    parser.add_argument(
        "--spare", type=int, default=4, help="slots of a rank in a layer beyond its share of the experts"
    )
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds for the change")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--backend", choices=["gloo", "nccl"])
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a collective may take")
    args = parser.parse_args()

    device = start(args.backend, args.timeout)
    log, ranks = log_of_rank(), dist.get_world_size()
    mesh = make_mesh(ep=ranks, device_type=device.type)
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    model = KimiK3ForCausalLM.from_pretrained(args.model, dtype=dtype, mesh=mesh, progress=False)
    layers = expert_layers(model)
    experts = layers[0].experts.num_experts
    capacity = -(-experts // ranks) + args.spare
    use_placement(model, ExpertPlacement.contiguous(experts, ranks, len(layers), capacity))
    log.info("%d experts in %d slots of %d ranks", experts, ranks * capacity, ranks)

    endless = SamplingParams(max_new_tokens=4000, ignore_eos=True, temperature=1.0, top_k=4, seed=0)
    with KimiK3Generator(model, max_num_seqs=args.rows, num_blocks=70 * args.rows) as gen:
        for row in range(args.rows):
            gen.add([40 + row % 2] * 8, endless)
        gen.count_experts()
        step_ms(gen, lambda steps: steps == 5)  # first calls of everything
        rows = ROWS_RECEIVED[GROUP]
        before = step_ms(gen, lambda steps: steps == args.steps)
        rows_before = busiest_over_mean(ROWS_RECEIVED[GROUP] - rows, device)
        loads, old = gen.expert_counts().numpy(), model.expert_placement
        plan = ExpertPlacement.balanced(loads, previous=old, active_slots=experts + ranks * args.spare // 2)
        gen.replace_experts(plan, deadline_s=args.deadline)
        during = step_ms(gen, lambda _: not gen.stats()["expert_changes"]["is_running"])
        gen.count_experts()
        rows = ROWS_RECEIVED[GROUP]
        after = step_ms(gen, lambda steps: steps == args.steps)
        rows_after = busiest_over_mean(ROWS_RECEIVED[GROUP] - rows, device)
        now, changes = gen.expert_counts().numpy(), gen.stats()["expert_changes"]
    moved = torch.tensor(changes["moved"], device=device)
    dist.all_reduce(moved)
    log.info("received %d copies; %s", changes["moved"], changes["last_error"] or "complete")
    if dist.get_rank() == 0:
        median = statistics.median(before)
        print(json.dumps({
            "ranks": ranks, "experts": experts, "layers": len(layers), "capacity": capacity, "copies_moved": int(moved),
            "completed": bool(changes["completed"]), "change_s": changes["last_completed"].get("seconds"),
            "rank_load_before": float(old.imbalance(loads).max()),
            "rank_load_after": float(model.expert_placement.imbalance(now).max()),
            "rows_before": rows_before, "rows_after": rows_after,
            "steps_during": len(during), "median_ms_before": median, "longest_ms_before": max(before),
            "median_ms_during": statistics.median(during), "longest_ms_during": max(during),
            "median_ms_after": statistics.median(after), "longest_before_over_median": max(before) / median,
            "longest_during_over_median": max(during) / median,
        }))  # fmt: skip
    stop()


if __name__ == "__main__":
    main()
