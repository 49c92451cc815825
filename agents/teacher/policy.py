"""The teacher as policy: reads the plan back from the question, walks it over what was called so far, answers from results.

Nothing is remembered between turns: each turn replays the conversation against the plan. A demonstration is right but not
always the shortest: now and then it looks around first with a related read-only tool. One conversation in some carries
one planted defect, drawn from the question, so that all turns of a conversation agree on it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agents.teacher.planter import Planter, question_item
from agents.teacher.registry import policy_turn
from agents.teacher.task_text import Flow, Language, Step, labels, parse, phrases, written_here
from agents.teacher.values import fill, secret
from agents.tool_docs import is_reading, nouns, properties, required, resolve, said_nouns, stem, words
from astrolabe.records.equality import equal, has_chinese
from astrolabe.records.ids import content_hash, rng_for
from astrolabe.records.messages import FunctionSchema

DEFECTS = (
    "wrong_tool",
    "invented_argument",
    "repeated_call",
    "refusal",
    "malformed_json",
    "made_up_answer",
    "language_switch",
    "unneeded_tool",
)
MAX_TRIES = 3
TRANSIENT = frozenset({"timeout", "unreachable", "rate_limit", "server_error", "malformed"})
DETOUR_RATE = 0.1


@dataclass
class Done:
    """A call of the conversation and what came back."""

    tool: str
    text: str
    arguments: dict[str, Any] | None
    result: Any = None
    error: str | None = None


@dataclass
class Conversation:
    question: str
    language: Language
    tools: list[FunctionSchema]
    steps: list[Step]
    done: list[Done]
    defect: str | None
    rng: random.Random
    """Seeded by the question: every turn of a conversation draws the same."""
    plant: Planter
    results: dict[int, Any] = field(default_factory=dict)
    """step -> its result, of those that succeeded."""
    failures: dict[int, str] = field(default_factory=dict)
    """step -> the error that it was given up with."""

    def tool(self, name: str) -> FunctionSchema:
        return next(t for t in self.tools if t.name == name)

    def label(self, detail: Any = None) -> None:
        self.plant.label(str(self.defect), item=question_item(self.question), detail=detail)


def _read_calls(messages: Sequence[dict[str, Any]]) -> list[Done]:
    done: list[Done] = []
    waiting: dict[str, Done] = {}
    for message in messages:
        for call in message.get("tool_calls") or []:
            text = call["function"].get("arguments") or ""
            arguments = _json(text)
            entry = Done(call["function"]["name"], text, arguments if isinstance(arguments, dict) else None)
            done.append(entry)
            waiting[call.get("id", "")] = entry
        if message.get("role") == "tool" and message.get("tool_call_id") in waiting:
            entry = waiting.pop(message["tool_call_id"])
            entry.result = _json(message.get("content") or "", message.get("content"))
            if (
                isinstance(entry.result, dict)
                and isinstance(entry.result.get("error"), str)
                and "message" in entry.result
            ):
                entry.error = entry.result["error"]
    return done


def _json(text: str, otherwise: Any = None) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return otherwise


def _plan(question: str, tools: list[FunctionSchema]) -> tuple[list[Step], Language]:
    chinese: Language = "zh" if has_chinese(question) and sum(map(has_chinese, question)) * 6 > len(question) else "en"
    other: Language = "en" if chinese == "zh" else "zh"
    steps = parse(question, tools, chinese)
    return (steps, chinese) if steps else (parse(question, tools, other), chinese)


@policy_turn("servers", order=0)
def written_turn(
    question: str, tools: list[dict[str, Any]], messages: list[dict[str, Any]], rng: random.Random, plant: Planter
) -> dict[str, Any] | None:
    """The next turn for a question that the teacher's planner certainly wrote; None for any other."""
    docs = [FunctionSchema.model_validate(t["function"]) for t in tools]
    if not any(written_here(question, docs, language) for language in ("en", "zh")):
        return None
    return next_turn(question, tools, messages, rng, plant)


