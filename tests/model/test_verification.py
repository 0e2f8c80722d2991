"""verify_folder: a whole checkpoint is whole; every kind of damage is named; nothing is a surprise at load."""

import subprocess

import pytest
import torch
from checkpoint_editing import GOLDEN, LAYER1, copy_of, edit, edit_config, edit_index, shard_of, sharded_copy_of
from test_checkpoint_load import DAMAGE, NAMED

from kimi_k3.verification import verify_folder


@pytest.mark.parametrize("name", ["golden", "smooth", "vision"])
def test_the_golden_checkpoints_are_whole(tmp_path, name):
    for folder in (GOLDEN / name, sharded_copy_of(name, tmp_path / name)):
        report = verify_folder(folder)
        assert report.is_whole and report.problems == [] and report.notes == []
        assert report.num_tensors == sum(report.tensors_by_dtype.values())
        assert report.file_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("damage", [d for d in DAMAGE if d != "scale 255"])  # that one is seen when it is loaded
def test_damage_is_named_with_its_file(tmp_path, damage):
    report = verify_folder(edit(copy_of("golden", tmp_path / "damaged"), DAMAGE[damage]))
    assert not report.is_whole
    assert any(NAMED[damage] in problem and "model.safetensors" in problem for problem in report.problems)


def test_a_missing_a_truncated_and_a_renamed_entry_are_all_in_one_report(tmp_path):
    folder = sharded_copy_of("golden", tmp_path / "s")
    shards = [shard_of(folder, f"language_model.model.layers.{layer}.mlp_res_norm.weight") for layer in range(9)]
    (folder / shards[1]).unlink()
    raw = (folder / shards[2]).read_bytes()
    (folder / shards[2]).write_bytes(raw[:-7])
    name = "language_model.model.layers.3.mlp_res_norm.weight"
    edit(folder, lambda t: t.update({f"{name}s": t.pop(name)}), shards[3])
    edit(folder, lambda t: t.update({name: torch.zeros(128, dtype=torch.bfloat16)}), shards[4])
    edit_index(folder, lambda index: index["metadata"].update(total_size=5))
    problems = "\n".join(verify_folder(folder).problems)
    assert f"{shards[1]}: this shard is missing" in problems
    assert f"{shards[2]}: truncated" in problems
    assert f"lacks tensor '{name}'" in problems and f"unexpected tensor '{name}s'" in problems
    assert shards[4] in problems and f"by the index, in {shards[3]}" in problems
    assert "total_size is 5" in problems


def test_what_the_index_lacks_or_has_too_much_is_named(tmp_path):
    folder = sharded_copy_of("vision", tmp_path / "s")
    edit_index(folder, lambda index: index["weight_map"].pop("mm_projector.post_norm.weight"))
    edit_index(
        folder, lambda index: index["weight_map"].update({"language_model.x": "model-00099-of-000099.safetensors"})
    )
    problems = "\n".join(verify_folder(folder).problems)
    assert "missing tensor 'mm_projector.post_norm.weight'" in problems
    assert "unexpected tensor 'language_model.x'" in problems
    assert "model-00099-of-000099.safetensors: this shard is missing" in problems


def test_other_files_and_disagreement_with_the_config_are_notes(tmp_path):
    folder = copy_of("golden", tmp_path / "s")
    (folder / "adapter.safetensors").write_bytes(b"anything")
    edit_config(folder, lambda config: config["text_config"].pop("quantization_config"))
    report = verify_folder(folder)
    assert report.is_whole
    assert "adapter.safetensors" in "\n".join(report.notes) and "are packed" in "\n".join(report.notes)


def test_checksums(tmp_path):
    folder = copy_of("golden", tmp_path / "s")
    report = verify_folder(folder, sha256=True)
    assert report.is_whole and report.checksums == "0 of 1 shards hashed"
    assert "no SHA-256 is known" in report.notes[0]
    output = subprocess.run(["sha256sum", "model.safetensors"], cwd=folder, capture_output=True, text=True, check=True)
    (folder / "SHA256SUMS").write_text(output.stdout)
    report = verify_folder(folder, sha256=True)
    assert report.is_whole and report.checksums == "1 of 1 shards hashed" and report.notes == []
    edit(folder, lambda t: t[f"{LAYER1}input_layernorm.weight"].add_(1))
    assert verify_folder(folder).is_whole
    assert any("SHA-256 differs" in problem for problem in verify_folder(folder, sha256=True).problems)


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        verify_folder(tmp_path)
    (tmp_path / "config.json").write_bytes((GOLDEN / "golden" / "config.json").read_bytes())
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        verify_folder(tmp_path)
