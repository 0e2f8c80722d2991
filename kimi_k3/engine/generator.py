"""KimiK3Generator: many requests through one model, each with the tokens that it would get alone."""

from __future__ import annotations

import copy
import hashlib
import json
import secrets
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kimi_k3.cache import BLOCK_SIZE
from kimi_k3.engine.agreement import Agreement
from kimi_k3.engine.arguments import check_generator, check_request, positions, seconds, token_ids, whole
from kimi_k3.engine.async_streams import AsyncListener, end_openmp_team
from kimi_k3.engine.expert_changes import ExpertChanges
from kimi_k3.engine.expert_counts import ExpertCounts
from kimi_k3.engine.metrics import expert_metrics, exposition, metrics_of
from kimi_k3.engine.other_groups import OtherGroups
from kimi_k3.engine.prefix_index import chain
from kimi_k3.engine.request import GenerationResult, Request, RequestOutput
from kimi_k3.engine.residency import REFRESH_STEPS, Residency
from kimi_k3.engine.row_sampling import RowError, is_plain_greedy, next_output
from kimi_k3.engine.runner import CudaRecorder, DecodeGraphs, Piece, Runner
from kimi_k3.engine.scheduler import DEFAULT_POLICY, SCHEDULERS, Candidate, Pace, Resources, Schedule
from kimi_k3.engine.tier_format import EXACT
from kimi_k3.generation import StopText, end_ids
from kimi_k3.sampling import SamplingParams, as_int, fresh_seed

if TYPE_CHECKING:
    from kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM
    from kimi_k3.parallel.placement import ExpertPlacement
    from kimi_k3.tokenization_kimi_k3 import KimiK3Tokenizer

LOOK_PAST = 64  # requests in line beyond the free seats that a step considers
# So many in line are looked up in the cache in every step in which it has changed: as many as could get a slot now, within
LOOK_UP_LEAST, LOOK_UP_FIRST = 1, 8
KEPT_LATENCIES = 4096  # of each kind, for `stats`
KEPT_RESULTS = 1024  # of finished requests that were added by hand, for `result`
MAX_LEADERS = 2  # a request waits for so many others' prefills, then computes its prefix itself


