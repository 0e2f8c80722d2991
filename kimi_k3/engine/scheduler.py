"""Who runs in the next step, with how many tokens. A pure function of plain numbers: every rank computes the same schedule.

Memory is counted in latent blocks; a KDA slot costs `slot_blocks` of the same budget. A step gives each decoding request
one token and fills the rest with prefill pieces. Both policies keep these promises:

    blocks     a schedule asks for no more than `room_blocks` and what its own preemptions free
    progress   requests have a fixed order; memory is taken from the last in it alone, so its first running request
               advances in every step, or in its turn where a step is too small for all, and no two requests can preempt
               each other for ever
    order      neither the order of the candidates nor anything but their numbers matters

`fcfs` is what known engines do: decodes, then prefill in order of arrival, the last arrived preempted. `dependency_aware`
knows who waits for whom, and what a choice costs later. Its wait is bounded: see `Policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple


class Candidate(NamedTuple):
    """What the scheduler sees of one request that is not finished."""

    rid: int
    arrival: int  # order of arrival, unique
    priority: int  # greater: more urgent (default 0)
    is_running: bool  # holds a live KDA slot
    done: int  # tokens that have run (reused ones included); 0 when not running
    total: int  # tokens known: prompt + generated. total - done == 1 and done >= prompt: it decodes; else a prefill
    is_decoding: bool
    blocks_held: int  # latent blocks in its table; not running: those of its hit that cost no room (others hold them)
    blocks_freed: int  # of those, freed if it were preempted (not shared)
    reuse: int  # not running: tokens it would not compute when admitted now (prefix hit on the device)
    waits_for: int | None  # rid of the request that computes, or would compute first, a prefix that this one shares
    fetch: str  # "none", "absent" (its best prefix lies in a lower tier), "pending" (asked for), "ready"
    fetch_bytes: int
    remaining_new: int  # upper bound of tokens it may still generate
    replay_if_dropped: int  # tokens to recompute if it is preempted without parking (since its last snapshot)
    idle_steps: int  # steps since it last ran (or arrived)
    experts: tuple[float, ...] = ()  # decayed load this request adds per expert rank (may be empty)
    ran_steps: int = 0  # running: steps since it got its slot; 0 throughout: nobody gives way to an old or urgent one


class Resources(NamedTuple):
    """What there is to give away in one step."""

    room_blocks: int  # latent blocks obtainable now: free plus evictable cache
    slot_blocks: int  # what one KDA slot costs in blocks
    total_blocks: int
    block_size: int
    max_num_seqs: int
    max_tokens_per_step: int
    expert_budget: float = 0.0  # 0: off; else the load of the busiest expert rank above which admission is throttled
    stall_tokens: int = 0  # prompt tokens beside decodes that make a step last `Policy.stall` of them; 0: not known yet
    park_tokens: int = 256  # parking and fetching one state costs as much as computing this many tokens


class Schedule(NamedTuple):
    """One step. `run` holds decode rows first; pieces end at the sequence's end or at multiples of the block size."""

    run: list[tuple[int, int]]  # (rid, its next tokens); 0 tokens only for a request that is reused whole
    admit: list[int]  # rids of `run` that are not running yet, in order
    preempt: list[tuple[int, str]]  # (rid, "park": its state is kept as a snapshot | "drop": back to its last snapshot)
    prefetch: list[int]  # rids whose tier data should be asked for now
    reasons: dict[int, str]  # why a candidate does not run
    expert_load: float = 0.0  # predicted load of the busiest expert rank; above `expert_budget` it is overloaded


class Policy(NamedTuple):
    """Knobs of `schedule_dependency_aware`, and the bound of a wait.

    The order of those who wait is their arrival, moved by at most `priority_worth` places for a level of priority and
    `length_worth` for a doubling of the prefill: so many later requests go first, and no more. After `patience` idle
    steps a request is old: nobody behind it is admitted before it any more, and when nobody was admitted for `quantum`
    steps, it takes the place of others. So it runs within patience + (1 + requests before it in the order) * quantum
    steps, plus its own fetch and the few for which a schedule is repeated, given max_tokens_per_step >= max_num_seqs +
    block_size. Nor does anyone lose its place in its first `quantum` steps to a request of higher priority.
    """

    stall: float = 3.0  # decode steps that one with prefill beside may last, see `Pace`
    prefill_share: float = 0.25  # before that is known, of max_tokens_per_step: the most beside as many who decode
    spread: int = 16  # and the steps over which the prefill at hand is spread
    horizon: int = 64  # tokens that each request is expected to grow by; admission leaves room for them
    priority_worth: int = 64  # one level of priority: as if it had arrived this many requests earlier
    length_worth: int = 2  # each doubling of the prefill beyond one block: this many requests later
    patience: int = 1024
    quantum: int = 128
    lookahead: int = 8  # waiting requests whose tier data is asked for ahead of their turn


