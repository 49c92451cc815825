"""The trajectory: one episode of an agent, as messages, as executor records, and (for the policy) as token ranges."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from astrolabe.records.base import Provenance, Record
from astrolabe.records.ids import content_hash
from astrolabe.records.messages import Message, ToolSchema

TaskKind = Literal["answer", "abstain", "ask"]
Augmentation = Literal["none", "diverse", "complex", "persona"]
JUDGES = (
    "query_understanding",
    "query_planning",
    "tool_understanding",
    "tool_planning",
    "tool_success",
    "tool_conciseness",
    "final_answer",
)


class Task(Record):
    id: str = ""
    question: str
    server: str | None = None
    environment: str | None = None
    chain: list[str] | None = None
    kind: TaskKind = "answer"
    augmentation: Augmentation = "none"

    def with_id(self) -> Task:
        """The task under its content id, `tk-` + hash of all other fields."""
        body = self.to_json()
        del body["id"]
        return self.model_copy(update={"id": "tk-" + content_hash(body)})


ErrorClass = Literal["tool", "infra", "timeout", "policy"]
ErrorKind = Literal[
    "unknown_tool", "bad_arguments", "malformed", "tool_error", "timeout", "unreachable", "rate_limit", "server_error"
]


class CallError(Record):
    class_: ErrorClass = Field(alias="class")
    kind: ErrorKind
    message: str = ""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class CallRecord(Record):
    """What the executor did for one call that a model emitted, also when it could not be parsed."""

    id: str
    turn: int
    """0 for the first assistant turn."""
    tool: str
    arguments: dict[str, Any] | None
    """Parsed arguments; null if malformed."""
    status: Literal["ok", "error"]
    error: CallError | None = None
    value: Any = None
    injected: bool = False
    backend: Literal["python", "mcp", "emulator"] = "python"
    cached: bool = False


class Verdict(Record):
    judge: str
    verdict: Literal["pass", "fail", "unjudged", "not_applicable"]
    score: float | None = None
    reason: str = ""
    model: str = ""
    attempts: int = 1


class Reward(Record):
    value: float
    kind: Literal["f1", "ladder", "answer"] = "f1"
    reason: str = ""
    hits: list[str] = Field(default_factory=list)
    calls: int = 0
    """c: calls that count (injected ones left out)."""
    targets: int = 0
    """n: nodes with a tool."""
    answer_correct: bool | None = None


class Segment(Record):
    """Token range [start, end) within the trace, by one author."""

    start: int
    end: int
    author: Literal["prompt", "policy", "tool", "template"]
    turn: int


class Trace(Record):
    """A range of the run's token store: arrays tokens int32, mask int8, logprobs float32 (NaN where mask is 0), versions int32."""

    store: str = "tokens"
    start: int
    length: int
    parent: int | None = None
    fork: int | None = None
    segments: list[Segment] = Field(default_factory=list)


class Trajectory(Record):
    schema_: Literal["astrolabe.trajectory/1"] = Field(default="astrolabe.trajectory/1", alias="schema")
    id: str = ""
    task: Task
    language: Literal["en", "zh"] = "en"
    tools: list[ToolSchema] = Field(default_factory=list)
    messages: list[Message] = Field(default_factory=list)
    calls: list[CallRecord] = Field(default_factory=list)
    status: Literal["finished", "truncated", "failed"] = "finished"
    failure: str | None = None
    verdicts: list[Verdict] = Field(default_factory=list)
    score: float | None = None
    group: str | None = None
    reward: Reward | None = None
    traces: list[Trace] = Field(default_factory=list)
    provenance: Provenance = Field(default_factory=Provenance)

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    def content_id(self) -> str:
        """`tr-` + hash of task, tools and messages (FORMATS)."""
        row = self.to_json()
        return "tr-" + content_hash({k: row[k] for k in ("task", "tools", "messages")})

    def with_id(self) -> Trajectory:
        return self.model_copy(update={"id": self.content_id()})
