"""What runs again and what does not: branches, chats, shared prefixes, repeats; and that a cache never changes a token."""

import hashlib
import random

import pytest
import torch
from safetensors.torch import load_file
from solo import SMOOTH, Recorder, assert_equals_solo

from kimi_k3 import KimiK3ForConditionalGeneration, KimiK3Generator, SamplingParams
from kimi_k3.cache import PackedBatch
from kimi_k3.engine.device_pools import DevicePools, PoolLayout


def prompt_of(length: int, seed: int = 0, vocab: int = 1000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(length)]


def ask(gen, prompt, new=2, **options):
    recorder = Recorder()
    params = SamplingParams(max_new_tokens=new, logits_processor=recorder, **options)
    before = gen.counts["prefill_tokens"]
    (result,) = gen.generate([prompt], params)
    return result, gen.counts["prefill_tokens"] - before, recorder, params


@pytest.fixture
def gen(demo):
    with KimiK3Generator(demo, max_num_seqs=8, num_blocks=2000, batch_invariant=True) as generator:
        yield generator


def branch_at(demo, gen, cuts):
    trunk = prompt_of(800)
    ask(gen, trunk)
    for place, cut in enumerate(cuts):
        branch = trunk[:cut] + prompt_of(7, seed=place + 1)
        result, evaluated, recorder, params = ask(gen, branch)
        assert evaluated <= 7 + 63
        assert result.reused_tokens == len(branch) - evaluated
        if place % 5 == 0:
            assert_equals_solo(demo, branch, result, recorder.rows, params)
        # The junction is known now: leaving the branch and coming back runs the new tokens alone.
        _, evaluated, _, _ = ask(gen, trunk[:cut] + prompt_of(5, seed=1000 + place))
        assert evaluated <= 5 + (1 if cut % 64 else 0) * 63
        _, evaluated, _, _ = ask(gen, [*branch, 7, 8, 9])
        assert evaluated <= 3


def test_a_branch_at_any_token_runs_its_new_tokens_and_at_most_63_more(demo, gen):
    branch_at(demo, gen, [*range(5, 800, 61), 63, 64, 65, 127, 128, 400, 799])


@pytest.mark.slow
def test_a_branch_at_every_token_runs_its_new_tokens_and_at_most_63_more(demo):
    with KimiK3Generator(demo, max_num_seqs=8, num_blocks=60_000, batch_invariant=True) as gen:
        branch_at(demo, gen, range(1, 800))
        assert gen.stats()["evictions"] == 0  # the room that the promise asks for


def test_whole_blocks_extended_by_one_token_are_reused(gen):
    prompt = prompt_of(256)
    ask(gen, prompt)
    result, evaluated, _, _ = ask(gen, [*prompt, 5])
    assert (result.reused_tokens, evaluated) == (256, 1)


def test_an_exact_repeat_runs_nothing_and_samples_anew(demo, gen):
    prompt = prompt_of(130)
    first, _, _, _ = ask(gen, prompt, new=5)
    again, evaluated, recorder, params = ask(gen, prompt, new=5)
    assert evaluated == 0 and again.reused_tokens == 130 and again.token_ids == first.token_ids
    assert_equals_solo(demo, prompt, again, recorder.rows, params)
    other, evaluated, recorder, params = ask(gen, prompt, new=5, temperature=1.5, seed=3)
    assert evaluated == 0
    assert_equals_solo(demo, prompt, other, recorder.rows, params)


def test_a_chat_of_three_turns_runs_each_turn_once(demo, tokenizer):
    with KimiK3Generator(demo, tokenizer, max_num_seqs=2, num_blocks=500, batch_invariant=True) as gen:
        messages, seen = [], 0
        for turn in range(3):
            messages.append({"role": "user", "content": f"Question {turn}: " + "what say you? " * (turn + 3)})
            encoded = tokenizer.encode_chat(messages, thinking=False)
            result, evaluated, recorder, params = ask(gen, encoded, new=12, temperature=1.0, seed=turn)
            # What was generated before has run, but for its last token, which was chosen and never read.
            assert evaluated <= len(encoded.ids) - seen + 1
            assert_equals_solo(demo, encoded.ids, result, recorder.rows, params)
            seen = len(encoded.ids) + len(result.token_ids)
            messages.append({"role": "assistant", "token_ids": result.token_ids})


