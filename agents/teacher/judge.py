"""The teacher as judge: rules over the question, the tools' documents and the conversation; it sees no label.

The plan is read from the question as the policy would read it (`task_text.parse`). A call is right if it is a step of the
plan with values that the question or an earlier result gives; a value that stands nowhere before the call is invented.
An answer is supported if its numbers stand in the question, the results or the documents.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from agents.teacher.planter import Planter
from agents.teacher.registry import program
from agents.teacher.task_text import Flow, Language, Step, parse
from agents.tool_docs import is_reading, nouns, properties, required, resolve, said_nouns
from astrolabe.records.equality import equal, has_chinese, leaves
from astrolabe.records.messages import FunctionSchema

TRANSIENT = frozenset({"timeout", "unreachable", "rate_limit", "server_error"})
_FAILURE_WORDS = re.compile(r"could not|cannot|can't|failed|unable|没有成功|无法|失败|做不到|not found", re.IGNORECASE)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
MAX_TRIES = 3


@dataclass
class Call:
    """A call of the conversation and what came back, as far as the judge is shown it."""

    id: str
    turn: int
    tool: str
    arguments: dict[str, Any] | None
    text: str
    known_before: str
    """Everything that was said or returned before the call, but for the assistant's own words."""
    result: str | None = None
    error: str | None = None

    def same(self, other: Call) -> bool:
        if self.arguments is None or other.arguments is None:
            return self.tool == other.tool and self.text == other.text
        return self.tool == other.tool and equal(self.arguments, other.arguments)


@dataclass
class Case:
    """A judge's request, read."""

    question: str
    tools: dict[str, FunctionSchema]
    messages: list[dict[str, Any]]
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        known, turn = self.question, -1
        waiting: dict[str, Call] = {}
        for message in self.messages:
            if message["role"] == "assistant":
                turn += 1
            for call in message.get("tool_calls") or []:
                text = call["function"].get("arguments") or ""
                arguments = _json(text)
                entry = Call(
                    id=call["id"],
                    turn=turn,
                    tool=call["function"]["name"],
                    arguments=arguments if isinstance(arguments, dict) else None,
                    text=text,
                    known_before=known,
                )
                self.calls.append(entry)
                waiting[entry.id] = entry
            if message["role"] == "tool":
                known += "\n" + message["content"]
                answered = waiting.get(message.get("tool_call_id", ""))
                if answered is not None:
                    answered.result = message["content"]
                    body = _json(message["content"])
                    if isinstance(body, dict) and isinstance(body.get("error"), str) and "message" in body:
                        answered.error = body["error"]
        self.known = known

    @cached_property
    def language(self) -> Language:
        return "zh" if sum(map(has_chinese, self.question)) * 6 > len(self.question) else "en"

    @cached_property
    def steps(self) -> list[Step]:
        """The plan that the question states; empty if no tool fits it."""
        docs = list(self.tools.values())
        other: Language = "en" if self.language == "zh" else "zh"
        return parse(self.question, docs, self.language) or parse(self.question, docs, other)

    @cached_property
    def lacking(self) -> list[str]:
        """Required arguments that the question neither states nor takes from an earlier step."""
        return [n for s in self.steps for n in required(self.tools[s.tool]) if n not in s.arguments]

    @property
    def last(self) -> dict[str, Any]:
        return self.messages[-1]

    def answer(self) -> str:
        return str(self.last.get("content") or "")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _case(request: dict[str, Any]) -> Case:
    tools = [FunctionSchema.model_validate(tool) for tool in request["tools"]]
    return Case(request["question"], {tool.name: tool for tool in tools}, request["messages"])


# -- calls -------------------------------------------------------------------------------------------------------------


def _stands_in(leaf: Any, text: str) -> bool:
    """Whether a value stands in a text, as JSON or as it is."""
    if leaf is None or isinstance(leaf, bool) or leaf == "":
        return True
    if isinstance(leaf, str):
        return leaf in text or json.dumps(leaf, ensure_ascii=False)[1:-1] in text
    shown = json.dumps(leaf)
    return re.search(rf"(?<![\d.]){re.escape(shown)}(?!\d)", text) is not None


