"""What the seven judgements share: what a judge is, what it is shown, and how answers become a verdict.

A judgement is made of items (an assistant message, a batch of results, a call, or the whole), each with a score in
[0, 1]. The verdict's score is their mean; it passes if no item is below the judgement's floor. Anything that is missing,
or not as asked for, leaves the judgement unjudged: no default, no benefit of the doubt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from agents.base import Agent, Strict
from astrolabe.records.messages import FunctionSchema, Message
from astrolabe.records.trajectory import Trajectory

Grade = Literal["good", "partial", "bad"]
GRADES: dict[str, float] = {"good": 1.0, "partial": 0.5, "bad": 0.0}


class JudgeRequest(BaseModel):
    """What every judge is shown. The trajectory's text goes in as data, in the JSON block only."""

    model_config = ConfigDict(extra="forbid")
    language: Literal["en", "zh"] = "en"
    question: str
    tools: list[FunctionSchema]
    messages: list[Message]
    """The part of the conversation that this judge may see, without the system message."""


class GradeReply(Strict):
    reason: str = Field(min_length=1)
    grade: Grade


class YesNoReply(Strict):
    reason: str = Field(min_length=1)
    good: bool


Req = TypeVar("Req", bound=JudgeRequest)
Rep = TypeVar("Rep", bound=BaseModel)


@dataclass(frozen=True)
class Item:
    """One scored thing and what was said of it."""

    score: float
    reason: str


@dataclass(frozen=True)
class Judge(Generic[Req, Rep]):
    """One judgement by a model."""

    name: str
    agent: Agent[Req, Rep]
    applies: Callable[[Trajectory], bool]
    requests: Callable[[Trajectory], list[Req]]
    """One request per model call, in the conversation's order."""
    items: Callable[[Req, Rep], list[Item] | None]
    """The items of one reply; None where it does not match its request (the judgement is then unjudged)."""


def graded(_: Any, reply: GradeReply) -> list[Item]:
    return [Item(GRADES[reply.grade], reply.reason)]


def conversation(trajectory: Trajectory) -> list[Message]:
    """The messages without the system's."""
    return [message for message in trajectory.messages if message.role != "system"]


def first_turn(messages: Sequence[Message]) -> int | None:
    """Index of the first assistant message."""
    return next((i for i, message in enumerate(messages) if message.role == "assistant"), None)


def shown(trajectory: Trajectory, messages: Sequence[Message]) -> dict[str, Any]:
    """The common fields of a request that shows these messages."""
    return {
        "language": trajectory.language,
        "question": trajectory.task.question,
        "tools": [tool.function for tool in trajectory.tools],
        "messages": list(messages),
    }


def has_calls(trajectory: Trajectory) -> bool:
    return any(message.tool_calls for message in trajectory.messages)
