"""What requests hold of the cache memory: their slots and blocks, the prefix that they start from, the states they leave."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kimi_k3.engine.agreement import Agreement
from kimi_k3.engine.device_pools import STAGED, DevicePools, PoolLayout
from kimi_k3.engine.page_pool import PagePool
from kimi_k3.engine.prefix_index import Evicted, Match, PrefixIndex, Snapshot, choose_stride, common_length
from kimi_k3.engine.request import Request
from kimi_k3.engine.runner import Piece
from kimi_k3.engine.tier_store import TierStore

if TYPE_CHECKING:
    from kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM

AUTO_SHARE = 0.25  # of the free memory of a CPU that memory="auto" takes; of a GPU: 0.9
REFRESH_STEPS = 16  # the match of a request that waits for another is looked up again at least so often


class Residency:
    """Gives requests their slots and blocks, starts them from what is kept for reuse, and keeps what they leave.

    Args: as KimiK3Generator's; requests: those not finished, in order of arrival; counts: where events are counted.
    """

    def __init__(
        self, model: KimiK3ForCausalLM, agreement: Agreement, requests: Mapping[int, Request], *, memory: int | str,
        num_blocks: int | None, max_num_seqs: int, block_size: int, prefix_cache: bool, tiers: Sequence[Any],
        counts: Counter[str], has_bf16_snapshots: bool = False,
    ) -> None:  # fmt: skip
        shared = [tier.name for tier in tiers if tier.is_shared]
        if shared and any(parameter.is_meta for parameter in model.parameters()):
            raise ValueError(
                f"KimiK3Generator: an offloaded model wants tiers that end with the process (HostTier), got {shared}: "
                "entries there are told apart by values of all weights"
            )
        self.max_num_seqs, self.block_size, self.prefix_cache = max_num_seqs, block_size, prefix_cache
        self.counts, self._requests, self.agreement = counts, requests, agreement
        layout = PoolLayout(model, block_size, has_bf16_snapshots=has_bf16_snapshots)
        (num_pages,) = agreement.least([self._num_pages(layout, memory, num_blocks, model.device)])
        heads = model.config.text_config.kda_num_heads
        first_head = heads // agreement.tp_size * agreement.tp_rank
        self.pools = DevicePools(layout, num_pages, model.device, first_head, heads)
        self.pool = PagePool(num_pages, layout.blocks_per_page, self.pools.copy_block)
        self.index = PrefixIndex(
            self.pool, block_size, layout.snapshot_bytes, layout.block_bytes, on_evict=self._on_evict
        )
        self.tiers = TierStore(tiers, self.pools, self.pool, self.index, agreement) if tiers else None

    def _num_pages(self, layout: PoolLayout, memory: int | str, num_blocks: int | None, device: torch.device) -> int:
        if num_blocks is not None:
            return self.max_num_seqs + -(-num_blocks // layout.blocks_per_page)
        if memory == "auto":
            memory = _free_memory(device)
            # More than every sequence's state, four snapshots of each and 4,096 tokens of each is of little use.
            enough = self.max_num_seqs * (5 + -(-4096 // self.block_size) // layout.blocks_per_page + 1)
            return max(2, min(memory // layout.page_bytes, enough))
        if not isinstance(memory, int) or memory < 2 * layout.page_bytes:
            least = (
                f"at least {2 * layout.page_bytes} bytes (a state is {layout.slot_bytes}, a block {layout.block_bytes})"
            )
            raise ValueError(f"KimiK3Generator: want memory='auto' or {least}, got {memory!r}")
        return memory // layout.page_bytes

    def refuse_what_never_fits(self, tokens: int) -> None:
        """Raise ValueError, with the numbers, for a sequence of so many tokens that no eviction makes room for."""
        blocks = -(-tokens // self.block_size)
        layout = self.pools.layout
        needed = layout.blocks_per_page + blocks
        # A page is a slot or blocks: what is left of the last page of blocks is lost.
        room = (self.pool.num_pages - 1) * layout.blocks_per_page
        if blocks > room:
            raise ValueError(
                f"add: {tokens} tokens (prompt and max_new_tokens) need {blocks} latent blocks of {layout.block_bytes} bytes "
                f"and a state of {layout.slot_bytes}, {needed * layout.block_bytes} bytes in all; memory holds {room} "
                "blocks beside one state"
            )

    def unshared_blocks(self, request: Request) -> int:
        """Of its blocks, those that nobody else holds."""
        if request.shares != self.pool.shares:
            request.unshared = sum(self.pool.references[handle] == 1 for handle in request.table)
        else:
            request.unshared += len(request.table) - request.counted_blocks  # new ones are its own
        request.shares, request.counted_blocks = self.pool.shares, len(request.table)
        return request.unshared

    def room_blocks(self, running: Sequence[Request]) -> int:
        """Places for blocks that are free, or would be if all that is only kept for reuse were dropped."""
        kept_blocks = self.pool.num_unshared - sum([self.unshared_blocks(request) for request in running])
        kept_slots = self.pool.num_slots - len(running)
        return self.pool.free_blocks + kept_slots * self.pool.blocks_per_page + kept_blocks

    # What a waiting request would find.

    def look_up(self, request: Request, step: int) -> None:
        """What the index and the tiers hold for a waiting request; looked up again when they may have changed."""
        version = self.index.num_events
        is_stale = request.reuse_version != version and (
            request.reuse_version < 0 or request.waits_for is None or step % REFRESH_STEPS == 0
        )
        if is_stale:
            match = self.index.match(request.root, request.tokens)
            request.reuse, request.reuse_version = match.position, version
            # Of the blocks that a hit would bring, those that other requests hold are not counted as room either.
            whole = [node.block for node in match.path if node.end <= match.position]
            request.reuse_shared = sum(self.pool.references[block] > 1 for block in whole)
            if self.tiers is not None and request.fetch_state == "none":
                self.tiers.look_up(request)

    # Slots and blocks.

    def slot(self) -> int | None:
        """A KDA slot, at the cost of what is only kept for reuse where none is free."""
        return self._obtain(self.pool.add_slot)

    def block(self) -> int | None:
        """A latent block, as `slot`."""
        return self._obtain(self.pool.add_block)

    def _obtain(self, add: Callable[[], int | None], *, may_drop_saved: bool = True) -> int | None:
        while (found := add()) is None:
            if not (self.index.evict() or (may_drop_saved and self._drop_saved())):
                return None
        return found

    def _slot_beside(self, snapshot: Snapshot | None, *, is_over: bool) -> int | None:
        """A slot for a request that starts from `snapshot`; where none is free, that one's own if nothing kept goes on from
        it (it is what a chat's last turn left) or nothing else can go. is_over: that one's own at once."""
        slot = None if is_over else self.pool.add_slot()
        if slot is not None:
            return slot
        if snapshot is None or snapshot.slot < 0 or snapshot.pins > 1:
            return self.slot()
        if self.index.is_between(snapshot) and not is_over:
            slot = self.slot()
        return self.index.take_slot(snapshot) if slot is None else slot

    def _own_tail(self, request: Request) -> bool:
        """Where others may read the last block of its table, a copy takes its place; False where there is no room for one."""
        if self.pool.references[request.table[-1]] > 1:
            tail = self.block()
            if tail is None:  # what was dropped in vain may have been the other reader
                return self.pool.references[request.table[-1]] == 1
            try:
                self.pools.copy_block(self.pool.places[request.table[-1]], self.pool.places[tail])
            except BaseException:
                self.pool.free_block(tail)
                raise
            self.pool.free_block(request.table[-1])
            request.table[-1] = tail
        return True

    def _drop_saved(self) -> bool:
        """Give up a snapshot that a prefill under way has left and not published: it must not stand in anyone's way."""
        for request in reversed(list(self._requests.values())):
            if request.saved:
                request.saved.pop(0).free(self.pool)
                self.counts["dropped_snapshots"] += 1
                return True
        return False

    def prepare(self, request: Request, count: int, followers: Iterable[Request]) -> Piece | None:
        """Give a request what its next `count` tokens need; None, and nothing taken, where memory is short after all.

        followers: requests that wait for this one's prefix.
        """
        if request.is_running:
            piece = self._allot(request, count, is_new=False)
        else:
            piece = self._start(request, count, followers)
        self.counts["held_allocation"] += piece is None
        return piece

    def _start(self, request: Request, count: int, followers: Iterable[Request]) -> Piece | None:
        """Make a waiting request run, with its first piece."""
        # What a hit starts from lies in memory beside the request's own. Where that is too much, it is taken over; where that
        # cannot be, in blocks, or is too much even for one request, the hit gives way. So whatever fits alone gets in.
        is_alone = not any(r.is_running for r in self._requests.values())
        may_give_way = is_alone or self.pools.layout.has_bf16_snapshots
        for way in ("beside", "over", "cold") if may_give_way else ("beside", "over"):
            match = self._admit(request, followers, way)
            piece = None if match is None else self._allot(request, count, is_new=True)
            if match is not None and piece is not None:
                self._count_start(request, match)
                return piece
            if match is not None:
                self.take_back(request)
        return None

    def _count_start(self, request: Request, match: Match) -> None:
        own = [snapshot for snapshot, used in request.left.items() if snapshot.used == used]
        self.index.touch(match)
        request.left = {snapshot: snapshot.used for snapshot in own}
        request.is_parked = False
        if not request.admitted_at:
            request.admitted_at = time.monotonic()
            request.reused_tokens = min(match.position, len(request.prompt))
            self.counts["prompt_tokens"] += len(request.prompt)
            self._count_hit(request)
            if match.miss:
                self.counts[f"miss_{match.miss}"] += 1
        else:
            replayed = max(0, min(request.ran, len(request.tokens) - 1) - max(match.position, request.reused_tokens))
            request.reused_tokens = min(request.reused_tokens, match.position)
            request.replayed_tokens += replayed
            self.counts["replayed_tokens"] += replayed

    def _allot(self, request: Request, count: int, is_new: bool) -> Piece | None:
        """Blocks for its next `count` tokens; None where they are short."""
        end = min(request.done + count, len(request.tokens))
        if is_new and end < len(request.tokens):  # the hit may differ from the one that was planned with
            end = end // self.block_size * self.block_size
            if end <= request.done:
                end = min(request.done // self.block_size * self.block_size + self.block_size, len(request.tokens))
        while len(request.table) * self.block_size < end:
            block = self.block()
            if block is None:
                return None
            request.table.append(block)
        return Piece(request, end - request.done, [])

    def _admit(self, request: Request, followers: Iterable[Request], way: str) -> Match | None:
        """Its slot, and the blocks and the state of the longest kept prefix, "beside" which it begins, or whose slot it takes
        "over", or "cold", without one. None, and nothing taken, where memory is short."""
        if self.tiers is not None and request.fetch_state == "ready":
            self.tiers.install(request, self.slot, self.block)
        if way == "cold":
            match = Match(0, 0, None, [], "no_room")
        else:
            match = self.index.match(request.root, request.tokens)
        snapshot = match.snapshot
        if snapshot is not None:
            if not snapshot.pins:  # a tier may just have brought it
                self.pack([snapshot])
            snapshot.pins += 1  # nothing below may evict it
        request.table = [node.block for node in match.path]
        for block in request.table:
            self.pool.share_block(block)
        slot, has_tail = None, False
        try:
            slot = self._slot_beside(snapshot, is_over=way == "over")
            has_tail = slot is not None and (match.position % self.block_size == 0 or self._own_tail(request))
        finally:
            if snapshot is not None:
                snapshot.pins -= 1
            if not has_tail:
                if slot is not None:
                    self.pool.free_slot(slot)
                self._free_table(request)
        if slot is None or not has_tail:
            return None
        request.slot, request.done = slot, match.position
        request.published, request.started_from = match.position, snapshot
        request.hidden = snapshot.hidden if snapshot is not None and match.position == len(request.tokens) else None
        if snapshot is not None and snapshot.blocks:
            self.pools.stage_blocks(self._places(snapshot))
            self.pools.unstage_slot(slot)
        elif snapshot is not None and slot != snapshot.slot and match.position == len(request.tokens):
            self.pools.copy_slot(snapshot.slot, slot)  # nothing runs in this step, and nothing stays pinned beyond it
        elif snapshot is not None and slot != snapshot.slot:
            request.read_from = snapshot
            snapshot.pins += 1
        elif snapshot is not None:  # it is kept no longer
            request.reuse = 0
        self._plan_snapshots(request, match.matched, followers)
        return match

    def _count_hit(self, request: Request) -> None:
        left = request.reused_tokens
        self.counts["hit_tokens"] += left
        for tier, restored in request.restored.items():
            self.counts[f"hit_tokens_{tier}"] += min(left, restored)
            left -= min(left, restored)
        self.counts["hit_tokens_device"] += left

    def _plan_snapshots(self, request: Request, matched: int, followers: Iterable[Request]) -> None:
        """Where the prefill leaves states: ends, the junction with what is known, junctions with who waits, a grid."""
        done, total = request.done, len(request.tokens)
        wanted = {p for p in request.boundaries if done < p <= total}
        if self.prefix_cache:
            wanted |= {matched} if done < matched <= total else set()
            for other in followers:
                shared = common_length(request.prompt, other.prompt)
                wanted |= {shared} if done < shared <= total else set()
            # The grid may use half of what is free or given to snapshots now.
            layout = self.pools.layout
            free = self.pool.free_pages * layout.page_bytes // (layout.snapshot_bytes or layout.page_bytes)
            slots = (free + self.index.num_snapshots) // 2 - len(wanted)
            request.stride = choose_stride(max(total - done, self.block_size), slots, self.block_size)
            if request.stride:
                wanted |= set(
                    range(done // request.stride * request.stride + request.stride, total + 1, request.stride)
                )
        request.wanted = sorted(p for p in wanted if p > done)

    def with_exports(self, pieces: list[Piece]) -> list[Piece]:
        """Slots for the snapshots on the way, after everything that must run has its memory."""
        out = []
        for request, count, _ in pieces:
            exports = []
            end = request.done + count
            while request.wanted and request.wanted[0] <= end:
                position = request.wanted.pop(0)
                # What a request has saved stays: this step's forward may be about to write it.
                slot = self._obtain(self.pool.add_slot, may_drop_saved=False) if position > request.done else None
                if slot is not None:
                    exports.append((position, slot))
                    request.saved.append(Snapshot(position, slot, is_end=position in request.boundaries))
            out.append(Piece(request, count, exports))
        return out

    def preempt(self, request: Request, how: str) -> None:
        """Back to waiting. "park": its state stays as a snapshot, which may move to a tier; "drop": only those it left."""
        request.preemptions += 1
        self.counts[f"preemptions_{how}"] += 1
        if how == "park" and request.done:
            request.saved.append(Snapshot(request.done, request.slot, is_end=True))
            request.slot = -1
            request.is_parked = True
        left = [] if request.has_prefilled else list(request.saved)
        if not self.publish(request):
            self.clear(request)
        request.left.update((snapshot, snapshot.used) for snapshot in left)
        self.take_back(request)

    def withdraw(self, request: Request) -> None:
        """An unfinished prefill leaves nothing: what it left when it was preempted goes, unless others have used it since."""
        for snapshot, used in request.left.items():
            if snapshot.used == used:
                self.index.discard(snapshot)

    def take_back(self, request: Request) -> None:
        """Back to waiting without what it has not published: it goes on from what the index holds."""
        self.release(request)
        request.ran = max(request.ran, request.done)
        request.done, request.reuse_version = 0, -1
        request.asked_positions.clear()

    def pack(self, snapshots: Iterable[Snapshot]) -> None:
        """Where snapshots are kept in bf16: move them from their slots, which a forward has written, into blocks."""
        for snapshot in snapshots if self.pools.layout.has_bf16_snapshots else ():
            if snapshot.slot >= 0:
                self.pools.stage_slot(snapshot.slot)
                self.pools.clear_slot(snapshot.slot)  # it is not told yet whether all in it is finite
                self.pool.free_slot(snapshot.slot)
                snapshot.slot = STAGED
                for _ in range(self.pools.layout.packed_blocks):
                    block = self.pool.add_block()
                    assert block is not None  # the slot's page alone has as many
                    snapshot.blocks.append(block)
                self.pools.unstage_blocks(self._places(snapshot))

    def _places(self, snapshot: Snapshot) -> list[int]:
        return [self.pool.places[block] for block in snapshot.blocks]

    def publish(self, request: Request) -> bool:
        """Make the states that a request has left, and the latents before them, known to all; up to what is not finite,
        then returns False."""
        self.pack(request.saved)
        request.saved.sort(key=lambda snapshot: snapshot.position)
        is_finite = self._drop_nonfinite(request)
        saved, request.saved = request.saved, []  # until here they are the request's: none is lost if it fails
        if saved:
            request.published = max(request.published, *(snapshot.position for snapshot in saved))
            tokens = request.tokens[: request.done]
            self.index.publish(request.root, tokens, request.table, saved, request.heat)
        return is_finite

    def _drop_nonfinite(self, request: Request) -> bool:
        """Whether all states that it has left, and the latents before them, are finite on every rank. From the first that is
        not they are zeroed and freed."""
        flags, start, saved = [], request.published, request.saved
        for snapshot in saved:
            if snapshot.blocks:
                self.pools.stage_blocks(self._places(snapshot))
            end = min(snapshot.position, request.done)
            new = range(start // self.block_size, -(-end // self.block_size)) if end > start else ()
            places = [self.pool.places[request.table[i]] for i in new]
            flags.append(self.pools.is_finite(snapshot.slot, places, (end - 1) % self.block_size + 1))
            start = max(start, end)
        is_bad = self.agreement.most([int(not flag) for flag in torch.stack(flags).tolist()] if flags else [])
        count = is_bad.index(1) if 1 in is_bad else len(saved)
        for snapshot in saved[count:]:
            self._clear_snapshot(snapshot)
            saved.remove(snapshot)
            snapshot.free(self.pool)
            self.counts["dropped_nonfinite"] += 1
        return 1 not in is_bad

    def distrust(self, request: Request) -> None:
        """What a request that came to non-finite values started from is dropped: the next one starts further back."""
        snapshot = request.started_from
        if snapshot is not None and self.index.discard(snapshot):
            self.counts["dropped_distrusted"] += 1

    def release(self, request: Request) -> None:
        """Give back what a request holds. States that it took and did not publish go with it."""
        if request.read_from is not None:
            request.read_from.pins -= 1
            request.read_from = None
        for snapshot in request.saved:
            snapshot.free(self.pool)
        request.saved, request.wanted, request.hidden = [], [], None
        if request.slot >= 0:
            self.pool.free_slot(request.slot)
            request.slot = -1
        self._free_table(request)

    def _free_table(self, request: Request) -> None:
        for block in request.table:
            self.pool.free_block(block)
        request.table, request.shares, request.counted_blocks = [], -1, 0

    def keep_decode_state(self, request: Request) -> None:
        """While decoding, a copy of the state on the grid where there is room: a preemption then costs less."""
        is_due = request.is_decoding and request.stride and request.done % request.stride == 0
        if not (is_due and self.prefix_cache and self.pool.free_pages > self.max_num_seqs // 4):
            return
        slot = self.pool.add_slot()
        if slot is not None:
            request.saved.append(Snapshot(request.done, slot, is_end=False))
            self.pools.copy_slot(request.slot, slot)
            self.publish(request)

    def _on_evict(self, evicted: Evicted) -> None:
        if self.tiers is not None:
            self.tiers.save(evicted)

    def publish_end(self, request: Request) -> None:
        """The state of a finished request becomes a snapshot: a later turn goes on from it."""
        if self.prefix_cache:
            request.saved.append(Snapshot(request.done, request.slot, is_end=True))
            request.slot = -1
            self.publish(request)

    def clear(self, request: Request) -> None:
        """Zero what a request wrote that went wrong, and nobody else reads."""
        for index, handle in enumerate(request.table):
            first = 0 if self.pool.references[handle] == 1 else request.published - index * self.block_size
            if first < self.block_size:
                self.pools.clear_block(self.pool.places[handle], max(0, first))
        if request.slot >= 0:
            self.pools.clear_slot(request.slot)
        for snapshot in request.saved:
            self._clear_snapshot(snapshot)

    def _clear_snapshot(self, snapshot: Snapshot) -> None:
        if snapshot.slot >= 0:
            self.pools.clear_slot(snapshot.slot)
        for place in self._places(snapshot):
            self.pools.clear_block(place)

    def clear_prefix_cache(self) -> None:
        """Drop all that is kept for reuse; tiers are told nothing."""
        for entry in list(self.index.entries()):
            self.index.discard(entry.snapshot)

    def close(self) -> None:
        """Hand what is kept to the tiers that outlive the process, and free it."""
        if self.tiers is not None:
            self.tiers.close(self.index.entries())
        self.index.on_evict = None
        self.index.clear()


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.9)
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(int(fields["MemAvailable"].split()[0]) * 1024 * AUTO_SHARE)
