"""Checkpoints in the released layout, streamed in and out: never a second copy of the model.

Loading builds the model on the meta device, checks names, sizes, shapes and dtypes of everything it is about to read, and
then fills one parameter after another from plain file reads. What a tensor is, is decided by what the shards hold.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kimi_k3.configuration_kimi_k3 import MXFP4_GROUP, KimiK3Config
from kimi_k3.hub import COMPANION_FILES, HubOptions, push_to_hub, resolve_file, resolve_files
from kimi_k3.inventory import (
    CheckpointSource,
    check_stored,
    check_values,
    find_index,
    packed_layers_of,
    read_headers,
    signature_of,
    some_of,
)
from kimi_k3.layers.moe import KimiK3Experts
from kimi_k3.preflight import available_memory, check_memory
from kimi_k3.saving import is_dtensor, save_pretrained
from kimi_k3.shards import DTYPES, INDEX_FILE, SINGLE_FILE, CheckpointError, Region, ShardReader, StoredTensor
from kimi_k3.tensor_layout import (
    VISION_PREFIXES,
    TensorSpec,
    expected_tensors,
    file_name_of,
    is_expert_stack,
    is_in_stage,
    layer_of,
    module_name_of,
    released_dtype,
)
from kimi_k3_kernels import mxfp4_dequantize

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("kimi_k3")

Model = TypeVar("Model", bound=nn.Module)
FLOAT_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
MOST_READERS = 4  # threads that fill a CPU's memory; copying out of the page cache takes one core 1 GB/s and less
HUGE_PAGE, MADV_HUGEPAGE = 2 << 20, 14  # bytes; the number in Linux's uapi/asm-generic/mman-common.h


class LoadPart(NamedTuple):
    """One read: into all of a module tensor, or into one expert's slice of it."""

    module_name: str
    expert: int | None  # its place in the stack that is being filled
    stored: StoredTensor
    scale: StoredTensor | None = None  # of packed bytes that are decoded on the way
    region: Region | None = None  # on a mesh: the part of this (decoded) matrix that the rank holds

    @property
    def num_bytes(self) -> int:
        """Bytes that are read for it."""
        total = self.stored.num_bytes + (0 if self.scale is None else self.scale.num_bytes)
        if self.region is None:
            return total
        whole = self.stored.shape[self.region.dim] * (2 if self.scale is not None and self.region.dim == 1 else 1)
        return total * self.region.length // whole


class ReadPlan(NamedTuple):
    model: Any
    parts: list[LoadPart]  # in file order
    tensors: dict[str, TensorSpec]  # the shape and dtype of each parameter, or of this rank's part of it
    source: CheckpointSource


