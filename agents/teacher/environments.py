"""Environments straight from knowledge, with neither a model nor a server: the core behind the teacher's programs.

A row is read into a world, queries are drawn from it, and each becomes an Environment record: nodes, true tools with
code over `data`, goldens, and distractors made of the world's other attributes, near variants and other worlds. The
gates are not run here; what they would find is avoided where a look at the texts can tell.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from agents.teacher.codegen import BuiltTool, lookup_tool, name_form, near_variant, op_tool, table_data
from agents.teacher.lexicon import identifier
from agents.teacher.plans import Shape, Step, UnknownFact, apply_op, lookups, sample_query, steps_of
from agents.teacher.questions import OPS, Compare, Lookup, Op, Query, render
from agents.teacher.stateful import state_tool, state_tool_name, stateful_task
from agents.teacher.sub_questions import node_question, read_question
from agents.teacher.worlds import Attribute, Language, World, read_world
from astrolabe.records.card import KnowledgeRow
from astrolabe.records.environment import Distractor, Environment, EnvTool, Goal, Golden, Node
from astrolabe.records.equality import equal, has_chinese, informative, leaves

MAX_CALLS = 7


def answer_text(value: Any) -> str:
    """A value as the text of an answer: 12.0 is "12"."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value == int(value):
        return str(int(value))
    return str(value)


def mentions(text: str, value: Any) -> bool:
    """Whether an informative leaf of `value` stands in `text` on token borders (Chinese: anywhere)."""
    for leaf in leaves(value):
        if not informative(leaf):
            continue
        token = answer_text(leaf)
        if has_chinese(token):
            if token in text:
                return True
        elif re.search(rf"(?<![\w.]){re.escape(token)}(?!\w|\.\d)", text, re.IGNORECASE):
            return True
    return False


def scenario_of(steps: list[Step]) -> str:
    """single_hop, multi_hop, or their parallel forms, by the longest chain of tool steps and whether it is one chain."""
    depth: dict[str, int] = {}
    tooled = [step for step in steps if step.attribute is not None or step.op is not None]
    for step in tooled:
        depth[step.id] = 1 + max((depth[parent] for parent in step.parents), default=0)
    hops = max(depth.values(), default=0)
    parallel = len(tooled) > hops
    if hops == 1:
        return "parallel_single_hop" if parallel else "single_hop"
    return "parallel_multi_hop" if parallel else "multi_hop"


def hops_of(environment: Environment) -> int:
    """Longest chain of nodes with a tool."""
    depth: dict[str, int] = {}
    for node in environment.nodes:
        if node.tool is not None:
            depth[node.id] = 1 + max((depth.get(parent, 0) for parent in node.parents), default=0)
    return max(depth.values(), default=0)


def similarity(a: str, b: str) -> float:
    """Dice coefficient of character trigrams (bigrams if Chinese): a cheap stand-in for an embedding."""
    size = 2 if has_chinese(a + b) else 3
    grams = [{text[i : i + size] for i in range(len(text) - size + 1)} for text in (a.lower(), b.lower())]
    total = len(grams[0]) + len(grams[1])
    return round(2 * len(grams[0] & grams[1]) / total, 3) if total else 0.0


def as_distractor(tool: EnvTool, true_tools: list[EnvTool]) -> Distractor:
    """`tool` with its band by the cheap similarity to its closest true tool."""
    close = max(
        (similarity(f"{tool.name} {tool.description}", f"{t.name} {t.description}") for t in true_tools), default=0.0
    )
    band = "high" if close > 0.6 else "medium" if close > 0.3 else "low"
    return Distractor(**tool.model_dump(), band=band, similarity=close)  # type: ignore[arg-type]


