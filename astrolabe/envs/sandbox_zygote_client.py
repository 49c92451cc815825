"""The parent's end of one zygote: starting it, sending a job, reading the framed reply under a deadline."""

from __future__ import annotations

import json
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ZYGOTE = Path(__file__).with_name("zygote.py")
_NONCE_BYTES = 16
START_DEADLINE_S = 60.0
_SLACK_S = 30.0


class SandboxError(RuntimeError):
    """The sandbox itself failed: no fault of the tool, so an infra failure for whoever called."""


@dataclass(frozen=True)
class ZygoteKey:
    """What is fixed when a zygote starts. `locale` is a name that the machine has, else C applies."""

    hash_seed: int = 0
    tz: str | None = None
    locale: str | None = None

    def environment(self) -> dict[str, str]:
        """The whole environment of the zygote. PYTHONHASHSEED has no other way in; nothing here is a secret."""
        chosen = {"PYTHONHASHSEED": str(self.hash_seed), "TZ": self.tz, "LC_ALL": self.locale}
        return {name: value for name, value in chosen.items() if value is not None}


@dataclass(frozen=True)
class JobReply:
    """`ending`: done, timeout, output_too_large, bad_reply, exit or signal:NAME; a line and [wall, cpu] seconds for
    each call served, and the seconds spent after the last of them."""

    ending: str
    lines: list[bytes]
    times: list[list[float]]
    last: list[float]


class ZygoteClient:
    """One zygote process. Not for use by two threads at a time."""

    def __init__(self, key: ZygoteKey, layers: tuple[str, ...], *, bubblewrap: bool = False) -> None:
        self.key = key
        options = json.dumps({"layers": list(layers), "wrapped": bubblewrap})
        # -S and -s: no site packages; -P: the script's folder does not come before the standard library. Not -I, which
        # would ignore PYTHONHASHSEED: the environment holds nothing else that Python reads.
        command = [sys.executable, "-s", "-S", "-P", "-B", str(_ZYGOTE), options]
        if bubblewrap:
            command = [*_bubblewrap(), *command]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=key.environment(),
            cwd="/",
            start_new_session=True,  # Ctrl-C is the parent's to handle
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        deadline = time.monotonic() + START_DEADLINE_S
        try:
            self.report: dict[str, Any] = json.loads(
                self._read(struct.unpack("!I", self._read(4, deadline))[0], deadline)
            )
        except SandboxError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The zygote's process id as the parent sees it."""
        return self._process.pid

    def _read(self, count: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._from], [], [], left)[0]:
                raise SandboxError("the zygote did not answer by its deadline")
            part = os.read(self._from, min(count - len(parts), 1 << 20))
            if not part:
                raise SandboxError(f"the zygote ended (exit status {self._process.poll()})")
            parts += part
        return bytes(parts)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._to, view) :]
        except (BrokenPipeError, ValueError):
            raise SandboxError("the zygote has ended") from None

    def submit(self, job: bytes, limits: dict[str, Any]) -> JobReply:
        """Run one job in a forked child. Raises SandboxError where the zygote fails; it must then be closed."""
        header = json.dumps({**limits, "job_bytes": len(job)}).encode()
        nonce = os.urandom(_NONCE_BYTES)
        self._write(struct.pack("!I", len(header)) + header + job + nonce)
        deadline = time.monotonic() + limits["wall_s"] * limits["calls"] + _SLACK_S
        if self._read(_NONCE_BYTES, deadline) != nonce:
            raise SandboxError("the zygote answered another job")
        summary = json.loads(self._read(struct.unpack("!I", self._read(4, deadline))[0], deadline))
        lines = [self._read(size, deadline) for size in summary["sizes"]]
        return JobReply(summary["ending"], lines, summary["times"], summary["last"])

    def close(self) -> None:
        """Kill the zygote and whatever it runs."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def has_bubblewrap() -> bool:
    return shutil.which("bwrap") is not None


def _bubblewrap() -> list[str]:
    """The wrapper for machines that let bubblewrap, but not us, make namespaces. Its own environment is empty too, since
    PID 1's can be read inside."""
    program = shutil.which("bwrap")
    assert program is not None
    binds = ["--ro-bind", "/", "/", "--dev", "/dev", "--tmpfs", "/proc"]
    return [program, "--unshare-all", "--new-session", "--cap-drop", "ALL", *binds]
