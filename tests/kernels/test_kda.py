"""KDA: the chunk form, the step form and the export against the recurrence, and against fla-core's own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kimi_k3_kernels import kda_chunk, kda_chunk_export, kda_step_
from kimi_k3_kernels.kda.op import kda_chunk_export_op, kda_chunk_op, kda_step_op
from kimi_k3_kernels.kda.reference import kda_recurrent_reference

sys.path.insert(0, str(Path(__file__).parent))
from inputs import kda_inputs, packed

LENGTHS = [1, 3, 4, 15, 16, 17, 63, 64, 65, 130]


def pool_and_slots(num_sequences: int, heads: int = 3, key_dim: int = 8, value_dim: int = 12, dtype=torch.float64):
    pool = torch.randn(num_sequences + 1, heads, key_dim, value_dim, dtype=dtype)
    return pool, torch.arange(num_sequences)


def fla_naive_kda():
    """fla-core's naive module by file: importing the package needs Triton."""
    spec = importlib.util.find_spec("fla")
    assert spec is not None and spec.submodule_search_locations, "the test extra installs fla-core"
    path = Path(spec.submodule_search_locations[0]) / "ops" / "kda" / "naive.py"
    module_spec = importlib.util.spec_from_file_location("fla_naive_kda", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("lowest", [-5.0, -0.05])
def test_chunk_and_step_equal_fla_naive(tokens: int, lowest: float):
    naive = fla_naive_kda().naive_recurrent_kda
    inputs = kda_inputs(tokens, dtype=torch.float32, lowest=lowest, seed=tokens)
    pool, slots = pool_and_slots(1, dtype=torch.float32)
    batched = [x[None] for x in inputs]
    want, want_state = naive(*batched, scale=1.0, initial_state=pool[:1].clone(), output_final_state=True)

    chunked = pool.clone()
    o = kda_chunk(*inputs, chunked, slots, slots, packed([tokens]))
    # Two float32 orders of one sum of up to 130 terms, outputs of order 1.
    torch.testing.assert_close(o, want[0], atol=5e-6, rtol=1e-5)
    torch.testing.assert_close(chunked[0], want_state[0], atol=5e-6, rtol=1e-5)

    stepped = pool.clone()
    steps = [kda_step_(*(x[t : t + 1] for x in inputs), stepped, slots, slots) for t in range(tokens)]
    torch.testing.assert_close(torch.cat(steps), want[0], atol=5e-6, rtol=1e-5)
    torch.testing.assert_close(stepped[0], want_state[0], atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("lowest", [-5.0, -0.01, -30.0])
def test_packed_sequences_equal_the_recurrence_and_slots_are_kept_apart(lowest: float):
    lengths = [130, 1, 0, 64, 65, 17]
    inputs = kda_inputs(sum(lengths), lowest=lowest)
    pool, _ = pool_and_slots(len(lengths) + 1)
    read, write = torch.tensor([0, 1, 2, 3, -1, 5]), torch.tensor([7, 1, 2, 3, 4, -1])
    initial = pool[read.clamp(min=0)].clone()
    initial[read < 0] = 0
    want, want_states = kda_recurrent_reference(*inputs, initial, packed(lengths))
    before, after = pool.clone(), pool.clone()
    o = kda_chunk(*inputs, after, read, write, packed(lengths))
    torch.testing.assert_close(o, want, atol=1e-12, rtol=1e-12)
    for n, slot in enumerate(write.tolist()):
        if slot >= 0:
            torch.testing.assert_close(after[slot], want_states[n], atol=1e-12, rtol=1e-12)
    untouched = [slot for slot in range(pool.shape[0]) if slot not in write.tolist()]
    assert torch.equal(after[untouched], before[untouched])


@pytest.mark.parametrize("bound", ["at the bound", "zero", "mixed"])
def test_decays_at_the_ends_of_their_range_stay_finite(bound: str):
    inputs = kda_inputs(130, dtype=torch.float32)
    if bound == "at the bound":
        inputs[3].fill_(-5.0)
    elif bound == "zero":
        inputs[3].zero_()
    else:
        inputs[3][::2], inputs[3][1::2] = -5.0, 0.0
    pool, slots = pool_and_slots(1, dtype=torch.float32)
    want, _ = kda_recurrent_reference(*(x.double() for x in inputs), pool[:1].double(), packed([130]))
    o = kda_chunk(*inputs, pool, slots, slots, packed([130]))
    torch.testing.assert_close(o.double(), want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("cut", range(0, 131, 13))
def test_two_pieces_that_carry_the_state_equal_one(cut: int):
    inputs = kda_inputs(130)
    pool, slots = pool_and_slots(1)
    whole, split = pool.clone(), pool.clone()
    want = kda_chunk(*inputs, whole, slots, slots, packed([130]))
    first = kda_chunk(*(x[:cut] for x in inputs), split, slots, slots, packed([cut]))
    second = kda_chunk(*(x[cut:] for x in inputs), split, slots, slots, packed([130 - cut]))
    torch.testing.assert_close(torch.cat([first, second]), want, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(split, whole, atol=1e-12, rtol=1e-12)


def test_step_with_different_slots_can_be_retried():
    inputs = kda_inputs(2)
    pool, _ = pool_and_slots(3)
    read, write, before = torch.tensor([0, 1]), torch.tensor([2, 3]), pool.clone()
    first = kda_step_(*inputs, pool, read, write)
    assert torch.equal(pool[:2], before[:2])
    assert torch.equal(kda_step_(*inputs, pool, read, write), first)


def test_export_writes_the_state_of_each_asked_for_prefix():
    lengths, at = [130, 40], [1, 64, 130, 131, 170]
    inputs = kda_inputs(170)
    pool = torch.zeros(2 + len(at), 3, 8, 12, dtype=torch.float64)
    slots, export_slots = torch.arange(2), torch.arange(2, 2 + len(at))
    o = kda_chunk_export(*inputs, pool, slots, slots, packed(lengths), torch.tensor(at), export_slots)
    torch.testing.assert_close(
        o, kda_chunk(*inputs, pool.clone(), -slots - 1, slots, packed(lengths)), atol=1e-12, rtol=1e-12
    )
    for position, slot in zip(at, export_slots.tolist()):
        start = 0 if position <= 130 else 130
        _, states = kda_recurrent_reference(
            *(x[start:position] for x in inputs),
            torch.zeros(1, 3, 8, 12, dtype=torch.float64),
            packed([position - start]),
        )
        torch.testing.assert_close(pool[slot], states[0], atol=1e-12, rtol=1e-12)


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def test_gradients_equal_autograd_through_the_recurrence():
    lengths = [70, 1, 18]
    pool, slots = pool_and_slots(3)
    ours, theirs = [[leaf(x) for x in kda_inputs(89)] for _ in range(2)]
    nowhere = torch.full((3,), -1)
    upstream = torch.randn(89, 3, 12, dtype=torch.float64)
    got = torch.autograd.grad(kda_chunk(*ours, pool, slots, nowhere, packed(lengths)), ours, upstream)
    o, _ = kda_recurrent_reference(*theirs, pool[:3], packed(lengths))
    for name, a, b in zip(("q", "k", "v", "log_decay", "beta"), got, torch.autograd.grad(o, theirs, upstream)):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-8, msg=lambda text, name=name: f"{name}: {text}")


def test_gradcheck():
    pool, slots = pool_and_slots(2, heads=1, key_dim=3, value_dim=2)
    inputs = [leaf(x) for x in kda_inputs(20, heads=1, key_dim=3, value_dim=2)]

    def run(*args: Tensor) -> Tensor:
        return kda_chunk(*args, pool, slots, torch.full((2,), -1), packed([17, 3]))

    assert torch.autograd.gradcheck(run, inputs)


def test_registration():
    inputs = kda_inputs(20)
    pool, slots = pool_and_slots(2)
    nowhere = torch.full((2,), -1)
    torch.library.opcheck(kda_chunk_op, (*map(leaf, inputs), pool, slots, nowhere, packed([17, 3])))
    torch.library.opcheck(kda_chunk_op, (*inputs, pool, slots, slots, packed([17, 3])))
    torch.library.opcheck(kda_step_op, (*(x[:2] for x in inputs), pool, slots, slots))
    exports = (torch.tensor([5, 20]), torch.tensor([0, 1]))
    torch.library.opcheck(kda_chunk_export_op, (*inputs, pool, slots, slots, packed([17, 3]), *exports))


def test_permuted_strides_change_nothing():
    inputs = kda_inputs(65)
    pool, slots = pool_and_slots(1)
    strided = [x.movedim(0, -1).contiguous().movedim(-1, 0) for x in inputs]
    want = kda_chunk(*inputs, pool.clone(), slots, slots, packed([65]))
    assert torch.equal(kda_chunk(*strided, pool.clone(), slots, slots, packed([65])), want)


@pytest.mark.parametrize("tokens", [0, 1])
def test_empty_and_single_token_inputs(tokens: int):
    inputs = kda_inputs(tokens)
    pool, slots = pool_and_slots(1)
    before = pool.clone()
    o = kda_chunk(*inputs, pool, slots, slots, packed([tokens]))
    assert o.shape == (tokens, 3, 12)
    assert torch.equal(pool, before) == (tokens == 0)


def test_wrong_shapes_and_dtypes_are_refused():
    q, k, v, log_decay, beta = kda_inputs(4)
    pool, slots = pool_and_slots(1)
    cu = packed([4])
    with pytest.raises(ValueError, match="kda_chunk: want q, k, log_decay"):
        kda_chunk(q, k[:, :2], v, log_decay, beta, pool, slots, slots, cu)
    with pytest.raises(ValueError, match="beta"):
        kda_chunk(q, k, v, log_decay, beta[:, :2], pool, slots, slots, cu)
    with pytest.raises(ValueError, match="float64"):
        kda_chunk(q, k, v, log_decay.float(), beta, pool, slots, slots, cu)
    with pytest.raises(ValueError, match="state_pool"):
        kda_chunk(q, k, v, log_decay, beta, pool.mT, slots, slots, cu)
    with pytest.raises(ValueError, match="cu_seqlens"):
        kda_chunk(q, k, v, log_decay, beta, pool, slots, slots, packed([2, 2]))
