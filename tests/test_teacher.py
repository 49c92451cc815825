"""The offline teacher: deterministic programs behind OpenAI's protocol, right demonstrations, labelled defects."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from agents.planner import AugmentRequest, ChainsRequest, CheckRequest, ServerInfo, TaskRequest
from agents.teacher import MODEL_NAME
from agents.teacher.planter import LabelSink, Planter, question_item
from agents.teacher.policy import DEFECTS, find_value
from agents.teacher.server import Teacher, create_app
from agents.teacher.task_text import Flow, Step, parse, phrases, render
from agents.teacher.values import fill, valid
from agents.tool_docs import names_tool, yields
from astrolabe.records.errors import RunError, UsageError
from astrolabe.records.messages import FunctionSchema
from serving.http import launch_in_thread

TEXT = {"type": "string"}


def tool(name: str, description: str, required: dict[str, Any] | None = None, **optional: Any) -> FunctionSchema:
    properties = {**(required or {}), **optional}
    return FunctionSchema(
        name=name,
        description=description,
        parameters={"type": "object", "properties": properties, "required": list(required or {})},
    )


HARBOUR = [
    tool("list_berths", "List the berths of the harbour. Each has an id."),
    tool("reserve_berth", "Reserve a berth for a boat", {"berth_id": TEXT, "boat_name": TEXT}, nights={"type": "integer", "minimum": 1, "maximum": 9}),
    tool("cancelBooking", "Cancels a booking.", {"booking-code": TEXT}),
    tool("get_tide_table", "Get the tide table of a day", {"date": {"type": "string", "description": "Day, YYYY-MM-DD"}}, unit={"type": "string", "enum": ["m", "ft"]}),
    tool("ring_bell", "Ring the harbour bell"),
    tool("get_weather", "Get the weather forecast for a place", {"place": {"type": "string", "description": "e.g. \"Bergen\", \"Lisbon\""}}),
]  # fmt: skip
MARKET = [
    tool("list_stalls", "列出市场里的全部摊位"),
    tool("find_fruit_price", "查询一种水果的价格", {"fruit_name": {"type": "string", "description": "水果名称，例如“苹果”、“梨”"}}),
    tool("close_stall", "关闭一个摊位", {"stall_id": TEXT}),
]  # fmt: skip
TABLE = {t.name: t for t in (*HARBOUR, *MARKET)}
QUESTION = {
    "two": 'Please first list the berths of the harbour; and finally reserve a berth for a boat, using the berth id from the result of step 1, boat name "Tern".',
    "one": 'Could you get the tide table of a day, using date "2025-03-14".',
    "lacking": "Could you get the tide table of a day.",
    "beyond": "Please water the tomato plants on my balcony.",
    "zh": '请帮我查询一种水果的价格（fruit name 为 "苹果"）。',
}


def schemas(tools: list[FunctionSchema]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": t.model_dump(mode="json")} for t in tools]


def talk(
    question: str, teacher: Teacher, tools: list[FunctionSchema] = HARBOUR, faults: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """A conversation with tools that answer by fixed rules; the first calls meet `faults`."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    waiting = list(faults)
    for turn in range(12):
        message = teacher.answer({"messages": messages, "tools": schemas(tools), "seed": turn})
        messages.append(message)
        if not message.get("tool_calls"):
            return messages
        for call in message["tool_calls"]:
            function = call["function"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer(function, waiting)})
    raise AssertionError("the policy does not come to an end")


def answer(function: dict[str, Any], faults: list[str]) -> str:
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return json.dumps({"error": "malformed", "message": "no JSON"})
    if not valid(TABLE[function["name"]], arguments):
        return json.dumps({"error": "bad_arguments", "message": "schema"})
    if faults:
        return json.dumps({"error": faults.pop(0), "message": "try again"})
    if function["name"] == "list_berths":
        return json.dumps({"berths": [{"id": "B7", "length_m": 12}, {"id": "B9", "length_m": 9}]})
    return json.dumps({"status": "done", "reference": "R-4417", **arguments}, ensure_ascii=False)


def calls_of(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(c["function"]["name"], c["function"]["arguments"]) for m in messages for c in m.get("tool_calls") or []]


def honest() -> Teacher:
    return Teacher(seed=0, defect_rate=0.0)


