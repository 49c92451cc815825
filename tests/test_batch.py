"""The batch loop: bounded, committed in input order, and stoppable at any moment."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from astrolabe.records.base import Usage
from astrolabe.records.errors import RunError, ServerError
from astrolabe.records.run_store import RunStore
from graphs.batch import Item, Outcome, run_batch

ITEMS = [Item(f"i{n}", n) for n in range(12)]


def open_run(path: Path) -> RunStore:
    return RunStore.open(path, verb="v", config={}, seed=0, files=("trajectories",))


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in (path / "trajectories.jsonl").read_text().splitlines()]


def accepted(item: Item) -> Outcome:
    return Outcome(rows={"trajectories": [{"id": item.key}]}, funnel=[("made", 1, 1, {})])


async def test_rows_are_in_input_order_whoever_finishes_first(tmp_path):
    async def work(item):
        await asyncio.sleep(0.002 * (12 - item.value))
        return accepted(item)

    with open_run(tmp_path) as store:
        report = await run_batch(ITEMS, work, store, concurrency=5, progress=False)
    assert ids(tmp_path) == [item.key for item in ITEMS]
    assert (report.total, report.done, report.interrupted, report.exit_code) == (12, 12, False, 0)
    assert report.rows == {"trajectories": 12, "rejected": 0}


async def test_no_more_than_the_bound_are_worked_on_and_a_slow_first_item_bounds_the_rest(tmp_path):
    at_work = most = begun = 0
    release = asyncio.Event()

    async def work(item):
        nonlocal at_work, most, begun
        at_work, begun = at_work + 1, begun + 1
        most = max(most, at_work)
        if item.value == 0:
            await release.wait()
        else:
            await asyncio.sleep(0)
        at_work -= 1
        return accepted(item)

    items = [Item(str(n), n) for n in range(100)]
    with open_run(tmp_path) as store:
        task = asyncio.create_task(run_batch(items, work, store, concurrency=3, progress=False))
        await asyncio.sleep(0.1)
        assert begun == 24  # eight times the bound wait for the first
        release.set()
        await task
    assert most == 3
    assert ids(tmp_path) == [item.key for item in items]


async def test_what_goes_wrong_with_one_item_is_a_rejected_row(tmp_path):
    async def work(item):
        if item.value == 3:
            raise ZeroDivisionError("by zero")
        if item.value == 4:
            await asyncio.sleep(30)
        return accepted(item)

    with open_run(tmp_path) as store:
        await run_batch(ITEMS, work, store, progress=False, deadline_s=0.2)
    rejected = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    assert [(row["item"], row["reasons"]) for row in rejected] == [("i3", ["infra_error"]), ("i4", ["infra_timeout"])]
    assert len(ids(tmp_path)) == 10


@pytest.mark.parametrize("error", [RunError("disk full", "mend"), ServerError("gone", "mend")])
async def test_what_would_go_wrong_with_every_item_ends_the_run_and_it_can_go_on(tmp_path, error):
    broken = True
    begun = []

    async def work(item):
        begun.append(item.value)
        await asyncio.sleep(0.001)
        if broken and item.value >= 5:
            raise error
        return accepted(item)

    items = [Item(f"i{n}", n) for n in range(60)]
    with open_run(tmp_path) as store, pytest.raises(type(error)):
        await run_batch(items, work, store, concurrency=2, progress=False)
    assert ids(tmp_path) == ["i0", "i1", "i2", "i3", "i4"]
    assert max(begun) < 10  # nothing new was begun after the failure
    assert (tmp_path / "rejected.jsonl").read_text() == ""
    broken = False
    with open_run(tmp_path) as store:
        report = await run_batch(items, work, store, progress=False)
        assert store.finished
    assert ids(tmp_path) == [item.key for item in items]
    assert report.done == 60


async def test_a_server_that_is_gone_ends_the_run_instead_of_rejecting_the_data_set(tmp_path):
    from serving.chat import ModelFailure

    async def work(item):
        raise ModelFailure("unreachable", "http://127.0.0.1:1: refused")

    with open_run(tmp_path) as store, pytest.raises(ServerError, match="refused"):
        await run_batch(ITEMS, work, store, progress=False)
    assert (tmp_path / "rejected.jsonl").read_text() == ""


async def test_a_committed_item_is_not_worked_on_again(tmp_path):
    async def work(item):
        return accepted(item)

    with open_run(tmp_path) as store:
        await run_batch(ITEMS, work, store, progress=False)
        before = (tmp_path / "journal.jsonl").read_bytes()

    async def never(item):
        raise AssertionError("worked on again")

    with open_run(tmp_path) as store:
        report = await run_batch(ITEMS, never, store, progress=False)
    assert report.done == 12
    assert (tmp_path / "journal.jsonl").read_bytes() == before


async def test_token_ranges_are_given_at_commit_so_that_they_follow_input_order(tmp_path):
    async def work(item):
        await asyncio.sleep(0.002 * (12 - item.value))

        def at_commit(store):
            n = item.value + 1
            start = store.tokens.append([item.value] * n, [1] * n, [-0.5] * n, [0] * n)
            return {"trajectories": [{"id": item.key, "start": start, "length": n}]}

        return Outcome(at_commit=at_commit, usage=Usage(prompt_tokens=2, completion_tokens=1, calls=1))

    with open_run(tmp_path) as store:
        await run_batch(ITEMS, work, store, concurrency=12, progress=False)
        rows = [json.loads(line) for line in (tmp_path / "trajectories.jsonl").read_text().splitlines()]
        assert [row["start"] for row in rows] == [n * (n + 1) // 2 for n in range(12)]
        assert store.tokens.read(rows[4]["start"], 5).tokens.tolist() == [4] * 5
    metrics = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["usage"] == {"prompt_tokens": 2, "completion_tokens": 1, "calls": 1}


async def test_two_items_of_one_key_are_refused(tmp_path):
    with open_run(tmp_path) as store, pytest.raises(ValueError, match="same key"):
        await run_batch([Item("a", 1), Item("a", 2)], accepted, store)


SCRIPT = """
import asyncio, sys
from pathlib import Path
from astrolabe.records.run_store import RunStore
from graphs.batch import Item, Outcome, run_batch
async def work(item):
    key = f"{item.value:016x}"
    if store.replies.get(key) is None:
        await asyncio.sleep(0.001 * (item.value * 7 % 11))
        store.replies.put(key, {"content": "r" * item.value})
    def at_commit(store):
        n = item.value % 7
        start = store.tokens.append([n] * n, [1] * n, [-0.5] * n, [0] * n)
        return {"trajectories": [{"id": item.key, "start": start}]}
    rejected = [{"item": item.key, "stage": "s", "reasons": ["odd"], "detail": "", "row": {}}] if item.value % 2 else []
    return Outcome(at_commit=at_commit, rejected=rejected, funnel=[("s", 1, 1, {})], judge_audit={"j": {"pass": 1}})
