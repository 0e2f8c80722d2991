"""Names and shapes: files against modules, and both against the release's own table."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_editing import GOLDEN, tensors_of

from kimi_k3 import KimiK3Config, KimiK3ForCausalLM
from kimi_k3.tensor_layout import (
    VISION_PREFIXES,
    expected_tensors,
    file_name_of,
    is_in_stage,
    module_name_of,
    released_dtype,
)


@pytest.mark.parametrize(
    ("file_name", "module_name", "expert"),
    [
        ("language_model.lm_head.weight", "lm_head.weight", None),
        ("language_model.model.layers.3.self_attn.kv_b_proj.weight", "model.layers.3.self_attn.kv_b_proj.weight", None),
        (
            "language_model.model.layers.92.block_sparse_moe.experts.895.w2.weight_scale",
            "model.layers.92.block_sparse_moe.experts.w2_scale",
            895,
        ),
        ("language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight",
         "model.layers.1.block_sparse_moe.experts.w1", 0),
        ("language_model.model.layers.1.block_sparse_moe.shared_experts.up_proj.weight",
         "model.layers.1.block_sparse_moe.shared_experts.up_proj.weight", None),
        ("vision_tower.encoder.blocks.7.wqkv.weight", "vision_tower.encoder.blocks.7.wqkv.weight", None),
        ("mm_projector.proj.0.weight", "mm_projector.proj.0.weight", None),
    ],
)  # fmt: skip
def test_names_map_both_ways(file_name, module_name, expert):
    assert module_name_of(file_name) == (module_name, expert)
    assert file_name_of(module_name, expert) == file_name


def test_only_stacks_have_experts():
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        file_name_of("lm_head.weight", 3)


@pytest.mark.parametrize("name", ["golden", "smooth", "vision"])
def test_expected_tensors_are_those_of_the_golden_files(name):
    config = KimiK3Config.from_pretrained(GOLDEN / name)
    stored = tensors_of(GOLDEN / name)
    expected = expected_tensors(config, packed=True)
    seen = set()
    for file_name, tensor in stored.items():
        module_name, expert = module_name_of(file_name)
        spec = expected[module_name]
        seen.add(module_name)
        assert tensor.dtype == spec.dtype == released_dtype(module_name), file_name
        if not file_name.endswith(".A_log"):  # these files store 32 values, the release the next multiple of 128
            assert tuple(tensor.shape) == (spec.shape if expert is None else spec.shape[1:]), file_name
    assert seen == expected.keys()


@pytest.mark.parametrize("packed", [True, False])
def test_expected_tensors_are_those_of_the_modules(packed):
    config = KimiK3Config.tiny()
    with torch.device("meta"):
        model = KimiK3ForCausalLM(config, experts="mxfp4" if packed else "dequantized")
    expected = {n: s for n, s in expected_tensors(config, packed).items() if not n.startswith(VISION_PREFIXES)}
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {n: s.shape for n, s in expected.items()}


def test_every_tensor_belongs_to_exactly_one_stage_of_a_split():
    config = KimiK3Config.tiny()
    stages = [range(0, 4), range(4, 5), range(5, 13)]
    for name in expected_tensors(config, packed=True):
        assert sum(is_in_stage(name, stage, 13) for stage in stages) == 1, name


def test_the_released_config_has_the_released_byte_total(released_config: Path):
    config = KimiK3Config.from_dict(json.loads(released_config.read_text()))
    expected = expected_tensors(config, packed=True)
    assert sum(spec.num_bytes for spec in expected.values()) == 1_560_860_324_864  # the released index's total_size
    count = sum(1 if "experts.w" not in name else spec.shape[0] for name, spec in expected.items())
    assert count == 497_220
