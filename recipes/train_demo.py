"""Train the bundled demo model: Kimi K3 with all its structure, a few million parameters, on Shakespeare's plays.

    python recipes/train_demo.py --out kimi_k3/demo

reads the vocabulary in kimi_k3/demo (recipes/demo_corpus.py made it), trains on 36 plays, and writes the model there in
the released layout: bfloat16 trunk, MXFP4 experts. A run that was stopped goes on with --resume OUT/training.pt. The
figures on the two plays held out are bits per UTF-8 byte, to be read beside those of recipes/demo_baselines.py.
"""

import argparse
import json
import math
import random
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from demo_corpus import load_plays
from torch import Tensor, nn

from kimi_k3 import KimiK3Config, KimiK3ForCausalLM
from kimi_k3.configuration_kimi_k3 import KimiK3TextConfig
from kimi_k3.layers.moe import KimiK3Router
from kimi_k3.modeling_kimi_k3 import IGNORE_INDEX
from kimi_k3.saving import save_pretrained
from kimi_k3.tokenization_kimi_k3 import KimiK3Tokenizer
from kimi_k3_kernels import mxfp4_dequantize, mxfp4_quantize

DEMO = Path(__file__).parents[1] / "kimi_k3" / "demo"
MUON_LR, ADAMW_LR = 1e-2, 6e-3
# The last steps see the experts as MXFP4 will store them, so that the rounding costs less.
ROUNDED_SHARE = 0.15
CHECKPOINT_EVERY = 100  # steps


def demo_config(tokenizer: KimiK3Tokenizer) -> KimiK3Config:
    """Every structural feature of K3, in a size that two CPU cores train in half an hour.

    Nine layers are the fewest with three sealed depth blocks, a partial one and two adjacent MLA layers at the end.
    """
    special = tokenizer.special_tokens
    ids = {
        "bos_token_id": special["[BOS]"],
        "eos_token_id": special["<|end_of_msg|>"],
        "pad_token_id": special["[PAD]"],
    }
    text = KimiK3TextConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=192, intermediate_size=384, num_hidden_layers=9,
        num_attention_heads=4, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
        linear_attn_config={
            "full_attn_layers": [4, 8, 9], "kda_layers": [1, 2, 3, 5, 6, 7], "num_heads": 4, "head_dim": 32,
            "short_conv_kernel_size": 4, "use_full_rank_gate": True, "gate_lower_bound": -5.0,
        },
        attn_res_block_size=4, num_experts=16, num_experts_per_token=2, num_shared_experts=1, moe_intermediate_size=128,
        routed_expert_hidden_size=64, activation_situ_beta=4.0, activation_situ_linear_beta=25.0,
        max_position_embeddings=4096, **ids,
    )  # fmt: skip
    return KimiK3Config(text, media_placeholder_token_id=special["<|media_pad|>"], **ids)


