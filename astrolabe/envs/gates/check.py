"""`astrolabe env check`: gate every row of a file, in fresh processes that reopen it, and ship the ones that pass.

A row that passes is written as it stands in the file, with its certificate; nothing else of it changes, so its id
stays true. Reports come in the file's order, however many processes work.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from astrolabe.envs.gates.gate import gate_environment
from astrolabe.envs.gates.report import GateReport
from astrolabe.envs.sandbox import Sandbox
from astrolabe.records.durable import disk_guard
from astrolabe.records.environment import Environment
from astrolabe.records.errors import AstrolabeError, UsageError
from astrolabe.records.jsonl import read_lines

SOURCES = ("native", "astra-rl")
_FREE = "free some space, then run the same command again"


def check_environments(
    rows: Iterable[Environment | dict[str, Any]], sandbox: Sandbox, workers: int = 1
) -> Iterator[GateReport]:
    """Reports for rows at hand, in their order; up to `workers` rows at a time on threads that share the sandbox."""
    if workers <= 1:
        for row in rows:
            yield gate_environment(row, sandbox)
        return
    with ThreadPoolExecutor(workers) as pool:
        yield from _in_order((pool.submit(gate_environment, row, sandbox) for row in rows), 2 * workers)


def check_file(
    path: Path,
    out_dir: Path | None = None,
    json_lines: bool = False,
    source: str = "native",
    *,
    workers: int | None = None,
) -> int:
    """Gate FILE. Reports go to stdout; passing rows, with their certificates, to OUT/environments.jsonl.

    Returns 0 if all rows pass, 1 if some fail. UsageError (exit code 2) for a file that cannot be used.
    """
    if source not in SOURCES:
        raise UsageError(f"--from {source}: unknown form", f"one of {', '.join(SOURCES)}")
    path = Path(path)
    if out_dir is not None:
        _refuse_to_overwrite(Path(out_dir), path)
    with contextlib.ExitStack() as stack:
        if source == "astra-rl":
            from astrolabe.envs.astra_rl import convert_file  # only needed for foreign files

            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="astrolabe-"))
            path = convert_file(path, Path(folder) / "environments.jsonl")
        lines = _places(path)
        out = stack.enter_context(_Out(Path(out_dir))) if out_dir is not None else None
        count = workers or min(os.cpu_count() or 1, 1 + len(lines) // 4)
        progress = stack.enter_context(_progress())
        bar = progress.add_task("gates", total=len(lines))
        passed = 0
        for place, reply in zip(lines, gate_places(path, lines, count), strict=True):
            report, certificate = reply["report"], reply["certificate"]
            passed += report["verdict"] == "pass"
            if out is not None and certificate is not None:
                out.write(path, place, certificate)
            _print(report, json_lines)
            progress.advance(bar)
        if not json_lines:
            print(f"{passed} of {len(lines)} environments pass")
    return 0 if passed == len(lines) else 1


# Rows of a file, in processes of their own

Place = tuple[int, int, int]
"""(offset in bytes, length in bytes, line number) of a row in its file."""


def _places(path: Path) -> list[Place]:
    """Where the rows stand. UsageError for a file that is missing, unreadable, not UTF-8 or empty."""
    numbers = [number for number, _ in read_lines(path)]
    if not numbers:
        raise UsageError(f"{path} holds no rows", "give a JSONL file with one environment per line")
    wanted = set(numbers)
    places, offset = [], 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if number in wanted:
                places.append((offset, len(line), number))
            offset += len(line)
    return places


def gate_places(path: Path, places: list[Place], workers: int) -> Iterator[dict[str, Any]]:
    """The workers' replies, in the order of `places`."""
    idle: SimpleQueue[GateProcess] = SimpleQueue()
    started = [GateProcess() for _ in range(workers)]
    for worker in started:
        idle.put(worker)

    def gate(place: Place) -> dict[str, Any]:
        worker = idle.get()
        try:
            return worker.ask(path, place)
        finally:
            idle.put(worker)

    try:
        with ThreadPoolExecutor(workers) as pool:
            yield from _in_order((pool.submit(gate, place) for place in places), 2 * workers)
    finally:
        for worker in started:
            worker.close()


def _in_order(futures: Iterable[Future[Any]], ahead: int) -> Iterator[Any]:
    """Results in the order of submission, at most `ahead` of them waiting."""
    waiting: list[Future[Any]] = []
    for future in futures:
        waiting.append(future)
        if len(waiting) >= ahead:
            yield waiting.pop(0).result()
    for future in waiting:
        yield future.result()


class GateProcess:
    """One gating process (`worker.py`), used by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "astrolabe.envs.gates.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def ask(self, path: Path, place: Place) -> dict[str, Any]:
        request = {"path": str(path.resolve()), "offset": place[0], "length": place[1], "number": place[2]}
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except BrokenPipeError:
                line = ""
        if not line:
            code = self._process.wait()
            raise AstrolabeError(
                f"a gating process ended with code {code} at line {place[2]}",
                "its message is above; `astrolabe doctor`",
            )
        return json.loads(line)

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


# Out


def _refuse_to_overwrite(folder: Path, source: Path) -> None:
    """UsageError where the passing rows would take the place of a run's rows, or of the rows that are checked."""
    mend = "give an empty or a new folder to --out"
    if os.path.exists(folder / "run.json"):
        raise UsageError(f"--out {folder} holds a run, whose environments would be overwritten", mend)
    rows = folder / "environments.jsonl"
    if os.path.exists(source) and os.path.exists(rows) and rows.samefile(source):
        raise UsageError(f"--out {folder} holds the file that is checked", mend)


class _Out:
    """OUT/environments.jsonl, put in place as a whole when all rows were gated."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "environments.jsonl"
        self._temporary = folder / ".environments.jsonl.part"

    def __enter__(self) -> _Out:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._temporary, "w", encoding="utf-8", newline="\n")
        except OSError as error:
            raise UsageError(
                f"--out {self.path.parent}: {error.strerror}", "give a folder that can be written"
            ) from None
        return self

    def write(self, source: Path, place: Place, certificate: dict[str, Any]) -> None:
        with open(source, "rb") as file:
            file.seek(place[0])
            row = json.loads(file.read(place[1]))
        row["certificate"] = certificate
        with disk_guard(self.path, _FREE):
            self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            with disk_guard(self.path, _FREE) if kind is None else contextlib.suppress(OSError):
                self._file.close()
            if kind is None:
                self._temporary.replace(self.path)
        finally:
            self._temporary.unlink(missing_ok=True)


def _print(report: dict[str, Any], json_lines: bool) -> None:
    if json_lines:
        print(json.dumps(report, ensure_ascii=False), flush=True)
        return
    print(f"{report['verdict'].upper()}  {report['id'] or '-'}  {' '.join(report['reasons'])}".rstrip(), flush=True)
    for item in report["detail"]:
        place = " ".join(filter(None, (item["node"], item["tool"])))
        print(f"      {item['reason']}{f' ({place})' if place else ''}: {item['text']}", flush=True)


def _progress() -> Progress:
    """Rows done, rows per second and time left, on standard error if that is a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f}/s" if task.speed else "")
