"""from_pretrained: the golden logits, dtypes, expert formats, stages, and every damaged checkpoint refused by name."""

import json
import logging
import math
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_editing import (
    GOLDEN,
    INDEX,
    LAYER0,
    LAYER1,
    copy_of,
    edit,
    edit_config,
    edit_index,
    shard_of,
    sharded_copy_of,
    tensors_of,
)
from safetensors.torch import load_file, save_file

from kimi_k3 import KimiK3ForCausalLM, KimiK3ForConditionalGeneration
from kimi_k3.checkpoint import CheckpointError
from kimi_k3.preflight import InsufficientResources
from kimi_k3.shards import read_header
from kimi_k3_kernels import mxfp4_dequantize

EXPERT = f"{LAYER1}block_sparse_moe.experts.3.w1.weight"


def load(folder: Path, **options):
    return KimiK3ForCausalLM.from_pretrained(folder, progress=False, **options)


def prompt(name: str = "golden") -> torch.Tensor:
    return torch.tensor([json.loads((GOLDEN / f"{name}.reference" / "reference.json").read_text())["tokens"]])


@torch.no_grad()
def logits_of(model, name: str = "golden") -> torch.Tensor:
    return model(prompt(name)).logits[0]


def plain_golden(folder: Path, layers: range = range(1, 9)) -> Path:
    """Golden with the routed experts of some layers as bfloat16 matrices of the same values."""

    def unpack(tensors):
        for name in [n for n in tensors if n.endswith(".weight_packed") and int(n.split(".")[3]) in layers]:
            stem = name.removesuffix("_packed")
            tensors[stem] = mxfp4_dequantize(tensors.pop(name), tensors.pop(f"{stem}_scale"))

    return edit(copy_of("golden", folder), unpack)


# What is loaded


@pytest.mark.parametrize("name", ["golden", "smooth"])
@pytest.mark.parametrize("experts", ["mxfp4", "dequantized"])
def test_float32_gives_the_golden_logits(name, experts):
    reference = load_file(GOLDEN / f"{name}.reference" / "logits.safetensors")["hf_f64_prefill"]
    difference = (logits_of(load(GOLDEN / name, dtype=torch.float32, experts=experts), name) - reference).abs()
    assert difference.max() <= 1.2e-4  # the golden README's bounds; float32 alone makes 6e-5
    assert difference.mean() <= 1e-5  # 1.6e-5 with the wrong epsilon


def test_every_parameter_has_the_file_s_values():
    stored = tensors_of(GOLDEN / "golden")
    model = load(GOLDEN / "golden")
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            stack, _, kind = name.rpartition(".")[2].partition("_")
            prefix = "language_model." + name.rpartition(".")[0]
            expected = torch.stack([stored[f"{prefix}.{e}.{stack}.weight_{kind}"] for e in range(16)])
        else:
            expected = stored[f"language_model.{name}"]
        assert parameter.dtype == expected.dtype, name
        assert torch.equal(parameter, expected), name
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert not model.training


@pytest.mark.parametrize(
    ("dtype", "experts", "projection", "decay", "expert"),
    [
        ("auto", "mxfp4", torch.bfloat16, torch.float32, torch.uint8),
        ("auto", "dequantized", torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.bfloat16, "dequantized", torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, "dequantized", torch.float32, torch.float32, torch.float32),
        (torch.float64, "dequantized", torch.float64, torch.float64, torch.float64),
        (torch.float64, "mxfp4", torch.float64, torch.float64, torch.uint8),
    ],
)
def test_dtypes(dtype, experts, projection, decay, expert):
    model = load(GOLDEN / "golden", dtype=dtype, experts=experts)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            assert parameter.dtype == expert, name
        elif name.endswith(("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")):
            assert parameter.dtype == decay, name
        else:
            assert parameter.dtype == projection, name


def test_packed_experts_and_the_router_bias_are_frozen_and_the_rest_is_not():
    for name, parameter in load(GOLDEN / "golden").named_parameters():
        assert parameter.requires_grad == (".experts." not in name and not name.endswith("correction_bias")), name