def test_many_requests_with_one_prefix_compute_it_once(demo):
    shared = prompt_of(512)
    with KimiK3Generator(demo, max_num_seqs=64, num_blocks=3000, batch_invariant=True) as gen:
        recorders = [Recorder() for _ in range(64)]
        prompts = [shared + prompt_of(1 + i % 5, seed=i) for i in range(64)]
        many = [SamplingParams(max_new_tokens=2, logits_processor=recorder) for recorder in recorders]
        results = gen.generate(prompts, many)
        own = sum(len(prompt) - len(shared) for prompt in prompts)
        assert gen.counts["prefill_tokens"] <= len(shared) + own
        for place in (0, 1, 33, 63):
            assert_equals_solo(demo, prompts[place], results[place], recorders[place].rows, many[place])


def test_a_prompt_in_pieces_equals_it_whole(demo):
    prompt = prompt_of(700)
    results = []
    for tokens in (64, 200, 2048):
        with KimiK3Generator(
            demo, max_num_seqs=2, num_blocks=100, max_tokens_per_step=tokens, batch_invariant=True
        ) as gen:
            result, _, recorder, params = ask(gen, prompt, new=4)
            results.append(result.token_ids)
            assert_equals_solo(demo, prompt, result, recorder.rows, params)
    assert results[0] == results[1] == results[2]


def test_a_stored_snapshot_is_never_written_again(demo, gen):
    """A, then B that branches off, then A while another A decodes: hash of every frozen state before and after."""

    def hashes():
        return {
            (e.snapshot.position, e.snapshot.slot): hashlib.sha256(
                gen.pools._pages[e.snapshot.slot].numpy()
            ).hexdigest()
            for e in gen.index.entries()
        }

    prompt = prompt_of(200)
    first, _, _, _ = ask(gen, prompt, new=70)
    frozen = hashes()
    # The state at 256 was taken while decoding, from a slot that went on to be written.
    branch = [*prompt, *first.token_ids[:60], 5, 6]
    result, _, recorder, params = ask(gen, branch)
    assert result.reused_tokens == 256
    assert_equals_solo(demo, branch, result, recorder.rows, params)
    ask(gen, prompt[:150] + prompt_of(30, seed=1), new=70)
    running = gen.add(prompt, SamplingParams(max_new_tokens=40))
    for _ in range(10):
        gen.step()
    again, _, _, _ = ask(gen, prompt, new=70)
    assert again.token_ids == first.token_ids
    while gen.has_unfinished():
        gen.step()
    assert gen.result(running).token_ids == first.token_ids[:40]
    after = hashes()
    assert frozen and all(after[key] == value for key, value in frozen.items())


def test_equal_tokens_under_other_images_share_nothing(demo, gen):
    prompt = prompt_of(128)
    gen.generate([prompt], SamplingParams(max_new_tokens=2), extra_key=b"\1" * 32)
    before = gen.counts["prefill_tokens"]
    (result,) = gen.generate([prompt], SamplingParams(max_new_tokens=2), extra_key=b"\1" * 31 + b"\2")
    assert result.reused_tokens == 0 and gen.counts["prefill_tokens"] - before == 128
    (result,) = gen.generate([prompt], SamplingParams(max_new_tokens=2), extra_key=b"\1" * 32)
    assert result.reused_tokens == 128


