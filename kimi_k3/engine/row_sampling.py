"""The next token of one request from its row of logits, by its own parameters alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kimi_k3.engine.request import Request, RequestOutput, TokenLogprobs
from kimi_k3.sampling import Penalties, SamplingParams, sample


class RowError(Exception):
    """Why a request ends with an error. is_state_bad: its state may hold what is not finite."""

    def __init__(self, message: str, is_state_bad: bool = False) -> None:
        super().__init__(message)
        self.is_state_bad = is_state_bad


def is_plain_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0 and not params.has_penalties and params.logits_processor is None


def next_output(request: Request, logits_V: Tensor, is_finite: bool, best: int) -> RequestOutput:
    """What a request gains with its next token.

    Args:
        is_finite: whether the largest of `logits_V` is.     best: its place, where the parameters are plain greedy.
    Raises: RowError, whatever goes wrong.
    """
    params, position = request.params, len(request.tokens) - len(request.prompt)
    what = "sampling"
    try:
        if params.logits_processor is not None:
            logits_V = _processed(params.logits_processor, request.tokens, logits_V)
        if params.has_penalties:
            if request.penalties is None:
                request.penalties = Penalties(params, request.prompt, len(logits_V), logits_V.device)
            logits_V = request.penalties.apply(logits_V)
        if not is_finite:
            raise RowError(f"non-finite logits at generated token {position}", is_state_bad=True)
        token = best if is_plain_greedy(params) else sample(logits_V, params, request.seed, position)
        what = "logprobs and text"
        return _output(request, token, logits_V)
    except RowError:
        raise
    except FloatingPointError as error:  # of what a hook or penalties made of finite logits
        raise RowError(str(error)) from error
    except Exception as error:
        raise RowError(f"{what}: {type(error).__name__}: {error}") from error


def _output(request: Request, token: int, logits_V: Tensor) -> RequestOutput:
    """What a request gains with its next token, and whether that ends it."""
    params, output = request.params, RequestOutput(request.rid, [token])
    if params.logprobs is not None:
        output.logprobs = [_logprobs(logits_V, token, params.logprobs)]
    is_end = token in request.ends
    if request.decoder is not None and not is_end:
        output.text = request.shown.feed(request.decoder.feed(token))
    is_long = len(request.tokens) + 1 - len(request.prompt) >= params.max_new_tokens
    reason = "stop" if is_end else "stop_string" if request.shown.is_stopped else "length" if is_long else None
    if reason is not None and request.decoder is not None:
        output.text += request.shown.feed(request.decoder.finish()) + request.shown.finish()
    output.finish_reason = reason
    return output


def _processed(hook: Callable[[list[int], Tensor], Tensor], tokens: list[int], logits_V: Tensor) -> Tensor:
    """What a logits hook makes of a row."""
    try:
        out = hook(list(tokens), logits_V)
    except Exception as error:
        raise RowError(f"logits_processor: {type(error).__name__}: {error}") from error
    if not isinstance(out, Tensor) or out.shape != logits_V.shape or not out.is_floating_point():
        given = f"{out.dtype} {list(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise RowError(f"logits_processor: want floating-point logits {list(logits_V.shape)} from it, got {given}")
    return out


def _logprobs(logits_V: Tensor, token: int, count: int) -> TokenLogprobs:
    values_V = torch.log_softmax(logits_V.double(), -1)
    best = values_V.topk(min(count, values_V.shape[0])) if count else None
    top = {} if best is None else dict(zip(best.indices.tolist(), best.values.tolist()))
    return TokenLogprobs(float(values_V[token]), top)
