"""The static argument-flow check: every required argument of a chain comes from the user or from an earlier result.

By documents only: a user can state scalars, short lists and declared objects; a value that the document says a tool gives
(a page reference, a cursor, another tool's output) needs a tool before it whose document gives such a thing. The check
needs no model, so no chain passes because a judge was kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agents.tool_docs import opaque, properties, required, statable, yields
from astrolabe.records.messages import FunctionSchema


@dataclass(frozen=True)
class Gap:
    """An argument that comes from nowhere, or a tool that does not exist."""

    tool: str
    argument: str | None
    reason: str
    """`unknown_tool` or `unobtainable_argument`."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.tool}" + (f".{self.argument}" if self.argument else "")


def argument_gaps(chain: Sequence[str], tools: Mapping[str, FunctionSchema]) -> list[Gap]:
    """The gaps of a chain, in call order; empty if the chain can be executed."""
    gaps: list[Gap] = []
    earlier: list[FunctionSchema] = []
    for name in chain:
        tool = tools.get(name)
        if tool is None:
            gaps.append(Gap(name, None, "unknown_tool"))
            continue
        for argument in required(tool):
            schema = properties(tool).get(argument)
            if any(yields(before, argument, tool) for before in earlier):
                continue
            if opaque(argument, schema) or not statable(schema, tool):
                gaps.append(Gap(name, argument, "unobtainable_argument"))
        earlier.append(tool)
    return gaps
