"""The decomposer: knowledge into a question with its dependency graph, and each node of the graph into a tool.

Five jobs and one helper: `decompose`, then per node `tool_document`, `scale_complexity`, `call_arguments`, `tool_code`,
and `neighbour_tools` for the pool that distractors are drawn from. A failed gate is fed back in `failures`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agents.base import Agent, Strict
from astrolabe.records.environment import AnswerType

Kind = Literal["answer", "no_tool", "missing_parameter", "stateful"]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")
    language: Literal["en", "zh"]


class NodeDraft(Strict):
    """One sub-question. `answer` is the value that its tool must return."""

    id: str = Field(min_length=1)
    question: str = Field(min_length=1)
    answer: Any
    parents: list[str]
    needs_tool: bool


class Answered(BaseModel):
    """A parent's question with its answer, as a child sees it."""

    question: str
    answer: Any


class NodeView(BaseModel):
    """What the tool jobs see of a node."""

    question: str
    answer: Any
    parents: list[Answered] = Field(default_factory=list)


class ToolDoc(Strict):
    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")
    description: str = Field(min_length=4)
    parameters: dict[str, Any]


class WrittenTool(ToolDoc):
    code: str = Field(min_length=1)
    data: dict[str, Any] | None


class DecomposeRequest(_Request):
    domain: str
    text: str
    kind: Kind = "answer"
    min_hops: int = 1
    max_hops: int = 5
    variation: int = 0
    """Which of several samples of one text this is: another number, another question."""


class DecomposeReply(Strict):
    question: str = Field(min_length=1)
    answer: str
    answer_type: AnswerType
    nodes: list[NodeDraft] = Field(min_length=1)
    """Of a question that cannot be answered: what the tools at hand do answer."""
    state: dict[str, Any] | None
    goal: dict[str, Any] | None


class DocumentRequest(_Request):
    domain: str
    text: str
    node: NodeView
    state: dict[str, Any] | None = None
    failures: list[str] = Field(default_factory=list)


class ScaleRequest(_Request):
    text: str
    node: NodeView
    tool: ToolDoc


class ScaleReply(Strict):
    tool: ToolDoc
    added: list[str]
    """Names of the parameters that were added; all of them optional."""


class CallRequest(_Request):
    node: NodeView
    tool: ToolDoc


class CallReply(Strict):
    arguments: dict[str, Any] | None
    """Null if the question and the parents' answers do not give what the tool needs."""


class CodeRequest(_Request):
    domain: str
    text: str
    node: NodeView
    tool: ToolDoc
    arguments: dict[str, Any]
    state: dict[str, Any] | None = None
    failures: list[str] = Field(default_factory=list)


class CodeReply(Strict):
    code: str = Field(min_length=1)
    data: dict[str, Any] | None
    """The tables of facts that the code reads, merged into the environment's `data`."""


class NeighbourRequest(_Request):
    question: str
    """None of the new tools may help to answer it."""
    text: str
    other_texts: list[str]
    tools: list[ToolDoc]
    count: int = 6


class NeighbourReply(Strict):
    tools: list[WrittenTool]


decompose = Agent("decomposer.decompose", request=DecomposeRequest, reply=DecomposeReply, prompt="decomposer_decompose")
tool_document = Agent(
    "decomposer.tool_document", request=DocumentRequest, reply=ToolDoc, prompt="decomposer_tool_document"
)
scale_complexity = Agent(
    "decomposer.scale_complexity", request=ScaleRequest, reply=ScaleReply, prompt="decomposer_scale_complexity"
)
call_arguments = Agent(
    "decomposer.call_arguments", request=CallRequest, reply=CallReply, prompt="decomposer_call_arguments"
)
tool_code = Agent("decomposer.tool_code", request=CodeRequest, reply=CodeReply, prompt="decomposer_tool_code")
neighbour_tools = Agent(
    "decomposer.neighbour_tools", request=NeighbourRequest, reply=NeighbourReply, prompt="decomposer_neighbour_tools"
)

AGENTS = (decompose, tool_document, scale_complexity, call_arguments, tool_code, neighbour_tools)
graph = decompose.graph