DEFAULT_POLICY = Policy()


class Pace:
    """How many prompt tokens a step may take beside decodes, from the seconds that steps took.

    A step of decodes alone lasts d; n prompt tokens beside them add fixed + n * each, fitted to what was seen, the latest
    weighing most. `tokens` are as many as make the step last `stall` d: few where prompts are read hardly faster than
    answers are written, far more on hardware that waits for memory.
    """

    KEPT = 0.95  # of what is known when a step has run
    LEAST = 8  # steps of either kind before it is told

    def __init__(self) -> None:
        self._decode_s = 0.0
        self._num_decodes = self._num_mixed = 0
        self._sums = [0.0] * 5  # of 1, tokens, seconds added, tokens ** 2, tokens * seconds

    def add(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """A step with `rows` that decoded and `prompt_tokens` beside."""
        if rows and not prompt_tokens:
            kept = self.KEPT if self._num_decodes else 0.0
            self._decode_s = kept * self._decode_s + (1 - kept) * seconds
            self._num_decodes += 1
        elif rows and self._num_decodes:
            added, n = max(seconds - self._decode_s, 0.0), prompt_tokens
            new = (1, n, added, n * n, n * added)
            self._sums = [self.KEPT * a + b for a, b in zip(self._sums, new)]
            self._num_mixed += 1

    def tokens(self, stall: float = DEFAULT_POLICY.stall) -> int:
        """0: not known yet."""
        if min(self._num_decodes, self._num_mixed) < self.LEAST:
            return 0
        count, tokens, seconds, squares, products = self._sums
        mean = max(seconds / tokens, 1e-9)  # of a token, the fixed part included
        spread = squares - tokens * tokens / count
        slope = (products - tokens * seconds / count) / spread if spread > 0.05 * squares else mean
        each = min(max(slope, mean / 4), mean)
        fixed = (seconds - each * tokens) / count
        return max(1, min(1 << 20, int(((stall - 1) * self._decode_s - fixed) / each)))


Key = tuple[float, ...]  # a place in an order; ends in a 0 that `_inherit` uses


class _Step:
    """The books of one step: blocks and tokens left, and what was decided."""

    def __init__(self, resources: Resources) -> None:
        if resources.max_tokens_per_step < resources.block_size:
            raise ValueError(
                f"schedule: want max_tokens_per_step >= block_size, else no piece fits into a step; got "
                f"{resources.max_tokens_per_step} < {resources.block_size}"
            )
        self.resources, self.block = resources, resources.block_size
        self.room, self.tokens, self.seqs = resources.room_blocks, resources.max_tokens_per_step, 0
        self.rows: list[tuple[int, int]] = []
        self.pieces: list[tuple[int, int]] = []
        self.admit: list[int] = []
        self.preempt: list[tuple[int, str]] = []
        self.prefetch: list[int] = []
        self.reasons: dict[int, str] = {}

    def blocks_at(self, candidate: Candidate, tokens: int) -> int:
        """New blocks that it needs to hold `tokens` tokens, its slot included."""
        slot = 0 if candidate.is_running else self.resources.slot_blocks
        return slot + max(0, -(-tokens // self.block) - candidate.blocks_held)

    def piece(self, candidate: Candidate, tokens: int, room: int) -> int:
        """The largest allowed number of next tokens within `tokens` and `room`; -1 if there is none."""
        start = candidate.done or candidate.reuse
        slot = 0 if candidate.is_running else self.resources.slot_blocks
        end = min(candidate.total, start + tokens, (room - slot + candidate.blocks_held) * self.block)
        if end < candidate.total:
            end -= end % self.block
        return end - start if end > start or end == candidate.total else -1

    def give(self, candidate: Candidate, tokens: int) -> None:
        self.room -= self.blocks_at(candidate, (candidate.done or candidate.reuse) + tokens)
        self.tokens -= tokens
        (self.rows if tokens == 1 else self.pieces).append((candidate.rid, tokens))
        if not candidate.is_running:
            self.admit.append(candidate.rid)
            self.seqs += 1

    def give_tokens(self, decoding: Sequence[Candidate], limit: int) -> None:
        """The next token for each that decodes, up to `limit` of them, while blocks last."""
        needs = sum([candidate.total > candidate.blocks_held * self.block for candidate in decoding])
        if needs <= self.room and len(decoding) <= limit:  # nearly always
            self.rows += [(candidate.rid, 1) for candidate in decoding]
            self.room -= needs
            self.tokens -= len(decoding)
            decoding = ()
        for candidate in decoding:
            needed = candidate.total > candidate.blocks_held * self.block
            if limit <= 0 or needed > self.room:
                self.reasons[candidate.rid] = "budget" if limit <= 0 else "memory"
            else:
                self.room -= needed
                self.rows.append((candidate.rid, 1))
                self.tokens -= 1
                limit -= 1

    def take_back(self, candidate: Candidate, how: str, reason: str) -> None:
        """Preempt; a row or piece that was given is withdrawn."""
        for given in (self.rows, self.pieces):
            for rid, tokens in [row for row in given if row[0] == candidate.rid]:
                given.remove((rid, tokens))
                self.tokens += tokens
                self.room += self.blocks_at(candidate, candidate.done + tokens)
        self.room += self.resources.slot_blocks + candidate.blocks_freed
        self.seqs -= 1
        self.preempt.append((candidate.rid, how))
        self.reasons[candidate.rid] = reason

    def close(self, expert_load: float = 0.0) -> Schedule:
        return Schedule(self.rows + self.pieces, self.admit, self.preempt, self.prefetch, self.reasons, expert_load)


def schedule_fcfs(candidates: Sequence[Candidate], resources: Resources) -> Schedule:
    """Decodes first, then prefill in order of arrival; when memory is short, the last arrived is dropped.

    Looks neither ahead nor at priorities, and computes a prefix that another request is just computing once more. Tier
    data is asked for when its request's turn has come.
    """
    step = _Step(resources)
    order = sorted(candidates, key=itemgetter(1))
    alive = [candidate for candidate in order if candidate.is_running]
    waiting = [candidate for candidate in order if not candidate.is_running]
    step.seqs = len(alive)
    while len(alive) > 1 and step.room < sum(c.is_decoding and c.total > c.blocks_held * step.block for c in alive):
        step.take_back(alive.pop(), "drop", "memory")
    step.give_tokens([candidate for candidate in alive if candidate.is_decoding], step.tokens)
    for candidate in [candidate for candidate in alive if not candidate.is_decoding]:
        if candidate not in alive:
            continue
        wanted = step.piece(candidate, step.tokens, resources.total_blocks)
        if wanted < 0:
            step.reasons[candidate.rid] = "budget"
            continue
        while step.blocks_at(candidate, candidate.done + wanted) > step.room and candidate in alive:
            if len(alive) == 1:  # alone: as much as there is
                wanted = step.piece(candidate, step.tokens, step.room)
                break
            step.take_back(alive.pop(), "drop", "memory")
        if candidate in alive and wanted >= 0:
            step.give(candidate, wanted)
        elif candidate in alive:
            step.reasons[candidate.rid] = "memory"
    blocked = "memory" if step.preempt else ""  # what was just freed is for those who run
    for candidate in waiting:
        if not blocked:
            wanted = step.piece(candidate, step.tokens, resources.total_blocks)
            needed = step.blocks_at(candidate, (candidate.done or candidate.reuse) + max(wanted, 0))
            is_full = step.seqs >= resources.max_num_seqs
            blocked = "max_num_seqs" if is_full else "budget" if wanted < 0 else "memory" if needed > step.room else ""
        if blocked:
            step.reasons[candidate.rid] = blocked
        elif candidate.fetch in ("absent", "pending"):
            step.reasons[candidate.rid] = "fetch"
            step.prefetch += [candidate.rid] if candidate.fetch == "absent" else []
        else:
            step.give(candidate, wanted)
    return step.close()


def _inherit(keys: dict[int, Key], waits_for: dict[int, int]) -> None:
    """Whoever others wait for, directly or not, comes right before the first of them."""
    own = dict(keys) if waits_for else keys
    for rid in waits_for:
        seen: set[int] = {rid}
        other: int | None = waits_for[rid]
        while other in own and other not in seen:
            place = (*own[rid][:-1], -len(seen))
            if place < keys[other]:
                keys[other] = place
            seen.add(other)
            other = waits_for.get(other)


def _busiest(loads: Sequence[tuple[float, ...]]) -> float:
    return max(map(sum, zip(*filter(None, loads))), default=0.0)


def schedule_dependency_aware(
    candidates: Sequence[Candidate], resources: Resources, policy: Policy = DEFAULT_POLICY
) -> Schedule:
    """Serve first what others wait for, what is resident, urgent, cheap or old; admit only what memory can carry.

    Unlike `schedule_fcfs` it admits a request only with room for its whole prompt and `policy.horizon` more tokens,
    beside the same for those that run; holds back requests whose prefix is just being computed, and moves the one
    that computes it to their place in the order; bounds the prefill of a step in which others decode; parks or drops by
    cost; asks for tier data ahead; and admits nobody, but the old, who would load the busiest expert rank above
    `expert_budget`.
    """
    step = _AwareStep(candidates, resources, policy)
    step.make_room()
    step.put_waiting_in_order()
    step.make_way()
    step.decode()
    step.prefill()
    step.give_rest()
    return step.close(_busiest(step.loads))


class _AwareStep(_Step):
    """The parts of `schedule_dependency_aware`: each method is one, called in their order."""

    def __init__(self, candidates: Sequence[Candidate], resources: Resources, policy: Policy) -> None:
        super().__init__(resources)
        self.policy = policy
        self.order = sorted(candidates, key=itemgetter(1))
        self.running = [c for c in self.order if c.is_running]
        self.waiting = [c for c in self.order if not c.is_running]
        self.waits_for = {c.rid: c.waits_for for c in self.waiting if c.waits_for is not None}
        self.seqs = len(self.running)
        self.is_closed = False  # nobody is admitted any more
        self.spare = 0  # blocks beside what those who run will want within the horizon
        self.is_stuck = False  # nobody was admitted for a quantum
        self.has_claim = False  # somebody who waits may take the place of others
        self.asked = 0  # of those who wait: whose tier data was asked for
        self.keys: dict[int, Key] = {}  # the order of those who prefill or wait
        self.chosen: Candidate | None = None  # it has taken the place of others
        self.decoding: list[Candidate] = []  # those who run and decode, whose turn it is first
        self.work: list[Candidate] = []  # all others, in order
        self.loads: list[tuple[float, ...]] = []  # of experts, by those who run

    def make_room(self) -> None:
        """Memory for those that run: a token for each that decodes, and a block for the first in order whatever it does."""
        needed = self._blocks_to_decode()
        if needed + 1 > self.room:
            self._put_running_in_order()
        while needed + 1 > self.room and len(self.running) > 1:
            first, needed = self.running[0], self._blocks_to_decode()
            if not first.is_decoding:
                needed += self.blocks_at(first, min(first.total, first.done - first.done % self.block + self.block))
            if needed <= self.room:
                break
            self._park_or_drop(self.running[-1], "memory")
        self.is_closed = bool(self.preempt)  # what was just freed is for those who run

    def put_waiting_in_order(self) -> None:
        """Who comes next: in order of arrival, priority counting as earlier and a long prefill as later."""
        policy, running, waiting = self.policy, self.running, self.waiting
        self.spare = self.room
        if waiting:
            ends = [c.total + min(policy.horizon, c.remaining_new) for c in running]
            self.spare -= sum([-(-end // self.block) - c.blocks_held for c, end in zip(running, ends)])
            self.is_stuck = min([c.ran_steps for c in running], default=policy.quantum) >= policy.quantum
            is_urgent = bool(running) and max([c.priority for c in waiting]) > min([c.priority for c in running])
            self.has_claim = is_urgent or (self.is_stuck and max([c.idle_steps for c in waiting]) >= policy.patience)
        fetches = [c.fetch for c in waiting]
        self.asked = fetches.count("pending") + fetches.count("ready")
        work = [c for c in running if not c.is_decoding]
        if len(work) <= 1 and self._is_full(may_ask=self.asked < policy.lookahead and "absent" in fetches):
            reason = "memory" if self.seqs < self.resources.max_num_seqs else "max_num_seqs"
            self.reasons.update(dict.fromkeys([c.rid for c in waiting], reason))
            self.waiting, self.waits_for = [], {}
        if self.has_claim:
            self._put_running_in_order()
        for c in (*work, *self.waiting):
            later = policy.length_worth * ((c.total - (c.done or c.reuse)) // self.block).bit_length()
            turn = c.arrival - policy.priority_worth * c.priority + later
            self.keys[c.rid] = (turn, c.arrival, 0)
        _inherit(self.keys, self.waits_for)
        self.waiting.sort(key=lambda c: self.keys[c.rid])

    def make_way(self) -> None:
        """One of them may take the place of others: of lower priority; of anyone when it is old and nothing moves."""
        if not self.has_claim or not self.running or self.is_closed:
            return
        live = {c.rid for c in self.running}
        for candidate in self.waiting[: self.policy.lookahead]:
            if candidate.fetch in ("absent", "pending") or candidate.waits_for in live:
                continue
            victims, free = self._victims_for(candidate)
            if victims:
                for victim in victims:
                    self._park_or_drop(victim, "demoted")
                self.chosen, self.spare = candidate, free
                return

    def decode(self) -> None:
        """One token for each that decodes. Where that leaves no block for prefill, a step leaves one when each has had its turn
        since the last such step: of n who decode each waits at most 2 ceil(n / max_tokens_per_step) steps, prefill half as
        many and one."""
        self.decoding = decoding = [c for c in self.running if c.is_decoding]
        self.work = [c for c in self.running if not c.is_decoding] + self.waiting
        self.work.sort(key=lambda c: (c is not self.chosen, self.keys[c.rid]))
        limit = self.resources.max_tokens_per_step
        if self.work and len(decoding) > limit - self.block:
            had_turn = max([c.idle_steps for c in decoding]) <= -(-len(decoding) // limit)
            limit -= self.block if had_turn or self.chosen is not None else 0
        if len(decoding) > limit:
            decoding.sort(key=lambda c: -c.idle_steps)
        self.give_tokens(decoding, limit)
        self.loads = [c.experts for c in decoding if c.experts and c.rid not in self.reasons]

    def prefill(self) -> None:
        """Prefill pieces and admission."""
        if not self.work:
            return
        block, allowance = self.block, self._prompt_tokens()
        live = {c.rid for c in self.running}
        for candidate in self.work:
            rid, start = candidate.rid, candidate.done or candidate.reuse
            left = candidate.total - start
            tokens = self.tokens if left <= 1 else min(allowance, self.tokens)
            if (start + tokens) // block * block - start < min(block // 2, left):  # a sliver: up to the next block
                tokens = min(tokens + -start % block, self.tokens)
            count = self.piece(candidate, tokens, self.room)
            if candidate.is_running:
                reason = "" if count > 0 else "budget" if tokens < min(block, left) else "memory"
            elif tokens < min(block, left):
                reason = self._refusal(candidate, live) or "budget"
            else:
                reason = self._refusal(candidate, live) or self._lack(candidate, count, is_alone=not live)
            if reason:
                self.reasons[rid] = reason
                continue
            self.give(candidate, count)
            allowance -= count if candidate.is_running or left > 1 else 0
            if not candidate.is_running:
                self.spare -= self._expected(candidate)
                live.add(rid)
                self.loads += [candidate.experts] if candidate.experts else []

    def give_rest(self) -> None:
        """What prefill left, to those who decode and had no turn."""
        rest = [c for c in self.decoding if self.reasons.get(c.rid) == "budget"][: self.tokens]
        for c in rest:
            del self.reasons[c.rid]
            self.loads += [c.experts] if c.experts else []
        self.give_tokens(rest, len(rest))

    # What the parts ask.

    def _blocks_to_decode(self) -> int:
        return sum([c.total > c.blocks_held * self.block for c in self.running if c.is_decoding])

    def _put_running_in_order(self) -> None:
        """Who gives way comes last. Needed only where somebody may have to."""
        worth = self.policy.priority_worth
        turns: dict[int, Key] = {c.rid: (c.arrival - worth * c.priority, c.arrival, 0) for c in self.order}
        _inherit(turns, self.waits_for)
        self.running.sort(key=lambda c: turns[c.rid])

    def _park_or_drop(self, candidate: Candidate, reason: str) -> None:
        is_dear = candidate.replay_if_dropped > self.resources.park_tokens
        self.take_back(candidate, "park" if is_dear else "drop", reason)
        self.running.remove(candidate)

    def _expected(self, candidate: Candidate) -> int:
        """Blocks it will want within the horizon, from now."""
        return self.blocks_at(candidate, candidate.total + min(self.policy.horizon, candidate.remaining_new))

    def _is_full(self, *, may_ask: bool) -> bool:
        """Whether nothing can be done for those who wait; common when memory is full."""
        has_seat = self.spare > self.resources.slot_blocks and self.seqs < self.resources.max_num_seqs
        has_seat = has_seat or not self.running
        return not may_ask and (self.is_closed or not (has_seat or self.has_claim))

    def _victims_for(self, candidate: Candidate) -> tuple[list[Candidate], int]:
        """Who would have to give way to it, the last in order first, and what were spare then; nobody where that does not
        do, or is not called for."""
        victims: list[Candidate] = []
        free, wanted, policy = self.spare, self._expected(candidate), self.policy
        may_take_any = self.is_stuck and candidate.idle_steps >= policy.patience
        for victim in reversed(self.running):
            # Whoever came in keeps its place until it has got somewhere: else urgent ones would undo its work for ever.
            is_settled = victim.ran_steps >= policy.quantum or victim.replay_if_dropped == 0
            is_lower = candidate.priority > victim.priority and is_settled
            fits = free >= wanted and self.seqs - len(victims) < self.resources.max_num_seqs
            if fits or not (may_take_any or is_lower):
                break
            victims.append(victim)
            free += self.resources.slot_blocks + victim.blocks_freed + self._expected(victim)
        fits = free >= wanted and self.seqs - len(victims) < self.resources.max_num_seqs
        return (victims, free) if fits else ([], free)

    def _prompt_tokens(self) -> int:
        """Beside tokens that others wait for, a step takes only so many prompt tokens: as many as keep it within `stall`
        decode steps. Before it is known what they cost, the prefill at hand is spread over some steps, fewer and larger
        ones the more wait for prefill against those who decode."""
        rows, stall_tokens = len(self.rows), self.resources.stall_tokens
        if not rows:
            return self.tokens
        if stall_tokens:
            return min(self.tokens, max(self.block, stall_tokens))
        at_hand, num_waiting, free = 0, 0, self.spare
        for candidate in self.work:
            free -= 0 if candidate.is_running else self._expected(candidate)
            if free < 0 and not candidate.is_running:
                break
            at_hand += candidate.total - (candidate.done or candidate.reuse)
            num_waiting += 1
        most = int(self.policy.prefill_share * self.resources.max_tokens_per_step) * max(num_waiting, rows) // rows
        most = min(most, at_hand * (num_waiting + rows) // (self.policy.spread * rows))
        return min(self.tokens, max(self.block, most))

    def _refusal(self, candidate: Candidate, live: set[int]) -> str:
        """Why a waiting one is not admitted, whatever it would run; "" where nothing speaks against it."""
        if candidate.waits_for in live:
            return "waits_for"
        if candidate.fetch in ("absent", "pending"):
            if candidate.fetch == "absent" and self.asked < self.policy.lookahead:
                self.prefetch.append(candidate.rid)
                self.asked += 1
            return "fetch"
        if self.seqs >= self.resources.max_num_seqs:
            return "max_num_seqs"
        return "memory" if self.is_closed or (live and self.spare <= self.resources.slot_blocks) else ""

    def _lack(self, candidate: Candidate, count: int, *, is_alone: bool) -> str:
        """What there is too little of to admit it with a piece of `count` tokens (-1: none fits); "": nothing."""
        if count < 0 or (self._expected(candidate) > self.spare and not is_alone):
            self.is_closed = candidate.idle_steps >= self.policy.patience  # nobody slips past an old one
            return "memory"
        budget, is_old = self.resources.expert_budget, candidate.idle_steps >= self.policy.patience
        may_be_over = not budget or is_alone or is_old
        return "experts" if not may_be_over and _busiest([*self.loads, candidate.experts]) > budget else ""


SCHEDULERS: dict[str, Callable[[Sequence[Candidate], Resources], Schedule]] = {
    "dependency_aware": schedule_dependency_aware,
    "fcfs": schedule_fcfs,
}