def test_sharded_and_single_file_load_alike_and_other_files_beside_are_ignored(tmp_path):
    folder = sharded_copy_of("golden", tmp_path / "sharded")
    save_file({"language_model.lm_head.weight": torch.zeros(3)}, folder / "adapter.safetensors")
    assert torch.equal(logits_of(load(folder)), logits_of(load(GOLDEN / "golden")))


def test_a_stage_reads_only_its_own_shards(tmp_path):
    folder = sharded_copy_of("golden", tmp_path / "sharded")
    whole = load(folder)
    for layers in (range(0, 2), range(3, 5), range(7, 9)):
        stage_folder = tmp_path / f"stage{layers.start}"
        shutil.copytree(folder, stage_folder)
        wanted = {shard_of(folder, f"language_model.model.layers.{i}.input_layernorm.weight") for i in layers}
        if layers.start == 0 or layers.stop == 9:
            wanted.add(shard_of(folder, "language_model.lm_head.weight"))
        for shard in stage_folder.glob("*.safetensors"):
            if shard.name not in wanted:
                shard.unlink()
        stage = load(stage_folder, layers=layers)
        held = dict(stage.named_parameters())
        assert ("model.embed_tokens.weight" in held) == (layers.start == 0)
        assert ("lm_head.weight" in held) == ("model.norm.weight" in held) == (layers.stop == 9)
        assert all(torch.equal(p, whole.get_parameter(name)) for name, p in held.items())


def test_plain_experts_stay_plain_under_the_default_and_a_warning_says_so(tmp_path, caplog):
    model = load(plain_golden(tmp_path / "plain"), dtype=torch.float32)
    assert "stored with plain experts" in caplog.text and "config.json says MXFP4" in caplog.text
    assert model.get_parameter("model.layers.1.block_sparse_moe.experts.w1").dtype == torch.float32
    difference = logits_of(model) - logits_of(load(GOLDEN / "golden", dtype=torch.float32))
    assert difference.abs().max() <= 1.2e-4  # the same values through another op: float32's own noise, doubled


def test_each_layer_is_packed_or_plain_as_its_shards_are(tmp_path):
    model = load(plain_golden(tmp_path / "mixed", layers=range(2, 4)), dtype=torch.float32)
    held = dict(model.named_parameters())
    for layer in range(1, 9):
        assert (f"model.layers.{layer}.block_sparse_moe.experts.w1" in held) == (layer in (2, 3))
    difference = logits_of(model) - logits_of(load(GOLDEN / "golden", dtype=torch.float32))
    assert difference.abs().max() <= 1.2e-4


def test_where_the_config_keeps_its_quantisation_does_not_matter(tmp_path, caplog):
    def hoist(config):
        config["quantization_config"] = config["text_config"].pop("quantization_config")

    def mislead(config):
        config["text_config"]["quantization_config"]["ignore"] += ["re:.*nothing\\.matches\\.this.", "self_attn."]

    expected = logits_of(load(GOLDEN / "golden"))
    for name, change in (("hoisted", hoist), ("mislead", mislead)):
        assert torch.equal(logits_of(load(edit_config(copy_of("golden", tmp_path / name), change))), expected)
    assert not caplog.records
    absent = edit_config(copy_of("golden", tmp_path / "absent"), lambda c: c["text_config"].pop("quantization_config"))
    assert torch.equal(logits_of(load(absent)), expected)
    assert "no quantization_config" in caplog.text
    caplog.clear()

    def ignore_experts(config):
        config["text_config"]["quantization_config"]["ignore"].append("re:.*block_sparse_moe.*")

    assert torch.equal(logits_of(load(edit_config(copy_of("golden", tmp_path / "ignored"), ignore_experts))), expected)
    assert "block_sparse_moe" in caplog.text


def test_the_multimodal_class_reads_the_vision_tensors():
    stored = tensors_of(GOLDEN / "vision")
    model = KimiK3ForConditionalGeneration.from_pretrained(GOLDEN / "vision", progress=False)
    vision = {n: p for n, p in model.named_parameters() if n.startswith(("vision_tower.", "mm_projector."))}
    assert vision.keys() == {name for name in stored if not name.startswith("language_model.")}
    assert all(torch.equal(parameter, stored[name]) for name, parameter in vision.items())


