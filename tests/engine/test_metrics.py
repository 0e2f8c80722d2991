"""What the generator says of itself: Prometheus text, which experts its tokens chose, and the trace of that."""

import random
import re
from collections import Counter

import pytest
import torch

from kimi_k3 import KimiK3Generator, SamplingParams
from kimi_k3.engine import generator
from kimi_k3.engine.expert_counts import CHOICES_KEPT, ExpertCounts
from kimi_k3.engine.metrics import Metric, expert_metrics, exposition, metrics_of
from kimi_k3.engine.tiers import DiskTier, HostTier
from kimi_k3.parallel.placement import ExpertPlacement
from kimi_k3.parallel.traces import read_trace

# A backslash stands before itself, a quote or an n, and nowhere else.
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
SAMPLE = re.compile(rf"([a-z_][a-z0-9_]*)(?:\{{({LABEL}(?:,{LABEL})*)\}})? (-?[0-9]+(?:\.[0-9]+)?(?:e[+-][0-9]+)?)")


def parse(text: str) -> dict[str, dict[frozenset, float]]:
    """name -> {labels: value}, for text in which each family has its HELP and TYPE once, before its samples, and samples of
    its type only: a summary's are quantiles, then its sum and its count, which are found under names of their own."""
    assert text.endswith("\n")
    families, kinds, before = {}, {}, ""
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# HELP "):
            current = line.split()[2]
            assert current not in families and re.fullmatch(r"# HELP kimi_k3_\w+ \S(.*\S)?", line)
            families[current] = {}
        elif line.startswith("# TYPE "):
            name, kinds[current] = line.split()[2:]
            assert before.startswith(f"# HELP {name} ") and kinds[name] in ("counter", "gauge", "summary")
            assert (kinds[name] == "counter") == name.endswith("_total")
        else:
            match = SAMPLE.fullmatch(line)
            assert match and kinds[current], line
            found = re.findall(rf"({LABEL})", match[2] or "")
            pairs = [(name, escaped[1:-1]) for name, escaped in (label.split("=", 1) for label in found)]
            labels, value = frozenset(pairs), float(match[3])
            assert len(labels) == len({name for name, _ in pairs})
            if kinds[current] == "summary" and not labels:
                assert match[1] == current + ("_count" if before.startswith(f"{current}_sum ") else "_sum"), line
            else:
                assert match[1] == current, line
                assert (kinds[current] == "summary") == any(name == "quantile" for name, _ in pairs), line
            if kinds[current] == "counter" or match[1].endswith("_count"):
                assert value >= 0
            assert labels not in families.setdefault(match[1], {})
            families[match[1]][labels] = value
        before = line
    assert all(f"{name}_count" in families for name, kind in kinds.items() if kind == "summary")
    assert not [name for name in families if f"{name}_total" in families]  # to OpenMetrics those are one family
    return families


def labels(**values: str) -> frozenset:
    return frozenset(values.items())


def prompts(lengths):
    rng = random.Random(0)
    return [[rng.randrange(3, 300) for _ in range(length)] for length in lengths]


class Chosen:
    """What the routers of a model chose, by hooks: the oracle."""

    def __init__(self, model):
        self.ids: dict[int, list[torch.Tensor]] = {}
        layers = [(int(i), layer) for i, layer in model.model.layers.items() if layer.is_moe]
        for layer_idx, layer in layers:
            self.ids[layer_idx] = []
            layer.block_sparse_moe.gate.register_forward_hook(
                lambda module, args, out, layer_idx=layer_idx: self.ids[layer_idx].append(out.topk_ids.sort(1).values)
            )
        self.gates = [layer.block_sparse_moe.gate for _, layer in layers]

    def close(self):
        for gate in self.gates:
            gate._forward_hooks.clear()


@pytest.fixture
def chosen(smooth):
    chosen = Chosen(smooth)
    yield chosen
    chosen.close()


