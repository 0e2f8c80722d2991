"""Every op of kimi_k3_kernels beside its reference and this machine's ceilings, measured in the same run.

    python recipes/bench_ops.py --shapes mid [--op kda_chunk --op matvec] [--device cuda] [--threads N] [--json]
    python recipes/bench_ops.py --op mxfp4_experts --shapes k3        # K3's own layer: 15.7 GB of packed experts

Shapes: `k3` (hidden 7168, 96 heads), `k3-tp8` (one of 8 shards: 12 heads, 112 experts), `mid` (hidden 1536, 20 heads,
128 experts 768 x 640), `tiny`. The whole layer of 896 experts runs only when it is named, alone, and without a
reference: memory stays at the packed size and what 512 tokens need; the peak is printed.

Ceilings: read bandwidth (CPU: torch.sum over 1 GiB of int64; GPU: copy of 1 GiB, read and write counted) and the rates of
torch's bf16 and fp32 GEMM (1536 -> 2560 at 512 rows over 6 weights; GPU: 8192 x 8192 x 8192). An op's limit is the longer
of its bytes over the bandwidth (each input that it must read and each output, once) and its flops over the better GEMM
rate; `share` is that limit over the measured time, so 100 % is the ceiling. Inputs alternate between copies, so that
weights and states of small ops come from memory and not from a cache. `reference` and `other` are times of the plain
PyTorch definition and of another library's op, where there is one. With --json the last line of the output is one JSON
object.
"""

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

import kimi_k3_kernels  # noqa: F401  (registers the ops)

OPS = torch.ops.kimi_k3
BETA, LINEAR_BETA = 4.0, 25.0
COLD_BYTES = 160 << 20  # inputs alternate until they add up to this: several times a shared cache
MOST_COPIES = 16


@dataclass(frozen=True)
class Shape:
    """Sizes of one model, or of one tensor-parallel shard of it."""

    hidden: int
    heads: int
    rank: int
    moe_latent: int
    expert_width: int
    experts: int
    topk: int
    sources: int  # of AttnRes: sealed blocks and the running sum
    prefill_tokens: int
    depth: int  # tokens in the latent pool of a decode step
    expert_tokens: tuple[int, ...] = (1, 4, 16, 32, 64, 512)
    key_dim: int = 128
    nope: int = 128
    rope: int = 64
    value_dim: int = 128


SHAPES = {
    "k3": Shape(7168, 96, 512, 3584, 3072, 896, 16, 9, 1024, 4096, (1, 16, 64, 512)),
    "k3-tp8": Shape(7168, 12, 512, 3584, 3072, 112, 16, 9, 2048, 4096, (1, 16, 64, 512)),
    "mid": Shape(1536, 20, 256, 768, 640, 128, 16, 5, 2048, 4096),
    "tiny": Shape(64, 2, 32, 64, 32, 8, 2, 3, 40, 40, (1, 8), key_dim=16, nope=16, rope=8, value_dim=16),
}
# One layer of K3's experts is 15.7 GB: only where it is asked for by name.
WHOLE_LAYER_BYTES = 4 << 30


@dataclass
class Case:
    """One call of an op: `run` and `reference` take one element of `inputs`."""

    op: str
    label: str
    run: Callable[..., object]
    inputs: list[tuple]
    bytes: float
    flops: float
    reference: Callable[..., object] | None = None
    others: dict[str, Callable[..., object]] = field(default_factory=dict)


