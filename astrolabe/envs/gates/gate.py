"""All gates on one environment, or on one tool before its environment is complete.

Cheap gates on the row come first; the dynamic ones follow where the structure lets anything run, on every tool whose
code and goldens are sound. A row that passes gets its certificate: what was run, and what came of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from astrolabe import __version__
from astrolabe.envs.gates.agreement import check_answers
from astrolabe.envs.gates.bounds import Bounds, check_bounds, measure
from astrolabe.envs.gates.code_rules import check_golden_arguments, check_tool_code
from astrolabe.envs.gates.determinism import check_determinism, hash_seeds, replays_made
from astrolabe.envs.gates.edges import check_edges
from astrolabe.envs.gates.evidence import Evidence
from astrolabe.envs.gates.graph import check_graph
from astrolabe.envs.gates.hard_coded import check_hard_coded
from astrolabe.envs.gates.leak import check_dynamic_leaks, check_static_leaks
from astrolabe.envs.gates.liveness import check_liveness, live_arguments, support
from astrolabe.envs.gates.replay import check_replay
from astrolabe.envs.gates.report import Finding, GateReport
from astrolabe.envs.gates.well_formed import read_environment
from astrolabe.envs.sandbox import Sandbox
from astrolabe.records.environment import Certificate, Environment, EnvTool, Golden, Node
from astrolabe.records.ids import canonical_json

CHECKED_WITH = f"astrolabe {__version__}"
_STOPS_RUNNING = {"duplicate_tool_name", "cyclic_graph", "target_without_tool"}
_STOPS_TOOL = {"unsafe_code", "signature_mismatch", "golden_argument_invalid"}


def gate_environment(row: Environment | dict[str, Any] | Any, sandbox: Sandbox) -> GateReport:
    """Every gate on a row (or record). Never raises for what the row holds; SandboxError if the sandbox itself fails."""
    raw = row.to_json() if isinstance(row, Environment) else row
    env, findings = read_environment(raw)
    row_id = raw.get("id") if isinstance(raw, dict) else None
    report = GateReport(id=row_id if isinstance(row_id, str) else "", findings=findings)
    if env is None:
        return report
    findings += check_graph(env)
    findings += check_answers(env)
    findings += check_golden_arguments(env)
    for tool in (*env.tools, *env.distractors):
        findings += check_tool_code(tool, env.mode == "stateful")
    findings += check_static_leaks(env)
    if any(finding.reason in _STOPS_RUNNING for finding in findings):
        if not any(finding.reason == "cyclic_graph" for finding in findings):
            findings += check_edges(env, None)
        return report
    skip = {finding.tool for finding in findings if finding.reason in _STOPS_TOOL and finding.tool}
    evidence = Evidence(env, sandbox, skip)
    bounds = _run(evidence, findings)
    if not findings and bounds is not None:
        report.certificate = certify(evidence, bounds)
        report.environment = env.model_copy(update={"certificate": report.certificate})
    return report


def _run(evidence: Evidence, findings: list[Finding]) -> Bounds | None:
    """The gates that run code; appends to `findings`. None if some golden could not be run at all."""
    env = evidence.env
    replay = check_replay(evidence)
    findings += replay
    findings += check_edges(env, None if evidence.blocked else evidence)
    unstable = check_determinism(evidence)
    findings += unstable
    for tool in env.tools:
        if not any(finding.tool == tool.name for finding in unstable):  # its values say nothing about its arguments
            findings += check_liveness(evidence, tool.name)
    findings += check_dynamic_leaks(evidence)
    findings += check_hard_coded(evidence)
    if evidence.blocked:
        return None
    bounds = measure(evidence)
    findings += check_bounds(evidence, bounds, replayed=not replay)
    return bounds


def certify(evidence: Evidence, bounds: Bounds) -> Certificate:
    """The certificate of an environment that passed: the figures of the runs that were made."""
    env = evidence.env
    transcript = [
        {"node": g.node, "tool": g.tool, "arguments": g.arguments, "value": evidence.replays[g.node].value}
        for g in evidence.oracle
    ]
    text = canonical_json({"calls": transcript, "state": evidence.states[-1]})
    return Certificate(
        replays=replays_made(env.id),
        hash_seeds=hash_seeds(env.id),
        transcript_sha256=hashlib.sha256(text.encode()).hexdigest(),
        probes=sum(len(evidence.probes(name)) for name in evidence.tools),
        live_arguments=sum(sum(live_arguments(evidence, tool.name).values()) for tool in env.tools),
        leaks=0,
        floor=bounds.floor,
        ceiling=bounds.ceiling,
        support={tool.name: support(evidence, tool.name) for tool in (*env.tools, *env.distractors)},
        checked_with=CHECKED_WITH,
    )


def gate_tool(
    tool: EnvTool,
    goldens: Sequence[Golden],
    data: Any,
    sandbox: Sandbox,
    *,
    state: Any = None,
    question: str = "",
    language: str = "en",
) -> list[Finding]:
    """The gates that concern one tool alone, before its environment exists: arguments and signature, static rules,
    replay, determinism, liveness, leaks in its own texts, hard-coded values. `state` not None: stateful mode, the
    goldens played in their order. A tool without arguments is left to the environment's gates."""
    env = Environment(
        schema="astrolabe.environment/1",
        language="zh" if language == "zh" else "en",
        domain="",
        question=question,
        answer="",
        scenario="single_hop",
        expect="answer",
        answer_type="span",
        nodes=[Node(id=golden.node, question="", answer=golden.returns, tool=tool.name) for golden in goldens],
        tools=[tool],
        goldens=list(goldens),
        data=data,
        mode="stateful" if state is not None else "stateless",
        state=state,
    ).with_id()
    findings = check_golden_arguments(env) + check_tool_code(tool, env.mode == "stateful") + check_static_leaks(env)
    if any(finding.reason in _STOPS_TOOL for finding in findings):
        return findings
    evidence = Evidence(env, sandbox)
    findings += check_replay(evidence) + check_determinism(evidence)
    if tool.parameters.get("properties"):
        findings += check_liveness(evidence, tool.name)
    return findings + check_hard_coded(evidence)
