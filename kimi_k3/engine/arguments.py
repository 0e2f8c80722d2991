"""What callers hand in: each a ValueError that names the argument, what is wanted and what was given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from kimi_k3.engine.scheduler import SCHEDULERS
from kimi_k3.engine.tier_format import LossyCodec
from kimi_k3.engine.tiers import Tier
from kimi_k3.sampling import SamplingParams, as_float, as_int


def whole(where: str, name: str, value: Any, least: int | None = None) -> int:
    """A whole number, numpy's and torch's too, as int."""
    found = as_int(value)
    if found is None or (least is not None and found < least):
        kind = "a whole number" if least is None else f">= {least}"
        raise ValueError(f"{where}: want {name} {kind}, got {value!r}")
    return found


def check_generator(
    model: Any, tokenizer: Any, *, memory: Any, num_blocks: int | None, scheduler: Any, tiers: Any, snapshots: Any,
    batch_invariant: bool, max_tokens_per_step: int, block_size: int, switches: dict[str, Any],
) -> None:  # fmt: skip
    """Raises: ValueError, and NotImplementedError for batch_invariant with compiled layers."""
    if not isinstance(model, nn.Module) or not hasattr(model, "head_logits"):
        raise ValueError(f"KimiK3Generator: want model to be a KimiK3ForCausalLM, got {type(model).__name__}")
    if tokenizer is not None and not hasattr(tokenizer, "stream_decoder"):
        raise ValueError(f"KimiK3Generator: want tokenizer to be a KimiK3Tokenizer, got {type(tokenizer).__name__}")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"KimiK3Generator: want {name} True or False, got {value!r}")
    if num_blocks is not None and memory != "auto":
        raise ValueError(f"KimiK3Generator: want memory or num_blocks, got both: {memory!r} and {num_blocks}")
    if not isinstance(tiers, Sequence) or not all(isinstance(tier, Tier) for tier in tiers):
        raise ValueError(f"KimiK3Generator: want tiers to be a list of HostTier, DiskTier, RemoteTier, got {tiers!r}")
    if batch_invariant and model.model.has_compiled_layers:  # type: ignore[union-attr]
        raise NotImplementedError(
            "KimiK3Generator: batch_invariant wants a model without compile_blocks: a compiler orders sums by their sizes"
        )
    if snapshots not in ("exact", "bf16"):
        raise ValueError(f"KimiK3Generator: want snapshots 'exact' or 'bf16', got {snapshots!r}")
    if batch_invariant and snapshots != "exact":
        raise ValueError(f"KimiK3Generator: batch_invariant wants snapshots='exact', got {snapshots!r}")
    if scheduler not in SCHEDULERS:
        raise ValueError(f"KimiK3Generator: want scheduler in {sorted(SCHEDULERS)}, got {scheduler!r}")
    if max_tokens_per_step < block_size:
        raise ValueError(
            f"KimiK3Generator: want max_tokens_per_step >= block_size {block_size}, got {max_tokens_per_step}"
        )
    lossy = [tier.name for tier in tiers if tier.codec != LossyCodec()]
    if batch_invariant and lossy:
        raise ValueError(f"KimiK3Generator: batch_invariant wants exact tiers, got lossy ones: {lossy}")


def check_request(params: Any, extra_key: Any, pixel_values: Any, grid_thws: Any) -> None:
    if not isinstance(params, SamplingParams):
        raise ValueError(f"add: want params to be SamplingParams or None, got {params!r}")
    params.check()  # it may have been changed since it was made
    if not isinstance(extra_key, bytes):
        raise ValueError(f"add: want extra_key to be bytes, got {extra_key!r}")
    for name, value in (("pixel_values", pixel_values), ("grid_thws", grid_thws)):
        if value is not None and not isinstance(value, Tensor):
            raise ValueError(f"add: want {name} to be a tensor or None, got {type(value).__name__}")
    if pixel_values is None and grid_thws is not None:
        raise ValueError("add: want pixel_values with grid_thws, got grid_thws alone")


def token_ids(prompt: Any, vocabulary: int) -> list[int]:
    """The ids of a prompt: of a list, an array, a tensor or a ChatEncoding."""
    given = getattr(prompt, "ids", prompt)
    given = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(given, (str, bytes, dict, set)) or not isinstance(given, Iterable):
        raise ValueError(f"add: want prompt to be token ids or a ChatEncoding, got {prompt!r}")
    given = list(given)
    ids = [token for token in map(as_int, given) if token is not None and 0 <= token < vocabulary]
    if not ids or len(ids) < len(given):
        wrong = [token for token in given if (found := as_int(token)) is None or not 0 <= found < vocabulary]
        raise ValueError(f"add: want a prompt of ids in 0..{vocabulary - 1}, not empty, got {wrong[:3]}")
    return ids


def positions(snapshot_at: Any, tokens: int) -> list[int]:
    if isinstance(snapshot_at, (str, bytes)) or not isinstance(snapshot_at, Iterable):
        raise ValueError(f"add: want snapshot_at to be positions, got {snapshot_at!r}")
    found = [whole("add", "snapshot_at", position) for position in snapshot_at]
    if any(not 0 < position <= tokens for position in found):
        raise ValueError(f"add: want snapshot_at in 1..{tokens}, got {found}")
    return found


def seconds(timeout: Any) -> float | None:
    found = None if timeout is None else as_float(timeout)
    if timeout is not None and (found is None or not found >= 0):
        raise ValueError(f"add: want timeout >= 0 seconds or None, got {timeout!r}")
    return found
