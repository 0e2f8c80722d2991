"""Names, shapes and dtypes of the released checkpoint: which file tensor is which part of which module tensor.

Two differences between files and modules: files put `language_model.` before the language model's names, and they hold
each routed expert alone (`experts.7.w1.weight_packed`) where the module holds a stack over experts (`experts.w1_packed`).
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import torch

from kimi_k3.configuration_kimi_k3 import MXFP4_GROUP, KimiK3Config, KimiK3TextConfig, KimiK3VisionConfig
from kimi_k3.layers.kda import A_LOG_MULTIPLE

TEXT_PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.")

_FILE_EXPERT = re.compile(r"(.+\.experts\.)(0|[1-9][0-9]*)\.(w[123])\.weight(_packed|_scale)?")
_MODULE_EXPERT = re.compile(r"(.+\.experts\.)(w[123])(_packed|_scale)?")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_FLOAT32_NAMES = re.compile(
    r"\.self_attn\.(A_log|dt_bias|[qkv]_conv1d\.weight|o_norm\.weight)$|\.gate\.e_score_correction_bias$"
)


class TensorSpec(NamedTuple):
    """Of a module tensor: a stack of routed experts is one tensor, experts first."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # as the release stores it

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


def module_name_of(file_name: str) -> tuple[str, int | None]:
    """The module tensor that a file's tensor belongs to, and which expert of the stack it is (None: all of the tensor)."""
    name = file_name.removeprefix(TEXT_PREFIX)
    expert = _FILE_EXPERT.fullmatch(name) if ".experts." in name else None
    if expert is None:
        return name, None
    return f"{expert[1]}{expert[3]}{expert[4] or ''}", int(expert[2])


def file_name_of(module_name: str, expert: int | None = None) -> str:
    """The file's name for a module tensor, or for one expert of a stack. The inverse of `module_name_of`."""
    prefix = "" if module_name.startswith(VISION_PREFIXES) else TEXT_PREFIX
    if expert is None:
        return prefix + module_name
    stack = _MODULE_EXPERT.fullmatch(module_name)
    if stack is None:
        raise ValueError(f"file_name_of: want the name of a stack of experts, got {module_name!r}")
    return f"{prefix}{stack[1]}{expert}.{stack[2]}.weight{stack[3] or ''}"


def is_expert_stack(module_name: str) -> bool:
    return _MODULE_EXPERT.fullmatch(module_name) is not None


def layer_of(name: str) -> int | None:
    """The layer that a file's or module's tensor belongs to; None for embedding, head, final norms and vision."""
    layer = _LAYER.match(name.removeprefix(TEXT_PREFIX))
    return int(layer[1]) if layer else None


def released_dtype(module_name: str) -> torch.dtype:
    """uint8 for packed experts, float32 for the few tensors that the release keeps so, bfloat16 for the rest."""
    if module_name.endswith(("_packed", "_scale")):
        return torch.uint8
    return torch.float32 if _FLOAT32_NAMES.search(module_name) else torch.bfloat16


def is_in_stage(module_name: str, layers: range, num_layers: int) -> bool:
    """Whether a stage of `layers` holds a tensor: embedding and vision with the first, head and final norms with the last."""
    layer = layer_of(module_name)
    if layer is not None:
        return layer in layers
    if module_name.startswith((*VISION_PREFIXES, "model.embed_tokens.")):
        return layers.start == 0
    return layers.stop == num_layers


def expected_tensors(config: KimiK3Config, packed: bool) -> dict[str, TensorSpec]:
    """Every module tensor of the whole model with its shape, from the config alone: independent of the module classes.

    Args:
        packed: routed experts as MXFP4 codes and scales, else as plain matrices.
    """
    shapes = _text_shapes(config.text_config, packed)
    if config.vision_config is not None:
        shapes |= _vision_shapes(config.vision_config)
    return {name: TensorSpec(shape, released_dtype(name)) for name, shape in shapes.items()}


