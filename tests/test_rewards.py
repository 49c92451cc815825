"""The F1 reward from executor records, and the same reward again from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gate_cases import abstain, garden, museum, row, schema, sealed, shop

from astrolabe.envs.match import goal_holds, matched_nodes
from astrolabe.envs.rewards.f1 import score_f1
from astrolabe.envs.rewards.rescore import rescored_rows
from astrolabe.records.environment import Environment, Goal
from astrolabe.records.errors import UsageError
from astrolabe.records.messages import Message
from astrolabe.records.trajectory import CallRecord, Task, Trajectory


def call(tool: str, arguments: dict[str, Any] | None, value: Any = None, **more: Any) -> CallRecord:
    return CallRecord(
        id="c", turn=0, tool=tool, arguments=arguments, status=more.pop("status", "ok"), value=value, **more
    )


TICKET = call("find_ticket", {"visitor": "Ada Quist"}, "TK7730")
FEE = call("guide_fee", {"ticket": "TK7730", "hours": 4}, 172)
WRONG = call("guide_fee", {"ticket": "TK2214", "hours": 4}, 116)
MALFORMED = call("guide_fee", None, status="error")


def score(
    env: dict[str, Any],
    calls: list[CallRecord],
    changed: list[bool] | None = None,
    state: Any = None,
    text: str = "172",
) -> Any:
    return score_f1(Environment.from_json(env), calls, changed or [False] * len(calls), state, text)


def test_f1_is_twice_the_hits_over_targets_and_calls() -> None:
    assert score(museum(), [TICKET, FEE]).value == 1.0
    assert score(museum(), [FEE, TICKET]).value == 1.0
    assert score(museum(), [TICKET]).value == pytest.approx(2 / 3)
    assert score(museum(), [TICKET, FEE, WRONG]).value == pytest.approx(4 / 5)
    assert score(museum(), [TICKET, FEE, MALFORMED, call("nothing", {}, status="error")]).value == pytest.approx(4 / 6)
    assert score(museum(), []).value == 0.0
    assert [score(museum(), calls).reason for calls in ([TICKET, FEE], [TICKET], [WRONG])] == [
        "all_hit",
        "some_hit",
        "no_hit",
    ]


def test_a_repeated_or_cached_call_costs_and_hits_once() -> None:
    again = TICKET.model_copy(update={"cached": True})
    reward = score(museum(), [TICKET, again, FEE])
    assert reward.value == pytest.approx(4 / 5)
    assert (reward.calls, reward.targets, reward.hits) == (3, 2, ["n1", "n2"])


def test_an_injected_fault_costs_nothing_and_hits_nothing() -> None:
    faulty = call("find_ticket", {"visitor": "Ada Quist"}, status="error", injected=True)
    assert score(museum(), [faulty, TICKET, FEE]).value == 1.0
    assert score(museum(), [TICKET.model_copy(update={"injected": True})]).value == 0.0


def test_another_way_to_an_informative_value_hits_and_to_a_short_one_does_not() -> None:
    other = call("guide_fee", {"ticket": "TK7730", "hours": 4.0}, 172.0)
    assert score(museum(), [TICKET, other]).value == 1.0
    roundabout = call("stock", {"shop": "北门", "item": "稻"}, 240)
    short = call("stock", {"shop": "南门", "item": "稻"}, 36)
    assert score(shop(), [roundabout], text="204").hits == ["n1"]
    assert score(shop(), [short], text="204").hits == []


def test_a_value_is_compared_by_type() -> None:
    assert score(museum(), [TICKET, call("guide_fee", {"ticket": "TK7730", "hours": 4}, "172")]).hits == ["n1"]
    assert score(museum(), [TICKET, call("guide_fee", {"ticket": "TK7730", "hours": 4}, True)]).hits == ["n1"]


def test_the_matching_is_a_maximum_one_in_any_order_of_calls() -> None:
    """Two nodes of one tool and value: a call with the first's arguments hits either, one with others only by value."""
    env = row(
        question="q", scenario="parallel_single_hop", answer="1200",
        nodes=[{"id": i, "question": "", "answer": 1200, "parents": [], "tool": "f"} for i in ("a", "b")],
        tools=[{"name": "f", "description": "", "parameters": schema({"x": "integer"}), "code": "def f(x):\n    return 1200\n"}],
        goldens=[{"node": i, "tool": "f", "arguments": {"x": x}, "returns": 1200} for i, x in (("a", 1), ("b", 2))],
    )  # fmt: skip
    first, second = call("f", {"x": 1}, 1200), call("f", {"x": 9}, 1200)
    for calls in ([first, second], [second, first]):
        assert sorted(matched_nodes(Environment.from_json(env), calls, [False, False])) == ["a", "b"]
    assert len(matched_nodes(Environment.from_json(env), [first], [False])) == 1


