"""Plans over a world: which queries its facts can answer, their values, and the steps that answer them.

Every chain of relations that ends in an attribute is a lookup of some depth. `sample_query` draws one query of a wanted
depth and shape; `steps_of` lays a query out as steps in topological order, equal subtrees once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agents.teacher.questions import OPS, Compare, Lookup, Op, OpName, Query
from agents.teacher.worlds import CONVERSIONS, Attribute, World, dimension_key
from astrolabe.records.equality import informative

Shape = Literal["chain", "scaled", "pair", "compare"]


class UnknownFact(Exception):
    """The world does not hold what a query asks for."""


def apply_op(op: OpName, a: float, b: float) -> int | float:
    """The value that the generated arithmetic tools return."""
    if op == "sum":
        return round(a + b, 6)
    if op == "difference":
        return round(a - b, 6)
    if op == "product":
        return round(a * b, 6)
    if op == "average":
        return round((a + b) / 2, 6)
    if b == 0:
        raise UnknownFact("percentage of zero")
    return round(100 * a / b, 2)


def attribute_value(attribute: Attribute, entity: str, modifiers: tuple[tuple[str, Any], ...], world: World) -> Any:
    """What the attribute's tool returns for this entity and these modifiers."""
    if entity not in attribute.values:
        raise UnknownFact(f"{attribute.phrase} of {entity}")
    value, given = attribute.values[entity], dict(modifiers)
    if attribute.dimension is not None:
        key = dimension_key(given.get(attribute.dimension.parameter))
        if key not in value:
            raise UnknownFact(f"{attribute.phrase} of {entity}, {key}")
        value = value[key]
    if attribute.per is not None:
        value = round(value * given[attribute.per], 6)
    if given.get("unit") not in (None, attribute.unit):
        smaller, factor = CONVERSIONS[world.language][attribute.unit or ""]
        if given["unit"] != smaller:
            raise UnknownFact(f"{attribute.phrase} in {given['unit']}")
        value = round(value * factor, 6)
    return value


def evaluate(query: Query | str, world: World) -> Any:
    """The value of a query. Raises UnknownFact."""
    if isinstance(query, str):
        return query
    if isinstance(query, Op):
        right = query.right if isinstance(query.right, int) else evaluate(query.right, world)
        return apply_op(query.op, evaluate(query.left, world), right)
    if isinstance(query, Compare):
        left, right = (evaluate(side, world) for side in query.sides)
        return evaluate(query.left if left > right else query.right, world)
    entity = evaluate(query.subject, world)
    if query.phrase not in world.attributes or not isinstance(entity, str):
        raise UnknownFact(query.phrase)
    return attribute_value(world.attributes[query.phrase], entity, query.modifiers, world)


def lookups(world: World) -> list[Lookup]:
    """Every lookup that the world answers, up to six steps, without modifiers."""
    found: list[Lookup] = []
    level: list[tuple[Lookup | str, str, str, frozenset[str]]] = [
        (name, name, kind, frozenset({kind})) for kind, members in world.types.items() for name in members
    ]
    for _ in range(6):
        deeper: list[tuple[Lookup | str, str, str, frozenset[str]]] = []
        for subject, entity, kind, seen in level:
            for attribute in world.attributes.values():
                if attribute.owner != kind or entity not in attribute.values:
                    continue
                lookup = Lookup(attribute.phrase, subject)
                found.append(lookup)
                if attribute.kind == "relation" and attribute.target and attribute.target not in seen:
                    deeper.append((lookup, attribute.values[entity], attribute.target, seen | {attribute.target}))
        level = deeper
    return found


def with_modifiers(lookup: Lookup, world: World, rng: random.Random) -> Lookup:
    """The lookup with what its attribute asks for (a dimension's value, a quantity) and sometimes another unit."""
    attribute = world.attributes[lookup.phrase]
    modifiers: list[tuple[str, Any]] = []
    if attribute.dimension is not None:
        entity = evaluate(lookup.subject, world)
        key = rng.choice(sorted(attribute.values[entity]))
        value: Any = key
        if attribute.dimension.type == "boolean":
            value = key == "true"
        elif attribute.dimension.type == "integer":
            value = int(key)
        modifiers.append((attribute.dimension.parameter, value))
    if attribute.per is not None:
        modifiers.append((attribute.per, rng.randint(2, 6)))
    convertible = attribute.unit in CONVERSIONS[world.language] and attribute.per is None
    if convertible and rng.random() < 0.3:
        modifiers.append(("unit", CONVERSIONS[world.language][attribute.unit or ""][0]))
    return replace(lookup, modifiers=tuple(modifiers))


