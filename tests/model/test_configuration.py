"""config.json: round trips, one-based layers, and refusals that name the key."""

import copy
import json
from pathlib import Path

import pytest
from reference_model import small_config

from kimi_k3 import KimiK3Config

GOLDEN = Path(__file__).parents[1] / "golden"


def tiny() -> dict:
    return KimiK3Config.tiny().to_dict()


def quantization(**weights) -> dict:
    released = {"num_bits": 4, "type": "float", "group_size": 32, "symmetric": True}
    return {"format": "mxfp4-pack-quantized", "config_groups": {"group_0": {"weights": released | weights}}}


@pytest.fixture
def released(released_config) -> dict:
    return json.loads(released_config.read_text())


def assert_round_trip(values: dict, folder: Path) -> KimiK3Config:
    """Every key of the file survives, with its value; what is added is a default, and another round adds nothing."""

    def contains(ours, theirs, where="config"):
        for key, value in theirs.items():
            assert key in ours, f"{where}.{key}"
            if isinstance(value, dict) and key in ("text_config", "vision_config"):
                contains(ours[key], value, f"{where}.{key}")
            else:
                assert ours[key] == value, f"{where}.{key}"

    config = KimiK3Config.from_dict(values)
    contains(config.to_dict(), values)
    config.save_pretrained(folder)
    again = KimiK3Config.from_pretrained(folder)
    assert again == config and again.to_dict() == config.to_dict()
    return again


def test_the_released_config_round_trips(released, tmp_path):
    config = assert_round_trip(released, tmp_path)
    text = config.text_config
    assert (text.num_hidden_layers, text.num_experts, text.num_experts_per_token) == (93, 896, 16)
    assert config.vision_config.vt_num_hidden_layers == 27
    assert config.eos_token_ids == (163586,)
    assert config.quantization_config["format"] == "mxfp4-pack-quantized"


@pytest.mark.parametrize("name", ["golden", "smooth", "vision"])
def test_the_golden_configs_round_trip(name, tmp_path):
    config = assert_round_trip(json.loads((GOLDEN / name / "config.json").read_text()), tmp_path)
    assert (config.vision_config is not None) == (name == "vision")


def test_unknown_extra_keys_stay_everywhere(tmp_path):
    values = tiny()
    values["a_new_key"] = {"nested": [1, None, "x"]}
    values["text_config"]["another"] = [1.5]
    values["text_config"]["linear_attn_config"]["third"] = True
    values["vision_config"]["fourth"] = "text"
    again = assert_round_trip(values, tmp_path).to_dict()
    assert again["a_new_key"] == {"nested": [1, None, "x"]} and again["text_config"]["another"] == [1.5]
    assert again["text_config"]["linear_attn_config"]["third"] is True and again["vision_config"]["fourth"] == "text"


def test_a_config_does_not_share_what_it_was_built_from():
    values = tiny()
    before = copy.deepcopy(values)
    config = KimiK3Config.from_dict(values)
    out = config.to_dict()
    out["text_config"]["linear_attn_config"]["kda_layers"].append(99)
    config.text_config.linear_attn_config["num_heads"] = 7
    assert values == before and 99 not in config.text_config.linear_attn_config["kda_layers"]


def test_one_based_lists_become_zero_based_layers(released):
    text = KimiK3Config.from_dict(released).text_config
    mla = [i for i in range(93) if not text.is_kda_layer(i)]
    assert mla == [*range(3, 92, 4), 92] and len(mla) == 24
    assert [i for i in range(93) if not text.is_moe_layer(i)] == [0]
    boundaries = [i for i in range(93) if text.num_sealed_blocks(i + 1) > text.num_sealed_blocks(i)]
    assert boundaries == [0, 12, 24, 36, 48, 60, 72, 84] and text.num_sealed_blocks(93) == 8


