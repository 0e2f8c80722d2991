"""What happens when concurrency and context outgrow the memory: latencies and throughput against load.

    python recipes/stress_memory_wall.py [--model DIR] [--loads 0.5,1,2,4] [--raise concurrency,context] --out FOLDER
    python recipes/stress_memory_wall.py --compare [--traces chat,bursts,mixed] --out FOLDER      # the two schedulers

Without --compare: users who each hold a chat, the next turn sent as soon as the last reply is there. Memory holds the
chats of --users users at their ends, with one KDA state each; load is what all users want over what there is. It is
raised by more users, or by longer turns of as many users, for both schedulers, with and without a host tier; at twice the
memory also with a tier that takes 50 ms for each read. FOLDER gets stress_memory_wall.csv and, with matplotlib, .png.

With --compare: three traces of arrivals at half of the memory that they take when nothing is short, measured first, and
twice the work that fits into their time. Goodput counts the tokens of requests with a first token within 15, and a p95
between tokens within 1.25, steps in which 8 rows decode beside one block of prefill, the least that can go on beside them.
It is printed for other bounds between tokens too.

--clock cpu counts this process's CPU seconds instead of wall seconds, for a machine that is not idle; use one thread then.
The run fails if memory runs out or a request is lost.
"""

import argparse
import csv
import heapq
import math
import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import kimi_k3
from kimi_k3 import KimiK3ForCausalLM, KimiK3Generator, SamplingParams
from kimi_k3.engine.device_pools import PoolLayout
from kimi_k3.engine.tiers import HostTier

BLOCK = 64
MAX_NUM_SEQS, MAX_TOKENS_PER_STEP = 32, 512
USER_TOKENS = 96  # of each turn
UTILISATION = 2.0  # of --compare: work that arrives, over what fits into its time
OVERSUBSCRIPTION = 2.0  # and the memory that it takes when nothing is short, over what there is
SLOW_READ_S = 0.05
HOST_BYTES = 1 << 30


class Clock:
    """Seconds since the start, of the wall or of this process's CPU time; `skip_to` passes time in which nobody asks."""

    def __init__(self, kind: str) -> None:
        self.read: Callable[[], float] = {"wall": time.perf_counter, "cpu": time.process_time}[kind]
        self.start = self.read()

    def __call__(self) -> float:
        return self.read() - self.start

    def skip_to(self, at: float) -> None:
        self.start = min(self.start, self.read() - at)


class TimedTier(HostTier):
    """A host tier whose reads take `read_s` of the clock's seconds at least, and are recorded."""

    def __init__(self, num_bytes: int, clock: Clock, read_s: float = 0.0) -> None:
        super().__init__(num_bytes)
        self.clock, self.read_s = clock, read_s
        self.reads: list[tuple[float, float]] = []

    def get(self, key: str) -> Any:
        start = self.clock()
        payload = super().get(key)
        while self.clock() < start + self.read_s:
            time.sleep(0.002)
        self.reads.append((start, self.clock()))
        return payload


# Who asks for what, and when.


@dataclass
class Turn:
    user: int  # tokens
    reply: int
    think_s: float = 0.0  # between the last reply and this turn


@dataclass
class Session:
    arrival_s: float
    prefix: tuple[str, int]  # what several share: a name and tokens
    turns: list[Turn]

    @property
    def num_tokens(self) -> int:
        return self.prefix[1] + sum(t.user + t.reply for t in self.turns)


def _tokens(rng: random.Random, median: int, spread: float, most: int) -> int:
    return max(8, min(most, int(rng.lognormvariate(math.log(median), spread))))


def chat(rng: random.Random, number: int) -> list[Session]:
    """Chats under 4 system prompts, one of them in half of the chats."""
    systems = [(f"system {i}", rng.randint(128, 384)) for i in range(4)]
    return [
        Session(
            rng.random(),
            systems[min(int(rng.paretovariate(1.0)) - 1, 3)],
            [Turn(_tokens(rng, 64, 0.8, 512), _tokens(rng, 24, 0.5, 64), 0.02) for _ in range(rng.randint(1, 4))],
        )
        for _ in range(number)
    ]


def bursts(rng: random.Random, number: int) -> list[Session]:
    """Four times eight in ten of the requests at once, about one new document each time; the others in between."""
    documents = [(f"document {i}", rng.randint(256, 768)) for i in range(4)]
    out = []
    for i in range(number):
        turn = Turn(_tokens(rng, 24, 0.6, 128), _tokens(rng, 24, 0.5, 64))
        if i % 5:
            out.append(Session(i % 4 / 4 + rng.uniform(0, 0.005), documents[i % 4], [turn]))
        else:
            out.append(Session(rng.random(), ("all", 16), [Turn(4 * turn.user, turn.reply)]))
    return out


