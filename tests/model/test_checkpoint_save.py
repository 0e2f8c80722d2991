"""save_pretrained: untrained tensors byte for byte, trained ones in their stored dtype, nothing dropped in silence."""

import json
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from checkpoint_editing import GOLDEN, INDEX, assert_same_bytes, copy_of, edit, edit_config, sharded_copy_of, tensors_of

from kimi_k3 import KimiK3Config, KimiK3ForCausalLM, KimiK3ForConditionalGeneration
from kimi_k3.checkpoint import CheckpointError
from kimi_k3.shards import parse_size
from kimi_k3.verification import verify_folder
from kimi_k3_kernels import mxfp4_dequantize

W1 = "language_model.model.layers.1.block_sparse_moe.experts.3.w1"


def load(folder, cls=KimiK3ForCausalLM, **options):
    return cls.from_pretrained(folder, progress=False, **options)


@pytest.mark.parametrize("name", ["golden", "smooth", "vision"])
@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("experts", ["mxfp4", "dequantized"])
def test_load_then_save_gives_every_tensor_back_byte_for_byte(tmp_path, name, dtype, experts):
    load(GOLDEN / name, dtype=dtype, experts=experts).save_pretrained(tmp_path)
    assert_same_bytes(tensors_of(tmp_path), tensors_of(GOLDEN / name))
    for file in (GOLDEN / name).iterdir():
        if file.suffix != ".safetensors" and file.name != "README.md":
            assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_the_multimodal_class_saves_its_vision_tensors_byte_for_byte(tmp_path):
    load(GOLDEN / "vision", KimiK3ForConditionalGeneration, dtype=torch.float32).save_pretrained(tmp_path)
    assert_same_bytes(tensors_of(tmp_path), tensors_of(GOLDEN / "vision"))


@pytest.mark.parametrize("experts", ["mxfp4", "dequantized"])
def test_plain_checkpoints_come_back_plain(tmp_path, experts):
    def unpack(tensors):
        for name in [n for n in tensors if n.endswith(".weight_packed")]:
            stem = name.removesuffix("_packed")
            tensors[stem] = mxfp4_dequantize(tensors.pop(name), tensors.pop(f"{stem}_scale"))

    plain = edit(copy_of("golden", tmp_path / "plain"), unpack)
    edit_config(plain, lambda config: config["text_config"].pop("quantization_config"))
    load(plain, experts=experts).save_pretrained(tmp_path / "out")
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors_of(plain))
    assert KimiK3Config.from_pretrained(tmp_path / "out").quantization_config is None


def test_codes_of_minus_zero_and_unusual_scales_survive_the_dequantised_form(tmp_path):
    def change(tensors):
        tensors[f"{W1}.weight_packed"][0] = 0x88  # -0 everywhere
        tensors[f"{W1}.weight_packed"][1] = 0x11  # 0.5 everywhere: a smaller scale would do as well
        tensors[f"{W1}.weight_scale"][0] = 90

    folder = edit(copy_of("golden", tmp_path / "odd"), change)
    load(folder, experts="dequantized", dtype=torch.float32).save_pretrained(tmp_path / "out")
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors_of(folder))


def test_shards_and_index(tmp_path):
    model = load(GOLDEN / "vision")
    model.save_pretrained(tmp_path, max_shard_size="500KB")
    stored = tensors_of(GOLDEN / "vision")
    assert_same_bytes(tensors_of(tmp_path), stored)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in stored.values())
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert shards == [f"model-{i + 1:05d}-of-{len(shards):06d}.safetensors" for i in range(len(shards))]
    assert set(index["weight_map"].values()) == set(shards) and len(shards) >= 6
    for shard in shards:
        held = [stored[name] for name, home in index["weight_map"].items() if home == shard]
        assert sum(tensor.numel() * tensor.element_size() for tensor in held) <= 500_000
    assert torch.equal(load(tmp_path).lm_head.weight, model.lm_head.weight)


def test_a_tensor_above_the_limit_has_a_shard_of_its_own(tmp_path):
    load(GOLDEN / "golden").save_pretrained(tmp_path, max_shard_size="60KB")
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    head = index["language_model.lm_head.weight"]
    assert [name for name, shard in index.items() if shard == head] == ["language_model.lm_head.weight"]  # 98 kB
    assert_same_bytes(tensors_of(tmp_path), tensors_of(GOLDEN / "golden"))


