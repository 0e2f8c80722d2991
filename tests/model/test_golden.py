"""The golden checkpoints: logits, intermediates, routing and greedy tokens of independent implementations."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kimi_k3 import KimiK3ForCausalLM, KimiK3ForConditionalGeneration

GOLDEN = Path(__file__).parents[1] / "golden"
# The released code in float32 is 6e-5 / 5e-6 from its float64 run; a wrong MLA eps shows as a mean of 1.6e-5.
MAX_ERROR, MEAN_ERROR = 1.2e-4, 1e-5


class Golden:
    """One checkpoint as a float32 model, and what was recorded for it."""

    def __init__(self, name: str, experts: str, dtype: torch.dtype = torch.float32) -> None:
        recorded = json.loads((GOLDEN / f"{name}.reference" / "reference.json").read_text())
        self.model = KimiK3ForCausalLM.from_pretrained(GOLDEN / name, dtype=dtype, experts=experts, progress=False)
        self.ids, self.greedy = torch.tensor([recorded["tokens"]]), recorded["hf_f32_greedy"]
        self.logits = load_file(GOLDEN / f"{name}.reference" / "logits.safetensors")["hf_f64_prefill"]
        self.folder = GOLDEN / f"{name}.reference"


@pytest.fixture(scope="module", params=["golden-mxfp4", "golden-dequantized", "smooth-mxfp4", "smooth-dequantized"])
def golden(request):
    with torch.no_grad():
        yield Golden(*request.param.split("-"))


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def assert_golden(logits: torch.Tensor, recorded: torch.Tensor) -> None:
    error = (logits.double() - recorded.double()).abs()
    assert error.max() <= MAX_ERROR and error.mean() <= MEAN_ERROR, (error.max().item(), error.mean().item())


def in_pieces(model, ids, sizes) -> torch.Tensor:
    cache, pieces = None, []
    for piece in ids.split(sizes, dim=1):
        out = model(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
    assert cache.get_seq_length() == ids.shape[1]
    return torch.cat(pieces, dim=1)[0]


def test_logits_of_the_whole_prompt(golden):
    assert_golden(golden.model(golden.ids).logits[0], golden.logits)


def test_logits_token_by_token(golden):
    assert_golden(in_pieces(golden.model, golden.ids, 1), golden.logits)


def test_logits_in_pieces_of_24(golden):
    assert_golden(in_pieces(golden.model, golden.ids, 24), golden.logits)


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_of_padded_rows(golden, side):
    short, padding = golden.ids[:, :57], torch.full((1, 7), 300)
    row = torch.cat([padding, short] if side == "left" else [short, padding], dim=1)
    mask = torch.ones(2, 64, dtype=torch.long)
    pads = slice(0, 7) if side == "left" else slice(57, 64)
    mask[0, pads] = 0
    logits = golden.model(torch.cat([row, golden.ids]), attention_mask=mask).logits
    assert_golden(logits[1], golden.logits)
    assert_golden(logits[0][mask[0].bool()], golden.logits[:57])
    assert torch.equal(logits[0, pads], torch.zeros_like(logits[0, pads]))


def test_logits_packed_with_other_sequences(golden):
    ids = torch.cat([golden.ids[:, :31], golden.ids, golden.ids[:, 5:30]], dim=1)
    logits = golden.model(ids, cu_seqlens=torch.tensor([0, 31, 95, 120], dtype=torch.int32)).logits[0]
    assert_golden(logits[31:95], golden.logits)
    assert_golden(logits[:31], golden.logits[:31])


def test_greedy_tokens(golden):
    out = golden.model.generate(golden.ids, max_new_tokens=32, eos_token_id=[])
    assert out[0, 64:].tolist() == golden.greedy


def test_greedy_tokens_of_a_padded_row_in_pieces(golden):
    ids = torch.cat([torch.zeros(1, 9, dtype=torch.long), golden.ids], dim=1)
    other = golden.ids.roll(1, dims=1)[:, :1].expand(1, 9)
    batch = torch.cat([torch.cat([other, golden.ids.flip(1)], dim=1), ids])
    mask = torch.ones_like(batch)
    mask[1, :9] = 0
    out = golden.model.generate(batch, mask, max_new_tokens=32, eos_token_id=[], prefill_tokens=17)
    assert out[1, 73:].tolist() == golden.greedy


def record(model):
    """Forward hooks on every layer; the recorded names of the golden files -> [T, ...] tensors."""
    seen = {}

    def keep(name, value):
        seen[name] = value.detach().clone()

    for index, layer in model.model.layers.items():
        name = f"layers.{index}."
        feed_forward = layer.block_sparse_moe if layer.is_moe else layer.mlp
        for short, module in (("attn", layer.self_attn), ("mlp", feed_forward)):

            def hook(_, inputs, out, short=short, name=name):
                keep(f"{name}{short}_in", inputs[0])
                keep(f"{name}{short}_out", out[0] if isinstance(out, tuple) else out)

            module.register_forward_hook(hook)
        if layer.is_moe:

            def routing_hook(_, __, routing, name=name):
                order = routing.topk_ids.argsort(-1)
                keep(f"{name}expert_ids", routing.topk_ids.gather(-1, order))
                keep(f"{name}expert_weights", routing.topk_weights.gather(-1, order))

            feed_forward.gate.register_forward_hook(routing_hook)
    return seen


@pytest.mark.parametrize("name", ["golden", "smooth"])
def test_intermediates_and_exact_expert_ids(name):
    golden = Golden(name, "mxfp4")
    seen = record(golden.model)
    cache = golden.model(golden.ids, use_cache=True).past_key_values
    text = golden.model.config.text_config
    for layer, pools in cache.pools.items():
        if text.is_kda_layer(layer):
            states, windows = pools
            seen[f"layers.{layer}.state_after"] = states[0].mT  # recorded value-major
            for stream, channels in zip("qkv", windows[0].T.chunk(3)):
                seen[f"layers.{layer}.conv_{stream}_after"] = channels
    recorded = load_file(golden.folder / "intermediates.safetensors")
    assert set(seen) == set(recorded)
    for key, wanted in recorded.items():
        got = seen[key]
        if key.endswith("expert_ids"):
            assert torch.equal(got, wanted.long()), key
            continue
        if "conv_" in key:
            wanted = wanted[:, 1:]  # that code keeps a fourth, unused column
        bound = 1e-4 * wanted.abs().max().item()
        torch.testing.assert_close(
            got.float(), wanted.float(), atol=bound, rtol=0, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("experts", ["mxfp4", "dequantized"])
def test_bfloat16_on_smooth(experts):
    smooth = Golden("smooth", experts, torch.bfloat16)
    logits = smooth.model(smooth.ids).logits[0].double()
    # The released code in bfloat16: 0.075 and 0.94.
    assert (logits - smooth.logits).abs().mean() <= 0.09
    assert (logits.argmax(-1) == smooth.logits.argmax(-1)).double().mean() >= 0.875


class Vision:
    """The multimodal golden checkpoint and its recorded forward."""

    def __init__(self) -> None:
        folder = GOLDEN / "vision.reference"
        self.model = KimiK3ForConditionalGeneration.from_pretrained(
            GOLDEN / "vision", dtype=torch.float32, progress=False
        )
        self.recorded = load_file(folder / "forward.safetensors")
        self.reference = json.loads((folder / "reference.json").read_text())["forward"]
        images = load_file(folder / "preprocess.safetensors")
        self.names = ["alpha_61x43", "rgb_224x224", "rgb_100x300"]
        self.pixels = [images["lut"][images[f"{name}.patches_u8"].long()] for name in self.names]
        self.grids = [images[f"{name}.grid_thw"].view(1, 3) for name in self.names]
        self.ids = self.recorded["input_ids"].view(1, -1)

    def images(self, *which: int) -> dict[str, torch.Tensor]:
        return {
            "pixel_values": torch.cat([self.pixels[i] for i in which]),
            "grid_thws": torch.cat([self.grids[i] for i in which]),
        }


@pytest.fixture(scope="module")
def vision():
    with torch.no_grad():
        return Vision()


def test_vision_logits_and_loss(vision):
    labels = vision.recorded["labels"].view(1, -1)
    out = vision.model(vision.ids, labels=labels, **vision.images(0, 1, 2))
    error = (out.logits[0].double() - vision.recorded["logits_f64"].double()).abs()
    assert error.max() <= 4e-4 and error.mean() <= 3e-5  # the released code: 1.5e-4 and 1.2e-5
    assert out.loss.item() == pytest.approx(vision.reference["loss"], abs=1e-5)


def test_vision_features_embeddings_and_labels(vision):
    images, recorded = vision.images(0, 1, 2), vision.recorded
    features = vision.model.image_features(**images)
    assert [len(rows) for rows in features] == [6, 64, 44]
    torch.testing.assert_close(torch.cat(features), recorded["features"], atol=2e-5, rtol=0)
    spliced = vision.model._spliced(vision.ids, None, recorded["labels"].view(1, -1), **images)
    assert torch.equal(spliced.labels[0], recorded["spliced_labels"].flatten())
    assert bool(spliced.attention_mask.all()) and bool(recorded["spliced_attention_mask"].all())
    is_image = torch.zeros(193, dtype=torch.bool)
    is_image[recorded["image_positions"].flatten()] = True
    wanted = recorded["spliced_embeds"].view(193, -1)
    assert torch.equal(spliced.inputs_embeds[0][~is_image], wanted[~is_image])
    torch.testing.assert_close(spliced.inputs_embeds[0][is_image], wanted[is_image], atol=2e-5, rtol=0)


@pytest.mark.parametrize("prefill_tokens", [2048, 50, 7])
def test_vision_greedy_tokens(vision, prefill_tokens):
    out = vision.model.generate(
        vision.ids, max_new_tokens=16, eos_token_id=[], prefill_tokens=prefill_tokens, **vision.images(0, 1, 2)
    )
    assert out[0, vision.ids.shape[1] :].tolist() == vision.reference["greedy16"]


def prompt_for(vision, which: int, extra: int) -> torch.Tensor:
    """`extra` text bytes, then one image."""
    return torch.tensor([[*range(65, 65 + extra), 274, 277, 276, 46]])


def test_images_in_a_batch_equal_each_alone(vision):
    prompts = [prompt_for(vision, 0, 3), prompt_for(vision, 2, 12)]
    alone = [vision.model(ids, **vision.images(i)).logits[0] for ids, i in zip(prompts, (0, 2))]
    batch, mask = torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long)
    for row, ids in enumerate(prompts):
        batch[row, 16 - ids.shape[1] :], mask[row, 16 - ids.shape[1] :] = ids[0], 1
    out = vision.model(batch, attention_mask=mask, **vision.images(0, 2)).logits
    for row, logits in enumerate(alone):
        torch.testing.assert_close(out[row, -len(logits) :], logits, atol=1e-4, rtol=0)
    tokens = vision.model.generate(batch, mask, max_new_tokens=6, eos_token_id=[], **vision.images(0, 2))
    for row, (ids, i) in enumerate(zip(prompts, (0, 2))):
        single = vision.model.generate(ids, max_new_tokens=6, eos_token_id=[], **vision.images(i))
        assert tokens[row, 16:].tolist() == single[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("which", [(0, 1), (0, 1, 2, 2)])
def test_a_wrong_number_of_images_is_an_error(vision, which):
    with pytest.raises(ValueError, match=r"3.*placeholder|placeholder.*3"):
        vision.model(vision.ids, **vision.images(*which))


def test_image_arguments_that_do_not_fit_are_errors(vision):
    images = vision.images(0, 1, 2)
    with pytest.raises(ValueError, match="pixel_values"):
        vision.model(vision.ids)
    with pytest.raises(ValueError, match="pixel_values"):
        vision.model.generate(vision.ids, max_new_tokens=1)
    with pytest.raises(ValueError, match="grid_thws"):
        vision.model(vision.ids, pixel_values=images["pixel_values"])
    with pytest.raises(ValueError, match="cu_seqlens"):
        vision.model(vision.ids, cu_seqlens=torch.tensor([0, 82], dtype=torch.int32), **images)