# Quintic coefficients of Keller Jordan's Muon: steepest at zero, so that five steps lift small singular values.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal, for matrices, stacks of matrices and heads' blocks of rows.

        M <- momentum M + G;   O = orthogonalise(G + momentum M)
        W <- (1 - lr weight_decay) W - lr 0.2 sqrt(max(out, in)) O
        (Muon, with the update's RMS matched to AdamW's: Moonlight, arXiv 2502.16982)

    `torch.optim.Muon` takes 2-D parameters only; this one also takes stacked experts [E, out, in], each orthogonalised
    alone, and a group's `num_heads` splits the rows of its [heads * head_dim, in] matrices so that each head is
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
            # Equal shapes of all layers go as one batch: a few large products, not hundreds of small ones.
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
    """[N, out, in] -> for each, nearly U V^T of its U S V^T: singular values end at about 0.7 .. 1.2."""
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

        b_j <- -quantile_{1 - K/E}(s_ij - alpha_i over i),  alpha_i the (K + 1)-th largest of s_i + b
        b <- b - mean(b)                                                              (Kimi K3 report)

    Expert j, with its new bias, beats the bar alpha_i on K/E of the tokens: the share that makes all loads equal.

    Args:
        bias: [E] float32, as it stood when `scores` were routed.     scores: [T, E] float32, sigmoid scores without it.
        topk: experts per token, below E.
    """
    alpha = (scores + bias).topk(topk + 1, dim=1).values[:, -1:]
    new = -torch.quantile(scores - alpha, 1 - topk / scores.shape[1], dim=0)
    bias.copy_(new - new.mean())


def random_windows(ids: Tensor, seq_len: int, num_windows: int, generator: torch.Generator) -> Tensor:
    """[num_windows * seq_len]: runs of `ids` [N] that start anywhere, one after another."""
    if len(ids) < seq_len:
        raise ValueError(f"random_windows: want at least seq_len ({seq_len}) ids, got {len(ids)}")
    starts = torch.randint(len(ids) - seq_len + 1, (num_windows,), generator=generator)
    return ids.unfold(0, seq_len, 1)[starts].flatten()


def even_boundaries(num_tokens: int, seq_len: int) -> Tensor:
    """int32 cu_seqlens of `num_tokens` packed tokens in sequences of `seq_len`, the last one shorter if need be."""
    return torch.tensor([*range(0, num_tokens, seq_len), num_tokens], dtype=torch.int32)


def encode_plays(plays: Iterable[str], tokenizer: KimiK3Tokenizer) -> Tensor:
    """The plays as one run of ids, each after an [EOS]."""
    return torch.tensor([i for play in plays for i in (tokenizer.eos_token_id, *tokenizer.encode(play))])


def encode_conversations(plays: Iterable[str], tokenizer: KimiK3Tokenizer, seed: int) -> Tensor:
    """A stretch of each scene's dialogue as a chat, so that the model knows K3's markup and answers in turn."""
    draw = random.Random(seed)
    ids: list[int] = []
    for scene in re.split(r"^#+ ", "\n".join(plays), flags=re.MULTILINE):
        speeches = [
            re.sub(r" +$", "", text, flags=re.M) for text in re.findall(r"^\*\*.+\*\* *\n((?:.+\n)+)", scene, re.M)
        ]
        start = draw.randrange(max(1, len(speeches) - 1))
        turns = speeches[start : start + 2 * draw.randint(1, 3)]
        if len(turns) < 2:
            continue
        messages = [{"role": ("user", "assistant")[i % 2], "content": text.strip()} for i, text in enumerate(turns)]
        thinking, effort = draw.random() < 0.7, draw.choice(["low", "high", "max", "max"])
        ids += tokenizer.encode_chat(
            messages, thinking=thinking, thinking_effort=effort, add_generation_prompt=False
        ).ids
    return torch.tensor(ids)


def make_optimisers(model: KimiK3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, heads of queries, keys and values alone; AdamW for all else that trains."""
    text = model.config.text_config
    per_head = {
        "q_proj": text.kda_num_heads, "k_proj": text.kda_num_heads, "v_proj": text.kda_num_heads,
        "q_b_proj": text.num_attention_heads, "kv_b_proj": text.num_attention_heads,
    }  # fmt: skip
    groups: dict[int, list[nn.Parameter]] = {}
    others = []
    for name, param in model.named_parameters():
        if not param.requires_grad:  # the router's bias, which quantile balancing moves
            continue
        is_matrix = param.ndim >= 2 and ".layers." in name and "_conv1d." not in name and "_res_proj." not in name
        if is_matrix:
            groups.setdefault(per_head.get(name.split(".")[-2], 1), []).append(param)
        else:
            others.append(param)
    muon = Muon([{"params": params, "num_heads": heads} for heads, params in groups.items()], lr=MUON_LR)
    return [muon, torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0)]


