"""The command line: `kimi-k3 generate | chat | plan | placement | verify | convert | compile | env`.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 `verify` or `placement check` found problems, 2 an error,
told in one line, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kimi_k3.parallel import placement_cli
from kimi_k3.planning import DEVICE_MEMORY_BYTES, MeshShape, Plan, read_stored
from kimi_k3.preflight import InsufficientResources
from kimi_k3.shards import parse_size

if TYPE_CHECKING:
    from kimi_k3.generation import GeneratedToken
    from kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM
    from kimi_k3.tokenization_kimi_k3 import KimiK3Tokenizer

DEMO_FOLDER = Path(__file__).parent / "demo"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"

log = logging.getLogger("kimi_k3")


class _Parser(argparse.ArgumentParser):
    """Errors in the command line are told like all others: in one line, by `main`."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see `{self.prog} --help`)")


def _byte_count(text: str) -> int:
    try:
        return parse_size(int(text) if text.isdigit() else text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"want bytes or a size such as 141GB, got {text!r}") from None


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    which = "checkpoint folder or Hub repository; the bundled demo model if left out"
    parser.add_argument("path", nargs="?", default=DEMO_FOLDER, help=which)
    dtypes = ["auto", "bfloat16", "float32"]
    parser.add_argument("--dtype", default="auto", choices=dtypes, help="of the trunk; auto: as stored")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--experts", default="mxfp4", choices=["mxfp4", "dequantized"])
    parser.add_argument("--trunk", choices=["int8"], help="quantise the trunk's weights (lossy)")
    parser.add_argument("--expert-activations", choices=["int8"], help="of the packed experts (lossy)")
    parser.add_argument("--compile", action="store_true", help="torch.compile every decoder layer")


