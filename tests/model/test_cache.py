"""The cache: lengths, copies, rows, growth, and memory that follows the prompt's length."""

import subprocess
import sys
import textwrap

import pytest
import torch
from reference_model import random_ids, random_model, small_config

from kimi_k3.cache import BLOCK_SIZE, KimiK3Cache

EXACT = {"atol": 1e-11, "rtol": 1e-10}


@pytest.fixture(scope="module")
def model():
    return random_model(small_config())


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def test_lengths_are_those_of_the_longest_row(model):
    cache = model.make_cache(2)
    assert cache.get_seq_length() == 0
    ids, mask = random_ids(model.config, 2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[1, :4] = 0
    model(ids, attention_mask=mask, past_key_values=cache)
    assert cache.get_seq_length() == 10 and cache.lengths == [10, 6]
    model(ids[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 11 and cache.lengths == [11, 7]


def test_forward_returns_the_cache_it_was_given(model):
    cache = model.make_cache(1)
    assert model(random_ids(model.config, 1, 3), past_key_values=cache).past_key_values is cache
    assert model(random_ids(model.config, 1, 3)).past_key_values is None
    fresh = model(random_ids(model.config, 1, 3), use_cache=True).past_key_values
    assert isinstance(fresh, KimiK3Cache) and fresh.get_seq_length() == 3


def test_a_copy_is_independent(model):
    ids = random_ids(model.config, 1, 70)
    cache = model(ids, use_cache=True).past_key_values
    twin = cache.copy()
    before = {layer: [pool.clone() for pool in pools] for layer, pools in cache.pools.items()}
    first = model(random_ids(model.config, 1, 66, seed=1), past_key_values=twin).logits
    assert cache.get_seq_length() == 70 and twin.get_seq_length() == 136
    for layer, pools in cache.pools.items():
        assert all(torch.equal(pool, old) for pool, old in zip(pools, before[layer]))
    # and the original goes on as if there had been no copy
    assert torch.equal(model(random_ids(model.config, 1, 66, seed=1), past_key_values=cache).logits, first)


@pytest.mark.parametrize("rows", [[2], [1, 1], [2, 0, 2, 1, 0], torch.tensor([0, 2])])
def test_selected_rows_go_on_as_their_sources(rows, model):
    ids, mask = random_ids(model.config, 3, 67), torch.ones(3, 67, dtype=torch.long)
    mask[0, :60] = 0
    mask[2, :3] = 0
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    chosen = cache.select_rows(rows)
    rows = list(map(int, rows))
    assert chosen.lengths == [[7, 67, 64][row] for row in rows]
    following = random_ids(model.config, len(rows), 5, seed=4)  # different in each copy of a row
    logits = torch.cat([model(following[:, t : t + 1], past_key_values=chosen).logits for t in range(5)], dim=1)
    for place, row in enumerate(rows):
        whole = torch.cat([ids[row][mask[row].bool()], following[place]])[None]
        torch.testing.assert_close(logits[place], model(whole).logits[0, -5:], **EXACT)
    assert cache.lengths == [7, 67, 64]


@pytest.mark.parametrize("rows", [[], [3], [-1], [0.5]])
def test_rows_that_do_not_exist_are_named(rows, model):
    with pytest.raises(ValueError, match=r"select_rows.*0\.\.2"):
        model.make_cache(3).select_rows(rows)


def test_it_grows_over_blocks_row_by_row(model):
    total = 3 * BLOCK_SIZE + 7
    ids = random_ids(model.config, 2, total)
    cache, out = model.make_cache(2), []
    for piece in ids.split([50, 20, 1, 1, BLOCK_SIZE, total - BLOCK_SIZE - 72], dim=1):
        out.append(model(piece, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(out, dim=1), model(ids).logits, **EXACT)
    table = cache.prepare([0, 0]).block_tables
    assert table.shape[1] == 4 and len(set(table.flatten().tolist())) == 8  # no block serves two places


def test_growth_copies_a_logarithmic_number_of_times(model):
    cache, sizes = model.make_cache(1), []
    for _ in range(64):
        cache.prepare([BLOCK_SIZE])
        cache.commit([BLOCK_SIZE])
        sizes.append(cache.memory_bytes())
    assert len(set(sizes)) <= 20
    text = model.config.text_config
    latents = 2 * 64 * BLOCK_SIZE * text.latent_kv_dim * 8  # two MLA layers, float64
    states = 4 * 2 * (3 * 8 * 8 + 3 * 3 * 24) * 8  # four KDA layers, two slots
    assert latents + states <= sizes[-1] <= 1.3 * latents + states


def test_cropping_says_why_it_cannot(model):
    with pytest.raises(NotImplementedError, match=r"KDA state"):
        model.make_cache(1).crop(3)


def test_a_batch_of_another_size_is_an_error_and_leaves_the_cache(model):
    ids = random_ids(model.config, 2, 5)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"past_key_values.*2 rows, got 3"):
        model(random_ids(model.config, 3, 1), past_key_values=cache)
    assert cache.lengths == [5, 5]
    step = random_ids(model.config, 2, 1)
    wanted = model(torch.cat([ids, step], dim=1)).logits[:, -1:]
    torch.testing.assert_close(model(step, past_key_values=cache).logits, wanted, **EXACT)


def test_states_are_wide_and_latents_have_the_models_dtype():
    model = random_model(small_config(), torch.bfloat16)
    cache = model(random_ids(model.config, 1, 5), use_cache=True).past_key_values
    for layer, pools in cache.pools.items():
        dtypes = [pool.dtype for pool in pools]
        is_kda = model.config.text_config.is_kda_layer(layer)
        assert dtypes == ([torch.float32, torch.bfloat16] if is_kda else [torch.bfloat16])


def test_training_with_a_cache_keeps_no_graph(model):
    ids = random_ids(model.config, 1, 5)
    with torch.enable_grad():
        cache = model(ids, use_cache=True).past_key_values
    assert not any(pool.requires_grad for pools in cache.pools.values() for pool in pools)


# One head of attention scores over 8192 tokens would take 268 MB for each of 4 heads; in pieces of 512, 17 MB.
PEAK = """
import resource, torch
from reference_model import random_ids, random_model, small_config
model = random_model(small_config(num_hidden_layers=2, mla=(2,), num_attention_heads=4), torch.float32)
def peak(tokens):
    model.generate(random_ids(model.config, 1, tokens), max_new_tokens=1, eos_token_id=[], prefill_tokens=512)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(peak(512), peak(2048), peak(8192))
"""


def test_memory_of_a_long_prompt_does_not_grow_with_its_square(request):
    folder = request.path.parent
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PEAK)], cwd=folder, check=True, capture_output=True, text=True
    )
    first, middle, last = map(int, run.stdout.split())
    assert last - middle < 60e6, (first, middle, last)
