"""Each group of ranks runs its own requests and the experts are exchanged: what one process computes, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from ranks import check_expert_figures, run_ranks

from kimi_k3 import KimiK3ForCausalLM, KimiK3Generator, SamplingParams
from kimi_k3.parallel import make_mesh, use_placement
from kimi_k3.parallel.placement import ExpertPlacement
from kimi_k3.parallel.traces import read_trace

PROMPTS = [[(7 * seed + place * place) % 250 for place in range(3 + 17 * seed)] for seed in range(7)]
NEW, SMALL = 9, {"max_num_seqs": 2, "num_blocks": 6, "max_tokens_per_step": 64}


def load(folder, mesh=None) -> KimiK3ForCausalLM:
    return KimiK3ForCausalLM.from_pretrained(folder, mesh=mesh, progress=False, dtype=torch.float32)


def run(gen: KimiK3Generator, indices: list[int]) -> dict[int, tuple[list[int], torch.Tensor]]:
    rows: dict[int, list[torch.Tensor]] = {index: [] for index in indices}

    def keeping(index: int):
        return lambda tokens, logits: rows[index].append(logits.clone()) or logits

    params = [SamplingParams(max_new_tokens=NEW, ignore_eos=True, logits_processor=keeping(index)) for index in indices]
    results = gen.generate([PROMPTS[index] for index in indices], params)
    return {i: (result.token_ids, torch.stack(rows[i])) for i, result in zip(indices, results, strict=True)}


def groups(folder, tp: int) -> dict:
    size = dist.get_world_size()
    mesh = make_mesh(tp=tp, ep=size)
    model, group, num_groups = load(folder, mesh), mesh["dp"].get_local_rank(), size // tp
    layers = 4
    use_placement(model, ExpertPlacement.contiguous(896, size, layers, capacity=-(-896 // size) + 16))
    with KimiK3Generator(model, batch_invariant=True, data_parallel=True, **SMALL) as gen:
        gen.count_experts()
        first = run(gen, list(range(len(PROMPTS)))[group::num_groups])
        counts = gen.expert_counts()
        ran = torch.tensor([gen.stats()["prefill_tokens"] + gen.stats()["decode_tokens"]])
        dist.all_reduce(ran, group=mesh["dp"].get_group())
        plan = ExpertPlacement.balanced(counts, previous=model.expert_placement, active_slots=896 + 8 * size)
        gen.replace_experts(plan)
        only_last = run(gen, [5, 2] if group == num_groups - 1 else [])  # the others have nothing at all
        while gen.stats()["expert_changes"]["is_running"]:
            gen.step()
        moved = gen.stats()["expert_changes"]["completed"]
        again = run(gen, list(range(len(PROMPTS)))[group::num_groups])
        told = check_expert_figures(gen, gen.expert_counts())  # some experts have copies on several ranks
        assert told == ([4 * 896] * size if tp == 1 else told[:2] * num_groups) and sum(told) == 4 * 896 * num_groups
        with pytest.raises(ValueError, match="all ranks step equally often"):
            next(gen.stream(PROMPTS[0]))
        return {"first": first, "only last": only_last, "again": again, "counts": counts, "ran": int(ran), "moved": moved,
                "steps": gen.num_steps}  # fmt: skip


@pytest.fixture(scope="module")
def plain(wide_folder):
    with KimiK3Generator(load(wide_folder), batch_invariant=True, max_num_seqs=4, num_blocks=30) as gen:
        return run(gen, list(range(len(PROMPTS))))


@pytest.mark.parametrize("size", [2, 3])
def test_groups_with_requests_of_their_own(size, plain, wide_folder):
    results = run_ranks(size, groups, wide_folder, 1, timeout=200)
    for part in ("first", "only last", "again"):
        seen = {index: value for result in results for index, value in result[part].items()}
        assert sorted(seen) == ([2, 5] if part == "only last" else list(range(len(PROMPTS))))
        for index, (tokens, logits) in seen.items():
            assert tokens == plain[index][0] and torch.equal(logits, plain[index][1]), (part, index)
    for result in results:
        assert result["moved"] == 1 and result["steps"] == results[0]["steps"]
        assert torch.equal(result["counts"], results[0]["counts"])
        assert result["counts"].sum(1).tolist() == [result["ran"] * 16] * 4
    assert results[0]["ran"] >= sum(len(prompt) + NEW - 1 for prompt in PROMPTS)


def test_groups_of_two_tp_ranks(plain, wide_folder):
    results = run_ranks(4, groups, wide_folder, 2, timeout=200)
    for part in ("first", "again"):
        for index in range(len(PROMPTS)):
            mine = [result[part][index] for result in results if index in result[part]]
            assert len(mine) == 2  # the tp ranks of one group
            assert mine[0][0] == mine[1][0] and torch.equal(mine[0][1], mine[1][1])
            torch.testing.assert_close(mine[0][1][0], plain[index][1][0], atol=1.2e-4, rtol=0)
    for index, value in results[0]["first"].items():
        assert torch.equal(value[1], results[0]["again"][index][1])


def test_a_mesh_without_ep_is_refused(wide_folder):
    with pytest.raises(ValueError, match="data_parallel wants a model on make_mesh"):
        KimiK3Generator(load(wide_folder), data_parallel=True)


def traced(folder, where: str) -> None:
    size = dist.get_world_size()
    mesh = make_mesh(tp=2, ep=size)
    model, group = load(folder, mesh), mesh["dp"].get_local_rank()
    with KimiK3Generator(model, data_parallel=True, **SMALL) as gen:
        gen.record_trace(f"{where}/own.jsonl")
        gen.generate([PROMPTS[group]], SamplingParams(max_new_tokens=3, ignore_eos=True))
    with KimiK3Generator(model, **SMALL) as gen:
        gen.record_trace(f"{where}/same.jsonl")
        gen.generate([PROMPTS[2]], SamplingParams(max_new_tokens=3, ignore_eos=True))


def test_each_group_writes_a_trace_of_its_own_once(wide_folder, tmp_path):
    run_ranks(4, traced, wide_folder, str(tmp_path))
    tokens = {path.name: read_trace(path, 896).num_tokens for path in tmp_path.iterdir()}
    wanted = [len(prompt) + 2 for prompt in PROMPTS]
    assert tokens == {"own.dp0.jsonl": wanted[0], "own.dp1.jsonl": wanted[1], "same.jsonl": wanted[2]}
