"""JSONL in: split on `\n` only (a U+2028 inside a string is text), every bad line named by file and number.

`parse_json` takes no more than can be written again, so that one bad line is refused where it is read and cannot end a
run where its row is stored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from astrolabe.records.base import Record
from astrolabe.records.errors import UsageError

AnyRecord = TypeVar("AnyRecord", bound=Record)
MAX_DEPTH = 100
"""Levels that a value from outside may have: a card, a call's arguments, what a tool returns."""
ROW_DEPTH = MAX_DEPTH + 10
"""Levels that a row may have: a record holds such values a few levels down."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str, levels: int = MAX_DEPTH, *, unique_keys: bool = False) -> Any:
    """The value of a JSON text. ValueError for what cannot be written as JSON in UTF-8 and read by anybody: NaN and
    Infinity, a number beyond a double, half a surrogate pair, nesting deeper than `levels`; with `unique_keys` also a
    key that stands twice in one object."""
    pairs = _no_double_key if unique_keys else None
    try:
        value = json.loads(
            text, parse_constant=_no_constant, parse_float=_float, parse_int=_int, object_pairs_hook=pairs
        )
    except RecursionError:
        raise ValueError(f"nested deeper than {levels} levels") from None
    if text.count("[") + text.count("{") > levels and too_deep(value, levels):
        raise ValueError(f"nested deeper than {levels} levels")
    try:
        text.encode()
        if _SURROGATE.search(text):  # in pairs they are one character
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair, which is no character") from None
    return value


def too_deep(value: Any, limit: int) -> bool:
    """Whether a JSON value has more than `limit` levels; looks without recursion."""
    layer = [value]
    for _ in range(limit):
        layer = [m for v in layer if isinstance(v, (dict, list)) for m in (v.values() if isinstance(v, dict) else v)]
        if not layer:
            return False
    return True


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _no_double_key(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return members


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits[:20]}: beyond the range of a double")
    return value


def _int(digits: str) -> int:
    if len(digits) > 308:
        _float(digits)
    return int(digits)


def read_object(path: Path, mend: str) -> dict[str, Any]:
    """The JSON object that a file holds. UsageError with the mend if it holds anything else."""
    try:
        row = json.loads(path.read_bytes())
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise UsageError(f"{path}: not a JSON object", mend)
    return row


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, text) of each non-blank line. UsageError if the file is missing, a folder, or not UTF-8."""
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, 1):
                text = line.rstrip("\n").removesuffix("\r")
                if text.strip():
                    yield number, text
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file", "give the path of an existing JSONL file") from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder", "give the path of a JSONL file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}", "save the file as UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "check the path and its permissions") from None


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number, parsed JSON) of each line. UsageError names the file and the line that is not JSON."""
    for number, text in read_lines(path):
        try:
            yield number, parse_json(text, ROW_DEPTH)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: not JSON: {error}", "one JSON object per line") from None


def read_records(path: Path, kind: type[AnyRecord], mend: str) -> Iterator[tuple[int, AnyRecord]]:
    """(line number, record) of each line. UsageError names the file, the line and the first field that is wrong."""
    for number, row in read_rows(path):
        yield number, as_record(kind, row, f"{path}, line {number}", mend)


def as_record(kind: type[AnyRecord], row: Any, where: str, mend: str) -> AnyRecord:
    """The row as a record. UsageError with `where` it stands and the first field that is wrong."""
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        fault = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
        raise UsageError(f"{where}: no {kind.__name__.lower()}: {fault}", mend) from None
