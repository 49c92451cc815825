"""Was each batch of results read for what it says? The judge sees the conversation up to the results and the one assistant
message that follows them."""

from __future__ import annotations

from agents.base import Agent
from agents.judges.common import GradeReply, Judge, JudgeRequest, conversation, graded, has_calls, shown
from astrolabe.records.trajectory import Trajectory


def _requests(trajectory: Trajectory) -> list[JudgeRequest]:
    messages = conversation(trajectory)
    return [
        JudgeRequest(**shown(trajectory, messages[: i + 1]))
        for i, message in enumerate(messages)
        if message.role == "assistant" and i and messages[i - 1].role == "tool"
    ]


agent = Agent(
    "judge.tool_understanding",
    request=JudgeRequest,
    reply=GradeReply,
    prompt="judge_tool_understanding",
    temperature=0.0,
)
JUDGE = Judge("tool_understanding", agent, has_calls, _requests, graded)
graph = agent.graph
