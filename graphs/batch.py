"""Drives a data set through a graph: one invocation per item, bounded, committed in input order.

At most `concurrency` items are worked on at a time, and results that wait for an earlier item are bounded too. Each
result is committed to the run store when all before it are, so the files do not depend on who finished first.

What goes wrong with one item ends as a rejected row of that item. What would go wrong with every item (a full disk, a
server that is gone: any `AstrolabeError`) ends the run without committing the item, so that the same command goes on
from there. Ctrl-C and SIGTERM let the items under way finish and be committed; a second one stops at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from astrolabe.progress import track
from astrolabe.records.base import Usage
from astrolabe.records.errors import EXIT_DONE, EXIT_PARTIAL, AstrolabeError, ServerError
from astrolabe.records.funnel import FunnelEntry
from astrolabe.records.run_store import RunStore
from serving.chat import ModelFailure

T = TypeVar("T")
Rows = dict[str, list[dict[str, Any]]]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Item(Generic[T]):
    """One input of a run: `key` names it in journal, seeds and rejected rows, and is unique within the run."""

    key: str
    value: T


@dataclass(kw_only=True)
class Outcome:
    """What one item came to."""

    rows: Rows = field(default_factory=dict)
    """File stem -> accepted rows."""
    rejected: list[dict[str, Any]] = field(default_factory=list)
    funnel: list[FunnelEntry] = field(default_factory=list)
    timings: list[dict[str, Any]] = field(default_factory=list)
    """Rows with an `id`; the seconds of the whole item are added here."""
    usage: Usage = field(default_factory=Usage)
    """Model calls and tokens of the whole item, rejected parts too."""
    judge_audit: dict[str, Any] | None = None
    at_commit: Callable[[RunStore], Rows] | None = None
    """Called in input order just before the commit; its rows are added. Here token arrays are appended, whose place in
    the store is part of a row."""


@dataclass(frozen=True)
class BatchReport:
    """Where a batch stands at its end."""

    total: int
    done: int
    """Items committed, before and now."""
    rows: dict[str, int]
    """Rows written now, by file stem (`rejected` too)."""
    interrupted: bool

    @property
    def exit_code(self) -> int:
        """0 done, 3 partial (FORMATS)."""
        return EXIT_PARTIAL if self.interrupted else EXIT_DONE


def failed_outcome(key: str, error: Exception) -> Outcome:
    """The rejection of an item whose work raised: class infra, since no policy could have caused it.

    The detail names the error, not where it was raised: paths and addresses would differ between equal runs. The
    traceback goes to the log.
    """
    kind = "timeout" if isinstance(error, TimeoutError) else getattr(error, "kind", None)
    reason = f"infra_{kind}" if isinstance(kind, str) else "infra_error"
    row = {"item": key, "stage": "work", "reasons": [reason], "detail": f"{type(error).__name__}: {error}"[:500]}
    return Outcome(rejected=[{**row, "row": {}}], funnel=[("work", 1, 0, {reason: 1})])


class _Drain:
    """Set by the first Ctrl-C; the second one is left to Python, which raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = False

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def ask(number: signal.Signals) -> None:
            self.asked = True
            log.warning("stopping: items under way are finished first; once more to stop at once")
            loop.remove_signal_handler(number)

        numbers: list[signal.Signals] = []
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, ask, number)
                numbers.append(number)
        except (ValueError, RuntimeError):  # not the main thread, which alone gets signals
            pass
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


async def run_batch(
    items: Sequence[Item[T]],
    work: Callable[[Item[T]], Awaitable[Outcome]],
    store: RunStore,
    *,
    concurrency: int = 16,
    what: str = "items",
    progress: bool = True,
    deadline_s: float | None = None,
) -> BatchReport:
    """Works on every item that the run has not committed, and finishes the run if none is left.

    deadline_s: an item that takes longer is rejected with `infra_timeout`. Raises the first `AstrolabeError` of `work`
    or of the store, after the items before it were committed. ValueError if two items have one key.
    """
    if len({item.key for item in items}) < len(items):
        raise ValueError("two items of the batch have the same key")
    todo = [item for item in items if not store.is_done(item.key)]
    written: dict[str, int] = {}
    drain = _Drain()
    done = len(items) - len(todo)

    async def attempt(item: Item[T]) -> tuple[Outcome, float]:
        start = time.monotonic()
        try:
            async with asyncio.timeout(deadline_s):
                outcome = await work(item)
        except AstrolabeError:
            raise
        except Exception as error:
            if isinstance(error, ModelFailure) and error.kind == "unreachable":
                raise ServerError(
                    str(error), "start the server, then run the same command again: it goes on"
                ) from error
            log.exception("item %s", item.key)
            outcome = failed_outcome(item.key, error)
        return outcome, time.monotonic() - start

    def commit(item: Item[T], outcome: Outcome, seconds: float) -> None:
        rows: Rows = {stem: list(some) for stem, some in outcome.rows.items()}
        if outcome.at_commit is not None:
            for stem, some in outcome.at_commit(store).items():
                rows.setdefault(stem, []).extend(some)
        accepted = sum(map(len, rows.values()))
        store.commit(
            item.key,
            rows=rows,
            rejected=outcome.rejected,
            funnel=outcome.funnel,
            timings=[*outcome.timings, {"id": item.key, "seconds": round(seconds, 4)}],
            metrics=[
                {
                    "item": item.key,
                    "accepted": accepted,
                    "rejected": len(outcome.rejected),
                    "usage": outcome.usage.to_json(),
                }
            ],
            judge_audit=outcome.judge_audit,
        )
        for stem, some in {**rows, "rejected": outcome.rejected}.items():
            written[stem] = written.get(stem, 0) + len(some)

    tasks: dict[int, asyncio.Task[tuple[Outcome, float]]] = {}
    started = committed = 0
    with track(what, len(items), done=done, show=progress) as bar:
        async with drain.listening():
            try:
                while committed < len(todo):
                    running = [task for task in tasks.values() if not task.done()]
                    broken = any(task.done() and task.exception() for task in tasks.values())
                    room = min(concurrency - len(running), 8 * concurrency - (started - committed))
                    if not drain.asked and not broken:
                        for index in range(started, min(started + room, len(todo))):
                            tasks[index] = asyncio.create_task(attempt(todo[index]))
                            running.append(tasks[index])
                            started += 1
                    if not tasks:
                        break
                    if running:
                        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    while committed in tasks and tasks[committed].done():
                        commit(todo[committed], *tasks.pop(committed).result())
                        committed += 1
                        bar.advance(1, " · ".join(f"{stem} {n}" for stem, n in written.items()))
            finally:
                for task in tasks.values():
                    task.cancel()
                await asyncio.gather(*tasks.values(), return_exceptions=True)
    if committed == len(todo):
        store.finish()
    else:
        store.write_summaries()
    return BatchReport(len(items), done + committed, written, interrupted=committed < len(todo))
