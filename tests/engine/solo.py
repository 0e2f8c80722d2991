"""What a request must give: the tokens of one forward over it alone."""

from pathlib import Path

import torch

import kimi_k3
from kimi_k3 import KimiK3ForCausalLM, SamplingParams
from kimi_k3.sampling import sample

DEMO = Path(kimi_k3.__file__).parent / "demo"
SMOOTH = Path(__file__).parents[1] / "golden" / "smooth"


def load(folder: Path) -> KimiK3ForCausalLM:
    return KimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float32, progress=False)


class Recorder:
    """A logits hook that keeps the row that each token was chosen from."""

    def __init__(self):
        self.rows: list[torch.Tensor] = []

    def __call__(self, token_ids, logits_V):
        self.rows.append(logits_V.clone())
        return logits_V


@torch.no_grad()
def solo_logits(model, prompt: list[int], generated: list[int], is_invariant: bool) -> torch.Tensor:
    """The rows that `generated` is chosen from: one forward over the whole sequence, without cache or engine."""
    before = model.model.is_batch_invariant
    model.set_batch_invariant(is_invariant)
    try:
        return model(torch.tensor([prompt + generated[:-1]])).logits[0, len(prompt) - 1 :]
    finally:
        model.set_batch_invariant(before)


def assert_equals_solo(model, prompt, result, rows, params: SamplingParams, ends=(), is_invariant=True):
    """The request's logits are bit for bit those of the whole sequence alone, its tokens what these rows give."""
    expected = solo_logits(model, prompt, result.token_ids, is_invariant)
    assert len(rows) == len(result.token_ids)
    assert torch.equal(torch.stack(rows), expected)
    for position, token in enumerate(result.token_ids):
        assert sample(expected[position], params, params.seed or 0, position) == token
    if result.finish_reason == "length":
        assert len(result.token_ids) == params.max_new_tokens
    elif result.finish_reason == "stop":
        assert result.token_ids[-1] in ends and not set(result.token_ids[:-1]) & set(ends)
