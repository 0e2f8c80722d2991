"""What an asyncio stream hears of its request, and what the thread that steps for it needs."""

from __future__ import annotations

import asyncio
import ctypes
import sys

from kimi_k3.engine.request import RequestOutput


class AsyncListener:
    """Outputs of a request, from the thread that steps to the event loop in which this was made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()

    @property
    def is_gone(self) -> bool:
        """Whether nobody can listen any more."""
        return self._loop.is_closed()

    def append(self, output: RequestOutput | BaseException) -> None:
        """From any thread; an exception is what the stream ends with."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, output)
        except RuntimeError:  # the loop was closed under its streams
            if not self.is_gone:
                raise

    async def next(self) -> RequestOutput:
        output = await self._queue.get()
        if isinstance(output, BaseException):
            raise output
        return output


def end_openmp_team() -> None:
    """End the OpenMP team of the calling thread; its next parallel op starts one anew.

    Two threads that compute have a team each, more threads than cores even while one is idle, and GNU's OpenMP then lets all
    of them sleep at barriers instead of spinning: on 2 cores a decode step of a 2.0 GB model took 150 to 160 ms in a second
    thread against 124 in the first, and 120 to 127 once the first had ended its team.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None) if sys.platform == "linux" else None
    if pause is not None:
        pause(1)  # omp_pause_soft
