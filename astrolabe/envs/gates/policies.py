"""Policies that solve nothing, for the floor of an environment's reward, and the oracle, for its ceiling."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from astrolabe.envs.gates.evidence import Call, Evidence
from astrolabe.envs.gates.leak import Text
from astrolabe.envs.gates.literals import question_literals
from astrolabe.envs.gates.probes import Candidates
from astrolabe.records.equality import has_chinese

RANDOM_SEEDS = 32


def oracle_calls(evidence: Evidence, order: list[str]) -> list[Call]:
    """The goldens in an order of their nodes."""
    return [(evidence.golden_of[node].tool, evidence.golden_of[node].arguments) for node in order]


def random_episodes(evidence: Evidence) -> Iterator[list[Call]]:
    """32 seeded episodes of as many random valid calls as there are targets, over tools and distractors alike, arguments
    from the probes' candidates."""
    names = sorted(name for name in evidence.tools if evidence.runnable(name))
    length = max(1, len(evidence.oracle))
    for seed in range(RANDOM_SEEDS):
        rng = random.Random(seed)
        calls: list[Call] = []
        for _ in range(length):
            tool = rng.choice(names)
            arguments = evidence.candidates(tool).draw(rng)
            if arguments is not None:
                calls.append((tool, arguments))
        yield calls


def greedy_episode(evidence: Evidence) -> list[Call]:
    """Every true tool once, arguments from the question. The reading that serves it best is taken: what the golden wants
    where the question says it, and where there are only a few choices, the right one."""
    env = evidence.env
    said = Text(env.question)
    spoken = question_literals(env.question)
    calls: list[Call] = []
    for tool in env.tools:
        if not evidence.runnable(tool.name):
            continue
        candidates = evidence.candidates(tool.name)
        golden = candidates.goldens[0].arguments if candidates.goldens else {}
        arguments = {}
        for name in candidates.values:
            if name in golden and _readable(golden[name], said, spoken, tool.parameters["properties"][name]):
                arguments[name] = golden[name]
            elif name in candidates.required:
                value = _first_of_question(candidates, name, spoken)
                if value is not None:
                    arguments[name] = value
        if all(name in arguments for name in candidates.required):
            calls.append((tool.name, arguments))
    return calls


def _readable(value: Any, said: Text, spoken: list[Any], schema: Any) -> bool:
    if isinstance(value, bool) or (isinstance(schema, dict) and "enum" in schema):
        return True
    if isinstance(value, str):
        return bool(value) and (said.holds(value) or (has_chinese(value) and value in said.text))
    if isinstance(value, (int, float)):
        return said.holds(value) or any(re.search(rf"(?<!\d){re.escape(str(value))}(?!\d)", str(w)) for w in spoken)
    return False


def _first_of_question(candidates: Candidates, name: str, spoken: list[Any]) -> Any:
    """The first candidate that the question says, else a neutral one; None if the argument takes neither."""
    for word in [*spoken, 1, 0, ""]:
        for value in candidates.values[name]:
            if type(value) is type(word) and value == word:
                return value
    return None
