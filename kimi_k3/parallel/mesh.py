"""The processes and their DeviceMesh: the only place that names mesh axes.

    "tp"  neighbouring ranks that share every token: heads, MLP widths and the vocabulary are cut over them
    "dp"  groups of tp ranks with tokens of their own
    "ep"  every rank, dp x tp flattened: the routed experts are spread over all of them, so ep spans tp

One `torchrun --nproc-per-node N` is one failure domain: when one of its processes dies, it stops the others.
"""

from __future__ import annotations

import datetime
import gc
import logging
import os
import weakref

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: its default arguments keep the one they see
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("dp", "tp")
_MESHES: list[weakref.ref[DeviceMesh]] = []  # by identity: equal meshes hold groups of their own


def start(backend: str | None = None, timeout_seconds: float = 60.0, device: str | None = None) -> torch.device:
    """Join the process group that torchrun describes (or a group of one, without torchrun), and name this rank's device.

    Args:
        backend: "gloo" or "nccl"; None: nccl on GPUs, else gloo.
        timeout_seconds: after so long a collective that some rank did not enter is an error, not a hang.
        device: "cpu" or "cuda"; None: as the backend.
    Raises: ValueError for a backend or device that this torch does not have.
    """
    backend = backend or ("nccl" if torch.cuda.is_available() and device != "cpu" else "gloo")
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"start: backend: want 'gloo' or 'nccl', got {backend!r}")
    if backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise ValueError("start: backend 'nccl' needs a CUDA device and a torch built with NCCL; want 'gloo' here")
    kind = device or ("cuda" if backend == "nccl" else "cpu")
    local = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
    if local.type == "cuda":
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        timeout = datetime.timedelta(seconds=timeout_seconds)
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return local


def stop() -> None:
    """Leave the process group, and end the threads of its groups; nothing without one. The last call of a rank's `main`.

    `destroy_process_group` alone leaves gloo's threads running while something refers to a group, and DTensor's caches refer
    to every mesh. Such a thread may be the last to drop a tensor of a finished collective; where the interpreter is ending by
    then, the process aborts ("terminate called without an active exception").
    """
    if not dist.is_initialized():
        return
    from kimi_k3.parallel.expert_parallel import forget_groups

    dist.destroy_process_group()
    forget_groups()
    for mesh in filter(None, (reference() for reference in _MESHES)):
        getattr(mesh, "_pg_registry", {}).clear()
    _MESHES.clear()
    gc.collect()


def log_of_rank() -> logging.Logger:
    """The logger "kimi_k3.rank", each line with time, rank and number of ranks; INFO on every rank, to stderr."""
    log = logging.getLogger("kimi_k3.rank")
    if not log.handlers:
        handler = logging.StreamHandler()
        who = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        handler.setFormatter(logging.Formatter(f"%(asctime)s [{who}] %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    return log


def make_mesh(tp: int = 1, ep: int | None = None, device_type: str = "cpu") -> DeviceMesh:
    """One mesh over all ranks of the process group, axes ("dp", "tp"), and with ep also "ep".

    Args:
        tp: ranks that share each token; must divide the number of ranks.
        ep: the number of ranks: it counts every rank and spans tp. None: no such axis; experts are cut over tp by width, or
            whole where tp is 1.
        device_type: "cpu" or "cuda".
    Raises: ValueError naming the size that does not fit; RuntimeError without a process group.
    """
    if not dist.is_initialized():
        raise RuntimeError("make_mesh: no process group: call kimi_k3.parallel.start() or init_process_group first")
    world = dist.get_world_size()
    if tp < 1 or world % tp:
        raise ValueError(f"make_mesh: tp: want a divisor of the {world} ranks, got {tp}")
    if ep not in (None, world):
        raise ValueError(f"make_mesh: ep: want None or the {world} ranks (it counts every rank and spans tp), got {ep}")
    mesh = init_device_mesh(device_type, (world // tp, tp), mesh_dim_names=AXES)
    if ep is not None:
        mesh.ep_axis = mesh._flatten("ep")  # type: ignore[attr-defined]
    _MESHES.append(weakref.ref(mesh))
    return mesh


def axis(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    """The one-dimensional mesh of an axis; None where the mesh has no such axis."""
    if name in (mesh.mesh_dim_names or ()):
        return mesh if mesh.ndim == 1 else mesh[name]
    return getattr(mesh, "ep_axis", None) if name == "ep" else None
