"""Properties of the whole model, mostly against the plain float64 model of reference_model.py."""

import copy
import hashlib
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference_model import plain_forward, random_ids, random_model, small_config
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint

import kimi_k3.modeling_kimi_k3 as modeling
from kimi_k3 import KimiK3Config, KimiK3ForCausalLM
from kimi_k3.cache import batch_without_cache, make_pools
from kimi_k3.layers.mlp import KimiK3MLP
from kimi_k3.layers.moe import KimiK3Experts, KimiK3Router
from kimi_k3_kernels import mxfp4_dequantize
from kimi_k3_kernels.kda_gates.reference import l2_normalize, log_decay_gate

GOLDEN = Path(__file__).parents[1] / "golden"
CPU = torch.device("cpu")


def text_keys(model: KimiK3ForCausalLM) -> dict:
    return model.config.text_config.to_dict()


VARIANTS = {
    "block_size_2": {},
    "block_size_3_boundary_on_mla": {"attn_res_block_size": 3, "mla": (4, 6)},
    "block_size_4": {"attn_res_block_size": 4},
    "block_size_1": {"attn_res_block_size": 1},
    "block_size_beyond_depth": {"attn_res_block_size": 100},
    "softplus_gate": {"linear": {"gate_lower_bound": None}},
    "other_lower_bound": {"linear": {"gate_lower_bound": -1.5}},
    "low_rank_gate": {"linear": {"use_full_rank_gate": False}},
    "three_taps": {"linear": {"short_conv_kernel_size": 3}},
    "grouped_router": {"num_expert_group": 4, "topk_group": 2, "num_experts_per_token": 3},
    "ungrouped_by_flag": {"num_expert_group": 4, "topk_group": 2, "use_grouped_topk": False},
    "no_renormalising": {"moe_renormalize": False, "routed_scaling_factor": 2.5},
    "one_expert_a_token": {"num_experts_per_token": 1},
    "no_latent_norm": {"latent_moe_use_norm": False},
    "linear_up_branch": {"activation_situ_beta": None, "activation_situ_linear_beta": None},
    "two_dense_layers": {"first_k_dense_replace": 2},
    "all_dense": {"first_k_dense_replace": 6},
    "first_layer_is_mla": {"mla": (1, 4)},
    "rank_norm_eps": {"mla_rank_norm_eps": 0.1},
    "one_shared_expert": {"num_shared_experts": 1},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_equals_the_plain_model(name):
    model = random_model(small_config(**VARIANTS[name]))
    ids = random_ids(model.config, 1, 19)
    wanted = plain_forward(model.state_dict(), text_keys(model), ids[0].tolist())
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits[0], wanted.logits, atol=1e-10, rtol=1e-10)
        cache, steps = model.make_cache(1), []
        for t in range(19):
            steps.append(model(ids[:, t : t + 1], past_key_values=cache).logits[0])
        torch.testing.assert_close(torch.cat(steps), wanted.logits, atol=1e-10, rtol=1e-10)


def test_variants_are_told_apart():
    """Each variant moves the logits of the same weights: so the comparison above sees each of them."""
    for name in ("softplus_gate", "other_lower_bound", "no_renormalising", "linear_up_branch", "rank_norm_eps",
                 "ungrouped_by_flag", "block_size_4", "block_size_beyond_depth"):  # fmt: skip
        changes = VARIANTS[name]
        base = {"num_expert_group": 4, "topk_group": 2} if name == "ungrouped_by_flag" else {}
        model, other = random_model(small_config(**base)), random_model(small_config(**changes))
        ids = random_ids(model.config, 1, 19)
        with torch.no_grad():
            assert (model(ids).logits - other(ids).logits).abs().max() > 1e-3, name


def test_random_models_exercise_the_whole_range():
    model = random_model(small_config())
    trace = plain_forward(model.state_dict(), text_keys(model), random_ids(model.config, 19).tolist())
    decays = torch.cat([g.flatten() for g in trace.log_decays])
    assert decays.min() < -4.9 and decays.max() > -0.1
    assert all(len(set.union(*layer)) >= 4 for layer in trace.chosen)