class KimiK3Generator:
    """Continuous batching: requests come and go between steps; each step runs decode tokens and prefill pieces together.

    A request's tokens depend on the request alone: not on its batch, on cache hits, on preemption or on where its state
    has been. With `batch_invariant=True` that holds bit for bit, else up to rounding.

    Args:
        model: KimiK3ForCausalLM or KimiK3ForConditionalGeneration.     tokenizer: for text, stop texts and its end ids.
        max_num_seqs: requests that run at once.     max_tokens_per_step: tokens of one forward.
        memory: bytes for latent blocks and KDA states together; "auto": a share of what is free.
        num_blocks: instead of `memory`: room for so many latent blocks and `max_num_seqs` states.
        block_size: tokens of a latent block.
        prefix_cache: reuse the prefixes of earlier requests; `clear_prefix_cache` after the weights have changed.
        scheduler: "dependency_aware" or "fcfs".
        tiers: HostTier, DiskTier, RemoteTier: where evicted and parked states go, nearest first. A tier belongs to one
            generator, which closes it. With one that outlives the generator all weights are read once to tell its entries
            from another model's: 2.0 GB in 0.5 s.
        batch_invariant: bitwise equal results in any batch, at some cost. It decides for this generator's steps alone: the
            model's own mode (`set_batch_invariant`) is neither heeded nor changed, and generators of both kinds may share
            one model.
        data_parallel: on a mesh with experts on "ep", each "dp" group of ranks runs the requests that it is given, with its
            own memory, and takes part in the others' steps with zero tokens when it has none. All ranks call `generate`,
            or `step` while `has_unfinished()`, equally often. Without it every rank is given the same requests.
        heat_every: every so many decode steps record which blocks attention looks at (`heat_map`); 0: never. Such a step
            of 8 rows at 1,000 tokens takes 2 to 3 % longer on the demo model, not measurably so on one of 2 GB
            (kernels/README.md); on a GPU about MLA's scores once more. It orders reads ahead and eviction; attention reads
            every block all the same.
        snapshots: "bf16" keeps the states of the prefix cache and of parked requests in half the bytes, rounded: what
            follows a hit then differs within bf16's error. Live states stay float32.
        cuda_graphs: on a GPU, unless the model is sharded or offloaded, replay recorded decode steps; where one cannot be
            recorded it warns and runs them plainly from then on. (It has not run on a GPU yet: all but the recording itself
            is tested on a CPU.)
    """

    def __init__(
        self, model: KimiK3ForCausalLM, tokenizer: KimiK3Tokenizer | None = None, *, max_num_seqs: int = 64,
        max_tokens_per_step: int = 2048, memory: int | str = "auto", num_blocks: int | None = None,
        block_size: int = BLOCK_SIZE, prefix_cache: bool = True, scheduler: str = "dependency_aware",
        tiers: Sequence[Any] = (), batch_invariant: bool = False, data_parallel: bool = False, heat_every: int = 0,
        snapshots: str = "exact", cuda_graphs: bool = True,
    ) -> None:  # fmt: skip
        max_num_seqs, max_tokens_per_step, block_size, heat_every = (
            whole("KimiK3Generator", name, value, least)
            for name, value, least in (
                ("max_num_seqs", max_num_seqs, 1), ("max_tokens_per_step", max_tokens_per_step, 1),
                ("block_size", block_size, 1), ("heat_every", heat_every, 0),
            )
        )  # fmt: skip
        if num_blocks is not None:
            num_blocks = whole("KimiK3Generator", "num_blocks", num_blocks, 1)
        check_generator(
            model, tokenizer, memory=memory, num_blocks=num_blocks, scheduler=scheduler, tiers=tiers, snapshots=snapshots,
            batch_invariant=batch_invariant, max_tokens_per_step=max_tokens_per_step, block_size=block_size,
            switches={
                "prefix_cache": prefix_cache, "batch_invariant": batch_invariant, "data_parallel": data_parallel,
                "cuda_graphs": cuda_graphs,
            },
        )  # fmt: skip
        self.model, self.tokenizer = model, tokenizer
        self.max_num_seqs, self.max_tokens_per_step, self.block_size = max_num_seqs, max_tokens_per_step, block_size
        self.prefix_cache, self.scheduler = prefix_cache, scheduler
        self._schedule = SCHEDULERS[scheduler]
        self.agreement = Agreement(model, of_tp=data_parallel)
        self.others = OtherGroups(model) if data_parallel else None
        self.expert_changes = ExpertChanges(model)
        if heat_every and self.agreement.tp_size > 1:  # each rank sees its own heads, and eviction must be alike on all
            raise ValueError(f"KimiK3Generator: want heat_every=0 under tensor parallelism, got {heat_every}")
        self._ends = end_ids(model, None) | frozenset(tokenizer.end_token_ids if tokenizer is not None else ())
        self.counts: Counter[str] = Counter()
        self._requests: dict[int, Request] = {}  # not finished, in order of arrival
        with torch.inference_mode(False):
            self.memory = Residency(
                model, self.agreement, self._requests, memory=memory, num_blocks=num_blocks, max_num_seqs=max_num_seqs,
                block_size=block_size, prefix_cache=prefix_cache, tiers=tiers, counts=self.counts,
                has_bf16_snapshots=snapshots == "bf16",
            )  # fmt: skip
        self.pools, self.pool, self.index = self.memory.pools, self.memory.pool, self.memory.index
        self.tiers = self.memory.tiers
        with torch.inference_mode(False):
            self.runner = Runner(model, self.pool, self.pools, heat_every, self.counts, batch_invariant)
        is_whole = self.agreement.all is None and all(p.device == model.device for p in model.parameters())
        if cuda_graphs and model.device.type == "cuda" and is_whole:
            self.runner.graphs = DecodeGraphs(model, self.pools, CudaRecorder())
        try:
            self._weights = self._told_weights()
            self._root = self._root_key(batch_invariant)
        except BaseException:  # its tiers and their threads end with it
            self.memory.close()
            raise

        # Without a prefix cache: so that no other generator over the same tiers has equal keys.
        self._nonce = 0 if prefix_cache else self.agreement.least([fresh_seed()])[0]
        self._expert_budget = 0.0
        self._pace, self._stall_tokens = Pace(), 0
        self._events = 0  # of requests: arrived, read ahead, finished, failed
        self._settled = Schedule([], [], [], [], {})  # see `_decide`
        self._settled_at: tuple[int, ...] | None = None
        self._next_rid = 0
        self._outputs: list[RequestOutput] = []  # that no step has returned yet
        self._results: dict[int, GenerationResult] = {}  # the latest KEPT_RESULTS, oldest first
        # Of the requests of `generate` and `stream`: the outputs that are not heard yet, and the results.
        self._listeners: dict[int, deque[RequestOutput] | AsyncListener] = {}
        self._own_results: dict[int, GenerationResult] = {}
        # One thread steps at a time. What requests and memory are is guarded apart and let go while the model runs, so that
        # others may add, abort, read and listen meanwhile. The first is taken before the second.
        self._step_lock, self._lock = threading.RLock(), threading.RLock()
        self._is_closed = self._is_stepping = False
        self._step_thread: threading.Thread | None = None  # while someone listens from asyncio
        self._after_step: list[Callable[[], None]] = []  # what was asked for inside the step that runs
        self.num_steps = 0
        self._step_seconds = self._forward_seconds = 0.0
        self._latency_totals: defaultdict[str, float] = defaultdict(float)  # sums and counts since the start
        self._latencies: dict[str, deque[float]] = {
            name: deque(maxlen=KEPT_LATENCIES) for name in ("first_token_s", "between_tokens_s")
        }

    # Requests in.

    def add(
        self, prompt: Any, params: SamplingParams | None = None, *, priority: int = 0, snapshot_at: Sequence[int] = (),
        extra_key: bytes = b"", timeout: float | None = None, pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
    ) -> int:  # fmt: skip
        """Queue a request; returns its number (of the first sample, where params.n > 1).

        Args:
            prompt: token ids, or a ChatEncoding, whose message ends and image hashes serve the prefix cache.
            priority: greater runs first.     timeout: seconds until the request ends with "timeout".
            snapshot_at: positions whose state should be kept.     extra_key: requests share prefixes only under equal keys.
            pixel_values, grid_thws: images, for a model with a vision tower.
        Whole numbers may be numpy's or torch's.
        Raises: ValueError for an argument of another kind, naming it, and for what can never run, with the numbers.
        """
        params = SamplingParams() if params is None else params
        check_request(params, extra_key, pixel_values, grid_thws)
        params = copy.copy(params)  # the caller may change its own
        ids = token_ids(prompt, self.model.config.text_config.vocab_size)
        priority = whole("add", "priority", priority)
        boundaries = {*positions(getattr(prompt, "boundaries", ()), len(ids)), *positions(snapshot_at, len(ids))}
        timeout = seconds(timeout)
        for image_hash in getattr(prompt, "image_hashes", ()):
            extra_key += image_hash
        if params.stop and self.tokenizer is None:
            raise ValueError("add: stop texts need a generator with a tokenizer")
        embeds = None
        if pixel_values is not None:
            ids, embeds, boundaries, extra_key = self._with_images(ids, boundaries, extra_key, pixel_values, grid_thws)
        elif self.model.config.media_placeholder_token_id in ids and hasattr(self.model, "vision_tower"):
            raise ValueError("add: the prompt holds image placeholders, but no pixel_values were given")
        self.memory.refuse_what_never_fits(len(ids) + params.max_new_tokens)
        with self._lock:
            self._refuse_if_closed()
            seed = self.agreement.least([fresh_seed()])[0] if params.seed is None else params.seed
            first = self._next_rid
            try:
                for sample_idx in range(params.n):
                    self._queue(ids, params, seed + sample_idx, priority, boundaries, extra_key, timeout, embeds, first)
            except BaseException:  # all samples or none
                for rid in range(first, self._next_rid):
                    if (request := self._requests.pop(rid, None)) is not None and self.tiers is not None:
                        self.tiers.cancel(request)
                raise
        return first

    def _queue(
        self, ids: list[int], params: SamplingParams, seed: int, priority: int, boundaries: set[int], extra_key: bytes,
        timeout: float | None, embeds: Tensor | None, first: int,
    ) -> None:  # fmt: skip
        rid = self._next_rid
        self._next_rid += 1
        root = hashlib.sha256(self._root + extra_key).digest()
        if not self.prefix_cache:  # its own states are still kept while it is preempted
            root = hashlib.sha256(root + f"request {rid} of {self._nonce}".encode()).digest()
        keys, key = [], root
        for start in range(0, len(ids) - self.block_size + 1, self.block_size):
            key = chain(key, ids[start : start + self.block_size])
            keys.append(key)
        self._requests[rid] = Request(
            rid=rid, prompt=list(ids), params=params, seed=seed, priority=priority, root=root, chain=keys,
            boundaries=frozenset(boundaries | {len(ids)}), embeds=embeds,
            deadline=float("inf") if timeout is None else time.monotonic() + timeout,
            ends=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._ends),
            decoder=None if self.tokenizer is None else self.tokenizer.stream_decoder(),
            shown=StopText(params.stop), parent=first, last_step=self.num_steps,
        )  # fmt: skip
        self.memory.look_up(self._requests[rid], self.num_steps)
        self.counts["requests"] += 1
        self._events += 1

    def abort(self, rid: int) -> None:
        """End a request now, with what it has, and, by the number of its first sample, all samples of its prompt. Nothing of
        an unfinished prefill is kept. Unknown or finished: nothing.

        While a step runs, by its logits_processor or from another thread: when that step ends.
        """
        with self._lock:
            if self._is_stepping:
                self._after_step.append(lambda: self.abort(rid))
                return
            for request in [r for r in self._requests.values() if rid in (r.rid, r.parent)]:
                self._finish(request, "abort", is_published=False)

    # One step.

    def step(self) -> list[RequestOutput]:
        """Run one forward. Returns what each request gained since the last call, the finished and failed ones included; what
        those of `generate` and `stream` gained goes there.

        After an exception of the forward the requests that took part wait again and lose no token; outputs come with the
        next step.
        """
        self._step()
        with self._lock:
            outputs, self._outputs = self._outputs, []
            return outputs

    @torch.inference_mode(False)  # a state that was made in that mode could not be written outside of it
    @torch.no_grad()
    def _step(self) -> None:
        with self._step_lock, self._lock:
            self._refuse_if_closed()
            self._refuse_if_stepping("step")
            self._is_stepping = True
            try:
                self._run_step()
            finally:
                self._is_stepping = False
                calls, self._after_step = self._after_step, []
                for call in calls:
                    call()

    def _run_step(self) -> None:
        started = time.perf_counter()
        has_changed = self.expert_changes.at_step_boundary(self.num_steps)
        if has_changed and self.runner.experts is not None and self.runner.experts.share_MEW is not None:
            self.runner.experts.follow(self.model.expert_placement)  # type: ignore[arg-type]
        timed = [r for r in self._requests.values() if r.deadline < float("inf")]
        is_late = self.agreement.most([int(r.deadline < time.monotonic()) for r in timed])
        for request in [r for r, late in zip(timed, is_late) if late]:
            self._finish(request, "timeout", is_published=False)
        if self._requests:
            self._run_scheduled()
            self.num_steps += 1
        elif self.others is not None:
            self._forward([])
            self.num_steps += 1
        self._step_seconds += time.perf_counter() - started

    def _run_scheduled(self) -> None:
        started = time.perf_counter()
        if self.tiers is not None:
            self._events += self.tiers.poll(self._requests.values())
        decision_started = time.perf_counter()
        plan = self._decide()
        self.counts["schedule_us"] += int(1e6 * (time.perf_counter() - decision_started))
        if self._expert_budget and plan.expert_load > self._expert_budget:
            self.counts["overloaded_steps"] += 1
        for reason in plan.reasons.values():
            self.counts[f"held_{reason}"] += 1
        for rid, how in plan.preempt:
            self._preempt(self._requests[rid], how)
        if self.tiers is not None:
            for rid in plan.prefetch:
                self.tiers.prefetch(self._requests[rid])
        taking_part = [self._requests[rid] for rid, _ in plan.run]
        try:
            prepared = [self._prepare(self._requests[rid], count) for rid, count in plan.run]
            pieces = [piece for piece in prepared if piece is not None]
            if self.tiers is not None and self.others is None and not pieces:
                self.tiers.pause(self._requests.values())
            decoding = sum(p.request.is_decoding for p in pieces if p.tokens)
            repeats = [p for p in pieces if p.tokens == 0]
            self._forward(self.memory.with_exports([p for p in pieces if p.tokens]))
            if repeats:
                hidden_RD = torch.stack([p.request.hidden for p in repeats if p.request.hidden is not None])
                self._sample([p.request for p in repeats], self.runner.logits(hidden_RD))
                for piece in repeats:
                    piece.request.hidden = None
        except BaseException:  # states may be half advanced, exports unwritten
            for request in taking_part:
                if request.rid in self._requests:
                    self.memory.take_back(request)
            self.counts["failed_steps"] += 1
            self._events += 1
            raise
        self._pace.add(decoding, sum(p.tokens for p in pieces) - decoding, time.perf_counter() - started)

    def _forward(self, pieces: list[Piece]) -> None:
        with self.agreement.naming("a collective of the forward pass"):
            if self.others is not None:
                self.others.step(bool(pieces), bool(self._requests))
            if not pieces:
                return
            forward_started = time.perf_counter()
            with self._others_may_act():
                hidden_RD, logits_RV = self.runner.run(pieces)
            self._forward_seconds += time.perf_counter() - forward_started
        self._commit(pieces, hidden_RD, logits_RV)

    @contextmanager
    def _others_may_act(self) -> Iterator[None]:
        """While the step that runs touches nothing of what the lock guards. It is held once here."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()

    def _decide(self) -> Schedule:
        """The schedule of this step; the last one again while each running request decodes and nothing has changed for those
        who wait: their turn comes with an event, or, where it is a matter of time, within REFRESH_STEPS."""
        running = [r for r in self._requests.values() if r.slot >= 0]
        version = (self._events, self.index.clock, self.index.evictions, self.num_steps // REFRESH_STEPS)
        if version == self._settled_at and all(len(r.tokens) <= len(r.table) * self.block_size for r in running):
            self.counts["repeated_schedules"] += 1
            return self._settled
        waiting = self._next_in_line(running)
        resources = self._resources(running)
        self._look_up(waiting, resources)
        if self.prefix_cache and waiting:
            self._find_dependencies(running, waiting)
        candidates = [self._running_candidate(r) for r in running] + [self._waiting_candidate(r) for r in waiting]
        plan = self._schedule(candidates, resources)
        if len(waiting) < len(self._requests) - len(running):
            plan.reasons.update(dict.fromkeys(self._requests.keys() - {c.rid for c in candidates}, "line"))
        is_steady = len(plan.run) == len(running) and all(r.is_decoding for r in running)
        is_steady = is_steady and not (plan.admit or plan.preempt or plan.prefetch or self._expert_budget)
        self._settled, self._settled_at = plan, version if is_steady else None
        return plan

    def _next_in_line(self, running: list[Request]) -> list[Request]:
        """Those who wait and can be of interest now: as many as there are seats, and some more for those held back."""
        waiting = [r for r in self._requests.values() if r.slot < 0]
        most = max(0, self.max_num_seqs - len(running)) + LOOK_PAST
        if len(waiting) > most:
            if self.scheduler != "fcfs":
                waiting.sort(key=lambda r: r.rid - DEFAULT_POLICY.priority_worth * r.priority)
            del waiting[most:]
        return waiting

    def _look_up(self, waiting: list[Request], resources: Resources) -> None:
        """What the cache holds for those who wait: of the first in line in every step, of the others now and then."""
        seats = resources.room_blocks // resources.slot_blocks
        first = max(LOOK_UP_LEAST, min(LOOK_UP_FIRST, seats))
        for place, request in enumerate(waiting):
            if place < first or request.reuse_version < 0 or (self.num_steps + place) % REFRESH_STEPS == 0:
                self.memory.look_up(request, self.num_steps)

    def _running_candidate(self, request: Request) -> Candidate:
        done, total, prompt, step = request.done, len(request.tokens), len(request.prompt), self.num_steps
        kept = max(request.saved[-1].position, request.reuse) if request.saved else request.reuse
        return Candidate(
            request.rid, request.rid, request.priority, True, done, total, done >= prompt and total - done <= 1,
            request.counted_blocks, request.unshared, 0, None, "none", 0,
            request.params.max_new_tokens - total + prompt, max(0, done - kept),
            step - request.last_step, request.expert_loads, step - request.admitted_step,
        )  # fmt: skip

    def _waiting_candidate(self, request: Request) -> Candidate:
        total, prompt = len(request.tokens), len(request.prompt)
        return Candidate(
            request.rid, request.rid, request.priority, False, 0, total, False, request.reuse_shared, 0,
            request.expected_reuse, request.waits_for, request.fetch_state, request.fetch_bytes,
            request.params.max_new_tokens - total + prompt, 0, self.num_steps - request.last_step, request.expert_loads,
        )  # fmt: skip

    def _resources(self, running: list[Request]) -> Resources:
        layout = self.pools.layout
        if not self._stall_tokens or self.num_steps % REFRESH_STEPS == 0:
            self._stall_tokens = self.agreement.least([self._pace.tokens()])[0]
        return Resources(
            room_blocks=self.memory.room_blocks(running), slot_blocks=layout.blocks_per_page,
            total_blocks=self.pool.total_blocks, block_size=self.block_size, max_num_seqs=self.max_num_seqs,
            max_tokens_per_step=self.max_tokens_per_step, expert_budget=self._expert_budget,
            stall_tokens=self._stall_tokens,
        )  # fmt: skip

    def _find_dependencies(self, running: list[Request], waiting: list[Request]) -> None:
        """Of several requests with one beginning, one computes it; the others wait for that one.

        Digests are chained, so equal ones at a block mean equal tokens up to its end. A request compares the first block
        beyond what it would reuse.
        """
        wanted = {r.rid: -(-r.reuse // self.block_size) for r in waiting if not r.has_prefilled}
        blocks = set(wanted.values())
        computes: dict[bytes, int] = {}  # a beginning -> who computes it, or will

        def lead(leader: Request) -> None:
            digests = leader.chain
            for block in blocks:
                if block < len(digests):
                    computes.setdefault(digests[block], leader.rid)

        for request in running:
            if not request.has_prefilled:
                lead(request)
        for request in sorted(waiting, key=lambda r: (-r.priority, r.rid)):
            block, waited_for = wanted.get(request.rid, len(request.chain)), request.waited_for
            leader = computes.get(request.chain[block]) if block < len(request.chain) else None
            if leader is not None and leader not in waited_for and len(waited_for) >= MAX_LEADERS:
                leader = None
            request.waits_for = leader
            if leader is None:
                lead(request)
            else:
                waited_for.add(leader)

    def _prepare(self, request: Request, count: int) -> Piece | None:
        """The next piece of a request that was chosen to run, with its memory; None where that is short after all."""
        is_new = not request.is_running
        followers = [r for r in self._requests.values() if r.waits_for == request.rid] if is_new else []
        piece = self.memory.prepare(request, count, followers)
        if piece is not None:
            request.last_step = self.num_steps
            if is_new:
                request.admitted_step, request.waits_for = self.num_steps, None
        return piece

    def _preempt(self, request: Request, how: str) -> None:
        self.memory.preempt(request, how)
        request.last_step = self.num_steps

    # After the forward.

    def _commit(self, pieces: list[Piece], hidden_RD: Tensor, logits_RV: Tensor) -> None:
        sampled, row = [], 0
        for request, count, _ in pieces:
            self.counts["decode_tokens" if request.is_decoding else "prefill_tokens"] += count
            request.done += count
            if request.read_from is not None:
                request.read_from.pins -= 1
                request.read_from = None
            self.memory.pack(request.saved)
            if request.done == len(request.tokens):
                for snapshot in request.saved:
                    if snapshot.position == request.done:
                        snapshot.hidden = hidden_RD[row].clone()
                sampled.append(request)
                row += 1
        self._sample(sampled, logits_RV)
        for request, _, _ in pieces:
            if request.rid in self._requests and request.is_running:
                self.memory.keep_decode_state(request)

    def _sample(self, requests: list[Request], logits_RV: Tensor) -> None:
        """Choose each row's next token by its own parameters alone. What goes wrong with a row ends its request alone."""
        if not requests:
            return
        is_plain = [is_plain_greedy(request.params) for request in requests]
        best, tokens = logits_RV.max(-1) if any(is_plain) else (logits_RV.amax(-1), torch.zeros(len(requests)))
        is_finite, greedy = torch.isfinite(best).tolist(), tokens.long().tolist()
        for row, request in enumerate(requests):
            try:
                with self._others_may_act():
                    output = next_output(request, logits_RV[row], is_finite[row], greedy[row])
            except RowError as error:
                self._fail(request, str(error))
                if error.is_state_bad:
                    self.memory.distrust(request)
                continue
            is_first_time, request.has_prefilled = not request.has_prefilled, True
            try:
                if is_first_time or request.saved:
                    self.memory.publish(request)
            finally:  # the token is chosen, and its text is told apart from the next one's
                self._take(request, output)

    def _take(self, request: Request, output: RequestOutput) -> None:
        now = time.monotonic()
        if not request.first_token_at:
            request.first_token_at = now
            name, seconds = "first_token", now - request.added_at
        else:
            name, seconds = "between_tokens", now - request.last_token_at
        self._latencies[f"{name}_s"].append(seconds)
        self._latency_totals[f"{name}_seconds_sum"] += seconds
        self._latency_totals[f"{name}_seconds_count"] += 1
        request.last_token_at = now
        request.tokens += output.token_ids
        request.text += output.text
        request.logprobs += output.logprobs or []
        if request.penalties is not None:
            request.penalties.add(output.token_ids[0])
        self.counts["generated_tokens"] += 1
        self._tell(output)
        if output.finish_reason is not None:
            self._finish(request, output.finish_reason, is_published=True, is_announced=False)

    def _fail(self, request: Request, error: str) -> None:
        """A request that went wrong leaves nothing behind: what it wrote and nobody else reads is zeroed."""
        request.error = error
        self.memory.clear(request)
        self._finish(request, "error", is_published=False)

    def _finish(self, request: Request, reason: str, *, is_published: bool, is_announced: bool = True) -> None:
        try:
            if is_published:
                self.memory.publish_end(request)
        finally:  # it has its last token, whatever becomes of its state
            self._leave(request, reason, is_published, is_announced)

    def _leave(self, request: Request, reason: str, is_published: bool, is_announced: bool) -> None:
        self.memory.release(request)
        if not is_published and not request.has_prefilled:
            self.memory.withdraw(request)
        if self.tiers is not None:
            self.tiers.cancel(request)
        if not self.prefix_cache:
            self.index.forget(request.root)
        rest = ""
        if is_announced and reason != "error" and request.decoder is not None:  # what might have begun a stop text
            rest = request.shown.feed(request.decoder.finish()) + request.shown.finish()
            request.text += rest
        now = time.monotonic()
        self.counts[f"finished_{reason}"] += 1
        results = self._own_results if request.rid in self._listeners else self._results
        results[request.rid] = GenerationResult(
            rid=request.rid, token_ids=request.generated, text=request.text, finish_reason=reason,
            reused_tokens=request.reused_tokens,
            metrics={
                "queue_s": (request.admitted_at or now) - request.added_at,
                "first_token_s": (request.first_token_at or now) - request.added_at, "total_s": now - request.added_at,
                "preemptions": request.preemptions, "replayed_tokens": request.replayed_tokens,
            },
            logprobs=request.logprobs if request.params.logprobs is not None else None, error=request.error,
            heat=request.heat,
        )  # fmt: skip
        if len(self._results) > KEPT_RESULTS:
            del self._results[next(iter(self._results))]
        del self._requests[request.rid]
        self._events += 1
        if is_announced:
            self._tell(RequestOutput(request.rid, [], rest, finish_reason=reason, error=request.error))

    def _tell(self, output: RequestOutput) -> None:
        self._listeners.get(output.rid, self._outputs).append(output)

    # Whole requests.

    def generate(
        self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None = None, **options: Any
    ) -> list[GenerationResult]:
        """Add all prompts and step until each is finished; results in the order of the prompts.

        When it ends with an exception, of `add` or of a step, or is interrupted, its requests are aborted.
        """
        if isinstance(prompts, (str, bytes, dict)) or not isinstance(prompts, Iterable):
            raise ValueError(f"generate: want prompts to be a list of prompts, got {prompts!r}")
        prompts = list(prompts)
        if prompts and as_int(prompts[0]) is not None and getattr(prompts[0], "ndim", 0) == 0:
            raise ValueError(f"generate: want prompts to be a list of prompts, got token ids {prompts[:3]}")
        many = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(many) != len(prompts):
            raise ValueError(f"generate: want one SamplingParams or {len(prompts)}, got {len(many)}")
        groups: list[range] = []  # the numbers of each prompt's samples
        try:
            for prompt, one in zip(prompts, many):
                self._listen(groups, prompt, one, options, lambda: deque(maxlen=0))
            if self.others is not None:
                self.others.is_busy = True  # until a step has told
            while self._step_for(groups):
                pass
            return [self._collect(group) for group in groups]
        finally:
            for group in groups:
                self._stop_listening(group)

    def _step_for(self, groups: list[range]) -> bool:
        """A step, if it is still needed."""
        with self._step_lock:
            is_needed = any(rid in self._requests for group in groups for rid in group) or self._are_others_busy()
            is_needed = is_needed and not self._is_closed
            if is_needed:
                self._step()
            return is_needed

    def result(self, rid: int) -> GenerationResult:
        """The result of a finished request that was added by hand, once; the latest 1,024 are kept.

        Raises: KeyError for any other.
        """
        with self._lock:
            result = self._results.pop(rid, None)
        if result is None:
            raise KeyError(
                f"result: want rid of a finished request, whose result was not taken and is among the latest {KEPT_RESULTS}, "
                f"got {rid!r}"
            )
        return result

    def _collect(self, group: range) -> GenerationResult:
        samples = [self._own_results.pop(rid) for rid in group]
        return samples[0] if len(samples) == 1 else replace(samples[0], samples=samples)

    def has_unfinished(self) -> bool:
        """Whether `step` has something to do or to tell; with data_parallel, for any group at the last step."""
        return bool(self._requests or self._outputs) or self._are_others_busy()

    def _are_others_busy(self) -> bool:
        return self.others is not None and self.others.is_busy

    def stream(self, prompt: Any, params: SamplingParams | None = None, **options: Any) -> Iterator[RequestOutput]:
        """The outputs of one request as they come; others go on beside it. Closing the iterator aborts the request."""
        heard: deque[RequestOutput] = deque()
        group = self._listen_to_one(prompt, params, options, heard)
        try:
            while True:
                while heard:
                    output = heard.popleft()
                    yield output
                    if output.finish_reason is not None:
                        return
                with self._step_lock:
                    if not heard:
                        self._step()
        finally:
            self._stop_listening(group)

    async def astream(
        self, prompt: Any, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """`stream` for asyncio. One thread steps for all such streams; the event loop waits for no forward.

        An exception of a step ends every stream that it steps for.
        Raises: ValueError also on several ranks, which would see streams begin at different steps.
        """
        if self.agreement.all is not None and self.agreement.all.size() > 1:
            raise ValueError(
                f"astream: want a model on one rank, got {self.agreement.all.size()}: there all add and step alike"
            )
        heard = AsyncListener()
        group = self._listen_to_one(prompt, params, options, heard)
        try:
            with self._lock:
                if self._step_thread is None:
                    end_openmp_team()
                    self._step_thread = threading.Thread(target=self._step_for_streams, name="kimi_k3 steps")
                    self._step_thread.start()
            while True:
                output = await heard.next()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._stop_listening(group)

    def _step_for_streams(self) -> None:
        """Step while a request of an asyncio stream is unfinished."""
        while True:
            with self._lock:
                streams = {rid: heard for rid, heard in self._listeners.items() if isinstance(heard, AsyncListener)}
                for rid in [rid for rid, heard in streams.items() if heard.is_gone]:
                    self._stop_listening(range(rid, rid + 1))
                if not streams.keys() & self._requests.keys():
                    self._step_thread = None
                    return
            try:
                self._step()
            except BaseException as error:
                with self._lock:
                    self._step_thread = None
                    for heard in self._listeners.values():
                        if isinstance(heard, AsyncListener):
                            heard.append(error)
                return

    def _listen_to_one(
        self,
        prompt: Any,
        params: SamplingParams | None,
        options: dict[str, Any],
        heard: deque[RequestOutput] | AsyncListener,
    ) -> range:
        if params is not None and getattr(params, "n", 1) != 1:
            raise ValueError(f"stream: want n == 1, got {params.n}")
        if self.others is not None:
            raise ValueError("stream: with data_parallel all ranks step equally often: want add and step")
        groups: list[range] = []
        self._listen(groups, prompt, params, options, lambda: heard)
        return groups[0]

    def _listen(
        self, groups: list[range], prompt: Any, params: SamplingParams | None, options: dict[str, Any],
        hearing: Callable[[], deque[RequestOutput] | AsyncListener],
    ) -> None:  # fmt: skip
        """Add a request whose outputs, to what `hearing` makes, and results are this caller's; its numbers go to `groups`."""
        with self._lock:
            group = range(self._next_rid, self._next_rid + (as_int(getattr(params, "n", 1)) or 1))
            try:
                self._listeners.update((rid, hearing()) for rid in group)
                self.add(prompt, params, **options)
                groups.append(group)
            except BaseException:
                if any(rid in self._requests for rid in group):
                    self._stop_listening(group)
                else:  # refused: these numbers are the next request's, so not when the step that runs ends
                    for rid in group:
                        self._listeners.pop(rid, None)
                raise

    def _stop_listening(self, group: range) -> None:
        with self._lock:
            if self._is_stepping:
                self._after_step.append(lambda: self._stop_listening(group))
                return
            for rid in group:
                if rid in self._requests:
                    self._finish(self._requests[rid], "abort", is_published=False)
                self._listeners.pop(rid, None)
                self._own_results.pop(rid, None)

    def close(self) -> None:
        """Abort what runs, write what is kept to the tiers that outlive the process, and free the memory.

        `generate`, `stream` and `astream` that are under way end with what they have and the finish_reason "abort".
        Raises: ValueError from inside a step.
        """
        with self._step_lock, self._lock:
            if self._is_closed:
                return
            self._refuse_if_stepping("close")
            for request in list(self._requests.values()):
                self._finish(request, "abort", is_published=False)
            self.memory.close()
            self.expert_changes.close()
            self.record_trace(None)
            self._is_closed = True

    def __enter__(self) -> KimiK3Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def clear_prefix_cache(self) -> None:
        """Forget all prefixes, after the model's weights have changed (`load_state_dict`, an adapter): until then hits go on
        from what the old ones computed. What lies in tiers is told apart by the weights, which are read anew: it serves
        the old ones only. Every rank calls it.

        Raises: ValueError while requests are unfinished.
        """
        with self._step_lock, self._lock:
            self._refuse_if_closed()
            if self._requests:
                raise ValueError(f"clear_prefix_cache: want no unfinished requests, got {len(self._requests)}")
            self.memory.clear_prefix_cache()
            self._weights = self._told_weights()
            self._root = self._root_key(self.runner.is_invariant)

    # What it says of itself.

    def stats(self) -> dict[str, Any]:
        """Counts since the start and the state now: requests, tokens, memory, hits and misses, latencies in seconds."""
        with self._lock:
            live = self._requests.values()
            running = sum(r.is_running for r in live)
            parked = sum(r.is_parked for r in live)
            out: dict[str, Any] = {
                "running": running, "waiting": len(live) - running - parked, "parked": parked, "steps": self.num_steps,
                "slots_live": running, "slots_snapshots": self.index.num_snapshots, "slots_free": self.pool.free_pages,
                "pages": self.pool.num_pages, "blocks_used": self.pool.num_blocks,
                "blocks_cached": self.index.num_blocks, "blocks_free": self.pool.free_blocks,
                "blocks_snapshots": self.index.num_snapshot_blocks, "snapshot_bytes": self.pools.layout.snapshot_bytes,
                "bytes_total": self.pools.num_pages * self.pools.layout.page_bytes,
                "evictions": self.index.evictions, "step_seconds": self._step_seconds,
                "forward_seconds": self._forward_seconds, **self.counts, **self._latency_totals,
            }  # fmt: skip
            for name, values in self._latencies.items():
                recent = sorted(values)
                if recent:
                    out[name] = {q: recent[min(len(recent) - 1, int(len(recent) * q / 100))] for q in (50, 95, 99)}
            if self.tiers is not None:
                out["tiers"] = self.tiers.stats()
            out["expert_changes"] = self.expert_changes.stats()
            return out

    def prometheus(self, all_experts: bool = False) -> str:
        """`stats` and, where they are counted, expert counts as Prometheus text; all_experts: not just the hottest few.

        No collective. On several ranks `worker` is the rank's number, its bytes are those it holds, and over all workers
        the tokens add up to tokens x top-k: those of an expert are told by the rank of its first active copy, even where
        copies share them, and by rank 0 where every rank holds all experts or a part of each. With data_parallel a
        group tells its own requests' choices, each expert's by the tp rank that it has in its group. An expert that
        `replace_experts` moves takes its count along to the other worker.
        """
        metrics = metrics_of(self.stats()) + self.expert_changes.metrics()
        experts = self.runner.experts
        if experts is not None:
            everyone, alike = self.agreement.all, self.agreement.group
            is_mine = experts.owners() % self.agreement.size == (0 if alike is None else alike.rank())
            metrics += expert_metrics(
                experts.counts.cpu(), experts.layers, experts.bytes_per_layer, is_mine=is_mine,
                worker=str(0 if everyone is None else everyone.rank()), hottest=None if all_experts else 4,
            )  # fmt: skip
        return exposition(metrics)

    def heat_map(self, request_id: int) -> list[float]:
        """The share of attention that each block of a request's tokens drew lately, the mean over heads and MLA layers.

        A decaying average of the recorded steps, which adds up to 1. Empty before the first one.

        Raises: ValueError where nothing is recorded (`heat_every=0`); KeyError for a request that is neither running nor
            waiting and whose result was taken: its `heat` holds the same.
        """
        with self._lock:
            if not self.runner.heat_every:
                raise ValueError("heat_map: heat is not recorded; want KimiK3Generator(heat_every=...) above 0")
            known = self._requests.get(request_id) or self._results.get(request_id)
            if known is None:
                raise KeyError(
                    f"heat_map: want request_id of a request that runs or waits or whose result is kept, got {request_id!r}"
                )
            return list(known.heat)

    def count_experts(self, is_on: bool = True) -> None:
        """Start to count from zero which experts tokens choose, or stop; off costs nothing."""
        with self._step_lock, self._lock:
            if self.runner.experts is not None:
                self.runner.experts.record(None)
            with torch.inference_mode(False):
                self.runner.experts = ExpertCounts(self.model) if is_on else None
            self._expert_budget = 0.0
            for request in self._requests.values():
                request.experts, request.expert_loads = None, ()

    def limit_experts(self, placement: ExpertPlacement | None, budget: float = 0.0) -> None:
        """Follow which experts each request chooses of late, and admit none that would overload a worker, but for one that has
        waited `Policy.patience` steps.

        Args:
            placement: which worker holds which experts, until a change by `replace_experts` ends: then as it left them;
                None: no more of it.
            budget: choices a layer and a step that the busiest worker may get by prediction; 0: follow only. A step in
                which those that run exceed it is counted as `overloaded_steps`. (All workers together get a choice for
                each expert per token of each token.)
        Raises: ValueError for a placement of other layers or experts, or a negative budget.
        """
        if not budget >= 0 or (placement is None and budget):
            raise ValueError(
                f"limit_experts: want budget >= 0, and 0 where placement is None, got {budget!r}, {placement!r}"
            )
        with self._step_lock, self._lock:
            if self.runner.experts is None and placement is not None:
                self.count_experts()
            if self.runner.experts is not None:
                self.runner.experts.follow(placement)
            self._expert_budget = budget
            self._events += 1
            for request in self._requests.values():
                request.experts, request.expert_loads = None, ()

    def expert_counts(self) -> Tensor:
        """[MoE layers, E] int64 on the CPU since `count_experts`: a row adds up to tokens that ran x experts per token. With
        data_parallel those of all groups: every rank calls it.

        Raises: ValueError unless they are being counted.
        """
        with self._step_lock, self._lock:
            if self.runner.experts is None:
                raise ValueError("expert_counts: experts are not counted; call count_experts() first")
            counts = self.runner.experts.counts
            return (counts if self.others is None else self.others.sum(counts)).cpu()

    def replace_experts(self, placement: ExpertPlacement, *, deadline_s: float = 30.0) -> None:
        """Begin to move the experts to another placement, while steps go on as before. Every rank calls it between the same
        two steps, with the same placement; `use_placement` came before.

        Copies travel in the background, and each layer switches at a step boundary, at the same step on every rank. No
        output changes. `stats()["expert_changes"]` and `prometheus` tell when it completed; one that fails or has not
        completed after `deadline_s` seconds is given up and counted: layers not yet switched stay as they were. So that
        steps keep links and cores, at most 0.8 GB/s travel to or from a rank: give large moves a longer deadline.
        `model.expert_placement` is the placement in use.
        Raises: ValueError if it does not fit, it or deadline_s differs between ranks, or another change is under way.
        """
        with self._step_lock, self._lock:
            self._refuse_if_closed()
            self.expert_changes.start(placement, deadline_s)

    def record_trace(self, path: str | Path | None) -> None:
        """Write the experts of each following forward's tokens to `path`, in the form of `kimi_k3.parallel.traces`; None:
        no more. Counts experts too. One rank writes where several run the same requests. With data_parallel each group
        writes its own, its number before the ending: routing.dp0.jsonl, routing.dp1.jsonl, ...
        """
        with self._step_lock, self._lock:
            if self.runner.experts is None and path is not None:
                self.count_experts()
            if self.runner.experts is not None:
                self.runner.experts.record(self._own_trace(path))

    def _own_trace(self, path: str | Path | None) -> Path | None:
        """The file that this rank writes, if any: the first rank of those that run the same requests does."""
        if path is None:
            return None
        if self.others is None:
            return Path(path) if self.agreement.all is None or self.agreement.all.rank() == 0 else None
        own = Path(path).with_stem(f"{Path(path).stem}.dp{self.others.group}")
        return own if self.agreement.tp_rank == 0 else None

    # Set-up.

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise ValueError("KimiK3Generator: it is closed")

    def _refuse_if_stepping(self, what: str) -> None:
        if self._is_stepping:
            raise ValueError(f"{what}: want no call from inside a step (a logits_processor may add and abort requests)")

    def _told_weights(self) -> str:
        """What tells the weights as they are now from others. Where no tier outlives the generator its entries serve nobody
        else: then a name made afresh.
        """
        is_shared = self.tiers is not None and any(tier.is_shared for tier in self.tiers.stack.tiers)
        (is_read,) = self.agreement.most([int(is_shared)])  # by every rank, or by none
        return self.agreement.weights_digest(self.model) if is_read else secrets.token_hex(16)

    def _root_key(self, batch_invariant: bool) -> bytes:
        """What two caches must agree in before a prefix of one may serve the other."""
        model = self.model
        parts = [
            "kimi_k3 prefix 1", json.dumps(model.config.to_dict(), sort_keys=True, default=str), str(model.dtype),
            str(self.block_size), self._weights,
            f"batch invariant, {self.agreement.tp_size} ranks" if batch_invariant else "",
            *(["bf16 snapshots"] if self.pools.layout.has_bf16_snapshots else []),
        ]  # fmt: skip
        tiers = self.tiers.stack.tiers if self.tiers is not None else ()
        codecs = {tier.codec.format for tier in tiers if tier.codec != EXACT}
        if codecs:  # what follows a hit is rounded
            parts.append(f"lossy tiers {sorted(codecs)}")
        if (lossy := getattr(model, "lossy_expert_activations", None)) is not None:
            parts.append(f"expert activations in {lossy}")
        return hashlib.sha256("\n".join(parts).encode()).digest()

    def _with_images(
        self, ids: list[int], boundaries: set[int], extra_key: bytes, pixel_values: Tensor, grid_thws: Tensor | None
    ) -> tuple[list[int], Tensor, set[int], bytes]:
        """The prompt with each placeholder grown to its image's tokens, and the embeddings that go with it."""
        model: Any = self.model
        media_id = model.config.media_placeholder_token_id
        if not hasattr(model, "image_features") or grid_thws is None or media_id is None:
            raise ValueError("add: pixel_values want grid_thws and a KimiK3ForConditionalGeneration")
        from kimi_k3.vision import splice_packed

        with torch.no_grad():
            given = torch.tensor(ids, device=model.device)
            features = model.image_features(pixel_values, grid_thws)
            embeds, token_index, _ = splice_packed(given, features, model.model.embed_tokens(given), media_id)
        places = torch.bincount(token_index, minlength=len(ids)).cumsum(0).tolist()
        digest = hashlib.sha256(str((grid_thws.tolist(), pixel_values.dtype)).encode())
        digest.update(pixel_values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        grown = given[token_index].tolist()
        return grown, embeds, {places[b - 1] for b in boundaries}, extra_key + digest.digest()