def _add_sampling_options(parser: argparse.ArgumentParser, temperature: float, max_new_tokens: int) -> None:
    parser.add_argument("--max-new-tokens", type=int, default=max_new_tokens)
    parser.add_argument("--temperature", type=float, default=temperature, help="0: greedy (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0, help="0: all")
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--seed", type=int, help="the same seed gives the same tokens")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the output; repeatable")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kimi-k3", description="Load, run and inspect Kimi K3 checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="continue a text")
    _add_model_options(generate)
    prompt = generate.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="else --prompt-file, else stdin")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE")
    _add_sampling_options(generate, temperature=0.0, max_new_tokens=256)
    shown = "an image before the prompt, which then is a chat message; repeatable"
    generate.add_argument("--image", action="append", default=[], metavar="FILE", help=shown)
    generate.add_argument("--no-stream", action="store_true", help="print the text when it is whole")
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk to a model; /reset starts anew, /exit leaves")
    _add_model_options(chat)
    _add_sampling_options(chat, temperature=1.0, max_new_tokens=4096)
    chat.set_defaults(run=_chat)

    plan = commands.add_parser("plan", help="bytes per device, token and sequence of a configuration; needs no weights")
    plan.add_argument("path", help="folder (config.json is enough) or Hub repository")
    ranks = "tp=8,ep=64: 64 ranks, each sequence split over 8 (default: %(default)s)"
    plan.add_argument("--mesh", default="tp=1,ep=1", help=ranks)
    memory = plan.add_mutually_exclusive_group()
    memory.add_argument("--device-memory", type=_byte_count, metavar="SIZE", help="of one device: 141GB or bytes")
    memory.add_argument("--hardware", choices=list(DEVICE_MEMORY_BYTES), help="a device whose memory is known")
    plan.add_argument("--context", type=int, metavar="N", help="tokens that each sequence keeps")
    plan.add_argument("--batch", type=int, metavar="N", help="sequences at once over the whole mesh; wants --context")
    plan.add_argument("--json", action="store_true")
    plan.set_defaults(run=_plan)

    placement_cli.add_commands(commands)

    verify = commands.add_parser("verify", help="check a folder's shards against its config and index")
    verify.add_argument("path")
    verify.add_argument("--sha256", action="store_true", help="also hash the shards, where their hashes are known")
    verify.add_argument("--json", action="store_true")
    verify.set_defaults(run=_verify)

    convert = commands.add_parser("convert", help="write a checkpoint with other experts or shard sizes")
    convert.add_argument("source")
    convert.add_argument("destination", type=Path)
    convert.add_argument("--experts", choices=["mxfp4", "dequantized"], help="left out: as they are")
    size = "default: %(default)s"
    convert.add_argument("--max-shard-size", type=_byte_count, default="5GB", metavar="SIZE", help=size)
    convert.set_defaults(run=_convert)

    warm = commands.add_parser("compile", help="compile a model's layers and keep the graphs for later processes")
    _add_model_options(warm)
    warm.set_defaults(run=_compile, compile=True)

    env = commands.add_parser("env", help="versions, devices, and which kernel serves each op")
    env.add_argument("--json", action="store_true")
    env.set_defaults(run=_env)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    log.addHandler(handler)
    try:
        log.setLevel(_log_level())
        args = _build_parser().parse_args(argv)
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of a pipe left: no error, but Python would flush into it once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError, NotImplementedError, FloatingPointError, InsufficientResources) as error:
        print(f"kimi-k3: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    finally:
        log.removeHandler(handler)


def _log_level() -> str:
    level = os.environ.get("KIMI_K3_LOG_LEVEL", "WARNING").upper()
    if level not in logging.getLevelNamesMapping():
        raise ValueError(f"KIMI_K3_LOG_LEVEL: want DEBUG, INFO, WARNING or ERROR, got {level!r}")
    return level


# generate and chat


def _load(args: argparse.Namespace, with_images: bool = False) -> tuple[KimiK3ForCausalLM, KimiK3Tokenizer]:
    import torch

    from kimi_k3 import KimiK3ForCausalLM, KimiK3ForConditionalGeneration, KimiK3Tokenizer

    if args.device is not None:
        try:
            torch.device(args.device)
        except RuntimeError as error:
            raise ValueError(f"--device: want a device such as cpu or cuda:0, got {args.device!r}") from error
    tokenizer = KimiK3Tokenizer.from_pretrained(args.path)
    model_class = KimiK3ForConditionalGeneration if with_images else KimiK3ForCausalLM
    model = model_class.from_pretrained(
        args.path,
        dtype="auto" if args.dtype == "auto" else getattr(torch, args.dtype),
        device=args.device,
        experts=args.experts,
        trunk=args.trunk,
        expert_activations=args.expert_activations,
    )
    if args.compile:
        model.compile_blocks()
    return model, tokenizer


def _stream(
    args: argparse.Namespace, model: KimiK3ForCausalLM, tokenizer: KimiK3Tokenizer, ids: list[int], **inputs: Any
) -> Iterator[GeneratedToken]:
    from kimi_k3.generation import stream_generate

    return stream_generate(
        model, ids, tokenizer=tokenizer, max_new_tokens=args.max_new_tokens, temperature=args.temperature,
        top_p=args.top_p, top_k=args.top_k, min_p=args.min_p, seed=args.seed, stop=tuple(args.stop), **inputs,
    )  # fmt: skip


def _read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return args.prompt
    if args.prompt_file is not None:
        return args.prompt_file.read_text(encoding="utf-8")
    if sys.stdin.isatty():
        raise ValueError("generate: want --prompt, --prompt-file or a text on stdin")
    return sys.stdin.read()


def _generate(args: argparse.Namespace) -> int:
    prompt = _read_prompt(args)
    model, tokenizer = _load(args, with_images=bool(args.image))
    inputs: dict[str, Any] = {}
    if args.image:
        from kimi_k3.image_processing_kimi_k3 import KimiK3ImageProcessor

        parts = [*({"type": "image", "image": file} for file in args.image), {"type": "text", "text": prompt}]
        encoded = tokenizer.encode_chat([{"role": "user", "content": parts}])
        ids = encoded.ids
        processed = KimiK3ImageProcessor.from_pretrained(args.path)(encoded.images)
        inputs = {
            "pixel_values": processed.pixel_values.to(model.device), "grid_thws": processed.grid_thws.to(model.device),
        }  # fmt: skip
    else:
        ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError("generate: want a prompt of at least one token, got an empty text")
    count, reason, pieces = 0, "interrupted", []
    start = first = time.perf_counter()
    try:
        for step in _stream(args, model, tokenizer, ids, **inputs):
            if not count:
                first = time.perf_counter()
            count, reason = count + 1, step.finish_reason or reason
            if args.no_stream:
                pieces.append(step.text)
            else:
                print(step.text, end="", flush=True)
    except KeyboardInterrupt:
        pass
    seconds = time.perf_counter() - first
    print("".join(pieces), flush=True)
    rate = f", {(count - 1) / seconds:.1f} tokens/s" if count > 1 and seconds else ""
    print(
        f"{len(ids)} prompt tokens, first token after {first - start:.2f} s, {count} new tokens{rate}, end: {reason}",
        file=sys.stderr,
    )
    return 130 if reason == "interrupted" else 0


def _chat(args: argparse.Namespace) -> int:
    if sys.stdin.isatty():
        import readline  # noqa: F401  (line editing for input())

    model, tokenizer = _load(args)
    tokenizer.chat_parser()  # a vocabulary without chat markers is told now, not after the first question
    messages: list[dict[str, Any]] = []
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if text == "/exit":
            return 0
        if text == "/reset":
            messages.clear()
        elif text.startswith("/"):
            print("commands: /reset, /exit", file=sys.stderr)
        elif text:
            messages.append({"role": "user", "content": text})
            # The ids themselves, so that the next prompt repeats exactly what was generated, cut off or not.
            messages.append({"role": "assistant", "token_ids": _answer(args, model, tokenizer, messages)})


def _answer(
    args: argparse.Namespace, model: KimiK3ForCausalLM, tokenizer: KimiK3Tokenizer, messages: list[dict[str, Any]]
) -> list[int]:
    """Print one reply as it comes; Ctrl-C ends it. Returns its ids."""
    from kimi_k3.chat_parser import MalformedToolCall, ReasoningDelta, ResponseDelta, ToolCall

    parser, ids, shows_reasoning = tokenizer.chat_parser(), [], False
    dim, plain = (DIM, PLAIN) if sys.stdout.isatty() else ("", "")

    def show(events: Sequence[Any]) -> None:
        nonlocal shows_reasoning
        for event in events:
            is_reasoning = isinstance(event, ReasoningDelta)
            if is_reasoning != shows_reasoning and isinstance(event, ReasoningDelta | ResponseDelta):
                print(dim if is_reasoning else f"{plain}\n\n", end="")
                shows_reasoning = is_reasoning
            if isinstance(event, ReasoningDelta | ResponseDelta):
                print(event.text, end="", flush=True)
            elif isinstance(event, ToolCall):
                print(f"\n[tool call {event.name} {json.dumps(event.arguments, ensure_ascii=False)}]", end="")
            elif isinstance(event, MalformedToolCall):
                print(f"\n[broken tool call: {event.reason}]", end="")

    try:
        for step in _stream(args, model, tokenizer, tokenizer.encode_chat(messages).ids):
            ids.append(step.token_id)
            show(parser.feed(step.token_id))
    except KeyboardInterrupt:
        pass
    finally:
        show(parser.finish())
        print(plain if shows_reasoning else "", flush=True)
    return ids


# plan, verify, convert and env


def _bytes(count: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count:,} bytes ({count / size:.2f} {unit})"
    return f"{count:,} bytes"


def _print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values, indent=2))


