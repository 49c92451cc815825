"""nondeterministic: hash seeds 0, 1 and two derived from the id, the same process twice, permuted order of unrelated
calls, another time zone and locale: equal values and states.

Each tool gets one child per setting. In it the goldens run in reverse order, then some probes, then the goldens again:
what one call leaves behind in the process shows in the next.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from astrolabe.envs.arguments import whole_numbers
from astrolabe.envs.gates.evidence import GOLDEN_CPU_S, Evidence
from astrolabe.envs.gates.replay import short
from astrolabe.envs.gates.report import Finding
from astrolabe.envs.sandbox import Execution
from astrolabe.records.equality import equal

_PROBES = 12
_DERIVED = 8  # distinct derived seeds, from 2 on: few, so that a zygote per seed serves many environments


@dataclass(frozen=True)
class Setting:
    hash_seed: int
    tz: str | None = None
    locale: str | None = None

    def __str__(self) -> str:
        place = f", TZ={self.tz}, LC_ALL={self.locale}" if self.tz else ""
        return f"PYTHONHASHSEED={self.hash_seed}{place}"


def hash_seeds(env_id: str) -> list[int]:
    """0, 1 and two different seeds derived from the id."""
    digest = hashlib.sha256(env_id.encode()).digest()
    first = digest[0] % _DERIVED
    second = (first + 1 + digest[1] % (_DERIVED - 1)) % _DERIVED
    return [0, 1, 2 + first, 2 + second]


def settings(env_id: str) -> list[Setting]:
    return [*map(Setting, hash_seeds(env_id)), Setting(0, "Pacific/Chatham", "tr_TR.UTF-8")]


def replays_made(env_id: str) -> int:
    """Times that every golden runs: once on its own, twice in each setting."""
    return 1 + 2 * len(settings(env_id))


def check_determinism(evidence: Evidence) -> list[Finding]:
    findings = []
    for tool in evidence.tools:
        if evidence.runnable(tool):
            findings += _check_tool(evidence, tool)
    return findings


def _check_tool(evidence: Evidence, name: str) -> list[Finding]:
    tool = evidence.tools[name]
    goldens = [(place, golden) for place, golden in enumerate(evidence.oracle) if golden.tool == name]
    known = evidence.probes(name)
    probes = [run for run in known[:: max(1, len(known) // _PROBES)] if run.execution.status != "timeout"][:_PROBES]
    if not goldens and not probes:
        return []
    calls: list[tuple[dict[str, Any], Any, Execution, str | None]] = [
        (g.arguments, evidence.states[p], evidence.replays[g.node], g.node) for p, g in reversed(goldens)
    ]
    calls += [(run.probe.arguments, evidence.states[run.probe.golden or 0], run.execution, None) for run in probes]
    calls += [(g.arguments, evidence.states[p], evidence.replays[g.node], g.node) for p, g in goldens]
    chosen = settings(evidence.env.id)
    if not goldens:  # a tool that nothing is expected of: one other hash seed and one other place
        chosen = [chosen[1], chosen[-1]]
    for setting in chosen:
        executions = evidence.sandbox.run_many(
            tool.code,
            name,
            [whole_numbers(tool.parameters, arguments) for arguments, *_ in calls],
            data=evidence.env.data,
            states=[state for _, state, *_ in calls] if evidence.stateful else None,
            cpu_s=GOLDEN_CPU_S,
            hash_seed=setting.hash_seed,
            tz=setting.tz,
            locale=setting.locale,
        )
        for (arguments, _, expected, node), got in zip(calls, executions, strict=True):
            if got.status != "timeout" and not _same(expected, got):
                text = f"{name}({short(arguments)}) gives {_said(got)} under {setting}, {_said(expected)} in a fresh process"
                return [Finding("nondeterministic", text, node, name)]
    return []


def _same(a: Execution, b: Execution) -> bool:
    if a.status != b.status:
        return False
    if a.status != "ok":
        return a.error_type == b.error_type and a.message == b.message
    return equal(a.value, b.value) and equal(a.state, b.state)


def _said(execution: Execution) -> str:
    return short(execution.value) if execution.status == "ok" else f"{execution.error_type}: {execution.message[:120]}"
