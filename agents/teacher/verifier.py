"""The teacher as verifier: five judgements by rule, from the texts of the questions and the graph alone.

A node's question shows how many earlier answers it refers to and what it asks; the main question shows what has to be
asked. A question that the grammar does not read is not atomic.
"""

from __future__ import annotations

import random
from typing import Any

from agents.teacher.decomposer import world_of
from agents.teacher.planter import Planter
from agents.teacher.questions import Compare, Op, Query, parse
from agents.teacher.registry import program
from agents.teacher.sub_questions import MOVE, SubQuestion, read_question
from agents.teacher.worlds import Language

Request = dict[str, Any]


def _read(request: Request) -> list[tuple[dict[str, Any], SubQuestion | None]]:
    return [(node, read_question(node["question"], request["language"])) for node in request["nodes"]]


def _small(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10


@program("verifier.necessity")
def necessity(request: Request, rng: random.Random, plant: Planter) -> dict[str, Any]:
    answers = {node["id"]: node["answer"] for node in request["nodes"]}
    items = []
    for node, read in _read(request):
        needed, why = True, "a fact to look up or a state to change"
        if read is not None and read.kind == "compare":
            needed, why = False, "the parents' figures already decide it"
        elif read is not None and read.kind == "op":
            operands = [answers.get(p) for p in node["parents"]] + (
                [read.constant] if read.constant is not None else []
            )
            needed = read.op == "percentage" or len(operands) < 2 or not all(map(_small, operands))
            why = "arithmetic with longer numbers" if needed else "arithmetic of single digits"
        items.append({"id": node["id"], "tool_necessary": needed, "reason": why})
    return {"items": items}


@program("verifier.dependency")
def dependency(request: Request, rng: random.Random, plant: Planter) -> dict[str, Any]:
    world = world_of(request)
    answers = {node["id"]: node["answer"] for node in request["nodes"]}
    items = []
    for node, read in _read(request):
        parents = [answers.get(parent) for parent in node["parents"]]
        verdict, why = "sufficient", "the parents give what it refers to"
        if read is None:
            why = "what it refers to cannot be told from its words"
        elif len(parents) < read.needs:
            verdict, why = "insufficient", f"it refers to {read.needs} earlier answers and has {len(parents)}"
        elif len(parents) > read.needs:
            verdict, why = "useless_parent", f"it refers to {read.needs} earlier answers and has {len(parents)}"
        elif read.of_type and world.type_of(str(parents[0])) != read.of_type:
            verdict, why = "insufficient", f"its parent's answer is no {read.of_type}"
        elif read.kind == "op" and not all(isinstance(p, (int, float)) for p in parents):
            verdict, why = "insufficient", "a parent's answer is no number"
        items.append({"id": node["id"], "verdict": verdict, "reason": why})
    return {"items": items}


@program("verifier.atomicity")
def atomicity(request: Request, rng: random.Random, plant: Planter) -> dict[str, Any]:
    return {
        "items": [
            {
                "id": node["id"],
                "is_atomic": read is not None,
                "reason": "one thing is asked" if read is not None else "it asks for more than one thing",
            }
            for node, read in _read(request)
        ]
    }


@program("verifier.serialisation")
def serialisation(request: Request, rng: random.Random, plant: Planter) -> dict[str, Any]:
    items = []
    for node, read in _read(request):
        forced = read is not None and read.needs == 0 and bool(node["parents"])
        why = "it uses nothing of the step that it waits for" if forced else "it waits for nothing that it does not use"
        items.append({"id": node["id"], "forced": forced, "reason": why})
    return {"items": items}


def _demands(query: Query | str | int, language: Language) -> set[str]:
    """What a question asks for: phrases, entities, operations with their constants, modifiers."""
    if isinstance(query, int):
        return {f"number {query}"}
    if isinstance(query, str):
        return {f"entity {query}"}
    if isinstance(query, Compare):
        both = set[str]().union(*(_demands(side, language) for side in query.sides))
        return both | {f"compare {query.phrase}"}
    if isinstance(query, Op):
        return {f"op {query.op}"} | _demands(query.left, language) | _demands(query.right, language)
    modifiers = {f"{name} {value}" for name, value in query.modifiers}
    return {f"phrase {query.phrase}"} | modifiers | _demands(query.subject, language)


def _supplies(read: SubQuestion) -> set[str]:
    out = {f"{name} {value}" for name, value in read.modifiers}
    if read.kind == "op":
        return out | {f"op {read.op}"} | ({f"number {read.constant}"} if read.constant is not None else set())
    if read.kind == "compare":
        return {f"compare {read.phrase}"}
    return out | {f"phrase {read.phrase}"} | ({f"entity {read.entity}"} if read.entity is not None else set())


def _missing(request: Request) -> list[str]:
    language: Language = request["language"]
    reads = [read for _, read in _read(request) if read is not None]
    stateful = [read for read in reads if read.kind == "change"]
    if stateful:
        moved = len(stateful[0].arguments) == 3 and MOVE[language].match(request["nodes"][0]["question"])
        return [] if not moved or any(read.kind == "read" for read in reads) else ["the value after the change"]
    query = parse(request["question"], language)
    if query is None or isinstance(query, str):
        return ["the question cannot be read"]
    supplied: set[str] = set().union(*map(_supplies, reads)) if reads else set()
    for node, read in _read(request):  # a question of two halves still asks for both
        if read is None:
            first = node["question"].split(", and what is" if language == "en" else "，另外")[0]
            half = read_question(first + ("?" if language == "en" else "？"), language)
            supplied |= _supplies(half) if half is not None else set()
    return sorted(_demands(query, language) - supplied)


@program("verifier.completeness")
def completeness(request: Request, rng: random.Random, plant: Planter) -> dict[str, Any]:
    missing = _missing(request)
    reason = "the nodes cover the question" if not missing else "not covered: " + ", ".join(missing)
    return {"complete": not missing, "missing": missing, "reason": reason}
