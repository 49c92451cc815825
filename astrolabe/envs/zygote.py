"""The zygote: a small process that has loaded what tools may import, and forks one child per job.

Started by `sandbox.py` with no environment, it locks itself down (namespaces, landlock), says what it reached, then
serves jobs from its standard input. For each job it forks a child, which closes every descriptor but its reply pipe,
sets resource limits and the seccomp filter, and only then parses the job and runs the code. The zygote reads the
child's lines without looking into them, keeps the clocks, kills the child when a limit is passed, and frames what came
with a nonce that it reads after the fork, so that no child ever holds it. It ends when its input closes: nothing
outlives the parent. Standard library only.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import struct
import sys
import time
import warnings
from typing import Any

NONCE_BYTES = 16
PR_SET_PDEATHSIG = 1
_REPLY_FD = 3
# Run before anything is locked or forked: the interpreter rewrites its bytecode on the first runs, and pages that the
# zygote has written need no copy in each child.
_WARM_UP = 16
_WARM_JOB = json.dumps(
    {
        "code": "def f(n, *, data, state):\n    state['n'] = n\n    return {'n': n, 'data': data, 'list': [1.5, 'a']}\n",
        "function": "f",
        "calls": [{"n": 1}],
        "states": [{}],
        "chain": False,
        "data": "{}",
    }
).encode()


def read_exact(fd: int, count: int) -> bytes:
    """Exactly `count` bytes; exits the process when the parent has closed its end."""
    parts = []
    while count:
        part = os.read(fd, count)
        if not part:
            os._exit(0)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except BrokenPipeError:
        os._exit(0)


def cpu_seconds(pid: int) -> float | None:
    """CPU time of a running child, or None where the system has no such clock (or the child is gone)."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return time.clock_gettime((~pid << 3) | 2)  # CPUCLOCK_SCHED of that process
    except OSError:
        return None


