"""Before a load: the bytes it needs against the memory there is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from kimi_k3.configuration_kimi_k3 import KimiK3Config
from kimi_k3.tensor_layout import TensorSpec, is_in_stage


class InsufficientResources(RuntimeError):
    """A load or download that cannot fit, refused before it starts. Carries the numbers and what would fit."""


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"


def _cgroup_limits() -> list[int]:
    """Bytes left under the memory limits of this process's control groups, versions 1 and 2."""
    membership = Path("/proc/self/cgroup")
    if not membership.exists():
        return []
    left = []
    for line in membership.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, limit_name, usage_name = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit_name, usage_name = (
                Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes",
            )  # fmt: skip
        else:
            continue
        folder = root / group.strip("/")
        # A container may show its own group as the root.
        for place in (folder, *[p for p in folder.parents if p.is_relative_to(root)]):
            limit = place / limit_name
            if not limit.exists() or (value := limit.read_text().strip()) == "max":
                continue
            cached = sum(
                int(row.split()[1])
                for row in (place / "memory.stat").read_text().splitlines()
                if row.split()[0] in ("inactive_file", "active_file")
            )  # the page cache counts as used but is given back on demand
            left.append(int(value) - int((place / usage_name).read_text()) + cached)
    return left


def available_memory(device: torch.device) -> int:
    """Bytes that a load onto `device` can take: free memory of an accelerator; else RAM within the control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return min([psutil.virtual_memory().available, *_cgroup_limits()])


def resident_bytes(
    tensors: Mapping[str, TensorSpec], dtypes: Mapping[str, torch.dtype], layers: range, num_layers: int
) -> int:
    """Bytes of the tensors of a stage in the dtypes that they will have."""
    return sum(
        spec.num_elements * dtypes[name].itemsize
        for name, spec in tensors.items()
        if is_in_stage(name, layers, num_layers)
    )


def check_memory(
    config: KimiK3Config,
    tensors: Mapping[str, TensorSpec],
    dtypes: Mapping[str, torch.dtype],
    layers: range,
    device: torch.device,
) -> None:
    """Raise InsufficientResources, with the numbers and the layers that would fit, if a stage does not fit a device."""
    num_layers = config.text_config.num_hidden_layers
    needed, free = resident_bytes(tensors, dtypes, layers, num_layers), available_memory(device)
    if needed <= free:
        return
    fitting = 0
    for stop in range(layers.start + 1, layers.stop):
        if resident_bytes(tensors, dtypes, range(layers.start, stop), num_layers) > free:
            break
        fitting = stop
    if fitting:
        part = range(layers.start, fitting)
        advice = f"layers={part} would fit, {gigabytes(resident_bytes(tensors, dtypes, part, num_layers))}"
    else:
        advice = f"not even layer {layers.start} alone fits"
    raise InsufficientResources(
        f"from_pretrained: layers {layers.start}..{layers.stop - 1} of {num_layers} need {gigabytes(needed)} on "
        f"{device}, which has {gigabytes(free)} free: {advice}; device_map can leave layers on disk"
    )
