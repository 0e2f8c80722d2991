"""Train the bundled demo model."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Quintic Newton-Schulz coefficients of Keller Jordan's Muon: steepest at zero, so five steps lift small singular values.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal, for matrices, stacks of matrices and heads' blocks of rows.

        M <- momentum M + G;   O = orthogonalise(G + momentum M);   W <- (1 - lr weight_decay) W - lr 0.2 sqrt(max(out, in)) O
        (Muon, with the update's RMS matched to AdamW's: Moonlight, arXiv 2502.16982)

    `torch.optim.Muon` takes 2-D parameters only; this one also takes stacked experts [E, out, in], one orthogonalisation for
    each, and a group's `num_heads` splits the rows of its [heads * head_dim, in] matrices so that each head is
    orthogonalised alone (K3's Per-Head Muon). Computes in the parameters' dtype.

    Args:
        params: parameters or groups; a group may set `num_heads` (default 1).
        lr: learning rate, of the size AdamW would take.
    Raises: ValueError if a parameter is not 2-D or 3-D, or its rows do not divide into the group's heads.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "num_heads": 1})
        for group in self.param_groups:
            for param in group["params"]:
                if param.ndim not in (2, 3) or param.shape[-2] % group["num_heads"]:
                    raise ValueError(
                        f"Muon: want [out, in] or [E, out, in] with out a multiple of num_heads "
                        f"({group['num_heads']}), got {tuple(param.shape)}"
                    )

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            # Equal shapes of all layers are orthogonalised as one batch: a few large products, not hundreds of small ones.
            by_shape: dict[tuple[int, ...], list[tuple[nn.Parameter, Tensor]]] = {}
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                state["momentum"].mul_(group["momentum"]).add_(param.grad)
                nesterov = param.grad.add(state["momentum"], alpha=group["momentum"])
                blocks = nesterov.reshape(-1, param.shape[-2] // group["num_heads"], param.shape[-1])
                by_shape.setdefault(tuple(blocks.shape[1:]), []).append((param, blocks))
            for shape, entries in by_shape.items():
                updates = orthogonalise(torch.cat([blocks for _, blocks in entries]))
                step_size = group["lr"] * 0.2 * math.sqrt(max(shape))
                for (param, _), update in zip(entries, updates.split([len(blocks) for _, blocks in entries])):
                    param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.view_as(param), alpha=step_size)


def orthogonalise(matrices: Tensor) -> Tensor:
    """[N, out, in] -> for each, nearly U V^T of its singular value decomposition: singular values end in about 0.7 .. 1.2."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if is_tall else x


def learning_rate_factor(step: int, num_steps: int) -> float:
    """Linear warm-up over the first 1 % of the steps, then a cosine from 1 to 0."""
    warm_up = max(1, num_steps // 100)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, num_steps - warm_up)))


@torch.no_grad()
def quantile_balance_(bias: Tensor, scores: Tensor, topk: int) -> None:
    """One Quantile Balancing step of a router's correction bias, in place.

        b_j <- -quantile_{1 - K/E}(s_ij - alpha_i over i),  alpha_i the (K + 1)-th largest of s_i + b;  then b <- b - mean(b)
        (Kimi K3 report)

    Expert j, with its new bias, beats the bar alpha_i on K/E of the tokens: the share that makes all loads equal.

    Args:
        bias: [E] float32, as it stood when `scores` were routed.     scores: [T, E] float32, sigmoid scores without it.
        topk: experts per token, below E.
    """
    alpha = (scores + bias).topk(topk + 1, dim=1).values[:, -1:]
    new = -torch.quantile(scores - alpha, 1 - topk / scores.shape[1], dim=0)
    bias.copy_(new - new.mean())


def packed_windows(
    ids: Tensor, seq_len: int, num_windows: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of random windows of `ids` [N]: input_ids [1, num_windows * seq_len] and int32 cu_seqlens."""
    if len(ids) < seq_len:
        raise ValueError(f"packed_windows: want at least seq_len ({seq_len}) ids, got {len(ids)}")
    windows = ids.unfold(0, seq_len, 1)
    cu_seqlens = torch.arange(0, (num_windows + 1) * seq_len, seq_len, dtype=torch.int32)
    while True:
        starts = torch.randint(len(windows), (num_windows,), generator=generator)
        yield windows[starts].view(1, -1), cu_seqlens
