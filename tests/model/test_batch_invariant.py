"""Batch-invariant mode: a token's logits are the same bits in any company, any piece and any form; and exports."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference_model import random_ids, random_model, small_config
from torch import Tensor

import kimi_k3
from kimi_k3 import KimiK3ForCausalLM
from kimi_k3.cache import PackedBatch, batch_without_cache

GOLDEN = Path(__file__).parents[1] / "golden"
DEMO = Path(kimi_k3.__file__).parent / "demo"
TOKENS = 150


def load(name: str) -> KimiK3ForCausalLM:
    if name.startswith("random"):  # widths and heads that fill no vector
        experts = "mxfp4" if name == "random-mxfp4" else "dequantized"
        return random_model(
            small_config(), torch.float64 if name == "random-float64" else torch.float32, experts=experts
        )
    folder, _, dtype = name.partition("-")
    path = DEMO if folder == "demo" else GOLDEN / folder
    dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    return KimiK3ForCausalLM.from_pretrained(path, dtype=dtype, experts="mxfp4", progress=False)


SLOW = ["demo-bf16", "random", "random-float64"]
NAMES = ["golden", "smooth", "demo", "random-mxfp4", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> KimiK3ForCausalLM:
    model = load(request.param)
    model.set_batch_invariant(True)
    return model


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def in_pieces(model: KimiK3ForCausalLM, ids: Tensor, sizes: int | list[int]) -> Tensor:
    cache = model.make_cache(1)
    return torch.cat([model(piece, past_key_values=cache).logits for piece in ids.split(sizes, dim=1)], dim=1)[0]


def beside_others(model: KimiK3ForCausalLM, ids: Tensor) -> Tensor:
    lengths = [3, 1, 17, ids.shape[1], 64, 1, 65, 100]
    parts = [random_ids(model.config, 1, length, seed=length) for length in lengths]
    parts[3] = ids
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return model(torch.cat(parts, dim=1), cu_seqlens=cu_seqlens).logits[0, cu_seqlens[3] : cu_seqlens[4]]


def decoded_beside_others(model: KimiK3ForCausalLM, ids: Tensor) -> Tensor:
    """The last 20 tokens one at a time in a batch of 5 rows, each with a past of its own."""
    cache, mask = model.make_cache(5), torch.ones(5, TOKENS - 20, dtype=torch.long)
    for row, padding in enumerate([100, 7, 0, 64, 129]):
        mask[row, :padding] = 0
    rows = random_ids(model.config, 5, TOKENS)
    rows[2] = ids[0]
    out = [model(rows[:, : TOKENS - 20], attention_mask=mask, past_key_values=cache).logits[2]]
    for t in range(TOKENS - 20, TOKENS):
        out.append(model(rows[:, t : t + 1], past_key_values=cache).logits[2])
    return torch.cat(out)


FORMS = {
    "in pieces of 64": lambda model, ids: in_pieces(model, ids, 64),
    "in uneven pieces": lambda model, ids: in_pieces(model, ids, [1, 2, 70, 7, 64, 6]),
    "token by token": lambda model, ids: in_pieces(model, ids, [2, 98, *[1] * 50]),
    "every token alone": lambda model, ids: in_pieces(model, ids, 1),
    "beside seven others": beside_others,
    "decoded beside four others": decoded_beside_others,
    "with a cache": lambda model, ids: model(ids, use_cache=True).logits[0],
    "the last logits only": lambda model, ids: torch.cat(
        [model(ids, logits_to_keep=keep).logits[0, :1] for keep in range(TOKENS, 0, -30)]
    ),
}


def assert_same_bits(model: KimiK3ForCausalLM, form: str) -> None:
    ids = random_ids(model.config, 1, TOKENS)
    whole, got = model(ids).logits[0], FORMS[form](model, ids)
    if form == "the last logits only":
        whole = whole[::30]
    different = (got != whole).any(-1).nonzero().flatten().tolist()
    assert got.shape == whole.shape and not different, f"{len(different)} positions differ, first {different[:3]}"


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.slow] if "every" in form else []) for form in FORMS]
)
def test_a_token_has_the_same_bits_in_every_form(model: KimiK3ForCausalLM, form: str) -> None:
    assert_same_bits(model, form)


@pytest.mark.parametrize("form", ["in pieces of 64", "token by token", "beside seven others"])
@pytest.mark.parametrize("threads", [2, 3])
def test_and_with_more_threads(threads: int, form: str) -> None:
    model = load("demo")
    model.set_batch_invariant(True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_same_bits(model, form)
    finally:
        torch.set_num_threads(before)


def test_without_the_mode_bits_do_depend_on_the_form() -> None:
    model = load("smooth")
    ids = random_ids(model.config, 1, 40)
    assert not torch.equal(in_pieces(model, ids, 1), model(ids).logits[0])


def test_the_mode_changes_rounding_only(model: KimiK3ForCausalLM) -> None:
    is_narrow = model.dtype == torch.bfloat16
    prompts = [random_ids(model.config, 1, TOKENS, seed=seed) for seed in range(8 if is_narrow else 1)]
    invariant = torch.cat([model(ids).logits for ids in prompts])
    model.set_batch_invariant(False)
    try:
        ordinary = torch.cat([model(ids).logits for ids in prompts])
    finally:
        model.set_batch_invariant(True)
    # Logits of order 1 to 10. A choice of experts can flip: in bfloat16 in every prompt, which moves one by 0.4 to 1.2 of the
    # bound; so the mean of several is bounded, at the size of one rounding. And beside float32 on the same weights, from which
    # either mode is 1.2 of that away, the invariant one is no worse.
    error = (invariant.double() - ordinary.double()).abs()
    if is_narrow:
        assert error.mean() <= 2.0**-8 * ordinary.double().abs().mean()
        wide = copy.deepcopy(model).float()
        wide.set_batch_invariant(False)
        exact = torch.cat([wide(ids).logits for ids in prompts])
        assert (invariant - exact).abs().mean() <= 1.15 * (ordinary - exact).abs().mean()
    else:
        assert error.max() <= (1e-10 if model.dtype == torch.float64 else 5e-4)


def test_generation_does_not_depend_on_pieces_or_company(model: KimiK3ForCausalLM) -> None:
    ids = random_ids(model.config, 3, 20)
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1, :9] = 0
    options = {"max_new_tokens": 12, "eos_token_id": [], "temperature": 1.0, "seed": 7}
    together = model.generate(ids, mask, **options)
    for row, start in enumerate([0, 9, 0]):
        alone = model.generate(ids[row : row + 1, start:], prefill_tokens=3, **options)
        assert torch.equal(alone[0, 20 - start :], together[row, 20:])


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("KIMI_K3_NATIVE") == "0", reason="this is the run that it starts")
def test_the_references_keep_the_promise_too(request: pytest.FixtureRequest) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", request.path, "-k", "every_form and (smooth or random-mxfp4)"],
        env=os.environ | {"KIMI_K3_NATIVE": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]


# --- exports


class Run:
    """Packed sequences through the layers, with pools of our own: slots 0..9, 64-token blocks."""

    def __init__(self, model: KimiK3ForCausalLM) -> None:
        self.model, self.cache = model, model.make_cache(9)  # ten slots

    def __call__(self, ids_T: Tensor, lengths: list[int], batch: PackedBatch) -> Tensor:
        embeds = self.model.model.embed_tokens(ids_T)
        running_sum, bank, *_ = self.model.model(embeds, batch, self.cache.pools)
        return self.model.head_logits(self.model.model.final_hidden(running_sum, bank))

    def batch(self, lengths: list[int], read: list[int], write: list[int], **exports: Tensor) -> PackedBatch:
        """Sequences without a past: row n of the cache's blocks for sequence n."""
        prepared = self.cache.prepare(lengths + [0] * (9 - len(lengths)))
        count = len(lengths)
        return prepared._replace(
            cu_seqlens=prepared.cu_seqlens[: count + 1], past_lens=prepared.past_lens[:count],
            kv_lens=prepared.kv_lens[:count], block_tables=prepared.block_tables[:count],
            read_slots=torch.tensor(read), write_slots=torch.tensor(write), is_decode=False, **exports,
        )  # fmt: skip

    def kda_pools(self, slot: int) -> list[Tensor]:
        text = self.model.config.text_config
        return [pool[slot] for i, pools in self.cache.pools.items() if text.is_kda_layer(i) for pool in pools]


