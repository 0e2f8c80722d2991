"""Packed documents, padded batches and split runs: a sequence never depends on what lies beside it or on how it is cut."""

import pytest
import torch
from reference_model import random_ids, random_model, small_config

from kimi_k3.packing import layout_from_cu_seqlens, layout_from_mask

CPU = torch.device("cpu")
EXACT = {"atol": 1e-11, "rtol": 1e-10}  # float64, other shapes of the same sums


@pytest.fixture(scope="module")
def model():
    return random_model(small_config())


def bounds_of(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("lengths", [[1, 1, 1], [3, 64, 1, 65, 2], [130, 4], [0, 5, 0, 0, 7, 0], [63]])
def test_packed_documents_equal_separate_ones_in_outputs_and_gradients(lengths, model):
    ids = random_ids(model.config, 1, sum(lengths), seed=len(lengths))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    model.zero_grad()
    out = model(ids, cu_seqlens=bounds_of(lengths), labels=ids)
    targets = sum(max(0, length - 1) for length in lengths)
    if targets:
        (out.loss * targets).backward()
    packed = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    start = 0
    for length in (n for n in lengths if n):
        piece = ids[:, start : start + length]
        alone = model(piece, labels=piece)
        torch.testing.assert_close(out.logits[:, start : start + length], alone.logits, **EXACT)
        if length > 1:
            (alone.loss * (length - 1)).backward()
        start += length
    if not targets:
        return
    separate = {name: p.grad for name, p in model.named_parameters()}
    for name in names:
        if separate[name] is not None:
            torch.testing.assert_close(
                packed[name], separate[name], atol=1e-9, rtol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", ["dequantized", "mxfp4"])
@torch.no_grad()
def test_changing_one_document_moves_no_bit_of_another(dtype, experts):
    """Exact as long as the packed length stays: the same shapes, so the same sums in the same order for each row."""
    model = random_model(small_config(), dtype, experts=experts)
    ids, bounds = random_ids(model.config, 1, 150), bounds_of([70, 66, 14])
    before = model(ids, cu_seqlens=bounds, output_hidden_states=True, output_router_logits=True)
    for seed in range(3):
        ids[:, :70] = random_ids(model.config, 1, 70, seed=seed + 5)
        ids[:, 136:] = random_ids(model.config, 1, 14, seed=seed + 9)
        after = model(ids, cu_seqlens=bounds, output_hidden_states=True, output_router_logits=True)
        assert not torch.equal(after.logits[:, :70], before.logits[:, :70])
        for x, y in zip(
            (after.logits, *after.hidden_states, *after.router_logits),
            (before.logits, *before.hidden_states, *before.router_logits), strict=True,
        ):  # fmt: skip
            assert torch.equal(x[:, 70:136], y[:, 70:136])


def test_no_gradient_crosses_a_boundary(model):
    ids, bounds = random_ids(model.config, 1, 90), bounds_of([30, 40, 20])
    embeds = model.model.embed_tokens(ids).detach().requires_grad_()
    out = model(inputs_embeds=embeds, cu_seqlens=bounds)
    out.logits[:, 30:70].square().sum().backward()
    assert not bool(embeds.grad[:, :30].any()) and not bool(embeds.grad[:, 70:].any())
    assert bool(embeds.grad[:, 30:70].any(-1).all())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 0), (torch.float32, 2e-5)])
@torch.no_grad()
def test_later_tokens_do_not_move_earlier_ones(dtype, bound):
    """Not by a bit in float64, where the plain references run; the compiled KDA kernel splits each 16-token tile's decays
    at the middle of the whole tile's, so in float32 the tile's later tokens choose how its earlier ones are rounded."""
    model = random_model(small_config(), dtype)
    ids = random_ids(model.config, 1, 100)
    before = model(ids).logits
    for cut in (1, 3, 64, 99):
        later = ids.clone()
        later[:, cut:] = random_ids(model.config, 1, 100 - cut, seed=cut)
        torch.testing.assert_close(model(later).logits[:, :cut], before[:, :cut], atol=bound, rtol=0)


