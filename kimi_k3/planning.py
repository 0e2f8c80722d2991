"""What a configuration weighs: parameters, stored bytes, and bytes per device, token and sequence. Arithmetic alone.

All numbers of weights are sums over the tensors of `tensor_layout`. A mesh "tp=8,ep=64" has 64 ranks: `ep` counts every
rank and spans `tp`, so there are ep / tp groups of tp ranks, and each group takes its own sequences. Divided are

    over tp   attention by head, the vocabulary, the widths of the shared experts and of dense MLPs, KDA states by head
    over ep   routed experts, whole ones
    not       norms, AttnRes, router, latent projections, rank projections, vision, MLA latents of a sequence

Where something does not divide evenly, the largest rank is counted; heads have to divide.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kimi_k3.configuration_kimi_k3 import KimiK3Config
from kimi_k3.shards import DTYPE_NAMES, INDEX_FILE, SINGLE_FILE, read_header, read_index
from kimi_k3.tensor_layout import TensorSpec, expected_tensors, is_expert_stack, layer_of

COMPONENTS = (
    "routed_experts", "kda_attention", "moe_non_routed", "mla_attention", "embed_tokens_and_lm_head", "dense_mlp",
    "vision_tower", "mm_projector", "norms_and_attn_res",
)  # fmt: skip
# Caches as the released model keeps them: latents and windows bfloat16, KDA states float32.
ACTIVATION_BYTES, STATE_BYTES = 2, 4

# The dimension that tp splits. A_log is not split: its padding does not divide by heads, and it is a few hundred bytes.
_SPLIT_ROWS = re.compile(
    r"(embed_tokens|lm_head|self_attn\.([qkvbg]|f_b|g_b|q_b|kv_b)_proj|self_attn\.[qkv]_conv1d"
    r"|(\.mlp|shared_experts)\.(gate|up)_proj)\.weight$|\.dt_bias$"
)
_SPLIT_COLUMNS = re.compile(r"(self_attn\.o_proj|(\.mlp|shared_experts)\.down_proj)\.weight$")

# GB as the sheets of 8-device systems give them, taken as 10^9 bytes. A driver may report up to 7 % more.
DEVICE_MEMORY_BYTES = {
    "h200": 141 * 10**9,
    "b200": 180 * 10**9,
    "b300": 268 * 10**9,
    "mi355x": 288 * 10**9,
}


@dataclass(frozen=True)
class MeshShape:
    """How many ranks share the work: `ep` counts all of them, `tp` those that split one sequence's layers."""

    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.ep < 1 or self.ep % self.tp:
            raise ValueError(
                "mesh: want tp >= 1 and ep a multiple of tp (ep counts every rank and spans tp), "
                f"got tp={self.tp}, ep={self.ep}"
            )

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        """ "tp=8,ep=64" in any order; tp left out is 1, ep left out is tp."""
        sizes: dict[str, int] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(tp|ep)\s*=\s*(\d+)\s*", part)
            if match is None or match[1] in sizes:
                raise ValueError(f"mesh: want sizes of tp and ep such as 'tp=8,ep=64', got {text!r}")
            sizes[match[1]] = int(match[2])
        tp = sizes.get("tp", 1)
        return cls(tp, sizes.get("ep", tp))

    @property
    def num_groups(self) -> int:
        """Groups of tp ranks; sequences are spread over them."""
        return self.ep // self.tp


