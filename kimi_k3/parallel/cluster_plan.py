"""A plan past one machine: what crosses the network for a token, how many copies of experts fit, what a lost rank costs.

`Plan` counts weights and caches. This adds what a group of ranks needs. The flow of tokens that is counted: inside a tp
group each rank owns a shard of the tokens, gathers all of them before attention and before a dense MLP or the shared
experts, and reduce-scatters the partial sums after; routed experts take latents over all `ep` ranks. AttnRes, norms, the
router and the latent projections work on the shard and send nothing.

What runs today differs, and `DIFFERS` says so beside the numbers: the plan is of what the network must carry at least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from kimi_k3.planning import ACTIVATION_BYTES, Plan

# What of a device's memory is used: an allocator's slack, libraries and activations take the rest.
USABLE_FRACTION, WORKSPACE_BYTES = 0.92, 4 * 10**9
# A step that can be retried reads one state and writes another.
STATE_SLOTS = 2
CONTEXTS = (8_192, 32_768, 131_072, 1_048_576)
# Each rank sends the best of its share of the vocabulary instead of its logits: id and logit, 8 bytes.
HEAD_CANDIDATES = 64
# From the plan's flow, in what `kimi_k3.parallel` runs.
DIFFERS = (
    "tp ranks hold all tokens, not a shard: one all_reduce (embedding, attention, dense MLP, shared experts) stands for "
    "each reduce_scatter and the all_gather after it, and the routed latents are gathered over tp",
    "dispatch sends latents in the model's dtype, not MXFP8, and an int64 slot with each",
    "the head gathers all logits, not candidates",
)


class Collective(NamedTuple):
    """One collective of a step.

    calls: of one step, over all layers.
    bytes_per_token: in one call. Over tp: what each rank receives for every token of its group. Over ep: what the rank
        that owns the token sends for it, or gets back, if all chosen experts are elsewhere.
    """

    what: str
    kind: str
    axis: str
    calls: int
    bytes_per_token: int


class Copies(NamedTuple):
    """One way to spend memory on copies: slots of a rank in a layer, bytes a rank, and whether a token's caches fit too."""

    name: str
    slots: int
    routed_bytes: int
    fits: bool | None