def test_plain_model_equals_the_golden_logits():
    """What everything here is compared with is itself right."""
    recorded = json.loads((GOLDEN / "golden.reference" / "reference.json").read_text())
    model = KimiK3ForCausalLM.from_pretrained(
        GOLDEN / "golden", dtype=torch.float32, experts="dequantized", progress=False
    )
    wanted = load_file(GOLDEN / "golden.reference" / "logits.safetensors")["hf_f64_prefill"][:24]
    got = plain_forward(model.state_dict(), text_keys(model), recorded["tokens"][:24]).logits
    assert (got - wanted.double()).abs().max() <= 1.2e-4 and (got - wanted.double()).abs().mean() <= 1e-5


def test_bank_sizes_of_the_tiny_configuration():
    text = KimiK3Config.tiny().text_config
    sizes = [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]  # blocks of 4 layers
    assert [text.num_sealed_blocks(i + 1) for i in range(13)] == sizes
    model = random_model(small_config(num_hidden_layers=13, mla=(4, 8, 12, 13), attn_res_block_size=4))
    trace = plain_forward(model.state_dict(), text_keys(model), [1, 2])
    assert trace.bank_sizes == sizes
    _, bank, _, _ = model.model(*whole_inputs(model, torch.tensor([[1, 2]])))
    assert bank.shape[0] == 4  # and the running sum: 5 sources in the last mix


def whole_inputs(model, ids):
    text, dtype = model.config.text_config, model.dtype
    pools = {i: make_pools(text, i, 2, 2, 1, dtype, CPU) for i in range(text.num_hidden_layers)}
    return model.model.embed_tokens(ids[0]), batch_without_cache([ids.shape[1]], CPU), pools


@pytest.mark.parametrize("needs_gradients", [False, True])
def test_sealed_blocks_are_never_written_again(needs_gradients, monkeypatch):
    model = random_model(small_config(num_hidden_layers=9, mla=(4, 8, 9)), torch.float32)
    hashes, seal = {}, modeling.seal

    def hash_of(block):
        return hashlib.sha256(block.detach().numpy().tobytes()).hexdigest()

    def sealing(bank, index, running_sum):
        out = seal(bank, index, running_sum)
        hashes[index] = hash_of(out[index])
        for earlier in range(index):
            assert hash_of(out[earlier]) == hashes[earlier]
        return out

    monkeypatch.setattr(modeling, "seal", sealing)
    with torch.set_grad_enabled(needs_gradients):
        _, bank, _, _ = model.model(*whole_inputs(model, random_ids(model.config, 1, 40)))
    assert [hash_of(block) for block in bank] == [hashes[i] for i in range(5)]
    assert len(set(hashes.values())) == 5


def with_changed_activation(model, position: int):
    """A copy whose `position`-th feed-forward block uses SiLU where it should use SiTU."""
    other = copy.deepcopy(model)
    blocks = [module for module in other.modules() if isinstance(module, (KimiK3MLP, KimiK3Experts))]
    block = blocks[position]
    block.beta, block.linear_beta = 1e6, None  # beta tanh(g / beta) sigmoid(g) -> silu(g)
    return other, len(blocks)


def test_situ_in_every_feed_forward_block_counts():
    model = random_model(small_config(num_hidden_layers=4, mla=(3,)))
    ids = random_ids(model.config, 1, 16)
    with torch.no_grad():
        logits = model(ids).logits
        _, count = with_changed_activation(model, 0)
        assert count == 1 + 3 * 2  # the dense layer; routed and shared experts of the others
        for position in range(count):
            other, _ = with_changed_activation(model, position)
            assert (other(ids).logits - logits).abs().max() > 1e-3, position