def test_own_defaults_are_the_released_codes():
    text = small_config().text_config
    assert text.mla_rank_norm_eps == 1e-6 and text.rms_norm_eps == 1e-5
    assert "mla_rank_norm_eps" not in text.to_dict()  # a key of our own is written only where it differs
    assert KimiK3Config.from_dict(small_config(mla_rank_norm_eps=1e-5).to_dict()).text_config.mla_rank_norm_eps == 1e-5


def test_absent_betas_and_flags_have_the_described_meaning():
    values = tiny()
    for key in ("activation_situ_beta", "activation_situ_linear_beta"):
        del values["text_config"][key]
    for key in ("gate_lower_bound", "use_full_rank_gate"):
        del values["text_config"]["linear_attn_config"][key]
    text = KimiK3Config.from_dict(values).text_config
    assert text.situ_betas == (1.0, None) and text.gate_lower_bound is None and text.use_full_rank_gate is False


@pytest.mark.parametrize(("eos", "ids"), [(5, (5,)), ([5, 6], (5, 6)), (None, ()), (0, (0,))])
def test_end_ids_may_be_a_number_a_list_or_absent(eos, ids):
    values = tiny()
    values["eos_token_id"] = values["text_config"]["eos_token_id"] = eos
    assert KimiK3Config.from_dict(values).eos_token_ids == ids
    values["eos_token_id"] = None
    assert KimiK3Config.from_dict(values).eos_token_ids == ids


# key path -> wrong value; the error must name the last key.
WRONG = [
    ("model_type", "llama"),
    ("tie_word_embeddings", True),
    ("text_config.model_type", "kimi_k2"),
    ("text_config.vocab_size", 0),
    ("text_config.hidden_size", -1),
    ("text_config.hidden_size", "128"),
    ("text_config.hidden_size", 128.0),
    ("text_config.num_hidden_layers", True),
    ("text_config.num_hidden_layers", 12),
    ("text_config.q_lora_rank", None),
    ("text_config.num_key_value_heads", 2),
    ("text_config.first_k_dense_replace", 14),
    ("text_config.first_k_dense_replace", -1),
    ("text_config.moe_layer_freq", 0),
    ("text_config.num_experts_per_token", 25),
    ("text_config.num_expert_group", 5),
    ("text_config.topk_group", 2),
    ("text_config.attn_res_block_size", 0),
    ("text_config.hidden_act", "silu"),
    ("text_config.moe_router_activation_func", "softmax"),
    ("text_config.topk_method", "greedy"),
    ("text_config.mla_use_nope", False),
    ("text_config.mla_use_output_gate", False),
    ("text_config.tie_word_embeddings", True),
    ("text_config.num_nextn_predict_layers", 1),
    ("text_config.activation_situ_beta", 0.0),
    ("text_config.activation_situ_linear_beta", -25.0),
    ("text_config.activation_situ_beta", "4"),
    ("text_config.rms_norm_eps", 0.0),
    ("text_config.rms_norm_eps", "1e-5"),
    ("text_config.rms_norm_eps", None),
    ("text_config.routed_scaling_factor", "1.0"),
    ("text_config.routed_scaling_factor", float("nan")),
    ("text_config.initializer_range", -0.02),
    ("text_config.linear_attn_config", None),
    ("text_config.linear_attn_config.num_heads", 0),
    ("text_config.linear_attn_config.head_dim", "32"),
    ("text_config.linear_attn_config.short_conv_kernel_size", 1),
    ("text_config.linear_attn_config.gate_lower_bound", 1.0),
    ("text_config.linear_attn_config.gate_lower_bound", -6.0),
    ("text_config.linear_attn_config.gate_lower_bound", 0.0),
    ("text_config.linear_attn_config.gate_lower_bound", "-5"),
    ("text_config.linear_attn_config.use_full_rank_gate", "no"),
    ("text_config.linear_attn_config.full_attn_layers", [4, 8, 12]),
    ("text_config.linear_attn_config.full_attn_layers", [3, 4, 8, 12, 13]),
    ("text_config.linear_attn_config.full_attn_layers", [4, 8, 12, 12, 13]),
    ("text_config.linear_attn_config.full_attn_layers", [4, 8, 12, 14]),
    ("text_config.linear_attn_config.kda_layers", [0, 1, 2, 4, 5, 6, 8, 9, 10]),
    ("text_config.quantization_config", quantization() | {"format": "nvfp4-pack-quantized"}),
    ("text_config.quantization_config", quantization(group_size=16)),
    ("text_config.quantization_config", quantization(num_bits=8)),
    ("text_config.quantization_config", quantization(type="int")),
    ("quantization_config", quantization(group_size=64)),
    ("eos_token_id", 603),
    ("pad_token_id", 1),
    ("vision_config.text_hidden_size", 64),
    ("vision_config.mm_hidden_size", 16),
    ("vision_config.qkv_hidden_size", 50),
    ("vision_config.patch_size", 0),
    ("vision_config.merge_kernel_size", [3, 3]),
    ("vision_config.norm_type", "layernorm"),
    ("vision_config.activation_func", "gelu"),
    ("vision_config.pos_emb_type", "absolute"),
    ("vision_config.pos_emb_interpolation_mode", "bicubic"),
    ("vision_config.merge_type", "sd2"),
    ("vision_config.mlp_type", "mlp3"),
    ("vision_config.mm_projector_type", "patchmerger"),
    ("vision_config.projector_hidden_act", "silu"),
    ("vision_config.attn_bias", True),
    ("vision_config.linear_bias", True),
    ("vision_config.patch_embed_proj_bias", True),
]


