"""The verifier: five judgements on a decomposition, each an agent of its own, and one on questions without an answer.

A judgement lists every node once; `failing` turns a reply into the nodes that it rejects, or None if the reply does not
cover the nodes, which counts as unjudged. Nothing defaults to a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from agents.base import Agent, Strict
from agents.decomposer import NodeDraft
from astrolabe.records.messages import FunctionSchema


class TraceRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    language: Literal["en", "zh"]
    text: str
    question: str
    nodes: list[NodeDraft]


class AnswerableRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    language: Literal["en", "zh"]
    question: str
    tools: list[FunctionSchema]


class AnswerableReply(Strict):
    answerable: bool
    reason: str


class NecessityItem(Strict):
    id: str
    tool_necessary: bool
    reason: str


class NecessityReply(Strict):
    items: list[NecessityItem]


class DependencyItem(Strict):
    id: str
    verdict: Literal["sufficient", "insufficient", "useless_parent"]
    reason: str


class DependencyReply(Strict):
    items: list[DependencyItem]


class AtomicityItem(Strict):
    id: str
    is_atomic: bool
    reason: str


class AtomicityReply(Strict):
    items: list[AtomicityItem]


class SerialisationItem(Strict):
    id: str
    forced: bool
    """The step is made to wait for another without needing what that one finds."""
    reason: str


class SerialisationReply(Strict):
    items: list[SerialisationItem]


class CompletenessReply(Strict):
    complete: bool
    missing: list[str]
    reason: str


necessity = Agent("verifier.necessity", request=TraceRequest, reply=NecessityReply, prompt="verifier_necessity", temperature=0.0)  # fmt: skip
dependency = Agent("verifier.dependency", request=TraceRequest, reply=DependencyReply, prompt="verifier_dependency", temperature=0.0)  # fmt: skip
atomicity = Agent("verifier.atomicity", request=TraceRequest, reply=AtomicityReply, prompt="verifier_atomicity", temperature=0.0)  # fmt: skip
serialisation = Agent("verifier.serialisation", request=TraceRequest, reply=SerialisationReply, prompt="verifier_serialisation", temperature=0.0)  # fmt: skip
completeness = Agent("verifier.completeness", request=TraceRequest, reply=CompletenessReply, prompt="verifier_completeness", temperature=0.0)  # fmt: skip

answerable = Agent("verifier.answerable", request=AnswerableRequest, reply=AnswerableReply, prompt="verifier_answerable", temperature=0.0)  # fmt: skip
"""Asked of questions that must not be answerable, with all the tools of the finished environment."""


@dataclass(frozen=True)
class Judge:
    """A judgement with the reading of its reply."""

    name: str
    agent: Agent[Any, Any]
    faults: Callable[[Any, dict[str, NodeDraft]], list[str]]
    """Reply and nodes by id -> what is wrong, one line each."""
    per_node: bool = True

    def failing(self, reply: Any, nodes: Sequence[NodeDraft]) -> list[str] | None:
        """The faults that the reply names; None if it does not judge every node exactly once."""
        by_id = {node.id: node for node in nodes}
        if self.per_node and sorted(item.id for item in reply.items) != sorted(by_id):
            return None
        return self.faults(reply, by_id)


JUDGES = (
    Judge(
        "necessity",
        necessity,
        lambda reply, nodes: [f"{i.id}: {i.reason}" for i in reply.items if i.tool_necessary != nodes[i.id].needs_tool],
    ),
    Judge(
        "dependency",
        dependency,
        lambda reply, nodes: [f"{i.id}: {i.verdict}: {i.reason}" for i in reply.items if i.verdict != "sufficient"],
    ),
    Judge(
        "atomicity",
        atomicity,
        lambda reply, nodes: [f"{i.id}: {i.reason}" for i in reply.items if not i.is_atomic],
    ),
    Judge(
        "serialisation",
        serialisation,
        lambda reply, nodes: [f"{i.id}: {i.reason}" for i in reply.items if i.forced],
    ),
    Judge(
        "completeness",
        completeness,
        lambda reply, nodes: [] if reply.complete and not reply.missing else [reply.reason or "incomplete"],
        per_node=False,
    ),
)

AGENTS = (*(judge.agent for judge in JUDGES), answerable)
graph = dependency.graph
