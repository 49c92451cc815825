"""One request of the engine as an asynchronous iterator of what it samples, or awaited whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from serving.engine.engine import Engine
from serving.engine.slots import Request
from serving.tokens import Sampling


class Stream:
    """A generation, submitted at once. Leaving the iteration or cancelling `result` aborts it.

    `seen` ids of `request.output` may be read; `done` tells that they are all.
    """

    def __init__(
        self,
        engine: Engine,
        input_ids: list[int],
        sampling: Sampling,
        *,
        rid: str | None = None,
        ignore_eos: bool = False,
    ) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[int | Request | BaseException] = asyncio.Queue()
        self.seen = 0
        self.done = False
        self.request = engine.submit(
            input_ids, sampling, self._put, rid=rid, progress=lambda ids: self._put(len(ids)), ignore_eos=ignore_eos
        )

    def _put(self, event: int | Request | BaseException) -> None:
        with suppress(RuntimeError):  # the loop was closed, and nobody waits
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def result(self) -> Request:
        """Wait for the end. ModelFailure if the engine stops."""
        async for _ in self:
            pass
        return self.request

    async def __aiter__(self) -> AsyncIterator[int]:
        """The number of new ids, after each chunk and once (with 0) at the end."""
        try:
            while not self.done:
                event = await self._events.get()
                if isinstance(event, BaseException):
                    self.done = True
                    raise event
                if isinstance(event, Request):
                    self.done = True
                    event = 0
                self.seen += event
                yield event
        finally:
            if not self.done:
                self._engine.abort(ticket=self.request.ticket)
