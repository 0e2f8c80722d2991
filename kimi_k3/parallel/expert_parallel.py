"""Expert parallelism: the routed experts spread over all ranks; tokens' latents travel to them and back.

    slot of each choice      logical expert -> one of its active copies -> (rank, slot), by tables that are tensors
    dispatch                 the latent of each choice to its rank: all_to_all, moe_latent wide
    experts                  one row for each choice; a row's bits depend on no other row
    combine                  rows back: all_to_all; sum_a topk_weights[a] row[a], in the order of a token's choices

So outputs depend neither on the number of ranks, nor on where an expert lies, nor on how many copies it has. Every rank
enters every exchange, with zero tokens too. ep spans tp: the tp ranks hold the same tokens, so each dispatches its part of
them, and the combined latents are gathered among the tp ranks at the end.

For loading, training and checkpoints the experts are DTensors, Shard(0) on "ep". For serving they are physical slots with
tables, behind one opaque op that looks its group up when it runs: a new placement, or a smaller group, is other data.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from kimi_k3.layers.moe import KimiK3SparseMoE, Routing
from kimi_k3.parallel.collectives import all_gather_rows, named
from kimi_k3.parallel.mesh import axis
from kimi_k3_kernels import dense_experts, mxfp4_combine, mxfp4_experts
from kimi_k3_kernels.library import define_op
from kimi_k3_kernels.mxfp4_experts.reference import combine_reference


class ExpertGroup(NamedTuple):
    """Who exchanges tokens: all ranks, and among them the tp ranks that hold the same tokens (None: nobody else does)."""

    ep: dist.ProcessGroup
    tp: dist.ProcessGroup | None = None

    def my_rows(self, tokens: int) -> tuple[int, int, int]:
        """The first of this rank's rows, the one after its last, and how many rows the first tp rank has."""
        if self.tp is None:
            return 0, tokens, tokens
        chunk = -(-tokens // self.tp.size())
        first = min(self.tp.rank() * chunk, tokens)
        return first, min(first + chunk, tokens), chunk


# What the op looks up when it runs: graphs know the name alone, so that a re-formed group needs no new graph.
_GROUPS: dict[str, ExpertGroup] = {}
GROUP = "experts"
# By name of the group: rows that this rank's experts computed for all ranks, over all layers, since the start.
ROWS_RECEIVED: Counter[str] = Counter()


def set_group(group: ExpertGroup, name: str = GROUP) -> None:
    """Make this the group that the experts' op exchanges tokens in from now on."""
    _GROUPS[name] = group


def forget_groups() -> None:
    """Hold no group any more: the process group ended."""
    _GROUPS.clear()


class Tables(NamedTuple):
    """Where the copies of each expert of one layer lie, int64, active ones first. Group ranks and slots, -1 where none."""

    copy_ranks: Tensor  # [E, C]
    copy_slots: Tensor  # [E, C]
    num_active: Tensor  # [E], >= 1


def contiguous_tables(num_experts: int, size: int, device: torch.device) -> Tables:
    """Whole chunks of experts to one rank after another, as DTensor's Shard(0) cuts: ceil(E / size) a rank, fewer at last."""
    chunk = -(-num_experts // size)
    experts = torch.arange(num_experts, device=device)
    return Tables((experts // chunk)[:, None], (experts % chunk)[:, None], torch.ones_like(experts))


def tables_from_slots(
    logical_to_physical: Tensor, num_active: Tensor, capacity: int, worker_ranks: Sequence[int] | None = None
) -> Tables:
    """The tables of one layer from a placement's.

    Args:
        logical_to_physical: [E, C] integers, physical slots p of each expert, active ones first, -1 where none; slot p lies
            on worker p // capacity.
        num_active: [E] integers.     capacity: slots of a worker.
        worker_ranks: the group rank of each worker, -1 for a lost one; None: the same number.
    Raises: ValueError if an active copy lies on a lost worker.
    """
    slots = logical_to_physical.long()
    workers = torch.where(slots < 0, -1, slots // capacity)
    if worker_ranks is None:
        ranks = workers
    else:
        ranks = torch.tensor([*worker_ranks, -1], device=slots.device)[workers]
    is_active = torch.arange(slots.shape[1], device=slots.device) < num_active[:, None]
    if bool((is_active & (ranks < 0)).any()):
        expert = int((is_active & (ranks < 0)).any(1).nonzero()[0])
        raise ValueError(f"placement: an active copy of expert {expert} lies on a lost worker or nowhere")
    return Tables(ranks, torch.where(slots < 0, -1, slots % capacity), num_active.long())


def _dispatch_plan(topk_ids: Tensor, tables: Tables, rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The flattened choices in the order of their ranks, the slot of each in that order, and how many go to each rank."""
    ids = topk_ids.flatten().long()
    # Copies of an expert take turns by the token's place and the rank, which may have a single token: evenly, and known
    # without messages.
    turn = (torch.arange(ids.shape[0], device=ids.device) // max(1, topk_ids.shape[1]) + rank) % tables.num_active[ids]
    ranks, slots = tables.copy_ranks[ids, turn], tables.copy_slots[ids, turn]
    order = torch.argsort(ranks, stable=True)
    return order, slots[order], torch.bincount(ranks, minlength=size)


def _exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """How many rows go to each rank, and how many come from each."""
    if group.size() == 1:
        sent = counts.tolist()
        return sent, sent
    received = torch.empty_like(counts)
    with named("exchange of expert counts (all_to_all_single)", group):
        dist.all_to_all_single(received, counts, group=group)
    return counts.tolist(), received.tolist()


def _exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, what: str) -> Tensor:
    if group.size() == 1:
        return rows
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    with named(f"{what} (all_to_all_single)", group):
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def _expert_rows(
    rows: Tensor, slots: Tensor, weights: Sequence[Tensor], beta: float, linear_beta: float | None
) -> Tensor:
    """One expert's output for each row, unweighted: the experts' op with one choice of weight 1."""
    ones = torch.ones((rows.shape[0], 1), dtype=torch.float32, device=rows.device)
    table = torch.arange(weights[0].shape[0], device=rows.device)
    op: Any = mxfp4_experts if len(weights) == 6 else dense_experts
    return op(rows, slots[:, None], ones, *weights, table, beta, linear_beta)


def _combine(outputs: Tensor, topk_weights: Tensor, is_packed: bool) -> Tensor:
    return (mxfp4_combine if is_packed else combine_reference)(outputs, topk_weights)


def _experts_over_ranks(
    latent: Tensor, topk_ids: Tensor, topk_weights: Tensor, weights: list[Tensor], copy_ranks: Tensor,
    copy_slots: Tensor, num_active: Tensor, beta: float, linear_beta: float | None, group: str,
) -> Tensor:  # fmt: skip
    ep, tp = exchange = _GROUPS[group]
    first, last, _ = exchange.my_rows(latent.shape[0])
    x, ids, factors = latent[first:last], topk_ids[first:last], topk_weights[first:last]
    order, slots, counts = _dispatch_plan(ids, Tables(copy_ranks, copy_slots, num_active), ep.rank(), ep.size())
    sent, received = _exchange_counts(counts, ep)
    ROWS_RECEIVED[group] += sum(received)
    rows = _exchange_rows(x[order // ids.shape[1]], sent, received, ep, "dispatch of latents")
    slots = _exchange_rows(slots, sent, received, ep, "dispatch of slots")
    rows = _expert_rows(rows, slots, weights, beta, linear_beta)
    rows = _exchange_rows(rows, received, sent, ep, "combine of latents")
    outputs = torch.empty_like(rows)
    outputs[order] = rows
    out = _combine(outputs.view(*ids.shape, latent.shape[1]), factors, len(weights) == 6)
    if tp is None:
        return out
    return _gather_rows(out, latent.shape[0], exchange).clone()


experts_over_ranks_op = define_op(
    "experts_over_ranks(Tensor latent, Tensor topk_ids, Tensor topk_weights, Tensor[] weights, Tensor copy_ranks, "
    "Tensor copy_slots, Tensor num_active, float beta, float? linear_beta, str group) -> Tensor",
    _experts_over_ranks,
    lambda latent, *_: torch.empty_like(latent),
)


class _ExchangeWithGradient(torch.autograd.Function):
    """Rows to other ranks; in the backward pass their gradients come back the same way. No rows are rows too."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, what: str
    ) -> Tensor:
        ctx.call = sent, received, group, what
        return _exchange_rows(rows, sent, received, group, what) if group.size() > 1 else rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        sent, received, group, what = ctx.call
        return _exchange_rows(grad, received, sent, group, f"gradient of the {what}"), None, None, None, None


class _MyRows(torch.autograd.Function):
    """This tp rank's part of rows that all tp ranks hold; the gradients of all parts are gathered, so all hold them again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: ExpertGroup) -> Tensor:
        ctx.exchange, ctx.tokens = exchange, x.shape[0]
        first, last, _ = exchange.my_rows(x.shape[0])
        return x[first:last].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather_rows(grad, ctx.tokens, ctx.exchange), None


class _AllRows(torch.autograd.Function):
    """The tp ranks' parts side by side. What follows is the same on all of them, so each keeps its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: int, exchange: ExpertGroup) -> Tensor:
        ctx.exchange, ctx.tokens = exchange, tokens
        return _gather_rows(x, tokens, exchange)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        first, last, _ = ctx.exchange.my_rows(ctx.tokens)
        return grad[first:last], None, None


def _gather_rows(x: Tensor, tokens: int, exchange: ExpertGroup) -> Tensor:
    assert exchange.tp is not None
    _, _, chunk = exchange.my_rows(tokens)
    padded = torch.nn.functional.pad(x, (0, 0, 0, chunk - x.shape[0]))
    with named("gather of rows (all_gather_into_tensor)", exchange.tp):
        return all_gather_rows(padded, exchange.tp.group_name, exchange.tp.size())[:tokens]


def experts_with_gradient(
    latent: Tensor, routing: Routing, weights: Sequence[Tensor], tables: Tables, beta: float, linear_beta: float | None,
    group: str = GROUP,
) -> Tensor:  # fmt: skip
    """What the op `experts_over_ranks` computes, by exchanges that autograd goes back through: gradients of the latents, of
    the router's weights and of the experts, which sum over all ranks' tokens (zeros for an idle expert).

    Args:
        latent: [T, L], T may be 0.     routing: topk_ids and topk_weights [T, A].
        weights: w1, w3, w2 of this rank's slots; or packed codes and scales of each.
    Returns: [T, L].
    """
    exchange = _GROUPS[group]
    ep, tp = exchange
    tokens, factors, ids = latent.shape[0], routing.topk_weights, routing.topk_ids
    if tp is not None:
        first, last, _ = exchange.my_rows(tokens)
        latent, factors, ids = _MyRows.apply(latent, exchange), _MyRows.apply(factors, exchange), ids[first:last]
    order, slots, counts = _dispatch_plan(ids, tables, ep.rank(), ep.size())
    sent, received = _exchange_counts(counts, ep)
    rows = latent[order // ids.shape[1]]
    rows = _ExchangeWithGradient.apply(rows, sent, received, ep, "dispatch of latents")
    slots = _exchange_rows(slots, sent, received, ep, "dispatch of slots")
    rows = _expert_rows(rows, slots, weights, beta, linear_beta)
    rows = _ExchangeWithGradient.apply(rows, received, sent, ep, "combine of latents")
    outputs = torch.zeros_like(rows).index_copy(0, order, rows)
    out = _combine(outputs.view(*ids.shape, latent.shape[1]), factors, len(weights) == 6)
    return out if tp is None else _AllRows.apply(out, tokens, exchange)


def weight_names(is_packed: bool) -> list[str]:
    kinds = ("_packed", "_scale") if is_packed else ("",)
    return [f"{name}{kind}" for name in ("w1", "w3", "w2") for kind in kinds]


def _forward(self: Any, latent_TL: Tensor, routing: Routing) -> Tensor:
    weights = [getattr(self, name) for name in weight_names(self.packed)]
    tables = Tables(self.copy_ranks, self.copy_slots, self.num_active)
    if torch.is_grad_enabled():
        return experts_with_gradient(latent_TL, routing, weights, tables, self.beta, self.linear_beta)
    return experts_over_ranks_op(
        latent_TL, routing.topk_ids, routing.topk_weights, weights, *tables, self.beta, self.linear_beta, GROUP
    )


@functools.cache  # layers of one kind share it, and with it their compiled graphs
def _exchanging_class(kind: type) -> type:
    return type(kind.__name__, (kind,), {"forward": _forward})


def expert_layers(model: nn.Module) -> list[KimiK3SparseMoE]:
    return [module for module in model.modules() if isinstance(module, KimiK3SparseMoE)]


def spread_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let the routed experts, DTensors on "ep" by now, exchange tokens. Called by `parallelize`."""
    ep, tp = axis(mesh, "ep"), axis(mesh, "tp")
    assert ep is not None
    set_group(ExpertGroup(ep.get_group(), None if tp is None or tp.size() == 1 else tp.get_group()))
    device = torch.device(mesh.device_type)
    for layer in expert_layers(model):
        experts = layer.experts
        for name, table in contiguous_tables(experts.num_experts, ep.size(), device)._asdict().items():
            experts.register_buffer(name, table, persistent=False)
        experts.__class__ = _exchanging_class(type(experts))  # type: ignore[arg-type]


class InStep:
    """While some ranks run forward passes and others have none left, the others enter the experts' exchanges with zero tokens.

        with InStep(model):
            out = model.generate(my_prompts, ...)

    Before each forward pass the ranks agree whether any still has one; a rank that leaves the block takes idle steps until
    all have left. Every rank enters it, with work or without.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.group = model, _GROUPS[GROUP].ep

    def __enter__(self) -> InStep:
        self._hook = self.model.register_forward_pre_hook(self._announce)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._hook.remove()
        if kind is not None:
            return  # the others learn of it by the timeout, or by torchrun
        with torch.no_grad():
            while self._is_anyone_running(False):
                idle_step(self.model)

    def _announce(self, module: nn.Module, inputs: Any) -> None:
        self._is_anyone_running(True)

    def _is_anyone_running(self, is_running: bool) -> bool:
        experts: Any = expert_layers(self.model)[0].experts
        device = experts.num_active.device
        flag = torch.tensor(int(is_running), device=device)
        if self.group.size() > 1:
            with named("agreement on another step (all_reduce)", self.group):
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        return bool(flag)


def idle_step(model: nn.Module) -> None:
    """Enter the exchanges of one forward pass without tokens: for a rank that has nothing to run while others do."""
    config: Any = model.config
    dtype: torch.dtype = model.dtype  # type: ignore[assignment]
    text = config.text_config
    for layer in expert_layers(model):
        experts: Any = layer.experts
        device = experts.num_active.device
        latent = torch.empty((0, text.routed_expert_hidden_size), dtype=dtype, device=device)
        ids = torch.empty((0, text.num_experts_per_token), dtype=torch.int64, device=device)
        weights = torch.empty(ids.shape, dtype=torch.promote_types(dtype, torch.float32), device=device)
        experts(latent, Routing(ids, weights, latent.new_empty((0, text.num_experts))))


@torch.no_grad()
def place_experts(layer: KimiK3SparseMoE, tables: Tables, slot_experts: Tensor) -> None:
    """Move one layer's experts to the slots of a new placement: weights from the ranks that hold them, then the tables.

    Every rank calls it with the same arguments, between two steps. Outputs do not change by a bit. Its first call makes
    plain slots of the DTensors, so serve compiled layers from a placement on: later ones of the same S and C compile
    nothing.

    Args:
        tables: where the copies will lie.
        slot_experts: [ranks, S] integers, the expert in each slot of each rank, -1 where none.
    Raises: ValueError for experts that are being trained, or tables of another number of experts.
    """
    experts: Any = layer.experts
    group = _GROUPS[GROUP].ep
    if any(parameter.requires_grad for parameter in experts.parameters()):
        raise ValueError("place_experts: want frozen experts: trained ones stay DTensors, Shard(0)")
    if tables.num_active.shape[0] != experts.num_experts:
        raise ValueError(f"place_experts: want tables of {experts.num_experts} experts, got {len(tables.num_active)}")
    rank, size = group.rank(), group.size()
    old_ranks, old_slots = experts.copy_ranks.tolist(), experts.copy_slots.tolist()
    held = [
        {old_ranks[e][c]: old_slots[e][c] for c in range(len(old_ranks[e])) if old_ranks[e][c] >= 0}
        for e in range(experts.num_experts)
    ]
    # For each rank's slots in order: the rank to copy from, itself if it has the expert.
    wanted = [
        [(slot, expert, target if target in held[expert] else next(iter(held[expert]))) for slot, expert in enumerate(row)
         if expert >= 0]
        for target, row in enumerate(slot_experts.tolist())
    ]  # fmt: skip
    received = [sum(source == other for _, _, source in wanted[rank]) for other in range(size)]
    sends = [[held[e][rank] for _, e, source in wanted[target] if source == rank] for target in range(size)]
    arrivals = sorted(((source, slot) for slot, _, source in wanted[rank]), key=lambda pair: pair[0])
    for name in weight_names(experts.packed):
        local = getattr(experts, name)
        rows = local[[row for row_list in sends for row in row_list]] if any(sends) else local[:0]
        rows = _exchange_rows(rows, [len(row_list) for row_list in sends], received, group, "moving experts")
        stack = local.new_zeros((slot_experts.shape[1], *local.shape[1:]))
        stack[[slot for _, slot in arrivals]] = rows
        experts.register_parameter(name, nn.Parameter(stack, requires_grad=False))
    for name, table in tables._asdict().items():
        current = getattr(experts, name)
        if current.shape == table.shape:
            current.copy_(table)
        else:
            setattr(experts, name, table.to(current.device))


def count_experts(model: nn.Module) -> None:
    """Count from now on, in each MoE layer, the tokens that chose each expert. Before `compile_blocks`, if at all.

    Counted where a token is routed, by its logical experts, on the device. Padding never reaches a layer, so counts are of
    real tokens only and add up to tokens x top-k in each layer.
    """

    def count(gate: Any, inputs: Any, routing: Routing) -> None:
        ids = routing.topk_ids.flatten()
        gate.expert_counts.scatter_add_(0, ids, torch.ones_like(ids))

    for layer in expert_layers(model):
        gate: Any = layer.gate
        if not hasattr(gate, "expert_counts"):
            device = gate.weight.device
            counts = torch.zeros(layer.experts.num_experts, dtype=torch.int64, device=device)
            gate.register_buffer("expert_counts", counts, persistent=False)
            gate.register_forward_hook(count)


def expert_counts(model: nn.Module, group: dist.ProcessGroup | None = None) -> Tensor:
    """[MoE layers, E] int64: tokens that chose each expert since `count_experts`, summed over the ranks of `group`: those of
    "dp", because the ranks of "tp" see the same tokens. Every rank of the group calls it."""
    gates: list[Any] = [layer.gate for layer in expert_layers(model)]
    counts = torch.stack([gate.expert_counts for gate in gates])
    if group is not None and group.size() > 1:
        with named("sum of expert counts (all_reduce)", group):
            dist.all_reduce(counts, group=group)
    return counts


def expert_matrix(experts: Any, name: str, expert: int) -> Tensor:
    """One expert's matrix on every rank, sent by the rank that holds its first copy. Every rank calls it."""
    group = _GROUPS[GROUP].ep
    owner, slot = int(experts.copy_ranks[expert, 0]), int(experts.copy_slots[expert, 0])
    local = getattr(experts, name).detach()
    matrix = local[slot].contiguous() if owner == group.rank() else local.new_empty(local.shape[1:])
    if group.size() > 1:
        with named(f"expert {expert} for saving (broadcast)", group):
            dist.broadcast(matrix, group_src=owner, group=group)
    return matrix
