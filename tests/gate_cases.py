"""Environments written for the gates' tests: three that are sound, and a way to break them one thing at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from astrolabe.records.environment import environment_id

Row = dict[str, Any]


def schema(required: dict[str, str], optional: dict[str, str] | None = None) -> Row:
    properties = {name: {"type": kind} for name, kind in {**required, **(optional or {})}.items()}
    return {"type": "object", "properties": properties, "required": list(required)}


def row(**fields: Any) -> Row:
    """A whole row with its id; `fields` over sound defaults."""
    base: Row = {
        "schema": "astrolabe.environment/1", "id": "", "language": "en", "domain": "museum", "question": "", "answer": "",
        "scenario": "single_hop", "expect": "answer", "answer_type": "number", "nodes": [], "tools": [], "goldens": [],
        "distractors": [], "data": None, "mode": "stateless", "state": None, "goal": None, "certificate": None,
        "provenance": {"source": "written for this test", "license": "CC0-1.0"},
    }  # fmt: skip
    base.update(fields)
    return sealed(base)


def sealed(env: Row) -> Row:
    """The row under the id of its content."""
    return {**env, "id": environment_id(env)}


TICKETS = """def find_ticket(visitor, *, data):
    if visitor not in data["tickets"]:
        raise ToolError("no ticket for this visitor")
    return data["tickets"][visitor]
"""
FEE = """def guide_fee(ticket, hours, *, data):
    if ticket not in data["rates"]:
        raise ToolError("unknown ticket")
    if hours < 1 or hours > 8:
        raise ToolError("hours must be 1 to 8")
    return data["rates"][ticket] * hours
"""
HALL = """def hall_of(ticket, day="weekday"):
    halls = {("TK7730", "weekday"): "east wing", ("TK7730", "sunday"): "north wing", ("TK2214", "weekday"): "cellar"}
    if (ticket, day) not in halls:
        raise ToolError("no hall")
    return halls[(ticket, day)]
"""


def museum() -> Row:
    """Two hops over `data`, with a distractor."""
    return row(
        question="What does Ada Quist pay for a guide of 4 hours?",
        answer="172",
        scenario="multi_hop",
        nodes=[
            {"id": "n1", "question": "Which ticket?", "answer": "TK7730", "parents": [], "tool": "find_ticket"},
            {"id": "n2", "question": "What fee?", "answer": 172, "parents": ["n1"], "tool": "guide_fee"},
        ],
        tools=[
            {"name": "find_ticket", "description": "Finds the ticket of a visitor.", "parameters": schema({"visitor": "string"}), "code": TICKETS},
            {"name": "guide_fee", "description": "Fee of a guide.", "parameters": schema({"ticket": "string", "hours": "integer"}), "code": FEE},
        ],
        goldens=[
            {"node": "n1", "tool": "find_ticket", "arguments": {"visitor": "Ada Quist"}, "returns": "TK7730"},
            {"node": "n2", "tool": "guide_fee", "arguments": {"ticket": "TK7730", "hours": 4}, "returns": 172},
        ],
        distractors=[
            {"name": "hall_of", "description": "Hall of a ticket.", "parameters": schema({"ticket": "string"}, {"day": "string"}), "code": HALL, "band": "high", "similarity": 0.9}
        ],
        data={
            "tickets": {"Ada Quist": "TK7730", "Bo Lind": "TK2214", "Cy Moe": "TK5150"},
            "rates": {"TK7730": 43, "TK2214": 29, "TK5150": 61},
        },
    )  # fmt: skip


WATER = '''def water(bed, litres, *, state):
    """Waters a bed."""
    if bed not in state["beds"] or litres < 1 or litres > state["tank"]:
        raise ToolError("not possible")
    state["tank"] -= litres
    state["beds"][bed] += litres
    return {"tank": state["tank"], "bed": state["beds"][bed]}
'''
LEVEL = """def tank_level(unit, *, state):
    if unit not in ("litres", "buckets"):
        raise ToolError("unknown unit")
    return state["tank"] if unit == "litres" else state["tank"] // 10
"""


def garden() -> Row:
    """Stateful: a write, then a read of what it left."""
    return row(
        domain="garden",
        question="Give the roses 35 litres and tell me how many litres the tank holds then.",
        answer="415",
        scenario="multi_hop",
        nodes=[
            {"id": "n1", "question": "Water.", "answer": {"tank": 415, "bed": 45}, "parents": [], "tool": "water"},
            {"id": "n2", "question": "Level?", "answer": 415, "parents": ["n1"], "tool": "tank_level"},
        ],
        tools=[
            {"name": "water", "description": "Waters a bed.", "parameters": schema({"bed": "string", "litres": "integer"}), "code": WATER},
            {"name": "tank_level", "description": "Level of the tank.", "parameters": schema({"unit": "string"}), "code": LEVEL},
        ],
        goldens=[
            {"node": "n1", "tool": "water", "arguments": {"bed": "roses", "litres": 35}, "returns": {"tank": 415, "bed": 45}},
            {"node": "n2", "tool": "tank_level", "arguments": {"unit": "litres"}, "returns": 415},
        ],
        mode="stateful",
        state={"tank": 450, "beds": {"roses": 10, "leeks": 0}},
        goal={"must": [{"path": "$.beds.roses", "equals": 45}], "must_not": [{"path": "$.beds.leeks", "equals": 35}]},
    )  # fmt: skip


STOCK = """def stock(shop, item):
    table = {"南门店": {"茶": 120, "米": 36}, "北门店": {"茶": 85, "米": 240}}
    if shop not in table or item not in table[shop]:
        raise ToolError("没有记录")
    return table[shop][item]
"""
DIFFERENCE = """def difference(a, b):
    return a - b
"""


def shop() -> Row:
    """Chinese: two calls side by side, then one that joins them."""
    return row(
        language="zh",
        domain="零售",
        question="北门店的米比南门店的米多多少？",
        answer="204",
        scenario="parallel_multi_hop",
        nodes=[
            {"id": "n1", "question": "北门店的米？", "answer": 240, "parents": [], "tool": "stock"},
            {"id": "n2", "question": "南门店的米？", "answer": 36, "parents": [], "tool": "stock"},
            {"id": "n3", "question": "差？", "answer": 204, "parents": ["n1", "n2"], "tool": "difference"},
        ],
        tools=[
            {"name": "stock", "description": "查询库存。", "parameters": schema({"shop": "string", "item": "string"}), "code": STOCK},
            {"name": "difference", "description": "两数之差。", "parameters": schema({"a": "number", "b": "number"}), "code": DIFFERENCE},
        ],
        goldens=[
            {"node": "n1", "tool": "stock", "arguments": {"shop": "北门店", "item": "米"}, "returns": 240},
            {"node": "n2", "tool": "stock", "arguments": {"shop": "南门店", "item": "米"}, "returns": 36},
            {"node": "n3", "tool": "difference", "arguments": {"a": 240, "b": 36}, "returns": 204},
        ],
    )  # fmt: skip


def abstain() -> Row:
    """No tool fits."""
    whole = museum()
    return row(
        question="Who painted the ceiling?",
        scenario="no_tool",
        expect="abstain",
        answer_type="none",
        tools=whole["tools"],
        distractors=whole["distractors"],
        data=whole["data"],
    )


def broken(base: Callable[[], Row], change: Callable[[Row], None]) -> Row:
    """A copy of a sound row with one thing changed, under its new id."""
    env = copy.deepcopy(base())
    change(env)
    return sealed(env)
