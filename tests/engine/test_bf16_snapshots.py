"""Snapshots kept in bf16: what they hold, what they save, what they are refused for, and that nothing of them leaks."""

import random

import pytest
import torch

from kimi_k3 import KimiK3Generator, SamplingParams
from kimi_k3.engine.tiers import DiskTier, HostTier

OPTIONS = {"max_num_seqs": 4, "num_blocks": 200, "max_tokens_per_step": 128}


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(length)]


def states_of(gen) -> dict[tuple, dict[str, torch.Tensor]]:
    """Prefix -> what a tier would store of its snapshot."""
    found = {}
    for entry in gen.index.entries():
        tokens = tuple(t for node in entry.path for t in node.tokens)[: entry.snapshot.position]
        if entry.snapshot.blocks:
            gen.pools.stage_blocks([gen.pool.places[block] for block in entry.snapshot.blocks])
        heads = (0, gen.pools.num_heads)
        (found[tokens],) = gen.pools.read_slices(entry.snapshot.slot, [heads])
    return found


def test_they_are_the_exact_ones_rounded(demo):
    prompts = [prompt_of(length, length) for length in (70, 130, 300)]
    params = SamplingParams(max_new_tokens=70, ignore_eos=True)
    found = {}
    for kind in ("exact", "bf16"):
        with KimiK3Generator(demo, snapshots=kind, **OPTIONS) as gen:
            gen.generate(prompts, params)
            found[kind] = states_of(gen)
            stats = gen.stats()
            held = stats["slots_snapshots"] * gen.pools.layout.packed_blocks
            assert stats["blocks_snapshots"] == (held if kind == "bf16" else 0)
            assert stats["blocks_used"] == stats["blocks_cached"] + stats["blocks_snapshots"]
            assert gen.pool.num_slots == (0 if kind == "bf16" else stats["slots_snapshots"])
    assert found["exact"].keys() == found["bf16"].keys() and len(found["exact"]) > 8
    for tokens, exact in found["exact"].items():
        for name, tensor in exact.items():
            wanted = tensor.bfloat16() if name.startswith("states") else tensor
            assert torch.equal(found["bf16"][tokens][name], wanted), name


class Hook:
    def __init__(self):
        self.rows = []

    def __call__(self, token_ids, logits_V):
        self.rows.append(logits_V.clone())
        return logits_V


def test_what_follows_a_hit_differs_by_the_rounding(demo):
    """From the host as from the device; a rounded state moves logits of order 10 by at most a few 2^-9 of them."""
    prompts = [prompt_of(200, seed) for seed in range(4)]
    with KimiK3Generator(demo, snapshots="bf16", tiers=(HostTier(1 << 28),), **OPTIONS) as gen:
        for is_evicted in (False, True):
            for prompt in prompts:
                rows = []
                for is_hit in (False, True):
                    hook = Hook()
                    extra = b"" if is_hit else bytes([is_evicted])
                    if is_hit:
                        gen.generate([prompt], SamplingParams(max_new_tokens=1))
                        if is_evicted:
                            gen.index.clear()
                            gen.tiers.stack.flush()
                    (result,) = gen.generate([[*prompt, 7]], SamplingParams(max_new_tokens=1, logits_processor=hook),
                                             extra_key=extra)  # fmt: skip
                    assert (result.reused_tokens == 200) == is_hit
                    rows += hook.rows
                error = (rows[0] - rows[1]).abs().max().item()
                assert 0 < error < 0.02 * rows[0].abs().max().item()
        assert gen.tiers.counts["restored_tokens"] > 0


def test_more_of_them_fit(demo):
    kept = {}
    for kind in ("exact", "bf16"):
        with KimiK3Generator(demo, snapshots=kind, memory=1 << 22, max_num_seqs=2) as gen:
            for seed in range(40):
                gen.generate([prompt_of(64, seed)], SamplingParams(max_new_tokens=1))
            kept[kind] = gen.stats()["slots_snapshots"]
            assert gen.index.evictions > 0
    assert kept["bf16"] > 1.2 * kept["exact"]  # the demo model's windows weigh as much as its states


def test_exact_results_refuse_them(demo):
    with pytest.raises(ValueError, match="batch_invariant wants snapshots='exact', got 'bf16'"):
        KimiK3Generator(demo, snapshots="bf16", batch_invariant=True)
    with pytest.raises(ValueError, match="snapshots 'exact' or 'bf16', got 'fp8'"):
        KimiK3Generator(demo, snapshots="fp8")


def test_on_disk_they_are_never_taken_for_exact_ones(demo, tmp_path):
    prompt = prompt_of(200, 1)
    for kind, reused in (("exact", 0), ("bf16", 0), ("exact", 192), ("bf16", 192)):
        with KimiK3Generator(demo, snapshots=kind, tiers=(DiskTier(tmp_path, 1 << 28),), **OPTIONS) as gen:
            (result,) = gen.generate([[*prompt, 5]], SamplingParams(max_new_tokens=2))
            assert result.reused_tokens >= reused and (reused or not result.reused_tokens)


@pytest.mark.parametrize("has_tier", [False, True])
def test_nothing_leaks_under_pressure(demo, has_tier):
    rng = random.Random(3)
    tiers = (HostTier(1 << 27),) if has_tier else ()
    with KimiK3Generator(
        demo, snapshots="bf16", max_num_seqs=3, num_blocks=14, max_tokens_per_step=128, tiers=tiers
    ) as gen:
        bases = [prompt_of(150, seed) for seed in range(4)]
        live = []
        for _ in range(40):
            prompt = rng.choice(bases)[: rng.randrange(1, 150)] + prompt_of(rng.randrange(1, 60), rng.randrange(99))
            live.append(gen.add(prompt, SamplingParams(max_new_tokens=rng.randrange(1, 30)), priority=rng.randrange(2)))
            for _ in range(rng.randrange(6)):
                gen.step()
            if rng.random() < 0.2:
                gen.abort(rng.choice(live))
        while gen.has_unfinished():
            gen.step()
        assert all(gen.result(rid).finish_reason in ("length", "stop", "abort") for rid in live)
        assert gen.index.evictions > 0
        gen.index.clear()
        assert gen.pool.num_slots == gen.pool.num_blocks == 0
