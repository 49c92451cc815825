"""Answers made of parts: sets, tuples, lists, intervals, inequalities. Each part is compared as a number where both are
numbers, as an expression where either is mathematics, else as text."""

from __future__ import annotations

import json
import re
from typing import Any

from astrolabe.envs.rewards.expressions import Comparison, expression_judge, to_latex
from astrolabe.envs.rewards.numbers import parse_quantity, plain, same_quantity
from astrolabe.envs.rewards.texts import normal_tokens

_OPEN, _CLOSE = "([{（【「", ")]}）】」"
_MATHS = re.compile(r"[\\^_=+*/<>≤≥√π]|\d[a-z]\b|^[a-zA-Z]$|[a-z]\(|-\s*[a-z]\b")


class VerifierStopped(Exception):
    """A part's check ran out of time; `how` is `timeout` (reproducibly) or `failed`."""

    def __init__(self, how: Comparison) -> None:
        super().__init__(how)
        self.how = how


def same_expression(predicted: str, gold: str) -> bool:
    """Equality of two expressions; raises VerifierStopped if math-verify ran out of time."""
    if re.sub(r"\s+", "", predicted) == re.sub(r"\s+", "", gold):
        return True
    a, b = parse_quantity(predicted), parse_quantity(gold)
    if a is not None and b is not None:
        return same_quantity(a, b)
    result = expression_judge().compare(to_latex(predicted), to_latex(gold))
    if result in ("timeout", "failed"):
        raise VerifierStopped(result)
    return result == "equal"


def same_part(predicted: str, gold: str) -> bool:
    """Equality of one member of a set, tuple or list."""
    a, b = parse_quantity(predicted), parse_quantity(gold)
    if a is not None and b is not None:
        return same_quantity(a, b)
    if normal_tokens(predicted) == normal_tokens(gold) and normal_tokens(gold):
        return True
    if _MATHS.search(predicted) or _MATHS.search(gold):
        return same_expression(predicted, gold)
    return False


def split_parts(text: str, words: bool) -> list[str]:
    """The members of a written collection, brackets of any kind around it removed; JSON lists are read as such. With
    `words`, `and` and 和 separate members too."""
    body = text.strip().strip("$").strip()
    try:
        parsed = json.loads(body)
    except ValueError:
        parsed = None
    if isinstance(parsed, list):
        return [_text_of(member) for member in parsed]
    body = re.sub(r"\\(?:left|right)\b|\\(?=[{}])", "", body).replace("\\,", "").strip().rstrip(".。")
    if body[:1] in _OPEN and _closes_at_end(body):
        body = body[1:-1]
    separators = ",;，；、" + ("\n" if words else "")
    parts, depth, start = [], 0, 0
    for i, char in enumerate(body):
        if char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        elif depth == 0 and char in separators:
            parts.append(body[start:i])
            start = i + 1
    parts.append(body[start:])
    if words:
        parts = [p for part in parts for p in re.split(r"\s+and\s+|^\s*and\s+|\s+&\s+|和|以及|与", part)]
    return [p.strip().strip("\"'“”").strip() for p in parts if p.strip()]


def _text_of(member: Any) -> str:
    return member if isinstance(member, str) else json.dumps(member, ensure_ascii=False)


def _closes_at_end(body: str) -> bool:
    depth = 0
    for i, char in enumerate(body):
        depth += (char in _OPEN) - (char in _CLOSE)
        if depth == 0:
            return i == len(body) - 1
    return False


def same_set(predicted: str, gold: str) -> bool:
    """The same members, in any order, repeats counted once."""
    return _covers(split_parts(predicted, True), split_parts(gold, True))


def _covers(mine: list[str], theirs: list[str]) -> bool:
    return (
        bool(mine) and all(any(same_part(p, g) for g in theirs) for p in mine)
        and all(any(same_part(p, g) for p in mine) for g in theirs)
    )  # fmt: skip


def same_sequence(predicted: str, gold: str, words: bool) -> bool:
    """The same members in the same order."""
    mine, theirs = split_parts(predicted, words), split_parts(gold, words)
    return len(mine) == len(theirs) > 0 and all(map(same_part, mine, theirs))