def test_a_log_of_another_stored_length_is_kept_at_that_length(tmp_path):
    def lengthen(tensors):
        for name in [n for n in tensors if n.endswith(".A_log")]:
            tensors[name] = torch.cat([tensors[name], torch.zeros(96)])

    model = load(edit(copy_of("golden", tmp_path / "long"), lengthen))
    assert model.get_parameter("model.layers.0.self_attn.A_log").shape == (128,)
    assert torch.equal(logits_of(model), logits_of(load(GOLDEN / "golden")))


# What is refused

DAMAGE = {
    "missing tensor": lambda t: t.pop(f"{LAYER1}mlp_res_norm.weight"),
    "missing expert": lambda t: t.pop(f"{EXPERT}_packed"),
    "unexpected tensor": lambda t: t.update({f"{LAYER1}self_attn.rotary.inv_freq": torch.zeros(3)}),
    "unexpected expert": lambda t: t.update({EXPERT.replace(".3.", ".16.") + "_scale": t[f"{EXPERT}_scale"].clone()}),
    "renamed head": lambda t: t.update({"lm_head.weight": t.pop("language_model.lm_head.weight")}),
    "mis-shaped": lambda t: t.update({f"{LAYER1}self_attn.o_proj.weight": torch.zeros(128, 127, dtype=torch.bfloat16)}),
    "transposed": lambda t: t.update({f"{LAYER1}mlp_res_proj.weight": t[f"{LAYER1}mlp_res_proj.weight"].T}),
    "wrong dtype": lambda t: t.update(
        {f"{LAYER1}self_attn.b_proj.weight": t[f"{LAYER1}self_attn.b_proj.weight"].half()}
    ),
    "wrong float32": lambda t: t.update({f"{LAYER1}self_attn.dt_bias": t[f"{LAYER1}self_attn.dt_bias"].bfloat16()}),
    "group of 16": lambda t: t.update({f"{EXPERT}_scale": t[f"{EXPERT}_scale"].repeat_interleave(2, dim=1)}),
    "packed and plain": lambda t: t.update({EXPERT.replace(".3.", ".4."): torch.zeros(32, 64, dtype=torch.bfloat16)}),
    "padding": lambda t: t[f"{LAYER1}self_attn.A_log"].__setitem__(5, 1.0),
    "short A_log": lambda t: t.update({f"{LAYER1}self_attn.A_log": t[f"{LAYER1}self_attn.A_log"][:3]}),
    "scale 255": lambda t: t[f"{EXPERT}_scale"].__setitem__((1, 1), 255),
}
NAMED = {
    "missing tensor": "mlp_res_norm", "missing expert": "experts.3.w1.weight_packed", "unexpected tensor": "inv_freq",
    "unexpected expert": "experts.16.w1", "renamed head": "lm_head.weight", "mis-shaped": "layers.1.self_attn.o_proj",
    "transposed": "layers.1.mlp_res_proj", "wrong dtype": "layers.1.self_attn.b_proj.weight",
    "wrong float32": "layers.1.self_attn.dt_bias", "group of 16": "experts.3.w1.weight_scale",
    "packed and plain": "experts.4.w1.weight", "padding": "layers.1.self_attn.A_log",
    "short A_log": "layers.1.self_attn.A_log", "scale 255": "experts.3.w1.weight_scale",
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("experts", ["mxfp4", "dequantized"])
def test_damage_in_a_shard_is_named_with_its_file(tmp_path, damage, experts):
    folder = edit(copy_of("golden", tmp_path / "damaged"), DAMAGE[damage])
    with pytest.raises(CheckpointError) as error:
        load(folder, experts=experts)
    assert NAMED[damage] in str(error.value)
    assert "model.safetensors" in str(error.value)


def test_a_missing_shard_is_named(tmp_path):
    folder = sharded_copy_of("golden", tmp_path / "s")
    shard = shard_of(folder, f"{LAYER1}input_layernorm.weight")
    (folder / shard).unlink()
    with pytest.raises(CheckpointError, match=f"{shard}.*missing"):
        load(folder)


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_fault_in_any_of_the_shards_that_are_read_at_once_is_named_and_stops_all_readers(
    tmp_path, place, monkeypatch
):
    monkeypatch.setattr("kimi_k3.checkpoint.MOST_READERS", 3)
    folder = sharded_copy_of("golden", tmp_path / "s")
    scales = [name for name in json.loads((folder / INDEX).read_text())["weight_map"] if name.endswith("weight_scale")]
    shards = sorted({shard_of(folder, name) for name in scales})
    assert len(shards) > 2
    shard = folder / shards[place]
    tensors = load_file(shard)
    name = next(name for name in tensors if name.endswith("weight_scale"))
    tensors[name][-1, -1] = 255
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{shard.name}.*{name}"):
        load(folder)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]


