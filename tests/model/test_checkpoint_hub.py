"""Checkpoints on the Hub: the real client against a server on the loopback, and what is said when there is no network.

huggingface_hub reads its endpoint when it is imported, so each case runs in a process of its own.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from checkpoint_editing import GOLDEN, assert_same_bytes, shard_of, sharded_copy_of, tensors_of
from hub_server import HubServer

PRELUDE = """
    import sys
    import torch
    from kimi_k3 import KimiK3Config, KimiK3ForCausalLM
    from kimi_k3.checkpoint import CheckpointError, resolve_file
    from kimi_k3.preflight import InsufficientResources
    golden = sys.argv[1]
"""


@pytest.fixture
def hub(tmp_path):
    server = HubServer(tmp_path / "hub")
    (tmp_path / "hub" / "me").mkdir(parents=True)
    yield server
    server.close()


def run(tmp_path: Path, endpoint: str, code: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment |= {
        "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_ETAG_TIMEOUT": "5", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **variables,
    }  # fmt: skip
    program = textwrap.dedent(PRELUDE) + textwrap.dedent(code)
    command = [sys.executable, "-c", program, str(GOLDEN / "golden")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def succeed(*arguments: str, **variables: str) -> str:
    result = run(*arguments, **variables)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def downloads(server: HubServer) -> list[str]:
    """Names of the weights files that were fetched."""
    fetched = [re.fullmatch(r"GET /me/k3/resolve/[^/]+/(.+\.safetensors)", line) for line in server.requests]
    return [match[1] for match in fetched if match]


def test_a_repository_is_downloaded_once_and_then_served_from_the_cache(tmp_path, hub):
    sharded_copy_of("golden", hub.root / "me" / "k3")
    code = """
        model = KimiK3ForCausalLM.from_pretrained("me/k3", token="hf_secret")
        same = KimiK3ForCausalLM.from_pretrained(golden)
        assert all(torch.equal(p, same.get_parameter(name)) for name, p in model.named_parameters())
    """
    succeed(tmp_path, hub.url, code)
    assert len(downloads(hub)) == len(set(downloads(hub))) == 10
    assert hub.tokens == {"Bearer hf_secret"}
    hub.requests.clear()
    succeed(tmp_path, hub.url, code)
    assert downloads(hub) == []
    hub.requests.clear()
    succeed(tmp_path, "http://127.0.0.1:9", code.replace('token="hf_secret"', "local_files_only=True"))
    succeed(tmp_path, "http://127.0.0.1:9", code, HF_HUB_OFFLINE="1")
    assert hub.requests == []


def test_a_single_file_repository(tmp_path, hub):
    shutil.copytree(GOLDEN / "vision", hub.root / "me" / "k3")
    code = f"""
        model = KimiK3ForCausalLM.from_pretrained("me/k3", cache_dir={str(tmp_path / "elsewhere")!r}, verify="sha256")
        model.save_pretrained({str(tmp_path / "out")!r})
    """
    succeed(tmp_path, hub.url, code)
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors_of(GOLDEN / "vision"))
    assert (tmp_path / "out" / "tiktoken.model").exists() and (tmp_path / "out" / "preprocessor_config.json").exists()
    assert (tmp_path / "elsewhere" / "models--me--k3").is_dir()


def test_a_stage_downloads_only_its_own_shards(tmp_path, hub):
    folder = sharded_copy_of("golden", hub.root / "me" / "k3")
    succeed(tmp_path, hub.url, 'KimiK3ForCausalLM.from_pretrained("me/k3", layers=range(2, 4))')
    wanted = {shard_of(folder, f"language_model.model.layers.{i}.mlp_res_norm.weight") for i in (2, 3)}
    assert set(downloads(hub)) == wanted


def test_a_download_that_broke_off_is_resumed(tmp_path, hub):
    shutil.copytree(GOLDEN / "golden", hub.root / "me" / "k3")
    hub.cut_after["model.safetensors"] = 1_000_000
    code = """
        from huggingface_hub import constants
        constants.DOWNLOAD_CHUNK_SIZE = 100_000  # in place of 10 MB, more than the file has
        model = KimiK3ForCausalLM.from_pretrained("me/k3")
        same = KimiK3ForCausalLM.from_pretrained(golden)
        assert all(torch.equal(p, same.get_parameter(name)) for name, p in model.named_parameters())
    """
    first = run(tmp_path, hub.url, code)
    if first.returncode != 0:  # this client gave up; another run must go on where it stopped
        succeed(tmp_path, hub.url, code)
    assert len(downloads(hub)) == 2
    assert hub.ranges == ["bytes=1000000-"]


def test_sha256_compares_with_the_hub(tmp_path, hub):
    shutil.copytree(GOLDEN / "golden", hub.root / "me" / "k3")
    code = 'KimiK3ForCausalLM.from_pretrained("me/k3", verify={})'
    succeed(tmp_path, hub.url, code.format('"sha256"'))
    blob = (tmp_path / "hf" / "hub" / "models--me--k3" / "snapshots").glob("*/model.safetensors")
    path = next(blob).resolve()
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    succeed(tmp_path, hub.url, code.format('"size"'))
    for offline in ("0", "1"):
        result = run(tmp_path, hub.url, code.format('"sha256"'), HF_HUB_OFFLINE=offline)
        assert result.returncode != 0 and "model.safetensors: SHA-256 differs" in result.stderr


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_download_that_the_disk_cannot_take_is_refused_before_it_starts(tmp_path, hub, is_sharded):
    if is_sharded:
        sharded_copy_of("golden", hub.root / "me" / "k3")
    else:
        shutil.copytree(GOLDEN / "golden", hub.root / "me" / "k3")
    code = """
        from collections import namedtuple
        import shutil
        shutil.disk_usage = lambda path: namedtuple("Usage", "total used free")(10**9, 10**9 - 10**6, 10**6)
        try:
            KimiK3ForCausalLM.from_pretrained("me/k3")
        except InsufficientResources as error:
            print(error)
    """
    output = succeed(tmp_path, hub.url, code)
    assert "0.00 GB free" in output and "me/k3" in output and "layers=range" in output
    assert downloads(hub) == []


@pytest.mark.parametrize("offline", ["0", "1"])
def test_without_a_network_one_message_names_repository_cache_and_variable(tmp_path, offline):
    code = """
        try:
            KimiK3ForCausalLM.from_pretrained("me/k3")
        except FileNotFoundError as error:
            print(error)
    """
    lines = succeed(tmp_path, "http://127.0.0.1:9", code, HF_HUB_OFFLINE=offline).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("me/k3: config.json: not in the cache") and str(tmp_path / "hf" / "hub") in lines[0]
    assert f"HF_HUB_OFFLINE={offline}" in lines[0]


def test_a_file_that_the_repository_lacks_is_named(tmp_path, hub):
    shutil.copytree(GOLDEN / "golden", hub.root / "me" / "k3")
    code = """
        try:
            resolve_file("me/k3", "preprocessor_config.json")
        except FileNotFoundError as error:
            print(error)
    """
    assert "me/k3: this Hub repository has no preprocessor_config.json" in succeed(tmp_path, hub.url, code)


def test_push_to_hub_uploads_what_save_pretrained_writes_and_it_loads_again(tmp_path, hub):
    code = """
        model = KimiK3ForCausalLM.from_pretrained(golden, dtype=torch.float32)
        print(model.push_to_hub("me/k3", token="hf_secret", max_shard_size="1MB"))
        again = KimiK3ForCausalLM.from_pretrained("me/k3", dtype=torch.float32)
        assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())
    """
    assert "/me/k3/commit/" in succeed(tmp_path, hub.url, code)
    pushed = hub.root / "me" / "k3"
    assert_same_bytes(tensors_of(pushed), tensors_of(GOLDEN / "golden"))
    assert json.loads((pushed / "config.json").read_text()) == json.loads(
        (GOLDEN / "golden" / "config.json").read_text()
    )
    assert (pushed / "tiktoken.model").exists() and (pushed / "generation_config.json").exists()
