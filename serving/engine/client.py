"""The engine behind the token client's interface, without HTTP: same checks, same results.

The engine's thread hands results to the event loop by `call_soon_threadsafe`; a caller that is cancelled aborts its
request.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from serving.chat import ModelFailure
from serving.engine.slots import Request
from serving.tokens import Generation, PauseMode, Sampling, check_sampling

if TYPE_CHECKING:
    from serving.engine.engine import Engine


class InProcessTokenClient:
    """A TokenClient of an engine in this process."""

    def __init__(self, engine: Engine, *, allow_truncated: bool = False) -> None:
        self.engine = engine
        self._allow_truncated = allow_truncated

    async def generate(self, input_ids: list[int], sampling: Sampling, *, rid: str | None = None) -> Generation:
        """Sample after `input_ids`. ModelFailure where the engine refuses the request or has stopped."""
        from serving.engine.engine import generation

        check_sampling(sampling, allow_truncated=self._allow_truncated)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Request] = loop.create_future()

        def deliver(result: Request | BaseException) -> None:
            if future.done():
                return
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

        def finished(result: Request | BaseException) -> None:
            with suppress(RuntimeError):  # the loop was closed, and nobody waits
                loop.call_soon_threadsafe(deliver, result)

        request = self.engine.submit(input_ids, sampling, finished, rid=rid)
        try:
            return generation(await future)
        except asyncio.CancelledError:
            self.engine.abort(ticket=request.ticket)
            raise

    async def abort(self, rid: str | None = None) -> None:
        self.engine.abort(rid)

    async def pause(self, mode: PauseMode = "retract") -> None:
        await asyncio.wrap_future(self.engine.pause(mode))

    async def continue_(self) -> None:
        await asyncio.wrap_future(self.engine.resume())

    async def flush_cache(self) -> None:
        if not await asyncio.wrap_future(self.engine.flush()):
            raise ModelFailure("bad_request", "the cache is not flushed while requests run")

    async def update_weights_from_disk(self, path: str | Path, version: int) -> None:
        await asyncio.wrap_future(await asyncio.to_thread(self.engine.load, path, version))

    async def aclose(self) -> None:
        """Nothing to close: the engine belongs to whoever made it."""
