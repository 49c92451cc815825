"""The funnel and the judges' audit: per-item counts, added up over a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FunnelEntry = tuple[str, int, int, dict[str, int]]
"""(stage, went in, came out, {reason: rejected})."""


def funnel_of(items: Sequence[Sequence[Sequence[Any]]]) -> list[dict[str, Any]]:
    """`[{"stage","in","out","rejected":{reason: n}}]` over all items, each a list of funnel entries.

    Stages stand in the order of the items' own lists: one that is met late is placed after its predecessor there.
    """
    order: list[str] = []
    total: dict[str, dict[str, Any]] = {}
    for entries in items:
        previous: str | None = None
        for stage, went_in, came_out, reasons in entries:
            if stage not in total:
                total[stage] = {"stage": stage, "in": 0, "out": 0, "rejected": {}}
                order.insert(order.index(previous) + 1 if previous else len(order), stage)
            row = total[stage]
            row["in"] += went_in
            row["out"] += came_out
            for reason, n in reasons.items():
                row["rejected"][reason] = row["rejected"].get(reason, 0) + n
            previous = stage
    for row in total.values():
        row["rejected"] = dict(sorted(row["rejected"].items()))
    return [total[stage] for stage in order]


def add_audit(total: dict[str, Any], part: dict[str, Any]) -> None:
    """Adds `part` into `total`: numbers are summed, objects member by member, lists joined."""
    for key, value in part.items():
        if isinstance(value, dict):
            add_audit(total.setdefault(key, {}), value)
        elif isinstance(value, list):
            total.setdefault(key, []).extend(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            total[key] = total.get(key, 0) + value
        else:
            total[key] = value


def audit_of(total: dict[str, Any]) -> dict[str, Any]:
    """The audit with its keys sorted, so that it does not depend on which item came first."""
    return {key: audit_of(value) if isinstance(value, dict) else value for key, value in sorted(total.items())}