def load_pretrained(
    cls: type[Model],
    path_or_repo: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    mesh: Any = None,
    experts: str = "mxfp4",
    trunk: str | None = None,
    expert_activations: str | None = None,
    layers: range | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    verify: str | None = "size",
    progress: bool = True,
) -> Model:
    """Open a checkpoint from a folder or a Hub repository.

    Args:
        cls: KimiK3ForCausalLM or KimiK3ForConditionalGeneration. What a text class does not hold (vision) is remembered,
            and streamed from the source on save.
        dtype: "auto" keeps the stored dtypes. torch.bfloat16 does so for the tensors that the release keeps in float32;
            torch.float32 and torch.float64 convert everything (but packed experts).
        device: of all parameters; default: torch's default device, or the mesh's.
        mesh: a DeviceMesh with axes "tp" or "ep" (`kimi_k3.parallel.make_mesh`): every parameter becomes a DTensor, placed by
            the table in parallel/tensor_parallel.py, and each rank reads its own bytes only. Every rank calls it.
        device_map: "auto" or module name -> device, "cpu" or "disk", through accelerate; what is on "disk" is read from
            the checkpoint's own shards when its layer runs. Final norms and head stay on the main device.
        experts: "mxfp4" keeps packed bytes. A layer that is stored with plain experts stays plain, and a warning says so.
            "dequantized" gives plain experts everywhere: bfloat16 with "auto", else in `dtype`.
        trunk: "int8" quantises the linear layers outside experts, router and head (torchao, weight only): lossy.
        expert_activations: "int8" rounds what the packed experts read to int8 by groups of 32: lossy, the weights stay.
        layers: a contiguous range of layers (from 0), reading only their shards; the embedding comes with layer 0, final
            norms and head with the last. Such a model cannot be saved.
        revision, cache_dir, token, local_files_only: for the Hub, as in huggingface_hub.
        verify: "size" compares file sizes with headers and the index; "sha256" also hashes every shard against the Hub's
            metadata, the names of the Hub's cache or a SHA256SUMS file; None leaves out the index's total.
        progress: show a progress bar on a terminal (never with HF_HUB_DISABLE_PROGRESS_BARS).

    Raises:
        InsufficientResources: before anything is downloaded or read that cannot fit.
        CheckpointError (a ValueError): file and tensor that are missing, unexpected, doubled, truncated or wrong.
        FileNotFoundError: no such folder, repository or file.
        ValueError: an argument that is none of the above, or sizes that the mesh cannot cut.
    """
    _check_options(dtype, mesh, experts, trunk, expert_activations, verify, device, device_map, layers)
    hub = HubOptions(revision, cache_dir, token, local_files_only)
    config = KimiK3Config.from_pretrained(path_or_repo, **hub._asdict())
    text = config.text_config
    layers = range(text.num_hidden_layers) if layers is None else layers
    if device is None:
        target = torch.get_default_device() if mesh is None else _device_of(mesh)
    else:
        target = _usable_device(device)

    if device_map is None:  # a first look, from the config alone: no index, no download
        packed = config.quantization_config is not None and experts == "mxfp4"
        outline = {n: s for n, s in expected_tensors(config, packed).items() if not n.startswith(VISION_PREFIXES)}
        if mesh is not None:
            from kimi_k3.parallel.tensor_parallel import check_sizes, local_shape

            check_sizes(text, mesh)
            outline = {n: TensorSpec(local_shape(n, s.shape, mesh), s.dtype) for n, s in outline.items()}
        check_memory(config, outline, {n: _loaded_dtype(n, s.dtype, dtype) for n, s in outline.items()}, layers, target)

    model, parts, plan, source = plan_reads(
        cls, path_or_repo, config=config, dtype=dtype, mesh=mesh, experts=experts, layers=layers, hub=hub, verify=verify
    )
    if device_map is not None:
        from kimi_k3.offload import load_dispatched

        load_dispatched(model, device_map, parts, plan, progress)
    else:
        check_memory(config, plan, {name: spec.dtype for name, spec in plan.items()}, layers, target)
        source.bytes_read = load_parts(model, parts, plan, target, progress)
    _assert_complete(model, allow_meta=device_map is not None)
    model.checkpoint_source = source
    generation = source.folder / "generation_config.json"
    if generation.is_file():
        model.generation_config = json.loads(generation.read_text())
    if trunk == "int8":
        from kimi_k3.quantization import quantize_trunk_int8_

        quantize_trunk_int8_(model)
    if expert_activations == "int8":
        from kimi_k3.quantization import quantize_expert_activations_int8_

        quantize_expert_activations_int8_(model)
    return model.eval()


