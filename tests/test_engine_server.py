"""The engine over HTTP: SGLang's and OpenAI's forms, and the same results as in process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tiny_model import tiny_config
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from astrolabe.model.config import ModelConfig
from astrolabe.model.decoder import init_decoder
from astrolabe.model.safetensors_io import save_params
from astrolabe.records.errors import ServerError, UsageError
from astrolabe.records.messages import Message
from serving.chat import ChatClient, ModelFailure, ModelSpec
from serving.engine.engine import Engine
from serving.engine.server import create_app
from serving.http import RunningServer, launch_in_thread
from serving.render import Renderer
from serving.tokenizer import TextTokenizer
from serving.tokens import HttpTokenClient, Sampling, TokenClient

TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds numbers.", "parameters": {"type": "object"}}}
]


def make_tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["find the booking"], trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer.to_str()


CONFIG = tiny_config(
    vocab_size=288, hidden_size=64, intermediate_size=96, head_dim=16, tie_embeddings=False, max_position=512
)


def write_model(folder: Path, seed: int, config: ModelConfig = CONFIG) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(make_tokenizer())
    save_params(init_decoder(config, seed)[1], config, folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "one", 0)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, Renderer.from_folder(folder), slots=4, max_len=512) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[RunningServer]:
    with launch_in_thread(create_app(engine, "tiny"), name="engine") as server:
        yield server


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        yield client


def generate(http: httpx.Client, **body: object) -> httpx.Response:
    return http.post("/generate", json={"input_ids": [5, 6, 7], **body})


PARAMS = {"max_new_tokens": 6, "sampling_seed": 3, "no_stop_trim": True, "ignore_eos": True}


async def test_http_and_in_process_clients_give_the_same_results(engine: Engine, server: RunningServer) -> None:
    clients: list[TokenClient] = [engine.client(), HttpTokenClient(server.url)]
    results = []
    for client in clients:
        ids = engine.renderer.prompt_ids([{"role": "user", "content": "find"}], TOOLS)  # type: ignore[union-attr]
        out = await asyncio.gather(*(client.generate(ids, Sampling(max_new_tokens=9, seed=s)) for s in range(3)))
        results.append([replace(one, cached_tokens=0) for one in out])
        await client.aclose()
    in_process, over_http = results
    assert [one.output_ids for one in in_process] == [one.output_ids for one in over_http]
    for one, two in zip(in_process, over_http, strict=True):
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)
        assert replace(one, logprobs=[]) == replace(two, logprobs=[])


def test_generate_has_sglangs_fields(http: httpx.Client) -> None:
    reply = generate(http, rid="mine", sampling_params=PARAMS, return_logprob=True).json()
    meta = reply["meta_info"]
    assert len(reply["output_ids"]) == 6
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (3, 6, "0")
    assert [row[1] for row in meta["output_token_logprobs"]] == reply["output_ids"]
    assert meta["output_token_logprobs_length"] == 6
    assert isinstance(reply["text"], str)


def test_generate_takes_batches_and_text(http: httpx.Client) -> None:
    one = generate(http, sampling_params=PARAMS).json()
    both = generate(http, input_ids=[[5, 6, 7], [9]], sampling_params=[PARAMS, {**PARAMS, "max_new_tokens": 2}]).json()
    assert both[0]["output_ids"] == one["output_ids"]
    assert len(both[1]["output_ids"]) == 2
    text = http.post("/generate", json={"text": "find", "sampling_params": PARAMS}).json()
    assert text["meta_info"]["prompt_tokens"] >= 1


def test_generate_streams_what_it_will_reply(http: httpx.Client) -> None:
    whole = generate(http, sampling_params={**PARAMS, "max_new_tokens": 20}).json()
    with http.stream(
        "POST",
        "/generate",
        json={"input_ids": [5, 6, 7], "sampling_params": {**PARAMS, "max_new_tokens": 20}, "stream": True},
    ) as reply:
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert len(events) > 2
    assert events[0]["meta_info"]["finish_reason"] is None
    assert events[-1]["output_ids"] == whole["output_ids"]


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"json_schema": "{}"}, "json_schema"),
        ({"regex": "a"}, "regex"),
        ({"stop": ["x"]}, "stop_token_ids"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"n": 2}, "n=2"),
        ({"min_p": 0.1}, "min_p"),
    ],
)
def test_what_is_not_done_is_refused_by_name(http: httpx.Client, params: dict[str, object], named: str) -> None:
    reply = generate(http, sampling_params=params)
    assert reply.status_code == 400
    assert named in reply.json()["error"]["message"]


def test_bad_requests_are_400_and_say_why(http: httpx.Client) -> None:
    for body, text in (
        ({"input_ids": []}, "empty"),
        ({"input_ids": [9999]}, "below 288"),
        ({"input_ids": [1] * 512}, "context length"),
        ({"text": "x"}, "either input_ids or text"),
        ({"logprob_start_len": 0, "return_logprob": True}, "logprob_start_len"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "2 prompts but 1 of rid"),
    ):
        reply = generate(http, **body)
        assert (reply.status_code, text in reply.text) == (400, True), reply.text
    assert generate(http, sampling_params={"temprature": 1}).status_code == 422


async def test_chat_completions_render_and_parse(engine: Engine, server: RunningServer) -> None:
    client = ChatClient(ModelSpec(base_url=server.url, model="tiny", max_tokens=12, temperature=1.0))
    assert await client.check() == "tiny"
    question = [Message(role="user", content="find the booking")]
    reply = await client.complete(question, role="policy", seed=1)
    assert engine.renderer is not None
    prompt = engine.renderer.prompt_ids(question, None)
    direct = await engine.client().generate(prompt, Sampling(max_new_tokens=12, seed=1))
    turn = engine.renderer.parse(direct.output_ids, prompt)
    assert reply.content == turn.content
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), len(direct.output_ids))
    await client.aclose()


def scripted(engine: Engine, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the device sample `text`, so that parsing and streaming are seen without a trained model."""
    import numpy as np

    import serving.engine.runner as module

    assert engine.renderer is not None
    script = engine.renderer.encode(text)
    start: dict[int, int] = {}

    def chunk(params: object, cache: object, ints: np.ndarray, *_: object, **__: object) -> tuple[object, tuple]:
        tokens = np.full((len(ints), 8), -1)
        counts = np.zeros(len(ints), int)
        for row in np.flatnonzero(ints[:, 5]):
            at = ints[row, 2] - start.setdefault(int(ints[row, 0]), int(ints[row, 2]))
            part = script[at : at + min(8, ints[row, 3])]
            tokens[row, : len(part)], counts[row] = part, len(part)
        return cache, (tokens, np.full(tokens.shape, -0.5), counts)

    monkeypatch.setattr(module, "decode_chunk", chunk)


