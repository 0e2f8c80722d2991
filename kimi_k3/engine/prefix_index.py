"""Which token prefixes are in the cache: latent blocks for every token of a kept path, KDA states at chosen positions.

A tree of blocks: a node is up to `block_size` tokens after its parent's. A snapshot is a state at a position inside or at
the end of a node. A hit is the deepest snapshot at or before the end of the match: the tokens from there on run again, and
latents beyond the last snapshot of a path would never be used, so they are not kept. Numbers only: slots and blocks are
those of a PagePool.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kimi_k3.engine.page_pool import PagePool

# How much more a snapshot where a prompt, a message or an answer ends is worth than one in between.
END_WEIGHT = 8.0


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
    used: int = 0
    heat: float = 0.0  # the share of attention that its block drew lately; 0 where that is not recorded

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def all_children(self) -> Iterator[Node]:
        for nodes in self.children.values():
            yield from nodes


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


def key_at(root: bytes, tokens: Sequence[int], position: int, block_size: int) -> bytes:
    """The digest of `tokens[:position]` under a root: block by block, then the rest."""
    key = root
    for start in range(0, position, block_size):
        key = chain(key, tokens[start : min(start + block_size, position)])
    return key


def choose_stride(length: int, slots: int, block_size: int = 64) -> int:
    """The finest grid of snapshots over `length` tokens that needs at most `slots`: block_size times a power of two;
    0: none."""
    if slots < 1 or length < block_size:
        return 0
    stride = block_size
    while length // stride > slots:
        stride *= 2
    return stride


class PrefixIndex:
    """
    Args:
        pool: where slots and blocks come from; the index frees what it owns there.
        block_size: tokens.     slot_bytes, block_bytes: what a snapshot and a block weigh.
        snapshot_weight, latent_weight: their bytes count so much when the cost of recomputing is set against them.
        on_evict: called with everything that is about to be freed.
    """

    def __init__(
        self, pool: PagePool, block_size: int, slot_bytes: int, block_bytes: int,
        snapshot_weight: float = 1.0, latent_weight: float = 1.0, on_evict: Callable[[Evicted], None] | None = None,
    ) -> None:  # fmt: skip
        self.pool, self.block_size = pool, block_size
        self.slot_bytes, self.block_bytes = slot_bytes, block_bytes
        self.snapshot_weight, self.latent_weight = snapshot_weight, latent_weight
        self.on_evict = on_evict
        self._roots: dict[bytes, Node] = {}
        self._snapshots: dict[Snapshot, Node] = {}
        self.num_blocks = 0  # of nodes
        self.clock = 0
        self.evictions = 0

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def num_snapshot_blocks(self) -> int:
        return sum(len(snapshot.blocks) for snapshot in self._snapshots)

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
                common = _common(child.tokens, chunk)
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
            node.used = self.clock
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
        last = max((s.position for s in wanted if s.position <= len(tokens)), default=0)
        node = self._roots.setdefault(root, Node((), 0, root, None))
        for index, start in enumerate(range(0, last, self.block_size)):
            chunk = tuple(tokens[start : min(start + self.block_size, last)])
            node = self._extend(node, chunk, start, blocks[index])
            node.used = self.clock
            node.heat = heat[index] if index < len(heat) else node.heat
            for snapshot in [s for s in wanted if start < s.position <= start + len(chunk)]:
                wanted.remove(snapshot)
                snapshot.used = self.clock
                kept = node.snapshots.get(snapshot.position)
                if kept is None:
                    node.snapshots[snapshot.position] = snapshot
                    self._snapshots[snapshot] = node
                else:
                    kept.is_end, kept.used = kept.is_end or snapshot.is_end, self.clock
                    kept.hidden = snapshot.hidden if kept.hidden is None else kept.hidden
                    snapshot.free(self.pool)
        for snapshot in wanted:
            snapshot.free(self.pool)
        self._drop_root_if_empty(root)

    def _extend(self, parent: Node, chunk: tuple[int, ...], start: int, block: int) -> Node:
        """The child of `parent` that begins with `chunk`, added or grown where needed."""
        found = parent.children.setdefault(chunk[0], [])
        for child in found:
            common = _common(child.tokens, chunk)
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
        of paths are left.
        """
        candidates = [s for s in self._snapshots if not s.pins]
        if not candidates:
            return False
        if len(self._snapshots) * self.slot_bytes > self.num_blocks * self.block_bytes:
            between = [s for s in candidates if self.is_between(s)]
            candidates = between or candidates
        self.drop(min(candidates, key=self._value))
        return True

    def is_between(self, snapshot: Snapshot) -> bool:
        """Whether what is kept goes on after it."""
        node = self._snapshots[snapshot]
        return any(position > snapshot.position for position in node.snapshots) or bool(node.children)

    def _value(self, snapshot: Snapshot) -> tuple[float, int, int]:
        """Tokens that its next use would save for each byte it holds, fading with age; then the coarser position.

        The blocks in which attention looked of late make it up to twice as dear: a guess at which branch goes on, and no
        more, as exact attention reads cold blocks as well.
        """
        node = self._snapshots[snapshot]
        before, heat = self._stretch(node, snapshot.position)
        saved = snapshot.position - before
        held = self.snapshot_weight * self.slot_bytes
        if not self.is_between(snapshot):
            held += self.latent_weight * self.block_bytes * saved / self.block_size
        age = self.clock - snapshot.used
        weight = END_WEIGHT if snapshot.is_end else 1.0
        return (
            weight * (1 + heat) * saved / held / (1 + age),
            snapshot.position & -snapshot.position,
            -snapshot.position,
        )

    def _stretch(self, node: Node | None, position: int) -> tuple[int, float]:
        """The position of the snapshot before this one, and the heat of the blocks in between."""
        heat = 0.0
        while node is not None:
            heat += node.heat
            before = max((p for p in node.snapshots if p < position), default=0)
            if before:
                return before, heat
            node = node.parent
        return 0, heat

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


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    if a == b:  # most often
        return len(a)
    for index, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return index
    return min(len(a), len(b))
