"""`/v1/chat/completions` and `/v1/models` of the engine: messages are rendered, the sampled ids are parsed.

While it streams, text is sent as soon as it is certain; calls are sent whole at the end, since a call that is cut or
malformed is not known before. A malformed call is given to the caller as it was written, so that it can be answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request

from serving.chat import ModelFailure
from serving.engine.engine import Engine
from serving.engine.responses import event_stream, until_gone
from serving.engine.stream import Stream
from serving.engine.wire import ChatBody, refuse
from serving.render import ParsedTurn, Renderer


def add_chat_routes(app: FastAPI, engine: Engine, model_name: str) -> None:
    renderers: dict[bool, Renderer] = {}
    if engine.renderer is not None:
        renderers[engine.renderer.enable_thinking] = engine.renderer

    def renderer_for(body: ChatBody) -> Renderer:
        base = engine.renderer
        if base is None:
            raise refuse("chat", "use /generate with input_ids: no tokenizer was given to the server")
        thinking = bool(body.chat_template_kwargs.get("enable_thinking", base.enable_thinking))
        if thinking not in renderers:
            renderers[thinking] = Renderer(base.tokenizer, base.family, enable_thinking=thinking)
        return renderers[thinking]

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {
            "id": model_name,
            "object": "model",
            "created": 0,
            "owned_by": "astrolabe",
            "root": engine.model_path or model_name,
            "max_model_len": engine.max_len,
        }
        return {"object": "list", "data": [card]}

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Any:
        body.check()
        renderer = renderer_for(body)
        prompt = renderer.prompt_ids(body.messages, body.tools if body.tool_choice != "none" else None)
        room = engine.max_len - len(prompt)
        if room <= 0:
            raise ModelFailure(
                "bad_request", f"a prompt of {len(prompt)} ids is over the context length of {engine.max_len}"
            )
        seeds = [None if body.seed is None else body.seed + choice for choice in range(body.n)]
        streams = [Stream(engine, prompt, body.sampling(seed, room)) for seed in seeds]
        head = {"id": f"chatcmpl-{streams[0].request.ticket}", "created": int(time.time()), "model": model_name}
        if body.stream:
            return event_stream(_chunks(streams[0], renderer, prompt, head, body))
        await until_gone(request, asyncio.gather(*(stream.result() for stream in streams)))
        choices = []
        for index, stream in enumerate(streams):
            turn = renderer.parse(stream.request.output, prompt)
            message: dict[str, Any] = {"role": "assistant", "content": turn.content}
            if turn.reasoning is not None:
                message["reasoning_content"] = turn.reasoning
            if turn.calls:
                message["tool_calls"] = _calls(turn, stream)
            choices.append({"index": index, "message": message, "finish_reason": _finish(turn, stream)})
        return {**head, "object": "chat.completion", "choices": choices, "usage": _usage(streams)}


async def _chunks(
    stream: Stream, renderer: Renderer, prompt: list[int], head: dict[str, Any], body: ChatBody
) -> AsyncIterator[dict[str, Any]]:
    """The completion as chunks: role, text as it comes, calls, finish reason, and usage where it is asked for."""

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {
            **head,
            "object": "chat.completion.chunk",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        }

    yield chunk({"role": "assistant", "content": ""})
    sent = {"reasoning_content": "", "content": ""}
    async for _ in stream:
        turn = renderer.parse(stream.request.output[: stream.seen], prompt)
        texts = {"reasoning_content": turn.reasoning or "", "content": turn.content}
        for name, text in texts.items():
            certain = text if stream.done else _certain(text, renderer.family)
            if len(certain) > len(sent[name]) and certain.startswith(sent[name]):
                yield chunk({name: certain[len(sent[name]) :]})
                sent[name] = certain
    turn = renderer.parse(stream.request.output, prompt)
    for index, call in enumerate(_calls(turn, stream)):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, _finish(turn, stream))
    if (body.stream_options or {}).get("include_usage"):
        yield {**head, "object": "chat.completion.chunk", "choices": [], "usage": _usage([stream])}


def _certain(text: str, family: str) -> str:
    """The part of a growing text that no later id changes: no half character, no start of what may be a Llama call."""
    return "" if family == "llama3" and text.startswith("{") else text.rstrip("\ufffd")


def _calls(turn: ParsedTurn, stream: Stream) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{stream.request.ticket}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments_text},
        }
        for number, call in enumerate(turn.calls)
    ]


def _finish(turn: ParsedTurn, stream: Stream) -> str:
    reason = stream.request.finish_reason
    if reason == "stop":
        return "tool_calls" if turn.calls else "stop"
    return reason


def _usage(streams: list[Stream]) -> dict[str, Any]:
    prompt = sum(len(stream.request.prompt) for stream in streams[:1])
    completion = sum(len(stream.request.output) for stream in streams)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": streams[0].request.cached},
    }
