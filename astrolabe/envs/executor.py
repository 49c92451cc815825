"""The executor: every call that a model emits becomes one record and one text for the model, in the order of emission.

Parse, look up, validate by JSON Schema, draw a fault, and only then ask the back end. A call that fails on the way has
a record too, with the class of its failure: `policy` (the model wrote it wrong), `tool` (the tool refused), `timeout`,
`infra` (nothing to do with the model). A back end is Python code in the sandbox, a real MCP server, or the emulator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from referencing.exceptions import Unresolvable

from astrolabe.envs.arguments import MalformedArguments, argument_faults, parse_arguments, whole_numbers
from astrolabe.envs.faults import FaultPlan, call_error, fault_error
from astrolabe.records.messages import ToolCall, ToolSchema
from astrolabe.records.trajectory import CallError, CallRecord, ErrorClass, ErrorKind

BackendName = Literal["python", "mcp", "emulator"]
MAX_TEXT = 8000


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """What a back end says of one call."""

    status: Literal["ok", "error"]
    value: Any = None
    text: str | None = None
    """For the model; None: made from `value` or `error` by the rule of `observation`."""
    error: CallError | None = None
    wall_s: float = 0.0
    injected: bool = False
    changed_state: bool = False
    cached: bool = False


class Backend(Protocol):
    """What answers valid calls. One back end object belongs to one episode and holds its state."""

    name: BackendName

    async def call(self, tool: str, arguments: dict[str, Any], *, call_id: str) -> ToolResult: ...

    async def aclose(self) -> None: ...


def failed(error_class: ErrorClass, kind: ErrorKind, message: str, **more: Any) -> ToolResult:
    """A ToolResult of status error."""
    return ToolResult(status="error", error=call_error(error_class, kind, message), **more)


def observation(value: Any, error: CallError | None = None) -> str:
    """A result as text: a string as it is, anything else as JSON (`null`, `42`, `["x"]`), an error as a JSON object."""
    if error is not None:
        value = {"error": error.kind, "message": error.message}
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def cap_text(text: str, limit: int) -> str:
    """At most `limit` characters of text, and a mark that says what was cut."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[cut: the first {limit} of {len(text)} characters]"


class Executor:
    """Runs the calls of one episode."""

    def __init__(
        self,
        tools: Sequence[ToolSchema],
        backend: Backend,
        *,
        faults: FaultPlan | None = None,
        episode: str = "",
        max_calls: int | None = None,
        max_text: int = MAX_TEXT,
    ) -> None:
        self.tools = list(tools)
        self.backend = backend
        self.records: list[CallRecord] = []
        self.changed: list[bool] = []
        """Per record, whether the call changed the episode's state."""
        self.wall_s: list[float] = []
        """Per record, seconds in the back end; for timings.jsonl, never for a record."""
        self._schemas = {tool.function.name: tool.function.parameters for tool in self.tools}
        self._faults = faults
        self._episode = episode
        self._max_calls = max_calls
        self._max_text = max_text
        self._ids: set[str] = set()

    @property
    def infra_failure(self) -> CallError | None:
        """The first failure that was neither the model's nor injected: such an episode is failed, never scored 0."""
        for record in self.records:
            if record.error is not None and record.error.class_ == "infra" and not record.injected:
                return record.error
        return None

    async def execute(self, call_id: str, turn: int, name: str, arguments_text: str) -> tuple[CallRecord, str]:
        """One call: its record and the text for the model. ValueError if `call_id` was used before in this episode."""
        if call_id in self._ids:
            raise ValueError(f"call id {call_id!r} was used twice in one episode")
        self._ids.add(call_id)
        arguments, result = await self._result(call_id, name, arguments_text)
        record = CallRecord(
            id=call_id,
            turn=turn,
            tool=name,
            arguments=arguments,
            status=result.status,
            error=result.error,
            value=result.value,
            injected=result.injected,
            backend=self.backend.name,
            cached=result.cached,
        )
        self.records.append(record)
        self.changed.append(result.changed_state)
        self.wall_s.append(result.wall_s)
        text = result.text if result.text is not None else observation(result.value, result.error)
        return record, cap_text(text, self._max_text)

    async def execute_all(self, turn: int, calls: Sequence[ToolCall]) -> list[tuple[CallRecord, str]]:
        """The calls of one assistant turn, one result each, in call order (a later call sees what an earlier changed)."""
        return [await self.execute(call.id, turn, call.function.name, call.function.arguments) for call in calls]

    def refuse(self, call_id: str, turn: int, name: str, message: str) -> tuple[CallRecord, str]:
        """A record for a call whose text could not be parsed into a name and arguments at all."""
        if call_id in self._ids:
            raise ValueError(f"call id {call_id!r} was used twice in one episode")
        self._ids.add(call_id)
        error = call_error("policy", "malformed", message)
        record = CallRecord(
            id=call_id, turn=turn, tool=name, arguments=None, status="error", error=error, backend=self.backend.name
        )
        self.records.append(record)
        self.changed.append(False)
        self.wall_s.append(0.0)
        return record, cap_text(observation(None, error), self._max_text)

    async def _result(self, call_id: str, name: str, text: str) -> tuple[dict[str, Any] | None, ToolResult]:
        """(parsed arguments or None, result)."""
        index = len(self.records)
        try:
            arguments = parse_arguments(text)
        except MalformedArguments as error:
            return None, failed("policy", "malformed", str(error))
        if self._max_calls is not None and index >= self._max_calls:
            return arguments, failed("policy", "rate_limit", f"the budget of {self._max_calls} calls is used up")
        if name not in self._schemas:
            known = ", ".join(sorted(self._schemas))
            return arguments, failed("policy", "unknown_tool", f"there is no tool {name!r}; the tools are: {known}")
        schema = self._schemas[name]
        try:
            faults = argument_faults(schema, arguments)
        except (Unresolvable, re.error) as error:
            return arguments, failed("infra", "server_error", f"the tool's schema cannot be resolved: {error}")
        except OverflowError as error:  # a number too large for `multipleOf`
            return arguments, failed("policy", "bad_arguments", str(error))
        if faults:
            return arguments, failed("policy", "bad_arguments", "; ".join(faults)[:1000])
        fault = self._faults.draw(self._episode, index) if self._faults else None
        if fault is not None:
            return arguments, ToolResult(status="error", error=fault_error(fault), injected=True)
        return arguments, await self.backend.call(name, whole_numbers(schema, arguments), call_id=call_id)

    async def aclose(self) -> None:
        await self.backend.aclose()
