"""Projections that read the same input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimi_k3_kernels import linear_rows
from kimi_k3_kernels.matvec import beats_library_gemm, matvec_op

ROW_BLOCK = 16


def project(
    x_TD: Tensor, projections: list[nn.Linear], is_decode: bool, is_invariant: bool = False
) -> list[Tensor]:  # fmt: skip
    """Each projection of x. In a decode step on a CPU one op reads all their weights, at memory speed; for more rows
    too where torch has no fast GEMM.

    Only plain linear layers without bias take the op: a quantised, wrapped or offloaded one is called as it is.
    is_invariant: a row's bits do not depend on the others.
    """
    if is_invariant:
        if not all(map(_is_plain, projections)):
            return [_in_blocks(projection, x_TD) for projection in projections]
        out_TC = linear_rows(x_TD, [projection.weight for projection in projections])
        return list(out_TC.split([projection.out_features for projection in projections], dim=-1))
    has_op = is_decode or beats_library_gemm(x_TD.dtype)
    if has_op and x_TD.device.type == "cpu" and not torch.is_grad_enabled() and all(map(_is_plain, projections)):
        out_TC = matvec_op(x_TD, [projection.weight for projection in projections])  # linear layers' shapes are right
        if len(projections) == 1:
            return [out_TC]
        return list(out_TC.split_with_sizes([projection.out_features for projection in projections], dim=-1))
    return [projection(x_TD) for projection in projections]


def _in_blocks(projection: nn.Linear, x_TD: Tensor) -> Tensor:
    """A projection of any kind, in blocks of one size: the order of its sums may depend on the number of rows."""
    blocks = F.pad(x_TD, (0, 0, 0, -x_TD.shape[0] % ROW_BLOCK)).split(ROW_BLOCK)
    return torch.cat([projection(block) for block in blocks])[: x_TD.shape[0]]


def _is_plain(projection: nn.Linear) -> bool:
    # On a mesh the class is one that reads its local part, a plain tensor, and runs this same forward.
    if getattr(type(projection), "forward", None) is not nn.Linear.forward:
        return False
    return is_bare(projection)


def is_bare(module: nn.Module) -> bool:
    """Whether an op that reads the module's weight can stand for a call of it: a plain tensor, and no hooks."""
    # accelerate replaces `forward` and leaves `_hf_hook`: the weight may be elsewhere until the module is called.
    if module._forward_hooks or module._forward_pre_hooks or "_hf_hook" in module.__dict__:
        return False
    return type(module.weight) in (nn.Parameter, Tensor)
