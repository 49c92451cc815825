"""From the text that a model wrote to arguments that fit the tool's schema, or the policy's error.

Strict JSON (no NaN, no doubled key, an object and nothing else), then JSON Schema as Draft 2020-12 unless the schema
names another: a boolean is no integer, and at the top level an argument that the schema does not know is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jsonschema
import regex
from jsonschema import ValidationError, validators
from jsonschema.protocols import Validator
from referencing import Registry

from astrolabe.records.ids import canonical_json
from astrolabe.records.jsonl import parse_json

PATTERN_S = 0.1
"""Seconds that a schema's pattern may take on one text."""


class MalformedArguments(ValueError):
    """The text is not one JSON object."""


def parse_arguments(text: str) -> dict[str, Any]:
    """The object that `text` holds. Raises MalformedArguments with what is wrong; never guesses, never returns {} for
    text that is not an object."""
    try:
        value = parse_json(text, unique_keys=True)
    except ValueError as error:
        raise MalformedArguments(f"the arguments are not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise MalformedArguments("the arguments must be a JSON object")
    return value


def validator(schema: dict[str, Any]) -> Validator:
    """A validator for a schema from outside: it fetches nothing (a $ref to an address is an error), and a pattern that
    takes longer than `PATTERN_S` on a text counts as not matching it."""
    bounded = validators.extend(
        validators.validator_for(schema, default=jsonschema.Draft202012Validator),
        {"pattern": _pattern, "patternProperties": _pattern_properties, "additionalProperties": _additional},
    )
    return bounded(schema, registry=Registry())


@lru_cache(maxsize=4096)
def _validator(schema_text: str) -> Validator:
    return validator(json.loads(schema_text))


def _matches(pattern: str, text: str) -> bool:
    """Python's `re` cannot be stopped; `regex` can, and reads the same patterns."""
    try:
        return regex.search(pattern, text, timeout=PATTERN_S) is not None
    except TimeoutError:
        return False


def _pattern(v: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if v.is_type(instance, "string") and not _matches(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(v: Any, patterns: dict[str, Any], instance: Any, schema: Any) -> Iterator[ValidationError]:
    for pattern, part in patterns.items() if v.is_type(instance, "object") else ():
        for key, value in instance.items():
            if _matches(pattern, key):
                yield from v.descend(value, part, path=key, schema_path=pattern)


def _additional(v: Any, part: Any, instance: Any, schema: dict[str, Any]) -> Iterator[ValidationError]:
    if not v.is_type(instance, "object"):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    extra = [key for key in instance if key not in known and not any(_matches(p, key) for p in patterns)]
    for key in extra:
        if part is False:
            yield ValidationError(f"unknown argument: {key}")
        else:
            yield from v.descend(instance[key], part, path=key)


def argument_faults(parameters: dict[str, Any], arguments: dict[str, Any]) -> list[str]:
    """What is wrong with parsed arguments, in a fixed order; empty if they fit.

    An `additionalProperties` that the schema states itself is kept; without one, unknown arguments are faults.
    Raises referencing's Unresolvable for a schema that refers outside itself.
    """
    schema = dict(parameters)
    known = schema.setdefault("properties", {})
    faults: list[str] = []
    if "additionalProperties" not in schema and "patternProperties" not in schema:
        faults = [f"unknown argument: {name}" for name in arguments if name not in known]
    errors = _validator(canonical_json(schema)).iter_errors(arguments)
    ordered = sorted(errors, key=lambda error: (error.json_path, str(error.validator), error.message))
    return faults + [f"{error.json_path.removeprefix('$.')}: {error.message[:300]}" for error in ordered]


def whole_numbers(parameters: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments with 3.0 as 3 where the schema says `integer`: equal as JSON, but not to Python's `range`."""
    properties = parameters.get("properties", {})
    return {
        name: int(value)
        if isinstance(value, float)
        and isinstance(properties.get(name), dict)
        and properties[name].get("type") == "integer"
        else value
        for name, value in arguments.items()
    }
