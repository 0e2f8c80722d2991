"""The prefix index against a list of what was published, and its policy at K3's sizes, on numbers alone."""

import random
import re
from pathlib import Path

import pytest

from kimi_k3.engine.page_pool import PagePool
from kimi_k3.engine.prefix_index import PrefixIndex, Snapshot, choose_stride

BLOCK = 4


def make_index(pages=64, per_page=2, block=BLOCK, slot_bytes=8, block_bytes=4, **options):
    pool = PagePool(pages, per_page)
    return pool, PrefixIndex(pool, block, slot_bytes, block_bytes, **options)


def publish(index, pool, tokens, positions, root=b"r", ends=(), hidden=(), heat=()):
    blocks = [pool.add_block() for _ in range(-(-len(tokens) // index.block_size))]
    snapshots = [Snapshot(p, pool.add_slot(), p in ends, "hidden" if p in hidden else None) for p in positions]
    assert None not in blocks and all(s.slot is not None for s in snapshots)
    index.publish(root, tokens, blocks, snapshots, heat)
    for block in blocks:
        pool.free_block(block)
    return snapshots


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def test_matches_equal_a_search_through_all_that_was_published():
    rng = random.Random(0)
    pool, index = make_index(pages=600)
    known = []
    for _ in range(60):
        base = list(rng.choice(known)[0][: rng.randrange(20)]) if known and rng.random() < 0.7 else []
        tokens = base + [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
        positions = sorted(rng.sample(range(1, len(tokens) + 1), min(len(tokens), rng.randrange(1, 4))))
        publish(index, pool, tokens, positions)
        known.append((tokens[: positions[-1]], positions))
        for _ in range(5):
            prompt = list(rng.choice(known)[0])[: rng.randrange(1, 24)] + [rng.randrange(3) for _ in range(3)]
            match = index.match(b"r", prompt)
            deepest = max(common(tokens, prompt) for tokens, _ in known)
            states = [p for tokens, places in known for p in places if p <= common(tokens, prompt) and p < len(prompt)]
            assert match.matched == deepest
            assert match.position == max(states, default=0)
            assert [n.start for n in match.path] == list(range(0, match.position, BLOCK))
            assert [t for n in match.path for t in n.tokens][: match.position] == prompt[: match.position]
    used = index.num_blocks, index.num_snapshots
    assert pool.num_blocks == used[0] and pool.num_slots == used[1]  # the index holds one reference to each, no more
    index.clear()
    assert pool.num_blocks == pool.num_slots == 0 and index.match(b"r", known[0][0]).matched == 0


def test_roots_share_nothing():
    pool, index = make_index()
    publish(index, pool, [1, 2, 3, 4, 5], [4], root=b"image A")
    assert index.match(b"image B", [1, 2, 3, 4, 5]).matched == 0
    assert index.match(b"image A", [1, 2, 3, 4, 5]).position == 4
    index.forget(b"image A")
    assert pool.num_slots == pool.num_blocks == 0


def test_four_whole_blocks_and_one_more_token_reuse_four():
    pool, index = make_index()
    prompt = list(range(4 * BLOCK))
    publish(index, pool, prompt, [4 * BLOCK], ends=[4 * BLOCK], hidden=[4 * BLOCK])
    assert index.match(b"r", [*prompt, 99]).position == 4 * BLOCK
    assert index.match(b"r", prompt).position == 4 * BLOCK  # whole: the last hidden vector is there
    assert index.match(b"r", prompt[:-1]).position == 0  # there is no state inside


def test_without_the_hidden_vector_the_last_token_runs_again():
    pool, index = make_index()
    publish(index, pool, list(range(8)), [4, 8])
    assert index.match(b"r", list(range(8))).position == 4


def test_misses_say_why():
    pool, index = make_index()
    publish(index, pool, list(range(10)), [6, 10])
    assert index.match(b"r", [7, 7, 7]).miss == "unknown_prefix"
    assert index.match(b"r", [0, 1, 2, 3, 99]).miss == "no_state"
    assert index.match(b"r", [*range(9), 99]).miss == "state_before_match"
    assert index.match(b"r", [*range(10), 99]).miss == ""


def test_a_longer_block_takes_the_place_of_a_shorter_one_and_keeps_its_states():
    pool, index = make_index()
    publish(index, pool, [1, 2], [2])
    publish(index, pool, [1, 2, 3, 4, 5, 6], [6])
    assert index.num_blocks == 2 and index.match(b"r", [1, 2, 9]).position == 2
    assert index.match(b"r", [1, 2, 3, 4, 5, 6, 7]).position == 6


def test_blocks_past_the_last_state_are_not_kept():
    pool, index = make_index()
    publish(index, pool, list(range(20)), [5])
    assert index.num_blocks == 2 == pool.num_blocks
    index.drop(next(iter(index._snapshots)))
    assert pool.num_blocks == 0


def test_a_pinned_snapshot_is_not_evicted():
    pool, index = make_index()
    (snapshot,) = publish(index, pool, [1, 2, 3], [3])
    snapshot.pins = 1
    assert not index.evict() and index.num_snapshots == 1
    snapshot.pins = 0
    assert index.evict() and pool.num_slots == 0


def test_what_was_used_lately_stays():
    pool, index = make_index(slot_bytes=1, block_bytes=100)
    publish(index, pool, [1] * 8, [8], ends=[8])
    publish(index, pool, [2] * 8, [8], ends=[8])
    for _ in range(3):
        index.touch(index.match(b"r", [*[1] * 8, 5]))
    index.evict()
    assert index.match(b"r", [*[1] * 8, 5]).position == 8 and index.match(b"r", [*[2] * 8, 5]).position == 0


@pytest.mark.parametrize("hot", [1, 2])
def test_of_equal_prefixes_the_one_that_attention_looked_at_stays(hot):
    pool, index = make_index()
    for first in (1, 2):
        publish(index, pool, [first] * 8, [8], heat=[0.5, 0.5] if first == hot else [])
    for snapshot in index._snapshots:
        snapshot.used = index.clock  # equally young
    assert index.evict()
    assert [index.match(b"r", [first] * 9).position for first in (1, 2)] == ([8, 0] if hot == 1 else [0, 8])


def test_evicted_entries_are_handed_out_while_their_memory_is_theirs():
    seen = []
    pool, index = make_index()
    index.on_evict = lambda e: seen.append((e.snapshot.position, [pool.references[n.block] for n in e.path]))
    publish(index, pool, list(range(6)), [6])
    index.evict()
    assert seen == [(6, [1, 1])]


def worths(index):
    """Of each snapshot that may go what its loss costs, from all that is kept; in the order in which they should go."""
    found = []
    for entry in index.entries():
        snapshot, start = entry.snapshot, entry.snapshot.position
        before = max([p for node in entry.path for p in node.snapshots if p < start], default=0)
        heat = sum(node.heat for node in reversed(entry.path) if node.end >= before)
        is_between = bool(entry.node.children) or any(p > start for p in entry.node.snapshots)
        held = index.slot_bytes + (0 if is_between else index.block_bytes * (start - before) / index.block_size)
        saved = (8 if snapshot.is_end else 1) * (1 + heat) * (start - before)
        is_spared = index.num_snapshots * index.slot_bytes > index.num_blocks * index.block_bytes and not is_between
        if not snapshot.pins:
            worth = saved / held / (1 + index.clock - snapshot.used)
            found.append((is_spared, worth, start & -start, -start, snapshot))
    return sorted(found, key=lambda found: found[:4])


def use(index, pool, rng, known, pinned):
    """One event in the life of a cache: a prompt that may go on from a known one, a hit, a reader that comes or goes."""
    chance = rng.random()
    if chance < 0.6 or not known:
        base = rng.choice(known)[: rng.randrange(40)] if known and rng.random() < 0.7 else []
        tokens = base + [rng.randrange(5) for _ in range(rng.randrange(1, 25))]
        positions = sorted(rng.sample(range(1, len(tokens) + 1), min(len(tokens), rng.randrange(1, 4))))
        heat = [rng.random() / 8 for _ in range(10)] if rng.random() < 0.3 else []
        publish(index, pool, tokens, positions, ends=[p for p in positions if rng.random() < 0.5], heat=heat)
        known.append(tokens)
    elif chance < 0.9:
        match = index.match(b"r", [*rng.choice(known), 9])
        index.touch(match)
        if match.snapshot is not None and rng.random() < 0.3:
            match.snapshot.pins += 1
            pinned.append(match.snapshot)
        elif match.snapshot is not None and not match.snapshot.pins and rng.random() < 0.3:
            pool.free_slot(index.take_slot(match.snapshot))
    elif pinned:
        pinned.pop(rng.randrange(len(pinned))).pins -= 1


@pytest.mark.parametrize(("slot_bytes", "block_bytes"), [(8, 4), (1, 100), (100, 1)])
@pytest.mark.parametrize(("most", "worse_part"), [(24, 0), (200, 1 / 8)])
def test_what_goes_is_what_is_worth_least(slot_bytes, block_bytes, most, worse_part):
    """Of few the least of all; of many one of the least, as their order is found anew only once in a while."""
    rng = random.Random(most + slot_bytes)
    gone, known, pinned = [], [], []
    pool, index = make_index(pages=8 * most, slot_bytes=slot_bytes, block_bytes=block_bytes)
    index.on_evict = lambda e: gone.append(e.snapshot)
    while index.evictions < 3 * most:
        use(index, pool, rng, known, pinned)
        while index.num_snapshots > most:
            expected = worths(index)
            assert index.evict() == bool(expected)
            if expected:
                allowed = expected[max(0, int(worse_part * len(expected)))][:4]
                assert next(e[:4] for e in expected if e[4] is gone[-1]) <= allowed
                assert not gone[-1].pins
    for snapshot in pinned:
        snapshot.pins = 0
    while index.evict():
        pass
    assert pool.num_slots == pool.num_blocks == index.num_snapshots == 0


def evicted_after(pool, index, change, count):
    """(Prompt, position) of the next `count` that go when 100 equally young prompts are ranked, and then `change` is made."""
    gone = []
    for first in range(100):
        publish(index, pool, [first] * 8, [8], ends=[8])
    for snapshot in index._snapshots:
        snapshot.used = index.clock
    assert index.evict()
    change()
    index.on_evict = lambda e: gone.append((e.path[0].tokens[0], e.snapshot.position))
    while len(gone) < count:
        assert index.evict()
    return gone


def test_the_grid_of_a_new_prompt_goes_before_older_ends_while_states_weigh_more():
    pool, index = make_index(pages=400, slot_bytes=100, block_bytes=1)
    gone = evicted_after(pool, index, lambda: publish(index, pool, [-1] * 16, [4, 8, 12, 16], ends=[16]), 4)
    assert gone[:3] == [(-1, 12), (-1, 4), (-1, 8)] and gone[3][0] != -1


def test_a_state_from_which_a_newer_one_goes_on_goes_before_ends_while_states_weigh_more():
    pool, index = make_index(pages=400, slot_bytes=100, block_bytes=1)
    gone = evicted_after(pool, index, lambda: publish(index, pool, [70] * 16, [16], ends=[16]), 2)
    assert gone[0] == (70, 8) and gone[1][0] != 70


def test_an_end_that_now_holds_the_latents_goes_next():
    pool, index = make_index(pages=400, slot_bytes=1, block_bytes=100)
    gone = evicted_after(pool, index, lambda: publish(index, pool, [-1] * 8, [4, 8]), 3)
    assert gone[:2] == [(-1, 8), (-1, 4)] and gone[2][0] != -1


def test_equal_histories_evict_the_same():
    def victims():
        rng, gone, known, pinned = random.Random(5), [], [], []
        pool, index = make_index(pages=2000)
        index.on_evict = lambda e: gone.append([t for node in e.path for t in node.tokens][: e.snapshot.position])
        for _ in range(1000):
            use(index, pool, rng, known, pinned)
            while index.num_snapshots > 200 and index.evict():
                pass
        return gone

    assert victims() == victims() and len(victims()) > 500


@pytest.mark.parametrize("kept", [300, 1500])
def test_evicting_a_page_costs_the_same_however_many_are_kept(kept):
    """So many values are looked at for each snapshot that goes, in a cache that stays full."""
    valued = 0

    class Counting(PrefixIndex):
        def _value(self, snapshot):
            nonlocal valued
            valued += 1
            return super()._value(snapshot)

    rng, known, pinned = random.Random(kept), [], []
    pool = PagePool(3 * kept, 2)
    index = Counting(pool, BLOCK, 8, 4)
    while index.evictions < 2 * kept:
        use(index, pool, rng, known, pinned)
        while index.num_snapshots > kept and index.evict():
            pass
    assert valued < 64 * index.evictions


K3_SLOT, K3_TOKEN = 434_110_464, 27_648  # bytes: the states of 69 KDA layers; a token's latents in 24 MLA layers
README = Path(__file__).parents[2] / "README.md"


def keep_under_pressure(tokens):
    """Positions whose states stay when a prompt's snapshots must weigh no more than its latents, or be one alone."""
    pool, index = make_index(pages=40_000, per_page=246, block=64, slot_bytes=K3_SLOT, block_bytes=64 * K3_TOKEN)
    grid = 64 if tokens < 65_536 else 1024 if tokens < 524_288 else 4096
    prompt, places = list(range(tokens)), sorted({*range(grid, tokens + 1, grid), tokens})
    publish(index, pool, prompt, places, ends=[tokens], hidden=[tokens])
    while index.num_snapshots * K3_SLOT > max(K3_SLOT, tokens * K3_TOKEN):
        assert index.evict()
    assert index.match(b"r", [*prompt, -1]).position == tokens  # the next turn replays nothing
    return sorted(s.position for s in index._snapshots)


@pytest.mark.parametrize(
    ("tokens", "snapshots", "worst_replay"),
    [(12_000, 1, 12_000), (15_701, 1, 15_701), (131_072, 8, 16_384), (130_300, 8, 16_384), (1_048_576, 66, 16_384)],
)
def test_under_pressure_snapshots_weigh_no_more_than_latents_at_k3_sizes(tokens, snapshots, worst_replay):
    """And the end of the last message is kept: its next turn replays nothing."""
    kept = keep_under_pressure(tokens)
    assert len(kept) == snapshots and kept[-1] == tokens
    assert max(b - a for a, b in zip([0, *kept], kept)) <= worst_replay


def test_the_table_of_the_readme_is_what_the_policy_does():
    """| tokens | latents | states kept | between two states | run again at most | at the end of the last message |"""
    found = {}
    for line in README.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and re.fullmatch(r"[\d,]+", cells[0]) and cells[1].endswith("GB"):
            found[int(cells[0].replace(",", ""))] = cells
    assert set(found) == {131_072, 1_048_576}
    for tokens, (_, latents, states, between, replay, end) in found.items():
        kept = keep_under_pressure(tokens)
        widest = max(b - a for a, b in zip([0, *kept], kept))
        assert latents == f"{tokens * K3_TOKEN / 1e9:.2g} GB" and states == str(len(kept))
        assert between == replay == f"{widest:,}" and end == "0"
    assert "| below 15,700 | under 434 MB | 1 |" in README.read_text() and K3_SLOT // K3_TOKEN == 15_701


def test_the_grid_is_chosen_to_fit():
    assert choose_stride(800, 100) == 64
    assert choose_stride(131_072, 131_072 * K3_TOKEN // K3_SLOT) == 16_384
    assert choose_stride(1_048_576, 1_048_576 * K3_TOKEN // K3_SLOT) == 16_384
    assert choose_stride(63, 10) == choose_stride(1000, 0) == 0


def test_keys_name_every_token_before_them():
    pool, index = make_index(pages=200)

    def keys(tokens, root=b"r"):
        publish(index, pool, tokens, range(1, len(tokens) + 1), root=root)
        return {node.key for node in index.match(root, [*tokens, -1]).path}

    tokens = list(range(20))
    known = keys(tokens)
    assert len(known) == 5
    for others, common in (([1, *tokens[1:]], 0), ([*tokens[:9], -1, *tokens[10:]], 2), ([*tokens[:-1], -1], 4)):
        assert len(keys(others)) == 5 and len(keys(others) & known) == common
    assert not keys(tokens, root=b"s") & known
