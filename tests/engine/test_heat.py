"""Block heat: what `heat_map` says against attention in its plain form, what it orders, and that it changes no token."""

import random

import pytest
import torch

from kimi_k3 import KimiK3Generator, SamplingParams
from kimi_k3.engine.runner import HEAT_KEPT
from kimi_k3.engine.tiers import HostTier
from kimi_k3.layers.mla import KimiMLAAttention


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 200) for _ in range(length)]


@torch.no_grad()
def plain_masses(model, tokens: list[int], block_size: int) -> list[list[float]]:
    """For each position, the attention that each block draws: keys of every head expanded, mean over heads and layers."""
    masses, layers = torch.zeros(len(tokens), -(-len(tokens) // block_size)), 0

    def look(module, inputs):
        nonlocal layers
        layers += 1
        x = inputs[0]
        q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x))).unflatten(-1, (module.num_heads, -1))
        latent, shared = module.kv_a_proj_with_mqa(x).split([module.rank, module.rope_dim], -1)
        expanded = module.kv_b_proj(module.kv_a_layernorm(latent)).unflatten(-1, (module.num_heads, -1))
        keys = torch.cat([expanded[..., : module.nope_dim], shared[:, None].expand(-1, module.num_heads, -1)], -1)
        scores = torch.einsum("thc,shc->hts", q, keys) * module.scale
        scores.masked_fill_(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
        weights = scores.softmax(-1).mean(0)
        for block, columns in enumerate(weights.split(block_size, 1)):
            masses[:, block] += columns.sum(1)

    attention = [m for m in model.modules() if isinstance(m, KimiMLAAttention)]
    hooks = [m.register_forward_pre_hook(look) for m in attention]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return (masses / layers).tolist()


def test_the_heat_map_is_the_attention_of_the_recorded_steps(smooth):
    prompts = [prompt_of(length, length) for length in (5, 20, 37)]
    options = {"max_num_seqs": 4, "num_blocks": 40, "block_size": 8}
    with KimiK3Generator(smooth, heat_every=2, **options) as gen:
        rids = [gen.add(prompt, SamplingParams(max_new_tokens=6, ignore_eos=True)) for prompt in prompts]
        assert [gen.heat_map(rid) for rid in rids] == [[], [], []]
        while gen.has_unfinished():
            gen.step()
        maps = [gen.heat_map(rid) for rid in rids]
        results = [gen.result(rid) for rid in rids]
        with pytest.raises(KeyError):
            gen.heat_map(rids[0])
    for prompt, heat, result in zip(prompts, maps, results):
        assert heat == result.heat and sum(heat) == pytest.approx(1)
        masses = plain_masses(smooth, prompt + result.token_ids, 8)
        want: list[float] = []
        for step in (1, 3):  # of five steps of decoding the second and the fourth
            new = masses[len(prompt) + step]
            kept = HEAT_KEPT if want else 0.0
            want = [kept * a + (1 - kept) * b for a, b in zip(want or new, new)]
        assert heat == pytest.approx(want[: len(heat)], abs=1e-4)  # float32, absorbed against expanded


@pytest.mark.parametrize("is_invariant", [False, True])
def test_prompts_of_one_token_wipe_no_heat(demo, is_invariant):
    """Such a prompt leaves a state, so that its step is none of decoding alone."""
    options = {"max_num_seqs": 4, "num_blocks": 40, "block_size": 8, "batch_invariant": is_invariant}
    with KimiK3Generator(demo, heat_every=1, **options) as gen:
        rid = gen.add(prompt_of(30, 0), SamplingParams(max_new_tokens=20, ignore_eos=True))
        for i in range(12):
            if i > 4:
                gen.add([i], SamplingParams(max_new_tokens=2, ignore_eos=True))
            gen.step()
            if i > 1:
                assert sum(gen.heat_map(rid)) == pytest.approx(1)
        while gen.has_unfinished():
            gen.step()


@pytest.mark.parametrize("is_invariant", [False, True])
def test_recording_changes_no_token_whatever_is_evicted(demo, is_invariant):
    prompts = [prompt_of(150, seed) for seed in range(6)]
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    tokens = []
    for heat_every in (0, 1):
        with KimiK3Generator(
            demo, max_num_seqs=3, num_blocks=14, max_tokens_per_step=128, batch_invariant=is_invariant,
            heat_every=heat_every, tiers=(HostTier(1 << 27),),
        ) as gen:  # fmt: skip
            tokens.append([r.token_ids for r in gen.generate(prompts * 2, params)])
            assert gen.index.evictions > 0
    assert tokens[0] == tokens[1]


def test_hot_blocks_are_read_first(demo):
    with KimiK3Generator(demo, max_num_seqs=2, num_blocks=30, heat_every=1, tiers=(HostTier(1 << 27),)) as gen:
        rid = gen.add(prompt_of(10, 0))
        request = gen._requests[rid]
        request.fetch_state, request.fetch_first, request.fetch_position = "absent", 1, 256
        request.fetch_keys = [f"{i:064x}" for i in range(4)]  # blocks 1, 2, 3 and a state
        request.heat, asked = [0.5, 0.1, 0.3, 0.2], []
        gen.tiers.stack.fetch = lambda keys, timeout_s: asked.extend(keys)
        gen.tiers.prefetch(request)
        assert [int(key, 16) for key in asked] == [1, 2, 0, 3]
        request.fetch_state = "none"
        request.fetch = None


def test_heat_is_off_unless_asked_for(demo):
    with KimiK3Generator(demo, max_num_seqs=2, num_blocks=10) as gen:
        rid = gen.add(prompt_of(10, 0), SamplingParams(max_new_tokens=3))
        while gen.has_unfinished():
            gen.step()
        with pytest.raises(ValueError, match="heat_every"):
            gen.heat_map(rid)
    with pytest.raises(ValueError, match="heat_every"):
        KimiK3Generator(demo, heat_every=-1)
