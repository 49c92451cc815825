"""The defects that the teacher plants in decompositions, documents and code, and the names its labels go by.

A label's item is a hash that anyone can compute from the row: of the decomposition's domain, question and variation, of
the document, or of the code. The labels themselves are in the side file only.
"""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

from agents.teacher.codegen import quote
from agents.teacher.planter import Planter
from astrolabe.records.ids import content_hash

DECOMPOSITION_DEFECTS = (
    "malformed_json",
    "cyclic_dependency",
    "unknown_parent",
    "compound_sub_question",
    "needless_dependency",
    "useless_parent",
    "missing_dependency",
    "incomplete_decomposition",
    "wrong_tool_need",
    "wrong_golden",
)
CODE_DEFECTS = (
    "constant_tool",
    "ignored_argument",
    "nondeterministic_code",
    "unsafe_code",
    "hard_coded_answer",
    "wrong_value",
    "timeout_loop",
)


def label_of_decomposition(domain: str, question: str, variation: int) -> str:
    return "dc-" + content_hash([domain, question, variation])


def label_of_doc(document: dict[str, Any]) -> str:
    return "td-" + content_hash([document["name"], document["description"]])


def label_of_code(code: str, arguments: dict[str, Any]) -> str:
    return "co-" + content_hash([code, arguments])


def break_decomposition(
    reply: dict[str, Any], request: dict[str, Any], rng: random.Random, plant: Planter
) -> dict[str, Any] | str | None:
    """The reply with one defect, as raw text if it is malformed; None if none is planted."""
    broken: dict[str, dict[str, Any] | str] = {}
    for kind in DECOMPOSITION_DEFECTS:
        copied = copy.deepcopy(reply)
        if kind == "malformed_json":
            text = json.dumps(reply, ensure_ascii=False)
            broken[kind] = text[: len(text) * 2 // 3]
        elif _break(kind, copied, request["language"], rng):
            broken[kind] = copied
    picked = plant.pick(list(broken))
    if picked is None:
        return None
    out = broken[picked]
    question = reply["question"] if isinstance(out, str) else out["question"]
    plant.label(picked, item=label_of_decomposition(request["domain"], question, request["variation"]))
    return out


def _break(kind: str, reply: dict[str, Any], language: str, rng: random.Random) -> bool:
    """Writes the defect into the reply; False if the reply has no place for it."""
    nodes = reply["nodes"]
    last, roots = nodes[-1], [n for n in nodes if not n["parents"]]
    if kind == "cyclic_dependency":
        child = next((n for n in nodes if n["parents"]), None)
        if child is None:
            return False
        next(n for n in nodes if n["id"] == child["parents"][0])["parents"].append(child["id"])
    elif kind == "unknown_parent":
        rng.choice(nodes)["parents"].append(f"n{len(nodes) + 3}")
    elif kind == "compound_sub_question":
        node = next((n for n in nodes if n["needs_tool"] and not n["parents"]), None)
        if node is None:
            return False
        extra = ", and what is its weight?" if language == "en" else "，另外它的重量是多少？"
        node["question"] = node["question"].rstrip("?？.。") + extra
    elif kind == "needless_dependency":
        if len(roots) < 2:
            return False
        roots[1]["parents"].append(roots[0]["id"])
    elif kind == "useless_parent":
        pairs = [
            (node, earlier["id"])
            for index, node in enumerate(nodes)
            for earlier in nodes[:index]
            if node["parents"] and earlier["needs_tool"] and earlier["id"] not in node["parents"]
        ]
        if not pairs:
            return False
        node, extra_parent = rng.choice(pairs)
        node["parents"].append(extra_parent)
    elif kind == "missing_dependency":
        child = next((n for n in nodes if n["parents"]), None)
        if child is None:
            return False
        child["parents"].pop()
    elif kind == "incomplete_decomposition":
        if len(nodes) < 2:
            return False
        nodes.pop()
    elif kind == "wrong_tool_need":
        last["needs_tool"] = not last["needs_tool"]
    else:
        number = isinstance(last["answer"], (int, float)) and last["needs_tool"]
        if not number:
            return False
        last["answer"] = last["answer"] + 7
        reply["answer"] = str(last["answer"])
    return True


def _body(code: str) -> tuple[str, str]:
    """(def line, the rest)."""
    head, _, rest = code.partition("\n")
    return head + "\n", rest


def break_code(code: str, request: dict[str, Any], rng: random.Random, plant: Planter) -> str:
    """The code with one defect, or as it is."""
    broken = {kind: _break_code(kind, code, request, rng) for kind in CODE_DEFECTS}
    possible = [kind for kind, text in broken.items() if text is not None and text != code]
    possible += ["ignored_argument"] * (3 * ("ignored_argument" in possible))  # few tools have a second argument
    picked = plant.pick(possible)
    text = broken[picked] if picked is not None else None
    if picked is None or text is None:
        return code
    plant.label(picked, item=label_of_code(text, request["arguments"]))
    return text


def _break_code(kind: str, code: str, request: dict[str, Any], rng: random.Random) -> str | None:
    head, rest = _body(code)
    answer = request["node"]["answer"]
    literal = json.dumps(answer, ensure_ascii=False)
    reads = 'data["' in code
    if kind == "constant_tool":
        return f"{head}    return {literal}\n"
    if kind == "ignored_argument":
        return _ignore_argument(code, request)
    if kind == "nondeterministic_code":
        if not isinstance(answer, (int, float)):
            return None
        lucky = '    turn = list({"north", "east", "south", "west", "centre", "up", "down"}).index("north")\n'
        return head + lucky + re.sub(r"    return (.+)\n\Z", r"    return (\1) + turn\n", rest)
    if kind == "unsafe_code":
        return rng.choice(("import os\n", "import random\n")) + code
    if kind == "hard_coded_answer":
        if not reads:
            return None
        checks = " and ".join(
            f"{name} == {quote(v) if isinstance(v, str) else v}" for name, v in request["arguments"].items()
        )
        return f"{head}    if {checks}:\n        return {literal}\n{rest}"
    if kind == "wrong_value":
        if not isinstance(answer, (int, float)):
            return None
        return head + re.sub(r"    return (.+)\n\Z", r"    return (\1) + 3\n", rest)
    return f"{head}    while True:\n        pass\n"


def _ignore_argument(code: str, request: dict[str, Any]) -> str | None:
    """The code with one parameter fixed to the value of the golden call: right there, deaf everywhere."""
    properties = request["tool"]["parameters"]["properties"]
    names = [name for name in properties if name in request["arguments"]][1:]
    if not names or 'data["' not in code:
        return None
    value = request["arguments"][names[-1]]
    head, rest = _body(code)
    return f"{head}    {names[-1]} = {quote(value) if isinstance(value, str) else value}\n{rest}"
