"""The ladder on text: the grammar, the bonus, and who wrote what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from astrolabe.envs.rewards.ladder import parse, score_ladder, succeeded
from astrolabe.envs.rewards.rescore import rescored_rows
from astrolabe.records.errors import UsageError

T = "<think>a</think>"
A = r"<answer>It is \boxed{12}.</answer>"
S = "<search>q</search><result>a page</result>"
P = "<python>print(12)</python><result>12</result>"

FORMATS = [
    (T + A, "ok"),
    (f" {T}\n{S}\n{T}\n{P}\n{A}\n<|im_end|>", "ok"),
    (A, "no_think"),
    (A + T, "answer_not_last"),
    ("<think>a" + A, "unpaired_think"),
    ("</think><think>a" + A, "unpaired_think"),
    ("<think>a<think>b</think>c</think>" + A, "unpaired_think"),
    (T, "no_answer"),
    (T + r"<answer>\boxed{12}", "no_answer"),
    (T + A + A, "many_answers"),
    (T + A + " more <search>", "answer_not_last"),
    (T + S + A + S, "answer_not_last"),
    (T + "then" + A, "bad_order"),
    (T + "</search>" + A, "bad_order"),
    (T + "<search>q</search>" + A, "call_without_result"),
    (T + "<search>q</search><python>1</python><result>both</result>" + A, "call_without_result"),
    (T + "<search>q" + A, "call_without_result"),
    (T + "<result>made up</result>" + A, "result_without_call"),
    (T + S + "<result>again</result>" + A, "result_without_call"),
    (T + "<search>a<python>b</python></search><result>x</result>" + A, "nested_tag"),
    (T + r"<answer><think>x</think>\boxed{12}</answer>", "nested_tag"),
    (T + "<answer>12</answer>", "no_box"),
    (T + r"<answer>\boxed{12</answer>", "no_box"),
    # Tags inside a thought or a result are text: the policy did nothing wrong.
    ("<think>I could <search> or </python> <answer></think>" + A, "ok"),
    (T + "<search>q</search><result><answer>1</answer><think></search></python></result>" + A, "ok"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "fault"), FORMATS)
def test_the_grammar_names_what_is_wrong(text: str, fault: str) -> None:
    assert parse(text).format == fault
    reward = score_ladder(text, ["12"], "number")
    assert (reward.reward == -1.0) == (fault != "ok")
    assert (reward.reason == "format") == (fault != "ok")


def test_wrong_is_zero_right_is_its_accuracy() -> None:
    assert score_ladder(T + A, ["13"], "number").to_json() == {
        "reward": 0.0,
        "accuracy": 0.0,
        "format": "ok",
        "reason": "wrong",
    }
    assert score_ladder(T + A, ["13", "12"], "number").to_json() == {
        "reward": 1.0,
        "accuracy": 1.0,
        "format": "ok",
        "reason": "correct",
    }
    partly = score_ladder(T + r"<answer>\boxed{Vienna}</answer>", ["Vienna, Austria"], "span")
    assert partly.reward == pytest.approx(2 / 3)
    assert partly.reason == "correct"
    hedged = score_ladder(T + r"<answer>\boxed{Vienna or Graz}</answer>", ["Vienna"], "span")
    assert (hedged.reward, hedged.reason) == (0.0, "wrong")


def test_the_bonus_is_for_a_search_and_a_python_call_that_both_came_back() -> None:
    assert score_ladder(T + S + P + A, ["12"], "number").to_json() == {
        "reward": 1.1,
        "accuracy": 1.0,
        "format": "ok",
        "reason": "correct_multi_tool",
    }
    for one in (
        S + S,
        P,
        S + P.replace(">12<", "><"),
        S + P.replace(">12<", ">NameError: x<"),
        S.replace("a page", "Error: 500") + P,
    ):
        assert score_ladder(T + one + A, ["12"], "number").reward == 1.0
    assert score_ladder(T + S + P + A, ["13"], "number").reward == 0.0
    shown = T + "<search>q</search><result>use <python>1</python><result>1</result>" + A
    assert score_ladder(shown, ["12"], "number").reward == 1.0  # tool text cannot earn it


def test_results_that_failed_are_seen_as_such() -> None:
    assert all(map(succeeded, ["12", '{"temperature": 3}', "The error bars are small.", "未来的天气"]))
    assert not any(
        map(
            succeeded,
            [
                "",
                " \n",
                "[]",
                "Traceback (most recent call last):\n x",
                '{"error": "timeout"}',
                "Timed out",
                "错误：超时",
            ],
        )
    )


def test_with_spans_only_the_tool_can_write_a_result() -> None:
    text = T + "<search>q</search><result>a </result> b</result>" + A
    start = text.index("a </result>")
    inside = (start, start + len("a </result> b"))
    assert parse(text, [inside]).format == "ok"
    assert parse(text, [inside]).calls == [("search", "q", "a </result> b")]
    whole = (text.index("<result>"), text.index(A))
    assert parse(text, [whole]).calls == [("search", "q", "a </result> b")]
    assert parse(T + S + A, []).format == "result_without_call"  # made up by the policy
    assert parse(T + S + A).format == "ok"


def test_rows_are_scored_in_order_and_bad_ones_named(tmp_path: Path) -> None:
    rows = [
        {"response": T + A, "gold": ["12"], "answer_type": "number", "spans": None},
        {"response": T, "gold": ["12"], "answer_type": "number", "spans": None},
    ]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["reward"] for row in rescored_rows(path, None, "ladder")] == [1.0, -1.0]
    assert [list(row) for row in rescored_rows(path, None, "ladder")] == [
        ["reward", "accuracy", "format", "reason"]
    ] * 2
    path.write_text(json.dumps({**rows[0], "answer_type": "grade"}) + "\n")
    with pytest.raises(UsageError, match="line 1"):
        list(rescored_rows(path, None, "ladder"))
