"""A world written out as a knowledge text: the inverse of `worlds.read_world`.

One paragraph: which entities there are, then fact by fact in a few sentence forms, in an order that keeps the facts of
one entity near each other, as a person would tell them.
"""

from __future__ import annotations

import random
from typing import Any

from agents.teacher.worlds import Attribute, Language, World, article, plural


def _value_text(attribute: Attribute, value: Any, language: Language) -> str:
    """A value as a text gives it, with its unit, quantity or dimension."""
    unit = attribute.unit or ""
    if attribute.dimension is not None:
        assert isinstance(value, dict)
        parts = []
        for key, number in value.items():
            dimension = attribute.dimension
            typed: Any = (
                key == "true" if dimension.type == "boolean" else int(key) if dimension.type == "integer" else key
            )
            phrase = dimension.phrase(typed, language)
            parts.append(
                " ".join(filter(None, (str(number), unit, phrase))) if language == "en" else f"{phrase}{number}{unit}"
            )
        return (" and " if language == "en" else "、").join(parts)
    if attribute.kind != "number":
        return str(value)
    if language == "en":
        per = f" {article(attribute.per)}" if attribute.per else ""
        return f"{value}{' ' + unit if unit else ''}{per}"
    return (f"每{attribute.per}" if attribute.per else "") + f"{value}{unit}"


def _listing(names: list[str], language: Language) -> str:
    if language == "en":
        return ", ".join(names[:-1]) + " and " + names[-1]
    return "、".join(names[:-1]) + "和" + names[-1]


def _entity_facts(entity: str, world: World, rng: random.Random) -> list[str]:
    """Sentences about one entity, sometimes two facts in one."""
    facts = [(a, a.values[entity]) for a in world.attributes.values() if entity in a.values]
    rng.shuffle(facts)
    out: list[str] = []
    index = 0
    while index < len(facts):
        attribute, value = facts[index]
        text = _value_text(attribute, value, world.language)
        joined = index + 1 < len(facts) and attribute.dimension is None and rng.random() < 0.45
        if world.language == "en":
            form = rng.random()
            if form < 0.5:
                sentence = f"The {attribute.phrase} of {entity} is {text}"
            elif form < 0.75:
                sentence = f"{entity}'s {attribute.phrase} is {text}"
            else:
                sentence = f"{entity} has {article(attribute.phrase)} of {text}"
        else:
            sentence = f"{entity}的{attribute.phrase}{rng.choice('是为')}{text}"
        if joined:
            other, other_value = facts[index + 1]
            other_text = _value_text(other, other_value, world.language)
            if world.language == "en":
                sentence += f", and the {other.phrase} is {other_text}"
            else:
                sentence += f"，{other.phrase}{rng.choice('是为')}{other_text}"
            index += 1
        index += 1
        out.append(sentence)
    return out


def write_text(world: World, rng: random.Random) -> str:
    """The paragraph. `read_world` of it gives the same facts."""
    english = world.language == "en"
    sentences: list[str] = []
    for kind, members in world.types.items():
        if english:
            listing = _listing(members, "en")
            sentences.append(
                f"{listing} are {plural(kind)}" if rng.random() < 0.5 else f"The {plural(kind)} are {listing}"
            )
        else:
            sentences.append(f"{kind}有{_listing(members, 'zh')}")
    for members in world.types.values():
        for entity in members:
            sentences += _entity_facts(entity, world, rng)
    return ". ".join(sentences) + "." if english else "。".join(sentences) + "。"
