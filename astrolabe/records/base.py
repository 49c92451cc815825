"""What every record shares: strict fields, and JSON out as FORMATS wants it."""

from __future__ import annotations

import json
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """A stored thing: unknown fields are errors, and null is written, never left out."""

    model_config = ConfigDict(extra="forbid")

    def to_json(self) -> dict[str, Any]:
        """The row as plain JSON values, fields in their declared order."""
        return self.model_dump(mode="json", by_alias=True)

    def to_line(self) -> str:
        """The row as one line of JSONL, without the newline."""
        return json.dumps(self.to_json(), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, row: Any) -> Self:
        """Parse and validate; raises pydantic's ValidationError."""
        return cls.model_validate(row)


class Usage(Record):
    """Model calls and tokens, summed."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    calls: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            calls=self.calls + other.calls,
        )


class Provenance(Record):
    """Where a record comes from: enough to make it again."""

    source: str | None = None
    license: str | None = None
    seed: int | None = None
    version: str | None = None
    commit: str | None = None
    models: dict[str, str] = Field(default_factory=dict)
    """role -> model name; the offline teacher appears as `astrolabe-teacher`."""
    prompts: dict[str, str] = Field(default_factory=dict)
    """role -> hash of the prompt template that was used."""
    usage: Usage | None = None