# -- the task language -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("tools", [HARBOUR, MARKET], ids=["harbour", "market"])
def test_a_rendered_plan_reads_back_as_the_same_plan(tools: list[FunctionSchema], language: Any):
    speakable = phrases(tools, language)
    assert len(set(speakable.values())) == len(tools)
    for seed in range(60):
        rng = random.Random(seed)
        steps = []
        for name in rng.sample(sorted(speakable), rng.randint(1, len(speakable))):
            arguments = fill(TABLE[name], rng, language, optional=0.5)
            assert arguments is not None
            if steps and arguments and rng.random() < 0.3:
                arguments[next(iter(arguments))] = Flow(0)
            steps.append(Step(name, arguments))
        question = render(
            steps, TABLE, speakable, language, rng, before="Hello there." if language == "en" else "你好。"
        )
        assert parse(question, tools, language) == steps
        assert names_tool(question, TABLE) is None


def test_a_value_that_holds_another_tools_phrase_does_not_become_a_step():
    steps = [Step("reserve_berth", {"berth_id": "B1", "boat_name": 'Ring the harbour bell", nights 3'})]
    question = render(steps, TABLE, phrases(HARBOUR, "en"), "en", random.Random(0))
    assert parse(question, HARBOUR, "en") == steps


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("please use list_berths now", "list_berths"),
        ("call cancelBooking for me", "cancelBooking"),
        ("list the berths", None),
        ("my_list_berths_copy", None),
        ("sort the files", None),
        ("run `sort` on it", "sort"),
    ],
)
def test_a_tool_is_named_by_its_identifier_not_by_its_words(text: str, named: str | None):
    assert names_tool(text, ["list_berths", "cancelBooking", "sort"]) == named


def test_values_fit_the_schema_and_hold_no_credential():
    for seed in range(40):
        for item in TABLE.values():
            arguments = fill(item, random.Random(seed), optional=0.5)
            assert arguments is not None
            assert valid(item, arguments)
    assert fill(tool("login", "Log in to the site", {"password": TEXT}), random.Random(0)) is None
    assert fill(tool("send", "Send a blob away", {"blob": {"type": "object"}}), random.Random(0)) is None


def test_an_id_flows_from_a_tool_that_gives_such_a_thing():
    assert yields(TABLE["list_berths"], "berth_id", TABLE["reserve_berth"])
    assert not yields(TABLE["get_weather"], "berth_id", TABLE["reserve_berth"])
    assert not yields(TABLE["reserve_berth"], "berth_id", TABLE["reserve_berth"])


# -- the planner -------------------------------------------------------------------------------------------------------


def ask(teacher: Teacher, agent: str, request: Any, seed: int = 0) -> Any:
    from agents.base import request_block

    content = request_block(agent, request.model_dump(mode="json"))
    body = {"messages": [{"role": "user", "content": content}], "seed": seed}
    return json.loads(teacher.answer(body)["content"])


def test_chains_follow_from_what_a_tool_gives_to_what_another_needs():
    reply = ask(honest(), "planner.chains", ChainsRequest(server=ServerInfo(name="harbour"), tools=HARBOUR))
    chains = [c["tools"] for c in reply["chains"] if c["dependency"] == "yes"]
    assert ["list_berths", "reserve_berth"] in [c[:2] for c in chains]
    assert all(name in TABLE for chain in chains for name in chain)


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("kind", ["answer", "ask", "abstain"])
def test_a_written_task_is_read_back_as_what_it_was_written_for(kind: Any, language: Any):
    teacher = honest()
    for seed in range(8):
        request = TaskRequest(server=ServerInfo(name="harbour"), tools=HARBOUR, kind=kind, language=language)
        task = ask(teacher, "planner.task", request, seed)
        check = CheckRequest(question=task["question"], tools=HARBOUR, language=language)
        assert ask(teacher, "planner.check", check) == {"kind": kind, "chain": task["chain"]}
        assert names_tool(task["question"], TABLE) is None


@pytest.mark.parametrize("mode", ["diverse", "complex", "persona"])
def test_an_augmented_question_needs_the_same_tools_in_the_same_order(mode: Any):
    persona = {"age": 34, "occupation": "ward nurse", "interests": ["sea swimming"]}
    request = AugmentRequest(
        question=QUESTION["two"], chain=["list_berths", "reserve_berth"], tools=HARBOUR, mode=mode, persona=persona
    )
    question = ask(honest(), "planner.augment", request)["question"]
    assert question != QUESTION["two"]
    assert [s.tool for s in parse(question, HARBOUR, "en")] == request.chain


# -- the policy --------------------------------------------------------------------------------------------------------


