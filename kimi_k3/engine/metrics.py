"""The engine's figures in the text form that Prometheus reads (text exposition format, version 0.0.4)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

PREFIX = "kimi_k3_"
QUANTILES = {50: "0.5", 95: "0.95", 99: "0.99"}


class Metric(NamedTuple):
    """One name with its samples: (labels, value)."""

    name: str  # without the prefix
    kind: str  # "counter", "gauge" or "summary"
    help: str
    samples: list[tuple[dict[str, str], float]]


# Families with one label: name, kind, help, label, {label value: key in stats}.
_BY_KEY = (
    ("requests_now", "gauge", "Requests that are not finished.", "state",
     {"running": "running", "waiting": "waiting", "parked": "parked"}),
    ("tokens_total", "counter", "Tokens: of admitted prompts, of these found in the cache, run, generated, run again after a "
     "preemption.", "kind",
     {"prompt": "prompt_tokens", "hit": "hit_tokens", "prefill": "prefill_tokens", "decode": "decode_tokens",
      "generated": "generated_tokens", "replayed": "replayed_tokens"}),
    ("slots", "gauge", "KDA states: of running requests, kept snapshots, and room for more.", "state",
     {"live": "slots_live", "snapshots": "slots_snapshots", "free": "slots_free"}),
    ("blocks", "gauge", "Latent blocks: in use, of these in the prefix cache or as bf16 snapshots, and room for more.", "state",
     {"used": "blocks_used", "cached": "blocks_cached", "snapshots": "blocks_snapshots", "free": "blocks_free"}),
)  # fmt: skip
_SINGLE = (
    ("requests_total", "counter", "Requests added.", "requests", 1.0),
    ("steps_total", "counter", "Steps.", "steps", 1.0),
    ("step_seconds_total", "counter", "Time of steps.", "step_seconds", 1.0),
    ("forward_seconds_total", "counter", "Time of forwards.", "forward_seconds", 1.0),
    ("schedule_seconds_total", "counter", "Time of scheduling decisions.", "schedule_us", 1e-6),
    ("evictions_total", "counter", "Entries that left the prefix cache.", "evictions", 1.0),
    ("pages", "gauge", "Pages of the memory: a page is one KDA state or several latent blocks.", "pages", 1.0),
    ("snapshot_bytes", "gauge", "Memory of one kept snapshot.", "snapshot_bytes", 1.0),
    ("memory_bytes", "gauge", "Memory for latents and states.", "bytes_total", 1.0),
)
# Families whose label is the rest of the key.
_BY_START = (
    (
        "hit_tokens_total",
        "Tokens of prompts found in the cache, by where they lay: on the device, or read from a tier.",
        "tier",
        "hit_tokens_",
    ),
    ("requests_finished_total", "Requests finished.", "reason", "finished_"),
    ("misses_total", "Prompts that the cache did not serve whole.", "reason", "miss_"),
    ("preemptions_total", "Running requests put back to waiting.", "how", "preemptions_"),
    ("held_total", "Decisions to let a request wait for a step.", "reason", "held_"),
)


def metrics_of(stats: Mapping[str, Any]) -> list[Metric]:
    """`KimiK3Generator.stats()` as metrics; a count that has no family here is `kimi_k3_<its name>_total`."""
    left = dict(stats)
    out = []
    for name, kind, text, label, keys in _BY_KEY:
        out.append(Metric(name, kind, text, [({label: value}, left.pop(key, 0)) for value, key in keys.items()]))
    for name, kind, text, key, scale in _SINGLE:
        out.append(Metric(name, kind, text, [({}, scale * left.pop(key, 0))]))
    for name, text, label, start in _BY_START:
        found = [key for key in left if key.startswith(start)]
        samples = [({label: key.removeprefix(start)}, float(left.pop(key))) for key in sorted(found)]
        out.append(Metric(name, "counter", text, samples))
    for name, key, text in (
        ("first_token_seconds", "first_token_s", "From a request's arrival to its first token, recent ones."),
        ("between_tokens_seconds", "between_tokens_s", "Between two tokens of a request, recent ones."),
    ):
        values = left.pop(key, {})
        out.append(Metric(name, "summary", text, [({"quantile": QUANTILES[q]}, v) for q, v in values.items()]))
    out += _tier_metrics(left.pop("tiers", {}))
    for key in sorted(key for key, value in left.items() if isinstance(value, (int, float))):
        out.append(Metric(f"{key}_total", "counter", f"The engine's count of {key}.", [({}, float(left[key]))]))
    return [metric for metric in out if metric.samples]


def _tier_metrics(tiers: Mapping[str, Any]) -> list[Metric]:
    events = [
        ({"tier": tier, "event": event}, float(value))
        for tier, counts in tiers.get("by_tier", {}).items()
        for event, value in counts.items()
    ]
    own = [({"event": key}, float(value)) for key, value in tiers.items() if key != "by_tier"]
    return [
        Metric("tier_figures", "gauge", "Counts and sizes that each tier reports; *_us are microseconds.", events),
        Metric("tier_events_total", "counter", "Traffic between the prefix cache and the tiers.", own),
    ]


def expert_metrics(
    counts: Tensor,
    layers: Sequence[int],
    bytes_per_layer: Mapping[int, int],
    *,
    worker: str = "0",
    hottest: int | None = 4,
) -> list[Metric]:
    """Tokens that each expert was given.

    Args:
        counts: [MoE layers, E] int64.     layers: the decoder layers of its rows.     bytes_per_layer: of their experts.
        hottest: so many experts of each layer by number, the rest together as expert="others", so that a layer still adds
            up to tokens x experts per token; None: all.
    """
    number = counts.shape[1] if hottest is None else min(hottest, counts.shape[1])
    best = torch.topk(counts, number, dim=1)
    tokens: list[tuple[dict[str, str], float]] = []
    for layer, row, values, ids in zip(layers, counts.tolist(), best.values.tolist(), best.indices.tolist()):
        labels = {"layer": str(layer), "worker": worker}
        tokens += [({**labels, "expert": str(expert)}, value) for expert, value in sorted(zip(ids, values))]
        if number < len(row):
            tokens.append(({**labels, "expert": "others"}, sum(row) - sum(values)))
    held = [({"layer": str(layer), "worker": worker}, float(size)) for layer, size in bytes_per_layer.items()]
    return [
        Metric("expert_tokens_total", "counter", "Choices of real tokens: a layer adds up to tokens x top-k.", tokens),
        Metric("expert_bytes", "gauge", "Memory of a layer's routed experts.", held),
    ]


def exposition(metrics: Sequence[Metric]) -> str:
    """The text: HELP and TYPE lines, then a line for each sample."""
    lines = []
    for name, kind, text, samples in metrics:
        lines += [f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} {kind}"]
        for labels, value in samples:
            inner = ",".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in labels.items())
            number = repr(float(value)) if value % 1 else str(int(value))
            lines.append(f"{PREFIX}{name}{{{inner}}} {number}" if inner else f"{PREFIX}{name} {number}")
    return "\n".join(lines) + "\n"
