"""Two habits of an HTTP server of a model: stream events, and stop working for a client that has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse

from astrolabe.records.errors import AstrolabeError
from serving.chat import ModelFailure


async def until_gone(request: Request, work: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> Any:
    """The result of `work`, cancelled where the client goes away before it."""
    task = asyncio.ensure_future(work)
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=1.0)
            if done:
                return task.result()
            if await request.is_disconnected():
                return JSONResponse({"error": {"message": "the client went away"}}, 499)
    finally:
        task.cancel()


def event_stream(events: AsyncIterator[Any]) -> StreamingResponse:
    """Server-sent events of JSON values, ended by `[DONE]`; a failure after the start is sent as an event."""

    async def lines() -> AsyncIterator[str]:
        try:
            async for event in events:
                yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
        except (ModelFailure, AstrolabeError) as error:
            yield f"data: {json.dumps({'error': {'message': str(error)}})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")
