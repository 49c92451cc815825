"""Does the last message answer the question, in its language, with what the results say and nothing else? The judge sees the
whole conversation, and grades what was asked for and what it rests on apart."""

from __future__ import annotations

from pydantic import Field

from agents.base import Agent, Strict
from agents.judges.common import GRADES, Grade, Item, Judge, JudgeRequest, conversation, shown
from astrolabe.records.trajectory import Trajectory


class AnswerReply(Strict):
    reason: str = Field(min_length=1)
    correlation: Grade
    """Whether it is an answer to this question, in its language."""
    support: Grade
    """Whether everything that it states stands in the question or the results."""


def _applies(trajectory: Trajectory) -> bool:
    return True


def _requests(trajectory: Trajectory) -> list[JudgeRequest]:
    messages = conversation(trajectory)
    if not messages or messages[-1].role != "assistant":
        return []
    return [JudgeRequest(**shown(trajectory, messages))]


def _items(_: JudgeRequest, reply: AnswerReply) -> list[Item]:
    return [
        Item(GRADES[reply.correlation], f"correlation: {reply.reason}"),
        Item(GRADES[reply.support], f"support: {reply.reason}"),
    ]


agent = Agent(
    "judge.final_answer", request=JudgeRequest, reply=AnswerReply, prompt="judge_final_answer", temperature=0.0
)
JUDGE = Judge("final_answer", agent, _applies, _requests, _items)
graph = agent.graph
