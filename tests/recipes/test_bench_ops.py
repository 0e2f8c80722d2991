"""The benchmark of the ops: every op is there, its counts are those of the equations, and its output is whole."""

import json
import sys

import bench_ops
import pytest
import torch


def cases(shapes: str, *ops: str) -> list[bench_ops.Case]:
    make = bench_ops.Maker(bench_ops.SHAPES[shapes], "cpu", torch.bfloat16)
    return list(bench_ops.cases_of(make, set(ops or bench_ops.ALL_OPS)))


def test_every_registered_op_is_measured():
    registered = {
        name.removeprefix("kimi_k3::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("kimi_k3::") and not name.endswith("cpu_instructions")
    } - {"experts_over_ranks"}  # it needs several processes
    assert registered == set(bench_ops.ALL_OPS) == {case.op for case in cases("tiny")}


def test_the_json_holds_what_the_table_shows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    ceilings = {"bandwidth_bytes_per_s": 2e10, "bf16_gemm_flops_per_s": 1e11, "fp32_gemm_flops_per_s": 5e10}
    monkeypatch.setattr(bench_ops, "measure_ceilings", lambda device: ceilings)
    wanted = ["kda_step_", "mxfp4_experts"]
    arguments = ["--shapes", "tiny", "--seconds", "0.01", "--json", *(word for op in wanted for word in ("--op", op))]
    monkeypatch.setattr(sys, "argv", ["bench_ops.py", *arguments])
    bench_ops.main()
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert {row["op"] for row in result["ops"]} == set(wanted)
    assert result["peak_memory_bytes"] > 1 << 26
    for row in result["ops"]:
        limit_s = max(row["bytes"] / 2e10, row["flops"] / 1e11)
        assert row["share"] == pytest.approx(limit_s / row["seconds"]) and row["seconds"] > 0
        assert any(line.startswith(f"{row['op']:23} {row['case']}") for line in lines)


@pytest.mark.slow
def test_ceilings_are_of_this_machine():
    ceilings = bench_ops.measure_ceilings("cpu")
    assert 1e9 < ceilings["bandwidth_bytes_per_s"] < 1e13
    assert all(1e9 < ceilings[f"{name}_gemm_flops_per_s"] < 1e15 for name in ("bf16", "fp32"))


def test_bytes_and_flops_of_the_experts_are_those_of_the_packed_layer():
    shape = bench_ops.SHAPES["tiny"]
    one, eight = cases("tiny", "mxfp4_experts")
    expert_bytes = 3 * shape.moe_latent * shape.expert_width * (1 / 2 + 1 / 32)  # a code is 4 bits, a scale 8 for 32
    assert one.bytes == shape.topk * expert_bytes + 2 * 2 * shape.moe_latent
    assert eight.flops == 8 * shape.topk * 3 * 2 * shape.moe_latent * shape.expert_width
    assert all(call[1].max() < shape.experts and len(call[1][0].unique()) == shape.topk for call in eight.inputs)


def test_the_whole_layer_of_k3_runs_only_alone(monkeypatch: pytest.MonkeyPatch):
    # 15.7 GB: reached only where it is the one op that was named.
    made = []
    monkeypatch.setattr(
        bench_ops, "packed_expert_cases", lambda make, with_reference: made.append(with_reference) or []
    )
    make = bench_ops.Maker(bench_ops.SHAPES["k3"], "cpu", torch.bfloat16)
    assert list(bench_ops.cases_of(make, {"mxfp4_experts", "mxfp4_experts_backward"})) == [] and made == []
    assert list(bench_ops.cases_of(make, {"mxfp4_experts"})) == [] and made == [False]
    assert list(bench_ops.cases_of(make, {"mxfp4_experts", "mxfp4_experts_int8"})) == [] and made == [False, False]


def test_random_bytes_fill_every_place_within_their_bounds():
    make = bench_ops.Maker(bench_ops.SHAPES["tiny"], "cpu", torch.bfloat16)
    filled = make.random_bytes((3, 1 << 20), 116, 120)
    assert filled.min() == 116 and filled.max() == 119
    assert not torch.equal(filled[0], filled[1]) and not torch.equal(filled[1], filled[2])


def test_inputs_alternate_until_they_leave_the_cache():
    for case in cases("mid", "kda_step_", "attn_res_mix"):
        held = {
            t.data_ptr(): t.numel() * t.element_size()
            for call in case.inputs
            for t in call
            if isinstance(t, torch.Tensor)
        }
        assert sum(held.values()) >= bench_ops.COLD_BYTES or len(case.inputs) == bench_ops.MOST_COPIES
