"""The emulator: a state per episode, answers that are checked, and the teacher's program that plays any server."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agents.base import parse_reply
from agents.context import Context
from agents.emulator import EmulateReply, open_emulator
from agents.teacher.emulator import emulator, verb_and_noun
from agents.teacher.planter import LabelSink, Planter
from agents.teacher.values import fill
from astrolabe.envs.emulator import EmulatorAnswer, EmulatorBackend, EmulatorCall
from astrolabe.envs.executor import Executor
from astrolabe.records.base import Usage
from astrolabe.records.card import ServerCard, read_card
from astrolabe.records.jsonl import read_rows
from astrolabe.records.messages import FunctionSchema, ToolSchema
from serving.chat import ChatReply, ModelFailure


def document(name: str, *arguments: str, description: str = "") -> FunctionSchema:
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string"} for argument in arguments},
        "required": list(arguments),
    }
    return FunctionSchema(name=name, description=description or name.replace("_", " "), parameters=parameters)


NOTES = ServerCard(
    name="notes",
    description="Notes.",
    license="CC0-1.0",
    tools=[
        document("create_note", "title", "body"),
        document("get_note", "note_id"),
        document("update_note", "note_id", "body"),
        document("delete_note", "note_id"),
        document("list_notes"),
        document("translate_text", "text"),
    ],
)
PLANTER = Planter(seed=0, rate=0.0, key="k", agent="emulator", sink=LabelSink())


class Episode:
    """Calls of one episode, answered by the teacher's program directly."""

    def __init__(self, card: ServerCard = NOTES) -> None:
        self.card, self.state, self.history = card, {}, []  # type: tuple[ServerCard, dict[str, Any], list[Any]]

    def __call__(self, tool: str, /, **arguments: Any) -> dict[str, Any]:
        request = {
            "language": "en", "server": self.card.name, "description": "", "tool": tool, "arguments": arguments,
            "tools": [t.model_dump(mode="json") for t in self.card.tools], "state": self.state, "history": self.history,
        }  # fmt: skip
        before = json.dumps(self.state, sort_keys=True)
        reply = emulator(request, random.Random(0), PLANTER)
        assert isinstance(reply, dict)
        assert json.dumps(request["state"], sort_keys=True) == before, "the state that came is not changed in place"
        checked = parse_reply(json.dumps(reply), EmulateReply)
        self.state = checked.state
        return reply


# The back end


class Client:
    def __init__(self, *replies: str | Exception) -> None:
        self.replies = list(replies)
        self.prompts: list[str] = []

    async def complete(self, messages: Any, **_: Any) -> ChatReply:
        self.prompts.append(messages[-1].content)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return ChatReply(reply, None, [], "stop", Usage(prompt_tokens=2, calls=1), "m", "key")


def backed(*replies: str | Exception) -> tuple[Executor, Client]:
    client = Client(*replies)
    backend = open_emulator(NOTES, Context(clients={"default": client}, max_repairs=1), seed=1, item="t")
    return Executor([ToolSchema(function=tool) for tool in NOTES.tools], backend), client


async def test_state_and_whole_history_go_with_every_call() -> None:
    run, client = backed(
        '{"status": "ok", "value": {"id": "7"}, "error": null, "state": {"notes": ["7"]}}',
        '{"status": "error", "value": null, "error": "no such note", "state": {"notes": ["7"]}}',
        '{"status": "ok", "value": [], "error": null, "state": {"notes": ["7"]}}',
    )
    await run.execute("c1", 0, "create_note", '{"title": "a", "body": "b"}')
    record, text = await run.execute("c2", 1, "get_note", '{"note_id": "9"}')
    assert record.error is not None
    assert (record.error.class_, record.error.kind, record.backend) == ("tool", "tool_error", "emulator")
    assert "no such note" in text
    await run.execute("c3", 2, "list_notes", "{}")
    block = json.loads(client.prompts[-1].rsplit("```json\n", 1)[1].removesuffix("\n```"))["request"]
    assert block["state"] == {"notes": ["7"]}
    assert [entry["status"] for entry in block["history"]] == ["ok", "error"]
    assert run.changed == [True, False, False]
    assert isinstance(run.backend, EmulatorBackend)
    assert (run.backend.usage.calls, run.backend.model) == (3, "m")


async def test_arguments_are_validated_before_the_emulator_is_asked() -> None:
    run, client = backed('{"status": "ok", "value": 1, "error": null, "state": {}}')
    record, _ = await run.execute("c1", 0, "get_note", '{"note_id": 7}')
    assert record.error is not None
    assert record.error.class_ == "policy"
    result = await run.backend.call("get_note", {"note": "7"}, call_id="c2")
    assert result.error is not None
    assert result.error.kind == "bad_arguments"
    assert client.prompts == []


@pytest.mark.parametrize("reply", ["the note says hello", ModelFailure("timeout", "slow")])
async def test_an_answer_that_never_fits_is_an_infra_failure(reply: str | Exception) -> None:
    run, _ = backed(reply)
    record, _ = await run.execute("c1", 0, "list_notes", "{}")
    assert run.infra_failure is not None
    assert record.error is not None
    assert record.error.class_ == "infra"


