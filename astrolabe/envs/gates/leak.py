"""answer_leak and distractor_hit: no golden value can be had without the call that it is for.

A golden value is looked for on token borders: numbers as numbers, Latin text between non-letters, Chinese as it stands.
An object counts as given away only where all of its informative parts are. What the golden's own arguments already say is
no secret of the golden. A call whose arguments hold the value of a later golden gives nothing away either: taking the
difference back, `subtract(answer, -b)`, needs the answer.
"""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import networkx as nx

from astrolabe.envs.gates.evidence import Evidence, ProbeRun
from astrolabe.envs.gates.graph import dependency_graph
from astrolabe.envs.gates.replay import short
from astrolabe.envs.gates.report import Finding
from astrolabe.envs.match import values_at
from astrolabe.records.environment import Environment, EnvTool, Golden
from astrolabe.records.equality import equal, informative, leaves
from astrolabe.records.ids import canonical_json

_NUMBER = re.compile(r"(?<![A-Za-z0-9_.])-?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?(?![A-Za-z0-9_]|\.\d)")


@dataclass(frozen=True)
class Secret:
    """A golden's value as parts, all of which a text must hold to give it away."""

    golden: Golden
    parts: tuple[Any, ...]

    def told_by(self, text: Text) -> bool:
        return all(text.holds(part) for part in self.parts)


class Text:
    """A text to search, its numbers read once and only if a number is asked for."""

    def __init__(self, text: str) -> None:
        self.text = unicodedata.normalize("NFC", text)
        self._numbers: list[float] | None = None

    def holds(self, part: Any) -> bool:
        """Whether an informative string or number stands in the text on token borders."""
        if isinstance(part, str):
            return _holds_string(self.text, unicodedata.normalize("NFC", part))
        if self._numbers is None:
            self._numbers = [float(n.replace(",", "")) for n in _NUMBER.findall(self.text)]
        return any(equal(number, part) for number in self._numbers)


def _holds_string(text: str, part: str) -> bool:
    if not re.fullmatch(r"[^\W\d_]+", part):  # more than one plain word: case does not hide it
        text, part = text.casefold(), part.casefold()
    start = text.find(part)
    while start >= 0:
        before, after = text[start - 1 : start], text[start + len(part) : start + len(part) + 1]
        if not (_joins(before) and _joins(part[0])) and not (_joins(after) and _joins(part[-1])):
            return True
        start = text.find(part, start + 1)
    return False


def _joins(char: str) -> bool:
    return bool(char) and char.isascii() and (char.isalnum() or char == "_")


def secrets(env: Environment) -> list[Secret]:
    """What must not be given away: each golden's value, and what its node's path selects of it."""
    paths = {node.id: node.path for node in env.nodes}
    out = []
    for golden in env.goldens:
        own = list(leaves(golden.arguments))
        values = [golden.returns]
        path = paths.get(golden.node)
        if path is not None:
            values += values_at(path, golden.returns)
        seen: set[str] = set()
        for value in values:
            parts = tuple(
                leaf
                for leaf in leaves(value)
                if informative(leaf) and not any(equal(leaf, argument) for argument in own)
            )
            if parts and canonical_json(parts) not in seen:
                seen.add(canonical_json(parts))
                out.append(Secret(golden, parts))
    return out


def docstrings(code: str) -> list[str]:
    """The docstrings of a source and its functions."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    holders = [
        tree,
        *(node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))),
    ]
    return [text for holder in holders if (text := ast.get_docstring(holder))]


def _static_texts(env: Environment, tools: Iterable[EnvTool]) -> Iterable[tuple[str, str, str | None]]:
    """(what it is, text, tool) of all that a policy or a reader of the exports sees before the first call."""
    yield "the question", env.question, None
    for tool in tools:
        yield "the description", tool.description, tool.name
        yield "the schema", canonical_json(tool.parameters), tool.name
        for text in docstrings(tool.code):
            yield "a docstring", text, tool.name


def check_static_leaks(env: Environment) -> list[Finding]:
    """answer_leak in the texts. Runs nothing."""
    findings = []
    hidden = secrets(env)
    for what, raw, tool in _static_texts(env, [*env.tools, *env.distractors]):
        text = Text(raw)
        for golden in {s.golden.node: s.golden for s in hidden if s.told_by(text)}.values():
            findings.append(
                Finding("answer_leak", f"{what} holds the golden value {short(golden.returns, 80)}", golden.node, tool)
            )
    return findings


def check_dynamic_leaks(evidence: Evidence) -> list[Finding]:
    """answer_leak in what other tools say, and distractor_hit."""
    env = evidence.env
    graph = dependency_graph(env)
    nodes_of: dict[str, set[str]] = {}
    for golden in env.goldens:
        nodes_of.setdefault(golden.tool, set()).add(golden.node)
    ancestors = {golden.node: nx.ancestors(graph, golden.node) for golden in env.goldens}
    distractors = {tool.name for tool in env.distractors}
    descendants = {golden.node: nx.descendants(graph, golden.node) for golden in env.goldens}
    order = [golden.node for golden in evidence.oracle]
    findings: dict[tuple[str, str | None, str], Finding] = {}
    hidden = secrets(env)
    for tool in evidence.tools:
        # A tool with a node above the golden's may say what the golden says: the way to it leads through that tool.
        watched = [
            s for s in hidden if s.golden.tool != tool and not (nodes_of.get(tool, set()) & ancestors[s.golden.node])
        ]
        if not watched:
            continue
        for run in evidence.probes(tool):
            text = Text(_said(run))
            known = order[: run.probe.golden] if run.probe.golden is not None and evidence.stateful else []
            for secret in watched:
                node = secret.golden.node
                if node in known or not secret.told_by(text) or _own(run, secret):
                    continue
                if _given(run, [s for s in hidden if s.golden.node in descendants[node]]):
                    continue  # whoever can make this call has been past the golden already
                reason = "distractor_hit" if tool in distractors and _gives(run, secret) else "answer_leak"
                text_of = f"{tool}({short(run.probe.arguments)}) says {short(secret.golden.returns, 80)}"
                findings.setdefault((reason, node, tool), Finding(reason, text_of, node, tool))
    return list(findings.values())


def _said(run: ProbeRun) -> str:
    return canonical_json(run.execution.value) if run.execution.status == "ok" else run.execution.message


def _own(run: ProbeRun, secret: Secret) -> bool:
    """Whether the call's own arguments already hold all that it gave away."""
    return secret.told_by(Text(canonical_json(run.probe.arguments)))


def _given(run: ProbeRun, later: list[Secret]) -> bool:
    """Whether the call's arguments hold one of these golden values."""
    text = Text(canonical_json(run.probe.arguments))
    return any(secret.told_by(text) for secret in later)


def _gives(run: ProbeRun, secret: Secret) -> bool:
    """Whether the value of a probe holds the golden's parts as values, not only inside a text."""
    if run.execution.status != "ok":
        return False
    given = list(leaves(run.execution.value))
    return all(any(equal(part, leaf) for leaf in given) for part in secret.parts)
