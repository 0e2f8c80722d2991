"""The plan against the released census, against models built on the meta device, and against files' own bytes."""

import csv
import json
import os
import re
import struct
from pathlib import Path

import pytest
import torch

from kimi_k3.configuration_kimi_k3 import KimiK3Config
from kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM, KimiK3ForConditionalGeneration
from kimi_k3.planning import MeshShape, Plan, planned_tensors, read_stored
from kimi_k3.shards import DTYPE_NAMES
from kimi_k3.tensor_layout import file_name_of

GOLDEN = Path(__file__).parent.parent / "golden"


def load_config(folder: Path) -> KimiK3Config:
    return KimiK3Config.from_dict(json.loads((folder / "config.json").read_text()))


def spec_folder() -> Path:
    if "KIMI_K3_TEST_DATA" not in os.environ:
        pytest.skip("KIMI_K3_TEST_DATA is not set")
    return Path(os.environ["KIMI_K3_TEST_DATA"]).parent / "spec"


@pytest.fixture
def released() -> KimiK3Config:
    return load_config(spec_folder())


def changed(config: KimiK3Config, **text: object) -> KimiK3Config:
    values = config.to_dict()
    linear = text.pop("linear_attn_config", {})
    values["text_config"] |= text
    values["text_config"]["linear_attn_config"] |= linear
    return KimiK3Config.from_dict(values)


def read_header(path: Path) -> dict:
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__", None)
    return header


def test_release_has_every_pattern_of_the_census(released):
    """tensors.tsv was counted from the released index and shard headers."""
    planned: dict[str, list] = {}
    for tensor in planned_tensors(released):
        name = file_name_of(tensor.name, 0 if tensor.num_stored > 1 else None)
        pattern = re.sub(r"blocks\.\d+", "blocks.{B}", name)
        pattern = re.sub(r"layers\.\d+", "layers.{L}", re.sub(r"experts\.\d+", "experts.{E}", pattern))
        dtype, elements = DTYPE_NAMES[tensor.spec.dtype], tensor.spec.num_elements // tensor.num_stored
        known = planned.setdefault(pattern, [dtype, 0, elements, 0])
        assert known[0] == dtype and known[2] == elements
        known[1] += tensor.num_stored
        known[3] += tensor.spec.num_bytes
    with (spec_folder() / "tensors.tsv").open() as file:
        census = {
            row["pattern"]: [row["dtype"], *(int(row[key]) for key in ("count", "elements_each", "bytes_total"))]
            for row in csv.DictReader(file, delimiter="\t")
        }
    assert planned == census


def test_release_has_the_figures_of_the_specification(released):
    plan = Plan(released)
    assert plan.num_parameters == 2_779_931_837_184
    assert plan.num_active_parameters == 104_189_614_848
    assert plan.checkpoint_bytes == 1_560_860_324_864
    assert plan.latent_cache_bytes_per_token == 27_648
    assert plan.kda_state_bytes_per_sequence == 434_110_464
    assert plan.conv_window_bytes_per_sequence == 15_261_696
    assert plan.attn_res_bytes_per_token == 129_024
    described = plan.to_dict()
    assert {name: part["parameters"] for name, part in described["components"].items()} == {
        "routed_experts": 2_722_740_830_208,
        "kda_attention": 30_618_088_704,
        "moe_non_routed": 17_473_358_336,
        "mla_attention": 5_572_706_304,
        "embed_tokens_and_lm_head": 2_348_810_240,
        "dense_mlp": 726_663_168,
        "vision_tower": 401_214_464,
        "mm_projector": 46_144_512,
        "norms_and_attn_res": 4_021_248,
    }
    assert described["components"]["routed_experts"]["bytes"] == 1_446_456_066_048
    assert described["num_tensors"] == 497_220


def test_release_on_one_device_is_its_checkpoint(released):
    assert Plan(released).device_weight_bytes == 1_560_860_324_864


