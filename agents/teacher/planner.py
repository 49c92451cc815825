"""The teacher as planner: chains by argument names and types, tasks in the invertible task language, votes by the same
documents that a planner sees.

Planted defects: a chain with a tool that does not exist, a chain whose argument nobody can give, a task that names a tool,
a malformed reply.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from agents.teacher.planter import Planter, question_item
from agents.teacher.registry import CannotAnswer, program
from agents.teacher.task_text import Flow, Language, Step, parse, phrases, render
from agents.teacher.values import fill
from agents.tool_docs import (
    is_reading,
    names_tool,
    nouns,
    opaque,
    properties,
    required,
    said_nouns,
    statable,
    words,
    yields,
)
from astrolabe.records.equality import has_chinese
from astrolabe.records.messages import FunctionSchema

_CONTEXTS: dict[str, tuple[str, ...]] = {
    "en": (
        "I am preparing a short briefing for a colleague who joins on Monday.",
        "We are checking our notes before the harbour survey starts.",
        "My team hands this over to the night shift.",
        "I promised a friend an answer by this evening.",
        "This is for the minutes of our weekly meeting.",
        "We are comparing two suppliers and need one more piece.",
    ),
    "zh": (
        "我在给周一入职的同事准备一份简报。",
        "港口调查开始之前，我们在核对笔记。",
        "这件事要交接给夜班同事。",
        "我答应朋友今晚之前给答复。",
        "这要写进我们每周例会的纪要。",
    ),
}
_CONSTRAINTS: dict[str, tuple[str, ...]] = {
    "en": (
        "Keep the answer under six lines and say which step each fact comes from.",
        "Two reviewers will read this, so report anything that did not work as well.",
        "Do not do more than I asked for, and leave everything else as it is.",
    ),
    "zh": (
        "答复请控制在六行以内，并注明每条事实来自哪一步。",
        "有两位评审会看，没有成功的部分也请写明。",
        "只做我要求的事，其他内容保持不变。",
    ),
}
_OUT_OF_REACH: dict[str, tuple[str, ...]] = {
    "en": (
        "Please water the tomato plants on my balcony at {time} on {day}.",
        "Could you pick up my suit from the dry cleaner before {time} on {day}?",
        "I need you to renew my passport at the consulate on {day} at {time}.",
        "Can you repaint the garage door in a darker green on {day}, starting at {time}?",
        "Please babysit my two nephews on {day} from {time}.",
        "Could you fix the leaking tap in the upstairs bathroom on {day} around {time}?",
    ),
    "zh": (
        "请{day}{time}帮我给阳台上的番茄浇水。",
        "麻烦你{day}{time}之前去干洗店取我的西装。",
        "我需要你{day}{time}去领事馆帮我换护照。",
        "能在{day}{time}帮我把车库门重新刷成深绿色吗？",
        "请{day}{time}开始帮我照看两个侄子。",
    ),
}
_DAYS = {
    "en": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "zh": ("周一", "周二", "周三", "周四", "周五", "周六", "周日"),
}


def _out_of_reach(language: Language, rng: random.Random) -> list[str]:
    """Requests that no server can act on, at a drawn time."""
    day, time = rng.choice(_DAYS[language]), f"{rng.randrange(8, 21)}:{rng.choice(('00', '15', '30', '45'))}"
    return [text.format(day=day, time=time) for text in _OUT_OF_REACH[language]]


def _tools(rows: Sequence[dict[str, Any]]) -> list[FunctionSchema]:
    return [FunctionSchema.model_validate(row) for row in rows]


def _malformed(reply: dict[str, Any], plant: Planter, item: str) -> dict[str, Any] | str:
    """The reply, or, planted, its text cut off as by a token limit."""
    text = json.dumps(reply, ensure_ascii=False)
    if plant.maybe("malformed_reply", item=item, share=0.25):
        return text[: max(8, len(text) * 2 // 3)].rstrip('}" ]')
    return reply


def plan_arguments(
    chain: Sequence[FunctionSchema], rng: random.Random, language: Language, *, optional: float = 0.2
) -> list[Step] | None:
    """Arguments for a chain: what an earlier tool gives flows, the rest is stated. None if something cannot be had."""
    steps: list[Step] = []
    for index, tool in enumerate(chain):
        flows: dict[str, Any] = {}
        for argument in required(tool):
            earlier = [i for i in range(index) if yields(chain[i], argument, tool)]
            if earlier:
                flows[argument] = Flow(earlier[-1])
            elif opaque(argument, properties(tool).get(argument)):
                return None
        stated = fill(tool, rng, language, optional=optional, skip=frozenset(flows))
        if stated is None:
            return None
        # Shared required arguments (one file, one page) keep one value over the chain, as one task would.
        for step in steps:
            same = {n: v for n, v in step.arguments.items() if n in stated and n in required(tool)}
            stated |= {n: v for n, v in same.items() if not isinstance(v, Flow) and type(v) is type(stated[n])}
        merged = {n: flows.get(n, stated.get(n)) for n in [*required(tool), *stated] if n in flows or n in stated}
        steps.append(Step(tool.name, merged))
    return steps


def _follows(first: FunctionSchema, second: FunctionSchema) -> bool:
    """Whether the second tool needs what the first gave: a value, or a state of the same thing that it brought about."""
    if any(yields(first, argument, second) for argument in required(second)):
        return True
    making = {
        "create",
        "add",
        "open",
        "start",
        "launch",
        "navigate",
        "connect",
        "init",
        "initialize",
        "set",
        "load",
        "new",
    }
    made = bool(set(words(first.name)) & making) and not set(words(second.name)) & {
        "create",
        "new",
        "init",
        "initialize",
    }
    shared = (nouns(first) & nouns(second)) or (set(required(first)) & set(required(second)))
    looked_up = is_reading(first) and bool(nouns(first) & nouns(second)) and not is_reading(second)
    return (made and bool(shared)) or looked_up


@program("planner.chains")
def chains(request: dict[str, Any], rng: random.Random, plant: Planter) -> dict[str, Any] | str:
    """Chains of two to four tools along "needs what an earlier gave"."""
    language, server = request["language"], request["server"]["name"]
    tools = _tools(request["tools"])
    speakable = phrases(tools, language)
    usable = [t for t in tools if t.name in speakable]
    follows = {a.name: [b for b in usable if b.name != a.name and _follows(a, b)] for a in usable}
    starts = [t for t in usable if follows[t.name]]
    rng.shuffle(starts)
    found: list[list[FunctionSchema]] = []
    for start in starts:
        chain = [start]
        while len(chain) < min(request["max_length"], 4):
            after = [t for t in follows[chain[-1].name] if t not in chain]
            if not after or (len(chain) > 1 and rng.random() < 0.5):
                break
            chain.append(rng.choice(after))
        if len(chain) > 1 and plan_arguments(chain, random.Random(rng.random()), language) is not None:
            found.append(chain)
        if len(found) >= request["max_chains"]:
            break
    rows = [
        {"tools": [t.name for t in chain], "dependency": "yes", "task": _purpose(chain, speakable)} for chain in found
    ]
    loose = [t for t in usable if not any(t in chain for chain in found)]
    if len(loose) > 1:  # a pair without a dependency, said to be one
        pair = rng.sample(loose, 2)
        rows.append({"tools": [t.name for t in pair], "dependency": "no", "task": _purpose(pair, speakable)})
    rows += _planted_chains(tools, rows, rng, plant, server)
    return _malformed({"chains": rows}, plant, server)


def _purpose(chain: Sequence[FunctionSchema], speakable: dict[str, str]) -> str:
    return "; ".join(speakable[t.name] for t in chain)


def _planted_chains(
    tools: list[FunctionSchema], rows: list[dict[str, Any]], rng: random.Random, plant: Planter, server: str
) -> list[dict[str, Any]]:
    """Defective chains beside the right ones, labelled `<server>:<a>><b>`."""
    kind = plant.pick(("unknown_tool", "unobtainable_argument"))
    if kind is None or len(tools) < 2:
        return []
    names = [t.name for t in tools]
    pairs = [
        [other.name, orphan.name]
        for orphan in tools
        if _orphaned(orphan)
        for other in tools
        if other is not orphan and not any(yields(other, a, orphan) for a in required(orphan))
    ]
    if kind == "unobtainable_argument" and pairs:
        chain = rng.choice(pairs)
    else:
        kind = "unknown_tool"
        good = [row["tools"] for row in rows if row["dependency"] == "yes"]
        chain = list(rng.choice(good)) if good else rng.sample(names, 2)
        ghost = next(g for g in (f"{chain[0]}_summary", f"{chain[0]}_digest", f"{chain[0]}_2") if g not in names)
        chain.insert(rng.randrange(1, len(chain) + 1), ghost)
    plant.label(kind, item=f"{server}:{'>'.join(chain)}")
    return [{"tools": chain, "dependency": "yes", "task": "one after the other"}]


def _orphaned(tool: FunctionSchema) -> bool:
    """Whether a required argument can only come from another tool's result."""
    members = properties(tool)
    return any(opaque(a, members.get(a)) or not statable(members.get(a), tool) for a in required(tool))


