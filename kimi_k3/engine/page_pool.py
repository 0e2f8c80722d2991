"""Who owns which part of the cache memory: pages that hold either one KDA slot or a run of MLA latent blocks. Numbers only.

One budget serves both, and the split follows the load: a page is a slot now and blocks later. A block is known by a handle
that stays while the block moves: blocks are gathered into fewer pages when a slot needs a whole one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

FREE, SLOT, BLOCKS = 0, 1, 2


class PagePool:
    """Pages of `blocks_per_page` block places; a slot takes a whole page and has its number.

    Args:
        num_pages, blocks_per_page: counts, >= 1.
        move_block: called as (from place, to place) when a block moves; a place is a number below
            num_pages * blocks_per_page.
    """

    def __init__(
        self, num_pages: int, blocks_per_page: int, move_block: Callable[[int, int], None] | None = None
    ) -> None:
        if num_pages < 1 or blocks_per_page < 1:
            raise ValueError(
                f"PagePool: want at least one page and one block in it, got {num_pages}, {blocks_per_page}"
            )
        self.num_pages, self.blocks_per_page = num_pages, blocks_per_page
        self._move_block = move_block or (lambda source, target: None)
        self._kind = [FREE] * num_pages
        self._handles: list[dict[int, int]] = [{} for _ in range(num_pages)]  # page -> place in it -> handle
        self._free_pages = list(range(num_pages))  # heaps: low numbers first, so that memory in use stays together
        self._open_pages: list[int] = []
        self.places: list[int] = []  # handle -> place
        self.references: list[int] = []  # handle -> count
        self._spare_handles: list[int] = []
        self.num_slots = self.num_blocks = 0
        self.num_unshared = 0  # blocks with one reference
        self.shares = 0  # times that a count of references passed between one and two

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    @property
    def total_blocks(self) -> int:
        return self.num_pages * self.blocks_per_page

    @property
    def free_blocks(self) -> int:
        """Places for blocks, those in free pages included."""
        return (self.num_pages - self.num_slots) * self.blocks_per_page - self.num_blocks

    def add_slot(self) -> int | None:
        """A page for one KDA state, or None where even moving blocks frees none."""
        if not self._free_pages and not self._gather():
            return None
        page = heapq.heappop(self._free_pages)
        self._kind[page] = SLOT
        self.num_slots += 1
        return page

    def free_slot(self, slot: int) -> None:
        assert self._kind[slot] == SLOT, f"slot {slot} is not in use"
        self._kind[slot] = FREE
        self.num_slots -= 1
        heapq.heappush(self._free_pages, slot)

    def add_block(self) -> int | None:
        """A handle with one reference, or None."""
        page = self._page_with_room()
        if page is None:
            return None
        inside = next(i for i in range(self.blocks_per_page) if i not in self._handles[page])
        if self._spare_handles:
            handle = self._spare_handles.pop()
        else:
            handle = len(self.places)
            self.places.append(0)
            self.references.append(0)
        self._put(handle, page, inside)
        self.references[handle] = 1
        self.num_unshared += 1
        self.num_blocks += 1
        return handle

    def share_block(self, handle: int) -> None:
        assert self.references[handle] > 0, f"block {handle} is not in use"
        self.references[handle] += 1
        if self.references[handle] == 2:
            self.num_unshared -= 1
            self.shares += 1

    def free_block(self, handle: int) -> bool:
        """Give back one reference; True if it was the last one."""
        assert self.references[handle] > 0, f"block {handle} is not in use"
        self.references[handle] -= 1
        if self.references[handle]:
            if self.references[handle] == 1:
                self.num_unshared += 1
                self.shares += 1
            return False
        self.num_unshared -= 1
        self._take_out(handle)
        self._spare_handles.append(handle)
        self.num_blocks -= 1
        return True

    def _put(self, handle: int, page: int, inside: int) -> None:
        self._handles[page][inside] = handle
        self.places[handle] = page * self.blocks_per_page + inside

    def _take_out(self, handle: int) -> None:
        page, inside = divmod(self.places[handle], self.blocks_per_page)
        was_full = len(self._handles[page]) == self.blocks_per_page
        del self._handles[page][inside]
        if not self._handles[page]:
            self._kind[page] = FREE
            heapq.heappush(self._free_pages, page)
        elif was_full:
            heapq.heappush(self._open_pages, page)

    def _page_with_room(self, without: int = -1) -> int | None:
        """A page of blocks that is not full, else a free one; never `without`, which is being emptied."""
        while self._open_pages:
            page = self._open_pages[0]
            if self._kind[page] == BLOCKS and len(self._handles[page]) < self.blocks_per_page and page != without:
                return page
            heapq.heappop(self._open_pages)  # full, or given back since
        if not self._free_pages:
            return None
        page = heapq.heappop(self._free_pages)
        self._kind[page] = BLOCKS
        if self.blocks_per_page > 1:
            heapq.heappush(self._open_pages, page)
        return page

    def _gather(self) -> bool:
        """Empty the least filled page of blocks into the others; False where they have no room for it."""
        pages = [page for page in range(self.num_pages) if self._kind[page] == BLOCKS]
        if not pages:
            return False
        emptied = min(pages, key=lambda page: len(self._handles[page]))
        if self.free_blocks - (self.blocks_per_page - len(self._handles[emptied])) < len(self._handles[emptied]):
            return False
        for inside, handle in list(self._handles[emptied].items()):
            page = self._page_with_room(without=emptied)
            assert page is not None
            target = next(i for i in range(self.blocks_per_page) if i not in self._handles[page])
            self._move_block(emptied * self.blocks_per_page + inside, page * self.blocks_per_page + target)
            del self._handles[emptied][inside]
            self._put(handle, page, target)
        self._kind[emptied] = FREE
        heapq.heappush(self._free_pages, emptied)
        return True
