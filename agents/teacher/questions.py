"""Questions about a world as trees, and the one phrase grammar that writes and reads them.

A query is a lookup ("the wing span of the assigned plane of Mira Sol"), an operation on two of them, or a comparison.
`render` turns it into English or Chinese, `parse` turns such a question back into the same tree without knowing the
world, so that the teacher can plan from a question and the tools alone.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any, Literal

from agents.teacher.worlds import CONVERSIONS, DIMENSIONS, Language, plural, singular

OpName = Literal["sum", "difference", "product", "percentage", "average"]
OPS: tuple[OpName, ...] = ("sum", "difference", "product", "percentage", "average")


@dataclass(frozen=True)
class Lookup:
    """`phrase` of a subject: an entity's name, or the value of another lookup."""

    phrase: str
    subject: Lookup | str
    modifiers: tuple[tuple[str, Any], ...] = ()
    """(parameter, value): a dimension's value, "unit", or how many of what the figure counts by ("night", 3)."""

    @property
    def depth(self) -> int:
        return 1 + (self.subject.depth if isinstance(self.subject, Lookup) else 0)

    @property
    def root(self) -> str:
        return self.subject.root if isinstance(self.subject, Lookup) else self.subject


@dataclass(frozen=True)
class Op:
    op: OpName
    left: Query
    right: Query | int

    @property
    def depth(self) -> int:
        return 1 + max(self.left.depth, 0 if isinstance(self.right, int) else self.right.depth)


@dataclass(frozen=True)
class Compare:
    """Which of two subjects has the larger figure under `phrase`: answered by reasoning on two looked-up figures."""

    phrase: str
    left: Lookup | str
    right: Lookup | str

    @property
    def sides(self) -> tuple[Lookup, Lookup]:
        return Lookup(self.phrase, self.left), Lookup(self.phrase, self.right)

    @property
    def depth(self) -> int:
        return max(side.depth for side in self.sides)


Query = Lookup | Op | Compare

QUANTIFIERS = ("小时", "公斤", "晚", "天", "张", "件", "人", "月", "次", "页", "份", "箱", "位", "包", "杯", "盒", "课")
_WORD = {
    "en": {"sum": "plus", "difference": "minus", "product": "times"},
    "zh": {"sum": "加上", "difference": "减去", "product": "乘以"},
}
_FORMS = {
    "en": ("What is {}?", "Tell me {}.", "Find {}.", "I need {}.", "Please look up {}.", "Can you tell me {}?"),
    "zh": ("{}是多少？", "请告诉我{}。", "请查一下{}。", "我想知道{}。", "帮我查{}。"),
}
_SHELLS = {
    "en": re.compile(r"(?:What is|Tell me|Find|I need|Please look up|Can you tell me) (.+)[?.]"),
    "zh": re.compile(r"(?:请告诉我|请查一下|我想知道|帮我查)?(.+?)(?:是多少|是什么|是哪个|等于多少)?[？。]"),
}


def _modifiers(modifiers: tuple[tuple[str, Any], ...], language: Language) -> str:
    """All modifiers as they stand in a question (English: each after a blank; Chinese: glued)."""
    out = ""
    for name, value in modifiers:
        if name == "unit":
            out += f" in {value}" if language == "en" else f"以{value}计"
        elif name == "year" or any(d.parameter == name for d in DIMENSIONS):
            dimension = next(d for d in DIMENSIONS if d.parameter == name)
            out += (" " if language == "en" else "") + dimension.phrase(value, language)
        else:
            out += f" for {value} {plural(name)}" if language == "en" else f"{value}{name}"
    return out


def noun_phrase(query: Lookup | str, language: Language, *, possessive: bool = False) -> str:
    """The query as a noun phrase; `possessive` writes the innermost English step as "Mira Sol's plane"."""
    if isinstance(query, str):
        return query
    modifiers = _modifiers(query.modifiers, language)
    if language == "zh":
        subject = noun_phrase(query.subject, language)
        gap = " " if modifiers[:1].isdigit() and subject[-1:].isascii() else ""  # "KL-207 3天", not "KL-2073天"
        return f"{subject}{gap}{modifiers}的{query.phrase}"
    if possessive and isinstance(query.subject, str):
        return f"{query.subject}'s {query.phrase}{modifiers}"
    return f"the {query.phrase} of {noun_phrase(query.subject, language, possessive=possessive)}{modifiers}"


def _expression(query: Query, language: Language, possessive: bool) -> str:
    if isinstance(query, Lookup):
        return noun_phrase(query, language, possessive=possessive)
    assert isinstance(query, Op)
    left = _expression(query.left, language, possessive)
    if isinstance(query.right, int):
        word = _WORD[language][query.op]
        return f"{left}, {word} {query.right}" if language == "en" else f"{left}，再{word}{query.right}"
    right = _expression(query.right, language, False)
    if language == "en":
        if query.op == "percentage":
            return f"{left} as a percentage of {right}"
        if query.op == "average":
            return f"the average of {left} and {right}"
        return f"{left} {_WORD['en'][query.op]} {right}"
    if query.op == "percentage":
        return f"{left}占{right}的百分比"
    if query.op == "average":
        return f"{left}与{right}的平均值"
    return f"{left}{_WORD['zh'][query.op]}{right}"


def render(query: Query, language: Language, rng: random.Random) -> str:
    """The question that asks for `query`, in one of a few forms."""
    if isinstance(query, Compare):
        left, right = (noun_phrase(side, language) for side in (query.left, query.right))
        if language == "en":
            return f"Which has the larger {query.phrase}, {left} or {right}?"
        return f"{left}和{right}，哪个的{query.phrase}更大？"
    text = _expression(query, language, possessive=rng.random() < 0.3)
    form = rng.choice(_FORMS[language])
    if language == "zh" and isinstance(query, Op) and query.op not in ("percentage", "average"):
        form = form.replace("是多少", "等于多少")
    return form.format(text)