def test_the_policy_walks_the_plan_and_takes_the_flowing_value_from_the_result():
    messages = talk(QUESTION["two"], honest())
    calls = calls_of(messages)
    assert [name for name, _ in calls][-2:] == ["list_berths", "reserve_berth"]
    assert json.loads(calls[-1][1]) == {"berth_id": "B7", "boat_name": "Tern"}
    assert "R-4417" in messages[-1]["content"]


def test_the_policy_tries_again_after_a_passing_fault_and_reports_a_lasting_one():
    once = talk(QUESTION["one"], honest(), faults=("timeout",))
    assert [name for name, _ in calls_of(once)] == ["get_tide_table"] * 2
    assert "R-4417" in once[-1]["content"]
    for_good = talk(QUESTION["one"], honest(), faults=("timeout",) * 9)
    assert len(calls_of(for_good)) == 3
    assert "could not be done" in for_good[-1]["content"]


def test_a_question_of_the_planner_is_played_by_its_plan_whatever_other_program_might_read_in_it(
    monkeypatch: pytest.MonkeyPatch,
):
    tools = [
        tool("get_pv_value", "Get the value of a specific PV.", {"pv_name": TEXT}),
        tool("get_pv_info", "Get information about a specific PV.", {"pv_name": TEXT}),
    ]
    monkeypatch.setitem(TABLE, "get_pv_value", tools[0])
    monkeypatch.setitem(TABLE, "get_pv_info", tools[1])
    question = (
        'I need you to first get the value of a specific PV, using pv name "tide-2"; '
        'and finally get information about a specific PV, using pv name "tide-2".'
    )
    assert sorted(calls_of(talk(question, honest(), tools)))[0] == ("get_pv_info", '{"pv_name": "tide-2"}')


def test_the_policy_asks_for_what_is_missing_and_calls_nothing():
    messages = talk(QUESTION["lacking"], honest())
    assert calls_of(messages) == []
    assert "date" in messages[-1]["content"]
    assert "?" in messages[-1]["content"]


def test_the_policy_declines_what_no_tool_can_do():
    messages = talk(QUESTION["beyond"], honest())
    assert calls_of(messages) == []
    assert messages[-1]["content"]


def test_the_policy_answers_a_chinese_question_in_chinese():
    messages = talk(QUESTION["zh"], honest(), MARKET)
    assert calls_of(messages) == [("find_fruit_price", '{"fruit_name": "苹果"}')]
    assert "结果如下" in messages[-1]["content"]


@pytest.mark.parametrize(
    ("result", "argument", "value"),
    [
        ({"berth_id": "B1", "id": "X"}, "berth_id", "B1"),
        ([{"id": "B2"}, {"id": "B3"}], "berth_id", "B2"),
        ({"data": {"rows": [{"berthId": "B4"}]}}, "berth_id", "B4"),
        ({"name": "pier"}, "berth_id", None),
        ({"id": None}, "berth_id", None),
    ],
)
def test_a_value_is_found_in_a_result_by_name_then_by_id(result: Any, argument: str, value: Any):
    assert find_value(result, argument, TABLE["reserve_berth"]) == value


# -- planted defects ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DEFECTS)
def test_a_planted_defect_is_what_its_label_says(kind: str, monkeypatch: pytest.MonkeyPatch):
    right = talk(QUESTION["one"], honest())
    monkeypatch.setattr(Planter, "pick", lambda self, kinds, scope=None: kind if kind in kinds else None)
    sink = LabelSink()
    messages = talk(QUESTION["one"], Teacher(seed=0, defect_rate=1.0, sink=sink))
    labels = [label for label in sink.labels if label["agent"] == "policy"]
    assert {label["kind"] for label in labels} == {kind}
    assert {label["item"] for label in labels} == {question_item(QUESTION["one"])}
    calls, final = calls_of(messages), messages[-1]["content"]
    want = ("get_tide_table", '{"date": "2025-03-14"}')
    if kind == "wrong_tool":
        assert calls
        assert all(name != "get_tide_table" for name, _ in calls)
    elif kind == "invented_argument":
        assert [name for name, _ in calls] == ["get_tide_table"]
        assert "2025-03-14" not in calls[0][1]
    elif kind == "repeated_call":
        assert calls == [want, want]
    elif kind == "refusal":
        assert not calls
    elif kind == "malformed_json":
        with pytest.raises(ValueError, match=r"."):
            json.loads(calls[0][1])
        assert calls[1] == want
    elif kind == "made_up_answer":
        assert calls == [want]
        assert "R-4417" not in final
    elif kind == "language_switch":
        assert any("\u4e00" <= ch <= "\u9fff" for ch in final)
    else:
        assert want in calls
        assert len(calls) == 2
    assert messages != right


