"""Server cards and knowledge rows: the inputs of synthesis, with their rejections.

A bad tool is dropped with its reason; a card is rejected for its own reasons or when too few tools are left.
Nothing is mended in silence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import jsonschema
from pydantic import Field

from astrolabe.records.base import Record
from astrolabe.records.equality import has_chinese
from astrolabe.records.ids import content_hash
from astrolabe.records.messages import FunctionSchema

TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ServerCard(Record):
    name: str
    description: str = ""
    domain: str = ""
    license: str
    source: str | None = None
    tools: list[FunctionSchema]
    connect: dict[str, Any] | None = None
    language: Literal["en", "zh"] = Field("en", exclude=True)
    """Read off the description: not a field of the file."""

    def content_id(self) -> str:
        """`card-` + hash of name and tools: the same card whoever lists it."""
        row = self.to_json()
        return "card-" + content_hash([row["name"], row["tools"]])


@dataclass(frozen=True)
class CardReading:
    """What became of one row: the card (None if rejected), the reasons, and the tools that were dropped."""

    card: ServerCard | None
    reasons: list[str]
    dropped: list[dict[str, Any]]
    """`{"tool": name or index, "reason": code, "detail": text}` for each dropped tool."""


def _tool_faults(tool: Any) -> list[tuple[str, str]]:
    """(reason, detail) of everything for which this raw tool must be dropped."""
    if not isinstance(tool, dict):
        return [("tool_without_name", "a tool must be an object with a name")]
    faults: list[tuple[str, str]] = []
    name, description, parameters = tool.get("name"), tool.get("description"), tool.get("parameters")
    if not isinstance(name, str) or not name.strip():
        faults.append(("tool_without_name", "a tool needs a non-empty name"))
    elif not TOOL_NAME.fullmatch(name):
        faults.append(("bad_name", f"{name!r} does not match [A-Za-z0-9_.-]{{1,64}}"))
    if not isinstance(description, str) or len(description.strip()) < 10:
        faults.append(("vague_description", "the description is missing or under 10 characters"))
    if not isinstance(parameters, dict) or parameters.get("type") != "object":
        faults.append(("parameters_not_object", "parameters must be a JSON Schema of type object"))
    if not isinstance(parameters, dict):
        if not isinstance(parameters, bool):  # true and false are schemas, though not of objects
            faults.append(("parameters_not_schema", f"{type(parameters).__name__} is no JSON Schema"))
        return faults
    properties = parameters.get("properties", {})
    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
    except jsonschema.SchemaError as error:
        faults.append(("parameters_not_schema", f"{error.json_path}: {error.message[:200]}"))
        return faults
    unknown = [name for name in parameters.get("required", []) if name not in properties]
    if unknown:
        faults.append(("required_not_in_properties", f"required but not in properties: {', '.join(unknown)}"))
    return faults


def read_card(row: Any, *, min_tools: int = 3) -> CardReading:
    """Validate one raw card row. A connected server needs one tool, any other `min_tools`."""
    if not isinstance(row, dict):
        return CardReading(None, ["schema_invalid"], [])
    reasons: list[str] = []
    if not isinstance(row.get("name"), str) or not row["name"].strip() or not isinstance(row.get("tools"), list):
        return CardReading(None, ["schema_invalid"], [])
    licence = row.get("license")
    if not isinstance(licence, str) or not licence.strip():
        reasons.append("license_missing")
    kept: list[FunctionSchema] = []
    dropped: list[dict[str, Any]] = []
    for index, tool in enumerate(row["tools"]):
        faults = _tool_faults(tool)
        if faults:
            name = tool.get("name") if isinstance(tool, dict) and tool.get("name") else index
            dropped += [{"tool": name, "reason": reason, "detail": detail} for reason, detail in faults]
        else:
            kept.append(
                FunctionSchema(name=tool["name"], description=tool["description"], parameters=tool["parameters"])
            )
    names = [tool["name"] for tool in row["tools"] if isinstance(tool, dict) and isinstance(tool.get("name"), str)]
    if len(set(names)) < len(names):
        reasons.append("duplicate_tool_name")
    connect = row.get("connect")
    if connect is not None and not (isinstance(connect, dict) and ("command" in connect or "url" in connect)):
        reasons.append("schema_invalid")
    texts = {field: row.get(field) for field in ("description", "domain", "source")}
    if not all(text is None or isinstance(text, str) for text in texts.values()):
        reasons.append("schema_invalid")
    if len(kept) < (1 if connect else min_tools):
        reasons.append("too_few_tools")
    if reasons:
        return CardReading(None, list(dict.fromkeys(reasons + [d["reason"] for d in dropped])), dropped)
    described = (texts["description"] or "") + "".join(tool.description for tool in kept)
    card = ServerCard(
        name=row["name"],
        description=texts["description"] or "",
        domain=texts["domain"] or "",
        license=str(licence),
        source=texts["source"],
        tools=kept,
        connect=connect,
        language="zh" if has_chinese(described) and sum(map(has_chinese, described)) * 4 > len(described) else "en",
    )
    return CardReading(card, [], dropped)


class KnowledgeRow(Record):
    domain: str
    text: str
    language: Literal["en", "zh"]

    def content_id(self) -> str:
        return "kn-" + content_hash(self.to_json())


def read_knowledge(row: Any) -> KnowledgeRow:
    """Our form, or ASTRA's `{"domain", "knowledge_corpus"}`. Raises ValueError with what is missing."""
    if not isinstance(row, dict):
        raise ValueError("a knowledge row must be an object")
    text = row.get("text", row.get("knowledge_corpus"))
    if not isinstance(text, str) or not text.strip():
        raise ValueError("`text` (or `knowledge_corpus`) is missing or empty")
    domain = row.get("domain")
    if not isinstance(domain, str) or not domain.strip():
        raise ValueError("`domain` is missing or empty")
    language = row.get("language", "zh" if has_chinese(text) else "en")
    if language not in ("en", "zh"):
        raise ValueError(f"`language` must be en or zh, not {language!r}")
    return KnowledgeRow(domain=domain, text=text, language=language)
