"""Which executed calls hit which nodes, and whether a goal holds: the two facts that every reward is made of.

Both are decided from executor records and the final state, never from text. A call is tied to nodes by FORMATS' rule
for a hit; a maximum matching then decides, so that one call hits at most one node and one node is hit at most once,
whatever the order of the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jsonpath_rfc9535 as jsonpath

from astrolabe.records.environment import Environment, Goal, Golden
from astrolabe.records.equality import equal, informative
from astrolabe.records.trajectory import CallRecord


def call_hits(record: CallRecord, changed: bool, golden: Golden) -> bool:
    """FORMATS' rule for one call and one golden. A call that a fault was injected into is the executor's, not the
    policy's, and hits nothing."""
    if record.status != "ok" or record.injected or record.tool != golden.tool or record.arguments is None:
        return False
    same_arguments = equal(record.arguments, golden.arguments)
    if changed:
        return same_arguments
    return equal(record.value, golden.returns) and (same_arguments or informative(record.value))


def matched_nodes(environment: Environment, records: Sequence[CallRecord], changed: Sequence[bool]) -> dict[str, int]:
    """node id -> index of the call that hits it, by a maximum matching over `call_hits` (Kuhn's augmenting paths)."""
    goldens = [g for g in environment.goldens if any(n.id == g.node and n.tool is not None for n in environment.nodes)]
    edges = [
        [i for i, (record, wrote) in enumerate(zip(records, changed, strict=True)) if call_hits(record, wrote, golden)]
        for golden in goldens
    ]
    call_of: dict[int, int] = {}  # call -> golden

    def augment(golden: int, seen: set[int]) -> bool:
        for call in edges[golden]:
            if call in seen:
                continue
            seen.add(call)
            if call not in call_of or augment(call_of[call], seen):
                call_of[call] = golden
                return True
        return False

    for golden in range(len(goldens)):
        augment(golden, set())
    return {goldens[golden].node: call for call, golden in sorted(call_of.items(), key=lambda item: item[1])}


@lru_cache(maxsize=4096)
def _compiled(path: str) -> jsonpath.JSONPathQuery:
    return jsonpath.compile(path)


def values_at(path: str, value: Any) -> list[Any]:
    """The values that an RFC 9535 JSONPath selects in `value`. Raises JSONPathError for a path that is not one."""
    return list(_compiled(path).find(value).values())


def goal_holds(goal: Goal | None, state: Any) -> bool:
    """Whether `state` meets the goal: equal to the goal's state, and each `must` selects an equal value and no
    `must_not` does. Without a goal there is nothing to miss."""
    if goal is None:
        return True
    if goal.state is not None and not equal(state, goal.state):
        return False
    if any(not any(equal(v, check.equals) for v in values_at(check.path, state)) for check in goal.must or ()):
        return False
    return not any(any(equal(v, check.equals) for v in values_at(check.path, state)) for check in goal.must_not or ())
