"""The executor: one record and one text per emitted call, failures by class, and episodes that never meet."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from astrolabe.envs.arguments import MalformedArguments, argument_faults, parse_arguments
from astrolabe.envs.executor import BackendName, Executor, ToolResult, cap_text, failed, observation
from astrolabe.envs.python_env import PythonBackend, open_episode
from astrolabe.envs.sandbox import Sandbox, SandboxError
from astrolabe.records.environment import Environment
from astrolabe.records.messages import FunctionCall, FunctionSchema, ToolCall, ToolSchema


def tool(name: str, **properties: dict[str, Any]) -> ToolSchema:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return ToolSchema(function=FunctionSchema(name=name, description="A tool.", parameters=parameters))


class Recorder:
    """A back end that answers with what it was given."""

    name: BackendName = "python"

    def __init__(self, result: ToolResult | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.result = result

    async def call(self, tool: str, arguments: dict[str, Any], *, call_id: str) -> ToolResult:
        self.calls.append((tool, arguments))
        return self.result or ToolResult(status="ok", value={"tool": tool, **arguments})

    async def aclose(self) -> None:
        pass


def executor(backend: Recorder, **options: Any) -> Executor:
    tools = [tool("add", a={"type": "integer"}, b={"type": "integer"}), tool("say", text={"type": "string"})]
    return Executor(tools, backend, **options)


def call(call_id: str, name: str, arguments: str) -> ToolCall:
    return ToolCall(id=call_id, function=FunctionCall(name=name, arguments=arguments))


# Arguments


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "null", "[]", "42", '"{}"', '"{\\"a\\": 1}"', '{"a": 1', '{"a": 1}}', "{'a': 1}", '{"a": NaN}',
        '{"a": Infinity}', '{"a": 1, "a": 2}', '{"a": "line\nbreak"}', '{"a": 1} trailing', "[" * 100_000, '{"a": "\\ud800"}',
        '{"a": 1e999}', '{"a": ' + "[" * 150 + "]" * 150 + "}",
    ],
)  # fmt: skip
async def test_b13_a_malformed_call_is_an_error_and_never_runs_with_no_arguments(text: str) -> None:
    with pytest.raises(MalformedArguments):
        parse_arguments(text)
    backend = Recorder()
    record, answer = await executor(backend).execute("c1", 0, "say", text)
    assert backend.calls == []
    assert record.error is not None
    assert (record.status, record.arguments, record.error.class_, record.error.kind) == (
        "error",
        None,
        "policy",
        "malformed",
    )
    assert json.loads(answer)["error"] == "malformed"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"a": True, "b": 1}, "True"),
        ({"a": 1, "b": "1"}, "'1'"),
        ({"a": 1, "b": 1.5}, "1.5"),
        ({"a": 1}, "required"),
        ({"a": 1, "b": 2, "c": 3}, "unknown argument: c"),
        ({"a": None, "b": 1}, "None"),
    ],
)
async def test_arguments_are_validated_before_any_back_end_runs(arguments: dict[str, Any], word: str) -> None:
    backend = Recorder()
    record, _ = await executor(backend).execute("c1", 0, "add", json.dumps(arguments))
    assert backend.calls == []
    assert record.error is not None
    assert (record.error.class_, record.error.kind, record.arguments) == ("policy", "bad_arguments", arguments)
    assert word in record.error.message


async def test_a_whole_float_is_an_integer_and_reaches_the_tool_as_one() -> None:
    backend = Recorder()
    record, _ = await executor(backend).execute("c1", 0, "add", '{"a": 3.0, "b": 4}')
    assert record.status == "ok"
    assert repr(backend.calls[0][1]["a"]) == "3"


def test_a_schema_may_state_its_own_additional_properties() -> None:
    assert argument_faults({"type": "object", "additionalProperties": {"type": "string"}}, {"x": "y"}) == []
    assert argument_faults({"type": "object", "additionalProperties": False}, {"x": "y"}) != []
    assert argument_faults({"type": "object"}, {"x": "y"}) == ["unknown argument: x"]


def test_a_pattern_that_never_ends_is_stopped() -> None:
    slow = {"type": "string", "pattern": "^(a+)+$"}
    began = time.monotonic()
    assert argument_faults({"type": "object", "properties": {"x": slow}}, {"x": "a" * 60 + "!"}) != []
    assert argument_faults({"type": "object", "patternProperties": {"^(a+)+$": {}}, "additionalProperties": False},
                           {"a" * 60 + "!": 1}) != []  # fmt: skip
    assert time.monotonic() - began < 30  # Python's own engine would take years
    assert argument_faults({"type": "object", "properties": {"x": slow}}, {"x": "aaa"}) == []
    bounded = {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False}
    assert argument_faults(bounded, {"n_a": 1}) == []
    assert argument_faults(bounded, {"n_a": "x"}) != []
    assert argument_faults(bounded, {"m_a": 1}) != []


async def test_a_reference_to_an_address_is_never_fetched() -> None:
    far = tool("far", x={"$ref": "https://example.org/schema.json"})
    record, _ = await Executor([far], Recorder()).execute("c1", 0, "far", '{"x": 1}')
    assert record.error is not None
    assert record.error.class_ == "infra"


# Records


async def test_an_unknown_tool_has_a_record() -> None:
    backend = Recorder()
    record, answer = await executor(backend).execute("c1", 2, "subtract", "{}")
    assert backend.calls == []
    assert record.error is not None
    assert (record.turn, record.tool, record.error.kind, record.error.class_) == (
        2,
        "subtract",
        "unknown_tool",
        "policy",
    )
    assert "add, say" in answer


async def test_b12_b13_a_call_without_a_name_has_a_record_too() -> None:
    run = executor(Recorder())
    record, answer = run.refuse("c1", 0, "", "no closing tag")
    assert record.error is not None
    assert (record.error.kind, record.arguments, len(run.records)) == ("malformed", None, 1)
    assert "no closing tag" in answer


async def test_b14_parallel_calls_each_get_one_result_in_call_order() -> None:
    calls = [
        call("c3", "say", '{"text": "x"}'),
        call("c1", "add", "{"),
        call("c2", "nothing", "{}"),
        call("c0", "add", '{"a": 1, "b": 2}'),
    ]
    run = executor(Recorder())
    results = await run.execute_all(0, calls)
    assert [record.id for record, _ in results] == ["c3", "c1", "c2", "c0"]
    assert [record.status for record, _ in results] == ["ok", "error", "error", "ok"]
    assert run.records == [record for record, _ in results]
    assert len(run.changed) == len(run.wall_s) == 4


async def test_b14_calls_over_the_budget_get_an_error_result() -> None:
    backend = Recorder()
    run = executor(backend, max_calls=2)
    results = await run.execute_all(0, [call(f"c{i}", "say", '{"text": "x"}') for i in range(3)])
    assert [record.status for record, _ in results] == ["ok", "ok", "error"]
    assert results[2][0].error is not None
    assert results[2][0].error.class_ == "policy"
    assert len(backend.calls) == 2


async def test_b14_call_ids_are_unique_in_an_episode() -> None:
    run = executor(Recorder())
    await run.execute("c1", 0, "say", '{"text": "x"}')
    with pytest.raises(ValueError, match="twice"):
        await run.execute("c1", 1, "say", '{"text": "x"}')


async def test_b15_infra_failures_are_told_from_tool_errors() -> None:
    refused = executor(Recorder(failed("tool", "tool_error", "no such city")))
    record, answer = await refused.execute("c1", 0, "say", '{"text": "x"}')
    assert refused.infra_failure is None
    assert json.loads(answer) == {"error": "tool_error", "message": "no such city"}
    broken = executor(Recorder(failed("infra", "unreachable", "connection refused")))
    record, _ = await broken.execute("c1", 0, "say", '{"text": "x"}')
    assert broken.infra_failure == record.error


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (42, "42"), (None, "null"), (["x"], '["x"]'), ("plain", "plain"), (True, "true"), ("", ""), ([], "[]"),
        ({"城市": "北京"}, '{"城市": "北京"}'), (0.5, "0.5"),
    ],
)  # fmt: skip
async def test_a8_a_result_is_made_text_by_one_rule(value: Any, text: str) -> None:
    assert observation(value) == text
    run = executor(Recorder(ToolResult(status="ok", value=value)))
    record, answer = await run.execute("c1", 0, "say", '{"text": "x"}')
    assert (record.value, answer) == (value, text)


async def test_f45_a_long_observation_is_cut_with_a_visible_mark() -> None:
    run = executor(Recorder(ToolResult(status="ok", value="x" * 70_000)), max_text=100)
    record, answer = await run.execute("c1", 0, "say", '{"text": "x"}')
    assert answer == "x" * 100 + "\n[cut: the first 100 of 70000 characters]"
    assert record.value == "x" * 70_000
    assert cap_text("x" * 100, 100) == "x" * 100


# Python environments

TRANSFER = """
def move(amount, *, state):
    if amount > state["from"]:
        state["from"] = -1
        raise ToolError("not enough")
    state["from"] -= amount
    state["to"] += amount
    return state["from"]
