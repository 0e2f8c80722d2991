"""Expert parallelism on real gloo processes: 896 experts at toy widths, bit for bit what one process computes."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import kimi_k3
from kimi_k3 import KimiK3Config, KimiK3ForCausalLM
from kimi_k3.layers.moe import Routing
from kimi_k3.parallel import make_mesh, parallelize, use_placement
from kimi_k3.parallel.collectives import CollectiveError
from kimi_k3.parallel.expert_parallel import (
    GROUP,
    ROWS_RECEIVED,
    InStep,
    contiguous_tables,
    count_experts,
    expert_counts,
    expert_layers,
    experts_over_ranks_op,
    idle_step,
    place_experts,
    tables_from_slots,
    weight_names,
)
from kimi_k3.parallel.mesh import axis
from kimi_k3.parallel.placement import ExpertPlacement

DEMO = Path(kimi_k3.__file__).parent / "demo"
LENGTHS = (5, 9, 17, 3, 30)
EXPERTS, TOP_K = 896, 16


def load(folder, mesh=None, **options) -> KimiK3ForCausalLM:
    return KimiK3ForCausalLM.from_pretrained(folder, mesh=mesh, progress=False, **{"dtype": torch.float32, **options})


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (1, length), generator=generator) for length in LENGTHS]


def logits_of_mine(model, mesh, order) -> dict[int, torch.Tensor]:
    """Logits of the sequences that this rank's dp group runs, one at a time; ranks with fewer idle."""
    dp, out = axis(mesh, "dp"), {}
    with torch.no_grad(), InStep(model):
        for index in order[dp.get_local_rank() :: dp.size()]:
            out[index] = model(sequences()[index]).logits
    return out


