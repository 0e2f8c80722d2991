"""compile_blocks: one set of graphs for all lengths, batches and depths, and the results of eager."""

import copy
from pathlib import Path

import pytest
import torch
from reference_model import random_ids, random_model, small_config
from torch._dynamo.utils import counters

import kimi_k3
from kimi_k3 import KimiK3ForCausalLM

DEMO = Path(kimi_k3.__file__).parent / "demo"

# Three kinds of layer; each for many tokens and for one token of each sequence, of one sequence and of more.
MOST_GRAPHS = 12
MOST_GRAPHS_WITHOUT_CACHE = 9  # three kinds: one token, one sequence, more sequences
LENGTHS, BATCHES = (1, 2, 3, 5, 17, 64, 65), (1, 2, 3, 4)


def graph_count() -> int:
    return counters["stats"]["unique_graphs"]


class Compiled:
    """One model twice, eager and compiled, and how many graphs were compiled for the calls so far."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        counters.clear()
        self.config = small_config(num_hidden_layers=4, mla=(3,))
        self.eager = random_model(self.config)
        self.compiled = copy.deepcopy(self.eager)
        self.compiled.compile_blocks(fullgraph=True)

    def assert_equal(self, ids, decode_steps: int = 0, **options) -> None:
        """The logits of `ids`, and of one more token each for `decode_steps` steps with the cache."""
        wanted, got = (model(ids, **options) for model in (self.eager, self.compiled))
        # float64: only the order of fused sums differs.
        torch.testing.assert_close(got.logits, wanted.logits, atol=1e-9, rtol=1e-9)
        for step in range(decode_steps):
            following = random_ids(self.config, len(wanted.past_key_values.lengths), 1, seed=step)
            steps = [
                model(following, past_key_values=out.past_key_values).logits
                for model, out in ((self.eager, wanted), (self.compiled, got))
            ]
            torch.testing.assert_close(steps[1], steps[0], atol=1e-9, rtol=1e-9)


@pytest.fixture(scope="module")
def both():
    with torch.no_grad(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        pair = Compiled()
        for step, length in enumerate(
            (*LENGTHS, *LENGTHS[::-1])
        ):  # all graphs here, so that no test depends on another
            ids = random_ids(pair.config, BATCHES[step % 4], length, seed=step)
            pair.assert_equal(ids, decode_steps=2, use_cache=True)
        yield pair


def test_a_small_number_of_graphs_serves_all_kinds_of_layer(both):
    assert 3 <= graph_count() <= MOST_GRAPHS
    assert not counters["graph_break"]


def test_no_length_batch_or_cache_compiles_anew(both):
    before = graph_count()
    for batch in BATCHES:
        for length in LENGTHS:
            both.assert_equal(random_ids(both.config, batch, length, seed=length), decode_steps=1, use_cache=True)
    both.assert_equal(random_ids(both.config, 1, 200), decode_steps=1, use_cache=True)
    assert graph_count() == before


def test_packed_and_padded_batches_use_the_same_graphs(both):
    before = graph_count()
    ids = random_ids(both.config, 1, 90)
    both.assert_equal(ids, decode_steps=1, use_cache=True, cu_seqlens=torch.tensor([0, 1, 40, 90], dtype=torch.int32))
    mask = torch.ones(3, 30, dtype=torch.long)
    mask[1, :20] = 0
    both.assert_equal(ids.view(3, 30), decode_steps=1, use_cache=True, attention_mask=mask)
    assert graph_count() == before


def test_generation_gives_the_tokens_of_eager(both):
    before = graph_count()
    ids, mask = random_ids(both.config, 2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    options = {"max_new_tokens": 70, "eos_token_id": [], "prefill_tokens": 4}  # over a block's end
    wanted = both.eager.generate(ids, mask, **options)
    assert torch.equal(both.compiled.generate(ids, mask, **options), wanted)
    assert graph_count() == before


@pytest.mark.slow
def test_two_hundred_steps_of_changing_lengths(both):
    before = graph_count()
    generator = torch.Generator().manual_seed(0)
    for step in range(200):
        batch, length = (int(torch.randint(1, n, (), generator=generator)) for n in (6, 150))
        ids = random_ids(both.config, batch, 1 if step % 5 == 0 else length, seed=step)
        both.assert_equal(ids, decode_steps=1, use_cache=True)
    assert graph_count() == before


@pytest.mark.slow
def test_forwards_without_a_cache_have_few_graphs_of_their_own(both):
    before, counts = graph_count(), []
    for _ in range(2):
        for length in LENGTHS:
            for batch in BATCHES:
                both.assert_equal(random_ids(both.config, batch, length, seed=length))
        counts.append(graph_count() - before)
    assert counts[0] == counts[1] <= MOST_GRAPHS_WITHOUT_CACHE


@pytest.mark.slow
@torch.enable_grad()
def test_compiled_training_gives_the_gradients_of_eager():
    torch._dynamo.reset()
    counters.clear()
    config = small_config(num_hidden_layers=4, mla=(3,))
    eager = random_model(config)
    compiled = copy.deepcopy(eager)
    compiled.compile_blocks(fullgraph=True)
    for length in (20, 66, 7, 31):
        ids = random_ids(config, 1, length, seed=length)
        for model in (eager, compiled):
            model.zero_grad()
            model(ids, labels=ids).loss.backward()
        for (name, p), other in zip(eager.named_parameters(), compiled.parameters()):
            if p.grad is not None:
                torch.testing.assert_close(other.grad, p.grad, atol=1e-9, rtol=1e-8, msg=lambda m, n=name: f"{n}: {m}")
    assert graph_count() <= MOST_GRAPHS


@pytest.mark.slow
def test_the_demo_model_compiled_equals_eager_over_two_hundred_steps():
    torch._dynamo.reset()
    counters.clear()
    eager, compiled = (KimiK3ForCausalLM.from_pretrained(DEMO, dtype=torch.float32, progress=False) for _ in range(2))
    compiled.compile_blocks(fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    settled = 0
    with torch.no_grad(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for step in range(200):
            batch, length = (int(torch.randint(1, most, (), generator=generator)) for most in (4, 90))
            ids = torch.randint(1000, (batch, length if step % 10 else 1), generator=generator)
            wanted, got = (model(ids, use_cache=True) for model in (eager, compiled))
            # float32 logits of order 10 through the compiled CPU kernels: fused sums in another order.
            torch.testing.assert_close(got.logits, wanted.logits, atol=2e-4, rtol=1e-4)
            following = ids[:, :1]
            steps = [
                model(following, past_key_values=out.past_key_values).logits
                for model, out in ((eager, wanted), (compiled, got))
            ]
            torch.testing.assert_close(steps[1], steps[0], atol=2e-4, rtol=1e-4)
            if step == 30:
                settled = graph_count()
    assert graph_count() == settled <= MOST_GRAPHS


def test_a_layer_compiles_in_bfloat16():
    """There torch's GEMM or the library's own serves many rows, by the processor: settled before the graph is made."""
    config = small_config(num_hidden_layers=1, mla=())
    eager = random_model(config).to(torch.bfloat16)
    compiled = copy.deepcopy(eager)
    compiled.compile_blocks()
    ids = random_ids(config, 1, 9)
    with torch.no_grad():
        want, got = eager(ids).logits, compiled(ids).logits
    assert (got - want).abs().max() <= 2**-5 * want.abs().max()