@dataclass
class Step:
    """One step of a plan: what a node of the environment is made of."""

    id: str
    query: Query
    parents: list[str]
    value: Any
    attribute: Attribute | None = None
    op: OpName | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    """By role, not by parameter name: "entity" and modifiers, or "a" and "b"."""


def steps_of(query: Query, world: World) -> list[Step]:
    """Steps in topological order, ids n1, n2, ...; equal subtrees are one step. A comparison ends in a step with neither
    attribute nor op. Raises UnknownFact."""
    steps: list[Step] = []
    by_query: dict[Query, Step] = {}

    def add(part: Query) -> Step:
        if part in by_query:
            return by_query[part]
        parents: list[Step] = []
        arguments: dict[str, Any] = {}
        attribute = op = None
        if isinstance(part, Lookup):
            if isinstance(part.subject, Lookup):
                parents = [add(part.subject)]
            attribute = world.attributes.get(part.phrase)
            if attribute is None:
                raise UnknownFact(part.phrase)
            arguments = {"entity": evaluate(part.subject, world), **dict(part.modifiers)}
        elif isinstance(part, Op):
            op = part.op
            parents = [add(part.left)] + ([] if isinstance(part.right, int) else [add(part.right)])
            arguments = {
                "a": parents[0].value,
                "b": part.right if isinstance(part.right, int) else parents[1].value,
            }
        else:
            parents = [add(side) for side in part.sides]
        value = evaluate(part, world)
        step = Step(f"n{len(steps) + 1}", part, [p.id for p in parents], value, attribute, op, arguments)
        steps.append(step)
        by_query[part] = step
        return step

    add(query)
    return steps


def _numeric(world: World, found: list[Lookup]) -> list[Lookup]:
    return [lookup for lookup in found if world.attributes[lookup.phrase].kind == "number"]


def sample_query(world: World, rng: random.Random, *, hops: int, shape: Shape) -> Query | None:
    """A query of this shape whose longest chain has `hops` tool calls, or None if the world has none.

    "chain" is a lookup, "scaled" an operation of a lookup with a number of the question, "pair" an operation on two
    lookups, "compare" the larger of two. A difference whose right side is informative is not asked: a subtraction tool
    gives that value away (a - (a - b) = b).
    """
    found = lookups(world)
    if shape == "chain":
        pool = [lookup for lookup in found if lookup.depth == hops]
        return with_modifiers(rng.choice(pool), world, rng) if pool else None
    if shape == "scaled":
        pool = [lookup for lookup in _numeric(world, found) if lookup.depth == hops - 1]
        if not pool:
            return None
        op: OpName = rng.choice(("product", "product", "sum", "difference"))
        return Op(op, with_modifiers(rng.choice(pool), world, rng), rng.randint(3, 19))
    if shape == "pair":
        pool = [lookup for lookup in _numeric(world, found) if lookup.depth == hops - 1]
        others = [lookup for lookup in _numeric(world, found) if lookup.depth <= max(1, min(hops - 1, 5 - hops))]
        if not pool or not others:
            return None
        left = rng.choice(pool)
        right = rng.choice(others)
        if rng.random() < 0.7:  # two of a kind read more naturally
            alike = [lookup for lookup in others if lookup.phrase == left.phrase]
            right = rng.choice(alike) if alike else right
        left, right = with_modifiers(left, world, rng), with_modifiers(right, world, rng)
        if left == right or (
            evaluate(left.subject, world) == evaluate(right.subject, world) and left.phrase == right.phrase
        ):
            return None
        same_unit = world.attributes[left.phrase].unit == world.attributes[right.phrase].unit
        op = rng.choice(OPS) if same_unit else "product"
        if op == "difference" and informative(evaluate(right, world)):
            op = "average"
        if rng.random() < 0.5 and left.depth > right.depth and op != "difference":
            left, right = right, left
        return Op(op, left, right)
    plain = [
        lookup
        for lookup in _numeric(world, found)
        if world.attributes[lookup.phrase].dimension is None
        and world.attributes[lookup.phrase].per is None
        and lookup.depth == hops
    ]
    if not plain:
        return None
    left = rng.choice(plain)
    rights = [
        lookup
        for lookup in plain
        if lookup.phrase == left.phrase
        and lookup.root != left.root
        and evaluate(lookup, world) != evaluate(left, world)
        and evaluate(lookup.subject, world) != evaluate(left.subject, world)
    ]
    return Compare(left.phrase, left.subject, rng.choice(rights).subject) if rights else None
