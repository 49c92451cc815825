"""From sampled ids to a turn: reasoning, content, and calls with the argument text exactly as it was written.

Markers are matched as ids, never as lookalike text. A call inside reasoning, closed or not, is no call. A call that is
not one JSON object with a name and an object of arguments is kept with the reason: it is answered with an error, and
never run with arguments that the model did not write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, Literal

from serving.tokenizer import TextTokenizer, encodable

MalformedReason = Literal[
    "cut_off", "unclosed", "invalid_json", "not_object", "missing_name", "missing_arguments", "arguments_not_object"
]
_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True)
class ParsedCall:
    name: str
    """Empty where none could be read."""
    arguments_text: str
    """The arguments cut from the sampled text byte for byte; of a call that cannot be read, its whole text."""
    arguments: dict[str, Any] | None
    malformed_reason: MalformedReason | None = None
    raw: str = ""
    """The text of the whole call."""
    span: tuple[int, int] = (0, 0)
    """Place of the call in the output ids, markers included."""
    id: str | None = None


@dataclass(frozen=True)
class ParsedTurn:
    reasoning: str | None
    content: str
    calls: list[ParsedCall] = field(default_factory=list)
    complete: bool = True
    """Whether the policy ended the turn itself; False where it was cut."""


@dataclass(frozen=True)
class TagIds:
    """The ids of a tagged family's markers; None for one that the vocabulary lacks."""

    think: int | None
    think_end: int | None
    call: int
    call_end: int


def parse_tagged(
    tokenizer: TextTokenizer, output_ids: Sequence[int], stop_ids: frozenset[int], tags: TagIds, *, in_reasoning: bool
) -> ParsedTurn:
    """A turn of the Qwen3 family: `<think>…</think>`, text, `<tool_call>{"name", "arguments"}</tool_call>`.

    `in_reasoning`: the prompt has opened `<think>`. A `</think>` that nothing opened ends reasoning too: all before it
    was reasoning.
    """
    ids, complete = _until_stop(output_ids, stop_ids)
    reasoning: list[int] = []
    content: list[int] = []
    calls: list[ParsedCall] = []
    thought = in_reasoning
    closed = False
    at = 0
    while at < len(ids):
        token = ids[at]
        at += 1
        if in_reasoning:
            if token == tags.think_end:
                in_reasoning, closed = False, True
            elif token != tags.think:
                reasoning.append(token)
        elif token == tags.think:
            in_reasoning = thought = True
        elif token == tags.think_end and not closed:
            reasoning, content, calls = list(ids[: at - 1]), [], []
            closed = thought = True
        elif token == tags.call:
            end = next((i for i in range(at, len(ids)) if ids[i] == tags.call_end), None)
            stop = len(ids) if end is None else end
            raw = tokenizer.decode(ids[at:stop]).strip()
            unclosed: MalformedReason | None = None if end is not None else "unclosed" if complete else "cut_off"
            span = (at - 1, stop if end is None else stop + 1)
            calls.append(_call(raw, ("arguments",), span, unclosed))
            at = span[1]
        else:
            content.append(token)
    text = tokenizer.decode(reasoning).strip()
    return ParsedTurn(text if thought and text else None, tokenizer.decode(content).strip(), calls, complete)


def parse_llama3(
    tokenizer: TextTokenizer, output_ids: Sequence[int], stop_ids: frozenset[int], python_tag: int | None
) -> ParsedTurn:
    """A turn of the Llama 3 family: the whole body is one `{"name", "parameters"}` object, or it is text."""
    ids, complete = _until_stop(output_ids, stop_ids)
    body = ids[1:] if ids and ids[0] == python_tag else ids
    raw = tokenizer.decode(body).strip()
    if re.match(r'\{\s*"(name|type|parameters|arguments)"\s*:', raw):
        call = _call(raw, ("parameters", "arguments"), (0, len(ids)), None)
        if call.malformed_reason == "invalid_json" and not complete:
            call = _call(raw, ("parameters", "arguments"), (0, len(ids)), "cut_off")
        return ParsedTurn(None, "", [call], complete)
    return ParsedTurn(None, raw, [], complete)


def _until_stop(output_ids: Sequence[int], stop_ids: frozenset[int]) -> tuple[list[int], bool]:
    for index, token in enumerate(output_ids):
        if token in stop_ids:
            return list(output_ids[:index]), True
    return list(output_ids), False


def _call(raw: str, keys: tuple[str, ...], span: tuple[int, int], broken: MalformedReason | None) -> ParsedCall:
    """The call in `raw`, whose arguments stand under the first of `keys` that is there."""

    def malformed(reason: MalformedReason, name: str = "", text: str | None = None) -> ParsedCall:
        return ParsedCall(name, raw if text is None else text, None, reason, raw, span)

    if broken is not None:
        return malformed(broken)
    try:
        members = object_members(raw)
    except (ValueError, RecursionError):  # a model can nest deeper than the JSON reader goes
        return malformed("invalid_json")
    if members is None:
        return malformed("not_object")
    name = members["name"][0] if "name" in members else None
    if not isinstance(name, str) or not name or not encodable(name):
        return malformed("missing_name")
    key = next((key for key in keys if key in members), None)
    if key is None:
        return malformed("missing_arguments", name, "")
    value, text = members[key]
    if not isinstance(value, dict):
        return malformed("arguments_not_object", name, text)
    return ParsedCall(name, text, value, None, raw, span)


def object_members(text: str) -> dict[str, tuple[Any, str]] | None:
    """Members of the JSON object that `text` is: name -> (value, its text as written). None if it is another value.

    ValueError where it is not JSON: also for NaN and infinities, for a name that comes twice, for anything after it. RecursionError where it is nested
    too deeply.
    """
    decoder = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_unique)
    start = _skip(text, 0)
    if text[start : start + 1] != "{":
        json.loads(text, parse_constant=_no_constant)
        return None
    members: dict[str, tuple[Any, str]] = {}
    at = _skip(text, start + 1)
    while text[at : at + 1] != "}":
        if members:
            at = _skip(text, _expect(text, at, ","))
        name, at = scanstring(text, _expect(text, at, '"'))
        at = _skip(text, _expect(text, _skip(text, at), ":"))
        if name in members:
            raise ValueError(f"{name!r} comes twice")
        value, end = decoder.raw_decode(text, at)
        members[name] = (value, text[at:end])
        at = _skip(text, end)
    if _skip(text, at + 1) != len(text):
        raise ValueError("text after the object")
    return members


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _expect(text: str, at: int, char: str) -> int:
    if text[at : at + 1] != char:
        raise ValueError(f"{char!r} expected at {at}")
    return at + 1


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name comes twice")
    return out