@pytest.mark.parametrize("is_invariant", [True, False])
@pytest.mark.parametrize("name", ["smooth", "random-mxfp4"])
def test_an_exported_state_and_window_are_those_of_a_run_that_ends_there(name: str, is_invariant: bool) -> None:
    model = load(name)
    model.set_batch_invariant(is_invariant)
    lengths = [40, 1, 90]
    ids = random_ids(model.config, 131)
    run = Run(model)
    at, to = torch.tensor([2, 17, 40, 41, 42, 105, 131, 60]), torch.tensor([3, 4, 5, 6, 7, 8, 9, -1])
    run(ids, lengths, run.batch(lengths, [-1] * 3, [0, 1, 2], export_at=at, export_slots=to))
    tolerance = {"atol": 0, "rtol": 0} if is_invariant else {"atol": 1e-4, "rtol": 1e-4}
    for position, slot in zip(at.tolist(), to.tolist()):
        start = 0 if position <= 40 else 40 if position == 41 else 41
        alone, length = Run(model), position - start
        alone(ids[start:position], [length], alone.batch([length], [-1], [0]))
        if slot >= 0:
            for got, want in zip(run.kda_pools(slot), alone.kda_pools(0), strict=True):
                torch.testing.assert_close(got, want, **tolerance)
    for got, want in zip(run.kda_pools(9), run.kda_pools(2), strict=True):
        assert torch.equal(got, want)  # an export at the end is what is written at the end