def test_a_changed_norm_is_the_one_that_runs():
    """Eager inference mixes and norms in one op, but never beside hooks, another module or a replaced forward."""
    model = random_model(small_config(num_hidden_layers=4, mla=(3,)))
    ids = random_ids(model.config, 1, 16)
    calls = []
    with torch.no_grad():
        logits = model(ids).logits
        norm = model.model.layers["2"].post_attention_layernorm
        handle = norm.register_forward_hook(lambda _, inputs, out: calls.append(out) or 2 * out)
        hooked = model(ids).logits
        handle.remove()
        assert len(calls) == 1 and (hooked - logits).abs().max() > 1e-3
        norm.forward = lambda x: 2 * type(norm).forward(norm, x)
        torch.testing.assert_close(model(ids).logits, hooked)
        del norm.forward
        assert torch.equal(model(ids).logits, logits)
        # The same definition, in PyTorch's own class.
        other = torch.nn.RMSNorm(norm.weight.shape[0], norm.eps)
        other.weight = norm.weight
        model.model.layers["2"].post_attention_layernorm = other
        torch.testing.assert_close(model(ids).logits, logits)
        model.model.layers["2"].post_attention_layernorm = torch.nn.Identity()
        assert (model(ids).logits - logits).abs().max() > 1e-3


# Router


def router_of(experts: int, top_k: int, hidden: int, dtype=torch.float32, seed=0, **changes) -> KimiK3Router:
    text = small_config(num_experts=experts, num_experts_per_token=top_k, hidden_size=hidden, **changes).text_config
    router, generator = KimiK3Router(text), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        router.weight.copy_(torch.randn(experts, hidden, generator=generator) * hidden**-0.5)
        router.e_score_correction_bias.copy_(torch.randn(experts, generator=generator) * 0.05)
    return router.to(dtype)


def sets(topk_ids) -> list[frozenset[int]]:
    return [frozenset(row) for row in topk_ids.tolist()]


@torch.no_grad()
def test_a_large_bias_on_the_chosen_experts_leaves_the_weights():
    router, x = router_of(24, 4, 32), torch.randn(1, 32, generator=torch.Generator().manual_seed(1))
    before = router(x)
    router.e_score_correction_bias[before.topk_ids[0]] += 100
    after = router(x)
    assert sets(before.topk_ids) == sets(after.topk_ids)
    order, other = before.topk_ids.argsort(-1), after.topk_ids.argsort(-1)
    assert torch.equal(before.topk_weights.gather(-1, order), after.topk_weights.gather(-1, other))
    router.e_score_correction_bias[(before.topk_ids[0, 0] + 1) % 24] += 1000  # and it does choose
    assert (before.topk_ids[0, 0].item() + 1) % 24 in sets(router(x).topk_ids)[0]


@torch.no_grad()
def test_896_experts_top_16_are_the_same_sets_at_any_batch_and_in_float64():
    router, hidden = router_of(896, 16, 256), 256
    x = torch.randn(4096, hidden, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    large = router(x)
    scores = torch.sigmoid(x.double() @ router.weight.double().T)
    biased = (scores + router.e_score_correction_bias.double()).sort(-1, descending=True)
    gap = biased.values[:, 15] - biased.values[:, 16]
    assert gap.min() < 1e-5  # a bfloat16 router (steps of 4e-3) fails here
    wanted = sets(biased.indices[:, :16])
    decided = (gap > 1e-6).tolist()  # float32's own rounding
    assert sum(decided) > 4000
    assert all(a == b for a, b, is_decided in zip(sets(large.topk_ids), wanted, decided) if is_decided)
    for row in range(0, 4096, 64):
        single = router(x[row : row + 1])
        if decided[row]:
            assert sets(single.topk_ids)[0] == wanted[row]
    weights = scores.gather(-1, large.topk_ids)
    torch.testing.assert_close(
        large.topk_weights.double(), weights / weights.sum(-1, keepdim=True), atol=1e-6, rtol=1e-5
    )
    assert large.topk_weights.dtype == large.logits.dtype == torch.float32


# KDA's gates and norms


@pytest.mark.parametrize("A_log", [-2.0, 0.0, 2.0794415, 5.0])
@pytest.mark.parametrize("bound", [-5.0, -1.0])
def test_bounded_gate_at_zero_is_half_the_bound(A_log, bound):
    gate = log_decay_gate(torch.zeros(3, 2, 4), torch.full((2,), A_log), bound)
    assert torch.equal(gate, torch.full((3, 2, 4), bound / 2))


def test_gates_are_finite_and_bounded_at_extreme_logits():
    logit = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4]).view(-1, 1, 1)
    bounded = log_decay_gate(logit, torch.zeros(1), -5.0).flatten()
    assert bounded.min() >= -5 and bounded.max() <= 0 and bounded[-1] == -5 and bounded[0] == 0
    softplus = log_decay_gate(logit, torch.zeros(1), None).flatten()
    assert bool(softplus.isfinite().all()) and softplus[-1] == -1e4 and softplus[0] == 0


