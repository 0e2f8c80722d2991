"""Tensor parallelism: one table of parameter names and placements, and the collectives around the layers.

A layer's own file knows nothing of this. Its parameters become DTensors; where its code reads one it gets the local part,
and heads and widths count what is local. Around the parts that are cut stand one sum in the forward pass (after the
row-wise projection) and one in the backward pass (of the input's gradient). All tp ranks hold the same tokens; between
the parts that are cut they compute the same, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from kimi_k3.configuration_kimi_k3 import MXFP4_GROUP, KimiK3TextConfig
from kimi_k3.layers.kda import KimiDeltaAttention
from kimi_k3.layers.mla import KimiMLAAttention
from kimi_k3.layers.mlp import KimiK3MLP
from kimi_k3.layers.moe import KimiK3Experts, Routing
from kimi_k3.parallel.collectives import gather_columns, sum_gradient, sum_output
from kimi_k3.parallel.mesh import axis


class Rule(NamedTuple):
    """How the parameters whose names match are placed on the tp axis.

    is_partial: a replicated one that acts on cut activations, so that its gradient is the sum over the ranks.
    """

    pattern: re.Pattern[str]
    placement: Placement
    is_partial: bool = False


def _rule(pattern: str, placement: Placement, is_partial: bool = False) -> Rule:
    return Rule(re.compile(pattern), placement, is_partial)


# The first rule that matches a name counts.
TABLE = (
    # By head: the output features of one head lie side by side.
    _rule(r".*\.self_attn\.(q|k|v|g|f_b|g_b|b|q_b|kv_b)_proj\.weight", Shard(0)),
    _rule(r".*\.self_attn\.([qkv]_conv1d\.weight|dt_bias)", Shard(0)),
    _rule(r".*\.self_attn\.o_proj\.weight", Shard(1)),
    # Stored with zeros after its heads, which a cut of the stored length would not divide: whole, sliced at use.
    _rule(r".*\.self_attn\.A_log", Replicate(), is_partial=True),
    # Low ranks, and norms inside the heads; what follows them is cut.
    _rule(r".*\.self_attn\.(f_a_proj|g_a_proj|q_a_proj|kv_a_proj_with_mqa)\.weight", Replicate(), is_partial=True),
    _rule(r".*\.self_attn\.(q_a_layernorm|kv_a_layernorm|o_norm)\.weight", Replicate(), is_partial=True),
    _rule(r".*\.(mlp|shared_experts)\.(gate|up)_proj\.weight", Shard(0)),
    _rule(r".*\.(mlp|shared_experts)\.down_proj\.weight", Shard(1)),
    # Without an ep axis: whole groups of 32 of the expert width. With one they are placed by expert instead.
    _rule(r".*\.experts\.w[13](_packed|_scale)?", Shard(1)),
    _rule(r".*\.experts\.w2(_packed|_scale)?", Shard(2)),
    _rule(r"model\.embed_tokens\.weight|lm_head\.weight", Shard(0)),
    # AttnRes, norms, router, latent down and up, vision.
    _rule(r".*", Replicate()),
)
_EXPERTS = re.compile(r".*\.experts\.w[123](_packed|_scale)?")


def rule_of(name: str) -> Rule:
    """The rule for a parameter's name (of KimiK3ForCausalLM)."""
    return next(rule for rule in TABLE if rule.pattern.fullmatch(name))


def placement_of(name: str, mesh: DeviceMesh) -> tuple[DeviceMesh | None, Placement]:
    """The axis that a parameter lies on, and how: routed experts on "ep" by expert where there is one, all else on "tp"."""
    ep = axis(mesh, "ep")
    if ep is not None and _EXPERTS.fullmatch(name):
        return ep, Shard(0)
    return axis(mesh, "tp"), rule_of(name).placement


def local_shape(name: str, shape: tuple[int, ...], mesh: DeviceMesh) -> tuple[int, ...]:
    """The shape of this rank's part of a parameter."""
    placed, placement = placement_of(name, mesh)
    if placed is None:
        return shape
    return tuple(compute_local_shape_and_global_offset(shape, placed, [placement])[0])


def check_sizes(config: KimiK3TextConfig, mesh: DeviceMesh) -> None:
    """Raise ValueError for sizes that the mesh cannot cut, naming the size."""
    tp, ep = axis(mesh, "tp"), axis(mesh, "ep")
    size = 1 if tp is None else tp.size()
    for name, heads in (("KDA heads", config.kda_num_heads), ("attention heads", config.num_attention_heads)):
        if heads % size:
            raise ValueError(f"parallelize: tp: want a divisor of the {heads} {name}, got {size}")
    width = config.moe_intermediate_size
    if ep is None and width % (size * MXFP4_GROUP):
        raise ValueError(
            f"parallelize: tp: want moe_intermediate_size {width} cut on whole groups of {MXFP4_GROUP}, which {size} ranks "
            "cannot do evenly; an ep axis places the experts whole"
        )
    if ep is not None and ep.size() > config.num_experts:
        raise ValueError(f"parallelize: ep: want at most the {config.num_experts} experts, got {ep.size()}")


