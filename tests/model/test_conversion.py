"""convert: between expert formats and shard sizes, exact, a matrix at a time."""

import subprocess
import sys
import textwrap

import pytest
import torch
from checkpoint_editing import GOLDEN, assert_same_bytes, copy_of, edit, sharded_copy_of, tensors_of

from kimi_k3 import KimiK3Config, KimiK3ForCausalLM
from kimi_k3.conversion import convert
from kimi_k3.shards import CheckpointError
from kimi_k3.verification import verify_folder

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def decode_by_loops(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Spec section 6, element by element."""
    rows, half = packed.shape
    out = torch.empty(rows, 2 * half, dtype=torch.float64)
    for row in range(rows):
        for column in range(2 * half):
            code = (int(packed[row, column // 2]) >> (4 * (column % 2))) & 15
            out[row, column] = (-1 if code & 8 else 1) * E2M1[code & 7] * 2.0 ** (int(scale[row, column // 32]) - 127)
    return out


@pytest.mark.parametrize("name", ["golden", "vision"])
def test_there_and_back_is_exact(tmp_path, name):
    source = sharded_copy_of(name, tmp_path / "source")
    convert(source, tmp_path / "plain", experts="dequantized", max_shard_size="900KB", progress=False)
    convert(tmp_path / "plain", tmp_path / "packed", experts="mxfp4", progress=False)
    plain, stored = tensors_of(tmp_path / "plain"), tensors_of(GOLDEN / name)
    for matrix in ("layers.1.block_sparse_moe.experts.0.w1", "layers.8.block_sparse_moe.experts.15.w2"):
        stem = f"language_model.model.{matrix}.weight"
        wanted = decode_by_loops(stored[f"{stem}_packed"], stored[f"{stem}_scale"])
        assert plain[stem].dtype == torch.bfloat16 and torch.equal(plain[stem].double(), wanted)
    assert_same_bytes(tensors_of(tmp_path / "packed"), stored)
    for folder, is_packed in (("plain", False), ("packed", True)):
        assert verify_folder(tmp_path / folder).is_whole
        assert verify_folder(tmp_path / folder).notes == []
        assert (KimiK3Config.from_pretrained(tmp_path / folder).quantization_config is not None) == is_packed
        assert (tmp_path / folder / "tiktoken.model").read_bytes() == (GOLDEN / name / "tiktoken.model").read_bytes()


def test_other_shard_sizes_keep_every_byte(tmp_path):
    convert(GOLDEN / "golden", tmp_path / "small", max_shard_size="400KB", progress=False)
    assert len(list((tmp_path / "small").glob("model-*-of-*.safetensors"))) >= 7
    assert_same_bytes(tensors_of(tmp_path / "small"), tensors_of(GOLDEN / "golden"))
    convert(tmp_path / "small", tmp_path / "one", progress=False)
    assert [p.name for p in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]
    assert_same_bytes(tensors_of(tmp_path / "one"), tensors_of(GOLDEN / "golden"))
    KimiK3ForCausalLM.from_pretrained(tmp_path / "small", progress=False)


def test_wrong_arguments_and_damaged_sources_are_refused(tmp_path):
    with pytest.raises(ValueError, match="experts"):
        convert(GOLDEN / "golden", tmp_path / "x", experts="bf16")
    with pytest.raises(ValueError, match="target other than the source"):
        convert(GOLDEN / "golden", GOLDEN / "golden")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        convert(tmp_path / "nowhere", tmp_path / "x")
    scale = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_scale"
    folder = edit(copy_of("golden", tmp_path / "bad"), lambda t: t[scale].__setitem__((0, 0), 255))
    with pytest.raises(CheckpointError, match=r"experts\.0\.w1\.weight_scale.*255"):
        convert(folder, tmp_path / "y", experts="dequantized", progress=False)
    assert not list((tmp_path / "y").glob("*"))


MEASURE = """
    import sys
    from kimi_k3.conversion import convert

    def peak():
        return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

    imported = peak()
    convert(sys.argv[1], sys.argv[2], experts="dequantized", max_shard_size="1GB", progress=False)
    print(peak() - imported)
"""


@pytest.mark.slow
def test_converting_mid_takes_little_memory(mid_folder, tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(mid_folder), str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(output) <= 300 * 2**20  # of 5 GB written: one matrix, one copying buffer, the plan
    assert verify_folder(tmp_path).is_whole
