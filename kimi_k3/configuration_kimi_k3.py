"""KimiK3Config: the keys of the released config.json, checked once, when built."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

MXFP4_GROUP = 32


def _reject(key: str, wanted: str, given: Any) -> None:
    raise ValueError(f"config: {key} must be {wanted}, got {given!r}")


def _require_one_of(key: str, given: Any, *allowed: Any) -> None:
    if given not in allowed:
        _reject(key, " or ".join(repr(value) for value in allowed), given)


def _require_positive_int(prefix: str, config: Any, *keys: str) -> None:
    for key in keys:
        value = getattr(config, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            _reject(f"{prefix}{key}", "a positive integer", value)


def _require_positive(key: str, value: Any) -> None:
    if not _is_number(value) or not value > 0:
        _reject(key, "a positive number", value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _split_known(cls: type, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    names = {f.name for f in dataclasses.fields(cls)} - {"extra"}
    known = {key: copy.deepcopy(value) for key, value in values.items() if key in names}
    return known, {key: copy.deepcopy(value) for key, value in values.items() if key not in names}


class _ConfigPart:
    """Known keys are fields; the rest is kept in `extra` and written back as it came."""

    extra: dict[str, Any]
    # Keys that the release does not have: written only where they differ from the default.
    _own_keys: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Any:
        known, extra = _split_known(cls, values)
        missing = [
            f.name
            for f in dataclasses.fields(cls)  # type: ignore[arg-type]
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in known
        ]
        if missing:
            raise ValueError(f"config: {cls.__name__} needs the keys {missing}")
        return cls(**known, extra=extra)  # type: ignore[call-arg]

    def to_dict(self) -> dict[str, Any]:
        out = {}
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if f.name != "extra" and not (f.name in self._own_keys and value == f.default):
                out[f.name] = copy.deepcopy(value)
        return dict(sorted((out | copy.deepcopy(self.extra)).items()))


@dataclass
class KimiK3TextConfig(_ConfigPart):
    """The language model. Field names are the released keys; `linear_attn_config` holds KDA's, with one-based layer lists."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    linear_attn_config: dict[str, Any]
    attn_res_block_size: int
    num_experts: int
    num_experts_per_token: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    num_key_value_heads: int | None = None
    num_shared_experts: int = 2
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    latent_moe_use_norm: bool = True
    moe_renormalize: bool = True
    moe_router_activation_func: str = "sigmoid"
    routed_scaling_factor: float = 1.0
    topk_method: str = "noaux_tc"
    use_grouped_topk: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    hidden_act: str = "situ"
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 1048576
    num_nextn_predict_layers: int = 0
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    model_type: str = "kimi_linear"
    quantization_config: dict[str, Any] | None = None
    # The released code builds the two rank norms of MLA without an eps, hence with the norm class's own 1e-6.
    mla_rank_norm_eps: float = 1e-6
    extra: dict[str, Any] = field(default_factory=dict)

    _own_keys = ("mla_rank_norm_eps", "quantization_config")

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self._check_values()
        self._check_linear_attn()
        self._check_quantization()

    def _check_values(self) -> None:
        _require_positive_int(
            "", self, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
            "attn_res_block_size", "num_experts", "num_experts_per_token", "num_shared_experts",
            "moe_intermediate_size", "routed_expert_hidden_size", "moe_layer_freq", "num_expert_group", "topk_group",
        )  # fmt: skip
        _require_one_of("model_type", self.model_type, "kimi_linear")
        _require_one_of("hidden_act", self.hidden_act, "situ")
        _require_one_of("moe_router_activation_func", self.moe_router_activation_func, "sigmoid")
        _require_one_of("topk_method", self.topk_method, "noaux_tc")
        _require_one_of("mla_use_nope", self.mla_use_nope, True)
        _require_one_of("mla_use_output_gate", self.mla_use_output_gate, True)
        _require_one_of("tie_word_embeddings", self.tie_word_embeddings, False)
        _require_one_of("num_nextn_predict_layers", self.num_nextn_predict_layers, 0)
        _require_one_of("num_key_value_heads", self.num_key_value_heads, self.num_attention_heads)
        if not 0 <= self.first_k_dense_replace <= self.num_hidden_layers:
            _reject("first_k_dense_replace", f"in 0..{self.num_hidden_layers}", self.first_k_dense_replace)
        if self.num_experts_per_token > self.num_experts:
            _reject("num_experts_per_token", f"at most num_experts ({self.num_experts})", self.num_experts_per_token)
        if self.num_experts % self.num_expert_group:
            _reject("num_expert_group", f"a divisor of num_experts ({self.num_experts})", self.num_expert_group)
        if self.topk_group > self.num_expert_group:
            _reject("topk_group", f"at most num_expert_group ({self.num_expert_group})", self.topk_group)
        reachable = self.topk_group * (self.num_experts // self.num_expert_group)
        if self.use_grouped_topk and self.num_experts_per_token > reachable:
            _reject("topk_group", f"enough to reach {self.num_experts_per_token} experts a token", self.topk_group)
        for key in ("activation_situ_beta", "activation_situ_linear_beta"):
            if getattr(self, key) is not None:
                _require_positive(key, getattr(self, key))
        for key in ("rms_norm_eps", "mla_rank_norm_eps", "initializer_range", "routed_scaling_factor"):
            _require_positive(key, getattr(self, key))
        for key in ("latent_moe_use_norm", "moe_renormalize", "use_grouped_topk"):
            _require_one_of(key, getattr(self, key), True, False)

    def _check_linear_attn(self) -> None:
        linear = self.linear_attn_config
        if not isinstance(linear, dict):
            _reject("linear_attn_config", "an object", linear)
        for key in ("full_attn_layers", "kda_layers", "num_heads", "head_dim", "short_conv_kernel_size"):
            if key not in linear:
                raise ValueError(f"config: linear_attn_config needs the key {key!r}, got {sorted(linear)}")
        for key in ("num_heads", "head_dim"):
            if not isinstance(linear[key], int) or linear[key] < 1:
                _reject(f"linear_attn_config.{key}", "a positive integer", linear[key])
        if not isinstance(linear["short_conv_kernel_size"], int) or linear["short_conv_kernel_size"] < 2:
            _reject("linear_attn_config.short_conv_kernel_size", "an integer >= 2", linear["short_conv_kernel_size"])
        bound = linear.get("gate_lower_bound")
        if bound is not None and not (_is_number(bound) and -5.0 <= bound < 0):
            _reject("linear_attn_config.gate_lower_bound", "in [-5, 0) or absent", bound)
        _require_one_of("linear_attn_config.use_full_rank_gate", linear.get("use_full_rank_gate", False), True, False)
        layers = sorted(linear["full_attn_layers"]) + sorted(linear["kda_layers"])
        if sorted(layers) != list(range(1, self.num_hidden_layers + 1)):
            raise ValueError(
                "config: linear_attn_config.full_attn_layers and kda_layers (one-based) must name each of the layers "
                f"1..{self.num_hidden_layers} (num_hidden_layers) once, got {linear['full_attn_layers']} and "
                f"{linear['kda_layers']}"
            )

    def _check_quantization(self) -> None:
        if self.quantization_config is None:
            return
        quantization = self.quantization_config
        _require_one_of("quantization_config.format", quantization.get("format"), "mxfp4-pack-quantized")
        for name, group in quantization.get("config_groups", {}).items():
            weights = group.get("weights", {})
            prefix = f"quantization_config.config_groups.{name}.weights"
            _require_one_of(f"{prefix}.group_size", weights.get("group_size"), MXFP4_GROUP)
            _require_one_of(f"{prefix}.num_bits", weights.get("num_bits"), 4)
            _require_one_of(f"{prefix}.type", weights.get("type"), "float")
        for key in ("moe_intermediate_size", "routed_expert_hidden_size"):
            if getattr(self, key) % MXFP4_GROUP:
                _reject(key, f"a multiple of {MXFP4_GROUP} for MXFP4 experts", getattr(self, key))

    # Everything below counts layers from 0.

    def is_kda_layer(self, layer_idx: int) -> bool:
        return layer_idx + 1 in self.linear_attn_config["kda_layers"]

    def is_moe_layer(self, layer_idx: int) -> bool:
        return layer_idx >= self.first_k_dense_replace and layer_idx % self.moe_layer_freq == 0

    def num_sealed_blocks(self, layer_idx: int) -> int:
        """Depth blocks in the bank when layer `layer_idx` starts (`num_hidden_layers`: when the last one has ended)."""
        return math.ceil(layer_idx / self.attn_res_block_size)

    @property
    def kda_num_heads(self) -> int:
        return self.linear_attn_config["num_heads"]

    @property
    def kda_head_dim(self) -> int:
        return self.linear_attn_config["head_dim"]

    @property
    def short_conv_kernel_size(self) -> int:
        return self.linear_attn_config["short_conv_kernel_size"]

    @property
    def gate_lower_bound(self) -> float | None:
        return self.linear_attn_config.get("gate_lower_bound")

    @property
    def use_full_rank_gate(self) -> bool:
        return bool(self.linear_attn_config.get("use_full_rank_gate", False))

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_kv_dim(self) -> int:
        """Width of what MLA caches for a token: the normed latent and the shared key channels."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def situ_betas(self) -> tuple[float, float | None]:
        """(beta of the gate branch, beta of the up branch or None for a linear one)."""
        gate_beta = 1.0 if self.activation_situ_beta is None else float(self.activation_situ_beta)
        return gate_beta, self.activation_situ_linear_beta


@dataclass
class KimiK3VisionConfig(_ConfigPart):
    """The vision tower and the projector."""

    vt_hidden_size: int
    vt_intermediate_size: int
    vt_num_hidden_layers: int
    vt_num_attention_heads: int
    qkv_hidden_size: int
    text_hidden_size: int
    mm_hidden_size: int
    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    init_pos_emb_time: int = 4
    merge_kernel_size: list[int] = field(default_factory=lambda: [2, 2])
    pos_emb_type: str = "divided_fixed"
    pos_emb_interpolation_mode: str = "bilinear"
    merge_type: str = "sd2_tpool"
    norm_type: str = "rmsnorm"
    mlp_type: str = "mlp2"
    activation_func: str = "gelu_pytorch_tanh"
    mm_projector_type: str = "patchmergerv2"
    projector_hidden_act: str = "gelu"
    projector_ln_eps: float = 1e-5
    attn_bias: bool = False
    linear_bias: bool = False
    patch_embed_proj_bias: bool = False
    # The released tower's norms take torch's default eps, which torch evaluates as float32's.
    vit_norm_eps: float = 1.1920929e-07
    extra: dict[str, Any] = field(default_factory=dict)

    _own_keys = ("vit_norm_eps",)

    def __post_init__(self) -> None:
        _require_positive_int(
            "vision_config.", self, "vt_hidden_size", "vt_intermediate_size", "vt_num_hidden_layers",
            "vt_num_attention_heads", "qkv_hidden_size", "text_hidden_size", "mm_hidden_size", "patch_size",
            "init_pos_emb_height", "init_pos_emb_width", "init_pos_emb_time",
        )  # fmt: skip
        for key, only in {
            "pos_emb_type": "divided_fixed", "pos_emb_interpolation_mode": "bilinear", "merge_type": "sd2_tpool",
            "norm_type": "rmsnorm", "mlp_type": "mlp2", "activation_func": "gelu_pytorch_tanh",
            "mm_projector_type": "patchmergerv2", "projector_hidden_act": "gelu", "attn_bias": False,
            "linear_bias": False, "patch_embed_proj_bias": False,
        }.items():  # fmt: skip
            _require_one_of(f"vision_config.{key}", getattr(self, key), only)
        if self.qkv_hidden_size % (4 * self.vt_num_attention_heads):
            wanted = f"a multiple of 4 x vt_num_attention_heads ({self.vt_num_attention_heads}), for the 2-D rotation"
            _reject("vision_config.qkv_hidden_size", wanted, self.qkv_hidden_size)
        if self.mm_hidden_size != self.vt_hidden_size:
            _reject("vision_config.mm_hidden_size", f"vt_hidden_size ({self.vt_hidden_size})", self.mm_hidden_size)
        if list(self.merge_kernel_size) != [2, 2]:
            _reject("vision_config.merge_kernel_size", "[2, 2]", self.merge_kernel_size)


class KimiK3Config:
    """The whole model: `text_config`, `vision_config` (None for a text checkpoint) and the top-level keys.

    Raises ValueError, naming the key, where a value is unknown to K3 or contradicts another.
    """

    model_type = "kimi_k3"
    _token_keys = ("bos_token_id", "eos_token_id", "pad_token_id")

    def __init__(
        self, text_config: KimiK3TextConfig, vision_config: KimiK3VisionConfig | None = None, **top_level: Any
    ) -> None:
        self.text_config = text_config
        self.vision_config = vision_config
        self.extra = {"architectures": ["KimiK3ForConditionalGeneration"], "dtype": "bfloat16"} | top_level
        _require_one_of("model_type", self.extra.pop("model_type", self.model_type), self.model_type)
        _require_one_of("tie_word_embeddings", self.extra.get("tie_word_embeddings", False), False)
        for key in self._token_keys:
            inner, outer = getattr(text_config, key), self.extra.get(key)
            if inner is not None and outer is not None and inner != outer:
                _reject(f"text_config.{key}", f"equal to the top-level {key} ({outer!r})", inner)
        hoisted = self.extra.get("quantization_config")
        if hoisted is not None:
            if text_config.quantization_config not in (None, hoisted):
                raise ValueError(
                    "config: quantization_config stands at the top level and in text_config, and they differ"
                )
            dataclasses.replace(text_config, quantization_config=hoisted)  # checks it
        if vision_config is not None and vision_config.text_hidden_size != text_config.hidden_size:
            wanted = f"text_config.hidden_size ({text_config.hidden_size})"
            _reject("vision_config.text_hidden_size", wanted, vision_config.text_hidden_size)

    def _token_id(self, key: str) -> Any:
        value = self.extra.get(key)
        return getattr(self.text_config, key) if value is None else value

    @property
    def bos_token_id(self) -> int | None:
        return self._token_id("bos_token_id")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation: `eos_token_id`, which may be a number, a list or absent."""
        value = self._token_id("eos_token_id")
        if value is None:
            return ()
        return (value,) if isinstance(value, int) else tuple(value)

    @property
    def pad_token_id(self) -> int | None:
        return self._token_id("pad_token_id")

    @property
    def media_placeholder_token_id(self) -> int | None:
        return self.extra.get("media_placeholder_token_id")

    @property
    def quantization_config(self) -> dict[str, Any] | None:
        """The experts' packing, wherever the file keeps it. The loader decides by what the shards hold, not by this."""
        return self.extra.get("quantization_config") or self.text_config.quantization_config

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> KimiK3Config:
        if values.get("model_type") != cls.model_type or not isinstance(values.get("text_config"), dict):
            raise ValueError(
                f"config: want model_type {cls.model_type!r} with a text_config, got model_type "
                f"{values.get('model_type')!r} with the keys {sorted(values)}"
            )
        top_level = {key: copy.deepcopy(v) for key, v in values.items() if key not in ("text_config", "vision_config")}
        vision = values.get("vision_config")
        return cls(
            KimiK3TextConfig.from_dict(values["text_config"]),
            None if vision is None else KimiK3VisionConfig.from_dict(vision),
            **top_level,
        )

    def to_dict(self) -> dict[str, Any]:
        out = copy.deepcopy(self.extra) | {"model_type": self.model_type, "text_config": self.text_config.to_dict()}
        if self.vision_config is not None:
            out["vision_config"] = self.vision_config.to_dict()
        return dict(sorted(out.items()))

    @classmethod
    def from_pretrained(cls, path_or_repo: str | Path, **hub_options: Any) -> KimiK3Config:
        """Read config.json of a folder or a Hub repository (`revision`, `cache_dir`, `token`, `local_files_only`)."""
        from kimi_k3.checkpoint import resolve_file

        file = resolve_file(path_or_repo, "config.json", **hub_options)
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file}: not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{file}: want a JSON object, got {type(values).__name__}")
        return cls.from_dict(values)

    def save_pretrained(self, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "config.json").write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KimiK3Config) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"KimiK3Config({json.dumps(self.to_dict(), indent=2)})"

    @classmethod
    def tiny(cls) -> KimiK3Config:
        """A small model with every structural feature: 13 layers, 8.1 M text parameters, and a small vision tower."""
        kda_layers = [1, 2, 3, 5, 6, 7, 9, 10, 11]
        text = KimiK3TextConfig(
            vocab_size=640, hidden_size=128, intermediate_size=320, num_hidden_layers=13, num_attention_heads=6,
            q_lora_rank=48, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24,
            linear_attn_config={
                "full_attn_layers": [4, 8, 12, 13], "kda_layers": kda_layers, "num_heads": 5, "head_dim": 32,
                "short_conv_kernel_size": 4, "use_full_rank_gate": True, "gate_lower_bound": -5.0,
            },
            attn_res_block_size=4, num_experts=24, num_experts_per_token=4, moe_intermediate_size=96,
            routed_expert_hidden_size=64, activation_situ_beta=4.0, activation_situ_linear_beta=25.0,
            max_position_embeddings=4096, bos_token_id=600, eos_token_id=602, pad_token_id=639,
        )  # fmt: skip
        vision = KimiK3VisionConfig(
            vt_hidden_size=32, vt_intermediate_size=64, vt_num_hidden_layers=2, vt_num_attention_heads=3,
            qkv_hidden_size=48, text_hidden_size=128, mm_hidden_size=32, init_pos_emb_height=8, init_pos_emb_width=8,
        )  # fmt: skip
        return cls(
            text, vision, bos_token_id=600, eos_token_id=602, pad_token_id=639, media_placeholder_token_id=605,
            tie_word_embeddings=False,
        )  # fmt: skip
