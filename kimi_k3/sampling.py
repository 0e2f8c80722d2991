"""How the next token is chosen: filters and draws, each row by its own parameters alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class SamplingParams:
    """What one request asks for.

    Args:
        max_new_tokens: at most so many tokens are generated.
        temperature: 0: greedy; else logits are divided by it.
        top_p: keep the most likely tokens that together reach this share, after top_k.     top_k: keep so many; 0: all.
        min_p: keep tokens at least so likely, relative to the most likely one.
        seed: draws depend on it and the position alone; None: a fresh one.
        stop: texts that end the generation.     stop_token_ids: ids that do.
        logprobs: report the log-probabilities of so many best tokens; None: none.
        logits_processor: `f(token_ids, logits [V]) -> logits [V]`, called before the penalties and filters.
        repetition_penalty: > 1 makes all tokens of prompt and text less likely: logits are divided or, where negative,
            multiplied by it.     presence_penalty, frequency_penalty: taken off the logits of generated tokens, once and
            for each time.
        ignore_eos: the model's and tokenizer's end ids end nothing; those of `stop_token_ids` do.
        n: so many samples of one prompt, the i-th with the seed plus i.
    Raises: ValueError naming the parameter.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    logits_processor: Callable[[list[int], Tensor], Tensor] | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def check(is_right: bool, name: str, wanted: str) -> None:
            if not is_right:
                raise ValueError(f"SamplingParams: {name} must be {wanted}, got {getattr(self, name)!r}")

        if isinstance(self.stop, str):
            self.stop = (self.stop,)
        check(self.max_new_tokens >= 1, "max_new_tokens", ">= 1")
        check(0 <= self.temperature < math.inf, "temperature", ">= 0 and finite")
        check(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        check(self.top_k >= 0, "top_k", ">= 0 (0: no limit)")
        check(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        check(all(isinstance(text, str) and text for text in self.stop), "stop", "non-empty strings")
        check(self.logprobs is None or self.logprobs >= 0, "logprobs", ">= 0 or None")
        check(0 < self.repetition_penalty < math.inf, "repetition_penalty", "> 0 and finite")
        check(math.isfinite(self.presence_penalty), "presence_penalty", "finite")
        check(math.isfinite(self.frequency_penalty), "frequency_penalty", "finite")
        check(self.n >= 1, "n", ">= 1")

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def fresh_seed() -> int:
    """A new seed from torch's global generator, so that torch.manual_seed governs unseeded draws."""
    return int(torch.randint(2**63 - 1, ()))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a pure function of the seed and the number of tokens generated before.

    No state is carried, so a draw depends neither on the other rows nor on a pause in between.
    """
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sorted_probabilities(logits_V: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Probabilities, largest first, zero where a filter drops a token, and the tokens they belong to."""
    # From the largest downwards, so that no quotient overflows to +inf, and by no less than float32 can hold.
    below_V = logits_V.float() - logits_V.max().float()
    scaled_V = below_V / max(params.temperature, torch.finfo(torch.float32).tiny)
    sorted_V, tokens_V = scaled_V.sort(descending=True, stable=True)
    probabilities_V = sorted_V.softmax(-1)
    if params.top_k:
        probabilities_V[params.top_k :] = 0
    if params.top_p < 1:
        # Of what top_k left: a token stays while those before it have not reached the share. The first always stays.
        share_before_V = probabilities_V.cumsum(0) - probabilities_V
        probabilities_V = probabilities_V.masked_fill(share_before_V >= params.top_p * probabilities_V.sum(), 0)
    if params.min_p:
        probabilities_V = probabilities_V.masked_fill(probabilities_V < params.min_p * probabilities_V[0], 0)
    return probabilities_V / probabilities_V.sum(), tokens_V


def sample(logits_V: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """The next token of one row, by inverting the cumulative distribution at `uniform(seed, position)`.

    Raises: FloatingPointError if a logit is NaN or +inf, or all are -inf: argmax over those would be a silent token 0.
    """
    if not torch.isfinite(logits_V.max()):
        raise FloatingPointError(f"sample: non-finite logits at generated token {position}")
    if params.temperature == 0:
        return int(logits_V.argmax())
    probabilities_V, tokens_V = sorted_probabilities(logits_V, params)
    cumulative_V = probabilities_V.double().cumsum(0)
    draw = uniform(seed, position) * float(cumulative_V[-1])
    index = int(
        torch.searchsorted(cumulative_V, torch.tensor(draw, dtype=torch.float64, device=logits_V.device), right=True)
    )
    return int(tokens_V[min(index, int((probabilities_V > 0).sum()) - 1)])


def penalize(logits_V: Tensor, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]) -> Tensor:
    """The logits after the penalties of `params`, float32."""
    out_V = logits_V.float().clone()
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *generated}), device=out_V.device)
        old = out_V[seen]
        out_V[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if generated:
        tokens, counts = torch.tensor(generated, device=out_V.device).unique(return_counts=True)
        out_V[tokens] -= params.presence_penalty + params.frequency_penalty * counts
    return out_V
