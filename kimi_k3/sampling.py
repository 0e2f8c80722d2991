"""How the next token is chosen: filters and draws, each row by its own parameters alone."""

from __future__ import annotations

import hashlib
import math
import numbers
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor


def as_int(value: Any) -> int | None:
    """A whole number as an int: Python's, numpy's or torch's; None for anything else, a bool too."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool:
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_float(value: Any) -> float | None:
    """A real number as a float; None for anything else, a bool too."""
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else None


def _listed(value: Any) -> list[Any] | None:
    try:
        return list(value)
    except TypeError:
        return None


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
    Whole numbers may be numpy's or torch's.
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
        self.check()

    def check(self) -> None:
        """Raise ValueError, naming the parameter, unless all can be used as they are now."""

        def refuse(name: str, wanted: str) -> NoReturn:
            raise ValueError(f"SamplingParams: {name} must be {wanted}, got {getattr(self, name)!r}")

        def whole(name: str, least: int | None, wanted: str) -> None:
            value = as_int(getattr(self, name))
            if value is None or (least is not None and value < least):
                refuse(name, wanted)
            setattr(self, name, value)

        def real(name: str, is_right: Callable[[float], bool], wanted: str) -> None:
            value = as_float(getattr(self, name))
            if value is None or not is_right(value):
                refuse(name, wanted)
            setattr(self, name, value)

        whole("max_new_tokens", 1, "a whole number >= 1")
        whole("top_k", 0, "a whole number >= 0 (0: no limit)")
        whole("n", 1, "a whole number >= 1")
        if self.seed is not None:
            whole("seed", None, "a whole number or None")
        if self.logprobs is not None:
            whole("logprobs", 0, "a whole number >= 0 or None")
        real("temperature", lambda value: 0 <= value < math.inf, ">= 0 and finite")
        real("top_p", lambda value: 0 < value <= 1, "in (0, 1]")
        real("min_p", lambda value: 0 <= value <= 1, "in [0, 1]")
        real("repetition_penalty", lambda value: 0 < value < math.inf, "> 0 and finite")
        real("presence_penalty", math.isfinite, "finite")
        real("frequency_penalty", math.isfinite, "finite")
        if isinstance(self.stop, str):
            self.stop = (self.stop,)
        stop, ends = _listed(self.stop), _listed(self.stop_token_ids)
        if stop is None or not all(isinstance(text, str) and text for text in stop):
            refuse("stop", "non-empty strings")
        ids = [token for token in map(as_int, ends or []) if token is not None and token >= 0]
        if ends is None or len(ids) < len(ends):
            refuse("stop_token_ids", "whole numbers >= 0")
        self.stop, self.stop_token_ids = tuple(stop), tuple(ids)
        if self.logits_processor is not None and not callable(self.logits_processor):
            refuse("logits_processor", "callable or None")
        if not isinstance(self.ignore_eos, bool):
            refuse("ignore_eos", "True or False")

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


BINS = 4096  # of a row's weights on a CPU
LEAST_SPREAD = 1e-30  # of the scaled logits for more than one bin: their scale, BINS / spread, must fit into float32
SPAN = 32.0  # the bins cover so much of the scaled logits: what lies deeper weighs less than 2e-14 of the largest


class _Descending:
    """A row's tokens from the most likely one down, equal ones by their number, each with the weight exp(scaled logit).

    Weights are float32, sums float64. Nothing is sorted but what is asked for: weights are summed in bins of scaled
    logits, and of these only the ones in which a sum is looked up are sorted. On a GPU all lies in one bin: its sums in
    bins have no fixed order, and its sort is fast.
    """

    def __init__(self, scaled_V: Tensor, deepest: float) -> None:
        """scaled_V: [V] float32, <= 0, one of them 0.     deepest: the least of them."""
        self.scaled_V, self.weights_V = scaled_V, scaled_V.exp()
        self.bins_V: Tensor | None = None
        if scaled_V.device.type == "cpu" and deepest < -LEAST_SPREAD:
            self.bins_V = (scaled_V * ((1 - BINS) / min(-deepest, SPAN))).clamp_(max=BINS - 1).long()
        self._sorted: dict[int, tuple[Tensor, Tensor]] = {}
        self.mass_B = self._sums(self.weights_V.double())

    def _sums(self, values_V: Tensor) -> Tensor:
        """[bins]: the values of each bin and of those before it."""
        if self.bins_V is None:
            return values_V.sum(0, keepdim=True)
        return values_V.new_zeros(BINS).scatter_add_(0, self.bins_V, values_V).cumsum(0)

    def _bin(self, index: int) -> tuple[Tensor, Tensor]:
        """The tokens of a bin in order, and the mass of all up to each."""
        if index not in self._sorted:
            if self.bins_V is None:
                tokens = self.scaled_V.sort(descending=True, stable=True).indices
            else:
                tokens = (self.bins_V == index).nonzero()[:, 0]
                tokens = tokens[self.scaled_V[tokens].sort(descending=True, stable=True).indices]
            mass = self.weights_V[tokens].double().cumsum(0)
            self._sorted[index] = tokens, mass + self.mass_B[index - 1] if index else mass
        return self._sorted[index]

    def mass(self) -> float:
        return float(self.mass_B[-1])

    def mass_of_first(self, count: int) -> float:
        """Of the `count` most likely ones, 1 <= count <= V."""
        counts_B = self._sums(torch.ones_like(self.scaled_V, dtype=torch.float64))
        index = int(torch.searchsorted(counts_B, float(count)))
        before = int(counts_B[index - 1]) if index else 0
        return float(self._bin(index)[1][count - before - 1])

    def first_at(self, mass: float, *, is_beyond: bool) -> tuple[int, float]:
        """The first token with which the sum reaches `mass` (goes beyond it, if is_beyond), and that sum."""
        index = min(int(torch.searchsorted(self.mass_B, mass, right=is_beyond)), self.mass_B.numel() - 1)
        tokens, mass_up_to = self._bin(index)
        # A bin's own sum and that of its sorted tokens may round apart: then it is the last one that weighs something.
        last = int(torch.searchsorted(mass_up_to, mass_up_to[-1]))
        place = min(int(torch.searchsorted(mass_up_to, mass, right=is_beyond)), last)
        return int(tokens[place]), float(mass_up_to[place])


def _kept_mass(row: _Descending, params: SamplingParams) -> float:
    """The mass that the filters leave. Each keeps the most likely tokens down to some place."""
    size = row.scaled_V.shape[0]
    kept = row.mass_of_first(params.top_k) if 0 < params.top_k < size else row.mass()
    if params.top_p < 1:  # of what top_k left: a token stays while those before it have not reached the share
        kept = min(kept, row.first_at(params.top_p * kept, is_beyond=False)[1])
    if params.min_p:
        likely = int(torch.count_nonzero(row.weights_V >= params.min_p))  # the most likely one weighs 1
        kept = min(kept, row.mass_of_first(likely)) if likely < size else kept
    return kept


def sample(logits_V: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """The next token of one row, by inverting the cumulative distribution, largest first, at `uniform(seed, position)`.

    Raises: FloatingPointError if a logit is NaN or +inf, or all are -inf: argmax over those would be a silent token 0.
    """
    lowest, highest = torch.aminmax(logits_V)
    if not math.isfinite(best := float(highest)):
        raise FloatingPointError(f"sample: non-finite logits at generated token {position}")
    if params.temperature == 0:
        return int(logits_V.argmax())
    # From the largest downwards, so that no quotient overflows to +inf, and by no less than float32 can hold.
    temperature = max(params.temperature, torch.finfo(torch.float32).tiny)
    row = _Descending((logits_V.float() - best).div_(temperature), (float(lowest) - best) / temperature)
    return row.first_at(uniform(seed, position) * _kept_mass(row, params), is_beyond=True)[0]


class Penalties:
    """The penalties of one request. A step costs time in the distinct tokens seen, whatever the length of the sequence."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int, device: torch.device) -> None:
        seen = sorted({*prompt}) if params.repetition_penalty != 1 else []  # the others leave the prompt's tokens alone
        self.params, self._places = params, {token: place for place, token in enumerate(seen)}
        size = min(vocab_size, len(seen) + params.max_new_tokens)
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)  # each once, in the places so far
        self._counts = torch.zeros_like(self._tokens)  # how often each was generated
        self._tokens[: len(seen)] = torch.tensor(seen, dtype=torch.int64, device=device)

    def add(self, token: int) -> None:
        """Count a generated token, at most `params.max_new_tokens` of them."""
        place = self._places.setdefault(token, len(self._places))
        self._tokens[place] = token
        self._counts[place] += 1

    def apply(self, logits_V: Tensor) -> Tensor:
        """The logits after the penalties, float32."""
        params, out_V = self.params, logits_V.to(torch.float32, copy=True)
        tokens_S, counts_S = self._tokens[: len(self._places)], self._counts[: len(self._places)]
        old_S = out_V[tokens_S]
        if params.repetition_penalty != 1:
            old_S = torch.where(old_S > 0, old_S / params.repetition_penalty, old_S * params.repetition_penalty)
        off_S = params.presence_penalty + params.frequency_penalty * counts_S
        old_S -= torch.where(counts_S > 0, off_S, 0.0)
        out_V[tokens_S] = old_S
        return out_V
