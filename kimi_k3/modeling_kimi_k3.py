"""Kimi K3 in plain PyTorch: the file to read first.

    P, bank = embedding, []                                  P: running sum, bank: sealed depth blocks
    for each layer l:
        x = mix(P, bank)                                     AttnRes, layers/attn_res.py
        if l % S == 0: bank.append(P); P = 0
        P = P + attention(input_layernorm(x))                KDA or gated MLA, layers/kda.py, layers/mla.py
        P = P + mlp(post_attention_layernorm(mix(P, bank)))  dense or LatentMoE, layers/mlp.py, layers/moe.py
    logits = lm_head(norm(mix(P, bank)))

Inside, tokens are packed [T, D] with sequence boundaries; batches with padding are packed on entry (packing.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimi_k3.cache import KimiK3Cache, PackedBatch, batch_by_tokens, batch_without_cache, make_pools
from kimi_k3.compilation import (
    INDUCTOR_OPTIONS,
    keep_graphs,
    mark_batch_dynamic,
    mark_layer_dynamic,
    symbolic_shapes,
)
from kimi_k3.configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig
from kimi_k3.layers.attn_res import Depth, depth_table, empty_bank, mix_and_norm, seal
from kimi_k3.layers.kda import KimiDeltaAttention, ShortConv1d
from kimi_k3.layers.linear import project
from kimi_k3.layers.mla import KimiMLAAttention
from kimi_k3.layers.mlp import KimiK3MLP
from kimi_k3.layers.moe import KimiK3Experts, KimiK3Router, KimiK3SparseMoE
from kimi_k3.layers.norm import RMSNorm
from kimi_k3.packing import TokenLayout, layout_from_cu_seqlens, layout_from_mask
from kimi_k3.vision import PatchMergerProjector, SplicedPrompt, VisionTower, splice_image_features
from kimi_k3_kernels.library import compute_dtype

IGNORE_INDEX = -100
FEW_ROWS = 32  # up to so many rows the lm_head is read like a decode step's weights


@dataclass
class CausalLMOutput:
    """What `forward` returns; every batch-shaped tensor is [B, T, ...] with zeros at padding.

    logits: [B, T or logits_to_keep, vocab], the model's dtype.     loss: [] float32 (float64 for float64), with labels.
    past_key_values: the cache, with use_cache or when one was given.
    hidden_states: the running sum before the first layer and after each one, then the lm_head's input, [B, T, D].
    router_logits: of each MoE layer in order, [B, T, E] float32.
    """

    logits: Tensor
    loss: Tensor | None = None
    past_key_values: KimiK3Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None


class KimiK3DecoderLayer(nn.Module):
    """One layer: two mixes over depth, attention, feed-forward."""

    def __init__(self, config: KimiK3TextConfig, layer_idx: int, packed_experts: bool) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attention_res_norm = RMSNorm(hidden, eps)
        self.self_attention_res_proj = nn.Linear(hidden, 1, bias=False)
        self.input_layernorm = RMSNorm(hidden, eps)
        mixer = KimiDeltaAttention if config.is_kda_layer(layer_idx) else KimiMLAAttention
        self.self_attn = mixer(config, layer_idx)
        self.mlp_res_norm = RMSNorm(hidden, eps)
        self.mlp_res_proj = nn.Linear(hidden, 1, bias=False)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.starts_sum = layer_idx % config.attn_res_block_size == 0
        self.is_moe = config.is_moe_layer(layer_idx)
        if self.is_moe:
            self.block_sparse_moe = KimiK3SparseMoE(config, packed_experts)
        else:
            self.mlp = KimiK3MLP(config, config.intermediate_size)

    def forward(
        self, running_sum: Tensor, bank: Tensor, depth: Depth, batch: PackedBatch, pools: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """[T, D] -> [T, D], and router logits. `bank` already holds `running_sum` where this layer starts a new sum."""
        x = mix_and_norm(
            running_sum, bank, depth.sealed_before, self.self_attention_res_norm, self.self_attention_res_proj,
            self.input_layernorm,
        )  # fmt: skip
        attention = self.self_attn(x, batch, pools)
        if torch.compiler.is_compiling():  # one graph for the layers that start a new sum and those that do not
            running_sum = torch.where(depth.starts_sum, attention, running_sum + attention)
        else:
            running_sum = attention if self.starts_sum else running_sum + attention
        x = mix_and_norm(
            running_sum, bank, depth.sealed_after, self.mlp_res_norm, self.mlp_res_proj, self.post_attention_layernorm
        )
        if self.is_moe:
            out, router_logits = self.block_sparse_moe(x, batch.is_decode, batch.is_invariant)
            return running_sum + out, router_logits
        return running_sum + self.mlp(x, batch.is_decode, batch.is_invariant), None


class KimiK3Model(nn.Module):
    """The decoder, or the stage of it that `layers` names: embedding with the first layer, final norm with the last."""

    def __init__(self, config: KimiK3TextConfig, layers: range, packed_experts: bool) -> None:
        super().__init__()
        self.config = config
        self.layer_range = layers
        self.is_first_stage, self.is_last_stage = layers.start == 0, layers.stop == config.num_hidden_layers
        if self.is_first_stage:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(i): KimiK3DecoderLayer(config, i, packed_experts) for i in layers})
        if self.is_last_stage:
            self.output_attn_res_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.output_attn_res_proj = nn.Linear(config.hidden_size, 1, bias=False)
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._depths: list[Depth] = []
        self.has_compiled_layers = False
        self.is_batch_invariant = False  # set by KimiK3ForCausalLM.set_batch_invariant

    def _depth_rows(self, device: torch.device) -> list[Depth]:
        if not self._depths or self._depths[0].starts_sum.device != device:
            with torch.inference_mode(False):  # it outlives this call, and training saves its tensors for backward
                self._depths = depth_table(self.config, device)
        return self._depths

    def forward(
        self, running_sum: Tensor, batch: PackedBatch, pools: dict[int, tuple[Tensor, ...]], bank: Tensor | None = None,
        keep_sums: bool = True, is_invariant: bool | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
        """Run the layers over packed tokens.

        Args:
            running_sum: [T, D]; the embeddings at the first stage.
            bank: [M, T, D], the blocks that earlier stages sealed; None at the first.
            keep_sums: False leaves the sums after each layer out of the result, and so their memory.
            is_invariant: the mode of this call, see `KimiK3ForCausalLM.set_batch_invariant`; None: the model's.
        Returns: (running_sum, bank [M, T, D], the running sum after each layer, the router logits [T, E] of each MoE
            layer). At the last stage `final_hidden` turns the first two into the lm_head's input.
        """
        if self.is_batch_invariant if is_invariant is None else is_invariant:
            _refuse_compiled_invariance(self.has_compiled_layers)
            if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters()):
                raise NotImplementedError("batch-invariant mode has no gradient: run it under torch.no_grad()")
            batch = batch_by_tokens(batch, running_sum.shape[0])
        start = self.layer_range.start
        sealed = self.config.num_sealed_blocks(start)
        if (0 if bank is None else bank.shape[0]) != sealed:
            raise ValueError(
                f"bank: want the {sealed} depth blocks sealed before layer {start}, got "
                f"{0 if bank is None else bank.shape[0]}"
            )
        room = empty_bank(self.config, running_sum)
        for index in range(sealed):
            room = seal(room, index, bank[index])  # type: ignore[index]
        depths = self._depth_rows(running_sum.device)
        sums, router_logits = [], []
        if self.has_compiled_layers:
            mark_batch_dynamic(batch)
        with symbolic_shapes() if self.has_compiled_layers else nullcontext():
            for layer_idx in self.layer_range:
                if layer_idx % self.config.attn_res_block_size == 0:
                    room = seal(room, sealed, running_sum)
                    sealed += 1
                if self.has_compiled_layers:
                    mark_layer_dynamic(running_sum, room, pools[layer_idx])
                layer = self.layers[str(layer_idx)]
                running_sum, logits = layer(running_sum, room, depths[layer_idx], batch, pools[layer_idx])
                if keep_sums:
                    sums.append(running_sum)
                if logits is not None:
                    router_logits.append(logits)
        return running_sum, room[:sealed], sums, router_logits

    def final_hidden(self, running_sum: Tensor, bank: Tensor) -> Tensor:
        """norm(mix(running_sum, bank)): what the lm_head reads, [T, D]."""
        num_blocks = torch.tensor(bank.shape[0], device=running_sum.device)
        return mix_and_norm(
            running_sum, bank, num_blocks, self.output_attn_res_norm, self.output_attn_res_proj, self.norm
        )


def _refuse_compiled_invariance(is_both: bool) -> None:
    if is_both:
        raise NotImplementedError(
            "set_batch_invariant: want a model without compile_blocks: a compiler orders sums by their sizes"
        )


class KimiK3ForCausalLM(nn.Module):
    """The Kimi K3 language model.

    `KimiK3ForCausalLM(config)` has fresh float32 weights for training; `from_pretrained` opens a checkpoint.

    Args:
        config: KimiK3Config.
        experts: "dequantized" for plain, trainable experts, "mxfp4" for packed, frozen ones.
        layers: a contiguous range of layers for a pipeline stage or a sample; None: all.
    """

    def __init__(self, config: KimiK3Config, *, experts: str = "dequantized", layers: range | None = None) -> None:
        super().__init__()
        text = config.text_config
        if experts not in ("mxfp4", "dequantized"):
            raise ValueError(f"experts: want 'mxfp4' or 'dequantized', got {experts!r}")
        layers = range(text.num_hidden_layers) if layers is None else layers
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= text.num_hidden_layers:
            raise ValueError(f"layers: want a contiguous range within 0..{text.num_hidden_layers}, got {layers}")
        self.config = config
        self.pool_config = text  # sizes the cache's pools; tensor parallelism leaves fewer heads to each rank
        self.model = KimiK3Model(text, layers, packed_experts=experts == "mxfp4")
        if self.model.is_last_stage:
            self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.generation_config: dict[str, Any] = {}  # of generation_config.json, where a checkpoint has one
        if self.device.type != "meta":  # there a checkpoint will bring the values
            self.reset_parameters()

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations: that of the projections, not of the few tensors that stay float32."""
        return next(p.dtype for name, p in self.named_parameters() if name.endswith("input_layernorm.weight"))

    @property
    def device(self) -> torch.device:
        # Offloaded layers are on meta between their calls.
        return next((p.device for p in self.parameters() if not p.is_meta), torch.device("meta"))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw fresh weights (packed experts excepted: those only ever come from a checkpoint)."""
        std = self.config.text_config.initializer_range
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding, KimiK3Router)):
                module.weight.normal_(std=std)
            elif isinstance(module, ShortConv1d):
                bound = module.weight.shape[-1] ** -0.5
                module.weight.uniform_(-bound, bound)
            elif isinstance(module, KimiK3Experts) and not module.packed:
                for weight in module.parameters():
                    weight.normal_(std=std)
            elif isinstance(module, KimiDeltaAttention):
                module.A_log.zero_()
                step = torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp_().clamp_(min=1e-4)
                module.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
        # A zero scoring vector makes each mix the plain average of its sources.
        for name, parameter in self.named_parameters():
            if name.endswith("_res_proj.weight"):
                parameter.zero_()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: KimiK3Cache | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        output_hidden_states: bool = False,
        output_router_logits: bool = False,
    ) -> CausalLMOutput:
        """Logits, and with `labels` the loss, of a batch or of packed sequences.

        Args:
            input_ids: [B, T] integers; or inputs_embeds [B, T, D], exactly one of the two.
            attention_mask: [B, T] of zeros and ones (with a cache also [B, past + T]): left or right padding.
            cu_seqlens: int32 [N + 1] from 0 to T: `input_ids` is [1, T] and holds N packed sequences.
            labels: [B, T], unshifted; -100 is ignored. The loss is the mean over the labels that count.
            past_key_values: the cache of earlier tokens, one row for each sequence; it is written.
            use_cache: start a cache when none is given.
            logits_to_keep: only the last so many tokens of each sequence get logits; 0: all.
        Raises: ValueError for shapes, masks or boundaries that do not fit.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("forward: want exactly one of input_ids and inputs_embeds")
        if not (self.model.is_first_stage and self.model.is_last_stage):
            raise ValueError(
                f"forward: this model holds {self.model.layer_range} only; call .model with (running_sum, bank)"
            )
        given = input_ids if inputs_embeds is None else inputs_embeds
        assert given is not None
        if given.ndim != (2 if inputs_embeds is None else 3) or 0 in given.shape[:2]:
            raise ValueError(
                f"forward: want input_ids [B, T] or inputs_embeds [B, T, D], not empty, got {list(given.shape)}"
            )
        width = self.config.text_config.hidden_size
        if inputs_embeds is not None and inputs_embeds.shape[2] != width:
            raise ValueError(f"forward: want inputs_embeds [B, T, {width}], got {list(inputs_embeds.shape)}")
        if logits_to_keep < 0:
            raise ValueError(f"forward: want logits_to_keep >= 0 (0: all), got {logits_to_keep}")
        layout = self._layout(given, attention_mask, cu_seqlens, past_key_values)
        if inputs_embeds is None:
            embeds = self.model.embed_tokens(layout.pack(given))
        else:
            embeds = layout.pack(inputs_embeds)

        config, device = self.pool_config, embeds.device
        is_invariant = self.model.is_batch_invariant
        if past_key_values is None and use_cache:
            past_key_values = self.make_cache(len(layout.lengths))
        cache = past_key_values
        if cache is None and is_invariant:  # a token's latents are always read from a pool; this one is dropped again
            cache = self.make_cache(len(layout.lengths))
        if cache is None:
            batch = batch_without_cache(layout.lengths, device)
            pools = {i: make_pools(config, i, 2, 2, 1, embeds.dtype, device) for i in self.model.layer_range}
        else:
            batch, pools = cache.prepare(layout.lengths), cache.pools
        running_sum, bank, sums, router_logits = self.model(embeds, batch, pools, keep_sums=output_hidden_states)
        if past_key_values is not None:
            past_key_values.commit(layout.lengths)
            past_key_values.num_columns += max(layout.lengths) if cu_seqlens is not None else given.shape[1]

        kept, kept_layout = (None, layout) if logits_to_keep == 0 else layout.last(logits_to_keep)
        hidden = self.model.final_hidden(running_sum, bank) if output_hidden_states or kept is None else None
        if kept is None:
            assert hidden is not None
            read = hidden
        else:
            kept = kept.to(device)
            read = self.model.final_hidden(running_sum[kept], bank[:, kept])
        logits = self.head_logits(read)
        loss = None if labels is None else self._loss(logits, labels, layout, kept)
        hidden_states = (embeds, *sums, hidden) if output_hidden_states else None
        return CausalLMOutput(
            logits=kept_layout.unpack(logits),
            loss=loss,
            past_key_values=past_key_values,
            hidden_states=None if hidden_states is None else tuple(map(layout.unpack, hidden_states)),
            router_logits=tuple(map(layout.unpack, router_logits)) if output_router_logits else None,
        )

    def head_logits(self, hidden_TD: Tensor, is_invariant: bool | None = None) -> Tensor:
        """Logits [T, V] of what `KimiK3Model.final_hidden` returns, in the model's dtype. is_invariant: None: as the model."""
        is_decode = hidden_TD.shape[0] <= FEW_ROWS
        mode = self.model.is_batch_invariant if is_invariant is None else is_invariant
        return project(hidden_TD, [self.lm_head], is_decode, mode)[0]

    def make_cache(self, num_rows: int) -> KimiK3Cache:
        """An empty cache for a batch of `num_rows` rows."""
        return KimiK3Cache(self.pool_config, num_rows, self.model.layer_range, self.dtype, self.device)

    def _layout(
        self, given: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None, cache: KimiK3Cache | None
    ) -> TokenLayout:
        shape = (given.shape[0], given.shape[1])
        if cu_seqlens is not None:
            if attention_mask is not None:
                raise ValueError("forward: want attention_mask or cu_seqlens, not both")
            return layout_from_cu_seqlens(cu_seqlens, shape)
        pasts = () if cache is None else (cache.get_seq_length(), cache.num_columns)
        return layout_from_mask(attention_mask, shape, pasts, given.device)

    @staticmethod
    def _loss(logits: Tensor, labels: Tensor, layout: TokenLayout, kept: Tensor | None) -> Tensor:
        if labels.shape != layout.shape:
            raise ValueError(f"labels: want {list(layout.shape)}, got {list(labels.shape)}")
        targets = layout.next_tokens(layout.pack(labels), IGNORE_INDEX)
        if kept is not None:
            targets = targets[kept]
        total = F.cross_entropy(logits.to(compute_dtype(logits)), targets, ignore_index=IGNORE_INDEX, reduction="sum")
        return total / (targets != IGNORE_INDEX).sum().clamp(min=1)

    def compile_blocks(self, mode: str | None = None, fullgraph: bool = True) -> None:
        """torch.compile every decoder layer in place (arguments as torch.compile's).

        Layers of one kind (dense or MoE, KDA or MLA) share their graphs: for many tokens and for one token of each
        sequence, with one or with more sequences. Every count of tokens, sequences and cache blocks uses the same graphs.
        They are kept in the library's cache folder (`kimi-k3 compile` fills it), so that a later process starts warm.
        """
        _refuse_compiled_invariance(self.model.is_batch_invariant)
        keep_graphs()
        for layer in self.model.layers.values():
            layer.compile(mode=mode, fullgraph=fullgraph, options=INDUCTOR_OPTIONS if mode is None else None)
        self.model.has_compiled_layers = True

    def set_batch_invariant(self, is_invariant: bool = True) -> None:
        """Give every token one arithmetic: its logits are the same bits whatever rows stand beside it, in whatever piece
        of a prompt it came, alone or with many, decoded or prefilled (on one machine, in one dtype, by one number of threads).

        KDA runs by the token recurrence, MLA absorbed, every matrix product in rows of their own. Prefill is slower; a
        decode step nearly as fast. For inference: NotImplementedError where gradients are wanted.
        """
        _refuse_compiled_invariance(self.model.has_compiled_layers and is_invariant)
        self.model.is_batch_invariant = is_invariant

    def prompt_embeds(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Embeddings that replace `input_ids` when generating, and the mask that goes with them; None: the ids do."""
        return None, attention_mask

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
        """See `kimi_k3.generation.generate`."""
        from kimi_k3.generation import generate

        return generate(self, input_ids, attention_mask, **options)

    @classmethod
    def from_pretrained(cls, path_or_repo: str | Path, **options: Any) -> KimiK3ForCausalLM:
        """See `kimi_k3.checkpoint.load_pretrained`."""
        from kimi_k3.checkpoint import load_pretrained

        return load_pretrained(cls, path_or_repo, **options)

    def save_pretrained(
        self, folder: str | Path, max_shard_size: str | int = "5GB", *, experts: str | None = None
    ) -> None:
        """See `kimi_k3.saving.save_pretrained`."""
        from kimi_k3.checkpoint import save_pretrained

        save_pretrained(self, folder, max_shard_size, experts=experts)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """See `kimi_k3.hub.push_to_hub`."""
        from kimi_k3.checkpoint import push_to_hub

        return push_to_hub(self, repo_id, **options)


class KimiK3ForConditionalGeneration(KimiK3ForCausalLM):
    """Kimi K3 with its vision tower: `forward` and `generate` take images beside the tokens.

    A prompt holds one media placeholder (`config.media_placeholder_token_id`) for each image. It grows to that image's
    tokens, so logits, mask and labels are as long as the expanded prompt.
    """

    def __init__(self, config: KimiK3Config, *, experts: str = "dequantized", layers: range | None = None) -> None:
        if config.vision_config is None:
            raise ValueError("KimiK3ForConditionalGeneration: config has no vision_config; want KimiK3ForCausalLM")
        if config.media_placeholder_token_id is None:
            raise ValueError("KimiK3ForConditionalGeneration: config needs the key media_placeholder_token_id")
        super().__init__(config, experts=experts, layers=layers)
        self.vision_tower = VisionTower(config.vision_config)
        self.mm_projector = PatchMergerProjector(config.vision_config)
        std = config.text_config.initializer_range
        for module in [*self.vision_tower.modules(), *self.mm_projector.modules()]:
            for name, parameter in module.named_parameters(recurse=False):
                if not isinstance(module, nn.RMSNorm) and name == "weight":
                    nn.init.normal_(parameter, std=std)

    def image_features(self, pixel_values: Tensor, grid_thws: Tensor) -> list[Tensor]:
        """The projected rows [tokens, D] of each image, from patches [N, 3, p, p] and grids [images, 3]."""
        return [self.mm_projector(item) for item in self.vision_tower(pixel_values, grid_thws)]

    def _spliced(
        self, input_ids: Tensor, attention_mask: Tensor | None, labels: Tensor | None, pixel_values: Tensor,
        grid_thws: Tensor,
    ) -> SplicedPrompt:  # fmt: skip
        media_id = self.config.media_placeholder_token_id
        assert media_id is not None
        features = self.image_features(pixel_values, grid_thws)
        embeds = self.model.embed_tokens(input_ids)
        return splice_image_features(input_ids, features, embeds, media_id, attention_mask, labels)

    def prompt_embeds(
        self, input_ids: Tensor, attention_mask: Tensor | None, pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        if pixel_values is None or grid_thws is None:
            self._refuse_lone_placeholders(input_ids)
            return None, attention_mask
        spliced = self._spliced(input_ids, attention_mask, None, pixel_values, grid_thws)
        return spliced.inputs_embeds, spliced.attention_mask

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: KimiK3Cache | None = None,
        pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """As KimiK3ForCausalLM, and with images: pixel_values [N, 3, p, p], the patches of all images in order, and
        grid_thws [images, 3]. Packed prompts (`cu_seqlens`) with images are not built: splice them beforehand.
        """
        if (pixel_values is None) != (grid_thws is None):
            raise ValueError("forward: want pixel_values and grid_thws together, got one of them")
        if pixel_values is not None and grid_thws is not None:
            if input_ids is None or cu_seqlens is not None:
                raise ValueError("forward: images go with input_ids [B, T], not with inputs_embeds or cu_seqlens")
            if past_key_values is not None and attention_mask is not None:
                attention_mask = attention_mask[:, attention_mask.shape[1] - input_ids.shape[1] :]
            spliced = self._spliced(input_ids, attention_mask, labels, pixel_values, grid_thws)
            input_ids, inputs_embeds = None, spliced.inputs_embeds
            attention_mask, labels = spliced.attention_mask, spliced.labels
        elif input_ids is not None and past_key_values is None:
            self._refuse_lone_placeholders(input_ids)
        return super().forward(input_ids, attention_mask, cu_seqlens, inputs_embeds, labels, past_key_values, **options)

    def _refuse_lone_placeholders(self, input_ids: Tensor) -> None:
        count = int(torch.eq(input_ids, self.config.media_placeholder_token_id or -1).sum())
        if count:
            raise ValueError(f"forward: input_ids holds {count} image placeholders, but no pixel_values were given")


__all__: Sequence[str] = [
    "CausalLMOutput",
    "KimiK3DecoderLayer",
    "KimiK3ForCausalLM",
    "KimiK3ForConditionalGeneration",
    "KimiK3Model",
]
