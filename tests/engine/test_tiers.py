"""Host, disk and remote tiers: what comes back is what went in, or nothing, and every loss has a counted reason."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tier_processes import entry, key, same, stored_files
from valkey_server import Server, server_binary

from kimi_k3.engine import tiers
from kimi_k3.engine.tier_format import DTYPES, FORMAT, LossyCodec, TierError, pack, payload_bytes, unpack
from kimi_k3.engine.tiers import DiskTier, HostTier, RemoteTier, Tier

ENTRY_BYTES = payload_bytes(entry(0))


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("--maxmemory", "12mb", "--maxmemory-policy", "noeviction")
    yield server
    server.stop()


@pytest.fixture(params=["host", "disk", "remote"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    if request.param == "host":
        tier: Tier = HostTier(1 << 20)
    elif request.param == "disk":
        tier = DiskTier(tmp_path, 1 << 20)
    else:
        tier = RemoteTier(request.getfixturevalue("shared_server").url)
        tier._client.flushall()
    yield tier
    tier.close()


# All tiers


def test_every_dtype_and_shape_comes_back(tier):
    source = {f"t{number}": torch.randint(0, 2, (3, 5, 2)).to(dtype) for number, dtype in enumerate(DTYPES.values())}
    source |= {"scalar": torch.tensor(7.0), "empty": torch.zeros(0, 4), "strided": torch.randn(6, 4).t()[1:]}
    source |= {"nan": torch.tensor([float("nan"), -0.0, float("inf")])}
    expected = {name: tensor.clone() for name, tensor in source.items()}
    assert tier.put(key(1), source)
    for tensor in source.values():
        tensor.zero_()  # the tier has its own copy
    found = tier.get(key(1))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and tensor.shape == expected[name].shape
        assert torch.equal(tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor,
                           expected[name].contiguous().view(torch.uint8) if tensor.ndim else expected[name])  # fmt: skip


def test_an_entry_is_there_until_it_is_deleted(tier):
    assert tier.get(key(1)) is None and not tier.contains(key(1))
    assert tier.put(key(1), entry(1)) and tier.put(key(2), entry(2)) and tier.contains(key(1))
    assert same(tier.get(key(1)), entry(1)) and same(tier.get(key(2)), entry(2))
    tier.delete(key(1))
    tier.delete(key(1))
    assert tier.get(key(1)) is None and same(tier.get(key(2)), entry(2))
    stats = tier.stats()
    assert (stats["hits"], stats["misses"], stats["puts"]) == (3, 2, 2)
    assert stats.get("entries", 1) == 1


def test_an_entry_is_never_rewritten(tier):
    assert tier.put(key(1), entry(1)) and tier.put(key(1), entry(2))
    assert same(tier.get(key(1)), entry(1))


@pytest.mark.parametrize(
    "bad",
    ["", "a" * 63, "A" * 64, "g" * 64, key(1) + "/x", "../" + "a" * 64, key(1) + ".x", key(1) + "-B", key(1) + "\n"],
)
def test_a_key_is_hex_and_short_suffixes(tier, bad):
    for call in (tier.get, tier.contains, tier.delete, lambda name: tier.put(name, entry(1))):
        with pytest.raises(ValueError, match="key: want 64"):
            call(bad)


@pytest.mark.parametrize(
    "payload",
    [{}, {"a.b": torch.zeros(1)}, {"__metadata__": torch.zeros(1)}, {"a": torch.zeros(1, device="meta")},
     {"a": torch.zeros(1, dtype=torch.complex64)}],
)  # fmt: skip
def test_a_payload_is_named_tensors_on_the_cpu(tier, payload):
    with pytest.raises(ValueError, match="payload: want"):
        tier.put(key(1), payload)


# The bytes


def test_an_entry_is_a_safetensors_file(tmp_path):
    DiskTier(tmp_path, 1 << 20).put(key(3), entry(3))
    (path,) = stored_files(tmp_path)
    assert path.stem == key(3) and same(load_file(path), entry(3))


def test_every_flipped_bit_is_found():
    whole = bytearray(b"".join(pack(key(1), {"a": torch.arange(6.0), "b": torch.ones(3, dtype=torch.int16)})))
    expected = unpack(key(1), torch.frombuffer(whole, dtype=torch.uint8).clone())
    header_end = 8 + int.from_bytes(whole[:8], "little")
    padding = range(8 + whole[8:header_end].rindex(b"}") + 1, header_end)  # spaces: mean nothing
    found = 0
    for position in range(len(whole)):
        for bit in range(8) if position not in padding else ():
            changed = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
            changed[position] ^= 1 << bit
            with pytest.raises(TierError) as caught:
                unpack(key(1), changed)
            assert caught.value.reason in ("damaged", "foreign")
            found += 1
    assert found > 8 * 300 and torch.equal(expected["a"], torch.arange(6.0))


def test_every_shorter_or_longer_file_is_damaged():
    whole = torch.frombuffer(bytearray(b"".join(pack(key(1), {"a": torch.arange(6.0)}))), dtype=torch.uint8)
    for length in range(len(whole)):
        with pytest.raises(TierError, match="damaged"):
            unpack(key(1), whole[:length])
    with pytest.raises(TierError, match="damaged"):
        unpack(key(1), torch.cat([whole, whole[:1]]))


def rewritten(path: Path, change: dict[str, str]) -> None:
    """The same tensors in a whole and valid file with other metadata."""
    header = path.read_bytes()
    metadata = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]
    save_file(load_file(path), path, metadata | change)


DAMAGE = {
    "empty": ("damaged", lambda path: path.write_bytes(b"")),
    "short": ("damaged", lambda path: os.truncate(path, path.stat().st_size - 1)),
    "header only": ("damaged", lambda path: os.truncate(path, 200)),
    "bit": ("damaged", lambda path: path.write_bytes(path.read_bytes()[:-9] + b"\x55" + path.read_bytes()[-8:])),
    "noise": ("damaged", lambda path: path.write_bytes(os.urandom(5000))),
    "other format": ("foreign", lambda path: rewritten(path, {"format": "kimi_k3-tier-0"})),
    "other program": ("foreign", lambda path: save_file({"weight": torch.zeros(3)}, path)),
    "claimed key": ("damaged", lambda path: rewritten(path, {"key": key(2)})),
    "other key": ("foreign", lambda path: path.write_bytes(b"".join(pack(key(2), entry(2))))),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_bad_file_is_removed_and_named(tmp_path, kind):
    reason, damage = DAMAGE[kind]
    tier = DiskTier(tmp_path, 1 << 20)
    tier.put(key(1), entry(1))
    damage(stored_files(tmp_path)[0])
    with pytest.raises(TierError) as caught:
        tier.get(key(1))
    assert caught.value.reason == reason and key(1) in str(caught.value)
    assert stored_files(tmp_path) == [] and tier.get(key(1)) is None
    stats = tier.stats()
    assert (stats[reason], stats["hits"], stats["misses"], stats["entries"], stats["bytes"]) == (1, 0, 1, 0, 0)
    assert tier.put(key(1), entry(1)) and same(tier.get(key(1)), entry(1))


# Host


def test_host_keeps_the_recently_used_within_its_bytes():
    tier, leaving = HostTier(4 * 2560), []
    tier.on_evict = lambda name: leaving.append((name, tier.contains(name), same(tier.read(name), entry(0))))
    for number in range(4):
        tier.put(key(number), entry(0))
    tier.get(key(0))
    tier.put(key(1), entry(0))
    tier.put(key(9), entry(0))
    assert [tier.contains(key(number)) for number in (0, 1, 2, 3, 9)] == [True, True, False, True, True]
    assert leaving == [(key(2), True, True)]  # still there while it is announced
    stats = tier.stats()
    assert stats["bytes"] <= 4 * 2560 and (stats["entries"], stats["evicted"]) == (4, 1)
    assert not tier.put(key(10), {"a": torch.zeros(4 * 2560 + 1, dtype=torch.uint8)}) and tier.stats()["refused"] == 1
    assert tier.stats()["entries"] == 4  # nothing was evicted for what can never fit


def test_host_results_outlive_their_eviction():
    tier = HostTier(3000)
    tier.put(key(0), entry(0))
    found = tier.get(key(0))
    for number in range(1, 9):
        tier.put(key(number), entry(number))
    assert not tier.contains(key(0)) and same(found, entry(0))


@pytest.mark.parametrize("inference", [False, True])
def test_host_notices_a_write_into_its_bytes(inference):
    tier = HostTier(1 << 20)
    with torch.inference_mode(inference):
        tier.put(key(0), entry(0))
        assert same(tier.get(key(0)), entry(0)) and same(tier.get(key(0)), entry(0))
        tier.get(key(0))["states"][0].add_(1)
    with pytest.raises(TierError, match="damaged"):
        tier.get(key(0))
    assert not tier.contains(key(0)) and tier.stats()["bytes"] == 0


# Disk


def file_bytes() -> int:
    return sum(piece.nbytes for piece in pack(key(0), entry(0)))


def test_disk_keeps_the_recently_used_within_its_bytes(tmp_path):
    tier = DiskTier(tmp_path, 4 * file_bytes())
    for number in range(4):
        assert tier.put(key(number), entry(number))
    tier.get(key(0))
    tier.put(key(1), entry(1))  # is there: counts as a use
    assert tier.put(key(9), entry(9))
    assert [tier.contains(key(number)) for number in (0, 1, 2, 3, 9)] == [True, True, False, True, True]
    assert sum(path.stat().st_size for path in stored_files(tmp_path)) <= 4 * file_bytes()
    assert not tier.put(key(10), entry(10, 1 << 16)) and tier.stats()["entries"] == 4


def test_disk_learns_of_a_use_when_it_evicts(tmp_path):
    tier = DiskTier(tmp_path, 48 * file_bytes())  # 3 entries between two scans
    for number in range(48):
        tier.put(key(number), entry(number))
    for step in range(6):
        assert tier.get(key(2 * step)) is not None  # the oldest
        assert tier.put(key(100 + step), entry(step))
    assert [tier.contains(key(number)) for number in range(14)] == [True, False] * 6 + [True, True]


def test_disk_sees_what_another_process_used(tmp_path):
    one, two = DiskTier(tmp_path, 4 * file_bytes()), DiskTier(tmp_path, 4 * file_bytes())
    for number in range(4):
        one.put(key(number), entry(number))
    assert two.get(key(0)) is not None
    one._is_old_at = 0.0
    one.put(key(4), entry(4))
    assert [one.contains(key(number)) for number in range(5)] == [True, False, True, True, True]


def test_disk_counts_an_entry_once_that_another_process_deleted(tmp_path):
    one, two = DiskTier(tmp_path, 1 << 20), DiskTier(tmp_path, 1 << 20)
    for _ in range(3):
        assert one.put(key(0), entry(0))
        two.delete(key(0))
    assert one.put(key(0), entry(0)) and one.stats()["bytes"] == file_bytes() and one.stats()["entries"] == 1


def test_disk_survives_a_restart_and_counts_what_is_there(tmp_path):
    first = DiskTier(tmp_path, 4 * file_bytes())
    for number in range(4):
        first.put(key(number), entry(number))
    first.close()
    second = DiskTier(tmp_path, 4 * file_bytes())
    assert same(second.get(key(0)), entry(0))
    assert second.put(key(4), entry(4)) and not second.contains(key(1)) and second.contains(key(0))
    assert second.stats()["bytes"] == 4 * file_bytes() and second.stats()["entries"] == 4


def test_disk_counts_and_evicts_what_lies_there_in_another_form(tmp_path):
    """Entries of another codec, or of an older format: the limit is the folder's, and the oldest goes first."""
    lossy = DiskTier(tmp_path, 1 << 20, latents="fp8")
    lossy.put(key(0), entry(0))
    old = tmp_path / "kimi_k3-tier-0" / "ab" / f"{key(1)}.safetensors"
    old.parent.mkdir(parents=True)
    old.write_bytes(bytes(file_bytes()))
    other = tmp_path / "other" / "ab" / f"{key(1)}.safetensors"
    other.parent.mkdir(parents=True)
    other.write_bytes(bytes(file_bytes()))
    os.utime(old, ns=(1, 1))
    tier, leaving = DiskTier(tmp_path, 4 * file_bytes()), []
    tier.on_evict = leaving.append
    assert tier.stats()["entries"] == 2
    for number, left in ((2, [True] * 2), (3, [True] * 2), (4, [False, True]), (5, [False] * 2), (6, [False] * 2)):
        assert tier.put(key(number), entry(number))
        assert [old.exists(), lossy.contains(key(0))] == left
    assert leaving == [key(2)] and tier.stats()["bytes"] == 4 * file_bytes() and other.exists()


