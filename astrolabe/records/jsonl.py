"""JSONL in: split on `\n` only (a U+2028 inside a string is text), every bad line named by file and number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from astrolabe.records.base import Record
from astrolabe.records.errors import UsageError

AnyRecord = TypeVar("AnyRecord", bound=Record)


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
            yield number, json.loads(text)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: not JSON: {error}", "one JSON object per line") from None


def read_records(path: Path, kind: type[AnyRecord], mend: str) -> Iterator[tuple[int, AnyRecord]]:
    """(line number, record) of each line. UsageError names the file, the line and the first field that is wrong."""
    for number, row in read_rows(path):
        try:
            yield number, kind.model_validate(row)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise UsageError(
                f"{path}, line {number}: no {kind.__name__.lower()}: {where}: {first['msg']}", mend
            ) from None