@dataclass
class Toolbox:
    """The tools of one environment while it is built, and the tables of `data` that they read."""

    world: World
    rng: random.Random
    form: str
    """How its lookup tools are named."""
    taken: set[str]
    built: dict[str, BuiltTool]
    data: dict[str, Any]

    @classmethod
    def empty(cls, world: World, rng: random.Random) -> Toolbox:
        return cls(world, rng, name_form(world), set(), {}, {})

    def for_attribute(self, attribute: Attribute) -> BuiltTool | None:
        """The attribute's tool, made once; None if another table of that name is there."""
        key = f"attribute:{attribute.phrase}"
        if key not in self.built:
            if identifier(attribute.phrase) in self.data:
                return None
            tool = lookup_tool(attribute, self.world, self.form, self.rng, self.taken)
            assert tool.table is not None
            self.built[key] = tool
            self.data[tool.table] = table_data(attribute)
        return self.built[key]

    def for_op(self, op: Any) -> BuiltTool:
        key = f"op:{op}"
        if key not in self.built:
            self.built[key] = op_tool(op, self.world.language, self.rng, self.taken)
        return self.built[key]


def _add_distractors(
    box: Toolbox, used: list[Attribute], goldens: list[Golden], others: list[World], question: str
) -> list[EnvTool]:
    """One to four tools that are not the question's: other attributes of the world, near variants, other worlds', other
    arithmetic. None can bring out an informative golden value."""
    rng, world = box.rng, box.world
    wanted = rng.randint(1, 4)
    candidates: list[tuple[World, Attribute]] = []
    free = [a for a in world.attributes.values() if a.phrase not in {u.phrase for u in used} and _varied(a)]
    candidates += [(world, attribute) for attribute in rng.sample(free, min(len(free), wanted))]
    for attribute in rng.sample(used, min(len(used), 2)):
        variant = near_variant(attribute, world, rng)
        if variant is not None and variant.phrase not in world.attributes and rng.random() < 0.5:
            candidates.insert(0, (world, variant))
    foreign = [(o, a) for o in others if o.language == world.language for a in o.attributes.values() if _varied(a)]
    candidates += rng.sample(foreign, min(len(foreign), 2))
    out: list[EnvTool] = []
    values = [leaf for golden in goldens for leaf in leaves(golden.returns) if informative(leaf)]
    if rng.random() < 0.3 and goldens:
        op = rng.choice(OPS)
        if f"op:{op}" not in box.built:
            out.append(box.for_op(op).tool)
    rng.shuffle(candidates)
    for home, attribute in candidates:
        if len(out) >= wanted:
            break
        clash = any(equal(leaf, value) for leaf in leaves(attribute.values) for value in values)
        if clash or (home is not world and attribute.phrase in question):
            continue
        saved, box.world = box.world, home
        built = box.for_attribute(attribute)
        box.world = saved
        if built is not None:
            out.append(built.tool)
    return out


def _gives_away(step: Step, steps: list[Step], data: dict[str, Any], question: str) -> bool:
    """Whether the arithmetic of `step` brings out another step's informative figure, one operand being any number at hand:
    times(70, 4) says 280, and so does a rent of 70 for 4 days."""
    a, b = step.arguments["a"], step.arguments["b"]
    others = [
        s.value for s in steps if s.value != step.value and isinstance(s.value, (int, float)) and informative(s.value)
    ]
    if not others:
        return False
    near = [0, 1, -a, 10 * a, -b, 10 * b, *(int(n) for n in re.findall(r"\d+", question))]
    stored = [n for n in leaves([data, *(s.value for s in steps)]) if isinstance(n, (int, float))]
    assert step.op is not None
    for number in [*near, *stored]:
        for x, y in ((number, b), (a, number)):
            if step.op == "percentage" and y == 0:
                continue
            value = apply_op(step.op, x, y)
            if any(equal(value, o) and o not in (x, y) for o in others):
                return True
    return False


def _varied(attribute: Attribute) -> bool:
    """Whether the attribute's tool can give two different values."""
    return len({str(leaf) for leaf in leaves(attribute.values)}) > 1


