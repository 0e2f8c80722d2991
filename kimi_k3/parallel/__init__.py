"""Several devices, from outside: the model's files know nothing of this package.

Its names are looked up when they are first used: DTensor and FSDP2 take a second to import, which one device needs not pay.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimi_k3.parallel.data_parallel import shard_for_training, share_of_loss
    from kimi_k3.parallel.mesh import log_of_rank, make_mesh, start, stop
    from kimi_k3.parallel.replication import use_placement
    from kimi_k3.parallel.tensor_parallel import parallelize

_HOMES = {
    "log_of_rank": "mesh", "make_mesh": "mesh", "parallelize": "tensor_parallel", "shard_for_training": "data_parallel",
    "share_of_loss": "data_parallel", "start": "mesh", "stop": "mesh", "use_placement": "replication",
}  # fmt: skip

__all__ = [
    "log_of_rank",
    "make_mesh",
    "parallelize",
    "shard_for_training",
    "share_of_loss",
    "start",
    "stop",
    "use_placement",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
