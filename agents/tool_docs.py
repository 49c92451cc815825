"""What can be read off a tool's document without a model: the words of its name, which arguments a user can state, and
which tool's result can give an argument that no user knows.

The static argument-flow check and the teacher's planner both stand on these rules; they see names, types and
descriptions only, as a planner does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from astrolabe.records.messages import FunctionSchema

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_A-Za-z]+")
REFERENCE = frozenset({"id", "ids", "uuid", "jid", "hash", "token", "ref", "handle", "cursor", "key", "pubkey"})
_OPAQUE_LAST = frozenset({"ref", "cursor", "handle", "nonce"})
_FROM_TOOL = re.compile(
    r"\b(?:from|by|via|using|in)\b[^.;]{0,40}\b(?:snapshot|page source|previous (?:call|result|response))\b"
    r"|\b(?:from|by|using) (?:the |a )?[`'\"]?[\w-]+[`'\"]? tool\b"
    r"|\b(?:returned|obtained|generated|received|exported) (?:from|by)\b",
    re.IGNORECASE,
)


def words(name: str) -> list[str]:
    """The lower-case words of an identifier: `getShotData` and `get-shot_data` -> get, shot, data."""
    return [word.lower() for word in _WORD.findall(name)]


GIVING = frozenset(words(
    "get list search find create add open start launch fetch lookup look new init initialize register "
    "read select query retrieve generate browse discover show view describe check make build import "
    "upload pack load scan record begin connect join return returns take run 获取 查询 搜索 创建 启动 列出"
))  # fmt: skip
READING = frozenset(words(
    "get list search find fetch lookup read query retrieve browse discover show view describe check "
    "status info count returns return latest 获取 查询 搜索 列出"
))  # fmt: skip
_VERBS = GIVING - {"scan", "record", "query", "view", "check"}
_COMMON = frozenset(words(
    "a an the of for to in on by with and or from all as is it its this that be at into your my one new "
    "current tool tools given using use used specific based via info information data details detail list "
    "single"
))  # fmt: skip


def stem(word: str) -> str:
    """A crude singular, enough to join `sessions` with `sessionId`."""
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("sses", "xes", "ches", "shes")):
        return word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")) else word


@lru_cache(maxsize=4096)
def _nouns(text: str) -> frozenset[str]:
    return frozenset(stem(w) for w in words(text) if w not in _COMMON and w not in _VERBS and not w.isdigit())


def nouns(tool: FunctionSchema) -> frozenset[str]:
    """What a tool is about, by its name."""
    return _nouns(tool.name)


def said_nouns(tool: FunctionSchema) -> frozenset[str]:
    """What a tool is about, by its name and the beginning of its description."""
    return nouns(tool) | _nouns(tool.description[:200])


def is_reading(tool: FunctionSchema) -> bool:
    """Whether the tool only looks something up, by the first words of its name."""
    return bool(set(words(tool.name)[:2]) & READING) or bool(set(words(tool.description[:24])[:1]) & READING)


def properties(tool: FunctionSchema) -> dict[str, Any]:
    found = tool.parameters.get("properties")
    return found if isinstance(found, dict) else {}


def required(tool: FunctionSchema) -> list[str]:
    return [name for name in tool.parameters.get("required") or [] if isinstance(name, str)]


def resolve(schema: Any, tool: FunctionSchema) -> dict[str, Any]:
    """A property's schema with a local `$ref` followed and the first branch of `anyOf`/`oneOf` that is not null taken."""
    for _ in range(4):
        if not isinstance(schema, dict):
            return {}
        if "$ref" in schema:
            name = str(schema["$ref"]).rsplit("/", 1)[-1]
            tables = [tool.parameters.get(k) for k in ("$defs", "definitions")]
            schema = next((t[name] for t in tables if isinstance(t, dict) and name in t), {})
            continue
        branches = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(branches, list) and "type" not in schema:
            live = [b for b in branches if isinstance(b, dict) and b.get("type") != "null"]
            schema = {**{k: v for k, v in schema.items() if k not in ("anyOf", "oneOf")}, **(live[0] if live else {})}
            continue
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return {**schema, "type": next((k for k in kinds if k != "null"), "null")}
        return schema
    return {}


def statable(schema: Any, tool: FunctionSchema, depth: int = 2) -> bool:
    """Whether a user could write such a value into a question: scalars, short lists of them, and objects whose members
    are declared and statable. An object of undeclared members is none."""
    schema = resolve(schema, tool)
    if "enum" in schema or "const" in schema:
        return True
    kind = schema.get("type")
    if kind in ("string", "number", "integer", "boolean"):
        return True
    if depth == 0:
        return False
    if kind == "array":
        return "items" in schema and statable(schema["items"], tool, depth - 1)
    if kind == "object":
        members = schema.get("properties")
        needed = schema.get("required") or (list(members) if isinstance(members, dict) else [])
        return (
            isinstance(members, dict)
            and bool(members)
            and all(statable(members.get(n), tool, depth - 1) for n in needed)
        )
    return False


def opaque(argument: str, schema: Any) -> bool:
    """Whether the document says that only a tool can give this value: a page reference, a cursor, another tool's output."""
    last = (words(argument) or [""])[-1]
    description = schema.get("description", "") if isinstance(schema, dict) else ""
    return last in _OPAQUE_LAST or bool(_FROM_TOOL.search(str(description)))


def reference_nouns(argument: str, tool: FunctionSchema) -> frozenset[str]:
    """What an id-like argument refers to (`sessionId` -> session; a bare `id` -> the tool's own nouns); empty if it is
    not id-like."""
    parts = words(argument)
    if not parts or parts[-1] not in REFERENCE:
        return frozenset()
    own = frozenset(stem(w) for w in parts[:-1] if w not in _COMMON)
    return own or (nouns(tool) if parts[-1] in ("id", "ids", "uuid") else frozenset())


def yields(producer: FunctionSchema, argument: str, consumer: FunctionSchema) -> bool:
    """Whether `producer`'s result can give `consumer`'s argument, by its document: it gives things, it is about what the
    argument refers to (or the argument's description names it), and it does not itself need that argument."""
    if producer.name == consumer.name or argument in required(producer):
        return False
    schema = properties(consumer).get(argument)
    description = schema.get("description", "") if isinstance(schema, dict) else ""
    if names_tool(str(description), [producer.name]):
        return True
    if opaque(argument, schema) and _nouns(argument + " " + str(description)) & nouns(producer):
        return True
    wanted = reference_nouns(argument, consumer)
    if not set(words(producer.name)) & GIVING and not set(words(producer.description[:40])[:1]) & GIVING:
        return False
    return bool(wanted) and (bool(wanted & nouns(producer)) or wanted <= said_nouns(producer))


def names_tool(text: str, names: Iterable[str]) -> str | None:
    """The first tool name that stands in `text` as an identifier. A plain word (`ping`) counts only when quoted or called,
    since it is also language."""
    for name in names:
        edge = re.escape(name)
        if re.search(r"[_.\-]|[a-z][A-Z]|\d", name):
            if re.search(rf"(?<![\w.-]){edge}(?![\w-])", text):
                return name
        elif re.search(rf"`{edge}`|(?<![\w.-]){edge}\(", text):
            return name
    return None
