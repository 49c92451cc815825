"""What a gate says: findings with FORMATS' reason codes, and the report of a row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from astrolabe.records.environment import Certificate, Environment

REASONS = (
    "schema_invalid", "id_mismatch", "duplicate_tool_name", "license_missing",
    "cyclic_graph", "missing_parent", "toolless_parent", "target_without_tool", "scenario_mismatch",
    "answer_mismatch", "edge_not_live", "golden_argument_invalid", "signature_mismatch", "unsafe_code",
    "golden_raises", "golden_mismatch", "timeout", "order_dependent", "nondeterministic",
    "constant_tool", "mutant_survived", "degenerate_tool", "answer_leak", "distractor_hit",
    "ceiling_violation", "floor_violation", "hard_coded",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One violated gate. `text` gives the failing case in a form that a model or a person can act on."""

    reason: str
    text: str
    node: str | None = None
    tool: str | None = None

    def to_json(self) -> dict[str, Any]:
        text = self.text.encode("utf-8", "replace").decode()  # a row may hold halves of characters
        return {"reason": self.reason, "node": self.node, "tool": self.tool, "text": text}


@dataclass
class GateReport:
    """The verdict on one row. A passing one has a certificate, and `environment` carries it."""

    id: str
    findings: list[Finding] = field(default_factory=list)
    certificate: Certificate | None = None
    environment: Environment | None = None

    @property
    def verdict(self) -> Literal["pass", "fail"]:
        return "fail" if self.findings else "pass"

    @property
    def reasons(self) -> list[str]:
        """Distinct reason codes, in the order of FORMATS' table."""
        found = {finding.reason for finding in self.findings}
        return [reason for reason in REASONS if reason in found]

    @property
    def detail(self) -> list[dict[str, Any]]:
        return [finding.to_json() for finding in self.findings]

    def to_json(self) -> dict[str, Any]:
        """The row of `env check --json`."""
        return {"id": self.id, "verdict": self.verdict, "reasons": self.reasons, "detail": self.detail}

    def feedback(self) -> str:
        """The findings as lines, for a model that is asked to mend what it wrote; empty for a pass."""
        return "\n".join(
            f"- {f.reason}" + (f" (tool {f.tool})" if f.tool else "") + (f" (node {f.node})" if f.node else "") + f": {f.text}"
            for f in self.findings
        )  # fmt: skip
