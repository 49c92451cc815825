"""The teacher as policy in environments: reads the question by the phrase grammar, finds each tool by its description,
and walks the plan over what was called so far.

Nothing is remembered between turns. A demonstration is right but not always the shortest: now and then a look-up is made
again to be sure. One conversation in some carries a planted defect, drawn from the question.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

from agents.teacher.codegen import op_of_description, phrase_of_description, quantity_name
from agents.teacher.environments import answer_text, final_text
from agents.teacher.planter import Planter, question_item
from agents.teacher.questions import Compare, Lookup, Op, Query, parse
from agents.teacher.registry import policy_turn, program
from agents.teacher.stateful import Aim, aim_of, is_state_description
from agents.teacher.sub_questions import read_task
from agents.teacher.worlds import DIMENSION_BY_NAME, Language
from astrolabe.records.equality import has_chinese
from astrolabe.records.ids import rng_for

DEFECTS = ("refusal", "repeated_call", "made_up_answer")
MAX_TRIES = 3
REDUNDANCY = 0.15
"""Share of conversations in which a look-up is made again to be sure."""
_TRANSIENT = frozenset({"timeout", "unreachable", "rate_limit", "server_error"})


class Stop(Exception):
    """The plan ends here: with a call to make, or with a text. `kind`: call, abstain, ask."""

    def __init__(self, kind: str, call: tuple[str, dict[str, Any]] | None = None) -> None:
        super().__init__(kind)
        self.kind, self.call = kind, call


@dataclass(frozen=True)
class Done:
    """A call of the conversation with its result, or its error's kind."""

    tool: str
    arguments: dict[str, Any]
    value: Any
    error: str | None


def read_calls(messages: list[dict[str, Any]]) -> list[Done]:
    """The calls of a conversation that have a result, in order."""
    results = {m.get("tool_call_id"): m.get("content") or "" for m in messages if m.get("role") == "tool"}
    out = []
    for message in messages:
        for call in message.get("tool_calls") or []:
            if call["id"] not in results:
                continue
            text = results[call["id"]]
            try:
                value = json.loads(text)
            except ValueError:
                value = text
            error = value.get("error") if isinstance(value, dict) and set(value) >= {"error", "message"} else None
            if isinstance(value, (int, float)) and re.fullmatch(r"[A-Z]{2}-?\d+|\d{4}-\d{2}-\d{2}", text):
                value = text
            try:
                arguments = json.loads(call["function"].get("arguments") or "{}")
            except ValueError:
                arguments = {}
            out.append(Done(call["function"]["name"], arguments, value, error))
    return out


class Walk:
    """One turn's walk over the plan. Evaluating a query either gives its value or raises Stop."""

    def __init__(self, tools: list[dict[str, Any]], done: list[Done], language: Language) -> None:
        self.tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self.done, self.language = done, language

    def _tool_for_phrase(self, phrase: str) -> dict[str, Any]:
        fits = [t for t in self.tools.values() if phrase_of_description(t["description"], self.language) == phrase]
        if not fits:
            raise Stop("abstain")
        return fits[0]

    def call(self, tool: dict[str, Any], arguments: dict[str, Any]) -> Any:
        """The value of this call if it was made; else Stop with the call (again after a passing fault)."""
        made = [d for d in self.done if d.tool == tool["name"] and d.arguments == arguments]
        good = [d for d in made if d.error is None]
        if good:
            return good[0].value
        if made and (made[-1].error not in _TRANSIENT or len(made) >= MAX_TRIES):
            raise Stop("abstain")
        raise Stop("call", (tool["name"], arguments))

    def value(self, query: Query | str) -> Any:
        if isinstance(query, str):
            return query
        if isinstance(query, Compare):
            left, right = (self.value(side) for side in query.sides)
            return self.value(query.left if left > right else query.right)
        if isinstance(query, Op):
            left = self.value(query.left)
            right = query.right if isinstance(query.right, int) else self.value(query.right)
            fits = [t for t in self.tools.values() if op_of_description(t["description"], self.language) == query.op]
            if not fits:
                raise Stop("abstain")
            a, b = fits[0]["parameters"]["required"]
            return self.call(fits[0], {a: left, b: right})
        tool = self._tool_for_phrase(query.phrase)
        names = tool["parameters"]["required"]
        if _unnamed(query.subject, self.language):
            raise Stop("ask")
        arguments = {names[0]: self.value(query.subject)}
        for role, value in query.modifiers:
            known = role == "unit" or role in DIMENSION_BY_NAME
            arguments[role if known else quantity_name(role, self.language)] = value
        if not set(names) <= set(arguments):
            raise Stop("ask")
        return self.call(tool, arguments)

    def aim(self, aim: Aim) -> Any:
        """A stateful task: the change, then what is asked of it."""
        value: Any = None
        for wanted, arguments in aim.calls(self.language):
            fits = [t for t in self.tools.values() if wanted(t["description"])]
            if not fits:
                raise Stop("abstain")
            names = fits[0]["parameters"]["required"]
            value = self.call(fits[0], dict(zip(names, arguments, strict=True)))
        return value


