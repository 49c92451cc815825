"""The executable environment: a question compiled into tools, goldens and distractors, with the certificate of its gates."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_serializer

from astrolabe.records.base import Record
from astrolabe.records.errors import UsageError
from astrolabe.records.ids import content_hash
from astrolabe.records.jsonl import read_records
from astrolabe.records.messages import FunctionSchema, ToolSchema

Scenario = Literal[
    "single_hop", "multi_hop", "parallel_single_hop", "parallel_multi_hop", "no_tool", "missing_parameter"
]
AnswerType = Literal[
    "number",
    "expression",
    "set",
    "tuple",
    "interval",
    "inequality",
    "choice",
    "span",
    "date",
    "boolean",
    "list",
    "none",
]


class Node(Record):
    id: str
    question: str
    answer: Any
    parents: list[str] = Field(default_factory=list)
    tool: str | None = None
    path: str | None = None
    """JSONPath into the golden's returns; absent from the row (not null) when there is none."""

    @model_serializer(mode="plain")
    def _leave_out_path(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "id": self.id,
            "question": self.question,
            "answer": self.answer,
            "parents": list(self.parents),
            "tool": self.tool,
        }
        if self.path is not None:
            out["path"] = self.path
        return out


class EnvTool(Record):
    name: str
    description: str
    parameters: dict[str, Any]
    code: str

    def schema_for_policy(self) -> ToolSchema:
        """What the policy sees: never the code."""
        return ToolSchema(
            function=FunctionSchema(name=self.name, description=self.description, parameters=self.parameters)
        )


class Distractor(EnvTool):
    band: Literal["high", "medium", "low"]
    similarity: float


class Golden(Record):
    node: str
    tool: str
    arguments: dict[str, Any]
    returns: Any


class PathCheck(Record):
    path: str
    equals: Any


class Goal(Record):
    """`{"state": object}`, or checks by RFC 9535 JSONPath."""

    state: dict[str, Any] | None = None
    must: list[PathCheck] | None = None
    must_not: list[PathCheck] | None = None

    @model_serializer(mode="plain")
    def _leave_out_absent(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if self.state is not None:
            out["state"] = self.state
        if self.must is not None:
            out["must"] = [c.model_dump(mode="json") for c in self.must]
        if self.must_not is not None:
            out["must_not"] = [c.model_dump(mode="json") for c in self.must_not]
        return out


class Floor(Record):
    noop: float
    echo: float
    random: float
    greedy: float


class Certificate(Record):
    replays: int
    hash_seeds: list[int]
    transcript_sha256: str
    probes: int
    live_arguments: int
    leaks: int
    floor: Floor
    ceiling: float
    support: dict[str, int]
    checked_with: str


class Environment(Record):
    schema_: Literal["astrolabe.environment/1"] = Field(default="astrolabe.environment/1", alias="schema")
    id: str = ""
    language: Literal["en", "zh"]
    domain: str
    question: str
    answer: str
    scenario: Scenario
    expect: Literal["answer", "abstain", "ask"]
    answer_type: AnswerType
    nodes: list[Node]
    tools: list[EnvTool]
    goldens: list[Golden]
    distractors: list[Distractor] = Field(default_factory=list)
    data: dict[str, Any] | None = None
    mode: Literal["stateless", "stateful"] = "stateless"
    state: dict[str, Any] | None = None
    goal: Goal | None = None
    certificate: Certificate | None = None
    provenance: dict[str, Any] = Field(default_factory=dict)

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    def content_id(self) -> str:
        """`env-` + hash of the row without id, certificate and provenance (FORMATS)."""
        return environment_id(self.to_json())

    def with_id(self) -> Environment:
        return self.model_copy(update={"id": self.content_id()})

    def policy_tools(self) -> list[ToolSchema]:
        """Schemas of the true tools and the distractors, in one order that says nothing of which is which (by name)."""
        return [t.schema_for_policy() for t in sorted([*self.tools, *self.distractors], key=lambda t: t.name)]


def environment_id(row: dict[str, Any]) -> str:
    """The id of a raw environment row."""
    body = {k: v for k, v in row.items() if k not in ("id", "certificate", "provenance")}
    return "env-" + content_hash(body)


def read_environments(path: Path, limit: int | None = None) -> list[Environment]:
    """The environments of a file, in order; a row without an id gets its own. UsageError names the line that is none, or
    a repeated id, or the file that holds none."""
    out: dict[str, Environment] = {}
    for number, row in read_records(path, Environment, "see `astrolabe env check`"):
        environment = row if row.id else row.with_id()
        if environment.id in out:
            raise UsageError(f"{path}, line {number}: {environment.id} is there twice", "remove the second one")
        out[environment.id] = environment
        if limit is not None and len(out) >= limit:
            break
    if not out:
        raise UsageError(f"{path}: no environments", "give a file with at least one row")
    return list(out.values())