def mixed(rng: random.Random, number: int) -> list[Session]:
    """One request in eight reads 768 to 1,536 tokens, the others some 48; nothing shared but 16 tokens."""
    return [
        Session(
            rng.random(),
            ("all", 16),
            [Turn(rng.randint(768, 1536) if i % 8 == 0 else _tokens(rng, 48, 0.6, 192), _tokens(rng, 32, 0.5, 96))],
        )
        for i in range(number)
    ]


TRACES = {"chat": chat, "bursts": bursts, "mixed": mixed}


# One run.


@dataclass
class Asked:
    """One request as its user sees it, in the clock's seconds."""

    session: int
    turn: int
    prompt: list[int]
    wanted: int  # tokens
    at: float
    step: int  # the generator's when it was asked, then when it last gained a token
    longest_wait_steps: int = 0
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def is_served(self) -> bool:
        return self.finish_reason == "length" and len(self.tokens) == self.wanted

    @property
    def first_token_s(self) -> float:
        return self.times[0] - self.at

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:])]


@dataclass
class Row:
    """One run's figures: a line of the CSV."""

    what: str
    scheduler: str
    tier: str
    load: float
    users: int
    requests: int
    lost: int
    tokens: int
    seconds: float
    tokens_per_s: float
    first_token_p50_s: float
    first_token_p95_s: float
    first_token_p99_s: float
    gap_p50_ms: float
    gap_p95_ms: float
    gap_p99_ms: float
    longest_wait_s: float
    longest_wait_steps: int
    goodput_tokens_per_s: float  # within both bounds
    within: int  # requests within both bounds
    decision_share: float  # of the steps' time
    decision_us: float
    computed_tokens: int
    replayed_tokens: int
    preemptions: int
    evictions: int
    fetches: int
    transfer_s: float  # in which at least one read was under way
    exposed_s: float  # of it, in which nothing else ran
    memory_bytes: int
    peak_rss_bytes: int  # of the process until then


@dataclass
class Bounds:
    first_token_s: float
    gap_s: float  # of a request's 95th percentile

    def hold(self, asked: Asked) -> bool:
        return asked.first_token_s <= self.first_token_s and percentile(asked.gaps_s, 95) <= self.gap_s


def goodput(asked: list[Asked], bounds: Bounds, seconds: float) -> float:
    """Tokens/s of the requests that keep both bounds."""
    return sum(len(a.tokens) for a in asked if a.is_served and bounds.hold(a)) / seconds


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else 0.0