def _unnamed(subject: Lookup | str, language: Language) -> bool:
    """Whether a subject names nobody: "my plane", "the plane", 那个飞机, or 我的飞机 (which reads as a look-up of 我)."""
    if isinstance(subject, Lookup):
        return language == "zh" and subject.subject == "我"
    if language == "en":
        return subject.startswith(("my ", "the ", "that "))
    return subject.startswith(("那个", "这个"))


def _ours(tools: list[dict[str, Any]], language: Language) -> bool:
    """Whether the tools are described in the forms of this teacher."""
    described = [tool["function"].get("description") or "" for tool in tools]
    return any(
        phrase_of_description(d, language) or op_of_description(d, language) or is_state_description(d, language)
        for d in described
    )


@policy_turn("environments")
def next_turn(
    question: str, tools: list[dict[str, Any]], messages: list[dict[str, Any]], rng: random.Random, plant: Planter
) -> dict[str, Any] | None:
    """The next assistant message, or None if the question is not of the grammar or the tools are not of its forms."""
    language: Language = "zh" if has_chinese(question) else "en"
    aim = aim_of(read_task(question, language))
    query = parse(question, language) if aim is None else None
    if (query is None and aim is None) or not _ours(tools, language):
        return None
    done = read_calls(messages)
    defect = plant.pick(DEFECTS, scope=["environment", question])
    if defect == "refusal" and not done:
        plant.label(defect, item=question_item(question))
        return _say("I'm sorry, but I can't help with that." if language == "en" else "抱歉，我无法帮你完成这件事。")
    walk = Walk(tools, done, language)
    try:
        value = walk.aim(aim) if aim is not None else walk.value(query)  # type: ignore[arg-type]
    except Stop as stop:
        if stop.call is None:
            return _say(final_text(stop.kind, "", language))
        again = _again(done, question, defect, plant) if aim is None else None
        return _call(*(again or stop.call), len(done))
    if defect == "made_up_answer":
        plant.label(defect, item=question_item(question))
        value = value + 17 if isinstance(value, (int, float)) else f"{value}X"
    return _say(final_text("answer", answer_text(value), language))


def _again(done: list[Done], question: str, defect: str | None, plant: Planter) -> tuple[str, dict[str, Any]] | None:
    """A look-up made again, at one place of the conversation: to be sure, or as a planted defect."""
    draw = rng_for(plant.seed, "again", question)
    place = draw.randint(1, 3)
    if len(done) != place or done[-1].error is not None or len({(d.tool, str(d.arguments)) for d in done}) < len(done):
        return None
    if defect == "repeated_call":
        plant.label(defect, item=question_item(question))
    elif draw.random() >= REDUNDANCY:
        return None
    return done[-1].tool, done[-1].arguments


def _say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _call(name: str, arguments: dict[str, Any], number: int) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call_{number + 1}", "type": "function", "function": function}],
    }


@program("verifier.answerable")
def answerable(request: dict[str, Any], rng: random.Random, plant: Planter) -> dict[str, Any]:
    """Whether a first call can be made for the question: the policy's own plan, judged by its first step."""
    language: Language = request["language"]
    query = parse(request["question"], language)
    tools = [{"type": "function", "function": tool} for tool in request["tools"]]
    try:
        if query is not None:
            Walk(tools, [], language).value(query)
    except Stop as stop:
        found = stop.kind == "call"
        return {"answerable": found, "reason": "a tool gives what is asked" if found else "no call can be made for it"}
    return {"answerable": False, "reason": "the question cannot be read"}
