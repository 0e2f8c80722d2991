"""Projections that read the same input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kimi_k3_kernels import matvec


def project(x_TD: Tensor, projections: list[nn.Linear], is_decode: bool) -> list[Tensor]:
    """Each projection of x. In a decode step on a CPU one op reads all their weights, at memory speed.

    Only plain linear layers without bias take the op: a quantised, wrapped or offloaded one is called as it is.
    """
    if is_decode and x_TD.device.type == "cpu" and not torch.is_grad_enabled() and all(map(_is_plain, projections)):
        out_TC = matvec(x_TD, [projection.weight for projection in projections])
        return list(out_TC.split([projection.out_features for projection in projections], dim=-1))
    return [projection(x_TD) for projection in projections]


def _is_plain(projection: nn.Linear) -> bool:
    # accelerate replaces `forward` and leaves `_hf_hook`: its weight may be elsewhere until the module is called.
    is_hooked = projection._forward_hooks or projection._forward_pre_hooks or hasattr(projection, "_hf_hook")
    # On a mesh the class is one that reads its local part, a plain tensor, and runs this same forward.
    is_linear = isinstance(projection, nn.Linear) and type(projection).forward is nn.Linear.forward
    return is_linear and type(projection.weight) in (nn.Parameter, Tensor) and not is_hooked
