"""The planted files: every good row passes, every bad one fails for its reason, and the sound ones ship whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from astrolabe.envs.gates.check import check_file


@pytest.mark.slow
def test_good_rows_pass_with_a_certificate(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = shared / "data" / "environments_good.jsonl"
    assert check_file(path, tmp_path, json_lines=True) == 0
    assert all(json.loads(line)["reasons"] == [] for line in capsys.readouterr().out.splitlines())
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    shipped = [json.loads(line) for line in (tmp_path / "environments.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [{**row, "certificate": None} for row in shipped] == rows
    assert all(row["certificate"]["ceiling"] == 1.0 for row in shipped)


@pytest.mark.slow
def test_bad_rows_fail_for_their_reason(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_file(shared / "data" / "environments_bad.jsonl", tmp_path, json_lines=True) == 1
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = json.loads((shared / "data" / "environments_bad_reasons.json").read_text())
    assert len(reports) == len(expected)
    for place, planted in expected.items():
        report = reports[int(place)]
        assert report["id"] == planted["id"]
        assert planted["reason"] in report["reasons"], report
    assert (tmp_path / "environments.jsonl").read_text() == ""