def _invented(case: Case, call: Call) -> str | None:
    """The first argument with a value that nobody gave, or None. Where the question states the step, an argument that is
    none of the step's must stand in a result or be the document's default."""
    tool = case.tools[call.tool]
    planned = [step for step in case.steps if step.tool == call.tool]
    for name, value in (call.arguments or {}).items():
        schema = resolve(properties(tool).get(name), tool)
        stated = [step.arguments[name] for step in planned if name in step.arguments]
        if any(not isinstance(said, Flow) and equal(said, value) for said in stated):
            continue
        if "default" in schema and equal(schema["default"], value):
            continue
        if planned and not stated and name in case.lacking:
            return name
        closed = "enum" in schema or schema.get("type") == "boolean"
        if planned and not stated and closed:
            continue
        if not all(_stands_in(leaf, call.known_before) for leaf in leaves(value)):
            return name
    return None


def _looks_around(case: Case, call: Call) -> bool:
    """A related read-only tool that needs nothing, called before anything else."""
    tool = case.tools[call.tool]
    about = frozenset().union(*(said_nouns(case.tools[step.tool]) for step in case.steps))
    return (
        bool(case.steps)
        and not call.arguments
        and not required(tool)
        and is_reading(tool)
        and bool(nouns(tool) & about)
    )


def _fault(case: Case, call: Call) -> str | None:
    """What is wrong with a call by what was known when it was made, or None."""
    if call.tool not in case.tools:
        return f"there is no tool {call.tool}"
    if call.arguments is None:
        return "the arguments are not JSON"
    if not case.steps:
        return "no tool fits the question, and one was called"
    if case.lacking:
        return f"called although {case.lacking[0]} was never said"
    invented = _invented(case, call)
    if invented is not None:
        return f"nobody gave the value of {invented}"
    if call.tool not in {step.tool for step in case.steps} and not _looks_around(case, call):
        return f"{call.tool} does nothing that was asked"
    return None


def _again(case: Case, index: int) -> str | None:
    """Why call `index` is a needless repetition, or None."""
    call = case.calls[index]
    before = [c for c in case.calls[:index] if c.same(call)]
    planned = sum(step.tool == call.tool for step in case.steps)
    good = [c for c in before if c.error is None]
    if good and len(good) >= max(1, _equal_steps(case, call) if planned > 1 else 1):
        return "the same call had succeeded before"
    lasting = [c for c in before if c.error is not None and c.error not in TRANSIENT and c.error != "malformed"]
    if lasting:
        return "the same call had failed for good"
    if len([c for c in before if c.error is not None]) >= MAX_TRIES:
        return f"tried more than {MAX_TRIES} times"
    return None


def _equal_steps(case: Case, call: Call) -> int:
    """How many steps of the plan ask for this very call."""
    count = 0
    for step in case.steps:
        known = {n: v for n, v in step.arguments.items() if not isinstance(v, Flow)}
        given = call.arguments or {}
        count += step.tool == call.tool and all(n in given and equal(given[n], v) for n, v in known.items())
    return count


def _skipped(case: Case) -> list[str]:
    """Tools of the plan that were never called."""
    called = {call.tool for call in case.calls}
    return [step.tool for step in case.steps if step.tool not in called]


# -- the programs ------------------------------------------------------------------------------------------------------


@program("judge.query_understanding")
def query_understanding(request: dict[str, Any], rng: random.Random, plant: Planter) -> dict[str, Any]:
    case = _case(request)
    said = case.answer().strip()
    if case.calls:
        if not case.steps:
            return {"reason": "no tool fits the question, and one was called", "good": False}
        if case.lacking:
            return {"reason": f"{case.lacking[0]} is missing and was not asked for", "good": False}
        return {"reason": "it begins to act on what was asked", "good": True}
    if not said:
        return {"reason": "the turn is empty", "good": False}
    if not case.steps:
        return {"reason": "it says that no tool fits", "good": True}
    if case.lacking:
        asks = "?" in said or "？" in said
        return {
            "reason": "it asks for what is missing" if asks else "it does not ask for what is missing",
            "good": asks,
        }
    return {"reason": "it refuses what the tools can do", "good": False}


