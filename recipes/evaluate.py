"""Perplexity and bits per byte of text files, on one process or on several ranks: the same score.

    python recipes/evaluate.py play.txt other.txt                                            # the bundled demo model
    torchrun --standalone --nproc-per-node 2 recipes/evaluate.py play.txt --dtype float32      # windows shared out
    torchrun --standalone --nproc-per-node 4 recipes/evaluate.py play.txt --tp 2 --ep --json
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST0:29500 --rdzv-id k3 \
        recipes/evaluate.py play.txt --model /models/kimi-k3 --tp 8 --ep --backend nccl

Each file starts with the bos token (where the model has one) and is cut into windows of --window tokens that overlap by
half, so that every token but the first is scored once, with at least half a window before it (where there is as much).
    perplexity = exp(nats / tokens scored)        bits per byte = nats / ln 2 / UTF-8 bytes of the files
A window runs alone and its nats are summed in float64 in the order of the windows, so the score does not depend on how
many ranks share them out. Tensor parallelism (--tp) rounds differently, in the seventh digit.
"""

import argparse
import json
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import kimi_k3
from kimi_k3 import KimiK3ForCausalLM, KimiK3Tokenizer
from kimi_k3.parallel import log_of_rank, make_mesh, start, stop
from kimi_k3.parallel.expert_parallel import InStep

DEMO = Path(kimi_k3.__file__).parent / "demo"


def windows_of(ids: list[int], window: int) -> list[tuple[list[int], int]]:
    """Windows that overlap by half, and from which place on each one's tokens are scored."""
    half, out = window // 2, []
    for start_at in range(0, max(1, len(ids) - half), half):
        out.append((ids[start_at : start_at + window], half if start_at else 1))
    return out


@torch.no_grad()
def nats_of(model: KimiK3ForCausalLM, ids: list[int], first: int, device: torch.device) -> tuple[float, int]:
    """The negative log-likelihood of the tokens from place `first` on, and how many they are."""
    logits = model(torch.tensor([ids], device=device)).logits[0, first - 1 : -1]
    targets = torch.tensor(ids[first:], device=device)
    return float(F.cross_entropy(logits.double(), targets, reduction="sum")), len(targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", default=DEMO, help="checkpoint folder or Hub repository")
    parser.add_argument("--window", type=int, default=512, help="tokens")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--tp", type=int, default=1, help="ranks that share tokens; the others share the windows out")
    parser.add_argument("--ep", action="store_true", help="spread the routed experts over all ranks")
    parser.add_argument("--backend", choices=["gloo", "nccl"])
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a collective may take")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    if args.window < 2:
        parser.error(f"--window: want at least 2 tokens, got {args.window}")

    device = start(args.backend, args.timeout)
    log = log_of_rank()
    size = dist.get_world_size()
    mesh = make_mesh(tp=args.tp, ep=size if args.ep else None, device_type=device.type)
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    is_spread = args.tp > 1 or (args.ep and size > 1)
    model = KimiK3ForCausalLM.from_pretrained(
        args.model, dtype=dtype, progress=False, **({"mesh": mesh} if is_spread else {"device": device})
    )
    tokenizer = KimiK3Tokenizer.from_pretrained(args.model)
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    texts = [file.read_text(encoding="utf-8") for file in args.files]
    windows = [window for text in texts for window in windows_of(bos + tokenizer.encode(text), args.window)]

    dp = mesh["dp"]
    scores = torch.zeros((len(windows), 2), dtype=torch.float64, device=device)

    def run_mine() -> None:
        for index in range(dp.get_local_rank(), len(windows), dp.size()):
            scores[index] = torch.tensor(nats_of(model, *windows[index], device), dtype=torch.float64)

    if args.ep and size > 1:
        with InStep(model):
            run_mine()
    else:
        run_mine()
    log.info("%d of %d windows", len(range(dp.get_local_rank(), len(windows), dp.size())), len(windows))
    dist.all_reduce(scores, group=dp.get_group())  # zeros from the ranks that did not run a window: exact
    nats = tokens = 0.0
    for window_nats, window_tokens in scores.tolist():
        nats, tokens = nats + window_nats, tokens + window_tokens
    num_bytes = sum(len(text.encode()) for text in texts)
    report = {
        "perplexity": math.exp(nats / tokens), "bits_per_byte": nats / math.log(2) / num_bytes, "tokens": int(tokens),
        "bytes": num_bytes, "nats": nats, "ranks": size, "tp": args.tp, "ep": size if args.ep else 1,
    }  # fmt: skip
    if dist.get_rank() == 0:
        print(
            f"perplexity {report['perplexity']:.4f} per token, {report['bits_per_byte']:.5f} bits per byte, "
            f"{report['tokens']:,} tokens in {num_bytes:,} bytes, {size} ranks"
        )
        if args.json:
            print(json.dumps(report))
    stop()


if __name__ == "__main__":
    main()
