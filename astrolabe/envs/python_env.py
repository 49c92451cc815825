"""A Python environment as a back end: its tools' code in the sandbox, and one copy of its state per episode."""

from __future__ import annotations

import copy
from typing import Any

from astrolabe.envs.executor import BackendName, Executor, ToolResult, failed
from astrolabe.envs.faults import FaultPlan
from astrolabe.envs.sandbox import Execution, Sandbox, SandboxError
from astrolabe.records.environment import Environment
from astrolabe.records.equality import equal


class PythonBackend:
    """The tools and distractors of one environment, for one episode.

    Stateless tools see `data` only. In stateful mode a call's changes are kept if the call succeeds, and dropped as a
    whole if it fails.
    """

    name: BackendName = "python"

    def __init__(self, environment: Environment, sandbox: Sandbox, *, cpu_s: float = 2.0, wall_s: float = 5.0) -> None:
        self.environment = environment
        self.state: Any = copy.deepcopy(environment.state)
        self._sandbox = sandbox
        self._codes = {tool.name: tool.code for tool in [*environment.tools, *environment.distractors]}
        self._limits = {"cpu_s": cpu_s, "wall_s": wall_s}

    async def call(self, tool: str, arguments: dict[str, Any], *, call_id: str) -> ToolResult:
        try:
            execution = await self._sandbox.arun(
                self._codes[tool], tool, arguments, data=self.environment.data, state=self.state, **self._limits
            )
        except SandboxError as error:
            return failed("infra", "unreachable", f"the sandbox failed: {error}")
        if execution.status != "ok":
            return _failure(execution)
        changed = self.environment.mode == "stateful" and not equal(execution.state, self.state)
        if changed:
            self.state = execution.state
        return ToolResult(status="ok", value=execution.value, wall_s=execution.wall_s, changed_state=changed)

    async def aclose(self) -> None:
        """Nothing is held: the sandbox is its owner's."""


def _failure(execution: Execution) -> ToolResult:
    """A failed execution as the tool's error. What the code did wrong is the tool's, its own messages included."""
    if execution.status == "timeout":
        return failed("timeout", "timeout", f"the tool took {execution.message}", wall_s=execution.wall_s)
    if execution.status == "tool_error":
        message = execution.message
    else:
        message = f"{execution.error_type}: {execution.message}" if execution.message else str(execution.error_type)
    return failed("tool", "tool_error", message, wall_s=execution.wall_s)


def open_episode(
    environment: Environment,
    sandbox: Sandbox,
    faults: FaultPlan | None = None,
    *,
    episode: str = "",
    max_calls: int | None = None,
) -> Executor:
    """An executor over the environment's policy tools with a fresh state. Its back end's `state` is the final state."""
    backend = PythonBackend(environment, sandbox)
    return Executor(environment.policy_tools(), backend, faults=faults, episode=episode, max_calls=max_calls)
