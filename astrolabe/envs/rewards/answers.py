"""The answer reward: is the policy's final text right, by the answer's type?

`extract_answer` finds what is put forward: the last box, else what follows an answer marker, else the last sentence of
the last line. A verifier per type compares it with the gold or any of its aliases. Only expressions need a process of
their own (`expressions.py`); the rest are bounded parsers. Every verdict has a reason:

correct, wrong, no_answer, several_candidates, bad_gold (the gold itself is not of its type), verifier_timeout (ran out
of time twice: the answer's doing, 0), verifier_failed (the verifier's doing: no verdict, to be left out).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from astrolabe.envs.rewards import structures, texts
from astrolabe.envs.rewards.numbers import Quantity, find_quantities, parse_quantity, plain, same_quantity
from astrolabe.records.environment import AnswerType
from astrolabe.records.errors import UsageError

ANSWER_TYPES: tuple[str, ...] = get_args(AnswerType)


@dataclass(frozen=True)
class AnswerVerdict:
    """`correct` and `score` are None only where the verifier itself failed. `score` is 1 or 0, or, for a span, its token
    F1 in [0, 1]."""

    correct: bool | None
    score: float | None
    reason: str


_WRONG = AnswerVerdict(False, 0.0, "wrong")
_RIGHT = AnswerVerdict(True, 1.0, "correct")
_SEVERAL = AnswerVerdict(False, 0.0, "several_candidates")


def boxed(text: str) -> str | None:
    """The content of the last balanced `\\boxed{...}` (or `\\fbox{...}`); None if there is none."""
    found = None
    for match in re.finditer(r"\\f?box(?:ed)?\s*\{", text):
        depth = 1
        for i in range(match.end(), len(text)):
            if text[i] in "{}" and text[i - 1] != "\\":
                depth += 1 if text[i] == "{" else -1
                if depth == 0:
                    found = text[match.end() : i]
                    break
    return found


_MARKER = re.compile(
    r"(?:^|[\n.!?。！？]\s*|[*_]{2})(?:so,?\s+|therefore,?\s+|thus,?\s+|因此[，,]?|所以[，,]?)?"
    r"(?:(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*[:：]|(?:the\s+)?(?:final\s+)?answer\s+is\s|####|(?:最终|最后的?)?答案(?:是|为)?\s*[:：]?)",
    re.IGNORECASE,
)
# A full stop after a single letter is an initial or an option's mark, not the end of a sentence.
_SENTENCE_END = re.compile(r"(?<=[。！？!?])\s*|(?:(?<=\w\w\.)|(?<=[\d%)\]\"'}]\.))\s+(?=[^a-z\d])")


def extract_answer(text: str) -> str:
    """What a final text puts forward as its answer, stripped; empty if the text is."""
    inside = boxed(text)
    if inside is not None:
        return inside.strip()
    if re.search(r"\\boxed\s*\{", text):  # a box that never closes puts nothing forward
        return ""
    markers = list(_MARKER.finditer(text))
    if markers and (tail := text[markers[-1].end() :].strip()):
        return tail.split("\n")[0].strip().strip("*").strip()
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if not lines:
        return ""
    sentences = [s.strip() for s in _SENTENCE_END.split(lines[-1]) if s.strip()]
    return (sentences[-1] if sentences else lines[-1]).strip("*").strip()


def verify_answer(predicted_text: str, gold: str | Sequence[str], answer_type: str) -> AnswerVerdict:
    """Grade a final text against a gold, or the best of several aliases, in English or Chinese (seen from
    the texts themselves). UsageError for an unknown type."""
    return verify_candidate(extract_answer(predicted_text), gold, answer_type)


def verify_candidate(candidate: str, gold: str | Sequence[str], answer_type: str) -> AnswerVerdict:
    """`verify_answer` for what was already extracted."""
    if answer_type not in ANSWER_TYPES:
        raise UsageError(f"unknown answer type {answer_type!r}", "one of " + ", ".join(ANSWER_TYPES))
    aliases = [gold] if isinstance(gold, str) else list(gold)
    if answer_type == "none":
        return _RIGHT if candidate else AnswerVerdict(False, 0.0, "no_answer")
    if not candidate:
        return AnswerVerdict(False, 0.0, "no_answer")
    if not any(alias.strip() for alias in aliases):
        return AnswerVerdict(False, 0.0, "bad_gold")
    verdicts = [_verify_one(candidate, alias, answer_type) for alias in aliases]
    if all(v.score is None for v in verdicts):
        return verdicts[0]
    return max((v for v in verdicts if v.score is not None), key=lambda v: (v.correct, v.score))


def _verify_one(candidate: str, gold: str, answer_type: str) -> AnswerVerdict:
    try:
        return _VERIFIERS[answer_type](candidate, gold)
    except structures.VerifierStopped as stopped:
        if stopped.how == "timeout":
            return AnswerVerdict(False, 0.0, "verifier_timeout")
        return AnswerVerdict(None, None, "verifier_failed")


def _verdict(right: bool) -> AnswerVerdict:
    return _RIGHT if right else _WRONG


_CUE = re.compile(
    r"[=:≈]|\b(?:is|are|was|were|be|equals?|costs?|pays?|paid|holds?|totals?|has|have|reach(?:es)?|amounts? to|comes? to|by|changed)\b"
    r"|是|为|等于|得到?|共|合计|剩",
    re.IGNORECASE,
)
_BETWEEN_ALTERNATIVES = re.compile(r"\bor\b|或|还是|\s/\s", re.IGNORECASE)


def _number(candidate: str, gold: str) -> AnswerVerdict:
    target = parse_quantity(gold)
    if target is None:
        return _expression(candidate, gold)
    whole = parse_quantity(candidate)
    if whole is not None:
        return _verdict(same_quantity(whole, target))
    found = find_quantities(candidate)
    if len(found) > 1 and _hedges(plain(candidate), found):
        return _SEVERAL
    chosen = _number_of_sentence(plain(candidate), found)
    if chosen is not None and same_quantity(chosen, target):
        return _RIGHT
    if re.search(r"\\[a-zA-Z]|\^|√", candidate) and len(candidate) <= 200:
        return _expression(candidate, gold)
    return _WRONG


def _hedges(text: str, found: list[tuple[int, int, Quantity]]) -> bool:
    return any(
        len(text[a[1] : b[0]]) <= 24 and _BETWEEN_ALTERNATIVES.search(text[a[1] : b[0]])
        for a, b in itertools.pairwise(found)
    )


def _number_of_sentence(text: str, found: list[tuple[int, int, Quantity]]) -> Quantity | None:
    """The number a sentence states: the one it begins with, else the first after its last cue (is, costs, 是, ...)
    that has one, else the last."""
    if not found:
        return None
    if len(found) == 1 or not text[: found[0][0]].strip():
        return found[0][2]
    for cue in reversed(list(_CUE.finditer(text))):
        after = [quantity for start, _, quantity in found if start >= cue.end() - 1]
        if after:
            return after[0]
    return found[-1][2]


def _expression(candidate: str, gold: str) -> AnswerVerdict:
    tail = candidate.rsplit("=", 1)[-1] if "=" in candidate and "=" not in gold else candidate
    return _verdict(structures.same_expression(tail.strip().rstrip("."), gold))


def _readings(candidate: str) -> list[str]:
    return texts.span_readings(candidate)


def _collection(same: str, words: bool) -> Callable[[str, str], AnswerVerdict]:
    def check(candidate: str, gold: str) -> AnswerVerdict:
        for reading in _readings(candidate):
            right = (
                structures.same_set(reading, gold) if same == "set" else structures.same_sequence(reading, gold, words)
            )
            if right:
                return _RIGHT
        return _WRONG

    return check


def _range(candidate: str, gold: str) -> AnswerVerdict:
    return _verdict(structures.same_range(candidate, gold))


def _choice(candidate: str, gold: str) -> AnswerVerdict:
    target = texts.read_choice(gold)
    if target is None:  # the gold is an option's text
        return _span(candidate, gold)
    if texts.offers_several(candidate, gold):
        return _SEVERAL
    return _verdict(texts.read_choice(candidate) == target)


def _date(candidate: str, gold: str) -> AnswerVerdict:
    targets = texts.read_dates(gold)
    if not targets:
        return AnswerVerdict(False, 0.0, "bad_gold")
    found = texts.read_dates(candidate)
    if len(set(found)) > len(set(targets)):
        return _SEVERAL
    return _verdict(len(found) == len(targets) and all(map(texts.same_date, found, targets)))


def _boolean(candidate: str, gold: str) -> AnswerVerdict:
    target = texts.read_boolean(gold)
    if target is None:
        return AnswerVerdict(False, 0.0, "bad_gold")
    return _verdict(texts.read_boolean(candidate) == target)


def _span(candidate: str, gold: str) -> AnswerVerdict:
    """Right if what is put forward equals the gold; the score is the token F1 of the closest reading."""
    readings = _readings(candidate)
    if texts.offers_several(candidate, gold):
        return _SEVERAL
    target = texts.normal_tokens(gold)
    score = max(texts.token_f1(reading, gold) for reading in readings)
    exact = any(texts.normal_tokens(reading) == target for reading in readings)
    return AnswerVerdict(exact, score, "correct" if exact else "wrong")


_VERIFIERS: dict[str, Callable[[str, str], AnswerVerdict]] = {
    "number": _number,
    "expression": _expression,
    "set": _collection("set", True),
    "tuple": _collection("sequence", False),
    "list": _collection("sequence", True),
    "interval": _range,
    "inequality": _range,
    "choice": _choice,
    "date": _date,
    "boolean": _boolean,
    "span": _span,
}