@pytest.mark.parametrize("padding", [1, 3, 4, 64, 100])
@torch.no_grad()
def test_left_padding_changes_neither_logits_nor_states(padding, model):
    ids = random_ids(model.config, 1, 70)
    alone = model(ids, use_cache=True)
    for pad_id in (0, 31):
        padded = torch.cat([torch.full((1, padding), pad_id), ids], dim=1)
        rows = torch.cat([padded, random_ids(model.config, 1, 70 + padding, seed=2)])
        mask = torch.ones_like(rows)
        mask[0, :padding] = 0
        out = model(rows, attention_mask=mask, use_cache=True)
        torch.testing.assert_close(out.logits[0, padding:], alone.logits[0], **EXACT)
        assert not bool(out.logits[0, :padding].any())
        for layer, pools in out.past_key_values.pools.items():
            if model.config.text_config.is_kda_layer(layer):
                for pool, wanted in zip(pools, alone.past_key_values.pools[layer]):
                    torch.testing.assert_close(pool[0], wanted[0], **EXACT)
        following = random_ids(model.config, 2, 1, seed=3)
        step = model(following, past_key_values=out.past_key_values).logits[0]
        wanted = model(following[:1], past_key_values=alone.past_key_values.copy()).logits[0]
        torch.testing.assert_close(step, wanted, **EXACT)


@torch.no_grad()
def test_padding_reaches_no_router_count(model):
    seen = []
    gate = model.model.layers["1"].block_sparse_moe.gate
    handle = gate.register_forward_hook(lambda _, __, routing: seen.append(routing.topk_ids.shape[0]))
    mask = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
    model(random_ids(model.config, 3, 5), attention_mask=mask)
    handle.remove()
    assert seen == [8]


@torch.no_grad()
def test_a_row_of_padding_alone_is_zero_and_leaves_the_others(model):
    ids = random_ids(model.config, 2, 6)
    mask = torch.tensor([[0] * 6, [1] * 6])
    logits = model(ids, attention_mask=mask).logits
    assert not bool(logits[0].any())
    torch.testing.assert_close(logits[1:], model(ids[1:]).logits, **EXACT)


def run_in_pieces(model, ids, sizes):
    cache, pieces = model.make_cache(1), []
    for piece in ids.split(sizes, dim=1):
        pieces.append(model(piece, past_key_values=cache).logits)
    return torch.cat(pieces, dim=1), cache


@pytest.fixture(scope="module")
def text_of_130(model):
    ids = random_ids(model.config, 1, 130, seed=7)
    with torch.no_grad():
        return ids, model(ids, use_cache=True)


def assert_same_states(model, cache, wanted) -> None:
    for layer, pools in cache.pools.items():
        if model.config.text_config.is_kda_layer(layer):
            for pool, other in zip(pools, wanted.pools[layer]):
                torch.testing.assert_close(pool[0], other[0], **EXACT)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5, 15, 16, 17, 48, 63, 64, 65, 66, 100, 127, 128, 129])
@torch.no_grad()
def test_a_run_cut_in_two_equals_the_whole(cut, model, text_of_130):
    ids, whole = text_of_130
    logits, cache = run_in_pieces(model, ids, [cut, 130 - cut])
    torch.testing.assert_close(logits, whole.logits, **EXACT)
    assert_same_states(model, cache, whole.past_key_values)


@pytest.mark.slow
@torch.no_grad()
def test_a_run_cut_at_every_position_equals_the_whole(model, text_of_130):
    ids, whole = text_of_130
    for cut in range(1, 130):
        logits, cache = run_in_pieces(model, ids, [cut, 130 - cut])
        torch.testing.assert_close(logits, whole.logits, **EXACT)
        assert_same_states(model, cache, whole.past_key_values)


@pytest.mark.parametrize("prefill", [1, 3, 4, 63, 64, 65, 130])
@torch.no_grad()
def test_prefill_then_decode_equals_decode_from_the_start(prefill, model, text_of_130):
    """Decode from the start is checked against the plain model in test_modeling.py."""
    ids, whole = text_of_130
    ids = torch.cat([ids, random_ids(model.config, 1, 6, seed=8)], dim=1)
    stepped = model.make_cache(1)
    steps = torch.cat([model(ids[:, t : t + 1], past_key_values=stepped).logits for t in range(prefill + 6)], dim=1)
    torch.testing.assert_close(steps[:, :prefill], whole.logits[:, :prefill], **EXACT)
    logits, cache = run_in_pieces(model, ids[:, : prefill + 6], [prefill, *[1] * 6])
    torch.testing.assert_close(logits, steps, **EXACT)
    assert_same_states(model, cache, stepped)