class Maker:
    """Random inputs on one device: weights in `dtype`, copies so that a loop over them leaves the cache."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(size, generator=self.generator, device=self.device).to(dtype or self.dtype)

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self.generator, device=self.device)

    def integers(self, *values: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def random_bytes(self, size: tuple[int, ...], low: int, high: int) -> Tensor:
        """uint8 in [low, high): a random block, doubled in place, because drawing gigabytes takes minutes."""
        out = torch.empty(size, dtype=torch.uint8, device=self.device)
        flat, filled = out.view(-1), min(out.numel(), (1 << 20) + 7)  # odd, so that experts do not repeat each other
        flat[:filled].random_(low, high, generator=self.generator)
        while filled < flat.numel():
            more = min(filled, flat.numel() - filled)
            flat[filled : filled + more].copy_(flat[:more])
            filled += more
        return out

    def packed(self, *size: int) -> tuple[Tensor, Tensor]:
        """An MXFP4 stack [.., out, in]: codes and scales."""
        *lead, columns = size
        return self.random_bytes((*lead, columns // 2), 0, 256), self.random_bytes((*lead, columns // 32), 116, 120)

    def copies(self, make: Callable[[], tuple]) -> list[tuple]:
        """Enough inputs that a loop over them reads from memory."""
        first = make()
        held = sum(x.numel() * x.element_size() for x in first if isinstance(x, Tensor))
        count = max(1, min(MOST_COPIES, -(-COLD_BYTES // max(1, held))))
        return [first, *(make() for _ in range(count - 1))]


def tensor_bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def fla_naive_kda() -> ModuleType | None:
    """fla-core's naive KDA by file (its package needs Triton); None where it is not installed."""
    spec = importlib.util.find_spec("fla")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "ops" / "kda" / "naive.py"
    module_spec = importlib.util.spec_from_file_location("fla_naive_kda", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


def kda_cases(make: Maker) -> Iterator[Case]:
    s = make.shape
    heads, key, value, tokens = s.heads, s.key_dim, s.key_dim, s.prefill_tokens

    def rows(count: int) -> tuple[Tensor, ...]:
        q = F.normalize(make.normal(count, heads, key, dtype=torch.float32), dim=-1) * key**-0.5
        k = F.normalize(make.normal(count, heads, key, dtype=torch.float32), dim=-1)
        v, log_decay = make.normal(count, heads, value), make.uniform(count, heads, key) * -5
        return q.to(make.dtype), k.to(make.dtype), v, log_decay, make.uniform(count, heads)

    state_bytes = heads * key * value * 4
    slots, cu = make.integers(0), make.integers(0, tokens, dtype=torch.int32)
    naive = fla_naive_kda()

    def fla_chunk(q, k, v, g, beta, pool, *_):
        assert naive is not None
        batched = [x[None] for x in (q, k, v, g, beta)]
        return naive.naive_chunk_kda(*batched, scale=1.0, initial_state=pool[:1], output_final_state=True)

    def fla_step(q, k, v, g, beta, pool, *_):
        assert naive is not None
        batched = [x[:, None] for x in (q, k, v, g, beta)]
        return naive.naive_recurrent_kda(*batched, scale=1.0, initial_state=pool, output_final_state=True)

    chunk = (*rows(tokens), torch.zeros((1, heads, key, value), device=make.device), slots, slots, cu)
    io_bytes = 2 * tensor_bytes(chunk[2]) + tensor_bytes(*chunk[:2], *chunk[3:5]) + 2 * state_bytes
    # The recurrence's own products: seen, update, output, each K x V a token and head.
    flops = 6 * tokens * heads * key * value
    yield Case(
        "kda_chunk", f"{tokens} tokens", OPS.kda_chunk, [chunk], io_bytes, flops, OPS.kda_chunk.reference,
        {"fla naive": fla_chunk} if naive and tokens % 64 == 0 else {},
    )  # fmt: skip
    at, to = make.integers(tokens // 2), make.integers(-1)
    yield Case(
        "kda_chunk_export", f"{tokens} tokens", OPS.kda_chunk_export, [(*chunk, at, to)], io_bytes, flops,
        OPS.kda_chunk_export.reference,
    )  # fmt: skip
    yield Case(
        "kda_recurrent", f"{tokens} tokens", OPS.kda_recurrent, [chunk], io_bytes, flops, OPS.kda_recurrent.reference
    )
    yield Case(
        "kda_recurrent_export", f"{tokens} tokens", OPS.kda_recurrent_export, [(*chunk, at, to)], io_bytes, flops,
        OPS.kda_recurrent_export.reference,
    )  # fmt: skip
    backward = (make.normal(tokens, heads, value), *chunk[:5], chunk[5], cu)
    # Each of the three products again, and two more for each in the gradient.
    yield Case(
        "kda_chunk_backward", f"{tokens} tokens", OPS.kda_chunk_backward, [backward], 2 * io_bytes, 3 * flops,
        OPS.kda_chunk_backward.reference,
    )  # fmt: skip
    for count in (1, 16):

        def step(count: int = count) -> tuple:
            pool, at = make.uniform(count, heads, key, value), torch.arange(count, device=make.device)
            return (*rows(count), pool, at, at)

        inputs = make.copies(step)
        yield Case(
            "kda_step_", f"{count} tokens", OPS.kda_step_, inputs,
            2 * count * state_bytes + tensor_bytes(*inputs[0][:5], inputs[0][2]), 6 * count * heads * key * value,
            OPS.kda_step_.reference, {"fla naive": fla_step} if naive else {},
        )  # fmt: skip


def short_conv_cases(make: Maker) -> Iterator[Case]:
    s = make.shape
    channels, tokens = 3 * s.heads * s.key_dim, s.prefill_tokens
    weight = make.normal(channels, 4)
    slots, cu = make.integers(0), make.integers(0, tokens, dtype=torch.int32)

    def torch_conv(x: Tensor, weight: Tensor, *_: Tensor) -> Tensor:
        return F.silu(F.conv1d(F.pad(x.t(), (3, 0))[None], weight[:, None], groups=channels))

    inputs = (make.normal(tokens, channels), weight, make.normal(1, 3, channels), slots, slots, cu)
    both_ways = 2 * tensor_bytes(inputs[0]) + tensor_bytes(weight)
    yield Case(
        "short_conv", f"{tokens} tokens", OPS.short_conv, [inputs], both_ways, 8 * tokens * channels,
        OPS.short_conv.reference, {"F.conv1d": torch_conv},
    )  # fmt: skip
    yield Case(
        "short_conv_export", f"{tokens} tokens", OPS.short_conv_export,
        [(*inputs, make.integers(tokens // 2), make.integers(-1))], both_ways, 8 * tokens * channels,
        OPS.short_conv_export.reference,
    )  # fmt: skip
    backward = (make.normal(tokens, channels), inputs[0], weight, make.normal(1, 3, channels), cu)
    yield Case(
        "short_conv_backward", f"{tokens} tokens", OPS.short_conv_backward, [backward],
        both_ways + tensor_bytes(inputs[0]), 24 * tokens * channels, OPS.short_conv_backward.reference,
    )  # fmt: skip
    for count in (1, 16):
        at = torch.arange(count, device=make.device)
        step = make.copies(lambda c=count, a=at: (make.normal(c, channels), weight, make.normal(c, 3, channels), a, a))
        step_bytes = tensor_bytes(step[0][0]) * 2 + tensor_bytes(weight) + 2 * tensor_bytes(step[0][2])
        yield Case(
            "short_conv_step_", f"{count} tokens", OPS.short_conv_step_, step, step_bytes, 8 * count * channels,
            OPS.short_conv_step_.reference,
        )  # fmt: skip


def attn_res_cases(make: Maker) -> Iterator[Case]:
    s = make.shape
    sealed, weight = s.sources - 1, make.normal(s.hidden, dtype=torch.float32)
    for count in (1, s.prefill_tokens):

        def mix(count: int = count) -> tuple:
            return (
                make.normal(count, s.hidden),
                make.normal(sealed, count, s.hidden),
                make.integers(sealed),
                weight,
                1e-5,
            )

        inputs = make.copies(mix)
        read = tensor_bytes(inputs[0][0], inputs[0][1])
        flops = 6 * s.sources * count * s.hidden
        yield Case(
            "attn_res_mix", f"{count} tokens, {s.sources} sources", OPS.attn_res_mix, inputs,
            read + tensor_bytes(inputs[0][0]), flops, OPS.attn_res_mix.reference,
        )  # fmt: skip
        norm, proj = make.normal(s.hidden), make.normal(1, s.hidden)
        normed = [(running_sum, bank, blocks, norm, proj, 1e-5, norm, 1e-5) for running_sum, bank, blocks, *_ in inputs]
        yield Case(
            "attn_res_mix_norm", f"{count} tokens, {s.sources} sources", OPS.attn_res_mix_norm, normed,
            read + tensor_bytes(inputs[0][0]), flops + 4 * count * s.hidden, OPS.attn_res_mix_norm.reference,
        )  # fmt: skip
    backward = (make.normal(s.prefill_tokens, s.hidden), *inputs[0])
    yield Case(
        "attn_res_mix_backward", f"{s.prefill_tokens} tokens", OPS.attn_res_mix_backward, [backward],
        2 * read + tensor_bytes(backward[0]), 3 * flops, OPS.attn_res_mix_backward.reference,
    )  # fmt: skip


def mla_cases(make: Maker) -> Iterator[Case]:
    s = make.shape
    heads, tokens, width, scale = s.heads, s.prefill_tokens, s.rank + s.rope, (s.nope + s.rope) ** -0.5
    out = heads * (s.nope + s.value_dim)
    block = 64

    def sdpa(q: Tensor, latent: Tensor, weight: Tensor, *_: object) -> Tensor:
        expanded = F.linear(latent[:, : s.rank], weight).view(tokens, heads, -1)
        keys = torch.cat([expanded[..., : s.nope], latent[:, None, s.rank :].expand(-1, heads, -1)], -1)
        heads_first = [x.transpose(0, 1)[None] for x in (q, keys, expanded[..., s.nope :])]
        return F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=scale)

    prefill = (
        make.normal(tokens, heads, s.nope + s.rope), make.normal(tokens, width),
        make.normal(out, s.rank) * s.rank**-0.5, make.normal(1, block, width), make.integers(0)[None],
        make.integers(0), make.integers(0, tokens, dtype=torch.int32), scale,
    )  # fmt: skip
    out_bytes = tokens * heads * s.value_dim * make.normal(1).element_size()
    seen = tokens * (tokens + 1) / 2 * heads
    flops = 2 * tokens * s.rank * out + 2 * seen * (s.nope + s.rope + s.value_dim)
    yield Case(
        "mla_prefill", f"{tokens} tokens", OPS.mla_prefill, [prefill], tensor_bytes(*prefill[:3]) + out_bytes, flops,
        OPS.mla_prefill.reference, {"expand + SDPA": sdpa},
    )  # fmt: skip
    backward = (make.normal(tokens, heads, s.value_dim), *prefill)
    # Recomputed scores, and four products of their size; the expansion and its two gradients.
    backward_flops = 3 * 2 * tokens * s.rank * out + 2 * seen * (3 * (s.nope + s.rope) + 2 * s.value_dim)
    yield Case(
        "mla_prefill_backward", f"{tokens} tokens", OPS.mla_prefill_backward, [backward],
        2 * tensor_bytes(*prefill[:3]) + out_bytes, backward_flops, OPS.mla_prefill_backward.reference,
    )  # fmt: skip
    for count in (1, 16):
        blocks = -(-s.depth // block)

        def decode(count: int = count, blocks: int = blocks) -> tuple:
            table = torch.randperm(count * blocks, generator=make.generator, device=make.device).view(count, blocks)
            lens = torch.full((count,), s.depth, device=make.device)
            return (
                make.normal(count, heads, width),
                make.normal(count * blocks, block, width),
                table,
                lens,
                scale,
                s.rank,
            )

        inputs = make.copies(decode)
        cache_bytes = count * s.depth * width * inputs[0][1].element_size()
        yield Case(
            "mla_decode", f"{count} tokens, depth {s.depth}", OPS.mla_decode, inputs, cache_bytes,
            2 * count * heads * s.depth * (width + s.rank), OPS.mla_decode.reference,
        )  # fmt: skip
        yield Case(
            "mla_decode_mass", f"{count} tokens, depth {s.depth}", OPS.mla_decode_mass, inputs, cache_bytes,
            2 * count * heads * s.depth * (width + s.rank), OPS.mla_decode_mass.reference,
        )  # fmt: skip


def matvec_cases(make: Maker) -> Iterator[Case]:
    s = make.shape
    channels = s.heads * s.key_dim
    sizes = (channels, channels, channels, channels, s.key_dim, s.heads)  # q, k, v, g, f_a, b of one KDA layer
    weights = make.copies(lambda: tuple(make.normal(size, s.hidden) for size in sizes))
    for count in (1, 8, 32):
        x = make.normal(count, s.hidden)
        inputs = [(x, list(w)) for w in weights]
        yield Case(
            "matvec", f"{count} rows, {len(sizes)} matrices", OPS.matvec, inputs,
            tensor_bytes(x, *weights[0]) + count * sum(sizes) * x.element_size(), 2 * count * s.hidden * sum(sizes),
            OPS.matvec.reference, {"F.linear each": lambda x, ws: [F.linear(x, w) for w in ws]},
        )  # fmt: skip


def small_cases(make: Maker) -> Iterator[Case]:
    """What eager inference runs as one op each: norms, gates, activation, the absorbed products, the invariant rows."""
    s = make.shape
    heads, key, count = s.heads, s.key_dim, 1
    x, weight = make.normal(count, s.hidden), make.normal(s.hidden)
    yield Case(
        "rms_norm", f"{count} tokens", OPS.rms_norm, [(x, weight, 1e-5)], 2 * tensor_bytes(x) + tensor_bytes(weight),
        4 * x.numel(), OPS.rms_norm.reference, {"F.rms_norm": lambda x, w, eps: F.rms_norm(x, w.shape, w, eps)},
    )  # fmt: skip
    o, gate, weight = (
        make.normal(count, heads, key),
        make.normal(count, heads, key),
        make.normal(key, dtype=torch.float32),
    )
    yield Case(
        "gated_rms_norm", f"{count} tokens", OPS.gated_rms_norm, [(o, gate, weight, 1e-5)], 3 * tensor_bytes(o),
        8 * o.numel(), OPS.gated_rms_norm.reference,
    )  # fmt: skip
    gates = (
        make.normal(count, 3 * heads * key), make.normal(count, heads * key), make.normal(count, heads),
        make.normal(heads, dtype=torch.float32), make.normal(heads * key, dtype=torch.float32), -5.0,
    )  # fmt: skip
    yield Case(
        "kda_gates", f"{count} tokens", OPS.kda_gates, [gates], 3 * tensor_bytes(gates[0]), 10 * gates[0].numel(),
        OPS.kda_gates.reference,
    )  # fmt: skip
    up = make.normal(count, s.expert_width)
    yield Case(
        "situ", f"{count} tokens", OPS.situ, [(up, up, BETA, LINEAR_BETA)], 3 * tensor_bytes(up), 12 * up.numel(),
        OPS.situ.reference,
    )  # fmt: skip
    scores = make.normal(count, s.experts, dtype=torch.float32).sigmoid()
    yield Case(
        "choose_experts", f"{count} tokens", OPS.choose_experts, [(scores, scores, s.topk, True, 1.0)],
        2 * tensor_bytes(scores), 2 * scores.numel(), OPS.choose_experts.reference,
    )  # fmt: skip
    absorbed = make.copies(lambda: (make.normal(count, heads, s.nope), make.normal(heads, s.nope, s.rank), True))
    yield Case(
        "head_matvec", f"{count} tokens", OPS.head_matvec, absorbed, tensor_bytes(*absorbed[0][:2]),
        2 * count * heads * s.nope * s.rank, OPS.head_matvec.reference,
        {"einsum": lambda x, w, _: torch.einsum("thn,hnr->thr", x, w)},
    )  # fmt: skip
    rows = make.normal(64, s.hidden)
    matrices = make.copies(lambda: (make.normal(heads * key, s.hidden),))
    yield Case(
        "linear_rows", "64 rows", OPS.linear_rows, [(rows, [w]) for (w,) in matrices], tensor_bytes(rows, *matrices[0]),
        2 * 64 * s.hidden * heads * key, OPS.linear_rows.reference, {"F.linear": lambda x, ws: F.linear(x, ws[0])},
    )  # fmt: skip
    outputs, weights = make.normal(64, s.topk, s.moe_latent), make.uniform(64, s.topk)
    yield Case(
        "mxfp4_combine", "64 tokens", OPS.mxfp4_combine, [(outputs, weights)], tensor_bytes(outputs),
        2 * outputs.numel(), OPS.mxfp4_combine.reference,
    )  # fmt: skip
    yield Case(
        "mxfp4_combine_backward", "64 tokens", OPS.mxfp4_combine_backward,
        [(make.normal(64, s.moe_latent), outputs, weights)], 2 * tensor_bytes(outputs), 4 * outputs.numel(),
        OPS.mxfp4_combine_backward.reference,
    )  # fmt: skip


def expert_flops(s: Shape, tokens: int) -> int:
    return 2 * tokens * s.topk * 3 * s.moe_latent * s.expert_width


def expert_routes(make: Maker, tokens: int, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """x, topk_ids, topk_weights: even routing, and neighbours in a loop over them choose other experts."""
    s, routes = make.shape, []
    for _ in range(count):
        ids = make.uniform(tokens, s.experts).topk(s.topk).indices
        routes.append((make.normal(tokens, s.moe_latent), ids, make.uniform(tokens, s.topk) / s.topk))
    return routes


def packed_expert_cases(make: Maker, with_reference: bool) -> Iterator[Case]:
    s = make.shape
    w1, w3 = (make.packed(s.experts, s.expert_width, s.moe_latent) for _ in range(2))
    w2 = make.packed(s.experts, s.moe_latent, s.expert_width)
    stacks = (*w1, *w3, *w2, torch.arange(s.experts, dtype=torch.int32, device=make.device))
    expert_bytes = tensor_bytes(*w1, *w3, *w2) / s.experts
    for tokens in s.expert_tokens:
        routes = expert_routes(make, tokens, 8 if tokens * s.topk < s.experts else 2)
        inputs = [(*route, *stacks, BETA, LINEAR_BETA) for route in routes]
        used = statistics.mean(route[1].unique().numel() for route in routes)
        for op in (OPS.mxfp4_experts, OPS.mxfp4_experts_int8):
            yield Case(
                op.__name__, f"{tokens} tokens, {used:.0f} experts", op, inputs,
                used * expert_bytes + 2 * tensor_bytes(routes[0][0]), expert_flops(s, tokens),
                op.reference if with_reference else None,
            )  # fmt: skip
    if not with_reference:
        return
    backward = [(make.normal(tokens, s.moe_latent), *inputs[0])]
    # Gate, up and down again, and the gradients of their inputs.
    yield Case(
        "mxfp4_experts_backward", f"{tokens} tokens", OPS.mxfp4_experts_backward, backward,
        used * expert_bytes + 3 * tensor_bytes(backward[0][0]), 2 * expert_flops(s, tokens),
        OPS.mxfp4_experts_backward.reference,
    )  # fmt: skip


def dense_expert_cases(make: Maker) -> Iterator[Case]:
    s = make.shape
    experts = min(s.experts, 32)  # plain weights are four times the packed ones
    tokens = min(s.prefill_tokens, 256)
    w1, w3 = (make.normal(experts, s.expert_width, s.moe_latent) * s.moe_latent**-0.5 for _ in range(2))
    w2 = make.normal(experts, s.moe_latent, s.expert_width) * s.expert_width**-0.5
    table = torch.arange(experts, dtype=torch.int32, device=make.device)
    x, _, weights = expert_routes(make, tokens, 1)[0]
    ids = make.uniform(tokens, experts).topk(min(s.topk, experts)).indices
    inputs = (x, ids, weights, w1, w3, w2, table, BETA, LINEAR_BETA)
    io_bytes, flops = tensor_bytes(w1, w3, w2) + 2 * tensor_bytes(x), expert_flops(s, tokens)
    label = f"{tokens} tokens, {experts} experts"
    yield Case("dense_experts", label, OPS.dense_experts, [inputs], io_bytes, flops, OPS.dense_experts.reference)
    yield Case(
        "dense_experts_backward", label, OPS.dense_experts_backward, [(make.normal(tokens, s.moe_latent), *inputs)],
        2 * io_bytes, 3 * flops, OPS.dense_experts_backward.reference,
    )  # fmt: skip


def mxfp4_cases(make: Maker) -> Iterator[Case]:
    s = make.shape
    stacks = make.copies(lambda: make.packed(s.expert_width, s.moe_latent))
    weights = s.expert_width * s.moe_latent
    decoded_bytes = 2 * weights
    yield Case(
        "mxfp4_dequantize", f"{s.expert_width} x {s.moe_latent}", OPS.mxfp4_dequantize,
        [(*stack, torch.bfloat16) for stack in stacks], tensor_bytes(*stacks[0]) + decoded_bytes, weights,
        OPS.mxfp4_dequantize.reference,
    )  # fmt: skip
    x = make.normal(16, s.moe_latent)
    yield Case(
        "mxfp4_linear", f"16 rows, {s.expert_width} x {s.moe_latent}", OPS.mxfp4_linear,
        [(x, *stack) for stack in stacks], tensor_bytes(x, *stacks[0]) + 32 * s.expert_width, 2 * 16 * weights,
        OPS.mxfp4_linear.reference,
    )  # fmt: skip


GROUPS: tuple[tuple[Callable[[Maker], Iterator[Case]], tuple[str, ...]], ...] = (
    (
        kda_cases,
        ("kda_chunk", "kda_chunk_export", "kda_recurrent", "kda_recurrent_export", "kda_chunk_backward", "kda_step_"),
    ),
    (short_conv_cases, ("short_conv", "short_conv_export", "short_conv_backward", "short_conv_step_")),
    (attn_res_cases, ("attn_res_mix", "attn_res_mix_norm", "attn_res_mix_backward")),
    (mla_cases, ("mla_prefill", "mla_prefill_backward", "mla_decode", "mla_decode_mass")),
    (matvec_cases, ("matvec",)),
    (
        small_cases,
        (
            "rms_norm",
            "gated_rms_norm",
            "kda_gates",
            "choose_experts",
            "situ",
            "head_matvec",
            "linear_rows",
            "mxfp4_combine",
            "mxfp4_combine_backward",
        ),
    ),
    (mxfp4_cases, ("mxfp4_dequantize", "mxfp4_linear")),
    (dense_expert_cases, ("dense_experts", "dense_experts_backward")),
)
EXPERT_OPS = ("mxfp4_experts", "mxfp4_experts_int8", "mxfp4_experts_backward")
ALL_OPS = tuple(name for _, names in GROUPS for name in names) + EXPERT_OPS


def cases_of(make: Maker, wanted: set[str]) -> Iterator[Case]:
    """Lazily: a group's inputs are made when it is reached, and are gone after it."""
    for group, names in GROUPS:
        if wanted & set(names):
            yield from (case for case in group(make) if case.op in wanted)
    s = make.shape
    whole_layer = s.experts * 3 * s.moe_latent * s.expert_width * 17 // 32 > WHOLE_LAYER_BYTES
    if wanted & set(EXPERT_OPS) and not (whole_layer and wanted - {"mxfp4_experts", "mxfp4_experts_int8"}):
        yield from (case for case in packed_expert_cases(make, with_reference=not whole_layer) if case.op in wanted)


def timer(device: str) -> Callable[[Callable[[], object]], float]:
    """A function that gives the seconds of one call: wall clock, or events on a GPU's stream."""
    if device == "cpu":

        def on_cpu(call: Callable[[], object]) -> float:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

        return on_cpu

    def on_gpu(call: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return on_gpu


def measure(run: Callable[..., object], inputs: list[tuple], seconds_of, budget_s: float, most: int) -> list[float]:
    """Times of calls over the inputs in turn, after one call to warm up (dropped unless it alone passes the budget)."""
    first = seconds_of(lambda: run(*inputs[0]))
    if first > budget_s:
        return [first]
    times: list[float] = []
    while len(times) < most and (sum(times) < budget_s or len(times) < 3):
        call = inputs[(len(times) + 1) % len(inputs)]
        times.append(seconds_of(lambda call=call: run(*call)))
    return times


def measure_ceilings(device: str) -> dict[str, float]:
    """Bytes/s of plain reads (GPU: of a copy, both ways) and flops/s of torch's GEMM in bf16 and fp32."""
    seconds_of = timer(device)
    words = torch.ones((1 << 30) // 8, dtype=torch.int64, device=device)
    if device == "cpu":
        bandwidth = (1 << 30) / min(measure(words.sum, [()], seconds_of, 2.0, 10))
    else:
        target = torch.empty_like(words)
        bandwidth = 2 * (1 << 30) / min(measure(target.copy_, [(words,)], seconds_of, 2.0, 20))
        del target
    del words
    rates = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        rows, columns, out, count = (512, 1536, 2560, 6) if device == "cpu" else (8192, 8192, 8192, 1)
        x = torch.randn(rows, columns, device=device).to(dtype)
        weights = [torch.randn(out, columns, device=device).to(dtype) for _ in range(count)]
        best = min(measure(lambda x=x, ws=weights: [F.linear(x, w) for w in ws], [()], seconds_of, 2.0, 20))
        rates[f"{name}_gemm_flops_per_s"] = count * 2 * rows * columns * out / best
    return {"bandwidth_bytes_per_s": bandwidth, **rates}


def has_kernel(op: str, device: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"kimi_k3::{op}", device.upper())


def measure_case(case: Case, device: str, ceilings: dict[str, float], budget_s: float, compare: bool) -> dict:
    seconds_of = timer(device)
    times = measure(case.run, case.inputs, seconds_of, budget_s, 200)
    best_rate = max(ceilings["bf16_gemm_flops_per_s"], ceilings["fp32_gemm_flops_per_s"])
    memory_s, compute_s = case.bytes / ceilings["bandwidth_bytes_per_s"], case.flops / best_rate
    best = min(times)
    native = has_kernel(case.op, device)
    row = {
        "op": case.op, "case": case.label, "kernel": "native" if native else "reference", "seconds": best,
        "median_s": statistics.median(times), "bytes": case.bytes, "flops": case.flops,
        "bytes_per_s": case.bytes / best, "flops_per_s": case.flops / best,
        "limit": "bandwidth" if memory_s >= compute_s else "GEMM rate", "share": max(memory_s, compute_s) / best,
    }  # fmt: skip
    if compare and native and case.reference is not None:
        row["reference_s"] = min(measure(case.reference, case.inputs, seconds_of, budget_s, 5))
    if compare:
        row["others_s"] = {
            name: min(measure(other, case.inputs, seconds_of, budget_s, 5)) for name, other in case.others.items()
        }
    return row


def peak_memory_bytes(device: str) -> int:
    """VmHWM of this process, or the most that torch has held on the GPU."""
    if device == "cuda":
        return torch.cuda.max_memory_reserved()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def print_row(row: dict) -> None:
    reference = f"{row['reference_s'] / row['seconds']:7.1f}x" if "reference_s" in row else f"{'-':>8}"
    others = ", ".join(f"{name} {s / row['seconds']:.1f}x" for name, s in row.get("others_s", {}).items())
    print(
        f"{row['op']:23} {row['case']:24} {1e3 * row['seconds']:10.3f} {row['bytes_per_s'] / 1e9:8.1f} "
        f"{row['flops_per_s'] / 1e9:9.1f} {100 * row['share']:6.1f} % {row['limit']:10} {row['kernel']:9} {reference} {others}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", choices=ALL_OPS, help="only this op; may be repeated")
    parser.add_argument("--shapes", choices=SHAPES, default="mid")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", help="token counts of the packed experts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="measuring time for one case")
    parser.add_argument("--no-compare", action="store_true", help="without references and other libraries")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    shape = SHAPES[args.shapes]
    if args.tokens:
        shape = replace(shape, expert_tokens=tuple(args.tokens))
    ceilings = measure_ceilings(args.device)
    print(
        f"{args.shapes}, {args.dtype}, {args.device}, {args.threads} threads; ceilings: "
        f"{ceilings['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s, GEMM bf16 {ceilings['bf16_gemm_flops_per_s'] / 1e9:.0f}, "
        f"fp32 {ceilings['fp32_gemm_flops_per_s'] / 1e9:.0f} GFLOP/s"
    )
    print(
        f"{'op':23} {'case':24} {'ms':>10} {'GB/s':>8} {'GFLOP/s':>9} {'share':>8} of {'':7} {'kernel':9} reference, others"
    )
    rows = []
    with torch.no_grad():
        make = Maker(shape, args.device, getattr(torch, args.dtype))
        for case in cases_of(make, set(args.op or ALL_OPS)):
            rows.append(measure_case(case, args.device, ceilings, args.seconds, not args.no_compare))
            print_row(rows[-1])
    peak = peak_memory_bytes(args.device)
    print(f"peak memory {peak / 1e9:.2f} GB")
    if args.json:
        settings = {"shapes": args.shapes, "dtype": args.dtype, "device": args.device, "threads": args.threads}
        print(json.dumps({**settings, **ceilings, "peak_memory_bytes": peak, "ops": rows}))


if __name__ == "__main__":
    main()
