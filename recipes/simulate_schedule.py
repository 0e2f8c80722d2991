"""Both schedulers on the same arrivals at the size of Kimi K3, with step times from bytes and flops instead of a model.

    python recipes/simulate_schedule.py [--traces chat,bursts,mixed,talk] [--oversubscription 2] [--experts zipf:0.5] [--json]
    python recipes/simulate_schedule.py --compose trace.jsonl        # does it help to choose a batch by its experts?

One group of `tp` ranks out of `ep` is simulated; the other groups are taken to carry the same load. Memory is the most
that all requests together held at any time of a run where nothing was short, divided by --oversubscription. Blocks of 64
latents, KDA slots, snapshots at message ends, prefix sharing, parking and a host tier behave as in the engine; the stride
of snapshots inside long messages is left out. Times are those of an assumed machine (`Machine`): compare, do not quote.
`fcfs_512` is fcfs with 512 instead of 2,048 tokens a step. --experts: each expert's share of a layer's tokens, a Zipf law
in another order for each layer, or a recording (kimi_k3/parallel/traces.py tells the forms; a short one hides rare experts).
One of K3 is taken as it is. Of a model of other sizes, such as the demo model by `gen.record_trace`, only the shape: each
layer's experts sorted by popularity, stretched to 896 along the cumulative share, of which a token draws 16 without
replacement; in another order for each layer, the recorded layers one after another over K3's 92.
"""

import argparse
import json
import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kimi_k3.engine.scheduler import SCHEDULERS, Candidate, Pace, Resources, Schedule
from kimi_k3.parallel.traces import read_trace

BLOCK = 64
KDA_STATE_BYTES = 69 * 96 * 128 * 128 * 4
LATENT_BYTES = 24 * 576 * 2  # of one token
EXPERT_BYTES, EXPERT_WEIGHTS = 17_547_264, 3 * 3072 * 3584
TRUNK_BYTES, TRUNK_WEIGHTS = 112e9, 56e9
MOE_LAYERS, EXPERTS, TOPK, LAYERS, HIDDEN = 92, 896, 16, 93, 7168
DISPATCH_BYTES = 92 * 16 * 3584 * 3  # of one token: one byte a number out, two back


# What a step costs.


@dataclass(frozen=True)
class Machine:
    """Assumed, per rank: 80 % of 8 TB/s, half of 2.25 Pflop/s, one link to all ranks at 450 GB/s, host memory at 50 GB/s."""

    tp: int = 8
    ep: int = 64
    memory_bytes_per_s: float = 6.4e12
    flops_per_s: float = 1.1e15
    link_bytes_per_s: float = 450e9
    tier_bytes_per_s: float = 50e9
    tier_latency_s: float = 0.001
    layer_overhead_s: float = 40e-6


class ExpertLoad:
    """What routing makes of a step's tokens, from each expert's share of the tokens of a layer, [layers, experts]."""

    def __init__(self, share_LE: np.ndarray, machine: Machine) -> None:
        per_rank_LRE = share_LE.reshape(len(share_LE), machine.ep, -1)
        self.log_tokens = np.log(np.unique(np.round(np.geomspace(1, 1 << 17, 40))))
        rng, table = np.random.default_rng(0), []
        for tokens in np.exp(self.log_tokens):
            hit_LRE = 1 - (1 - np.minimum(per_rank_LRE, 1)) ** tokens
            counts_NLR = rng.poisson(tokens * per_rank_LRE.sum(2), (8, *per_rank_LRE.shape[:2]))
            busiest = (counts_NLR.max(2) / np.maximum(counts_NLR.mean(2), 1e-9)).mean()
            table.append((hit_LRE.sum((1, 2)).mean(), hit_LRE.sum(2).max(1).mean(), busiest))
        self.table = np.array(table)

    def at(self, tokens: int) -> tuple[float, ...]:
        """Of a layer: distinct experts hit, those read by the rank with most of them, the busiest rank's tokens over mean."""
        return tuple(float(np.interp(math.log(max(tokens, 1)), self.log_tokens, column)) for column in self.table.T)