def environment_for(
    query: Query, world: World, rng: random.Random, *, others: list[World] | None = None
) -> Environment | None:
    """The environment that asks for `query`, or None if its facts are missing or its question would give a golden away."""
    try:
        steps = steps_of(query, world)
    except UnknownFact:
        return None
    question = render(query, world.language, rng)
    box = Toolbox.empty(world, rng)
    nodes: list[Node] = []
    goldens: list[Golden] = []
    for step in steps:
        built = None
        if step.attribute is not None:
            built = box.for_attribute(step.attribute)
        elif step.op is not None:
            built = box.for_op(step.op)
        tool = built.tool.name if built else None
        nodes.append(
            Node(
                id=step.id,
                question=node_question(step, world.language),
                answer=step.value,
                parents=step.parents,
                tool=tool,
            )
        )
        if built is not None:
            goldens.append(
                Golden(
                    node=step.id, tool=built.tool.name, arguments=built.arguments(step.arguments), returns=step.value
                )
            )
    if any(not _varied(step.attribute) for step in steps if step.attribute is not None):
        return None
    if len(goldens) > MAX_CALLS or any(mentions(question, golden.returns) for golden in goldens):
        return None
    computed = [step.value for step in steps if step.op is not None]
    if any(equal(leaf, value) for value in computed if informative(value) for leaf in leaves(box.data)):
        return None
    if any(_gives_away(step, steps, box.data, question) for step in steps if step.op is not None):
        return None
    if len({(golden.tool, str(sorted(golden.arguments.items()))) for golden in goldens}) < len(goldens):
        return None
    true_tools = [built.tool for built in box.built.values()]
    used = [step.attribute for step in steps if step.attribute is not None]
    distractors = _add_distractors(box, used, goldens, others or [], question)
    last = steps[-1]
    answer_type = "number"
    if isinstance(query, Compare):
        answer_type = "choice"
    elif isinstance(query, Lookup) and last.attribute is not None and last.attribute.kind != "number":
        answer_type = "date" if last.attribute.kind == "date" else "span"
    rng.shuffle(true_tools)
    return Environment(
        schema="astrolabe.environment/1",
        language=world.language,
        domain=world.domain,
        question=question,
        answer=answer_text(last.value),
        scenario=scenario_of(steps),  # type: ignore[arg-type]
        expect="answer",
        answer_type=answer_type,  # type: ignore[arg-type]
        nodes=nodes,
        tools=true_tools,
        goldens=goldens,
        distractors=[as_distractor(tool, true_tools) for tool in distractors],
        data=box.data or None,
        provenance={"source": "astrolabe-teacher", "license": "CC0-1.0", "seed": 0, "version": "1"},
    ).with_id()


_MISSING_ROOTS = {"en": ("my {}", "the {}", "that {}"), "zh": ("我的{}", "那个{}", "这个{}")}


def unanswerable_question(world: World, rng: random.Random, scenario: str) -> tuple[str, list[Attribute]] | None:
    """A question that the returned attributes' tools cannot answer: none of them gives it (no_tool), or it is not said of
    whom (missing_parameter; then the first attribute is the one asked for). None if the world is too small."""
    attributes = [a for a in world.attributes.values() if _varied(a)]
    if len(attributes) < 3:
        return None
    asked = rng.choice(attributes)
    if scenario == "no_tool":
        entity = rng.choice(sorted(asked.values))
        question = render(Lookup(asked.phrase, entity), world.language, rng)
        rest = [a for a in attributes if a is not asked and asked.phrase not in a.phrase]
        return question, rng.sample(rest, min(len(rest), rng.randint(2, 4)))
    root = rng.choice(_MISSING_ROOTS[world.language]).format(asked.owner)
    query: Query = Lookup(asked.phrase, root)
    if asked.kind == "number" and rng.random() < 0.3:
        query = Op(rng.choice(("sum", "product")), query, rng.randint(3, 19))
    rest = [a for a in attributes if a is not asked]
    return render(query, world.language, rng), [asked, *rng.sample(rest, min(len(rest), rng.randint(1, 3)))]


