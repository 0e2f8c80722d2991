"""What every op must show: registration, empty and single-token inputs, poisoned outputs, any strides, offsets past 2^31
elements, equal bits on 1 and 2 threads. (Numerical gradients and the equations stand in the tests of each op.)"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kimi_k3_kernels
from kimi_k3_kernels import mxfp4_quantize
from kimi_k3_kernels.library import GPU_KERNELS, gpu_function

sys.path.insert(0, str(Path(__file__).parent))
from inputs import kda_inputs, packed

OPS = torch.ops.kimi_k3
NATIVE = kimi_k3_kernels.native_library is not None
EPS, BETAS = 1e-5, (4.0, 25.0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape)))


def kda_rows(tokens: int, lowest: float = -5.0) -> list[Tensor]:
    return kda_inputs(tokens, 2, 8, 12, torch.float32, lowest)


def pools(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return normal(3, 2, 8, 12), torch.tensor([1]), torch.tensor([2]), packed([tokens])


def kda_export(tokens: int) -> list:
    at = torch.tensor([tokens] if tokens else [], dtype=torch.int64)
    return [*kda_rows(tokens), *pools(tokens), at, torch.zeros_like(at)]


def short_conv(tokens: int) -> list:
    return [normal(tokens, 20), normal(20, 4), normal(3, 3, 20), torch.tensor([1]), torch.tensor([2]), packed([tokens])]


def mla(tokens: int) -> list:
    tables, past = torch.tensor([[2, 0]]), torch.tensor([6])
    return [
        normal(tokens, 2, 10),
        normal(tokens, 12),
        normal(22, 8),
        normal(3, 4, 12),
        tables,
        past,
        packed([tokens]),
        0.3,
    ]


def mla_decode(tokens: int) -> list:
    lens = torch.arange(tokens) % 8 + 1
    return [
        normal(tokens, 2, 12),
        normal(3, 4, 12),
        torch.tensor([[2, 0]]).expand(tokens, 2).contiguous(),
        lens,
        0.3,
        8,
    ]


def routed(tokens: int) -> list:
    ids = torch.rand((tokens, 3), generator=torch.Generator().manual_seed(0)).argsort(1)[:, :2].contiguous()
    return [normal(tokens, 32), ids, normal(tokens, 2).sigmoid()]


def packed_experts() -> list:
    sizes = ((3, 64, 32), (3, 64, 32), (3, 32, 64))
    return [t for i, size in enumerate(sizes) for t in mxfp4_quantize(normal(*size, seed=i) * 0.2)]


def dense() -> list:
    return [normal(3, 64, 32) * 0.2, normal(3, 64, 32, seed=1) * 0.2, normal(3, 32, 64) * 0.2]


TABLE = torch.tensor([2, 0, 1])
INPUTS: dict[str, Callable[[int], list]] = {
    "kda_chunk": lambda t: [*kda_rows(t), *pools(t)],
    "kda_chunk_export": kda_export,
    "kda_chunk_backward": lambda t: [normal(t, 2, 12), *kda_rows(t), normal(1, 2, 8, 12), packed([t])],
    "kda_step_": lambda t: [*kda_rows(t), normal(2 * t + 1, 2, 8, 12), torch.arange(t), torch.arange(t, 2 * t)],
    "short_conv": short_conv,
    "short_conv_backward": lambda t: [normal(t, 20, seed=3), *short_conv(t)[:2], normal(1, 3, 20), packed([t])],
    "short_conv_step_": lambda t: [
        normal(t, 20), normal(20, 4), normal(2 * t + 1, 3, 20), torch.arange(t), torch.arange(t, 2 * t)
    ],
    "attn_res_mix": lambda t: [normal(t, 24), normal(3, t, 24), torch.tensor(2), normal(24), EPS],
    "attn_res_mix_norm": lambda t: [
        normal(t, 24), normal(3, t, 24), torch.tensor(2), normal(24), normal(1, 24), EPS, normal(24, seed=1), EPS
    ],
    "attn_res_mix_backward": lambda t: [
        normal(t, 24, seed=3), normal(t, 24), normal(3, t, 24), torch.tensor(2), normal(24), EPS
    ],
    "mla_prefill": mla,
    "mla_prefill_backward": lambda t: [normal(t, 2, 5), *mla(t)],
    "mla_decode": mla_decode,
    "mla_decode_mass": mla_decode,
    "mxfp4_experts": lambda t: [*routed(t), *packed_experts(), TABLE, *BETAS],
    "mxfp4_experts_int8": lambda t: [*routed(t), *packed_experts(), TABLE, *BETAS],
    "mxfp4_experts_backward": lambda t: [normal(t, 32, seed=3), *routed(t), *packed_experts(), TABLE, *BETAS],
    "dense_experts": lambda t: [*routed(t), *dense(), TABLE, *BETAS],
    "dense_experts_backward": lambda t: [normal(t, 32, seed=3), *routed(t), *dense(), TABLE, *BETAS],
    "matvec": lambda t: [normal(t, 40), [normal(24, 40), normal(5, 40)]],
    "kda_recurrent": lambda t: [*kda_rows(t), *pools(t)],
    "kda_recurrent_export": kda_export,
    "short_conv_export": lambda t: [*short_conv(t), *kda_export(t)[-2:]],
    "head_matvec": lambda t: [normal(t, 3, 16), normal(3, 20, 16), False],
    "linear_rows": lambda t: [normal(t, 40), [normal(24, 40), normal(5, 40)]],
    "choose_experts": lambda t: [normal(t, 24).sigmoid(), normal(t, 24, seed=1), 5, True, 2.5],
    "rms_norm": lambda t: [normal(t, 24), normal(24), EPS],
    "gated_rms_norm": lambda t: [normal(t, 2, 12), normal(t, 2, 12, seed=1), normal(12), EPS],
    "kda_gates": lambda t: [normal(t, 48), normal(t, 16), normal(t, 2), normal(2), normal(16), -5.0],
    "situ": lambda t: [normal(t, 24), normal(t, 24, seed=1), *BETAS],
    "mxfp4_combine": lambda t: [normal(t, 2, 32), normal(t, 2).sigmoid()],
    "mxfp4_combine_backward": lambda t: [normal(t, 32), normal(t, 2, 32), normal(t, 2).sigmoid()],
    "mxfp4_linear": lambda t: [normal(t, 32), *(x[0] for x in packed_experts()[:2])],
    "mxfp4_dequantize": lambda t: [*(x[0, :t] for x in packed_experts()[:2]), torch.float32],
}  # fmt: skip
every_op = pytest.mark.parametrize("name", INPUTS)


def run(name: str, arguments: list) -> list[Tensor]:
    """Outputs and every tensor argument as the op left it, so that what it writes to a pool is compared too."""
    out = getattr(OPS, name)(*arguments)
    outputs = list(out) if isinstance(out, tuple) else [out]
    return outputs + [x for x in arguments if isinstance(x, Tensor) and x.is_floating_point()]


def mapped(arguments: list, change: Callable[[Tensor], Tensor]) -> list:
    def one(x):
        return [change(y) for y in x] if isinstance(x, list) else change(x) if isinstance(x, Tensor) else x

    return [one(x) for x in arguments]


def assert_close(got: list[Tensor], want: list[Tensor], bits: bool = False) -> None:
    for a, b in zip(got, want, strict=True):
        if bits:
            assert torch.equal(a, b)
        else:
            # float32 sums of up to 64 products, of order 1 each, against float64.
            scale = max(1.0, b.abs().max().item()) if b.numel() else 1.0
            torch.testing.assert_close(a.double(), b.double(), atol=1e-5 * scale, rtol=0)


def test_every_op_is_in_the_matrix():
    names = {
        name.removeprefix("kimi_k3::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if "kimi_k3::" in name
    }
    # The op over several ranks needs them: tests/parallel has its registration.
    assert names - {"set_cpu_instructions", "cpu_instructions", "experts_over_ranks"} == set(INPUTS)


@every_op
def test_registration(name: str):
    torch.library.opcheck(getattr(OPS, name).default, tuple(INPUTS[name](3)))


@every_op
@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_any_number_of_tokens(name: str, tokens: int):
    got = run(name, INPUTS[name](tokens))
    wide = mapped(INPUTS[name](tokens), lambda x: x.double() if x.is_floating_point() else x)
    if name == "mxfp4_dequantize":
        wide[2] = torch.float64
    assert_close(got, run(name, wide))


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """New memory starts as NaN, so that an element nobody wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@every_op
@pytest.mark.filterwarnings("ignore:.*deterministic.*")
def test_every_output_element_is_written(name: str, poisoned_memory: None):
    for tokens in (1, 17):
        assert all(x.isfinite().all() for x in run(name, INPUTS[name](tokens)))