@torch.no_grad()
def test_ragged_pieces_of_several_rows(model):
    """Rows gain 0, 1 or many tokens in one call, also where one of them gains exactly one and the others none."""
    lengths = [9, 71, 30]
    rows = [random_ids(model.config, 1, n, seed=n) for n in lengths]
    cache, done, out = model.make_cache(3), [0, 0, 0], [[], [], []]
    for gains in ([3, 0, 1], [1, 0, 0], [0, 66, 1], [1, 1, 1], [4, 4, 27]):
        width = max(gains)
        ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
        for row, gain in enumerate(gains):
            if gain:
                ids[row, -gain:] = rows[row][0, done[row] : done[row] + gain]
                mask[row, -gain:] = 1
        logits = model(ids, attention_mask=mask, past_key_values=cache).logits
        for row, gain in enumerate(gains):
            out[row].append(logits[row, width - gain :])
            done[row] += gain
    assert done == [9, 71, 30] == cache.lengths
    for row, ids in enumerate(rows):
        torch.testing.assert_close(torch.cat(out[row]), model(ids).logits[0], **EXACT)


@torch.no_grad()
def test_packed_prefill_then_batched_decode(model):
    lengths = [5, 68, 1]
    ids, following = random_ids(model.config, 1, 74), random_ids(model.config, 3, 4, seed=2)
    cache = model(ids, cu_seqlens=bounds_of(lengths), use_cache=True).past_key_values
    assert cache.lengths == lengths
    steps = torch.cat([model(following[:, t : t + 1], past_key_values=cache).logits for t in range(4)], dim=1)
    for row, piece in enumerate(ids.split(lengths, dim=1)):
        whole = model(torch.cat([piece, following[row : row + 1]], dim=1)).logits
        torch.testing.assert_close(steps[row], whole[0, -4:], **EXACT)


@torch.no_grad()
def test_a_cached_mask_may_cover_the_past_too(model):
    ids, mask = random_ids(model.config, 2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    out = model(ids[:, :8], attention_mask=mask[:, :8], use_cache=True)
    short = model(ids[:, 8:], attention_mask=mask[:, 8:], past_key_values=out.past_key_values.copy()).logits
    long = model(ids[:, 8:], attention_mask=mask, past_key_values=out.past_key_values).logits
    assert torch.equal(short, long)


@torch.no_grad()
def test_a_cached_mask_covers_the_columns_seen_also_where_every_row_was_padded(model):
    """Batches padded to a multiple: no row fills all columns, so the longest row is shorter than the mask's past."""
    ids, mask = random_ids(model.config, 2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :2], mask[1, :4] = 0, 0
    out = model(ids[:, :8], attention_mask=mask[:, :8], use_cache=True)
    short = model(ids[:, 8:], past_key_values=out.past_key_values.copy()).logits
    assert torch.equal(model(ids[:, 8:], attention_mask=mask, past_key_values=out.past_key_values).logits, short)


# The layouts themselves


@pytest.mark.parametrize("seed", range(5))
def test_pack_and_unpack_by_loops(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (4,), generator=generator).tolist()
    left = bool(seed % 2)
    mask, x = torch.zeros(4, 6, dtype=torch.long), torch.randn(4, 6, 2, generator=generator)
    for row, length in enumerate(lengths):
        mask[row, 6 - length :] = 1 if left else mask[row, 6 - length :]
        if not left:
            mask[row, :length] = 1
    layout = layout_from_mask(mask, (4, 6), (), CPU)
    assert layout.lengths == lengths
    wanted = [x[row, t] for row in range(4) for t in range(6) if mask[row, t]]
    packed = layout.pack(x)
    assert torch.equal(packed, torch.stack(wanted) if wanted else x.new_zeros(0, 2))
    assert torch.equal(layout.unpack(packed), x * mask[..., None])


def test_next_tokens_and_last_by_loops():
    layout = layout_from_cu_seqlens(torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32), (1, 9))
    ids = torch.arange(10, 19)
    assert layout.next_tokens(ids, -100).tolist() == [11, 12, -100, -100, 15, 16, 17, 18, -100]
    rows, kept = layout.last(2)
    assert rows.tolist() == [1, 2, 3, 7, 8] and kept.lengths == [2, 0, 1, 2] and kept.shape == (1, 5)
