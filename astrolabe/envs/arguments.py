"""From the text that a model wrote to arguments that fit the tool's schema, or the policy's error.

Strict JSON (no NaN, no doubled key, an object and nothing else), then JSON Schema as Draft 2020-12 unless the schema
names another: a boolean is no integer, and at the top level an argument that the schema does not know is an error.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import jsonschema
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry

from astrolabe.records.ids import canonical_json
from astrolabe.records.jsonl import MAX_DEPTH, too_deep


class MalformedArguments(ValueError):
    """The text is not one JSON object."""


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _no_double_key(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return members


def parse_arguments(text: str) -> dict[str, Any]:
    """The object that `text` holds. Raises MalformedArguments with what is wrong; never guesses, never returns {} for
    text that is not an object."""
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_double_key)
        # Neither a lone surrogate nor 1e999, which is read as infinity, could be stored.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        if too_deep(value, MAX_DEPTH):
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    except (ValueError, RecursionError) as error:
        raise MalformedArguments(f"the arguments are not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise MalformedArguments("the arguments must be a JSON object")
    return value


@lru_cache(maxsize=4096)
def _validator(schema_text: str) -> Validator:
    schema = json.loads(schema_text)
    cls = validator_for(schema, default=jsonschema.Draft202012Validator)
    # An empty registry: a $ref to an address is an error, never a download.
    return cls(schema, registry=Registry())


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
