"""The compiled CPU kernels: built once, from csrc/, by the machine's C++ compiler against torch's stable ABI.

An installation made with torch at hand (`make`, or `pip install --no-build-isolation`) carries the library beside this
file. Otherwise the first import builds it, says so in one line, and keeps it in a cache folder. Without a compiler the
plain PyTorch references serve every op; `kimi-k3 env` says which kernel serves which.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
STABLE_ABI = 0x020A000000000000  # torch 2.10: the library loads in this release and in every later one
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wall"]
FLAGS += [f"-DTORCH_TARGET_VERSION={STABLE_ABI:#x}"]

logger = logging.getLogger("kimi_k3")


def source_files() -> list[Path]:
    return sorted(SOURCES.rglob("*.cpp"))


def fingerprint() -> str:
    """Of the sources and of what they are built for: a change of either builds anew."""
    digest = hashlib.sha256(repr((FLAGS, platform.machine(), sys.platform)).encode())
    for file in sorted(SOURCES.rglob("*.[ch]*")):
        digest.update(file.relative_to(SOURCES).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def compiler() -> str | None:
    """$CXX, or the first of c++, g++ and clang++ that is installed."""
    return next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")))), None)


def installed_library() -> Path:
    return Path(__file__).parent / f"_native_{fingerprint()}.so"


def cache_folder() -> Path:
    """Where built kernels and compiled graphs are kept: $KIMI_K3_CACHE, else kimi_k3 in the user's cache folder."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("KIMI_K3_CACHE") or user / "kimi_k3")


def cached_library() -> Path:
    return cache_folder() / f"kernels_{fingerprint()}.so"


def build(target: Path) -> Path:
    """Compile csrc/ into `target`.

    Raises: RuntimeError with the compiler's own words.
    """
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("no C++ compiler: install g++ or clang++, or set CXX")
    torch_folder = Path(torch.__file__).parent
    includes = [f"-I{SOURCES}", f"-I{torch_folder / 'include'}"]
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu"]
    if sys.platform == "darwin":
        libraries += ["-undefined", "dynamic_lookup"]

    def run(*command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = {source: str(Path(folder) / f"{i}.o") for i, source in enumerate(source_files())}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda item: run(cxx, *FLAGS, *includes, "-c", str(item[0]), "-o", item[1]), objects.items()))
        finished = str(Path(folder) / target.name)
        run(cxx, "-shared", "-o", finished, *objects.values(), *libraries)
        os.replace(finished, target)  # whole or not at all, also when two processes build at once
    return target


def load() -> Path | None:
    """Register the compiled kernels, building them where there are none yet. Returns the library, None without one."""
    if os.environ.get("KIMI_K3_NATIVE") == "0" or not source_files():
        return None
    library = installed_library()
    if not library.exists():
        library = cached_library()
    if not library.exists():
        if compiler() is None:
            logger.warning("kimi_k3: no C++ compiler, so plain PyTorch serves every op (slow on a CPU)")
            return None
        print("kimi_k3: building the CPU kernels (once) ...", file=sys.stderr, flush=True)
        try:
            build(library)
        except (RuntimeError, OSError) as error:  # OSError: a cache folder that cannot be written
            logger.warning("kimi_k3: the CPU kernels did not build, so plain PyTorch serves every op:\n%s", error)
            return None
    torch.ops.load_library(str(library))
    return library
