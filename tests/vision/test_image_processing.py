"""Image preprocessing against what the released processor made of the same images."""

import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from kimi_k3.image_processing_kimi_k3 import KimiK3ImageProcessor, image_hash, image_prompt

GOLDEN = Path(__file__).parents[1] / "golden"
CHECKPOINT, REFERENCE = GOLDEN / "vision", GOLDEN / "vision.reference"
RECORDED = json.loads((REFERENCE / "reference.json").read_text())
PREPROCESSOR_CONFIG = json.loads((CHECKPOINT / "preprocessor_config.json").read_text())
ALL_IMAGES = sorted(RECORDED["preprocess"])


@pytest.fixture(scope="module")
def expected():
    return load_file(REFERENCE / "preprocess.safetensors")


def processor_for(name: str) -> KimiK3ImageProcessor:
    limit = RECORDED["preprocess"][name]["in_patch_limit"]  # two images have a small one, to be shrunk
    return KimiK3ImageProcessor(in_patch_limit=limit)


@pytest.mark.parametrize("name", ALL_IMAGES)
def test_patches_equal_the_released_processor_bit_for_bit(name, expected):
    with Image.open(REFERENCE / "images" / f"{name}.png") as image:
        assert image.mode == RECORDED["preprocess"][name]["mode"]
    inputs = processor_for(name)([REFERENCE / "images" / f"{name}.png"])
    assert inputs.pixel_values.dtype == torch.float32
    assert torch.equal(inputs.pixel_values, expected["lut"][expected[f"{name}.patches_u8"].long()])
    assert inputs.grid_thws.dtype == torch.int64
    assert inputs.grid_thws.tolist() == [expected[f"{name}.grid_thw"].tolist()]
    assert inputs.num_tokens == [RECORDED["preprocess"][name]["tokens"]]
    assert inputs.prompts == [RECORDED["preprocess"][name]["prompt"]]


def test_pixel_values_equal_the_recorded_output(expected):
    inputs = KimiK3ImageProcessor()([REFERENCE / "images" / "alpha_61x43.png"])
    assert torch.equal(inputs.pixel_values, expected["alpha_61x43.pixel_values"])


@pytest.mark.parametrize(
    "width, height, new_width, new_height, pad_width, pad_height, tokens", RECORDED["sizes"]["rows"]
)
def test_sizes_equal_the_released_rule(width, height, new_width, new_height, pad_width, pad_height, tokens):
    processor = KimiK3ImageProcessor()
    plan = processor.resize_plan(width, height)
    assert (plan.width, plan.height, plan.pad_right, plan.pad_bottom) == (new_width, new_height, pad_width, pad_height)
    assert processor.num_tokens(width, height) == tokens