def _plan(args: argparse.Namespace) -> int:
    from kimi_k3.configuration_kimi_k3 import KimiK3Config

    config = KimiK3Config.from_pretrained(args.path)
    stored = read_stored(args.path) if Path(args.path).is_dir() else None
    plan = Plan(
        config,
        MeshShape.parse(args.mesh),
        device_memory=DEVICE_MEMORY_BYTES[args.hardware] if args.hardware else args.device_memory,
        context=args.context,
        batch=args.batch,
        experts=stored.experts if stored else None,
        a_log_length=stored.a_log_length if stored else None,
    )
    stored_bytes = stored.num_bytes if stored else None
    if stored_bytes not in (None, plan.checkpoint_bytes):
        log.warning(
            "%s holds %d bytes of tensors, its config.json makes %d: the plan counts these (see `kimi-k3 verify`)",
            args.path, stored_bytes, plan.checkpoint_bytes,
        )  # fmt: skip
    values = {"path": str(args.path), "stored_bytes": stored_bytes} | plan.to_dict()
    if plan.mesh.ep > 1:
        from kimi_k3.parallel.cluster_plan import ClusterPlan

        cluster = ClusterPlan(plan)
        values["cluster"] = cluster.to_dict()
    if args.json:
        _print_json(values)
        return 0
    _print_plan(plan)
    if plan.mesh.ep > 1:
        print()
        print("\n".join(cluster.lines()))
    return 0