@dataclass(frozen=True)
class PlannedTensor:
    """A module tensor and the part of the model that it belongs to. A stack of routed experts is one of them."""

    name: str
    component: str
    spec: TensorSpec

    @property
    def num_stored(self) -> int:
        """Tensors of a checkpoint: one for each expert of a stack."""
        return self.spec.shape[0] if is_expert_stack(self.name) else 1

    @property
    def num_parameters(self) -> int:
        """A packed byte holds two weights; a scale byte is no parameter."""
        if self.spec.dtype != torch.uint8:
            return self.spec.num_elements
        return 2 * self.spec.num_elements if self.name.endswith("_packed") else 0

    @property
    def split(self) -> tuple[str, int] | None:
        """The mesh axis that divides it and the dimension it divides; None: every rank has all of it."""
        if is_expert_stack(self.name):
            return "ep", 0
        if _SPLIT_ROWS.search(self.name):
            return "tp", 0
        return ("tp", 1) if _SPLIT_COLUMNS.search(self.name) else None

    def device_bytes(self, mesh: MeshShape) -> int:
        """On the rank that holds most."""
        shape = list(self.spec.shape)
        if self.split is not None:
            axis, dim = self.split
            shape[dim] = math.ceil(shape[dim] / getattr(mesh, axis))
        return math.prod(shape) * self.spec.dtype.itemsize


def _component(name: str, config: KimiK3Config) -> str:
    for component in ("vision_tower", "mm_projector"):
        if name.startswith(f"{component}."):
            return component
    if name.startswith(("model.embed_tokens.", "lm_head.")):
        return "embed_tokens_and_lm_head"
    layer_idx = layer_of(name)
    if layer_idx is not None and ".self_attn." in name:
        return "kda_attention" if config.text_config.is_kda_layer(layer_idx) else "mla_attention"
    if ".block_sparse_moe." in name:
        return "routed_experts" if is_expert_stack(name) else "moe_non_routed"
    return "dense_mlp" if ".mlp." in name else "norms_and_attn_res"


def planned_tensors(
    config: KimiK3Config, experts: str | None = None, a_log_length: int | None = None
) -> list[PlannedTensor]:
    """Every tensor of `config`, as a checkpoint stores it.

    Args:
        experts: "mxfp4" or "dequantized"; None: packed if the config has a quantization_config.
        a_log_length: elements of A_log as stored; None: the head count up to a multiple of 128, as the release.
    """
    if experts is None:
        experts = "dequantized" if config.quantization_config is None else "mxfp4"
    if experts not in ("mxfp4", "dequantized"):
        raise ValueError(f"plan: experts: want 'mxfp4' or 'dequantized', got {experts!r}")
    tensors = []
    for name, spec in expected_tensors(config, packed=experts == "mxfp4").items():
        if a_log_length is not None and name.endswith(".A_log"):
            spec = TensorSpec((a_log_length,), spec.dtype)
        tensors.append(PlannedTensor(name, _component(name, config), spec))
    return tensors


class StoredCheckpoint(NamedTuple):
    """What a folder's index and headers say about the weights in it; None where they do not tell."""

    num_bytes: int | None
    experts: str | None
    a_log_length: int | None


def read_stored(folder: str | Path) -> StoredCheckpoint:
    """Look at the index and at the header of one shard; no tensor is read. A folder may hold config.json alone."""
    folder = Path(folder)
    if (folder / INDEX_FILE).is_file():
        files, num_bytes = read_index(folder / INDEX_FILE)
    elif (folder / SINGLE_FILE).is_file():
        header = read_header(folder / SINGLE_FILE)
        files, num_bytes = dict.fromkeys(header, SINGLE_FILE), sum(stored.num_bytes for stored in header.values())
    else:
        return StoredCheckpoint(None, None, None)
    is_packed = any(name.endswith(".weight_packed") for name in files)
    is_plain = any(re.search(r"\.experts\.\d+\.w1\.weight$", name) for name in files)
    a_log = next((name for name in files if name.endswith(".A_log")), None)
    a_log_length = None
    if a_log is not None and (folder / files[a_log]).is_file():
        a_log_length = read_header(folder / files[a_log])[a_log].num_elements
    return StoredCheckpoint(num_bytes, "mxfp4" if is_packed else "dequantized" if is_plain else None, a_log_length)