# An interval is (low, low closed, high, high closed); an unbounded end is None.
Interval = tuple[str | None, bool, str | None, bool]
_INTERVAL = re.compile(r"([\[(])([^\[\]]*?),([^\[\]]*?)([\])])")
_RELATION = re.compile(r"<=|>=|[<>≤≥]")


def _relations(text: str) -> str:
    text = plain(text)
    for name, sign in ((r"\\l(?:eq?|eqslant)?(?:slant)?(?![a-z])", "<="), (r"\\g(?:eq?|eqslant)?(?:slant)?(?![a-z])", ">=")):  # fmt: skip
        text = re.sub(name, sign, text)
    text = text.replace("\\lt", "<").replace("\\gt", ">").replace("≤", "<=").replace("≥", ">=")
    return text.replace("⩽", "<=").replace("⩾", ">=")


def _end(text: str) -> str | None:
    bare = re.sub(r"\s|\{|\}", "", text)
    return None if re.fullmatch(r"[-+]?(?:\\infty|∞|inf|infinity|oo)", bare) else text.strip()


def read_intervals(text: str) -> list[Interval] | None:
    """A union of intervals, `[0, 5) \\cup (7, \\infty)`; None if the text is not one."""
    body = re.sub(r"\\(?:left|right)\b|\$", "", text).strip().rstrip(".。")
    body = re.sub(r"^[A-Za-z]\s*(?:\\in|∈)\s*", "", body)
    out: list[Interval] = []
    for part in re.split(r"\\cup|∪|\bor\b|\bU\b|或", body):
        match = _INTERVAL.fullmatch(part.strip())
        if match is None:
            return None
        low, high = _end(match[2]), _end(match[3])
        out.append((low, match[1] == "[" and low is not None, high, match[4] == "]" and high is not None))
    return out


def read_inequalities(text: str) -> tuple[str, list[Interval]] | None:
    """(variable, intervals) of inequalities that bound one variable, `2 < x <= 5` or `x < 1 or x > 3`; None if the
    text is anything else, such as one with a variable on both sides."""
    variable = ""
    out: list[Interval] = []
    for part in re.split(r"\bor\b|\\lor|或|\\cup|∪", _relations(text).strip().rstrip(".。")):
        pieces, signs = [p.strip() for p in _RELATION.split(part)], _RELATION.findall(part)
        at = [i for i, piece in enumerate(pieces) if re.fullmatch(r"[A-Za-z]|\\[a-z]+", piece)]
        if not signs or len(signs) > 2 or len(at) != 1 or (variable and pieces[at[0]] != variable):
            return None
        variable, low, high = pieces[at[0]], None, None
        low_closed = high_closed = False
        for i, sign in enumerate(signs):
            left, right = pieces[i], pieces[i + 1]
            below = sign.startswith("<")
            if right == variable:
                bound, is_low = left, below
            elif left == variable:
                bound, is_low = right, not below
            else:
                return None
            if is_low:
                low, low_closed = _end(bound), sign.endswith("=")
            else:
                high, high_closed = _end(bound), sign.endswith("=")
        out.append((low, low_closed, high, high_closed))
    return variable, out


def _same_interval(a: Interval, b: Interval) -> bool:
    def same_end(p: str | None, q: str | None) -> bool:
        return p is None and q is None if p is None or q is None else same_part(p, q)

    return a[1] == b[1] and a[3] == b[3] and same_end(a[0], b[0]) and same_end(a[2], b[2])


def _same_intervals(mine: list[Interval], theirs: list[Interval]) -> bool:
    return len(mine) == len(theirs) and all(any(_same_interval(a, b) for b in theirs) for a in mine)


def same_range(predicted: str, gold: str) -> bool:
    """Intervals and one-variable inequalities, in either form; anything else is left to math-verify."""
    sides = []
    for text in (predicted, gold):
        intervals = read_intervals(text)
        sides.append(("", intervals) if intervals is not None else read_inequalities(text))
    mine, theirs = sides
    if mine is None or theirs is None:
        return same_expression(_relations(predicted), _relations(gold))
    if mine[0] and theirs[0] and mine[0] != theirs[0]:
        return False
    return _same_intervals(mine[1], theirs[1])
