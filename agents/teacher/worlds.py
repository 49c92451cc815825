"""Knowledge text read into a world: entity types, entities, and attributes with their values.

The project's knowledge is written in controlled English or Chinese, one fact per clause. A first pass collects the
entities ("Mira Sol and Jon Aas are pilots."), a second the facts about them ("The home hangar of KL-207 is North
Bay."). A value that is itself an entity of another type makes the attribute a relation; two figures with the two
phrases of a dimension ("12 crowns for members and 15 crowns for others") make a parameter of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from astrolabe.records.card import KnowledgeRow

Language = Literal["en", "zh"]
Kind = Literal["relation", "number", "text", "date"]


@dataclass(frozen=True)
class Dimension:
    """A parameter besides the entity: how its values stand in a text and in a call."""

    parameter: str
    type: Literal["boolean", "integer", "string"]
    phrases: dict[str, tuple[tuple[str, Any], ...]]
    """language -> (phrase, value); empty for the year, whose phrase is a pattern."""

    def values(self, language: Language) -> list[Any]:
        return [value for _, value in self.phrases[language]]

    def phrase(self, value: Any, language: Language) -> str:
        """The phrase that says `value` in a question, without outer blanks."""
        if self.parameter == "year":
            return f"in {value}" if language == "en" else f"{value}年"
        return next(phrase for phrase, known in self.phrases[language] if known == value)


DIMENSIONS = (
    Dimension("year", "integer", {"en": (), "zh": ()}),
    Dimension(
        "member",
        "boolean",
        {"en": (("for members", True), ("for others", False)), "zh": (("非会员", False), ("会员", True))},
    ),
    Dimension(
        "season",
        "string",
        {"en": (("in summer", "summer"), ("in winter", "winter")), "zh": (("夏季", "夏季"), ("冬季", "冬季"))},
    ),
    Dimension(
        "when",
        "string",
        {
            "en": (("on weekdays", "weekdays"), ("on weekends", "weekends")),
            "zh": (("工作日", "工作日"), ("周末", "周末")),
        },
    ),
    Dimension(
        "age",
        "string",
        {"en": (("for adults", "adults"), ("for children", "children")), "zh": (("成人", "成人"), ("儿童", "儿童"))},
    ),
    Dimension(
        "shift",
        "string",
        {"en": (("by day", "day"), ("by night", "night")), "zh": (("白天", "白天"), ("夜间", "夜间"))},
    ),
    Dimension(
        "trip",
        "string",
        {"en": (("one way", "one way"), ("both ways", "both ways")), "zh": (("单程", "单程"), ("往返", "往返"))},
    ),
)
DIMENSION_BY_NAME = {dimension.parameter: dimension for dimension in DIMENSIONS}

CONVERSIONS: dict[str, dict[str, tuple[str, int]]] = {
    "en": {
        "metres": ("centimetres", 100),
        "kilometres": ("metres", 1000),
        "kilograms": ("grams", 1000),
        "tonnes": ("kilograms", 1000),
        "litres": ("millilitres", 1000),
        "hours": ("minutes", 60),
        "minutes": ("seconds", 60),
        "days": ("hours", 24),
        "years": ("months", 12),
    },
    "zh": {
        "米": ("厘米", 100),
        "公里": ("米", 1000),
        "公斤": ("克", 1000),
        "吨": ("公斤", 1000),
        "升": ("毫升", 1000),
        "小时": ("分钟", 60),
        "分钟": ("秒", 60),
        "天": ("小时", 24),
        "年": ("个月", 12),
    },
}
"""unit -> (smaller unit, how many of it make one)."""


@dataclass
class Attribute:
    """One column of a world: what is known of every entity of `owner` under this phrase."""

    phrase: str
    owner: str
    kind: Kind
    target: str | None = None
    unit: str | None = None
    per: str | None = None
    """What the figure counts by ("night" in "85 crowns a night"): the tool takes how many."""
    dimension: Dimension | None = None
    values: dict[str, Any] = field(default_factory=dict)
    """entity -> value, or {dimension value as text: number}."""


@dataclass
class World:
    language: Language
    domain: str
    types: dict[str, list[str]]
    attributes: dict[str, Attribute]

    def type_of(self, entity: str) -> str | None:
        return next((name for name, members in self.types.items() if entity in members), None)


def dimension_key(value: Any) -> str:
    """How a dimension's value is written as a key of `data`: 2021 -> "2021", True -> "true"."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def singular(noun: str) -> str:
    """The singular of a regular English plural: ferries -> ferry, boxes -> box, pilots -> pilot."""
    if noun.endswith("ies"):
        return noun[:-3] + "y"
    if noun.endswith(("sses", "xes", "ches", "shes")):
        return noun[:-2]
    return noun.removesuffix("s")