def test_saving_over_another_checkpoint_leaves_nothing_of_it(tmp_path):
    folder = sharded_copy_of("golden", tmp_path / "s")
    (folder / "adapter.safetensors").write_bytes(b"mine")
    load(GOLDEN / "smooth").save_pretrained(folder)
    assert not (folder / INDEX).exists()
    assert sorted(p.name for p in folder.glob("*.safetensors")) == ["adapter.safetensors", "model.safetensors"]
    assert_same_bytes(tensors_of(folder), tensors_of(GOLDEN / "smooth"))


def test_a_model_can_be_saved_over_its_own_source_and_then_again(tmp_path):
    folder = copy_of("vision", tmp_path / "v")
    model = load(folder, experts="dequantized")
    for size in ("700KB", "5GB", "1MB"):
        model.save_pretrained(folder, max_shard_size=size)
        assert_same_bytes(tensors_of(folder), tensors_of(GOLDEN / "vision"))


def test_a_failed_save_leaves_the_folder_as_it_was(tmp_path):
    model = load(copy_of("vision", tmp_path / "source"))
    model.save_pretrained(tmp_path / "out")
    shutil.rmtree(tmp_path / "source")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(CheckpointError, match=r"(vision_tower|mm_projector).*gone"):
        model.save_pretrained(tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_vision_tensors_of_a_changed_source_are_refused(tmp_path):
    folder = copy_of("vision", tmp_path / "v")
    model = load(folder)
    edit(folder, lambda t: t["mm_projector.post_norm.weight"].add_(1))
    with pytest.raises(CheckpointError, match=r"has\s+changed"):
        model.save_pretrained(tmp_path / "out")


def test_a_partly_missing_vision_tower_is_refused_at_load(tmp_path):
    folder = edit(copy_of("vision", tmp_path / "v"), lambda t: t.pop("vision_tower.encoder.final_layernorm.weight"))
    with pytest.raises(CheckpointError, match=r"final_layernorm"):
        load(folder)


def test_a_text_model_needs_its_source_no_more_after_loading(tmp_path, caplog):
    folder = copy_of("golden", tmp_path / "g")
    packed, plain = load(folder), load(folder, experts="dequantized")
    shutil.rmtree(folder)
    packed.save_pretrained(tmp_path / "packed")
    assert_same_bytes(tensors_of(tmp_path / "packed"), tensors_of(GOLDEN / "golden"))
    assert not caplog.records
    plain.save_pretrained(tmp_path / "plain")
    assert "packed anew" in caplog.text
    again = load(tmp_path / "plain", experts="dequantized")
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in plain.named_parameters())


def test_trained_tensors_are_rounded_to_their_stored_dtypes_and_the_rest_is_untouched(tmp_path):
    model = load(GOLDEN / "golden", dtype=torch.float32, experts="dequantized")
    with torch.no_grad():
        model.lm_head.weight.add_(0.01)
        model.get_parameter("model.layers.1.block_sparse_moe.experts.w1")[3].mul_(2.9)
    model.save_pretrained(tmp_path)
    saved, stored = tensors_of(tmp_path), tensors_of(GOLDEN / "golden")
    changed = {name for name in stored if not torch.equal(saved[name], stored[name])}
    assert changed == {"language_model.lm_head.weight", f"{W1}.weight_packed", f"{W1}.weight_scale"}
    assert torch.equal(saved["language_model.lm_head.weight"], model.lm_head.weight.bfloat16())
    wanted = model.get_parameter("model.layers.1.block_sparse_moe.experts.w1")[3].detach()
    got = mxfp4_dequantize(saved[f"{W1}.weight_packed"], saved[f"{W1}.weight_scale"], torch.float32)
    largest = wanted.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
    # The widest step of E2M1 is 2 below a largest value in [4, 8) of its scale; above 6 the value saturates.
    assert ((wanted - got).unflatten(-1, (-1, 32)).abs() <= largest / 4).all()