def _print_plan(plan: Plan) -> None:
    values, mesh = plan.to_dict(), plan.mesh
    device, parts = values["device"], values["components"]
    print(f"parameters          {values['parameters']:,}, active for a token {values['active_parameters']:,}")
    print(f"checkpoint          {_bytes(values['checkpoint_bytes'])} in {values['num_tensors']:,} tensors")
    print(f"mesh                tp={mesh.tp}, ep={mesh.ep}: {mesh.ep} devices, {mesh.num_groups} groups of {mesh.tp}")
    print()
    print(f"{'component':<26}{'parameters':>22}{'bytes':>22}{'bytes a device':>20}")
    rows = [(name, *(part[key] for key in ("parameters", "bytes", "device_bytes"))) for name, part in parts.items()]
    rows.append(("all", plan.num_parameters, plan.checkpoint_bytes, plan.device_weight_bytes))
    for name, parameters, stored, on_device in rows:
        print(f"{name:<26}{parameters:>22,}{stored:>22,}{on_device:>20,}")
    print()
    print("a device keeps")
    print(f"  for each token    {_bytes(device['latent_cache_bytes_per_token'])} of MLA latents")
    print(f"  for each sequence {_bytes(device['kda_state_bytes_per_sequence'])} of KDA states (float32)")
    print(f"                    {_bytes(device['conv_window_bytes_per_sequence'])} of convolution windows")
    if mesh.tp > 1:
        whole = values["kda_state_bytes_per_sequence"], values["conv_window_bytes_per_sequence"]
        print(f"                    (over all {mesh.tp} devices of a group: {whole[0]:,} and {whole[1]:,} bytes)")
    print(f"  during a pass     {_bytes(values['attn_res_bytes_per_token'])} for each of its tokens, AttnRes blocks")
    if plan.context is not None:
        sequences = device["sequences"]
        print(f"  {sequences} x {plan.context:,} tokens: {_bytes(device['cache_bytes'])}")
    if plan.device_memory is None:
        return
    print()
    used = device["weight_bytes"] + device["cache_bytes"]
    print(f"fits                {'yes' if plan.fits else 'no'}: {_bytes(used)} of {_bytes(plan.device_memory)}")
    if plan.largest_batch is not None:
        print(f"largest batch       {plan.largest_batch:,} sequences of {plan.context:,} tokens over all devices")
    if plan.largest_context is not None:
        given = f"{plan.batch:,} sequences at once" if plan.batch else "one sequence in each group"
        print(f"largest context     {plan.largest_context:,} tokens with {given}")
    print("not counted         activations and the workspace of libraries")


def _verify(args: argparse.Namespace) -> int:
    from kimi_k3.verification import verify_folder

    report = verify_folder(args.path, sha256=args.sha256)
    if args.json:
        _print_json(dataclasses.asdict(report) | {"folder": str(report.folder), "is_whole": report.is_whole})
    else:
        kinds = ", ".join(f"{count:,} {dtype}" for dtype, count in report.tensors_by_dtype.items())
        print(f"{report.num_shards:,} shards, {_bytes(report.file_bytes)}")
        print(f"{report.num_tensors:,} tensors, {_bytes(report.tensor_bytes)}: {kinds or 'none'}")
        print(f"checksums: {report.checksums}")
        for note in report.notes:
            print(f"note: {note}")
        for problem in report.problems:
            print(f"problem: {problem}")
        print("whole" if report.is_whole else f"{len(report.problems):,} problems")
    return 0 if report.is_whole else 1


def _convert(args: argparse.Namespace) -> int:
    from kimi_k3.conversion import convert

    convert(args.source, args.destination, experts=args.experts, max_shard_size=args.max_shard_size)
    return 0


def _compile(args: argparse.Namespace) -> int:
    from torch._dynamo.utils import counters

    from kimi_k3.compilation import keep_graphs, warm_up

    model, _ = _load(args)
    start = time.perf_counter()
    warm_up(model)
    seconds, graphs = time.perf_counter() - start, counters["stats"]["unique_graphs"]
    print(f"{graphs} graphs in {seconds:.1f} s, kept in {keep_graphs()} for `--compile` and `compile_blocks()`")
    return 0


def _env(args: argparse.Namespace) -> int:
    from kimi_k3.environment import VARIABLES, environment

    values = environment()
    if args.json:
        _print_json(values)
        return 0
    print(f"{'python':<20}{values['python']}")
    print(f"{'platform':<20}{values['platform']}")
    for package, version in values["packages"].items():
        print(f"{package:<20}{version or 'not installed'}")
    cpu, cuda = values["cpu"], values["cuda"]
    print(f"{'cpu':<20}{cpu['capability']}, {cpu['cores']} cores, {cpu['threads']} threads")
    print(f"{'cuda':<20}{'none' if not cuda['devices'] else 'version ' + cuda['version']}")
    for index, device in enumerate(cuda["devices"]):
        described = f"{device['name']}, capability {device['capability']}, {_bytes(device['memory_bytes'])}"
        print(f"{f'cuda:{index}':<20}{described}")
    print()
    devices = next(iter(values["ops"].values())).keys()
    print(f"{'op':<28}" + "".join(f"{device:<28}" for device in devices))
    for op, kernels in values["ops"].items():
        print(f"{op:<28}" + "".join(f"{kernels[device] or 'none':<28}" for device in devices).rstrip())
    print()
    for name, meaning in VARIABLES.items():
        print(f"{name}={values['variables'][name] or ''}  {meaning}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
