"""`device_map`: part of the layers on the CPU or left on disk, through accelerate's hooks.

What is on "disk" is read from the checkpoint's own shards whenever its layer runs: no second copy of the weights is ever
written. The unit is a decoder layer, all of it: its submodules read some weights of each other directly, so a hook on a
smaller module would not always run. Final norms and head stay on the main device, whatever the map says of them. This is
for running at all, not for speed, and hooks end compiled graphs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kimi_k3.checkpoint import LoadPart, load_parts, read_part, set_parameter
from kimi_k3.preflight import InsufficientResources, available_memory, gigabytes
from kimi_k3.shards import ShardReader
from kimi_k3.tensor_layout import TensorSpec

DISK = "disk"


class ShardWeights(Mapping[str, Tensor]):
    """Parameters by name, each put together from its shards when it is asked for, or kept in host memory."""

    def __init__(
        self, parts: list[LoadPart], plan: dict[str, TensorSpec], in_memory: dict[str, Tensor], a_log_heads: int
    ) -> None:
        self._parts: dict[str, list[LoadPart]] = defaultdict(list)
        for part in parts:
            self._parts[part.module_name].append(part)
        self._plan, self._in_memory, self._a_log_heads = plan, in_memory, a_log_heads

    def __getitem__(self, name: str) -> Tensor:
        if name in self._in_memory:
            return self._in_memory[name]
        if name not in self._parts:
            raise KeyError(name)
        tensor = torch.empty(self._plan[name].shape, dtype=self._plan[name].dtype)
        with ShardReader() as reader, torch.no_grad():
            for part in self._parts[name]:
                read_part(reader, part, tensor if part.expert is None else tensor[part.expert], self._a_log_heads)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts.keys() | self._in_memory.keys())

    def __len__(self) -> int:
        return len(self._parts.keys() | self._in_memory.keys())


def load_dispatched(
    model: nn.Module,
    device_map: str | dict[str, Any],
    parts: list[LoadPart],
    plan: dict[str, TensorSpec],
    progress: bool,
) -> None:
    """Load what the map keeps in memory, and hook what it leaves on the CPU (beside an accelerator) or on disk."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
    from accelerate.utils import PrefixedDataset

    for name, spec in plan.items():  # the sizes that accelerate counts, and what a hook puts back after a layer ran
        set_parameter(model, name, torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
    units = _units(model)
    places = _places(model, device_map, units)
    accelerators = {place for place in places.values() if place not in (DISK, "cpu")}
    if len(accelerators) > 1:
        raise ValueError(f"device_map: want one accelerator beside 'cpu' and 'disk', got {sorted(accelerators)}")
    main = torch.device(next(iter(accelerators), "cpu"))
    unit_of = {name: next(unit for unit in units if name.startswith(unit + ".")) for name in plan}
    always = {name for name in plan if unit_of[name] not in places}
    homes = {name: str(main) if name in always else places[unit_of[name]] for name in plan}
    _check_places(plan, homes, unit_of, main)

    load_parts(model, [p for p in parts if homes[p.module_name] == str(main)], plan, main, progress)
    in_memory: dict[str, Tensor] = {}
    if main.type != "cpu":
        load_parts(model, [p for p in parts if homes[p.module_name] == "cpu"], plan, torch.device("cpu"), progress)
        in_memory = {name: model.get_parameter(name).data for name in plan if homes[name] == "cpu"}
    heads = model.config.text_config.kda_num_heads  # type: ignore[union-attr]
    weights = ShardWeights([p for p in parts if homes[p.module_name] == DISK], plan, in_memory, heads)  # type: ignore[arg-type]
    for unit, place in places.items():
        if place != str(main):
            hook = AlignDevicesHook(
                execution_device=main,
                offload=True,
                weights_map=PrefixedDataset(weights, f"{unit}."),
                place_submodules=True,
            )
            add_hook_to_module(model.get_submodule(unit), hook)
    model.hf_device_map = {unit: places.get(unit, str(main)) for unit in units}  # type: ignore[assignment]


def _units(model: nn.Module) -> list[str]:
    """Names of the modules that move as one: decoder layers, and every other module that has weights, from the top."""
    units = []
    for name, _ in model.named_parameters():
        steps = name.split(".")
        unit = ".".join(steps[:3] if steps[:2] == ["model", "layers"] else steps[: 2 if steps[0] == "model" else 1])
        if unit not in units:
            units.append(unit)
    return units


def _is_movable(unit: str) -> bool:
    """Not the last norms and the head: their weights are read outside their own forward, where no hook runs."""
    return not unit.startswith(("model.norm", "model.output_attn_res", "lm_head"))


def _places(model: nn.Module, device_map: str | dict[str, Any], units: list[str]) -> dict[str, str]:
    """Where each movable unit lives: a device's name or "disk"."""
    if device_map == "auto":
        device_map = _infer(model)
    if not isinstance(device_map, dict):
        raise ValueError(f"device_map: want 'auto' or a dict of module names, got {device_map!r}")
    places = {}
    for unit in units:
        keys = [key for key in device_map if key == "" or unit == key or unit.startswith(key + ".")]
        if not keys:
            raise ValueError(
                f"device_map: no place for {unit}; want names of modules of this model, got {sorted(device_map)}"
            )
        place = device_map[max(keys, key=len)]
        if _is_movable(unit):
            places[unit] = f"cuda:{place}" if isinstance(place, int) else str(place)
    inner = [key for key in device_map if any(key.startswith(unit + ".") for unit in units)]
    if inner:
        raise ValueError(f"device_map: a decoder layer is one unit, got the inner module {inner[0]!r}")
    return places


def _infer(model: nn.Module) -> dict[str, Any]:
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_max_memory

    free: dict[Any, int] = get_max_memory()
    # One accelerator computes; others would need copies of the caches.
    limits: dict[Any, Any] = {0: free[0]} if 0 in free else {}
    limits["cpu"] = min(free["cpu"], available_memory(torch.device("cpu")))
    return infer_auto_device_map(model, max_memory=limits, no_split_module_classes=["KimiK3DecoderLayer"])


def _check_places(
    plan: dict[str, TensorSpec], homes: dict[str, str], unit_of: dict[str, str], main: torch.device
) -> None:
    """Raise InsufficientResources if a device cannot hold what is mapped to it and the largest unit that visits it."""
    visiting: dict[str, int] = defaultdict(int)
    for name, spec in plan.items():
        if homes[name] != str(main):
            visiting[unit_of[name]] += spec.num_bytes
    for place in sorted({*homes.values(), str(main)} - {DISK}):
        needed = sum(spec.num_bytes for name, spec in plan.items() if homes[name] == place)
        visitor = max(visiting.values(), default=0) if place == str(main) else 0
        free = available_memory(torch.device(place))
        if needed + visitor > free:
            raise InsufficientResources(
                f"device_map: {place} is to hold {gigabytes(needed)}, and {gigabytes(visitor)} for the largest offloaded "
                f"unit while it runs, but has {gigabytes(free)} free: map more layers to 'disk'"
            )
