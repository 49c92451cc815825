"""The teacher over HTTP: /v1/chat/completions (tools, streaming), /v1/models, /health.

A request whose last user message ends with a JSON block goes to that agent's program; any other is a turn of the policy.
The reply depends on the teacher's seed and the content of the request (its `seed` included) only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from agents.teacher import MODEL_NAME
from agents.teacher.planter import LabelSink, Planter
from agents.teacher.registry import PROGRAMS, TURNS, CannotAnswer, load
from astrolabe.records.errors import RunError
from astrolabe.records.ids import content_hash, rng_for

_BLOCK = re.compile(r"```json\n(\{.*\})\n```\s*\Z")


class BadRequest(CannotAnswer):
    """A body that is no chat request, or that no program reads."""


def find_block(messages: list[dict[str, Any]]) -> tuple[str, dict[str, Any]] | None:
    """(agent, request) of the block that ends the last user message; None if there is none."""
    text = next((m.get("content") or "" for m in reversed(messages) if m.get("role") == "user"), "")
    found = _BLOCK.search(text) if isinstance(text, str) else None
    if found is None:
        return None
    body = json.loads(found.group(1))
    if not isinstance(body.get("agent"), str) or not isinstance(body.get("request"), dict):
        return None
    return body["agent"], body["request"]


class Teacher:
    """Answers chat requests. `defect_rate` is the share of conversations and replies with a planted defect."""

    def __init__(self, *, seed: int = 0, defect_rate: float = 0.12, sink: LabelSink | None = None) -> None:
        load()
        self.seed, self.defect_rate, self.sink = seed, defect_rate, sink or LabelSink()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """The assistant message for a request body. Raises BadRequest."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise BadRequest("`messages` must be a non-empty list of objects")
        key = content_hash({k: body.get(k) for k in ("messages", "tools", "seed")})
        block = find_block(messages)
        if block is None:
            return self._policy(body, key)
        agent, request = block
        if agent not in PROGRAMS:
            raise BadRequest(f"the teacher has no program for the agent {agent!r}")
        reply = PROGRAMS[agent](request, rng_for(self.seed, agent, key), self._planter(agent, key))
        content = reply if isinstance(reply, str) else json.dumps(reply, ensure_ascii=False)
        return {"role": "assistant", "content": content}

    def _policy(self, body: dict[str, Any], key: str) -> dict[str, Any]:
        messages, tools = body["messages"], body.get("tools") or []
        question = next((m.get("content") or "" for m in messages if m.get("role") == "user"), "")
        for order, family in sorted(TURNS):
            rng = rng_for(self.seed, "policy", family, key)
            turn = TURNS[order, family](question, tools, messages, rng, self._planter("policy", key))
            if turn is not None:
                return turn
        raise BadRequest("no policy program of the teacher reads this question")

    def _planter(self, agent: str, key: str) -> Planter:
        return Planter(seed=self.seed, rate=self.defect_rate, key=key, agent=agent, sink=self.sink)


def _body_of(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _usage(body: dict[str, Any], message: dict[str, Any]) -> dict[str, int]:
    """Rough token counts (four characters a token): deterministic, and marked by the model's name as the teacher's."""
    prompt = (sum(len(str(m.get("content") or "")) for m in body["messages"]) + 3) // 4
    completion = (len(json.dumps(message, ensure_ascii=False)) + 3) // 4
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _stream(base: dict[str, Any], message: dict[str, Any], finish: str) -> Iterator[str]:
    """The message as server-sent chunks: content in pieces, each tool call whole."""

    def chunk(delta: dict[str, Any], reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return "data: " + json.dumps({**base, "object": "chat.completion.chunk", "choices": [choice]}) + "\n\n"

    yield chunk({"role": "assistant"})
    content = message.get("content") or ""
    for start in range(0, len(content), 64):
        yield chunk({"content": content[start : start + 64]})
    for index, call in enumerate(message.get("tool_calls") or []):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, finish)
    yield "data: [DONE]\n\n"


def create_app(seed: int = 0, defect_rate: float = 0.12, labels_path: Path | None = None) -> FastAPI:
    """The server. Labels of planted defects are appended to `labels_path`."""
    app = FastAPI(title="Astrolabe offline teacher")
    teacher = Teacher(seed=seed, defect_rate=defect_rate, sink=LabelSink(labels_path))
    app.state.teacher = teacher

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "model": MODEL_NAME}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": MODEL_NAME, "object": "model", "owned_by": "astrolabe"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        try:
            message = teacher.answer(body := _body_of(await request.body()))
        except CannotAnswer as error:
            return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, status_code=400)
        except RunError as error:  # no room for the label of a defect
            return JSONResponse({"error": {"message": error.message, "type": "server_error"}}, status_code=507)
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        # The epoch, not the clock: a reply is stored and compared byte for byte.
        base = {"id": "chatcmpl-" + content_hash(message), "created": 0, "model": MODEL_NAME}
        if body.get("stream"):
            return StreamingResponse(_stream(base, message, finish), media_type="text/event-stream")
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return JSONResponse({**base, "object": "chat.completion", "choices": [choice], "usage": _usage(body, message)})

    return app