class Zygote:
    def __init__(self, options: dict[str, Any]) -> None:
        sys.path.append(os.path.dirname(os.path.abspath(__file__)))
        self.child = importlib.import_module("sandbox_child")
        seccomp, self.landlock = importlib.import_module("seccomp"), importlib.import_module("landlock")
        self.namespaces = importlib.import_module("sandbox_namespaces")
        sys.path.pop()
        warnings.simplefilter("ignore")  # a tool's invalid escape must not send the compiler to read source files
        self.facades = self.child.preload()
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.linux = sys.platform.startswith("linux")
        self.filter = seccomp.Filter(self.libc) if self.linux else None
        self.use = set(options["layers"])
        self.inherited_namespaces = options["wrapped"]
        self.devnull = os.open(os.devnull, os.O_RDWR)
        for _ in range(_WARM_UP):
            self.child.serve(_WARM_JOB, self.devnull, self.facades)

    # Locking down

    def lock_down(self) -> dict[str, Any]:
        """Apply the layers that hold for the zygote too, then try a child, and say what is in force."""
        report: dict[str, Any] = {"namespaces": self.inherited_namespaces, "landlock": 0, "seccomp": False, "notes": []}
        if not self.linux:
            report["notes"].append(f"{sys.platform} has no seccomp, landlock or namespaces: resource limits only")
        elif "namespaces" in self.use and not self.inherited_namespaces:
            try:
                self.namespaces.enter(self.libc)
                report["namespaces"] = True
            except OSError as error:
                report["notes"].append(f"namespaces: {error.strerror or error}")
                return report | {"half_way": True}
            self._become_first_process()
        if self.linux and "landlock" in self.use:
            report["landlock"] = self.landlock.deny_all(self.libc)
            if not report["landlock"]:
                report["notes"].append("landlock: this kernel has none, or it is switched off")
        if self.linux and "seccomp" in self.use:
            report["seccomp"] = self._self_test()
            if not report["seccomp"]:
                report["notes"].append("seccomp: the filter could not be set, or a forbidden call went through")
        gc.collect()
        gc.freeze()
        return report

    def _become_first_process(self) -> None:
        """Fork into the PID namespace. The outer process only waits, and takes the inner one with it when it is killed."""
        inner = os.fork()
        if inner:
            for fd in (0, 1, self.devnull):
                os.close(fd)
            os.waitpid(inner, 0)
            os._exit(0)
        self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def _self_test(self) -> bool:
        """Whether a child under the filter is refused a file, a socket, a fork and a signal."""
        pid = os.fork()
        if pid == 0:
            os._exit(0 if self.filter is not None and self.filter.install() and self._refused() else 1)
        return os.waitpid(pid, 0)[1] == 0

    def _refused(self) -> bool:
        # Raw calls: what is tested is the kernel's answer. Sockets and signals by number differ per machine, so by libc.
        attempts = (
            lambda: self.libc.open(b"/dev/null", 0),
            lambda: self.libc.socket(2, 1, 0),
            lambda: self.libc.kill(os.getpid(), 0),
            lambda: os.fork(),
        )
        for attempt in attempts:
            try:
                if attempt() != -1:
                    return False
            except OSError:
                continue
        return True

    # Serving

    def serve(self) -> None:
        while True:
            header = json.loads(read_exact(0, struct.unpack("!I", read_exact(0, 4))[0]))
            job = read_exact(0, header["job_bytes"])
            limits = self._limits(header)
            read_end, write_end = os.pipe()
            pid = os.fork()
            if pid == 0:
                self._in_child(job, write_end, limits)
            os.close(write_end)
            nonce = read_exact(0, NONCE_BYTES)
            ending, lines, times = self._supervise(pid, read_end, header)
            os.close(read_end)
            sizes = [len(line) for line in lines]
            summary = json.dumps({"ending": ending, "sizes": sizes, "times": times[:-1], "last": times[-1]}).encode()
            write_all(1, nonce + struct.pack("!I", len(summary)) + summary + b"".join(lines))

    def _in_child(self, job: bytes, write_end: int, limits: list[tuple[int, int]]) -> None:
        try:
            for fd in (0, 1, 2):  # before the next line, which may overwrite devnull's own number
                os.dup2(self.devnull, fd)
            if write_end != _REPLY_FD:
                os.dup2(write_end, _REPLY_FD)
            os.closerange(_REPLY_FD + 1, 64)
            if self.linux:
                self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            self._set_limits(limits)
            if self.filter is not None and "seccomp" in self.use and not self.filter.install():
                os._exit(1)
            self.child.serve(job, _REPLY_FD, self.facades)
        finally:
            os._exit(0)

    @staticmethod
    def _limits(header: dict[str, Any]) -> list[tuple[int, int]]:
        cpu = int(header["cpu_s"] * header["calls"]) + 2  # the supervisor is exact; this holds if it cannot see
        memory = header["memory_bytes"]
        named = {"CPU": cpu, "AS": memory, "DATA": memory, "FSIZE": 0, "CORE": 0, "NPROC": 0, "NOFILE": 8}
        numbers = {name: getattr(resource, f"RLIMIT_{name}", None) for name in named}
        return [(number, named[name]) for name, number in numbers.items() if number is not None]

    def _set_limits(self, limits: list[tuple[int, int]]) -> None:
        for number, limit in limits:
            try:
                resource.setrlimit(number, (limit, limit))
            except (ValueError, OSError):
                if self.linux:  # macOS refuses some for a process that is already above them
                    raise

    def _supervise(self, pid: int, pipe: int, header: dict[str, Any]) -> tuple[str, list[bytes], list[list[float]]]:
        """Read the child's lines under the clocks: (how it ended, lines, [wall, cpu] seconds of each line and, last, of
        what came after them)."""
        wanted, cap, total_cap = header["calls"], header["line_bytes"], header["total_bytes"]
        lines: list[bytes] = []
        times: list[list[float]] = []
        pending = bytearray()
        total = 0
        wall_from, cpu_from = time.monotonic(), 0.0
        poller = select.poll()
        poller.register(pipe, select.POLLIN)
        poller.register(0, 0)  # hang-up only
        ending = ""
        while not ending:  # to the end of the pipe: an honest child ends itself after its last line
            cpu = cpu_seconds(pid)
            wall_left = header["wall_s"] - (time.monotonic() - wall_from)
            cpu_left = header["cpu_s"] - (cpu - cpu_from) if cpu is not None else wall_left
            if wall_left <= 0 or cpu_left <= 0:
                ending = "timeout"
                break
            for fd, _ in poller.poll(max(1.0, 1000 * min(wall_left, cpu_left))):
                if fd == 0:
                    os.kill(pid, signal.SIGKILL)
                    os._exit(0)
                part = os.read(pipe, 65536)
                if not part:
                    ending = "closed"
                    break
                total += len(part)
                pending += part
                while (end := pending.find(b"\n")) >= 0:
                    now, cpu = time.monotonic(), cpu_seconds(pid)
                    used = cpu - cpu_from if cpu is not None else 0.0
                    lines.append(bytes(pending[:end]))
                    times.append([now - wall_from, used])
                    wall_from, cpu_from = now, cpu_from + used
                    del pending[: end + 1]
                if len(pending) > cap or total > total_cap or any(len(line) > cap for line in lines[-1:]):
                    ending = "output_too_large"
        if lines and len(lines[-1]) > cap:
            lines.pop()
            times.pop()
        times.append([time.monotonic() - wall_from, (cpu_seconds(pid) or cpu_from) - cpu_from])
        ending = self._reap(pid, ending)
        if len(lines) > wanted or (len(lines) == wanted and (pending or ending != "exit")):
            # More than one line a call, or no end after the last: the tool has had a hand in the pipe.
            return "bad_reply", [], times[-1:]
        return "done" if len(lines) == wanted else ending, lines, times

    @staticmethod
    def _reap(pid: int, ending: str) -> str:
        """Kill what is left of the child and name the way it ended: `ending`, or for a closed pipe exit or signal:NAME."""
        status = None
        if ending == "closed":  # a dying child closes its pipe a moment before it can be waited for
            for _ in range(400):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    break
                status = None
                time.sleep(0.0005)
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if ending != "closed":
            return ending
        if status is not None and os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return "timeout" if number == signal.SIGXCPU else f"signal:{signal.Signals(number).name}"
        return "exit"


def main() -> None:
    zygote = Zygote(json.loads(sys.argv[1]))
    if "TZ" in os.environ:
        time.tzset()
    report = zygote.lock_down()
    os.environ.clear()
    text = json.dumps(report).encode()
    write_all(1, struct.pack("!I", len(text)) + text)
    if report.get("half_way"):
        os._exit(1)
    zygote.serve()


if __name__ == "__main__":
    main()
