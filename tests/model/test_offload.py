"""device_map: the same text with layers on disk, no second copy of the weights, and maps that make no sense refused."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_editing import GOLDEN, assert_same_bytes, copy_of, edit, sharded_copy_of, tensors_of

from kimi_k3 import KimiK3ForCausalLM, KimiK3ForConditionalGeneration
from kimi_k3.checkpoint import CheckpointError
from kimi_k3.preflight import InsufficientResources

SOME_ON_DISK = {
    "model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "model.output_attn_res_norm": "cpu",
    "model.output_attn_res_proj": "cpu", "lm_head": "cpu",
    # a dense KDA layer, MoE layers with KDA and with MLA, and one that is the last of its depth block
    "model.layers.0": "disk", "model.layers.2": "disk", "model.layers.3": "disk", "model.layers.7": "disk",
}  # fmt: skip


def load(folder, cls=KimiK3ForCausalLM, **options):
    return cls.from_pretrained(folder, progress=False, **options)


def prompt() -> torch.Tensor:
    return torch.tensor([json.loads((GOLDEN / "golden.reference" / "reference.json").read_text())["tokens"]])


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("device_map", [SOME_ON_DISK, {"": "disk"}])
@pytest.mark.parametrize("experts", ["mxfp4", "dequantized"])
def test_greedy_text_is_the_resident_model_s_and_nothing_is_written(tmp_path, monkeypatch, device_map, experts):
    folder = sharded_copy_of("golden", tmp_path / "golden")
    monkeypatch.chdir(tmp_path)
    before = listing(tmp_path)
    options = {"dtype": torch.float32, "experts": experts}
    resident = load(folder, **options).generate(prompt(), max_new_tokens=32, eos_token_id=[])
    offloaded = load(folder, device_map=device_map, **options)
    away = [name for name, parameter in offloaded.named_parameters() if parameter.is_meta]
    assert offloaded.hf_device_map["lm_head"] == "cpu"  # read outside its own forward: never away
    assert {name.split(".")[2] for name in away if name.startswith("model.layers.")} >= {"0", "2", "3", "7"}
    assert torch.equal(offloaded.generate(prompt(), max_new_tokens=32, eos_token_id=[]), resident)
    assert [name for name, parameter in offloaded.named_parameters() if parameter.is_meta] == away
    assert listing(tmp_path) == before
    reference = json.loads((GOLDEN / "golden.reference" / "reference.json").read_text())
    assert len(set(resident[0, 64:].tolist())) > 5, "a text of one token would show nothing"
    assert reference["tokens"] == resident[0, :64].tolist()


def test_what_is_on_disk_is_read_when_its_layer_runs(tmp_path):
    folder = sharded_copy_of("golden", tmp_path / "golden")
    model = load(folder, device_map=SOME_ON_DISK)
    before = model(prompt()).logits

    def negate(tensors):
        tensors["language_model.model.layers.3.self_attn.o_proj.weight"].neg_()

    shard = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    edit(folder, negate, shard["language_model.model.layers.3.self_attn.o_proj.weight"])
    assert not torch.equal(model(prompt()).logits, before)


def test_auto_keeps_everything_where_there_is_room_and_the_rest_goes_to_disk(monkeypatch):
    resident = load(GOLDEN / "golden")
    roomy = load(GOLDEN / "golden", device_map="auto")
    assert not any(parameter.is_meta for parameter in roomy.parameters())
    monkeypatch.setattr("kimi_k3.offload.available_memory", lambda device: 2_000_000)
    tight = load(GOLDEN / "golden", device_map="auto")
    held = [p for p in tight.parameters() if not p.is_meta]
    assert 0 < sum(p.numel() * p.element_size() for p in held) <= 2_000_000
    assert any(parameter.is_meta for parameter in tight.parameters())
    assert torch.equal(tight(prompt()).logits, resident(prompt()).logits)


def test_an_offloaded_model_saves_every_byte(tmp_path):
    load(GOLDEN / "vision", device_map={"": "disk"}).save_pretrained(tmp_path / "text")
    assert_same_bytes(tensors_of(tmp_path / "text"), tensors_of(GOLDEN / "vision"))
    load(GOLDEN / "vision", KimiK3ForConditionalGeneration, device_map={"": "disk"}).save_pretrained(tmp_path / "whole")
    assert_same_bytes(tensors_of(tmp_path / "whole"), tensors_of(GOLDEN / "vision"))


def test_damage_on_disk_is_named_when_its_layer_runs(tmp_path):
    scale = "language_model.model.layers.3.block_sparse_moe.experts.2.w1.weight_scale"
    folder = edit(copy_of("golden", tmp_path / "g"), lambda tensors: tensors[scale].__setitem__((0, 0), 255))
    model = load(folder, device_map=SOME_ON_DISK)
    with pytest.raises(CheckpointError, match=r"layers\.3.*experts\.2\.w1\.weight_scale"):
        model(prompt())


@pytest.mark.parametrize(
    ("device_map", "named"),
    [
        ("balanced", "balanced"),
        ({"model": "cpu"}, "lm_head"),
        ({"": "cpu", "model.layers.3.self_attn": "disk"}, r"model\.layers\.3\.self_attn"),
        ({"": "cuda:0", "model.layers.3": "cuda:1"}, "one accelerator"),
    ],
)
def test_maps_that_make_no_sense_are_refused(device_map, named):
    with pytest.raises(ValueError, match=named):
        load(GOLDEN / "golden", device_map=device_map)


def test_too_little_memory_for_the_map_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr("kimi_k3.offload.available_memory", lambda device: 1_000_000)
    with pytest.raises(InsufficientResources, match="map more layers to 'disk'"):
        load(GOLDEN / "golden", device_map={"": "cpu", "model.layers.3": "disk"})
