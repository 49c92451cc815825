"""`astrolabe reward`: rewards again from what is stored, without a model.

Rollouts are scored from their executor records. In stateful mode the calls that worked are played once more, in order,
on a fresh copy of the state: that says which of them changed it, and how it ended. Ladder rows are scored from their
text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from astrolabe.envs.arguments import whole_numbers
from astrolabe.envs.rewards.answers import ANSWER_TYPES, verify_answer
from astrolabe.envs.rewards.f1 import score_f1
from astrolabe.envs.rewards.ladder import Span, score_ladder
from astrolabe.envs.sandbox import Sandbox
from astrolabe.records.environment import Environment, read_environments
from astrolabe.records.equality import equal
from astrolabe.records.errors import UsageError
from astrolabe.records.jsonl import read_records, read_rows
from astrolabe.records.messages import Message
from astrolabe.records.trajectory import CallRecord, Reward, Trajectory

KINDS = ("f1", "answer", "ladder")


def rescore_file(path: Path, envs: Path | None, kind: str = "f1") -> int:
    """Print one JSON row per input row, in input order; returns exit code 0. UsageError names the row that is wrong."""
    for row in rescored_rows(path, envs, kind):
        print(json.dumps(row, ensure_ascii=False))
    return 0


def rescored_rows(path: Path, envs: Path | None, kind: str = "f1") -> Iterator[dict[str, Any]]:
    """Rows of `rescore_file`: `{"id", "environment", "reward"}` for rollouts, the ladder's own form for texts."""
    if kind not in KINDS:
        raise UsageError(f"--kind {kind}: unknown reward", f"one of {', '.join(KINDS)}")
    if kind == "ladder":
        yield from _ladder_rows(path)
        return
    if envs is None:
        raise UsageError("rollouts are scored against their environments", "give --envs FILE")
    environments = {environment.id: environment for environment in read_environments(envs)}
    with ExitStack() as stack:
        sandbox: Sandbox | None = None
        for number, trajectory in read_records(path, Trajectory, "give rows of rollouts.jsonl"):
            environment = environments.get(trajectory.task.environment or "")
            if environment is None:
                raise UsageError(
                    f"{path}, line {number}: environment {trajectory.task.environment} is not in {envs}",
                    "give --envs the file that the rollouts were made with",
                )
            if sandbox is None and environment.mode == "stateful":
                sandbox = stack.enter_context(Sandbox(workers=1))
            reward = rescore(environment, trajectory.calls, final_text(trajectory.messages), kind, sandbox)
            yield {"id": trajectory.id, "environment": environment.id, "reward": reward.to_json()}


def rescore(environment: Environment, calls: list[CallRecord], text: str, kind: str, sandbox: Sandbox | None) -> Reward:
    """The reward of one stored episode. `kind` answer: 1 or 0 (a span's token F1) by the typed verifier alone."""
    changed, state = replay_state(environment, calls, sandbox)
    reward = score_f1(environment, calls, changed, state, text)
    if kind == "f1":
        return reward
    verdict = verify_answer(text, environment.answer, environment.answer_type)
    value = 0.0 if verdict.score is None else verdict.score
    return reward.model_copy(update={"kind": "answer", "value": value, "reason": verdict.reason})


def final_text(messages: list[Message]) -> str:
    """The last assistant turn's text; empty if the episode ended on a call."""
    last = next((message for message in reversed(messages) if message.role == "assistant"), None)
    return last.content if last is not None and not last.tool_calls else ""


def replay_state(environment: Environment, calls: list[CallRecord], sandbox: Sandbox | None) -> tuple[list[bool], Any]:
    """(which calls changed the state, state at the end). Stateless: none, and null. Calls that failed, that a fault was
    injected into, or that a cache answered changed nothing."""
    if environment.mode == "stateless":
        return [False] * len(calls), None
    assert sandbox is not None
    tools = {tool.name: tool for tool in (*environment.tools, *environment.distractors)}
    state: Any = environment.state
    changed = []
    for call in calls:
        wrote = False
        if (
            call.status == "ok"
            and not call.injected
            and not call.cached
            and call.tool in tools
            and call.arguments is not None
        ):
            tool = tools[call.tool]
            arguments = whole_numbers(tool.parameters, call.arguments)
            execution = sandbox.run(tool.code, tool.name, arguments, data=environment.data, state=state)
            wrote = execution.status == "ok" and not equal(execution.state, state)
            if wrote:
                state = execution.state
        changed.append(wrote)
    return changed, state


def _ladder_rows(path: Path) -> Iterator[dict[str, Any]]:
    for number, row in read_rows(path):
        where = f"{path}, line {number}"
        if not isinstance(row, dict) or not isinstance(row.get("response"), str):
            raise UsageError(f"{where}: no `response`", 'rows are {"response", "gold": [...], "answer_type", "spans"}')
        gold = [row["gold"]] if isinstance(row.get("gold"), str) else row.get("gold")
        if not isinstance(gold, list) or not gold or not all(isinstance(alias, str) for alias in gold):
            raise UsageError(f"{where}: `gold` is no list of texts", "give the answer and its aliases")
        if row.get("answer_type") not in ANSWER_TYPES:
            raise UsageError(
                f"{where}: unknown answer type {row.get('answer_type')!r}", "one of " + ", ".join(ANSWER_TYPES)
            )
        yield score_ladder(row["response"], gold, row["answer_type"], _spans(row.get("spans"), where)).to_json()


def _spans(raw: Any, where: str) -> list[Span] | None:
    """Character ranges that the tool wrote: `[start, end]`, or `{"start", "end", "author"}` of which the tool's count."""
    if raw is None:
        return None
    out: list[Span] = []
    for item in raw if isinstance(raw, list) else [raw]:
        if isinstance(item, dict) and {"start", "end"} <= item.keys():
            if item.get("author", "tool") == "tool":
                out.append((int(item["start"]), int(item["end"])))
        elif isinstance(item, list) and len(item) >= 2 and all(isinstance(i, int) for i in item[:2]):
            if len(item) == 2 or item[2] == "tool":
                out.append((item[0], item[1]))
        else:
            raise UsageError(
                f"{where}: `spans` holds {item!r}", "give [start, end] ranges that the tool wrote, or null"
            )
    return sorted(out)
