"""Plain generation: one batch or one stream, from a model and a cache. The engine batches many requests instead."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kimi_k3.sampling import SamplingParams, fresh_seed, sample

if TYPE_CHECKING:
    from kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM
    from kimi_k3.tokenization_kimi_k3 import KimiK3Tokenizer

# Tokens of one row that run through the layers at once: bounds the activations of a long prompt.
PREFILL_TOKENS = 2048


@dataclass
class GeneratedToken:
    """One step of a stream: the token, the text that it makes certain, and why the stream ends with it, if it does.

    finish_reason: None, "stop" (an end id), "stop_string" or "length".
    """

    token_id: int
    text: str
    finish_reason: str | None


class StopText:
    """Text pieces in, text that may be shown out: the part that could still become a stop text is held back."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop = tuple(stop)
        self.is_stopped = False
        self._held = ""

    def feed(self, piece: str) -> str:
        """The text that is now certain; nothing of a stop text is among it, and nothing after one."""
        if self.is_stopped:
            return ""
        text = self._held + piece
        found = [at for at in map(text.find, self.stop) if at >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        longest = max(
            (n for s in self.stop for n in range(1, min(len(s), len(text) + 1)) if text.endswith(s[:n])), default=0
        )
        self._held = text[len(text) - longest :]
        return text[: len(text) - longest]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return "" if self.is_stopped else held


def end_ids(model: KimiK3ForCausalLM, eos_token_id: int | Sequence[int] | None) -> frozenset[int]:
    """The ids that end a generation: those given, else those of config.json and generation_config.json; [] is none."""
    if eos_token_id is not None:
        return frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id)
    generation = model.generation_config.get("eos_token_id")
    generation = [generation] if isinstance(generation, int) else generation or []
    return frozenset(model.config.eos_token_ids) | frozenset(generation)


def _next_logits(
    model: KimiK3ForCausalLM, input_ids: Tensor, attention_mask: Tensor | None, prefill_tokens: int, **inputs: Any
) -> Generator[Tensor, Tensor, None]:
    """Logits [B, V] after the prompt, then, each time tokens [B] are sent, after those."""
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(f"generate: want input_ids [B, T], not empty, got {list(input_ids.shape)}")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        wanted, given = list(input_ids.shape), list(attention_mask.shape)
        raise ValueError(f"generate: want attention_mask {wanted} as input_ids, got {given}")
    if prefill_tokens < 1:
        raise ValueError(f"generate: want prefill_tokens >= 1, got {prefill_tokens}")
    inputs_embeds, attention_mask = model.prompt_embeds(input_ids, attention_mask, **inputs)
    length = input_ids.shape[1] if inputs_embeds is None else inputs_embeds.shape[1]
    cache = model.make_cache(input_ids.shape[0])
    for start in range(0, length, prefill_tokens):
        piece = slice(start, start + prefill_tokens)
        out = model(
            input_ids=input_ids[:, piece] if inputs_embeds is None else None,
            inputs_embeds=None if inputs_embeds is None else inputs_embeds[:, piece],
            attention_mask=None if attention_mask is None else attention_mask[:, piece],
            past_key_values=cache, logits_to_keep=1,
        )  # fmt: skip
    while True:
        token_ids = yield out.logits[:, -1]
        out = model(token_ids[:, None], past_key_values=cache, logits_to_keep=1)


