"""The accounting of slots and blocks in one budget: nothing overlaps, nothing is lost, whatever the order."""

import random

import pytest

from kimi_k3.engine.page_pool import PagePool


def places_in_use(pool, slots, blocks):
    taken = [page * pool.blocks_per_page + i for page in slots for i in range(pool.blocks_per_page)]
    return taken + [pool.places[handle] for handle in blocks]


@pytest.mark.parametrize("blocks_per_page", [1, 3, 7])
def test_random_use_never_overlaps_and_moves_carry_contents(blocks_per_page):
    rng = random.Random(blocks_per_page)
    contents: dict[int, int] = {}

    def move(source, target):
        contents[target] = contents.pop(source)

    pool = PagePool(6, blocks_per_page, move)
    slots, blocks, written = set(), {}, 0
    for _ in range(5000):
        action = rng.random()
        if action < 0.35:
            handle = pool.add_block()
            assert (handle is None) == (len(blocks) >= (6 - len(slots)) * blocks_per_page)
            if handle is not None:
                blocks[handle] = written
                contents[pool.places[handle]] = written
                written += 1
        elif action < 0.5:
            free_pages = (6 - len(slots)) * blocks_per_page - len(blocks)
            slot = pool.add_slot()
            # A slot is refused only where even gathered blocks leave no whole page.
            assert (slot is not None) == (free_pages >= blocks_per_page)
            if slot is not None:
                slots.add(slot)
        elif action < 0.8 and blocks:
            handle = rng.choice(sorted(blocks))
            contents.pop(pool.places[handle])
            del blocks[handle]
            assert pool.free_block(handle)
        elif slots:
            slot = slots.pop()
            pool.free_slot(slot)
        used = places_in_use(pool, slots, blocks)
        assert len(used) == len(set(used)) and all(0 <= place < pool.total_blocks for place in used)
        assert all(contents[pool.places[handle]] == value for handle, value in blocks.items())
        assert pool.num_blocks == len(blocks) and pool.num_slots == len(slots)
        assert pool.free_blocks == pool.total_blocks - len(used)


def test_a_shared_block_is_freed_by_its_last_reader():
    pool = PagePool(1, 2)
    handle = pool.add_block()
    pool.share_block(handle)
    assert not pool.free_block(handle) and pool.num_blocks == 1
    assert pool.free_block(handle) and pool.free_pages == 1
    with pytest.raises(AssertionError, match="not in use"):
        pool.free_block(handle)


def test_the_split_follows_the_load():
    pool = PagePool(4, 2)
    blocks = [pool.add_block() for _ in range(8)]
    assert pool.add_slot() is None and pool.add_block() is None
    for handle in blocks:
        pool.free_block(handle)
    assert [pool.add_slot() for _ in range(5)] == [0, 1, 2, 3, None]


def test_unshared_blocks_are_counted():
    rng = random.Random(3)
    pool, held = PagePool(8, 4), []
    for _ in range(2000):
        action = rng.random()
        if action < 0.4 and (handle := pool.add_block()) is not None:
            held.append(handle)
        elif action < 0.6 and held:
            pool.share_block(rng.choice(held))
        elif held:
            handle = rng.choice(held)
            if pool.free_block(handle):
                held.remove(handle)
        assert pool.num_unshared == sum(pool.references[handle] == 1 for handle in held)
