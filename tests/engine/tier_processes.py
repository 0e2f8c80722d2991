"""Entries that say what they must hold, and processes that fight over one folder or are killed while they write.

python tier_processes.py kill FOLDER ROUNDS SEED     python tier_processes.py share FOLDER SECONDS SEED
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from kimi_k3.engine import tiers
from kimi_k3.engine.tier_format import Payload
from kimi_k3.engine.tiers import DiskTier


def key(number: int, suffix: str = "-b") -> str:
    return hashlib.sha256(str(number).encode()).hexdigest() + suffix


def entry(number: int, elements: int = 512) -> Payload:
    generator = torch.Generator().manual_seed(number)
    return {
        "latents": torch.randn(4, elements // 4, generator=generator).bfloat16(),
        "states": torch.randn(2, 8, 16, generator=generator),
        "windows": torch.randint(0, 99, (3,), generator=generator),
    }


def same(left: Payload | None, right: Payload) -> bool:
    return left is not None and left.keys() == right.keys() and all(
        tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]) for name, tensor in left.items()
    )  # fmt: skip


def stored_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def forked(work: Callable[[], None]) -> int:
    process = os.fork()
    if process == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(3)
    return process


def write_for_ever(folder: str, seed: int) -> None:
    """Writes as the tier does, only with a pause between the pieces of a file, for the kill to fall into."""
    packed = tiers.pack

    def slowly(*arguments):
        pieces = packed(*arguments)

        class Slow(list):
            def __iter__(self):
                for piece in pieces:
                    for start in range(0, len(piece), 4096):
                        yield piece[start : start + 4096]
                        time.sleep(0.0005)

        return Slow() if sys._getframe(1).f_code.co_name == "_put" else pieces

    tiers.pack = slowly
    tier, numbers = DiskTier(folder, 1 << 30), random.Random(seed)
    while True:
        number = numbers.randrange(1 << 30)
        tier.put(key(number), entry(number, 1 << 15))
        with open(Path(folder) / "written", "a") as log:  # only what put() has promised
            log.write(f"{number}\n")


def kill(folder: str, rounds: int, seed: int) -> dict[str, int]:
    delays = random.Random(seed)
    found = {"leftovers": 0, "entries": 0, "wrong": 0, "damaged": 0, "temporaries": 0}
    log = Path(folder) / "written"
    for round_ in range(8 * rounds):
        if round_ >= rounds and found["leftovers"]:  # more rounds only where no kill fell into a write
            break
        before = log.stat().st_size if log.exists() else 0
        writer = forked(lambda: write_for_ever(folder, seed + round_))  # noqa: B023
        while not log.exists() or log.stat().st_size == before:  # however busy the machine is
            time.sleep(0.001)
        time.sleep(0.1 * delays.random())
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        found["leftovers"] += sum(path.suffix == ".tmp" for path in stored_files(Path(folder)))
        tier = DiskTier(folder, 1 << 30)  # the next start
        tier.stats()
        found["temporaries"] += sum(path.suffix == ".tmp" for path in stored_files(Path(folder)))
    for number in {int(line) for line in log.read_text().splitlines()}:
        found["entries"] += 1
        found["wrong"] += not same(tier.get(key(number)), entry(number, 1 << 15))
    for path in stored_files(Path(folder) / "kimi_k3-tier-1"):
        try:
            tier.get(path.stem)
        except tiers.TierError:
            found["damaged"] += 1
    return found


def use(folder: str, seconds: float, seed: int) -> None:
    """Random puts, reads and deletes of few keys in a folder that is too small for them; exits 1 on a wrong entry."""
    tier, choice = DiskTier(folder, 100_000), random.Random(seed)
    end, counts = time.monotonic() + seconds, Counter[str]()
    while time.monotonic() < end:
        number = choice.randrange(60)
        action = choice.random()
        if action < 0.45:
            tier.put(key(number), entry(number, 1024))
        elif action < 0.9:
            found = tier.get(key(number))
            if found is not None and not same(found, entry(number, 1024)):
                os._exit(1)
        elif action < 0.97:
            tier.delete(key(number))
        else:
            counts.update(tier.stats())
            tier = DiskTier(folder, 100_000)  # a restart: scans, and looks for leftovers of the dead
    counts.update(tier.stats())
    if counts["damaged"] or counts["foreign"] or counts["io"] or not counts["hits"] or not counts["evicted"]:
        print(counts, file=sys.stderr)
        os._exit(2)


def share(folder: str, seconds: float, seed: int) -> dict[str, int]:
    workers = [forked(lambda: use(folder, seconds, seed + number)) for number in range(2)]  # noqa: B023
    ends = [os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) for worker in workers]
    files = stored_files(Path(folder))
    return {
        "failed": sum(end != 0 for end in ends),
        "temporaries": sum(path.suffix == ".tmp" for path in files),
        "bytes": sum(path.stat().st_size for path in files),
        "entries": len(files),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, folder, amount, seed = sys.argv[1:]
    print(
        json.dumps(kill(folder, int(amount), int(seed)) if mode == "kill" else share(folder, float(amount), int(seed)))
    )
