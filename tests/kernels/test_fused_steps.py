"""The small steps of a decode step as one op each: RMSNorm, SiTU, KDA's gates, against their equations in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kimi_k3_kernels import gated_rms_norm, kda_gates, native_library, rms_norm, situ

EPS = 1e-5
OPS = torch.ops.kimi_k3
native = pytest.mark.skipif(native_library is None, reason="no compiled kernels here")
# bfloat16: one rounding of the result, half a unit in the last of 8 bits; the plain norm rounds before its weight too.
TOLERANCE = {torch.float32: {"atol": 2e-6, "rtol": 2e-6}, torch.bfloat16: {"atol": 1e-6, "rtol": 2**-8}}
TWICE = {torch.float32: TOLERANCE[torch.float32], torch.bfloat16: {"atol": 1e-6, "rtol": 2**-7}}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def norm_equation(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def situ_equation(gate: Tensor, up: Tensor, linear_beta: float | None) -> Tensor:
    bounded = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    return 4.0 * torch.tanh(gate / 4.0) / (1 + torch.exp(-gate)) * bounded


def gates_equation(qkv: Tensor, decay: Tensor, beta_logit: Tensor, A_log: Tensor, dt_bias: Tensor) -> list[Tensor]:
    heads = beta_logit.shape[1]
    q, k, _ = (part.unflatten(1, (heads, -1)) for part in qkv.chunk(3, dim=1))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    logit = (decay + dt_bias).unflatten(1, (heads, -1))
    rate = torch.exp(A_log[:heads])[:, None]
    return [q * q.shape[-1] ** -0.5, k, -5.0 / (1 + torch.exp(-rate * logit)), 1 / (1 + torch.exp(-beta_logit))]


def gate_inputs(tokens: int, heads: int = 3, dim: int = 20, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    width = heads * dim
    return [
        random(tokens, 3 * width, seed=1, dtype=dtype), random(tokens, width, seed=2, dtype=dtype),
        random(tokens, heads, seed=3, dtype=dtype), random(128, seed=4, scale=0.5), random(width, seed=5),
    ]  # fmt: skip


def poison() -> None:
    """Leave NaN in the memory that the next small allocations get, so that an element nobody wrote is seen."""
    held = [torch.full((size,), torch.nan) for size in (60, 180, 300, 1000, 4000) for _ in range(8)]
    del held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (5, 100), (3, 7), (0, 16), (2, 1536)])
def test_norms_equal_their_equations(instructions: str, dtype: torch.dtype, tokens: int, width: int):
    x, gate = random(tokens, width, dtype=dtype), random(tokens, width, seed=1, dtype=dtype)
    weight = random(width, seed=2, dtype=dtype)
    poison()
    got, want = rms_norm(x, weight, EPS), norm_equation(x.double(), weight.double())
    torch.testing.assert_close(got.double(), want, **TWICE[dtype])
    for gain in (weight, weight.float()):
        got = gated_rms_norm(x, gate, gain, EPS)
        assert got.dtype == dtype
        want = norm_equation(x.double(), gain.double()) * torch.sigmoid(gate.double())
        torch.testing.assert_close(got.double(), want, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("linear_beta", [25.0, None])
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (5, 100), (3, 7), (0, 16), (2, 4100)])
def test_situ_equals_its_equation(
    instructions: str, dtype: torch.dtype, linear_beta: float | None, tokens: int, width: int
):
    # One projection beside the other, as `project` returns them; values from the smallest to far beyond the bounds.
    both = random(tokens, 2 * width, dtype=dtype) * random(2 * width, seed=1, dtype=dtype).exp()
    gate, up = both.split(width, dim=1)
    poison()
    got, want = situ(gate, up, 4.0, linear_beta), situ_equation(gate.double(), up.double(), linear_beta)
    assert got.dtype == dtype and got.is_contiguous()
    # Beyond -88 the sigmoid is a denormal number in float64 and 0 in float32.
    torch.testing.assert_close(got.double(), want, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_gates_equal_their_equations(instructions: str, dtype: torch.dtype, tokens: int):
    inputs = gate_inputs(tokens, dtype=dtype)
    poison()
    got, want = kda_gates(*inputs, -5.0), gates_equation(*(x.double() for x in inputs))
    assert [x.dtype for x in got] == [dtype, dtype, torch.float32, torch.float32]
    for name, one, expected in zip(("q", "k", "log_decay", "beta"), got, want):
        tolerance = TOLERANCE[one.dtype] if name in "qk" else {"atol": 1e-6, "rtol": 1e-5}  # exp of up to 30 in float32
        torch.testing.assert_close(one.double(), expected, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def test_without_a_bound_the_gate_is_kimi_linears():
    inputs = gate_inputs(2)
    log_decay = kda_gates(*inputs, None)[2]
    logit = (inputs[1] + inputs[4]).unflatten(1, (3, -1)).double()
    want = -inputs[3][:3, None].double().exp() * torch.log1p(torch.exp(logit))
    torch.testing.assert_close(log_decay.double(), want, atol=1e-5, rtol=1e-5)


CASES: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]], tuple[object, ...]]] = {
    "rms_norm": (OPS.rms_norm, lambda: [random(5, 40), random(40, seed=1)], (EPS,)),
    "gated_rms_norm": (
        OPS.gated_rms_norm, lambda: [random(5, 2, 40), random(5, 2, 40, seed=1), random(40, seed=2)], (EPS,),
    ),
    "situ": (OPS.situ, lambda: [random(5, 40), random(5, 40, seed=1)], (4.0, 25.0)),
    "kda_gates": (OPS.kda_gates, lambda: gate_inputs(5, heads=7), (-5.0,)),
}  # fmt: skip
PER_TOKEN = {"rms_norm": 1, "gated_rms_norm": 2, "situ": 2, "kda_gates": 3}  # the first inputs, by op


def outputs(out: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)


@pytest.mark.parametrize("name", CASES)
def test_registration(name: str):
    op, make_inputs, rest = CASES[name]
    torch.library.opcheck(op.default, (*make_inputs(), *rest))


@pytest.mark.parametrize("name", CASES)
def test_a_row_does_not_depend_on_the_others(instructions: str, name: str):
    op, make_inputs, rest = CASES[name]
    inputs, per_token = make_inputs(), PER_TOKEN[name]
    whole = outputs(op(*inputs, *rest))
    for row in range(5):
        alone = outputs(op(*(x[row : row + 1] for x in inputs[:per_token]), *inputs[per_token:], *rest))
        assert all(torch.equal(one[0], all_rows[row]) for one, all_rows in zip(alone, whole))


@pytest.mark.parametrize("name", CASES)
def test_strides_change_nothing(name: str):
    op, make_inputs, rest = CASES[name]
    strided = [x.mT.contiguous().mT if x.ndim > 1 else x.repeat_interleave(2)[::2] for x in make_inputs()]
    want, got = outputs(op(*make_inputs(), *rest)), outputs(op(*strided, *rest))
    assert all(map(torch.equal, got, want)) and all(x.is_contiguous() for x in got)


@pytest.mark.parametrize("name", CASES)
def test_other_dtypes_take_the_reference(name: str):
    op, make_inputs, rest = CASES[name]
    inputs = [x.double() for x in make_inputs()]
    for got, want in zip(outputs(op(*inputs, *rest)), outputs(op.reference(*inputs, *rest))):
        assert got.dtype == torch.float64 and torch.equal(got, want)


@native
@pytest.mark.parametrize("name", CASES)
def test_sizes_that_disagree_are_refused(name: str):
    op, make_inputs, rest = CASES[name]
    for position, tensor in enumerate(make_inputs()):
        for dim in range(tensor.ndim):
            if (name, position, dim) in {("rms_norm", 0, 0), ("kda_gates", 3, 0)}:
                continue  # no other tensor repeats these sizes
            inputs = make_inputs()
            inputs[position] = tensor.narrow(dim, 0, tensor.shape[dim] - 1).clone()
            with pytest.raises(RuntimeError):
                op(*inputs, *rest)


def test_public_functions_name_the_wanted_and_the_given():
    x = random(2, 8)
    for run in (
        lambda: rms_norm(x, random(7), EPS), lambda: gated_rms_norm(x, random(2, 7), random(8), EPS),
        lambda: situ(x, random(2, 7), 4.0, None), lambda: kda_gates(*gate_inputs(2)[:4], random(7), -5.0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"(rms_norm|gated_rms_norm|situ|kda_gates): want .*; got "):
            run()