@policy_turn("any", order=2)
def next_turn(
    question: str, tools: list[dict[str, Any]], messages: list[dict[str, Any]], rng: random.Random, plant: Planter
) -> dict[str, Any]:
    """The next assistant turn. Answers every question: one that states no plan is beyond the tools."""
    docs = [FunctionSchema.model_validate(t["function"]) for t in tools]
    steps, language = _plan(question, docs)
    scope = content_hash([question, [t.name for t in docs]])
    talk = Conversation(
        question=question,
        language=language,
        tools=docs,
        steps=steps,
        done=_read_calls(messages),
        defect=plant.pick(DEFECTS, scope=["conversation", scope]),
        rng=rng_for(plant.seed, "conversation", scope),
        plant=plant,
    )
    lacking = [(s, n) for s in steps for n in required(talk.tool(s.tool)) if n not in s.arguments]
    if not steps:
        return _beyond(talk)
    if lacking:
        return _ask(talk, *lacking[0])
    return _act(talk)


# -- the walk ----------------------------------------------------------------------------------------------------------


def _act(talk: Conversation) -> dict[str, Any]:
    if talk.defect == "refusal" and not talk.done:
        talk.label()
        return _say(
            "I'm sorry, but I can't help with that." if talk.language == "en" else "抱歉，我无法帮你完成这件事。"
        )
    target = talk.rng.randrange(len(talk.steps))
    stray = talk.rng.random()
    detour = _detour(talk) if talk.defect is None and talk.rng.random() < DETOUR_RATE else None
    together = len(talk.steps) > 1 and talk.rng.random() < 0.3
    used = [False] * len(talk.done)
    for index, step in enumerate(talk.steps):
        arguments = _resolve_flows(talk, index)
        if isinstance(arguments, str):
            talk.failures[index] = arguments
            continue
        name = step.tool
        if talk.defect == "wrong_tool" and index == target:
            other = _wrong_tool(talk, step, arguments)
            if other is not None:
                name, arguments = other
        if talk.defect == "invented_argument" and index == target:
            arguments = _with_invention(talk, step, arguments)
        if detour is not None and index == 0 and not any(d.tool == detour for d in talk.done):
            return _call(talk, [(detour, "{}")])
        if talk.defect == "unneeded_tool" and index == target:
            extra = _unneeded(talk, stray)
            if extra is not None and not any(d.tool == extra[0] for d in talk.done):
                talk.label({"tool": extra[0]})
                return _call(talk, [(extra[0], json.dumps(extra[1], ensure_ascii=False))])
        tries = [i for i, d in enumerate(talk.done) if not used[i] and d.tool == name and _same(d.arguments, arguments)]
        broken = [i for i, d in enumerate(talk.done) if not used[i] and d.tool == name and _was_malformed(d)]
        for i in [*tries, *broken]:
            used[i] = True
        good = [i for i in tries if talk.done[i].error is None]
        if good:
            talk.results[index] = talk.done[good[0]].result
            if talk.defect == "repeated_call" and index == target and len(good) == 1:
                talk.label({"tool": name})
                return _call(talk, [(name, json.dumps(arguments, ensure_ascii=False))])
            continue
        errors = [talk.done[i].error for i in tries]
        if len(errors) >= MAX_TRIES or (errors and errors[-1] not in TRANSIENT):
            talk.failures[index] = str(errors[-1])
            continue
        if talk.defect == "malformed_json" and index == target and not broken and not tries:
            talk.label({"tool": name})
            text = json.dumps(arguments, ensure_ascii=False)
            return _call(talk, [(name, text[:-1] + ("," if arguments else ""))])
        if talk.defect == "wrong_tool" and name != step.tool and not tries:
            talk.label({"tool": name, "instead_of": step.tool})
        if (
            talk.defect == "invented_argument"
            and index == target
            and not tries
            and arguments != _resolve_flows(talk, index)
        ):
            talk.label({"tool": name, "arguments": arguments})
        calls = [(name, json.dumps(arguments, ensure_ascii=False))]
        if together and not talk.done and talk.defect is None and index == 0:
            calls = _independent(talk) or calls
        return _call(talk, calls)
    return _finish(talk)