def test_the_text_holds_the_figures(smooth):
    tiers = (HostTier(1 << 26),)
    with KimiK3Generator(smooth, max_num_seqs=2, num_blocks=8, max_tokens_per_step=64, tiers=tiers) as gen:
        params = SamplingParams(max_new_tokens=3, ignore_eos=True)
        gen.generate(prompts([70, 40, 130, 90]), params)
        gen.add(prompts([10])[0], params)
        stats, found = gen.stats(), parse(gen.prometheus())
    assert found["kimi_k3_requests_total"] == {labels(): 5}
    assert found["kimi_k3_requests_now"][labels(state="waiting")] == 1
    assert found["kimi_k3_requests_finished_total"] == {labels(reason="length"): 4}
    tokens = found["kimi_k3_tokens_total"]
    assert tokens[labels(kind="generated")] == 12 and tokens[labels(kind="prompt")] == 330
    assert tokens[labels(kind="prefill")] >= 330 and tokens[labels(kind="decode")] == stats["decode_tokens"]
    assert found["kimi_k3_memory_bytes"] == {labels(): stats["bytes_total"]}
    assert found["kimi_k3_schedule_seconds_total"][labels()] == pytest.approx(stats["schedule_us"] / 1e6)
    assert found["kimi_k3_evictions_total"] == {labels(): stats["evictions"]} and stats["evictions"] > 0
    first = found["kimi_k3_first_token_seconds"]
    assert (
        0 < first[labels(quantile="0.5")] <= first[labels(quantile="0.99")] == pytest.approx(stats["first_token_s"][99])
    )
    assert first.keys() == {labels(quantile=q) for q in ("0.5", "0.95", "0.99")}
    assert found["kimi_k3_first_token_seconds_count"] == {labels(): 4}
    assert found["kimi_k3_between_tokens_seconds_count"] == {labels(): 8}
    assert "kimi_k3_expert_tokens_total" not in found


def test_every_number_of_the_stats_is_in_the_text():
    stats = {"steps": 7, "held_memory": 3, "miss_new": 2, "something_else": 5, "first_token_s": {50: 0.25, 95: 1.5}}
    stats |= {"first_token_seconds_sum": 3.5, "first_token_seconds_count": 9, "schedule_us": 1500}
    found = parse(exposition(metrics_of(stats)))
    assert found["kimi_k3_steps_total"] == {labels(): 7}
    assert found["kimi_k3_held_total"] == {labels(reason="memory"): 3}
    assert found["kimi_k3_misses_total"] == {labels(reason="new"): 2}
    assert found["kimi_k3_something_else_total"] == {labels(): 5}
    assert found["kimi_k3_first_token_seconds"] == {labels(quantile="0.5"): 0.25, labels(quantile="0.95"): 1.5}
    assert found["kimi_k3_first_token_seconds_sum"] == {labels(): 3.5}
    assert found["kimi_k3_first_token_seconds_count"] == {labels(): 9}
    assert found["kimi_k3_between_tokens_seconds_count"] == {labels(): 0}  # none yet
    assert found["kimi_k3_schedule_seconds_total"] == {labels(): 0.0015}


def test_tiers_have_counters_and_sizes_by_name_and_the_traffic_its_own(demo, tmp_path):
    tiers = HostTier(1 << 20), DiskTier(tmp_path, 1 << 28)
    options = {"max_num_seqs": 2, "num_blocks": 8, "max_tokens_per_step": 64}
    with KimiK3Generator(demo, tiers=tiers, **options) as gen:
        params = SamplingParams(max_new_tokens=3, ignore_eos=True)
        for _ in range(2):
            gen.generate(prompts([150, 140, 130]), params)
            gen.index.clear()
            gen.tiers.stack.flush()
        stats, text = gen.stats(), gen.prometheus()
    found, by_tier = parse(text), stats["tiers"]["by_tier"]
    transfers = stats["tiers"] | by_tier["transfers"]
    assert by_tier["disk"]["hits"] > 0 and by_tier["host"]["evicted"] > 0 and transfers["restored_tokens"] > 0
    names = {f"{k}_total": k for k in ("hits", "misses", "puts", "refused", "evicted", "damaged", "foreign")}
    names |= {"io_errors_total": "io", "timeouts_total": "timeout", "entries": "entries", "bytes": "bytes"}
    for name, key in names.items():
        assert found[f"kimi_k3_tier_{name}"] == {labels(tier=tier): by_tier[tier][key] for tier in ("host", "disk")}
    keys = ("stored_blocks", "stored_snapshots", "fetches", "restored_tokens", "demoted", "fetched_bytes")
    for name, key in ({k: k for k in keys} | {"written": "stored", "written_bytes": "stored_bytes"}).items():
        assert found[f"kimi_k3_transfers_{name}_total"] == {labels(): transfers[key]} and transfers[key] > 0
    assert found["kimi_k3_transfers_read_seconds_total"][labels()] == pytest.approx(transfers["read_us"] / 1e6)
    assert found["kimi_k3_transfers_pending_bytes"] == {labels(): 0}
    assert 'tier="transfers"' not in text and "Since the start: " not in text  # every count says what it is of
    assert sum("read_us" in line or "tier_figures" in line for line in text.splitlines()) == 0


