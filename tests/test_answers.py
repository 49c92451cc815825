"""Typed answers: what is put forward, and whether it is right."""

from __future__ import annotations

import time

import pytest

from astrolabe.envs.rewards.answers import boxed, extract_answer, verify_answer
from astrolabe.envs.rewards.expressions import ExpressionJudge
from astrolabe.envs.rewards.numbers import find_quantities, parse_quantity
from astrolabe.envs.rewards.texts import normal_tokens, read_dates, token_f1
from astrolabe.records.errors import UsageError

CASES = [
    # Tool-Star's measured misjudgements: wrong ones that it pays, right ones that it does not.
    ("number", "-5", "5", False), ("number", "1.2", "12", False), ("number", "1/2", "12", False), ("number", "(1,2)", "12", False),
    ("inequality", "x<2", "x>2", False), ("number", r"\frac{1}{2}", "1/2", True), ("number", "0.5", r"\frac{1}{2}", True),
    ("expression", r"4 \sqrt {2}", r"4\sqrt{2}", True), ("expression", r"2+\sqrt{3}", r"\sqrt{3}+2", True), ("number", "97.0", "97", True),
    ("choice", "A", "A", True), ("span", "New York or Paris or London or Rome", "New York", False),
    # numbers
    ("number", "1,234", "1234", True), ("number", "12,345.60", "12345.6", True), ("number", "１２", "12", True), ("number", "1.05e2", "105", True),
    ("number", r"1.05\times 10^{2}", "105", True), ("number", "1.05×10²", "105", True), ("number", "1 1/2", "1.5", True), ("number", "−3", "-3", True),
    ("number", "1.2 million", "1200000", True), ("number", "1.2万", "12000", True), ("number", "三百八十", "380", True), ("number", "三千零五", "3005", True),
    ("number", "3亿5千万", "350000000", True), ("number", "二〇二四", "2024", True), ("number", "负三点五", "-3.5", True), ("number", "百分之三点五", "3.5%", True),
    ("number", "-3.95%", "-3.95", True), ("number", "-0.0395", "-3.95", False), ("number", "0.5", "50%", True), ("number", "50%", "0.5", True),
    ("number", "0.333", "1/3", True), ("number", "0.33", "0.3333", False), ("number", "105.0001", "105", False),
    ("number", "$105", "105", True), (r"number", r"\$105", "105", True), ("number", "105 dollars", "105", True), ("number", "105 km", "105 m", False),
    ("number", "0.105 km", "105 m", True), ("number", "90 minutes", "1.5 hours", True), ("number", "217元", "217", True), ("number", "35", "35 km", True),
    ("number", "The fee for 3 bags on BK4471 is 105.", "105", True), ("number", "Mira Sol pays 105 for 3 bags.", "105", True),
    ("number", "105 is what 3 bags cost.", "105", True), ("number", "It is 105 or 150.", "105", False), ("number", "西门店的梨一共值217元。", "217", True),
    ("number", "The population changed by -3.95 % from 2010 to 2020.", "-3.95", True), ("number", "so 35 * 3 = 105", "105", True),
    ("number", "", "5", False), ("number", "BK105", "105", False),
    # expressions
    ("expression", "x^2+2x+1", "(x+1)^2", True), ("expression", "sqrt(3)+2", r"2+\sqrt{3}", True), ("expression", "2*pi", r"2\pi", True),
    ("expression", "x+1", "x-1", False), ("expression", r"y = \frac{x}{2}", "x/2", True),
    # collections
    ("set", "{1, 2, 3}", "{3, 2, 1}", True), ("set", "1, 2 and 3", r"\{1,2,3\}", True), ("set", "{1, 2}", "{1, 2, 3}", False), ("set", "{1,2,3,4}", "{1,2,3}", False),
    ("set", "苹果和梨", "{梨，苹果}", True), ("tuple", "(1, 2)", "(1,2)", True), ("tuple", "(2, 1)", "(1,2)", False), ("tuple", r"(\frac12, 0.5)", "(1/2, 1/2)", True),
    ("list", "苹果、梨", "苹果、梨", True), ("list", "梨、苹果", "苹果、梨", False), ("list", '["a", "b"]', "a, b", True), ("list", "They are Oslo, Lund", "Oslo, Lund", True),
    # ranges
    ("interval", "[2, 5)", "[2,5)", True), ("interval", "[2,5]", "[2,5)", False), ("interval", r"(-\infty, 0) \cup (1, \infty)", "(1,∞) ∪ (-∞,0)", True),
    ("interval", r"2 < x \leq 5", "(2,5]", True), ("inequality", "2>x", "x<2", True), ("inequality", r"x \le 3", "x<=3", True), ("inequality", "x<3", "x<=3", False),
    ("inequality", "y<3", "x<3", False), ("inequality", "x<1 or x>3", "x>3 或 x<1", True),
    # choices
    ("choice", "(A)", "A", True), ("choice", "B. Lund", "B", True), ("choice", "The answer is B.", "A", False), ("choice", "答案是A", "A", True), ("choice", "选B", "B", True),
    ("choice", "A or B", "A", False), ("choice", "A, C", "AC", True), ("choice", "a", "A", True),
    # dates
    ("date", "March 5, 2024", "2024-03-05", True), ("date", "5th of March 2024", "2024-03-05", True), ("date", "2024年3月5日", "2024-03-05", True),
    ("date", "二〇二四年三月五日", "2024-03-05", True), ("date", "2024/3/5", "2024-03-05", True), ("date", "5 March 2024", "2024-03-06", False),
    ("date", "March 5, 2024", "2024", True), ("date", "2024", "2024-03-05", False), ("date", "2024-03-05 or 2024-03-06", "2024-03-05", False), ("date", "2024-02-31", "2024-02-31", False),
    # yes and no
    ("boolean", "Yes, it is.", "yes", True), ("boolean", "不是", "否", True), ("boolean", "yes or no", "yes", False), ("boolean", "True", "yes", True), ("boolean", "没有", "no", True),
    ("boolean", "It is not true that it rained.", "no", False), ("boolean", "是的，可以。", "true", True),
    # spans
    ("span", "São Paulo", "Sao Paulo", True), ("span", "the Beatles", "Beatles", True), ("span", "北京市", "北京", False), ("span", "答案是北京。", "北京", True),
    ("span", "The booking is BK4471.", "BK4471", True), ("span", "It is not BK4471 but BK9902", "BK4471", False), ("span", "BK4471, BK9902, BK1038", "BK4471", False),
    ("span", "Vienna, Austria", "Vienna, Austria", True), ("span", "Trial or Error", "trial or error", True), ("span", "no", "yes", False), ("span", "5", "-5", False), ("span", "ＢＫ４４７１", "BK4471", True),
]  # fmt: skip