@dataclass(frozen=True)
class ClusterPlan:
    """`plan` for a mesh of several ranks; see the module. All numbers are for the rank that holds most.

    Raises: RuntimeError if DTensor on a fake process group of as many ranks holds other bytes than the plan counts.
    """

    plan: Plan
    weight_bytes_on_fake_group: int = field(init=False)

    def __post_init__(self) -> None:
        measured = fake_group_bytes(self.plan)
        if measured != self.plan.device_weight_bytes:
            raise RuntimeError(f"plan: counts {self.plan.device_weight_bytes:,} bytes a rank, DTensor has {measured:,}")
        object.__setattr__(self, "weight_bytes_on_fake_group", measured)

    # Sizes.

    @cached_property
    def moe_layers(self) -> int:
        text = self.plan.config.text_config
        return sum(map(text.is_moe_layer, range(text.num_hidden_layers)))

    @cached_property
    def expert_bytes(self) -> int:
        """Of one expert of one layer, as stored."""
        routed = sum(tensor.spec.num_bytes for tensor in self.plan.tensors if tensor.component == "routed_experts")
        return routed // (self.moe_layers * self.plan.config.text_config.num_experts)

    @property
    def slots(self) -> int:
        """Experts of a rank in a layer, with one copy of each."""
        return math.ceil(self.plan.config.text_config.num_experts / self.plan.mesh.ep)

    @property
    def trunk_bytes(self) -> int:
        return self.plan.device_weight_bytes - self.moe_layers * self.slots * self.expert_bytes

    # The network.

    def collectives(self) -> list[Collective]:
        """In the order of a step. Those over an axis of one rank do not happen."""
        text, tp = self.plan.config.text_config, self.plan.mesh.tp
        layers, moe = text.num_hidden_layers, self.moe_layers
        hidden = text.hidden_size * ACTIVATION_BYTES * (tp - 1) // tp
        latent, chosen = text.routed_expert_hidden_size, text.num_experts_per_token
        dense = [
            Collective("embedding", "reduce_scatter", "tp", 1, hidden),
            Collective("attention, in", "all_gather", "tp", layers, hidden),
            Collective("attention, out", "reduce_scatter", "tp", layers, hidden),
            Collective("dense MLP, in", "all_gather", "tp", layers - moe, hidden),
            Collective("dense MLP, out", "reduce_scatter", "tp", layers - moe, hidden),
            Collective("shared experts, in", "all_gather", "tp", moe, hidden),
            Collective("shared experts, out", "reduce_scatter", "tp", moe, hidden),
        ]
        routed = [
            Collective(
                "rows to expect", "all_to_all", "ep", moe, 0
            ),  # counts: 4 bytes to each rank, whatever the tokens
            Collective("dispatch", "all_to_all", "ep", moe, chosen * self.wire_bytes_of_a_latent),
            Collective("combine", "all_to_all", "ep", moe, chosen * latent * ACTIVATION_BYTES),
        ]
        head = [
            Collective("head, in", "all_gather", "tp", 1, hidden),
            Collective("head, candidates", "all_gather", "tp", 1, (tp - 1) * HEAD_CANDIDATES * 8),
        ]
        return [one for one in dense + routed + head if one.calls and getattr(self.plan.mesh, one.axis) > 1]

    @property
    def wire_bytes_of_a_latent(self) -> int:
        """MXFP8, a scale byte for 32 values, where the experts take that; else bfloat16."""
        latent = self.plan.config.text_config.routed_expert_hidden_size
        is_packed = any(tensor.name.endswith("_packed") for tensor in self.plan.tensors)
        return latent + math.ceil(latent / 32) if is_packed else latent * ACTIVATION_BYTES

    def touched(self, ranks: int = 1) -> float:
        """The chance that a token of one layer chose an expert of given ranks, if all experts are equally likely."""
        text = self.plan.config.text_config
        rest = text.num_experts - ranks * self.slots
        return 1 - math.comb(rest, text.num_experts_per_token) / math.comb(text.num_experts, text.num_experts_per_token)

    # Memory.

    @property
    def free_bytes(self) -> int | None:
        """Of a device's usable memory, after one copy of the weights; below zero if they do not fit."""
        memory = self.plan.device_memory
        if memory is None:
            return None
        return int(memory * USABLE_FRACTION) - WORKSPACE_BYTES - self.plan.device_weight_bytes

    def sequence_bytes(self, context: int) -> int:
        """States twice, for a step that can be retried; latents once, since rewriting them changes nothing."""
        fixed = self.plan.device_fixed_bytes_per_sequence
        return STATE_SLOTS * fixed + context * self.plan.latent_cache_bytes_per_token

    def largest_batch(self, context: int) -> int | None:
        """Sequences of `context` tokens over the whole mesh."""
        if self.free_bytes is None:
            return None
        return max(0, self.free_bytes) // self.sequence_bytes(context) * self.plan.mesh.num_groups

    def largest_context(self, batch: int | None = None) -> int | None:
        """Tokens of each of `batch` sequences, at most the model's own limit; None: one sequence in each group."""
        per_token = self.plan.latent_cache_bytes_per_token
        if self.free_bytes is None or not per_token:
            return None
        sequences = math.ceil((batch or 1) / self.plan.mesh.num_groups)
        room = (self.free_bytes - sequences * self.sequence_bytes(0)) // (sequences * per_token)
        return min(max(0, room), self.plan.config.text_config.max_position_embeddings)

    @property
    def cache_bytes(self) -> int:
        """What the plan's batch and context need on a rank; one sequence of one token if it has none."""
        return max(self.plan.sequences_per_device, 1) * self.sequence_bytes(self.plan.context or 1)

    @property
    def spare_slots(self) -> int | None:
        """Slots of a rank in each layer that copies could have beside the plan's batch."""
        if self.free_bytes is None:
            return None
        return max(0, self.free_bytes - self.cache_bytes) // (self.moe_layers * self.expert_bytes)

    def copies(self) -> list[Copies]:
        experts, ranks = self.plan.config.text_config.num_experts, self.plan.mesh.ep
        ways = [
            ("one copy", experts),
            ("+64 active", experts + 64),
            ("+128 active", experts + 128),
            ("two", 2 * experts),
        ]
        found = []
        for name, copies in ways:
            slots, free = math.ceil(copies / ranks), self.free_bytes
            more = (slots - self.slots) * self.moe_layers * self.expert_bytes
            fits = None if free is None else more + self.cache_bytes <= free
            found.append(Copies(name, slots, self.moe_layers * slots * self.expert_bytes, fits))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers: the `cluster` of `kimi-k3 plan --json`."""
        ranks, text = self.plan.mesh.ep, self.plan.config.text_config
        lost = self.moe_layers * self.slots * self.expert_bytes
        totals = dict.fromkeys(("tp", "ep"), 0)
        for one in self.collectives():
            totals[one.axis] += one.calls * one.bytes_per_token
        unpacked = self.moe_layers * 2 * text.num_experts_per_token * text.routed_expert_hidden_size * ACTIVATION_BYTES
        return {
            "collectives": [one._asdict() for one in self.collectives()],
            "differs_today": list(DIFFERS),
            "collectives_per_step": sum(one.calls for one in self.collectives()),
            "bytes_per_token": totals,
            "bytes_per_token_ep_in_bfloat16": unpacked,
            "ranks_per_token_and_layer": ranks * self.touched() if text.num_experts % ranks == 0 else None,
            "expert_bytes": self.expert_bytes,
            "trunk_bytes": self.trunk_bytes,
            "weight_bytes_on_fake_group": self.weight_bytes_on_fake_group,
            "usable_fraction": USABLE_FRACTION,
            "workspace_bytes": WORKSPACE_BYTES,
            "free_bytes": self.free_bytes,
            "state_slots": STATE_SLOTS,
            "sequence_bytes": {str(context): self.sequence_bytes(context) for context in CONTEXTS},
            "largest_batch": {str(context): self.largest_batch(context) for context in CONTEXTS},
            "largest_context_tokens": self.largest_context(self.plan.batch),
            "copies": [one._asdict() for one in self.copies()],
            "spare_slots": self.spare_slots,
            "loss_of_a_rank": {
                "bytes": lost,
                "bytes_per_survivor": lost // (ranks - 1),
                "tokens_touched_per_layer": self.touched(),
            },
        }

    def lines(self) -> list[str]:
        """For people: what `kimi-k3 plan` prints."""
        values, moe = self.to_dict(), self.moe_layers
        lines = [f"{'collective':<22}{'kind':<16}{'over':<6}{'calls a step':>14}{'bytes a token, each':>22}"]
        for one in self.collectives():
            lines.append(f"{one.what:<22}{one.kind:<16}{one.axis:<6}{one.calls:>14,}{one.bytes_per_token:>22,}")
        per_token, loss = values["bytes_per_token"], values["loss_of_a_rank"]
        lines.append(
            f"a token             {per_token['tp']:,} bytes to each rank of its group, {per_token['ep']:,} over ep"
        )
        lines += [f"{'today' if i == 0 else '':<20}{text}" for i, text in enumerate(DIFFERS)]
        lines.append("")
        lines.append(
            f"{'copies of experts':<20}{'slots a layer':>14}{'routed bytes a rank':>22}  fits beside the batch"
        )
        for copy in self.copies():
            fits = {None: "-", True: "yes", False: "no"}[copy.fits]
            lines.append(f"{copy.name:<20}{copy.slots:>14,}{copy.routed_bytes:>22,}  {fits}")
        lines.append(
            f"a lost rank         {loss['bytes']:,} bytes in {moe} layers, {loss['bytes_per_survivor']:,} to each survivor; "
            f"{loss['tokens_touched_per_layer']:.1%} of tokens a layer chose its experts"
        )
        if self.free_bytes is None:
            return lines
        lines.append("")
        usable = f"{USABLE_FRACTION:.0%} of memory less {WORKSPACE_BYTES / 1e9:.0f} GB"
        lines.append(f"to serve, {usable}, states twice so that a step can be retried")
        lines.append(
            f"  free a device     {self.free_bytes:,} bytes; {self.spare_slots:,} more slots a layer beside the batch"
        )
        batches = ", ".join(f"{self.largest_batch(context):,} of {context:,}" for context in CONTEXTS)
        lines.append(f"  largest batch     {batches} tokens, over all devices")
        if self.largest_context(self.plan.batch) is not None:
            lines.append(f"  largest context   {self.largest_context(self.plan.batch):,} tokens")
        return lines


def fake_group_bytes(plan: Plan) -> int:
    """Bytes of weights on rank 0 of a fake process group: meta tensors, distributed as DTensors over the mesh.

    An independent count: the shapes are DTensor's. Leaves a process group that is already there alone, and then makes
    no group of its own: the plan's own count is returned.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        return plan.device_weight_bytes
    mesh = plan.mesh
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.ep)
    try:
        meshes = {
            "tp": init_device_mesh("cpu", (mesh.num_groups, mesh.tp), mesh_dim_names=("group", "tp")),
            "ep": init_device_mesh("cpu", (mesh.ep,), mesh_dim_names=("ep",)),
        }
        known: dict[Any, int] = {}
        total = 0
        for tensor in plan.tensors:
            key = (tensor.spec.shape, tensor.spec.dtype, tensor.split)
            if key not in known:
                axis, dim = tensor.split or ("tp", 0)
                split = Shard(dim) if tensor.split else Replicate()
                placements = [Replicate(), split] if axis == "tp" else [split]
                whole = torch.empty(tensor.spec.shape, dtype=tensor.spec.dtype, device="meta")
                sharded = distribute_tensor(whole, meshes[axis], placements)
                assert isinstance(sharded, DTensor)
                known[key] = sharded.to_local().numel() * tensor.spec.dtype.itemsize
            total += known[key]
        return total
    finally:
        dist.destroy_process_group()