def test_l2_norm_has_its_epsilon_on_the_sum():
    x = torch.full((1, 128), 1e-4, dtype=torch.float64)  # sum of squares 1.28e-6: as large as the epsilon
    wanted = 1e-4 / (1.28e-6 + 1e-6) ** 0.5
    torch.testing.assert_close(l2_normalize(x), torch.full_like(x, wanted), rtol=1e-12, atol=0)
    assert torch.equal(l2_normalize(torch.zeros(2, 8)), torch.zeros(2, 8))
    large = l2_normalize(torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16))
    torch.testing.assert_close(large.norm(dim=-1), torch.ones(5), atol=1e-5, rtol=0)


# Gradients


def test_gradients_equal_finite_differences_along_random_directions():
    model = random_model(small_config(num_hidden_layers=4, mla=(3,), linear={"num_heads": 2}))
    ids = random_ids(model.config, 1, 70)  # more than one chunk of KDA
    bounds = torch.tensor([0, 3, 70], dtype=torch.int32)

    def loss():
        return model(ids, cu_seqlens=bounds, labels=ids).loss

    loss().backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    unused = {"model.layers.0.self_attention_res_norm.weight", "model.layers.0.self_attention_res_proj.weight"}
    assert {name for name, p in trained.items() if p.grad is None or not bool(p.grad.any())} <= unused
    step = 1e-6
    for pattern in ("embed_tokens", "layers.0.self_attn", "layers.0.mlp", "layers.1.", "layers.2.self_attn",
                    "layers.2.block_sparse_moe", "layers.3.", "_res_", "experts.w", "norm.weight", ""):  # fmt: skip
        some = {name: p for name, p in trained.items() if pattern in name and p.grad is not None}
        assert some, pattern
        generator = torch.Generator().manual_seed(len(pattern))
        directions = {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in some.items()}
        wanted = sum((p.grad * directions[name]).sum() for name, p in some.items())
        with torch.no_grad():
            values = []
            for sign in (1, -2):
                for name, p in some.items():
                    p += sign * step * directions[name]
                values.append(loss())
            for name, p in some.items():
                p += step * directions[name]
        numeric = (values[0] - values[1]) / (2 * step)
        assert numeric.item() == pytest.approx(wanted.item(), rel=2e-5, abs=1e-7), pattern


def test_gradients_through_packed_experts_equal_dequantized_ones():
    packed = random_model(small_config(), experts="mxfp4")
    plain = KimiK3ForCausalLM(packed.config).double().eval()
    state = {}
    for name, tensor in packed.state_dict().items():
        if name.endswith("_packed"):
            scale = packed.state_dict()[name.replace("_packed", "_scale")]
            state[name.removesuffix("_packed")] = mxfp4_dequantize(tensor, scale, torch.float64)
        elif not name.endswith("_scale"):
            state[name] = tensor
    plain.load_state_dict(state)
    ids = random_ids(packed.config, 2, 20)
    for model in (packed, plain):
        model(ids, labels=ids).loss.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    compared = 0
    for name, p in packed.named_parameters():
        if p.requires_grad and p.grad is not None:
            torch.testing.assert_close(p.grad, gradients[name], rtol=1e-9, atol=1e-14)
            compared += 1
    assert compared > 80
    assert packed.model.layers["0"].self_attn.q_proj.weight.grad.abs().max() > 0
    assert packed.model.layers["1"].block_sparse_moe.gate.weight.grad.abs().max() > 0


