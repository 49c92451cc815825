"""Is each turn's choice of calls the right next step, with arguments that the user stated or an earlier result gave? One
request per assistant message with calls; the judge sees the conversation up to that message and nothing after it."""

from __future__ import annotations

from agents.base import Agent
from agents.judges.common import GradeReply, Judge, JudgeRequest, conversation, graded, has_calls, shown
from astrolabe.records.trajectory import Trajectory


def _requests(trajectory: Trajectory) -> list[JudgeRequest]:
    messages = conversation(trajectory)
    return [
        JudgeRequest(**shown(trajectory, messages[: i + 1])) for i, message in enumerate(messages) if message.tool_calls
    ]


agent = Agent(
    "judge.tool_planning", request=JudgeRequest, reply=GradeReply, prompt="judge_tool_planning", temperature=0.0
)
JUDGE = Judge("tool_planning", agent, has_calls, _requests, graded)
graph = agent.graph
