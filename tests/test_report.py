"""The report: one self-contained page, in which nothing that a model wrote can act."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from astrolabe.evals.leaks import leak_report, without_shared
from astrolabe.records.environment import Environment
from astrolabe.records.errors import UsageError
from astrolabe.records.messages import Message
from astrolabe.records.token_store import TokenRange
from astrolabe.records.trajectory import Segment, Task, Trace, Trajectory
from astrolabe.report.charts import Series, line_chart, ticks
from astrolabe.report.html import episode, render, token_view, write_report

HOSTILE = "<script>alert(1)</script>"


def trajectory(**more) -> Trajectory:
    messages = [Message(role="user", content=HOSTILE), Message(role="assistant", content="done & dusted")]
    return Trajectory(task=Task(question=HOSTILE).with_id(), messages=messages, **more).with_id()


def test_text_of_models_and_tools_is_escaped_and_nothing_is_loaded():
    page = render(title="t", lead=HOSTILE, episodes=[episode(trajectory())], charts=[line_chart(HOSTILE, [])])
    assert HOSTILE not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"<script|src=|@import|https?://", page)


def test_every_token_has_its_author_and_its_mask():
    class Store:
        def read(self, start, length):
            assert (start, length) == (7, 4)
            return TokenRange(
                tokens=np.arange(4),
                mask=np.array([0, 1, 0, 0]),
                logprobs=np.array([math.nan, -0.5, math.nan, math.nan]),
                versions=np.array([-1, 3, -1, -1]),
            )

    segments = [
        Segment(start=0, end=1, author="prompt", turn=0),
        Segment(start=1, end=2, author="policy", turn=0),
        Segment(start=2, end=4, author="tool", turn=0),
    ]
    shown = token_view(
        trajectory(traces=[Trace(start=7, length=4, segments=segments)]), Store(), lambda ids: f"t{ids[0]}"
    )
    assert [(t["text"], t["author"], t["mask"]) for t in shown] == [
        ("t0", "prompt", 0),
        ("t1", "policy", 1),
        ("t2", "tool", 0),
        ("t3", "tool", 0),
    ]
    assert "weights 3" in shown[1]["tip"]


def test_a_chart_breaks_at_a_missing_value_and_says_when_there_is_none():
    drawn = line_chart("loss", [Series("a", [(0, 1.0), (1, math.nan), (2, 0.5)])])
    assert drawn.count("M") >= 2
    assert "no points" in line_chart("loss", [Series("a", [(0, math.nan)])])


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (3.0, 3.0), (-2e-4, 5e-4), (0, 12345)])
def test_ticks_cover_the_range(low, high):
    values = ticks(low, high)
    assert values[0] <= low
    assert values[-1] >= high
    assert len(values) < 12


def test_the_report_of_a_run_names_its_counts_and_refuses_what_is_no_run(tmp_path):
    with pytest.raises(UsageError, match=r"run\.json"):
        write_report(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"verb": "synth trajectories"}))
    (tmp_path / "trajectories.jsonl").write_text(trajectory().to_line() + "\n")
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i, "loss": 1 / (i + 1)}) + "\n" for i in range(3))
    )
    page = write_report(tmp_path).read_text()
    assert "1 trajectories" in page
    assert "<svg" in page


def environments(shared) -> list[Environment]:
    lines = (shared / "data" / "environments_good.jsonl").read_text(encoding="utf-8").splitlines()
    return [Environment.from_json(json.loads(line)) for line in lines]


def test_what_held_out_shares_with_training_is_counted_and_can_be_left_out(shared):
    railway, retail, bank, lost = environments(shared)
    report = {row["what"]: row for row in leak_report([railway], [retail, bank, lost])}
    assert report["tools"]["both"] == 2  # the lost-property question shows the railway tools
    assert report["questions"]["both"] == report["environments"]["both"] == 0
    assert without_shared([retail, bank, lost], [railway]) == [retail, bank]
    assert {r["what"]: r["both"] for r in leak_report([railway], [retail, bank])}["tools"] == 0
