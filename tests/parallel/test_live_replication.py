"""Experts change places while the generator serves: the same bits, a lower peak; a change that fails costs nothing."""

import dataclasses
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import check_expert_figures, run_ranks

import kimi_k3.parallel.replication as replication
from kimi_k3 import KimiK3ForCausalLM, KimiK3Generator, SamplingParams
from kimi_k3.parallel import make_mesh, use_placement
from kimi_k3.parallel.placement import ExpertPlacement

EXPERTS, LAYERS, SPARE = 896, 4, 32  # the `wide` checkpoint; free slots of a rank
PROMPTS = [
    [7 + seed, 7 + seed, 9, 7 + seed] * 3 for seed in range(6)
]  # few tokens, so few experts have most of the load


def load(folder, mesh=None) -> KimiK3ForCausalLM:
    return KimiK3ForCausalLM.from_pretrained(folder, mesh=mesh, progress=False, dtype=torch.float32)


def start_plan(ranks: int) -> ExpertPlacement:
    return ExpertPlacement.contiguous(EXPERTS, ranks, LAYERS, capacity=-(-EXPERTS // ranks) + SPARE)


def round_of(gen: KimiK3Generator) -> list[tuple[list[int], torch.Tensor]]:
    """Tokens and logits of every request."""
    rows: dict[int, list[torch.Tensor]] = {}

    def keeping(index: int):
        def keep(tokens, logits):
            rows.setdefault(index, []).append(logits.clone())
            return logits

        return keep

    params = [
        SamplingParams(max_new_tokens=12, ignore_eos=True, logits_processor=keeping(i)) for i in range(len(PROMPTS))
    ]
    results = gen.generate(PROMPTS, params)
    return [(result.token_ids, torch.stack(rows[i])) for i, result in enumerate(results)]


def generator(model) -> KimiK3Generator:
    return KimiK3Generator(model, max_num_seqs=4, num_blocks=16, prefix_cache=False, batch_invariant=True)


def is_running(gen: KimiK3Generator) -> bool:
    return gen.stats()["expert_changes"]["is_running"]


def before_during_after(folder) -> dict:
    model = load(folder, make_mesh(ep=dist.get_world_size()))
    before_digest = generator(model).agreement.weights_digest(model)
    use_placement(model, start_plan(dist.get_world_size()))
    with generator(model) as gen:
        gen.count_experts()
        rounds = [round_of(gen)]
        loads, old = gen.expert_counts().numpy(), model.expert_placement
        plan = ExpertPlacement.balanced(loads, previous=old, active_slots=EXPERTS + SPARE * dist.get_world_size() // 2)
        gen.replace_experts(plan, deadline_s=50)
        with pytest.raises(ValueError, match="a change is under way"):
            gen.replace_experts(plan)
        is_first_round_during = is_running(gen)
        for _ in range(50):  # the scheduler's steps switch one layer after another
            rounds.append(round_of(gen))
            if not is_running(gen):
                break
        rounds.append(round_of(gen))
        check_expert_figures(gen, gen.expert_counts())
        experts = model.model.layers["1"].block_sparse_moe.experts
        return {
            "rounds": rounds, "during": is_first_round_during, "stats": gen.stats()["expert_changes"],
            "ratios": (old.imbalance(loads).max(), plan.imbalance(loads).max()), "in use": model.expert_placement is plan,
            "moves": len([m for m in plan.moves_from(old) if m.worker == dist.get_rank()]),
            "num_active": experts.num_active.sum(), "digests": {before_digest, gen.agreement.weights_digest(model)},
            "metrics": gen.prometheus(),
        }  # fmt: skip


def test_outputs_do_not_change_while_experts_are_replicated(wide_folder):
    with generator(load(wide_folder)) as gen:
        expected = round_of(gen)
    results = run_ranks(4, before_during_after, wide_folder, timeout=200)
    for result in results:
        assert result["during"] and len(result["rounds"]) >= 3
        for tokens_and_logits in result["rounds"]:
            for (tokens, logits), (expected_tokens, expected_logits) in zip(tokens_and_logits, expected, strict=True):
                assert tokens == expected_tokens and torch.equal(logits, expected_logits)
        stats = result["stats"]
        assert stats["completed"] == 1 and stats["failed"] == stats["overdue"] == 0 and not stats["is_running"]
        assert stats["last_completed"]["step"] == results[0]["stats"]["last_completed"]["step"] > 0
        assert stats["moved"] == result["moves"] > 0 and result["in use"]
        assert result["num_active"] == EXPERTS + 2 * SPARE  # replicas are in the tables that are served from
        before, after = result["ratios"]
        assert after < 0.7 * before and after < 1.3
        assert len(result["digests"]) == 1  # the prefix cache knows the weights again
        assert 'kimi_k3_expert_changes_total{result="completed"} 1' in result["metrics"]
        assert "kimi_k3_expert_change_last_completed_timestamp_seconds 1" in result["metrics"]


def compiled(folder) -> dict:
    from torch._dynamo.utils import counters

    model = load(folder, make_mesh(ep=2))
    use_placement(model, start_plan(2))
    for layer in model.model.layers.values():
        layer.compile(backend="aot_eager", fullgraph=True)
    model.model.has_compiled_layers = True
    with KimiK3Generator(model, max_num_seqs=4, num_blocks=16, prefix_cache=False) as gen:
        expected = round_of(gen)
        graphs, frames = counters["stats"]["unique_graphs"], counters["frames"]["total"]
        plan = ExpertPlacement.balanced(
            np.arange(EXPERTS)[None].repeat(LAYERS, 0), previous=model.expert_placement, active_slots=EXPERTS + SPARE
        )
        gen.replace_experts(plan, deadline_s=50)
        rounds = [round_of(gen)]
        while is_running(gen):
            gen.step()
        rounds.append(round_of(gen))
        is_same = all(
            tokens == wanted[0] and torch.equal(logits, wanted[1])
            for one in rounds for (tokens, logits), wanted in zip(one, expected, strict=True)
        )  # fmt: skip
        done = model.expert_placement is plan and not counters["graph_break"]
        more = counters["stats"]["unique_graphs"] - graphs, counters["frames"]["total"] - frames
        return {"same": is_same, "done": done, "graphs": graphs, "more": more}


def test_a_change_compiles_nothing(wide_folder):
    for result in run_ranks(2, compiled, wide_folder, timeout=200):
        assert result["same"] and result["done"] and result["graphs"] > 3 and result["more"] == (0, 0)


def blocked_or_broken(folder, how: str) -> dict:
    model = load(folder, make_mesh(ep=2))
    use_placement(model, start_plan(2))
    old = model.expert_placement
    plan = ExpertPlacement.balanced(
        np.arange(EXPERTS)[None].repeat(LAYERS, 0), previous=old, active_slots=EXPERTS + SPARE
    )
    stage = replication.Transfer._stage

    def disturbed(self, layer, *args):
        if layer == 2 and dist.get_rank() == 1:
            if how == "failed":
                raise OSError("a cable")
            time.sleep(3)
        stage(self, layer, *args)

    replication.Transfer._stage = disturbed
    with generator(model) as gen:
        expected = round_of(gen)
        gen.replace_experts(plan, deadline_s=2 if how == "overdue" else 50)
        steps, longest, began, is_same = gen.num_steps, 0.0, time.monotonic(), True
        while is_running(gen):
            gen.add(PROMPTS[0], SamplingParams(max_new_tokens=2))
            at = time.monotonic()
            gen.step()
            longest = max(longest, time.monotonic() - at)
        seconds, steps = time.monotonic() - began, gen.num_steps - steps
        is_same = all(t == u and torch.equal(x, y) for (t, x), (u, y) in zip(round_of(gen), expected, strict=True))
        middle, stats = model.expert_placement, gen.stats()["expert_changes"]
        replication.Transfer._stage = stage
        gen.replace_experts(plan, deadline_s=50)  # another change, after one that came to nothing
        while is_running(gen):
            gen.step()
        is_same &= all(t == u and torch.equal(x, y) for (t, x), (u, y) in zip(round_of(gen), expected, strict=True))
        layers = [(middle.is_same_in(old, i), middle.is_same_in(plan, i)) for i in range(LAYERS)]
        return {
            "same": is_same, "stats": stats, "seconds": seconds, "steps": steps, "longest": longest, "layers": layers,
            "metrics": gen.prometheus(), "completed": gen.stats()["expert_changes"]["completed"],
        }  # fmt: skip


def closed_in_the_middle(folder) -> dict:
    model = load(folder, make_mesh(ep=2))
    use_placement(model, start_plan(2))
    old = model.expert_placement
    plan = ExpertPlacement.balanced(
        np.arange(EXPERTS)[None].repeat(LAYERS, 0), previous=old, active_slots=EXPERTS + SPARE
    )
    stage = replication.Transfer._stage

    def slow(self, layer, *args):
        if layer == 2:
            time.sleep(3)
        stage(self, layer, *args)

    def step_while(gen, goes_on) -> None:
        while goes_on():
            gen.add(PROMPTS[0], SamplingParams(max_new_tokens=2))
            gen.step()

    replication.Transfer._stage = slow
    with generator(model) as gen:
        expected = round_of(gen)
        gen.replace_experts(plan, deadline_s=50)
        with pytest.raises(ValueError, match="want no change of replace_experts under way"):
            use_placement(model, old)
        step_while(gen, lambda: gen.expert_changes._transfer.num_committed < 2)
    replication.Transfer._stage = stage
    middle = model.expert_placement
    # Away from what the layers hold now: a plan that starts from another belief reads wrong slots.
    other = ExpertPlacement.balanced(
        np.arange(EXPERTS)[None, ::-1].repeat(LAYERS, 0), previous=middle, active_slots=EXPERTS + SPARE
    )
    with generator(model) as gen:
        rounds = [round_of(gen)]
        gen.replace_experts(other, deadline_s=50)
        step_while(gen, lambda: is_running(gen))
        rounds.append(round_of(gen))
    return {
        "same": [t == u and torch.equal(x, y) for r in rounds for (t, x), (u, y) in zip(r, expected, strict=True)],
        "layers": [(middle.is_same_in(old, i), middle.is_same_in(plan, i)) for i in range(LAYERS)],
        "in use": model.expert_placement is other,
    }  # fmt: skip


def test_a_generator_closed_during_a_change_leaves_the_placement_that_serves(wide_folder):
    for result in run_ranks(2, closed_in_the_middle, wide_folder):
        assert result["layers"] == [(False, True)] * 2 + [(True, False)] * 2
        assert all(result["same"]) and result["in use"]


def followed(folder) -> list[bool]:
    model = load(folder, make_mesh(ep=2))
    use_placement(model, start_plan(2))
    plan = ExpertPlacement.balanced(
        np.arange(EXPERTS)[None].repeat(LAYERS, 0), previous=model.expert_placement, active_slots=EXPERTS + SPARE
    )
    with generator(model) as gen:
        gen.limit_experts(model.expert_placement)
        before = gen.runner.experts.share_MEW
        gen.replace_experts(plan, deadline_s=50)
        while is_running(gen):
            gen.step()
        after = gen.runner.experts.share_MEW
        gen.limit_experts(plan)
        return [torch.equal(before, after), torch.equal(after, gen.runner.experts.share_MEW)]


def test_the_limit_on_experts_follows_a_change(wide_folder):
    assert run_ranks(2, followed, wide_folder) == [[False, True]] * 2


@pytest.mark.parametrize("how", ["overdue", "failed"])
def test_a_change_that_is_blocked_or_broken_is_given_up_and_decoding_goes_on(how, wide_folder):
    results = run_ranks(2, blocked_or_broken, wide_folder, how)
    for result in results:
        assert result["same"] and result["steps"] >= (5 if how == "overdue" else 1) and result["seconds"] < 20
        assert result["stats"][how] == 1 and result["stats"]["completed"] == 0
        assert result["layers"] == [(False, True)] * 2 + [(True, False)] * 2
        assert f'kimi_k3_expert_changes_total{{result="{how}"}} 1' in result["metrics"]
        assert result["completed"] == 1
        assert result["longest"] < 1.0  # no step waited for the transfer
    assert "a cable" in results[1]["stats"]["last_error"] or how == "overdue"
    assert "2 of 4 layers switched" in results[0]["stats"]["last_error"]


def one_way(folder) -> tuple[bool, int]:
    """Rank 0 gets copies of 32 experts of rank 1, two rows a message at most; rank 1 gets nothing."""
    replication.CHUNK_BYTES = 1024
    model = load(folder, make_mesh(ep=2))
    use_placement(model, start_plan(2))
    old = model.expert_placement
    slots, is_active = old.slots.copy(), old.is_active.copy()
    slots[:, 0, EXPERTS // 2 :], is_active[:, 0, EXPERTS // 2 :] = np.arange(EXPERTS - SPARE, EXPERTS), True
    plan = dataclasses.replace(old, slots=slots, is_active=is_active)
    with generator(model) as gen:
        expected = round_of(gen)
        gen.replace_experts(plan, deadline_s=50)
        while is_running(gen):
            gen.step()
        is_same = all(t == u and torch.equal(x, y) for (t, x), (u, y) in zip(round_of(gen), expected, strict=True))
        for layer in model.model.layers.values():
            experts = getattr(layer, "block_sparse_moe", None) and layer.block_sparse_moe.experts
            if experts is not None:  # from now on the copies serve, and what they are copies of does not
                experts.copy_ranks[EXPERTS - SPARE :, 0] = 0
                experts.copy_slots[EXPERTS - SPARE :, 0] = torch.arange(EXPERTS // 2, EXPERTS // 2 + SPARE)
                experts.num_active[EXPERTS - SPARE :] = 1
        is_same &= all(t == u and torch.equal(x, y) for (t, x), (u, y) in zip(round_of(gen), expected, strict=True))
        return is_same, gen.stats()["expert_changes"]["moved"]


def test_copies_that_travel_one_way_in_small_messages_are_whole(wide_folder):
    assert run_ranks(2, one_way, wide_folder) == [(True, SPARE * LAYERS), (True, 0)]


def refused(folder) -> list[str]:
    model = load(folder, make_mesh(ep=2))
    plan, messages = start_plan(2), []
    lost = ExpertPlacement.contiguous(EXPERTS, 2, LAYERS, capacity=EXPERTS).after_loss(1)
    with generator(model) as gen:
        for given in (plan, start_plan(4), ExpertPlacement.contiguous(EXPERTS, 2, LAYERS), lost):
            with pytest.raises(ValueError) as caught:
                gen.replace_experts(given)
            messages.append(str(caught.value))
            if given is plan:
                use_placement(model, plan)
        mine = ExpertPlacement.balanced(
            np.random.default_rng(dist.get_rank()).random((LAYERS, EXPERTS)), previous=plan, active_slots=EXPERTS + 8
        )
        with pytest.raises(ValueError) as caught:
            gen.replace_experts(mine)
        messages.append(str(caught.value))
        for deadline_s in (0, -float(dist.get_rank())):  # alike, and not: every rank is told
            with pytest.raises(ValueError) as caught:
                gen.replace_experts(plan, deadline_s=deadline_s)
            messages.append(str(caught.value))
        return messages


def test_what_does_not_fit_is_refused_by_name(wide_folder):
    parts = ["call use_placement", "(4, 2, 896) as the model has, got (4, 4, 896)", "capacity of 480", "2 living workers",
             "the same placement on every rank", "want deadline_s > 0, got 0", "and the same deadline_s"]  # fmt: skip
    for messages in run_ranks(2, refused, wide_folder):
        assert all(part in message for part, message in zip(parts, messages, strict=True)), messages
