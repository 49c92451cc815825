"""answer_mismatch: the golden's value (at `path`) equals the node's answer; the sink's answer satisfies `answer`."""

from __future__ import annotations

import json
from typing import Any

from astrolabe.envs.gates.report import Finding
from astrolabe.envs.match import values_at
from astrolabe.envs.rewards.answers import verify_candidate
from astrolabe.records.environment import Environment
from astrolabe.records.equality import equal, leaves


def answer_text(value: Any) -> str:
    """A node's answer as a policy would put it forward."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def check_answers(env: Environment) -> list[Finding]:
    findings = []
    nodes = {node.id: node for node in env.nodes}
    for golden in env.goldens:
        node = nodes.get(golden.node)
        if node is None or node.tool is None:
            continue
        values = [golden.returns] if node.path is None else values_at(node.path, golden.returns)
        if len(values) != 1 or not equal(values[0], node.answer):
            place = f" at {node.path}" if node.path else ""
            got = "nothing" if not values else ", ".join(map(answer_text, values[:3]))
            findings.append(
                Finding(
                    "answer_mismatch",
                    f"the golden gives {got}{place}, the node says {answer_text(node.answer)}",
                    node.id,
                    golden.tool,
                )
            )
    parents = {parent for node in env.nodes for parent in node.parents}
    sinks = [node for node in env.nodes if node.id not in parents]
    if env.expect == "answer" and sinks and not _satisfied(env, [sink.answer for sink in sinks]):
        said = "; ".join(answer_text(sink.answer) for sink in sinks)
        findings.append(
            Finding(
                "answer_mismatch",
                f"the last node says {said}, the row's answer is {env.answer!r} ({env.answer_type})",
                sinks[-1].id,
            )
        )
    return findings


def _satisfied(env: Environment, answers: list[Any]) -> bool:
    """One sink answers by itself; several answer together, as a list, or one of them does."""
    readings = [answer_text(answer) for answer in answers]
    if len(answers) > 1:
        readings.insert(0, ", ".join(readings))
    for answer in answers:
        if isinstance(answer, (dict, list)):
            readings += [answer_text(leaf) for leaf in leaves(answer)]
            if isinstance(answer, list):
                readings.append(", ".join(map(answer_text, answer)))
    return any(verify_candidate(reading.strip(), env.answer, env.answer_type).correct for reading in readings)
