"""The literals that a tool could be probed with: from its code, from data and state, from the question, from goldens.

Containers keep their shape, so that the siblings of a golden's argument (the other keys of the table it stands in, the
other values of the field it fills) can be tried before anything else: those are the values that a tool knows.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from astrolabe.records.equality import equal, leaves

_CONTAINERS = (ast.Dict, ast.List, ast.Tuple, ast.Set)


def code_literals(code: str) -> list[Any]:
    """The literal containers and constants of a Python source, outermost first; empty for code that does not parse."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    out: list[Any] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.Module)):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            children: list[ast.AST] = [*body]
            if isinstance(node, ast.FunctionDef):
                children += [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]
        else:
            children = list(ast.iter_child_nodes(node))
        if isinstance(node, _CONTAINERS):
            try:
                out.append(ast.literal_eval(node))
            except (ValueError, TypeError, SyntaxError, RecursionError):
                pass
            else:
                return
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ToolError":
            return  # an error's text is no value that a tool knows
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float)):
            out.append(node.value)
        for child in children:
            visit(child)

    visit(tree)
    return out


def scalars(value: Any) -> Iterator[str | int | float | bool]:
    """The scalars of a value, keys too; tuples and sets as lists. Sets in sorted order."""
    if isinstance(value, dict):
        for key, member in value.items():
            yield from scalars(key)
            yield from scalars(member)
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from scalars(member)
    elif isinstance(value, (set, frozenset)):
        yield from scalars(sorted(value, key=repr))
    elif isinstance(value, (str, int, float, bool)):
        yield value


def lists_in(value: Any) -> Iterator[list[Any]]:
    """The lists inside a JSON value, outermost first."""
    if isinstance(value, list):
        yield value
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for member in members:
        yield from lists_in(member)


def siblings(value: Any, wanted: Any) -> Iterator[Any]:
    """Values that stand where `wanted` stands somewhere in `value`: other keys of the same table, the same field of other
    records, the same place of other tuple keys, other members of the same list."""
    if isinstance(value, dict):
        keys = list(value)
        if any(equal(key, wanted) for key in keys):
            yield from keys
        for key in keys:
            if isinstance(key, tuple):
                for place, part in enumerate(key):
                    if equal(part, wanted):
                        yield from (k[place] for k in keys if isinstance(k, tuple) and len(k) > place)
        members = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        members = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else list(value)
        if any(equal(member, wanted) for member in members):
            yield from members
    else:
        return
    for record in members:
        if isinstance(record, dict):
            for field, member in record.items():
                if equal(member, wanted):
                    yield from (r[field] for r in members if isinstance(r, dict) and field in r)
        elif isinstance(record, (tuple, list)):
            for place, member in enumerate(record):
                if equal(member, wanted):
                    yield from (r[place] for r in members if isinstance(r, (tuple, list)) and len(r) > place)
    for member in members:
        yield from siblings(member, wanted)


_QUOTED = re.compile(r"[\"'“‘「『《]([^\"'”’」』》]{1,80})[\"'”’」』》]")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w]|\.\d)|(?<=[\u3400-\u9fff])\d+(?:\.\d+)?(?=[\u3400-\u9fff]|$)")
_NAMES = re.compile(r"[A-Z][\w'’-]*(?:\s+(?:of|the|de|van)?\s*[A-Z][\w'’-]*)*")
_WORDS = re.compile(r"[A-Za-z0-9][\w.:-]*\w|[\u3400-\u9fff]+")


def question_literals(question: str) -> list[str | int | float]:
    """Numbers, quoted texts, names and words of a question, in that order."""
    numbers: list[str | int | float] = []
    for text in _NUMBER.findall(question):
        numbers.append(float(text) if "." in text else int(text))
    words = [*_QUOTED.findall(question), *_NAMES.findall(question), *_WORDS.findall(question)]
    return list(dict.fromkeys([*numbers, *words]))


def all_leaves(values: list[Any]) -> list[Any]:
    """The scalars of several JSON values, nulls left out."""
    return [leaf for value in values for leaf in leaves(value) if leaf is not None]
