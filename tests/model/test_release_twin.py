"""The release itself, by its twin: 96 shards, 497,220 tensors, 1.56 TB of holes."""

import json
import os
import subprocess
import sys
import textwrap

import psutil
import pytest
import torch

from kimi_k3 import KimiK3Config, KimiK3ForConditionalGeneration
from kimi_k3.tensor_layout import file_name_of, is_expert_stack, module_name_of

VERIFY = """
    import json, sys, time
    from kimi_k3.verification import verify_folder
    start = time.perf_counter()
    report = verify_folder(sys.argv[1])
    # Not getrusage's: that one remembers the process which started this one.
    peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(json.dumps({
        "seconds": time.perf_counter() - start, "peak": peak,
        "problems": report.problems, "tensors": report.num_tensors, "bytes": report.tensor_bytes, "shards": report.num_shards,
        "dtypes": report.tensors_by_dtype,
    }))
"""
REFUSE = """
    import sys, time
    from kimi_k3 import KimiK3ForCausalLM
    from kimi_k3.preflight import InsufficientResources
    start = time.perf_counter()
    try:
        KimiK3ForCausalLM.from_pretrained(sys.argv[1])
    except InsufficientResources as error:
        print(time.perf_counter() - start, error)
"""
STAGE = """
    import os, sys
    from kimi_k3 import KimiK3ForCausalLM
    opened = set()
    sys.addaudithook(lambda event, args: opened.add(os.path.basename(str(args[0]))) if event == "open" else None)
    model = KimiK3ForCausalLM.from_pretrained(sys.argv[1], layers=range(1, 2), progress=False)
    print(sorted(name for name in opened if name.endswith(".safetensors")))
    print(sum(p.numel() * p.element_size() for p in model.parameters()), sum(p.is_meta for p in model.parameters()))
"""


def run(code: str, folder) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def verify(folder) -> dict:
    return json.loads(run(VERIFY, folder))


@pytest.mark.slow
def test_verify_walks_it_in_under_a_minute_and_two_gigabytes(twin_folder):
    report = verify(twin_folder)
    assert report["problems"] == []
    assert (report["shards"], report["tensors"], report["bytes"]) == (96, 497_220, 1_560_860_324_864)
    assert report["dtypes"] == {"BF16": 2_122, "F32": 506, "U8": 494_592}
    assert report["seconds"] < 60
    assert report["peak"] < 2e9


def test_it_is_refused_in_seconds_with_the_numbers(twin_folder):
    seconds, message = run(REFUSE, twin_folder).split(maxsplit=1)
    assert float(seconds) < 5
    assert "1,559.97 GB" in message  # without the 0.89 GB of vision, which the text class does not hold
    assert "free" in message


def test_the_multimodal_class_maps_every_name(twin_folder):
    config = KimiK3Config.from_pretrained(twin_folder)
    with torch.device("meta"):
        model = KimiK3ForConditionalGeneration(config, experts="mxfp4")
    held = dict(model.named_parameters())
    index = json.loads((twin_folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(index) == 497_220
    filled = set()
    for name in index:
        module_name, expert = module_name_of(name)
        assert module_name in held and (expert is None or expert < held[module_name].shape[0]), name
        filled.add((module_name, expert))
    assert len(filled) == len(index)
    wanted = {(n, e) for n, p in held.items() for e in (range(p.shape[0]) if is_expert_stack(n) else [None])}
    assert filled == wanted
    assert {file_name_of(*place) for place in wanted} == index.keys()


@pytest.mark.slow
@pytest.mark.skipif(psutil.virtual_memory().available < 18e9, reason="one MoE layer of the release takes 17 GB")
def test_one_layer_loads_from_its_own_shard_alone(twin_folder):
    shards, sizes = run(STAGE, twin_folder).splitlines()
    assert shards == "['model-00002-of-000096.safetensors']"
    num_bytes = os.path.getsize(twin_folder / "model-00002-of-000096.safetensors")
    held, on_meta = map(int, sizes.split())
    assert on_meta == 0
    assert num_bytes - 1_000_000 < held < num_bytes  # the header is the rest


@pytest.mark.slow
def test_a_deleted_a_truncated_and_a_renamed_entry_are_named(twin_folder, tmp_path):
    for path in twin_folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    shards = {number: tmp_path / f"model-{number:05d}-of-000096.safetensors" for number in (3, 50, 94)}
    shards[3].unlink()
    original = shards[50].resolve()
    shards[50].unlink()
    with open(original, "rb") as source, open(shards[50], "wb") as target:
        target.write(source.read(2_000_000))
        target.truncate(original.stat().st_size - 1)
    with open(shards[94], "rb") as source:
        header = source.read(1 << 16)  # all of the header and no more than zeros after it
    size = shards[94].stat().st_size
    shards[94].unlink()
    with open(shards[94], "wb") as target:
        target.write(header.replace(b"language_model.lm_head.weight", b"language_model.lm_tail.weight"))
        target.truncate(size)
    problems = "\n".join(verify(tmp_path)["problems"])
    assert "model-00003-of-000096.safetensors: this shard is missing" in problems
    assert "model-00050-of-000096.safetensors: truncated" in problems
    assert "lacks tensor 'language_model.lm_head.weight'" in problems
    assert "unexpected tensor 'language_model.lm_tail.weight'" in problems
