"""The static rules of tool code, and the signature's equality with the schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from astrolabe.envs.static_rules import check_code, check_signature


def body(text: str, before: str = "") -> str:
    return f"{before}\ndef tool(x=1):\n    {text}\n    return x\n"


@pytest.mark.parametrize(
    "code",
    [
        "import math, re\nRATE = re.compile('a')\nTABLE = {'a': [1, 2]}\n\ndef helper(v):\n    return math.floor(v)\n\ndef tool(x):\n    return helper(x) + TABLE['a'][0]\n",
        "from datetime import date, timedelta\ndef tool(day):\n    return (date.fromisoformat(day) + timedelta(days=1)).isoformat()\n",
        "def tool(input, open, *, state):\n    state['rows'].append(input)\n    state['n'] = len(state['rows'])\n    return open\n",
        "def tool(items):\n    seen = []\n    seen.append(1)\n    seen.sort(key=lambda v: -v)\n    rows = {}\n    rows['a'] = 1\n    return [vars for vars in items]\n",
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef tool(x):\n    return P(x, 1)._asdict()\n",
        "def tool(x, *, data):\n    match x:\n        case {'a': value, **rest}:\n            return value\n        case _:\n            raise ToolError('no')\n",
        "RATES: dict = {'a': 1}\ndef tool(x):\n    try:\n        return RATES[x]\n    except KeyError as error:\n        raise ToolError('unknown') from error\n",
        "import decimal\ndef tool(x):\n    with decimal.localcontext() as ctx:\n        ctx.prec = 50\n        return str(decimal.Decimal(x))\n",
    ],
)
def test_ordinary_tools_pass(code: str) -> None:
    assert check_code(code, "tool") == []


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("import os\ndef tool():\n    return 1\n", "os"),
        ("import random\ndef tool():\n    return 1\n", "random"),
        ("import time\ndef tool():\n    return 1\n", "time"),
        ("import collections.abc\ndef tool():\n    return 1\n", "collections.abc"),
        ("from . import x\ndef tool():\n    return 1\n", "import from"),
        ("from math import *\ndef tool():\n    return 1\n", "star"),
        ("from statistics import random\ndef tool():\n    return 1\n", "random"),
        ("from string import Formatter\ndef tool():\n    return 1\n", "Formatter"),
        ("import statistics as s\ndef tool():\n    return s.random.random()\n", "not public"),
        ("import json\ndef tool():\n    return json.decoder\n", "not public"),
        (body("import os"), "os"),
        *((body(f"{name}('1')"), name) for name in ("eval", "exec", "compile", "open", "input", "__import__")),
        *((body(f"{name}(x, 'a')"), name) for name in ("getattr", "setattr", "delattr", "hasattr", "vars")),
        (body("globals()"), "globals"),
        (body("f = eval"), "eval"),
        (body("x = ().__class__"), "__class__"),
        (body("x = [c for c in ().__class__.__base__.__subclasses__()]"), "__subclasses__"),
        (body("x = __builtins__"), "__builtins__"),
        (body("x = x._private"), "_private"),
        (body("x = '{0.__class__}'.format(x)"), "format string"),
        (body("x = (lambda: 0).gi_frame.f_back"), "f_back"),
        (body("type('X', (object,), {})"), "type()"),
        (body("import datetime\n    x = datetime.datetime.now()"), "now"),
        (body("import datetime\n    x = datetime.date.today()"), "today"),
        ("class A:\n    pass\ndef tool():\n    return 1\n", "class"),
        ("async def tool():\n    return 1\n", "async"),
        ("for i in range(3):\n    pass\ndef tool():\n    return 1\n", "top level"),
        ("print(1)\ndef tool():\n    return 1\n", "top level"),
        ("eval: int\ndef tool():\n    return eval('1')\n", "without a value"),
        ("def tool(:\n", "does not parse"),
        ("def tool():\n    return '\0'\n", "does not parse"),
        ("x = " + "(" * 3000 + ")" * 3000, "does not parse"),
        ("x = '" + "a" * 70_000 + "'", "longer than"),
        ("def tool():\n    match 1:\n        case int(__class__=c):\n            return c\n", "__class__"),
        ("def tool():\n    return 1\ndef tool():\n    return 2\n", "2 top-level functions"),
    ],
)
def test_what_is_banned_is_found(code: str, word: str) -> None:
    assert any(word in violation for violation in check_code(code, "tool")), check_code(code, "tool")


@pytest.mark.parametrize(
    "code",
    [
        "N = 0\ndef tool():\n    global N\n    N += 1\n    return N\n",
        "SEEN = {}\ndef tool(x):\n    SEEN[x] = 1\n    return len(SEEN)\n",
        "SEEN = []\ndef tool(x):\n    SEEN.append(x)\n    return len(SEEN)\n",
        "S = {'a': {'n': 0}}\ndef tool():\n    S['a']['n'] += 1\n    return S['a']['n']\n",
        "S = {'a': []}\ndef tool():\n    del S['a']\n    return 1\n",
        "S = {'a': []}\ndef tool():\n    S['a'].extend([1])\n    return 1\n",
        "def tool(x, seen=[]):\n    seen.append(x)\n    return len(seen)\n",
        "def tool(x, *, seen=dict()):\n    return 1\n",
        "def tool():\n    tool.count = 1\n    return 1\n",
        "import itertools\nC = itertools.count()\ndef tool():\n    return next(C)\n",
        "import heapq\nH = [1]\ndef tool():\n    heapq.heappush(H, 2)\n    return len(H)\n",
        "from functools import lru_cache\n@lru_cache\ndef tool(x):\n    return x\n",
        "import functools\ndef helper(x):\n    return x\nH = functools.lru_cache(helper)\ndef tool(x):\n    return H(x)\n",
        "import math\ndef tool(x):\n    math.pi = 3\n    return math.pi\n",
    ],
)
def test_state_kept_between_calls_is_found(code: str) -> None:
    assert check_code(code, "tool") != []


def test_a_long_sum_is_walked_without_recursion() -> None:
    assert check_code("def tool():\n    return " + "+".join(["1"] * 900) + "\n", "tool") == []


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
    "required": ["a"],
}


@pytest.mark.parametrize(
    "signature", ["a, b=1", "b=1, *, a", "*, a, b=None", "a, b=1, *, data", "a, b=1, *, data, state", "a='x', b=2"]
)
def test_an_equal_signature_passes(signature: str) -> None:
    assert check_signature(f"def tool({signature}):\n    return a\n", "tool", SCHEMA) == []


@pytest.mark.parametrize(
    "signature",
    ["a", "a, b", "a, b=1, c=2", "a, b=1, data=None", "a, b=1, /", "*args, a, b=1", "a, b=1, **kwargs", "b=1"],
)
def test_an_unequal_signature_is_found(signature: str) -> None:
    assert check_signature(f"def tool({signature}):\n    return a\n", "tool", SCHEMA) != []


def test_state_is_no_parameter_of_a_stateless_tool() -> None:
    code = "def tool(a, b=1, *, state):\n    return a\n"
    assert check_signature(code, "tool", SCHEMA, stateful=False) == ["the schema has no property 'state'"]


def test_a_missing_function_is_a_mismatch() -> None:
    assert "no top-level function" in check_signature("def other():\n    return 1\n", "tool", SCHEMA)[0]


def test_the_planted_files_agree(shared: Path) -> None:
    reasons = json.loads((shared / "data/environments_bad_reasons.json").read_text())
    unsafe = {row["id"] for row in reasons.values() if row["reason"] == "unsafe_code"}
    mismatched = {row["id"] for row in reasons.values() if row["reason"] == "signature_mismatch"}
    for name in ("environments_good.jsonl", "environments_bad.jsonl"):
        for line in (shared / "data" / name).read_text().split("\n"):
            row = json.loads(line) if line.strip() else {"id": "", "tools": [], "distractors": [], "mode": ""}
            tools = [tool for tool in row["tools"] + row["distractors"] if "code" in tool]
            assert any(check_code(t["code"], t["name"]) for t in tools) == (row["id"] in unsafe)
            signatures = [
                check_signature(t["code"], t["name"], t["parameters"], stateful=row["mode"] == "stateful")
                for t in tools
            ]
            assert any(signatures) == (row["id"] in mismatched)