_EN_TAIL = re.compile(
    r"(?P<rest>.+?)(?: (?P<phrase>"
    + "|".join(re.escape(phrase) for d in DIMENSIONS for phrase, _ in d.phrases["en"])
    + r")| in (?P<year>\d{4})| in (?P<unit>"
    + "|".join(sorted({unit for pair in CONVERSIONS["en"].items() for unit in (pair[0], pair[1][0])}))
    + r")| for (?P<count>\d+) (?P<per>[a-z]+))"
)
_ZH_TAIL = re.compile(
    r"(?P<rest>.+?) ?(?:(?P<phrase>"
    + "|".join(phrase for d in DIMENSIONS for phrase, _ in d.phrases["zh"])
    + r")|(?P<year>\d{4})年|以(?P<unit>[\u4e00-\u9fff]{1,3})计|(?P<count>\d+)(?P<per>"
    + "|".join(QUANTIFIERS)
    + "))"
)


def _strip_modifiers(text: str, language: Language) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """(text without the modifiers that end it, the modifiers in order)."""
    found: list[tuple[str, Any]] = []
    while match := (_EN_TAIL if language == "en" else _ZH_TAIL).fullmatch(text):
        if match["phrase"]:
            dimension, value = next(
                (d, value) for d in DIMENSIONS for phrase, value in d.phrases[language] if phrase == match["phrase"]
            )
            found.append((dimension.parameter, value))
        elif match["year"]:
            found.append(("year", int(match["year"])))
        elif match["unit"]:
            found.append(("unit", match["unit"]))
        else:
            found.append((singular(match["per"]) if language == "en" else match["per"], int(match["count"])))
        text = match["rest"]
    return text, tuple(reversed(found))


def parse_noun_phrase(text: str, language: Language) -> Lookup | str:
    """The inverse of `noun_phrase`; a text without a phrase is an entity."""
    text = text.strip()
    if language == "zh":
        root, *phrases = text.split("的")
        out: Lookup | str = ""
        for index, phrase in enumerate(phrases):
            last = index == len(phrases) - 1
            if index == 0:
                root, modifiers = _strip_modifiers(root, "zh") if last else (root, ())
                out = Lookup(phrase, root, modifiers)
                continue
            if last:  # modifiers of the last step stand behind the phrase before it
                assert isinstance(out, Lookup)
                before, modifiers = _strip_modifiers(out.phrase, "zh")
                out = Lookup(phrase, Lookup(before, out.subject, out.modifiers), modifiers)
            else:
                out = Lookup(phrase, out)
        return out if phrases else text
    bare, modifiers = _strip_modifiers(text, "en")
    *outer, inner = bare.split(" of ")
    possessive = re.fullmatch(r"(.+?)'s (.+)", inner)
    query: Lookup | str = Lookup(possessive[2], possessive[1]) if possessive else inner
    for phrase in reversed(outer):
        query = Lookup(phrase.removeprefix("the "), query)
    if isinstance(query, str) or not modifiers:
        return query if isinstance(query, Lookup) else text
    return Lookup(query.phrase, query.subject, modifiers)


def _parse_expression(text: str, language: Language) -> Query | None:
    words = {word: op for op, word in _WORD[language].items()}
    constant = (
        re.fullmatch(r"(.+), (plus|minus|times) (\d+)", text)
        if language == "en"
        else re.fullmatch(r"(.+)，再(加上|减去|乘以)(\d+)", text)
    )
    if constant:
        left = _parse_expression(constant[1], language)
        return Op(words[constant[2]], left, int(constant[3])) if left else None  # type: ignore[arg-type]
    patterns: tuple[tuple[str, str], ...] = (
        (
            ("percentage", r"(.+) as a percentage of (.+)"),
            ("average", r"the average of (.+) and (the .+)"),
            ("sum", r"(.+) plus (.+)"),
            ("difference", r"(.+) minus (.+)"),
            ("product", r"(.+) times (.+)"),
        )
        if language == "en"
        else (
            ("percentage", r"(.+)占(.+)的百分比"),
            ("average", r"(.+)与(.+)的平均值"),
            ("sum", r"(.+)加上(.+)"),
            ("difference", r"(.+)减去(.+)"),
            ("product", r"(.+)乘以(.+)"),
        )
    )
    for op, pattern in patterns:
        match = re.fullmatch(pattern, text)
        if match:
            first, second = (parse_noun_phrase(part, language) for part in match.groups())
            if isinstance(first, Lookup) and isinstance(second, Lookup):
                return Op(op, first, second)  # type: ignore[arg-type]
            return None
    lookup = parse_noun_phrase(text, language)
    return lookup if isinstance(lookup, Lookup) else None


def parse(question: str, language: Language) -> Query | None:
    """The tree that a question asks for, or None if it is not of this grammar."""
    question = question.strip()
    comparison = (
        re.fullmatch(r"Which has the larger (.+?), (.+) or (.+)\?", question)
        if language == "en"
        else re.fullmatch(r"(.+)和(.+)，哪个的(.+)更大？", question)
    )
    if comparison:
        phrase, left, right = comparison.groups() if language == "en" else comparison.group(3, 1, 2)
        return Compare(phrase, parse_noun_phrase(left, language), parse_noun_phrase(right, language))
    shell = _SHELLS[language].fullmatch(question)
    return _parse_expression(shell[1], language) if shell else None
