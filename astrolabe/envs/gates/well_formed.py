"""schema_invalid, id_mismatch, duplicate_tool_name, license_missing: the row is what FORMATS says a row is."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jsonpath_rfc9535 as jsonpath
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from pydantic import ValidationError

from astrolabe.envs.gates.report import Finding
from astrolabe.envs.match import values_at
from astrolabe.records.environment import Environment, EnvTool, environment_id
from astrolabe.records.ids import canonical_json
from astrolabe.records.jsonl import too_deep

FIELDS = (
    "schema", "id", "language", "domain", "question", "answer", "scenario", "expect", "answer_type", "nodes", "tools",
    "goldens", "distractors", "data", "mode", "state", "goal", "certificate", "provenance",
)  # fmt: skip
MAX_DEPTH = 64
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def read_environment(row: Any) -> tuple[Environment | None, list[Finding]]:
    """The row as a record, if it is one, and what is wrong with it."""
    if not isinstance(row, dict):
        return None, [Finding("schema_invalid", "the row is not a JSON object")]
    if too_deep(row, MAX_DEPTH):
        return None, [Finding("schema_invalid", f"the row nests deeper than {MAX_DEPTH} levels")]
    findings: list[Finding] = []
    missing = [name for name in FIELDS if name not in row]
    if missing:
        findings.append(
            Finding("schema_invalid", f"fields left out (null is written, never left out): {', '.join(missing)}")
        )
    environment: Environment | None = None
    try:
        environment = Environment.model_validate(row, strict=True)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False, include_context=False)[:8]:
            place = ".".join(map(str, problem["loc"]))
            findings.append(Finding("schema_invalid", f"{place}: {problem['msg']}"))
    try:
        expected = environment_id(row)
    except (TypeError, ValueError) as error:
        return None, [*findings, Finding("schema_invalid", f"the row has no canonical JSON: {error}")]
    if row.get("id") != expected:
        findings.append(Finding("id_mismatch", f"the content's id is {expected}"))
    if environment is None:
        return None, findings
    findings += [Finding("schema_invalid", text, node, tool) for text, node, tool in _malformed(environment, row)]
    names = Counter(tool.name for tool in (*environment.tools, *environment.distractors))
    for name, count in names.items():
        if count > 1:
            findings.append(Finding("duplicate_tool_name", f"{count} tools and distractors have this name", tool=name))
    licence = environment.provenance.get("license")
    if not isinstance(licence, str) or not licence.strip():
        findings.append(Finding("license_missing", "provenance.license names no licence"))
    usable = not any(f.reason == "schema_invalid" for f in findings)
    return (environment if usable else None), findings


def _malformed(env: Environment, row: dict[str, Any]) -> list[tuple[str, str | None, str | None]]:
    """(text, node, tool) of what the types alone do not say."""
    out: list[tuple[str, str | None, str | None]] = []
    for node_id, count in Counter(node.id for node in env.nodes).items():
        if count > 1:
            out.append((f"{count} nodes have this id", node_id, None))
    for node, raw in zip(env.nodes, row["nodes"], strict=True):
        if "path" in raw and raw["path"] is None:
            out.append(("path is null: a node without a path leaves it out", node.id, None))
        if node.path is not None and not _is_path(node.path):
            out.append((f"path {node.path!r} is no RFC 9535 JSONPath", node.id, None))
    for tool in (*env.tools, *env.distractors):
        out += [(text, None, tool.name) for text in _malformed_tool(tool)]
    if env.mode == "stateful" and env.state is None:
        out.append(("stateful mode needs a state", None, None))
    if env.mode == "stateless" and (env.state is not None or env.goal is not None):
        out.append(("stateless mode has neither state nor goal", None, None))
    if env.goal is not None:
        if env.goal.state is None and not env.goal.must and not env.goal.must_not:
            out.append(("the goal asks for nothing", None, None))
        for check in [*(env.goal.must or ()), *(env.goal.must_not or ())]:
            if not _is_path(check.path):
                out.append((f"goal path {check.path!r} is no RFC 9535 JSONPath", None, None))
    if not env.question.strip():
        out.append(("the question is empty", None, None))
    return out


def _malformed_tool(tool: EnvTool) -> list[str]:
    if not _NAME.fullmatch(tool.name):
        return [f"the name {tool.name!r} is not [A-Za-z0-9_.-]{{1,64}}"]
    if tool.parameters.get("type") != "object" or not isinstance(tool.parameters.get("properties", {}), dict):
        return ["parameters are no schema of an object"]
    fault = _schema_fault(canonical_json(tool.parameters))
    if fault:
        return [f"parameters are no JSON Schema: {fault}"]
    unknown = set(tool.parameters.get("required", [])) - set(tool.parameters.get("properties", {}))
    return [f"required arguments that are no properties: {', '.join(sorted(unknown))}"] if unknown else []


@lru_cache(maxsize=4096)
def _schema_fault(schema_text: str) -> str:
    """What is wrong with a JSON Schema, given as its canonical text; empty if nothing is. Patterns must compile and
    references point to a definition inside the schema: nothing is ever fetched."""
    schema = json.loads(schema_text)
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        return error.message
    for part in _subschemas(schema):
        reference = part.get("$ref", part.get("$dynamicRef"))
        if reference is not None and not _points_inside(schema, reference):
            return f"{reference!r} is no definition of this schema"
        for pattern in [part.get("pattern"), *part.get("patternProperties", {})]:
            try:
                re.compile(pattern or "")
            except (re.error, TypeError, RecursionError) as error:
                return f"the pattern {pattern!r} does not compile: {error}"
    return ""


def _subschemas(value: Any) -> Iterator[dict[str, Any]]:
    """Every object inside a schema that may be a schema (enum and const values aside)."""
    if isinstance(value, dict):
        yield value
        for key, member in value.items():
            if key not in ("enum", "const", "default", "examples"):
                yield from _subschemas(member)
    elif isinstance(value, list):
        for member in value:
            yield from _subschemas(member)


def _points_inside(schema: Any, reference: Any) -> bool:
    """Whether a reference is a JSON pointer to something in the schema."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return reference == "#"
    for step in reference[2:].split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(schema, dict) or step not in schema:
            return False
        schema = schema[step]
    return True


def _is_path(path: str) -> bool:
    try:
        values_at(path, None)
    except jsonpath.JSONPathError:
        return False
    return True