@pytest.mark.parametrize("cut", [1, 1000, 10**5])
def test_a_truncated_shard_is_named(tmp_path, cut):
    folder = sharded_copy_of("golden", tmp_path / "s")
    shard = shard_of(folder, f"{LAYER1}input_layernorm.weight")
    raw = (folder / shard).read_bytes()
    (folder / shard).write_bytes(raw[:-cut])
    with pytest.raises(CheckpointError, match=f"{shard}.*truncated.*tensor"):
        load(folder)


@pytest.mark.parametrize("raw", [b"", b"\x10", b"\xff" * 64, (20).to_bytes(8, "little") + b'{"a": 1, "a": 2}    '])
def test_a_file_that_is_no_shard_is_named(tmp_path, raw):
    folder = copy_of("golden", tmp_path / "s")
    (folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(folder)


def test_a_file_with_more_bytes_than_its_header_describes_is_refused(tmp_path):
    folder = copy_of("golden", tmp_path / "s")
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"\0" * 8)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*header describes"):
        load(folder)


def test_one_key_in_two_shards_is_named_with_both(tmp_path):
    folder = sharded_copy_of("golden", tmp_path / "s")
    name, home, other = (
        f"{LAYER1}input_layernorm.weight",
        *(shard_of(folder, f"{p}mlp_res_norm.weight") for p in (LAYER1, LAYER0)),
    )
    edit(folder, lambda t: t.update({name: torch.zeros(128, dtype=torch.bfloat16)}), other)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert name in str(error.value) and home in str(error.value) and other in str(error.value)