def spread(x: Tensor) -> Tensor:
    """The same values, every second element of a larger tensor in every dimension, NaN or -1 between them."""
    if x.ndim == 0:
        return x
    filler = torch.nan if x.is_floating_point() else 255 if x.dtype == torch.uint8 else -1
    large = torch.full([2 * size for size in x.shape], filler, dtype=x.dtype)
    view = large[tuple(slice(None, None, 2) for _ in x.shape)]
    return view.copy_(x)


@every_op
def test_strides_do_not_matter(name: str):
    want = run(name, INPUTS[name](17))
    assert_close(run(name, mapped(INPUTS[name](17), spread)), want)
    assert_close(run(name, mapped(INPUTS[name](17), lambda x: x.mT.contiguous().mT if x.ndim > 1 else x)), want)


def far_apart(x: Tensor) -> Tensor:
    """The same values, the last at an offset of 2^31 elements: untouched pages of the space between cost no memory."""
    stride = 2**31 // (x.shape[0] - 1) + 1
    storage = torch.empty(stride * (x.shape[0] - 1) + x[0].numel(), dtype=x.dtype)
    return storage.as_strided(x.shape, (stride, *x[0].contiguous().stride())).copy_(x)


# Arguments whose first dimension is slots, blocks, depth or tokens, and which a model may hold at any stride.
FAR = {
    "kda_chunk": (0, 1, 2, 3, 5), "kda_chunk_export": (5,), "kda_chunk_backward": (0, 3), "kda_step_": (0, 5),
    "short_conv": (0, 2), "short_conv_step_": (0, 2), "short_conv_backward": (1,), "attn_res_mix": (0, 1),
    "attn_res_mix_backward": (2,), "mla_prefill": (0, 1, 3), "mla_prefill_backward": (0, 4), "mla_decode": (0, 1),
    "mla_decode_mass": (0, 1),
    "mxfp4_experts": (0, 3, 4, 5, 6, 7, 8), "mxfp4_experts_int8": (0, 3, 8), "mxfp4_experts_backward": (4, 8),
    "dense_experts": (3, 5),
    "kda_recurrent": (0, 5), "kda_recurrent_export": (5,), "short_conv_export": (0, 2), "head_matvec": (0, 1),
    "attn_res_mix_norm": (0, 1), "choose_experts": (0, 1),
    "linear_rows": (0,), "rms_norm": (0,), "gated_rms_norm": (0, 1), "kda_gates": (0, 1), "situ": (0, 1),
    "dense_experts_backward": (4,), "mxfp4_linear": (1,), "mxfp4_dequantize": (0,),
}  # fmt: skip