@program("judge.query_planning")
def query_planning(request: dict[str, Any], rng: random.Random, plant: Planter) -> dict[str, Any]:
    case = _case(request)
    if any(call.tool not in case.tools for call in case.calls):
        return {"reason": "it calls a tool that does not exist", "grade": "bad"}
    if not case.calls and not case.answer().strip():
        return {"reason": "there is no plan and no call", "grade": "bad"}
    if not case.calls:
        return {"reason": "it plans nothing that could answer the question", "grade": "bad"}
    planned = {step.tool for step in case.steps}
    if any(call.tool not in planned and not _looks_around(case, call) for call in case.calls):
        return {"reason": "it begins with a call that serves nothing asked", "grade": "bad" if planned else "partial"}
    return {"reason": "the steps can answer the question", "grade": "good"}


@program("judge.tool_understanding")
def tool_understanding(request: dict[str, Any], rng: random.Random, plant: Planter) -> dict[str, Any]:
    case = _case(request)
    now = max((call.turn for call in case.calls), default=-1)
    if case.last.get("tool_calls"):
        for index, call in enumerate(case.calls):
            last = [c for c in case.calls if c.turn == now - 1 and c.same(call) and c.error is None]
            if call.turn == now and last and _again(case, index):
                return {"reason": "it makes a call again that has just succeeded", "grade": "bad"}
        return {"reason": "it goes on from the results", "grade": "good"}
    made_up = _unsupported(case)
    if made_up is not None:
        return {"reason": f"the results do not hold {made_up}", "grade": "bad"}
    return {"reason": "what it says fits the results", "grade": "good"}


@program("judge.tool_planning")
def tool_planning(request: dict[str, Any], rng: random.Random, plant: Planter) -> dict[str, Any]:
    case = _case(request)
    now = max(call.turn for call in case.calls)
    for index, call in enumerate(case.calls):
        if call.turn == now:
            fault = _fault(case, call) or _again(case, index)
            if fault is not None:
                return {"reason": fault, "grade": "bad"}
    return {"reason": "the calls are right next steps, with values that were given", "grade": "good"}


@program("judge.tool_conciseness")
def tool_conciseness(request: dict[str, Any], rng: random.Random, plant: Planter) -> dict[str, Any]:
    case = _case(request)
    skipped = _skipped(case)
    planned = {step.tool for step in case.steps}
    rows = []
    for index, call in enumerate(case.calls):
        fault = _fault(case, call) or _again(case, index)
        if fault is None and call.tool not in planned and skipped:
            fault = f"{call.tool} was called and {skipped[0]} never was"
        rows.append({"id": call.id, "needed": fault is None, "reason": fault or "it serves what was asked"})
    return {"calls": rows}


def _unsupported(case: Case) -> str | None:
    """The first number of three digits or more in the last message that stands nowhere before it, or None."""
    documents = "\n".join(tool.name + " " + tool.description for tool in case.tools.values())
    sources = case.known + "\n" + documents
    for number in _NUMBER.findall(case.answer()):
        if len(number.replace(".", "")) >= 3 and re.search(rf"(?<!\d){re.escape(number)}", sources) is None:
            return str(number)
    return None


def _other_language(case: Case) -> bool:
    """Whether the opening of the answer is in another language than the question (facts further on are the tools')."""
    opening = re.split(r"[\n:：。.!?！？]", case.answer().strip(), maxsplit=1)[0]
    share = sum(map(has_chinese, opening)) / max(1, len(opening))
    return share > 0.3 if case.language == "en" else share < 0.1


@program("judge.final_answer")
def final_answer(request: dict[str, Any], rng: random.Random, plant: Planter) -> dict[str, Any]:
    case = _case(request)
    said = case.answer().strip()
    if not said:
        return {"reason": "the answer is empty", "correlation": "bad", "support": "bad"}
    if _other_language(case):
        return {"reason": "the answer is not in the question's language", "correlation": "bad", "support": "good"}
    made_up = _unsupported(case)
    if made_up is not None:
        return {"reason": f"nothing says {made_up}", "correlation": "good", "support": "bad"}
    if case.steps and not case.lacking:
        if not case.calls:
            return {"reason": "it does nothing of what was asked", "correlation": "bad", "support": "good"}
        skipped = _skipped(case)
        if skipped and not _FAILURE_WORDS.search(said):
            return {"reason": f"{skipped[0]} was never called", "correlation": "bad", "support": "bad"}
    if case.lacking and not ("?" in said or "？" in said):
        return {"reason": f"{case.lacking[0]} was missing and is passed over", "correlation": "bad", "support": "bad"}
    return {"reason": "it answers what was asked, from the results", "correlation": "good", "support": "good"}
