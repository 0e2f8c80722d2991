"""Prefill and decode speed of a checkpoint beside this machine's own ceilings, measured in the same run.

    python recipes/bench_generate.py --model DIR --prompt-tokens 512,2048 --new-tokens 64 [--batch 1,4,16] [--depth D[,D]]
        [--compile] [--explain] [--engine] --json

Prefill is measured for each count of prompt tokens, decode for each batch after --depth tokens, or after the first count.
--explain says where a decoded token's time goes: ops a token, time by group, and what the weight readers reach of the read
bandwidth; with --compile also graphs and the time of the first calls, which is the compile time with cold caches.

--engine runs each batch through KimiK3Generator as well: requests of --prompt-tokens and --new-tokens that start together,
greedy and sampled; its tokens/s are those of the steps in which all decode, its overhead what is not the forward.

Ceilings, in a child process: decode, read bandwidth (torch.sum over 1 GiB of int64, best of 3) over the bytes of the
weights that one token reads; prefill and many rows, the GEMM rate (F.linear 1536 -> 2560 at 512 rows over 6 weights, best
of 20, in bf16 or float32, whichever is faster) over the flops of one token, 2 for each weight that it passes (in a prompt
the lm_head runs for the last token only). Memory that others use too changes its speed from one minute to the next, so each
decode figure stands beside the mean of reads before it, after every 8 of its steps, and after it. With --json the last line
of the output is one JSON object.
"""

import argparse
import functools
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from kimi_k3 import KimiK3Config, KimiK3ForCausalLM, KimiK3Generator, SamplingParams
from kimi_k3.planning import Plan

FIRST_TOKEN_PROMPT = 32
READ_EVERY = 8  # decode steps between two measurements of the read bandwidth
MOST_SECONDS = 20  # for one ceiling: torch's bfloat16 GEMM is slow on processors without instructions for it


def memory_bytes(key: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def seconds_since_start() -> float:
    """Since the kernel started this process, interpreter and imports included."""
    ticks_after_boot = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks_after_boot / 100


def measure_ceilings(folder: Path) -> None:
    """The child: for each line of its input, read, gemm or files, one line of output: bytes/s of a plain read, flops/s of
    torch's GEMM in bf16 or float32, whichever is faster, or the seconds to read the shards of a checkpoint."""

    def best(run, repeats: int) -> float:
        times: list[float] = []
        while len(times) < repeats and (len(times) < 3 or sum(times) < MOST_SECONDS):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return min(times)

    words = torch.ones((1 << 30) // 8, dtype=torch.int64)

    def gemm() -> float:
        seconds = math.inf
        for dtype in (torch.bfloat16, torch.float32):
            x, weights = torch.randn(512, 1536, dtype=dtype), [torch.randn(2560, 1536, dtype=dtype) for _ in range(6)]
            run = functools.partial(lambda x, weights: [torch.nn.functional.linear(x, w) for w in weights], x, weights)
            seconds = min(seconds, best(run, 20))
        return 6 * 2 * 512 * 1536 * 2560 / seconds

    def files() -> float:
        shards, held = sorted(folder.glob("*.safetensors")), []

        def read_files() -> None:
            held.clear()
            held.extend(shard.read_bytes() for shard in shards)

        return best(read_files, 2)

    measures = {"read": lambda: (1 << 30) / best(words.sum, 3), "gemm": gemm, "files": files}
    for line in sys.stdin:
        print(measures[line.strip()](), flush=True)


class Machine:
    """What this machine can do, measured in a child process: its buffers, of 1 GiB, are not in this one's memory."""

    def __init__(self, folder: Path, threads: int) -> None:
        command = [sys.executable, __file__, "--ceilings", "--threads", str(threads), "--model", str(folder)]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self, what: str) -> float:
        """See `measure_ceilings`."""
        assert self.child.stdin is not None and self.child.stdout is not None
        try:
            self.child.stdin.write(f"{what}\n")
            self.child.stdin.flush()
            answer = self.child.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"the process that measures the ceilings ended with {self.child.wait()}")
        return float(answer)

    def close(self) -> None:
        self.child.communicate()