@pytest.mark.parametrize(("name", "position"), [(name, i) for name, places in FAR.items() for i in places])
def test_offsets_past_32_bits(name: str, position: int):
    want = run(name, INPUTS[name](3))
    arguments = INPUTS[name](3)
    arguments[position] = far_apart(arguments[position])
    assert arguments[position][-1].storage_offset() >= 2**31
    assert_close(run(name, arguments), want)


@pytest.mark.skipif(not NATIVE, reason="promised by the CPU kernels")
@every_op
def test_one_and_two_threads_give_the_same_bits(name: str):
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"kimi_k3::{name}", "CPU"):
        pytest.skip("the reference serves this op")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = run(name, INPUTS[name](70))
        torch.set_num_threads(2)
        assert_close(run(name, INPUTS[name](70)), want, bits=True)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("lowest", [0.0, -5.0, -100.0, -1e30, "mixed"])
@pytest.mark.parametrize("name", ["kda_chunk", "kda_chunk_export", "kda_step_", "kda_chunk_backward"])
def test_decays_at_the_bound_and_beyond(name: str, lowest: float | str):
    arguments = INPUTS[name](40)
    place = 4 if name == "kda_chunk_backward" else 3
    decays = arguments[place]
    if lowest == "mixed":  # neighbours at both ends: differences of cumulative sums must not cancel
        decays.copy_(torch.where(torch.rand_like(decays) < 0.5, 0.0, -100.0))
    else:
        decays.fill_(lowest)
    wide = mapped(
        [x.clone() if isinstance(x, Tensor) else x for x in arguments],
        lambda x: x.double() if x.is_floating_point() else x,
    )
    got, want = run(name, arguments), run(name, wide)
    outputs = len(got) - sum(isinstance(x, Tensor) and x.is_floating_point() for x in arguments)
    assert all(x.isfinite().all() for x in got)
    assert_close(got[:outputs], want[:outputs])


@every_op
def test_the_reference_is_not_the_kernel(name: str):
    # The matrix means nothing where a kernel is not reached.
    native = torch._C._dispatch_has_kernel_for_dispatch_key(f"kimi_k3::{name}", "CPU")
    plain = {
        "mla_prefill_backward",
        "mxfp4_experts_backward",
        "dense_experts",
        "dense_experts_backward",
    }
    plain |= {"mxfp4_linear", "mxfp4_dequantize", "mxfp4_combine_backward"}
    assert native or not NATIVE or name in plain


@pytest.mark.parametrize("name", sorted(GPU_KERNELS))
def test_a_gpu_without_triton_is_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    for module in [module for module in sys.modules if module.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it is a ModuleNotFoundError
    for module in ("kimi_k3_kernels.gpu", GPU_KERNELS[name]):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(RuntimeError, match=f"kimi_k3::{name}: want Triton on a GPU"):
        gpu_function(name)