async def test_a_value_is_checked_against_the_tools_output_schema() -> None:
    answers = [EmulatorAnswer(status="ok", value=1), EmulatorAnswer(status="ok", value="one")]
    asked: list[EmulatorCall] = []

    async def ask(call: EmulatorCall) -> EmulatorAnswer:
        asked.append(call)
        return answers[len(asked) - 1] if len(asked) <= 2 else EmulatorAnswer(status="ok", value=3)

    backend = EmulatorBackend(NOTES.tools, ask, outputs={"list_notes": {"type": "string"}})
    assert (await backend.call("list_notes", {}, call_id="c")).value == "one"
    assert [call.attempt for call in asked] == [0, 1]
    refused = await backend.call("list_notes", {}, call_id="d")
    assert refused.error is not None
    assert refused.error.class_ == "infra"
    assert len(backend.history) == 1


async def test_a_state_that_grows_without_end_is_refused() -> None:
    async def ask(call: EmulatorCall) -> EmulatorAnswer:
        return EmulatorAnswer(status="ok", value=1, state={"log": "x" * 100_000})

    backend = EmulatorBackend(NOTES.tools, ask)
    assert (await backend.call("list_notes", {}, call_id="c")).status == "error"
    assert backend.state == {}


@pytest.mark.parametrize(
    "text",
    [
        '{"status": "ok", "value": 1, "error": "odd", "state": {}}',
        '{"status": "error", "value": null, "error": null, "state": {}}',
        '{"status": "error", "value": 1, "error": "no", "state": {}}',
        '{"status": "ok", "value": 1}',
        '{"status": "fine", "value": 1, "error": null, "state": {}}',
    ],
)
def test_a_reply_that_contradicts_itself_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        parse_reply(text, EmulateReply)


# The teacher's program


def test_what_was_created_is_found_listed_changed_and_gone_once_deleted() -> None:
    call = Episode()
    note = call("create_note", title="Plan", body="Buy bread")["value"]
    assert note["title"] == "Plan"
    assert call("get_note", note_id=note["id"])["value"]["body"] == "Buy bread"
    assert note["id"] in [row["id"] for row in call("list_notes")["value"]["notes"]]
    assert call("update_note", note_id=note["id"], body="Buy milk")["status"] == "ok"
    assert call("get_note", note_id=note["id"])["value"]["body"] == "Buy milk"
    assert call("delete_note", note_id=note["id"])["value"]["status"] == "deleted"
    assert call("get_note", note_id=note["id"]) == {
        "status": "error", "value": None, "error": f"note {note['id']} not found", "state": call.state,
    }  # fmt: skip
    assert call("delete_note", note_id=note["id"])["status"] == "error"
    assert note["id"] not in [row["id"] for row in call("list_notes")["value"]["notes"]]


def test_the_same_call_gives_the_same_value_in_an_episode_and_across_episodes() -> None:
    first, second = Episode(), Episode()
    for call in (first, first, second):
        assert call("get_note", note_id="41")["value"] == first("get_note", note_id="41")["value"]
        assert call("list_notes")["value"] == first("list_notes")["value"]
        assert call("translate_text", text="hello")["value"] == first("translate_text", text="hello")["value"]
    assert first("get_note", note_id="41") != first("get_note", note_id="42")
    assert first("translate_text", text="hello")["value"] != first("translate_text", text="goodbye")["value"]


def test_two_creations_are_two_things() -> None:
    call = Episode()
    first, second = (call("create_note", title="a", body="b")["value"]["id"] for _ in range(2))
    assert first != second


def test_a_result_holds_what_other_tools_need_under_their_names() -> None:
    card = NOTES.model_copy(
        update={
            "name": "web",
            "tools": [document("open_session", "url"), document("click_button", "session_id", "label")],
        }
    )
    assert Episode(card)("open_session", url="https://a.example")["value"]["session_id"]


@pytest.mark.parametrize(
    ("name", "description", "verb", "noun"),
    [
        ("create_note", "", "create", "note"),
        ("listNotes", "", "list", "note"),
        ("delete-reading-list", "", "delete", "reading"),
        ("browser_close", "", "delete", "browser"),
        ("temperature", "Returns the temperature of a city", "get", "temperature"),
        ("sha256", "Hash of a text", "compute", "sha"),
    ],
)
def test_verb_and_noun_are_read_off_the_name(name: str, description: str, verb: str, noun: str) -> None:
    assert verb_and_noun(FunctionSchema(name=name, description=description))[0] == verb
    if verb != "delete" or noun == "browser":
        assert verb_and_noun(FunctionSchema(name=name, description=description))[1] == noun


def test_every_tool_of_the_real_cards_is_played(shared: Path) -> None:
    played = 0
    for number, row in read_rows(shared / "data/mcp_servers.jsonl"):
        card = read_card(row).card
        if card is None or number % 3:
            continue
        call = Episode(card)
        for tool in card.tools:
            arguments = fill(tool, random.Random(number), optional=0.3)
            if arguments is not None:
                first = call(tool.name, **arguments)
                assert first["status"] == "error" or len(json.dumps(first["value"])) < 8000
                played += 1
    assert played > 200
