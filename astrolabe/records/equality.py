"""Typed equality and "informative" values, as FORMATS defines them.

Every comparison of a tool's value with a golden goes through `equal`; every leak test asks `informative` first.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

_CJK = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]")


def has_chinese(text: str) -> bool:
    """Whether `text` holds a CJK ideograph."""
    return bool(_CJK.search(text))


def equal(a: Any, b: Any) -> bool:
    """Typed equality of JSON values: numbers by value to 1e-9 relative (a boolean is no number), strings exactly after
    NFC, objects and lists member by member in order (the order of an object's keys is not its members' order)."""
    if isinstance(a, bool) or isinstance(b, bool):
        return isinstance(a, bool) and isinstance(b, bool) and a == b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        if a == b:
            return True
        try:
            return math.isclose(a, b, rel_tol=1e-9, abs_tol=0.0)
        except OverflowError:  # an int too large for a float equals only itself
            return False
    if isinstance(a, str) and isinstance(b, str):
        return unicodedata.normalize("NFC", a) == unicodedata.normalize("NFC", b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a is None and b is None


def leaves(value: Any) -> Iterator[Any]:
    """The scalars inside a JSON value, depth first."""
    if isinstance(value, dict):
        for member in value.values():
            yield from leaves(member)
    elif isinstance(value, list):
        for member in value:
            yield from leaves(member)
    else:
        yield value


def significant_digits(number: int | float) -> int:
    """Significant digits of a number as written in decimal: 105 -> 3, 100 -> 3 (an integer's digits all count), 0.50 -> 1."""
    text = repr(abs(number)).lower().split("e")[0]
    if isinstance(number, float) and text.endswith(".0"):
        text = text[:-2]
    return len(text.replace(".", "").lstrip("0"))


def informative(value: Any) -> bool:
    """A string of at least 4 characters (2 if Chinese), a number of at least 3 significant digits, or an object or list
    that holds one. Booleans and null are not."""
    if isinstance(value, bool) or value is None:
        return False
    if isinstance(value, str):
        return len(value) >= (2 if has_chinese(value) else 4)
    if isinstance(value, (int, float)):
        return significant_digits(value) >= 3
    return any(informative(leaf) for leaf in leaves(value))
