"""Progress of long work on stderr: a bar with rate and remaining time on a terminal, plain lines elsewhere.

Nothing is shown in the first two seconds. This file imports nothing of ours, so every part may use it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

QUIET_S = 2.0
LINE_EVERY_S = 10.0


class Progress(Protocol):
    def advance(self, n: int = 1, note: str = "") -> None:
        """`n` more are done; `note` stands behind the counts."""


class _Silent:
    def advance(self, n: int = 1, note: str = "") -> None:
        pass


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class _Lines:
    """One line each ten seconds, for logs."""

    def __init__(self, what: str, total: int | None, done: int) -> None:
        self.what, self.total, self.done, self.begun_with = what, total, done, done
        self.start = self.last = time.monotonic()
        self.note = ""
        self.spoke = False

    def advance(self, n: int = 1, note: str = "") -> None:
        self.done += n
        self.note = note or self.note
        now = time.monotonic()
        if now - self.last >= (LINE_EVERY_S if self.spoke else QUIET_S):
            self.say(now)

    def say(self, now: float) -> None:
        self.last, self.spoke = now, True
        rate = (self.done - self.begun_with) / max(now - self.start, 1e-9)
        parts = [f"{self.what}: {self.done}" + (f"/{self.total}" if self.total is not None else ""), f"{rate:.1f}/s"]
        if self.total is not None and rate > 0 and self.done < self.total:
            parts.append(f"{_clock((self.total - self.done) / rate)} left")
        if self.note:
            parts.append(self.note)
        print(" · ".join(parts), file=sys.stderr, flush=True)


class _Bar:
    """A rich bar, made once two seconds have passed."""

    def __init__(self, what: str, total: int | None, done: int) -> None:
        self.what, self.total, self.done, self.begun_with = what, total, done, done
        self.start = time.monotonic()
        self.note = ""
        self.rich: Any = None

    def advance(self, n: int = 1, note: str = "") -> None:
        self.done += n
        self.note = note or self.note
        now = time.monotonic()
        if self.rich is None:
            if now - self.start < QUIET_S:
                return
            self._show()
        rate = (self.done - self.begun_with) / max(now - self.start, 1e-9)
        self.rich.update(self.task, completed=self.done, rate=f"{rate:.1f}/s", note=self.note)

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self.rich = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
        )
        self.task = self.rich.add_task(self.what, total=self.total, rate="", note="")
        self.rich.start()


@contextmanager
def track(what: str, total: int | None = None, *, done: int = 0, show: bool = True) -> Iterator[Progress]:
    """Progress over `total` things (None: unknown), `done` of them finished before. `show=False` shows nothing.

    `TERM=dumb` and `NO_PROGRESS` choose plain lines on a terminal too.
    """
    if not show:
        yield _Silent()
        return
    fancy = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_PROGRESS")
    if not fancy:
        lines = _Lines(what, total, done)
        try:
            yield lines
        finally:
            if lines.spoke and lines.last < time.monotonic() - 0.5:
                lines.say(time.monotonic())
        return
    bar = _Bar(what, total, done)
    try:
        yield bar
    finally:
        if bar.rich is not None:
            bar.rich.stop()
