"""Writing checkpoints in the released layout, tensor by tensor: `save_pretrained`."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kimi_k3.configuration_kimi_k3 import MXFP4_GROUP, KimiK3Config
from kimi_k3.hub import COMPANION_FILES
from kimi_k3.inventory import CheckpointSource, open_source
from kimi_k3.shards import (
    DTYPES,
    CheckpointError,
    ShardReader,
    StoredTensor,
    TensorToWrite,
    byte_view,
    produce_pieces,
    write_shards,
)
from kimi_k3.tensor_layout import VISION_PREFIXES, file_name_of, is_expert_stack, module_name_of, released_dtype
from kimi_k3_kernels import mxfp4_dequantize, mxfp4_quantize

logger = logging.getLogger("kimi_k3")

# What the release says of its experts' packing; written where packed experts are saved under a config that lacks it.
QUANTIZATION_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": [
        "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
        "re:.*vision_tower.*", "re:.*mm_projector.*",
    ],
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4, "type": "float", "strategy": "group", "group_size": MXFP4_GROUP, "symmetric": True,
                "dynamic": False, "scale_dtype": "torch.uint8",
            },
        }
    },
}  # fmt: skip


def is_dtensor(tensor: Any) -> bool:
    """Asked without importing torch.distributed.tensor, which takes a second."""
    return hasattr(tensor, "device_mesh")


def save_pretrained(
    model: nn.Module, folder: str | Path, max_shard_size: str | int = "5GB", *, experts: str | None = None
) -> None:
    """Write a checkpoint in the released layout, tensor by tensor.

    Every tensor has the dtype it was loaded from (the release's, for a fresh model), so that untrained ones come back byte
    for byte. Up to `max_shard_size` it is one `model.safetensors`, above that shards with an index. config.json,
    generation_config.json and the tokenizer's files go with it.

    Args:
        max_shard_size: bytes, or a text such as "5GB".
        experts: "mxfp4" or "dequantized" (bfloat16). None: as they were stored; for a fresh model, packed if its config has
            a quantization_config, else dequantized. Packing rounds to nearest; matrices that still equal the source's get
            the source's bytes (or, if the source is gone, codes of equal values, with a warning).

    A model on a mesh (tensor or expert parallel, FSDP2) is saved by all its ranks together into one folder that they share:
    parts travel to rank 0, a tensor at a time, and it writes the same bytes as a model in one process.

    Raises: ValueError for a model of some layers only, or one quantised to int8; CheckpointError if the tensors that the
        class does not hold (vision) must come from a source that is gone or has changed.
    """
    if experts not in (None, "mxfp4", "dequantized"):
        raise ValueError(f"save_pretrained: experts: want 'mxfp4', 'dequantized' or None, got {experts!r}")
    config: KimiK3Config = model.config  # type: ignore[assignment]
    if getattr(model, "lossy_trunk", None) is not None:
        raise ValueError(
            f"save_pretrained: the trunk is quantised ({model.lossy_trunk}), which is lossy: load without trunk="
        )
    held = model.model.layer_range  # type: ignore[union-attr]
    if held != range(config.text_config.num_hidden_layers):
        raise ValueError(f"save_pretrained: this model holds only {held}: load it without layers= to save it")
    folder = Path(folder).expanduser()
    source: CheckpointSource | None = getattr(model, "checkpoint_source", None)
    is_spread = any(is_dtensor(parameter) for parameter in model.parameters())
    is_writer = not is_spread or dist.get_rank() == 0
    with ShardReader() as reader:
        tensors = list(_tensors_to_write(model, config, source, reader, experts, is_writer))
        if is_writer:
            write_shards(folder, tensors, max_shard_size)
        else:
            produce_pieces(tensors, max_shard_size)
    names = [tensor.name for tensor in tensors]
    if is_writer:
        write_companions(config, folder, None if source is None else source.folder, names)
    if is_spread:
        dist.barrier()
    if source is not None and source.folder.resolve() == folder.resolve():
        model.checkpoint_source = open_source(folder, source.carried)  # type: ignore[assignment]


def _tensors_to_write(
    model: nn.Module, config: KimiK3Config, source: CheckpointSource | None, reader: ShardReader, experts: str | None,
    is_writer: bool,
) -> Iterator[TensorToWrite]:  # fmt: skip
    origin = {} if source is None else source.stored
    for module_name, parameter in model.named_parameters():
        if is_expert_stack(module_name):
            continue
        name = file_name_of(module_name)
        stored = origin.get(name)
        dtype = released_dtype(module_name) if stored is None else DTYPES[stored.dtype]
        if parameter.is_meta:
            yield _from_source(source, name, reader)
        else:
            yield TensorToWrite(name, dtype, tuple(parameter.shape), _bytes_of(_whole(parameter), dtype, is_writer))
        if module_name.endswith(".block_sparse_moe.gate.e_score_correction_bias"):
            prefix = module_name.removesuffix("gate.e_score_correction_bias") + "experts."
            module = model.get_submodule(prefix[:-1])
            yield from _experts_to_write(module, prefix, config, source, reader, experts, is_writer)
    for name in () if source is None or not is_writer else source.carried:
        yield _from_source(source, name, reader)


def _whole(parameter: Any) -> Callable[[], Tensor]:
    """The whole of a tensor; of a DTensor every rank asks for it, and gets it."""
    return lambda: (parameter.full_tensor() if is_dtensor(parameter) else parameter).detach()


def _matrix(module: nn.Module, name: str, expert: int) -> Callable[[], Tensor]:
    """One expert's matrix of a stack, as `_whole`."""
    stack: Any = module._parameters[name]  # not the attribute, which on a mesh is the local part
    if "copy_ranks" in module._buffers:
        from kimi_k3.parallel.expert_parallel import expert_matrix

        return lambda: expert_matrix(module, name, expert)
    if is_dtensor(stack) and len(stack.placements) == 1 and stack.placements[0].is_shard(0):
        return lambda: _from_owner(stack, expert)
    if is_dtensor(stack):
        selected: Any = stack.detach()[expert]
        return lambda: selected.full_tensor()
    return lambda: stack[expert].detach()


def _from_owner(stack: Any, expert: int) -> Tensor:
    """One row of a stack that is cut by rows, from the rank that holds it."""
    group, chunk = stack.device_mesh.get_group(), -(-stack.shape[0] // stack.device_mesh.size())
    owner, local = expert // chunk, stack.detach().to_local()
    row = local[expert % chunk].contiguous() if owner == group.rank() else local.new_empty(local.shape[1:])
    dist.broadcast(row, group_src=owner, group=group)
    return row


def _bytes_of(
    produce: Callable[[], Tensor], dtype: torch.dtype, is_writer: bool = True
) -> Callable[[], list[memoryview]]:
    def pieces() -> list[memoryview]:
        tensor = produce()
        return [byte_view(tensor.to("cpu", dtype).contiguous())] if is_writer else []

    return pieces


def _from_source(source: CheckpointSource | None, name: str, reader: ShardReader) -> TensorToWrite:
    if source is None or not source.is_intact(name):
        where = "no checkpoint" if source is None else source.stored[name].file
        raise CheckpointError(
            f"save_pretrained: tensor {name!r} is not held by this model and was to be read from {where}, which is gone or "
            "has changed since loading"
        )
    stored = source.stored[name]
    return TensorToWrite(name, DTYPES[stored.dtype], stored.shape, lambda: reader.pieces(stored))


class PackedMatrix:
    """Codes and scales of one expert matrix, made when the first is written and kept until the second is."""

    def __init__(self, name: str, make: Callable[[], tuple[Tensor, Tensor]], rows: int, columns: int) -> None:
        self._make, self._made = make, None
        self.tensors = (
            TensorToWrite(f"{name}.weight_packed", torch.uint8, (rows, columns // 2), self._codes),
            TensorToWrite(f"{name}.weight_scale", torch.uint8, (rows, columns // MXFP4_GROUP), self._scales),
        )

    _made: tuple[Tensor, Tensor] | None

    def _codes(self) -> list[memoryview]:
        self._made = self._make()
        return [byte_view(self._made[0].contiguous())]

    def _scales(self) -> list[memoryview]:
        made, self._made = self._made or self._make(), None
        return [byte_view(made[1].contiguous())]


def _experts_to_write(
    module: nn.Module, prefix: str, config: KimiK3Config, source: CheckpointSource | None, reader: ShardReader,
    experts: str | None, is_writer: bool,
) -> Iterator[TensorToWrite]:  # fmt: skip
    origin = {} if source is None else source.stored
    if experts is None and source is not None:
        is_packed = file_name_of(f"{prefix}w1_packed", 0) in origin
    else:
        is_packed = experts == "mxfp4" or (experts is None and config.quantization_config is not None)
    parameters = dict(module.named_parameters(recurse=False))
    num_experts = config.text_config.num_experts
    for expert in range(num_experts):
        for name in ("w1", "w2", "w3"):
            matrix = file_name_of(prefix + name, expert)
            stored_names = [file_name_of(f"{prefix}{name}{kind}", expert) for kind in ("_packed", "_scale")]
            pair = [origin[n] for n in stored_names] if all(n in origin for n in stored_names) else None
            stack = parameters.get(name)
            if stack is None:  # packed in the module
                codes, scales = parameters[f"{name}_packed"], parameters[f"{name}_scale"]
                if codes.is_meta:
                    yield from (_from_source(source, n, reader) for n in stored_names)
                elif is_packed:
                    for n, kind, tensor in zip(stored_names, ("_packed", "_scale"), (codes, scales)):
                        pieces = _bytes_of(_matrix(module, name + kind, expert), torch.uint8, is_writer)
                        yield TensorToWrite(n, torch.uint8, tuple(tensor.shape[1:]), pieces)
                else:
                    shape = (codes.shape[1], codes.shape[2] * 2)
                    packed, scale = (_matrix(module, f"{name}{kind}", expert) for kind in ("_packed", "_scale"))
                    yield TensorToWrite(matrix, torch.bfloat16, shape, _decoded(packed, scale, is_writer))
            elif stack.is_meta:
                names = stored_names if pair is not None else [matrix]
                yield from (_from_source(source, n, reader) for n in names)
            elif is_packed:
                intact = source is not None and pair is not None and source.is_intact(stored_names[0])
                make = _repacked(_matrix(module, name, expert), pair if intact else None, reader, is_writer)
                yield from PackedMatrix(matrix.removesuffix(".weight"), make, stack.shape[1], stack.shape[2]).tensors
            else:
                pieces = _bytes_of(_matrix(module, name, expert), torch.bfloat16, is_writer)
                yield TensorToWrite(matrix, torch.bfloat16, tuple(stack.shape[1:]), pieces)
    if source is not None and is_packed and "w1" in parameters and not parameters["w1"].is_meta:
        first = file_name_of(f"{prefix}w1_packed", 0)
        if first in origin and not source.is_intact(first):
            logger.warning(
                "%s is gone or has changed: experts of %s are packed anew, with equal values where they are untrained but "
                "not always the same codes", origin[first].file, prefix,
            )  # fmt: skip


def _decoded(
    codes: Callable[[], Tensor], scales: Callable[[], Tensor], is_writer: bool
) -> Callable[[], list[memoryview]]:
    def pieces() -> list[memoryview]:
        packed, scale = codes(), scales()
        return [byte_view(mxfp4_dequantize(packed.cpu(), scale.cpu()))] if is_writer else []

    return pieces


def _repacked(
    matrix: Callable[[], Tensor], pair: list[StoredTensor] | None, reader: ShardReader, is_writer: bool
) -> Callable[[], tuple[Tensor, Tensor]]:
    """The codes and scales of a plain matrix: the source's own where they decode to it."""

    def make() -> tuple[Tensor, Tensor]:
        current = matrix().cpu()
        if not is_writer:
            return torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
        if pair is not None:
            codes, scales = (reader.read(stored) for stored in pair)
            if torch.equal(mxfp4_dequantize(codes, scales, current.dtype), current):
                return codes, scales
        return mxfp4_quantize(current)

    return make


def write_companions(config: KimiK3Config, folder: Path, source: Path | None, names: list[str]) -> None:
    """Write config.json, generation_config.json and the tokenizer's files.

    config.json says of the experts and of vision what the shards hold: a text model with fresh weights has no vision part,
    whatever the configuration that it was built from.
    """
    has_packed = any(name.endswith(".weight_packed") for name in names)
    has_plain = any(module_name_of(name)[1] is not None and name.endswith(".weight") for name in names)
    config = copy.deepcopy(config)
    if config.vision_config is not None and not any(name.startswith(VISION_PREFIXES) for name in names):
        config.vision_config = None
    if has_packed and config.quantization_config is None:
        config.text_config = dataclasses.replace(
            config.text_config, quantization_config=copy.deepcopy(QUANTIZATION_CONFIG)
        )
    elif has_plain and not has_packed:
        config.extra.pop("quantization_config", None)
        config.text_config = dataclasses.replace(config.text_config, quantization_config=None)
    is_in_place = source is not None and source.resolve() == folder.resolve()
    if is_in_place:
        source = None
    old_config = None if source is None else source / "config.json"
    if old_config is not None and old_config.exists() and KimiK3Config.from_pretrained(old_config.parent) == config:
        shutil.copyfile(old_config, folder / "config.json")
    else:
        config.save_pretrained(folder)
    for name in COMPANION_FILES:
        if source is not None and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    generation = folder / "generation_config.json"
    if not is_in_place and (source is None or not (source / generation.name).is_file()):
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        values = {key: config._token_id(key) for key in keys}
        generation.write_text(json.dumps({k: v for k, v in values.items() if v is not None}, indent=2) + "\n")