@torch.no_grad()
def generate(
    model: KimiK3ForCausalLM,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int | Sequence[int] | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    stop: Sequence[str] = (),
    tokenizer: KimiK3Tokenizer | None = None,
    prefill_tokens: int = PREFILL_TOKENS,
    **inputs: Any,
) -> Tensor:
    """Continue each row of a batch.

    Args:
        input_ids: [B, T] integers.     attention_mask: [B, T], 0 at left padding.
        temperature, top_p, top_k, min_p: see SamplingParams.
        seed: a row's draws depend on its seed and the position alone: a number seeds every row with itself, so that a
            row gives the same tokens alone and in any batch; a list has one for each row; None draws fresh ones.
        eos_token_id: ids that end a row; None: those of the model's configuration; []: none.
        stop: texts that end a row; they need `tokenizer`.
        prefill_tokens: tokens of a row that run at once; bounds memory, not results.
        inputs: pixel_values and grid_thws of the multimodal class.
    Returns: [B, T + new] on input_ids' device: `new` is the longest row up to and including its end; shorter rows are
        filled up with the pad id.
    Raises: ValueError for arguments that do not fit; FloatingPointError, naming the row, for non-finite logits.
    """
    batch = input_ids.shape[0]
    if attention_mask is not None and attention_mask.shape == input_ids.shape and not bool(attention_mask[:, -1].all()):
        raise ValueError(
            "generate: want left padding (attention_mask 1 in the last column), got a row that ends in padding"
        )
    if stop and tokenizer is None:
        raise ValueError("generate: stop texts need tokenizer=")
    params = SamplingParams(max_new_tokens, temperature, top_p, top_k, min_p, stop=stop)
    if seed is None:
        seeds = [fresh_seed() for _ in range(batch)]
    else:
        seeds = [seed] * batch if isinstance(seed, int) else list(seed)
    if len(seeds) != batch or not all(isinstance(one, int) for one in seeds):
        raise ValueError(f"generate: want an integer seed, or one for each of the {batch} rows, got {seed!r}")
    ends, pad = end_ids(model, eos_token_id), model.config.pad_token_id or 0
    texts = [StopText(params.stop) for _ in range(batch)]
    decoders = [tokenizer.stream_decoder() for _ in range(batch)] if stop and tokenizer is not None else []

    rows: list[list[int]] = [[] for _ in range(batch)]
    running = set(range(batch))
    steps = _next_logits(model, input_ids, attention_mask, prefill_tokens, **inputs)
    logits_BV = next(steps)
    for position in range(max_new_tokens):
        for row in sorted(running):
            try:
                token = sample(logits_BV[row], params, seeds[row], position)
            except FloatingPointError as error:
                raise FloatingPointError(f"generate: row {row}: {error}") from None
            rows[row].append(token)
            if decoders:
                texts[row].feed(decoders[row].feed(token))
            if token in ends or texts[row].is_stopped:
                running.discard(row)
        if not running or position == max_new_tokens - 1:
            break
        last = [tokens[-1] if row in running else pad for row, tokens in enumerate(rows)]
        logits_BV = steps.send(torch.tensor(last, device=input_ids.device))
    new = max(map(len, rows))
    filled = [tokens + [pad] * (new - len(tokens)) for tokens in rows]
    return torch.cat([input_ids, torch.tensor(filled, dtype=input_ids.dtype, device=input_ids.device)], dim=1)


@torch.no_grad()
def stream_generate(
    model: KimiK3ForCausalLM,
    input_ids: Sequence[int],
    *,
    tokenizer: KimiK3Tokenizer | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    stop: Sequence[str] = (),
    prefill_tokens: int = PREFILL_TOKENS,
    **inputs: Any,
) -> Iterator[GeneratedToken]:
    """`generate` for one prompt, token by token: the same tokens, with text where a tokenizer is given.

    With a tokenizer its own end ids join those of the configuration. The texts of all steps joined equal one decode of
    all tokens, up to a stop text and without the end id. Closing the iterator (Ctrl-C) is clean at any point.
    """
    if stop and tokenizer is None:
        raise ValueError("stream_generate: stop texts need tokenizer=")
    params = SamplingParams(max_new_tokens, temperature, top_p, top_k, min_p, stop=stop)
    seed = fresh_seed() if seed is None else seed
    ends = end_ids(model, eos_token_id)
    if tokenizer is not None and eos_token_id is None:
        ends |= frozenset(tokenizer.end_token_ids)
    shown, decoder = StopText(params.stop), None if tokenizer is None else tokenizer.stream_decoder()
    steps = _next_logits(model, torch.tensor([list(input_ids)], device=model.device), None, prefill_tokens, **inputs)
    logits_V = next(steps)[0]
    for position in range(max_new_tokens):
        token = sample(logits_V, params, seed, position)
        text = "" if decoder is None or token in ends else shown.feed(decoder.feed(token))
        reason = "stop" if token in ends else "stop_string" if shown.is_stopped else None
        if reason is None and position == max_new_tokens - 1:
            reason = "length"
        if reason is not None and decoder is not None:
            text += shown.feed(decoder.finish()) + shown.finish()
        yield GeneratedToken(token, text, reason)
        if reason is not None:
            return
        logits_V = steps.send(torch.tensor([token], device=model.device))[0]
