"""What the generator says of itself: Prometheus text, which experts its tokens chose, and the trace of that."""

import random
import re
from collections import Counter

import pytest
import torch

from kimi_k3 import KimiK3Generator, SamplingParams
from kimi_k3.engine.expert_counts import CHOICES_KEPT, ExpertCounts
from kimi_k3.engine.metrics import Metric, exposition, metrics_of
from kimi_k3.engine.tiers import HostTier
from kimi_k3.parallel.placement import ExpertPlacement
from kimi_k3.parallel.traces import read_trace

SAMPLE = re.compile(r'([a-z_][a-z0-9_]*)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*)\})? (-?[0-9.e+-]+)$')


def parse(text: str) -> dict[str, dict[frozenset, float]]:
    """name -> {labels: value}, for text in which each family has its HELP and TYPE once, before its samples."""
    assert text.endswith("\n")
    families, current = {}, None
    for line in text.splitlines():
        if line.startswith("# HELP "):
            current = line.split()[2]
            assert current not in families and len(line.split()) > 3
            families[current] = {}
        elif line.startswith("# TYPE "):
            assert line.split()[2] == current and line.split()[3] in ("counter", "gauge", "summary")
            assert (line.split()[3] == "counter") == current.endswith("_total")
        else:
            match = SAMPLE.match(line)
            assert match and match[1] == current, line
            labels = frozenset(re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', match[2] or ""))
            assert labels not in families[current]
            families[current][labels] = float(match[3])
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
    assert found["kimi_k3_tier_figures"][labels(tier="host", event="bytes")] > 0
    assert "kimi_k3_expert_tokens_total" not in found


def test_every_number_of_the_stats_is_in_the_text():
    stats = {"steps": 7, "held_memory": 3, "miss_new": 2, "something_else": 5, "first_token_s": {50: 0.25, 95: 1.5}}
    found = parse(exposition(metrics_of(stats)))
    assert found["kimi_k3_steps_total"] == {labels(): 7}
    assert found["kimi_k3_held_total"] == {labels(reason="memory"): 3}
    assert found["kimi_k3_misses_total"] == {labels(reason="new"): 2}
    assert found["kimi_k3_something_else_total"] == {labels(): 5}
    assert found["kimi_k3_first_token_seconds"] == {labels(quantile="0.5"): 0.25, labels(quantile="0.95"): 1.5}


def test_labels_are_escaped():
    text = exposition([Metric("x_total", "counter", "x.", [({"tier": 'a"b\\c\nd'}, 1.0)])])
    assert text.splitlines()[2] == 'kimi_k3_x_total{tier="a\\"b\\\\c\\nd"} 1'


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
    trace = read_trace(path, config.num_experts)
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
