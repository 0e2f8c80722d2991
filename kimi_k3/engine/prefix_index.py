"""Which token prefixes are in the cache: latent blocks for every token of a kept path, KDA states at chosen positions.

A tree of blocks: a node is up to `block_size` tokens after its parent's. A snapshot is a state at a position inside or at
the end of a node. A hit is the deepest snapshot at or before the end of the match: the tokens from there on run again, and
latents beyond the last snapshot of a path would never be used, so they are not kept. Numbers only: slots and blocks are
those of a PagePool.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kimi_k3.engine.page_pool import PagePool

# How much more a snapshot where a prompt, a message or an answer ends is worth than one in between.
END_WEIGHT = 8.0
# So much the bytes of either count when the cost of recomputing is set against them.
SNAPSHOT_WEIGHT, LATENT_WEIGHT = 1.0, 1.0
RANKED_PART = 16  # what is kept is valued anew once events (uses, publications, evictions) are this part of it


@dataclass(eq=False)
class Snapshot:
    """The state after `position` tokens of a path, in a slot or, rounded to bf16, in blocks (handles; then slot is -1).

    hidden: the last layer's output there, so that nothing need run.
    """

    position: int
    slot: int
    is_end: bool
    hidden: Any = None
    used: int = 0  # when, by the index's clock
    pins: int = 0  # readers in this step
    blocks: list[int] = field(default_factory=list)

    def free(self, pool: PagePool) -> None:
        if self.slot >= 0:
            pool.free_slot(self.slot)
        for block in self.blocks:
            pool.free_block(block)


@dataclass(eq=False)
class Node:
    tokens: tuple[int, ...]
    start: int  # position of the first token
    key: bytes  # digest of everything up to the last token
    parent: Node | None
    block: int = -1  # handle
    children: dict[int, list[Node]] = field(default_factory=dict)  # by first token
    snapshots: dict[int, Snapshot] = field(default_factory=dict)  # by position
    heat: float = 0.0  # the share of attention that its block drew lately; 0 where that is not recorded

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass
class Match:
    """What a prompt finds: `matched` tokens are known; `position` of them need not run (0: none).

    path: the nodes that cover `position`.     miss: why `position` < `matched`, or why nothing matched; "" for a full hit.
    """

    matched: int
    position: int
    snapshot: Snapshot | None
    path: list[Node]
    miss: str


@dataclass
class Evicted:
    """One snapshot that leaves, with the nodes that leave with it; handed to `on_evict` while its memory is intact."""

    node: Node
    snapshot: Snapshot
    path: list[Node]  # from the first block to the one that holds the position


def chain(key: bytes, tokens: Iterable[int]) -> bytes:
    """The digest of a prefix that is extended by `tokens`: SHA-256 over the former digest and the ids as int32."""
    return hashlib.sha256(key + array("i", tokens).tobytes()).digest()


def choose_stride(length: int, slots: int, block_size: int = 64) -> int:
    """The finest grid of snapshots over `length` tokens that needs at most `slots`: block_size times a power of two;
    0: none."""
    if slots < 1 or length < block_size:
        return 0
    stride = block_size
    while length // stride > slots:
        stride *= 2
    return stride


# What a snapshot is worth; the least goes first. (tokens that its next use would save for each byte it holds, fading with
# age; the power of two that divides its position; minus its position; whether it lies in between)
_Value = tuple[float, int, int, bool]
_Ranked = tuple[_Value, int, Snapshot]  # the number tells entries of one value apart: the first entered goes first


class PrefixIndex:
    """All prefixes that are kept for reuse: finds the longest one for a prompt, takes in new ones, and drops the one that is
    worth least when its memory is wanted.

    Args:
        pool: where slots and blocks come from; the index frees what it owns there.
        block_size: tokens.     slot_bytes, block_bytes: what a snapshot and a block weigh.
        on_evict: called with everything that is about to be freed.
    """

    def __init__(
        self, pool: PagePool, block_size: int, slot_bytes: int, block_bytes: int,
        on_evict: Callable[[Evicted], None] | None = None,
    ) -> None:  # fmt: skip
        self.pool, self.block_size = pool, block_size
        self.slot_bytes, self.block_bytes = slot_bytes, block_bytes
        self.on_evict = on_evict
        self._roots: dict[bytes, Node] = {}
        self._snapshots: dict[Snapshot, Node] = {}
        self.num_blocks = 0  # of nodes
        self.clock = 0
        self.evictions = 0
        self._ranked: tuple[list[_Ranked], list[_Ranked]] = ([], [])  # heaps: of ends of paths, of those in between
        self._num_ranked = 0
        self._ranked_at = 0  # the clock then
        self._rank_again_at = 0  # a count of events

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def num_snapshot_blocks(self) -> int:
        return sum(len(snapshot.blocks) for snapshot in self._snapshots)

    @property
    def num_events(self) -> int:
        return self.clock + self.evictions

    # What is known.

    def match(self, root: bytes, tokens: Sequence[int]) -> Match:
        """The deepest usable snapshot for a prompt. The whole prompt only where the last hidden vector is kept too."""
        node, matched = self._roots.get(root), 0
        best: Snapshot | None = None
        while node is not None and matched < len(tokens):
            chunk = tuple(tokens[matched : matched + self.block_size])
            following, longest = None, 0
            # Siblings may begin alike: a state inside the common part of any of them serves.
            for child in node.children.get(chunk[0], ()):
                common = common_length(child.tokens, chunk)
                if common > longest:
                    following, longest = child, common
                for snapshot in child.snapshots.values():
                    is_whole = snapshot.position == len(tokens) and snapshot.hidden is not None
                    is_usable = snapshot.position <= child.start + common and (
                        snapshot.position < len(tokens) or is_whole
                    )
                    if is_usable and (best is None or snapshot.position > best.position):
                        best = snapshot
            matched += longest
            node = following if longest == self.block_size else None
        position = 0 if best is None else best.position
        if matched == 0:
            miss = "unknown_prefix"
        elif position >= min(matched, len(tokens) - 1):
            miss = ""
        else:
            miss = "no_state" if best is None else "state_before_match"
        return Match(matched, position, best, [] if best is None else self.path_to(self._snapshots[best]), miss)

    def touch(self, match: Match) -> None:
        """A hit was used: what it stands on grows young again."""
        self.clock += 1
        for node in match.path:
            for snapshot in node.snapshots.values():
                if snapshot.position <= match.position:
                    snapshot.used = self.clock

    # What becomes known.

    def publish(
        self, root: bytes, tokens: Sequence[int], blocks: Sequence[int], snapshots: Iterable[Snapshot],
        heat: Sequence[float] = (),
    ) -> None:  # fmt: skip
        """Keep the states in `snapshots` with the latents before them.

        The index takes the slots (a position that it already has, or that lies past `tokens`, is freed) and its own
        references to those of `blocks` (handles, one for each block of `tokens`) that it lacks. `heat`: of these blocks.
        """
        self.clock += 1
        wanted = sorted(snapshots, key=lambda s: s.position)
        added: list[Snapshot] = []
        last = max((s.position for s in wanted if s.position <= len(tokens)), default=0)
        node = self._roots.setdefault(root, Node((), 0, root, None))
        for index, start in enumerate(range(0, last, self.block_size)):
            chunk = tuple(tokens[start : min(start + self.block_size, last)])
            node = self._extend(node, chunk, start, blocks[index])
            node.heat = heat[index] if index < len(heat) else node.heat
            for snapshot in [s for s in wanted if start < s.position <= start + len(chunk)]:
                wanted.remove(snapshot)
                snapshot.used = self.clock
                kept = node.snapshots.get(snapshot.position)
                if kept is None:
                    node.snapshots[snapshot.position] = snapshot
                    self._snapshots[snapshot] = node
                    added.append(snapshot)
                else:
                    kept.is_end, kept.used = kept.is_end or snapshot.is_end, self.clock
                    kept.hidden = snapshot.hidden if kept.hidden is None else kept.hidden
                    snapshot.free(self.pool)
        for snapshot in wanted:
            snapshot.free(self.pool)
        if added:
            before, _ = self._before(self._snapshots[added[0]], added[0].position)
            for snapshot in added if before is None else [before, *added]:  # the one before lies in between now
                self._enter(snapshot)
        self._drop_root_if_empty(root)

    def _extend(self, parent: Node, chunk: tuple[int, ...], start: int, block: int) -> Node:
        """The child of `parent` that begins with `chunk`, added or grown where needed."""
        found = parent.children.setdefault(chunk[0], [])
        for child in found:
            common = common_length(child.tokens, chunk)
            if common == len(chunk):
                return child
            if common == len(child.tokens):  # a shorter block that ends inside this one: the longer one takes its place
                self._free_block(child.block)
                self._take_block(block)
                child.tokens, child.block, child.key = chunk, block, chain(parent.key, chunk)
                return child
        self._take_block(block)
        child = Node(chunk, start, chain(parent.key, chunk), parent, block)
        found.append(child)
        return child

    def _take_block(self, block: int) -> None:
        self.pool.share_block(block)
        self.num_blocks += 1

    def _free_block(self, block: int) -> None:
        self.pool.free_block(block)
        self.num_blocks -= 1

    # What goes.

    def evict(self) -> bool:
        """Drop the snapshot whose loss costs least for its bytes, with the blocks only it needs. False: nothing to drop.

        While snapshots weigh more than latents, those in between go first, the finest grid first: at last only the ends
        of paths are left. Ages are those of the last ranking.
        """
        is_due = self.num_events >= self._rank_again_at
        victim = None if is_due else self._next_victim()
        if victim is None:  # or all that was ranked is gone or pinned
            self._rank()
            victim = self._next_victim()
        if victim is None:
            return False
        self.drop(victim)
        return True

    def _rank(self) -> None:
        """Value all that is kept."""
        self._ranked_at, self._ranked = self.clock, ([], [])
        self._rank_again_at = self.num_events + max(1, len(self._snapshots) // RANKED_PART)
        for number, snapshot in enumerate(self._snapshots):
            value = self._value(snapshot)
            self._ranked[value[-1]].append((value, number, snapshot))
        self._num_ranked = len(self._snapshots)
        for heap in self._ranked:
            heapq.heapify(heap)

    def _enter(self, snapshot: Snapshot) -> None:
        """Give it its place in the ranking, beside any that it had before; not where all are to be ranked anew."""
        if self.num_events < self._rank_again_at:
            value = self._value(snapshot)
            heapq.heappush(self._ranked[value[-1]], (value, self._num_ranked, snapshot))
            self._num_ranked += 1

    def _next_victim(self) -> Snapshot | None:
        """Takes the least off the ranking; one that has changed since it got its place there gets another first."""
        ends, between = self._ranked
        while ends or between:
            is_heavy = len(self._snapshots) * self.slot_bytes > self.num_blocks * self.block_bytes
            is_between = not ends or bool(between and (is_heavy or between[0] < ends[0]))
            value, _, snapshot = heapq.heappop(between if is_between else ends)
            if snapshot in self._snapshots and not snapshot.pins:
                if value == self._value(snapshot):
                    return snapshot
                self._enter(snapshot)
        return None

    def is_between(self, snapshot: Snapshot) -> bool:
        """Whether what is kept goes on after it."""
        node = self._snapshots[snapshot]
        return bool(node.children) or max(node.snapshots) > snapshot.position

    def _value(self, snapshot: Snapshot) -> _Value:
        """The blocks in which attention looked of late make it up to twice as dear: a guess at which branch goes on, and no
        more, as exact attention reads cold blocks as well."""
        before, heat = self._before(self._snapshots[snapshot], snapshot.position)
        saved = snapshot.position - (0 if before is None else before.position)
        is_between = self.is_between(snapshot)
        held = SNAPSHOT_WEIGHT * self.slot_bytes
        if not is_between:
            held += LATENT_WEIGHT * self.block_bytes * saved / self.block_size
        age = max(self._ranked_at - snapshot.used, 0)
        weight = END_WEIGHT if snapshot.is_end else 1.0
        worth = weight * (1 + heat) * saved / held / (1 + age)
        return worth, snapshot.position & -snapshot.position, -snapshot.position, is_between

    def _before(self, node: Node | None, position: int) -> tuple[Snapshot | None, float]:
        """The snapshot before this position, and the heat of the blocks in between."""
        heat = 0.0
        while node is not None:
            heat += node.heat
            if node.snapshots:
                before = max([p for p in node.snapshots if p < position], default=0)
                if before:
                    return node.snapshots[before], heat
            node = node.parent
        return None, heat

    def drop(self, snapshot: Snapshot) -> None:
        self._take_out(snapshot)
        snapshot.free(self.pool)

    def take_slot(self, snapshot: Snapshot) -> int:
        """As `drop`, but the slot, with the state in it, becomes the caller's."""
        self._take_out(snapshot)
        return snapshot.slot

    def _take_out(self, snapshot: Snapshot) -> None:
        node = self._snapshots[snapshot]
        if self.on_evict is not None:
            self.on_evict(Evicted(node, snapshot, self.path_to(node)))
        self.evictions += 1
        del self._snapshots[snapshot], node.snapshots[snapshot.position]
        while node.parent is not None and not node.snapshots and not node.children:
            parent = node.parent
            siblings = parent.children[node.tokens[0]]
            siblings.remove(node)
            if not siblings:
                del parent.children[node.tokens[0]]
            self._free_block(node.block)
            node = parent
        if node.parent is None:
            self._drop_root_if_empty(node.key)
        elif not node.children:
            self._enter(node.snapshots[max(node.snapshots)])  # now it is an end, and holds the latents before it
        if not self._snapshots:
            self._ranked, self._rank_again_at = ([], []), 0

    def _drop_root_if_empty(self, root: bytes) -> None:
        if root in self._roots and not self._roots[root].children:
            del self._roots[root]

    @staticmethod
    def path_to(node: Node) -> list[Node]:
        path: list[Node] = []
        step: Node | None = node
        while step is not None and step.parent is not None:
            path.append(step)
            step = step.parent
        return path[::-1]

    def discard(self, snapshot: Snapshot) -> bool:
        """Drop one without a word to `on_evict`; False where it is not kept, or being read."""
        if snapshot not in self._snapshots or snapshot.pins:
            return False
        told, self.on_evict = self.on_evict, None
        self.drop(snapshot)
        self.on_evict = told
        return True

    def forget(self, root: bytes) -> None:
        """Drop all that is kept under one root, without a word to `on_evict`."""
        told, self.on_evict = self.on_evict, None
        for snapshot, node in list(self._snapshots.items()):
            if self.path_to(node)[0].parent is self._roots.get(root):
                self.drop(snapshot)
        self.on_evict = told

    def clear(self) -> None:
        for snapshot in list(self._snapshots):
            self.drop(snapshot)

    def entries(self) -> Iterator[Evicted]:
        """Everything that is kept, as `drop` would hand it out."""
        for snapshot, node in self._snapshots.items():
            yield Evicted(node, snapshot, self.path_to(node))


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    if a == b:  # most often
        return len(a)
    for index, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return index
    return min(len(a), len(b))
