"""The generator on several ranks: a small budget, preemption and tiers change no token; degrees read each other's states."""

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import check_expert_figures, run_ranks

import kimi_k3
from kimi_k3 import KimiK3ForCausalLM, KimiK3Generator, SamplingParams
from kimi_k3.engine.tiers import DiskTier, HostTier
from kimi_k3.parallel import make_mesh

DEMO = Path(kimi_k3.__file__).parent / "demo"
SMALL = {"max_num_seqs": 4, "num_blocks": 12, "max_tokens_per_step": 128}


def load(mesh=None) -> KimiK3ForCausalLM:
    return KimiK3ForCausalLM.from_pretrained(DEMO, dtype=torch.float32, progress=False, mesh=mesh)


def mesh_of(kind: str):
    size = dist.get_world_size()
    return make_mesh(tp=size) if kind == "tp" else make_mesh(ep=size) if kind == "ep" else make_mesh(tp=2, ep=size)


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(length)]


def requests():
    rng = random.Random(1)
    prompts = [prompt_of(rng.randrange(1, 250), seed % 4) for seed in range(10)]  # several begin alike
    options = [{}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}]
    return [(p, SamplingParams(max_new_tokens=6, **options[i % 2])) for i, p in enumerate(prompts)]


def tight_and_roomy(kind: str | None) -> dict:
    """Everything through a budget that forces eviction and preemption, then each request alone with room."""
    model = load(None if kind is None else mesh_of(kind))
    with KimiK3Generator(model, tiers=(HostTier(1 << 26),), batch_invariant=True, **SMALL) as gen:
        many = requests()
        rids = [gen.add(prompt, params, priority=i % 3) for i, (prompt, params) in enumerate(many)]
        while gen.has_unfinished():
            gen.step()
        tight = [gen.result(rid).token_ids for rid in rids]
        stats = gen.stats()
    alone = []
    for prompt, params in many:
        with KimiK3Generator(model, batch_invariant=True, max_num_seqs=1, num_blocks=20) as gen:
            alone.append(gen.generate([prompt], params)[0].token_ids)
    # Unseeded draws: no rank may draw its own.
    with KimiK3Generator(model, max_num_seqs=2, num_blocks=20) as gen:
        gen.count_experts()
        free = gen.generate([prompt_of(9, 1)], SamplingParams(max_new_tokens=8, temperature=1.5))[0].token_ids
        told = [] if kind is None else check_expert_figures(gen, gen.expert_counts())
    return {"tight": tight, "alone": alone, "free": free, "evictions": stats["evictions"], "told": told}


@pytest.fixture(scope="module")
def one_process():
    return tight_and_roomy(None)


@pytest.mark.parametrize(("size", "kind"), [(2, "tp"), (2, "ep"), (4, "tp x ep")])
def test_a_small_budget_changes_no_token_on_any_rank(size, kind, one_process):
    ranks = run_ranks(size, tight_and_roomy, kind, timeout=300)
    assert all(rank == ranks[0] for rank in ranks)
    # Each tells the tokens of its own experts; where experts are cut by their width, the first one tells all.
    everyone = 8 * 16
    assert ranks[0]["told"] == ([everyone, 0] if kind == "tp" else [everyone // size] * size)
    assert ranks[0]["tight"] == ranks[0]["alone"] and ranks[0]["evictions"] > 0
    # Tensor parallelism sums in another order, so this holds where no two tokens are close; expert parallelism exactly.
    same = sum(a == b for a, b in zip(ranks[0]["tight"], one_process["tight"], strict=True))
    assert same == 10 if kind == "ep" else same >= 8


def store(folder: str) -> None:
    model = load(mesh_of("tp") if dist.is_initialized() and dist.get_world_size() > 1 else None)
    with KimiK3Generator(model, tiers=(DiskTier(folder, 1 << 28),), **SMALL) as gen:
        gen.generate([prompt_of(200, 5)], SamplingParams(max_new_tokens=2))


def restore(folder: str) -> tuple[int, list[int]]:
    model = load(mesh_of("tp") if dist.is_initialized() and dist.get_world_size() > 1 else None)
    with KimiK3Generator(model, tiers=(DiskTier(folder, 1 << 28),), **SMALL) as gen:
        (result,) = gen.generate([[*prompt_of(200, 5), 7]], SamplingParams(max_new_tokens=6))
    return result.reused_tokens, result.token_ids


@pytest.mark.parametrize("direction", ["two from one", "one from two"])
def test_what_one_degree_stored_another_restores(direction, tmp_path):
    with KimiK3Generator(load(), max_num_seqs=1, num_blocks=20) as gen:
        expected = gen.generate([[*prompt_of(200, 5), 7]], SamplingParams(max_new_tokens=6))[0].token_ids
    if direction == "two from one":
        store(str(tmp_path))
        results = run_ranks(2, restore, str(tmp_path), timeout=200)
    else:
        run_ranks(2, store, str(tmp_path), timeout=200)
        results = [restore(str(tmp_path))]
    assert all(result == (200, expected) for result in results)


def restore_where_one_rank_cannot() -> tuple[int, list[int], int]:
    with KimiK3Generator(load(mesh_of("tp")), tiers=(HostTier(1 << 28),), **SMALL) as gen:
        gen.generate([prompt_of(200, 5)], SamplingParams(max_new_tokens=2))
        gen.index.clear()
        gen.tiers.stack.flush()
        if dist.get_rank() == 1:  # all that this rank has stored is of another shape
            (tier,) = gen.tiers.stack.tiers
            read = tier.get
            tier.get = lambda key: {name: tensor[:0] for name, tensor in read(key).items()}
        (result,) = gen.generate([[*prompt_of(200, 5), 7]], SamplingParams(max_new_tokens=6))
        counts = gen.tiers.counts
        return result.reused_tokens, result.token_ids, counts["miss_foreign"] + counts["miss_elsewhere"]


def test_what_one_rank_cannot_restore_no_rank_does():
    with KimiK3Generator(load(), max_num_seqs=1, num_blocks=20) as gen:
        expected = gen.generate([[*prompt_of(200, 5), 7]], SamplingParams(max_new_tokens=6))[0].token_ids
    ranks = run_ranks(2, restore_where_one_rank_cannot, timeout=30)
    assert ranks[0] == ranks[1] and ranks[0][:2] == (0, expected) and ranks[0][2] > 0
