"""Was every call needed? The judge sees the whole conversation and says yes or no to each call by its id; a reply that does
not name exactly the calls that were made judges nothing."""

from __future__ import annotations

from pydantic import Field

from agents.base import Agent, Strict
from agents.judges.common import Item, Judge, JudgeRequest, conversation, has_calls, shown
from astrolabe.records.trajectory import Trajectory


class CallVerdict(Strict):
    id: str
    needed: bool
    reason: str = Field(min_length=1)


class CallsReply(Strict):
    calls: list[CallVerdict]


def _requests(trajectory: Trajectory) -> list[JudgeRequest]:
    return [JudgeRequest(**shown(trajectory, conversation(trajectory)))]


def _items(request: JudgeRequest, reply: CallsReply) -> list[Item] | None:
    made = [call.id for message in request.messages for call in message.tool_calls or []]
    if sorted(made) != sorted(call.id for call in reply.calls) or len(set(made)) < len(made):
        return None
    said = {call.id: call for call in reply.calls}
    return [Item(1.0 if said[id].needed else 0.0, f"{id}: {said[id].reason}") for id in made]


agent = Agent(
    "judge.tool_conciseness", request=JudgeRequest, reply=CallsReply, prompt="judge_tool_conciseness", temperature=0.0
)
JUDGE = Judge("tool_conciseness", agent, has_calls, _requests, _items)
graph = agent.graph