def plan_reads(
    cls: type[Model],
    path_or_repo: str | Path,
    *,
    config: KimiK3Config | None = None,
    dtype: str | torch.dtype = "auto",
    mesh: DeviceMesh | None = None,
    experts: str = "mxfp4",
    layers: range | None = None,
    hub: HubOptions | None = None,
    verify: str | None = "size",
) -> ReadPlan:
    """A model without values, and every read that fills it: this rank's alone, on a mesh. Reads headers and index only.

    Arguments and errors as `load_pretrained`.
    """
    hub = HubOptions() if hub is None else hub
    config = KimiK3Config.from_pretrained(path_or_repo, **hub._asdict()) if config is None else config
    layers = range(config.text_config.num_hidden_layers) if layers is None else layers
    index = find_index(path_or_repo, hub)
    packed_layers = packed_layers_of(index)
    _report_disagreement(config, packed_layers)
    model = _meta_model(cls, config, experts, packed_layers, layers)
    if mesh is not None:
        from kimi_k3.parallel.tensor_parallel import parallelize

        parallelize(model, mesh)
    where = f"{path_or_repo}: {SINGLE_FILE if set(index.weight_map.values()) == {SINGLE_FILE} else INDEX_FILE}"
    needed, carried = _select_tensors(model, config, index.weight_map, packed_layers, layers, where)

    shards = {index.weight_map[name] for name in (*needed, *carried)}
    folder = resolve_files(path_or_repo, shards | set(COMPANION_FILES), hub)
    stored = read_headers(
        folder, index, shards, is_whole=len(shards) == len(set(index.weight_map.values())), verify=verify
    )
    _check_tensors(model, config, {name: stored[name] for name in (*needed, *carried)})
    if verify == "sha256":
        from kimi_k3.verification import check_sha256

        check_sha256(path_or_repo, folder, sorted(shards), hub)
    source = CheckpointSource(
        folder, {name: stored[name] for name in (*needed, *carried)}, tuple(carried),
        {folder / shard: signature_of(folder / shard) for shard in shards},
    )  # fmt: skip
    parts = _parts(model, needed, stored)
    plan = _planned_tensors(model, parts, dtype)

    return ReadPlan(model, parts, plan, source)


def _check_options(
    dtype: str | torch.dtype, mesh: Any, experts: str, trunk: str | None, expert_activations: str | None,
    verify: str | None, device: str | torch.device | None, device_map: str | dict[str, Any] | None, layers: range | None,
) -> None:  # fmt: skip
    if mesh is not None and not hasattr(mesh, "mesh_dim_names"):
        raise ValueError(f"from_pretrained: mesh: want a DeviceMesh (kimi_k3.parallel.make_mesh), got {mesh!r}")
    if mesh is not None and (trunk is not None or device_map is not None):
        raise ValueError("from_pretrained: want mesh, or one of trunk and device_map, got both")
    if dtype != "auto" and dtype not in FLOAT_DTYPES:
        raise ValueError(f"from_pretrained: dtype: want 'auto' or one of {FLOAT_DTYPES}, got {dtype!r}")
    for name, given, allowed in (
        ("experts", experts, ("mxfp4", "dequantized")),
        ("trunk", trunk, (None, "int8")),
        ("expert_activations", expert_activations, (None, "int8")),
        ("verify", verify, ("size", "sha256", None)),
    ):
        if given not in allowed:
            raise ValueError(f"from_pretrained: {name}: want one of {allowed}, got {given!r}")
    if expert_activations is not None and (mesh is not None or experts == "dequantized"):
        given = "mesh" if mesh is not None else "experts='dequantized'"
        raise ValueError(f"from_pretrained: expert_activations: want packed experts in one process, got {given} too")
    if layers is not None and not isinstance(layers, range):
        raise ValueError(f"from_pretrained: layers: want a range such as range(0, 4), got {layers!r}")
    if device is not None and device_map is not None:
        raise ValueError(
            f"from_pretrained: want device or device_map, got device={device!r} and device_map={device_map!r}"
        )
    if trunk is not None and device_map is not None:
        raise ValueError("from_pretrained: want trunk or device_map: offloaded weights stay as they are stored")


