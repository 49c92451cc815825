"""The gates on a finished row, as they will be met by whoever reads the file: the row is serialised, and a process of
its own that has seen nothing else of it reopens the file and gates what it finds there.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from astrolabe.envs.gates.check import GateProcess
from astrolabe.records.environment import Certificate, Environment


@dataclass(frozen=True)
class GateVerdict:
    """The gates' word on one row."""

    reasons: list[str]
    detail: list[dict[str, Any]]
    """`{"reason","node","tool","text"}` per finding."""
    certificate: Certificate | None

    @property
    def passed(self) -> bool:
        return self.certificate is not None and not self.reasons

    def text(self) -> str:
        return "; ".join(f"{d['reason']} ({d['tool'] or d['node'] or '-'}): {d['text']}" for d in self.detail)


class GatePool:
    """A few gating processes, started when the first row comes. Close it, or use it as a context manager."""

    def __init__(self, workers: int) -> None:
        self._lock = threading.Lock()
        self._missing = workers
        self._idle: SimpleQueue[GateProcess] = SimpleQueue()
        self._started: list[GateProcess] = []
        self._slots = threading.BoundedSemaphore(workers)

    def __enter__(self) -> GatePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self) -> GateProcess:
        with self._lock:
            if self._missing and self._idle.empty():
                self._missing -= 1
                self._started.append(GateProcess())
                return self._started[-1]
        return self._idle.get()

    def check(self, environment: Environment) -> GateVerdict:
        """Write the row to a file of its own, and have it reopened and gated. AstrolabeError if a process dies."""
        line = (environment.to_line() + "\n").encode()
        with self._slots, tempfile.TemporaryDirectory(prefix="astrolabe-") as folder:
            path = Path(folder) / "environments.jsonl"
            path.write_bytes(line)
            process = self._take()
            try:
                reply = process.ask(path, (0, len(line), 1))
            finally:
                self._idle.put(process)
        report, certificate = reply["report"], reply["certificate"]
        return GateVerdict(
            report["reasons"],
            report["detail"],
            None if certificate is None else Certificate.model_validate(certificate),
        )

    async def acheck(self, environment: Environment) -> GateVerdict:
        """The same without blocking the loop."""
        return await asyncio.to_thread(self.check, environment)

    def close(self) -> None:
        """Ends the processes; none may be at work."""
        for process in self._started:
            process.close()
        self._started.clear()