def weights_of_one_token(plan: Plan) -> tuple[dict[str, int], int, int]:
    """Bytes that a decoded token reads, by group of GROUPS; weights that a prompt token and a decoded token pass."""
    text = plan.config.text_config
    read_bytes, passed, head = {"projections": 0, "experts": 0}, 0, 0
    for tensor in plan.tensors:
        if tensor.component in ("vision_tower", "mm_projector") or "embed_tokens" in tensor.name:
            continue
        routed = tensor.component == "routed_experts"
        share = text.num_experts_per_token / text.num_experts if routed else 1
        read_bytes["experts" if routed else "projections"] += int(tensor.spec.num_bytes * share)
        if tensor.name.startswith("lm_head"):
            head += tensor.num_parameters
        else:
            passed += int(tensor.num_parameters * share)
    return read_bytes, passed, passed + head


@torch.no_grad()
def prefill(model: KimiK3ForCausalLM, ids: torch.Tensor):
    """The cache and the first token [B, 1] after prompts [B, T]."""
    cache = model.make_cache(ids.shape[0])
    for piece in ids.split(2048, dim=1):
        logits = model(piece, past_key_values=cache, logits_to_keep=1).logits
    return cache, logits[:, -1].argmax(-1, keepdim=True)


GROUPS = {
    "projections": ("kimi_k3::matvec",),
    "experts": ("kimi_k3::mxfp4_experts",),
    "kda": ("kimi_k3::kda", "kimi_k3::short_conv"),
    "mla": ("kimi_k3::mla", "kimi_k3::head_matvec", "aten::bmm"),
    "mix and norm": ("kimi_k3::attn_res",),
    "norms, gates": ("kimi_k3::rms_norm", "kimi_k3::gated_rms_norm", "kimi_k3::situ", "kimi_k3::choose_experts"),
}


def explain(run, steps: int, read_bytes: dict[str, int], read_bytes_per_s: float) -> dict[str, dict[str, float]]:
    """Time and calls of one token by group of ops, of `steps` profiled steps; "other ops" and "Python, graphs" are the rest.

    An op that another op calls counts as part of it.
    """
    run(1)
    start = time.perf_counter()
    run(steps)
    wall_ms = 1e3 * (time.perf_counter() - start) / steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(steps)
    table = {name: {"ms": 0.0, "calls": 0.0} for name in (*GROUPS, "other ops")}
    for event in profile.events():
        above = event.cpu_parent
        while above is not None and "::" not in above.name:
            above = above.cpu_parent
        if above is None and "::" in event.name:
            group = next((g for g, ops in GROUPS.items() if event.name.startswith(ops)), "other ops")
            table[group]["ms"] += event.cpu_time_total / 1e3 / steps
            table[group]["calls"] += 1 / steps
    # The profiler itself costs time for every op, so this remainder of the undisturbed step is a lower bound.
    table["Python, graphs"] = {"ms": max(0.0, wall_ms - sum(row["ms"] for row in table.values())), "calls": 0.0}
    for name, row in table.items():
        if name in read_bytes and row["ms"]:
            row["bytes_per_s"] = read_bytes[name] / (row["ms"] / 1e3)
    print(f"one token: {wall_ms:.1f} ms, {sum(row['calls'] for row in table.values()):.0f} ops")
    for name, row in table.items():
        speed = row.get("bytes_per_s")
        share = "" if speed is None else f"  {speed / 1e9:6.1f} GB/s, {100 * speed / read_bytes_per_s:.0f} % of reading"
        print(f"  {name:14} {row['ms']:8.2f} ms {row['calls']:6.0f} calls{share}")
    return table


