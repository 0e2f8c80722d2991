"""The mix over depth against its equation in float64, at every number of sealed blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kimi_k3_kernels import attn_res_mix, attn_res_mix_norm, rms_norm
from kimi_k3_kernels.attn_res.op import attn_res_mix_op

EPS = 1e-5


def make_inputs(blocks: int = 3, tokens: int = 5, dim: int = 16, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(blocks)
    bank = torch.randn((4, tokens, dim), generator=generator, dtype=torch.float64) * 3
    running_sum = torch.randn((tokens, dim), generator=generator, dtype=torch.float64)
    weight = torch.randn(dim, generator=generator, dtype=torch.float64)
    bank[blocks:] = torch.nan  # what is not sealed is never read
    return running_sum.to(dtype), bank.to(dtype), torch.tensor(blocks), weight


def equation(running_sum: Tensor, bank: Tensor, num_blocks: Tensor, weight: Tensor) -> Tensor:
    sources = torch.stack([*bank[: int(num_blocks)], running_sum])
    scores = (sources * weight).sum(-1) * torch.rsqrt(sources.square().mean(-1) + EPS)
    return (torch.softmax(scores, 0)[..., None] * sources).sum(0)


@pytest.mark.parametrize("blocks", [0, 1, 2, 4])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_mix_equals_the_equation(blocks: int, tokens: int):
    inputs = make_inputs(blocks, tokens)
    torch.testing.assert_close(attn_res_mix(*inputs, EPS), equation(*inputs))


def test_bfloat16_inputs_are_scored_and_summed_in_float32():
    running_sum, bank, blocks, weight = make_inputs(3, 64, 256, torch.bfloat16)
    want = equation(running_sum.double(), bank.double(), blocks, weight)
    # The only rounding to bfloat16 is that of the result: half a unit in the last of 8 bits.
    torch.testing.assert_close(
        attn_res_mix(running_sum, bank, blocks, weight.float(), EPS).double(), want, atol=1e-4, rtol=2**-8
    )


def test_gradcheck_and_registration():
    running_sum, bank, blocks, weight = make_inputs(2)
    inputs = [x.nan_to_num(1.0).requires_grad_() for x in (running_sum, bank, weight)]

    def run(running_sum: Tensor, bank: Tensor, weight: Tensor) -> Tensor:
        return attn_res_mix(running_sum, bank, blocks, weight, EPS)

    assert torch.autograd.gradcheck(run, inputs)
    torch.library.opcheck(attn_res_mix_op, (inputs[0], inputs[1], blocks, inputs[2], EPS))


def test_the_sources_are_left_as_they_were():
    running_sum, bank, _, weight = make_inputs(4)
    copies = running_sum.clone(), bank.clone()
    attn_res_mix(running_sum, bank, torch.tensor(4), weight, EPS)
    assert torch.equal(running_sum, copies[0]) and torch.equal(bank, copies[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("blocks", "tokens", "dim"), [(0, 3, 16), (1, 1, 16), (3, 5, 100), (4, 2, 1536)])
def test_the_norm_after_the_mix_is_the_same_bits_as_apart(
    instructions: str, dtype: torch.dtype, weight_dtype: torch.dtype, blocks: int, tokens: int, dim: int
):
    running_sum, bank, num_blocks, weight = make_inputs(blocks, tokens, dim, dtype)
    generator = torch.Generator().manual_seed(dim)
    score_norm, score_proj = weight.to(weight_dtype), torch.randn((1, dim), generator=generator).to(weight_dtype)
    input_norm = torch.randn(dim, generator=generator).to(dtype)
    got = attn_res_mix_norm(running_sum, bank, num_blocks, score_norm, score_proj, EPS, input_norm, 2 * EPS)
    mixed = attn_res_mix(running_sum, bank, num_blocks, score_norm.float() * score_proj[0].float(), EPS)
    assert got.dtype == dtype and torch.equal(got, rms_norm(mixed, input_norm, 2 * EPS))
    # And, apart from these two ops, the equation in float64: a rounding of the mix, of the norm and of the result.
    want = equation(running_sum.double(), bank.double(), num_blocks, (score_norm.double() * score_proj[0].double()))
    want = input_norm.double() * want * torch.rsqrt(want.square().mean(-1, keepdim=True) + 2 * EPS)
    step = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(got.double(), want, atol=step, rtol=step)


def test_the_norm_after_the_mix_in_other_dtypes_is_the_reference():
    running_sum, bank, num_blocks, weight = make_inputs(3)
    inputs = (running_sum, bank, num_blocks, weight, weight[None], EPS)
    got = attn_res_mix_norm(*inputs, weight, EPS)
    mixed = attn_res_mix(running_sum, bank, num_blocks, weight * weight, EPS)
    assert got.dtype == torch.float64 and torch.equal(got, rms_norm(mixed, weight, EPS))
    # bfloat16 activations beside a float32 norm give float32, as its layer does.
    narrow = (running_sum.bfloat16(), bank.bfloat16(), num_blocks, weight.float(), weight[None].float(), EPS)
    got = attn_res_mix_norm(*narrow, weight.float(), EPS)
    want = rms_norm(attn_res_mix(*narrow[:3], (weight * weight).float(), EPS), weight.float(), EPS)
    assert got.dtype == torch.float32
    # The mix is rounded to bfloat16, from sums in another order.
    torch.testing.assert_close(got, want, atol=2**-6, rtol=2**-6)


def test_one_graph_serves_every_depth():
    compiled = torch.compile(attn_res_mix, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for blocks in (1, 2, 4):
            inputs = make_inputs(blocks)
            assert torch.equal(compiled(*inputs, EPS), attn_res_mix(*inputs, EPS))


def test_wrong_shapes_are_refused():
    running_sum, bank, blocks, weight = make_inputs(2)
    with pytest.raises(ValueError, match="attn_res_mix: want"):
        attn_res_mix(running_sum, bank[:, :2], blocks, weight, EPS)
    with pytest.raises(ValueError, match="one dtype"):
        attn_res_mix(running_sum, bank.float(), blocks, weight, EPS)
    with pytest.raises(ValueError, match=r"attn_res_mix_norm: want .*score_proj \[1, D\].*; got .*score_proj \(16,\)"):
        attn_res_mix_norm(running_sum, bank, blocks, weight, weight, EPS, weight, EPS)