def random_placement(ranks: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Experts in shuffled slots, seven to spare on each rank, and second copies in some of those."""
    generator = torch.Generator().manual_seed(seed)
    capacity = -(-EXPERTS // ranks) + 7
    slots = torch.full((ranks * capacity,), -1)
    places = torch.randperm(ranks * capacity, generator=generator)
    slots[places[:EXPERTS]] = torch.arange(EXPERTS)
    logical_to_physical = torch.full((EXPERTS, 2), -1)
    logical_to_physical[:, 0] = places[:EXPERTS]
    for slot in places[EXPERTS : EXPERTS + 5 * ranks].tolist():
        expert = int(torch.randint(EXPERTS, (1,), generator=generator))
        if logical_to_physical[expert, 1] < 0:
            logical_to_physical[expert, 1], slots[slot] = slot, expert
    return logical_to_physical, (logical_to_physical >= 0).sum(1), slots.view(ranks, capacity), capacity


def serve(folder, tp: int) -> dict:
    size = dist.get_world_size()
    mesh = make_mesh(tp=tp, ep=size)
    model = load(folder, mesh)
    model.set_batch_invariant(True)
    experts = {p.placements for name, p in model.named_parameters() if ".experts." in name}
    count_experts(model)
    first = logits_of_mine(model, mesh, list(range(len(LENGTHS))))
    counts = expert_counts(model, axis(mesh, "dp").get_group())
    permuted = logits_of_mine(model, mesh, [3, 0, 4, 2, 1])
    for layer_idx, layer in enumerate(expert_layers(model)):
        tables, num_active, slots, capacity = random_placement(size, layer_idx)
        place_experts(layer, tables_from_slots(tables, num_active, capacity), slots)
    placed = logits_of_mine(model, mesh, list(range(len(LENGTHS))))
    return {"first": first, "permuted": permuted, "placed": placed, "counts": counts, "placements": experts}


@pytest.fixture(scope="module")
def plain(wide_folder) -> dict:
    model, routed = load(wide_folder), []
    model.set_batch_invariant(True)
    hooks = [layer.gate.register_forward_hook(lambda _, x, out: routed.append(out)) for layer in expert_layers(model)]
    with torch.no_grad():
        logits = [model(ids).logits for ids in sequences()]
    for hook in hooks:
        hook.remove()
    layers = len(expert_layers(model))
    ids = [torch.cat([out.topk_ids for out in routed[i::layers]]).flatten() for i in range(layers)]
    return {"logits": logits, "counts": torch.stack([torch.bincount(one, minlength=EXPERTS) for one in ids])}


def check_bits(plain, results):
    for kind in ("first", "permuted", "placed"):
        seen = set()
        for result in results:
            for index, logits in result[kind].items():
                assert torch.equal(logits, plain["logits"][index]), (kind, index)
                seen.add(index)
        assert seen == set(range(len(LENGTHS)))
    for result in results:
        assert torch.equal(result["counts"], plain["counts"])
        assert result["counts"].sum(1).tolist() == [sum(LENGTHS) * TOP_K] * len(result["counts"])
        assert {placement[0].dim for placement in result["placements"]} == {0}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bits_do_not_depend_on_ranks_order_or_placement(plain, wide_folder, ranks):
    check_bits(plain, run_ranks(ranks, serve, wide_folder, 1))


@pytest.mark.slow
def test_eight_ranks(plain, wide_folder):
    check_bits(plain, run_ranks(8, serve, wide_folder, 1))


def tp_by_ep(folder, ep: int) -> dict:
    mesh = make_mesh(tp=2, ep=ep)
    return logits_of_mine(load(folder, mesh), mesh, list(range(len(LENGTHS))))


def tp_alone(folder) -> list[torch.Tensor]:
    model = load(folder, make_mesh(tp=2, ep=2))
    with torch.no_grad():
        return [model(ids).logits for ids in sequences()]


def test_tp_by_ep_on_four_ranks(plain, wide_folder):
    """ep spans tp: with tp = 2 the experts lie on 4 ranks or on 2, and that changes no bit; tp itself rounds anew."""
    two = run_ranks(2, tp_alone, wide_folder)
    for result in run_ranks(4, tp_by_ep, wide_folder, 4):
        for index, logits in result.items():
            assert torch.equal(logits, two[0][index])
            torch.testing.assert_close(logits, plain["logits"][index], atol=1.2e-4, rtol=0)


# Training.


def moe_gradients(mesh_sizes: tuple[int, int] | None, shares: list[int]) -> dict:
    """Loss and gradients of one MoE layer of the demo's sizes; rank r has `shares[r]` of the tokens."""
    torch.manual_seed(0)
    config = KimiK3Config.from_pretrained(DEMO)
    model = KimiK3ForCausalLM(config, layers=range(1, 2))
    total = sum(shares)
    x, upstream = torch.randn(total, 192), torch.randn(total, 192)
    if mesh_sizes is None:
        mine = slice(0, total)
    else:
        tp, ep = mesh_sizes
        mesh = make_mesh(tp=tp, ep=ep)
        parallelize(model, mesh)
        rank = axis(mesh, "dp").get_local_rank()
        mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    (layer,) = expert_layers(model)
    for _ in range(3):  # the same every time: nothing is left behind, nobody hangs
        model.zero_grad()
        inputs = x[mine].clone().requires_grad_()
        out, _ = layer(inputs)
        (out * upstream[mine]).sum().backward()
    grads = {}
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            grads[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    if mesh_sizes is not None:  # what data parallelism does with the dense ones
        for name, grad in grads.items():
            if not name.startswith("experts."):
                dist.all_reduce(grad, group=axis(mesh, "dp").get_group())
    return {"out": out.detach(), "grad": inputs.grad, "grads": grads, "mine": mine}


@pytest.mark.parametrize(
    ("ranks", "tp", "shares"),
    [(2, 1, [20, 11]), (2, 1, [31, 0]), (3, 1, [10, 0, 21]), (2, 2, [31]), (4, 2, [1, 30])],
    ids=["two", "one without tokens", "three", "ep spans tp", "tp by ep"],
)
def test_gradients_of_all_ranks_are_those_of_one(ranks, tp, shares):
    one = moe_gradients(None, shares)
    assert {"gate.weight", "experts.w1", "experts.w2", "experts.w3", "routed_expert_norm.weight"} <= one["grads"].keys()
    assert (one["grads"]["experts.w1"].flatten(1).norm(dim=1) > 0).any()
    for result in run_ranks(ranks, moe_gradients, (tp, ranks), shares):
        mine = result["mine"]
        torch.testing.assert_close(result["out"], one["out"][mine], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(result["grad"], one["grad"][mine], atol=1e-5, rtol=1e-4)
        assert result["grads"].keys() == one["grads"].keys()
        for name, grad in one["grads"].items():
            torch.testing.assert_close(result["grads"][name], grad, atol=2e-5, rtol=1e-4, msg=name)


def all_to_one() -> dict:
    """Every token's experts lie on rank 0; rank 1 gets none and holds only idle experts."""
    torch.manual_seed(0)
    model = KimiK3ForCausalLM(KimiK3Config.from_pretrained(DEMO), layers=range(1, 2))
    with torch.no_grad():
        (layer,) = expert_layers(model)
        layer.gate.e_score_correction_bias[:2] = 10  # of 16 experts, top-2
    parallelize(model, make_mesh(ep=2))
    (layer,) = expert_layers(model)
    for _ in range(20):
        layer.zero_grad()
        layer(torch.randn(6, 192, requires_grad=True))[0].square().sum().backward()
    return {name: layer.experts._parameters[name].grad.to_local() for name in ("w1", "w2", "w3")}


def test_idle_experts_get_zero_gradients_and_idle_ranks_do_not_hang():
    first, second = run_ranks(2, all_to_one)
    assert all((grad[:2] != 0).any() and not grad[2:].any() for grad in first.values())
    assert all(grad.shape[0] == 8 and not grad.any() for grad in second.values())


# The op.


def place(model, seed: int) -> None:
    size = dist.get_world_size()
    for layer_idx, layer in enumerate(expert_layers(model)):
        tables, num_active, slots, capacity = random_placement(size, seed * 10 + layer_idx)
        place_experts(layer, tables_from_slots(tables, num_active, capacity), slots)


def recompiles(folder, is_parallel: bool) -> list[int]:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    mesh = make_mesh(ep=dist.get_world_size()) if is_parallel else None
    model, eager = load(folder, mesh), load(folder, mesh)
    if is_parallel:
        place(model, 1)
    for layer in model.model.layers.values():
        layer.compile(backend="aot_eager", fullgraph=True)
    model.model.has_compiled_layers = True
    ids, seen, logits = sequences()[1], [], []
    with torch.no_grad():
        for seed in (None, 2, 3) if is_parallel else (None,):
            if seed is not None:
                place(model, seed)
            logits.append(model(ids).logits)
            assert torch.equal(logits[0], logits[-1])  # a placement changes no bit; compiling may round anew
            torch.testing.assert_close(logits[-1], eager(ids).logits, atol=1.2e-4, rtol=0)
            seen.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]
    return seen


@pytest.mark.slow
def test_a_new_placement_compiles_nothing(wide_folder):
    ((graphs,),) = run_ranks(1, recompiles, wide_folder, False, timeout=200)
    assert run_ranks(2, recompiles, wide_folder, True, timeout=200) == [[graphs] * 3] * 2


def absent_rank(folder) -> str:
    model = load(folder, make_mesh(ep=2))
    if dist.get_rank() == 1:
        time.sleep(4)  # does not take part
        return ""
    with pytest.raises(CollectiveError) as caught:
        idle_step(model)
    return str(caught.value)


def test_a_hang_ends_in_an_error_that_names_rank_and_collective(wide_folder):
    message = run_ranks(2, absent_rank, wide_folder, timeout=2)[0]
    assert message.startswith(
        "rank 0: exchange of expert counts (all_to_all_single) among ranks [0, 1] failed after 2."
    )


def received_for_one_token(folder) -> int:
    """Every rank has one token; every expert has a copy on each rank."""
    size = dist.get_world_size()
    model = load(folder, make_mesh(ep=size))
    layers = expert_layers(model)
    plan = ExpertPlacement.balanced(np.ones((len(layers), EXPERTS)), size, active_slots=size * EXPERTS)
    use_placement(model, plan)
    experts = layers[0].experts
    ids = (experts.copy_ranks[:, 0] == 0).nonzero().flatten()[:TOP_K][None]
    before = ROWS_RECEIVED[GROUP]
    with torch.no_grad():
        latent = torch.ones(1, model.config.text_config.routed_expert_hidden_size)
        experts(latent, Routing(ids, torch.full(ids.shape, 1 / TOP_K), torch.zeros(1, EXPERTS)))
    return ROWS_RECEIVED[GROUP] - before


def test_copies_take_turns_among_ranks_that_have_one_token_each(wide_folder):
    assert run_ranks(3, received_for_one_token, wide_folder) == [TOP_K] * 3


def test_tables():
    tables = contiguous_tables(896, 8, torch.device("cpu"))
    assert (int(tables.copy_ranks[347]), int(tables.copy_slots[347])) == (3, 347 - 3 * 112)
    uneven = contiguous_tables(7, 3, torch.device("cpu"))
    assert uneven.copy_ranks.flatten().tolist() == [0, 0, 0, 1, 1, 1, 2]
    physical, active = torch.tensor([[5, 0], [2, -1]]), torch.tensor([2, 1])
    assert tables_from_slots(physical, active, 2).copy_ranks.tolist() == [[2, 0], [1, -1]]
    assert tables_from_slots(physical, active, 2, [0, 1, 1]).copy_ranks.tolist() == [[1, 0], [1, -1]]
    with pytest.raises(ValueError, match="expert 1 lies on a lost worker"):
        tables_from_slots(physical, active, 2, [0, -1, 1])


def check_registration(folder) -> None:
    experts = expert_layers(load(folder, make_mesh(ep=dist.get_world_size())))[0].experts
    weights = [getattr(experts, name).data for name in weight_names(is_packed=True)]
    ids = torch.rand(5, EXPERTS).topk(TOP_K).indices
    tables = (experts.copy_ranks, experts.copy_slots, experts.num_active)
    inputs = (torch.randn(5, 32), ids, torch.rand(5, TOP_K), weights, *tables, 4.0, 25.0, GROUP)
    torch.library.opcheck(experts_over_ranks_op, inputs)


def test_the_op_is_registered_right(wide_folder):
    run_ranks(2, check_registration, wide_folder)