class Driver:
    """Sends the turns of sessions to a generator and notes when each token came."""

    def __init__(self, gen: KimiK3Generator, sessions: list[Session], clock: Clock, vocab_size: int, seed: int) -> None:
        self.gen, self.sessions, self.clock, self.vocab_size, self.seed = gen, sessions, clock, vocab_size, seed
        self.coming = [(s.arrival_s, i, 0) for i, s in enumerate(sessions)]
        self.histories = [self._ids(*s.prefix) for s in sessions]
        self.message_ends: list[list[int]] = [[] for _ in sessions]  # as encode_chat tells them
        self.live: dict[int, Asked] = {}
        self.all: list[Asked] = []
        self.idle: list[tuple[float, float]] = []  # steps in which nothing ran
        self.peak_blocks = 0  # latent blocks and states of requests under way, a shared prefix counted once

    def _ids(self, name: str, tokens: int) -> list[int]:
        rng = random.Random(f"{self.seed} {name}")
        return [rng.randrange(self.vocab_size) for _ in range(tokens)]

    def run(self) -> "Driver":
        heapq.heapify(self.coming)
        counts = self.gen.counts
        while self.coming or self.live:
            while self.coming and self.coming[0][0] <= self.clock():
                self._ask(*heapq.heappop(self.coming)[1:])
            if not self.live:
                self.clock.skip_to(self.coming[0][0])
                continue
            start, ran = self.clock(), counts["decode_tokens"] + counts["prefill_tokens"]
            outputs = self.gen.step()
            now = self.clock()
            if counts["decode_tokens"] + counts["prefill_tokens"] == ran and not outputs:
                self.idle.append((start, now))
            for output in outputs:
                self._hear(output, now)
            self.peak_blocks = max(self.peak_blocks, self._blocks())
        return self

    def _ask(self, number: int, turn: int) -> None:
        wanted = self.sessions[number].turns[turn]
        prompt = self.histories[number] + self._ids(f"{number} {turn}", wanted.user)
        ends = self.message_ends[number] = [*self.message_ends[number], len(self.histories[number])]
        rid = self.gen.add(prompt, SamplingParams(max_new_tokens=wanted.reply, ignore_eos=True), snapshot_at=ends)
        self.live[rid] = Asked(number, turn, prompt, wanted.reply, self.clock(), self.gen.num_steps)
        self.all.append(self.live[rid])

    def _hear(self, output: Any, now: float) -> None:
        asked = self.live[output.rid]
        asked.tokens += output.token_ids
        asked.times += [now] * len(output.token_ids)
        asked.longest_wait_steps = max(asked.longest_wait_steps, self.gen.num_steps - asked.step)
        asked.step = self.gen.num_steps
        if output.finish_reason is not None:
            asked.finish_reason = output.finish_reason
            del self.live[output.rid]
            self.gen.result(output.rid)
            session, turn = self.sessions[asked.session], asked.turn + 1
            self.histories[asked.session] = asked.prompt + asked.tokens
            if turn < len(session.turns):
                heapq.heappush(self.coming, (now + session.turns[turn].think_s, asked.session, turn))

    def _blocks(self) -> int:
        slot_blocks, total, prefixes = self.gen.pools.layout.blocks_per_page, 0, set()
        for asked in self.live.values():
            name, tokens = self.sessions[asked.session].prefix
            shared = tokens // BLOCK if name in prefixes else 0
            prefixes.add(name)
            total += slot_blocks + -(-(len(asked.prompt) + len(asked.tokens)) // BLOCK) - shared
        return total


def overlap(intervals: list[tuple[float, float]], others: list[tuple[float, float]]) -> tuple[float, float]:
    """Seconds that the union of `intervals` covers, and how many of them `others`, which do not overlap, cover too."""
    union: list[list[float]] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1][1] = max(union[-1][1], end)
        else:
            union.append([start, end])
    both = sum(
        max(0.0, min(end, b) - max(start, a)) for start, end in union for a, b in others if a < end and b > start
    )
    return sum(end - start for start, end in union), both


@dataclass
class Setup:
    """What all runs share."""

    model: KimiK3ForCausalLM
    max_num_seqs: int
    max_tokens_per_step: int
    clock: str
    seed: int
    bounds: Bounds
    options: dict[str, Any] = field(default_factory=dict)  # of the generator

    @property
    def vocab_size(self) -> int:
        return min(self.model.config.text_config.vocab_size, 1000)  # of the demo model: no control tokens

    def run(
        self, what: str, sessions: list[Session], scheduler: str, tier: str, load: float, memory: int | str
    ) -> tuple[Row, Driver]:
        """tier: "off", "host" or "slow". memory: bytes."""
        clock = Clock(self.clock)
        tiers = [] if tier == "off" else [TimedTier(HOST_BYTES, clock, SLOW_READ_S if tier == "slow" else 0.0)]
        gen = KimiK3Generator(
            self.model, max_num_seqs=self.max_num_seqs, max_tokens_per_step=self.max_tokens_per_step, memory=memory,
            scheduler=scheduler, tiers=tiers, **self.options,
        )  # fmt: skip
        with gen:
            done = Driver(gen, sessions, clock, self.vocab_size, self.seed).run()
            stats, seconds = gen.stats(), clock()
        transfer_s, exposed_s = overlap(tiers[0].reads, done.idle) if tiers else (0.0, 0.0)
        served = [a for a in done.all if a.is_served]
        if stats["bytes_total"] > memory:
            raise RuntimeError(f"memory: the pools took {stats['bytes_total']} bytes of {memory}")
        tokens = sum(len(a.tokens) for a in done.all)
        first = [a.first_token_s for a in done.all if a.times]
        gaps = [1e3 * gap for a in done.all for gap in a.gaps_s]
        row = Row(
            what, scheduler, tier, load, len(sessions), len(done.all), len(done.all) - len(served), tokens, seconds,
            tokens / seconds, *(percentile(first, q) for q in (50, 95, 99)), *(percentile(gaps, q) for q in (50, 95, 99)),
            max(first + [gap / 1e3 for gap in gaps]), max(a.longest_wait_steps for a in done.all),
            goodput(served, self.bounds, seconds), sum(map(self.bounds.hold, served)),
            stats["schedule_us"] / 1e6 / stats["step_seconds"], stats["schedule_us"] / stats["steps"], stats["prefill_tokens"],
            stats.get("replayed_tokens", 0), sum(stats.get(f"preemptions_{how}", 0) for how in ("park", "drop")),
            stats["evictions"], stats.get("tiers", {}).get("fetches", 0), transfer_s, exposed_s, stats["bytes_total"],
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )  # fmt: skip
        show(row)
        if row.lost or len(done.all) != sum(len(s.turns) for s in sessions):
            raise RuntimeError(f"{row.lost} of {row.requests} requests lost: {[a.finish_reason for a in done.all]}")
        return row, done


