"""What a held-out set shares with a training set: questions, entities, tools, and whole environments.

Held out means other entities, other tools and other questions. A tool is its name with its description; an entity is a
string of at least four letters or figures that a golden takes or gives and the data holds, as the policy would have to
copy it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from astrolabe.records.environment import Environment
from astrolabe.records.equality import informative, leaves


def tool_signatures(environment: Environment) -> set[str]:
    """`name: description` of the true tools."""
    return {f"{tool.name}: {tool.description}" for tool in environment.tools}


def entities(environment: Environment) -> set[str]:
    """Informative strings among the goldens' arguments and values that are not an option of the tool's own schema."""
    options = {
        str(option)
        for tool in environment.tools
        for schema in tool.parameters.get("properties", {}).values()
        for option in schema.get("enum", [])
    }
    found: set[str] = set()
    for golden in environment.goldens:
        for leaf in leaves([golden.arguments, golden.returns]):
            if isinstance(leaf, str) and informative(leaf) and leaf not in options:
                found.add(leaf)
    return found


def without_shared(held_out: Sequence[Environment], train: Iterable[Environment]) -> list[Environment]:
    """The environments that share no question, entity or true tool with any training environment."""
    train = list(train)
    tools = set().union(*(tool_signatures(e) for e in train)) if train else set()
    names = set().union(*(entities(e) for e in train)) if train else set()
    questions = {e.question for e in train}
    return [
        e
        for e in held_out
        if e.question not in questions and not tool_signatures(e) & tools and not entities(e) & names
    ]


def leak_report(train: Sequence[Environment], held_out: Sequence[Environment]) -> list[dict[str, Any]]:
    """Rows `{"what", "train", "held_out", "both", "examples"}`: how many there are on each side, and in both."""

    def union(of: Any, rows: Sequence[Environment]) -> set[str]:
        return set().union(*(of(row) for row in rows)) if rows else set()

    kinds = {
        "environments": lambda e: {e.id},
        "domains": lambda e: {e.domain},
        "questions": lambda e: {e.question},
        "entities": entities,
        "tools": tool_signatures,
    }
    report = []
    for what, of in kinds.items():
        one, two = union(of, train), union(of, held_out)
        both = sorted(one & two)
        report.append({"what": what, "train": len(one), "held_out": len(two), "both": len(both), "examples": both[:5]})
    return report
