"""Several devices, from outside: the model's files know nothing of this package."""

from kimi_k3.parallel.data_parallel import shard_for_training, share_of_loss
from kimi_k3.parallel.mesh import log_of_rank, make_mesh, start
from kimi_k3.parallel.replication import use_placement
from kimi_k3.parallel.tensor_parallel import parallelize

__all__ = [
    "log_of_rank",
    "make_mesh",
    "parallelize",
    "shard_for_training",
    "share_of_loss",
    "start",
    "use_placement",
]
