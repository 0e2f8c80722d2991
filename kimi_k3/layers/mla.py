"""Gated multi-head latent attention without positions: the latent KV, expanded for many tokens, absorbed for one."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from kimi_k3.cache import PackedBatch
from kimi_k3.configuration_kimi_k3 import KimiK3TextConfig
from kimi_k3.layers.linear import project
from kimi_k3.layers.norm import RMSNorm
from kimi_k3_kernels import head_matvec, mla_decode, mla_decode_mass, mla_prefill
from kimi_k3_kernels.library import at_once, by_rows


class KimiMLAAttention(nn.Module):
    """x [T, D] -> [T, D] over packed tokens; the cache holds `[normed latent | shared key channels]` for each token."""

    def __init__(self, config: KimiK3TextConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.rank = config.num_attention_heads, config.kv_lora_rank
        self.nope_dim, self.rope_dim, self.value_dim = (
            config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim,
        )  # fmt: skip
        self.scale = config.qk_head_dim**-0.5
        hidden, values = config.hidden_size, self.num_heads * self.value_dim
        self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.mla_rank_norm_eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.num_heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, config.latent_kv_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(self.rank, config.mla_rank_norm_eps)
        self.kv_b_proj = nn.Linear(self.rank, self.num_heads * (self.nope_dim + self.value_dim), bias=False)
        self.g_proj = nn.Linear(hidden, values, bias=False)
        self.o_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, x_TD: Tensor, batch: PackedBatch, pools: tuple[Tensor, ...]) -> Tensor:
        (latent_pool,) = pools
        run = partial(project, is_decode=batch.is_decode, is_invariant=batch.is_invariant)
        apply = by_rows if batch.is_invariant else at_once
        inputs = [self.q_a_proj, self.kv_a_proj_with_mqa, self.g_proj]
        rank_TC, latent_TC, gate_TC = run(x_TD, inputs)
        (q_TC,) = run(self.q_a_layernorm(rank_TC), [self.q_b_proj])
        q_THC = q_TC.unflatten(-1, (self.num_heads, -1))
        # k_r has no rotation ("nope" everywhere): ordinary key channels, shared by all heads, and not normed.
        latent_TR, shared_key_TC = latent_TC.split([self.rank, self.rope_dim], dim=-1)
        latent_TC = torch.cat([self.kv_a_layernorm(latent_TR), shared_key_TC], dim=-1)
        if batch.latent_rows is not None:
            size = latent_pool.shape[1]  # the pool's blocks need not lie side by side
            latent_pool.index_put_((batch.latent_rows // size, batch.latent_rows % size), latent_TC.detach())
        if batch.is_decode or batch.is_invariant:
            o_THV = self._absorbed(q_THC, latent_pool, batch)
        else:
            o_THV = mla_prefill(
                q_THC, latent_TC, self.kv_b_proj.weight, latent_pool, batch.block_tables, batch.past_lens,
                batch.cu_seqlens, self.scale,
            )  # fmt: skip
        return run(o_THV.flatten(1) * apply(torch.sigmoid, gate_TC), [self.o_proj])[0]

    def _absorbed(self, q_THC: Tensor, latent_pool: Tensor, batch: PackedBatch) -> Tensor:
        """Attention in the latent space: the key expansion moves to the query, the value expansion to the output.

        One row of `block_tables` and `kv_lens` for each token.
        """
        q_nope_THn, q_shared_THr = q_THC.split([self.nope_dim, self.rope_dim], dim=-1)
        to_keys_HnR, to_values_HVR = self.kv_b_proj.weight.view(self.num_heads, -1, self.rank).split(
            [self.nope_dim, self.value_dim], dim=1
        )
        q_latent_THR = head_matvec(q_nope_THn, to_keys_HnR, transposed=True)
        queries_THC = torch.cat([q_latent_THR, q_shared_THr], dim=-1)
        inputs = (queries_THC, latent_pool, batch.block_tables, batch.kv_lens, self.scale, self.rank)
        if batch.block_mass is None:
            context_THR = mla_decode(*inputs)
        else:
            context_THR, mass_TB = mla_decode_mass(*inputs)
            batch.block_mass.add_(mass_TB)
        return head_matvec(context_THR, to_values_HVR)
