"""A run folder: append-only, one writer, and the same files whether or not it was killed on the way.

Every input item is committed at once and in input order: its rows are appended to their files and synced, then one
line goes to `journal.jsonl` with the byte lengths of all files. The journal is what counts. Opening a run cuts every
file back to the last whole journal line, so a kill loses the items under way and doubles none. Files that hold
measured times (`timings.jsonl`, `metrics.jsonl`) are counted in lines, since their bytes differ from run to run.
"""

from __future__ import annotations

import fcntl
import json
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from astrolabe.records.durable import append, disk_guard, remove_temporary, write_atomic
from astrolabe.records.errors import RunError
from astrolabe.records.funnel import FunnelEntry, add_audit, audit_of, funnel_of
from astrolabe.records.reply_store import ReplyStore
from astrolabe.records.versions import code_commit, versions

if TYPE_CHECKING:
    from astrolabe.records.token_store import TokenStore

SCHEMA = "astrolabe.run/1"
RESTORE = "restore the file, or begin a new run"
_COUNTED = ("timings", "metrics")
_open_locks: weakref.WeakSet[_Lock] = weakref.WeakSet()


class _Lock:
    """flock on `run.lock`, given up with the process however it ends."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.fd)
            raise RunError(
                f"{path.parent}: another process is writing this run", "wait for it to end, or give another --out"
            ) from None
        _open_locks.add(self)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _drop_locks_in_child() -> None:
    """A forked worker that outlived a killed parent would otherwise keep the run locked."""
    for lock in list(_open_locks):
        lock.close()


os.register_at_fork(after_in_child=_drop_locks_in_child)


def _lines(rows: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode()


def _pretty(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1) + "\n").encode()


def read_journal(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a run's journal, and the bytes that they take; a torn last line is left out. RunError names a
    whole line of another form."""
    entries: list[dict[str, Any]] = []
    length = 0
    try:
        data = (path / "journal.jsonl").read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return [], 0
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        try:
            entry = json.loads(line)
        except ValueError:  # torn by a power cut: what follows was never committed
            break
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), dict) for key in ("offsets", "lines")):
            raise RunError(f"{path}/journal.jsonl: line {number} is no journal line", RESTORE)
        entries.append(entry)
        length += len(line)
    return entries, length


def read_run(path: Path) -> dict[str, Any]:
    """`run.json` of a run folder. RunError if there is none or it is no run's."""
    try:
        run = json.loads((path / "run.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{path}: no run here (run.json is missing)", "give the folder of a run") from None
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path}/run.json: not JSON: {error}", RESTORE) from None
    except OSError as error:
        raise RunError(f"{path}/run.json: {error.strerror}", "check the path and its permissions") from None
    if not isinstance(run, dict) or run.get("schema") != SCHEMA:
        raise RunError(f"{path}/run.json: not of schema {SCHEMA}", "give the folder of a run of this version")
    return run


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """An OSError of a folder that cannot be made, read or written, as a RunError."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise RunError(f"{error.filename or path}: not a folder", "give another --out") from None
    except OSError as error:
        raise RunError(
            f"{path}: no run can be written there: {error.strerror}", "give another --out, or mend its permissions"
        ) from error


def is_locked(path: Path) -> bool:
    """Whether a process is writing the run now."""
    try:
        fd = os.open(path / "run.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # no lock file, or one that we may not open: nobody of ours writes there
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """`name: old -> new` for each leaf in which two JSON values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for key in sorted({*old, *new})
            for line in differences(old.get(key), new.get(key), f"{where}.{key}" if where else key)
        ]
    return [] if old == new else [f"{where}: {json.dumps(old)} -> {json.dumps(new)}"]