def test_checkpointed_layers_give_the_same_gradients():
    model = random_model(small_config())
    ids = random_ids(model.config, 1, 40)
    model(ids, labels=ids).loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for layer in model.model.layers.values():
        layer.forward = lambda *inputs, inner=layer.forward: checkpoint(inner, *inputs, use_reentrant=False)
    model(ids, labels=ids).loss.backward()
    for name, gradient in wanted.items():
        assert torch.equal(dict(model.named_parameters())[name].grad, gradient), name


@pytest.mark.parametrize("experts", ["dequantized", "mxfp4"])
def test_a_model_that_ran_in_inference_mode_can_be_trained(experts):
    model = random_model(small_config(), torch.float32, experts=experts)
    ids = random_ids(model.config, 1, 8)
    with torch.inference_mode():
        model(ids)
    model(ids, labels=ids).loss.backward()
    assert model.lm_head.weight.grad is not None


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    model = KimiK3ForCausalLM(small_config(num_hidden_layers=4, mla=(3,)))
    ids = random_ids(model.config, 2, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(48.0).log().item(), abs=0.3)  # uniform over the vocabulary
    assert losses[-1] < 0.5 * losses[0]


# Loss


def loss_by_loops(logits, labels, ends) -> float:
    """Mean of -log p(labels[t + 1] after t) over valid labels, never from a sequence's last token into the next one."""
    total, count = 0.0, 0
    for row in range(labels.shape[0]):
        for t in range(labels.shape[1] - 1):
            target = int(labels[row, t + 1])
            if target != -100 and t + 1 not in ends:
                total -= logits[row, t].double().log_softmax(-1)[target].item()
                count += 1
    return total / count


def test_loss_is_over_unshifted_labels_within_each_sequence():
    model = random_model(small_config())
    ids = random_ids(model.config, 1, 30)
    labels = ids.clone()
    labels[0, [0, 4, 5, 17, 29]] = -100
    bounds = torch.tensor([0, 9, 10, 22, 30], dtype=torch.int32)
    with torch.no_grad():
        out = model(ids, labels=labels, cu_seqlens=bounds)
        assert out.loss.item() == pytest.approx(loss_by_loops(out.logits, labels, {9, 10, 22}), rel=1e-6)
        whole = model(ids, labels=labels)
        assert whole.loss.item() == pytest.approx(loss_by_loops(whole.logits, labels, set()), rel=1e-6)


