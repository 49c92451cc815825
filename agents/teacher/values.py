"""Values for a tool's arguments, as a user would say them: by the schema's enum, default and bounds, by the examples in the
description, then by the argument's name and type.

Values for chains are drawn so that two argument sets of one server rarely share one. What does not validate by the
tool's schema is never used; a tool that cannot be filled is left out of the plan.
"""

from __future__ import annotations

import math
import random
import re
from typing import Any

import jsonschema

from agents.tool_docs import properties, required, resolve, statable, stem, words
from astrolabe.records.equality import has_chinese
from astrolabe.records.messages import FunctionSchema

_EXAMPLES = re.compile(
    r"(?:e\.g\.?|eg\.|such as|for example|examples?:|like|例如|比如|如)[,:：]?\s*([^);。\n]{2,160})", re.IGNORECASE
)
_QUOTED = re.compile(r"[\"'`“「]([^\"'`”」\n]{1,80})[\"'`”」]")
_OPTIONS = re.compile(r"(?:one of|either|options?:|values?:|可选)[:：]?\s*([^.;\n)]{3,160})", re.IGNORECASE)
_SECRET = frozenset({"password", "secret", "mnemonic", "apikey", "seed"})

_POOLS: dict[str, tuple[str, ...]] = {
    "url": ("https://example.org/reports/q3", "https://example.com/blog/launch", "https://docs.example.net/guide/setup"),
    "email": ("mira.sol@example.com", "jon.aas@example.org", "li.wen@example.net"),
    "path": ("/home/mira/projects/atlas", "/srv/data/inbox/notes.md", "/workspace/orchard/src"),
    "file": ("quarterly_report.docx", "meeting_minutes.docx", "field_notes.docx"),
    "date": ("2025-03-14", "2025-06-02", "2024-11-21"),
    "time": ("2025-03-14 09:30:00", "2025-06-02 18:45:00", "2024-11-21 07:05:00"),
    "year": ("2023", "2024", "2025"),
    "city": ("Lisbon", "Osaka", "Nairobi", "Bergen"),
    "country": ("Portugal", "Japan", "Kenya", "Norway"),
    "currency": ("EUR", "JPY", "NOK", "CHF"),
    "symbol": ("BTC/USDT", "ETH/USDT", "SOL/USDT"),
    "timezone": ("Europe/Lisbon", "Asia/Tokyo", "Africa/Nairobi"),
    "language": ("en", "fr", "ja"),
    "phone": ("+351912345678", "+819012345678", "+4791234567"),
    "color": ("#3366cc", "#e07a5f", "#2a9d8f"),
    "address": ("0x52908400098527886E0F7030069857D2E4169EE7", "0x8617E340B3D01FA5F11F306F4090FD50E238070D"),
    "hash": ("0x9fc76417374aa880d4449a1f7f31ec597f00b1f6f3dd2d66f4c9c6c445836d8b",),
    "package": ("left-pad", "date-fns", "lodash"),
    "repo": ("orchard-tools", "tide-tables", "lantern-ui"),
    "owner": ("northwind-labs", "harbor-dev", "mira-sol"),
    "branch": ("feature/tide-chart", "release/2.4", "fix/login-timeout"),
    "person": ("Mira Sol", "Jon Aas", "Li Wen", "Tariq Noor"),
    "title": ("Spring harbour survey", "Notes on the tide tables", "Launch checklist"),
    "text": ("The ferry leaves at nine from the north pier.", "Please review the tide tables before Friday.", "Budget approved for the harbour survey."),
    "query": ("tidal energy storage", "harbour maintenance schedule", "solar roof subsidies"),
    "command": ("ls -la", "git status", "df -h"),
    "selector": ("#submit-order", ".nav-menu a.active", "input[name=email]"),
    "code": ("print(sum(range(10)))", "return document.title;", "x = [n * n for n in range(5)]"),
    "name": ("harbour-survey", "tide-watch", "orchard-pilot"),
    "domain": ("harbour-atlas.com", "tidewatch.io", "orchard-pilot.org"),
    "status": ("active", "paused", "archived"),
    "amount": ("1500", "250000", "420"),
    "emoji": ("👍", "🎉", "✅"),
    "jid": ("351912345678@s.whatsapp.net", "4791234567@s.whatsapp.net"),
    "digits": ("351912345678", "819012345678", "4791234567"),
}  # fmt: skip
_POOLS_ZH: dict[str, tuple[str, ...]] = {
    "person": ("李文", "苏明远", "陈嘉禾"),
    "title": ("春季港口调查", "潮汐表备注", "上线检查清单"),
    "text": ("渡轮九点从北码头出发。", "请在周五之前核对潮汐表。", "港口调查的预算已经批准。"),
    "query": ("潮汐能储存", "港口维护计划", "屋顶光伏补贴"),
    "city": ("里斯本", "大阪", "杭州"),
    "name": ("港口调查", "潮汐观测", "果园试点"),
}
# The last words of an argument's name, and the pool that they draw from; the first match from the name's end decides.
_BY_WORD = {
    **dict.fromkeys(("url", "uri", "link", "website", "endpoint", "remote", "relays"), "url"),
    **dict.fromkeys(("email", "to", "cc", "bcc", "recipient"), "email"),
    **dict.fromkeys(("path", "directory", "dir", "folder", "cwd", "workspace"), "path"),
    **dict.fromkeys(("filename", "file"), "file"),
    **dict.fromkeys(("date", "day", "since", "until"), "date"),
    **dict.fromkeys(("time", "datetime", "timestamp", "start", "end", "before", "after"), "time"),
    **dict.fromkeys(("year", "season"), "year"),
    **dict.fromkeys(("city", "location", "place", "origin", "destination"), "city"),
    "country": "country",
    **dict.fromkeys(("currency", "currencies"), "currency"),
    **dict.fromkeys(("symbol", "symbols", "pair"), "symbol"),
    **dict.fromkeys(("timezone", "tz"), "timezone"),
    **dict.fromkeys(("lang", "language", "locale"), "language"),
    **dict.fromkeys(("phone", "number"), "phone"),
    **dict.fromkeys(("color", "colour"), "color"),
    **dict.fromkeys(("address", "addresses", "account", "wallet"), "address"),
    **dict.fromkeys(("hash", "pubkey", "signature"), "hash"),
    **dict.fromkeys(("package", "packages", "library", "module"), "package"),
    **dict.fromkeys(("repo", "repository"), "repo"),
    **dict.fromkeys(("owner", "org", "organization", "username", "user"), "owner"),
    **dict.fromkeys(("branch", "ref", "commit"), "branch"),
    **dict.fromkeys(("person", "author", "player", "champion", "traveler"), "person"),
    **dict.fromkeys(("title", "subject", "topic", "tema", "heading"), "title"),
    **dict.fromkeys(
        ("text", "message", "content", "body", "description", "prompt", "input", "data", "thought"), "text"
    ),
    **dict.fromkeys(("query", "keyword", "keywords", "search", "question", "term"), "query"),
    **dict.fromkeys(("command", "cmd"), "command"),
    **dict.fromkeys(("selector", "element"), "selector"),
    **dict.fromkeys(("code", "script", "expression", "html"), "code"),
    **dict.fromkeys(("avatar", "image", "icon"), "url"),
    "domain": "domain",
    **dict.fromkeys(("status", "state"), "status"),
    **dict.fromkeys(("amount", "price", "balance"), "amount"),
    **dict.fromkeys(("emoji", "reaction"), "emoji"),
    "jid": "jid",
    "mint": "address",
}