def parallelize(
    model: nn.Module, mesh: DeviceMesh, *, gather_logits: bool = True, ordered_sums: bool = False
) -> nn.Module:
    """Make every parameter a DTensor on its axis of the mesh, and put the collectives around the layers. In place.

    Args:
        model: KimiK3ForCausalLM or KimiK3ForConditionalGeneration, with the same values on every rank, or on meta.
        mesh: of `make_mesh`, or any with an axis "tp" or "ep".
        gather_logits: every rank gets all logits; else each its own part of the vocabulary, for `sharded_topk`.
        ordered_sums: sum over more than two tp ranks in their order, so that a row's bits do not depend on its batch (with
            `set_batch_invariant`); more bytes travel. Two ranks' sums have no order.
    Raises: ValueError for a model that is parallel already, or sizes that the mesh cannot cut.
    """
    config: KimiK3TextConfig = model.config.text_config  # type: ignore[union-attr,assignment]
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("parallelize: want a model that is not on a mesh yet")
    if axis(mesh, "tp") is None and axis(mesh, "ep") is None:
        raise ValueError(f"parallelize: want a mesh with an axis 'tp' or 'ep', got {mesh.mesh_dim_names}")
    check_sizes(config, mesh)
    for prefix, module in list(model.named_modules()):
        _place_parameters(module, prefix, mesh, config)
    tp, ep = axis(mesh, "tp"), axis(mesh, "ep")
    if tp is not None and tp.size() > 1:
        ordered_size = tp.size() if ordered_sums and tp.size() > 2 else 0
        _wrap(model, config, tp, ep is None, gather_logits, ordered_size)
    if ep is not None:
        from kimi_k3.parallel.expert_parallel import spread_experts

        spread_experts(model, mesh)
    model.mesh = mesh  # type: ignore[assignment]
    return model


def local_part(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _place_parameters(module: nn.Module, prefix: str, mesh: DeviceMesh, config: KimiK3TextConfig) -> None:
    readers: dict[str, Callable[[Tensor], Tensor]] = {}
    for leaf, parameter in list(module.named_parameters(recurse=False)):
        name = f"{prefix}.{leaf}" if prefix else leaf
        placed, placement = placement_of(name, mesh)
        if placed is None:
            continue
        tensor = distribute_tensor(parameter.detach(), placed, [placement], src_data_rank=None)
        module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=parameter.requires_grad))
        readers[leaf] = _reader(name, placed, config)
    if readers:
        reads_locally_(module, readers)
    if isinstance(module, nn.Linear) and "weight" in readers:
        module.out_features, module.in_features = local_part(module._parameters["weight"]).shape  # type: ignore[arg-type]


def _reader(name: str, tp: DeviceMesh, config: KimiK3TextConfig) -> Callable[[Tensor], Tensor]:
    """What a layer's code gets when it reads a parameter."""
    if _EXPERTS.fullmatch(name) or not rule_of(name).is_partial or tp.size() == 1:
        return local_part
    heads = config.kda_num_heads // tp.size() if name.endswith(".A_log") else None
    return _summed_reader(tp.get_group().group_name, tp.get_local_rank(), heads)


@functools.cache  # like the classes below: layers of one kind share a class, and with it their compiled graphs
def _summed_reader(group_name: str, rank: int, heads: int | None) -> Callable[[Tensor], Tensor]:
    def read(parameter: Tensor) -> Tensor:
        whole = sum_gradient(local_part(parameter), group_name)
        return whole if heads is None else whole[rank * heads : (rank + 1) * heads]

    return read


@functools.cache
def _sharded_class(kind: type, readers: tuple[tuple[str, Callable[[Tensor], Tensor]], ...]) -> type:
    def reading(leaf: str, read: Callable[[Tensor], Tensor]) -> property:
        def get(self: nn.Module) -> Any:
            parameter: Any = self._parameters[leaf]
            # On two axes it is FSDP2's sharded form, which FSDP2 alone reads: the layer runs on the unsharded one.
            is_fsdp = isinstance(parameter, DTensor) and len(parameter.placements) > 1
            return parameter if is_fsdp else read(parameter)

        return property(get)

    return type(f"Sharded{kind.__name__}", (kind,), {leaf: reading(leaf, read) for leaf, read in readers})


def reads_locally_(module: nn.Module, readers: dict[str, Callable[[Tensor], Tensor]]) -> None:
    """Give a module a class in which `module.weight` is the local part; `_parameters` keeps the DTensor."""
    ordered = tuple(sorted(readers.items(), key=lambda item: item[0]))
    module.__class__ = _sharded_class(type(module), ordered)  # type: ignore[arg-type]