def _text_shapes(config: KimiK3TextConfig, packed: bool) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attention_res_norm.weight": (hidden,),
            "self_attention_res_proj.weight": (1, hidden),
            "mlp_res_norm.weight": (hidden,),
            "mlp_res_proj.weight": (1, hidden),
        }
        attention = _kda_shapes(config) if config.is_kda_layer(layer) else _mla_shapes(config)
        parts |= {f"self_attn.{name}": shape for name, shape in attention.items()}
        if config.is_moe_layer(layer):
            parts |= {f"block_sparse_moe.{name}": shape for name, shape in _moe_shapes(config, packed).items()}
        else:
            parts |= {f"mlp.{name}": shape for name, shape in _mlp_shapes(hidden, config.intermediate_size).items()}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return shapes | {
        "model.output_attn_res_norm.weight": (hidden,),
        "model.output_attn_res_proj.weight": (1, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }


def _kda_shapes(config: KimiK3TextConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads, dim = config.hidden_size, config.kda_num_heads, config.kda_head_dim
    width = heads * dim
    shapes: dict[str, tuple[int, ...]] = {}
    for branch in "qkv":
        shapes[f"{branch}_proj.weight"] = (width, hidden)
        shapes[f"{branch}_conv1d.weight"] = (width, 1, config.short_conv_kernel_size)
    shapes |= {
        "A_log": (math.ceil(heads / A_LOG_MULTIPLE) * A_LOG_MULTIPLE,),
        "dt_bias": (width,),
        "f_a_proj.weight": (dim, hidden),
        "f_b_proj.weight": (width, dim),
        "b_proj.weight": (heads, hidden),
        "o_norm.weight": (dim,),
        "o_proj.weight": (hidden, width),
    }
    if config.use_full_rank_gate:
        return shapes | {"g_proj.weight": (width, hidden)}
    return shapes | {"g_a_proj.weight": (dim, hidden), "g_b_proj.weight": (width, dim)}


def _mla_shapes(config: KimiK3TextConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads, values = config.hidden_size, config.num_attention_heads, config.v_head_dim
    return {
        "q_a_proj.weight": (config.q_lora_rank, hidden),
        "q_a_layernorm.weight": (config.q_lora_rank,),
        "q_b_proj.weight": (heads * config.qk_head_dim, config.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (config.latent_kv_dim, hidden),
        "kv_a_layernorm.weight": (config.kv_lora_rank,),
        "kv_b_proj.weight": (heads * (config.qk_nope_head_dim + values), config.kv_lora_rank),
        "g_proj.weight": (heads * values, hidden),
        "o_proj.weight": (hidden, heads * values),
    }


def _mlp_shapes(hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        "gate_proj.weight": (width, hidden),
        "up_proj.weight": (width, hidden),
        "down_proj.weight": (hidden, width),
    }


def _moe_shapes(config: KimiK3TextConfig, packed: bool) -> dict[str, tuple[int, ...]]:
    hidden, latent, experts = config.hidden_size, config.routed_expert_hidden_size, config.num_experts
    width = config.moe_intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "gate.weight": (experts, hidden),
        "gate.e_score_correction_bias": (experts,),
        "routed_expert_down_proj.weight": (latent, hidden),
        "routed_expert_up_proj.weight": (hidden, latent),
    }
    if config.latent_moe_use_norm:
        shapes["routed_expert_norm.weight"] = (latent,)
    shared = _mlp_shapes(hidden, config.num_shared_experts * width)
    shapes |= {f"shared_experts.{name}": shape for name, shape in shared.items()}
    for name, rows, columns in (("w1", width, latent), ("w2", latent, width), ("w3", width, latent)):
        if packed:
            shapes[f"experts.{name}_packed"] = (experts, rows, columns // 2)
            shapes[f"experts.{name}_scale"] = (experts, rows, columns // MXFP4_GROUP)
        else:
            shapes[f"experts.{name}"] = (experts, rows, columns)
    return shapes


def _vision_shapes(config: KimiK3VisionConfig) -> dict[str, tuple[int, ...]]:
    hidden, side = config.vt_hidden_size, config.patch_size
    merged = hidden * math.prod(config.merge_kernel_size)
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (hidden, 3, side, side),
        "vision_tower.patch_embed.pos_emb.weight": (config.init_pos_emb_height, config.init_pos_emb_width, hidden),
    }
    for block in range(config.vt_num_hidden_layers):
        parts = {
            "norm0.weight": (hidden,),
            "norm1.weight": (hidden,),
            "wqkv.weight": (3 * config.qkv_hidden_size, hidden),
            "wo.weight": (hidden, config.qkv_hidden_size),
            "mlp.fc0.weight": (config.vt_intermediate_size, hidden),
            "mlp.fc1.weight": (hidden, config.vt_intermediate_size),
        }
        shapes |= {f"vision_tower.encoder.blocks.{block}.{name}": shape for name, shape in parts.items()}
    return shapes | {
        "vision_tower.encoder.final_layernorm.weight": (hidden,),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.2.weight": (config.text_hidden_size, merged),
        "mm_projector.post_norm.weight": (config.text_hidden_size,),
    }
