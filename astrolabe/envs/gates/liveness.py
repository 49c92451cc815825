"""constant_tool, mutant_survived, degenerate_tool: a tool does something with each of its arguments.

An argument is live if some two probes that differ only in it differ in value or error (or in the state they leave).
A tool whose answer never changes, or that ignores an argument, teaches a policy that arguments do not matter.
"""

from __future__ import annotations

from collections import defaultdict

from astrolabe.envs.gates.evidence import Evidence, ProbeRun
from astrolabe.envs.gates.probes import fingerprint
from astrolabe.envs.gates.report import Finding


def live_arguments(evidence: Evidence, tool: str) -> dict[str, bool]:
    """argument -> whether it is live."""
    runs = evidence.probes(tool)
    return {name: _is_live(name, runs) for name in evidence.tools[tool].parameters.get("properties", {})}


def _is_live(name: str, runs: list[ProbeRun]) -> bool:
    seen: dict[tuple[str, int | None], str] = {}
    for run in runs:
        rest = {k: v for k, v in run.probe.arguments.items() if k != name}
        key = (fingerprint(rest), run.probe.golden)
        if seen.setdefault(key, run.outcome) != run.outcome:
            return True
    return False


def support(evidence: Evidence, tool: str) -> int:
    """Distinct values of the tool's valid probes."""
    return len({fingerprint(run.execution.value) for run in evidence.probes(tool) if run.execution.status == "ok"})


def _distinct_effects(evidence: Evidence, tool: str) -> int:
    """Most distinct (value, state afterwards) from one starting state: a write may answer `ok` each time."""
    by_start: defaultdict[int | None, set[str]] = defaultdict(set)
    for run in evidence.probes(tool):
        if run.execution.status == "ok":
            by_start[run.probe.golden].add(fingerprint([run.execution.value, run.execution.state]))
    return max(map(len, by_start.values()), default=0)


def check_liveness(evidence: Evidence, tool: str) -> list[Finding]:
    """Findings on one true tool."""
    if not evidence.runnable(tool):
        return []
    spec = evidence.tools[tool]
    if not spec.parameters.get("properties"):
        return [] if _changes_or_depends(evidence, tool) else [
            Finding("constant_tool", "it takes no argument, and neither a state nor a parent changes its value", tool=tool)
        ]  # fmt: skip
    runs = evidence.probes(tool)
    live = live_arguments(evidence, tool)
    if not any(live.values()):
        sample = runs[0].outcome[:120] if runs else "nothing"
        return [
            Finding("constant_tool", f"no argument changes what it gives ({len(runs)} probes): {sample}", tool=tool)
        ]
    findings = [
        Finding("mutant_survived", f"no probe of {name!r} changes value or error ({len(runs)} probes)", tool=tool)
        for name, is_live in live.items()
        if not is_live
    ]
    if support(evidence, tool) < 2 and _distinct_effects(evidence, tool) < 2:
        valid = sum(run.execution.status == "ok" for run in runs)
        findings.append(
            Finding("degenerate_tool", f"{valid} of {len(runs)} probes are valid, and all give one value", tool=tool)
        )
    return findings


def _changes_or_depends(evidence: Evidence, tool: str) -> bool:
    nodes = {golden.node for golden in evidence.oracle if golden.tool == tool}
    if any(node.parents for node in evidence.env.nodes if node.id in nodes):
        return True
    if not evidence.stateful:
        return False
    values = {fingerprint(evidence.execution(tool, {}, state).value) for state in evidence.states}
    return len(values) > 1