def secret(argument: str) -> bool:
    """Whether an argument holds a credential: such a tool is left out, so that no text carries one."""
    parts = words(argument)
    return bool(set(parts) & _SECRET) or "".join(parts[-2:]) in ("apikey", "privatekey", "accesstoken", "webhooktoken")


def _said_examples(description: str) -> list[str]:
    """What the description offers as examples or options, in order."""
    found: list[str] = []
    for pattern in (_EXAMPLES, _OPTIONS):
        for span in pattern.findall(description):
            quoted = _QUOTED.findall(span)
            bare = [piece.strip(" .`'\"") for piece in re.split(r",|，|、|\bor\b|或", span)]
            found += quoted or [p for p in bare if p and len(p) <= 24 and " " not in p and "=" not in p]
    return [
        x for x in dict.fromkeys(found) if x and not x.endswith(("...", "…")) and "etc" not in x and x.isprintable()
    ]


def _bounds(argument: str, schema: dict[str, Any]) -> tuple[float, float]:
    """The range to draw from: the schema's, else the description's, else what the name suggests."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if isinstance(schema.get("exclusiveMinimum"), (int, float)):
        low = schema["exclusiveMinimum"] + (1 if schema.get("type") == "integer" else 0.01)
    if isinstance(schema.get("exclusiveMaximum"), (int, float)):
        high = schema["exclusiveMaximum"] - (1 if schema.get("type") == "integer" else 0.01)
    if low is None and high is None:
        last = (words(argument) or [""])[-1]
        if re.search(r"\b0(?:\.0)?\s*(?:-|to|–)\s*1(?:\.0)?\b", str(schema.get("description", ""))):
            return 0, 1
        if last in ("page", "index", "row", "col", "level", "iteration", "limit", "count", "size", "days", "period"):
            return 1, 9
        return (2019, 2025) if last == "year" else (12, 480)
    lowest = float(low) if low is not None else min(0.0, float(high or 0))
    return lowest, float(high) if high is not None else lowest + 40


def _number(argument: str, schema: dict[str, Any], rng: random.Random) -> int | float:
    low, high = _bounds(argument, schema)
    first, last = math.ceil(low), math.floor(min(high, low + 500))
    if (schema.get("type") == "integer" or high - low > 4) and first <= last:
        return rng.randint(first, last)
    return round(low + (high - low) * rng.choice((0.25, 0.4, 0.5, 0.75)), 2)


def _string(argument: str, schema: dict[str, Any], rng: random.Random, language: str) -> str:
    description = str(schema.get("description", ""))
    examples = [x for x in _said_examples(description) if len(x) >= schema.get("minLength", 0)]
    name = words(argument)
    if examples and rng.random() < 0.8:
        return rng.choice(examples)
    kind = {"date": "date", "date-time": "time", "uri": "url", "email": "email", "time": "time"}.get(
        str(schema.get("format"))
    )
    if kind is None and re.search(r"YYYY-MM-DD HH", description):
        kind = "time"
    if kind is None and "YYYY-MM-DD" in description:
        kind = "date"
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        every = [v for pool in _POOLS.values() for v in pool]
        fitting = [v for v in every if re.search(pattern, v)]
        return rng.choice(fitting or every)
    if kind is None and name and name[-1] in ("id", "ids", "uuid", "key", "token", "cursor"):
        head = "".join(w[:4] for w in name[:-1]) or "ref"
        return f"{head}-{rng.randrange(1000, 9999)}"
    if kind is None and name:
        kind = _BY_WORD.get(name[-1]) or (_BY_WORD.get(stem(name[-1])) if len(name[-1]) > 4 else None)
    if kind is None and len(name) > 1 and _BY_WORD.get(name[0]) not in ("text", "email", "time", "date"):
        kind = _BY_WORD.get(name[0])
    if kind is None and re.search(r"\burl\b", description, re.IGNORECASE):
        kind = "url"
    kind = kind or "name"
    pool = _POOLS_ZH.get(kind, _POOLS[kind]) if language == "zh" else _POOLS[kind]
    value = rng.choice(pool)
    return f"{value}-{rng.randrange(2, 99)}" if kind == "name" and language != "zh" else value


def make_value(
    argument: str, schema: Any, tool: FunctionSchema, rng: random.Random, language: str = "en", depth: int = 2
) -> Any:
    """A value for one argument. Raises ValueError where none can be stated."""
    schema = resolve(schema, tool)
    if not statable(schema, tool, depth):
        raise ValueError(f"no user can state {argument}")
    if "const" in schema:
        return schema["const"]
    if isinstance(schema.get("enum"), list):
        live = [v for v in schema["enum"] if v not in (None, "")]
        return rng.choice(live or schema["enum"])
    examples = [x for x in schema.get("examples", []) if x not in (None, "", [], {})]
    if examples:
        return rng.choice(examples)
    kind = schema.get("type")
    if kind == "boolean":
        return rng.random() < 0.5 if schema.get("default") is None else not schema["default"]
    if kind in ("integer", "number"):
        return _number(argument, schema, rng)
    if kind == "array":
        items = resolve(schema.get("items"), tool)
        items = {**items, "description": items.get("description") or schema.get("description", "")}
        count = max(int(schema.get("minItems", 1)), 1 if rng.random() < 0.6 else 2)
        count = min(count, int(schema.get("maxItems", count)))
        made: list[Any] = []
        for _ in range(count * 4):
            value = make_value(argument.removesuffix("s") or argument, items, tool, rng, language, depth - 1)
            if value not in made:
                made.append(value)
            if len(made) == count:
                break
        return made
    if kind == "object":
        members = schema["properties"]
        needed = schema.get("required") or list(members)
        return {name: make_value(name, members[name], tool, rng, language, depth - 1) for name in needed}
    return _string(argument, schema, rng, language)


def fill(
    tool: FunctionSchema,
    rng: random.Random,
    language: str = "en",
    *,
    optional: float = 0.25,
    skip: frozenset[str] = frozenset(),
) -> dict[str, Any] | None:
    """Arguments for a call: every required one (but those in `skip`, whose values come from elsewhere) and some optional
    ones, at most two. None if a needed value cannot be stated or the whole does not validate."""
    needed, members = required(tool), properties(tool)
    if any(secret(name) for name in needed):
        return None
    for _ in range(6):
        extra = [n for n in members if n not in needed and not secret(n) and rng.random() < optional][:2]
        arguments: dict[str, Any] = {}
        try:
            for name in [*needed, *extra]:
                if name in skip:
                    continue
                if name in extra and not statable(members[name], tool):
                    continue
                arguments[name] = make_value(name, members.get(name, {}), tool, rng, language)
        except ValueError:
            return None
        if valid(tool, arguments, skip):
            return arguments
    return None


def valid(tool: FunctionSchema, arguments: dict[str, Any], skip: frozenset[str] = frozenset()) -> bool:
    """Whether arguments fit the tool's schema, the skipped ones aside; and hold no text that would not print."""
    schema = {**tool.parameters, "required": [n for n in required(tool) if n not in skip]}
    return not list(jsonschema.Draft202012Validator(schema).iter_errors(arguments))


def language_of(text: str) -> str:
    """zh if a text holds Chinese, else en."""
    return "zh" if has_chinese(text) else "en"
