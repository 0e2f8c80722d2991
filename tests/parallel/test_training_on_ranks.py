"""Training steps on several ranks equal those of one: loss, gradients, optimiser state; stopped, saved and resumed."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import kimi_k3
from kimi_k3 import KimiK3ForCausalLM
from kimi_k3.parallel import make_mesh, parallelize, shard_for_training, share_of_loss
from kimi_k3.parallel.mesh import axis

DEMO = Path(kimi_k3.__file__).parent / "demo"
LAYERS = 5  # dense, MoE, KDA and MLA, and a second depth block


def fresh() -> KimiK3ForCausalLM:
    torch.manual_seed(0)
    config = KimiK3ForCausalLM.from_pretrained(DEMO, progress=False).config
    text = config.text_config
    text.num_hidden_layers = LAYERS
    text.linear_attn_config = {
        **text.linear_attn_config, "full_attn_layers": [4, 5], "kda_layers": [1, 2, 3],
    }  # fmt: skip
    return KimiK3ForCausalLM(config)


def batch() -> torch.Tensor:
    return torch.randint(0, 1000, (4, 24), generator=torch.Generator().manual_seed(1))


def make_optimiser(model) -> torch.optim.Optimizer:
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    others = [p for name, p in model.named_parameters() if ".experts." not in name and p.requires_grad]
    return torch.optim.AdamW([{"params": others}, {"params": experts}], lr=1e-3)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def step(model, optimiser, mesh) -> torch.Tensor:
    ids = batch()
    if mesh is not None:
        dp = axis(mesh, "dp")
        # Unequal shares: three of four rows on the first group.
        ids = ids if dp.size() == 1 else ids[:3] if dp.get_local_rank() == 0 else ids[3:]
    optimiser.zero_grad()
    loss = model(ids, labels=ids).loss
    if mesh is not None:
        loss = share_of_loss(loss, torch.tensor(ids.shape[0] * (ids.shape[1] - 1)), mesh)
    loss.backward()
    loss = loss.detach()
    if mesh is not None and dp.size() > 1:
        dist.all_reduce(loss, group=dp.get_group())
    return loss


def on_mesh(kind: str) -> tuple:
    size = dist.get_world_size()
    mesh = make_mesh(**{"fsdp": {}, "tp": {"tp": size}, "ep": {"ep": size}, "all": {"tp": 2, "ep": size}}[kind])
    model = fresh()
    if kind != "fsdp":
        parallelize(model, mesh)
    if kind != "tp":
        shard_for_training(model, mesh)
    return model, mesh


def train(kind: str | None, folder: str = "") -> dict:
    model, mesh = (fresh(), None) if kind is None else on_mesh(kind)
    optimiser = make_optimiser(model)
    losses = [step(model, optimiser, mesh)]
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    optimiser.step()
    states = {
        name: {key: whole(optimiser.state[p][key]) for key in ("exp_avg", "exp_avg_sq")}
        for name, p in model.named_parameters() if p in optimiser.state
    }  # fmt: skip
    if kind is not None:
        weights, optimiser_state = get_state_dict(model, optimiser)
        dcp.save({"model": weights, "optimiser": optimiser_state}, checkpoint_id=folder)
    losses.append(step(model, optimiser, mesh))
    optimiser.step()
    after = {name: whole(p) for name, p in model.named_parameters()}
    if kind is not None:  # stopped after the first step, and resumed in new objects
        resumed, mesh = on_mesh(kind)
        with torch.no_grad():
            for parameter in resumed.parameters():
                parameter.zero_()
        optimiser = make_optimiser(resumed)
        weights, optimiser_state = get_state_dict(resumed, optimiser)
        dcp.load({"model": weights, "optimiser": optimiser_state}, checkpoint_id=folder)
        set_state_dict(resumed, optimiser, model_state_dict=weights, optim_state_dict=optimiser_state)
        losses.append(step(resumed, optimiser, mesh))
        optimiser.step()
        assert torch.equal(losses[1], losses[2])
        for name, parameter in resumed.named_parameters():
            assert torch.equal(whole(parameter), after[name]), name
    return {"losses": losses[:2], "grads": grads, "states": states}


@pytest.fixture(scope="module")
def one() -> dict:
    return train(None)


def check(one, results) -> None:
    for result in results:
        torch.testing.assert_close(result["losses"], one["losses"], rtol=1e-5, atol=0)
        assert result["grads"].keys() == one["grads"].keys()
        assert result["states"].keys() == one["states"].keys() and len(one["states"]) > 80
        assert any(name.endswith("gate.weight") for name in result["grads"])
        for name, grad in one["grads"].items():
            error = (result["grads"][name] - grad).norm()
            # Seen: below 1e-5 of the norm. Gradients that are zero but for rounding have a norm of their own.
            assert error < 1e-4 * grad.norm() + 1e-8, (name, float(error), float(grad.norm()))
            for key, state in one["states"][name].items():
                assert (result["states"][name][key] - state).norm() < 2e-4 * state.norm() + 1e-8, (name, key)


@pytest.mark.parametrize("kind", ["fsdp", "tp", "ep"])
def test_two_ranks_train_as_one(one, kind, tmp_path):
    check(one, run_ranks(2, train, kind, str(tmp_path)))


@pytest.mark.slow
def test_four_ranks_with_everything_train_as_one(one, tmp_path):
    check(one, run_ranks(4, train, "all", str(tmp_path)))
