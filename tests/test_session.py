"""A synthesis session: teacher, clients per role, what is recorded, and replay without a server."""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from agents.teacher.server import create_app
from astrolabe.records.errors import RunError, ServerError, UsageError
from graphs.options import RoleModel, SynthOptions
from graphs.session import NO_SERVER, TEACHER, open_session
from serving.http import launch_in_thread


def opened(out: Path, options: SynthOptions, **changes):
    arguments = {"inputs": {"servers": "abc"}, "prompts": {"planner": "def"}, "files": ["trajectories"]}
    return open_session("synth trajectories", out, options, **(arguments | changes))


def ask(session, seed: int = 1) -> str:
    """One policy turn, through the session's client and reply store."""

    async def once() -> str:
        client = session.context.client("policy")
        reply = await client.complete(
            [{"role": "user", "content": 'Do it.\n\n```json\n{"agent": "none", "request": {}}\n```'}],
            role="policy",
            seed=seed,
        )
        await client.aclose()
        return reply.key

    return asyncio.run(once())


@pytest.fixture
def chat_server():
    """A chat server that counts its requests and answers each with its number."""
    from fastapi import FastAPI, Request

    app = FastAPI()
    app.state.asked = []

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [{"id": "big", "object": "model"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request):
        app.state.asked.append(await request.json())
        message = {"role": "assistant", "content": str(len(app.state.asked))}
        return {"model": "big", "choices": [{"message": message, "finish_reason": "stop"}], "usage": {}}

    with launch_in_thread(app) as server:
        server.app = app
        yield server


def test_without_an_address_the_teacher_is_started_and_named(tmp_path):
    with opened(tmp_path / "run", SynthOptions(seed=4)) as session:
        assert session.models == {"default": TEACHER}
        url = session.context.client("judge").spec.base_url
        assert url.startswith("http://127.0.0.1:")
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["config"]["model"] == TEACHER
    assert run["seeds"] == {"run": 4}
    assert url not in (tmp_path / "run" / "run.json").read_text()


def test_the_address_of_the_server_and_the_paths_are_no_part_of_the_run(tmp_path, chat_server):
    options = SynthOptions(model_url=chat_server.url, concurrency=3)
    with opened(tmp_path / "one", options):
        pass
    with launch_in_thread(create_app()) as other:
        assert other.url != chat_server.url
    with opened(tmp_path / "two", replace(options, concurrency=5, labels=tmp_path / "labels.jsonl")):
        pass
    assert (tmp_path / "one" / "run.json").read_bytes() == (tmp_path / "two" / "run.json").read_bytes()
    config = json.loads((tmp_path / "one" / "run.json").read_text())["config"]
    assert config["model"] == "big"
    assert config["self_judged"] is True


def test_roles_have_models_of_their_own_and_share_the_reply_store(tmp_path, chat_server):
    roles = {"judge": RoleModel(temperature=0.0, max_tokens=99)}
    options = SynthOptions(model_url=chat_server.url, roles=roles, allow_self_judge=True)
    with opened(tmp_path / "run", options) as session:
        judge, policy = session.context.client("judge"), session.context.client("policy")
        assert (judge.spec.temperature, judge.spec.max_tokens, judge.spec.model) == (0.0, 99, "big")
        assert (policy.spec.temperature, policy.spec.max_tokens) == (0.7, 2048)
        ask(session)
        ask(session)
        assert len(chat_server.app.state.asked) == 1


def test_a_key_goes_to_the_server_and_into_no_file(tmp_path, chat_server, monkeypatch):
    monkeypatch.setitem(os.environ, "SOME_KEY", "sk-very-secret")
    options = SynthOptions(model_url=chat_server.url, api_key_env="SOME_KEY")
    with opened(tmp_path / "run", options) as session:
        ask(session)
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"very-secret" not in written


def test_a_replay_asks_no_server_and_misses_are_named(tmp_path, chat_server):
    options = SynthOptions(model_url=chat_server.url)
    with opened(tmp_path / "one", options) as session:
        key = ask(session)
    chat_server.stop()
    replayed = SynthOptions(replay=tmp_path / "one")
    with opened(tmp_path / "two", replayed) as session:
        assert session.models == {"default": "big"}
        assert session.context.client("policy").spec.base_url == NO_SERVER
        assert ask(session) == key
        with pytest.raises(RunError, match="no stored reply"):
            ask(session, seed=2)
    assert (tmp_path / "one" / "run.json").read_bytes() == (tmp_path / "two" / "run.json").read_bytes()
    with pytest.raises(ServerError, match="no model server answers"), opened(tmp_path / "three", options):
        pass
    assert not (tmp_path / "three").exists()


def test_the_same_run_is_continued_by_an_equal_session_only(tmp_path):
    with opened(tmp_path / "run", SynthOptions(seed=1)):
        pass
    with opened(tmp_path / "run", SynthOptions(seed=1, concurrency=2)):
        pass
    for options, changes, named in (
        (SynthOptions(seed=2), {}, "seeds"),
        (SynthOptions(seed=1, limit=3), {}, "limit"),
        (SynthOptions(seed=1), {"inputs": {"servers": "other"}}, "inputs"),
    ):
        with pytest.raises(RunError, match=named), opened(tmp_path / "run", options, **changes):
            pass


@pytest.mark.parametrize(
    ("suffix", "models"), [("/v1", (None, None)), ("", ("big", "default")), ("/v1/", (None, "big"))]
)
def test_a_judge_that_turns_out_to_be_the_policy_is_refused(tmp_path, chat_server, suffix, models):
    """One server under two addresses, and `default` beside the name that it stands for."""
    address = chat_server.url.replace("127.0.0.1", "localhost") + suffix
    judge, policy = models
    roles = {"judge": RoleModel(model_url=address, model=judge), "policy": RoleModel(model=policy)}
    options = SynthOptions(model_url=chat_server.url, roles=roles)
    with pytest.raises(UsageError, match="its own generations"), opened(tmp_path / "run", options):
        pass
    assert not (tmp_path / "run").exists()
    with opened(tmp_path / "run", replace(options, allow_self_judge=True)):
        pass


def test_a_judge_and_a_policy_beside_the_teacher_may_be_the_same_server_too(tmp_path, chat_server):
    one = RoleModel(model_url=chat_server.url, model="big")
    options = SynthOptions(roles={"judge": one, "policy": one})
    with pytest.raises(UsageError, match="its own generations"), opened(tmp_path / "run", options):
        pass