def _wrap(
    model: nn.Module, config: KimiK3TextConfig, tp: DeviceMesh, experts_by_width: bool, gather_logits: bool,
    ordered_size: int,
) -> None:  # fmt: skip
    size, rank, group_name = tp.size(), tp.get_local_rank(), tp.get_group().group_name
    linear = {**config.linear_attn_config, "num_heads": config.kda_num_heads // size}
    # What a cache's pools are sized by.
    model.pool_config = dataclasses.replace(config, linear_attn_config=linear)  # type: ignore[assignment]

    def sum_first_gradient(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return sum_gradient(inputs[0], group_name), *inputs[1:]

    def sum_routed_gradients(module: nn.Module, inputs: tuple[Tensor, Routing]) -> tuple[Tensor, Routing]:
        latent, routing = inputs
        weights = sum_gradient(routing.topk_weights, group_name)
        return sum_gradient(latent, group_name), routing._replace(topk_weights=weights)

    def sum_result(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return sum_output(output, group_name, ordered_size)

    for module in model.modules():
        if isinstance(module, (KimiDeltaAttention, KimiMLAAttention)):
            module.num_heads //= size
        if isinstance(module, (KimiDeltaAttention, KimiMLAAttention, KimiK3MLP)):
            # Around the whole module, whose last projection is the row-wise one: its projections stay plain.
            module.register_forward_pre_hook(sum_first_gradient)
            module.register_forward_hook(sum_result)
        elif isinstance(module, KimiK3Experts) and experts_by_width:
            # The latent sum is whole before its norm reads it.
            module.register_forward_pre_hook(sum_routed_gradients)
            module.register_forward_hook(sum_result)
    stage: Any = model.model
    if stage.is_first_stage:
        _cut_embedding(stage.embed_tokens, config.vocab_size, tp)
    if stage.is_last_stage:
        head: Any = model.lm_head
        head.register_forward_pre_hook(sum_first_gradient)
        if gather_logits:
            head.register_forward_hook(
                lambda _, inputs, logits: gather_columns(logits, config.vocab_size, rank, size, group_name)
            )


def vocabulary_range(vocab_size: int, rank: int, size: int) -> tuple[int, int]:
    """The first id that a rank holds, and how many: DTensor's own cut, whole chunks first."""
    chunk = -(-vocab_size // size)
    first = min(rank * chunk, vocab_size)
    return first, min(chunk, vocab_size - first)


def _cut_embedding(embedding: nn.Embedding, vocab_size: int, tp: DeviceMesh) -> None:
    group_name = tp.get_group().group_name
    first, count = vocabulary_range(vocab_size, tp.get_local_rank(), tp.size())

    def forward(self: nn.Embedding, ids: Tensor) -> Tensor:
        local = ids - first
        is_outside = (local < 0) | (local >= count)
        rows = F.embedding(local.masked_fill(is_outside, 0), self.weight)
        return sum_output(rows.masked_fill(is_outside[..., None], 0), group_name)

    embedding.__class__ = type(type(embedding).__name__, (type(embedding),), {"forward": forward})


def sharded_topk(logits: Tensor, k: int, vocab_size: int, tp: DeviceMesh) -> tuple[Tensor, Tensor]:
    """The k largest logits of the whole vocabulary and their ids, from each rank's own part: k pairs a rank travel.

    Args:
        logits: [B, my part] as `parallelize(gather_logits=False)` leaves them.     k: at most vocab_size.
    Returns: values [B, k], largest first, and ids [B, k] int64; equal values in the order of their ids. The same on
        every rank, and the same as `topk` of the gathered logits but for the order of equal values.
    """
    if not 1 <= k <= vocab_size:
        raise ValueError(f"sharded_topk: k: want 1..{vocab_size}, got {k}")
    first, count = vocabulary_range(vocab_size, tp.get_local_rank(), tp.size())
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    kept = min(k, count)
    values, ids = values[:, :kept], ids[:, :kept] + first
    pad = (0, k - kept)
    values, ids = F.pad(values, pad, value=-torch.inf), F.pad(ids, pad, value=vocab_size)
    rank, size, name = tp.get_local_rank(), tp.size(), tp.get_group().group_name
    all_values = gather_columns(values, size * k, rank, size, name)
    all_ids = gather_columns(ids, size * k, rank, size, name)
    # Ranks hold rising ids, so a stable sort keeps equal values in the order of their ids.
    order = all_values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return all_values.gather(1, order), all_ids.gather(1, order)


def gather_logits(logits: Tensor, vocab_size: int, tp: DeviceMesh) -> Tensor:
    """[B, my part] -> [B, vocab_size], exact, on every rank."""
    return gather_columns(logits, vocab_size, tp.get_local_rank(), tp.size(), tp.get_group().group_name)
