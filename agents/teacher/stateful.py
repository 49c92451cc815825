"""Stateful tasks of the teacher: move an amount between two entities, or change a value and report the old one.

The world's table of one attribute is the state; the tools change or read it, and the goal is the state afterwards or
checks on it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agents.teacher.codegen import quote
from agents.teacher.lexicon import identifier
from agents.teacher.random_worlds import code
from agents.teacher.sub_questions import SubQuestion
from agents.teacher.worlds import Attribute, Language, World, article

_MOVABLE = {
    "en": re.compile(r".*\b(stock|balance|count|amount|allowance|tally|fleet|order|load|roster|places|points|size|limit)"),
    "zh": re.compile(r".*(库存|余额|数|订量|补贴|积分|承重)"),
}  # fmt: skip


@dataclass(frozen=True)
class StatefulTask:
    """A question that changes state, with its steps: (sub-question, answer, parents) each."""

    question: str
    answer: str
    answer_type: str
    steps: list[tuple[str, Any, list[str]]]
    state: dict[str, Any]
    goal: dict[str, Any]


def _movable(attribute: Attribute, language: Language) -> bool:
    plain = attribute.kind == "number" and attribute.dimension is None and attribute.per is None
    whole = all(isinstance(value, int) for value in attribute.values.values())
    return plain and whole and len(attribute.values) > 1 and bool(_MOVABLE[language].fullmatch(attribute.phrase))


def _move(world: World, attribute: Attribute, rng: random.Random) -> StatefulTask | None:
    source, target = rng.sample(sorted(attribute.values), 2)
    amount = rng.randint(2, min(attribute.values[source] - 1, 60))
    table = identifier(attribute.phrase)
    after = dict(attribute.values)
    after[source] -= amount
    after[target] += amount
    phrase = attribute.phrase
    if world.language == "en":
        move = f"Move {amount} of the {phrase} from {source} to {target}"
        question = f"{move}, then tell me the {phrase} of {target}."
        steps = [
            (move + ".", {"moved": amount}, []),
            (f"What is the {phrase} of {target} after that?", after[target], ["n1"]),
        ]
    else:
        move = f"将{source}的{phrase}调出{amount}给{target}"
        question = f"{move}，再告诉我{target}的{phrase}。"
        steps = [(move + "。", {"moved": amount}, []), (f"此后{target}的{phrase}是多少？", after[target], ["n1"])]
    if str(after[target]) in question:
        return None
    return StatefulTask(
        question, str(after[target]), "number", steps, {table: attribute.values}, {"state": {table: after}}
    )


def _change(world: World, attribute: Attribute, rng: random.Random) -> StatefulTask:
    entity, other = rng.sample(sorted(attribute.values), 2)
    new: Any = code(rng)
    if attribute.kind == "number":
        new = next(n for n in iter(lambda: rng.randint(12, 989), None) if n not in attribute.values.values())
    elif attribute.kind == "date":
        new = f"{rng.randint(2028, 2031)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    table, phrase = identifier(attribute.phrase), attribute.phrase
    if world.language == "en":
        question = f"Change the {phrase} of {entity} to {new}, and say what it was before."
    else:
        question = f"把{entity}的{phrase}改为{new}，并说出原来的值。"
    old = attribute.values[entity]
    goal = {
        "must": [{"path": f"$[{table!r}][{entity!r}]", "equals": new}],
        "must_not": [{"path": f"$[{table!r}][{other!r}]", "equals": new}],
    }
    kind = {"date": "date", "number": "number"}.get(attribute.kind, "span")
    return StatefulTask(question, str(old), kind, [(question, old, [])], {table: attribute.values}, goal)


def stateful_task(world: World, rng: random.Random) -> StatefulTask | None:
    """A task over one attribute of the world, or None if none of them suits."""
    movable = [a for a in world.attributes.values() if _movable(a, world.language)]
    changing = [
        a
        for a in world.attributes.values()
        if a.kind != "relation" and a.dimension is None and a.per is None and len(a.values) > 1
    ]
    if movable and (not changing or rng.random() < 0.6):
        return _move(world, rng.choice(movable), rng)
    return _change(world, rng.choice(changing), rng) if changing else None


def state_tool(
    step: SubQuestion, attribute: Attribute, language: Language, name: str
) -> tuple[str, dict[str, Any], str]:
    """(description, parameters, code) of the tool that a stateful sub-question needs."""
    owner, phrase, table = identifier(attribute.owner), attribute.phrase, quote(identifier(attribute.phrase))
    owner = owner if owner not in ("class", "state", "value", "new") else f"{owner}_name"
    english = language == "en"
    unknown = quote(f"unknown {attribute.owner}" if english else f"没有这个{attribute.owner}")
    text = {"type": "string"}
    if step.kind == "read":
        description = (
            f"Present {phrase} of {article(attribute.owner)}." if english else f"查询{attribute.owner}现在的{phrase}。"
        )
        body = f"def {name}({owner}, *, state):\n    table = state[{table}]\n    if {owner} not in table:\n        raise ToolError({unknown})\n    return table[{owner}]\n"
        return description, _schema({owner: text}), body
    if len(step.arguments) == 3:
        short = quote("the amount is not there" if english else "数量不足")
        description = (
            f"Moves some {phrase} from one {attribute.owner} to another."
            if english
            else f"把一个{attribute.owner}的{phrase}调给另一个。"
        )
        body = (
            f"def {name}(source, target, amount, *, state):\n    table = state[{table}]\n"
            f"    if source not in table or target not in table or source == target:\n        raise ToolError({unknown})\n"
            f"    if amount < 1 or amount > table[source]:\n        raise ToolError({short})\n"
            '    table[source] -= amount\n    table[target] += amount\n    return {"moved": amount}\n'
        )
        return description, _schema({"source": text, "target": text, "amount": {"type": "integer"}}), body
    description = (
        f"Changes the {phrase} of {article(attribute.owner)}; gives the old one."
        if english
        else f"修改{attribute.owner}的{phrase}，返回原来的值。"
    )
    empty = quote("the new value is empty" if english else "新值为空")
    body = (
        f"def {name}({owner}, new, *, state):\n    table = state[{table}]\n    if {owner} not in table:\n        raise ToolError({unknown})\n"
        f"    if not new:\n        raise ToolError({empty})\n    old = table[{owner}]\n    table[{owner}] = new\n    return old\n"
    )
    kind = {"type": "number"} if attribute.kind == "number" else text
    return description, _schema({owner: text, "new": kind}), body


def _schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def state_tool_name(step: SubQuestion, phrase: str) -> str:
    """Name of the tool: what it does and to what."""
    verb = "present" if step.kind == "read" else "move" if len(step.arguments) == 3 else "change"
    return f"{verb}_{identifier(phrase)}"


@dataclass(frozen=True)
class Aim:
    """A stateful question as calls to make: which tool, told by its description, and its arguments in order."""

    change: SubQuestion

    def calls(self, language: Language) -> list[tuple[Callable[[str], bool], list[Any]]]:
        phrase, arguments = self.change.phrase, list(self.change.arguments)
        if len(arguments) == 2:
            return [
                (
                    lambda text: (
                        text.startswith(f"Changes the {phrase} of " if language == "en" else "修改") and phrase in text
                    ),
                    arguments,
                )
            ]
        moves, reads = (
            (f"Moves some {phrase} from ", f"Present {phrase} of ")
            if language == "en"
            else (f"的{phrase}调给另一个", f"现在的{phrase}")
        )
        return [(lambda text: moves in text, arguments), (lambda text: reads in text, [arguments[1]])]


def aim_of(change: SubQuestion | None) -> Aim | None:
    return None if change is None else Aim(change)


def is_state_description(description: str, language: Language) -> bool:
    """Whether a description is of one of the tools that change or read state."""
    marks = ("Changes the ", "Moves some ", "Present ") if language == "en" else ("修改", "调给另一个", "现在的")
    return description.startswith(marks) if language == "en" else any(mark in description for mark in marks)