def test_disk_that_is_opened_with_fewer_bytes_makes_room_at_once(tmp_path):
    tier = DiskTier(tmp_path, 1 << 20)
    for number in range(8):
        tier.put(key(number), entry(number))
    tier = DiskTier(tmp_path, 3 * file_bytes())
    assert [path.stem for path in stored_files(tmp_path)] == sorted(key(number) for number in (5, 6, 7))
    assert (tier.stats()["entries"], tier.stats()["bytes"]) == (3, 3 * file_bytes())


def test_disk_sees_what_another_process_stored_and_evicted(tmp_path):
    one, two = DiskTier(tmp_path, 8 * file_bytes()), DiskTier(tmp_path, 8 * file_bytes())
    one.put(key(0), entry(0))
    assert two.contains(key(0)) and same(two.get(key(0)), entry(0))
    for number in range(1, 40):
        (one, two)[number % 2].put(key(number), entry(number))
        assert sum(path.stat().st_size for path in stored_files(tmp_path)) <= 9 * file_bytes()
    assert one.get(key(0)) is None and two.get(key(0)) is None
    assert one.stats()["io"] == two.stats()["io"] == 0


def test_disk_removes_what_dead_writers_left_and_nothing_else(tmp_path):
    tier = DiskTier(tmp_path, 1 << 20)
    tier.put(key(0), entry(0))
    shard = stored_files(tmp_path)[0].parent
    (shard / ".dead.tmp").write_bytes(b"half")
    with open(shard / ".alive.tmp", "wb") as alive:
        tiers.fcntl.flock(alive, tiers.fcntl.LOCK_EX)
        DiskTier(tmp_path, 1 << 20).stats()
        assert [path.name for path in stored_files(tmp_path)] == [".alive.tmp", f"{key(0)}.safetensors"]
    DiskTier(tmp_path, 1 << 20).stats()
    assert [path.name for path in stored_files(tmp_path)] == [f"{key(0)}.safetensors"]


