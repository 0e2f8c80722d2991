"""What tells two prefixes of equal tokens apart: images, the configuration, adapters."""

import copy
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kimi_k3 import DiskTier, KimiK3ForConditionalGeneration, KimiK3Generator, SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden"
SMALL = {"max_num_seqs": 4, "num_blocks": 20, "max_tokens_per_step": 256}


def prompt_of(length: int) -> list[int]:
    rng = random.Random(3)
    return [rng.randrange(3, 1000) for _ in range(length)]


def test_images_are_told_apart_by_a_whole_hash_and_by_their_grid():
    """Fault 5.6: equal pixels as 4 x 6 and as 6 x 4 patches take equally many tokens and are two images."""
    model = KimiK3ForConditionalGeneration.from_pretrained(GOLDEN / "vision", dtype=torch.float32, progress=False)
    images = load_file(GOLDEN / "vision.reference" / "preprocess.safetensors")
    pixels = images["lut"][images["alpha_61x43.patches_u8"].long()]
    _, height, width = images["alpha_61x43.grid_thw"].tolist()
    assert height != width
    ids = [5, 6, model.config.media_placeholder_token_id, *range(7, 40)]
    with KimiK3Generator(model, max_num_seqs=4, num_blocks=60, batch_invariant=True) as gen:
        grids = [torch.tensor([[1, height, width]]), torch.tensor([[1, width, height]])]
        keys = [gen._with_images(ids, set(), b"mine", pixels, grid)[3] for grid in grids]
        assert keys[0] != keys[1] and all(key.startswith(b"mine") and len(key) == 4 + 32 for key in keys)
        for grid, reused in zip([*grids, grids[0]], [0, 0, 1]):
            (result,) = gen.generate([ids], SamplingParams(max_new_tokens=1), pixel_values=pixels, grid_thws=grid)
            assert (result.reused_tokens > 0) == reused


@pytest.mark.parametrize("difference", ["configuration", "adapter"])
def test_stored_prefixes_of_another_configuration_or_adapter_are_misses(demo, tmp_path, difference):
    """Fault 7.2, with the weights of the checkpoint equal."""
    model, other = copy.deepcopy(demo), copy.deepcopy(demo)
    if difference == "configuration":
        other.config.text_config.routed_scaling_factor *= 2
    else:  # two trainings of one adapter
        for one in (model, other):
            one.model.layers["1"].register_parameter("lora_A", torch.nn.Parameter(torch.zeros(4, 8)))
        with torch.no_grad():
            other.model.layers["1"].lora_A[0, 0] = 1e-30
    reused = []
    for one, new in ((model, 5), (other, 6), (model, 7)):
        with KimiK3Generator(one, tiers=(DiskTier(tmp_path, 1 << 28),), **SMALL) as gen:
            (result,) = gen.generate([[*prompt_of(200), new]], SamplingParams(max_new_tokens=1))
            reused.append(result.reused_tokens)
    assert reused == [0, 0, 192]
