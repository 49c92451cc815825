"""Chat messages and tool schemas in OpenAI's form.

Inside `messages` an absent field is left out (FORMATS); `content` is never null; `arguments` is the text that the
model wrote, byte for byte.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_serializer

from astrolabe.records.base import Record


class FunctionCall(Record):
    name: str
    arguments: str = "{}"


class ToolCall(Record):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Record):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_serializer(mode="plain")
    def _leave_out_absent(self) -> dict[str, Any]:
        out: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning_content is not None:
            out["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            out["tool_calls"] = [call.model_dump(mode="json") for call in self.tool_calls]
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            out["name"] = self.name
        return out


class FunctionSchema(Record):
    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})


class ToolSchema(Record):
    type: Literal["function"] = "function"
    function: FunctionSchema
