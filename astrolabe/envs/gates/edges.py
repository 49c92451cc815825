"""edge_not_live: something flows along every edge of the graph. An argument of the child's golden equals a leaf of the
parent's value; or, in stateful mode, leaving the parent's call out changes what the child's call gives."""

from __future__ import annotations

from astrolabe.envs.gates.evidence import Evidence
from astrolabe.envs.gates.replay import call_text, short
from astrolabe.envs.gates.report import Finding
from astrolabe.records.environment import Environment, Golden
from astrolabe.records.equality import equal, leaves


def flows(parent: Golden, child: Golden) -> bool:
    """Whether an argument (or a part of one) of the child equals a leaf of the parent's value."""
    given = [leaf for leaf in leaves(parent.returns) if leaf is not None]
    return any(equal(argument, leaf) for argument in leaves(child.arguments) for leaf in given)


def check_edges(env: Environment, evidence: Evidence | None) -> list[Finding]:
    """`evidence` None: nothing may be run, and a stateful edge is given the benefit of the doubt."""
    goldens = {golden.node: golden for golden in env.goldens}
    findings = []
    for node in env.nodes:
        for parent in node.parents:
            if node.id not in goldens or parent not in goldens:
                continue
            source, target = goldens[parent], goldens[node.id]
            if flows(source, target) or (
                env.mode == "stateful" and (evidence is None or _matters(evidence, source, target))
            ):
                continue
            findings.append(
                Finding("edge_not_live", f"no argument of {call_text(target)} comes from {parent}'s value {short(source.returns)}", node.id, target.tool)
            )  # fmt: skip
    return findings


def _matters(evidence: Evidence, parent: Golden, child: Golden) -> bool:
    """Whether the child's call gives something else when the oracle leaves the parent's call out."""
    calls = [(golden.tool, golden.arguments) for golden in evidence.oracle if golden.node != parent.node]
    place = [golden.node for golden in evidence.oracle if golden.node != parent.node].index(child.node)
    records, _, _ = evidence.episode(calls[: place + 1])
    with_parent = evidence.replays[child.node]
    without = records[-1]
    return (without.status == "ok") != (with_parent.status == "ok") or not equal(without.value, with_parent.value)