def test_one_key_twice_in_the_index_is_named(tmp_path):
    folder = sharded_copy_of("golden", tmp_path / "s")
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"weight_map": {', '"weight_map": {"language_model.lm_head.weight": "x",'))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*twice"):
        load(folder)


def test_an_entry_that_its_shard_lacks_is_named(tmp_path):
    folder = sharded_copy_of("golden", tmp_path / "s")
    name = f"{LAYER1}input_layernorm.weight"
    shard = shard_of(folder, name)
    edit(folder, lambda t: t.update({name + "_old": t.pop(name)}), shard)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert name in str(error.value) and shard in str(error.value)


def test_a_wrong_total_size_is_refused_unless_verification_is_off(tmp_path):
    folder = sharded_copy_of("golden", tmp_path / "s")
    edit_index(folder, lambda index: index["metadata"].update(total_size=1))
    with pytest.raises(CheckpointError, match="total_size is 1"):
        load(folder)
    load(folder, verify=None)


def test_an_index_cannot_point_outside_its_folder(tmp_path):
    folder = sharded_copy_of("golden", tmp_path / "s")
    edit_index(folder, lambda index: index["weight_map"].update({"language_model.lm_head.weight": "../x.safetensors"}))
    with pytest.raises(CheckpointError, match="beside the index"):
        load(folder)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": torch.float16}, "dtype"), ({"dtype": "bf16"}, "dtype"), ({"experts": "int4"}, "experts"),
        ({"trunk": "int4"}, "trunk"), ({"verify": "md5"}, "verify"), ({"layers": range(0, 10)}, "layers"),
        ({"layers": range(0, 4, 2)}, "layers"), ({"device": "cpu", "device_map": "auto"}, "device"),
        ({"expert_activations": "int4"}, "expert_activations"),
        ({"expert_activations": "int8", "experts": "dequantized"}, "expert_activations.*dequantized"),
        ({"layers": [0, 1]}, "layers"), ({"device": "gpu"}, "device"), ({"device": "meta"}, "device"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        load(GOLDEN / "golden", **options)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_no_object_is_named_with_its_file(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: .*JSON"):
        load(tmp_path)


def test_a_mesh_that_is_none_is_named():
    with pytest.raises(ValueError, match="mesh: want a DeviceMesh"):
        load(GOLDEN / "golden", mesh=object())


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load(tmp_path / "empty")


def test_too_little_memory_is_refused_with_the_numbers_and_what_would_fit(tmp_path, monkeypatch):
    # Only config.json: the refusal comes before any shard or index is opened.
    shutil.copy(GOLDEN / "golden" / "config.json", tmp_path)
    monkeypatch.setattr("kimi_k3.preflight.available_memory", lambda device: 1_500_000)
    with pytest.raises(InsufficientResources) as error:
        load(tmp_path)
    needed = sum(t.numel() * t.element_size() for t in tensors_of(GOLDEN / "golden").values())
    needed += 6 * (128 - 32) * 4  # by the config, A_log is as long as in the release
    assert f"{needed / 1e9:,.2f} GB" in str(error.value)
    fitting = int(str(error.value).split("range(0, ")[1].split(")")[0])
    assert 0 < fitting < 9
    monkeypatch.undo()
    part = load(GOLDEN / "golden", layers=range(0, fitting))
    held = sum(p.numel() * p.element_size() for p in part.parameters())
    assert held <= 1_500_000 < held + 400_000  # and one more layer, of 300 kB, would not


# SHA-256


def test_sha256_is_compared_where_it_is_known_and_its_absence_is_an_error(tmp_path):
    folder = copy_of("golden", tmp_path / "s")
    with pytest.raises(ValueError, match="SHA256SUMS"):
        load(folder, verify="sha256")
    output = subprocess.run(["sha256sum", "model.safetensors"], cwd=folder, capture_output=True, text=True, check=True)
    (folder / "SHA256SUMS").write_text(output.stdout)
    load(folder, verify="sha256")
    edit(folder, lambda t: t["language_model.lm_head.weight"].__setitem__((0, 0), 7.0))
    load(folder)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: SHA-256"):
        load(folder, verify="sha256")


# Memory

MEASURE = """
    import sys
    from pathlib import Path
    from kimi_k3 import KimiK3ForCausalLM

    def peak():
        return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

    shards = sorted(Path(sys.argv[1]).glob("*.safetensors"))
    size = sum(shard.stat().st_size for shard in shards)

    imported = peak()
    model = KimiK3ForCausalLM.from_pretrained(sys.argv[1], progress=False)
    print((peak() - imported) / size)
"""


@pytest.mark.slow
def test_loading_mid_takes_its_own_size_of_memory(mid_folder):
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(mid_folder)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert float(output) <= 1.10


@pytest.mark.slow
def test_page_cache_is_given_back_only_where_it_would_be_short(monkeypatch):
    from kimi_k3 import checkpoint

    part = checkpoint.LoadPart("x", None, read_header(GOLDEN / "golden" / "model.safetensors")[f"{EXPERT}_packed"])
    for free, dropped in ((math.inf, False), (part.stored.num_bytes, True)):
        monkeypatch.setattr(checkpoint, "available_memory", lambda device, free=free: free)
        assert checkpoint._is_cache_to_be_dropped([part]) == dropped


def test_the_logger_is_the_library_s(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="kimi_k3"):
        load(plain_golden(tmp_path / "p", layers=range(1, 2)))
    assert {record.name for record in caplog.records} == {"kimi_k3"}
