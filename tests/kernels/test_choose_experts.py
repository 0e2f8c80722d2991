"""The router's choice as one op, against a loop over sorted choices and the plain PyTorch that it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kimi_k3_kernels import choose_experts, native_library
from kimi_k3_kernels.choose_experts.reference import choose_experts_reference

native = pytest.mark.skipif(native_library is None, reason="no compiled kernels here")


def random_scores(tokens: int, experts: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.sigmoid(torch.randn((tokens, experts), generator=generator))
    return scores, scores + torch.randn(experts, generator=generator)


@pytest.mark.parametrize(("tokens", "experts", "topk"), [(0, 8, 2), (1, 8, 8), (5, 128, 16), (40, 896, 16), (3, 7, 1)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_the_choice_is_that_of_a_sort(tokens: int, experts: int, topk: int, renormalize: bool):
    scores, choice = random_scores(tokens, experts)
    ids, weights = choose_experts(scores, choice, topk, renormalize, 2.5)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32 and ids.shape == weights.shape == (tokens, topk)
    for t in range(tokens):
        highest = sorted(range(experts), key=lambda e: -choice[t, e].item())[:topk]
        assert ids[t].tolist() == highest
        total = sum(scores[t, e].double() for e in highest) if renormalize else 1.0
        want = 2.5 * scores[t, ids[t]].double() / total
        torch.testing.assert_close(weights[t].double(), want, atol=0, rtol=1e-6)


def test_it_agrees_with_plain_pytorch():
    scores, choice = random_scores(50, 128)
    got, want = (f(scores, choice, 16, True, 1.5) for f in (choose_experts, choose_experts_reference))
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], atol=0, rtol=1e-6)  # torch adds up 16 scores in vectors


@native
def test_of_equal_choices_the_lower_id_is_taken_and_nan_is_the_highest():
    scores = torch.full((2, 40), 0.5)
    choice = torch.zeros(2, 40)
    choice[1, 30] = torch.nan
    choice[1, 5] = -1.0
    ids, weights = choose_experts(scores, choice, 4, True, 1.0)
    assert ids.tolist() == [[0, 1, 2, 3], [30, 0, 1, 2]]
    assert torch.equal(weights, torch.full((2, 4), 0.25))


@native
def test_a_row_does_not_depend_on_the_others():
    scores, choice = random_scores(600, 64)
    whole = choose_experts(scores, choice, 6, True, 2.0)
    for t in (0, 7, 599):
        alone = choose_experts(scores[t : t + 1], choice[t : t + 1], 6, True, 2.0)
        assert all(torch.equal(one[0], rows[t]) for one, rows in zip(alone, whole))


def test_wrong_inputs_are_refused():
    scores, choice = random_scores(2, 8)
    for arguments in ((scores, choice[:1], 2), (scores, choice.double(), 2), (scores, choice, 0), (scores, choice, 9)):
        with pytest.raises(ValueError, match=r"choose_experts: want .*topk in 1\.\.E; got .*topk"):
            choose_experts(*arguments, True, 1.0)


@native
def test_the_op_itself_refuses_what_it_cannot_read():
    scores, choice = random_scores(2, 8)
    for arguments in ((scores, choice[:1], 2), (scores, choice[:, :7], 2), (scores, choice, 9)):
        with pytest.raises(RuntimeError, match="choose_experts: want"):
            torch.ops.kimi_k3.choose_experts(*arguments, True, 1.0)