def test_latencies_are_counted_beyond_the_window(smooth, monkeypatch):
    monkeypatch.setattr(generator, "KEPT_LATENCIES", 4)
    with KimiK3Generator(smooth, max_num_seqs=2, num_blocks=8) as gen:
        gen.generate(prompts([20, 30]), SamplingParams(max_new_tokens=9, ignore_eos=True))
        waits = list(gen._latencies["between_tokens_s"])
        found, stats = parse(gen.prometheus()), gen.stats()
    assert len(waits) == 4 and found["kimi_k3_between_tokens_seconds_count"] == {labels(): 16}
    (total,) = found["kimi_k3_between_tokens_seconds_sum"].values()
    assert sum(waits) < total <= 16 * stats["step_seconds"]
    (first,) = found["kimi_k3_first_token_seconds_sum"].values()
    assert found["kimi_k3_first_token_seconds_count"] == {labels(): 2}
    assert first == pytest.approx(sum(gen._latencies["first_token_s"]))


def test_labels_are_escaped():
    text = exposition([Metric("x_total", "counter", "x.", [({"tier": 'a"b\\c\nd\te\x01'}, 1.0)])])
    assert text.split("\n")[2] == 'kimi_k3_x_total{tier="a\\"b\\\\c\\nd\te\x01"} 1'  # a tab and others stay as they are
    assert parse(text) == {"kimi_k3_x_total": {labels(tier='a\\"b\\\\c\\nd\te\x01'): 1}}


@pytest.mark.parametrize("is_invariant", [False, True])
def test_expert_counts_are_the_routers_choices(smooth, chosen, tmp_path, is_invariant):
    path = tmp_path / "trace.jsonl"
    with KimiK3Generator(
        smooth, max_num_seqs=3, num_blocks=16, max_tokens_per_step=64, batch_invariant=is_invariant
    ) as gen:
        gen.record_trace(path)
        gen.generate(prompts([70, 5, 33]), SamplingParams(max_new_tokens=4, ignore_eos=True))
        counts, stats = gen.expert_counts(), gen.stats()
        text = parse(gen.prometheus())["kimi_k3_expert_tokens_total"]
        whole = parse(gen.prometheus(all_experts=True))["kimi_k3_expert_tokens_total"]
    config = smooth.config.text_config
    tokens, topk = stats["prefill_tokens"] + stats["decode_tokens"], config.num_experts_per_token
    assert counts.shape == (len(chosen.ids), config.num_experts) and counts.dtype == torch.int64
    assert counts.sum(1).tolist() == [tokens * topk] * len(chosen.ids)
    trace = read_trace(path)
    assert trace.num_experts == config.num_experts
    assert trace.layers == list(chosen.ids)
    for row, (layer_idx, ids) in zip(counts, chosen.ids.items()):
        ids_TA = torch.cat(ids)
        assert torch.equal(row, ids_TA.flatten().bincount(minlength=config.num_experts))
        assert torch.equal(torch.from_numpy(trace.topk_ids(layer_idx)).sort(1).values, ids_TA)
        of_layer = Counter(
            {dict(name)["expert"]: v for name, v in text.items() if dict(name)["layer"] == str(layer_idx)}
        )
        assert of_layer.total() == tokens * topk and len(of_layer) <= 5
        for expert, value in enumerate(row.tolist()):
            assert whole[labels(layer=str(layer_idx), worker="0", expert=str(expert))] == value


@pytest.mark.parametrize("hottest", [None, 2])
def test_workers_add_up_to_all_choices(hottest):
    """Each tells the tokens of its own experts, three, one and none of a layer among them; and its own bytes."""
    counts, owners = torch.tensor([[5, 1, 9, 7], [2, 3, 4, 8]]), torch.tensor([[0, 0, 1, 0], [2, 0, 2, 2]])
    text = [
        exposition(expert_metrics(counts, [1, 6], {1: 10 * w}, is_mine=owners == w, worker=str(w), hottest=hottest))
        for w in range(3)
    ]
    tokens = [parse(part)["kimi_k3_expert_tokens_total"] for part in text]
    small = {  # what is left out of the hottest two
        labels(layer="1", worker="0", expert="others" if hottest else "1"): 1,
        labels(layer="6", worker="2", expert="others" if hottest else "0"): 2,
    }
    assert {name: value for part in tokens for name, value in part.items()} == small | {
        labels(layer="1", worker="0", expert="0"): 5, labels(layer="1", worker="0", expert="3"): 7,
        labels(layer="1", worker="1", expert="2"): 9, labels(layer="6", worker="0", expert="1"): 3,
        labels(layer="6", worker="2", expert="2"): 4, labels(layer="6", worker="2", expert="3"): 8,
    }  # fmt: skip
    assert [len(part) for part in tokens] == [4, 1, 3]
    for w, part in enumerate(text):
        assert parse(part)["kimi_k3_expert_bytes"] == {labels(layer="1", worker=str(w)): 10 * w}