def plural(noun: str) -> str:
    """The inverse of `singular`."""
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return noun[:-1] + "ies"
    if noun.endswith(("ss", "x", "ch", "sh")):
        return noun + "es"
    return noun + "s"


def article(noun: str) -> str:
    return ("an " if noun[:1].lower() in "aeiou" else "a ") + noun


def to_number(text: str) -> int | float:
    return float(text) if "." in text else int(text)


_NUMBER = r"-?\d+(?:\.\d+)?"
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def split_dimension(text: str, language: Language) -> tuple[str, Dimension, Any] | None:
    """(rest, dimension, value) of a text that ends (English) or begins (Chinese) with a dimension's phrase."""
    if language == "en":
        year = re.fullmatch(r"(.+) in (\d{4})", text)
        if year:
            return year[1], DIMENSION_BY_NAME["year"], int(year[2])
        for dimension in DIMENSIONS:
            for phrase, value in dimension.phrases["en"]:
                if text.endswith(" " + phrase):
                    return text[: -len(phrase) - 1], dimension, value
        return None
    year = re.fullmatch(r"(\d{4})年(.+)", text)
    if year:
        return year[2], DIMENSION_BY_NAME["year"], int(year[1])
    for dimension in DIMENSIONS:
        for phrase, value in dimension.phrases["zh"]:
            if text.startswith(phrase):
                return text[len(phrase) :], dimension, value
    return None


def _figure(text: str, language: Language) -> tuple[int | float, str | None, str | None] | None:
    """(number, unit, per) of "85 crowns a night", "34 metres", "每晚85元", "34米"; None if it is no figure."""
    if language == "en":
        match = re.fullmatch(rf"({_NUMBER})(?: ([a-z]+))?(?: (?:a|an|per) ([a-z]+))?", text)
        return (to_number(match[1]), match[2], match[3]) if match else None
    match = re.fullmatch(rf"(?:每([\u4e00-\u9fff]{{1,2}}))?({_NUMBER})([\u4e00-\u9fff]{{1,3}})?", text)
    return (to_number(match[2]), match[3], match[1]) if match else None


@dataclass(frozen=True)
class Fact:
    entity: str
    phrase: str
    text: str


def _entities(sentences: list[str], language: Language) -> tuple[dict[str, list[str]], list[str]]:
    """Entity types with their members, and the sentences that are left (facts)."""
    types: dict[str, list[str]] = {}
    rest: list[str] = []
    for sentence in sentences:
        names: list[str] = []
        kind = ""
        if language == "en":
            match = re.fullmatch(r"(.+) and (.+) are ([a-z ]+)", sentence) or re.fullmatch(
                r"The ([a-z ]+) are (.+) and (.+)", sentence
            )
            if match and sentence.startswith("The "):
                kind, names = singular(match[1]), [*match[2].split(", "), match[3]]
            elif match and " of " not in sentence and " is " not in sentence:
                kind, names = singular(match[3]), [*match[1].split(", "), match[2]]
        else:
            match = re.fullmatch(r"([\u4e00-\u9fff]{1,6})有(.+)", sentence)
            if match and "的" not in sentence:
                kind, names = match[1], re.split(r"、|和", match[2])
        if kind and len(names) > 1:
            members = types.setdefault(kind, [])
            members += [name for name in names if name not in members]
        else:
            rest.append(sentence)
    return types, rest


