"""Did the first turn take the question for what it is: act where it can be acted on, ask where something is missing, say so
where no tool fits? The judge sees the question and the first turn, nothing later."""

from __future__ import annotations

from agents.base import Agent
from agents.judges.common import Item, Judge, JudgeRequest, YesNoReply, conversation, first_turn, shown
from astrolabe.records.trajectory import Trajectory


def _applies(trajectory: Trajectory) -> bool:
    return True


def _requests(trajectory: Trajectory) -> list[JudgeRequest]:
    messages = conversation(trajectory)
    first = first_turn(messages)
    return [] if first is None else [JudgeRequest(**shown(trajectory, messages[: first + 1]))]


def _items(_: JudgeRequest, reply: YesNoReply) -> list[Item]:
    return [Item(1.0 if reply.good else 0.0, reply.reason)]


agent = Agent(
    "judge.query_understanding",
    request=JudgeRequest,
    reply=YesNoReply,
    prompt="judge_query_understanding",
    temperature=0.0,
)
JUDGE = Judge("query_understanding", agent, _applies, _requests, _items)
graph = agent.graph