def _unanswerable(world: World, rng: random.Random, scenario: str) -> Environment | None:
    """A no_tool or a missing_parameter environment."""
    drawn = unanswerable_question(world, rng, scenario)
    if drawn is None:
        return None
    question, shown = drawn
    box = Toolbox.empty(world, rng)
    for attribute in shown:
        box.for_attribute(attribute)
    if scenario == "missing_parameter" and rng.random() < 0.5:
        box.for_op(rng.choice(("sum", "product")))
    tools = [built.tool for built in box.built.values()]
    split = max(1, len(tools) - rng.randint(0, 2))
    return Environment(
        schema="astrolabe.environment/1",
        language=world.language,
        domain=world.domain,
        question=question,
        answer="",
        scenario=scenario,  # type: ignore[arg-type]
        expect="abstain" if scenario == "no_tool" else "ask",
        answer_type="none",
        nodes=[],
        tools=tools[:split],
        goldens=[],
        distractors=[as_distractor(tool, tools[:split]) for tool in tools[split:]],
        data=box.data,
        provenance={"source": "astrolabe-teacher", "license": "CC0-1.0", "seed": 0, "version": "1"},
    ).with_id()


def stateful_environment(world: World, rng: random.Random) -> Environment | None:
    """An environment whose question changes state; None where the world has no attribute for it."""
    task = stateful_task(world, rng)
    if task is None:
        return None
    box = Toolbox.empty(world, rng)
    tools: list[EnvTool] = []
    nodes: list[Node] = []
    goldens: list[Golden] = []
    used: list[Attribute] = []
    for number, (question, answer, parents) in enumerate(task.steps, 1):
        read = read_question(question, world.language)
        attribute = world.attributes.get(read.phrase) if read else None
        if read is None or attribute is None:
            return None
        name = state_tool_name(read, attribute.phrase)
        description, parameters, code = state_tool(read, attribute, world.language, name)
        given = [read.entity] if read.kind == "read" else list(read.arguments)
        arguments = dict(zip(parameters["properties"], given, strict=True))
        box.taken.add(name)
        used.append(attribute)
        tools.append(EnvTool(name=name, description=description, parameters=parameters, code=code))
        nodes.append(Node(id=f"n{number}", question=question, answer=answer, parents=parents, tool=name))
        goldens.append(Golden(node=f"n{number}", tool=name, arguments=arguments, returns=answer))
    distractors = _add_distractors(box, used, goldens, [], task.question)
    return Environment(
        schema="astrolabe.environment/1",
        language=world.language,
        domain=world.domain,
        question=task.question,
        answer=task.answer,
        scenario="multi_hop" if len(nodes) > 1 else "single_hop",
        expect="answer",
        answer_type=task.answer_type,  # type: ignore[arg-type]
        nodes=nodes,
        tools=tools,
        goldens=goldens,
        distractors=[as_distractor(tool, tools) for tool in distractors],
        data=box.data or None,
        mode="stateful",
        state=task.state,
        goal=Goal.model_validate(task.goal),
        provenance={"source": "astrolabe-teacher", "license": "CC0-1.0", "seed": 0, "version": "1"},
    ).with_id()


_SHAPES: tuple[Shape, ...] = ("chain", "chain", "scaled", "pair", "pair", "compare")
_HOP_WEIGHTS = (2, 4, 4, 4, 4)


def draw_hops(world: World, rng: random.Random) -> int:
    """1 to 5 hops, as far as the world's chains and one operation on their end go."""
    deepest = max((lookup.depth for lookup in lookups(world)), default=0)
    weights = _HOP_WEIGHTS[: min(5, deepest + 1)]
    return rng.choices(range(1, len(weights) + 1), weights)[0]


