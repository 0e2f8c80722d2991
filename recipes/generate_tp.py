"""Generate on several ranks that share every token: tensor parallelism. Without --model, with the bundled demo model.

    torchrun --standalone --nproc-per-node 2 recipes/generate_tp.py --prompt "**PROSPERO**" --max-new-tokens 64

On GPUs the backend is nccl, on CPUs gloo; --backend says it aloud. One host with 8 GPUs, a log file for each rank, rank
0's on the terminal:

    torchrun --standalone --nproc-per-node 8 --log-dir logs --redirects 3 --tee 3 --local-ranks-filter 0 \
        recipes/generate_tp.py --model /models/kimi-k3 --prompt "..." --backend nccl

Two hosts of 4 (the same command on both; HOST0 is the first one's name):

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST0:29500 --rdzv-id k3 \
        recipes/generate_tp.py --model /models/kimi-k3 --prompt "..."

Each rank reads only its own part of the checkpoint. Every rank computes the same tokens; rank 0 prints them. One torchrun
with --nproc-per-node N is one failure domain: when a rank dies, the others are stopped, and with --max-restarts all of
them start anew and generate from the beginning (with --standalone and gloo, torch 2.13 restarts only where the environment
has TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1). A rank that is missing from a collective for --timeout seconds ends the run
with an error that names the collective and the missing rank.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist

import kimi_k3
from kimi_k3 import KimiK3ForCausalLM, KimiK3Tokenizer
from kimi_k3.parallel import log_of_rank, make_mesh, start, stop

DEMO = Path(kimi_k3.__file__).parent / "demo"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO, help="checkpoint folder or Hub repository")
    parser.add_argument("--prompt", default="**PROSPERO**\n\nMy brave spirit, come!")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="the same on every rank, so that all draw the same tokens")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--backend", choices=["gloo", "nccl"])
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a collective may take")
    args = parser.parse_args()

    device = start(args.backend, args.timeout)
    log = log_of_rank()
    mesh = make_mesh(tp=dist.get_world_size(), device_type=device.type)
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    began = time.perf_counter()
    model = KimiK3ForCausalLM.from_pretrained(args.model, dtype=dtype, mesh=mesh, progress=False)
    log.info("read %.1f MB in %.1f s", model.checkpoint_source.bytes_read / 1e6, time.perf_counter() - began)
    tokenizer = KimiK3Tokenizer.from_pretrained(args.model)

    ids = torch.tensor([tokenizer.encode(args.prompt)], device=device)
    began = time.perf_counter()
    out = model.generate(
        ids, max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed, tokenizer=tokenizer
    )[0, ids.shape[1] :]
    log.info("%d tokens in %.2f s", len(out), time.perf_counter() - began)
    if dist.get_rank() == 0:
        print(tokenizer.decode(out.tolist(), skip_special_tokens=True))
    stop()


if __name__ == "__main__":
    main()