WATER = call("water", {"bed": "roses", "litres": 35}, {"tank": 415, "bed": 45})
LEVEL = call("tank_level", {"unit": "litres"}, 415)
DONE = {"tank": 415, "beds": {"roses": 45, "leeks": 0}}


def test_stateful_is_zero_unless_the_goal_holds() -> None:
    assert score(garden(), [WATER, LEVEL], [True, False], DONE, "415").value == 1.0
    missed = score(garden(), [WATER, LEVEL], [True, False], {"tank": 450, "beds": {"roses": 10, "leeks": 0}}, "415")
    assert (missed.value, missed.reason) == (0.0, "goal_missed")


def test_a_call_that_changed_the_state_hits_by_its_arguments_alone() -> None:
    later = WATER.model_copy(update={"value": {"tank": 400, "bed": 60}})
    assert score(garden(), [later, LEVEL], [True, False], DONE, "415").value == 1.0
    other = call("water", {"bed": "leeks", "litres": 35}, {"tank": 415, "bed": 45})
    assert score(garden(), [other, LEVEL], [True, False], DONE, "415").hits == ["n2"]


def test_goals_by_path_must_and_must_not() -> None:
    goal = Goal.model_validate(
        {"must": [{"path": "$.a[*].n", "equals": 2}], "must_not": [{"path": "$..gone", "equals": True}]}
    )
    assert goal_holds(goal, {"a": [{"n": 1}, {"n": 2.0}]})
    assert not goal_holds(goal, {"a": [{"n": 1}]})
    assert not goal_holds(goal, {"a": [{"n": 2, "gone": True}]})
    assert goal_holds(None, {})


def test_where_no_call_is_due_silence_and_calls_both_score_zero() -> None:
    assert score(abstain(), [], text="No tool tells who painted it.").value == 1.0
    assert score(abstain(), [], text=" ").reason == "empty_turn"
    assert score(abstain(), [TICKET], text="I do not know.").reason == "needless_call"
    assert score(abstain(), [], text="I cannot know that.").reason == "abstained"
    assert score(abstain(), [], text="Which ceiling do you mean?").reason == "asked"
    assert score(abstain(), [], text="x").answer_correct is None


def test_the_answer_is_graded_beside_the_calls() -> None:
    assert score(museum(), [TICKET, FEE], text="Ada Quist pays 172.").answer_correct is True
    assert score(museum(), [TICKET, FEE], text="Ada Quist pays 127.").answer_correct is False


def rollout(env: dict[str, Any], calls: list[CallRecord], text: str) -> Trajectory:
    return Trajectory(
        schema="astrolabe.trajectory/1",
        task=Task(question=env["question"], environment=env["id"]).with_id(),
        messages=[Message(role="user", content=env["question"]), Message(role="assistant", content=text)],
        calls=calls,
    ).with_id()


def files(tmp_path: Path, envs: list[dict[str, Any]], rollouts: list[Trajectory]) -> tuple[Path, Path]:
    (tmp_path / "envs.jsonl").write_text("".join(json.dumps(env, ensure_ascii=False) + "\n" for env in envs))
    (tmp_path / "rollouts.jsonl").write_text("".join(r.to_line() + "\n" for r in rollouts))
    return tmp_path / "rollouts.jsonl", tmp_path / "envs.jsonl"


def test_rollouts_are_scored_again_from_their_records(tmp_path: Path) -> None:
    episodes = [
        rollout(museum(), [TICKET, FEE], "172"),
        rollout(museum(), [WRONG], "It is 116"),
        rollout(garden(), [WATER, LEVEL], "415"),
        rollout(garden(), [LEVEL], "450"),
    ]
    path, envs = files(tmp_path, [museum(), garden()], episodes)
    rows = list(rescored_rows(path, envs, "f1"))
    assert [r["id"] for r in rows] == [e.id for e in episodes]
    assert [r["reward"]["value"] for r in rows] == [1.0, 0.0, 1.0, 0.0]
    assert [r["reward"]["reason"] for r in rows] == ["all_hit", "no_hit", "all_hit", "goal_missed"]
    answers = list(rescored_rows(path, envs, "answer"))
    assert [r["reward"]["value"] for r in answers] == [1.0, 0.0, 1.0, 0.0]
    assert {r["reward"]["kind"] for r in answers} == {"answer"}


def test_a_rollout_of_an_unknown_environment_is_named(tmp_path: Path) -> None:
    path, envs = files(tmp_path, [garden()], [rollout(museum(), [], "x")])
    with pytest.raises(UsageError, match="line 1: environment env-"):
        list(rescored_rows(path, envs, "f1"))
    with pytest.raises(UsageError, match="scored against their environments"):
        list(rescored_rows(path, None, "f1"))


def test_sealed_rows_keep_their_id() -> None:
    assert Environment.from_json(sealed(museum())).content_id() == museum()["id"]