def _device_of(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def _usable_device(device: str | torch.device) -> torch.device:
    try:
        wanted = torch.device(device)
        if wanted.type == "meta":
            raise RuntimeError("meta holds no values")
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch built without that kind of device
        reason = str(error).splitlines()[0]
        raise ValueError(f"from_pretrained: device: want one that this torch has, got {device!r}: {reason}") from error
    return wanted


def _loaded_dtype(module_name: str, stored: torch.dtype, dtype: str | torch.dtype) -> torch.dtype:
    if stored == torch.uint8 or dtype == "auto":
        return stored
    assert isinstance(dtype, torch.dtype)
    if dtype == torch.bfloat16 and released_dtype(module_name) == torch.float32:
        return torch.float32
    return dtype


def _report_disagreement(config: KimiK3Config, packed_layers: dict[int, bool]) -> None:
    quantization = config.quantization_config
    packed = [layer for layer, is_packed in packed_layers.items() if is_packed]
    plain = [layer for layer, is_packed in packed_layers.items() if not is_packed]
    if quantization is None and packed:
        logger.warning("config.json has no quantization_config, but the shards hold MXFP4 experts; loaded as packed")
    if quantization is not None and plain:
        logger.warning("config.json says MXFP4, but the shards hold plain experts in layers %s; loaded as plain", plain)
    for pattern in [] if quantization is None else quantization.get("ignore", []):
        if not pattern.startswith("re:"):
            continue
        hit = [
            n for n in packed if re.match(pattern[3:], file_name_of(f"model.layers.{n}.block_sparse_moe.experts.w1", 0))
        ]
        if hit:
            logger.warning("config.json ignores %r, but the shards hold packed experts there (layers %s)", pattern, hit)


class _NoDraws(TorchFunctionMode):
    """Leaves random fills out: on meta tensors they do nothing but import torch's compiler, for seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _meta_model(
    cls: type[Model], config: KimiK3Config, experts: str, packed_layers: dict[int, bool], layers: range
) -> Model:
    keeps_packed = experts == "mxfp4" and any(packed_layers.get(layer, False) for layer in layers)
    with torch.device("meta"), _NoDraws():
        model = cls(config, experts="mxfp4" if keeps_packed else "dequantized", layers=layers)
        plain = [layer for layer in layers if not packed_layers.get(layer, True)]
        if experts == "mxfp4" and plain:
            logger.warning(
                "experts='mxfp4' was asked for, but layers %s are stored with plain experts and stay so", plain
            )
        for layer in plain if keeps_packed else []:
            block = model.get_submodule(f"model.layers.{layer}.block_sparse_moe")
            block.experts = KimiK3Experts(config.text_config, packed=False)
    return model


def _needed_names(model: nn.Module, num_experts: int, packed_layers: dict[int, bool]) -> list[str]:
    """The file names that fill the model's parameters; plain experts of a packed layer are filled by codes and scales."""
    needed: list[str] = []
    for module_name, _ in model.named_parameters():
        if not is_expert_stack(module_name):
            needed.append(file_name_of(module_name))
            continue
        is_decoded = not module_name.endswith(("_packed", "_scale")) and packed_layers.get(
            layer_of(module_name) or 0, False
        )
        stacks = (f"{module_name}_packed", f"{module_name}_scale") if is_decoded else (module_name,)
        needed += [file_name_of(stack, expert) for expert in range(num_experts) for stack in stacks]
    return needed


def _select_tensors(
    model: nn.Module,
    config: KimiK3Config,
    weight_map: dict[str, str],
    packed_layers: dict[int, bool],
    layers: range,
    where: str,
) -> tuple[list[str], list[str]]:
    """File names that the model needs, and those it only carries. Everything else must belong to other layers."""
    num_experts, num_layers = config.text_config.num_experts, config.text_config.num_hidden_layers
    needed = _needed_names(model, num_experts, packed_layers)
    known = expected_tensors(config, packed=True).keys() | expected_tensors(config, packed=False).keys()
    wanted, carried, unexpected = set(needed), [], []
    for name in weight_map:
        if name in wanted:
            continue
        module_name, expert = module_name_of(name)
        is_known = module_name in known and is_expert_stack(module_name) == (expert is not None)
        is_known = is_known and (expert is None or expert < num_experts) and file_name_of(module_name, expert) == name
        if is_known and module_name.startswith(VISION_PREFIXES):
            if layers == range(num_layers):
                carried.append(name)
        elif not is_known or is_in_stage(module_name, layers, num_layers):
            unexpected.append(f"{name} (in {weight_map[name]})")
    missing = [name for name in needed if name not in weight_map]
    if carried:
        missing += [name for name in known if name.startswith(VISION_PREFIXES) and name not in weight_map]
    problems = [f"missing {some_of(missing)}"] if missing else []
    problems += [f"unexpected, no part of this model: {some_of(unexpected)}"] if unexpected else []
    if problems:
        raise CheckpointError(f"{where}: {'; '.join(problems)}")
    return needed, carried


def _check_tensors(model: nn.Module, config: KimiK3Config, stored: dict[str, StoredTensor]) -> None:
    expected = expected_tensors(config, packed=True) | expected_tensors(config, packed=False)
    for name, tensor in stored.items():
        module_name, expert = module_name_of(name)
        spec = expected[module_name]
        shape = spec.shape if expert is None else spec.shape[1:]
        check_stored(tensor, shape, spec.dtype, module_name, config.text_config.kda_num_heads)


def _parts(model: nn.Module, needed: list[str], stored: dict[str, StoredTensor]) -> list[LoadPart]:
    """The reads that fill the model, in file order."""
    held = dict(model.named_parameters())
    parts = []
    for name in needed:
        module_name, expert = module_name_of(name)
        if module_name in held:
            parts.append(LoadPart(module_name, expert, stored[name]))
        elif module_name.endswith("_packed"):
            scale = file_name_of(module_name.removesuffix("_packed") + "_scale", expert)
            parts.append(LoadPart(module_name.removesuffix("_packed"), expert, stored[name], stored[scale]))
    boxes = {name: _box_of(parameter) for name, parameter in held.items()}
    parts = [local for part in parts if (local := _local_part(part, boxes[part.module_name])) is not None]
    return sorted(parts, key=lambda part: (part.stored.file, part.stored.start))


class Box(NamedTuple):
    """This rank's part of a DTensor."""

    whole: tuple[int, ...]
    shape: tuple[int, ...]
    offset: tuple[int, ...]


def _box_of(parameter: Any) -> Box | None:
    if not is_dtensor(parameter):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return Box(tuple(parameter.shape), tuple(shape), tuple(offset))


def _local_part(part: LoadPart, box: Box | None) -> LoadPart | None:
    """What of a read this rank's part of a parameter needs; None: nothing."""
    if box is None:
        return part
    whole, shape, offset = box
    expert = part.expert
    if expert is not None:
        if not offset[0] <= expert < offset[0] + shape[0]:
            return None
        part = part._replace(expert=expert - offset[0])
        shape, offset, whole = shape[1:], offset[1:], whole[1:]
    cut = [dim for dim in range(len(whole)) if shape[dim] != whole[dim]]
    if not cut:
        return part
    (dim,) = cut  # every parameter lies on one axis
    return part._replace(region=Region(dim, offset[dim], shape[dim])) if shape[dim] else None


def _planned_tensors(model: nn.Module, parts: list[LoadPart], dtype: str | torch.dtype) -> dict[str, TensorSpec]:
    """The shape and dtype that each parameter will have: of this rank's part, on a mesh."""
    held = dict(model.named_parameters())
    shapes = {name: tuple(local.shape) for name, local in zip(held, map(_local_of, held.values()))}
    plan = {}
    for part in parts:
        if part.module_name in plan:
            continue
        plain = DTYPES[part.stored.dtype] if part.scale is None else torch.bfloat16
        is_stored_whole = part.expert is None and part.region is None
        shape = part.stored.shape if is_stored_whole else shapes[part.module_name]
        plan[part.module_name] = TensorSpec(shape, _loaded_dtype(part.module_name, plain, dtype))
    return plan


def _local_of(parameter: Any) -> Tensor:
    return parameter._local_tensor if is_dtensor(parameter) else parameter


def read_part(reader: ShardReader, part: LoadPart, destination: Tensor, a_log_heads: int) -> None:
    """Read one part into its tensor (or its expert's slice of it), decoding if it has a scale, and check its values."""
    region = part.region
    if part.scale is not None:
        if region is None:
            packed, scale = reader.read(part.stored), reader.read(part.scale)
        else:
            per_byte, group = (2, MXFP4_GROUP) if region.dim == 1 else (1, 1)
            packed, scale = (
                reader.read_region(stored, Region(region.dim, region.start // unit, region.length // unit))
                for stored, unit in ((part.stored, per_byte), (part.scale, group))
            )
        check_values(part.scale, f"{part.module_name}_scale", scale, a_log_heads)
        destination.copy_(mxfp4_dequantize(packed, scale, destination.dtype))
        return
    if region is None:
        reader.read_into(part.stored, destination)
    else:
        destination.copy_(reader.read_region(part.stored, region))
    check_values(part.stored, part.module_name, destination, a_log_heads)


def set_parameter(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    old: Any = owner._parameters[leaf]  # not the attribute, which on a mesh is the local part
    if is_dtensor(old):
        from torch.distributed.tensor import DTensor

        # A replicated one may be stored longer than it was built (A_log).
        meta = torch.empty(old.shape if any(p.is_shard() for p in old.placements) else tensor.shape, device="meta")
        tensor = DTensor.from_local(
            tensor, old.device_mesh, old.placements, run_check=False, shape=meta.shape, stride=meta.stride()
        )
    owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=old.requires_grad))


def _is_cache_to_be_dropped(parts: list[LoadPart]) -> bool:
    """Page cache is worth keeping, for the next load, only if files and model fit side by side."""
    return 2 * sum(part.num_bytes for part in parts) > available_memory(torch.device("cpu"))


def _empty(spec: TensorSpec, device: torch.device) -> Tensor:
    """Memory for one parameter; on a CPU in huge pages where Linux has them: decode is bound by reading the weights,
    and with pages of 4 KiB much of that time goes into page tables."""
    tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device)
    if device.type == "cpu" and _madvise is not None:
        # Whole huge pages inside the tensor, so that none reaches memory which nobody asked for.
        start = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        end = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE * HUGE_PAGE
        if start < end:
            _madvise(
                start, end - start, MADV_HUGEPAGE
            )  # advice: a kernel without huge pages refuses, and nothing is lost
    return tensor


def _linux_madvise() -> Any:
    if sys.platform != "linux":
        return None
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


_madvise = _linux_madvise()


@torch.no_grad()
def load_parts(
    model: nn.Module, parts: list[LoadPart], plan: dict[str, TensorSpec], device: torch.device, progress: bool
) -> int:
    """Give the planned parameters memory on a device and fill them, shard by shard; on a CPU a few shards
    at once. Returns the bytes read for them."""
    from huggingface_hub.utils import tqdm

    config: KimiK3Config = model.config  # type: ignore[assignment]
    heads = config.text_config.kda_num_heads
    filled: dict[str, Tensor] = {}
    total = sum(part.num_bytes for part in parts)
    drop_cache = _is_cache_to_be_dropped(parts)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="Loading", disable=None if progress else True)
    lock, stopped = Lock(), Event()  # of `filled` and the bar; set when one shard failed

    def load_shard(shard: list[LoadPart]) -> int:
        try:
            with ShardReader(drop_cache) as reader:
                for part in shard:
                    if stopped.is_set():
                        break
                    with lock:
                        tensor = filled.get(part.module_name)
                        if tensor is None:
                            tensor = filled[part.module_name] = _empty(plan[part.module_name], device)
                    read_part(reader, part, tensor if part.expert is None else tensor[part.expert], heads)
                    with lock:
                        bar.update(part.num_bytes)
                return reader.bytes_read
        except BaseException:
            stopped.set()
            raise

    shards = [list(shard) for _, shard in groupby(parts, key=lambda part: part.stored.file)]
    readers = min(MOST_READERS, os.cpu_count() or 1) if device.type == "cpu" else 1
    with bar, ThreadPoolExecutor(readers) as pool:
        try:
            bytes_read = sum(pool.map(load_shard, shards))
        except BaseException:  # Ctrl-C too: no reader goes on to the end of its shard
            stopped.set()
            raise
    for name, tensor in filled.items():
        set_parameter(model, name, tensor)
    return bytes_read


def _assert_complete(model: nn.Module, allow_meta: bool) -> None:
    named = [*model.named_parameters(), *model.named_buffers()]
    left = [name for name, tensor in named if _local_of(tensor).is_meta]
    assert allow_meta or not left, f"no values for {left}"


__all__ = [
    "CheckpointError",
    "load_pretrained",
    "push_to_hub",
    "resolve_file",
    "resolve_files",
    "save_pretrained",
]
