"""The token client: SGLang's wire form out, and no reply in that could not be trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from astrolabe.records.errors import ServerError, UsageError
from serving.chat import ModelFailure
from serving.http import bind, launch_in_thread
from serving.tokens import HttpTokenClient, Sampling, generation_from_wire, sampling_params


def reply(ids: list[int], rows: Any = "match", finish: Any = "stop", **meta: Any) -> dict[str, Any]:
    if rows == "match":
        rows = [[-0.5, token, None] for token in ids]
    return {
        "text": "",
        "output_ids": ids,
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": finish, "matched": 7} if finish else None,
            "prompt_tokens": 3,
            "cached_tokens": 2,
            "weight_version": "default",
            "output_token_logprobs": rows,
            **meta,
        },
    }


@dataclass
class Fake:
    url: str = ""
    script: Callable[[int], Any] = lambda n: reply([4, 7])
    seen: list[tuple[str, Any]] = field(default_factory=list)


@pytest.fixture(scope="module")
def fake_server() -> Iterator[Fake]:
    fake, app = Fake(), FastAPI()

    @app.post("/generate")
    async def generate(request: Request) -> Any:
        fake.seen.append(("/generate", await request.json()))
        return fake.script(len(fake.seen))

    @app.post("/{name}")
    async def control(name: str, request: Request) -> Any:
        fake.seen.append((f"/{name}", await request.json()))
        if name == "update_weights_from_disk":
            return fake.script(len(fake.seen))
        return PlainTextResponse("ok")

    with launch_in_thread(app, name="fake") as server:
        fake.url = server.url
        yield fake


@pytest.fixture
def fake(fake_server: Fake) -> Fake:
    fake_server.seen.clear()
    fake_server.script = lambda n: reply([4, 7])
    return fake_server


async def test_the_request_is_sglangs(fake: Fake) -> None:
    client = HttpTokenClient(fake.url + "/v1")
    out = await client.generate(
        [1, 2, 3], Sampling(max_new_tokens=9, temperature=0.7, seed=5, stop_token_ids=(7,)), rid="me"
    )
    await client.aclose()
    ((path, body),) = fake.seen
    assert path == "/generate"
    assert body["input_ids"] == [1, 2, 3]
    assert (body["rid"], body["return_logprob"], body["logprob_start_len"], body["stream"]) == ("me", True, -1, False)
    assert body["sampling_params"] == {
        "max_new_tokens": 9,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "stop_token_ids": [7],
        "sampling_seed": 5,
    }
    assert (out.output_ids, out.logprobs, out.finish_reason) == ([4, 7], [-0.5, -0.5], "stop")
    assert (out.prompt_tokens, out.cached_tokens, out.weight_version, out.versions) == (3, 2, 0, ())


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (reply([4, 7], [[-0.5, 4, None]]), "2 output ids but 1 log-probs"),
        (reply([4, 7], None), "no log-probs"),
        (reply([4, 7], [[-0.5, 4, None], [-0.5, 8, None]]), "other ids"),
        (reply([4], [[None, 4, None]]), "not a /generate reply"),
        (reply([4], [[float("nan"), 4, None]]), "not finite"),
        (reply([4], [[0.7, 4, None]]), "above 0"),
        (reply([4], finish=None), "finish reason"),
        ({"text": "hello"}, "not a /generate reply"),
        ([], "not a /generate reply"),
    ],
)
def test_c20_a_reply_that_cannot_be_trained_on_is_refused(row: Any, said: str) -> None:
    with pytest.raises(ModelFailure, match=said) as caught:
        generation_from_wire(row)
    assert caught.value.kind == "bad_reply"


def test_an_aborted_request_may_be_empty() -> None:
    out = generation_from_wire(reply([], None, finish="abort", weight_version="12"))
    assert (out.output_ids, out.logprobs, out.finish_reason, out.weight_version) == ([], [], "abort", 12)


def test_versions_per_token_are_read_where_they_are_told() -> None:
    out = generation_from_wire(reply([4, 7], weight_version="3", output_token_weight_versions=[2, 3]))
    assert out.versions == (2, 3)


@pytest.mark.parametrize(
    "sampling", [Sampling(top_p=0.9), Sampling(top_k=20), Sampling(max_new_tokens=0), Sampling(top_p=0)]
)
async def test_f38_truncated_or_senseless_sampling_is_refused_before_it_is_sent(fake: Fake, sampling: Sampling) -> None:
    client = HttpTokenClient(fake.url)
    with pytest.raises(UsageError):
        await client.generate([1], sampling)
    assert fake.seen == []
    await client.aclose()


async def test_truncated_sampling_may_be_allowed_and_greedy_always_is(fake: Fake) -> None:
    client = HttpTokenClient(fake.url, allow_truncated=True)
    await client.generate([1], Sampling(top_p=0.9))
    await HttpTokenClient(fake.url).generate([1], Sampling(temperature=0.0, top_k=1))
    assert len(fake.seen) == 2
    await client.aclose()


def test_optional_members_are_left_out() -> None:
    assert "sampling_seed" not in sampling_params(Sampling())
    assert sampling_params(Sampling(json_schema="{}"))["json_schema"] == "{}"


async def test_weights_are_updated_between_pause_and_continue(fake: Fake) -> None:
    fake.script = lambda n: {"success": True, "message": "ok", "num_paused_requests": 0}
    client = HttpTokenClient(fake.url)
    await client.pause("retract")
    await client.update_weights_from_disk("/models/step-12", 12)
    await client.continue_()
    await client.flush_cache()
    await client.abort("r1")
    await client.abort()
    await client.aclose()
    assert [path for path, _ in fake.seen] == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/continue_generation",
        "/flush_cache",
        "/abort_request",
        "/abort_request",
    ]
    assert fake.seen[0][1] == {"mode": "retract"}
    update = fake.seen[1][1]
    assert (update["model_path"], update["weight_version"], update["flush_cache"]) == ("/models/step-12", "12", True)
    assert [fake.seen[4][1], fake.seen[5][1]] == [{"rid": "r1"}, {"abort_all": True}]


async def test_a_failed_update_is_a_failure(fake: Fake) -> None:
    fake.script = lambda n: {"success": False, "message": "bad shape"}
    client = HttpTokenClient(fake.url)
    with pytest.raises(ModelFailure, match="bad shape"):
        await client.update_weights_from_disk("/x", 1)
    await client.aclose()


async def test_generations_are_tried_again_and_boundedly(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr("serving.tokens.asyncio.sleep", lambda _: sleep(0))
    client = HttpTokenClient(fake.url, max_retries=2)
    fake.script = lambda n: JSONResponse({}, 503) if n < 3 else reply([4])
    assert (await client.generate([1], Sampling(seed=1))).output_ids == [4]
    fake.seen.clear()
    fake.script = lambda n: JSONResponse({}, 500)
    with pytest.raises(ModelFailure) as caught:
        await client.generate([1], Sampling(seed=1))
    assert (caught.value.kind, len(fake.seen)) == ("server_error", 3)
    fake.seen.clear()
    fake.script = lambda n: JSONResponse({"error": {"message": "over the context length"}}, 400)
    with pytest.raises(ModelFailure, match="context") as caught:
        await client.generate([1], Sampling(seed=1))
    assert (caught.value.kind, len(fake.seen)) == ("bad_request", 1)
    await client.aclose()


async def test_a_hung_server_ends_at_the_deadline() -> None:
    with bind("127.0.0.1", 0) as silent:  # accepts, and never answers
        client = HttpTokenClient(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2)
        with pytest.raises(ModelFailure) as caught:
            await asyncio.wait_for(client.generate([1], Sampling()), 10)
        assert caught.value.kind == "timeout"
        await client.aclose()


async def test_a_dead_server_is_unreachable() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    client = HttpTokenClient(f"http://127.0.0.1:{port}", max_retries=0)
    with pytest.raises(ModelFailure) as caught:
        await client.generate([1], Sampling())
    assert caught.value.kind == "unreachable"
    await client.aclose()


async def test_the_preflight_names_a_server_that_is_gone_or_of_another_kind(fake: Fake) -> None:
    sock = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    sock.close()
    for client, said in (
        (HttpTokenClient(url, max_retries=0), "no model server answers"),
        (HttpTokenClient(fake.url), "does not say which model"),
    ):
        with pytest.raises(ServerError, match=said):
            await client.check()
        await client.aclose()