def test_two_images_of_one_size_are_two_prefixes():
    """In sequence and at once: equal ids, equal grids, other pixels; each as plain generation gives it."""
    folder = SMOOTH.with_name("vision")
    model = KimiK3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, progress=False)
    images = load_file(SMOOTH.with_name("vision.reference") / "preprocess.safetensors")
    pixels = images["lut"][images["alpha_61x43.patches_u8"].long()]
    grid = images["alpha_61x43.grid_thw"].view(1, 3)
    ids = [5, 6, model.config.media_placeholder_token_id, *range(7, 40)]
    inputs = [{"pixel_values": p, "grid_thws": grid} for p in (pixels, pixels.flip(0), pixels * 0.5)]
    options = {"max_num_seqs": 4, "num_blocks": 60, "batch_invariant": True}
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)

    def finish(gen, rids):
        while gen.has_unfinished():
            gen.step()
        return [gen.result(rid) for rid in rids]

    with KimiK3Generator(model, **options) as gen:
        wanted = [model.generate(torch.tensor([ids]), max_new_tokens=6, eos_token_id=[], **one)[0, len(ids) :].tolist()
                  for one in inputs]  # fmt: skip
        at_once = finish(gen, [gen.add(ids, params, **one) for one in inputs])
        assert [r.token_ids for r in at_once] == wanted and [r.reused_tokens for r in at_once] == [0, 0, 0]
        again = finish(gen, [gen.add(ids, params, **one) for one in inputs])
        assert [r.token_ids for r in again] == wanted and min(r.reused_tokens for r in again) > len(ids)
        gen.index.clear()
        for one, tokens in zip(inputs, wanted):
            (result,) = finish(gen, [gen.add(ids, params, **one)])
            assert result.token_ids == tokens and result.reused_tokens == 0


