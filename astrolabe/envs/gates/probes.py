"""Probes: the calls that find out what a tool does beside its goldens.

Each argument has at most 32 candidate values (FORMATS: enum values; literals of its type in the code, `data`, `state`,
the question and all goldens; 0, 1, negation, times ten, empty, truncated, changed case). They are put in one argument at
a time from each golden, and in 32 seeded pairs. A tool without a golden is probed from calls of its own that
succeeded, found by seeded draws.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from astrolabe.envs.arguments import argument_faults, validator
from astrolabe.envs.gates.literals import all_leaves, code_literals, lists_in, question_literals, scalars, siblings
from astrolabe.records.environment import Environment, EnvTool, Golden

MAX_VALUES = 32
PAIRS = 32
_ABSENT = object()
_PLAIN_KEYS = {"type", "properties", "required", "additionalProperties", "title", "description", "$schema"}


def fingerprint(value: Any) -> str:
    """A text that is equal for values that are equal by type: whole floats as integers, keys sorted."""
    return json.dumps(_normal(value), sort_keys=True, ensure_ascii=False)


def _normal(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return int(value)
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, dict):
        return {key: _normal(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_normal(member) for member in value]
    return value


@dataclass(frozen=True)
class Probe:
    """A call to make. `golden` is the place, in the oracle's order, of the golden that it starts from (its state is the
    state before that golden); None: the initial state."""

    arguments: dict[str, Any]
    golden: int | None = None


class Candidates:
    """Candidate values per argument of one tool."""

    def __init__(self, env: Environment, tool: EnvTool, goldens: list[Golden]) -> None:
        self.tool = tool
        self.goldens = goldens
        self._own = code_literals(tool.code)
        self._around = [env.data, env.state]
        self._question = question_literals(env.question)
        self._other = all_leaves([value for g in env.goldens for value in (g.arguments, g.returns)])
        properties = tool.parameters.get("properties", {})
        self.required = [name for name in tool.parameters.get("required", []) if name in properties]
        # One argument alone, under the whole schema's definitions; what binds several together is asked of the call.
        alone = {k: v for k, v in tool.parameters.items() if k in ("type", "properties", "$defs", "definitions")}
        self._one = validator(alone)
        self._check_whole = not set(tool.parameters) <= _PLAIN_KEYS
        self.values = {name: self._values(name, schema) for name, schema in properties.items()}

    def fits(self, arguments: dict[str, Any]) -> bool:
        """Whether the schema lets a combination of candidates through (each fits by itself already)."""
        return not self._check_whole or not argument_faults(self.tool.parameters, arguments)

    def _values(self, name: str, schema: Any) -> list[Any]:
        schema = schema if isinstance(schema, dict) else {}
        mine = [g.arguments[name] for g in self.goldens if name in g.arguments]
        kinds = _kinds(schema, mine)
        out: list[Any] = []
        seen: set[str] = set()
        for value in self._ordered(schema, mine, kinds):
            key = fingerprint(value) + type(value).__name__[:1] * isinstance(value, bool)
            if key not in seen and _kind(value) in kinds and self._one.is_valid({name: value}):
                seen.add(key)
                out.append(value)
                if len(out) == MAX_VALUES:
                    break
        return out

    def _ordered(self, schema: dict[str, Any], mine: list[Any], kinds: set[str]) -> Iterator[Any]:
        yield from mine
        yield from schema.get("enum", [])
        yield from [schema[key] for key in ("const", "default") if key in schema]
        yield from [False, True]
        for value in mine:
            yield from _variations(value)
        yield from [0, 1, ""]
        places = [*self._own, *self._around]
        for value in mine:
            for place in places:
                yield from siblings(place, value)
        yield from (s for value in self._own for s in scalars(value))
        yield from (s for value in self._around for s in scalars(value))
        yield from self._question
        yield from self._other
        if "array" in kinds:
            for place in [*self._own, *self._around]:
                yield from lists_in(place)
            items = [s for value in [*self._own, *self._around] for s in scalars(value)]
            yield from ([item] for item in [*items, *self._question, *self._other])
        if "object" in kinds:
            yield {}
        if "null" in kinds:
            yield None

    def one_at_a_time(self, base: dict[str, Any], golden: int | None) -> Iterator[Probe]:
        """The base itself, then each argument varied alone; an optional one is also left out."""
        yield Probe(base, golden)
        for name, values in self.values.items():
            for value in values:
                arguments = {**base, name: value}
                if self.fits(arguments):
                    yield Probe(arguments, golden)
            if name in base and name not in self.required:
                yield Probe({k: v for k, v in base.items() if k != name}, golden)

    def pairs(self, bases: list[tuple[dict[str, Any], int | None]], rng: random.Random) -> Iterator[Probe]:
        """32 seeded draws that vary two arguments at once."""
        names = [name for name, values in self.values.items() if len(values) > 1]
        if len(names) < 2 or not bases:
            return
        for _ in range(PAIRS):
            base, golden = rng.choice(bases)
            arguments = {**base, **{name: rng.choice(self.values[name]) for name in rng.sample(names, 2)}}
            if self.fits(arguments):
                yield Probe(arguments, golden)

    def draw(self, rng: random.Random) -> dict[str, Any] | None:
        """Random valid arguments; None if a required argument has no candidate."""
        arguments = {}
        for name, values in self.values.items():
            wanted = name in self.required or rng.random() < 0.5
            if wanted and not values and name in self.required:
                return None
            if wanted and values:
                arguments[name] = rng.choice(values)
        return arguments if self.fits(arguments) else None


def unique(probes: Iterable[Probe]) -> list[Probe]:
    """Without repeats, in order."""
    seen: set[tuple[str, int | None]] = set()
    out = []
    for probe in probes:
        key = (fingerprint(probe.arguments), probe.golden)
        if key not in seen:
            seen.add(key)
            out.append(probe)
    return out


def _kind(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "other"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if value is None:
        return "null"
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return names.get(type(value), "other")


def _kinds(schema: dict[str, Any], mine: list[Any]) -> set[str]:
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []
    kinds = {"number" if name == "integer" else name for name in names}
    if not kinds:
        kinds = {_kind(value) for value in mine} or {"string", "number", "boolean", "array", "object", "null"}
    return kinds | {_kind(value) for value in schema.get("enum", [])}


def _variations(value: Any) -> Iterator[Any]:
    """Negation, times ten, empty, truncated, changed case; of a list or object also by its members."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, (int, float)):
        yield from (-value, value * 10)
    elif isinstance(value, str):
        yield from ("", value[:-1], value.swapcase(), value.lower(), value.upper())
    elif isinstance(value, list):
        yield from ([], value[:-1], value[1:], value[::-1])
        for i, member in enumerate(value[:4]):
            for changed in (*_variations(member), 0, 1):
                if _kind(changed) == _kind(member):
                    yield [*value[:i], changed, *value[i + 1 :]]
    elif isinstance(value, dict):
        for name, member in list(value.items())[:8]:
            for changed in (*_variations(member), 0, 1):
                if _kind(changed) == _kind(member):
                    yield {**value, name: changed}
            yield {k: v for k, v in value.items() if k != name}