def _facts(sentences: list[str], entities: list[str], language: Language) -> list[Fact]:
    known = "|".join(re.escape(name) for name in sorted(entities, key=len, reverse=True)) or r"(?!)"
    facts: list[Fact] = []
    for sentence in sentences:
        entity = ""
        if language == "en":
            for clause in re.split(r", and (?:its|the) (?=[a-z])", sentence):
                clause = re.sub(r"^In the records, t", "T", clause)
                match = re.fullmatch(rf"The ([^,]+?) of ({known}) (?:is|was) (.+)", clause)
                if match:
                    entity = match[2]
                    facts.append(Fact(entity, match[1], match[3]))
                    continue
                match = re.fullmatch(rf"({known}) has (?:the|an|a) ([^,]+?) of (.+)", clause) or re.fullmatch(
                    rf"({known})'s ([^,]+?) is (.+)", clause
                )
                if match:
                    entity = match[1]
                    facts.append(Fact(entity, match[2], match[3]))
                    continue
                match = re.fullmatch(r"([^,]+?) is (.+)", clause)
                if match and entity:
                    facts.append(Fact(entity, match[1], match[2]))
        else:
            for clause in sentence.split("，"):
                match = re.fullmatch(rf"({known})的([^，是为]+?)[是为](.+)", clause)
                if match:
                    entity = match[1]
                    facts.append(Fact(entity, match[2], match[3]))
                    continue
                match = re.fullmatch(r"([^，是为的]+?)[是为](.+)", clause)
                if match and entity:
                    facts.append(Fact(entity, match[1], match[2]))
    return facts


def _read_value(text: str, language: Language) -> dict[str, Any]:
    """Fields of the attribute that a value's text shows, with the value under "value"."""
    parts = text.split(" and ") if language == "en" else text.split("、")
    split = [split_dimension(part, language) for part in parts]
    if len(parts) == 2 and all(split):
        (rest1, dimension, value1), (rest2, dimension2, value2) = split  # type: ignore[misc]
        figures = [_figure(rest1, language), _figure(rest2, language)]
        if dimension is dimension2 and figures[0] and figures[1]:
            return {
                "kind": "number",
                "unit": figures[0][1],
                "dimension": dimension,
                "value": {dimension_key(value1): figures[0][0], dimension_key(value2): figures[1][0]},
            }
    figure = _figure(text, language)
    if figure:
        return {"kind": "number", "unit": figure[1], "per": figure[2], "value": figure[0]}
    return {"kind": "date" if _DATE.fullmatch(text) else "text", "value": text}


def read_world(row: KnowledgeRow) -> World:
    """The world that a knowledge text tells of; sentences of another form are passed over, so a text that is not in
    the controlled form gives a world without attributes."""
    language = row.language
    splitter = r"\.(?:\s+|$)" if language == "en" else r"[。\n]"
    sentences = [part.strip() for part in re.split(splitter, row.text) if part and part.strip()]
    types, rest = _entities(sentences, language)
    world = World(language, row.domain, types, {})
    entities = [name for members in types.values() for name in members]
    for fact in _facts(rest, entities, language):
        owner = world.type_of(fact.entity)
        assert owner is not None
        target = world.type_of(fact.text)
        seen: dict[str, Any] = (
            {"kind": "relation", "target": target, "value": fact.text}
            if target is not None
            else _read_value(fact.text, language)
        )
        value = seen.pop("value")
        attribute = world.attributes.setdefault(fact.phrase, Attribute(fact.phrase, owner, **seen))
        if (attribute.owner, attribute.kind, attribute.target) == (owner, seen["kind"], target):
            attribute.values[fact.entity] = value
    return world
