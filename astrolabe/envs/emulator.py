"""The emulator as a back end: a model plays the server, with an explicit state and the whole history of the episode.

What plays it is given as a function, so that this file knows no agent. The back end checks arguments before it asks,
checks the answer's value against the tool's output schema where it has one, and carries the state from call to call. An
answer that does not come, or does not fit, is an infra failure: the policy could not have caused it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from astrolabe.envs.arguments import argument_faults, validator
from astrolabe.envs.executor import BackendName, ToolResult, failed
from astrolabe.records.base import Usage
from astrolabe.records.equality import equal
from astrolabe.records.messages import FunctionSchema

MAX_STATE = 65_536
_ATTEMPTS = 2


@dataclass(frozen=True, kw_only=True)
class EmulatorAnswer:
    """What the emulator says of one call; `status` None: it gave no valid answer, and `error` says why."""

    status: Literal["ok", "error"] | None
    value: Any = None
    error: str | None = None
    state: dict[str, Any] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    model: str = ""


@dataclass(frozen=True, kw_only=True)
class EmulatorCall:
    """What the emulator is asked."""

    tool: FunctionSchema
    arguments: dict[str, Any]
    state: dict[str, Any]
    history: list[dict[str, Any]]
    """`{"tool", "arguments", "status", "value" | "error"}` of every call so far."""
    index: int
    attempt: int


class EmulatorBackend:
    """One episode with an emulated server. `usage` and `model` say what the emulation cost and who played it."""

    name: BackendName = "emulator"

    def __init__(
        self,
        tools: Sequence[FunctionSchema],
        ask: Callable[[EmulatorCall], Awaitable[EmulatorAnswer]],
        *,
        outputs: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """`outputs`: tool -> JSON Schema of its value, for the tools that state one."""
        self.state: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.usage = Usage()
        self.model = ""
        self._tools = {tool.name: tool for tool in tools}
        self._ask = ask
        self._outputs = dict(outputs or {})

    async def call(self, tool: str, arguments: dict[str, Any], *, call_id: str) -> ToolResult:
        faults = argument_faults(self._tools[tool].parameters, arguments)
        if faults:
            return failed("policy", "bad_arguments", "; ".join(faults))
        why = ""
        for attempt in range(_ATTEMPTS):
            answer = await self._ask(
                EmulatorCall(
                    tool=self._tools[tool],
                    arguments=arguments,
                    state=self.state,
                    history=list(self.history),
                    index=len(self.history),
                    attempt=attempt,
                )
            )
            self.usage += answer.usage
            self.model = answer.model or self.model
            why = self._unfit(tool, answer)
            if not why:
                return self._accept(tool, arguments, answer)
            if answer.status is None:
                break  # the agent has used up its own repairs
        return failed("infra", "server_error", f"the emulator gave no usable answer: {why}"[:1000])

    def _unfit(self, tool: str, answer: EmulatorAnswer) -> str:
        """Why an answer cannot be used; empty if it can."""
        if answer.status is None:
            return answer.error or "no answer"
        if len(json.dumps(answer.state, ensure_ascii=False)) > MAX_STATE:
            return f"its state is longer than {MAX_STATE} characters"
        if answer.status == "ok" and tool in self._outputs:
            fault = next(iter(validator(self._outputs[tool]).iter_errors(answer.value)), None)
            return f"its value does not fit the output schema: {fault.message[:300]}" if fault else ""
        return ""

    def _accept(self, tool: str, arguments: dict[str, Any], answer: EmulatorAnswer) -> ToolResult:
        entry: dict[str, Any] = {"tool": tool, "arguments": arguments, "status": answer.status}
        if answer.status == "error":
            self.history.append(entry | {"error": answer.error})
            return failed("tool", "tool_error", answer.error or "the tool failed")
        changed = not equal(answer.state, self.state)
        self.state = answer.state
        self.history.append(entry | {"value": answer.value})
        return ToolResult(status="ok", value=answer.value, changed_state=changed)

    async def aclose(self) -> None:
        """Nothing is held: the model's client is its owner's."""
