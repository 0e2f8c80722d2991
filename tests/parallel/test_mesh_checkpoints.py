"""Checkpoints on a mesh: each rank reads its own bytes, and what the ranks save together is the released layout."""

import hashlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_expert_parallel import random_placement
from torch.testing._internal.distributed.fake_pg import FakeStore

import kimi_k3
from kimi_k3 import KimiK3ForCausalLM, checkpoint
from kimi_k3.parallel import make_mesh, parallelize, shard_for_training
from kimi_k3.parallel.expert_parallel import expert_layers, place_experts, tables_from_slots
from kimi_k3.shards import Region, ShardReader, read_header

DEMO = Path(kimi_k3.__file__).parent / "demo"


def digests(folder) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(Path(folder).iterdir())}


def load(folder=DEMO, **options) -> KimiK3ForCausalLM:
    return KimiK3ForCausalLM.from_pretrained(folder, progress=False, **options)


def local_bytes(model) -> dict[str, torch.Tensor]:
    return {name: p.to_local() for name, p in model.named_parameters()}


def read_and_save(folder, out, tp: int, ep: int | None) -> list[tuple[int, int]]:
    """Bytes read and the share of a rank, for packed and for decoded experts; saves both under `out`."""
    mesh, read = make_mesh(tp=tp, ep=ep), []
    for experts in ("mxfp4", "dequantized"):
        model = load(folder, experts=experts, mesh=mesh)
        sliced = parallelize(load(folder, experts=experts), mesh)
        for name, tensor in local_bytes(sliced).items():
            assert torch.equal(local_bytes(model)[name], tensor), name
        packed = load(folder, mesh=mesh)
        share = sum(tensor.nbytes for tensor in local_bytes(packed).values())
        read.append((model.checkpoint_source.bytes_read, share))
        model.save_pretrained(f"{out}/{experts}", max_shard_size="2MB")
    return read


@pytest.mark.parametrize(("ranks", "tp", "ep"), [(2, 2, None), (3, 1, 3), (4, 2, 4)])
def test_ranks_read_their_share_and_save_the_source_back(tmp_path, ranks, tp, ep):
    source = tmp_path / "source"
    load().save_pretrained(source, max_shard_size="2MB")
    expected = digests(source)
    assert len(expected) > 5
    results = run_ranks(ranks, read_and_save, source, tmp_path, tp, ep)
    for rank in results:
        for read, share in rank:
            assert read <= 1.05 * share
    assert sum(read for read, _ in (rank[0] for rank in results)) >= sum(
        stored.num_bytes for file in source.glob("*.safetensors") for stored in read_header(file).values()
    )
    for experts in ("mxfp4", "dequantized"):
        assert digests(tmp_path / experts) == expected


def save_trained(out, kind: str) -> None:
    mesh = make_mesh(**({"ep": 2} if kind == "ep and fsdp" else {}))
    model = load(experts="dequantized", dtype=torch.float32, **({} if kind == "fsdp" else {"mesh": mesh}))
    shard_for_training(model, mesh)
    with torch.no_grad():  # "training" of two tensors
        for name, parameter in model.named_parameters():
            if name.endswith(("layers.1.block_sparse_moe.experts.w2", "layers.2.self_attn.q_proj.weight")):
                parameter.mul_(2)
    model.save_pretrained(out)


@pytest.mark.parametrize("kind", ["fsdp", "ep and fsdp"])
def test_a_trained_model_is_saved_as_by_one_process(tmp_path, kind):
    model = load(experts="dequantized", dtype=torch.float32)
    with torch.no_grad():
        model.model.layers["1"].block_sparse_moe.experts.w2.mul_(2)
        model.model.layers["2"].self_attn.q_proj.weight.mul_(2)
    model.save_pretrained(tmp_path / "one")
    run_ranks(2, save_trained, tmp_path / "two", kind)
    assert digests(tmp_path / "two") == digests(tmp_path / "one")
    assert digests(tmp_path / "one")["model.safetensors"] != digests(DEMO)["model.safetensors"]


def save_placed(folder, out) -> None:
    size = dist.get_world_size()
    model = load(folder, mesh=make_mesh(ep=size))
    for layer_idx, layer in enumerate(expert_layers(model)):
        tables, num_active, slots, capacity = random_placement(size, layer_idx)
        place_experts(layer, tables_from_slots(tables, num_active, capacity), slots)
    model.save_pretrained(out)


def test_a_model_whose_experts_have_moved_is_saved_in_order(wide_folder, tmp_path):
    load(wide_folder).save_pretrained(tmp_path / "one")
    run_ranks(2, save_placed, wide_folder, tmp_path / "two")
    assert digests(tmp_path / "two") == digests(tmp_path / "one")


def test_a_region_is_read_by_its_own_bytes():
    stored = read_header(DEMO / "model.safetensors")
    name = next(name for name in stored if name.endswith("layers.0.self_attn.o_proj.weight"))
    with ShardReader() as reader:
        whole = reader.read(stored[name])
        for region in (Region(0, 5, 7), Region(1, 3, 11), Region(1, 0, whole.shape[1]), Region(0, 4, 0)):
            before = reader.bytes_read
            part = reader.read_region(stored[name], region)
            assert torch.equal(part, whole.narrow(*region))
            assert reader.bytes_read - before == part.nbytes


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="mesh: want a DeviceMesh"):
        load(mesh="tp=2")


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 8])
def test_eight_ranks_read_an_eighth_of_the_release(shared_folder, tmp_path, tp):
    """On the release's twin, by the byte ranges that a rank asks for: nothing is read."""
    import subprocess
    import sys

    folder = tmp_path / "twin"
    subprocess.run([sys.executable, shared_folder / "tools" / "make_release_twin.py", folder], check=True)
    for rank in (0, 3, 7):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        try:
            plan = checkpoint.plan_reads(KimiK3ForCausalLM, folder, mesh=make_mesh(tp=tp, ep=8))
        finally:
            dist.destroy_process_group()
        asked = sum(part.num_bytes for part in plan.parts)
        share = sum(spec.num_bytes for spec in plan.tensors.values())
        assert share / 8 < asked <= 1.05 * share
        routed = sum(part.num_bytes for part in plan.parts if ".experts." in part.module_name)
        assert routed == 17_547_264 * 112 * 92
        print(rank, asked, share)
