"""`kimi-k3 placement explain | check | imbalance`: what the plan says, whether plans hold, how skewed a trace is."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kimi_k3.parallel.placement import ExpertPlacement, NoRoomForExperts
from kimi_k3.parallel.traces import (
    ACCEPTABLE_RATIO,
    MIN_MEAN_COUNT,
    HotExperts,
    RoutingTrace,
    read_trace,
    recommended_copies,
    share_of_top_experts,
)

# Of the released model: MoE layers, and an expert as stored, 2 x [3072 x 1792 + 3072 x 112] + [3584 x 1536 + 3584 x 96].
MOE_LAYERS, EXPERT_BYTES = 92, 17_547_264
LEVEL_RATIO = 1.05  # busiest worker over mean that extra slots bring a known skew to
SOURCES = ("standby", "host", "peer", "checkpoint")  # nearest first


def add_commands(commands: argparse._SubParsersAction) -> None:
    """Add `placement` to the command line; its functions return exit codes."""
    placement = commands.add_parser(
        "placement", help="experts on workers: who has which, plans checked, skew of a trace"
    )
    actions = placement.add_subparsers(dest="action", required=True, metavar="ACTION")

    explain = actions.add_parser("explain", help="who has an expert, and who gets it when workers are lost")
    explain.add_argument("--experts", type=int, default=896, metavar="N", help="of one layer (default: %(default)s)")
    explain.add_argument("--workers", type=int, required=True, metavar="N")
    explain.add_argument("--expert", type=int, required=True, metavar="E")
    explain.add_argument("--fail", type=_numbers, default=[], metavar="W[,W]", help="workers lost, in this order")
    explain.add_argument(
        "--layers", type=int, default=MOE_LAYERS, metavar="N", help="MoE layers (default: %(default)s)"
    )
    explain.add_argument("--standby", choices=["none", "device", "host"], default="none", help="keep second copies")
    capacity = "slots of a worker in a layer; left out: enough for what --fail loses"
    explain.add_argument("--capacity", type=int, metavar="N", help=capacity)
    explain.add_argument("--expert-bytes", type=int, default=EXPERT_BYTES, metavar="N", help="default: %(default)s")
    _add_domain_size(explain)
    explain.add_argument("--json", action="store_true")
    explain.set_defaults(run=_explain)

    check = actions.add_parser("check", help="plan for loads and try every promise; the exit code is the verdict")
    check.add_argument("--workers", type=_numbers, default=[8, 16, 32, 64], metavar="N[,N]")
    loads = "uniform, zero, zipfS and trace files (default: uniform,zipf0.5,zipf0.8,zipf1.2)"
    check.add_argument("--loads", default="uniform,zipf0.5,zipf0.8,zipf1.2", metavar="LOAD[,LOAD]", help=loads)
    check.add_argument("--experts", type=int, default=896, metavar="N", help="of loads that are no file")
    check.add_argument("--extra", type=int, default=128, metavar="N", help="active slots beyond one for each expert")
    usual = f"(default: {LEVEL_RATIO}; of trace files {ACCEPTABLE_RATIO})"
    ratio = f"busiest worker over mean that the plan with extra slots may have {usual}"
    check.add_argument("--limit", type=float, metavar="RATIO", help=ratio)
    _add_domain_size(check)
    check.add_argument("--json", action="store_true")
    check.set_defaults(run=_check)

    imbalance = actions.add_parser("imbalance", help="skew of a routing trace, its hot experts, replicas to add")
    imbalance.add_argument("--trace", type=Path, required=True, metavar="FILE")
    imbalance.add_argument("--workers", type=int, default=8, metavar="N", help="default: %(default)s")
    told = "as FILE says; where it does not, one more than the highest in it, up to a multiple of 64 (.bin: 896)"
    imbalance.add_argument("--experts", type=int, metavar="N", help=f"of a layer; left out: {told}")
    window = f"tokens of a window; left out: as many as give a mean count of {MIN_MEAN_COUNT}"
    imbalance.add_argument("--window", type=int, metavar="N", help=window)
    imbalance.add_argument("--json", action="store_true")
    imbalance.set_defaults(run=_imbalance)


def _add_domain_size(parser: argparse.ArgumentParser) -> None:
    domain = "neighbouring workers that fail together, such as those of a node (default: %(default)s)"
    parser.add_argument("--domain-size", type=int, default=1, metavar="N", help=domain)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"want whole numbers such as 8,16, got {text!r}") from None


def _domains(workers: int, size: int) -> list[int]:
    if size < 1:
        raise ValueError(f"--domain-size: want at least 1, got {size}")
    return [worker // size for worker in range(workers)]


# explain


def _explain(args: argparse.Namespace) -> int:
    if not 0 <= args.expert < args.experts:
        raise ValueError(f"--expert: want one below {args.experts}, got {args.expert}")
    standby = None if args.standby == "none" else args.standby
    survivors = args.workers - len(args.fail)
    if args.workers < 1 or survivors < 1:
        raise ValueError(f"--workers: want more than --fail takes away, got {args.workers}")
    even, after = -(-args.experts // args.workers), -(-args.experts // survivors)
    capacity = args.capacity or (max(after, 2 * even) if standby == "device" else after)
    domains = _domains(args.workers, args.domain_size)
    before = ExpertPlacement.contiguous(args.experts, args.workers, args.layers, capacity, domains)
    if standby is not None:  # nothing is active twice, so nothing moves: each expert gets its second copy
        before = ExpertPlacement.balanced(np.ones((args.layers, args.experts)), previous=before, standby=standby)
    plan, moves = before, []
    for worker in args.fail:
        lost_one = plan.after_loss(worker)
        moves += lost_one.moves_from(plan)
        plan = lost_one
    mine = [move for move in moves if move.expert == args.expert]
    taken = Counter(move.worker for move in moves)
    copied = Counter(move.worker for move in moves if move.source != "standby")
    values: dict[str, Any] = {
        "experts": args.experts,
        "workers": args.workers,
        "layers": args.layers,
        "capacity": capacity,
        "expert": args.expert,
        "owner": before.workers_of(args.expert)[0],
        "standby": [{"worker": worker, "tier": tier} for worker, tier in before.standby_of(args.expert)],
        "failed": args.fail,
        "new_owners": sorted(
            {worker for layer in range(args.layers) for worker in plan.workers_of(args.expert, layer)}
        ),
        "source": max((move.source for move in mine), key=SOURCES.index, default="none"),
        "bytes": args.expert_bytes * sum(move.source != "standby" for move in mine),
        "expert_bytes": args.expert_bytes,
        "restored": {
            "experts": len(moves),
            "bytes": args.expert_bytes * sum(copied.values()),
            "experts_per_survivor": [taken[worker] for worker in range(args.workers) if plan.alive[worker]],
            "bytes_of_the_busiest_survivor": args.expert_bytes * max(copied.values(), default=0),
        },
    }
    if args.json:
        print(json.dumps(values))
        return 0
    print(
        f"expert {args.expert} of {args.experts} on {args.workers} workers: owner {values['owner']}, in {args.layers} layers"
    )
    for copy in values["standby"]:
        print(f"standby copy        worker {copy['worker']}, {copy['tier']} memory")
    if not args.fail:
        return 0
    restored = values["restored"]
    print(f"lost                workers {', '.join(map(str, args.fail))}")
    print(
        f"new owners          {', '.join(map(str, values['new_owners']))}, {values['bytes']:,} bytes from {values['source']}"
    )
    print(f"all experts         {restored['experts']:,} of all layers, {restored['bytes']:,} bytes")
    print(f"busiest survivor    {restored['bytes_of_the_busiest_survivor']:,} bytes")
    return 0


# check


def _named_loads(text: str, experts: int) -> Iterator[tuple[str, np.ndarray, float]]:
    """Name, counts [L, E], and the ratio that plans for them may have.

    Zipf ranks are dealt to experts by a fixed shuffle: hot ones are not neighbours.
    """
    for name in text.split(","):
        if name in ("uniform", "zero"):
            yield name, np.full((1, experts), float(name == "uniform")), LEVEL_RATIO
        elif name.startswith("zipf"):
            try:
                exponent = float(name.removeprefix("zipf"))
            except ValueError:
                raise ValueError(f"--loads: want an exponent such as zipf0.8, got {name!r}") from None
            weights = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
            yield name, np.random.default_rng(0).permutation(weights)[None], LEVEL_RATIO
        elif Path(name).is_file():
            yield Path(name).name, read_trace(name).counts().astype(np.float64), ACCEPTABLE_RATIO
        else:
            raise ValueError(f"--loads: want uniform, zero, zipfS or a file, got {name!r}")


def check_plans(loads_LE: np.ndarray, workers: int, extra: int, limit: float, domain_size: int = 1) -> dict[str, Any]:
    """Make the plans that serving makes, and list what does not hold. Building a plan checks its invariants.

    Returns: ratios of busiest worker to mean (worst layer), what survives a domain, seconds are not measured;
        `problems` is empty if every promise is kept.
    """
    layers, experts = loads_LE.shape
    domains, problems = _domains(workers, domain_size), []
    active = min(experts + extra, experts * workers)
    plans: dict[str, ExpertPlacement] = {
        "contiguous": ExpertPlacement.contiguous(experts, workers, layers, domains=domains)
    }
    wanted: dict[str, dict[str, Any]] = {
        "no spare slot": {},
        "extra": {"active_slots": active},
        "extra, standby": {"active_slots": active, "standby": "device"},
        "extra, host standby": {"active_slots": active, "standby": "host"},
    }
    if len(set(domains)) < 2:
        del wanted["extra, standby"], wanted["extra, host standby"]
    elif (loads_LE == loads_LE[:, :1]).all() and workers > 1:  # no expert is worth three copies: each gets two, apart
        wanted["twice"] = {"active_slots": 2 * experts}
    for name, options in wanted.items():
        if name.startswith("extra, "):  # standby copies are added to a plan in use, which stays as it is
            if "extra" not in plans:
                continue
            more = -(-experts // workers) if options["standby"] == "device" else 0
            options |= {"previous": plans["extra"], "capacity": plans["extra"].capacity + more}
        else:
            options |= {"num_workers": workers, "domains": domains}
        try:
            plans[name] = ExpertPlacement.balanced(loads_LE, **options)
        except (ValueError, AssertionError) as error:
            problems.append(f"{name}: {error}")
    ratios = {name: float(plan.imbalance(loads_LE).max()) for name, plan in plans.items()}
    for name, ratio in ratios.items():
        if name.startswith("extra") and ratio > limit:
            problems.append(f"{name}: busiest worker {ratio:.3f} x mean, above {limit}")
    spans = {name: plan.share_on_two_domains() for name, plan in plans.items() if "standby" in name or name == "twice"}
    problems += [f"{name}: {1 - span:.1%} of experts in one domain" for name, span in spans.items() if span < 1]
    after = 0.0
    for worker in sorted({0, workers // 2, workers - 1}):
        for name, plan in plans.items():
            if "standby" not in name:
                continue
            try:
                lost = plan.after_loss(worker, loads_LE)
            except NoRoomForExperts as error:
                if name == "extra, standby":  # standby copies take over where they lie, so there is always room
                    problems.append(f"{name}: {error}")
                continue
            if name == "extra, standby":
                after = max(after, float(lost.imbalance(loads_LE).max()))
                copied = sum(move.source != "standby" for move in lost.moves_from(plan))
                if copied:
                    problems.append(f"{name}: {copied} experts copied after the loss of worker {worker}, want none")
    return {
        "layers": layers, "experts": experts, "workers": workers, "active_slots": active,
        "capacity": plans["extra"].capacity if "extra" in plans else None, "ratios": ratios,
        "on_two_domains": min(spans.values(), default=None), "ratio_after_loss": after or None, "problems": problems,
    }  # fmt: skip


def _check(args: argparse.Namespace) -> int:
    rows = []
    for name, loads_LE, usual in _named_loads(args.loads, args.experts):
        limit = usual if args.limit is None else args.limit
        for workers in args.workers:
            if workers > loads_LE.shape[1]:
                raise ValueError(f"--workers: want at most the {loads_LE.shape[1]} experts of {name}, got {workers}")
            rows.append({"load": name} | check_plans(loads_LE, workers, args.extra, limit, args.domain_size))
    holds = not any(row["problems"] for row in rows)
    if args.json:
        print(json.dumps({"holds": holds, "plans": rows}))
        return 0 if holds else 1
    columns = ("contiguous", "no spare slot", "extra", "extra, standby")
    print(
        f"busiest worker over mean, worst layer; extra: {args.extra} active slots; loss: of one worker, before rebalancing"
    )
    print(
        f"{'load':<22}{'workers':>8}{'slots':>7}"
        + "".join(f"{name:>16}" for name in columns)
        + f"{'loss':>8}{'2 domains':>11}"
    )
    for row in rows:
        ratios = "".join(f"{row['ratios'].get(name, float('nan')):>16.3f}" for name in columns)
        loss = f"{row['ratio_after_loss']:.3f}" if row["ratio_after_loss"] else "-"
        span = "-" if row["on_two_domains"] is None else f"{row['on_two_domains']:.1%}"
        print(f"{row['load']:<22}{row['workers']:>8}{row['capacity'] or 0:>7}{ratios}{loss:>8}{span:>11}")
        for problem in row["problems"]:
            print(f"  problem: {problem}")
    print("every promise holds" if holds else "NOT every promise holds")
    return 0 if holds else 1


# imbalance


def describe_imbalance(trace: RoutingTrace, workers: int, window: int | None = None) -> dict[str, Any]:
    """Skew by layer, hot experts, and the replicas that would level the workers of a contiguous placement."""
    counts_LE, layers = trace.counts(), trace.layers
    window = window or trace.tokens_for_a_window()
    windows = trace.windows(window)
    hot = HotExperts(*counts_LE.shape)
    for counts in windows:
        hot.update(counts)
    contiguous = ExpertPlacement.contiguous(trace.num_experts, workers, len(layers)).imbalance(counts_LE)
    expert_ratio_L = counts_LE.max(1) / np.maximum(counts_LE.mean(1), 1e-300)
    copies_LE, top_L = recommended_copies(counts_LE, hot.is_hot), share_of_top_experts(counts_LE)
    rows = []
    for row, layer in enumerate(layers):
        experts = sorted(np.flatnonzero(hot.is_hot[row]), key=lambda expert: (-counts_LE[row, expert], expert))
        median = float(np.median(counts_LE[row]))
        rows.append(
            {
                "layer": layer,
                "expert_max_over_mean": float(expert_ratio_L[row]),
                "worker_max_over_mean": float(contiguous[row]),
                "share_on_top_fifth": float(top_L[row]),
                "acceptable": bool(contiguous[row] <= ACCEPTABLE_RATIO),
                "hot": [
                    {"expert": int(e), "count": int(counts_LE[row, e]), "times_median": counts_LE[row, e] / max(median, 1),
                     "copies": int(copies_LE[row, e])}
                    for e in experts
                ],
            }
        )  # fmt: skip
    mean_count = window * counts_LE.sum(1).max() / max(trace.num_tokens, 1) / trace.num_experts
    return {
        "tokens": trace.num_tokens, "experts": trace.num_experts, "workers": workers, "window_tokens": window,
        "windows": len(windows), "mean_count": float(mean_count),
        "enough_tokens": bool(len(windows) and mean_count >= MIN_MEAN_COUNT),
        "worker_max_over_mean": {"mean": float(contiguous.mean()), "worst": float(contiguous.max())},
        "share_on_top_fifth": float(top_L.mean()),
        "acceptable_ratio": ACCEPTABLE_RATIO, "acceptable": bool(contiguous.max() <= ACCEPTABLE_RATIO),
        "hot_experts": int(hot.is_hot.sum()), "replicas_of_hot_experts": int((copies_LE - 1).sum(1).max()),
        "replicas_to_level_workers": _replicas_to_level(counts_LE, workers), "layers": rows,
    }  # fmt: skip


def _replicas_to_level(counts_LE: np.ndarray, workers: int, tolerance: float = LEVEL_RATIO) -> int | None:
    """Fewest of 0, W, 2W, 4W, ... active slots a layer beyond one an expert that bring all layers within tolerance."""
    experts, open_LE, extra = counts_LE.shape[1], np.unique(counts_LE, axis=0), 0
    while experts + extra <= experts * workers:
        plan = ExpertPlacement.balanced(open_LE, workers, active_slots=experts + extra, tolerance=tolerance)
        open_LE = open_LE[plan.imbalance(open_LE) > tolerance]
        if not len(open_LE):
            return extra
        extra = 2 * extra or workers
    return None


def _imbalance(args: argparse.Namespace) -> int:
    trace = read_trace(args.trace, args.experts)
    if not 1 <= args.workers <= trace.num_experts:
        raise ValueError(f"--workers: want 1 to {trace.num_experts}, got {args.workers}")
    values = describe_imbalance(trace, args.workers, args.window)
    if args.json:
        print(json.dumps({"trace": str(args.trace)} | values))
        return 0
    print(f"{values['tokens']:,} tokens, {len(values['layers'])} layers of {values['experts']} experts")
    print(f"{'':<8}{'max / mean of':>24}{'share of the':>16}")
    print(
        f"{'layer':<8}{'experts':>12}{f'{args.workers} workers':>12}{'top fifth':>16}  hot experts (x median, copies)"
    )
    for row in values["layers"]:
        hot = " ".join(f"{one['expert']} ({one['times_median']:.1f}, {one['copies']})" for one in row["hot"][:8])
        more = f" and {len(row['hot']) - 8} more" if len(row["hot"]) > 8 else ""
        ratios = f"{row['expert_max_over_mean']:>12.2f}{row['worker_max_over_mean']:>12.2f}"
        flag = "" if row["acceptable"] else f"  above {ACCEPTABLE_RATIO}"
        print(f"{row['layer']:<8}{ratios}{row['share_on_top_fifth']:>16.1%}  {hot}{more}{flag}".rstrip())
    worst = values["worker_max_over_mean"]
    verdict = "acceptable" if values["acceptable"] else "NOT acceptable"
    print(
        f"workers             mean {worst['mean']:.2f}, worst {worst['worst']:.2f}: {verdict} (limit {ACCEPTABLE_RATIO})"
    )
    if values["enough_tokens"]:
        seen = f"{values['windows']} windows of {values['window_tokens']:,} tokens"
        print(f"hot experts         {values['hot_experts']} after {seen}")
        print(f"replicas            {values['replicas_of_hot_experts']} in the layer that needs most, for hot experts")
    else:
        least = f"want windows of {trace.tokens_for_a_window():,} tokens, a mean count of {MIN_MEAN_COUNT}"
        print(f"hot experts         not judged: too few tokens ({least})")
    extra = values["replicas_to_level_workers"]
    known = "none suffices" if extra is None else f"{extra} active slots a layer"
    note = "" if values["enough_tokens"] else "; of this trace alone, too short to act on"
    print(f"to level workers    {known} bring every layer to 1.05 x mean{note}")
    return 0