@program("planner.vote")
def vote(request: dict[str, Any], rng: random.Random, plant: Planter) -> dict[str, Any] | str:
    """Valid if every argument can be had and each tool after the first has to do with an earlier one."""
    table = {t.name: t for t in _tools(request["tools"])}
    if any(name not in table for name in request["chain"]):
        return {"valid": False, "reason": "a tool of the chain has no document"}
    chain = [table[name] for name in request["chain"]]
    if plan_arguments(chain, random.Random(0), request["language"]) is None:
        return {"valid": False, "reason": "a required argument comes from neither the user nor an earlier result"}
    for index in range(1, len(chain)):
        if not any(_follows(a, chain[index]) or said_nouns(a) & said_nouns(chain[index]) for a in chain[:index]):
            return {"valid": False, "reason": f"step {index + 1} has nothing to do with what comes before"}
    return _malformed(
        {"valid": True, "reason": "each step needs or continues an earlier one"}, plant, ">".join(request["chain"])
    )


@program("planner.task")
def task(request: dict[str, Any], rng: random.Random, plant: Planter) -> dict[str, Any] | str:
    """A request that `parse` reads back as exactly the plan; with a tool's name in it where that defect is planted."""
    language: Language = request["language"]
    tools = _tools(request["tools"])
    table, speakable = {t.name: t for t in tools}, phrases(tools, language)
    if request["kind"] == "abstain":
        known = frozenset().union(*(said_nouns(t) for t in tools)) if tools else frozenset()
        every = _out_of_reach(language, rng)
        offers = [q for q in every if not known & set(words(q)) and not parse(q, tools, language)]
        return {"question": _dressed(rng.choice(offers or every), rng, language), "chain": []}
    for _ in range(24):
        chain = _choose(request, tools, speakable, rng)
        if not chain or any(t.name not in speakable for t in chain):
            continue
        steps = plan_arguments(chain, rng, language)
        if steps is None:
            continue
        if request["kind"] == "ask":
            missing = _leave_out(steps[0], chain[0], rng)
            if not missing:
                continue
        before = rng.choice(_CONTEXTS[language]) if rng.random() < 0.4 else ""
        question = render(steps, table, speakable, language, rng, before=before)
        if parse(question, tools, language) != steps or names_tool(question, table):
            continue
        if request["kind"] == "answer":
            name = rng.choice(chain).name
            naming = question + (f" (call `{name}`)" if language == "en" else f"（调用 `{name}`）")
            if plant.maybe("names_tool", item=question_item(naming), share=0.4):
                question = naming
        return _malformed({"question": question, "chain": [t.name for t in chain]}, plant, question_item(question))
    raise CannotAnswer("no task can be written for these tools")


