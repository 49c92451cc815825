"""The solver loop: order, budgets, and who is to blame for the end of an episode."""

from __future__ import annotations

import asyncio

import pytest
from rollout_fakes import Echo

from astrolabe.records.base import Usage
from astrolabe.records.messages import FunctionCall, FunctionSchema, Message, ToolCall, ToolSchema
from astrolabe.records.trajectory import CallError, Task
from graphs.solver import Budgets, Episode, PolicyFailure, Turn, graph, solve

TASK = Task(question="How many?").with_id()
TOOLS = [ToolSchema(function=FunctionSchema(name="count"))]


class Scripted:
    """Plays the given turns; an exception among them is raised."""

    def __init__(self, *turns: Turn | Exception | float) -> None:
        self.turns, self.seen = list(turns), []

    async def act(self, episode: Episode) -> Turn:
        self.seen.append(list(episode.messages))
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        if isinstance(turn, float):
            await asyncio.sleep(turn)
            raise AssertionError("the deadline did not come")
        return turn


def say(text: str, **more: object) -> Turn:
    return Turn(message=Message(role="assistant", content=text), usage=Usage(completion_tokens=10, calls=1), **more)


def call(*arguments: str, name: str = "count", **more: object) -> Turn:
    calls = [ToolCall(id="same", function=FunctionCall(name=name, arguments=text)) for text in arguments]
    message = Message(role="assistant", tool_calls=calls)
    return Turn(message=message, usage=Usage(completion_tokens=10, calls=1), **more)


async def run(*turns: Turn | Exception | float, executor: Echo | None = None, **budgets: object) -> Episode:
    return await solve(
        TASK, TOOLS, executor or Echo(), Scripted(*turns), budgets=Budgets(**budgets), system="Be brief."
    )


async def test_an_episode_is_system_question_calls_results_answer():
    episode = await run(call('{"a":1}'), say("1"))
    assert [m.role for m in episode.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert (episode.status, episode.failure, episode.final_text, episode.turn) == ("finished", None, "1", 2)
    assert episode.usage.completion_tokens == 20


async def test_a6_the_arguments_stay_the_text_that_the_model_wrote():
    raw = '{"b":1.0,"a":"\\u00e9"}'
    episode = await run(call(raw), say("1"))
    assert episode.messages[2].tool_calls[0].function.arguments == raw


async def test_b14_parallel_calls_keep_order_and_get_one_result_each_matched_by_id():
    episode = await run(call('{"a":1}', '{"a":2}', '{"a":3}'), call('{"a":4}'), say("4"))
    ids = [m.tool_call_id for m in episode.messages if m.role == "tool"]
    assert ids == ["call_1", "call_2", "call_3", "call_4"] == [c.id for c in episode.calls]
    assert [c.arguments["a"] for c in episode.calls] == [1, 2, 3, 4]
    assert [c.turn for c in episode.calls] == [0, 0, 0, 1]


async def test_b13_a_malformed_call_gets_an_error_message_and_a_record_and_the_loop_goes_on():
    episode = await run(call('{"a":1', '{"a":2}'), say("2"))
    assert [c.status for c in episode.calls] == ["error", "ok"]
    assert episode.calls[0].arguments is None
    assert episode.messages[3].content == "Error: malformed"
    assert episode.status == "finished"


async def test_b15_an_infra_error_of_a_tool_fails_the_episode_and_is_not_shown_to_the_model():
    infra = CallError.model_validate({"class": "infra", "kind": "unreachable"})
    policy = Scripted(call("{}"), say("never"))
    episode = await solve(TASK, TOOLS, Echo({"count": infra}), policy)
    assert (episode.status, episode.failure) == ("failed", "tool_unreachable")
    assert len(policy.seen) == 1


async def test_b15_an_injected_fault_is_a_message_to_the_model():
    infra = CallError.model_validate({"class": "infra", "kind": "unreachable"})
    episode = await run(call("{}"), say("gave up"), executor=Echo({"count": infra}, injected=True))
    assert episode.status == "finished"


async def test_b15_turns_are_bounded_and_the_end_is_truncated():
    episode = await run(*[call("{}")] * 3, max_turns=3)
    assert (episode.status, episode.failure, len(episode.calls)) == ("truncated", "turns", 3)
    assert episode.messages[-1].role == "tool"


async def test_the_call_budget_may_be_used_up_and_answered_but_not_exceeded():
    assert (await run(call("{}", "{}"), say("done"), max_calls=2)).status == "finished"
    episode = await run(call("{}", "{}", "{}"), say("done"), max_calls=2)
    assert (episode.status, episode.failure, len(episode.calls)) == ("truncated", "calls", 3)


async def test_the_token_budget_ends_the_episode_as_truncated():
    episode = await run(call("{}"), call("{}"), max_tokens=10)
    assert (episode.status, episode.failure) == ("truncated", "tokens")


async def test_e45_a_full_context_is_truncated_not_a_parse_error_and_not_a_failure():
    episode = await run(call("{}"), say("", finish="context"))
    assert (episode.status, episode.failure) == ("truncated", "context")
    assert episode.messages[-1].role == "tool"


async def test_a_turn_cut_by_length_is_truncated_whether_or_not_it_called():
    assert (await run(say("It is", finish="length"))).status == "truncated"
    episode = await run(call('{"a":1}', '{"a":', finish="length"))
    assert (episode.status, episode.failure) == ("truncated", "tokens")
    assert [c.status for c in episode.calls] == ["ok", "error"]


@pytest.mark.parametrize("kind", ["unreachable", "abort"])
async def test_e36_a_failure_of_the_model_server_fails_the_episode(kind):
    episode = await run(call("{}"), PolicyFailure(kind))
    assert (episode.status, episode.failure) == ("failed", f"model_{kind}")


async def test_f44_one_deadline_covers_a_hung_model_and_a_hung_tool():
    assert (await run(60.0, wall_s=0.05)).failure == "deadline"
    assert (await run(call("{}"), executor=Echo(hang=True), wall_s=0.05)).failure == "deadline"


async def test_without_an_executor_a_call_is_an_unknown_tool():
    episode = await solve(TASK, [], None, Scripted(call("{}"), say("none")))
    assert episode.calls[0].error.kind == "unknown_tool"


def test_the_graph_opens_alone_with_schemas_for_a_studio():
    assert set(graph.get_graph().nodes) >= {"start", "policy", "tools", "finish"}
    assert graph.get_input_jsonschema()
    assert graph.get_context_jsonschema()
