"""Writes the project's knowledge: `python -m agents.teacher.make_knowledge` from the domain files, the same every time.

`astrolabe/data/knowledge/domains_*.toml` say what each domain is about, `names.toml` what its entities are called; a
seeded draw of entities, facts and sentence forms makes each row of `en.jsonl` and `zh.jsonl`. `words_zh.json` keeps the
English of every Chinese word, which tool names are made of.
"""

from __future__ import annotations

import json
import random
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.teacher.random_worlds import Fresh, code
from agents.teacher.texts import write_text
from agents.teacher.worlds import DIMENSION_BY_NAME, Attribute, Language, World
from astrolabe.records.card import KnowledgeRow
from astrolabe.records.ids import rng_for

FOLDER = Path(__file__).parents[2] / "astrolabe" / "data" / "knowledge"
ROWS_PER_DOMAIN = 3
_DECIMAL_UNITS = (
    "metres",
    "kilometres",
    "tonnes",
    "kilograms",
    "litres",
    "hours",
    "米",
    "公里",
    "吨",
    "公斤",
    "升",
    "小时",
)
_FIGURE = re.compile(r"(\d+)-(\d+)(?: ([^/~ ]+))?(?: /([^ ~]+))?(?: ~([a-z]+))?")


def _word(text: str) -> tuple[str, str]:
    """("翼展", "wing span") of "翼展=wing span"; an English word is its own English."""
    word, _, english = text.partition("=")
    return word.strip(), (english or word).strip()


@dataclass
class Domain:
    """One table of a domain file, parsed."""

    name: str
    types: list[tuple[str, str]]
    relations: list[tuple[str, str, str]]
    attributes: list[tuple[str, str, str]]
    """(owner, phrase, what its values are)."""
    english: dict[str, str]


def read_domains(language: Language) -> list[Domain]:
    """The domains of one language, in file order."""
    out = []
    for title, table in tomllib.loads((FOLDER / f"domains_{language}.toml").read_text(encoding="utf-8")).items():
        name, name_english = _word(title)
        english = {name: name_english}
        types, relations, attributes = [], [], []
        for line in table["types"]:
            words, style = line.rsplit(" ", 1)
            word, english_word = _word(words)
            english[word] = english_word
            types.append((word, style))
        for line in table["relations"]:
            owner, rest = line.split(": ", 1)
            words, target = rest.rsplit(" > ", 1)
            word, english_word = _word(words)
            english[word] = english_word
            relations.append((owner, word, target))
        for line in table["attributes"]:
            owner, rest = line.split(": ", 1)
            words, values = rest.rsplit(" = ", 1)
            word, english_word = _word(words)
            english[word] = english_word
            attributes.append((owner, word, values))
        out.append(Domain(name, types, relations, attributes, english))
    return out


def _names(language: Language, style: str, rng: random.Random, fresh: Fresh, words: dict[str, Any]) -> str:
    if style == "code":
        return str(fresh.draw(lambda: code(rng)))
    if style == "person":
        first, last = words["first"], words["last"]
        if language == "en":
            return str(fresh.draw(lambda: f"{rng.choice(first)} {rng.choice(last)}"))
        return str(fresh.draw(lambda: rng.choice(last) + rng.choice(first)))
    if language == "en":
        firsts, seconds = zip(*(name.split() for name in words[style]), strict=True)
        return str(fresh.draw(lambda: f"{rng.choice(firsts)} {rng.choice(seconds)}"))
    return str(fresh.draw(lambda: rng.choice(words[style])))


def _value(values: str, rng: random.Random, fresh: Fresh) -> Any:
    if values == "code":
        return fresh.draw(lambda: code(rng))
    if values == "date":
        return fresh.draw(lambda: f"{rng.randint(2016, 2027)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}")
    match = _FIGURE.fullmatch(values)
    assert match is not None, values
    low, high = int(match[1]), int(match[2])
    if rng.random() < 0.3 and match[3] in _DECIMAL_UNITS and high < 100:
        return fresh.draw(lambda: rng.randint(low, high - 1) + rng.randint(1, 9) / 10)
    return fresh.number(low, high)


def _attribute(
    domain: Domain,
    owner: str,
    phrase: str,
    values: str,
    members: list[str],
    rng: random.Random,
    fresh: Fresh,
    language: Language,
) -> Attribute:
    if values in ("code", "date"):
        kind: Any = "text" if values == "code" else "date"
        return Attribute(phrase, owner, kind, values={m: _value(values, rng, fresh) for m in members})
    match = _FIGURE.fullmatch(values)
    assert match is not None, f"{domain.name}: {values}"
    dimension = DIMENSION_BY_NAME[match[5]] if match[5] else None
    attribute = Attribute(phrase, owner, "number", None, match[3], match[4], dimension)
    year = rng.randint(2008, 2023)
    for member in members:
        if dimension is None:
            attribute.values[member] = _value(values, rng, fresh)
        else:
            known = [year, year + 1] if dimension.parameter == "year" else dimension.values(language)
            attribute.values[member] = {
                str(v).lower() if isinstance(v, bool) else str(v): _value(values, rng, fresh) for v in known
            }
    return attribute


def domain_world(
    domain: Domain, language: Language, rng: random.Random, words: dict[str, Any], names: Fresh | None = None
) -> World:
    """Entities, relations and three to five attributes of one domain; `names` holds those that others have."""
    fresh = Fresh(rng)
    names = names or fresh
    size = 2 if len(domain.types) > 3 else rng.choice((2, 3))
    types = {
        kind: [_names(language, style, rng, names, words) for _ in range(size + (index == 0 and rng.random() < 0.5))]
        for index, (kind, style) in enumerate(domain.types)
    }
    attributes: dict[str, Attribute] = {}
    for owner, phrase, target in domain.relations:
        targets = types[target][:]
        rng.shuffle(targets)
        values = {member: targets[i % len(targets)] for i, member in enumerate(types[owner])}
        attributes[phrase] = Attribute(phrase, owner, "relation", target, values=values)
    chosen = rng.sample(domain.attributes, min(len(domain.attributes), rng.choice((3, 4, 4, 5))))
    for owner, phrase, values_text in domain.attributes:
        if (owner, phrase, values_text) in chosen:
            attributes[phrase] = _attribute(domain, owner, phrase, values_text, types[owner], rng, fresh, language)
    return World(language, domain.name, types, attributes)


def knowledge_rows(language: Language) -> list[KnowledgeRow]:
    """All rows of one language: domains in file order, each `ROWS_PER_DOMAIN` times with other entities and facts. No two
    English rows share an entity, so that rows can be held out; the Chinese names are too few for that."""
    words = tomllib.loads((FOLDER / "names.toml").read_text(encoding="utf-8"))[language]
    rows = []
    names = Fresh(rng_for(0, "knowledge", language)) if language == "en" else None
    for number in range(ROWS_PER_DOMAIN):
        for domain in read_domains(language):
            rng = rng_for(0, "knowledge", language, domain.name, number)
            world = domain_world(domain, language, rng, words, names)
            rows.append(KnowledgeRow(domain=domain.name, text=write_text(world, rng), language=language))
    return rows


def main() -> None:
    for language in ("en", "zh"):
        lines = [row.to_line() + "\n" for row in knowledge_rows(language)]  # type: ignore[arg-type]
        (FOLDER / f"{language}.jsonl").write_text("".join(lines), encoding="utf-8")
    words = {word: english for domain in read_domains("zh") for word, english in domain.english.items()}
    text = json.dumps(words, ensure_ascii=False, indent=0, sort_keys=True)
    (FOLDER / "words_zh.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