def test_loss_ignores_padding_whatever_its_labels():
    model = random_model(small_config())
    ids, mask = random_ids(model.config, 2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    labels = ids.clone()
    with torch.no_grad():
        out = model(ids, attention_mask=mask, labels=labels)
        labels[1, :5] = 7
        assert torch.equal(out.loss, model(ids, attention_mask=mask, labels=labels).loss)
        masked = labels.clone()
        masked[1, :6] = -100  # the first real token is nobody's target: the padding before it predicts nothing
        assert out.loss.item() == pytest.approx(loss_by_loops(out.logits, masked, set()), rel=1e-6)


@torch.no_grad()
def test_loss_without_valid_labels_is_zero_and_differs_from_none():
    model = random_model(small_config())
    ids = random_ids(model.config, 1, 5)
    assert model(ids, labels=torch.full_like(ids, -100)).loss.item() == 0
    assert model(ids).loss is None


# Outputs and arguments


@torch.no_grad()
def test_logits_to_keep_counts_per_sequence():
    model = random_model(small_config())
    ids, mask = random_ids(model.config, 3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[1, :10] = 0
    mask[2, :4] = 0
    full = model(ids, attention_mask=mask).logits
    for keep in (1, 3, 12, 40):
        kept = model(ids, attention_mask=mask, logits_to_keep=keep).logits
        assert kept.shape[1] == min(keep, 12)
        torch.testing.assert_close(kept, full[:, -keep:], atol=1e-12, rtol=1e-12)
    bounds = torch.tensor([0, 7, 8, 12], dtype=torch.int32)
    packed = model(ids[:1], cu_seqlens=bounds).logits
    kept = model(ids[:1], cu_seqlens=bounds, logits_to_keep=2).logits
    torch.testing.assert_close(kept, packed[:, [5, 6, 7, 10, 11]], atol=1e-12, rtol=1e-12)
    labelled = model(ids[:1], labels=ids[:1], logits_to_keep=4)
    assert labelled.loss.item() == pytest.approx(loss_by_loops(full[:1, -4:], ids[:1, -4:], set()), rel=1e-6)


@torch.no_grad()
def test_hidden_states_router_logits_and_embeddings():
    model = random_model(small_config())
    ids, mask = random_ids(model.config, 2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    out = model(ids, attention_mask=mask, output_hidden_states=True, output_router_logits=True)
    embeds = model.model.embed_tokens(ids)
    assert len(out.hidden_states) == 1 + 6 + 1 and len(out.router_logits) == 5
    torch.testing.assert_close(out.hidden_states[0], embeds * mask[..., None])
    torch.testing.assert_close(model.lm_head(out.hidden_states[-1]), out.logits)
    assert out.router_logits[0].shape == (2, 10, 8)
    assert all(bool((x[0, :3] == 0).all()) for x in (*out.hidden_states, *out.router_logits, out.logits))
    assert torch.equal(model(inputs_embeds=embeds, attention_mask=mask).logits, out.logits)
    plain = model(ids, attention_mask=mask)
    assert plain.hidden_states is None and plain.router_logits is None and plain.past_key_values is None


@pytest.mark.parametrize("cuts", [(5,), (1, 2, 4), (3,)])
@torch.no_grad()
def test_chained_stages_equal_the_whole_model(cuts):
    whole = random_model(small_config(attn_res_block_size=2))
    ids, layers = random_ids(whole.config, 1, 25), whole.config.text_config.num_hidden_layers
    running_sum, batch, pools = whole_inputs(whole, ids)
    bank = None
    for start, stop in zip((0, *cuts), (*cuts, layers)):
        stage = KimiK3ForCausalLM(whole.config, layers=range(start, stop)).double().eval()
        names = set(stage.state_dict())
        stage.load_state_dict({name: tensor for name, tensor in whole.state_dict().items() if name in names})
        assert ("lm_head.weight" in names) == (stop == layers)
        assert ("model.embed_tokens.weight" in names) == (start == 0)
        sent = None if bank is None else bank.clone()
        running_sum, bank, _, _ = stage.model(running_sum, batch, pools, bank=bank)
        if sent is not None:
            assert torch.equal(bank[: len(sent)], sent)
    logits = stage.lm_head(stage.model.final_hidden(running_sum, bank))
    assert torch.equal(logits, whole(ids).logits[0])


def test_stages_refuse_a_bank_of_another_depth():
    stage = KimiK3ForCausalLM(small_config(), layers=range(3, 6))
    x = torch.zeros(2, 32)
    pools = {i: make_pools(stage.config.text_config, i, 2, 2, 1, torch.float32, CPU) for i in range(3, 6)}
    for bank in (None, torch.zeros(3, 2, 32)):
        with pytest.raises(ValueError, match=r"bank.*2 depth blocks"):
            stage.model(x, batch_without_cache([2], CPU), pools, bank=bank)
    with pytest.raises(ValueError, match=r"range\(3, 6\)"):
        stage(torch.zeros(1, 2, dtype=torch.long))


def bad_arguments():
    ids, ones = torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)
    row = ids[:1]
    hole = ones.clone()
    hole[0, 1] = 0

    def bounds(*values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype)

    return {
        "neither ids nor embeds": ({}, "input_ids.*inputs_embeds"),
        "both": ({"input_ids": ids, "inputs_embeds": torch.zeros(2, 4, 32)}, "input_ids.*inputs_embeds"),
        "one dimension": ({"input_ids": ids[0]}, r"input_ids.*\[4\]"),
        "no tokens": ({"input_ids": ids[:, :0]}, r"input_ids.*\[2, 0\]"),
        "embeds without width": ({"inputs_embeds": torch.zeros(2, 4)}, "inputs_embeds"),
        "embeds of another width": ({"inputs_embeds": torch.zeros(2, 4, 31)}, "inputs_embeds"),
        "mask shape": ({"input_ids": ids, "attention_mask": ones[:, :3]}, r"attention_mask.*\[2, 3\]"),
        "mask values": ({"input_ids": ids, "attention_mask": ones * 2}, "attention_mask"),
        "mask hole": ({"input_ids": ids, "attention_mask": hole}, "attention_mask.*hole"),
        "mask and bounds": ({"input_ids": row, "attention_mask": ones[:1], "cu_seqlens": bounds(0, 4)}, "cu_seqlens"),
        "bounds dtype": ({"input_ids": row, "cu_seqlens": bounds(0, 4, dtype=torch.int64)}, "cu_seqlens.*int32"),
        "bounds end": ({"input_ids": row, "cu_seqlens": bounds(0, 3)}, r"cu_seqlens.*T = 4"),
        "bounds start": ({"input_ids": row, "cu_seqlens": bounds(1, 4)}, "cu_seqlens"),
        "bounds fall": ({"input_ids": row, "cu_seqlens": bounds(0, 3, 2, 4)}, "cu_seqlens"),
        "bounds of a batch": ({"input_ids": ids, "cu_seqlens": bounds(0, 4)}, r"cu_seqlens.*\[2, 4\]"),
        "labels shape": ({"input_ids": ids, "labels": ids[:, :3]}, r"labels.*\[2, 3\]"),
        "logits_to_keep": ({"input_ids": ids, "logits_to_keep": -1}, "logits_to_keep.*-1"),
    }


@pytest.mark.parametrize("case", bad_arguments())
@torch.no_grad()
def test_wrong_arguments_are_named(case):
    arguments, message = bad_arguments()[case]
    with pytest.raises(ValueError, match=message):
        random_model(small_config(num_hidden_layers=1, mla=()), torch.float32)(**arguments)


def test_wrong_constructor_arguments_are_named():
    for layers in (range(3, 3), range(0, 7), range(-1, 2), range(0, 6, 2)):
        with pytest.raises(ValueError, match="layers"):
            KimiK3ForCausalLM(small_config(), layers=layers)
    with pytest.raises(ValueError, match=r"experts.*'int4'"):
        KimiK3ForCausalLM(small_config(), experts="int4")


def test_the_model_has_no_buffers():
    for experts in ("dequantized", "mxfp4"):
        assert not list(KimiK3ForCausalLM(small_config(), experts=experts).named_buffers())


def test_fresh_models_have_the_described_start():
    torch.manual_seed(0)
    model = KimiK3ForCausalLM(KimiK3Config.tiny())
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(8.1e6, rel=0.02)
    for layer in model.model.layers.values():
        assert not bool(layer.self_attention_res_proj.weight.any()) and not bool(layer.mlp_res_proj.weight.any())
        if hasattr(layer.self_attn, "A_log"):
            assert layer.self_attn.A_log.shape == (128,) and not bool(layer.self_attn.A_log.any())
            rate = F.softplus(layer.self_attn.dt_bias)
            assert rate.min() >= 0.9e-4 and rate.max() <= 0.11
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert all(bool((m.weight == 1).all()) for m in model.modules() if type(m).__name__.endswith("RMSNorm"))


@torch.no_grad()
def test_meta_construction_then_loading_equals_a_direct_one():
    model = random_model(small_config(), torch.float32)
    with torch.device("meta"):
        empty = KimiK3ForCausalLM(model.config)
    assert empty.device.type == "meta"
    empty.load_state_dict(model.state_dict(), assign=True)
    ids = random_ids(model.config, 1, 9)
    assert torch.equal(empty.eval()(ids).logits, model(ids).logits)


@torch.no_grad()
def test_state_sits_in_arguments_alone():
    """The same call twice gives the same bits, whatever ran in between."""
    model = random_model(small_config(), torch.float32)
    ids = random_ids(model.config, 2, 70)
    first = model(ids).logits
    model(ids[:1, :5], use_cache=True)
    assert torch.equal(model(ids).logits, first)
