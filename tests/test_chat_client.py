"""The chat client: one deadline, typed and bounded retries, replies kept by the hash of the request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from astrolabe.records.errors import ServerError, UsageError
from astrolabe.records.messages import FunctionSchema, Message, ToolSchema
from serving.chat import ChatClient, ModelFailure, ModelSpec, json_schema_format
from serving.health import LIMIT
from serving.http import is_loopback, launch_in_thread

HELLO = [Message(role="user", content="hello 你好")]


def completion(content: str | None = "hi", **message: Any) -> dict[str, Any]:
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "fake-1",
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content, **message}}
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


@dataclass
class Load:
    active: int = 0
    most: int = 0


@dataclass
class Fake:
    """A server whose reply to each request is scripted; it counts what it saw."""

    url: str = ""
    script: Callable[[int, dict[str, Any]], Response | dict[str, Any]] = lambda *_: completion()
    models: Response | None = None
    delay_s: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    load: Load = field(default_factory=Load)


@pytest.fixture(scope="module")
def fake_server() -> Iterator[Fake]:
    fake, app = Fake(), FastAPI()

    @app.get("/v1/models")
    async def models() -> Any:
        return fake.models or {
            "object": "list",
            "data": [{"id": "fake-1", "object": "model", "created": 0, "owned_by": "x"}],
        }

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        fake.bodies.append(await request.json())
        fake.headers.append(dict(request.headers))
        load = fake.load  # a request that its client gave up may outlive its test
        load.active += 1
        load.most = max(load.most, load.active)
        try:
            await asyncio.sleep(fake.delay_s)
            return fake.script(len(fake.bodies), fake.bodies[-1])
        finally:
            load.active -= 1

    with launch_in_thread(app, name="fake") as server:
        fake.url = server.url
        yield fake


@pytest.fixture
def fake(fake_server: Fake, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setattr("serving.chat.FIRST_PAUSE_S", 0.01)
    fake_server.bodies.clear()
    fake_server.headers.clear()
    fake_server.script, fake_server.delay_s, fake_server.load = lambda *_: completion(), 0.0, Load()
    fake_server.models = None
    return fake_server


class Replies:
    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def get(self, key: str) -> dict[str, Any] | None:
        return self.rows.get(key)

    def put(self, key: str, reply: dict[str, Any]) -> None:
        self.rows[key] = reply


def client_for(
    fake: Fake, replies: Replies | None = None, *, retries: int = 4, concurrency: int = 32, **spec: Any
) -> ChatClient:
    given = {"timeout_s": 30.0, **spec}
    return ChatClient(
        ModelSpec(base_url=fake.url, model="fake-1", **given),
        replies=replies,
        max_retries=retries,
        concurrency=concurrency,
    )


async def test_a_turn_is_sent_whole_and_read_back(fake: Fake) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":  1}'}}
    fake.script = lambda *_: completion(None, tool_calls=[call], reasoning_content="why")
    client = client_for(fake, temperature=0.3, extra={"chat_template_kwargs": {"enable_thinking": False}})
    tool = ToolSchema(function=FunctionSchema(name="add", description="Adds."))
    reply = await client.complete(HELLO, role="policy", seed=7, tools=[tool], max_tokens=11)
    await client.aclose()
    assert (reply.content, reply.reasoning_content, reply.model) == ("", "why", "fake-1")
    assert reply.tool_calls[0].function.arguments == '{"a":  1}'
    (body,) = fake.bodies
    assert body["messages"] == [{"role": "user", "content": "hello 你好"}]
    assert (body["seed"], body["temperature"], body["max_tokens"]) == (7, 0.3, 11)
    assert body["tools"][0]["function"]["name"] == "add"
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


async def test_a_structured_reply_is_asked_for_by_its_schema(fake: Fake) -> None:
    class Plan(BaseModel):
        steps: list[str]

    client = client_for(fake)
    await client.complete(HELLO, role="planner", seed=1, response_format=json_schema_format(Plan))
    await client.aclose()
    form = fake.bodies[0]["response_format"]
    assert form["type"] == "json_schema"
    assert form["json_schema"]["name"] == "Plan"
    assert form["json_schema"]["schema"]["required"] == ["steps"]


@pytest.mark.parametrize("status", [429, 500, 503, 408])
async def test_what_a_retry_may_mend_is_tried_again(fake: Fake, status: int) -> None:
    fake.script = lambda n, _: JSONResponse({"error": {"message": "busy"}}, status) if n < 3 else completion("done")
    client = client_for(fake)
    assert (await client.complete(HELLO, role="x", seed=1)).content == "done"
    await client.aclose()
    assert (len(fake.bodies), client.retries) == (3, 2)


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_what_no_retry_mends_fails_at_once(fake: Fake, status: int) -> None:
    fake.script = lambda *_: JSONResponse({"error": {"message": "no such tool"}}, status)
    client = client_for(fake)
    with pytest.raises(ModelFailure, match="no such tool") as caught:
        await client.complete(HELLO, role="x", seed=1)
    await client.aclose()
    assert (caught.value.kind, caught.value.attempts, len(fake.bodies)) == ("bad_request", 1, 1)


async def test_retries_are_bounded_and_the_failure_has_its_kind(fake: Fake) -> None:
    for script, kind in (
        (lambda *_: JSONResponse({}, 500), "server_error"),
        (lambda *_: JSONResponse({}, 429), "rate_limit"),
        (lambda *_: PlainTextResponse("<html>"), "bad_reply"),
        (lambda *_: {"choices": []}, "bad_reply"),
        (lambda *_: completion(tool_calls=[{"function": {"name": "f"}}]), "bad_reply"),
    ):
        fake.bodies.clear()
        fake.script = script
        client = client_for(fake, retries=2)
        with pytest.raises(ModelFailure) as caught:
            await client.complete(HELLO, role="x", seed=1)
        await client.aclose()
        assert (caught.value.kind, len(fake.bodies)) == (kind, 3)


async def test_one_deadline_covers_all_attempts_and_pauses(fake: Fake) -> None:
    fake.delay_s = 5.0
    client = client_for(fake, timeout_s=0.3)
    with pytest.raises(ModelFailure) as caught:
        await asyncio.wait_for(client.complete(HELLO, role="x", seed=1), 4)
    assert caught.value.kind == "timeout"
    fake.delay_s = 0.0
    fake.script = lambda *_: JSONResponse({}, 503, {"retry-after": "3600"})
    with pytest.raises(ModelFailure) as caught:
        await asyncio.wait_for(client.complete(HELLO, role="x", seed=1), 4)
    await client.aclose()
    assert (caught.value.kind, caught.value.attempts) == ("server_error", 1)


async def test_retry_after_is_honoured(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float, *args: Any) -> None:
        pauses.append(seconds)
        await sleep(0, *args)

    fake.script = lambda n, _: JSONResponse({}, 429, {"retry-after": "7"}) if n == 1 else completion()
    client = client_for(fake)
    await client.check()  # the connection pool exists before time is faked
    monkeypatch.setattr("serving.chat.asyncio.sleep", noted)
    await client.complete(HELLO, role="x", seed=1)
    await client.aclose()
    assert 7.0 in pauses


def test_jitter_is_seeded() -> None:
    from serving.chat import _AttemptFailed

    failed = _AttemptFailed("server_error", "x")
    spec = ModelSpec(base_url="http://127.0.0.1:1")
    one, two, other = (ChatClient(spec, seed=s)._pause("key", 2, failed) for s in (1, 1, 2))
    assert one == two != other


async def test_concurrency_is_bounded(fake: Fake) -> None:
    fake.delay_s = 0.02
    client = client_for(fake, concurrency=3)
    await asyncio.gather(*(client.complete(HELLO, role="x", seed=seed) for seed in range(15)))
    await client.aclose()
    assert fake.load.most == 3


async def test_waiting_for_a_slot_does_not_use_up_the_deadline(fake: Fake) -> None:
    client = client_for(fake, concurrency=1, timeout_s=4.0)
    await client.check()
    _, slots = client._enter_loop()
    await slots.acquire()
    waiting = asyncio.create_task(client.complete(HELLO, role="x", seed=1))
    await asyncio.sleep(4.1)
    assert not waiting.done()
    slots.release()
    assert (await waiting).content == "hi"
    await client.aclose()


async def test_usage_is_summed_by_role(fake: Fake) -> None:
    client = client_for(fake)
    for role in ("planner", "judge", "judge"):
        await client.complete(HELLO, role=role, seed=1)
    await client.aclose()
    assert (client.usage.calls, client.usage.prompt_tokens, client.usage.completion_tokens) == (3, 9, 6)
    assert client.usage_by_role["judge"].calls == 2


async def test_a_stored_reply_is_the_reply_and_counts_the_same(fake: Fake) -> None:
    store = Replies()
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    fake.script = lambda *_: completion("x", tool_calls=[call], reasoning_content="r")
    first, second = client_for(fake, store), client_for(fake, store)
    one = await first.complete(HELLO, role="x", seed=1)
    two = await second.complete(HELLO, role="x", seed=1)
    await first.aclose()
    assert one == two
    assert first.usage == second.usage
    assert (len(fake.bodies), second.replayed) == (1, 1)


async def test_the_key_is_of_the_whole_request_and_not_of_the_address(fake: Fake) -> None:
    client = client_for(fake)
    base: dict[str, Any] = {"role": "x", "seed": 1}
    tool = ToolSchema(function=FunctionSchema(name="add"))
    variants = [
        {},
        {"seed": 2},
        {"temperature": 0.1},
        {"max_tokens": 5},
        {"tools": [tool]},
        {"response_format": {"type": "json_object"}},
    ]
    keys = [(await client.complete(HELLO, **{**base, **extra})).key for extra in variants]
    keys.append((await client.complete([Message(role="user", content="other")], **base)).key)
    assert len(set(keys)) == len(keys)
    assert (await client.complete(HELLO, role="another", seed=1)).key == keys[0]
    elsewhere = ChatClient(replace(client.spec, base_url=client.spec.base_url + "/v1/", timeout_s=5))
    assert (await elsewhere.complete(HELLO, **base)).key == keys[0]
    await client.aclose()
    await elsewhere.aclose()


async def test_equal_requests_in_flight_share_one_reply(fake: Fake) -> None:
    fake.delay_s = 0.05
    fake.script = lambda n, _: completion(f"reply {n}")
    client = client_for(fake, Replies())
    replies = await asyncio.gather(*(client.complete(HELLO, role="x", seed=1) for _ in range(5)))
    await client.aclose()
    assert {reply.content for reply in replies} == {"reply 1"}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


async def test_a_dead_server_is_an_error_with_its_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.chat.FIRST_PAUSE_S", 0.01)
    client = ChatClient(ModelSpec(base_url=f"http://127.0.0.1:{free_port()}"), max_retries=1)
    with pytest.raises(ServerError, match="no model server answers") as caught:
        await client.check()
    assert "--model-url" in caught.value.mend
    with pytest.raises(ModelFailure) as failure:
        await client.complete(HELLO, role="x", seed=1)
    assert (failure.value.kind, failure.value.attempts) == ("unreachable", 2)
    await client.aclose()


async def test_preflight_names_the_models_that_are_there(fake: Fake) -> None:
    assert await client_for(fake).check() == "fake-1"
    assert await ChatClient(ModelSpec(base_url=fake.url)).check() == "fake-1"
    with pytest.raises(ServerError, match="offers fake-1, not 'gpt'"):
        await ChatClient(ModelSpec(base_url=fake.url, model="gpt")).check()


@pytest.mark.parametrize(
    "body", [b"<html>hi</html>", b"[1, 2]", b"{not json", b"\xff\xfe\x00", b'{"data": [null]}', b'{"foo": 1}', b"null"]
)
async def test_preflight_names_a_server_of_another_kind(fake: Fake, body: bytes) -> None:
    fake.models = Response(body, media_type="application/json")
    client = client_for(fake)
    with pytest.raises(ServerError, match="no list of models") as caught:
        await client.check()
    await client.aclose()
    assert "OpenAI-compatible" in caught.value.mend


async def test_a_server_without_room_ends_the_run_at_once(fake: Fake) -> None:
    fake.script = lambda *_: JSONResponse({"error": {"message": "labels: No space left on device"}}, 507)
    client = client_for(fake)
    with pytest.raises(ServerError, match="No space left"):
        await client.complete(HELLO, role="x", seed=1)
    await client.aclose()
    assert len(fake.bodies) == 1


async def test_the_key_comes_from_the_environment_and_goes_nowhere_else(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_KEY", "sk-very-secret")
    store = Replies()
    client = client_for(fake, store, api_key_env="FAKE_KEY")
    await client.complete(HELLO, role="x", seed=1)
    await client.aclose()
    assert fake.headers[0]["authorization"] == "Bearer sk-very-secret"
    assert "very-secret" not in repr((store.rows, client.spec, fake.bodies))
    monkeypatch.delenv("FAKE_KEY")
    with pytest.raises(UsageError, match="FAKE_KEY is not set"):
        await client_for(fake, api_key_env="FAKE_KEY").complete(HELLO, role="x", seed=1)


def test_a_client_serves_one_event_loop_after_another(fake: Fake) -> None:
    client = client_for(fake)
    for seed in range(2):
        assert asyncio.run(client.complete(HELLO, role="x", seed=seed)).content == "hi"


def test_a_server_of_ours_leaves_the_log_handlers_of_others_open() -> None:
    class Handler(logging.StreamHandler[Any]):
        closed = False

        def close(self) -> None:
            self.closed = True
            super().close()

    handler = Handler()
    with launch_in_thread(FastAPI()):
        assert not handler.closed


@pytest.mark.parametrize(
    ("url", "is_local"),
    [
        ("http://127.0.0.1:1/v1", True),
        ("http://localhost", True),
        ("http://[::1]:5", True),
        ("http://example.org", False),
        ("http://10.0.0.1", False),
    ],
)
def test_loopback_addresses_go_past_proxies(url: str, is_local: bool) -> None:
    assert is_loopback(url) is is_local


async def test_a_server_that_fails_every_request_ends_the_run(fake: Fake) -> None:
    """Behind a proxy of a crashed server each request fails for itself; the input must not be spent on it."""
    fake.script = lambda *_: JSONResponse({"error": "bad gateway"}, 502)
    client = client_for(fake, retries=0)
    ends = []
    for seed in range(LIMIT):
        try:
            await client.complete(HELLO, role="policy", seed=seed)
        except (ModelFailure, ServerError) as error:
            ends.append(type(error))
    await client.aclose()
    assert ends == [ModelFailure] * (LIMIT - 1) + [ServerError]


async def test_requests_that_fail_among_good_ones_end_nothing(fake: Fake) -> None:
    fake.script = lambda count, _: JSONResponse({}, 502) if count % 4 else completion()
    client = client_for(fake, retries=0)
    good = 0
    for seed in range(2 * LIMIT):
        with contextlib.suppress(ModelFailure):
            await client.complete(HELLO, role="policy", seed=seed)
            good += 1
    await client.aclose()
    assert good == LIMIT // 2


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_key_ends_the_run(fake: Fake, status: int) -> None:
    fake.script = lambda *_: JSONResponse({"error": {"message": "no"}}, status)
    client = client_for(fake)
    with pytest.raises(ServerError, match="refused the key"):
        await client.complete(HELLO, role="policy", seed=1)
    await client.aclose()


async def test_text_that_cannot_be_stored_is_a_bad_reply(fake: Fake) -> None:
    fake.script = lambda *_: Response(json.dumps(completion("\ud800")), media_type="application/json")
    client = client_for(fake, retries=0)
    with pytest.raises(ModelFailure, match="bad_reply"):
        await client.complete(HELLO, role="policy", seed=1)
    await client.aclose()
