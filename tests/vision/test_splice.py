"""Placement of image features among the tokens, against the released merge."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kimi_k3.vision import expand_placeholders, splice_image_features, splice_packed

GOLDEN = Path(__file__).parents[1] / "golden"
MEDIA, PAD = 277, 383
RIGHT_CASES = ["even", "uneven", "left_pad", "right_pad_equal"]


@pytest.fixture(scope="module")
def cases():
    return load_file(GOLDEN / "vision.reference" / "splice.safetensors")


@pytest.fixture(scope="module")
def embedding():
    stored = load_file(GOLDEN / "vision" / "model.safetensors")
    return stored["language_model.model.embed_tokens.weight"].float()


def splice_case(cases, embedding, case):
    ids = cases[f"{case}.input_ids"]
    is_real = ids != PAD
    features = list(cases[f"{case}.features"].split(cases[f"{case}.feature_rows"].tolist()))
    return splice_image_features(ids, features, embedding[ids], MEDIA, is_real.long(), ids.masked_fill(~is_real, -100))


def splice_by_loops(ids, features, embeds, mask, labels, length, pad_right):
    """One row as lists: what stands at every place."""
    places, used = [], 0
    for token in range(len(ids)):
        if not mask[token]:
            places.append((torch.zeros_like(embeds[token]), 0, -100))
        elif ids[token] == MEDIA:
            places += [(row, 1, -100) for row in features[used]]
            used += 1
        else:
            places.append((embeds[token], 1, labels[token]))
    padding = [(torch.zeros_like(embeds[0]), 0, -100)] * (length - len(places))
    return places + padding if pad_right else padding + places


@pytest.mark.parametrize("case", RIGHT_CASES)
def test_splice_equals_the_released_code(case, cases, embedding):
    spliced = splice_case(cases, embedding, case)
    assert torch.equal(spliced.inputs_embeds, cases[f"{case}.embeds"])
    assert torch.equal(spliced.attention_mask, cases[f"{case}.attention_mask"])
    assert torch.equal(spliced.labels, cases[f"{case}.labels"])
    assert torch.equal(spliced.position_ids, cases[f"{case}.position_ids"])


@pytest.mark.parametrize("case", ["right_pad_uneven", "right_pad_uneven2"])
def test_uneven_right_padded_rows_keep_images_at_their_placeholders(case, cases, embedding):
    # the released code slides the first row's image into the trailing padding here
    spliced = splice_case(cases, embedding, case)
    ids, rows = cases[f"{case}.input_ids"], cases[f"{case}.feature_rows"].tolist()
    features = cases[f"{case}.features"].split(rows)
    assert spliced.inputs_embeds.shape == cases[f"{case}.embeds"].shape
    for row in range(2):
        places = splice_by_loops(ids[row], [features[row]], embedding[ids[row]], ids[row] != PAD, ids[row], 21, True)
        assert torch.equal(spliced.inputs_embeds[row], torch.stack([embeds for embeds, _, _ in places]))
        assert spliced.attention_mask[row].tolist() == [real for _, real, _ in places]
        assert spliced.labels[row].tolist() == [int(label) for _, _, label in places]
        real = sum(real for _, real, _ in places)
        assert spliced.position_ids[row].tolist() == list(range(real)) + [1] * (21 - real)


def test_splice_of_the_recorded_prompt(embedding):
    recorded = load_file(GOLDEN / "vision.reference" / "forward.safetensors")
    ids = recorded["input_ids"].unsqueeze(0)
    features = list(recorded["features"].split([6, 64, 44]))
    spliced = splice_image_features(ids, features, embedding[ids], MEDIA, labels=recorded["labels"].unsqueeze(0))
    assert torch.equal(spliced.inputs_embeds[0], recorded["spliced_embeds"])
    assert torch.equal(spliced.attention_mask[0], recorded["spliced_attention_mask"])
    assert torch.equal(spliced.labels[0], recorded["spliced_labels"])
    assert torch.equal(spliced.position_ids[0], recorded["spliced_position_ids"])
    embeds, token_index, is_image = splice_packed(ids[0], features, embedding[ids[0]], MEDIA)
    assert torch.equal(embeds, recorded["spliced_embeds"])
    assert torch.equal(is_image.nonzero().squeeze(1), recorded["image_positions"])
    assert torch.equal(recorded["labels"][token_index].masked_fill(is_image, -100), recorded["spliced_labels"])


@pytest.mark.parametrize("seed", range(8))
def test_a_batch_is_its_rows_spliced_one_by_one(seed):
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    ids = integers(0, 10, 3, 9)
    ids[integers(0, 3, 3, 9) == 0] = MEDIA
    mask = torch.ones_like(ids)
    for row in range(3):  # padding on either side, other lengths in every row; a placeholder there is padding too
        padding = int(integers(0, 4, 1))
        mask[row, 9 - padding if seed % 2 else 0 : 9 if seed % 2 else padding] = 0
    embeds = torch.randn(3, 9, 5, generator=generator)
    counts = ((ids == MEDIA) & (mask == 1)).sum(1).tolist()
    per_row = [[torch.randn(int(integers(1, 7, 1)), 5, generator=generator) for _ in range(count)] for count in counts]
    spliced = splice_image_features(
        ids, [image for features in per_row for image in features], embeds, MEDIA, mask, ids
    )
    length = max(9 + sum(len(f) - 1 for f in features) for features in per_row)
    pad_right = bool((mask[:, -1] == 0).any())
    assert spliced.inputs_embeds.shape == (3, length, 5)
    for row in range(3):
        places = splice_by_loops(ids[row], per_row[row], embeds[row], mask[row], ids[row], length, pad_right)
        assert torch.equal(spliced.inputs_embeds[row], torch.stack([vector for vector, _, _ in places]))
        assert spliced.attention_mask[row].tolist() == [real for _, real, _ in places]
        assert spliced.labels[row].tolist() == [int(label) for _, _, label in places]


@pytest.mark.parametrize("ids", [[MEDIA], [5, 6, MEDIA], [MEDIA, MEDIA], [MEDIA, 5]])
def test_images_splice_wherever_they_stand(ids):
    # the released code skips one-token prompts; a port skipped an image at the end
    ids = torch.tensor([ids])
    features = [torch.full((3, 4), 7.0 + i) for i in range(int((ids == MEDIA).sum()))]
    spliced = splice_image_features(ids, features, torch.ones(*ids.shape, 4), MEDIA)
    expected = []
    for token in ids[0].tolist():
        expected += features[sum(e > 1 for e in expected) // 3][:, 0].tolist() if token == MEDIA else [1.0]
    assert spliced.inputs_embeds[0, :, 0].tolist() == expected
    assert spliced.labels is None


def test_a_prompt_without_images_comes_back_unchanged():
    ids = torch.tensor([[PAD, 1, 2], [3, 4, 5]])
    embeds = torch.randn(2, 3, 4)
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    spliced = splice_image_features(ids, [], embeds, MEDIA, mask)
    assert torch.equal(spliced.inputs_embeds, embeds * mask.unsqueeze(-1))
    assert torch.equal(spliced.attention_mask, mask)


def test_packed_sequences_splice_like_rows():
    ids = torch.tensor([1, MEDIA, 2, MEDIA, 3, 4])  # two sequences, of 3 and 3 tokens
    token_index, is_image = expand_placeholders(ids, [3, 2], MEDIA)
    assert token_index.tolist() == [0, 1, 1, 1, 2, 3, 3, 4, 5]
    assert is_image.tolist() == [False, True, True, True, False, True, True, False, False]
    assert (token_index < 3).sum() == 5  # the boundary moves from 3 to 5


def test_gradients_go_to_features_and_to_text_but_not_to_placeholders():
    ids = torch.tensor([[1, MEDIA, 2], [MEDIA, 3, PAD]])
    mask = (ids != PAD).long()
    embeds = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    features = [torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in (2, 4)]

    def spliced(embeds, *features):
        return splice_image_features(ids, list(features), embeds, MEDIA, mask).inputs_embeds

    assert torch.autograd.gradcheck(spliced, (embeds, *features))
    spliced(embeds, *features).sum().backward()
    assert torch.equal(embeds.grad[..., 0] != 0, (ids != MEDIA) & (mask == 1))
    assert all(torch.equal(f.grad, torch.ones_like(f)) for f in features)


def test_features_take_the_dtype_of_the_embeddings():
    spliced = splice_image_features(torch.tensor([[MEDIA]]), [torch.ones(2, 4)], torch.zeros(1, 1, 4).bfloat16(), MEDIA)
    assert spliced.inputs_embeds.dtype == torch.bfloat16


@pytest.mark.parametrize("images, placeholders", [(1, 2), (2, 1), (0, 1), (1, 0)])
def test_other_numbers_of_images_and_placeholders_are_refused_with_both(images, placeholders):
    ids = torch.tensor([[1] + [MEDIA] * placeholders])
    with pytest.raises(ValueError, match=f"{placeholders} image placeholders.*{images} images"):
        splice_image_features(ids, [torch.ones(2, 4)] * images, torch.zeros(*ids.shape, 4), MEDIA)


def test_a_placeholder_under_the_mask_is_no_image():
    ids, mask = torch.tensor([[MEDIA, MEDIA]]), torch.tensor([[0, 1]])
    spliced = splice_image_features(ids, [torch.ones(2, 4)], torch.full((1, 2, 4), 9.0), MEDIA, mask)
    assert spliced.inputs_embeds[0, :, 0].tolist() == [0, 1, 1]
    with pytest.raises(ValueError, match=r"1 image placeholders.*2 images"):
        splice_image_features(ids, [torch.ones(2, 4)] * 2, torch.zeros(1, 2, 4), MEDIA, mask)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"input_ids": torch.tensor([1, MEDIA])}, "input_ids"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask"),
        ({"labels": torch.ones(1, 3)}, "labels"),
        ({"inputs_embeds": torch.zeros(1, 3, 4)}, "inputs_embeds"),
        ({"features": [torch.ones(2, 5)]}, r"features\[0\]"),
        ({"features": [torch.ones(0, 4)]}, r"features\[0\]"),
    ],
)
def test_shapes_that_disagree_are_refused_by_name(changes, message):
    arguments = {"input_ids": torch.tensor([[1, MEDIA]]), "features": [torch.ones(2, 4)]}
    arguments |= {"inputs_embeds": torch.zeros(1, 2, 4), "media_token_id": MEDIA}
    with pytest.raises(ValueError, match=message):
        splice_image_features(**(arguments | changes))
