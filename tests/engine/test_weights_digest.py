"""Stored prefixes are told apart by every bit of the weights, whatever part of them a rank holds."""

import copy
import random

import pytest
import torch

from kimi_k3 import KimiK3Generator, SamplingParams
from kimi_k3.engine.agreement import Agreement
from kimi_k3.engine.tiers import DiskTier, HostTier
from kimi_k3.engine.weights_digest import part_of, weighted_sum

SMALL = {"max_num_seqs": 4, "num_blocks": 20, "max_tokens_per_step": 256}
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(length)]


def random_bytes(shape, dtype, seed=0):
    size = torch.empty(shape, dtype=dtype).nbytes
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def total(tensor: torch.Tensor) -> int:
    return int(weighted_sum(tensor, tuple(tensor.shape), (0,) * tensor.ndim))


def test_a_small_change_of_one_embedding_row_is_a_miss_on_disk(demo, tmp_path):
    model, prompt = copy.deepcopy(demo), prompt_of(200, 1)

    def reused(new):
        with KimiK3Generator(model, tiers=(DiskTier(tmp_path, 1 << 28),), **SMALL) as gen:
            return gen.generate([[*prompt, new]], SamplingParams(max_new_tokens=1))[0].reused_tokens

    assert (reused(3), reused(4)) == (0, 192)
    row = model.model.embed_tokens.weight[prompt[7]]
    with torch.no_grad():
        before = row.clone()
        row[5] = torch.nextafter(row[5], torch.tensor(9.0))
        assert reused(5) == 0
        row.copy_(before)
        assert reused(6) == 192


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (37,), (5, 7), (3, 64), (4, 6, 32), (4, 6, 5)])
def test_every_bit_counts(dtype, shape):
    tensor = random_bytes(shape, dtype)
    before, flat = total(tensor), tensor.reshape(-1).view(torch.uint8)
    for at in range(len(flat)):
        bit = 1 << (at % 8)
        flat[at] ^= bit
        assert total(tensor) != before
        flat[at] ^= bit
    assert total(tensor) == before


def test_a_tensor_that_lies_askew_in_its_storage_has_the_same_sum():
    storage = random_bytes((3 + 5 * 64,), torch.uint8)
    askew = storage[3:].view(5, 64)
    assert total(askew) == total(askew.clone()) == total(askew.t().contiguous().t())


def test_changes_of_several_places_do_not_cancel():
    tensor = torch.randn(60, 40)
    before = total(tensor)
    changes = [lambda t: t.neg_(), lambda t: t[7].neg_(), lambda t: t[:, 3].neg_(), lambda t: t.copy_(t.flip(0)),
               lambda t: t.copy_(t.flip(1)), lambda t: t[[3, 8]].copy_(t[[8, 3]]), lambda t: t.mul_(2),
               lambda t: t[5, [1, 3]].neg_()]  # fmt: skip
    changes[5] = lambda t: t.copy_(t[[0, 1, 2, 8, 4, 5, 6, 7, 3, *range(9, 60)]])
    changes[7] = lambda t: t.view(torch.int32)[5].bitwise_xor_(torch.tensor([0, -(2**31), 0, -(2**31)] + [0] * 36))
    seen = {before}
    for change in changes:
        changed = tensor.clone()
        change(changed)
        assert not torch.equal(changed, tensor)
        seen.add(total(changed))
    assert len(seen) == len(changes) + 1
    rng = random.Random(0)
    for _ in range(2000):  # the top bit of two words: the least that the sum keeps of a change
        words = tensor.clone().view(torch.int32)
        for at in rng.sample(range(words.numel()), 2):
            words.view(-1)[at] ^= -(2**31)
        assert total(words.view(torch.float32)) != before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim", "cut"), [((48,), 0, 20), ((6, 128), 0, 4), ((6, 128), 1, 64), ((4, 6, 128), 1, 2),
                                                    ((4, 6, 128), 0, 3), ((9, 5), 0, 2), ((4, 3, 5), 1, 1)])  # fmt: skip
def test_sums_of_parts_add_up_to_the_whole(dtype, shape, dim, cut, monkeypatch):
    monkeypatch.setattr("kimi_k3.engine.weights_digest.CPU_WORDS", 50)  # several chunks
    tensor = random_bytes(shape, dtype)
    first = [0] * len(shape)
    first[dim] = cut
    parts = tensor.narrow(dim, 0, cut), tensor.narrow(dim, cut, shape[dim] - cut)
    sums = [int(weighted_sum(part, shape, at)) for part, at in zip(parts, ((0,) * len(shape), tuple(first)))]
    assert (sum(sums) - total(tensor)) % 2**64 == 0


def test_all_parameters_of_a_model_take_part(demo):
    model = copy.deepcopy(demo)
    digest = Agreement(model).weights_digest
    seen = {digest(model)}
    for parameter in model.parameters():
        last = parameter.data.view(-1).view(torch.uint8)[-1:]
        last ^= 1
        seen.add(digest(model))
    assert len(seen) == 1 + len(list(model.parameters()))


def test_the_place_of_an_expert_in_its_slots_changes_nothing(monkeypatch):
    """Four slots on each of two ranks for six experts, two of them twice; the sums of the ranks add up to the plain stack's."""
    experts = torch.nn.Module()
    experts.num_experts = 6
    experts.copy_ranks = torch.tensor([[0, 0], [1, 0], [1, 1], [0, 1], [0, 0], [1, 1]])
    experts.copy_slots = torch.tensor([[2, 2], [3, 1], [0, 0], [0, 1], [3, 3], [2, 2]])
    stack = random_bytes((6, 3, 64), torch.uint8)
    slots = random_bytes((2, 4, 3, 64), torch.uint8, seed=1)
    for expert in range(6):
        for rank, slot in zip(experts.copy_ranks[expert], experts.copy_slots[expert]):
            slots[rank, slot] = stack[expert]
    parts = []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        parts.append(part_of(torch.nn.Parameter(slots[rank], requires_grad=False), experts))
    assert [(part.shape, part.tag) for part in parts] == [((6, 3, 64), 0), ((6, 3, 64), 1)]
    assert (int(parts[0].total) + int(parts[1].total) - total(stack)) % 2**64 == 0


def test_weights_are_read_only_where_a_tier_outlives_the_generator(demo, tmp_path, monkeypatch):
    reads, digest = [], Agreement.weights_digest
    monkeypatch.setattr(Agreement, "weights_digest", lambda self, model: reads.append(1) or digest(self, model))
    for tiers, count in (((), 0), ((HostTier(1 << 26),), 0), ((HostTier(1 << 26), DiskTier(tmp_path, 1 << 26)), 1)):
        with KimiK3Generator(demo, tiers=tiers, **SMALL):
            assert len(reads) == count


def test_after_the_weights_changed_a_host_tier_serves_nothing_old(demo):
    model, prompt = copy.deepcopy(demo), prompt_of(200, 2)
    with KimiK3Generator(model, tiers=(HostTier(1 << 26),), **SMALL) as gen:
        for expected in (0, 192):
            (result,) = gen.generate([[*prompt, 5 + expected]], SamplingParams(max_new_tokens=1))
            assert result.reused_tokens == expected
            gen.index.clear()
            gen.tiers.stack.flush()
        with torch.no_grad():
            model.model.embed_tokens.weight[7] += 0.5
        gen.clear_prefix_cache()
        (result,) = gen.generate([[*prompt, 9]], SamplingParams(max_new_tokens=1))
        assert result.reused_tokens == 0
