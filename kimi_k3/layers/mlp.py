"""SiTU-GLU and the MLP that every token takes: the dense one of the first layer, the shared experts of the others."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from kimi_k3.configuration_kimi_k3 import KimiK3TextConfig
from kimi_k3.layers.linear import project
from kimi_k3_kernels import situ
from kimi_k3_kernels.library import at_once, by_rows, is_eager_inference
from kimi_k3_kernels.mxfp4_experts.reference import situ as situ_reference


class KimiK3MLP(nn.Module):
    """down_proj( situ(gate_proj(x), up_proj(x)) )."""

    def __init__(self, config: KimiK3TextConfig, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)
        self.beta, self.linear_beta = config.situ_betas

    def forward(self, x_TD: Tensor, is_decode: bool = False, is_invariant: bool = False) -> Tensor:
        gate_TF, up_TF = project(x_TD, [self.gate_proj, self.up_proj], is_decode, is_invariant)
        activation = situ if is_eager_inference(x_TD) else situ_reference
        apply = by_rows if is_invariant else at_once
        hidden_TF = apply(partial(activation, beta=self.beta, linear_beta=self.linear_beta), gate_TF, up_TF)
        return project(hidden_TF, [self.down_proj], is_decode, is_invariant)[0]
