"""The engine over HTTP: SGLang's `/generate` and control endpoints, and OpenAI's chat completions.

Handlers only translate: the engine does the work in its own thread, and the event loop waits on futures. A client that
goes away has its request aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from astrolabe.records.errors import AstrolabeError
from serving.chat import ModelFailure
from serving.engine.chat_api import add_chat_routes
from serving.engine.engine import Engine
from serving.engine.responses import event_stream, until_gone
from serving.engine.stream import Stream
from serving.engine.wire import AbortBody, GenerateBody, PauseBody, SamplingParams, UpdateBody, refuse
from serving.http import serve as serve_app
from serving.render import Renderer
from serving.tokens import PauseMode

HEALTH_TIMEOUT_S = 20.0
_STATUS = {"bad_request": 400, "rate_limit": 429, "timeout": 504}


def create_app(engine: Engine, model_name: str = "default") -> FastAPI:
    """The server of `engine`. `/generate` with text and chat completions need the engine to have a renderer."""
    app = FastAPI(title="astrolabe engine", docs_url=None, redoc_url=None)

    @app.exception_handler(ModelFailure)
    async def failed(_: Request, error: ModelFailure) -> JSONResponse:
        return _error(_STATUS.get(error.kind, 500), error.message, error.kind)

    @app.exception_handler(AstrolabeError)
    async def misused(_: Request, error: AstrolabeError) -> JSONResponse:
        return _error(400, str(error), "bad_request")

    @app.post("/generate")
    async def generate(body: GenerateBody, request: Request) -> Any:
        body.check()
        batch = isinstance(body.text, list) or (
            body.text is None and bool(body.input_ids) and isinstance((body.input_ids or [0])[0], list)
        )
        jobs = _jobs(engine, body, batch)
        if body.stream:
            if batch:
                raise refuse("stream with a batch", "send one request per prompt")
            return event_stream(_generate_events(jobs[0], body, engine))
        replies = await until_gone(request, asyncio.gather(*(_generate_one(job, body, engine) for job in jobs)))
        return replies if batch else replies[0]

    add_chat_routes(app, engine, model_name)
    _add_control_routes(app, engine, model_name)
    return app


def _add_control_routes(app: FastAPI, engine: Engine, model_name: str) -> None:
    @app.get("/health")
    async def health() -> PlainTextResponse:
        if engine.failure is not None:
            return PlainTextResponse(f"the engine stopped: {engine.failure}", 503)
        return PlainTextResponse("")

    @app.get("/health_generate")
    async def health_generate() -> PlainTextResponse:
        stream = Stream(engine, [0], SamplingParams(max_new_tokens=1, temperature=0).sampling())
        try:
            await asyncio.wait_for(stream.result(), HEALTH_TIMEOUT_S)
        except (ModelFailure, TimeoutError) as error:
            return PlainTextResponse(f"no token: {error or 'timeout'}", 503)
        return PlainTextResponse("")

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> PlainTextResponse:
        if await asyncio.wrap_future(engine.flush()):
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse(f"Not flushed: {engine.running} running, {engine.queued} queued.\n", 400)

    @app.post("/pause_generation")
    async def pause(body: PauseBody | None = None) -> dict[str, str]:
        await asyncio.wrap_future(engine.pause((body or PauseBody()).mode))
        return {"message": "Generation paused successfully.", "status": "ok"}

    @app.post("/continue_generation")
    async def resume() -> dict[str, str]:
        await asyncio.wrap_future(engine.resume())
        return {"message": "Generation continued successfully.", "status": "ok"}

    @app.post("/abort_request")
    async def abort(body: AbortBody) -> PlainTextResponse:
        if body.rid is None and not body.abort_all:
            raise ModelFailure("bad_request", "give rid, or abort_all")
        engine.abort(None if body.abort_all else body.rid)
        return PlainTextResponse("")

    @app.post("/update_weights_from_disk")
    async def update(body: UpdateBody) -> JSONResponse:
        waiting = engine.running + engine.queued if engine.paused else 0
        try:
            version = int(body.weight_version) if body.weight_version is not None else engine.version + 1
            mode: PauseMode | None = "abort" if body.abort_all_requests else None
            await asyncio.wrap_future(await asyncio.to_thread(engine.load, body.model_path, version, mode=mode))
        except (AstrolabeError, ModelFailure, ValueError) as error:
            return JSONResponse({"success": False, "message": str(error), "num_paused_requests": waiting}, 400)
        return JSONResponse(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": waiting}
        )

    @app.get("/get_model_info")
    @app.get("/model_info")
    async def model_info() -> dict[str, Any]:
        return {
            "model_path": engine.model_path or model_name,
            "tokenizer_path": engine.renderer.tokenizer.name_or_path if engine.renderer else None,
            "is_generation": True,
            "model_type": engine.config.model_type,
            "weight_version": str(engine.version),
        }

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        return {
            "version": "astrolabe",
            "model_path": engine.model_path or model_name,
            "served_model_name": model_name,
            "context_length": engine.max_len,
            "max_running_requests": engine.slots,
            "dtype": str(getattr(engine.dtype, "__name__", engine.dtype)),
            "vocab_size": engine.config.vocab_size,
            "weight_version": str(engine.version),
            "paused": engine.paused,
            "running": engine.running,
            "queued": engine.queued,
            "counters": dict(engine.counters),
        }


def serve(
    model_dir: Path | str,
    *,
    host: str = "127.0.0.1",
    port: int = 30000,
    slots: int = 8,
    max_len: int = 2048,
    enable_thinking: bool = False,
    model_name: str | None = None,
) -> None:
    """Serve the model in `model_dir` in the foreground, until Ctrl-C (`astrolabe serve policy`)."""
    renderer = Renderer.from_folder(model_dir, enable_thinking=enable_thinking)
    with Engine(model_dir, renderer, slots=slots, max_len=max_len) as engine:
        app = create_app(engine, model_name or Path(model_dir).resolve().name)
        serve_app(app, host=host, port=port, name="policy")


def _jobs(engine: Engine, body: GenerateBody, batch: bool) -> list[tuple[list[int], SamplingParams, str | None]]:
    """(ids, sampling, rid) per prompt of a request."""
    if (body.text is None) == (body.input_ids is None):
        raise ModelFailure("bad_request", "give either input_ids or text")
    given: Any = body.input_ids if body.text is None else body.text
    prompts: list[Any] = list(given) if batch else [given]
    if body.text is not None:
        if engine.renderer is None:
            raise refuse("text", "send input_ids: no tokenizer was given to the server")
        prompts = [engine.renderer.encode(text) for text in prompts]

    def spread(value: Any, name: str) -> list[Any]:
        if not isinstance(value, list):
            return [value] * len(prompts)
        if len(value) != len(prompts):
            raise ModelFailure("bad_request", f"{len(prompts)} prompts but {len(value)} of {name}")
        return value

    params, rids = spread(body.sampling_params, "sampling_params"), spread(body.rid, "rid")
    return list(zip(prompts, params, rids, strict=True))


def _open(job: tuple[list[int], SamplingParams, str | None], engine: Engine) -> Stream:
    ids, params, rid = job
    return Stream(engine, ids, params.sampling(), rid=rid, ignore_eos=params.ignore_eos)


async def _generate_one(job: tuple[list[int], SamplingParams, str | None], body: GenerateBody, engine: Engine) -> Any:
    stream = _open(job, engine)
    await stream.result()
    return _reply(stream, job[1], body, engine)


async def _generate_events(
    job: tuple[list[int], SamplingParams, str | None], body: GenerateBody, engine: Engine
) -> AsyncIterator[Any]:
    stream = _open(job, engine)
    async for _ in stream:
        yield _reply(stream, job[1], body, engine)


def _reply(stream: Stream, params: SamplingParams, body: GenerateBody, engine: Engine) -> dict[str, Any]:
    """SGLang's reply for what `stream` has so far."""
    request = stream.request
    count = stream.seen
    ids, logprobs, versions = request.output[:count], request.logprobs[:count], request.versions[:count]
    reason = request.finish_reason if stream.done else ""
    finish: dict[str, Any] | None = None
    if reason == "stop":
        finish = {"type": "stop", "matched": ids[-1]}
        if not params.no_stop_trim:
            ids, logprobs, versions = ids[:-1], logprobs[:-1], versions[:-1]
    elif reason == "length":
        finish = {"type": "length", "length": len(ids)}
    elif reason:
        finish = {"type": reason, "message": "Aborted by request."}
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": finish,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": count,
        "cached_tokens": request.cached,
        "weight_version": str(versions[-1] if versions else engine.version),
        "num_retractions": 0,
    }
    tokenizer = engine.renderer.tokenizer if engine.renderer else None
    if body.return_logprob:
        text = tokenizer.token_text if tokenizer and body.return_text_in_logprobs else lambda _: None
        meta["output_token_logprobs"] = [[p, t, text(t)] for p, t in zip(logprobs, ids, strict=True)]
        meta["output_token_logprobs_length"] = len(ids)
        meta["output_token_weight_versions"] = versions
    decoded = tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens) if tokenizer else ""
    return {"text": decoded, "output_ids": ids, "meta_info": meta}


def _error(status: int, message: str, kind: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)
