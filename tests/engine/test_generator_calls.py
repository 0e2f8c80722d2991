"""Calls at odd moments and with odd arguments: each concerns its own request, and says what is wrong."""

import dataclasses
import threading

import pytest
import torch

from kimi_k3 import HostTier, KimiK3Generator, SamplingParams
from kimi_k3.engine.scheduler import Candidate, Policy, Resources, schedule_dependency_aware

PROMPT = [(7 * i) % 900 + 1 for i in range(300)]


def params(new: int, **options) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, ignore_eos=True, **options)


def finish(gen):
    while gen.has_unfinished():
        gen.step()


def test_a_prompt_that_is_refused_while_a_step_runs_costs_the_next_one_nothing(demo):
    """Its numbers are the next request's."""
    with KimiK3Generator(demo, max_num_seqs=4, num_blocks=60) as gen:
        inside, refused, outcomes = threading.Event(), threading.Event(), []

        def hold(*_):
            inside.set()
            refused.wait(20)

        long = gen.add(PROMPT[:20], params(6))
        handle = demo.model.layers["0"].register_forward_pre_hook(hold)
        try:
            stepping = threading.Thread(target=finish, args=(gen,))
            stepping.start()
            assert inside.wait(20)
            with pytest.raises(ValueError, match="want a prompt of ids"):
                gen.generate([[10**9]])
            outcomes = [gen.add(PROMPT[:6], params(3))]
        finally:
            refused.set()
            handle.remove()
        stepping.join()
        finish(gen)
        assert [len(gen.result(rid).token_ids) for rid in (long, *outcomes)] == [6, 3]


@pytest.mark.parametrize("options", [{}, {"presence_penalty": 1.0}], ids=["plain", "penalty"])
def test_what_is_changed_in_params_after_add_is_the_next_requests(demo, options):
    with KimiK3Generator(demo, max_num_seqs=4, num_blocks=60) as gen:
        mine = params(3, **options)
        first = gen.add(PROMPT[:10], mine)
        gen.step()
        mine.max_new_tokens = 9
        second = gen.add(PROMPT[:11], mine)
        for _ in range(30):
            gen.step()
        assert [len(gen.result(rid).token_ids) for rid in (first, second)] == [3, 9]


def test_fcfs_serves_a_long_line_in_order_of_arrival(demo):
    with KimiK3Generator(demo, max_num_seqs=1, num_blocks=60, scheduler="fcfs") as gen:
        rids = [gen.add([5 + i % 90], params(1), priority=5 * (i >= 70)) for i in range(140)]
        served = []
        while gen.has_unfinished():
            served += [output.rid for output in gen.step()]
        assert served == rids


@pytest.mark.parametrize("is_evicted", [False, True])
@pytest.mark.parametrize("hit", [0, 192])
def test_replayed_tokens_are_those_that_ran_twice(demo, hit, is_evicted):
    with KimiK3Generator(demo, max_num_seqs=2, num_blocks=60, max_tokens_per_step=64) as gen:
        if hit:
            gen.generate([PROMPT[:hit]], params(1))
        before = gen.counts["prefill_tokens"]
        rid = gen.add(PROMPT, params(1))
        gen.step()
        gen._preempt(gen._requests[rid], "drop")
        if is_evicted:
            gen.index.clear()
        finish(gen)
        result, ran = gen.result(rid), gen.counts["prefill_tokens"] - before
        reused = 0 if is_evicted else hit
        assert result.reused_tokens == reused
        assert result.metrics["replayed_tokens"] == gen.stats()["replayed_tokens"] == (64 if is_evicted else 0)
        assert ran == len(PROMPT) - reused + (64 if is_evicted else 0)


def test_a_forward_that_fails_at_its_entrance_replays_nothing(demo):
    with KimiK3Generator(demo, max_num_seqs=2, num_blocks=60) as gen:
        gen.add(PROMPT, params(1))
        handle = demo.model.layers["0"].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gen.step()
        handle.remove()
        finish(gen)
        assert gen.stats()["replayed_tokens"] == 0


def a_candidate(rid: int, *, is_running: bool, idle_steps: int, experts: tuple[float, ...]) -> Candidate:
    return Candidate(
        rid, rid, 0, is_running, 10 if is_running else 0, 11 if is_running else 10, is_running, is_running, is_running, 0,
        None, "none", 0, 20, 0, idle_steps, experts,
    )  # fmt: skip


def test_the_experts_budget_holds_nobody_back_for_ever():
    """Who is known to choose a busy worker waits, as does who is not known while that worker has too much; then age counts."""
    runs = a_candidate(0, is_running=True, idle_steps=1, experts=(3.0, 0.0))
    resources = Resources(100, 4, 200, 64, 8, 256, expert_budget=2.0)

    def admitted(idle_steps: int, experts: tuple[float, ...]) -> bool:
        waits = a_candidate(1, is_running=False, idle_steps=idle_steps, experts=experts)
        plan = schedule_dependency_aware([runs, waits], resources)
        assert plan.admit or plan.reasons == {1: "experts"}
        return bool(plan.admit)

    patience = Policy().patience
    for experts in ((1.0, 0.0), ()):
        assert [admitted(idle, experts) for idle in (1, patience - 1, patience)] == [False, False, True]


def test_it_may_be_made_and_used_inside_and_outside_of_inference_mode(demo):
    prompt, sampling = PROMPT[:70], params(4, presence_penalty=0.5)
    with KimiK3Generator(demo, max_num_seqs=2, num_blocks=60) as gen:
        (want,) = gen.generate([prompt], sampling)
    with torch.inference_mode():
        gen = KimiK3Generator(demo, max_num_seqs=2, num_blocks=60)
        gen.count_experts()
        rid = gen.add(prompt, sampling)
        gen.step()
    finish(gen)
    with torch.inference_mode():
        (again,) = gen.generate([[*prompt, 5]], sampling)
    assert gen.result(rid).token_ids == want.token_ids and len(again.token_ids) == 4
    gen.close()


def test_results_of_several_samples_are_plain_data(demo):
    with KimiK3Generator(demo, max_num_seqs=4, num_blocks=60) as gen:
        (result,) = gen.generate([PROMPT[:9]], params(3, n=3, temperature=1.0, seed=1))
    tree = dataclasses.asdict(result)
    assert [sample["token_ids"] for sample in tree["samples"]] == [sample.token_ids for sample in result.samples]
    assert result.samples[0].token_ids == result.token_ids and len(result.samples) == 3


def test_prompts_of_one_token_may_be_tensors(demo):
    with KimiK3Generator(demo, max_num_seqs=4, num_blocks=60) as gen:
        rows = gen.generate(torch.tensor([[5], [6]]), params(2))
        assert [row.token_ids for row in rows] == [gen.generate([[id]], params(2))[0].token_ids for id in (5, 6)]
        for flat in ([5, 6], torch.tensor([5, 6])):
            with pytest.raises(ValueError, match="got token ids"):
                gen.generate(flat)
        with pytest.raises(ValueError, match="want pixel_values with grid_thws"):
            gen.add([5], grid_thws=torch.ones(1, 3))


def test_without_a_prefix_cache_two_generators_have_no_key_in_common(demo):
    roots = []
    for _ in range(2):
        with KimiK3Generator(demo, max_num_seqs=2, num_blocks=60, prefix_cache=False, tiers=[HostTier(1 << 20)]) as gen:
            gen._weights, gen._root = "", b""  # as with a tier that both may read
            roots.append(gen._requests[gen.add(PROMPT, params(1))].root)
    assert roots[0] != roots[1]
