"""The teacher as decomposer: questions from the facts of a text, and a tool for each node by reading its question.

Each job answers from its own request only: the text is read into a world again, and the node's question is parsed by the
phrase grammar. Planted defects are labelled where they are written; a second attempt, after failures, is right.
"""

from __future__ import annotations

import random
from typing import Any

from agents.teacher.codegen import (
    lookup_code,
    lookup_description,
    lookup_schema,
    name_form,
    near_variant,
    op_code,
    op_tool,
    quantity_name,
    table_data,
    tool_name,
    unit_choices,
)
from agents.teacher.defects import break_code, break_decomposition, label_of_doc
from agents.teacher.environments import draw_hops, environment_for, unanswerable_question
from agents.teacher.lexicon import identifier
from agents.teacher.plans import Step, attribute_value, sample_query, with_modifiers
from agents.teacher.planter import Planter
from agents.teacher.questions import OPS, Lookup
from agents.teacher.registry import CannotAnswer, program
from agents.teacher.stateful import state_tool, state_tool_name, stateful_task
from agents.teacher.sub_questions import SubQuestion, node_question, read_question
from agents.teacher.worlds import DIMENSION_BY_NAME, Attribute, Language, World, read_world
from astrolabe.records.card import KnowledgeRow
from astrolabe.records.equality import equal, informative, leaves

_SHAPES = ("chain", "chain", "scaled", "pair", "pair", "compare")


def world_of(request: dict[str, Any]) -> World:
    """The world of the request's text."""
    return read_world(
        KnowledgeRow(domain=request.get("domain") or "-", text=request["text"], language=request["language"])
    )


@program("decomposer.decompose")
def decompose(request: dict[str, Any], rng: random.Random, plant: Planter) -> dict[str, Any] | str:
    world = world_of(request)
    if len(world.attributes) < 2:
        raise CannotAnswer("the text is not in the controlled form that the teacher reads")
    kind = request["kind"]
    if kind == "answer":
        reply = _answerable(world, request, rng)
    elif kind == "stateful":
        reply = _stateful(world, rng)
    else:
        reply = _unanswerable(world, rng, kind)
    if reply is None:
        raise CannotAnswer("the text has no question of this kind")
    if kind == "answer":
        broken = break_decomposition(reply, request, rng, plant)
        if broken is not None:
            return broken
    return reply


def _answerable(world: World, request: dict[str, Any], rng: random.Random) -> dict[str, Any] | None:
    for _ in range(40):
        hops = draw_hops(world, rng)
        if not request["min_hops"] <= hops <= request["max_hops"]:
            continue
        query = sample_query(world, rng, hops=hops, shape=rng.choice(_SHAPES))  # type: ignore[arg-type]
        environment = environment_for(query, world, rng) if query is not None else None
        if environment is None:
            continue
        nodes = [
            {
                "id": n.id,
                "question": n.question,
                "answer": n.answer,
                "parents": n.parents,
                "needs_tool": n.tool is not None,
            }
            for n in environment.nodes
        ]
        return {
            "question": environment.question,
            "answer": environment.answer,
            "answer_type": environment.answer_type,
            "nodes": nodes,
            "state": None,
            "goal": None,
        }
    return None


def _stateful(world: World, rng: random.Random) -> dict[str, Any] | None:
    for _ in range(10):
        task = stateful_task(world, rng)
        if task is not None:
            nodes = [
                {"id": f"n{i}", "question": question, "answer": answer, "parents": parents, "needs_tool": True}
                for i, (question, answer, parents) in enumerate(task.steps, 1)
            ]
            return {
                "question": task.question,
                "answer": task.answer,
                "answer_type": task.answer_type,
                "nodes": nodes,
                "state": task.state,
                "goal": task.goal,
            }
    return None


