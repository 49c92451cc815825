"""The hierarchical reward on text: the Tool-Star protocol read by a grammar, not by counting tags.

A machine walks the top level, `(<think> | call <result>)* <answer>`. Inside a thought or a result everything is text up
to the first closing tag, so a page that happens to contain `<answer>` breaks nothing and earns nothing. Where spans say
which characters the tool wrote, only those can be a result: a result that the policy wrote itself is none.

-1 for a broken format, 0 for a wrong answer, else the accuracy (1, or the token F1 of a span), plus 0.1 where both a
search and a Python call came back with something.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from astrolabe.envs.rewards.answers import boxed, verify_candidate

FORMATS = (
    "no_think", "unpaired_think", "no_answer", "many_answers", "answer_not_last", "bad_order",
    "call_without_result", "result_without_call", "nested_tag", "no_box",
)  # fmt: skip
"""What can be wrong, in the order in which one is named where several are."""
CALLS = ("search", "python", "browse")
MULTI_TOOL_BONUS = 0.1
_TAG = re.compile(r"<(/?)(think|search|python|browse|result|answer)>")
_END_OF_TURN = re.compile(r"(?:\s|<\|im_end\|>|<\|endoftext\|>|<\|eot_id\|>|</s>)+\Z")

Span = tuple[int, int]


@dataclass
class Parsed:
    """What the walk found: calls with their results, the answer's text, and all that is wrong."""

    calls: list[tuple[str, str, str]] = field(default_factory=list)
    """(tool, request, result)."""
    answer: str | None = None
    faults: set[str] = field(default_factory=set)

    @property
    def format(self) -> str:
        """`ok`, or the first fault in FORMATS' order."""
        return next((fault for fault in FORMATS if fault in self.faults), "ok")


@dataclass(frozen=True)
class LadderReward:
    """`reward` is None only where the verifier failed for no fault of the answer: to be left out."""

    reward: float | None
    accuracy: float | None
    format: str
    reason: Literal["format", "wrong", "correct", "correct_multi_tool", "verifier_failed"]

    def to_json(self) -> dict[str, Any]:
        return {"reward": self.reward, "accuracy": self.accuracy, "format": self.format, "reason": self.reason}


