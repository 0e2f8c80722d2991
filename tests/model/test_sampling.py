"""Filters against a loop over sorted tokens, draws against their distribution, and seeds."""

import math
import random

import pytest
import torch

from kimi_k3.sampling import Penalties, SamplingParams, sample, uniform


def random_logits(seed: int, vocab: int = 40, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def filtered_by_loops(logits, temperature, top_p, top_k, min_p) -> dict[int, float]:
    """Token -> probability: top-k, then top-p of what is left, then min-p relative to the best; renormalised."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token].item(), token))
    best = logits[order[0]].item()
    weight = {token: math.exp((logits[token].item() - best) / temperature) for token in order}
    kept = order[:top_k] if top_k else order
    total, share, nucleus = sum(weight[token] for token in kept), 0.0, []
    for token in kept:
        if top_p < 1 and share >= top_p * total:
            break
        nucleus.append(token)
        share += weight[token]
    likely = [token for token in nucleus if weight[token] >= min_p * weight[nucleus[0]]]
    total = sum(weight[token] for token in likely)
    return {token: weight[token] / total for token in likely}


def tokens_at(monkeypatch, logits, params, draws) -> list[int]:
    tokens = []
    for draw in draws:
        monkeypatch.setattr("kimi_k3.sampling.uniform", lambda seed, position, draw=draw: draw)
        tokens.append(sample(logits, params, 0, 0))
    return tokens


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.31, 1e-6])
@pytest.mark.parametrize("top_k", [0, 1, 5, 1000])
@pytest.mark.parametrize("min_p", [0.0, 0.07, 1.0])
def test_filters_equal_a_loop(monkeypatch, temperature, top_p, top_k, min_p):
    """Each kept token is drawn just inside both ends of its share, the likeliest first."""
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    for seed in range(4):
        logits = random_logits(seed)
        wanted = filtered_by_loops(logits, temperature, top_p, top_k, min_p)
        draws, tokens, start = [], [], 0.0
        for token, probability in wanted.items():
            margin = 1e-5 * max(probability, 0.01)  # float32 weights
            draws += [max(start + margin, 0.0), start + probability - margin] if probability > 4 * margin else []
            tokens += [token] * 2 if probability > 4 * margin else []
            start += probability
        assert tokens_at(monkeypatch, logits, params, draws) == tokens
        assert tokens_at(monkeypatch, logits, params, [0.0]) == [next(iter(wanted))]


def test_top_p_is_taken_of_what_top_k_left(monkeypatch):
    # shares 0.4, 0.3, 0.2, 0.1; of the two best 0.571 and 0.429: 0.5 keeps one of them, where 0.5 of all keeps two
    logits, most = torch.tensor([0.4, 0.3, 0.2, 0.1]).log(), [1 - 2**-53]
    assert tokens_at(monkeypatch, logits, SamplingParams(temperature=1.0, top_p=0.5), most) == [1]
    assert tokens_at(monkeypatch, logits, SamplingParams(temperature=1.0, top_p=0.5, top_k=2), most) == [0]


def drawn_by_sorting(logits, params, draw) -> int:
    """The definition: sort, filter, cumulate, look up."""
    scaled = ((logits.float() - logits.max().float()) / params.temperature).sort(descending=True, stable=True)
    weights = scaled.values.exp()
    mass, kept = weights.double().cumsum(0), len(logits)
    if params.top_k:
        kept = min(kept, params.top_k)
    if params.top_p < 1:
        before = mass - weights.double()
        kept = min(kept, max(1, int((before < params.top_p * mass[kept - 1]).sum())))
    kept = min(kept, int((weights >= params.min_p).sum()))
    place = torch.searchsorted(mass[:kept].contiguous(), draw * float(mass[kept - 1]), right=True)
    return int(scaled.indices[min(int(place), int(weights[:kept].count_nonzero()) - 1)])


@pytest.mark.parametrize("shape", ["peaked", "flat", "equal", "levels", "one", "masked", "deep"])
def test_large_vocabularies_equal_sorting(monkeypatch, shape):
    """Whatever lies in one bin, in many, or below all of them."""
    generator = torch.Generator().manual_seed(len(shape))
    noise = torch.randn(20_000, generator=generator)
    logits = {
        "peaked": noise * 8, "flat": noise * 0.1, "equal": torch.zeros(20_000), "levels": (noise * 2).round(),
        "one": torch.where(torch.arange(20_000) == 77, 90.0, noise), "deep": noise * 1e4,
        "masked": torch.where(torch.arange(20_000) % 7 == 0, noise, -torch.inf),
    }[shape]  # fmt: skip
    draws = torch.rand(6, dtype=torch.float64, generator=generator).tolist()
    draws += [0.0, 1e-12, 1 - 1e-9]
    for filters in ({}, {"top_p": 0.9}, {"top_p": 0.3, "temperature": 0.5}, {"top_k": 40}, {"top_k": 9_000, "top_p": 0.8},
                    {"min_p": 0.02, "temperature": 3.0}, {"min_p": 0.5, "top_k": 11, "top_p": 0.99}):  # fmt: skip
        params = SamplingParams(**({"temperature": 1.0} | filters))
        wanted = [drawn_by_sorting(logits, params, draw) for draw in draws]
        assert tokens_at(monkeypatch, logits, params, draws) == wanted, filters


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1, "temperature": 1.7}])
def test_draws_follow_the_distribution(params):
    params = SamplingParams(**({"temperature": 1.0} | params))
    logits, draws = random_logits(3, vocab=12, spread=1.2), 4000
    wanted = filtered_by_loops(logits, params.temperature, params.top_p, params.top_k, params.min_p)
    counts = dict.fromkeys(wanted, 0)
    for i in range(draws):  # seeds and positions both vary
        counts[sample(logits, params, seed=i // 4, position=i % 4)] += 1
    chi_square = sum((counts[t] - draws * p) ** 2 / (draws * p) for t, p in wanted.items())
    freedom = len(wanted) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)  # four standard deviations of chi-square


def test_draws_at_successive_positions_are_uncorrelated():
    draws = torch.tensor(
        [[uniform(seed, position) for position in range(40)] for seed in range(200)], dtype=torch.float64
    )
    assert abs(draws.mean() - 0.5) < 0.02 and abs(draws.var() - 1 / 12) < 0.005
    by_position, by_seed = draws - 0.5, (draws - 0.5).T
    for table in (by_position, by_seed):
        assert abs((table[:, 1:] * table[:, :-1]).mean() * 12) < 0.06  # 5 / sqrt(8000)
    assert bool((draws >= 0).all()) and bool((draws < 1).all()) and len(draws.flatten().unique()) == 8000


def test_a_draw_depends_on_seed_and_position_alone():
    logits, params = random_logits(0), SamplingParams(temperature=1.0)
    first = [sample(logits, params, seed, position) for seed in (1, 2**62) for position in range(20)]
    torch.manual_seed(5)
    torch.rand(10)
    assert first == [sample(logits, params, seed, position) for seed in (1, 2**62) for position in range(20)]
    assert len(set(first)) > 5


def test_greedy_takes_the_first_largest():
    assert sample(torch.tensor([1.0, 3.0, 3.0, 2.0]), SamplingParams(), 0, 0) == 1
    assert sample(torch.tensor([-torch.inf, -1e30, -torch.inf]), SamplingParams(), 0, 0) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ties_equal_top_k_1_and_greedy(dtype):
    for seed in range(5):
        logits = random_logits(seed).to(dtype)
        params = SamplingParams(temperature=1.0, top_k=1, top_p=0.8)
        assert sample(logits, params, seed, 0) == sample(logits, SamplingParams(), seed, 0) == int(logits.argmax())


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-40])
def test_a_tiny_temperature_is_greedy(temperature):
    """Logits divided by it overflow float32."""
    for seed in range(5):
        logits = random_logits(seed, spread=30.0)
        assert sample(logits, SamplingParams(temperature=temperature), seed, 0) == int(logits.argmax())


@pytest.mark.parametrize("filters", [{}, {"top_k": 30}, {"top_p": 0.75}, {"min_p": 0.5}])
@pytest.mark.parametrize("temperature", [1e20, 1e33, 1e36, 1e38, 1.7e308])
def test_a_huge_temperature_draws_from_all_alike(monkeypatch, temperature, filters):
    """The scaled logits lie so close together, or underflow, that all weigh the same."""
    logits = random_logits(0)
    kept = 30 if filters.keys() & {"top_k", "top_p"} else 40
    params = SamplingParams(temperature=temperature, **filters)
    drawn = tokens_at(monkeypatch, logits, params, [(i + 0.5) / kept for i in range(kept)])
    likely = set(logits.topk(kept).indices.tolist())
    assert len(set(drawn)) == kept and (set(drawn) == likely or temperature > 1e37)


@pytest.mark.parametrize("spread", [1e-45, 1e-40, 1e-36, 1e-31, 1e-29])
def test_logits_that_differ_by_next_to_nothing_are_drawn_alike(monkeypatch, spread):
    logits = torch.tensor([0.0, -spread, 0.0, -spread])
    assert tokens_at(monkeypatch, logits, SamplingParams(temperature=1.0), [0.1, 0.3, 0.6, 0.9]) == [0, 2, 1, 3]


def test_huge_logits_and_dropped_tokens_are_fine():
    logits = torch.tensor([3e38, -3e38, 3e38, -torch.inf])
    drawn = {sample(logits, SamplingParams(temperature=1.0), seed, 0) for seed in range(30)}
    assert drawn == {0, 2}


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"min_p": 0.4}, {"top_p": 0.3}])
@pytest.mark.parametrize("vocab", [40, 20_000])
def test_draws_at_the_edges_stay_among_the_kept_tokens(monkeypatch, filters, vocab):
    params = SamplingParams(temperature=0.3, **filters)
    for seed in range(8):
        logits = random_logits(seed, vocab)
        kept = list(filtered_by_loops(logits, 0.3, params.top_p, params.top_k, params.min_p))
        assert tokens_at(monkeypatch, logits, params, (0.0, 1.0 - 2.0**-53)) == [kept[0], kept[-1]]


@pytest.mark.parametrize("bad", [[torch.nan, 1.0], [torch.inf, 1.0], [-torch.inf, -torch.inf], [1.0, torch.nan]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_are_an_error(bad, temperature):
    with pytest.raises(FloatingPointError, match="token 7"):
        sample(torch.tensor(bad), SamplingParams(temperature=temperature), 0, 7)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0), ("temperature", -0.1), ("temperature", math.nan), ("top_p", 0.0), ("top_p", 1.1),
        ("top_p", math.nan), ("top_k", -1), ("min_p", -0.1), ("min_p", 1.5), ("stop", [""]), ("stop", [3]),
        ("logprobs", -1), ("temperature", math.inf),
    ],
)  # fmt: skip
def test_wrong_parameters_are_named(name, value):
    with pytest.raises(ValueError, match=rf"{name}.*{value!r}".replace("[", r"\[")):
        SamplingParams(**{name: value})


def test_one_stop_text_may_be_given_as_a_string():
    assert SamplingParams(stop="ab").stop == ("ab",)


def penalized_anew(logits_V, params: SamplingParams, prompt: list[int], generated: list[int]) -> torch.Tensor:
    """The definition: from the whole sequence, at every step."""
    out_V = logits_V.float().clone()
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *generated}))
        old = out_V[seen]
        out_V[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if generated:
        tokens, counts = torch.tensor(generated).unique(return_counts=True)
        out_V[tokens] -= params.presence_penalty + params.frequency_penalty * counts
    return out_V


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "penalties", [(1.3, 0.0, 0.0), (0.7, 0.5, 0.25), (1.0, 0.4, 0.0), (1.0, 0.0, -0.3), (1.17, -0.2, 1 / 3)]
)
@pytest.mark.parametrize("vocab", [7, 40, 3000])
def test_penalties_that_are_kept_equal_those_of_the_whole_sequence(vocab, penalties, dtype):
    """Bit for bit, where all tokens have been seen too."""
    repetition, presence, frequency = penalties
    params = SamplingParams(120, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    rng = random.Random(vocab)
    prompt, generated = [rng.randrange(vocab) for _ in range(rng.randrange(1, 60))], []
    kept = Penalties(params, prompt, vocab, torch.device("cpu"))
    for step in range(120):
        logits_V = random_logits(step, vocab, spread=8.0).to(dtype)
        logits_V[step % vocab], logits_V[-1 - step % 5] = -0.0, -math.inf
        before, got = logits_V.clone(), kept.apply(logits_V)
        want = penalized_anew(logits_V, params, prompt, generated)
        assert got.dtype == torch.float32 and torch.equal(got.view(torch.int32), want.view(torch.int32))
        assert torch.equal(logits_V, before)
        # Some tokens come again and again, and some are of the prompt.
        generated.append(rng.choice([*prompt[:3], *generated[-3:], rng.randrange(vocab), rng.randrange(vocab)]))
        kept.add(generated[-1])