CALLING = 'I add 你好.<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call><|im_end|>'


async def test_chat_completions_give_tool_calls_as_they_were_written(
    engine: Engine, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(engine, CALLING, monkeypatch)
    client = ChatClient(ModelSpec(base_url=server.url, model="tiny", max_tokens=200))
    reply = await client.complete([{"role": "user", "content": "1"}], role="policy", seed=1)
    await client.aclose()
    assert reply.content == "I add 你好."
    assert reply.finish_reason == "tool_calls"
    assert [(call.function.name, call.function.arguments) for call in reply.tool_calls] == [("add", '{"a":  1}')]


async def test_a_streamed_completion_is_the_whole_one(
    engine: Engine, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(engine, CALLING, monkeypatch)
    body = {
        "messages": [{"role": "user", "content": "stream"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content, calls, finish, usage, parts = "", [], None, None, 0
    async with (
        httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as reply,
    ):
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text = choice["delta"].get("content") or ""
                parts += bool(text)
                content += text
                calls += choice["delta"].get("tool_calls") or []
                finish = choice["finish_reason"] or finish
    assert content == "I add 你好."
    assert parts > 1
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == [("add", '{"a":  1}')]
    assert finish == "tool_calls"
    assert usage is not None
    assert usage["completion_tokens"] > 10


def test_chat_refuses_what_it_would_not_do(http: httpx.Client) -> None:
    base = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for extra, named in (
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stop": "x"}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": [{"role": "user", "content": "word " * 600}]}, "context length"),
    ):
        reply = http.post("/v1/chat/completions", json={**base, **extra})
        assert (reply.status_code, named in reply.text) == (400, True), reply.text
    several = http.post("/v1/chat/completions", json={**base, "n": 2, "seed": 5}).json()
    assert [choice["index"] for choice in several["choices"]] == [0, 1]


async def test_pause_update_continue_serves_the_new_weights(
    tmp_path: Path, server: RunningServer, folder: Path
) -> None:
    client = HttpTokenClient(server.url)
    ids, sampling = [5, 6, 7, 8] * 10, Sampling(max_new_tokens=8, temperature=0.0)
    old = await client.generate(ids, sampling)
    other = write_model(tmp_path / "two", 1)
    await client.pause("retract")
    waiting = asyncio.create_task(client.generate(ids, sampling))
    await client.update_weights_from_disk(str(other), 12)
    assert not waiting.done()
    await client.continue_()
    new = await waiting
    assert (old.weight_version, new.weight_version, new.cached_tokens) == (0, 12, 0)
    assert new.versions == (12,) * len(new.output_ids)
    assert new.logprobs != old.logprobs
    assert (await client.model_info())["weight_version"] == "12"
    with pytest.raises(ModelFailure, match=r"no config\.json"):
        await client.update_weights_from_disk(str(tmp_path / "nowhere"), 13)
    wider = write_model(tmp_path / "wider", 1, replace(CONFIG, intermediate_size=128))
    with pytest.raises(ModelFailure, match="another model"):
        await client.update_weights_from_disk(str(wider), 13)
    await client.update_weights_from_disk(str(folder), 0)
    assert (await client.generate(ids, sampling)).output_ids == old.output_ids
    await client.flush_cache()
    await client.aclose()


async def test_abort_over_http(server: RunningServer, engine: Engine) -> None:
    client = HttpTokenClient(server.url)
    await client.pause("in_place")
    task = asyncio.create_task(client.generate([5, 6], Sampling(max_new_tokens=400), rid="mine"))
    while not engine.queued:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await client.abort("mine")
    assert (await task).finish_reason == "abort"
    await client.continue_()
    await client.aclose()


def test_health_and_info(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    assert http.get("/health_generate").status_code == 200
    assert http.get("/flush_cache").status_code == 200
    assert http.get("/server_info").json()["max_running_requests"] == 4
    assert http.post("/abort_request", json={}).status_code == 400
    assert http.post("/pause_generation", json={"mode": "sideways"}).status_code == 422


def test_a_port_in_use_is_an_error_with_its_mend(server: RunningServer) -> None:
    with pytest.raises(UsageError, match="in use") as caught:
        launch_in_thread(object(), server.port)
    assert "another port" in caught.value.mend


def test_an_app_that_cannot_start_is_reported() -> None:
    from contextlib import asynccontextmanager

    from fastapi import FastAPI

    @asynccontextmanager
    async def lifespan(_: FastAPI):  # type: ignore[no-untyped-def]
        raise RuntimeError("no weights")
        yield

    with pytest.raises(ServerError, match="did not start"):
        launch_in_thread(FastAPI(lifespan=lifespan), name="broken")


def test_a_tokenizer_larger_than_the_model_is_refused(folder: Path) -> None:
    renderer = Renderer(TextTokenizer(make_tokenizer()), "qwen3")
    small = replace(CONFIG, vocab_size=200)
    with pytest.raises(UsageError, match="ids, the model 200"):
        Engine((small, init_decoder(small, 0)[1]), renderer)
