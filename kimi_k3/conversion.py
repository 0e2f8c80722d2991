"""`kimi-k3 convert`: from one expert format and shard size to another, matrix by matrix, without loading the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from kimi_k3.configuration_kimi_k3 import KimiK3Config
from kimi_k3.hub import local_folder
from kimi_k3.inventory import open_source
from kimi_k3.saving import PackedMatrix, write_companions
from kimi_k3.shards import (
    DTYPES,
    CheckpointError,
    ShardReader,
    StoredTensor,
    TensorToWrite,
    byte_view,
    write_shards,
)
from kimi_k3.tensor_layout import expected_tensors, layer_of, module_name_of
from kimi_k3_kernels import mxfp4_dequantize, mxfp4_quantize


def convert(
    source: str | Path,
    target: str | Path,
    experts: str | None = None,
    max_shard_size: str | int = "5GB",
    progress: bool = True,
) -> None:
    """Rewrite a checkpoint folder in another expert format or shard size. Everything else is copied byte for byte.

    Args:
        source: a folder.     target: another folder, which need not exist.
        experts: "mxfp4" rounds plain experts to MXFP4 (exact where MXFP4 holds their values); "dequantized" writes them as
            bfloat16 (always exact); None copies them as they are.
        max_shard_size: bytes, or a text such as "5GB"; up to it, one file without an index.
    Raises: ValueError for a wrong argument or checkpoint; FileNotFoundError for a missing source.
    """
    if experts not in (None, "mxfp4", "dequantized"):
        raise ValueError(f"convert: experts: want 'mxfp4', 'dequantized' or None, got {experts!r}")
    origin, folder = local_folder(source), Path(target).expanduser()
    if origin is None:
        raise FileNotFoundError(f"{source}: no such folder")
    if origin.resolve() == folder.resolve():
        raise ValueError(f"convert: want a target other than the source, got {source} twice")
    config = KimiK3Config.from_pretrained(origin)
    stored = open_source(origin).stored
    from huggingface_hub.utils import tqdm

    with ShardReader() as reader:
        tensors = list(_converted(config, stored, reader, experts))
        total = sum(tensor.num_bytes for tensor in tensors)
        with tqdm(total=total, unit="B", unit_scale=True, desc="Converting", disable=None if progress else True) as bar:
            write_shards(folder, tensors, max_shard_size, bar.update)
    write_companions(config, folder, origin, [tensor.name for tensor in tensors])


def _reading_order(config: KimiK3Config, stored: dict[str, StoredTensor]) -> list[StoredTensor]:
    """As the model runs: embedding, layers, the rest; an expert's tensors side by side."""
    places = {name: place for place, name in enumerate(expected_tensors(config, packed=True))}

    def place(tensor: StoredTensor) -> tuple[int, ...]:
        module_name, expert = module_name_of(tensor.name)
        layer = layer_of(module_name)
        if expert is None:
            return (-1 if module_name == "model.embed_tokens.weight" else 10**9 if layer is None else layer,
                    0, 0, places.get(module_name, 0))  # fmt: skip
        stack = module_name.rpartition(".")[2]
        return (-1 if layer is None else layer, 1, expert, int(stack[1]) * 2 + stack.endswith("_scale"))

    return sorted(stored.values(), key=place)


def _converted(
    config: KimiK3Config, stored: dict[str, StoredTensor], reader: ShardReader, experts: str | None
) -> Iterator[TensorToWrite]:
    for tensor in _reading_order(config, stored):
        _, expert = module_name_of(tensor.name)
        if expert is not None and experts == "dequantized" and tensor.name.endswith(".weight_scale"):
            continue
        if expert is not None and experts == "dequantized" and tensor.name.endswith(".weight_packed"):
            name = tensor.name.removesuffix("_packed")
            scale = stored.get(f"{name}_scale")
            if scale is None:
                raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r} has no {name}_scale beside it")
            yield TensorToWrite(
                name, torch.bfloat16, (tensor.shape[0], tensor.shape[1] * 2), _decoded(reader, tensor, scale)
            )
        elif expert is not None and experts == "mxfp4" and tensor.name.endswith(".weight"):
            make = _packed(reader, tensor)
            yield from PackedMatrix(tensor.name.removesuffix(".weight"), make, *tensor.shape).tensors
        else:
            yield TensorToWrite(tensor.name, DTYPES[tensor.dtype], tensor.shape, _copied(reader, tensor))


def _copied(reader: ShardReader, tensor: StoredTensor) -> Callable[[], Iterator[memoryview]]:
    return lambda: reader.pieces(tensor)


def _packed(reader: ShardReader, tensor: StoredTensor) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: mxfp4_quantize(reader.read(tensor))


def _decoded(reader: ShardReader, packed: StoredTensor, scale: StoredTensor) -> Callable[[], list[memoryview]]:
    def pieces() -> list[memoryview]:
        scales = reader.read(scale)
        if (scales == 255).any():
            raise CheckpointError(f"{scale.file}: tensor {scale.name!r}: E8M0 scale 255 (not a number)")
        return [byte_view(mxfp4_dequantize(reader.read(packed), scales))]

    return pieces
