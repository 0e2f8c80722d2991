"""What a decode step of Kimi K3 costs on 8 to 64 ranks: skew, replicas, a slow rank, a dead one, a larger batch.

    python recipes/simulate_cluster.py --hardware h200 --batch 16 --zipf 0.8 --extra 128
    python recipes/simulate_cluster.py --trace routing.jsonl        # the skew that a run of the model recorded
    python recipes/simulate_cluster.py --validate          # run the model's structure on gloo, keep the errors

--trace reads what `gen.record_trace` writes, and the other forms of kimi_k3.parallel.traces, of 896 experts and 16 choices.

The model: ranks are bulk-synchronous, so a layer takes what its slowest rank takes,

    layer = max over ranks of slowness x (trunk + experts) + dispatch + combine
    trunk = (weights / layers + caches read and written) / memory bandwidth
    experts = larger of (chance that a slot is hit x expert bytes) / memory bandwidth and rows x operations / peak
    dispatch, combine = latency + bytes of the rank that receives or sends most / link

It shows which change helps and which part is the limit. It does not show milliseconds of a real system: bandwidths are
sheet values times --efficiency, nothing overlaps, and attention's arithmetic is left out. What its structure is worth
is printed with every result: errors against real gloo runs, from simulate_cluster_validation.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kimi_k3.parallel import stop
from kimi_k3.parallel.placement import ExpertPlacement, NoRoomForExperts
from kimi_k3.parallel.traces import read_trace

VALIDATION = Path(__file__).with_name("simulate_cluster_validation.json")
# Of the released model; tests/recipes/test_simulate_cluster.py holds them against `kimi-k3 plan`.
LAYERS, EXPERTS, TOPK, EXPERT_BYTES, EXPERT_PARAMETERS = 92, 896, 16, 17_547_264, 33_030_144
TRUNK_BYTES = {1: 114_404_258_816, 8: 25_144_323_072}  # by tp
STATE_BYTES, LATENT_BYTES = 434_110_464, 27_648  # of a sequence, of a token
DISPATCH_BYTES, COMBINE_BYTES = 3_696, 7_168  # of a row: MXFP8 out (bfloat16 in what runs today), bfloat16 back


class Device(NamedTuple):
    """Sheet values a second: bytes of memory, dense 8-bit operations."""

    memory: float
    operations: float


DEVICES = {
    "h200": Device(4.8e12, 1.98e15),
    "b200": Device(8.0e12, 4.5e15),
    "b300": Device(8.0e12, 4.5e15),
    "mi355x": Device(8.0e12, 5.0e15),
}


@dataclass(frozen=True)
class Cost:
    """Seconds of one step, by part, and the busiest rank's rows over the mean."""

    trunk: float
    experts: float
    network: float
    imbalance: float

    @property
    def step(self) -> float:
        return self.trunk + self.experts + self.network


def choice_chances(exponent: float, experts: int, topk: int, seed: int) -> np.ndarray:
    """[E]: chance that a token chooses an expert. Zipf, dealt at random; no chance above 1, together topk."""
    chance = np.random.default_rng(seed).permutation(np.arange(1.0, experts + 1) ** -exponent)
    for _ in range(100):
        chance *= topk / chance.sum()
        if chance.max() <= 1 + 1e-12:
            break
        certain = chance >= 1
        chance[certain] = 1
        chance[~certain] *= (topk - certain.sum()) / chance[~certain].sum()
    return chance


def trace_chances(path: str, samples: int) -> list[np.ndarray]:
    """[E] of each of `samples` layers, evenly spread over the trace's."""
    trace = read_trace(path, EXPERTS)
    counts_LE = trace.counts()
    tokens_L1 = counts_LE.sum(1, keepdims=True) / TOPK
    if (counts_LE > tokens_L1).any():
        raise ValueError(f"--trace: want {TOPK} choices a token, got fewer in {path}")
    chance_LE = counts_LE / tokens_L1
    return [chance_LE[layer] for layer in np.linspace(0, len(chance_LE) - 1, samples).round().astype(int)]