"""
READ = "def read(*, state, data):\n    return [data['unit'], state['from'], state['to']]\n"
AMOUNT = {"type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"]}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as box:
        yield box


def bank() -> Environment:
    tools = [
        {"name": "move", "description": "Moves money.", "parameters": AMOUNT, "code": TRANSFER},
        {"name": "read", "description": "Reads.", "parameters": {"type": "object", "properties": {}}, "code": READ},
    ]
    hang = {"name": "hang", "description": "Hangs.", "parameters": {"type": "object", "properties": {}}}
    hang |= {"code": "def hang():\n    while True: pass\n", "band": "low", "similarity": 0.1}
    return Environment.from_json(
        {
            "schema": "astrolabe.environment/1", "language": "en", "domain": "bank", "question": "?", "answer": "1",
            "scenario": "single_hop", "expect": "answer", "answer_type": "number", "nodes": [], "tools": tools,
            "goldens": [], "distractors": [hang], "data": {"unit": "EUR"}, "mode": "stateful", "state": {"from": 10, "to": 0},
        }
    )  # fmt: skip


async def test_a_stateful_call_changes_the_episodes_state_and_says_so(sandbox: Sandbox) -> None:
    run = open_episode(bank(), sandbox)
    results = await run.execute_all(0, [call("c1", "move", '{"amount": 4}'), call("c2", "read", "{}")])
    assert [record.value for record, _ in results] == [6, ["EUR", 6, 4]]
    assert run.changed == [True, False]
    assert isinstance(run.backend, PythonBackend)
    assert run.backend.state == {"from": 6, "to": 4}


async def test_a_refused_call_changes_nothing(sandbox: Sandbox) -> None:
    run = open_episode(bank(), sandbox)
    record, _ = await run.execute("c1", 0, "move", '{"amount": 99}')
    assert record.error is not None
    assert (record.error.class_, record.error.kind, record.error.message) == ("tool", "tool_error", "not enough")
    assert isinstance(run.backend, PythonBackend)
    assert (run.backend.state, run.changed) == ({"from": 10, "to": 0}, [False])


async def test_f46_two_interleaved_episodes_never_see_each_others_writes(sandbox: Sandbox) -> None:
    environment = bank()
    first, second = open_episode(environment, sandbox), open_episode(environment, sandbox)
    for turn in range(3):
        await asyncio.gather(
            first.execute(f"a{turn}", turn, "move", '{"amount": 1}'),
            second.execute(f"b{turn}", turn, "move", '{"amount": 2}'),
        )
    assert [record.value for record in first.records] == [9, 8, 7]
    assert [record.value for record in second.records] == [8, 6, 4]
    assert environment.state == {"from": 10, "to": 0}
    assert open_episode(environment, sandbox).backend.state == {"from": 10, "to": 0}  # type: ignore[attr-defined]


async def test_a_tool_that_hangs_is_a_timeout_of_its_own_class(sandbox: Sandbox) -> None:
    run = open_episode(bank(), sandbox)
    run.backend._limits = {"cpu_s": 0.2, "wall_s": 5.0}  # type: ignore[attr-defined]
    record, _ = await run.execute("c1", 0, "hang", "{}")
    assert record.error is not None
    assert (record.error.class_, record.error.kind) == ("timeout", "timeout")
    assert run.infra_failure is None


async def test_a_dead_sandbox_is_an_infra_failure(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    async def dead(*_: Any, **__: Any) -> None:
        raise SandboxError("gone")

    monkeypatch.setattr(sandbox, "arun", dead)
    run = open_episode(bank(), sandbox)
    await run.execute("c1", 0, "read", "{}")
    assert run.infra_failure is not None
    assert run.infra_failure.class_ == "infra"


async def test_a_number_beyond_a_double_is_the_policys_fault() -> None:
    backend = Recorder()
    run = Executor([tool("add", a={"type": "number", "multipleOf": 0.5})], backend)
    record, _ = await run.execute("c1", 0, "add", '{"a": 1' + "0" * 400 + "}")
    assert record.error is not None
    assert (record.error.class_, record.error.kind, backend.calls) == ("policy", "malformed", [])