@torch.no_grad()
def decode(model: KimiK3ForCausalLM, cache, token: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        token = model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    return token


def measure_decode(
    model: KimiK3ForCausalLM, prompts: torch.Tensor, new_tokens: int, machine: Machine
) -> dict[str, float]:
    """Decode speed of all rows together, and the mean of the read bandwidth beside it."""
    cache, token = prefill(model, prompts)
    token = decode(model, cache, token, 2)
    reads, seconds = [machine.measure("read")], 0.0
    for first in range(0, new_tokens, READ_EVERY):
        start = time.perf_counter()
        token = decode(model, cache, token, min(READ_EVERY, new_tokens - first))
        seconds += time.perf_counter() - start
        reads.append(machine.measure("read"))
    return {"tokens_per_s": prompts.shape[0] * new_tokens / seconds, "read_bytes_per_s": statistics.fmean(reads)}


def measure_engine(
    model: KimiK3ForCausalLM, prompts: torch.Tensor, new_tokens: int, temperature: float, machine: Machine
) -> dict[str, float]:
    """The same through the engine, and its time outside of the forward."""
    params = SamplingParams(max_new_tokens=new_tokens, temperature=temperature, seed=0, ignore_eos=True)
    rows = prompts.shape[0]
    with KimiK3Generator(model, max_num_seqs=rows, prefix_cache=False) as gen:
        for prompt in prompts.tolist():
            gen.add(prompt, params)
        decoded = seconds = forward = 0.0
        reads, steps = [], 0
        while gen.has_unfinished():
            before = gen.stats()
            gen.step()
            after = gen.stats()
            if after.get("prefill_tokens", 0) == before.get("prefill_tokens", 0):
                decoded += after["generated_tokens"] - before["generated_tokens"]
                seconds += after["step_seconds"] - before["step_seconds"]
                forward += after["forward_seconds"] - before["forward_seconds"]
                steps += 1
                if steps % READ_EVERY == 0:
                    reads.append(machine.measure("read"))
            else:
                reads = [machine.measure("read")]  # the last one is just before the first step of decodes alone
        reads.append(machine.measure("read"))
    return {
        "tokens_per_s": decoded / seconds,
        "read_bytes_per_s": statistics.fmean(reads),
        "overhead": 1 - forward / seconds,
    }


def counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompt-tokens", type=counts, default=[512], metavar="N[,N]")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=counts, default=[1], metavar="N[,N]")
    parser.add_argument(
        "--depth", type=counts, default=[], metavar="N[,N]",
        help="decode after so many tokens (default: --prompt-tokens); more than one: the first batch at the others too",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--engine", action="store_true", help="each batch through KimiK3Generator too")
    parser.add_argument("--explain", action="store_true", help="where a decoded token's time goes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ceilings", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.ceilings:
        measure_ceilings(args.model)
        return
    import_rss_bytes = memory_bytes("VmRSS")

    config = KimiK3Config.from_pretrained(args.model)
    start = time.perf_counter()
    model = KimiK3ForCausalLM.from_pretrained(args.model, progress=False).eval()
    load_s = time.perf_counter() - start
    if args.compile:
        model.compile_blocks()
    generator = torch.Generator().manual_seed(0)

    def prompt(batch: int, tokens: int) -> torch.Tensor:
        return torch.randint(config.text_config.vocab_size, (batch, tokens), generator=generator)

    start = time.perf_counter()
    prefill(model, prompt(1, FIRST_TOKEN_PROMPT))
    first_token_s = seconds_since_start()
    for batch in args.batch:  # warm-up: caches of the libraries, graphs
        decode(model, *prefill(model, prompt(batch, min(args.prompt_tokens[0], 64))), 1)
    first_calls_s = time.perf_counter() - start

    prefills = {}
    for tokens in args.prompt_tokens:
        ids = prompt(args.batch[0], tokens)
        start = time.perf_counter()
        prefill(model, ids)
        prefills[tokens] = ids.numel() / (time.perf_counter() - start)
    depth, *more_depths = args.depth or args.prompt_tokens[:1]
    machine = Machine(args.model, args.threads)
    decodes = {b: measure_decode(model, prompt(b, depth), args.new_tokens, machine) for b in args.batch}
    decodes_at = {d: measure_decode(model, prompt(args.batch[0], d), args.new_tokens, machine) for d in more_depths}
    peak_rss_bytes = memory_bytes("VmHWM")
    engines = {
        f"{kind}, {b}": measure_engine(model, prompt(b, args.prompt_tokens[0]), args.new_tokens, temperature, machine)
        for kind, temperature in (("greedy", 0.0), ("sampled", 1.0))
        for b in (args.batch if args.engine else ())
    }

    read_bytes, passed, decoded = weights_of_one_token(Plan(config))
    bytes_per_token = sum(read_bytes.values())
    by_depth = {depth: decodes[args.batch[0]], **decodes_at}
    for speed in (*decodes.values(), *decodes_at.values(), *engines.values()):
        speed["ceiling_tokens_per_s"] = speed["read_bytes_per_s"] / bytes_per_token
    gemm_flops_per_s, read_files_s = machine.measure("gemm"), machine.measure("files")
    from torch._dynamo.utils import counters  # here: it imports the compiler, half a second of a start without it

    graphs = counters["stats"]["unique_graphs"]
    result = {
        "prefill_tokens_per_s": prefills[args.prompt_tokens[0]],
        "ceiling_prefill_tokens_per_s": gemm_flops_per_s / (2 * passed),
        "decode_tokens_per_s": decodes[args.batch[0]]["tokens_per_s"],
        "ceiling_decode_tokens_per_s": decodes[args.batch[0]]["ceiling_tokens_per_s"],
        "ceiling_many_rows_tokens_per_s": gemm_flops_per_s / (2 * decoded),
        "prefill_by_prompt_tokens": prefills,
        "decode_by_batch": {batch: speed["tokens_per_s"] for batch, speed in decodes.items()},
        "ceiling_decode_by_batch": {batch: speed["ceiling_tokens_per_s"] for batch, speed in decodes.items()},
        "decode_by_depth": {depth: speed["tokens_per_s"] for depth, speed in by_depth.items()},
        "ceiling_decode_by_depth": {depth: speed["ceiling_tokens_per_s"] for depth, speed in by_depth.items()},
        "engine": engines,
        "first_token_s": first_token_s,
        "first_calls_s": first_calls_s,
        "load_s": load_s,
        "peak_rss_bytes": peak_rss_bytes,
        "import_rss_bytes": import_rss_bytes,
        "checkpoint_bytes": sum(f.stat().st_size for f in args.model.glob("*.safetensors")),
        "graphs": graphs,
        "bytes_per_token": bytes_per_token,
        "flops_per_token": 2 * passed,
        "batch": args.batch[0],
        "depth": depth,
        "threads": args.threads,
        "read_bytes_per_s": decodes[args.batch[0]]["read_bytes_per_s"],
        "gemm_flops_per_s": gemm_flops_per_s,
        "read_files_s": read_files_s,
    }

    def beside_ceiling(speed: dict[str, float]) -> str:
        rate, ceiling = speed["tokens_per_s"], speed["ceiling_tokens_per_s"]
        return f"{rate:10.2f} tokens/s, {rate / ceiling:5.2f} x the ceiling of {ceiling:.1f}"

    for count, rate in prefills.items():
        figures = {"tokens_per_s": rate, "ceiling_tokens_per_s": result["ceiling_prefill_tokens_per_s"]}
        print(f"prefill  {count:6} tokens {beside_ceiling(figures)}")
    for batch, speed in decodes.items():
        print(f"decode   {batch:6} rows   {beside_ceiling(speed)}")
    for deeper, speed in decodes_at.items():
        print(f"decode   {args.batch[0]:6} rows   {beside_ceiling(speed)}, at depth {deeper}, {depth} above")
    for name, speed in engines.items():
        overhead = f"{100 * speed['overhead']:.1f} % outside of the forward"
        print(f"engine   {name:13} {beside_ceiling(speed)}, {overhead}")
    print(
        f"ceilings of decode: one row's, by its bytes and the reads measured beside it; "
        f"{result['ceiling_many_rows_tokens_per_s']:.1f} tokens/s for many rows, by flops"
    )
    above = peak_rss_bytes - import_rss_bytes
    print(f"memory   {above / 1e9:.2f} GB above imports, {above / result['checkpoint_bytes']:.2f} x the checkpoint")
    print(f"load     {load_s:.2f} s, {load_s / read_files_s:.2f} x reading its files into memory")
    print(f"start    {first_token_s:.1f} s to the first token of a {FIRST_TOKEN_PROMPT}-token prompt")
    if args.compile:
        print(f"compile  {result['graphs']} graphs, {first_calls_s:.1f} s for the first calls")
    if args.explain:
        cache, token = prefill(model, prompt(1, depth))
        steps = min(args.new_tokens, 8)
        run = functools.partial(decode, model, cache, token)
        result["explain"] = explain(run, steps, read_bytes, machine.measure("read"))
    machine.close()
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
