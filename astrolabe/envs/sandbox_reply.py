"""A child's reply, read with distrust: exactly the form that an honest child writes, or nothing of it counts.

A tool that climbs out of its namespace can write this text itself. What it wins is a value of its own choosing, which
it could have returned anyway; it cannot touch the clocks, how the process ended, another call's reply, or the framing.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from astrolabe.envs.sandbox_child import MAX_DEPTH
from astrolabe.envs.sandbox_zygote_client import JobReply


@dataclass(frozen=True)
class Execution:
    """What became of one call."""

    status: Literal["ok", "tool_error", "error", "timeout", "killed"]
    """`tool_error`: the tool raised ToolError; `error`: any other failure of the code or of its output."""
    value: Any = None
    message: str = ""
    error_type: str | None = None
    """The exception's name, or `output_too_large`, `bad_reply`, `exit`, a signal's name."""
    line: int | None = None
    state: Any = None
    """State after the call; as before where the call failed."""
    wall_s: float = 0.0
    cpu_s: float = 0.0


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")


def _too_deep(value: Any) -> bool:
    """Whether a value nests beyond what the child's own check lets through, or holds text that is not Unicode."""
    layer, depth = [value], 0
    while layer:
        if depth > MAX_DEPTH:
            return True
        inner: list[Any] = []
        for member in layer:
            if isinstance(member, dict):
                inner += [*member.keys(), *member.values()]
            elif isinstance(member, list):
                inner += member
            elif isinstance(member, str) and _LONE_SURROGATE.search(member):
                return True
        layer, depth = inner, depth + 1
    return False


def _read_line(line: bytes) -> dict[str, Any] | None:
    """One reply, or None if it is not exactly what an honest child sends."""
    try:
        reply = json.loads(line.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    if not isinstance(reply, dict):
        return None
    if reply.get("status") == "ok":
        well_formed = reply.keys() == {"status", "value", "state"}
        return reply if well_formed and not _too_deep(reply["value"]) and not _too_deep(reply["state"]) else None
    well_formed = (
        reply.keys() == {"status", "message", "error_type", "line"}
        and reply["status"] in ("tool_error", "error")
        and isinstance(reply["message"], str)
        and isinstance(reply["error_type"], str)
        and not _too_deep([reply["message"], reply["error_type"]])
        and (reply["line"] is None or type(reply["line"]) is int)
    )
    return reply if well_formed else None


def read_lines(reply: JobReply, states: list[Any], chain: bool) -> list[Execution] | None:
    """Executions of the lines that came, or None if any of them, or the end, is not as an honest child writes it."""
    if reply.ending == "bad_reply":
        return None
    done: list[Execution] = []
    for index, (line, (wall_s, cpu_s)) in enumerate(zip(reply.lines, reply.times, strict=True)):
        parsed = _read_line(line)
        if parsed is None:
            return None
        before = done[-1].state if chain and done else states[index]
        parsed.setdefault("state", before)
        done.append(Execution(**parsed, wall_s=wall_s, cpu_s=cpu_s))
    return done


def ending_of(ending: str, state: Any, cpu_s: float, wall_s: float) -> Execution:
    """The Execution of a call that sent no line."""
    if ending == "timeout":
        return Execution("timeout", message=f"more than {cpu_s:g} s CPU or {wall_s:g} s", state=state)
    if ending == "output_too_large":
        return Execution("error", message="the output is too large", error_type=ending, state=state)
    name = ending.removeprefix("signal:")
    message = "the process ended without a reply" if ending == "exit" else f"the process was ended by {name}"
    return Execution("killed", message=message, error_type=name, state=state)