def _same(a: dict[str, Any] | None, b: dict[str, Any]) -> bool:
    return a is not None and equal(a, b)


def _was_malformed(done: Done) -> bool:
    return done.error == "malformed" and (done.arguments is None or "malformed_arguments" in done.arguments)


def _independent(talk: Conversation) -> list[tuple[str, str]]:
    """All steps at once, if none needs another's result and no two are equal."""
    if any(isinstance(v, Flow) for s in talk.steps for v in s.arguments.values()):
        return []
    if not all(is_reading(talk.tool(s.tool)) for s in talk.steps):
        return []  # what changes something keeps the order that the user gave
    calls = [(s.tool, json.dumps(s.arguments, ensure_ascii=False)) for s in talk.steps]
    return calls if len(set(calls)) == len(calls) else []


def _resolve_flows(talk: Conversation, index: int) -> dict[str, Any] | str:
    """The step's arguments with every flow replaced by the value that an earlier result holds; or why that fails."""
    step = talk.steps[index]
    tool = talk.tool(step.tool)
    out: dict[str, Any] = {}
    for argument, value in step.arguments.items():
        if not isinstance(value, Flow):
            out[argument] = value
            continue
        if value.step not in talk.results:
            return "unavailable"
        found = find_value(talk.results[value.step], argument, tool)
        if found is None:
            return "unavailable"
        out[argument] = found
    return out


def find_value(result: Any, argument: str, tool: FunctionSchema) -> Any:
    """The value in a result that an argument means: the member of the same name first, then a bare `id` (or the name's
    last word) of the first thing listed, then a member whose name ends alike. None if there is none of the right type."""
    schema = resolve(properties(tool).get(argument), tool)
    kind = schema.get("type")
    wanted = [stem(w) for w in words(argument)]
    ranked: list[tuple[int, int, Any]] = []

    def visit(value: Any, depth: int) -> None:
        if isinstance(value, list):
            for member in value[:3]:
                visit(member, depth + 1)
        elif isinstance(value, dict):
            for key, member in value.items():
                parts = [stem(w) for w in words(str(key))]
                rank = None
                if parts == wanted:
                    rank = 0
                elif parts == wanted[-1:]:
                    rank = 1
                elif parts and wanted and parts[-1] == wanted[-1]:
                    rank = 2
                elif parts and parts[-1] == "id" and wanted and wanted[-1] in ("id", "ref", "key", "jid", "hash"):
                    rank = 3
                if rank is not None and not isinstance(member, dict):
                    ranked.append((rank, len(ranked), member))
                visit(member, depth + 1)

    visit(result, 0)
    for _, _, value in sorted(ranked, key=lambda r: r[:2]):
        fitted = _fit(value, kind, schema)
        if fitted is not None:
            return fitted
    if kind == "string" and isinstance(result, str) and result:
        return result
    return None


def _fit(value: Any, kind: str | None, schema: dict[str, Any]) -> Any:
    """The value as the schema's type, without changing what it says; None if it cannot be."""
    if kind == "array":
        items = schema.get("items")
        inner = items.get("type") if isinstance(items, dict) else None
        members = value if isinstance(value, list) else [value]
        fitted = [_fit(member, inner, {}) for member in members[:2]]
        return None if not fitted or None in fitted else fitted
    if isinstance(value, (list, dict)) or value is None:
        return None
    if kind == "string":
        return value if isinstance(value, str) and value else str(value) if type(value) in (int, float) else None
    if kind in ("integer", "number"):
        if type(value) in (int, float) and (kind == "number" or float(value).is_integer()):
            return value
        return int(value) if isinstance(value, str) and value.isdecimal() else None
    if kind == "boolean":
        return value if isinstance(value, bool) else None
    return value


