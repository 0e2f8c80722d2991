"""Kimi Delta Attention: projections, short convolutions, decay gate, output gate. The recurrence is in the kernels."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from kimi_k3.cache import PackedBatch
from kimi_k3.configuration_kimi_k3 import KimiK3TextConfig
from kimi_k3.layers.linear import project
from kimi_k3.layers.norm import GatedRMSNorm
from kimi_k3_kernels import (
    kda_chunk,
    kda_chunk_export,
    kda_gates,
    kda_recurrent,
    kda_recurrent_export,
    kda_step_,
    short_conv,
    short_conv_export,
    short_conv_step_,
)
from kimi_k3_kernels.kda_gates.reference import kda_gates_reference
from kimi_k3_kernels.library import at_once, by_rows, is_eager_inference

A_LOG_MULTIPLE = 128  # the release stores A_log with zeros up to a multiple of this


class ShortConv1d(nn.Module):
    """The weight of a causal depthwise convolution, [C, 1, W]; tap W - 1 multiplies the current token."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))


class KimiDeltaAttention(nn.Module):
    """x [T, D] -> [T, D] over packed tokens, through a state and a convolution window for each sequence."""

    def __init__(self, config: KimiK3TextConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.head_dim = config.kda_num_heads, config.kda_head_dim
        self.gate_lower_bound, self.use_full_rank_gate = config.gate_lower_bound, config.use_full_rank_gate
        hidden, width, taps = config.hidden_size, self.num_heads * self.head_dim, config.short_conv_kernel_size
        self.q_proj = nn.Linear(hidden, width, bias=False)
        self.k_proj = nn.Linear(hidden, width, bias=False)
        self.v_proj = nn.Linear(hidden, width, bias=False)
        self.q_conv1d = ShortConv1d(width, taps)
        self.k_conv1d = ShortConv1d(width, taps)
        self.v_conv1d = ShortConv1d(width, taps)
        # One value for each head, then zeros; kept at its stored length, sliced at use.
        self.A_log = nn.Parameter(torch.empty(math.ceil(self.num_heads / A_LOG_MULTIPLE) * A_LOG_MULTIPLE))
        self.dt_bias = nn.Parameter(torch.empty(width))
        self.f_a_proj = nn.Linear(hidden, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, width, bias=False)
        self.b_proj = nn.Linear(hidden, self.num_heads, bias=False)
        if self.use_full_rank_gate:
            self.g_proj = nn.Linear(hidden, width, bias=False)
        else:
            self.g_a_proj = nn.Linear(hidden, self.head_dim, bias=False)
            self.g_b_proj = nn.Linear(self.head_dim, width, bias=False)
        self.o_norm = GatedRMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x_TD: Tensor, batch: PackedBatch, pools: tuple[Tensor, ...]) -> Tensor:
        state_pool, conv_pool = pools
        slots = (batch.read_slots, batch.write_slots)
        exports = (
            None if batch.export_at is None or batch.export_slots is None else (batch.export_at, batch.export_slots)
        )
        is_step = batch.is_decode and exports is None
        run = partial(project, is_decode=batch.is_decode, is_invariant=batch.is_invariant)
        apply = by_rows if batch.is_invariant else at_once
        gate_proj = self.g_proj if self.use_full_rank_gate else self.g_a_proj
        inputs = [self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, self.b_proj, gate_proj]
        *qkv, decay_TK, beta_logit_TH, gate_TC = run(x_TD, inputs)
        qkv_TC = torch.cat(qkv, dim=-1)
        taps_C1W = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])
        if is_step:
            qkv_TC = short_conv_step_(qkv_TC, taps_C1W[:, 0], conv_pool, *slots)
        elif exports is not None:
            qkv_TC = short_conv_export(qkv_TC, taps_C1W[:, 0], conv_pool, *slots, batch.cu_seqlens, *exports)
        else:
            qkv_TC = short_conv(qkv_TC, taps_C1W[:, 0], conv_pool, *slots, batch.cu_seqlens)
        v_THV = qkv_TC.view(-1, 3, self.num_heads, self.head_dim)[:, 2]
        (decay_TC,) = run(decay_TK, [self.f_b_proj])
        gates = partial(
            kda_gates if is_eager_inference(x_TD) else kda_gates_reference,
            A_log=self.A_log, dt_bias=self.dt_bias, lower_bound=self.gate_lower_bound,
        )  # fmt: skip
        q_THK, k_THK, log_decay_THK, beta_TH = apply(gates, qkv_TC, decay_TC, beta_logit_TH)

        tokens = (q_THK, k_THK, v_THV, log_decay_THK, beta_TH)
        if is_step:
            o_THV = kda_step_(*tokens, state_pool, *slots)
        elif exports is not None:
            export_scan = kda_recurrent_export if batch.is_invariant else kda_chunk_export
            o_THV = export_scan(*tokens, state_pool, *slots, batch.cu_seqlens, *exports)
        else:
            scan = kda_recurrent if batch.is_invariant else kda_chunk
            o_THV = scan(*tokens, state_pool, *slots, batch.cu_seqlens)
        if not self.use_full_rank_gate:
            (gate_TC,) = run(gate_TC, [self.g_b_proj])
        normed_THV = apply(self.o_norm, o_THV, gate_TC.reshape(o_THV.shape))
        return run(normed_THV.flatten(1), [self.o_proj])[0]
