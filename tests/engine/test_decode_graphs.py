"""Recorded decode steps on a CPU: the engine's own code, with the recording alone replaced by running the step again."""

import random

import pytest
import torch

from kimi_k3 import KimiK3Generator, SamplingParams
from kimi_k3.engine.runner import DecodeGraphs, bucket

OPTIONS = {"max_num_seqs": 12, "num_blocks": 60, "max_tokens_per_step": 256}


class RunAgain:
    """In place of `CudaRecorder`: outputs that stay, rewritten by each replay."""

    def __init__(self):
        self.recorded, self.replayed = 0, 0

    def __call__(self, function):
        function()  # as the recorder warms up
        running_sum, bank, router_logits = function()
        self.recorded += 1

        def replay():
            self.replayed += 1
            again = function()
            for old, new in zip([running_sum, bank, *router_logits], [*again[:2], *again[2]], strict=True):
                old.copy_(new)

        return replay, (running_sum, bank, router_logits)


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 1000) for _ in range(rng.choice([3, 64, 90, 200]))] for _ in range(count)]


@pytest.mark.parametrize("options", [{}, {"prefix_cache": False}, {"num_blocks": 14, "max_num_seqs": 5}])
def test_replayed_steps_are_the_plain_ones(demo, options):
    """Same tokens, logits and memory; rows that fill up a bucket leave no trace outside of the scrap block.

    Up to the order of sums: torch's product of the router, in float32, has other bits for another number of rows.
    """
    found = []
    for has_graphs in (False, True):
        recorder, rows = RunAgain(), []

        def keep(tokens, logits_V, rows=rows):
            rows.append(logits_V.clone())
            return logits_V

        with KimiK3Generator(demo, **OPTIONS | options) as gen:
            if has_graphs:
                gen.runner.graphs = DecodeGraphs(demo, gen.pools, recorder)
            gen.count_experts()
            params = [
                SamplingParams(
                    max_new_tokens=5 + 3 * i, temperature=i % 2, seed=i, ignore_eos=True, logits_processor=keep
                )
                for i in range(9)
            ]
            results = gen.generate(prompts(9), params)
            found.append(
                (results, rows, gen.pools.buffer[: -gen.pools.layout.block_bytes].clone(), gen.expert_counts())
            )
            steps = recorder.recorded, recorder.replayed
    (plain, plain_rows, plain_memory, plain_counts), (replayed, rows, memory, counts) = found
    assert [r.token_ids for r in replayed] == [r.token_ids for r in plain]
    near = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(torch.stack(rows), torch.stack(plain_rows), **near)
    torch.testing.assert_close(memory.view(torch.float32), plain_memory.view(torch.float32), **near)
    assert torch.equal(counts, plain_counts)
    assert 2 <= steps[0] <= 15 and steps[1] > 2 * steps[0]


def test_nothing_that_a_recorded_step_reads_is_bound_anew(demo):
    with KimiK3Generator(demo, **OPTIONS) as gen:
        gen.runner.graphs = DecodeGraphs(demo, gen.pools, RunAgain())
        for prompt in prompts(3):
            gen.add(prompt, SamplingParams(max_new_tokens=40, ignore_eos=True))
        places: dict = {}
        pools = [pool.data_ptr() for layer in gen.pools.pools.values() for pool in layer]
        while gen.has_unfinished():
            gen.step()
            for key, (ids, batch, _, outputs) in gen.runner.graphs._steps.items():
                tensors = [ids, *batch[:7], *outputs[:2], *outputs[2]]
                now = [tensor.data_ptr() for tensor in tensors]
                assert places.setdefault(key, now) == now
        assert len(places) >= 1
        assert pools == [pool.data_ptr() for layer in gen.pools.pools.values() for pool in layer]


def test_only_plain_decode_steps_are_replayed(demo):
    """Batch-invariant ones, those with prefill pieces, and those that record heat are launched."""
    for options, is_replayed in (({}, True), ({"batch_invariant": True}, False), ({"heat_every": 1}, False)):
        recorder = RunAgain()
        with KimiK3Generator(demo, **OPTIONS, **options) as gen:
            gen.runner.graphs = DecodeGraphs(demo, gen.pools, recorder)
            gen.generate(prompts(2), SamplingParams(max_new_tokens=6, ignore_eos=True))
            assert (recorder.replayed > 0) == is_replayed
            assert recorder.replayed <= gen.counts["decode_tokens"]


@pytest.mark.parametrize("last", [0, 1])
def test_a_step_that_cannot_be_recorded_runs_plainly_as_do_all_after_it(demo, last):
    """At the first bucket, and at the second one when the first is already replayed."""
    params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=2, ignore_eos=True)
    recorder, asked = RunAgain(), 0

    def record(function):
        nonlocal asked
        asked += 1
        if asked > last:
            function()
            raise RuntimeError("operation not permitted when stream is capturing")
        return recorder(function)

    with KimiK3Generator(demo, **OPTIONS, prefix_cache=False) as gen:
        plain = gen.generate(prompts(3), params)
    with KimiK3Generator(demo, **OPTIONS, prefix_cache=False) as gen:
        gen.runner.graphs = DecodeGraphs(demo, gen.pools, record)
        with pytest.warns(UserWarning, match="not permitted") as warned:
            results = gen.generate(prompts(3), params)
        assert gen.runner.graphs is None and gen.stats()["failed_recordings"] == len(warned) == 1
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert asked == last + 1 and (recorder.replayed > 0) == (last > 0)


def test_buckets_hold_their_rows_and_few_more():
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17, 63, 64)] == [1, 2, 4, 4, 8, 8, 16, 16, 24, 64, 64]
    assert all(n <= bucket(n) < n + 8 for n in range(1, 300))


def test_a_cpu_records_nothing(demo):
    with KimiK3Generator(demo, **OPTIONS) as gen:
        assert gen.runner.graphs is None