def _unanswerable(world: World, rng: random.Random, kind: str) -> dict[str, Any] | None:
    drawn = unanswerable_question(world, rng, kind)
    if drawn is None:
        return None
    question, attributes = drawn
    nodes = []
    for index, attribute in enumerate(attributes, 1):
        lookup = with_modifiers(Lookup(attribute.phrase, rng.choice(sorted(attribute.values))), world, rng)
        value = attribute_value(attribute, lookup.root, lookup.modifiers, world)
        nodes.append({"id": f"n{index}", "question": _plain_question(lookup, attribute, world), "answer": value,
                      "parents": [], "needs_tool": True})  # fmt: skip
    return {"question": question, "answer": "", "answer_type": "none", "nodes": nodes, "state": None, "goal": None}


def _plain_question(lookup: Lookup, attribute: Attribute, world: World) -> str:
    return node_question(Step("", lookup, [], None, attribute), world.language)


def _read_node(request: dict[str, Any], world: World) -> tuple[SubQuestion, Attribute | None]:
    """The node's sub-question and the attribute that it asks for (None for arithmetic)."""
    read = read_question(request["node"]["question"], request["language"])
    if read is None:
        # A compound question: its first half is what a careless author would write a tool for.
        first = request["node"]["question"].split(", and what is" if request["language"] == "en" else "，另外")[0]
        read = read_question(first + ("?" if request["language"] == "en" else "？"), request["language"])
    if read is None:
        raise CannotAnswer(f"the teacher does not read the node's question: {request['node']['question']}")
    if read.kind == "op":
        return read, None
    attribute = world.attributes.get(read.phrase)
    if attribute is None:
        raise CannotAnswer(f"the text does not tell the {read.phrase}")
    return read, attribute


@program("decomposer.tool_document")
def tool_document(request: dict[str, Any], rng: random.Random, plant: Planter) -> dict[str, Any]:
    world, language = world_of(request), request["language"]
    read, attribute = _read_node(request, world)
    document: dict[str, Any]
    if attribute is None:
        assert read.op is not None
        tool = op_tool(read.op, language, rng, set()).tool
        document = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    elif read.kind in ("change", "read"):
        name = state_tool_name(read, attribute.phrase)
        description, parameters, _ = state_tool(read, attribute, language, name)
        document = {"name": name, "description": description, "parameters": parameters}
    else:
        unit = "unit" in dict(read.modifiers)
        document = {
            "name": tool_name(attribute, name_form(world)),
            "description": lookup_description(attribute, language, rng),
            "parameters": lookup_schema(attribute, language, unit=unit),
        }
    answer = request["node"]["answer"]
    leak = informative(answer) and not isinstance(answer, (dict, list)) and not request["failures"]
    if leak and plant.pick(("leaking_description",)) and rng.random() < 0.5:
        example = f" For example, it gave {answer}." if language == "en" else f"例如曾返回{answer}。"
        document["description"] += example
        plant.label("leaking_description", item=label_of_doc(document))
    return document


@program("decomposer.scale_complexity")
def scale_complexity(request: dict[str, Any], rng: random.Random, plant: Planter) -> dict[str, Any]:
    world, tool = world_of(request), request["tool"]
    read, attribute = _read_node(request, world)
    if attribute is None or read.kind != "lookup" or "unit" in tool["parameters"]["properties"]:
        return {"tool": tool, "added": []}
    choices = unit_choices(attribute, request["language"])
    if not choices:
        return {"tool": tool, "added": []}
    properties = {**tool["parameters"]["properties"], "unit": {"type": "string", "enum": choices}}
    return {"tool": {**tool, "parameters": {**tool["parameters"], "properties": properties}}, "added": ["unit"]}


