"""The sub-questions of a plan, written and read: what a node asks, and how many earlier answers it refers to.

A value of an earlier step is referred to ("that plane", "the first number", "after that") and never named, so that the
question shows which parents it needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from agents.teacher.plans import Step
from agents.teacher.questions import Compare, Lookup, OpName, noun_phrase, parse
from agents.teacher.worlds import Language, to_number

_OP_FORMS: dict[Language, dict[OpName, str]] = {
    "en": {
        "sum": "{} plus {}",
        "difference": "{} minus {}",
        "product": "{} times {}",
        "percentage": "{} as a percentage of {}",
        "average": "the average of {} and {}",
    },
    "zh": {
        "sum": "{}加上{}等于多少",
        "difference": "{}减去{}等于多少",
        "product": "{}乘以{}等于多少",
        "percentage": "{}占{}的百分比是多少",
        "average": "{}与{}的平均值是多少",
    },
}
_NUMBERS: dict[Language, tuple[str, str, str]] = {
    "en": ("the first number", "the second number", "that number"),
    "zh": ("第一个数", "第二个数", "那个数"),
}


def node_question(step: Step, language: Language) -> str:
    """The sub-question of one step."""
    query = step.query
    if isinstance(query, Lookup):
        assert step.attribute is not None
        if isinstance(query.subject, Lookup):
            that = f"that {step.attribute.owner}" if language == "en" else f"那个{step.attribute.owner}"
            query = Lookup(query.phrase, that, query.modifiers)
        text = noun_phrase(query, language)
        if language == "en":
            return f"What is {text}?"
        return f"{text}是{'多少' if step.attribute.kind == 'number' else '什么'}？"
    if isinstance(query, Compare):
        if language == "en":
            return f"Which of the two has the larger {query.phrase}?"
        return f"两者中哪个的{query.phrase}更大？"
    first, second, only = _NUMBERS[language]
    operands = (only, str(query.right)) if isinstance(query.right, int) else (first, second)
    text = _OP_FORMS[language][query.op].format(*operands)
    return f"What is {text}?" if language == "en" else f"{text}？"


@dataclass(frozen=True)
class SubQuestion:
    """A node's question, read."""

    kind: Literal["lookup", "op", "compare", "change", "read"]
    needs: int
    """How many earlier answers it refers to."""
    phrase: str = ""
    entity: str | None = None
    """None if it is an earlier answer."""
    modifiers: tuple[tuple[str, Any], ...] = ()
    op: OpName | None = None
    constant: int | None = None
    arguments: tuple[Any, ...] = ()
    """Of a change: (source, target, amount) or (entity, new value)."""
    of_type: str = ""
    """Of a lookup on an earlier answer: the type that it must have."""


def _pattern(form: str, language: Language) -> re.Pattern[str]:
    first, second, only = _NUMBERS[language]
    left, right = f"(?P<a>{first}|{only})", rf"(?P<b>{second}|\d+)"
    text = re.escape(form).replace(r"\{\}", "\0")
    text = text.replace("\0", left, 1).replace("\0", right, 1)
    return re.compile(rf"What is {text}\?" if language == "en" else rf"{text}？")


_OP_PATTERNS = {
    language: [(op, _pattern(form, language)) for op, form in forms.items()] for language, forms in _OP_FORMS.items()
}
_COMPARE = {
    "en": re.compile(r"Which of the two has the larger (.+)\?"),
    "zh": re.compile(r"两者中哪个的(.+)更大？"),
}
MOVE = {
    "en": re.compile(r"Move (\d+) of the (.+) from (.+) to (.+)\."),
    "zh": re.compile(r"将(.+)的(.+)调出(\d+)给(.+)。"),
}
CHANGE = {
    "en": re.compile(r"Change the (.+) of (.+) to (\S+), and say what it was before\."),
    "zh": re.compile(r"把(.+)的(.+)改为(\S+?)，并说出原来的值。"),
}
READ_AFTER = {
    "en": re.compile(r"What is the (.+) of (.+) after that\?"),
    "zh": re.compile(r"此后(.+)的(.+)是多少？"),
}


def _state_question(question: str, language: Language) -> SubQuestion | None:
    move, change, read = (p[language].fullmatch(question) for p in (MOVE, CHANGE, READ_AFTER))
    if move:
        amount, phrase, source, target = move.groups() if language == "en" else move.group(3, 2, 1, 4)
        return SubQuestion("change", 0, phrase, arguments=(source, target, int(amount)))
    if change:
        phrase, entity, value = change.groups() if language == "en" else change.group(2, 1, 3)
        number = re.fullmatch(r"-?\d+(?:\.\d+)?", value)
        return SubQuestion("change", 0, phrase, arguments=(entity, to_number(value) if number else value))
    if read:
        phrase, entity = read.groups() if language == "en" else read.group(2, 1)
        return SubQuestion("read", 1, phrase, entity)
    return None


def read_question(question: str, language: Language) -> SubQuestion | None:
    """The sub-question in a node's text, or None if it is not of this grammar (a compound one is not)."""
    stateful = _state_question(question, language)
    if stateful is not None:
        return stateful
    compare = _COMPARE[language].fullmatch(question)
    if compare:
        return SubQuestion("compare", 2, compare[1])
    for op, pattern in _OP_PATTERNS[language]:
        match = pattern.fullmatch(question)
        if match:
            constant = int(match["b"]) if match["b"].isdigit() else None
            return SubQuestion("op", 1 if constant is not None else 2, op=op, constant=constant)
    query = parse(question, language)
    if not isinstance(query, Lookup) or isinstance(query.subject, Lookup) or re.search("[,，]", query.subject):
        return None
    reference = "that " if language == "en" else "那个"
    if query.subject.startswith(reference):
        return SubQuestion(
            "lookup", 1, query.phrase, None, query.modifiers, of_type=query.subject.removeprefix(reference)
        )
    return SubQuestion("lookup", 0, query.phrase, query.subject, query.modifiers)


_MOVE_TASK = {
    "en": re.compile(r"Move (\d+) of the (.+) from (.+) to (.+), then tell me the (.+) of (.+)\."),
    "zh": re.compile(r"将(.+)的(.+)调出(\d+)给(.+)，再告诉我(.+)的(.+)。"),
}


def read_task(question: str, language: Language) -> SubQuestion | None:
    """The change that a whole stateful question asks for first; of a move, its target is what is read after."""
    move = _MOVE_TASK[language].fullmatch(question)
    if move:
        amount, phrase, source, target = move.groups()[:4] if language == "en" else move.group(3, 2, 1, 4)
        return SubQuestion("change", 0, phrase, arguments=(source, target, int(amount)))
    read = _state_question(question, language)
    return read if read is not None and read.kind == "change" and len(read.arguments) == 2 else None