def test_decode_and_prefill_pieces_run_together_and_export() -> None:
    """One step with a decode token, a piece and a fresh prompt; it goes on from exported slots."""
    model = load("demo")
    model.set_batch_invariant(True)
    first, second = random_ids(model.config, 1, 71), random_ids(model.config, 1, 40, seed=1)
    wanted = [model(ids).logits[0] for ids in (first, second)]
    run = Run(model)
    exports = {"export_at": torch.tensor([70, 80]), "export_slots": torch.tensor([4, 5])}
    got = run(torch.cat([first[0, :70], second[0, :30]]), [70, 30], run.batch([70, 30], [-1] * 2, [0, 1], **exports))
    assert torch.equal(got, torch.cat([wanted[0][:70], wanted[1][:30]]))
    run.cache.lengths[:2] = [70, 10]  # the second goes on from its tenth token: its latents are written once more
    ids = torch.cat([first[0, 70:], second[0, 10:]])
    exports = {"export_at": torch.tensor([1, 31]), "export_slots": torch.tensor([6, 7])}
    got = run(ids, [1, 30], run.batch([1, 30], [4, 5], [0, 1], **exports))
    assert torch.equal(got, torch.cat([wanted[0][70:], wanted[1][10:]]))
    for exported, written in ((6, 0), (7, 1)):
        assert all(map(torch.equal, run.kda_pools(exported), run.kda_pools(written)))


def test_a_decode_step_exports_too() -> None:
    model = load("demo")
    ids = random_ids(model.config, 12)
    run = Run(model)
    run(ids[:11], [11], run.batch([11], [-1], [0]))
    run.cache.lengths[0] = 11
    batch = run.batch([1], [0], [1], export_at=torch.tensor([1]), export_slots=torch.tensor([2]))
    run(ids[11:], [1], batch._replace(is_decode=True))
    assert all(map(torch.equal, run.kda_pools(1), run.kda_pools(2)))
    assert not any(map(torch.equal, run.kda_pools(1), run.kda_pools(0)))


# --- what it refuses


def test_gradients_and_graphs_are_refused() -> None:
    model = random_model(small_config(num_hidden_layers=3, mla=(3,)))
    ids = random_ids(model.config, 1, 4)
    model.set_batch_invariant(True)
    with torch.enable_grad(), pytest.raises(NotImplementedError, match=r"no gradient.*no_grad"):
        model(ids, labels=ids)
    with pytest.raises(NotImplementedError, match="without compile_blocks"):
        model.compile_blocks()
    with pytest.raises(ValueError, match="latent_rows"):
        model.model(model.model.embed_tokens(ids[0]), batch_without_cache([4], torch.device("cpu")), {})
    model.set_batch_invariant(False)
    model.compile_blocks()
    with pytest.raises(NotImplementedError, match="without compile_blocks"):
        model.set_batch_invariant(True)


def test_a_model_in_the_mode_drops_the_cache_that_nobody_asked_for(model: KimiK3ForCausalLM) -> None:
    ids = random_ids(model.config, 1, 5)
    assert model(ids).past_key_values is None
    assert model(ids, use_cache=True).past_key_values.get_seq_length() == 5