def test_requests_are_followed_to_the_workers_of_their_experts(smooth, chosen):
    """Decayed averages of what each token chose, and of them each worker's share; a step of its own for every token."""
    config = smooth.config.text_config
    layers, experts, topk = len(chosen.ids), config.num_experts, config.num_experts_per_token
    placement = ExpertPlacement.contiguous(experts, num_layers=layers, num_workers=2)
    with KimiK3Generator(smooth, max_num_seqs=1, num_blocks=16, prefix_cache=False) as gen:
        gen.limit_experts(placement)
        rid = gen.add(prompts([9])[0], SamplingParams(max_new_tokens=4, ignore_eos=True))
        request = gen._requests[rid]
        for _ in range(3):
            gen.step()
        want = torch.zeros(layers, experts)
        for row, ids in enumerate(chosen.ids.values()):
            ids_TA = torch.cat(ids)
            averages = [ids_TA[:9].flatten().bincount(minlength=experts) / 9]
            averages += [ids_TA[t].bincount(minlength=experts).float() for t in (9, 10)]
            want[row] = averages[0]
            for average in averages[1:]:
                want[row] = CHOICES_KEPT * want[row] + (1 - CHOICES_KEPT) * average
        torch.testing.assert_close(request.experts, want)
        assert request.expert_loads == pytest.approx(placement.worker_loads(want.numpy()).mean(0))
        assert (
            sum(request.expert_loads) == pytest.approx(topk)
            and gen._running_candidate(request).experts == request.expert_loads
        )
        with pytest.raises(ValueError, match="placement of"):
            gen.limit_experts(ExpertPlacement.contiguous(experts, num_layers=layers + 1, num_workers=2))
        gen.limit_experts(None)
        assert gen._running_candidate(request).experts == ()


def test_the_expert_budget_holds_back_who_would_overload_a_worker(smooth):
    config = smooth.config.text_config
    placement = ExpertPlacement.contiguous(config.num_experts, 1, num_layers=len(ExpertCounts(smooth).layers))
    topk = config.num_experts_per_token
    with KimiK3Generator(smooth, max_num_seqs=4, num_blocks=16, scheduler="dependency_aware") as gen:
        gen.limit_experts(placement, budget=1.5 * topk)  # one worker has it all: one request's tokens, and not two's
        first = gen.add(prompts([9])[0], SamplingParams(max_new_tokens=12, ignore_eos=True))
        for _ in range(2):
            gen.step()
        second = gen.add(prompts([8])[0], SamplingParams(max_new_tokens=12, ignore_eos=True))
        gen._requests[second].expert_loads = gen._requests[first].expert_loads  # as after a preemption
        gen.step()
        assert gen.counts["held_experts"] == 1 and not gen._requests[second].is_running
        while gen.has_unfinished():
            gen.step()
        assert gen.result(first).finish_reason == gen.result(second).finish_reason == "length"


def test_experts_are_counted_from_when_asked(smooth, tmp_path):
    with KimiK3Generator(smooth, max_num_seqs=2, num_blocks=8, prefix_cache=False) as gen:
        with pytest.raises(ValueError, match="count_experts"):
            gen.expert_counts()
        gen.generate(prompts([20]), SamplingParams(max_new_tokens=1))
        gen.count_experts()
        gen.generate(prompts([9]), SamplingParams(max_new_tokens=1))
        assert set(gen.expert_counts().sum(1).tolist()) == {9 * smooth.config.text_config.num_experts_per_token}
        gen.record_trace(tmp_path / "a.jsonl")
        gen.record_trace(None)
        gen.generate(prompts([9]), SamplingParams(max_new_tokens=1))
        assert (tmp_path / "a.jsonl").read_text() == ""
        gen.count_experts(False)
        assert gen.runner.experts is None