def build_environments(
    row: KnowledgeRow,
    rng: random.Random,
    count: int,
    *,
    others: list[World] | None = None,
    unanswerable: float = 0.14,
    stateful: float = 0.0,
) -> list[Environment]:
    """Up to `count` different environments from one knowledge row; `unanswerable` is the share of no_tool and
    missing_parameter ones, `stateful` that of those which change state, `others` worlds that lend distractors."""
    world = read_world(row)
    out: list[Environment] = []
    seen: set[str] = set()
    if len(world.attributes) < 2:
        return out
    for _ in range(count):
        drawn = rng.random()
        scenario = rng.choice(("no_tool", "missing_parameter")) if drawn < unanswerable else None
        changes = unanswerable <= drawn < unanswerable + stateful
        hops = draw_hops(world, rng)
        for attempt in range(16):
            environment: Environment | None = None
            hops = draw_hops(world, rng) if attempt > 7 else hops
            if scenario is not None:
                environment = _unanswerable(world, rng, scenario)
            elif changes:
                environment = stateful_environment(world, rng)
            else:
                query = sample_query(world, rng, hops=hops, shape=rng.choice(_SHAPES))
                if query is not None:
                    environment = environment_for(query, world, rng, others=others)
            if environment is not None and environment.question not in seen:
                seen.add(environment.question)
                out.append(environment)
                break
    return out


@dataclass(frozen=True)
class DemoTurn:
    """One assistant turn of a demonstration: calls (name, arguments), or the final text."""

    calls: tuple[tuple[str, dict[str, Any]], ...]
    content: str


_FINAL: dict[Language, dict[str, tuple[str, ...]]] = {
    "en": {
        "answer": ("The answer is {}.",),
        "abstain": ("None of my tools can tell me that.",),
        "ask": ("Which one do you mean? Please tell me the name.",),
    },
    "zh": {"answer": ("答案是{}。",), "abstain": ("我的工具查不到这个。",), "ask": ("请问是哪一个？请告诉我名称。",)},
}


def final_text(expect: str, answer: str, language: Language) -> str:
    """The last turn's text."""
    return _FINAL[language][expect][0].format(answer)


def _redundant_call(
    environment: Environment, done: list[tuple[str, dict[str, Any]]], rng: random.Random
) -> tuple[str, dict[str, Any]]:
    """A legitimate call that was not needed: a lookup made again, or a look at something else that the data holds."""
    if done and (rng.random() < 0.5 or environment.data is None):
        return rng.choice(done)
    tools = [t for t in [*environment.tools, *environment.distractors] if 'data["' in t.code]
    rng.shuffle(tools)
    for tool in tools:
        table = (environment.data or {}).get(tool.code.split('data["')[1].split('"')[0], {})
        properties = tool.parameters["properties"]
        required = tool.parameters["required"]
        if len(required) == 1 and table:
            return tool.name, {required[0]: rng.choice(sorted(table))}
        if len(required) == 2 and "enum" in properties[required[1]]:
            return tool.name, {
                required[0]: rng.choice(sorted(table)),
                required[1]: rng.choice(properties[required[1]]["enum"]),
            }
    return rng.choice(done) if done else (environment.goldens[0].tool, environment.goldens[0].arguments)


def demonstration(environment: Environment, rng: random.Random, redundancy: float) -> list[DemoTurn]:
    """A right episode: the golden calls in a topological order, one per turn, and the answer. With probability
    `redundancy` one to three legitimate extra calls are made on the way (a lookup made again to be sure, or something
    looked up that was not needed). Questions that no call can answer get none."""
    final = DemoTurn((), final_text(environment.expect, environment.answer, environment.language))
    if not environment.goldens:
        return [final]
    extra = rng.randint(1, 3) if rng.random() < redundancy else 0
    golden = [(g.tool, g.arguments) for g in environment.goldens]
    places = sorted(rng.randint(0, len(golden)) for _ in range(extra))
    calls: list[tuple[str, dict[str, Any]]] = []
    for index in range(len(golden) + 1):
        calls += [_redundant_call(environment, calls, rng) for _ in range(places.count(index))]
        calls += golden[index : index + 1]
    return [*(DemoTurn((call,), "") for call in calls), final]