class RunStore:
    """An open run folder; use `RunStore.open`, and close it (or use it in a `with`)."""

    def __init__(self, path: Path, lock: _Lock, replay_from: Path | None, files: Sequence[str]) -> None:
        self.path = path
        self._lock = lock
        self._tokens: TokenStore | None = None
        remove_temporary(path)
        for folder in ("logs", "replies"):
            (path / folder).mkdir(exist_ok=True)
        self.replies = ReplyStore(path / "replies", replay_from, replay_only=replay_from is not None)
        self.entries, self._journal_bytes = read_journal(path)
        self._done = {entry["item"] for entry in self.entries if "item" in entry}
        self._offsets: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._restore(files)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        verb: str,
        config: dict[str, Any],
        seed: int,
        prompts: dict[str, str] | None = None,
        inputs: dict[str, str] | None = None,
        files: Sequence[str] = (),
        replay_from: Path | None = None,
    ) -> Self:
        """A new run folder, or an old one to be continued.

        verb, config (JSON), seed, prompts (role -> hash) and inputs (name -> hash of content) say which run this is;
        they must hold no clock value and no path. files: stems of row files that exist even if they stay empty.
        replay_from: a run whose stored replies are used, and no others.
        Raises RunError if another process writes it, if the folder cannot be written, or if it holds a run that differs,
        naming the difference.
        """
        identity = {
            "schema": SCHEMA,
            "verb": verb,
            "inputs": inputs or {},
            "seeds": {"run": seed},
            "config": config,
            "prompts": prompts or {},
        }
        if replay_from is not None and replay_from.resolve() != path.resolve():
            read_run(replay_from)  # a missing folder is told before one is made
        with _opening(path):
            path.mkdir(parents=True, exist_ok=True)
            if not (path / "run.json").exists() and any(p.suffix == ".jsonl" for p in path.iterdir()):
                raise RunError(f"{path}: holds files but no run.json", "give an empty or a new folder to --out")
            lock = _Lock(path / "run.lock")
            try:
                cls._begin(path, identity)
                return cls(path, lock, replay_from, files)
            except BaseException:
                lock.close()
                raise

    @staticmethod
    def _begin(path: Path, identity: dict[str, Any]) -> None:
        """Writes `run.json`, or finds in it the run that is asked for."""
        if not (path / "run.json").exists():
            write_atomic(path / "run.json", _pretty({**identity, "commit": code_commit(), "versions": versions()}))
            return
        old = read_run(path)
        new = json.loads(json.dumps(identity))  # tuples as lists, as the file has them
        unlike = [line for key in identity for line in differences(old.get(key), new[key], key)]
        if unlike:
            raise RunError(
                f"{path}: holds another run; it differs in {'; '.join(unlike[:5])}",
                "give the options of that run to continue it, or another --out",
            )

    def _restore(self, files: Sequence[str]) -> None:
        """Cuts every file back to the last journal line."""
        last = self.entries[-1] if self.entries else None
        self._offsets = dict(last["offsets"]) if last else {}
        self._counts = dict(last["lines"]) if last else {}
        with disk_guard(self.path):
            if (self.path / "journal.jsonl").exists():
                os.truncate(self.path / "journal.jsonl", self._journal_bytes)
            for stem in {*self._offsets, *files, "rejected"}:
                file = self.path / f"{stem}.jsonl"
                size, wanted = file.stat().st_size if file.exists() else 0, self._offsets.get(stem, 0)
                if size < wanted:
                    raise RunError(f"{file}: shorter than the journal says", RESTORE)
                file.touch()
                os.truncate(file, wanted)
            for stem in _COUNTED:
                file, count = self.path / f"{stem}.jsonl", self._counts.get(stem, 0) if last else None
                self._counts[stem], self._sizes[stem] = self._cut_lines(file, count)
        counted = last["tokens"] if last else 0
        if (self.path / "tokens").exists():
            self._tokens = self._open_tokens(counted)
        elif counted:
            raise RunError(
                f"{self.path}/tokens: missing, but the journal counts {counted} tokens",
                "restore the folder, or begin a new run",
            )

    def _open_tokens(self, length: int) -> TokenStore:
        from astrolabe.records.token_store import TokenStore  # most runs have none: tensorstore is slow to import

        return TokenStore(self.path / "tokens", length=length)

    @staticmethod
    def _cut_lines(file: Path, count: int | None) -> tuple[int, int]:
        """Keeps the first `count` lines, or (None) all whole ones: a run without commits keeps its metrics. Returns the
        lines and bytes that are kept."""
        file.touch()
        lines = file.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith(b"\n")][:count]
        os.truncate(file, size := sum(map(len, kept)))
        return len(kept), size

    @property
    def tokens(self) -> TokenStore:
        """The run's token store, made on first use. Append only just before the commit of the item it belongs to."""
        if self._tokens is None:
            self._tokens = self._open_tokens(0)
        return self._tokens

    def is_done(self, item: str) -> bool:
        """Whether the item has been committed."""
        return item in self._done

    @property
    def finished(self) -> bool:
        """Whether `finish` was called and nothing was committed since."""
        return bool(self.entries) and bool(self.entries[-1].get("finished"))

    def commit(
        self,
        item: str,
        *,
        rows: dict[str, list[dict[str, Any]]],
        rejected: Sequence[dict[str, Any]] = (),
        funnel: Sequence[FunnelEntry] = (),
        timings: Sequence[dict[str, Any]] = (),
        metrics: Sequence[dict[str, Any]] = (),
        judge_audit: dict[str, Any] | None = None,
    ) -> None:
        """Commits one input item, whole or not at all; call it in input order.

        rows: file stem -> rows. rejected: rows of `rejected.jsonl`. funnel: (stage, in, out, {reason: n}) of this item.
        timings: rows with an `id` and seconds. judge_audit: numbers that are added up over items.
        RunError if the disk is full: nothing of the item is then kept. ValueError if it was committed before.
        """
        if item in self._done:
            raise ValueError(f"item {item!r} is committed already")
        checked = [
            {key: row.get(key, default) for key, default in _REJECTED.items()} for row in rejected if _known(row)
        ]
        self._append_entry(
            {"item": item, "funnel": [list(entry) for entry in funnel], "audit": judge_audit or {}},
            rows={**rows, "rejected": checked},
            counted={"timings": timings, "metrics": metrics},
        )
        self._done.add(item)

    def _append_entry(
        self,
        entry: dict[str, Any],
        *,
        rows: dict[str, list[dict[str, Any]]],
        counted: dict[str, Sequence[dict[str, Any]]],
    ) -> None:
        offsets, counts, sizes = dict(self._offsets), dict(self._counts), dict(self._sizes)
        try:
            for stem, wanted in rows.items():
                if data := _lines(wanted):
                    start = self._offsets.get(stem, 0)
                    append(self.path / f"{stem}.jsonl", data, at=start)
                    offsets[stem] = start + len(data)
            for stem, measured in counted.items():
                if data := _lines(measured):
                    append(self.path / f"{stem}.jsonl", data, at=self._sizes[stem])
                    sizes[stem] += len(data)
                counts[stem] = counts.get(stem, 0) + len(measured)
            entry |= {
                "offsets": dict(offsets),
                "lines": dict(counts),
                "tokens": self._tokens.length if self._tokens else 0,
            }
            line = _lines([entry])
            append(self.path / "journal.jsonl", line, at=self._journal_bytes)
        except BaseException:
            for stem, size in [*((s, self._offsets.get(s, 0)) for s in rows), *self._sizes.items()]:
                file = self.path / f"{stem}.jsonl"
                if file.exists():
                    os.truncate(file, size)
            if self._tokens is not None:
                self._tokens.truncate(self.entries[-1]["tokens"] if self.entries else 0)
            raise
        self._journal_bytes += len(line)
        self._offsets, self._counts, self._sizes = offsets, counts, sizes
        self.entries.append(entry)

    def log_metrics(self, row: dict[str, Any]) -> None:
        """Appends one row to `metrics.jsonl`. It stands once the next item is committed, or `finish` called; a run
        without commits keeps all its rows."""
        data = _lines([row])
        append(self.path / "metrics.jsonl", data, at=self._sizes["metrics"])
        self._sizes["metrics"] += len(data)
        self._counts["metrics"] = self._counts.get("metrics", 0) + 1

    def rewind(self, item: str | None) -> None:
        """Forgets everything after the commit of `item` (None: everything): for a trainer that resumes from a
        checkpoint older than its last commit. ValueError if the item was never committed."""
        keep = 0
        if item is not None:
            if item not in self._done:
                raise ValueError(f"item {item!r} was never committed")
            keep = 1 + next(i for i, entry in enumerate(self.entries) if entry.get("item") == item)
        self._journal_bytes = sum(len(_lines([entry])) for entry in self.entries[:keep])
        stems = {stem for entry in self.entries for stem in entry["offsets"]}
        self.entries = self.entries[:keep]
        self._done = {entry["item"] for entry in self.entries if "item" in entry}
        if not self.entries:  # without a journal line _restore would keep all metrics
            self._cut_lines(self.path / "metrics.jsonl", 0)
        self._tokens = None
        self._restore(sorted(stems))

    def write_summaries(self) -> None:
        """Writes `funnel.json` and `judge_audit.json` of what is committed so far."""
        write_atomic(self.path / "funnel.json", _pretty(self.funnel()))
        audit: dict[str, Any] = {}
        for entry in self.entries:
            add_audit(audit, entry.get("audit", {}))
        write_atomic(self.path / "judge_audit.json", _pretty(audit_of(audit)))

    def funnel(self) -> list[dict[str, Any]]:
        """The funnel of what is committed so far, as `funnel.json` holds it."""
        return funnel_of([entry["funnel"] for entry in self.entries if "funnel" in entry])

    def finish(self) -> None:
        """Writes the summaries and marks the run as finished. Calling it again changes nothing."""
        self.write_summaries()
        if not self.finished:
            self._append_entry({"finished": True}, rows={}, counted={})

    def close(self) -> None:
        """Gives up the lock."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_REJECTED: dict[str, Any] = {"item": None, "stage": None, "reasons": [], "detail": "", "row": {}}


def _known(row: dict[str, Any]) -> bool:
    """FORMATS fixes the five fields of a rejected row, and a row without a reason says nothing."""
    if not row.keys() <= _REJECTED.keys() or not row.get("reasons") or not row.get("stage"):
        raise ValueError(f"a rejected row holds item, stage, reasons, detail, row; not {sorted(row)}")
    return True
