"""The run folder: one writer, whole commits, the same files after any interruption."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from astrolabe.records import durable
from astrolabe.records.errors import RunError
from astrolabe.records.funnel import funnel_of
from astrolabe.records.reply_store import ReplyStore
from astrolabe.records.run_status import run_status
from astrolabe.records.run_store import RunStore, is_locked, read_run
from astrolabe.records.token_store import CHUNK, TokenStore

CONFIG = {"model": "m", "limit": 3}


def open_run(path: Path, **changes) -> RunStore:
    args = {"verb": "synth trajectories", "config": CONFIG, "seed": 7, "files": ("trajectories",)}
    return RunStore.open(path, **(args | changes))


def commit(store: RunStore, item: str, text: str = "x") -> None:
    store.commit(
        item,
        rows={"trajectories": [{"id": item, "text": text}]},
        rejected=[{"item": item, "stage": "judged", "reasons": ["low"], "detail": "", "row": {"a": 1}}],
        funnel=[("planned", 2, 2, {}), ("judged", 2, 1, {"low": 1})],
        timings=[{"id": item, "seconds": 0.25}],
        judge_audit={"final_answer": {"pass": 1}},
    )


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes()
        for p in sorted(path.rglob("*"))
        if p.is_file() and p.name != "run.lock"
    }


def test_a_run_holds_the_files_of_formats(tmp_path):
    with open_run(tmp_path / "run", prompts={"planner": "abc"}, inputs={"servers": "def"}) as store:
        commit(store, "a", "星盘 \u2028 line")
        commit(store, "b")
        store.finish()
    run = read_run(tmp_path / "run")
    assert run["config"] == CONFIG
    assert run["seeds"] == {"run": 7}
    assert run["prompts"] == {"planner": "abc"}
    assert run["versions"]["python"]
    assert "commit" in run
    assert str(tmp_path) not in json.dumps(run)
    text = (tmp_path / "run" / "trajectories.jsonl").read_bytes().decode()
    assert [json.loads(line)["id"] for line in text.split("\n") if line] == ["a", "b"]
    assert "星盘" in text
    rejected = json.loads((tmp_path / "run" / "rejected.jsonl").read_text().split("\n")[0])
    assert list(rejected) == ["item", "stage", "reasons", "detail", "row"]
    assert json.loads((tmp_path / "run" / "funnel.json").read_text()) == [
        {"stage": "planned", "in": 4, "out": 4, "rejected": {}},
        {"stage": "judged", "in": 4, "out": 2, "rejected": {"low": 2}},
    ]
    assert json.loads((tmp_path / "run" / "judge_audit.json").read_text()) == {"final_answer": {"pass": 2}}
    for name in ("timings.jsonl", "metrics.jsonl", "logs", "replies"):
        assert (tmp_path / "run" / name).exists()


def test_the_same_command_continues_and_committed_items_are_not_doubled(tmp_path):
    with open_run(tmp_path) as store:
        commit(store, "a")
    with open_run(tmp_path) as store:
        assert store.is_done("a")
        assert not store.is_done("b")
        with pytest.raises(ValueError, match="committed already"):
            commit(store, "a")
        commit(store, "b")
    assert len((tmp_path / "trajectories.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"config": CONFIG | {"limit": 4}}, "config.limit: 3 -> 4"),
        ({"seed": 8}, "seeds.run: 7 -> 8"),
        ({"inputs": {"servers": "other"}}, "inputs.servers"),
        ({"verb": "synth environments"}, "verb"),
        ({"prompts": {"planner": "new"}}, "prompts.planner"),
    ],
)
def test_another_run_in_the_folder_is_refused_by_the_name_of_what_differs(tmp_path, changes, named):
    open_run(tmp_path).close()
    before = contents(tmp_path)
    with pytest.raises(RunError, match=named) as caught:
        open_run(tmp_path, **changes)
    assert caught.value.mend
    assert contents(tmp_path) == before


def test_a_second_writer_is_refused_and_a_closed_run_is_free(tmp_path):
    store = open_run(tmp_path)
    assert is_locked(tmp_path)
    with pytest.raises(RunError, match="another process"):
        open_run(tmp_path)
    store.close()
    assert not is_locked(tmp_path)
    open_run(tmp_path).close()


def test_a_forked_worker_that_outlives_its_parent_holds_no_lock(tmp_path):
    code = (
        "import os, sys, time, signal\nfrom pathlib import Path\nfrom astrolabe.records.run_store import RunStore\n"
        f"store = RunStore.open(Path({str(tmp_path / 'run')!r}), verb='v', config={{}}, seed=0)\n"
        "child = os.fork()\n"
        "if child == 0:\n    os.close(1)\n    time.sleep(30)\n    os._exit(0)\n"
        "print(child, flush=True)\ntime.sleep(0.2)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=20)
    child = int(done.stdout)
    try:
        os.kill(child, 0)
        RunStore.open(tmp_path / "run", verb="v", config={}, seed=0).close()
    finally:
        os.kill(child, 9)


def test_a_kill_at_any_byte_loses_only_the_item_under_way(tmp_path):
    """Every prefix of what a commit writes is what a kill may leave; each must continue to the unbroken files."""
    with open_run(tmp_path / "whole") as store:
        for item in "abc":
            commit(store, item)
        store.finish()
    wanted = contents(tmp_path / "whole")
    with open_run(tmp_path / "cut") as store:
        commit(store, "a")
    saved = contents(tmp_path / "cut")
    with open_run(tmp_path / "cut") as store:
        commit(store, "b")
    grown = contents(tmp_path / "cut")
    names = ["trajectories.jsonl", "rejected.jsonl", "timings.jsonl", "metrics.jsonl", "journal.jsonl"]
    for n, name in enumerate(names):
        for share in (0.0, 0.5, 1.0):
            for other in names[:n]:  # written before it in the commit
                (tmp_path / "cut" / other).write_bytes(grown[other])
            for other in names[n:]:
                (tmp_path / "cut" / other).write_bytes(saved.get(other, b""))
            size = len(saved[name]) + int((len(grown[name]) - len(saved[name])) * share)
            (tmp_path / "cut" / name).write_bytes(grown[name][:size])
            (tmp_path / "cut" / ("funnel.json" + durable.TEMPORARY)).write_text("torn")
            with open_run(tmp_path / "cut") as store:
                for item in "abc":
                    if not store.is_done(item):
                        commit(store, item)
                store.finish()
            assert contents(tmp_path / "cut") == wanted


def test_finish_is_idempotent(tmp_path):
    with open_run(tmp_path) as store:
        commit(store, "a")
        store.finish()
        before = contents(tmp_path)
        store.finish()
    with open_run(tmp_path) as store:
        assert store.finished
        store.finish()
    assert contents(tmp_path) == before


def test_a_full_disk_is_an_error_with_a_mend_and_the_run_goes_on(tmp_path):
    """A real limit on file size, in a process of its own: the commit fails whole, and goes through once there is room."""
    code = f"""