def test_disk_writes_again_when_a_scan_took_its_file_for_a_leftover(tmp_path, monkeypatch):
    tier, real, calls = DiskTier(tmp_path, 1 << 20), tiers.fcntl.flock, []

    def flock(file, mode):
        if not calls:
            os.unlink(file.name)
        calls.append(mode)
        real(file, mode)

    monkeypatch.setattr(tiers.fcntl, "flock", flock)
    assert tier.put(key(0), entry(0)) and len(calls) == 2
    assert same(tier.get(key(0)), entry(0)) and len(stored_files(tmp_path)) == 1


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, 1 << 20)

    def full(source, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(TierError, match="No space left") as caught:
            tier.put(key(0), entry(0))
    assert caught.value.reason == "io" and stored_files(tmp_path) == []
    assert tier.stats()["bytes"] == 0 and tier.stats()["io"] == 1
    assert tier.put(key(0), entry(0))


def test_evicted_under_a_reader_is_a_miss_or_whole(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, 1 << 20)
    tier.put(key(0), entry(0))
    assert tier.contains(key(0))
    real = tiers.np.fromfile

    def evict_first(file, dtype):
        DiskTier(tmp_path, 1 << 20).delete(key(0))  # between the reader's open and its read
        return real(file, dtype)

    monkeypatch.setattr(tiers.np, "fromfile", evict_first)
    assert same(tier.get(key(0)), entry(0))
    assert tier.get(key(0)) is None


def processes(*arguments: object) -> dict[str, int]:
    script = Path(__file__).with_name("tier_processes.py")
    run = subprocess.run([sys.executable, script, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    print(run.stderr)  # of what failed in a process of its own
    assert run.returncode == 0
    return json.loads(run.stdout)


def check_kills(folder: Path, rounds: int) -> None:
    found = processes("kill", folder, rounds, 17)
    assert found["leftovers"] > 0 and found["entries"] > 0, "no kill fell into a write"
    assert (found["wrong"], found["damaged"], found["temporaries"]) == (0, 0, 0), found


def test_killed_while_writing_only_whole_entries_remain(tmp_path):
    check_kills(tmp_path, 5)


@pytest.mark.slow
def test_killed_while_writing_fifty_times(tmp_path):
    check_kills(tmp_path, 50)


@pytest.mark.parametrize("seconds", [1.5, pytest.param(20.0, marks=pytest.mark.slow)])
def test_two_processes_share_a_folder(tmp_path, seconds):
    found = processes("share", tmp_path, seconds, 5)
    assert (found["failed"], found["temporaries"]) == (0, 0), found
    assert found["entries"] > 10 and found["bytes"] <= 100_000 * (1 + 2 / 16) + 2 * 4096, found


def test_threads_share_a_folder(tmp_path):
    tier, errors = DiskTier(tmp_path, 12 * file_bytes()), []

    def work(seed: int) -> None:
        try:
            for step in range(120):
                number = (step * 7 + seed * 3) % 20
                tier.put(key(number), entry(number))
                found = tier.get(key((number + seed) % 20))
                assert found is None or same(found, entry((number + seed) % 20))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    files = stored_files(tmp_path)
    assert sum(path.stat().st_size for path in files) <= 12 * file_bytes()
    stats = tier.stats()
    assert (stats["entries"], stats["bytes"]) == (len(files), len(files) * file_bytes())


# Lossy


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_lossy_error_is_bounded_and_named(tmp_path, kind):
    make = {
        "host": lambda **codec: HostTier(1 << 22, **codec),
        "disk": lambda **codec: DiskTier(tmp_path, 1 << 22, **codec),
    }
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(4, 64, 64, generator=generator) * torch.logspace(-6, 3, 64)[:, None]
    states[0, 3] = 0
    latents = torch.randn(64, 128, generator=generator).bfloat16()
    source = {"latents": latents, "states": states, "windows": torch.randn(8, 3)}
    errors = {}
    for name in ("bf16", "fp8"):
        tier = make[kind](latents="fp8", snapshots=name)
        assert tier.put(key(1), source)
        found = tier.get(key(1))
        assert torch.equal(found["windows"], source["windows"])
        for part in ("latents", "states"):
            assert found[part].dtype == source[part].dtype
            step = 2**-8 if part == "states" and name == "bf16" else 2**-4
            row = source[part].float().abs().amax(-1, keepdim=True)
            bound = step * source[part].float().abs() + row * 2**-10 / 448 + (2**-8 * row if part == "latents" else 0)
            error = (found[part].float() - source[part].float()).abs()
            assert (error <= bound).all()
            errors[name, part] = float(error.norm() / source[part].float().norm())
    assert 1e-4 < errors["bf16", "states"] < 2e-3 and 0.01 < errors["fp8", "states"] < 0.04
    assert 0.01 < errors["bf16", "latents"] < 0.04
    print({name: f"{error:.2e}" for name, error in errors.items()})


def test_lossy_and_exact_entries_never_mix(tmp_path):
    exact, lossy = DiskTier(tmp_path, 1 << 20), DiskTier(tmp_path, 1 << 20, latents="fp8", snapshots="fp8")
    assert exact.codec == LossyCodec() != lossy.codec
    lossy.put(key(1), entry(1))
    assert exact.get(key(1)) is None and not exact.contains(key(1)) and not same(lossy.get(key(1)), entry(1))
    exact.put(key(1), entry(1))
    assert same(exact.get(key(1)), entry(1)) and not same(lossy.get(key(1)), entry(1))
    other = DiskTier(tmp_path, 1 << 20, latents="fp8")
    assert other.get(key(1)) is None and len(stored_files(tmp_path)) == 2


def test_lossy_entries_are_smaller_and_keep_what_is_not_finite():
    source = {"latents": torch.randn(64, 512).bfloat16(), "states": torch.randn(8, 128, 128)}
    source["states"][1, 2, 3], source["states"][1, 5, 3] = float("nan"), float("inf")
    codec = LossyCodec("fp8", "fp8")
    assert payload_bytes(codec.encode(source)) < 0.6 * source["latents"].nbytes + 0.3 * source["states"].nbytes
    is_finite = codec.decode(codec.encode(source))["states"].isfinite().all(-1)
    assert torch.equal(is_finite, source["states"].isfinite().all(-1))


def test_codecs_are_known():
    with pytest.raises(ValueError, match=r"latents exact\|fp8"):
        HostTier(1, latents="bf16")
    with pytest.raises(ValueError, match="got 0"):
        HostTier(0)


# Remote


def test_remote_is_asked_for_many_keys_in_one_round_trip(server, monkeypatch):
    from valkey.connection import Connection

    tier = RemoteTier(server.url)
    for number in (3, 4, 40):
        tier.put(key(number), entry(number))
    sent, send = [], Connection.send_packed_command
    monkeypatch.setattr(
        Connection, "send_packed_command", lambda self, *args, **options: sent.append(1) or send(self, *args, **options)
    )
    has = tier.contains_each([key(number) for number in range(50)])
    assert [number for number in range(50) if has[number]] == [3, 4, 40] and len(sent) == 1


def test_remote_server_killed_is_an_error_at_once(server):
    tier = RemoteTier(server.url)
    tier.put(key(1), entry(1))
    assert same(tier.get(key(1)), entry(1))
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    start = time.monotonic()
    for call in (tier.get, tier.contains, tier.delete, lambda name: tier.put(name, entry(1))):
        with pytest.raises(TierError) as caught:
            call(key(1))
        assert caught.value.reason == "io"
    assert time.monotonic() - start < 1.0 and tier.stats()["io"] == 4


def test_remote_server_that_hangs_is_a_timeout_once(server):
    tier = RemoteTier(server.url, timeout_s=0.2)
    tier.put(key(1), entry(1))
    server.process.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(TierError, match="timeout"):
        tier.get(key(1))
    for _ in range(20):
        with pytest.raises(TierError, match="did not answer lately"):
            tier.get(key(1))
    assert time.monotonic() - start < 0.6
    server.process.send_signal(signal.SIGCONT)
    tier._down_until = 0.0
    assert same(tier.get(key(1)), entry(1))


def test_remote_server_that_comes_back_is_used_again(server):
    tier = RemoteTier(server.url, pause_s=0.0)
    tier.put(key(1), entry(1))
    for _ in range(2):  # the pooled connection is dead, the next try opens another
        tier._client.connection_pool.disconnect()
        assert same(tier.get(key(1)), entry(1))


def test_remote_bad_values_are_removed(server):
    tier = RemoteTier(server.url)
    for bad in (b"", b"junk", b"".join(pack(key(1), entry(1)))[:-1], b"".join(pack(key(2), entry(2)))):
        tier._client.set(f"{FORMAT}:{key(1)}", bad)
        with pytest.raises(TierError):
            tier.get(key(1))
        assert not tier.contains(key(1))
    assert tier.stats()["damaged"] == 3 and tier.stats()["foreign"] == 1


def test_remote_full_or_too_big_is_refused(server, monkeypatch):
    monkeypatch.setattr(tiers, "SERVER_BYTES", 1 << 21)
    tier = RemoteTier(server.url)
    big = {"a": torch.zeros(1 << 20, dtype=torch.uint8)}
    assert not tier.put(key(1), {"a": torch.zeros(1 << 21, dtype=torch.uint8)})
    stored = [tier.put(key(number), big) for number in range(2, 20)]
    assert stored[0] and not stored[-1] and tier.stats()["refused"] >= 2


def test_remote_needs_a_server_and_a_client(monkeypatch):
    server_binary()
    with pytest.raises(TierError, match="io"):
        RemoteTier("redis://127.0.0.1:1/0")
    monkeypatch.setitem(sys.modules, "valkey", None)
    with pytest.raises(ImportError, match=r"kimi-k3\[remote\]"):
        RemoteTier("redis://127.0.0.1:1/0")


OPENMP_THREADS = """
import os, threading, torch
from kimi_k3.engine.tiers import HostTier

tier, payload = HostTier(1 << 28), {"x": torch.ones(1 << 22)}
begin, done, end = threading.Event(), threading.Event(), threading.Event()

def write():
    begin.wait()
    tier.put("0" * 64, payload)
    done.set()
    end.wait()  # its team would live as long as it does

thread = threading.Thread(target=write)
thread.start()
before = len(os.listdir("/proc/self/task"))
begin.set()
done.wait()
print(before, len(os.listdir("/proc/self/task")))
end.set()
thread.join()
"""


def test_a_write_starts_no_openmp_threads():
    """A second team of them, with more threads than cores, makes every barrier of the model's slow."""
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    out = subprocess.run(
        [sys.executable, "-c", OPENMP_THREADS], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    before, after = map(int, out.stdout.split())
    assert after == before


# Arguments


@pytest.mark.parametrize("size", ["1GB", 0, -1, 1.5, True, None, torch.tensor(2.0), np.float32(3)])
def test_bytes_are_a_whole_number_above_zero(tmp_path, size):
    for make, name in ((lambda: HostTier(size), "HostTier"), (lambda: DiskTier(tmp_path, size), "DiskTier")):
        with pytest.raises(ValueError) as caught:
            make()
        assert str(caught.value) == f"{name}: want bytes a whole number > 0, got {size!r}"
    assert stored_files(tmp_path) == []


def test_bytes_may_be_numpys_or_torchs(tmp_path):
    for size in (np.int64(1 << 20), torch.tensor(1 << 20)):
        for tier in (HostTier(size), DiskTier(tmp_path, size)):
            assert type(tier._limit) is int and tier.put(key(1), entry(1))


def test_other_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"^DiskTier: want folder a path, got None$"):
        DiskTier(None, 1 << 20)
    with pytest.raises(ValueError, match=r"^LossyCodec: want latents exact\|fp8, .* got 'fp4', 'exact'$"):
        HostTier(1 << 20, latents="fp4")
    for timeout_s, pause_s in ((0, 1), ("1", 1), (1, -1), (1, None)):
        with pytest.raises(ValueError, match=r"^RemoteTier: want timeout_s > 0 and pause_s >= 0 seconds, got "):
            RemoteTier("redis://127.0.0.1:1", timeout_s=timeout_s, pause_s=pause_s)


@pytest.mark.parametrize("url", ["foo", "", "http://host", 5, None, b"foo", "redis://:secret@host:port", "redisf://a"])
def test_a_url_that_is_none_is_named_without_its_password(url):
    with pytest.raises(ValueError, match=r"^RemoteTier: want url redis\[s\]:// or .*, got ") as caught:
        RemoteTier(url)
    assert "secret" not in str(caught.value) and caught.value.__suppress_context__
    assert url == "redis://:secret@host:port" or str(caught.value).endswith(f"got {url!r}")


# What others do to a folder or a server


def test_a_folder_that_was_removed_is_made_again(tmp_path):
    tier = DiskTier(tmp_path / "deep", 1 << 20)
    for number in range(3):
        tier.put(key(number), entry(number))
    shutil.rmtree(tmp_path / "deep")
    assert tier.get(key(0)) is None and tier.put(key(1), entry(1)) and same(tier.get(key(1)), entry(1))
    tier._scan()
    assert tier.stats()["entries"] == 1 and len(stored_files(tmp_path)) == 1


def test_odd_things_in_a_folder_are_left_alone(tmp_path):
    """A directory, a link into nothing, a file without its owner's leave: nothing that a scan may fail on."""
    tier = DiskTier(tmp_path, 1 << 20)
    tier.put(key(0), entry(0))
    shard = stored_files(tmp_path)[0].parent
    (shard / ".a.tmp").mkdir()
    (shard / ".b.tmp").symlink_to("nowhere")
    (shard / f"{key(7)}.safetensors").mkdir()
    again = DiskTier(tmp_path, 1 << 20)
    assert again.stats()["entries"] == 1 and same(again.get(key(0)), entry(0))


def test_an_entry_that_cannot_be_removed_bars_no_other(tmp_path, monkeypatch):
    tier, unlink = DiskTier(tmp_path, 3 * file_bytes()), Path.unlink
    tier.put(key(0), entry(0))

    def refused(path, missing_ok=False):
        if key(0) in path.name:
            raise PermissionError(f"another user's: {path}")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    for number in range(1, 8):
        assert tier.put(key(number), entry(number)) and same(tier.get(key(number)), entry(number))
    assert tier.stats()["entries"] <= 3 and tier.contains(key(0))


def test_a_value_of_another_type_is_foreign_and_removed(server):
    tier = RemoteTier(server.url)
    tier._client.lpush(tier._name(key(1)), "x")
    with pytest.raises(TierError) as caught:
        tier.get(key(1))
    assert caught.value.reason == "foreign" and tier.stats()["foreign"] == 1
    assert tier.get(key(1)) is None and tier.put(key(1), entry(1)) and same(tier.get(key(1)), entry(1))
    tier.close()