@pytest.mark.parametrize("width, height, tokens", [(611, 437, 352), (224, 224, 64), (1920, 1080, 2691)])
def test_published_token_counts(width, height, tokens):
    inputs = KimiK3ImageProcessor()([Image.new("RGB", (width, height))])
    assert inputs.num_tokens == [tokens]
    t, h, w = inputs.grid_thws[0].tolist()
    assert (t, h // 2 * (w // 2)) == (1, tokens)
    assert inputs.pixel_values.shape == (h * w, 3, 14, 14)


def test_images_of_a_call_are_packed_in_order(expected):
    names = ["alpha_61x43", "rgb_224x224", "rgb_100x300"]
    inputs = KimiK3ImageProcessor()([REFERENCE / "images" / f"{name}.png" for name in names])
    assert torch.equal(inputs.grid_thws, torch.stack([expected[f"{name}.grid_thw"] for name in names]))
    patches = torch.cat([expected[f"{name}.patches_u8"] for name in names])
    assert torch.equal(inputs.pixel_values, expected["lut"][patches.long()])
    alone = [KimiK3ImageProcessor()([REFERENCE / "images" / f"{name}.png"]).hashes[0] for name in names]
    assert inputs.hashes == alone


def test_paths_bytes_and_pillow_images_are_the_same_image():
    file = REFERENCE / "images" / "rgb_100x300.png"
    with Image.open(file) as image:
        inputs = KimiK3ImageProcessor()([file, str(file), file.read_bytes(), image])
    assert len(set(inputs.hashes)) == 1
    first, *rest = inputs.pixel_values.split(176)
    assert len(rest) == 3
    assert all(torch.equal(first, other) for other in rest)


def test_palette_images_shrink_without_new_colours():
    # the release resizes in the image's own mode: palette indices cannot be mixed
    with Image.open(REFERENCE / "images" / "palette_50x30.png") as image:
        image.load()
    image.info.pop("transparency")
    colours = {(40 * i, 255 - 30 * i, 20 + 10 * i) for i in range(7)} | {(0, 0, 0)}  # and the padding
    inputs = KimiK3ImageProcessor(in_patch_limit=2)([image, image.convert("RGB")])
    seen = []
    for patches in inputs.pixel_values.chunk(2):
        pixels = ((patches / 2 + 0.5) * 255).round().long().transpose(0, 1).flatten(1)
        seen.append({tuple(pixel) for pixel in pixels.T.tolist()})
    assert seen[0] <= colours
    assert not seen[1] <= colours


def test_opaque_images_are_not_put_on_the_board():
    opaque = Image.new("RGBA", (28, 28), (10, 20, 30, 255))
    clear = Image.new("RGBA", (28, 28), (10, 20, 30, 0))
    pixels = KimiK3ImageProcessor()([opaque, clear]).pixel_values.view(2, 2, 2, 3, 14, 14)
    bytes_u8 = ((pixels / 2 + 0.5) * 255).round().to(torch.uint8).permute(0, 3, 1, 4, 2, 5).reshape(2, 3, 28, 28)
    assert torch.equal(bytes_u8[0], torch.tensor([10, 20, 30], dtype=torch.uint8).view(3, 1, 1).expand(3, 28, 28))
    for y, x, value in [(0, 0, 255), (7, 7, 255), (0, 8, 180), (8, 0, 180), (8, 8, 255), (27, 27, 255), (27, 23, 180)]:
        assert bytes_u8[1, :, y, x].tolist() == [value] * 3


def test_mean_and_std_are_taken_per_channel():
    image = Image.new("RGB", (28, 28), (0, 51, 255))
    pixels = KimiK3ImageProcessor(image_mean=(0.5, 0.1, 0.0), image_std=(0.5, 0.25, 2.0))([image]).pixel_values
    torch.testing.assert_close(pixels[:, :, 0, 0], torch.tensor([-1.0, 0.4, 0.5]).expand(4, 3))


def test_other_content_or_shape_is_another_hash():
    processor = KimiK3ImageProcessor()
    image = Image.new("RGB", (56, 28), (1, 2, 3))
    changed = image.copy()
    changed.putpixel((55, 27), (1, 2, 4))
    turned = Image.new("RGB", (28, 56), (1, 2, 3))  # the same bytes in another grid
    hashes = processor([image, changed, turned, image.copy()]).hashes
    assert len(set(hashes[:3])) == 3
    assert hashes[0] == hashes[3]
    assert all(len(h) == 64 and int(h, 16) >= 0 for h in hashes)


def test_hash_is_free_of_the_callers_float_type():
    patches = torch.arange(4 * 588).remainder(255).view(4, 3, 14, 14) / 128  # exact in bfloat16
    grid = torch.tensor([1, 2, 2])
    assert image_hash(patches, grid) == image_hash(patches.bfloat16(), grid)


def test_prompt_names_the_size_before_the_resize():
    image = Image.new("RGB", (300, 200))
    inputs = KimiK3ImageProcessor(in_patch_limit=16)([image])
    assert inputs.prompts == ["<|media_begin|>image 300x200<|media_content|><|media_pad|><|media_end|>"]
    assert inputs.prompts == [image_prompt(300, 200)]
    assert inputs.num_tokens[0] < KimiK3ImageProcessor().num_tokens(300, 200)


def test_released_rules_are_the_defaults():
    assert KimiK3ImageProcessor.from_dict(PREPROCESSOR_CONFIG) == KimiK3ImageProcessor()


def test_from_pretrained_reads_the_folder(tmp_path):
    changed = json.loads(json.dumps(PREPROCESSOR_CONFIG))
    changed["media_proc_cfg"]["in_patch_limit"] = 40
    changed["media_proc_cfg"]["sample_fps"] = 8.0  # for video: in the released file, without meaning here
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(changed))
    assert KimiK3ImageProcessor.from_pretrained(tmp_path) == KimiK3ImageProcessor(in_patch_limit=40)


@pytest.mark.parametrize(
    "holder, key, value",
    [
        ("media_proc_cfg", "fixed_output_tokens", 64),
        ("media_proc_cfg", "transparent_bg_fill_stage", "before_resize"),
        ("transparent_bg_config", "pattern", "solid"),
        ("media_proc_cfg", "image_mean", [0.5]),
    ],
)
def test_rules_that_are_not_built_are_refused_by_name(holder, key, value):
    changed = json.loads(json.dumps(PREPROCESSOR_CONFIG))
    rules = changed["media_proc_cfg"]
    (rules if holder == "media_proc_cfg" else rules[holder])[key] = value
    with pytest.raises(ValueError, match=key):
        KimiK3ImageProcessor.from_dict(changed)


@pytest.mark.parametrize("key", sorted(PREPROCESSOR_CONFIG["media_proc_cfg"]))
def test_a_missing_rule_is_named(key):
    changed = json.loads(json.dumps(PREPROCESSOR_CONFIG))
    del changed["media_proc_cfg"][key]
    with pytest.raises(ValueError, match=f"{key} is missing"):
        KimiK3ImageProcessor.from_dict(changed)


@pytest.mark.parametrize("given", [3, None, [[1, 2]], b"not an image"])
def test_what_is_no_image_is_refused(given):
    with pytest.raises(ValueError, match="image"):
        KimiK3ImageProcessor()([given])


def test_a_damaged_image_is_named(tmp_path):
    whole = (REFERENCE / "images" / "rgb_224x224.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut\.png: a damaged image"):
        KimiK3ImageProcessor()([tmp_path / "cut.png"])


@pytest.mark.parametrize("given", [[], "photo.png", None])
def test_a_call_wants_a_list(given):
    with pytest.raises(ValueError, match="list of at least one image"):
        KimiK3ImageProcessor()(given)


def test_without_pillow_the_error_says_what_to_install(monkeypatch):
    image = Image.new("RGB", (28, 28))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r'pip install "kimi-k3\[vision\]"'):
        KimiK3ImageProcessor()([image])
    assert KimiK3ImageProcessor().num_tokens(611, 437) == 352  # counting needs no Pillow
