"""From a node to its tool: document, complexity, call, code, and the tool's gates, with the failing case fed back.

A tool that fails is written again within a bounded number of attempts; every failed attempt is kept, so that the gates
can be measured. Tools of one environment that do the same become one.
"""

from __future__ import annotations

import asyncio
import io
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel

from agents import decomposer
from agents.base import Agent, AgentResult
from agents.decomposer import (
    Answered,
    CallRequest,
    CodeRequest,
    DocumentRequest,
    NodeDraft,
    NodeView,
    ScaleRequest,
    ToolDoc,
)
from astrolabe.envs.gates.gate import gate_tool
from astrolabe.envs.gates.report import Finding
from astrolabe.records.base import Usage
from astrolabe.records.card import KnowledgeRow
from astrolabe.records.environment import EnvTool, Golden
from astrolabe.records.equality import equal
from astrolabe.records.ids import seed_for
from graphs.environment_context import EnvironmentContext

Req = TypeVar("Req", bound=BaseModel)
Rep = TypeVar("Rep", bound=BaseModel)
_DOCUMENT_REASONS = {"answer_leak", "signature_mismatch", "golden_argument_invalid"}
"""What is (or may be) the document's fault: it is written anew too, not the code alone."""


@dataclass
class BuiltNode:
    """A node with its tool; `tool` is None for reasoning, or where building failed for `reasons`."""

    draft: NodeDraft
    tool: EnvTool | None = None
    golden: Golden | None = None
    data: dict[str, Any] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    detail: str = ""
    failed: list[dict[str, Any]] = field(default_factory=list)
    """Attempts that the gates refused: `{"reasons", "detail", "row"}`."""
    attempts: int = 0
    usage: Usage = field(default_factory=Usage)
    models: dict[str, str] = field(default_factory=dict)


class Quarantined(Exception):
    """An agent gave no valid reply."""


class NodeBuilder:
    """Builds the tool of one node."""

    def __init__(
        self,
        ctx: EnvironmentContext,
        row: KnowledgeRow,
        draft: NodeDraft,
        parents: Sequence[NodeDraft],
        *,
        seed: int,
        state: dict[str, Any] | None,
    ) -> None:
        self.ctx, self.row, self.seed, self.state = ctx, row, seed, state
        self.view = NodeView(
            question=draft.question,
            answer=draft.answer,
            parents=[Answered(question=p.question, answer=p.answer) for p in parents],
        )
        self.built = BuiltNode(draft)
        self.gate = state is None or not parents  # a later step of a stateful task needs the state that came before

    async def ask(self, agent: Agent[Req, Rep], request: Req) -> Rep:
        """One agent's reply. Raises Quarantined."""
        seed = seed_for(self.seed, self.built.draft.id, self.built.attempts)
        result: AgentResult[Rep] = await agent(request, self.ctx, seed=seed, item=self.built.draft.id)
        self.built.usage = self.built.usage + result.usage
        self.built.models.setdefault(agent.role, result.model)
        if result.reply is None:
            raise Quarantined(f"{agent.name}: {result.failure}: {result.detail}")
        return result.reply

    async def build(self) -> BuiltNode:
        """Attempts until the gates find nothing, at most `tool_attempts`."""
        built = self.built
        failures: list[str] = []
        document: ToolDoc | None = None
        try:
            for _ in range(self.ctx.tool_attempts):
                if document is None:
                    document = await self._document(failures)
                findings = await self._attempt(document, failures)
                built.attempts += 1
                if findings is None:
                    document = None  # no call fits this document
                    failures = ["the document's parameters cannot be filled from the question"]
                    built.reasons, built.detail = ["no_call"], failures[0]
                    continue
                if not findings:
                    built.reasons, built.detail = [], ""
                    return built
                failures = [f"{f.reason}: {f.text}" for f in findings]
                built.reasons = list(dict.fromkeys(f.reason for f in findings))
                built.detail = "; ".join(failures)
                assert built.tool is not None
                assert built.golden is not None
                row = {"tool": built.tool.model_dump(), "arguments": built.golden.arguments}
                built.failed.append({"reasons": built.reasons, "detail": built.detail, "row": row})
                if _DOCUMENT_REASONS & set(built.reasons):
                    document = None
        except Quarantined as problem:
            built.reasons, built.detail = ["invalid_reply"], str(problem)
        built.tool = built.golden = None
        return built

    async def _document(self, failures: list[str]) -> ToolDoc:
        language, row = self.row.language, self.row
        request = DocumentRequest(
            language=language, domain=row.domain, text=row.text, node=self.view, state=self.state, failures=failures
        )
        document = await self.ask(decomposer.tool_document, request)
        scaled = await self.ask(
            decomposer.scale_complexity,
            ScaleRequest(language=language, text=row.text, node=self.view, tool=document),
        )
        return scaled.tool if compatible(document, scaled.tool) else document

    async def _attempt(self, document: ToolDoc, failures: list[str]) -> list[Finding] | None:
        """Call, code and gates; None if there is no call for this document."""
        language, row, built = self.row.language, self.row, self.built
        call = await self.ask(decomposer.call_arguments, CallRequest(language=language, node=self.view, tool=document))
        if call.arguments is None:
            return None
        code = await self.ask(
            decomposer.tool_code,
            CodeRequest(
                language=language,
                domain=row.domain,
                text=row.text,
                node=self.view,
                tool=document,
                arguments=call.arguments,
                state=self.state,
                failures=failures,
            ),
        )
        built.tool = EnvTool(**document.model_dump(), code=code.code)
        built.data = code.data or {}
        built.golden = Golden(
            node=built.draft.id, tool=document.name, arguments=call.arguments, returns=built.draft.answer
        )
        if not self.gate:
            return []
        return await asyncio.to_thread(
            gate_tool,
            built.tool,
            [built.golden],
            built.data or None,
            self.ctx.sandbox,
            state=self.state,
            question=built.draft.question,
            language=language,
        )


