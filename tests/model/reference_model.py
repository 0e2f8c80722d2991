"""Kimi K3 from its equations, in float64, with lists and loops; and random models to compare with it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kimi_k3 import KimiK3Config, KimiK3ForCausalLM
from kimi_k3.configuration_kimi_k3 import KimiK3TextConfig


def small_config(
    *, num_hidden_layers: int = 6, mla: tuple[int, ...] = (3, 6), linear: dict | None = None, **changes
) -> KimiK3Config:
    """Every structural feature at toy widths; `mla` names layers one-based, a None in `linear` removes a key."""
    kda = [layer for layer in range(1, num_hidden_layers + 1) if layer not in mla]
    attention = {
        "full_attn_layers": list(mla), "kda_layers": kda, "num_heads": 3, "head_dim": 8, "short_conv_kernel_size": 4,
        "use_full_rank_gate": True, "gate_lower_bound": -5.0,
    } | (linear or {})  # fmt: skip
    values = {
        "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 2, "q_lora_rank": 12,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "attn_res_block_size": 2,
        "num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 32, "routed_expert_hidden_size": 32,
        "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
    }  # fmt: skip
    text = KimiK3TextConfig(
        num_hidden_layers=num_hidden_layers,
        linear_attn_config={key: value for key, value in attention.items() if value is not None},
        **(values | changes),
    )
    return KimiK3Config(text, pad_token_id=0)


@torch.no_grad()
def randomize(model: KimiK3ForCausalLM, seed: int = 0) -> KimiK3ForCausalLM:
    """Weights that make every part count: spread scores, a bias that changes choices, decays over the whole range."""
    generator = torch.Generator().manual_seed(seed)
    heads = model.config.text_config.kda_num_heads
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.dtype == torch.uint8:
            low, high = (0, 256) if name.endswith("_packed") else (121, 125)
            drawn = torch.randint(low, high, parameter.shape, generator=generator)
        elif name.endswith("norm.weight"):
            drawn = 1 + 0.25 * drawn
        elif name.endswith("A_log"):
            drawn[heads:] = 0
        elif name.endswith("dt_bias"):
            drawn = 2 * drawn
        elif name.endswith("e_score_correction_bias"):
            drawn = 0.3 * drawn
        elif name.endswith(("res_proj.weight", "gate.weight")):
            drawn = 2 * drawn / parameter.shape[-1] ** 0.5
        elif "embed_tokens" not in name:
            drawn = drawn / parameter.shape[-1] ** 0.5
        parameter.copy_(drawn)
    return model


def random_model(
    config: KimiK3Config, dtype: torch.dtype = torch.float64, seed: int = 0, experts: str = "dequantized"
) -> KimiK3ForCausalLM:
    return randomize(KimiK3ForCausalLM(config, experts=experts), seed).to(dtype).eval()


def random_ids(config: KimiK3Config, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(config.text_config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Trace:
    """What the plain model did: logits [T, V], the chosen experts of each MoE layer, all decays and bank sizes."""

    logits: Tensor
    chosen: list[list[set[int]]] = field(default_factory=list)
    log_decays: list[Tensor] = field(default_factory=list)
    bank_sizes: list[int] = field(default_factory=list)


def plain_forward(weights: dict[str, Tensor], text: dict, ids: list[int]) -> Trace:
    """One sequence through all layers. `weights` by the model's names, experts as stacks; `text`: the text_config keys."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    eps, trace = text["rms_norm_eps"], Trace(torch.empty(0))
    P, bank = w["model.embed_tokens.weight"][ids], []
    for layer in range(text["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        part = {name.removeprefix(prefix): tensor for name, tensor in w.items() if name.startswith(prefix)}
        x = _mix(P, bank, part, "self_attention_res", eps)
        if layer % text["attn_res_block_size"] == 0:
            bank, P = [*bank, P], None
        x = _rms(x, part["input_layernorm.weight"], eps)
        attention = {name.removeprefix("self_attn."): tensor for name, tensor in part.items()}
        is_kda = layer + 1 in text["linear_attn_config"]["kda_layers"]
        out = _kda(x, attention, text, trace) if is_kda else _mla(x, attention, text)
        P = out if P is None else P + out
        x = _rms(_mix(P, bank, part, "mlp_res", eps), part["post_attention_layernorm.weight"], eps)
        P = P + (_mlp(x, part, "mlp.", text) if "mlp.up_proj.weight" in part else _moe(x, part, text, trace))
        trace.bank_sizes.append(len(bank))
    top = {name.removeprefix("model."): tensor for name, tensor in w.items()}
    hidden = _rms(_mix(P, bank, top, "output_attn_res", eps), top["norm.weight"], eps)
    trace.logits = hidden @ w["lm_head.weight"].T
    return trace


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _mix(P: Tensor, bank: list[Tensor], part: dict, name: str, eps: float) -> Tensor:
    if not bank:
        return P
    sources = [*bank, P]
    key = part[f"{name}_norm.weight"] * part[f"{name}_proj.weight"][0]
    scores = torch.stack([_rms(v, torch.ones(()), eps) @ key for v in sources])
    return sum(a[:, None] * v for a, v in zip(scores.softmax(0), sources))


def _kda(x: Tensor, w: dict, text: dict, trace: Trace) -> Tensor:
    linear = text["linear_attn_config"]
    H, K, taps = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]

    def stream(name: str) -> Tensor:
        u, weight, rows = x @ w[f"{name}_proj.weight"].T, w[f"{name}_conv1d.weight"][:, 0], []
        for t in range(len(u)):
            total = sum(weight[:, j] * u[t - taps + 1 + j] for j in range(taps) if t - taps + 1 + j >= 0)
            rows.append(total * torch.sigmoid(total))
        return torch.stack(rows).view(-1, H, K)

    q, k, v = stream("q"), stream("k"), stream("v")
    q, k = (u / (u.square().sum(-1, keepdim=True) + 1e-6).sqrt() for u in (q, k))
    z = (x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T + w["dt_bias"]).view(-1, H, K)
    rate, bound = w["A_log"][:H].exp()[:, None], linear.get("gate_lower_bound")
    g = -rate * torch.log1p(z.exp()) if bound is None else bound / (1 + torch.exp(-rate * z))
    trace.log_decays.append(g)
    beta = torch.sigmoid(x @ w["b_proj.weight"].T)
    outputs, S = [], torch.zeros(H, K, K, dtype=torch.float64)
    for t in range(len(x)):
        heads = []
        for h in range(H):
            decayed = g[t, h].exp()[:, None] * S[h]
            S[h] = decayed + torch.outer(k[t, h], beta[t, h] * (v[t, h] - decayed.T @ k[t, h]))
            heads.append(S[h].T @ q[t, h] * K**-0.5)
        outputs.append(torch.stack(heads))
    gate = x @ w["g_proj.weight"].T if "g_proj.weight" in w else x @ w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T
    o = _rms(torch.stack(outputs), w["o_norm.weight"], text["rms_norm_eps"]).flatten(1)
    return (o * torch.sigmoid(gate)) @ w["o_proj.weight"].T


def _mla(x: Tensor, w: dict, text: dict) -> Tensor:
    H, R, nope = text["num_attention_heads"], text["kv_lora_rank"], text["qk_nope_head_dim"]
    eps, width = text.get("mla_rank_norm_eps", 1e-6), nope + text["qk_rope_head_dim"]
    q = (_rms(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], eps) @ w["q_b_proj.weight"].T).unflatten(
        1, (H, -1)
    )
    c = x @ w["kv_a_proj_with_mqa.weight"].T
    kv = (_rms(c[:, :R], w["kv_a_layernorm.weight"], eps) @ w["kv_b_proj.weight"].T).unflatten(1, (H, -1))
    rows = []
    for t in range(len(x)):
        heads = []
        for h in range(H):
            keys = torch.cat([kv[: t + 1, h, :nope], c[: t + 1, R:]], dim=1)
            heads.append((keys @ q[t, h] * width**-0.5).softmax(0) @ kv[: t + 1, h, nope:])
        rows.append(torch.cat(heads))
    return (torch.stack(rows) * torch.sigmoid(x @ w["g_proj.weight"].T)) @ w["o_proj.weight"].T