def rows_and_slots(plan: ExpertPlacement, chance_E: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """[W]: rows each rank receives, and how many of its slots are hit; an expert's tokens are split over its copies."""
    tables = plan.tables()
    slot_P = tables.physical_to_logical[0].numpy()
    chance_P = np.where(tables.is_active[0].numpy(), (chance_E / tables.num_active[0].numpy())[slot_P], 0.0)
    chance_WS = chance_P.reshape(plan.num_workers, plan.capacity)
    return tokens * chance_WS.sum(1), (1 - (1 - chance_WS) ** tokens).sum(1)


def simulate(
    ranks: int, device: Device, *, batch: int, context: int = 8192, zipf: float = 0.0, extra: int = 0, slow: float = 1.0,
    dead: bool = False, rebalanced: bool = False, tp: int = 8, link: float = 50e9, latency: float = 15e-6,
    efficiency: float = 0.7, samples: int = 4, chances: Sequence[np.ndarray] = (),
) -> Cost:  # fmt: skip
    """One decode step of `batch` sequences a rank, at `context` tokens each.

    slow: rank 0 takes so many times as long.   dead: one rank is gone, its experts and sequences on the others, as
        failover leaves them at once; rebalanced: and as the next plan levels them.
    extra: replicas a layer.   samples: layers with other hot experts that are averaged.
    chances: [E] of each layer that is averaged, in place of zipf: the chance that a token chooses an expert.
    """
    memory, operations = device.memory * efficiency, device.operations * efficiency
    share = batch * ranks / (ranks - dead)
    tokens = round(share * (ranks - dead))
    cached = share * (2 * STATE_BYTES + tp * LATENT_BYTES * context)
    trunk = (TRUNK_BYTES[tp] + cached) / LAYERS / memory
    totals = np.zeros(4)
    layers = list(chances) or [choice_chances(zipf, EXPERTS, TOPK, seed) for seed in range(samples)]
    for chance_E in layers:
        if extra:
            plan = ExpertPlacement.balanced(chance_E, ranks, active_slots=EXPERTS + extra)
        else:
            plan = ExpertPlacement.contiguous(EXPERTS, ranks, capacity=-(-EXPERTS // max(ranks - 1, 1)))
        if dead:
            plan = plan.after_loss(ranks - 1, chance_E)
        if rebalanced:
            active = min(EXPERTS + extra, (ranks - dead) * plan.capacity)
            plan = ExpertPlacement.balanced(chance_E, previous=plan, active_slots=active)
        rows_W, hit_W = rows_and_slots(plan, chance_E, tokens)
        expert_W = np.maximum(hit_W * EXPERT_BYTES / memory, rows_W * 2 * EXPERT_PARAMETERS / operations)
        slowness_W = np.ones(ranks)
        slowness_W[0] = slow
        whole = (slowness_W * (trunk + expert_W)).max()
        busiest = max(rows_W.max(), share * TOPK) * (1 - 1 / ranks)
        network = 2 * latency + busiest * (DISPATCH_BYTES + COMBINE_BYTES) / link
        shown_trunk = trunk * (slow if slow > 1 else 1)
        totals += [shown_trunk, whole - shown_trunk, network, rows_W.max() / rows_W[np.array(plan.alive)].mean()]
    trunk_s, experts_s, network_s, imbalance = totals / len(layers)
    return Cost(trunk_s * LAYERS, experts_s * LAYERS, network_s * LAYERS, imbalance)


# Validation: the same structure with real collectives. Experts are a sleep for each row, so cores are not the limit.


class Case(NamedTuple):
    """A run on gloo: rows a step over all ranks, bytes and seconds a row, and what is done to the ranks."""

    name: str
    rows: int
    row_bytes: int
    row_seconds: float
    zipf: float = 0.0
    extra: int = 0
    slow: float = 1.0
    dead: bool = False


TINY_EXPERTS = 56
CALIBRATION = (
    Case("small rows", 512, 64, 0.0), Case("large rows", 512, 16384, 0.0), Case("even", 512, 64, 200e-6),
)  # fmt: skip
UNSEEN = (
    Case("rank 0 takes 3 x", 512, 64, 200e-6, slow=3),
    Case("skew 1.2", 512, 64, 200e-6, zipf=1.2),
    Case("skew 1.2, 16 replicas", 512, 64, 200e-6, zipf=1.2, extra=16),
    Case("skew 1.2, 16 replicas, a dead rank", 512, 64, 200e-6, zipf=1.2, extra=16, dead=True),
    Case("four times the batch", 2048, 64, 200e-6),
    Case("bytes alone, twice", 1024, 16384, 0.0),
    Case("bytes alone, skew 1.2", 512, 16384, 0.0, zipf=1.2),
)


def case_rows(case: Case, ranks: int) -> np.ndarray:
    """[W]: rows each rank receives, from the placement."""
    chance_E = choice_chances(case.zipf, TINY_EXPERTS, 4, seed=0)
    plan = ExpertPlacement.contiguous(TINY_EXPERTS, ranks, capacity=-(-TINY_EXPERTS // (ranks - 1)))
    if case.extra:
        plan = ExpertPlacement.balanced(
            chance_E, ranks, active_slots=TINY_EXPERTS + case.extra, capacity=plan.capacity + 8
        )
    if case.dead:
        plan = plan.after_loss(ranks - 1, chance_E)
    rows_W, _ = rows_and_slots(plan, chance_E, 1)
    return rows_W / rows_W.sum() * case.rows


def predict(case: Case, ranks: int, fit: tuple[float, float]) -> float:
    """Seconds of a step of one layer: the slowest rank's rows, and two exchanges."""
    latency, seconds_per_byte = fit
    rows_W = case_rows(case, ranks)
    slowness_W = np.array([case.slow] + [1.0] * (ranks - 1))
    return float(
        (slowness_W * rows_W).max() * case.row_seconds
        + 2 * (latency + rows_W.max() * case.row_bytes * seconds_per_byte)
    )


def _run_cases(rank: int, ranks: int, store: str, results: dict[str, float], steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    survivors = dist.new_group(list(range(ranks - 1)))
    seconds: dict[str, list[float]] = {case.name: [] for case in CALIBRATION + UNSEEN}
    for step in range(steps + 2):  # all cases in turn, so that what else the machine does reaches all alike
        for case in CALIBRATION + UNSEEN:
            members = ranks - 1 if case.dead else ranks
            if rank >= members:
                continue
            group = survivors if case.dead else None
            rows = [
                round(float(count) / members) for count in case_rows(case, ranks)[:members]
            ]  # from each member to each
            outgoing = torch.zeros(sum(rows), case.row_bytes, dtype=torch.uint8)
            incoming = torch.zeros(rows[rank] * members, case.row_bytes, dtype=torch.uint8)
            busy = rows[rank] * members * case.row_seconds * (case.slow if rank == 0 else 1)
            dist.barrier(group)
            start = time.perf_counter()
            dist.all_to_all_single(incoming, outgoing, [rows[rank]] * members, rows, group=group)
            if busy:
                time.sleep(busy)
            dist.all_to_all_single(outgoing, incoming, rows, [rows[rank]] * members, group=group)
            took = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
            if step >= 2:
                seconds[case.name].append(float(took))
    if rank == 0:
        results.update({name: statistics.median(times) for name, times in seconds.items()})
    dist.barrier()
    del group, survivors
    stop()


def validate(ranks: int, steps: int = 15) -> dict[str, object]:
    """Fit latency and bandwidth to the calibration runs, predict the others, and compare."""
    with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        shared = manager.dict()
        mp.spawn(_run_cases, (ranks, f"{folder}/store", shared, steps), nprocs=ranks)
        measured = dict(shared)
    small, large, even = (measured[case.name] for case in CALIBRATION)
    per_byte = max(large - small, 0) / 2 / (512 / ranks * (16384 - 64))
    latency = small / 2 - 512 / ranks * 64 * per_byte
    cases = []
    for case in UNSEEN:
        predicted = predict(case, ranks, (latency, per_byte))
        cases.append(
            {
                "case": case.name, "predicted_ms": predicted * 1e3, "measured_ms": measured[case.name] * 1e3,
                "error": predicted / measured[case.name] - 1,
            }
        )  # fmt: skip
    machine = f"{os.cpu_count()} CPU cores at a load average of {os.getloadavg()[0]:.0f}"
    where = f"gloo on loopback, {ranks} processes, {machine}, torch {torch.__version__}, median of {steps} steps"
    return {
        "measured": date.today().isoformat(), "where": where, "latency_us": latency * 1e6,
        "gigabytes_per_second": 1e-9 / per_byte if per_byte else None, "even_ms": even * 1e3, "cases": cases,
    }  # fmt: skip


def error_lines(validation: dict) -> list[str]:
    lines = [f"errors of this model against real runs ({validation['where']}, {validation['measured']}):"]
    for case in validation["cases"]:
        figures = f"predicted {case['predicted_ms']:7.2f} ms, measured {case['measured_ms']:7.2f} ms"
        lines.append(f"  {case['case']:<36}{figures}, error {case['error']:+.0%}")
    return lines + ["Constants of devices and links were not measured: they are sheet values and assumptions."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,16,32,64")
    parser.add_argument("--hardware", default="h200", choices=list(DEVICES))
    parser.add_argument("--tp", type=int, default=8, choices=list(TRUNK_BYTES))
    parser.add_argument("--batch", type=int, default=16, help="sequences a rank (default: %(default)s)")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--zipf", type=float, default=0.8, help="skew of the experts (default: %(default)s)")
    parser.add_argument("--trace", metavar="FILE", help="recorded routing, in place of --zipf")
    parser.add_argument("--extra", type=int, default=128, help="replicas a layer (default: %(default)s)")
    parser.add_argument("--slow", type=float, default=2.0, help="times as long, one rank (default: %(default)s)")
    parser.add_argument("--link", type=float, default=50, help="GB/s of a rank, assumed (default: %(default)s)")
    parser.add_argument("--latency", type=float, default=15, help="us of an exchange, assumed (default: %(default)s)")
    parser.add_argument("--efficiency", type=float, default=0.7, help="of sheet values, assumed (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--validate", type=int, nargs="?", const=4, metavar="RANKS", help="run on gloo and keep the errors"
    )
    args = parser.parse_args()

    if args.validate:
        VALIDATION.write_text(json.dumps(validate(args.validate), indent=2) + "\n")
    validation = json.loads(VALIDATION.read_text())

    common = {
        "batch": args.batch, "context": args.context, "tp": args.tp, "link": args.link * 1e9, "latency": args.latency * 1e-6,
        "efficiency": args.efficiency,
    }  # fmt: skip
    skew = {"chances": trace_chances(args.trace, samples=4)} if args.trace else {"zipf": args.zipf}
    level = skew | {"extra": args.extra}
    variants = {
        "uniform": {}, "trace" if args.trace else f"zipf {args.zipf}": skew, f"+{args.extra} replicas": level,
        f"  one rank {args.slow} x": level | {"slow": args.slow}, "  one rank dead": level | {"dead": True},
        "  and rebalanced": level | {"dead": True, "rebalanced": True},
        "  batch doubled": level | {"batch": 2 * args.batch},
    }  # fmt: skip
    rows = []
    for ranks in map(int, args.ranks.split(",")):
        for name, options in variants.items():
            try:
                cost = simulate(ranks, DEVICES[args.hardware], **(common | options))
            except NoRoomForExperts as error:
                rows.append({"ranks": ranks, "variant": name.strip(), "problem": str(error)})
                continue
            sequences = options.get("batch", args.batch) * ranks
            parts = {f"{part}_ms": getattr(cost, part) * 1e3 for part in ("step", "trunk", "experts", "network")}
            rows.append({"ranks": ranks, "variant": name.strip(), "tokens_per_second": sequences / cost.step}
                        | parts | {"imbalance": cost.imbalance})  # fmt: skip
    if args.json:
        print(json.dumps({"steps": rows, "validation": validation}))
        return
    print(f"{args.hardware}, tp {args.tp}, {args.batch} sequences a rank at {args.context:,} tokens; ms a decode step")
    print(
        f"{'ranks':<7}{'variant':<20}{'step':>9}{'trunk':>9}{'experts':>9}{'network':>9}{'max/mean':>10}{'tokens/s':>12}"
    )
    for row in rows:
        if "problem" in row:
            print(f"{row['ranks']:<7}{row['variant']:<20}{row['problem']}")
            continue
        parts = "".join(f"{row[f'{part}_ms']:>9.2f}" for part in ("step", "trunk", "experts", "network"))
        print(
            f"{row['ranks']:<7}{row['variant']:<20}{parts}{row['imbalance']:>10.2f}{row['tokens_per_second']:>12,.0f}"
        )
    print("\n".join(error_lines(validation)))


if __name__ == "__main__":
    main()
