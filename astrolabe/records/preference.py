"""A preference pair: two traces of one policy from one prompt, which share their first `fork` tokens exactly."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from astrolabe.records.base import Record
from astrolabe.records.ids import content_hash
from astrolabe.records.messages import Message, ToolSchema


class PreferenceSide(Record):
    messages: list[Message]
    trace: dict[str, Any]
    reward: float


class Preference(Record):
    schema_: Literal["astrolabe.preference/1"] = Field(default="astrolabe.preference/1", alias="schema")
    id: str = ""
    group: str | None = None
    prompt: list[Message]
    tools: list[ToolSchema] = Field(default_factory=list)
    chosen: PreferenceSide
    rejected: PreferenceSide
    fork: int = 0

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    def with_id(self) -> Preference:
        """`pf-` + hash of prompt, tools and both sides' messages."""
        row = self.to_json()
        body = [row["prompt"], row["tools"], row["chosen"]["messages"], row["rejected"]["messages"]]
        return self.model_copy(update={"id": "pf-" + content_hash(body)})