@dataclass(frozen=True)
class Plan:
    """The weight of a model on a mesh. Activations and library workspace are not counted.

    Args:
        device_memory: bytes of one device; None: fitting is not asked.
        context: tokens that each sequence keeps.     batch: sequences at once, over the whole mesh; wants `context`.
        experts, a_log_length: how they are stored, see `planned_tensors`.
    Raises: ValueError if heads do not divide by tp, naming the key, or an argument is out of range.
    """

    config: KimiK3Config
    mesh: MeshShape = MeshShape()
    device_memory: int | None = None
    context: int | None = None
    batch: int | None = None
    experts: str | None = None
    a_log_length: int | None = None
    tensors: tuple[PlannedTensor, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        text = self.config.text_config
        for key, heads in (
            ("num_attention_heads", text.num_attention_heads),
            ("linear_attn_config.num_heads", text.kda_num_heads),
        ):
            if heads % self.mesh.tp:
                raise ValueError(f"plan: {key} ({heads}) must be a multiple of tp, got tp={self.mesh.tp}")
        for name in ("context", "batch", "device_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"plan: {name}: want at least 1, got {value}")
        if self.batch is not None and self.context is None:
            raise ValueError("plan: batch: want context too, the tokens that each sequence keeps")
        tensors = planned_tensors(self.config, self.experts, self.a_log_length)
        object.__setattr__(self, "tensors", tuple(tensors))

    # The model as a whole.

    @property
    def num_parameters(self) -> int:
        return sum(tensor.num_parameters for tensor in self.tensors)

    @property
    def num_active_parameters(self) -> int:
        """That one text token passes through: the chosen experts and the lm_head; no vision, no embedding."""
        text, active = self.config.text_config, 0
        for tensor in self.tensors:
            if tensor.component == "routed_experts":
                active += tensor.num_parameters * text.num_experts_per_token // text.num_experts
            elif tensor.component not in ("vision_tower", "mm_projector") and "embed_tokens" not in tensor.name:
                active += tensor.num_parameters
        return active

    @property
    def checkpoint_bytes(self) -> int:
        """`metadata.total_size` of the checkpoint's index."""
        return sum(tensor.spec.num_bytes for tensor in self.tensors)

    # What a sequence costs.

    @property
    def _num_kda_layers(self) -> int:
        text = self.config.text_config
        return sum(map(text.is_kda_layer, range(text.num_hidden_layers)))

    @property
    def latent_cache_bytes_per_token(self) -> int:
        """MLA: `[latent | shared key channels]` in each MLA layer; each tp rank keeps all of it."""
        text = self.config.text_config
        return (text.num_hidden_layers - self._num_kda_layers) * text.latent_kv_dim * ACTIVATION_BYTES

    @property
    def kda_state_bytes_per_sequence(self) -> int:
        text = self.config.text_config
        return self._num_kda_layers * text.kda_num_heads * text.kda_head_dim**2 * STATE_BYTES

    @property
    def conv_window_bytes_per_sequence(self) -> int:
        """The last W - 1 inputs of the q, k and v convolutions."""
        text = self.config.text_config
        channels = 3 * text.kda_num_heads * text.kda_head_dim
        return self._num_kda_layers * channels * (text.short_conv_kernel_size - 1) * ACTIVATION_BYTES

    @property
    def attn_res_bytes_per_token(self) -> int:
        """Depth blocks and running sum of a token inside one forward pass; nothing of it is kept."""
        text = self.config.text_config
        return (text.num_sealed_blocks(text.num_hidden_layers) + 1) * text.hidden_size * ACTIVATION_BYTES

    # One device.

    @cached_property
    def device_weight_bytes(self) -> int:
        return sum(tensor.device_bytes(self.mesh) for tensor in self.tensors)

    @property
    def device_fixed_bytes_per_sequence(self) -> int:
        """KDA states and windows, split by head over tp; they do not grow with the context."""
        return (self.kda_state_bytes_per_sequence + self.conv_window_bytes_per_sequence) // self.mesh.tp

    def device_bytes_per_sequence(self, context: int) -> int:
        return self.device_fixed_bytes_per_sequence + context * self.latent_cache_bytes_per_token

    @property
    def sequences_per_device(self) -> int:
        """Sequences of `batch` in the fullest group; one where only a context was given; none without."""
        if self.context is None:
            return 0
        return math.ceil((self.batch or 1) / self.mesh.num_groups)

    @property
    def device_cache_bytes(self) -> int:
        return self.sequences_per_device * self.device_bytes_per_sequence(self.context or 0)

    @property
    def fits(self) -> bool | None:
        if self.device_memory is None:
            return None
        return self.device_weight_bytes + self.device_cache_bytes <= self.device_memory

    @property
    def largest_batch(self) -> int | None:
        """Sequences of `context` tokens over the whole mesh."""
        if self.device_memory is None or self.context is None:
            return None
        free = max(0, self.device_memory - self.device_weight_bytes)
        return free // self.device_bytes_per_sequence(self.context) * self.mesh.num_groups

    @property
    def largest_context(self) -> int | None:
        """Tokens that each sequence of `batch` can keep, at most the model's own limit; no batch: one in each group."""
        if self.device_memory is None or not self.latent_cache_bytes_per_token:
            return None
        sequences = math.ceil((self.batch or 1) / self.mesh.num_groups)
        free = self.device_memory - self.device_weight_bytes - sequences * self.device_fixed_bytes_per_sequence
        room = max(0, free // (sequences * self.latent_cache_bytes_per_token))
        return min(room, self.config.text_config.max_position_embeddings)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, bytes unless the name says otherwise: what `kimi-k3 plan --json` prints."""
        components = {}
        for component in COMPONENTS:
            tensors = [tensor for tensor in self.tensors if tensor.component == component]
            if tensors:
                components[component] = {
                    "parameters": sum(tensor.num_parameters for tensor in tensors),
                    "bytes": sum(tensor.spec.num_bytes for tensor in tensors),
                    "bytes_by_dtype": _bytes_by_dtype(tensors),
                    "device_bytes": sum(tensor.device_bytes(self.mesh) for tensor in tensors),
                }
        tp = self.mesh.tp
        return {
            "parameters": self.num_parameters,
            "active_parameters": self.num_active_parameters,
            "checkpoint_bytes": self.checkpoint_bytes,
            "num_tensors": sum(tensor.num_stored for tensor in self.tensors),
            "bytes_by_dtype": _bytes_by_dtype(self.tensors),
            "components": components,
            "latent_cache_bytes_per_token": self.latent_cache_bytes_per_token,
            "kda_state_bytes_per_sequence": self.kda_state_bytes_per_sequence,
            "conv_window_bytes_per_sequence": self.conv_window_bytes_per_sequence,
            "attn_res_bytes_per_token": self.attn_res_bytes_per_token,
            "mesh": {"tp": tp, "ep": self.mesh.ep, "ranks": self.mesh.ep, "groups": self.mesh.num_groups},
            "device": {
                "weight_bytes": self.device_weight_bytes,
                "latent_cache_bytes_per_token": self.latent_cache_bytes_per_token,
                "kda_state_bytes_per_sequence": self.kda_state_bytes_per_sequence // tp,
                "conv_window_bytes_per_sequence": self.conv_window_bytes_per_sequence // tp,
                "memory_bytes": self.device_memory,
                "sequences": self.sequences_per_device,
                "cache_bytes": self.device_cache_bytes,
                "fits": self.fits,
            },
            "context_tokens": self.context,
            "batch": self.batch,
            "largest_batch": self.largest_batch,
            "largest_context_tokens": self.largest_context,
        }


def _bytes_by_dtype(tensors: Iterable[PlannedTensor]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for tensor in tensors:
        dtype = DTYPE_NAMES[tensor.spec.dtype]
        totals[dtype] = totals.get(dtype, 0) + tensor.spec.num_bytes
    return dict(sorted(totals.items()))
