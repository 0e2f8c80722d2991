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
    can_park: bool  # a tier exists that takes states
    bytes_per_block: int
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
    return max(map(sum, zip(*loads)), default=0.0)


def schedule_dependency_aware(
    candidates: Sequence[Candidate], resources: Resources, policy: Policy = DEFAULT_POLICY
) -> Schedule:
    """Serve first what others wait for, what is resident, urgent, cheap or old; admit only what memory can carry.

    Unlike `schedule_fcfs` it admits a request only with room for its whole prompt and `policy.horizon` more tokens,
    beside the same for those that run; holds back requests whose prefix is just being computed, and moves the one
    that computes it to their place in the order; bounds the prefill of a step in which others decode; parks or drops by
    cost; asks for tier data ahead; and admits nobody who would load the busiest expert rank above `expert_budget`.
    """
    step, block = _Step(resources), resources.block_size
    order = sorted(candidates, key=itemgetter(1))
    running = [c for c in order if c.is_running]
    waiting = [c for c in order if not c.is_running]
    waits_for = {c.rid: c.waits_for for c in waiting if c.waits_for is not None}
    step.seqs = len(running)

    def put_running_in_order() -> None:
        """Who gives way comes last. Needed only where somebody may have to."""
        turns: dict[int, Key] = {c.rid: (c.arrival - policy.priority_worth * c.priority, c.arrival, 0) for c in order}
        _inherit(turns, waits_for)
        running.sort(key=lambda c: turns[c.rid])

    def expected(candidate: Candidate) -> int:
        """Blocks it will want within the horizon, from now."""
        return step.blocks_at(candidate, candidate.total + min(policy.horizon, candidate.remaining_new))

    def preempt(candidate: Candidate, reason: str) -> None:
        is_dear = candidate.replay_if_dropped > resources.park_tokens
        step.take_back(candidate, "park" if resources.can_park and is_dear else "drop", reason)
        running.remove(candidate)

    # 1. Memory for those that run: a token for each that decodes, and a block for the first in order whatever it does.
    needed = sum([c.total > c.blocks_held * block for c in running if c.is_decoding])
    if needed + 1 > step.room:
        put_running_in_order()
    while needed + 1 > step.room and len(running) > 1:
        first = running[0]
        needed = sum([c.total > c.blocks_held * block for c in running if c.is_decoding])
        if not first.is_decoding:
            needed += step.blocks_at(first, min(first.total, first.done - first.done % block + block))
        if needed <= step.room:
            break
        preempt(running[-1], "memory")
    is_closed = bool(step.preempt)  # to others: what was just freed is for those who run

    # 2. Who comes next: in order of arrival, priority counting as earlier and a long prefill as later.
    horizon, spare = policy.horizon, step.room  # spare: beside what those who run will want
    if waiting:
        spare -= sum([-(-(c.total + min(horizon, c.remaining_new)) // block) - c.blocks_held for c in running])
    is_stuck = min([c.ran_steps for c in running], default=policy.quantum) >= policy.quantum
    has_claim = running and waiting and max([c.priority for c in waiting]) > min([c.priority for c in running])
    has_claim = has_claim or (is_stuck and max([c.idle_steps for c in waiting], default=0) >= policy.patience)
    fetches = [c.fetch for c in waiting]
    asked = fetches.count("pending") + fetches.count("ready")
    may_ask = asked < policy.lookahead and "absent" in fetches
    work = [c for c in running if not c.is_decoding]
    has_room = not running or (spare > resources.slot_blocks and step.seqs < resources.max_num_seqs)
    if len(work) <= 1 and not may_ask and (is_closed or not (has_room or has_claim)):  # common when memory is full
        reason = "memory" if step.seqs < resources.max_num_seqs else "max_num_seqs"
        step.reasons.update(dict.fromkeys([c.rid for c in waiting], reason))
        waiting, waits_for = [], {}
    if has_claim:
        put_running_in_order()
    keys: dict[int, Key] = {}
    for c in (*work, *waiting):
        later = policy.length_worth * ((c.total - (c.done or c.reuse)) // block).bit_length()
        turn = c.arrival - policy.priority_worth * c.priority + later
        keys[c.rid] = (turn, c.arrival, 0)
    _inherit(keys, waits_for)
    waiting.sort(key=lambda c: keys[c.rid])

    # 3. One of them may take the place of others: of lower priority; of anyone when it is old and nothing moves.
    chosen: Candidate | None = None
    for candidate in waiting[: policy.lookahead] if has_claim and running and not is_closed else ():
        if candidate.fetch in ("absent", "pending") or candidate.waits_for in {c.rid for c in running}:
            continue
        victims: list[Candidate] = []
        free, wanted = spare, expected(candidate)
        may_take_any = is_stuck and candidate.idle_steps >= policy.patience
        for victim in reversed(running):
            # Whoever came in keeps its place until it has got somewhere: else urgent ones would undo its work for ever.
            is_settled = victim.ran_steps >= policy.quantum and (victim.is_decoding or resources.can_park)
            is_lower = candidate.priority > victim.priority and (is_settled or victim.replay_if_dropped == 0)
            fits = free >= wanted and step.seqs - len(victims) < resources.max_num_seqs
            if fits or not (may_take_any or is_lower):
                break
            victims.append(victim)
            free += resources.slot_blocks + victim.blocks_freed + expected(victim)
        if victims and free >= wanted and step.seqs - len(victims) < resources.max_num_seqs:
            for victim in victims:
                preempt(victim, "demoted")
            chosen, spare = candidate, free
            break

    # 4. One token for each that decodes. Where that leaves no block for prefill, a step leaves one when each has had its turn
    # since the last such step: of n who decode each waits at most 2 ceil(n / max_tokens_per_step) steps, prefill half as many
    # and one.
    decoding = [c for c in running if c.is_decoding]
    work = [c for c in running if not c.is_decoding] + waiting
    work.sort(key=lambda c: (c is not chosen, keys[c.rid]))
    limit = resources.max_tokens_per_step
    if work and len(decoding) > limit - block:
        had_turn = max([c.idle_steps for c in decoding]) <= -(-len(decoding) // limit)
        limit -= block if had_turn or chosen is not None else 0
    if len(decoding) > limit:
        decoding.sort(key=lambda c: -c.idle_steps)
    step.give_tokens(decoding, limit)
    loads = [c.experts for c in decoding if c.experts and c.rid not in step.reasons]
    if not work:
        return step.close(_busiest(loads))

    # 5. Prefill and admission. Beside tokens that others wait for, a step takes only so many prompt tokens: as many as keep
    # it within `stall` decode steps. Before it is known what they cost, the prefill at hand is spread over some steps, fewer
    # and larger ones the more wait for prefill against those who decode.
    allowance, rows = step.tokens, len(step.rows)
    if rows and resources.stall_tokens:
        allowance = min(step.tokens, max(block, resources.stall_tokens))
    elif rows:
        at_hand, num_waiting, free = 0, 0, spare
        for candidate in work:
            free -= 0 if candidate.is_running else expected(candidate)
            if free < 0 and not candidate.is_running:
                break
            at_hand += candidate.total - (candidate.done or candidate.reuse)
            num_waiting += 1
        most = int(policy.prefill_share * resources.max_tokens_per_step) * max(num_waiting, rows) // rows
        most = min(most, at_hand * (num_waiting + rows) // (policy.spread * rows))
        allowance = min(step.tokens, max(block, most))
    live = {c.rid for c in running}
    for candidate in work:
        rid, start = candidate.rid, candidate.done or candidate.reuse
        left = candidate.total - start
        tokens = step.tokens if left <= 1 else min(allowance, step.tokens)
        if (start + tokens) // block * block - start < min(block // 2, left):  # a sliver: up to the next block
            tokens = min(tokens + -start % block, step.tokens)
        if candidate.is_running:
            count = step.piece(candidate, tokens, step.room)
            if count > 0:
                step.give(candidate, count)
                allowance -= count
            else:
                step.reasons[rid] = "budget" if tokens < min(block, left) else "memory"
            continue
        is_alone, is_old = not live, candidate.idle_steps >= policy.patience
        if candidate.waits_for in live:
            step.reasons[rid] = "waits_for"
        elif candidate.fetch in ("absent", "pending"):
            step.reasons[rid] = "fetch"
            if candidate.fetch == "absent" and asked < policy.lookahead:
                step.prefetch.append(rid)
                asked += 1
        elif step.seqs >= resources.max_num_seqs:
            step.reasons[rid] = "max_num_seqs"
        elif is_closed or (spare <= resources.slot_blocks and not is_alone):
            step.reasons[rid] = "memory"
        elif tokens < min(block, left):
            step.reasons[rid] = "budget"
        else:
            count, wanted = step.piece(candidate, tokens, step.room), expected(candidate)
            if count < 0 or (wanted > spare and not is_alone):
                step.reasons[rid] = "memory"
                is_closed = is_old  # nobody slips past an old one
            elif (
                resources.expert_budget
                and not is_alone
                and _busiest([*loads, candidate.experts]) > resources.expert_budget
            ):
                step.reasons[rid] = "experts"
            else:
                step.give(candidate, count)
                spare -= wanted
                live.add(rid)
                allowance -= count if left > 1 else 0
                loads += [candidate.experts] if candidate.experts else []
    rest = [c for c in decoding if step.reasons.get(c.rid) == "budget"][: step.tokens]  # prefill left it to them
    for c in rest:
        del step.reasons[c.rid]
        loads += [c.experts] if c.experts else []
    step.give_tokens(rest, len(rest))
    return step.close(_busiest(loads))


SCHEDULERS: dict[str, Callable[[Sequence[Candidate], Resources], Schedule]] = {
    "dependency_aware": schedule_dependency_aware,
    "fcfs": schedule_fcfs,
}
