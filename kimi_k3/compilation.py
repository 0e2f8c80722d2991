"""What torch.compile is told of the layers, so that a few graphs serve every length, batch and depth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.fx.experimental._config as symbolic_shape_config
from torch import Tensor

from kimi_k3.cache import PackedBatch

# Four kinds of layer times the graphs of each: torch's own limit of 8 counts all kinds together.
RECOMPILE_LIMIT = 32
# Trust the CPU's own flags: else each process starts another one to try them, a second even with all graphs cached.
INDUCTOR_OPTIONS = {"cpp.vec_isa_ok": True}


@contextmanager
def symbolic_shapes() -> Iterator[None]:
    """Compile sizes that happen to be equal at first (3 tokens, 3 blocks) as the different sizes that they are."""
    dynamo = torch._dynamo.config
    limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
    patched = symbolic_shape_config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with patched, dynamo.patch(recompile_limit=limit):
        yield


def mark_dynamic_sizes(
    running_sum: Tensor, bank: Tensor, depth: Tensor, batch: PackedBatch, pools: tuple[Tensor, ...]
) -> None:
    """Name the sizes that vary between calls of one layer: tokens, sequences, blocks and slots."""
    mark = torch._dynamo.maybe_mark_dynamic
    mark(running_sum, 0)
    mark(bank, 1)
    for per_sequence in batch[:5]:
        mark(per_sequence, 0)
    mark(batch.block_tables, [0, 1])
    if batch.latent_rows is not None:
        mark(batch.latent_rows, 0)
    if batch.export_at is not None and batch.export_slots is not None:
        mark(batch.export_at, 0)
        mark(batch.export_slots, 0)
    for pool in pools:
        mark(pool, 0)
