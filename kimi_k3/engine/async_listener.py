"""What an asyncio stream hears of its request."""

from __future__ import annotations

import asyncio

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