@pytest.mark.parametrize(("path", "value"), WRONG, ids=[f"{path}={value}"[:70] for path, value in WRONG])
def test_wrong_values_name_their_key(path, value):
    values = tiny()
    *parents, key = path.split(".")
    part = values
    for parent in parents:
        part = part[parent]
    part[key] = value
    with pytest.raises(ValueError, match=key):
        KimiK3Config.from_dict(values)


@pytest.mark.parametrize("key", ["linear_attn_config", "attn_res_block_size", "num_experts", "hidden_size"])
def test_missing_keys_are_named(key):
    values = tiny()
    del values["text_config"][key]
    with pytest.raises(ValueError, match=key):
        KimiK3Config.from_dict(values)


@pytest.mark.parametrize("key", ["kda_layers", "full_attn_layers", "num_heads", "head_dim", "short_conv_kernel_size"])
def test_missing_attention_keys_are_named(key):
    values = tiny()
    del values["text_config"]["linear_attn_config"][key]
    with pytest.raises(ValueError, match=key):
        KimiK3Config.from_dict(values)


def test_quantization_may_be_nested_or_hoisted_but_not_both_and_different():
    values = tiny()
    for where in (values, values["text_config"]):
        where["quantization_config"] = quantization()
        assert KimiK3Config.from_dict(values).quantization_config == quantization()
    values["text_config"]["quantization_config"] = quantization(symmetric=False)
    with pytest.raises(ValueError, match="quantization_config"):
        KimiK3Config.from_dict(values)


@pytest.mark.parametrize("key", ["moe_intermediate_size", "routed_expert_hidden_size"])
def test_packed_experts_need_whole_groups(key):
    values = tiny()
    values["text_config"]["quantization_config"] = quantization()
    values["text_config"][key] = 80
    with pytest.raises(ValueError, match=f"{key}.*32.*80"):
        KimiK3Config.from_dict(values)


@pytest.mark.parametrize("values", [{}, {"model_type": "kimi_k3"}, {"model_type": "kimi_linear", "hidden_size": 3}])
def test_other_models_are_refused(values):
    with pytest.raises(ValueError, match=r"model_type 'kimi_k3' with a text_config"):
        KimiK3Config.from_dict(values)
