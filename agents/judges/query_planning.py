"""Is the plan of the first turn (what it says, and the calls that it makes) one that can answer the question with these tools?
The judge sees nothing later: a plan is not better for having worked."""

from __future__ import annotations

from agents.base import Agent
from agents.judges.common import GradeReply, Judge, JudgeRequest, conversation, first_turn, graded, shown
from astrolabe.records.trajectory import Trajectory


def _applies(trajectory: Trajectory) -> bool:
    """A question that calls for no tool needs no plan."""
    return trajectory.task.kind == "answer"


def _requests(trajectory: Trajectory) -> list[JudgeRequest]:
    messages = conversation(trajectory)
    first = first_turn(messages)
    return [] if first is None else [JudgeRequest(**shown(trajectory, messages[: first + 1]))]


agent = Agent(
    "judge.query_planning", request=JudgeRequest, reply=GradeReply, prompt="judge_query_planning", temperature=0.0
)
JUDGE = Judge("query_planning", agent, _applies, _requests, graded)
graph = agent.graph
