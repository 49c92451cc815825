"""A real synthesis that is killed, or stopped by Ctrl-C, and run again ends with the files of an unbroken run."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SPEC = importlib.util.spec_from_file_location("kill_resume", ROOT / "benchmarks" / "kill_resume.py")
assert SPEC is not None
assert SPEC.loader is not None
kill_resume = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(kill_resume)

THINGS = ("library", "harbour", "orchard", "museum", "theatre")


def tool(name: str, description: str, **arguments: str) -> dict:
    properties = {
        key: {"type": kind, "description": f"The {key.replace('_', ' ')}."} for key, kind in arguments.items()
    }
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"name": name, "description": description, "parameters": parameters}


@pytest.fixture
def cards(tmp_path) -> Path:
    """Small cards, each with tools whose outputs fit the next one's arguments."""
    rows = []
    for thing in THINGS:
        tools = [
            tool(f"find_{thing}", f"Finds a {thing} by the city that it lies in and gives its id.", city="string"),
            tool(f"describe_{thing}", f"Gives the name and the owner of a {thing} by its id.", **{f"{thing}_id": "string"}),
            tool(f"count_visitors_of_{thing}", f"Counts the visitors of a {thing} in a year.", **{f"{thing}_id": "string", "year": "integer"}),
            tool(f"rate_{thing}", f"Stores a rating from 1 to 5 for a {thing}.", **{f"{thing}_id": "string", "rating": "integer"}),
        ]  # fmt: skip
        row = {"name": thing, "description": f"Finds and rates a {thing}.", "domain": "Places", "license": "MIT"}
        rows.append({**row, "source": None, "tools": tools, "connect": None})
    file = tmp_path / "cards.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="orphans are seen through /proc")
@pytest.mark.parametrize("what", ["trajectories", "environments"])
def test_killed_synthesis_ends_with_the_files_of_an_unbroken_run_and_leaves_no_process(tmp_path, cards, what):
    arguments = ["synth", what, "--seed", "3", "--concurrency", "2"]
    arguments += ["--limit", "3"] + (["--servers", str(cards)] if what == "trajectories" else [])
    done, faults = kill_resume.kill_and_resume(arguments, tmp_path, kills=2, seed=1, say=False)
    assert faults == []
    assert done == 2
    assert len((tmp_path / "whole" / f"{what}.jsonl").read_text().splitlines()) >= 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_replayed_run_has_the_files_of_the_recorded_one_without_any_server(tmp_path, cards):
    arguments = ["synth", "trajectories", "--seed", "3", "--servers", str(cards), "--limit", "2"]
    assert kill_resume.launch(arguments, tmp_path / "one").wait() == 0
    replayed = [*arguments, "--replay", str(tmp_path / "one")]
    assert kill_resume.launch(replayed, tmp_path / "two").wait() == 0
    assert kill_resume.unlike(kill_resume.contents(tmp_path / "one"), kill_resume.contents(tmp_path / "two")) == []
    reply = next((tmp_path / "one" / "replies").glob("*/*.json"))
    reply.unlink()
    done = subprocess.run(
        kill_resume.command(replayed, tmp_path / "three"),
        capture_output=True,
        text=True,
        env={**os.environ, "ASTROLABE_COMMIT": "0" * 40},
    )
    assert done.returncode == 1
    assert f"no stored reply to request {reply.stem}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ctrl_c_ends_a_synthesis_in_order_and_it_goes_on(tmp_path, cards):
    arguments = ["synth", "trajectories", "--seed", "3", "--servers", str(cards), "--concurrency", "1"]
    assert kill_resume.launch(arguments, tmp_path / "whole").wait() == 0
    process = subprocess.Popen(
        kill_resume.command(arguments, tmp_path / "stopped"),
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ASTROLABE_COMMIT": "0" * 40},
    )
    journal = tmp_path / "stopped" / "journal.jsonl"
    while process.poll() is None and not (journal.exists() and journal.stat().st_size):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 3, text
    assert "Traceback" not in text
    assert kill_resume.launch(arguments, tmp_path / "stopped").wait() == 0
    assert (
        kill_resume.unlike(kill_resume.contents(tmp_path / "whole"), kill_resume.contents(tmp_path / "stopped")) == []
    )