with RunStore.open(Path(sys.argv[1]), verb="v", config={}, seed=0) as store:
    print("ready", flush=True)
    report = asyncio.run(run_batch([Item(str(n), n) for n in range(int(sys.argv[2]))], work, store, concurrency=4))
sys.exit(report.exit_code)
"""


def start(path: Path, n: int) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(path), str(n)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_ctrl_c_commits_what_is_under_way_and_exits_partial(tmp_path):
    process = start(tmp_path, 3000)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 3
    rows = ids(tmp_path)
    assert rows == [str(n) for n in range(len(rows))]
    assert 0 < len(rows) < 3000
    assert json.loads((tmp_path / "funnel.json").read_text())[0]["in"] == len(rows)


def files(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes()
        for p in path.rglob("*")
        if p.is_file() and p.name != "timings.jsonl" and "logs" not in p.parts
    }


@pytest.mark.slow
def test_kill_nine_at_random_moments_ends_with_the_files_of_an_unbroken_run(tmp_path):
    n = 150
    assert start(tmp_path / "whole", n).wait(timeout=60) == 0
    wanted = files(tmp_path / "whole")
    kills = 0
    for moment in range(20):
        process = start(tmp_path / "killed", n)
        time.sleep(0.02 + 0.013 * (moment * 5 % 7))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills >= 5
    assert start(tmp_path / "killed", n).wait(timeout=60) == 0
    assert files(tmp_path / "killed") == wanted
    assert not [p for p in Path("/proc").glob("[0-9]*") if str(tmp_path) in _command(p)]


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:  # it ended meanwhile
        return ""


def test_the_loop_runs_outside_the_main_thread_too(tmp_path):
    async def work(item):
        return accepted(item)

    def run() -> None:
        with open_run(tmp_path) as store:
            asyncio.run(run_batch(ITEMS, work, store, progress=False))

    import threading

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(ids(tmp_path)) == 12
    assert os.getpid()
