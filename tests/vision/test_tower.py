"""Tower and projector against the released code's recorded stages, and against loops in float64."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kimi_k3.configuration_kimi_k3 import KimiK3VisionConfig
from kimi_k3.vision import PatchMergerProjector, VisionTower

GOLDEN = Path(__file__).parents[1] / "golden"
ITEMS = range(4)
OTHER_GRIDS = [[1, 2, 2], [1, 12, 4], [3, 4, 8], [1, 8, 2], [2, 8, 8]]  # the table is 8 x 8


def vision_config(**changes) -> KimiK3VisionConfig:
    values = json.loads((GOLDEN / "vision" / "config.json").read_text())["vision_config"]
    return KimiK3VisionConfig.from_dict(values | changes)


@pytest.fixture(scope="module")
def weights():
    stored = load_file(GOLDEN / "vision" / "model.safetensors")
    return {name: w for name, w in stored.items() if name.startswith(("vision_tower.", "mm_projector."))}


@pytest.fixture(scope="module")
def recorded():
    return load_file(GOLDEN / "vision.reference" / "tower.safetensors")


def build(weights, dtype=torch.float32, **changes) -> torch.nn.ModuleDict:
    config = vision_config(**changes)
    model = torch.nn.ModuleDict({"vision_tower": VisionTower(config), "mm_projector": PatchMergerProjector(config)})
    model.load_state_dict(weights, strict=True)  # the names are the checkpoint's: no table between
    return model.to(dtype)


def run(model, pixel_values, grid_thws):
    merged = model["vision_tower"](pixel_values, grid_thws)
    return merged, [model["mm_projector"](item) for item in merged]


def all_pixels(recorded, items=ITEMS) -> torch.Tensor:
    return torch.cat([recorded[f"item{i}.pixel_values"] for i in items])


def random_items(grids, seed=0):
    generator = torch.Generator().manual_seed(seed)
    patches = sum(t * h * w for t, h, w in grids)
    return torch.rand(patches, 3, 14, 14, generator=generator) * 2 - 1, torch.tensor(grids)


def test_names_and_shapes_are_the_checkpoints(weights):
    model = build(weights)
    assert {name: p.shape for name, p in model.named_parameters()} == {name: w.shape for name, w in weights.items()}
    assert not list(model.buffers())  # nothing that a load into meta tensors could leave empty


def test_the_released_widths_give_the_published_counts():
    config = vision_config(
        vt_hidden_size=1024, vt_intermediate_size=4096, vt_num_hidden_layers=27, vt_num_attention_heads=12,
        qkv_hidden_size=1536, mm_hidden_size=1024, text_hidden_size=7168, init_pos_emb_height=64, init_pos_emb_width=64,
    )  # fmt: skip
    with torch.device("meta"):
        parts = VisionTower(config), PatchMergerProjector(config)
    assert [sum(p.numel() for p in part.parameters()) for part in parts] == [401_214_464, 46_144_512]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_equal_the_released_code(dtype, weights, recorded):
    with torch.no_grad():
        merged, projected = run(build(weights, dtype), all_pixels(recorded).to(dtype), recorded["grid_thws"])
    for i in ITEMS:
        # released float32 against its float64: 4.8e-6 and 3.4e-6
        torch.testing.assert_close(merged[i].double(), recorded[f"item{i}.tower_f64"], atol=2e-5, rtol=0)
        torch.testing.assert_close(projected[i].double(), recorded[f"item{i}.projected_f64"], atol=2e-5, rtol=0)


def test_every_stage_equals_the_released_code(weights, recorded):
    model = build(weights)
    tower = model["vision_tower"]
    stages = {"patch_embed": tower.patch_embed, "final_layernorm": tower.encoder.final_layernorm}
    for b, block in enumerate(tower.encoder.blocks):
        for name in ("norm0", "wqkv", "wo", "mlp"):
            stages[f"blocks.{b}.{name}"] = getattr(block, name)
        stages[f"blocks.{b}.out"] = block
    seen = {name: [] for name in stages}
    for name, module in stages.items():
        module.register_forward_hook(lambda _m, _i, out, name=name: seen[name].append(out))
    with torch.no_grad():
        tower(all_pixels(recorded), recorded["grid_thws"])
    for name, outputs in seen.items():
        expected = recorded[f"packed.{name}"]
        # float32 rounding of values up to about 10, through at most two blocks
        torch.testing.assert_close(
            torch.cat(outputs), expected, atol=2e-6 * max(1, expected.abs().max().item()), rtol=0
        )


def test_bfloat16_stays_near_float32(weights, recorded):
    with torch.no_grad():
        projected = run(build(weights, torch.bfloat16), all_pixels(recorded), recorded["grid_thws"])[1]
    for i, (largest_mean, largest) in enumerate([(0.02, 0.15), (0.02, 0.15), (0.008, 0.04), (0.008, 0.04)]):
        assert projected[i].dtype == torch.bfloat16
        # released bfloat16: mean 0.011, max 0.072 for items 0 and 1; 0.0037 and 0.019 for items 2 and 3
        difference = (projected[i].float() - recorded[f"item{i}.projected"]).abs()
        assert difference.mean() <= largest_mean
        assert difference.max() <= largest


def test_bfloat16_rounds_where_the_released_code_rounds(weights, recorded, monkeypatch):
    def eager(q, k, v):  # the recorded run's attention; a fused one rounds differently
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", eager)
    with torch.no_grad():
        merged = build(weights, torch.bfloat16)["vision_tower"](all_pixels(recorded), recorded["grid_thws"])
    for i in ITEMS:
        released, noise = recorded[f"item{i}.tower_bf16"], recorded[f"item{i}.tower_bf16"] - recorded[f"item{i}.tower"]
        # bit for bit where it was recorded; a tenth of bfloat16's own error is room for another machine's sums.
        # One rounding step elsewhere (norm weight, rotation) gives 0.7 or more of it.
        assert (merged[i].float() - released).abs().mean() <= 0.1 * noise.abs().mean()


def test_gradients_equal_the_released_code(weights, recorded):
    expected = load_file(GOLDEN / "vision.reference" / "gradients.safetensors")
    model = build(weights)
    _, projected = run(model, all_pixels(recorded), recorded["grid_thws"])
    loss = (expected["upstream"] * torch.cat(projected)).sum() / 39
    assert loss.item() == pytest.approx(0.1177297, abs=2e-6)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad - expected[name]).norm() / expected[name].norm() <= 1e-5, name


def test_gradients_reach_the_pixels(weights):
    model = build(weights, torch.float64)
    pixels, grid = random_items([[2, 2, 4]])
    pixels = (pixels[:, :, :2, :2] * 0.5).double().requires_grad_()  # few numbers: the check is one forward per number

    def projected(few):
        return run(model, torch.nn.functional.pad(few, (0, 12, 0, 12)), grid)[1][0]

    assert torch.autograd.gradcheck(projected, pixels, fast_mode=True)


def test_an_item_is_the_same_alone_and_in_company(weights, recorded):
    model = build(weights)
    with torch.no_grad():
        together = run(model, all_pixels(recorded), recorded["grid_thws"])[1]
        for i in ITEMS:
            alone = run(model, recorded[f"item{i}.pixel_values"], recorded["grid_thws"][i : i + 1])[1][0]
            assert torch.equal(alone, together[i])
            torch.testing.assert_close(alone.double(), recorded[f"item{i}.projected_f64"], atol=2e-5, rtol=0)


def test_items_do_not_see_each_other(weights):
    model = build(weights)
    pixels, grids = random_items([[1, 4, 6], [1, 4, 6]])
    changed = torch.cat([pixels[:24], -pixels[24:]])
    with torch.no_grad():
        before, after = run(model, pixels, grids)[1], run(model, changed, grids)[1]
    assert torch.equal(before[0], after[0])
    assert not torch.allclose(before[1], after[1])


def test_every_patch_sees_every_frame_and_place_of_its_item(weights):
    model = build(weights)
    pixels, grid = random_items([[2, 4, 4]])
    pixels.requires_grad_()
    run(model, pixels, grid)[1][0][0].square().sum().backward()
    assert (pixels.grad.flatten(1).abs().amax(1) > 0).all()


def by_loops(weights, pixels, grid, eps=1.1920929e-07):
    """Spec section 8 in float64, one number at a time where order or layout could be mistaken."""
    w = {name: tensor.double().numpy() for name, tensor in weights.items()}
    t, h, width = grid
    table = w["vision_tower.patch_embed.pos_emb.weight"]
    dim, heads = table.shape[2], 3

    def sample(y, x):
        def corners(place, wanted, stored):
            source = min(max((place + 0.5) * stored / wanted - 0.5, 0), stored - 1)
            low = int(source)
            return low, min(low + 1, stored - 1), source - low

        y0, y1, fy = corners(y, h, table.shape[0])
        x0, x1, fx = corners(x, width, table.shape[1])
        top = table[y0, x0] * (1 - fx) + table[y0, x1] * fx
        return top * (1 - fy) + (table[y1, x0] * (1 - fx) + table[y1, x1] * fx) * fy

    def norm(rows, name):
        return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + eps) * w[f"vision_tower.encoder.{name}.weight"]

    places = [(f, y, x) for f in range(t) for y in range(h) for x in range(width)]
    rows = []
    for (f, y, x), patch in zip(places, pixels.double().numpy()):
        row = np.einsum("dcij,cij->d", w["vision_tower.patch_embed.proj.weight"], patch) + sample(y, x)
        if t > 1:
            angles = [f / 10000 ** (i / (dim // 2)) for i in range(dim // 2)]
            row = row + np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
        rows.append(row)
    x_ND = np.array(rows)
    for b in range(2):
        name = f"blocks.{b}"
        block = f"vision_tower.encoder.{name}."
        qkv = (norm(x_ND, name + ".norm0") @ w[block + "wqkv.weight"].T).reshape(len(places), 3, heads, -1)
        head_dim = qkv.shape[-1]
        q, k, v = (np.array(qkv[:, part]) for part in range(3))
        for n, (_, y, x) in enumerate(places):
            for i in range(head_dim // 4):
                frequency = 10000 ** (-4 * i / head_dim)
                for pair, angle in ((2 * i, x * frequency), (2 * i + 1, y * frequency)):
                    turn = complex(math.cos(angle), math.sin(angle))
                    for vectors in (q, k):
                        for head in range(heads):
                            z = complex(vectors[n, head, 2 * pair], vectors[n, head, 2 * pair + 1]) * turn
                            vectors[n, head, 2 * pair], vectors[n, head, 2 * pair + 1] = z.real, z.imag
        out = np.zeros_like(q)
        for head in range(heads):
            scores = q[:, head] @ k[:, head].T / math.sqrt(head_dim)
            exp = np.exp(scores - scores.max(1, keepdims=True))
            out[:, head] = exp / exp.sum(1, keepdims=True) @ v[:, head]
        x_ND = x_ND + out.reshape(len(places), -1) @ w[block + "wo.weight"].T
        hidden = norm(x_ND, name + ".norm1") @ w[block + "mlp.fc0.weight"].T
        hidden = 0.5 * hidden * (1 + np.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
        x_ND = x_ND + hidden @ w[block + "mlp.fc1.weight"].T
    at = dict(zip(places, norm(x_ND, "final_layernorm")))
    merged = []
    for y in range(0, h, 2):
        for x in range(0, width, 2):
            cell = [(y, x), (y, x + 1), (y + 1, x), (y + 1, x + 1)]
            merged.append([sum(at[f, cy, cx] for f in range(t)) / t for cy, cx in cell])
    merged = np.array(merged)
    hidden = merged.reshape(len(merged), -1) @ w["mm_projector.proj.0.weight"].T
    hidden = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
    out = hidden @ w["mm_projector.proj.2.weight"].T
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-5) * w["mm_projector.post_norm.weight"]
    return torch.from_numpy(merged), torch.from_numpy(out)


@pytest.mark.parametrize("grid", OTHER_GRIDS)
def test_grids_other_than_the_tables_equal_the_loops(grid, weights):
    pixels, grids = random_items([grid])
    with torch.no_grad():
        merged, projected = run(build(weights, torch.float64), pixels.double(), grids)
    expected_merged, expected_projected = by_loops(weights, pixels, grid)
    # angles and frame code are float32 here, as released
    torch.testing.assert_close(merged[0], expected_merged, atol=5e-6, rtol=0)
    torch.testing.assert_close(projected[0], expected_projected, atol=5e-6, rtol=0)


def test_the_norms_take_the_eps_of_the_config(weights):
    pixels, grids = random_items([[1, 4, 4]])
    with torch.no_grad():
        projected = run(build(weights, torch.float64, vit_norm_eps=1e-3), pixels.double(), grids)[1][0]
    torch.testing.assert_close(projected, by_loops(weights, pixels, [1, 4, 4], eps=1e-3)[1], atol=5e-6, rtol=0)
    assert (projected - by_loops(weights, pixels, [1, 4, 4])[1]).abs().max() > 1e-3


def test_a_one_frame_video_equals_the_image(weights):
    # a clip [frames, 3, height, width] cut into patches frame by frame; its first frame alone is the image
    clip = torch.rand(3, 3, 28, 56, generator=torch.Generator().manual_seed(1)) * 2 - 1

    def cut(frames):
        return frames.unflatten(3, (4, 14)).unflatten(2, (2, 14)).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)

    model = build(weights)
    with torch.no_grad():
        image = run(model, cut(clip[:1]), torch.tensor([[1, 2, 4]]))[1][0]
        one_frame, three_frames = run(
            model, torch.cat([cut(clip[:1]), cut(clip)]), torch.tensor([[1, 2, 4], [3, 2, 4]])
        )[1]
    assert torch.equal(one_frame, image)
    torch.testing.assert_close(image.double(), by_loops(weights, cut(clip[:1]), [1, 2, 4])[1], atol=2e-5, rtol=0)
    assert (three_frames - image).abs().max() > 0.1


def test_the_number_of_tokens_does_not_depend_on_the_frames(weights):
    grids = [[t, 4, 6] for t in (1, 2, 3, 4)]
    with torch.no_grad():
        merged, projected = run(build(weights), *random_items(grids))
    assert [item.shape for item in merged] == [(6, 4, 32)] * 4
    assert [item.shape for item in projected] == [(6, 128)] * 4


def test_the_tower_is_one_graph_per_item(weights):
    model = build(weights)
    encoder = model["vision_tower"].encoder
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    for h, w in ((2, 4), (4, 6)):
        x_ND = torch.randn(h * w, 32, generator=torch.Generator().manual_seed(h))
        torch.testing.assert_close(compiled(x_ND, 1, h, w), encoder(x_ND, 1, h, w))


@pytest.mark.parametrize(
    "pixels, grids, message",
    [
        (torch.zeros(8, 3, 14, 14), torch.tensor([[2, 4]]), r"\[n, 3\]"),
        (torch.zeros(8, 3, 14, 14), torch.tensor([[1.0, 2.0, 4.0]]), "integer"),
        (torch.zeros(8, 3, 14, 14), torch.tensor([[1, 2, 6]]), "12 patches, pixel_values has 8"),
        (torch.zeros(8, 588), torch.tensor([[1, 2, 4]]), r"\[N, 3, 14, 14\]"),
        (torch.zeros(8, 3, 14, 14, dtype=torch.uint8), torch.tensor([[1, 2, 4]]), "uint8"),
        (torch.zeros(40, 3, 14, 14), torch.tensor([[5, 2, 4]]), "1 to 4 frames"),
        (torch.zeros(9, 3, 14, 14), torch.tensor([[1, 3, 3]]), "even rows and columns"),
        (torch.zeros(1028, 3, 14, 14), torch.tensor([[1, 2, 514]]), "512"),
    ],
)
def test_grids_that_cannot_be_run_are_refused(pixels, grids, message, weights):
    with pytest.raises(ValueError, match=message):
        build(weights)["vision_tower"](pixels, grids)
