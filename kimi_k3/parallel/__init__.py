"""Several devices, from outside: the model's files know nothing of this package."""

from kimi_k3.parallel.mesh import make_mesh, start
from kimi_k3.parallel.tensor_parallel import parallelize

__all__ = ["make_mesh", "parallelize", "start"]
