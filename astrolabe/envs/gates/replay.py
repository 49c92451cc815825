"""golden_raises, golden_mismatch, timeout: every golden, replayed from the reopened row, gives its value."""

from __future__ import annotations

from astrolabe.envs.gates.evidence import GOLDEN_CPU_S, Evidence
from astrolabe.envs.gates.report import Finding
from astrolabe.records.environment import Golden
from astrolabe.records.equality import equal
from astrolabe.records.ids import canonical_json


def call_text(golden: Golden) -> str:
    return f"{golden.tool}({canonical_json(golden.arguments)})"


def short(value: object, limit: int = 200) -> str:
    text = canonical_json(value)
    return text if len(text) <= limit else text[:limit] + "..."


def check_replay(evidence: Evidence) -> list[Finding]:
    findings = []
    for golden in evidence.oracle:
        execution = evidence.replays.get(golden.node)
        if execution is None:
            continue
        if execution.status == "timeout":
            findings.append(
                Finding("timeout", f"{call_text(golden)} took over {GOLDEN_CPU_S:g} s of CPU", golden.node, golden.tool)
            )
        elif execution.status != "ok":
            where = f" at line {execution.line}" if execution.line else ""
            what = f"{execution.error_type}: {execution.message}"[:300]
            findings.append(
                Finding("golden_raises", f"{call_text(golden)} raised {what}{where}", golden.node, golden.tool)
            )
        elif not equal(execution.value, golden.returns):
            findings.append(
                Finding(
                    "golden_mismatch",
                    f"{call_text(golden)} gives {short(execution.value)}, the golden says {short(golden.returns)}",
                    golden.node,
                    golden.tool,
                )
            )
    return findings