@pytest.mark.parametrize(
    "ep, gigabytes", [(8, "180.8"), (16, "90.4"), (32, "45.2"), (64, "22.6")]
)  # whole experts of 17,547,264 bytes in 92 layers: 896 / ep on each rank
def test_release_routed_bytes_per_rank(released, ep, gigabytes):
    routed = Plan(released, MeshShape(8, ep)).to_dict()["components"]["routed_experts"]["device_bytes"]
    assert routed == 92 * 896 // ep * 17_547_264
    assert f"{routed / 1e9:.1f}" == gigabytes


def test_release_attention_per_rank_by_hand(released):
    """tp = 8: 12 heads a rank. KDA and MLA written out, replicated tensors whole."""
    components = Plan(released, MeshShape(8, 64)).to_dict()["components"]
    hidden, width = 7168, 12 * 128
    kda = 2 * (5 * width * hidden + 12 * hidden + width * 128 + 128 * hidden)  # q, k, v, g, o; b; f_b; f_a
    kda += 4 * (3 * width * 4 + width + 128 + 128)  # convolutions, dt_bias; A_log and o_norm whole
    assert components["kda_attention"]["device_bytes"] == 69 * kda
    mla = 2 * (2 * width * hidden + 12 * 192 * 1536 + 12 * 256 * 512)  # g, o; q_b; kv_b
    mla += 2 * (1536 * hidden + 1536 + 576 * hidden + 512)  # q_a, kv_a and their norms whole
    assert components["mla_attention"]["device_bytes"] == 24 * mla
    assert components["embed_tokens_and_lm_head"]["device_bytes"] == 4_697_620_480 // 8
    assert components["norms_and_attn_res"]["device_bytes"] == 8_042_496


def low_rank_gate_and_odd_layers() -> KimiK3Config:
    text = {"first_k_dense_replace": 3, "moe_layer_freq": 2, "latent_moe_use_norm": False}
    return changed(KimiK3Config.tiny(), linear_attn_config={"use_full_rank_gate": False, "num_heads": 130}, **text)


@pytest.mark.parametrize(
    "config",
    [
        KimiK3Config.tiny(),
        load_config(GOLDEN / "golden"),
        load_config(GOLDEN / "smooth"),
        load_config(GOLDEN / "vision"),
        low_rank_gate_and_odd_layers(),
    ],
    ids=["tiny", "golden", "smooth", "vision", "low_rank_gate"],
)
def test_parameters_are_those_of_the_model(config):
    model_class = KimiK3ForCausalLM if config.vision_config is None else KimiK3ForConditionalGeneration
    with torch.device("meta"):
        model = model_class(config)
    assert Plan(config).num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_cache_bytes_are_those_of_the_cache():
    """KimiK3Cache holds one spare slot, and blocks of 64 tokens."""
    config = KimiK3Config.tiny()
    plan = Plan(config)
    with torch.device("meta"):
        model = KimiK3ForCausalLM(config).to(torch.bfloat16)
    cache = model.make_cache(3)
    blocks = cache._num_blocks
    per_sequence = plan.kda_state_bytes_per_sequence + plan.conv_window_bytes_per_sequence
    assert cache.memory_bytes() == 4 * per_sequence + 64 * blocks * plan.latent_cache_bytes_per_token


@pytest.mark.parametrize("name", ["golden", "smooth", "vision"])
def test_stored_bytes_are_those_of_the_file(name):
    header = read_header(GOLDEN / name / "model.safetensors")
    in_file: dict[str, int] = {}
    for entry in header.values():
        begin, end = entry["data_offsets"]
        in_file[entry["dtype"]] = in_file.get(entry["dtype"], 0) + end - begin
    stored = read_stored(GOLDEN / name)
    assert (stored.num_bytes, stored.experts, stored.a_log_length) == (sum(in_file.values()), "mxfp4", 32)
    plan = Plan(load_config(GOLDEN / name), a_log_length=stored.a_log_length, experts=stored.experts)
    assert plan.to_dict()["bytes_by_dtype"] == dict(sorted(in_file.items()))
    assert plan.to_dict()["num_tensors"] == len(header)
    # From the configuration alone A_log has the released length: 96 more zeros in each of the 6 KDA layers.
    assert Plan(load_config(GOLDEN / name)).checkpoint_bytes == sum(in_file.values()) + 6 * 96 * 4


