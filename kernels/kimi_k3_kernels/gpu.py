"""What the Triton kernels share: a dot that is right under the interpreter too, the search for a row's sequence, targets."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # others go to the reference


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b. The interpreter multiplies the raw bits of bfloat16, so it gets float32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def only_if(inside, condition):
    """`inside` where the scalar `condition` holds. (The interpreter spreads a scalar truth value as an integer.)"""
    return tl.where(inside, condition.to(tl.int32), 0) > 0


@triton.jit
def find_sequence(cu_ptr, place, num_sequences, steps, ROWS: tl.constexpr, GAP: tl.constexpr, SCALE):
    """The last n with SCALE cu[n] // ROWS + GAP n <= place; `steps` >= log2(num_sequences).

    With ROWS rows to a block and GAP 1, each sequence has enough places for all its blocks, whatever the lengths, and
    the number of all places is known without reading a length. With ROWS 1 and GAP 0, `place` is a packed row.
    """
    low = place * 0
    high = low + num_sequences - 1
    for _ in range(steps):
        middle = (low + high + 1) // 2
        before = tl.load(cu_ptr + middle) * SCALE // ROWS + GAP * middle <= place
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
    return low


def num_places(rows: int, block: int, num_sequences: int) -> int:
    """Blocks that `find_sequence` needs for all sequences together."""
    return rows // block + num_sequences


def search_steps(num_sequences: int) -> int:
    return max(num_sequences - 1, 0).bit_length()


def block_of(size: int, least: int = 16) -> int:
    """The power of two that holds `size`; a dot wants 16."""
    return max(least, triton.next_power_of_2(size))


def indices(x: Tensor) -> Tensor:
    """A small list of slots, lengths or positions, as the kernels read it."""
    return x if x.is_contiguous() else x.contiguous()


def target_of(device: torch.device) -> str:
    """The architecture: "sm_90", "gfx942", ..; "interpreter" on a CPU."""
    if device.type != "cuda":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def is_amd(target: str) -> bool:
    return target.startswith("gfx")


def dot_precision(dtype: torch.dtype, target: str) -> str:
    """Of products of float32 tensors inside a kernel: nearly all of float32 for float32 inputs, TF32 for narrow ones.

    TF32 is finer than bfloat16, and three products of it keep what float32 has; AMD multiplies float32 itself.
    """
    if not target.startswith("sm_"):
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"
