"""Generate many prompts with the experts spread over all ranks: expert parallelism, with tensor parallelism inside if asked.

    torchrun --standalone --nproc-per-node 4 recipes/generate_ep.py --prompts prompts.txt --max-new-tokens 64

--prompts is a file with one prompt a line, blank lines skipped (default: a few built in). Ranks are --tp ranks that share
tokens, times groups with prompts of their own; the routed experts lie on all ranks, so expert parallelism spans tp. Without
--model it runs the bundled demo model, with 16 experts.

    torchrun --standalone --nproc-per-node 4 recipes/generate_ep.py --tp 2                      # tp 2 x 2 groups, ep 4
    torchrun --standalone --nproc-per-node 8 recipes/generate_ep.py --model /models/kimi-k3 --tp 8 --backend nccl

Eight hosts of 8 GPUs (the same command on each; tp inside a host, ep over all 64 ranks):

    torchrun --nnodes 8 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST0:29500 --rdzv-id k3 \
        --log-dir logs --redirects 3 --tee 3 --local-ranks-filter 0 \
        recipes/generate_ep.py --model /models/kimi-k3 --tp 8 --prompts prompts.txt

Each group decodes its own prompts together, --rows at once, and takes part with zero tokens when it has none left. Answers
are printed by rank 0 in the order of the prompts, then the load: tokens for each expert, busiest against mean. With
--batch-invariant an answer is the same bits for any number of groups and any --rows. One torchrun is one failure domain: a
rank that stops ends the run after --timeout seconds with an error that names it. torchrun's --max-restarts N then starts
all ranks anew, from the beginning; with --standalone and gloo that needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the
environment (torch 2.13).
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import kimi_k3
from kimi_k3 import KimiK3ForCausalLM, KimiK3Generator, KimiK3Tokenizer, SamplingParams
from kimi_k3.parallel import log_of_rank, make_mesh, start, stop

DEMO = Path(kimi_k3.__file__).parent / "demo"
PROMPTS = ["**PROSPERO**", "**MACBETH**", "**MIRANDA**", "**LADY MACBETH**", "**ARIEL**"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO, help="checkpoint folder or Hub repository")
    parser.add_argument("--prompts", type=Path, help="text file, one prompt a line")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share tokens; must divide the number of ranks")
    parser.add_argument("--rows", type=int, default=16, help="prompts that a group decodes at once")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--backend", choices=["gloo", "nccl"])
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a collective may take")
    args = parser.parse_args()

    device = start(args.backend, args.timeout)
    log = log_of_rank()
    mesh = make_mesh(tp=args.tp, ep=dist.get_world_size(), device_type=device.type)
    dp = mesh["dp"]
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    model = KimiK3ForCausalLM.from_pretrained(args.model, dtype=dtype, mesh=mesh, progress=False)
    tokenizer = KimiK3Tokenizer.from_pretrained(args.model)
    megabytes = model.checkpoint_source.bytes_read / 1e6
    log.info("process %d, group %d of %d, read %.1f MB", os.getpid(), dp.get_local_rank(), dp.size(), megabytes)

    prompts = PROMPTS if args.prompts is None else [p for p in args.prompts.read_text().splitlines() if p.strip()]
    mine, began = range(dp.get_local_rank(), len(prompts), dp.size()), time.perf_counter()
    params = [
        SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed + index)
        for index in mine
    ]
    with KimiK3Generator(
        model, tokenizer, max_num_seqs=args.rows, batch_invariant=args.batch_invariant, data_parallel=True
    ) as gen:
        gen.count_experts()
        results = gen.generate([tokenizer.encode(prompts[index]) for index in mine], params)
        counts = gen.expert_counts().double()
    log.info("%d prompts in %.2f s", len(mine), time.perf_counter() - began)

    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {index: result.text for index, result in zip(mine, results)})
    if dist.get_rank() == 0:
        everything = {index: text for part in gathered for index, text in part.items()}
        for index, prompt in enumerate(prompts):
            print(f"--- {prompt}\n{everything[index]}")
        busiest = counts.amax(1) / counts.mean(1)
        print(f"expert load, busiest / mean: median layer {busiest.median():.2f}, worst layer {busiest.max():.2f}")
    stop()


if __name__ == "__main__":
    main()
