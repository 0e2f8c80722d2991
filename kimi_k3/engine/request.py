"""One request: what was asked, what is known of it, and where its past lies."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kimi_k3.engine.prefix_index import Snapshot
from kimi_k3.generation import StopText
from kimi_k3.sampling import Penalties, SamplingParams


@dataclass
class TokenLogprobs:
    """Natural-log probabilities under the unfiltered distribution: of the token, and of the best ones."""

    token: float
    top: dict[int, float]


@dataclass
class RequestOutput:
    """What one request gained in one step.

    finish_reason: None while it goes on; "stop" (an end id), "stop_string", "length", "abort", "timeout" or "error".
    """

    rid: int
    token_ids: list[int]
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


@dataclass
class GenerationResult:
    """A finished request.

    token_ids: generated, the end id included.     text: without it; "" where the generator has no tokenizer.
    reused_tokens: tokens of the prompt that did not run through the layers for it.
    metrics: seconds (queue_s, first_token_s, total_s) and counts (preemptions, replayed_tokens).
    samples: all samples of the prompt where n > 1, this one first.     heat: see `KimiK3Generator.heat_map`.
    """

    rid: int
    token_ids: list[int]
    text: str
    finish_reason: str
    reused_tokens: int
    metrics: dict[str, float]
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    samples: list[GenerationResult] = field(default_factory=list)
    heat: list[float] = field(default_factory=list)


@dataclass(eq=False)
class Request:
    rid: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    priority: int
    root: bytes  # of its prefix keys
    chain: list[bytes]  # digests of whole blocks: of all of the prompt, and of generated ones once they were looked for
    boundaries: frozenset[int]  # positions whose state may be asked for again
    deadline: float
    embeds: Tensor | None  # [len(prompt), D] where images take part
    ends: frozenset[int]
    decoder: Any
    shown: StopText
    parent: int | None = None  # the first of several samples
    penalties: Penalties | None = None  # from its first sampling on, where there are any

    tokens: list[int] = field(default_factory=list)
    done: int = 0  # tokens that ran, or whose result was reused
    ran: int = 0  # the most of them before it was put back to waiting
    slot: int = -1
    read_from: Snapshot | None = None  # the state to start from, until the first piece has run
    started_from: Snapshot | None = None  # when it was last admitted
    table: list[int] = field(default_factory=list)  # block handles
    unshared: int = 0  # of them, those that nobody else held when the pool counted `shares` and it `counted_blocks`
    shares: int = -1
    counted_blocks: int = 0
    wanted: list[int] = field(default_factory=list)  # positions to snapshot, increasing
    stride: int = 0  # between snapshots while decoding; 0: none
    saved: list[Snapshot] = field(default_factory=list)  # taken, not yet published
    published: int = 0  # tokens whose latents the index may hold
    left: dict[Snapshot, int] = field(default_factory=dict)  # by its unfinished prefill, preempted; and when last used
    heat: list[float] = field(default_factory=list)  # of each block, see `Runner`; empty: not recorded
    experts: Tensor | None = None  # [MoE layers, E]: how often a token chose each of late; None: not followed
    expert_loads: tuple[float, ...] = ()  # choices a layer that a token adds to each expert worker
    hidden: Tensor | None = None  # of an exact repeat: the logits come from it
    has_prefilled: bool = False

    reuse: int = 0  # what the index would give now
    reuse_version: int = -1
    reuse_shared: int = 0
    fetch: Any = None  # a running read from the tiers, or a question to a far one
    far_positions: list[int] = field(default_factory=list)  # that it asks for
    asked_positions: set[int] = field(default_factory=set)  # of far tiers, since it last ran
    near_position: int = 0  # what a near tier has meanwhile
    fetch_keys: list[str] = field(default_factory=list)
    fetch_position: int = 0  # of the state that is fetched
    fetch_first: int = 0  # the first block that is fetched with it
    missed_positions: set[int] = field(default_factory=set)  # asked of the tiers in vain
    fetch_state: str = "none"
    fetch_bytes: int = 0
    restored: Counter[str] = field(default_factory=Counter)  # by tier: tokens of its last read
    waits_for: int | None = None
    waited_for: set[int] = field(default_factory=set)
    last_step: int = 0
    admitted_step: int = 0
    is_parked: bool = False

    reused_tokens: int = 0
    preemptions: int = 0
    replayed_tokens: int = 0
    added_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def expected_reuse(self) -> int:
        """Tokens that it would not compute when admitted now."""
        return max(self.reuse, self.fetch_position) if self.fetch_state == "ready" else self.reuse

    @property
    def is_running(self) -> bool:
        return self.slot >= 0

    @property
    def is_decoding(self) -> bool:
        return self.done >= len(self.prompt) and len(self.tokens) - self.done <= 1

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]