def test_without_a_rate_nothing_is_planted():
    sink = LabelSink()
    teacher = Teacher(seed=0, defect_rate=0.0, sink=sink)
    for question in QUESTION.values():
        talk(question, teacher, [*HARBOUR, *MARKET])
    assert sink.labels == []


def test_defects_come_at_about_the_rate_that_is_asked_for():
    sink = LabelSink()
    planters = [Planter(seed=0, rate=0.12, key=str(n), agent="policy", sink=sink) for n in range(3000)]
    share = sum(p.pick(DEFECTS) is not None for p in planters) / len(planters)
    assert 0.10 < share < 0.14
    assert sum(p.maybe("x", share=0.5) for p in planters) == len(sink.labels)
    assert 0.045 < len(sink.labels) / len(planters) < 0.075


def test_a_label_is_written_once_also_after_a_restart(tmp_path: Any):
    path = tmp_path / "labels.jsonl"
    for _ in range(2):
        sink = LabelSink(path)
        for _ in range(2):
            Planter(seed=0, rate=1.0, key="k", agent="a", sink=sink).label("wrong_tool", item="q-1")
    assert len(path.read_text().splitlines()) == 1


# -- the server --------------------------------------------------------------------------------------------------------


def test_replies_depend_on_the_seed_and_the_request_only():
    request = TaskRequest(server=ServerInfo(name="harbour"), tools=HARBOUR)
    first, second = Teacher(seed=3), Teacher(seed=3)
    ask(second, "planner.chains", ChainsRequest(server=ServerInfo(name="other"), tools=HARBOUR))
    assert ask(first, "planner.task", request, 5) == ask(second, "planner.task", request, 5)
    answers = {json.dumps(ask(first, "planner.task", request, seed)) for seed in range(8)}
    assert len(answers) > 1


def test_the_server_speaks_the_protocol_streams_and_refuses_in_words(tmp_path: Any):
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": QUESTION["one"]}], "tools": schemas(HARBOUR)}
    with launch_in_thread(create_app(defect_rate=0.0)) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/health").json()["status"] == "ok"
        assert client.get("/v1/models").json()["data"][0]["id"] == MODEL_NAME
        reply = client.post("/v1/chat/completions", json=body).json()
        again = client.post("/v1/chat/completions", json=body).json()
        assert reply == again
        assert reply["model"] == MODEL_NAME
        assert reply["choices"][0]["finish_reason"] == "tool_calls"
        streamed = client.post("/v1/chat/completions", json={**body, "stream": True}).text
        chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        message = reply["choices"][0]["message"]
        assert "".join(d.get("content") or "" for d in deltas) == message["content"]
        call = next(d["tool_calls"][0] for d in deltas if "tool_calls" in d)
        assert call["function"] == message["tool_calls"][0]["function"]
        for wrong in (b"{", b"[]", b'{"messages": []}', b'{"messages": ["x"]}'):
            refused = client.post("/v1/chat/completions", content=wrong)
            assert refused.status_code == 400
            assert refused.json()["error"]["message"]
        unknown = '```json\n{"agent": "nobody", "request": {}}\n```'
        refused = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": unknown}]})
        assert refused.status_code == 400
        assert "nobody" in refused.json()["error"]["message"]


def test_labels_that_cannot_be_written_end_the_answers(tmp_path):
    with pytest.raises(UsageError, match="Is a directory"):
        LabelSink(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="File exists"):
        LabelSink(tmp_path / "file" / "labels.jsonl")
    sink = LabelSink(Path("/dev/full"))
    for kind in ("refusal", "refusal", "wrong_tool"):
        with pytest.raises(RunError, match="No space left"):
            sink.write({"kind": kind})
    assert sink.labels == []


def test_a_label_that_a_killed_run_left_half_written_is_dropped(tmp_path):
    path = tmp_path / "labels.jsonl"
    LabelSink(path).write({"kind": "refusal", "n": 1})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "refu')
    sink = LabelSink(path)
    sink.write({"kind": "refusal", "n": 1})
    assert path.read_bytes() == whole
    sink.write({"kind": "refusal", "n": 2})
    assert path.read_bytes().count(b"\n") == 2
