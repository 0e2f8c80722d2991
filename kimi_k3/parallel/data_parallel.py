"""Training on several ranks: FSDP2 over "dp", beside tensor parallelism and experts that lie on "ep"."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from kimi_k3.parallel.collectives import named
from kimi_k3.parallel.mesh import axis


def shard_for_training(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 over "dp", layer by layer, in place; gradients are summed over the ranks, so pair it with `share_of_loss`.

    Experts that lie on "ep" stay there: their gradients already sum over all ranks' tokens. AdamW and its like take
    parameters of one mesh at a time: give the experts a parameter group of their own.

    Args:
        model: plain, or after `parallelize` on the same mesh.     mesh: with an axis "dp".
    Raises: ValueError for a mesh without "dp".
    """
    dp = axis(mesh, "dp")
    if dp is None:
        raise ValueError(f"shard_for_training: want a mesh with an axis 'dp', got {mesh.mesh_dim_names}")
    on_ep: set[nn.Parameter] = set()
    if axis(mesh, "ep") is not None:
        on_ep = {parameter for name, parameter in model.named_parameters() if ".experts." in name}
    stage: Any = model.model
    for layer in stage.layers.values():
        fully_shard(layer, mesh=dp, ignored_params=on_ep & set(layer.parameters()))
    fully_shard(model, mesh=dp, ignored_params=on_ep)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            if dist.get_backend(dp.get_group()) == "gloo":
                module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    return model


def share_of_loss(loss: Tensor, num_labels: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's part of the mean over all ranks' labels: the parts add up to the loss, their gradients to its gradient.

    Args:
        loss: [], the mean over this rank's labels.     num_labels: [] how many those are (shifted, not ignored); 0 is fine.
    """
    dp = axis(mesh, "dp")
    assert dp is not None
    total = num_labels.detach().clone().to(torch.int64)
    if dp.size() > 1:
        with named("sum of label counts (all_reduce)", dp.get_group()):
            dist.all_reduce(total, group=dp.get_group())
    return loss * (num_labels / total.clamp(min=1)).to(loss.dtype)
