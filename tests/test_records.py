"""Records: ids, seeds, typed equality, strict fields, cards and their rejections."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from astrolabe.records.card import read_card, read_knowledge
from astrolabe.records.environment import Environment, environment_id
from astrolabe.records.equality import equal, informative
from astrolabe.records.errors import UsageError
from astrolabe.records.ids import canonical_json, content_hash, seed_for
from astrolabe.records.jsonl import MAX_DEPTH, parse_json, read_records, read_rows
from astrolabe.records.messages import Message
from astrolabe.records.trajectory import CallError, CallRecord, Task, Trajectory

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False, width=32)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_canonical_json_survives_a_round_trip(value):
    assert canonical_json(json.loads(canonical_json(value))) == canonical_json(value)


@given(json_values)
def test_every_value_equals_itself_after_a_round_trip(value):
    assert equal(value, json.loads(json.dumps(value)))


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (105, 105.0, True),
        (1, True, False),
        (0, False, False),
        (1.0, 1.0 + 1e-12, True),
        (1.0, 1.0 + 1e-6, False),
        ("e\u0301", "\u00e9", True),
        ("5", 5, False),
        ([1, 2], [2, 1], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 1, "b": None}, False),
        (None, None, True),
        (None, 0, False),
        (10**400, 1.0, False),
    ],
)
def test_equality_is_typed(a, b, same):
    assert equal(a, b) is same
    assert equal(b, a) is same


@pytest.mark.parametrize(
    ("value", "is_informative"),
    [
        ("abc", False),
        ("abcd", True),
        ("梨", False),
        ("苹果", True),
        (99, False),
        (105, True),
        (100, True),
        (0.5, False),
        (0.507, True),
        (True, False),
        (None, False),
        ([1, 2], False),
        ({"a": ["BK4471"]}, True),
    ],
)
def test_informative_follows_the_contract(value, is_informative):
    assert informative(value) is is_informative


def test_seeds_differ_by_every_part_and_repeat():
    seeds = {seed_for(0, "card-1", "chains", n) for n in range(50)} | {seed_for(1, "card-1", "chains", 0)}
    assert len(seeds) == 51
    assert seed_for(0, "card-1", "chains", 0) == seed_for(0, "card-1", "chains", 0)


def test_an_environment_id_ignores_certificate_and_provenance(shared):
    for _, row in read_rows(shared / "data" / "environments_good.jsonl"):
        environment = Environment.from_json(row)
        assert environment.content_id() == row["id"] == environment_id(row)
        assert environment.model_copy(update={"provenance": {"x": 1}}).content_id() == row["id"]
        assert environment.model_copy(update={"question": row["question"] + "?"}).content_id() != row["id"]


def test_unknown_fields_are_refused():
    with pytest.raises(ValidationError, match="extra"):
        Task.from_json({"question": "q", "colour": "red"})


def test_absent_fields_are_null_in_records_and_left_out_of_messages():
    row = Trajectory(
        task=Task(question="q").with_id(),
        messages=[Message(role="user", content="q")],
        calls=[
            CallRecord(
                id="call_1",
                turn=0,
                tool="f",
                arguments=None,
                status="error",
                error=CallError(class_="policy", kind="malformed", message="m"),
            )
        ],
    ).to_json()
    assert row["group"] is None
    assert row["reward"] is None
    assert row["messages"] == [{"role": "user", "content": "q"}]
    assert row["calls"][0]["error"] == {"class": "policy", "kind": "malformed", "message": "m"}
    assert row["schema"] == "astrolabe.trajectory/1"
    assert Trajectory.from_json(row).to_json() == row


def test_a_trajectory_id_covers_task_tools_and_messages_only():
    base = Trajectory(task=Task(question="q").with_id(), messages=[Message(role="user", content="q")]).with_id()
    assert base.id.startswith("tr-")
    assert base.model_copy(update={"score": 0.5}).content_id() == base.id
    assert base.model_copy(update={"messages": []}).content_id() != base.id
    row = base.to_json()
    assert base.id == "tr-" + content_hash({k: row[k] for k in ("task", "tools", "messages")})


def test_lines_are_split_on_newline_only(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"a": "x\u2028y\u0085z"}\n\n{"a": 2}\n', encoding="utf-8")
    assert [row["a"] for _, row in read_rows(file)] == ["x\u2028y\u0085z", 2]


def test_a_bad_line_is_named_with_its_number(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"a": 1}\n{oops\n', encoding="utf-8")
    with pytest.raises(UsageError, match="line 2"):
        list(read_rows(file))
    with pytest.raises(UsageError, match="no such file"):
        list(read_rows(tmp_path / "missing.jsonl"))


def test_each_planted_card_is_rejected_for_its_reason(shared):
    reasons = json.loads((shared / "data" / "mcp_servers_bad_reasons.json").read_text(encoding="utf-8"))
    rows = [row for _, row in read_rows(shared / "data" / "mcp_servers_bad.jsonl")]
    assert len(rows) == len(reasons) == 10
    for row, reason in zip(rows, reasons, strict=True):
        reading = read_card(row)
        assert reading.card is None
        assert reason in reading.reasons


def test_every_real_card_is_kept_and_its_dropped_tools_are_named(shared):
    rows = [row for _, row in read_rows(shared / "data" / "mcp_servers.jsonl")]
    readings = [read_card(row) for row in rows]
    assert len(rows) == 89
    assert all(reading.card for reading in readings)
    kept = sum(len(r.card.tools) for r in readings if r.card)
    dropped = {(i, d["tool"]) for i, r in enumerate(readings) for d in r.dropped}
    assert kept + len(dropped) == sum(len(row["tools"]) for row in rows) == 984


def test_a_connected_server_needs_one_tool():
    tool = {"name": "now", "description": "Tells the time.", "parameters": {"type": "object", "properties": {}}}
    row = {"name": "clock", "description": "", "domain": "Time", "license": "MIT", "tools": [tool]}
    assert read_card(row).reasons == ["too_few_tools"]
    assert read_card({**row, "connect": {"command": ["clock"]}}).card is not None
    assert read_card(row, min_tools=1).card is not None


def test_both_knowledge_forms_are_read_and_a_bad_row_says_what_is_missing():
    assert read_knowledge({"domain": "d", "knowledge_corpus": "Some text."}).language == "en"
    assert read_knowledge({"domain": "d", "text": "西门店有三十一个梨。"}).language == "zh"
    with pytest.raises(ValueError, match="text"):
        read_knowledge({"domain": "d"})
    with pytest.raises(ValueError, match="language"):
        read_knowledge({"domain": "d", "text": "t", "language": "fr"})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": NaN}', "NaN"),
        ("[-Infinity]", "Infinity"),
        ('{"a": 1e999}', "double"),
        ("9" * 400, "double"),
        ('{"\\ud800": 1}', "surrogate"),
        ('["x \\uDFFF"]', "surrogate"),
        ("[" * 200_000, "deeper"),
        ("[" * 111 + "]" * 111, "deeper"),
        ("{", "Expecting"),
    ],
)
def test_what_could_not_be_written_again_is_not_read(text, why, tmp_path):
    with pytest.raises(ValueError, match=why):
        parse_json(text)
    (tmp_path / "a.jsonl").write_text(text + "\n")
    with pytest.raises(UsageError, match=r"a\.jsonl, line 1: not JSON"):
        list(read_rows(tmp_path / "a.jsonl"))


def test_an_escaped_pair_a_large_integer_and_a_hundred_levels_are_read():
    assert parse_json('["\\ud83c\\udf1f", 123456789012345678901234567890]') == ["🌟", 123456789012345678901234567890]
    assert canonical_json(parse_json("[" * 100 + "]" * 100)) == "[" * 100 + "]" * 100
    with pytest.raises(ValueError, match="deeper than 100"):
        parse_json("[" * 101 + "]" * 101)


def test_a_row_that_holds_the_deepest_arguments_is_read_again(tmp_path):
    arguments = parse_json('{"a":' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}")
    call = CallRecord(id="c", turn=0, tool="t", arguments=arguments, status="ok", backend="python")
    row = Trajectory(task=Task(question="q").with_id(), calls=[call]).with_id()
    (tmp_path / "a.jsonl").write_text(row.to_line() + "\n")
    assert [found for _, found in read_records(tmp_path / "a.jsonl", Trajectory, "mend")] == [row]


@pytest.mark.parametrize("change", [{"source": 5}, {"description": ["x"]}, {"domain": {}}])
def test_a_card_with_a_field_of_the_wrong_type_is_rejected_and_not_mended(change):
    tool = {"name": "now", "description": "Tells the time.", "parameters": {"type": "object", "properties": {}}}
    assert read_card({"name": "clock", "license": "MIT", "tools": [tool], **change}, min_tools=1).reasons == [
        "schema_invalid"
    ]


def test_a_row_of_the_wrong_type_is_named_with_its_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('3\n{"task": 5}\n')
    with pytest.raises(UsageError, match=r"a\.jsonl, line 1: no trajectory: Input should be"):
        list(read_records(tmp_path / "a.jsonl", Trajectory, "mend"))