def compatible(before: ToolDoc, after: ToolDoc) -> bool:
    """Whether a scaled document still takes every call of the one before: what was there is unchanged, what is new is
    optional."""
    old, new = before.parameters, after.parameters
    kept = all(new.get("properties", {}).get(name) == schema for name, schema in old.get("properties", {}).items())
    return (
        (before.name, before.description) == (after.name, after.description)
        and kept
        and sorted(old.get("required", [])) == sorted(new.get("required", []))
    )


def rename(tool: EnvTool, name: str) -> EnvTool:
    """The tool under another name, in its code too (names only, never text in quotes)."""
    lines = tool.code.splitlines(keepends=True)
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(tool.code).readline))):
        if token.type == tokenize.NAME and token.string == tool.name:
            (row, start), (_, end) = token.start, token.end
            lines[row - 1] = lines[row - 1][:start] + name + lines[row - 1][end:]
    return tool.model_copy(update={"name": name, "code": "".join(lines)})


def _normal(tool: EnvTool) -> tuple[str, str]:
    return rename(tool, "_tool").code, str(tool.parameters)


async def does_the_same(a: BuiltNode, b: BuiltNode, data: dict[str, Any], ctx: EnvironmentContext) -> bool:
    """Whether two tools are one: equal code but for the name, or one signature and each answers the other's call."""
    assert a.tool is not None and b.tool is not None and a.golden is not None and b.golden is not None  # noqa: PT018
    if _normal(a.tool) == _normal(b.tool):
        return True
    if a.tool.parameters != b.tool.parameters:
        return False
    for tool, golden in ((a.tool, b.golden), (b.tool, a.golden)):
        reads = data if re.search(r"\bdata\b", tool.code) else None
        run = await ctx.sandbox.arun(tool.code, tool.name, golden.arguments, data=reads)
        if run.status != "ok" or not equal(run.value, golden.returns):
            return False
    return True


async def merge(nodes: Sequence[BuiltNode], data: dict[str, Any], ctx: EnvironmentContext, *, stateful: bool) -> None:
    """Makes tools that do the same one tool (the first), and gives clashing names a number. In place."""
    kept: list[BuiltNode] = []
    for node in nodes:
        if node.tool is None or node.golden is None:
            continue
        twin = None
        if not stateful:
            for other in kept:
                if await does_the_same(other, node, data, ctx):
                    twin = other
                    break
        if twin is not None and twin.tool is not None:
            node.tool = twin.tool
        else:
            taken = {other.tool.name for other in kept if other.tool is not None}
            name, number = node.tool.name, 2
            while name in taken:
                name, number = f"{node.tool.name}_{number}", number + 1
            node.tool = rename(node.tool, name)
            kept.append(node)
        node.golden = node.golden.model_copy(update={"tool": node.tool.name})


def merge_data(parts: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """All tables under their keys, and the keys under which two parts say different things."""
    out: dict[str, Any] = {}
    clashes: list[str] = []
    for part in parts:
        for key, table in part.items():
            if key in out and out[key] != table:
                clashes.append(key)
            out.setdefault(key, table)
    return out, clashes
