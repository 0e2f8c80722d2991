"""The engine's figures in the text form that Prometheus reads (text exposition format, version 0.0.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

PREFIX = "kimi_k3_"
QUANTILES = {50: "0.5", 95: "0.95", 99: "0.99"}
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Metric(NamedTuple):
    """One name with its samples: (labels, value)."""

    name: str  # without the prefix
    kind: str  # "counter", "gauge" or "summary"
    help: str
    samples: list[tuple[dict[str, str], float]]
    total: tuple[float, int] = (0.0, 0)  # of a summary: sum and count of all values since the start


class _Family(NamedTuple):
    """What one metric takes from a dictionary of figures. A name that ends in _total is a counter, any other a gauge; what
    the key of a figure calls microseconds becomes seconds.

    keys: of the figure, or of several {label value: key}, or how all of them start: the rest is the label's value.
    """

    name: str
    help: str
    keys: str | dict[str, str]
    label: str = ""


_ENGINE = (
    _Family("requests_now", "Requests that are not finished.",
            {"running": "running", "waiting": "waiting", "parked": "parked"}, "state"),
    _Family("tokens_total", "Tokens: of admitted prompts, of these found in the cache, run, generated, run again after a "
            "preemption.",
            {"prompt": "prompt_tokens", "hit": "hit_tokens", "prefill": "prefill_tokens", "decode": "decode_tokens",
             "generated": "generated_tokens", "replayed": "replayed_tokens"}, "kind"),
    _Family("slots", "KDA states: of running requests, kept snapshots, and room for more.",
            {"live": "slots_live", "snapshots": "slots_snapshots", "free": "slots_free"}, "state"),
    _Family("blocks", "Latent blocks: in use, of these in the prefix cache or as bf16 snapshots, and room for more.",
            {"used": "blocks_used", "cached": "blocks_cached", "snapshots": "blocks_snapshots", "free": "blocks_free"},
            "state"),
    _Family("requests_total", "Requests added.", "requests"),
    _Family("steps_total", "Steps.", "steps"),
    _Family("step_seconds_total", "Time of steps.", "step_seconds"),
    _Family("forward_seconds_total", "Time of forwards.", "forward_seconds"),
    _Family("schedule_seconds_total", "Time of scheduling decisions.", "schedule_us"),
    _Family("repeated_schedules_total", "Steps that ran the last decision again, as nothing had changed.",
            "repeated_schedules"),
    _Family("failed_steps_total", "Steps that an exception ended; their requests wait again.", "failed_steps"),
    _Family("overloaded_steps_total", "Steps that by prediction gave a worker more choices of experts than the budget.",
            "overloaded_steps"),
    _Family("failed_recordings_total", "CUDA graphs that could not be recorded.", "failed_recordings"),
    _Family("evictions_total", "Entries that left the prefix cache.", "evictions"),
    _Family("dropped_snapshots_total", "States that a prefill had left and that made room before they were published.",
            "dropped_snapshots"),
    _Family("dropped_nonfinite_total", "States not published, as they or the latents before them were not finite.",
            "dropped_nonfinite"),
    _Family("dropped_distrusted_total", "States dropped, as a request that started from one came to non-finite logits.",
            "dropped_distrusted"),
    _Family("pages", "Pages of the memory: a page is one KDA state or several latent blocks.", "pages"),
    _Family("snapshot_bytes", "Memory of one kept snapshot.", "snapshot_bytes"),
    _Family("memory_bytes", "Memory for latents and states.", "bytes_total"),
    _Family("hit_tokens_total", "Tokens of prompts found in the cache, by where they lay: on the device, or read from a tier.",
            "hit_tokens_", "tier"),
    _Family("requests_finished_total", "Requests finished.", "finished_", "reason"),
    _Family("misses_total", "Prompts that the cache did not serve whole.", "miss_", "reason"),
    _Family("preemptions_total", "Running requests put back to waiting.", "preemptions_", "how"),
    _Family("held_total", "Decisions to let a request wait for a step.", "held_", "reason"),
)  # fmt: skip
# Of each tier, its name the label "tier".
_TIER = (
    _Family("tier_hits_total", "Reads for a request that found their entry.", "hits"),
    _Family("tier_misses_total", "Reads for a request that found no entry.", "misses"),
    _Family("tier_puts_total", "Writes after which the entry was there.", "puts"),
    _Family("tier_refused_total", "Writes of entries that do not fit.", "refused"),
    _Family("tier_evicted_total", "Entries that left to make room.", "evicted"),
    _Family("tier_damaged_total", "Reads of an entry that was not as it had been written; it is removed.", "damaged"),
    _Family("tier_foreign_total", "Reads of another format's or key's entry; it is removed.", "foreign"),
    _Family("tier_io_errors_total", "Calls that failed, and calls that a pause after a failure refused.", "io"),
    _Family("tier_timeouts_total", "Calls that the tier did not answer in time.", "timeout"),
    _Family("tier_entries", "Entries held now.", "entries"),
    _Family("tier_bytes", "Bytes held now.", "bytes"),
)  # fmt: skip
# Of the traffic between the prefix cache and all tiers, and between tiers.
_TRANSFERS = (
    _Family("transfers_stored_blocks_total", "Latent blocks given to the tiers.", "stored_blocks"),
    _Family("transfers_stored_snapshots_total", "States given to the tiers.", "stored_snapshots"),
    _Family("transfers_refused_total", "Entries not given to the tiers, as too many waited to be written.", "refused"),
    _Family("transfers_lost_total", "Entries of what the cache holds that turned out to be in no tier.", "lost"),
    _Family("transfers_fetches_total", "Reads of all that a request can start from.", "fetches"),
    _Family("transfers_restored_tokens_total", "Tokens that such reads brought back.", "restored_tokens"),
    _Family("transfers_misses_total", "Entries of such reads, and questions to far tiers, that gave nothing.", "miss_",
            "reason"),
    _Family("transfers_written_total", "Entries written to a tier, those moved between tiers included.", "stored"),
    _Family("transfers_written_bytes_total", "Bytes written to a tier.", "stored_bytes"),
    _Family("transfers_failed_writes_total", "Entries that no tier took.", "failed_writes"),
    _Family("transfers_dropped_total", "Moves between tiers, and writes at the end, given up for want of room or time.",
            "dropped"),
    _Family("transfers_demoted_total", "Entries that a tier evicted and the next one was given.", "demoted"),
    _Family("transfers_promoted_total", "Entries read from a lower tier that the first one was given.", "promoted"),
    _Family("transfers_fetched_bytes_total", "Bytes read for requests.", "fetched_bytes"),
    _Family("transfers_read_seconds_total", "Time of reads and questions, summed over threads.", "read_us"),
    _Family("transfers_failed_reads_total", "Entries and questions that a read ended without.", "failed_", "reason"),
    _Family("transfers_pending_writes", "Entries that wait to be written now.", "pending_writes"),
    _Family("transfers_pending_bytes", "Bytes that wait to be written now.", "pending_bytes"),
)  # fmt: skip


def metrics_of(stats: Mapping[str, Any]) -> list[Metric]:
    """`KimiK3Generator.stats()` as metrics; a count that has no family here is `kimi_k3_<its name>_total`."""
    left = dict(stats)
    out = _take(_ENGINE, [({}, left)])
    for name, text in (
        ("first_token", "From a request's arrival to its first token."), ("between_tokens", "Between two tokens of a request."),
    ):  # fmt: skip
        samples = [({"quantile": QUANTILES[q]}, value) for q, value in left.pop(f"{name}_s", {}).items()]
        total = left.pop(f"{name}_seconds_sum", 0.0), left.pop(f"{name}_seconds_count", 0)
        out.append(Metric(f"{name}_seconds", "summary", f"{text} Quantiles: of recent ones.", samples, total))
    if "tiers" in left:
        tiers = dict(left["tiers"])
        by_tier = dict(tiers.pop("by_tier"))
        transfers = tiers | by_tier.pop("transfers")
        out += _take(_TIER, [({"tier": name}, dict(figures)) for name, figures in by_tier.items()])
        out += _take(_TRANSFERS, [({}, transfers)])
        left |= {f"transfers_{key}": value for key, value in transfers.items()}
    for key in sorted(key for key, value in left.items() if isinstance(value, (int, float))):
        text = f"Since the start: {key.replace('_', ' ')}."
        out.append(Metric(f"{key}_total", "counter", text, [({}, float(left[key]))]))
    return [metric for metric in out if metric.samples or metric.kind == "summary"]


def _take(families: Sequence[_Family], sources: Sequence[tuple[dict[str, str], dict[str, Any]]]) -> list[Metric]:
    """The families' metrics, with the samples of each source: (labels, figures). The figures are taken out.

    A counter that has not counted yet is 0, a size that is not told has no sample.
    """
    out = []
    for name, text, keys, label in families:
        is_counter = name.endswith("_total")
        metric = Metric(name, "counter" if is_counter else "gauge", text, [])
        for labels, figures in sources:
            if isinstance(keys, dict):
                found = keys
            elif label:
                found = {key.removeprefix(keys): key for key in sorted(figures) if key.startswith(keys)}
            else:
                found = {"": keys}
            for value, key in found.items():
                if is_counter or key in figures:
                    number = figures.pop(key, 0) * (1e-6 if key.endswith("_us") else 1)
                    metric.samples.append((labels | ({label: value} if label else {}), float(number)))
        out.append(metric)
    return out


def expert_metrics(
    counts: Tensor,
    layers: Sequence[int],
    bytes_per_layer: Mapping[int, int],
    *,
    is_mine: Tensor | None = None,
    worker: str = "0",
    hottest: int | None = 4,
) -> list[Metric]:
    """Tokens that each expert was given.

    Args:
        counts: [MoE layers, E] int64.     layers: the decoder layers of its rows.     bytes_per_layer: held of their experts.
        is_mine: [MoE layers, E] bool, the experts whose tokens this worker tells, where others tell the rest; None: all.
        hottest: so many of these experts of each layer by number, the rest together as expert="others", so that a layer
            still adds up to its tokens x experts per token; None: all.
    """
    is_mine = torch.ones_like(counts, dtype=torch.bool) if is_mine is None else is_mine
    number = counts.shape[1] if hottest is None else min(hottest, counts.shape[1])
    best = torch.topk(counts.masked_fill(~is_mine, -1), number, dim=1)
    totals, sizes = (counts * is_mine).sum(1).tolist(), is_mine.sum(1).tolist()
    tokens: list[tuple[dict[str, str], float]] = []
    for layer, total, size, values, ids in zip(layers, totals, sizes, best.values.tolist(), best.indices.tolist()):
        labels = {"layer": str(layer), "worker": worker}
        shown = sorted(zip(ids[:size], values))  # -1, of those that are not this worker's, comes last
        tokens += [({**labels, "expert": str(expert)}, value) for expert, value in shown]
        if len(shown) < size:
            tokens.append(({**labels, "expert": "others"}, total - sum(value for _, value in shown)))
    held = [({"layer": str(layer), "worker": worker}, float(size)) for layer, size in bytes_per_layer.items()]
    text = "Choices of real tokens: over experts and workers a layer adds up to tokens x top-k."
    return [
        Metric("expert_tokens_total", "counter", text, tokens),
        Metric("expert_bytes", "gauge", "Memory of a layer's routed experts on this worker.", held),
    ]


def exposition(metrics: Sequence[Metric]) -> str:
    """The text: HELP and TYPE lines, then a line for each sample."""
    lines = []
    for name, kind, text, samples, (total, count) in metrics:
        lines += [f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} {kind}"]
        lines += [_line(name, labels, value) for labels, value in samples]
        if kind == "summary":
            lines += [_line(f"{name}_sum", {}, total), _line(f"{name}_count", {}, count)]
    return "\n".join(lines) + "\n"


def _line(name: str, labels: dict[str, str], value: float) -> str:
    inner = ",".join(f'{key}="{text.translate(_ESCAPES)}"' for key, text in labels.items())
    number = repr(float(value)) if value % 1 else str(int(value))
    return f"{PREFIX}{name}{{{inner}}} {number}" if inner else f"{PREFIX}{name} {number}"