import resource
from pathlib import Path
from astrolabe.records.errors import RunError
from astrolabe.records.run_store import RunStore
store = RunStore.open(Path({str(tmp_path / "run")!r}), verb="v", config={{}}, seed=0)
store.commit("a", rows={{"trajectories": [{{"t": "x" * 100}}]}}, timings=[{{"id": "a"}}])
sizes = {{p.name: p.stat().st_size for p in store.path.glob("*.jsonl")}}
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
try:
    store.commit("b", rows={{"trajectories": [{{"t": "x"}}], "other": [{{"t": "x" * 9000}}]}}, timings=[{{"id": "b"}}])
    raise SystemExit("the commit went through")
except RunError as error:
    assert "free some space" in error.mend, error
assert {{p.name: p.stat().st_size for p in store.path.glob("*.jsonl") if p.stat().st_size or p.name in sizes}} == sizes
try:
    store.replies.put("ab" * 8, {{"t": "x" * 9000}})
    raise SystemExit("the reply went through")
except RunError as error:
    assert "free some space" in error.mend, error
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
store.commit("b", rows={{"trajectories": [{{"t": "x"}}], "other": [{{"t": "x" * 9000}}]}}, timings=[{{"id": "b"}}])
store.finish()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr + done.stdout
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert len((tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()) == 2
    assert len((tmp_path / "run" / "timings.jsonl").read_text().splitlines()) == 2
    with RunStore.open(tmp_path / "run", verb="v", config={}, seed=0) as store:
        assert store.finished


def test_another_disk_error_is_not_taken_for_a_full_disk(tmp_path):
    with pytest.raises(OSError, match="Input/output"), durable.disk_guard(tmp_path):
        raise OSError(errno.EIO, "Input/output error")


def test_a_rejected_row_without_a_reason_is_refused(tmp_path):
    with open_run(tmp_path) as store, pytest.raises(ValueError, match="rejected row"):
        store.commit("a", rows={}, rejected=[{"item": "a", "stage": "s", "reasons": [], "detail": "", "row": {}}])


def test_a_folder_with_foreign_rows_is_not_taken_over(tmp_path):
    (tmp_path / "trajectories.jsonl").write_text("{}\n")
    with pytest.raises(RunError, match=r"no run\.json"):
        open_run(tmp_path)
    assert (tmp_path / "trajectories.jsonl").read_text() == "{}\n"


def test_rewind_forgets_what_came_after_a_checkpoint(tmp_path):
    with open_run(tmp_path) as store:
        for n in range(3):
            start = store.tokens.append([n] * 4, [1] * 4, [-0.5] * 4, [n] * 4)
            store.log_metrics({"step": n})
            store.commit(f"step-{n}", rows={"rollouts": [{"start": start}]})
        store.rewind("step-0")
        assert not store.is_done("step-1")
        assert store.tokens.length == 4
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
        assert store.tokens.append([9], [0], [0.0], [-1]) == 4
        store.commit("step-1", rows={"rollouts": [{"start": 4}]})
    with open_run(tmp_path) as store:
        assert store.tokens.length == 5
        assert len((tmp_path / "rollouts.jsonl").read_text().splitlines()) == 2
        store.rewind(None)
        assert (tmp_path / "rollouts.jsonl").read_bytes() == b""


def test_metrics_of_a_run_without_commits_survive(tmp_path):
    with open_run(tmp_path) as store:
        store.log_metrics({"step": 1})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step"')  # a kill in the middle of a row
    with open_run(tmp_path) as store:
        store.log_metrics({"step": 2})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_the_funnel_keeps_the_order_of_stages():
    items = [[("read", 1, 1, {}), ("judged", 1, 1, {})], [("read", 1, 1, {}), ("built", 2, 0, {"b": 1, "a": 1})]]
    rows = funnel_of(items)
    assert [row["stage"] for row in rows] == ["read", "built", "judged"]
    assert rows[0] == {"stage": "read", "in": 2, "out": 2, "rejected": {}}
    assert list(rows[1]["rejected"]) == ["a", "b"]


def test_replies_are_found_by_their_request_and_copied_from_a_replayed_run(tmp_path):
    first = ReplyStore(tmp_path / "one" / "replies")
    first.put("ab" * 32, {"content": "你好"})
    assert ReplyStore(tmp_path / "one" / "replies").get("ab" * 32) == {"content": "你好"}
    assert first.get("cd" * 32) is None
    second = ReplyStore(tmp_path / "two" / "replies", replay_from=tmp_path / "one", replay_only=True)
    assert second.get("ab" * 32) == {"content": "你好"}
    assert len(second) == 1
    with pytest.raises(RunError, match="cd" * 32):
        second.get("cd" * 32)
    with pytest.raises(ValueError, match="hex"):
        first.get("../../etc/passwd")


def test_a_torn_reply_is_asked_for_again(tmp_path):
    store = ReplyStore(tmp_path)
    store.put("ab" * 8, {"content": "x"})
    (tmp_path / "ab" / ("ab" * 8 + ".json")).write_text('{"content": ')
    assert store.get("ab" * 8) is None


def test_replay_from_a_folder_that_is_no_run_is_a_user_error(tmp_path):
    with pytest.raises(RunError, match="no run here"):
        open_run(tmp_path / "new", replay_from=tmp_path / "absent")
    assert not (tmp_path / "new").exists()


def test_token_arrays_come_back_exactly_and_logprobs_are_nan_where_masked(tmp_path):
    store = TokenStore(tmp_path)
    assert store.append([1, 2, 3], [0, 1, 1], [9.0, -0.25, -1.5], [-1, 4, 4]) == 0
    assert store.append([5] * (CHUNK + 10), [0] * (CHUNK + 10), [0.0] * (CHUNK + 10), [-1] * (CHUNK + 10)) == 3
    again = TokenStore(tmp_path, read_only=True)
    trace = again.read(0, 3)
    assert trace.tokens.dtype == np.int32
    assert trace.tokens.tolist() == [1, 2, 3]
    assert trace.mask.tolist() == [0, 1, 1]
    assert np.isnan(trace.logprobs[0])
    assert trace.logprobs[1:].tolist() == [-0.25, -1.5]
    assert trace.versions.tolist() == [-1, 4, 4]
    assert (again.read(3, CHUNK + 10).tokens == 5).all()
    with pytest.raises(RunError, match="not within"):
        again.read(3, CHUNK + 11)


def test_token_arrays_of_unequal_length_or_without_a_logprob_are_refused(tmp_path):
    store = TokenStore(tmp_path)
    with pytest.raises(ValueError, match="differ in length"):
        store.append([1, 2], [1, 1], [-0.5], [0, 0])
    with pytest.raises(ValueError, match="finite"):
        store.append([1], [1], [float("nan")], [0])
    assert store.length == 0


def test_uncommitted_tokens_leave_no_trace_in_the_files(tmp_path):
    def run(path: Path, broken: bool) -> None:
        with open_run(path) as store:
            store.tokens.append([1, 2], [1, 1], [-0.5, -0.5], [0, 0])
            store.commit("a", rows={})
            if broken:
                store.tokens.append([7] * 3000, [1] * 3000, [-0.5] * 3000, [0] * 3000)
        with open_run(path) as store:
            assert store.tokens.length == 2
            assert store.tokens.append([3], [0], [0.0], [-1]) == 2
            store.commit("b", rows={})
            store.finish()

    run(tmp_path / "broken", True)
    run(tmp_path / "whole", False)
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")


def test_a_run_that_lost_its_tokens_is_not_begun_again_at_nought(tmp_path):
    with open_run(tmp_path / "run") as store:
        store.tokens.append([1, 2], [1, 1], [-0.5, -0.5], [0, 0])
        store.commit("a", rows={})
    (tmp_path / "run" / "tokens").rename(tmp_path / "tokens")
    with pytest.raises(RunError, match="tokens: missing, but the journal counts 2 tokens") as caught:
        open_run(tmp_path / "run")
    assert "restore" in caught.value.mend
    assert not (tmp_path / "run" / "tokens").exists()
    (tmp_path / "tokens").rename(tmp_path / "run" / "tokens")
    with open_run(tmp_path / "run") as store:
        assert store.tokens.length == 2


def test_token_arrays_that_are_missing_short_or_broken_are_errors_with_a_mend(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="does not exist") as caught:
        TokenStore(tmp_path / "empty", read_only=True)
    assert "restore" in caught.value.mend
    store = TokenStore(tmp_path / "tokens")
    store.append([1, 2], [1, 1], [-0.5, -0.5], [0, 0])
    with pytest.raises(RunError, match="counts 3 tokens, the arrays hold 2"):
        TokenStore(tmp_path / "tokens", length=3)
    (tmp_path / "tokens" / "mask" / "0").write_bytes(b"no chunk")
    with pytest.raises(RunError, match="cannot be read"):
        TokenStore(tmp_path / "tokens", read_only=True).read(0, 2)


def test_the_status_of_a_run_that_lost_a_row_file_names_it(tmp_path):
    with open_run(tmp_path) as store:
        commit(store, "a")
    for name in ("timings.jsonl", "rejected.jsonl", "trajectories.jsonl"):
        (tmp_path / name).unlink()
        with pytest.raises(RunError, match=rf"{name}: missing") as caught:
            run_status(tmp_path)
        assert "restore" in caught.value.mend


@pytest.mark.parametrize("line", ["[]", "{}", '{"offsets": [], "lines": {}}', "7"])
def test_a_journal_line_of_another_form_is_named(tmp_path, line):
    with open_run(tmp_path) as store:
        commit(store, "a")
    lines = len((tmp_path / "journal.jsonl").read_text().splitlines())
    with (tmp_path / "journal.jsonl").open("a") as journal:
        journal.write(line + "\n")
    for read in (lambda: run_status(tmp_path), lambda: open_run(tmp_path)):
        with pytest.raises(RunError, match=rf"journal\.jsonl: line {lines + 1} ") as caught:
            read()
        assert "restore" in caught.value.mend


def test_a_folder_that_cannot_be_written_is_an_error_with_a_mend(tmp_path, monkeypatch):
    for path in (Path("/proc/r"), tmp_path / ("x" * 300), Path("/dev/null/run")):
        with pytest.raises(RunError) as caught:
            open_run(path)
        assert "--out" in caught.value.mend
    with pytest.raises(RunError, match=r"run\.json"):
        open_run(tmp_path / "new", replay_from=tmp_path / ("x" * 300))

    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(RunError, match="Read-only file system"):
        open_run(tmp_path)
