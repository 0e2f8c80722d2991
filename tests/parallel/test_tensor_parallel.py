"""Tensor parallelism on real gloo processes, against the model in one process: the demo model in float32."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import kimi_k3
from kimi_k3 import KimiK3Config, KimiK3ForCausalLM
from kimi_k3.parallel import make_mesh, parallelize
from kimi_k3.parallel.mesh import axis
from kimi_k3.parallel.tensor_parallel import check_sizes, gather_logits, rule_of, sharded_topk

DEMO = Path(kimi_k3.__file__).parent / "demo"
NEW_TOKENS = 8
# Sums over ranks come in another order: 1e-5 of logits of size 10, seen 1.4e-5; a wrong placement is off by more than 1.
MAX_ERROR, MEAN_ERROR = 1.2e-4, 1e-5


def load(**options) -> KimiK3ForCausalLM:
    return KimiK3ForCausalLM.from_pretrained(DEMO, dtype=torch.float32, progress=False, **options)


def prompts() -> torch.Tensor:
    return torch.randint(0, 1000, (2, 37), generator=torch.Generator().manual_seed(0))


def one_process(experts: str) -> dict:
    torch.manual_seed(0)
    model, ids = load(experts=experts), prompts()
    with torch.no_grad():
        logits = model(ids).logits
    tokens = model.generate(ids, max_new_tokens=NEW_TOKENS, eos_token_id=[])
    loss = model(ids, labels=ids).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits, "tokens": tokens, "loss": loss.detach(), "grads": grads}


def on_ranks(experts: str) -> dict:
    mesh, ids = make_mesh(tp=dist.get_world_size()), prompts()
    model = load(experts=experts, mesh=mesh)
    with torch.no_grad():
        logits = model(ids).logits
    tokens = model.generate(ids, max_new_tokens=NEW_TOKENS, eos_token_id=[])
    out = model(ids, labels=ids)
    out.loss.backward()
    named = dict(model.named_parameters())
    grads = {name: p.grad.full_tensor() for name, p in named.items() if p.grad is not None}
    placements = {name: type(p.grad) is DTensor and p.grad.placements == p.placements for name, p in named.items()}
    parallel_head = load(experts=experts, mesh=mesh)
    parallel_head.lm_head._forward_hooks.clear()  # as gather_logits=False leaves it
    with torch.no_grad():
        local = parallel_head(ids).logits[:, -1]
    tp = axis(mesh, "tp")
    return {
        "logits": logits, "tokens": tokens, "loss": out.loss.detach(), "grads": grads,
        "placed": {name: (type(p) is DTensor, p.placements) for name, p in named.items()},
        "grads_placed": {name for name, right in placements.items() if not right and named[name].requires_grad},
        "state_heads": {pools[0].shape[1] for pools in model.make_cache(1).pools.values() if pools[0].ndim == 4},
        "gathered": gather_logits(local, 1280, tp), "topk": sharded_topk(local, 5, 1280, tp), "local": local.shape[1],
    }  # fmt: skip


@pytest.fixture(scope="module", params=["mxfp4", "dequantized"])
def experts(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def one(experts):
    return one_process(experts)


@pytest.fixture(scope="module")
def two(experts):
    return run_ranks(2, on_ranks, experts)


def check_equal(one, ranks):
    for result in ranks:
        error = (result["logits"] - one["logits"]).abs()
        assert error.max() < MAX_ERROR and error.mean() < MEAN_ERROR
        assert torch.equal(result["logits"], ranks[0]["logits"]), "ranks must agree bit for bit, or they sample apart"
        assert torch.equal(result["tokens"], one["tokens"])
        torch.testing.assert_close(result["loss"], one["loss"], rtol=1e-6, atol=0)
        assert result["grads"].keys() == one["grads"].keys()
        for name, grad in one["grads"].items():
            error = (result["grads"][name] - grad).norm()
            # Seen: 2.2e-5 of the norm. The first layer's mix has one source, so its gradient is zero.
            assert error <= 1e-4 * grad.norm(), name


def test_two_ranks_equal_one(one, two):
    check_equal(one, two)


def test_four_ranks_equal_one(one, experts):
    check_equal(one, run_ranks(4, on_ranks, experts))


def test_every_parameter_is_placed_by_the_table(two):
    for name, (is_dtensor, placements) in two[0]["placed"].items():
        assert is_dtensor and placements == (rule_of(name).placement,), name
    assert not two[0]["grads_placed"]
    by_name = {name: placements[0] for name, (_, placements) in two[0]["placed"].items()}
    assert by_name["model.layers.0.self_attn.q_proj.weight"] == Shard(0)
    assert by_name["model.layers.0.self_attn.o_proj.weight"] == Shard(1)
    assert by_name["model.layers.0.self_attn.A_log"] == Replicate()
    assert by_name["model.layers.3.self_attn.kv_b_proj.weight"] == Shard(0)
    assert by_name["model.layers.3.self_attn.kv_a_proj_with_mqa.weight"] == Replicate()
    assert by_name["model.layers.1.block_sparse_moe.routed_expert_down_proj.weight"] == Replicate()
    assert by_name["model.embed_tokens.weight"] == by_name["lm_head.weight"] == Shard(0)


def test_a_rank_caches_its_own_heads(two):
    assert [result["state_heads"] for result in two] == [{2}, {2}]


def test_topk_of_the_parts_is_topk_of_the_whole(two):
    whole = two[0]["gathered"]
    assert two[0]["local"] == 640 and torch.equal(whole, two[0]["logits"][:, -1])
    values, ids = whole.topk(5)
    for result in two:
        assert torch.equal(result["topk"][0], values) and torch.equal(result["topk"][1], ids)


def topk_of_ten_on_three() -> tuple:
    tp = axis(make_mesh(tp=3), "tp")
    logits = torch.tensor([[3.0, 9, 9, 1, 9, 2, 7, 0, 5, 4]])
    rank = dist.get_rank()
    part = logits[:, rank * 4 : rank * 4 + 4]  # 4, 4 and 2 ids
    return sharded_topk(part, 7, 10, tp), gather_logits(part, 10, tp)


def test_vocabulary_that_does_not_divide():
    for (values, ids), whole in run_ranks(3, topk_of_ten_on_three):
        assert values.tolist() == [[9, 9, 9, 7, 5, 4, 3]] and ids.tolist() == [[1, 2, 4, 6, 8, 9, 0]]
        assert whole.tolist() == [[3, 9, 9, 1, 9, 2, 7, 0, 5, 4]]


@pytest.fixture
def fake_ranks():
    """A process group of that many ranks of which only this one exists: for shapes and refusals."""

    def start(size: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("size", "ep", "words"),
    [(3, None, "4 KDA heads, got 3"), (8, None, "4 KDA heads, got 8"), (4, None, None), (2, 2, None)],
)
def test_sizes_that_cannot_be_cut_are_refused_by_name(fake_ranks, size, ep, words):
    fake_ranks(size)
    text, mesh = KimiK3Config.from_pretrained(DEMO).text_config, make_mesh(tp=size, ep=ep)
    if words is None:
        check_sizes(text, mesh)
    else:
        with pytest.raises(ValueError, match=words):
            check_sizes(text, mesh)


def test_expert_width_is_cut_on_whole_groups_or_refused(fake_ranks):
    fake_ranks(4)
    text = copy.deepcopy(KimiK3Config.from_pretrained(DEMO).text_config)
    text.moe_intermediate_size = 192  # 6 groups of 32 on 4 ranks
    with pytest.raises(ValueError, match="moe_intermediate_size 192 cut on whole groups of 32, which 4 ranks"):
        check_sizes(text, make_mesh(tp=4))
    check_sizes(text, make_mesh(tp=4, ep=4))
    check_sizes(text, make_mesh(tp=2))


def test_a_mesh_that_does_not_fit_the_ranks_is_refused(fake_ranks):
    with pytest.raises(RuntimeError, match="no process group"):
        make_mesh()
    fake_ranks(4)
    with pytest.raises(ValueError, match="tp: want a divisor of the 4 ranks, got 3"):
        make_mesh(tp=3)
    with pytest.raises(ValueError, match="ep: want None or the 4 ranks"):
        make_mesh(ep=2)
    with pytest.raises(ValueError, match="not on a mesh yet"):
        model = parallelize(load(), make_mesh(tp=4))
        parallelize(model, make_mesh(tp=4))


def graph_counts(parallel: bool) -> int:
    torch._dynamo.reset()
    mesh = make_mesh(tp=dist.get_world_size())
    model = load(mesh=mesh) if parallel else load()
    model.compile_blocks(None)
    for layer in model.model.layers.values():
        layer.compile(backend="aot_eager", fullgraph=True)
    from torch._dynamo.utils import counters

    counters.clear()
    eager = load(mesh=mesh) if parallel else load()
    ids = prompts()
    with torch.no_grad():
        close = torch.allclose(model(ids).logits, eager(ids).logits, atol=1e-4)
    assert close
    for length in (5, 9):
        model.generate(ids[:, :length], max_new_tokens=3, eos_token_id=[])
        model.generate(ids[:1, :length], max_new_tokens=3, eos_token_id=[])
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_compiled_layers_have_the_graphs_of_one_rank():
    single = run_ranks(1, graph_counts, False)[0]
    assert run_ranks(2, graph_counts, True) == [single, single]