@torch.no_grad()
def test_the_state_after_j_of_k_proposed_tokens_is_that_of_plain_decoding(smooth):
    """Proposals run from a state that they do not touch, with an export after each: accepting j is taking the j-th."""
    model, prompt, proposed = smooth, prompt_of(70, seed=2, vocab=200), prompt_of(5, seed=3, vocab=200)
    was, pools = model.model.is_batch_invariant, DevicePools(PoolLayout(smooth), 16, smooth.device)
    first_block = 12 * pools.layout.blocks_per_page  # pages 0 .. 11 are slots
    model.set_batch_invariant(True)

    def run(tokens, past, read, write, blocks, exports=()):
        rows = [blocks[p // 64] * 64 + p % 64 for p in range(past, past + len(tokens))]
        int32 = {"dtype": torch.int32}
        batch = PackedBatch(
            torch.tensor([0, len(tokens)], **int32), torch.tensor([read]), torch.tensor([write]),
            torch.tensor([past], **int32), torch.tensor([past + len(tokens)], **int32), torch.tensor([blocks], **int32),
            torch.tensor(rows), is_decode=False,
            export_at=torch.tensor([at for at, _ in exports]) if exports else None,
            export_slots=torch.tensor([slot for _, slot in exports]) if exports else None,
        )  # fmt: skip
        running_sum, bank, _, _ = model.model(model.model.embed_tokens(torch.tensor(tokens)), batch, pools.pools)
        return model.head_logits(model.model.final_hidden(running_sum[-1:], bank[:, -1:]))

    def state(slot):
        return [pool[slot].clone() for layer in pools.pools.values() if len(layer) == 2 for pool in layer]

    try:
        blocks, others = [first_block, first_block + 1], [first_block + 2, first_block + 3]
        run(prompt, 0, -1, 0, blocks)
        run(prompt, 0, -1, 1, others)  # the plain one
        before = state(0)
        run(proposed, 70, 0, -1, blocks, [(j, 2 + j) for j in range(1, 6)])
        assert all(torch.equal(a, b) for a, b in zip(state(0), before))
        for j in range(6):
            taken = 0 if j == 0 else 2 + j
            assert all(torch.equal(a, b) for a, b in zip(state(taken), state(1)))
            # The next token after j accepted ones overwrites the latents of those that were not.
            assert torch.equal(run([9], 70 + j, taken, -1, blocks), run([9], 70 + j, 1, -1, others))
            if j < 5:
                run(proposed[j : j + 1], 70 + j, 1, 1, others)
                run(proposed[j : j + 1], 70 + j, taken, -1, blocks)  # its latent again
    finally:
        model.set_batch_invariant(was)


def test_without_prefix_cache_nothing_is_reused_and_nothing_stays(demo):
    with KimiK3Generator(demo, max_num_seqs=2, num_blocks=50, prefix_cache=False, batch_invariant=True) as gen:
        for _ in range(2):
            result, evaluated, _, _ = ask(gen, prompt_of(100))
            assert (result.reused_tokens, evaluated) == (0, 100)
        assert gen.pool.num_slots == gen.pool.num_blocks == 0


@pytest.mark.parametrize("moment", range(0, 12))
def test_an_abandoned_prefill_publishes_nothing(demo, moment):
    prompt = prompt_of(640)
    with KimiK3Generator(demo, max_num_seqs=4, num_blocks=200, max_tokens_per_step=64, batch_invariant=True) as gen:
        rid = gen.add(prompt, SamplingParams(max_new_tokens=3))
        for _ in range(moment):
            gen.step()
        has_prefilled = gen.counts["generated_tokens"] > 0
        gen.abort(rid)
        if not has_prefilled:
            assert gen.pool.num_slots == gen.pool.num_blocks == 0
        result, evaluated, recorder, params = ask(gen, prompt, new=3)
        assert evaluated == (0 if has_prefilled else 640)
        assert_equals_solo(demo, prompt, result, recorder.rows, params)


def test_evicting_a_state_or_its_blocks_shortens_the_hit_and_changes_no_token(demo, gen):
    prompt = prompt_of(300)
    expected = ask(gen, prompt, new=3)[0].token_ids
    reused = []
    for deepest in (300, 256, 130, 64, 0):
        for entry in list(gen.index.entries()):
            if entry.snapshot.position > deepest:
                gen.index.drop(entry.snapshot)
        result, _, recorder, params = ask(gen, [*prompt, 1, 2], new=3)
        assert_equals_solo(demo, [*prompt, 1, 2], result, recorder.rows, params)
        reused.append(result.reused_tokens)
    assert reused == [300, 256, 128, 64, 0]
    assert ask(gen, prompt, new=3)[0].token_ids == expected


def test_the_last_position_of_each_cut_equals_a_fresh_prefill(demo, gen):
    """For each cut the restored state gives what a fresh prefill of exactly that prefix gives."""
    prompt = prompt_of(130)
    ask(gen, prompt)
    for cut in (1, 2, 63, 64, 65, 100, 127, 128, 129):
        result, _, recorder, params = ask(gen, prompt[:cut], new=1)
        assert_equals_solo(demo, prompt[:cut], result, recorder.rows, params)


def test_near_equal_where_the_mode_is_off(smooth):
    """Without batch invariance: equal tokens unless the margin is below 1e-3; such cases are counted."""
    rng = random.Random(5)
    prompts = [
        [rng.randrange(smooth.config.text_config.vocab_size) for _ in range(rng.randrange(1, 200))] for _ in range(16)
    ]
    close = 0
    with KimiK3Generator(smooth, max_num_seqs=6, num_blocks=40, max_tokens_per_step=128) as gen:
        results = gen.generate(prompts, SamplingParams(max_new_tokens=8))
        for prompt, result in zip(prompts, results):
            with torch.no_grad():
                rows = smooth(torch.tensor([prompt + result.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
            for row, token in zip(rows, result.token_ids):
                best = row.topk(2).values
                if token != int(row.argmax()):
                    assert best[0] - row[token] < 1e-3
                    close += 1
                    break
    assert close <= 1
