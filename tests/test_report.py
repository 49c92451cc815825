"""The report: one self-contained page, in which nothing that a model wrote can act."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astrolabe.evals.leaks import leak_report, without_shared
from astrolabe.records.environment import Environment
from astrolabe.records.errors import RunError, UsageError
from astrolabe.records.messages import Message
from astrolabe.records.run_store import RunStore
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
    with pytest.raises(RunError, match=r"run\.json"):
        write_report(tmp_path)
    page = write_report(stored(tmp_path)).read_text()
    assert "1 trajectories" in page
    assert "<svg" in page
    assert "judged" in page


def stored(path: Path, row: dict[str, Any] | None = None) -> Path:
    """A run of one committed trajectory, with metrics of three steps."""
    with RunStore.open(path, verb="synth trajectories", config={}, seed=0) as store:
        for i in range(3):
            store.log_metrics({"step": i, "loss": 1 / (i + 1)})
        store.commit(
            "a", rows={"trajectories": [trajectory().to_json() if row is None else row]}, funnel=[("judged", 1, 1, {})]
        )
    return path


def test_the_report_of_a_run_in_work_shows_what_is_committed(tmp_path):
    run = stored(tmp_path)
    (run / "funnel.json").write_text("{")  # only the journal counts
    for name in ("trajectories.jsonl", "rejected.jsonl", "metrics.jsonl"):
        with open(run / name, "a") as file:
            file.write('{"half": ')
    page = write_report(run).read_text()
    assert "1 trajectories, 0 rejected" in page
    assert "<svg" in page
    (run / "journal.jsonl").unlink()
    assert "no records yet" in write_report(run).read_text()


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("run.json", "{", r"run\.json: not JSON"),
        ("run.json", "[]", r"run\.json: not of schema"),
        ("trajectories.jsonl", None, r"trajectories\.jsonl: missing"),
        ("trajectories.jsonl", "", r"trajectories\.jsonl: shorter"),
        ("trajectories.jsonl", "{", r"trajectories\.jsonl, line 1: not JSON"),
        ("trajectories.jsonl", "3", r"trajectories\.jsonl, line 1: no JSON object"),
        ("trajectories.jsonl", " " * 9000, r"trajectories\.jsonl: no line ends"),
        ("metrics.jsonl", "{", r"metrics\.jsonl, line 1: not JSON"),
    ],
)
def test_a_run_with_a_broken_file_is_named_with_the_mend(tmp_path, file, text, named):
    run = stored(tmp_path)
    size = (run / file).stat().st_size
    (run / file).unlink()
    if text is not None:  # as long as the file was
        (run / file).write_text(text and text.ljust(size - 1) + "\n")
    with pytest.raises(RunError, match=named) as caught:
        write_report(run)
    assert caught.value.mend


def test_a_row_that_is_no_trajectory_and_a_folder_as_the_page_are_usage_errors(tmp_path):
    run = stored(tmp_path / "run", {"task": 5})
    with pytest.raises(UsageError, match=r"trajectories\.jsonl, line 1: no trajectory: task"):
        write_report(run)
    run = stored(tmp_path / "good")
    for out in (tmp_path, tmp_path / "absent" / "page.html"):
        with pytest.raises(UsageError) as caught:
            write_report(run, out)
        assert str(out) in caught.value.message


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