def step_seconds(
    machine: Machine, experts: ExpertLoad, rows: int, piece_tokens: int, pieces: int, context: int, pairs: int
) -> float:
    """Seconds of a step: `rows` decode tokens over `context` tokens of latents, prefill pieces with `pairs` of attention."""
    tokens = rows + piece_tokens
    _, read, busiest = experts.at(tokens * machine.ep // machine.tp)
    trunk = max(
        TRUNK_BYTES / machine.tp / machine.memory_bytes_per_s,
        2 * TRUNK_WEIGHTS * tokens / machine.tp / machine.flops_per_s,
    )
    routed_tokens = tokens / machine.tp * TOPK * busiest  # of the busiest rank, a layer
    routed = MOE_LAYERS * max(
        read * EXPERT_BYTES / machine.memory_bytes_per_s, 2 * EXPERT_WEIGHTS * routed_tokens / machine.flops_per_s
    )
    states = 2 * KDA_STATE_BYTES / machine.tp * (rows + pieces) / machine.memory_bytes_per_s
    latents = LATENT_BYTES * context / machine.memory_bytes_per_s
    attention = pairs * 24 * 96 * 2 * (576 + 512) / machine.tp / machine.flops_per_s
    links = (tokens * 4 * LAYERS * HIDDEN + tokens / machine.tp * DISPATCH_BYTES) / machine.link_bytes_per_s
    return trunk + routed + states + latents + attention + links + LAYERS * machine.layer_overhead_s


# Arrivals.


@dataclass
class Turn:
    user: int  # tokens
    reply: int
    think_s: float  # between the last reply and this turn


@dataclass
class Session:
    arrival_s: float
    prefix: tuple[str, int]  # what several share: a name and tokens
    turns: list[Turn]
    priority: int = 0


def _tokens(rng: random.Random, median: int, spread: float, most: int) -> int:
    return max(8, min(most, int(rng.lognormvariate(math.log(median), spread))))


def chat(rng: random.Random, seconds: float) -> list[Session]:
    """Coding chats under 8 system prompts, one of them in half of the chats; five new prompt tokens for each generated.

    (Recorded agents read 131 tokens for each they write, 94 % of them seen before: 7.6 new ones.)
    """
    systems = [(f"system {i}", rng.randint(1000, 6000)) for i in range(8)]
    out, now = [], 0.0
    while (now := now + rng.expovariate(3.0)) < seconds:
        turns = [
            Turn(_tokens(rng, 1000, 1.0, 16000), _tokens(rng, 250, 0.7, 2000), rng.uniform(3, 10))
            for _ in range(rng.randint(1, 4))
        ]
        out.append(Session(now, systems[min(int(rng.paretovariate(1.0)) - 1, 7)], turns))
    return out


def bursts(rng: random.Random, seconds: float) -> list[Session]:
    """Every 15 s some 50 questions at once about one new document of 2,000 to 8,000 tokens; two other requests a second."""
    out, now = [], 0.0
    while now < seconds:
        document = (f"document {now}", rng.randint(2000, 8000))
        for _ in range(rng.randint(40, 60)):
            turn = Turn(_tokens(rng, 200, 0.8, 2000), _tokens(rng, 250, 0.6, 2000), 0)
            out.append(Session(now + rng.uniform(0, 0.2), document, [turn]))
        for _ in range(30):
            turn = Turn(_tokens(rng, 1500, 0.8, 16000), _tokens(rng, 250, 0.6, 2000), 0)
            out.append(Session(now + rng.uniform(0, 15), ("all", 16), [turn]))
        now += 15
    return out


def mixed(rng: random.Random, seconds: float) -> list[Session]:
    """One request in eight reads 8,000 to 64,000 tokens, the others some 400; nothing shared but 16 tokens."""
    out, now = [], 0.0
    while (now := now + rng.expovariate(4.0)) < seconds:
        if rng.random() < 0.125:
            turn = Turn(int(rng.triangular(8000, 64000, 16000)), _tokens(rng, 600, 0.5, 3000), 0)
        else:
            turn = Turn(_tokens(rng, 400, 0.8, 3000), _tokens(rng, 400, 0.7, 3000), 0)
        out.append(Session(now, ("all", 16), [turn]))
    return out


def talk(rng: random.Random, seconds: float) -> list[Session]:
    """Conversation: less than one new prompt token for each generated one."""
    systems = [(f"system {i}", rng.randint(800, 4000)) for i in range(8)]
    out, now = [], 0.0
    while (now := now + rng.expovariate(8.0)) < seconds:
        turns = [
            Turn(_tokens(rng, 120, 0.8, 2000), _tokens(rng, 500, 0.7, 3000), rng.uniform(3, 15))
            for _ in range(rng.randint(1, 4))
        ]
        out.append(Session(now, systems[min(int(rng.paretovariate(1.0)) - 1, 7)], turns))
    return out


TRACES: dict[str, Callable[[random.Random, float], list[Session]]] = {
    "chat": chat,
    "bursts": bursts,
    "mixed": mixed,
    "talk": talk,
}


# Memory, as the engine keeps it.


@dataclass(eq=False)
class Node:
    """The end of a message on a path of messages: its latents are kept or not, a state at its end is kept or not."""

    parent: "Node | None"
    end: int
    blocks: int = 0
    is_kept: bool = False
    has_state: bool = False
    pins: int = 0  # live requests that read its latents
    kept_children: int = 0
    used: int = 0
    children: dict[str, "Node"] = field(default_factory=dict)

    def path(self) -> "list[Node]":
        out, node = [], self
        while node.parent is not None:
            out.append(node)
            node = node.parent
        return out[::-1]


@dataclass(eq=False)
class Request:
    rid: int
    session: Session
    number: int
    turn: int
    path: list[Node]  # of its prompt
    prompt: int
    arrived_s: float
    generated: int = 0
    done: int = 0
    is_running: bool = False
    has_prefilled: bool = False
    base: Node | None = None  # what it reads beside its own blocks; pinned
    covered: int = 0  # blocks of its table that `base` holds
    private: int = 0
    furthest: int = 0  # token that it has computed before
    parked: Node | None = None
    fetch: tuple[Node, float] | None = None  # what is read from the tier, and when it is there
    waits_for: int | None = None
    last_step: int = 0
    admitted_step: int = 0
    last_token_s: float = 0.0
    first_token_s: float = 0.0
    gaps: list[float] = field(default_factory=list)
    last_run_s: float = 0.0

    @property
    def total(self) -> int:
        return self.prompt + self.generated


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


class Simulation:
    """Runs one trace to its end under one scheduler."""

    def __init__(
        self, sessions: list[Session], schedule: Callable[[list[Candidate], Resources], Schedule], machine: Machine,
        experts: ExpertLoad, total_blocks: int, tier_bytes: float, max_num_seqs: int = 256, max_tokens: int = 2048,
    ) -> None:  # fmt: skip
        self.schedule, self.machine, self.experts = schedule, machine, experts
        self.total_blocks, self.max_num_seqs, self.max_tokens = total_blocks, max_num_seqs, max_tokens
        self.block_bytes = LATENT_BYTES * BLOCK
        self.slot_blocks = -(-KDA_STATE_BYTES // machine.tp // self.block_bytes)
        self.tier_bytes, self.tier, self.tier_free_s = tier_bytes, OrderedDict[Node, float](), 0.0
        self.tier_used = 0.0
        self.root = Node(None, 0, is_kept=True)
        self.states: set[Node] = set()
        self.used = self.live_blocks = self.peak_blocks = 0
        self.now = self.busy_s = self.decide_s = 0.0
        self.num_steps = self.next_rid = 0
        self.coming = sorted(((s.arrival_s, n, 0) for n, s in enumerate(sessions)), reverse=True)
        self.sessions, self.histories = sessions, [self._child(self.root, s.prefix[0], s.prefix[1]) for s in sessions]
        self.live: dict[int, Request] = {}
        self.finished: list[Request] = []
        self.counts = dict.fromkeys(["preempted", "parked", "computed", "replayed", "fetched", "reused", "evicted"], 0)
        self.longest_wait_s = 0.0
        self.pace = Pace()
        self.step_stats: list[tuple[int, float, float]] = []

    @staticmethod
    def _child(parent: Node, name: str, tokens: int) -> Node:
        return parent.children.setdefault(name, Node(parent, parent.end + tokens))

    # Memory.

    def _pin(self, node: Node | None, by: int) -> None:
        for n in node.path() if node is not None else ():
            if n.pins == 0 and by > 0:
                self.live_blocks += n.blocks
            n.pins += by
            if n.pins == 0:
                self.live_blocks -= n.blocks
        if by < 0 and node is not None:
            self._free_orphans(node)

    def _keep(self, node: Node, blocks: int) -> None:
        node.is_kept, node.blocks = True, blocks
        self.used += blocks
        if node.parent is not None:
            node.parent.kept_children += 1

    def _keep_state(self, node: Node) -> None:
        if not node.has_state:
            node.has_state = True
            self.states.add(node)
            self.used += self.slot_blocks
        node.used = self.num_steps

    def _free_orphans(self, node: Node | None) -> None:
        """Latents that lead to no state and that nobody reads."""
        while node is not None and node.parent is not None and node.is_kept:
            if node.has_state or node.kept_children or node.pins:
                return
            node.is_kept = False
            self.used -= node.blocks
            node.parent.kept_children -= 1
            node = node.parent

    def _evict(self) -> None:
        """The state whose loss costs least for its bytes and age, until all fits."""
        while self.used > self.total_blocks:
            assert self.states, "a schedule asked for more memory than there is"

            def value(node: Node) -> float:
                before, saved = node.parent, node.end
                while before is not None and not before.has_state:
                    before = before.parent
                saved -= before.end if before is not None else 0
                return saved / (self.slot_blocks + node.blocks) / (1 + self.num_steps - node.used)

            node = min(self.states, key=lambda n: (value(n), n.end, n.used))
            self.states.discard(node)
            node.has_state = False
            self.used -= self.slot_blocks
            self.counts["evicted"] += 1
            if self.tier_bytes and node not in self.tier:
                size = self.slot_blocks * self.block_bytes + node.blocks * self.block_bytes
                self.tier[node] = size
                self.tier_used += size
                self.tier_free_s = max(self.tier_free_s, self.now) + size / self.machine.tier_bytes_per_s
                while self.tier_used > self.tier_bytes:
                    self.tier_used -= self.tier.popitem(last=False)[1]
            self._free_orphans(node)

    def _hit(self, request: Request) -> Node:
        nodes = [*request.path, request.parked] if request.parked is not None else request.path
        return next((n for n in reversed(nodes) if n.has_state), self.root)

    def _release(self, request: Request) -> None:
        self._pin(request.base, -1)
        self.used -= request.private + self.slot_blocks
        self.live_blocks -= request.private + self.slot_blocks
        request.base, request.private, request.is_running, request.done = None, 0, False, 0

    def _publish(self, request: Request, nodes: Iterable[Node]) -> None:
        """Hand over latents and states of `nodes`, the next ones on its path; what another handed over first stays double."""
        for node in nodes:
            if not node.is_kept and node.parent.is_kept and node.parent is request.base:
                blocks = blocks_of(node.end) - request.covered
                request.private -= blocks
                request.covered += blocks
                self.live_blocks -= blocks
                self.used -= blocks
                self._keep(node, blocks)
                node.pins += 1
                self.live_blocks += blocks
                request.base = node
            if node.is_kept:
                self._keep_state(node)

    # A step.

    def _candidates(self) -> list[Candidate]:
        leaders: dict[Node, int] = {}
        for r in self.live.values():
            if r.is_running and not r.has_prefilled:
                leaders.update({n: r.rid for n in r.path if n not in leaders})
        out = []
        for r in self.live.values():
            if r.is_running:
                is_decoding = r.has_prefilled and r.total - r.done == 1
                saved = r.base.end if r.base is not None else 0
                out.append(
                    Candidate(
                        r.rid, r.rid, r.session.priority, True, r.done, r.total, is_decoding,
                        r.covered + r.private, r.private, 0, None, "none", 0, self._limit(r) - r.generated,
                        r.done - saved, self.num_steps - r.last_step, (), self.num_steps - r.admitted_step,
                    )
                )  # fmt: skip
                continue
            hit = self._hit(r)
            fetch, fetch_bytes, reuse = self._fetch_state(r, hit)
            waits_for = None
            if not r.has_prefilled:
                waits_for = next(
                    (leaders[n] for n in reversed(r.path) if n in leaders and n.end >= reuse + BLOCK), None
                )
                if waits_for is None:
                    leaders.update({n: r.rid for n in r.path if n not in leaders})
            target = r.fetch[0] if fetch == "ready" and r.fetch is not None else hit
            held = target.end // BLOCK - sum(
                n.blocks if n.is_kept else blocks_of(n.end) - blocks_of(n.parent.end)
                for n in target.path()
                if not n.pins
            )
            out.append(
                Candidate(
                    r.rid, r.rid, r.session.priority, False, 0, r.total, False, held, 0,
                    min(reuse, r.total - 1), waits_for, fetch, fetch_bytes, self._limit(r) - r.generated, 0,
                    self.num_steps - r.last_step,
                )
            )  # fmt: skip
        return out

    @staticmethod
    def _limit(request: Request) -> int:
        return 4096  # what clients ask for at most; how long a reply gets is not known before

    def _fetch_state(self, request: Request, hit: Node) -> tuple[str, int, int]:
        if request.fetch is not None:
            node, ready_s = request.fetch
            if node.end <= hit.end:
                request.fetch = None
            else:
                return ("ready", 0, node.end) if ready_s <= self.now else ("pending", 0, hit.end)
        if self.tier:
            nodes = [*request.path, request.parked] if request.parked is not None else request.path
            for node in reversed(nodes):
                if node.end <= hit.end + BLOCK:
                    break
                if node in self.tier:
                    missing = sum(blocks_of(n.end) - blocks_of(n.parent.end) for n in node.path() if not n.is_kept)
                    return "absent", (self.slot_blocks + missing) * self.block_bytes, hit.end
        return "none", 0, hit.end

    def _admit(self, request: Request) -> None:
        hit = self._hit(request)
        if request.fetch is not None and request.fetch[1] <= self.now and request.fetch[0].end > hit.end:
            hit = request.fetch[0]
            for node in hit.path():
                if not node.is_kept:
                    self._keep(node, blocks_of(node.end) - blocks_of(node.parent.end))
            self.counts["fetched"] += 1
        request.fetch = None
        for node in hit.path():
            node.used = self.num_steps
        request.base, request.is_running = hit, True
        self._pin(hit, 1)
        request.covered = hit.end // BLOCK
        self.used += self.slot_blocks
        self.live_blocks += self.slot_blocks
        request.done = min(hit.end, request.total - 1)
        self.counts["reused"] += request.done
        request.admitted_step = self.num_steps

    def _preempt(self, request: Request, how: str) -> None:
        self.counts["preempted"] += 1
        if how == "park" and request.done > request.base.end:
            self.counts["parked"] += 1
            parked = Node(request.base, request.done)
            private, request.private = request.private, 0
            self.live_blocks -= private
            self.used -= private
            self._keep(parked, private)
            self._keep_state(parked)
            request.parked = parked
        request.furthest = max(request.furthest, request.done)
        self._release(request)
        request.last_step = self.num_steps

    def step(self) -> None:
        while self.coming and self.coming[-1][0] <= self.now:
            self._arrive(*self.coming.pop())
        if not self.live:
            self.now = self.coming[-1][0]
            return
        candidates = self._candidates()
        resources = Resources(
            self.total_blocks - self.live_blocks, self.slot_blocks, self.total_blocks, BLOCK, self.max_num_seqs,
            self.max_tokens, stall_tokens=self.pace.tokens(),
        )  # fmt: skip
        started = time.thread_time()
        plan = self.schedule(candidates, resources)
        self.decide_s += time.thread_time() - started
        for rid, how in plan.preempt:
            self._preempt(self.live[rid], how)
        for rid in plan.prefetch:
            by_rid = next(c for c in candidates if c.rid == rid)
            self._start_fetch(self.live[rid], by_rid.fetch_bytes)
        rows = tokens = pieces = context = pairs = 0
        for rid, count in plan.run:
            r = self.live[rid]
            if not r.is_running:
                self._admit(r)
            new = max(0, blocks_of(r.done + count) - r.covered - r.private)
            r.private += new
            self.used += new
            self.live_blocks += new
            self.longest_wait_s = max(self.longest_wait_s, self.now - r.last_run_s)
            if count == 1:
                rows, context = rows + 1, context + r.done
            else:
                tokens, pieces, context = tokens + count, pieces + 1, context + r.done
                pairs += count * r.done + count * count // 2
                self.counts["computed"] += count
            self.counts["replayed"] += max(0, min(r.done + count, r.furthest) - r.done)
        self._evict()
        self.peak_blocks = max(self.peak_blocks, self.live_blocks)
        seconds = 0.001
        if plan.run:
            seconds = step_seconds(self.machine, self.experts, rows, tokens, pieces, context, pairs)
            distinct, _, busiest = self.experts.at((rows + tokens) * self.machine.ep // self.machine.tp)
            self.step_stats.append((rows + tokens, distinct, busiest))
            self.pace.add(rows, tokens, seconds)
        elif self.coming and not any(c.fetch == "pending" for c in candidates):
            seconds = max(seconds, self.coming[-1][0] - self.now)
        self.now += seconds
        self.busy_s += seconds if plan.run else 0
        for rid, count in plan.run:
            self._advance(self.live[rid], count)
        self._evict()
        self.num_steps += 1

    def _arrive(self, at: float, number: int, turn: int) -> None:
        session, history = self.sessions[number], self.histories[number]
        prompt = self._child(history, f"{number} user {turn}", session.turns[turn].user)
        r = Request(
            self.next_rid, session, number, turn, prompt.path(), prompt.end, at, last_step=self.num_steps, last_run_s=at
        )
        self.live[r.rid] = r
        self.next_rid += 1

    def _start_fetch(self, request: Request, size: int) -> None:
        node = next(
            n
            for n in reversed([*request.path, request.parked] if request.parked is not None else request.path)
            if n in self.tier
        )
        self.tier.move_to_end(node)
        start = max(self.now, self.tier_free_s)
        self.tier_free_s = start + size / self.machine.tier_bytes_per_s
        request.fetch = (node, self.tier_free_s + self.machine.tier_latency_s)

    def _advance(self, r: Request, count: int) -> None:
        r.done += count
        r.last_step, r.last_run_s = self.num_steps, self.now
        if r.done < r.total:
            return
        if not r.has_prefilled:
            r.has_prefilled = True
            self._publish(r, [n for n in r.path if n.end > r.base.end])
        if r.first_token_s:
            r.gaps.append(self.now - r.last_token_s)
        else:
            r.first_token_s = self.now
        r.last_token_s = self.now
        r.generated += 1
        if r.generated < r.session.turns[r.turn].reply:
            return
        reply = self._child(r.path[-1], "reply", r.generated)
        if r.base is r.path[-1]:
            self._publish(r, [reply])
        self._release(r)
        del self.live[r.rid]
        self.finished.append(r)
        self.histories[r.number] = reply
        if r.turn + 1 < len(r.session.turns):
            self.coming.append((self.now + r.session.turns[r.turn + 1].think_s, r.number, r.turn + 1))
            self.coming.sort(reverse=True)

    def run(self) -> None:
        while self.live or self.coming:
            self.step()

    def report(self, first_token_bound_s: float, gap_bound_s: float) -> dict[str, float]:
        gaps = np.array([g for r in self.finished for g in r.gaps])
        first = np.array([r.first_token_s - r.arrived_s for r in self.finished])
        tokens = sum(r.generated for r in self.finished)
        is_good = [
            f <= first_token_bound_s and np.percentile(r.gaps or [0], 95) <= gap_bound_s
            for r, f in zip(self.finished, first)
        ]
        sizes, distinct, busiest = map(np.array, zip(*self.step_stats))
        return {
            "requests": len(self.finished), "first_token_p50_s": float(np.percentile(first, 50)),
            "first_token_p95_s": float(np.percentile(first, 95)),
            **{f"gap_p{q}_ms": 1e3 * float(np.percentile(gaps, q)) for q in (50, 95, 99)},
            "tokens_per_s": tokens / self.now,
            "goodput_tokens_per_s": sum(r.generated for r, ok in zip(self.finished, is_good) if ok) / self.now,
            "within_bounds": float(np.mean(is_good)), **self.counts, "longest_wait_s": self.longest_wait_s,
            "step_ms": 1e3 * self.busy_s / len(self.step_stats), "steps": self.num_steps,
            "decision_share": self.decide_s / self.busy_s, "tokens_per_step": float(sizes.mean()),
            "distinct_experts": float(distinct.mean()), "busiest_rank": float(busiest.mean()), "seconds": self.now,
        }  # fmt: skip


# Routing.


def zipf_shares(exponent: float, seed: int) -> np.ndarray:
    """[layers, experts]: shares by rank ** -exponent, none above 1, that add up to 16 a layer."""
    rng, share = np.random.default_rng(seed), drawn_shares(1 / np.arange(1, EXPERTS + 1) ** exponent)
    return np.stack([rng.permutation(share) for _ in range(MOE_LAYERS)])


def drawn_shares(weights: np.ndarray) -> np.ndarray:
    """[experts]: how often a token has each of 16 experts drawn by weights > 0 without replacement: none above 1."""
    share, is_full = weights / weights.sum() * TOPK, np.zeros(EXPERTS, bool)
    while (share > 1).any():  # what the first ones cannot take goes to the others
        is_full |= share >= 1
        rest = weights * ~is_full
        share = np.where(is_full, 1, rest / rest.sum() * (TOPK - is_full.sum()))
    return share


def read_routing(path: Path, option: str, least: int) -> tuple[np.ndarray, int]:
    """[layers, tokens, chosen] expert numbers, and of how many; the layer with fewest tokens counts. It wants `least`."""
    try:
        trace = read_trace(path, topk=TOPK)
        if trace.num_tokens < least:
            raise ValueError(f"{trace.num_tokens} tokens, want at least {least}")
        return np.stack([trace.topk_ids(layer)[: trace.num_tokens] for layer in trace.layers]), trace.num_experts
    except (OSError, ValueError) as error:
        raise SystemExit(f"{option}: want a recording of routing, got {path}: {error}") from error


def expert_shares(text: str, seed: int) -> np.ndarray:
    """What --experts asks for, [layers, experts]."""
    kind, _, value = text.partition(":")
    if kind == "zipf":
        try:
            return zipf_shares(float(value), seed)
        except ValueError:
            raise SystemExit(f"--experts: want a number as exponent, such as zipf:0.5, got {text!r}") from None
    if not Path(text).is_file():
        raise SystemExit(f"--experts: want zipf:EXPONENT or the file of a recording, got {text!r}")
    return recorded_shares(Path(text), seed)


def recorded_shares(path: Path, seed: int) -> np.ndarray:
    """[layers, experts] as recorded, or where K3's sizes are others, of the recorded shape."""
    ids_LTA, experts = read_routing(path, "--experts", 1)
    share_LE = np.stack([np.bincount(ids.ravel(), minlength=experts) / len(ids) for ids in ids_LTA])
    if (experts, ids_LTA.shape[2]) == (EXPERTS, TOPK):
        return share_LE
    rng, layers = np.random.default_rng(seed), len(share_LE)
    cumulative_LE = np.pad(np.sort(share_LE)[:, ::-1].cumsum(1), ((0, 0), (1, 0)))
    places = np.linspace(0, experts, EXPERTS + 1)
    shapes = [np.diff(np.interp(places, np.arange(experts + 1), row)) for row in cumulative_LE]
    shares = [drawn_shares(np.maximum(shape, 1e-9)) for shape in shapes]  # so few may be chosen that they are not 16
    return np.stack([rng.permutation(shares[layer * layers // MOE_LAYERS]) for layer in range(MOE_LAYERS)])


def compose(path: Path, ranks: int, batch: int, trials: int, seed: int, history: int = 16) -> dict[str, float]:
    """Busiest rank over mean, of the next tokens of `batch` out of 2 x batch pseudo-requests (places in the recording).

    random: any; predicted: chosen one by one for the least load of the busiest rank, summed over layers, by the last
    `history` tokens of each; oracle: the same by the next tokens themselves.
    """
    ids_LTA, _ = read_routing(path, "--compose", history + 1)
    layers, tokens, _ = ids_LTA.shape
    per_rank = -(-(int(ids_LTA.max()) + 1) // ranks)
    load_TLR = np.zeros((tokens, layers, ranks))
    for layer in range(layers):
        for token in range(tokens):
            load_TLR[token, layer] = np.bincount(ids_LTA[layer, token] // per_rank, minlength=ranks)
    rng, ratios = np.random.default_rng(seed), {"random": [], "predicted": [], "oracle": []}

    def pick(loads_NLR: np.ndarray) -> list[int]:
        chosen, total_LR = [], np.zeros((layers, ranks))
        for _ in range(batch):
            cost_N = (total_LR + loads_NLR).max(2).sum(1)
            cost_N[chosen] = np.inf
            chosen.append(int(cost_N.argmin()))
            total_LR += loads_NLR[chosen[-1]]
        return chosen

    for _ in range(trials):
        places = rng.choice(np.arange(history, tokens), 2 * batch, replace=tokens - history < 2 * batch)
        next_NLR = load_TLR[places]
        past_NLR = np.stack([load_TLR[place - history : place].mean(0) for place in places])
        for name, chosen in (("random", list(range(batch))), ("predicted", pick(past_NLR)), ("oracle", pick(next_NLR))):
            total_LR = next_NLR[chosen].sum(0)
            ratios[name].append((total_LR.max(1) / total_LR.mean(1)).mean())
    return {name: float(np.mean(values)) for name, values in ratios.items()}


# The table.

POLICIES = (*SCHEDULERS, *(f"{name}_512" for name in SCHEDULERS))
COLUMNS = {
    "first_token_p50_s": "first p50 s", "first_token_p95_s": "p95 s", "gap_p50_ms": "gap p50 ms", "gap_p95_ms": "p95 ms",
    "gap_p99_ms": "p99 ms", "tokens_per_s": "tokens/s", "goodput_tokens_per_s": "goodput", "preempted": "preempted",
    "computed": "prefill", "replayed": "replayed", "fetched": "fetched", "longest_wait_s": "longest wait s",
    "tokens_per_step": "tokens/step", "distinct_experts": "experts/layer", "busiest_rank": "busiest/mean",
    "step_ms": "step ms", "decision_share": "decision",
}  # fmt: skip


def show(rows: list[dict], has_header: bool) -> None:
    if has_header:
        print("| trace | scheduler | " + " | ".join(COLUMNS.values()) + " |\n" + "|---" * (len(COLUMNS) + 2) + "|")
    for row in rows:
        cells = [
            f"{row[c]:.2%}" if c == "decision_share" else f"{row[c]:,.0f}" if abs(row[c]) >= 100 else f"{row[c]:.3g}"
            for c in COLUMNS
        ]
        print(f"| {row['trace']} | {row['scheduler']} | " + " | ".join(cells) + " |", flush=True)


def simulate(
    trace: str, policies: list[str], oversubscription: float, seconds: float, tier_bytes: float, experts: ExpertLoad,
    machine: Machine, bounds: tuple[float, float], seed: int,
) -> list[dict]:  # fmt: skip
    """A row for each policy, the first for memory without end."""
    sessions = TRACES[trace](random.Random(seed), seconds)
    if not sessions:
        raise SystemExit(f"--seconds: want time for an arrival of {trace}, got {seconds:g}")
    free = Simulation(sessions, SCHEDULERS["fcfs"], machine, experts, 10**8, 0, max_num_seqs=10**6)
    free.run()
    total_blocks = int(free.peak_blocks / oversubscription)
    longest = max(s.prefix[1] + sum(t.user + t.reply for t in s.turns) for s in sessions)
    if total_blocks < (least := blocks_of(longest) + free.slot_blocks):
        raise SystemExit(
            f"--oversubscription: want memory for {longest} tokens of {trace} at least, {least} blocks, got {total_blocks}: "
            "want more --seconds of arrivals"
        )
    rows = [{"trace": trace, "scheduler": "fcfs, no limit", **free.report(*bounds)}]
    for policy in policies:
        run = Simulation(
            sessions, SCHEDULERS[policy.removesuffix("_512")], machine, experts, total_blocks, tier_bytes,
            max_tokens=512 if policy.endswith("_512") else 2048,
        )  # fmt: skip
        run.run()
        rows.append({"trace": trace, "scheduler": policy, **run.report(*bounds)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", default="chat,bursts,mixed,talk", help=f"of {', '.join(TRACES)}")
    parser.add_argument("--policies", default="fcfs,fcfs_512,dependency_aware", help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--oversubscription", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=60, help="of arrivals; each run goes on until all are served")
    parser.add_argument("--tier-gb", type=float, default=64, help="host tier of each rank; 0: none")
    parser.add_argument("--experts", default="zipf:0.5", help="zipf:EXPONENT or a recording, of another model too")
    parser.add_argument(
        "--first-token-s", type=float, default=10, help="goodput: tokens of requests within both bounds"
    )
    parser.add_argument("--gap-ms", type=float, default=50, help="goodput: bound of a request's p95 between tokens")
    parser.add_argument("--compose", type=Path, help="recording; measures batches chosen by experts, and nothing else")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="the last line of the output is one JSON object")
    args = parser.parse_args()
    if args.compose is not None:
        rows = [
            {"ranks": ranks, "batch": batch, **compose(args.compose, ranks, batch, 40, args.seed)}
            for ranks in (8, 16, 32) for batch in (8, 32)
        ]  # fmt: skip
        for row in rows:
            print(", ".join(f"{key} {value:.3g}" for key, value in row.items()))
    else:
        traces, policies, machine = args.traces.split(","), args.policies.split(","), Machine()
        for option, given, known in (("traces", traces, TRACES), ("policies", policies, POLICIES)):
            if unknown := [name for name in given if name not in known]:
                raise SystemExit(f"--{option}: want some of {', '.join(known)}, got {unknown[0]!r}")
        if not args.oversubscription > 0:
            raise SystemExit(f"--oversubscription: want more than 0, got {args.oversubscription:g}")
        experts = ExpertLoad(expert_shares(args.experts, args.seed), machine)
        bounds, rows = (args.first_token_s, args.gap_ms / 1e3), []
        for trace in traces:
            done = simulate(
                trace, policies, args.oversubscription, args.seconds, args.tier_gb * 1e9, experts, machine,
                bounds, args.seed,
            )  # fmt: skip
            show(done, has_header=not rows)
            rows += done
    if args.json:
        print(json.dumps({"rows": rows, "seconds": args.seconds, "oversubscription": args.oversubscription}))


if __name__ == "__main__":
    main()