@pytest.mark.parametrize(("answer_type", "predicted", "gold", "right"), CASES)
def test_answers_are_judged_by_their_type(answer_type: str, predicted: str, gold: str, right: bool) -> None:
    assert verify_answer(predicted, gold, answer_type).correct is right


def test_the_best_alias_counts_not_the_last() -> None:
    for aliases in (["NYC", "New York"], ["New York", "NYC"]):
        assert verify_answer("New York", aliases, "span").correct
    assert verify_answer("7", ["5", "6"], "number").reason == "wrong"


def test_what_is_put_forward() -> None:
    assert extract_answer(r"I tried 3. So \boxed{\frac{1}{2}} it is, not \boxed 4") == r"\frac{1}{2}"
    assert extract_answer(r"\boxed{1} then \boxed{{2}}") == "{2}"
    assert extract_answer(r"thus \boxed{12") == ""
    assert extract_answer("It took 3 calls.\nThe fee is 105.") == "The fee is 105."
    assert extract_answer("First 3. Then the fee is 105.") == "Then the fee is 105."
    assert extract_answer("Answer: 12\n\nThanks!") == "12"
    assert extract_answer("最终答案：217元。") == "217元。"
    assert extract_answer(" \n ") == ""
    assert boxed(r"\fbox{a} \boxed {b}") == "b"


def test_reasons_say_why() -> None:
    assert verify_answer("", "5", "number").reason == "no_answer"
    assert verify_answer("A or B", "A", "choice").reason == "several_candidates"
    assert verify_answer("maybe", "perhaps", "boolean").reason == "bad_gold"
    assert verify_answer("I cannot know that.", "", "none").correct
    with pytest.raises(UsageError, match="unknown answer type"):
        verify_answer("5", "5", "numbr")


def test_span_scores_are_token_f1() -> None:
    assert verify_answer("Vienna", "Vienna, Austria", "span").score == pytest.approx(2 / 3)
    assert token_f1("北京市", "北京") == pytest.approx(0.8)
    assert token_f1("yes indeed", "no indeed") > 0
    assert token_f1("yes", "no") == 0
    assert normal_tokens("The price: -1,200.50") == ["price", "-1200.50"]
    assert normal_tokens("A") == ["a"]


def test_numbers_are_exact_and_codes_are_none() -> None:
    assert parse_quantity("0.1").value * 3 == parse_quantity("0.3").value  # type: ignore[union-attr]
    assert parse_quantity("BK4471") is None
    assert parse_quantity("1e999999") is None
    assert [int(q.value) for _, _, q in find_quantities("3 bags on BK4471 cost 105")] == [3, 105]
    assert find_quantities("一共是多少") == []
    assert read_dates("from 2024-03-05 on") == [(2024, 3, 5)]


@pytest.mark.slow
def test_d43_a_verifier_that_hangs_is_killed_and_tried_once_more() -> None:
    judge = ExpressionJudge(wall_s=2.0)
    try:
        assert judge.compare("1+1", "2") == "equal"
        started = time.monotonic()
        assert judge.compare("10^{10^{10}}", "5") == "timeout"
        assert time.monotonic() - started > 2.0  # twice: once more in a new worker
        assert judge.compare("1+1", "2") == "equal"  # and the next question is answered
    finally:
        judge.close()


def test_d43_model_text_is_never_evaluated(tmp_path: object) -> None:
    marker = f"{tmp_path}/ran"
    for attempt in (
        f"__import__('os').system('touch {marker}')",
        f"open('{marker}','w')",
        f"exec(\"open('{marker}','w')\")",
    ):
        for answer_type in ("expression", "number", "set", "tuple", "interval", "inequality"):
            assert not verify_answer(attempt, "5", answer_type).correct
    import os

    assert not os.path.exists(marker)


def test_d43_a_verifier_that_failed_for_no_fault_of_the_answer_gives_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge = ExpressionJudge()
    replies = iter(["timeout", "equal"])
    monkeypatch.setattr(judge, "_ask", lambda *_: next(replies))
    assert judge.compare("x", "y") == "failed"
    monkeypatch.setattr("astrolabe.envs.rewards.structures.expression_judge", lambda: judge)
    monkeypatch.setattr(judge, "compare", lambda *_: "failed")
    verdict = verify_answer("x+y", "x-y", "expression")
    assert (verdict.correct, verdict.score, verdict.reason) == (None, None, "verifier_failed")
    monkeypatch.setattr(judge, "compare", lambda *_: "timeout")
    verdict = verify_answer("x+y", "x-y", "expression")
    assert (verdict.correct, verdict.score, verdict.reason) == (False, 0.0, "verifier_timeout")