def test_a_folder_with_config_alone_tells_nothing_of_its_weights(tmp_path):
    assert read_stored(tmp_path) == (None, None, None)


def test_an_index_tells_the_size_without_its_shards(tmp_path):
    weight_map = {"language_model.model.layers.0.self_attn.A_log": "a.safetensors"}
    index = {"metadata": {"total_size": 123}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_stored(tmp_path) == (123, None, None)


def test_dequantized_experts_are_bfloat16():
    config = load_config(GOLDEN / "golden")
    packed, plain = Plan(config), Plan(config, experts="dequantized")
    assert plain.num_parameters == packed.num_parameters
    experts = plain.to_dict()["components"]["routed_experts"]
    assert experts["bytes"] == 2 * experts["parameters"]
    # 4 bits a weight, and one byte for 32 of them
    assert packed.to_dict()["components"]["routed_experts"]["bytes"] == experts["parameters"] * 17 // 32


def test_the_fullest_rank_is_counted():
    config = KimiK3Config.tiny()  # 24 experts, 12 MoE layers, 3 * 96 * 64 weights an expert
    routed = Plan(config, MeshShape(1, 7)).to_dict()["components"]["routed_experts"]["device_bytes"]
    assert routed == 12 * 4 * 3 * 96 * 64 * 2
    routed = Plan(config, MeshShape(1, 30)).to_dict()["components"]["routed_experts"]["device_bytes"]
    assert routed == 12 * 1 * 3 * 96 * 64 * 2


def test_the_largest_batch_and_context_just_fit(released):
    memory = 141 * 10**9
    mesh = MeshShape(8, 64)
    batch = Plan(released, mesh, memory, context=131_072).largest_batch
    assert batch and batch % 8 == 0
    assert Plan(released, mesh, memory, context=131_072, batch=batch).fits
    assert not Plan(released, mesh, memory, context=131_072, batch=batch + 1).fits
    context = Plan(released, mesh, memory, context=1, batch=batch).largest_context
    assert Plan(released, mesh, memory, context=context, batch=batch).fits
    assert not Plan(released, mesh, memory, context=context + 1, batch=batch).fits


def test_the_largest_context_ends_at_the_models_own(released):
    assert Plan(released, MeshShape(8, 64), 10**15).largest_context == 1_048_576


def test_weights_that_do_not_fit_leave_no_batch(released):
    plan = Plan(released, device_memory=141 * 10**9, context=1024)
    assert plan.fits is False and plan.largest_batch == 0 and plan.largest_context == 0


def test_heads_that_do_not_divide_are_refused_by_name():
    config = KimiK3Config.tiny()  # 6 MLA heads, 5 KDA heads
    with pytest.raises(ValueError, match=r"linear_attn_config\.num_heads \(5\).*tp=2"):
        Plan(config, MeshShape(2, 2))
    with pytest.raises(ValueError, match=r"num_attention_heads \(6\).*tp=5"):
        Plan(config, MeshShape(5, 5))


@pytest.mark.parametrize("text, tp, ep", [("tp=8,ep=64", 8, 64), ("ep=4", 1, 4), ("tp=4", 4, 4), (" ep=8, tp=2", 2, 8)])
def test_mesh_is_read(text, tp, ep):
    assert MeshShape.parse(text) == MeshShape(tp, ep)


@pytest.mark.parametrize("text", ["tp=4,ep=6", "tp=8,ep=1", "tp=0", "pp=2", "tp", "tp=2,tp=2", ""])
def test_mesh_errors_name_the_mesh(text):
    with pytest.raises(ValueError, match=r"^mesh: want"):
        MeshShape.parse(text)


@pytest.mark.parametrize(
    "arguments, name",
    [
        ({"context": 0}, "context"),
        ({"context": 4, "batch": 0}, "batch"),
        ({"batch": 4}, "batch"),
        ({"device_memory": 0}, "device_memory"),
    ],
)
def test_arguments_out_of_range_are_named(arguments, name):
    with pytest.raises(ValueError, match=f"^plan: {name}: want"):
        Plan(KimiK3Config.tiny(), **arguments)
