"""What torch.compile is told of the layers, so that a few graphs serve every length, batch and depth."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.fx.experimental._config as symbolic_shape_config
from torch import Tensor

from kimi_k3.cache import PackedBatch
from kimi_k3_kernels.native import cache_folder

if TYPE_CHECKING:
    from kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM

# Four kinds of layer times the graphs of each: torch's own limit of 8 counts all kinds together.
RECOMPILE_LIMIT = 32
# Trust the CPU's own flags: else each process starts another one to try them, a second even with all graphs cached.
INDUCTOR_OPTIONS = {"cpp.vec_isa_ok": True}


def keep_graphs() -> Path:
    """Keep compiled graphs where a later process finds them, and not in /tmp. Returns the folder.

    A TORCHINDUCTOR_CACHE_DIR that is set stays; but torch itself sets it to its own default when it is imported.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder in (None, default_cache_dir()):
        folder = os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder() / "graphs")
    return Path(folder)


@torch.no_grad()
def warm_up(model: KimiK3ForCausalLM) -> None:
    """Run a compiled model through all that generation needs: prefill and decode, of one sequence and of more."""
    for rows in (1, 2):
        cache = model.make_cache(rows)
        for tokens in (17, 1, 1):
            ids = torch.zeros((rows, tokens), dtype=torch.int64, device=model.device)
            model(ids, past_key_values=cache, logits_to_keep=1)


@contextmanager
def symbolic_shapes() -> Iterator[None]:
    """Compile sizes that happen to be equal at first (3 tokens, 3 blocks) as the different sizes that they are."""
    dynamo = torch._dynamo.config
    limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
    patched = symbolic_shape_config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with patched, dynamo.patch(recompile_limit=limit):
        yield


def mark_batch_dynamic(batch: PackedBatch) -> None:
    """Name the sizes that vary between passes in what all layers read: tokens, sequences, blocks."""
    mark = torch._dynamo.maybe_mark_dynamic
    for per_sequence in batch[:5]:
        mark(per_sequence, 0)
    mark(batch.block_tables, [0, 1])
    for per_token in (batch.latent_rows, batch.export_at, batch.export_slots):
        if per_token is not None:
            mark(per_token, 0)
    if batch.block_mass is not None:
        mark(batch.block_mass, [0, 1])


def mark_layer_dynamic(running_sum: Tensor, bank: Tensor, pools: tuple[Tensor, ...]) -> None:
    """The same for what each layer has of its own: tokens, blocks and slots."""
    mark = torch._dynamo.maybe_mark_dynamic
    mark(running_sum, 0)
    mark(bank, 1)
    for pool in pools:
        mark(pool, 0)