class _Walk:
    """The machine. `spans`: character ranges that the tool wrote; None: the result right after a call is the tool's."""

    def __init__(self, text: str, spans: Sequence[Span] | None) -> None:
        self.text = _END_OF_TURN.sub("", text)
        self.spans = spans
        self.at = 0
        self.out = Parsed()
        self.thoughts = 0
        self.think_tags = False

    def run(self) -> Parsed:
        while self.at < len(self.text):
            tag = _TAG.search(self.text, self.at)
            between = self.text[self.at : tag.start() if tag else len(self.text)]
            if between.strip():
                self._fault("answer_not_last" if self.out.answer is not None else "bad_order")
            if tag is None:
                break
            self.at = tag.end()
            closing, name = bool(tag[1]), tag[2]
            if self.out.answer is not None and not (name == "answer" or closing):
                self._fault("answer_not_last")
            if closing:
                self._stray(name)
            elif name == "think":
                self._think()
            elif name == "answer":
                self._answer()
            elif name == "result":
                self._fault("result_without_call")
                self._close("result")
            else:
                self._call(name)
        if not self.thoughts and not self.think_tags:
            self._fault("no_think")
        if self.out.answer is None:
            self._fault("no_answer")
        return self.out

    def _fault(self, name: str) -> None:
        self.out.faults.add(name)

    def _close(self, name: str) -> str | None:
        """The text up to the first closing tag, which is consumed; None (and nothing consumed) if it never closes."""
        end = self.text.find(f"</{name}>", self.at)
        if end < 0:
            return None
        inside = self.text[self.at : end]
        self.at = end + len(name) + 3
        return inside

    def _stray(self, name: str) -> None:
        if name == "think":
            self.think_tags = True
            self._fault("unpaired_think")
        elif name == "answer" and self.out.answer is None:
            self._fault("no_answer")
        elif name == "result":
            self._fault("result_without_call")
        else:
            self._fault("bad_order")

    def _think(self) -> None:
        self.think_tags = True
        if self._close("think") is None:
            self._fault("unpaired_think")
            self.at = len(self.text)
        else:
            self.thoughts += 1

    def _answer(self) -> None:
        if self.out.answer is not None:
            self._fault("many_answers")
        inside = self._close("answer")
        if inside is None:
            self._fault("no_answer" if self.out.answer is None else "many_answers")
            return
        if _TAG.search(inside):
            self._fault("many_answers" if "<answer>" in inside else "nested_tag")
        if not boxed(inside):
            self._fault("no_box")
        self.out.answer = inside

    def _call(self, name: str) -> None:
        request = self._close(name)
        if request is None:  # it never closes: go on at the next tag
            self._fault("call_without_result")
            following = _TAG.search(self.text, self.at)
            self.at = following.start() if following else len(self.text)
            return
        if _TAG.search(request):
            self._fault("nested_tag")
        opened = re.compile(r"\s*<result>").match(self.text, self.at)
        if opened is None:
            self._fault("call_without_result")
            return
        self.at = opened.end()
        result = self._result(opened.end() - len("<result>"))
        if result is None:
            self._fault("call_without_result")
            self.at = len(self.text)
        else:
            self.out.calls.append((name, request, result))

    def _result(self, tag_at: int) -> str | None:
        """The tool's text after `<result>`. With spans, the closing tag is the first one that the tool did not write
        inside its own text."""
        if self.spans is None:
            return self._close("result")
        start = self.at
        span = next(((s, e) for s, e in self.spans if s <= start + 1 and e >= start and e > tag_at), None)
        if span is None:  # the policy wrote this result itself
            self._fault("result_without_call")
            return self._close("result")
        inner_end = span[1]
        if self.text[:inner_end].rstrip().endswith("</result>") and self.text.rfind("</result>", start, inner_end) >= 0:
            self.at = self.text.rfind("</result>", start, inner_end)
        else:
            self.at = inner_end
        rest = self._close("result")
        if rest is None:
            return None
        return self.text[start : self.at - len("</result>")]


def parse(text: str, spans: Sequence[Span] | None = None) -> Parsed:
    """Walk a response. `spans`: (start, end) character ranges that the tool wrote, if that is known."""
    return _Walk(text, spans).run()


_FAILED = re.compile(
    r"\s*(?:\[?error\b|traceback \(most recent|exception\b|timed? ?out\b|timeout\b|(?:\w+\.)*\w+(?:error|exception):|no results?\b"
    r"|错误|超时|没有结果|执行失败|未找到)",
    re.IGNORECASE,
)


def succeeded(result: str) -> bool:
    """Whether a result's text is that of a call that worked: not empty, and no error."""
    text = result.strip()
    if not text or text in ("null", "None", "[]", "{}") or _FAILED.match(text) or "Traceback (most recent call" in text:
        return False
    try:
        value = json.loads(text)
    except ValueError:
        return True
    return not (isinstance(value, dict) and value.get("error"))


def score_ladder(
    response: str, gold: Sequence[str], answer_type: str, spans: Sequence[Span] | None = None
) -> LadderReward:
    """The ladder's reward of one response. `gold`: the answer and its aliases."""
    parsed = parse(response, spans)
    if parsed.format != "ok":
        return LadderReward(-1.0, 0.0, parsed.format, "format")
    verdict = verify_candidate((boxed(parsed.answer or "") or "").strip(), gold, answer_type)
    if verdict.score is None:
        return LadderReward(None, None, "ok", "verifier_failed")
    if verdict.reason == "verifier_timeout":
        return LadderReward(0.0, 0.0, "ok", "verifier_failed")
    accuracy = verdict.score if answer_type == "span" or verdict.correct else 0.0
    if accuracy <= 0:
        return LadderReward(0.0, 0.0, "ok", "wrong")
    worked = {name for name, _, result in parsed.calls if succeeded(result)}
    if {"search", "python"} <= worked:
        return LadderReward(accuracy + MULTI_TOOL_BONUS, accuracy, "ok", "correct_multi_tool")
    return LadderReward(accuracy, accuracy, "ok", "correct")
