from itertools import pairwise

import pytest
import torch
from torch import nn
from train_demo import Muon, learning_rate_factor, orthogonalise, packed_windows, quantile_balance_


def step_with(optimiser_class, weight, grads, **options):
    param = nn.Parameter(weight.clone())
    optimiser = optimiser_class([param], **options)
    for grad in grads:
        param.grad = grad.clone()
        optimiser.step()
    return param.detach()


@pytest.mark.parametrize("shape", [(48, 48), (16, 64), (96, 24)])
def test_a_matrix_moves_as_in_torch(shape):
    torch.manual_seed(0)
    weight, grads = torch.randn(shape), [torch.randn(shape) for _ in range(3)]
    ours = step_with(Muon, weight, grads, lr=0.02)
    theirs = step_with(
        torch.optim.Muon, weight, grads, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    # torch iterates in bfloat16, 8 bits; its momentum is a running mean, a scale that orthogonalising removes.
    moved = (theirs - weight).norm()
    assert (ours - theirs).norm() < 0.02 * moved


@pytest.mark.parametrize("shape", [(2, 48, 48), (3, 20, 64), (2, 64, 20)])
def test_orthogonalise_keeps_the_singular_vectors_and_levels_the_values(shape):
    torch.manual_seed(1)
    matrices = torch.randn(shape, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    got = left.transpose(1, 2) @ orthogonalise(matrices) @ right.transpose(1, 2)
    # The map is x -> a x + b x^3 + c x^5, five times, on each singular value divided by the Frobenius norm.
    want = values / matrices.norm(dim=(1, 2))[:, None]
    for _ in range(5):
        want = 3.4445 * want - 4.7750 * want**3 + 2.0315 * want**5
    torch.testing.assert_close(got, torch.diag_embed(want), rtol=0, atol=1e-9)
    assert want[values > 0.1 * values.max()].min() > 0.65 and want.max() < 1.25


def test_a_stack_of_experts_moves_as_its_matrices_alone():
    torch.manual_seed(2)
    weight, grads = torch.randn(4, 32, 16), [torch.randn(4, 32, 16) for _ in range(2)]
    stacked = step_with(Muon, weight, grads, lr=0.1)
    alone = [step_with(Muon, weight[e], [grad[e] for grad in grads], lr=0.1) for e in range(4)]
    torch.testing.assert_close(stacked, torch.stack(alone), rtol=1e-5, atol=1e-6)


def test_heads_are_orthogonalised_alone():
    torch.manual_seed(3)
    weight, grad = torch.randn(4 * 8, 24), torch.randn(4 * 8, 24)
    grad[:8] *= 1000  # one loud head must not still the others
    param = nn.Parameter(weight.clone())
    param.grad = grad.clone()
    Muon([{"params": [param], "num_heads": 4}], lr=0.1).step()
    alone = [step_with(Muon, w, [g], lr=0.1) for w, g in zip(weight.split(8), grad.split(8))]
    torch.testing.assert_close(param.detach(), torch.cat(alone), rtol=1e-5, atol=1e-6)


def test_muon_refuses_what_it_cannot_orthogonalise():
    with pytest.raises(ValueError, match=r"got \(8,\)"):
        Muon([nn.Parameter(torch.zeros(8))], lr=0.1)
    with pytest.raises(ValueError, match=r"num_heads \(3\)"):
        Muon([{"params": [nn.Parameter(torch.zeros(8, 4))], "num_heads": 3}], lr=0.1)


def test_schedule():
    factors = [learning_rate_factor(step, 1000) for step in range(1000)]
    assert factors[0] == 0.1 and factors[9] == 1.0 and factors[10] == 1.0
    assert factors[505] == pytest.approx(0.5) and 0 < factors[-1] < 1e-5
    assert all(a >= b for a, b in pairwise(factors[9:]))


def test_quantile_balance_is_the_equation():
    torch.manual_seed(4)
    scores, bias, topk = torch.rand(41, 6), torch.randn(6) * 0.1, 2  # (41 - 1) * (1 - 2/6) is no integer
    want = []
    for expert in range(6):
        margins = sorted(
            float(row[expert]) - sorted((float(s + b) for s, b in zip(row, bias)), reverse=True)[topk] for row in scores
        )
        place = (len(margins) - 1) * (1 - topk / 6)
        low = int(place)
        want.append(-(margins[low] + (place - low) * (margins[low + 1] - margins[low])))
    quantile_balance_(bias, scores, topk)
    torch.testing.assert_close(bias, torch.tensor(want) - sum(want) / 6, rtol=0, atol=1e-6)
    assert abs(float(bias.mean())) < 1e-7


def test_quantile_balance_equalises_skewed_loads():
    torch.manual_seed(5)
    scores = torch.sigmoid(torch.randn(4096, 16) + torch.linspace(-3, 3, 16))
    bias, topk = torch.zeros(16), 4

    def loads():
        ids = (scores + bias).topk(topk, dim=1).indices
        return torch.bincount(ids.flatten(), minlength=16) * 16 / ids.numel()

    assert loads().max() > 2.5 and loads().min() < 0.1
    for _ in range(20):
        quantile_balance_(bias, scores, topk)
    assert loads().max() < 1.05 and loads().min() > 0.95


def test_windows_are_runs_of_the_text():
    ids = torch.arange(100, 200)
    batch, cu_seqlens = next(packed_windows(ids, 8, 5, torch.Generator().manual_seed(0)))
    assert batch.shape == (1, 40) and cu_seqlens.dtype == torch.int32
    assert cu_seqlens.tolist() == [0, 8, 16, 24, 32, 40]
    windows = batch.view(5, 8)
    assert torch.equal(windows, windows[:, :1] + torch.arange(8))
    assert len(set(windows[:, 0].tolist())) > 1