COLUMNS = (
    "what", "scheduler", "tier", "load", "users", "requests", "lost", "tokens_per_s", "first_token_p50_s",
    "first_token_p95_s", "gap_p50_ms", "gap_p95_ms", "gap_p99_ms", "goodput_tokens_per_s", "longest_wait_s",
    "longest_wait_steps", "decision_share", "decision_us", "computed_tokens", "preemptions", "fetches",
    "transfer_s", "exposed_s",
)  # fmt: skip


def show(row: Row | None) -> None:
    """A line of the table; None: its head."""
    if row is None:
        print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
        return
    values = [getattr(row, name) for name in COLUMNS]
    print("| " + " | ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in values) + " |", flush=True)


# The memory wall.


def memory_wall(setup: Setup, args: argparse.Namespace) -> list[Row]:
    layout = PoolLayout(setup.model, BLOCK)
    loads = [float(load) for load in args.loads.split(",")]

    def users(number: int, factor: float = 1.0) -> list[Session]:
        turns = [Turn(int(USER_TOKENS * factor), args.reply_tokens) for _ in range(args.turns)]
        # One after another within a moment: nobody's first turn waits for all others to be put in.
        return [Session(1e-3 * i, (f"user {i}", 16), turns) for i in range(number)]

    pages = args.users * (1 + math.ceil(math.ceil(users(1)[0].num_tokens / BLOCK) / layout.blocks_per_page))
    memory = pages * layout.page_bytes
    if "context" in args.axes and max(loads) >= args.users:  # one chat alone would not fit
        raise SystemExit(f"--raise context: want --users above the highest load, got {args.users} and {max(loads):g}")
    print(f"memory: {memory:,} bytes, {args.users} chats of {users(1)[0].num_tokens} tokens and their states")
    rows: list[Row] = []
    show(None)
    for axis in args.axes.split(","):
        for scheduler in ("fcfs", "dependency_aware"):
            for tier in ("off", "host"):
                for load in loads:
                    if axis == "concurrency":
                        sessions = users(max(1, round(args.users * load)))
                    else:
                        sessions = users(args.users, load)
                    rows.append(setup.run(axis, sessions, scheduler, tier, load, memory)[0])
    twice = min(loads, key=lambda load: abs(load - 2))
    slow = setup.run("concurrency", users(round(args.users * twice)), "dependency_aware", "slow", twice, memory)[0]
    summarize(rows, slow)
    return [*rows, slow]


def summarize(rows: list[Row], slow: Row) -> None:
    ours = [r for r in rows if r.what == rows[0].what and r.scheduler == "dependency_aware"]
    by_tier = {tier: [r for r in ours if r.tier == tier] for tier in ("off", "host")}
    host = by_tier["host"]
    peak = max(r.tokens_per_s for r in host)
    for row in host:
        print(
            f"throughput with the host tier at {row.load:g} x: {row.tokens_per_s / peak:.2f} of its peak (at 2 x: >= 0.7)"
        )
    base = min(by_tier["off"], key=lambda row: abs(row.load - 1))
    bound = 2 * base.first_token_p95_s
    counts = {tier: users_within(found, bound) for tier, found in by_tier.items()}
    print(
        f"users served with a p95 of the first token within {bound:.3g} s: {counts['host']:.1f} with the host tier, "
        f"{counts['off']:.1f} without"
    )
    hidden = 1 - slow.exposed_s / slow.transfer_s if slow.transfer_s else 1.0
    print(
        f"tier of {1e3 * SLOW_READ_S:.0f} ms a read: {hidden:.1%} of {slow.transfer_s:.2f} s of transfers hidden (>= 80 %), "
        f"{slow.fetches} fetches; {slow.tokens_per_s:.1f} tokens/s"
    )
    print(
        f"no memory ran out, no request lost: {sum(r.requests for r in [*rows, slow])} requests in {len(rows) + 1} runs"
    )


def users_within(rows: list[Row], bound: float) -> float:
    """The most users with a p95 of the first token within `bound`, linear between the loads that were run."""
    best, before = 0.0, (0.0, 0.0)
    for row in sorted(rows, key=lambda row: row.load):
        users, p95 = float(row.users), row.first_token_p95_s
        if p95 <= bound:
            best = users
        else:
            if before[1] < bound:
                best = before[0] + (users - before[0]) * (bound - before[1]) / (p95 - before[1])
            break
        before = (users, p95)
    return best


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes_names = list(dict.fromkeys(r.what for r in rows))
    figure, axes = pyplot.subplots(len(axes_names), 3, figsize=(15, 4.5 * len(axes_names)), squeeze=False)
    colours = {"fcfs": "tab:orange", "dependency_aware": "tab:blue"}
    for line, axis in zip(axes, axes_names):
        for scheduler, colour in colours.items():
            for tier, style in (("off", "--"), ("host", "-")):
                found = sorted(
                    (r for r in rows if (r.what, r.scheduler, r.tier) == (axis, scheduler, tier)), key=lambda r: r.load
                )
                loads, name = [r.load for r in found], f"{scheduler}, tier {tier}"
                line[0].plot(loads, [r.tokens_per_s for r in found], style, color=colour, marker="o", label=name)
                for q, width in ((50, 0.7), (95, 2.0), (99, 1.2)):
                    for place, (head, unit) in ((1, ("first_token", "s")), (2, ("gap", "ms"))):
                        values = [getattr(r, f"{head}_p{q}_{unit}") for r in found]
                        line[place].plot(loads, values, style, color=colour, linewidth=width, alpha=q / 99)
        for place, title in zip(line, ("tokens/s", "first token, s: p50 thin, p95 thick, p99", "between tokens, ms")):
            place.set_title(title)
            place.set_xlabel(f"load: wanted memory over memory, by {axis}")
            place.set_xscale("log", base=2)
        for place in line[1:]:
            place.set_yscale("log")
        line[0].set_ylim(bottom=0)
        line[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


# The two schedulers.

GAP_BOUNDS = (1, 1.25, 1.5, 2, 3, 5)  # one bound may lie just beside what all steps take


def calibrate(setup: Setup) -> tuple[float, float, float]:
    """A prefill token, a decode step of 8 rows, and one beside a block of prefill: medians in the clock's seconds."""
    clock, rng = Clock(setup.clock), random.Random(0)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(setup.vocab_size) for _ in range(tokens)]

    def timed(run: Callable[[], object]) -> float:
        start = clock()
        run()
        return clock() - start

    with KimiK3Generator(setup.model, max_num_seqs=9, num_blocks=64, prefix_cache=False) as gen:
        alone = [timed(lambda: gen.generate([prompt(512)], SamplingParams(max_new_tokens=1))) for _ in range(4)]
        for _ in range(8):
            gen.add(prompt(BLOCK), SamplingParams(max_new_tokens=32, ignore_eos=True))
        steps = [timed(gen.step) for _ in range(15)]
        beside = []
        for _ in range(6):
            gen.add(prompt(BLOCK), SamplingParams(max_new_tokens=1, ignore_eos=True))
            beside.append(timed(gen.step))
    return sorted(alone[1:])[1] / 512, sorted(steps[3:])[6], sorted(beside[1:])[2]


def compare(setup: Setup, args: argparse.Namespace) -> list[Row]:
    token_s, step_s, beside_s = calibrate(setup)
    setup.bounds = Bounds(15 * beside_s, 1.25 * beside_s)
    print(f"prefill {1 / token_s:.0f} tokens/s, a step of 8 rows {1e3 * step_s:.1f} ms, with a block of prefill "
          f"{1e3 * beside_s:.1f} ms; goodput: first token within {setup.bounds.first_token_s:.2f} s, p95 between tokens "
          f"within {1e3 * setup.bounds.gap_s:.0f} ms")  # fmt: skip
    layout = PoolLayout(setup.model, BLOCK)
    rows: list[Row] = []
    show(None)
    for name in args.traces.split(","):
        sessions = TRACES[name](random.Random(args.seed), args.sessions)
        shared = sum({s.prefix[0]: s.prefix[1] for s in sessions}.values())
        turns = [turn for s in sessions for turn in s.turns]
        work_s = (shared + sum(t.user for t in turns)) * token_s + sum(t.reply for t in turns) * step_s / 8
        span = work_s / UTILISATION
        for session in sessions:
            session.arrival_s *= span
            for turn in session.turns:
                turn.think_s *= span
        most = sum(s.num_tokens // BLOCK + 1 for s in sessions) + layout.blocks_per_page * (2 * len(turns) + 8)
        plenty = most * layout.block_bytes
        free, done = setup.run(f"{name}, enough", sessions, "fcfs", "off", 0.0, plenty)
        rows.append(free)
        pages = max(math.floor(done.peak_blocks / OVERSUBSCRIPTION / layout.blocks_per_page), 4)
        longest = max(s.num_tokens for s in sessions)
        pages = max(pages, 2 + math.ceil((longest / BLOCK + 1) / layout.blocks_per_page))
        load = done.peak_blocks / layout.blocks_per_page / pages
        pair = [
            setup.run(name, sessions, scheduler, "host", load, pages * layout.page_bytes)
            for scheduler in ("fcfs", "dependency_aware")
        ]
        fcfs, ours = (row for row, _ in pair)
        rows += [fcfs, ours]
        gap = ours.gap_p95_ms / fcfs.gap_p95_ms - 1
        theirs, own = fcfs.goodput_tokens_per_s, ours.goodput_tokens_per_s
        more = own / theirs - 1 if theirs else math.inf if own else 0.0
        print(
            f"{name} at {load:.2f} x: p95 between tokens {ours.gap_p95_ms:.0f} ms against {fcfs.gap_p95_ms:.0f} "
            f"({gap:+.0%}), goodput {own:.1f} against {theirs:.1f} tokens/s "
            f"({more:+.0%}), all {ours.tokens_per_s:.0f} against {fcfs.tokens_per_s:.0f} tokens/s; decisions "
            f"{ours.decision_us:.0f} us, {ours.decision_share:.2%} of the steps; longest wait {ours.longest_wait_s:.2f} s, "
            f"{ours.longest_wait_steps} steps, against {fcfs.longest_wait_s:.2f} s, {fcfs.longest_wait_steps} steps"
        )
        by_bound = []
        for factor in GAP_BOUNDS:
            bounds = Bounds(setup.bounds.first_token_s, factor * beside_s)
            theirs, own = (goodput(done.all, bounds, row.seconds) for row, done in pair)
            by_bound.append(f"{factor:g}: {own:.1f} against {theirs:.1f}")
        print(f"{name}: goodput by the bound between tokens, in steps with a block of prefill: {', '.join(by_bound)}")
    return rows


def write_csv(rows: list[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = [f.name for f in fields(Row)]
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in rows)


def main(argv: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(kimi_k3.__file__).parent / "demo")
    parser.add_argument("--out", type=Path, required=True, help="folder of the CSV and the PNG")
    parser.add_argument("--loads", default="0.5,1,2,4")
    parser.add_argument("--raise", dest="axes", default="concurrency,context")
    parser.add_argument("--users", type=int, default=8, help="chats that memory holds")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--reply-tokens", type=int, default=24, help="of each turn")
    parser.add_argument("--compare", action="store_true", help="the schedulers on traces of arrivals")
    parser.add_argument("--traces", default="chat,bursts,mixed")
    parser.add_argument("--sessions", type=int, default=40, help="of each trace")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if set(args.axes.split(",")) - {"concurrency", "context"} or set(args.traces.split(",")) - set(TRACES):
        raise SystemExit(f"want --raise of concurrency, context and --traces of {', '.join(TRACES)}")
    is_plotted = not args.compare and find_spec("matplotlib") is not None
    if not (args.compare or is_plotted):
        print('the CSV alone: no PNG is drawn without matplotlib (pip install "kimi-k3[plot]")')
    args.out.mkdir(parents=True, exist_ok=True)
    model = KimiK3ForCausalLM.from_pretrained(args.model, progress=False).eval()
    setup = Setup(model, MAX_NUM_SEQS, MAX_TOKENS_PER_STEP, args.clock, args.seed, Bounds(math.inf, math.inf))
    if args.clock == "cpu":
        torch.set_num_threads(1)
    rows = compare(setup, args) if args.compare else memory_wall(setup, args)
    name = "compare_schedulers" if args.compare else "stress_memory_wall"
    write_csv(rows, args.out / f"{name}.csv")
    if is_plotted:
        plot([r for r in rows if r.tier != "slow"], args.out / f"{name}.png")
    return rows


if __name__ == "__main__":
    main()