def _situ(g: Tensor, u: Tensor, text: dict) -> Tensor:
    b1, b2 = text.get("activation_situ_beta"), text.get("activation_situ_linear_beta")
    b1 = 1.0 if b1 is None else b1
    return b1 * torch.tanh(g / b1) * torch.sigmoid(g) * (u if b2 is None else b2 * torch.tanh(u / b2))


def _mlp(x: Tensor, w: dict, prefix: str, text: dict) -> Tensor:
    gate, up, down = (w[f"{prefix}{name}_proj.weight"].T for name in ("gate", "up", "down"))
    return _situ(x @ gate, x @ up, text) @ down


def _moe(x: Tensor, part: dict, text: dict, trace: Trace) -> Tensor:
    w = {name.removeprefix("block_sparse_moe."): tensor for name, tensor in part.items()}
    z, rows, chosen = x @ w["routed_expert_down_proj.weight"].T, [], []
    groups = text["num_expert_group"]
    for t in range(len(x)):
        scores = torch.sigmoid(w["gate.weight"] @ x[t])
        biased = (scores + w["gate.e_score_correction_bias"]).tolist()
        allowed, size = list(range(len(biased))), len(biased) // groups
        if text["use_grouped_topk"] and groups > text["topk_group"]:
            best = [sum(sorted(biased[i * size : (i + 1) * size])[-2:]) for i in range(groups)]
            kept = sorted(range(groups), key=lambda i: -best[i])[: text["topk_group"]]
            allowed = [e for e in allowed if e // size in kept]
        picks = sorted(allowed, key=lambda e: -biased[e])[: text["num_experts_per_token"]]
        total = sum(scores[e] for e in picks) if text["moe_renormalize"] and len(picks) > 1 else 1.0
        out = 0
        for e in picks:
            hidden = _situ(w["experts.w1"][e] @ z[t], w["experts.w3"][e] @ z[t], text)
            out = out + scores[e] / total * text["routed_scaling_factor"] * (w["experts.w2"][e] @ hidden)
        rows.append(out)
        chosen.append(set(picks))
    trace.chosen.append(chosen)
    u = torch.stack(rows)
    if text["latent_moe_use_norm"]:
        u = _rms(u, w["routed_expert_norm.weight"], text["rms_norm_eps"])
    return u @ w["routed_expert_up_proj.weight"].T + _mlp(x, w, "shared_experts.", text)
