"""The sandbox: model-written code in forked children of locked-down zygotes, judged from outside.

A call costs one fork of a small process that has no environment, no files, no network and a handful of system calls
(`zygote.py`). What a child sends back is text that the tool could have forged, so it is only ever taken for the tool's
own value: the parent parses it strictly, the zygote measures the clocks, and whoever asked compares values.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from astrolabe.envs.sandbox_reply import Execution, ending_of, read_lines
from astrolabe.envs.sandbox_zygote_client import JobReply, SandboxError, ZygoteClient, ZygoteKey, has_bubblewrap
from astrolabe.records.errors import UsageError

LEVELS = ("rlimits", "seccomp", "landlock", "full")
_LAYERS: dict[str, tuple[str, ...]] = {
    "rlimits": (),
    "seccomp": ("seccomp",),
    "landlock": ("seccomp", "landlock"),
    "full": ("seccomp", "landlock", "namespaces"),
}
_SPARE_ZYGOTES = 16  # kept for other hash seeds, time zones and locales, least recently used first out

__all__ = ["LEVELS", "Execution", "Sandbox", "SandboxError", "SandboxReport", "sandbox_level"]


@dataclass(frozen=True)
class SandboxReport:
    """What isolation this machine gives."""

    level: str
    namespaces: Literal["own", "bubblewrap", "none"]
    landlock: int
    """The landlock ABI in force, 0 for none."""
    seccomp: bool
    notes: list[str] = field(default_factory=list)


def _level(report: dict[str, Any]) -> str:
    if not report["seccomp"]:
        return "rlimits"
    if report["namespaces"]:
        return "full"
    return "landlock" if report["landlock"] else "seccomp"


@lru_cache(maxsize=len(LEVELS))
def sandbox_level(at_most: str = "full") -> SandboxReport:
    """Try what this machine allows, strongest first (once per process)."""
    notes: list[str] = []
    report: dict[str, Any] = {}
    wrapped = False
    for layers, wrapped in _attempts(at_most):
        try:
            zygote = ZygoteClient(ZygoteKey(), layers, bubblewrap=wrapped)
        except SandboxError as error:
            notes.append(f"{'bubblewrap' if wrapped else 'zygote'}: {error}")
            continue
        zygote.close()
        notes += zygote.report["notes"]
        if not zygote.report.get("half_way"):
            report = zygote.report
            break
    if not report:
        raise SandboxError("no zygote could be started: " + "; ".join(notes))
    namespaces: Literal["own", "bubblewrap", "none"] = "none"
    if report["namespaces"]:
        namespaces = "bubblewrap" if wrapped else "own"
    return SandboxReport(_level(report), namespaces, report["landlock"], report["seccomp"], notes)


def _attempts(at_most: str) -> list[tuple[tuple[str, ...], bool]]:
    layers = _LAYERS[at_most]
    if "namespaces" not in layers:
        return [(layers, False)]
    wrapped = [(layers, True)] if has_bubblewrap() else []
    return [(layers, False), *wrapped, (_LAYERS["landlock"], False)]


class Sandbox:
    """A pool of zygotes. Thread-safe; at most `workers` children run at a time.

    `level` is the least isolation that is accepted: `auto` takes the best of the machine, and on Linux nothing below
    `seccomp`. UsageError if the machine gives less. `at_most` leaves stronger layers off, for measuring.
    """

    def __init__(
        self,
        level: str = "auto",
        workers: int = 2,
        *,
        at_most: str = "full",
        memory_mb: int = 256,
        max_output: int = 1_000_000,
    ) -> None:
        if level not in ("auto", *LEVELS) or at_most not in LEVELS:
            raise UsageError(f"unknown sandbox level {level!r}", f"one of auto, {', '.join(LEVELS)}")
        self.report = sandbox_level(at_most)
        least = level if level != "auto" else ("seccomp" if sys.platform.startswith("linux") else "rlimits")
        if LEVELS.index(self.report.level) < LEVELS.index(least):
            why = "; ".join(self.report.notes) or "see `astrolabe doctor`"
            raise UsageError(
                f"the sandbox reaches level {self.report.level!r} here and {least!r} is required: {why}",
                f"configure a lower level only if the code is trusted ({', '.join(LEVELS)})",
            )
        self.workers = workers
        self._limits = {"memory_bytes": memory_mb << 20, "line_bytes": max_output, "total_bytes": 16 * max_output}
        usable = at_most if self.report.namespaces != "none" else min(at_most, "landlock", key=LEVELS.index)
        self._layers = _LAYERS[usable]
        self._slots = threading.BoundedSemaphore(workers)
        self._lock = threading.Lock()
        self._idle: OrderedDict[ZygoteKey, list[ZygoteClient]] = OrderedDict()
        self._live: set[ZygoteClient] = set()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")
        self._finalizer = weakref.finalize(self, _close_all, self._live, self._threads)

    def run(
        self,
        code: str,
        function: str,
        arguments: dict[str, Any],
        *,
        data: Any = None,
        state: Any = None,
        cpu_s: float = 2.0,
        wall_s: float = 5.0,
        hash_seed: int = 0,
        tz: str | None = None,
        locale: str | None = None,
    ) -> Execution:
        """Call `function` of `code` in a child of its own. `data` and `state` reach the tool if it takes them by keyword.

        Raises SandboxError if the sandbox itself fails twice.
        """
        key = ZygoteKey(hash_seed, tz, locale)
        return self._run_child(key, code, function, [arguments], data, [state], False, cpu_s, wall_s)[0]

    async def arun(self, code: str, function: str, arguments: dict[str, Any], **options: Any) -> Execution:
        """`run` on a thread of the pool."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: self.run(code, function, arguments, **options))

    def run_many(
        self,
        code: str,
        function: str,
        calls: Sequence[dict[str, Any]],
        *,
        same_process: bool = True,
        data: Any = None,
        state: Any = None,
        states: Sequence[Any] | None = None,
        chain: bool = False,
        cpu_s: float = 2.0,
        wall_s: float = 5.0,
        hash_seed: int = 0,
        tz: str | None = None,
        locale: str | None = None,
    ) -> list[Execution]:
        """One Execution per call, in order; limits hold per call.

        With `same_process` the code is loaded once and the calls follow each other in one child; a call that kills it
        gets its own failure and the rest go on in a new child. Every call starts from `state` (or its member of
        `states`); with `chain`, from the state that the call before it left.
        """
        key = ZygoteKey(hash_seed, tz, locale)
        before = list(states) if states is not None else [state] * len(calls)
        done: list[Execution] = []
        while len(done) < len(calls):
            start = len(done)
            if chain and done:
                before[start] = done[-1].state
            end = len(calls) if same_process else start + 1
            done += self._run_child(
                key, code, function, list(calls[start:end]), data, before[start:end], chain, cpu_s, wall_s
            )
        return done

    def close(self) -> None:
        """Kill every zygote. The sandbox cannot be used afterwards."""
        self._finalizer()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # One child

    def _run_child(
        self,
        key: ZygoteKey,
        code: str,
        function: str,
        calls: list[dict[str, Any]],
        data: Any,
        states: list[Any],
        chain: bool,
        cpu_s: float,
        wall_s: float,
    ) -> list[Execution]:
        """Executions of the calls that one child served, the last of which may be the one that ended it."""
        job = {"code": code, "function": function, "calls": calls, "states": states, "chain": chain}
        text = json.dumps(job | {"data": json.dumps(data, allow_nan=False)}, allow_nan=False).encode()
        limits = {**self._limits, "calls": len(calls), "cpu_s": cpu_s, "wall_s": wall_s}
        reply = self._submit(key, text, limits)
        done = read_lines(reply, states, chain)
        if done is None:
            forged = Execution("error", message="the reply is ill-formed", error_type="bad_reply")
            return [replace(forged, state=state) for state in states]
        if len(done) < len(calls):
            before = done[-1].state if chain and done else states[len(done)]
            ended = ending_of(reply.ending, before, cpu_s, wall_s)
            done.append(replace(ended, wall_s=reply.last[0], cpu_s=reply.last[1]))
        return done

    def _submit(self, key: ZygoteKey, job: bytes, limits: dict[str, Any]) -> JobReply:
        with self._slots:
            for last in (False, True):
                zygote = self._take(key)
                try:
                    reply = zygote.submit(job, limits)
                except SandboxError:
                    self._drop(zygote)
                    if last:
                        raise
                except BaseException:  # an interrupt between request and reply: the pipe holds half a job
                    self._drop(zygote)
                    raise
                else:
                    self._give_back(zygote)
                    return reply
        raise AssertionError("unreachable")

    def _take(self, key: ZygoteKey) -> ZygoteClient:
        if not self._finalizer.alive:
            raise SandboxError("the sandbox is closed")
        with self._lock:
            waiting = self._idle.get(key)
            if waiting:
                return waiting.pop()
        zygote = ZygoteClient(key, self._layers, bubblewrap=self.report.namespaces == "bubblewrap")
        if LEVELS.index(_level(zygote.report)) < LEVELS.index(self.report.level):
            zygote.close()
            raise SandboxError(f"a zygote came up below level {self.report.level}: {zygote.report['notes']}")
        self._live.add(zygote)
        return zygote

    def _give_back(self, zygote: ZygoteClient) -> None:
        surplus: list[ZygoteClient] = []
        with self._lock:
            self._idle.setdefault(zygote.key, []).append(zygote)
            self._idle.move_to_end(zygote.key)
            count = sum(map(len, self._idle.values()))
            while count > self.workers + _SPARE_ZYGOTES:
                oldest = next(key for key, idle in self._idle.items() if idle)
                surplus.append(self._idle[oldest].pop())
                count -= 1
            for key in [key for key, idle in self._idle.items() if not idle]:
                del self._idle[key]
        for old in surplus:
            self._drop(old)

    def _drop(self, zygote: ZygoteClient) -> None:
        self._live.discard(zygote)
        zygote.close()


def _close_all(live: set[ZygoteClient], threads: ThreadPoolExecutor) -> None:
    while live:
        live.pop().close()
    threads.shutdown(wait=False)
