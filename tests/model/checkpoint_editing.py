"""Checkpoints taken apart and put together again with the safetensors package, which our own reader and writer are not."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden"
INDEX = "model.safetensors.index.json"
LAYER1 = "language_model.model.layers.1."
LAYER0 = "language_model.model.layers.0."


def copy_of(name: str, folder: Path) -> Path:
    """A copy of one of the golden checkpoints, as a single file."""
    shutil.copytree(GOLDEN / name, folder)
    return folder


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object], file: str = "model.safetensors") -> Path:
    """Rewrite one shard after `change` has edited its tensors in place."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    return folder


def sharded_copy_of(name: str, folder: Path) -> Path:
    """A copy with one shard for each layer, one for what is outside the layers, and an index."""
    copy_of(name, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        layer = re.search(r"\.layers\.(\d+)\.", key)
        kind = layer[1] if layer else "vision" if key.startswith(("vision_tower", "mm_projector")) else "ends"
        shards.setdefault(kind, {})[key] = tensor
    names = {kind: f"model-{i + 1:05d}-of-{len(shards):06d}.safetensors" for i, kind in enumerate(sorted(shards))}
    for kind, part in shards.items():
        save_file(part, folder / names[kind])
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    weight_map = {key: names[kind] for kind, part in shards.items() for key in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return folder


def shard_of(folder: Path, name: str) -> str:
    return json.loads((folder / INDEX).read_text())["weight_map"][name]


def edit_index(folder: Path, change: Callable[[dict], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def edit_config(folder: Path, change: Callable[[dict], object]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors that a folder's checkpoint holds."""
    if not (folder / INDEX).exists():
        return load_file(folder / "model.safetensors")
    files = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}


def assert_same_bytes(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].shape == tensor.shape, name
        same = torch.equal(actual[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        assert same, name