def _choose(
    request: dict[str, Any], tools: list[FunctionSchema], speakable: dict[str, str], rng: random.Random
) -> list[FunctionSchema]:
    table = {t.name: t for t in tools}
    if request["chain"]:
        return [table[name] for name in request["chain"] if name in table]
    usable = [t for t in tools if t.name in speakable and not _orphaned(t)]
    if request["kind"] == "ask":
        usable = [t for t in usable if required(t)]
        return [rng.choice(usable)] if usable else []
    count = min(len(usable), rng.randint(1, request["max_tools"]))
    # Reading tools come first: what a user without a plan asks for is mostly to look something up.
    usable.sort(key=lambda t: (not is_reading(t), t.name))
    return rng.sample(usable[: max(count, len(usable) * 2 // 3)], count) if usable else []


def _leave_out(step: Step, tool: FunctionSchema, rng: random.Random) -> str:
    """Take one required argument without a default out of the step."""
    members = properties(tool)
    names = [n for n in required(tool) if n in step.arguments and "default" not in (members.get(n) or {})]
    if not names:
        return ""
    name = rng.choice(names)
    del step.arguments[name]
    return name


def _dressed(question: str, rng: random.Random, language: Language) -> str:
    if rng.random() >= 0.4:
        return question
    context = rng.choice(_CONTEXTS[language])
    return f"{context} {question}" if language == "en" else context + question


@program("planner.check")
def check(request: dict[str, Any], rng: random.Random, plant: Planter) -> dict[str, Any] | str:
    """Back translation: the question read with the tools' documents only."""
    tools = _tools(request["tools"])
    table = {t.name: t for t in tools}
    steps = parse(request["question"], tools, request["language"])
    if not steps:
        return {"kind": "abstain", "chain": []}
    lacking = [n for s in steps for n in required(table[s.tool]) if n not in s.arguments]
    return {"kind": "ask" if lacking else "answer", "chain": [s.tool for s in steps]}


@program("planner.augment")
def augment(request: dict[str, Any], rng: random.Random, plant: Planter) -> dict[str, Any] | str:
    """The same plan in another context, under constraints, or in a person's words."""
    language: Language = request["language"]
    tools = _tools(request["tools"])
    table, speakable = {t.name: t for t in tools}, phrases(tools, language)
    steps = parse(request["question"], tools, language)
    if not steps:
        raise CannotAnswer("the question states no plan of these tools")
    mode = request["mode"]
    before, after = "", ""
    if mode == "diverse":
        again = plan_arguments([table[s.tool] for s in steps], rng, language)
        steps = again or steps
        before = rng.choice(_CONTEXTS[language])
    elif mode == "complex":
        after = rng.choice(_CONSTRAINTS[language])
    elif request.get("persona"):
        person = request["persona"]
        hobby = (person.get("interests") or [""])[0]
        if language == "en":
            before = f"I work as a {person['occupation']}, am {person['age']} and spend my free time on {hobby}."
        else:
            before = f"我是一名{person['age']}岁的{person['occupation']}，业余喜欢{hobby}。"
    question = render(steps, table, speakable, language, rng, before=before, after=after)
    return _malformed({"question": question}, plant, question_item(question))


@program("planner.score")
def score(request: dict[str, Any], rng: random.Random, plant: Planter) -> dict[str, Any] | str:
    """Ratings by rule: a named tool or a broken text is poor; a plan that reads back is good or better."""
    question, tools = request["question"], _tools(request["tools"])
    steps = parse(question, tools, request["language"])
    named = names_tool(question, [t.name for t in tools])
    right_language = has_chinese(question) == (request["language"] == "zh") or request["language"] == "en"
    quality = "poor" if named or not right_language or not 12 <= len(question) <= 2400 else "good"
    if quality == "good" and len(question) < 500:
        quality = "excellent"
    strange = sum(1 for s in steps for v in s.arguments.values() if isinstance(v, (list, dict)) and len(str(v)) > 160)
    realism = "fair" if strange else "excellent" if request["kind"] != "answer" or len(steps) <= 3 else "good"
    if request["kind"] == "abstain":
        necessity = "excellent" if not steps else "very_poor"
    else:
        necessity = "excellent" if [s.tool for s in steps] == request["chain"] else "poor"
    return {"question_quality": quality, "scenario_realism": realism, "tool_necessity": necessity}