@program("decomposer.call_arguments")
def call_arguments(request: dict[str, Any], rng: random.Random, plant: Planter) -> dict[str, Any]:
    language, node = request["language"], request["node"]
    names = request["tool"]["parameters"]["required"]
    read = read_question(node["question"], language) or _first_half(node["question"], language)
    parents = [parent["answer"] for parent in node["parents"]]
    if read is None or len(parents) < read.needs:
        return {"arguments": None}
    if read.kind == "change":
        values: list[Any] = list(read.arguments)
        return {"arguments": dict(zip(names, values, strict=True))}
    if read.kind == "op":
        values = [parents[0], read.constant if read.constant is not None else parents[1]]
        return {"arguments": dict(zip(names, values, strict=True))}
    arguments = {names[0]: read.entity if read.entity is not None else parents[0]}
    for role, value in read.modifiers:
        known = role == "unit" or role in DIMENSION_BY_NAME
        arguments[role if known else quantity_name(role, language)] = value
    return {"arguments": arguments}


def _first_half(question: str, language: Language) -> SubQuestion | None:
    first = question.split(", and what is" if language == "en" else "，另外")[0]
    return read_question(first + ("?" if language == "en" else "？"), language)


@program("decomposer.tool_code")
def tool_code(request: dict[str, Any], rng: random.Random, plant: Planter) -> dict[str, Any]:
    world, language, tool = world_of(request), request["language"], request["tool"]
    read, attribute = _read_node(request, world)
    data: dict[str, Any] | None = None
    if attribute is None:
        assert read.op is not None
        a, b = tool["parameters"]["required"]
        code = op_code(tool["name"], read.op, language, a, b)
    elif read.kind in ("change", "read"):
        _, _, code = state_tool(read, attribute, language, tool["name"])
    else:
        unit = "unit" in tool["parameters"]["properties"]
        code = lookup_code(tool["name"], attribute, language, unit=unit)
        data = {identifier(attribute.phrase): table_data(attribute)}
    if not request["failures"] and request["state"] is None:
        code = break_code(code, request, rng, plant)
    return {"code": code, "data": data}


@program("decomposer.neighbour_tools")
def neighbour_tools(request: dict[str, Any], rng: random.Random, plant: Planter) -> dict[str, Any]:
    language: Language = request["language"]
    world = world_of(request)
    described = " ".join(tool["description"].lower() for tool in request["tools"])
    used = [a for a in world.attributes.values() if a.phrase.lower() in described]
    question = request["question"].lower()
    candidates = [a for a in world.attributes.values() if a not in used and a.phrase.lower() not in question]
    rng.shuffle(candidates)
    candidates = candidates[:3]
    tables = {identifier(a.phrase) for a in used}
    hidden = [v for a in used for v in leaves(a.values)]
    for attribute in rng.sample(used, min(2, len(used))):
        variant = near_variant(attribute, world, rng)
        if variant is not None and variant.phrase not in world.attributes:
            candidates.append(variant)
    for text in request["other_texts"]:
        other = read_world(KnowledgeRow(domain="-", text=text, language=language))
        foreign = [a for a in other.attributes.values() if a.phrase.lower() not in described + question]
        candidates += rng.sample(foreign, min(2, len(foreign)))
    tools: list[dict[str, Any]] = []
    names = {tool["name"] for tool in request["tools"]}
    for attribute in candidates:
        table, name = identifier(attribute.phrase), tool_name(attribute, name_form(world))
        clash = any(informative(leaf) and any(equal(leaf, h) for h in hidden) for leaf in leaves(attribute.values))
        if table in tables or name in names or clash or len(set(map(str, leaves(attribute.values)))) < 2:
            continue
        tables.add(table)
        names.add(name)
        unit = bool(unit_choices(attribute, language))
        tools.append(
            {
                "name": name,
                "description": lookup_description(attribute, language, rng),
                "parameters": lookup_schema(attribute, language, unit=unit),
                "code": lookup_code(name, attribute, language, unit=unit),
                "data": {table: table_data(attribute)},
            }
        )
    if rng.random() < 0.4:
        op = op_tool(rng.choice(OPS), language, rng, names)
        same = [t for t in request["tools"] if t["description"] == op.tool.description]
        if not same:
            tools.append({**op.tool.model_dump(), "data": None})
    rng.shuffle(tools)
    return {"tools": tools[: request["count"]]}