# -- defects and detours -----------------------------------------------------------------------------------------------


def _detour(talk: Conversation) -> str | None:
    """A related tool that only looks and needs nothing: legitimate, though not the shortest way."""
    first = talk.tool(talk.steps[0].tool)
    planned = {s.tool for s in talk.steps}
    near = [
        t for t in talk.tools if t.name not in planned and is_reading(t) and not required(t) and nouns(t) & nouns(first)
    ]
    return near[0].name if near else None


def _wrong_tool(talk: Conversation, step: Step, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Another tool in the step's place, with values that the user did state where it takes them."""
    planned = {s.tool for s in talk.steps}
    choices = []
    for tool in talk.tools:
        if tool.name in planned or not set(required(tool)) <= set(arguments):
            continue
        given = {n: v for n, v in arguments.items() if n in properties(tool)}
        own = properties(tool)
        if all(resolve(own[n], tool).get("type") == _type_name(v) for n, v in given.items()):
            choices.append((tool.name, {n: v for n, v in given.items() if n in required(tool)}))
    rng = rng_for(talk.plant.seed, "wrong", talk.question)
    return rng.choice(choices) if choices else None


def _type_name(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _with_invention(talk: Conversation, step: Step, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with one value that nobody stated."""
    tool = talk.tool(step.tool)
    rng = rng_for(talk.plant.seed, "invent", talk.question)
    texts = [
        n for n, v in arguments.items() if isinstance(v, str) and "enum" not in resolve(properties(tool).get(n), tool)
    ]
    if texts:
        name = rng.choice(texts)
        return {**arguments, name: f"{rng.choice(('granite', 'willow', 'cobalt'))}-{rng.randrange(10000, 99999)}"}
    free = [
        n for n in properties(tool) if n not in arguments and resolve(properties(tool)[n], tool).get("type") == "string"
    ]
    free = [n for n in free if "enum" not in resolve(properties(tool)[n], tool) and not secret(n)]
    if free:
        return {**arguments, rng.choice(free): f"granite-{rng.randrange(10000, 99999)}"}
    return arguments


def _unneeded(talk: Conversation, draw: float) -> tuple[str, dict[str, Any]] | None:
    """A call of a tool that has nothing to do with the question and needs no value."""
    planned = {s.tool for s in talk.steps}
    about = frozenset().union(*(said_nouns(talk.tool(s.tool)) for s in talk.steps)) if talk.steps else frozenset()
    free = [t for t in talk.tools if t.name not in planned and not required(t)]
    far = [t for t in free if not nouns(t) & about] or [t for t in free if not is_reading(t)]
    return (far[int(draw * len(far))].name, {}) if far else None


# -- what is said ------------------------------------------------------------------------------------------------------


def _say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _call(talk: Conversation, calls: list[tuple[str, str]]) -> dict[str, Any]:
    base = len(talk.done)
    rows = [
        {"id": f"call_{base + n}", "type": "function", "function": {"name": name, "arguments": text}}
        for n, (name, text) in enumerate(calls, 1)
    ]
    return {"role": "assistant", "content": "" if talk.done else _announce(talk), "tool_calls": rows}


def _announce(talk: Conversation) -> str:
    """The plan, before the first call."""
    speakable = phrases(talk.tools, talk.language)
    texts = [speakable.get(s.tool, "look this up" if talk.language == "en" else "查询") for s in talk.steps]
    if talk.language == "en":
        return "I will " + "; then ".join(texts) + "."
    return "我将" + "，然后".join(texts) + "。"


def _beyond(talk: Conversation) -> dict[str, Any]:
    if talk.defect is not None and not talk.done:
        extra = _unneeded(talk, talk.rng.random())
        if extra is not None:
            talk.plant.label("unneeded_tool", item=question_item(talk.question), detail={"tool": extra[0]})
            message = _call(talk, [(extra[0], json.dumps(extra[1]))])
            return {**message, "content": "Let me look." if talk.language == "en" else "让我看看。"}
    if talk.language == "en":
        return _say(
            "None of the tools that I have can do this, so I have not called any. It is outside what I can act on here."
        )
    return _say("我手上的工具都做不到这件事，所以没有进行任何调用。这超出了我在这里能办的范围。")


def _ask(talk: Conversation, step: Step, argument: str) -> dict[str, Any]:
    tool = talk.tool(step.tool)
    label = labels(tool).get(argument, argument)
    if talk.defect is not None and not talk.done:
        known = {n: v for n, v in step.arguments.items() if not isinstance(v, Flow)}
        made = fill(tool, rng_for(talk.plant.seed, "guess", talk.question), "en", optional=0.0)
        if made is not None:
            arguments = {**made, **known}
            talk.plant.label("invented_argument", item=question_item(talk.question), detail={"arguments": arguments})
            return _call(talk, [(tool.name, json.dumps(arguments, ensure_ascii=False))])
    if talk.done:
        return _finish_guess(talk)
    if talk.language == "en":
        return _say(f"Before I can do this I need one more thing: which {label} should I use?")
    return _say(f"开始之前还需要一个信息：{label} 应该用什么值？")


def _finish_guess(talk: Conversation) -> dict[str, Any]:
    facts = _facts(talk.done[-1].result, 3) or "-"
    return _say(f"Done. Result: {facts}." if talk.language == "en" else f"已完成。结果：{facts}。")


def _facts(result: Any, limit: int = 4) -> str:
    """A few members of a result, as they stand in it."""
    if isinstance(result, str):
        return result[:200]
    found: list[str] = []

    def visit(value: Any, name: str) -> None:
        if len(found) >= limit:
            return
        if isinstance(value, dict):
            for key, member in value.items():
                visit(member, str(key))
        elif isinstance(value, list):
            for member in value[:2]:
                visit(member, name)
        elif value is not None and str(value) != "":
            text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value[:120]
            found.append(f"{name.replace('_', ' ')}: {text}" if name else text)

    visit(result, "")
    return "; ".join(found)


def _finish(talk: Conversation) -> dict[str, Any]:
    language: Language = talk.language
    results = dict(talk.results)
    if talk.defect == "language_switch":
        talk.label()
        language = "zh" if language == "en" else "en"
    if talk.defect == "made_up_answer":
        talk.label()
        rng = rng_for(talk.plant.seed, "made up", talk.question)
        results = {
            i: {
                "summary": f"about {rng.randrange(1200, 9800)} records, the best of them Calder {rng.randrange(310, 990)}"
            }
            for i in results
        }
    speakable = phrases(talk.tools, talk.language)
    lines: list[str] = []
    for index, step in enumerate(talk.steps):
        what = speakable.get(step.tool, step.tool)
        if talk.defect == "language_switch":
            what = f"step {index + 1}" if language == "en" else f"第 {index + 1} 步"
        if index in results:
            facts = _facts(results[index])
            if language == "en":
                lines.append(f"{what[0].upper()}{what[1:]}: " + (facts or "done, with an empty result"))
            else:
                lines.append(f"{what}：" + (facts or "已完成，结果为空"))
        else:
            why = talk.failures.get(index, "unavailable")
            if language == "en":
                lines.append(f"{what[0].upper()}{what[1:]}: this could not be done ({why.replace('_', ' ')})")
            else:
                lines.append(f"{what}：没有成功（{why}）")
    if talk.defect == "language_switch":
        head = (
            "Here is everything that you asked for, with the results of each step:"
            if language == "en"
            else "你要求的事情已经全部处理，各步结果如下，请查收并核对："
        )
    else:
        head = "Here is what came back." if language == "en" else "结果如下。"
    return _say(head + "\n" + "\n".join(f"- {line}" for line in lines))