@pytest.mark.parametrize("says_packed", [False, True])
@pytest.mark.parametrize("experts", [None, "mxfp4", "dequantized"])
def test_a_fresh_model_has_the_released_dtypes_and_a_config_that_says_what_the_shards_hold(
    tmp_path, says_packed, experts, caplog
):
    config = KimiK3Config.tiny()
    if says_packed:
        quantization = KimiK3Config.from_pretrained(GOLDEN / "golden").quantization_config
        values = config.to_dict()
        values["text_config"]["quantization_config"] = quantization
        config = KimiK3Config.from_dict(values)
    torch.manual_seed(0)
    model = KimiK3ForConditionalGeneration(config)
    model.save_pretrained(tmp_path, experts=experts)
    saved = tensors_of(tmp_path)
    is_packed = experts == "mxfp4" or (experts is None and says_packed)
    assert any(name.endswith(".weight_packed") for name in saved) == is_packed
    assert (KimiK3Config.from_pretrained(tmp_path).quantization_config is not None) == is_packed
    assert saved["language_model.model.layers.0.self_attn.A_log"].shape == (128,)
    for name, tensor in saved.items():
        if name.endswith(("_packed", "_scale")):
            assert tensor.dtype == torch.uint8
        elif name.endswith(("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")):
            assert tensor.dtype == torch.float32
        else:
            assert tensor.dtype == torch.bfloat16
    again = load(tmp_path, KimiK3ForConditionalGeneration)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight.bfloat16())
    assert "config.json" not in caplog.text  # it agrees with the shards
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 600, "eos_token_id": 602, "pad_token_id": 639}


def test_the_format_of_experts_can_be_chosen_on_save(tmp_path):
    load(GOLDEN / "golden").save_pretrained(tmp_path / "plain", experts="dequantized")
    load(tmp_path / "plain").save_pretrained(tmp_path / "packed", experts="mxfp4")
    assert_same_bytes(tensors_of(tmp_path / "packed"), tensors_of(GOLDEN / "golden"))
    assert KimiK3Config.from_pretrained(tmp_path / "packed").quantization_config["format"] == "mxfp4-pack-quantized"


def test_what_cannot_be_saved_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"range\(1, 2\)"):
        load(GOLDEN / "golden", layers=range(1, 2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="experts"):
        load(GOLDEN / "golden").save_pretrained(tmp_path, experts="int4")
    with pytest.raises(ValueError, match="max_shard_size"):
        load(GOLDEN / "golden").save_pretrained(tmp_path, max_shard_size="600B")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("size", "wanted"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), (123, 123), ("2TB", 2 * 10**12)]
)
def test_sizes(size, wanted):
    assert parse_size(size) == wanted


@pytest.mark.parametrize("size", ["", "5", "GB", "-1GB", 0, -5, "5GiB", "0MB"])
def test_sizes_that_are_none(size):
    with pytest.raises(ValueError, match="max_shard_size"):
        parse_size(size)


MEASURE = """
    import sys
    import torch
    from kimi_k3 import KimiK3ForCausalLM

    def peak():
        return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

    model = KimiK3ForCausalLM.from_pretrained(sys.argv[1], progress=False)
    loaded = peak()
    model.save_pretrained(sys.argv[2], max_shard_size="300MB")
    print(peak() - loaded)
"""


@pytest.mark.slow
def test_saving_mid_needs_no_second_copy_and_gives_every_tensor_back(mid_folder, tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(mid_folder), str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(output) <= 200 * 2**20  # the largest tensor is 100 MB; the checkpoint is 1.99 GB
    saved, stored = tensors_of(tmp_path), tensors_of(mid_folder)
    assert_same_bytes(saved, stored)
    total = json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"]
    assert total == json.loads((mid_folder / INDEX).read_text())["metadata"]["total_size"]


def test_a_fresh_text_model_is_saved_as_a_text_checkpoint(tmp_path):
    config = KimiK3Config.tiny()
    assert config.vision_config is not None
    KimiK3ForCausalLM(config).save_pretrained(tmp_path)
    assert KimiK3Config.from_pretrained(tmp_path).vision_config is None
    assert config.vision_config is not None
    assert verify_folder(tmp_path).problems == []