@contextmanager
def rounded_experts(model: KimiK3ForCausalLM) -> Iterator[None]:
    """Inside, the experts hold what MXFP4 keeps of them, so that gradients pass straight through the rounding."""
    experts = [param for name, param in model.named_parameters() if ".experts." in name]
    exact = [param.detach().clone() for param in experts]
    with torch.no_grad():
        for param in experts:
            param.copy_(mxfp4_dequantize(*mxfp4_quantize(param), param.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for param, values in zip(experts, exact):
                param.copy_(values)


@torch.no_grad()
def held_out_bits(
    model: KimiK3ForCausalLM, plays: dict[str, str], tokenizer: KimiK3Tokenizer, seq_len: int, every: int = 1
) -> float:
    """Bits per UTF-8 byte of the plays: every token once, in windows of `seq_len` that overlap by half.

    `every` takes one window in so many, for a quick look.
    """
    half, windows = seq_len // 2, []
    for play in plays.values():
        ids = encode_plays([play], tokenizer)
        for start in range(0, max(1, len(ids) - half), half):
            window = ids[start : start + seq_len]
            labels = window.clone()
            labels[: half if start else 1] = IGNORE_INDEX  # the window before has scored these
            windows.append((window, labels))
    tokens_a_byte = sum(int((y != IGNORE_INDEX).sum()) for _, y in windows) / sum(
        len(p.encode()) for p in plays.values()
    )
    nats, num_tokens = 0.0, 0
    windows = windows[::every]
    for batch in (windows[i : i + 16] for i in range(0, len(windows), 16)):
        ids, labels = torch.cat([x for x, _ in batch]), torch.cat([y for _, y in batch])
        cu_seqlens = torch.tensor([0, *(len(x) for x, _ in batch)]).cumsum(0).int()
        count = int((labels != IGNORE_INDEX).sum())
        nats += count * float(model(ids[None], cu_seqlens=cu_seqlens, labels=labels[None]).loss)
        num_tokens += count
    return nats / num_tokens / math.log(2) * tokens_a_byte


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=520)
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of a training sequence")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens of an optimiser step")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/demo"), help="gets the model, training.pt before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="training.pt of a stopped run that had the same arguments")
    args = parser.parse_args()
    if args.batch_tokens % args.seq_len:
        parser.error(f"--batch-tokens: want a multiple of --seq-len ({args.seq_len}), got {args.batch_tokens}")

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    tokenizer = KimiK3Tokenizer.from_pretrained(DEMO)
    train, held_out = load_plays()
    plays, chats = encode_plays(train.values(), tokenizer), encode_conversations(train.values(), tokenizer, args.seed)
    text = torch.cat([plays, chats])
    model = KimiK3ForCausalLM(demo_config(tokenizer))
    optimisers = make_optimisers(model)
    routers = [module for module in model.modules() if isinstance(module, KimiK3Router)]
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters:,} parameters; tokens: {len(plays):,} of plays, {len(chats):,} of chats", flush=True)

    first_step, seconds = 0, 0.0
    if args.resume is not None:
        saved = torch.load(args.resume)
        model.load_state_dict(saved["model"])
        for optimiser, state in zip(optimisers, saved["optimisers"]):
            optimiser.load_state_dict(state)
        generator.set_state(saved["generator"])
        first_step, seconds = saved["step"], saved["seconds"]

    args.out.mkdir(parents=True, exist_ok=True)
    num_windows = args.batch_tokens // args.seq_len
    cu_seqlens = even_boundaries(args.batch_tokens, args.seq_len)
    for step in range(first_step, args.steps):
        started = time.perf_counter()
        batch = random_windows(text, args.seq_len, num_windows, generator)[None]
        factor = learning_rate_factor(step, args.steps)
        for optimiser, base in zip(optimisers, (MUON_LR, ADAMW_LR)):
            for group in optimiser.param_groups:
                group["lr"] = base * factor
        with rounded_experts(model) if step >= (1 - ROUNDED_SHARE) * args.steps else nullcontext():
            out = model(batch, cu_seqlens=cu_seqlens, labels=batch, output_router_logits=True)
            out.loss.backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        assert out.router_logits is not None
        load = 0.0
        for router, logits in zip(routers, out.router_logits):
            scores, topk = torch.sigmoid(logits[0].detach()), router.config.num_experts_per_token
            chosen = (scores + router.e_score_correction_bias).topk(topk, dim=1).indices
            load = max(load, float(torch.bincount(chosen.flatten()).max()) * scores.shape[1] / chosen.numel())
            quantile_balance_(router.e_score_correction_bias, scores, topk)
        seconds += time.perf_counter() - started

        done = step + 1
        if done % 20 == 0 or done == args.steps:
            rate = done * args.batch_tokens / seconds
            print(
                f"step {done}/{args.steps}  loss {out.loss.item():.3f} nats/token  busiest expert {load:.2f} x mean  "
                f"{rate:,.0f} tokens/s  {seconds:,.0f} s",
                flush=True,
            )
        if done % CHECKPOINT_EVERY == 0 or done == args.steps:
            bits = held_out_bits(model, held_out, tokenizer, args.seq_len, every=16)
            print(f"step {done}  held out (a sample) {bits:.3f} bits per byte", flush=True)
            saved = {
                "model": model.state_dict(), "optimisers": [optimiser.state_dict() for optimiser in optimisers],
                "generator": generator.get_state(), "step": done, "seconds": seconds,
            }  # fmt: skip
            torch.save(saved, args.out / "training.pt.new")
            (args.out / "training.pt.new").replace(args.out / "training.pt")  # a kill leaves the old one or the new one

    report = {
        "parameters": num_parameters, "steps": args.steps,
        "tokens": args.steps * args.batch_tokens, "training_seconds": round(seconds),
        "held_out_bits_per_byte_float32": held_out_bits(model, held_out, tokenizer, args.seq_len),
    }  # fmt: skip
    save_pretrained(model, args.out, experts="mxfp4")
    for name in ("tiktoken.model", "tokenizer_config.json", "chat_constants.json"):
        if args.out.resolve() != DEMO.resolve():
            shutil.copyfile(DEMO / name, args.out / name)
    stored = KimiK3ForCausalLM.from_pretrained(args.out, dtype=torch.float32, progress=False)
    report["held_out_bits_per_byte_stored"] = held_out_bits(stored, held_out, tokenizer, args.seq_len)
    report["model_bytes"] = (args.out / "model.safetensors").stat().st_size
    (args.out / "training.pt").unlink()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
