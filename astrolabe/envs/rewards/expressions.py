"""Equality of mathematical expressions, decided by math-verify in a process that can be killed.

The worker is a fresh interpreter with an empty environment and a bound on its memory; it parses LaTeX only, so the
model's text never reaches `eval` or sympy's `parse_expr`. Its clock is ours: an answer such as 10^{10^{10}} ends with
the worker killed, not with a thread that never comes back (rl-pitfalls 43). A check that runs out of time is tried
once more in a new worker; twice out of time is the answer's own doing.
"""

from __future__ import annotations

import json
import re
import select
import subprocess
import sys
import threading
import time
from functools import lru_cache
from typing import IO, Literal

_WORKER = r"""
import json, resource, sys, logging
logging.disable(logging.CRITICAL)
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
sys.set_int_max_str_digits(10000)
from math_verify import LatexExtractionConfig, parse, verify
config = [LatexExtractionConfig()]
def read(text):
    return parse("$" + text + "$", extraction_config=config, fallback_mode="no_fallback", parsing_timeout=None)
print("ready", flush=True)
for line in sys.stdin:
    predicted, gold = json.loads(line)
    try:
        a, b = read(gold), read(predicted)
        result = "equal" if a and b and verify(a, b, timeout_seconds=None) else "different" if a and b else "unreadable"
    except MemoryError:
        result = "timeout"
    except Exception:
        result = "unreadable"
    print(result, flush=True)
"""

Comparison = Literal["equal", "different", "unreadable", "timeout", "failed"]


def to_latex(text: str) -> str:
    """Plain mathematical writing (`2*sqrt(3)`, `x**2`, `pi/2`) as LaTeX; LaTeX is left as it is."""
    text = text.strip().strip("$").strip()
    text = text.removeprefix("\\(").removesuffix("\\)").removeprefix("\\[").removesuffix("\\]")
    text = text.replace("−", "-").replace("√", "\\sqrt").replace("π", "\\pi ").replace("×", "\\times ")
    text = (
        text.replace("²", "^2").replace("³", "^3").replace("≤", "\\le ").replace("≥", "\\ge ").replace("∞", "\\infty ")
    )
    text = re.sub(r"(?<!\\)\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\sqrt\s*(\d+)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\\A-Za-z])(pi|sin|cos|tan|log|ln|exp)(?![A-Za-z])", r"\\\1 ", text)
    text = re.sub(r"\*\*\s*\(([^()]*)\)", r"^{\1}", text)
    text = re.sub(r"\*\*\s*(-?\w+)", r"^{\1}", text)
    return text.replace("*", " \\cdot ")


class ExpressionJudge:
    """One worker, started at the first question and again after each kill. Safe to call from threads."""

    def __init__(self, wall_s: float = 6.0, boot_s: float = 90.0) -> None:
        self._wall_s, self._boot_s = wall_s, boot_s
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[str] | None = None

    def compare(self, predicted: str, gold: str) -> Comparison:
        """equal, different or unreadable; `timeout` if it ran out of time twice, `failed` if only once (the verdict is
        then the machine's doing, and is left out)."""
        with self._lock:
            first = self._ask(predicted, gold)
            if first != "timeout":
                return first
            return "timeout" if self._ask(predicted, gold) == "timeout" else "failed"

    def close(self) -> None:
        """Kill the worker, if there is one."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait()
            for pipe in (self._worker.stdin, self._worker.stdout):
                if pipe is not None:
                    pipe.close()
            self._worker = None

    def _ask(self, predicted: str, gold: str) -> Comparison:
        worker = self._running()
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write(json.dumps([predicted, gold]) + "\n")
            worker.stdin.flush()
            line = _read_line(worker.stdout, self._wall_s)
        except (BrokenPipeError, TimeoutError):
            line = ""
        for name in ("equal", "different", "unreadable"):
            if line == name:
                return name  # type: ignore[return-value]
        self.close()  # out of time, out of memory, or dead: all of them ended this worker
        return "timeout"

    def _running(self) -> subprocess.Popen[str]:
        if self._worker is None:
            self._worker = subprocess.Popen(
                [sys.executable, "-I", "-c", _WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={},
            )
            assert self._worker.stdout is not None
            if _read_line(self._worker.stdout, self._boot_s) != "ready":
                self.close()
                raise RuntimeError("the expression verifier did not start: is math-verify installed?")
        return self._worker


def _read_line(pipe: IO[str], seconds: float) -> str:
    """One short line, or TimeoutError. The worker writes one word per question, so a ready pipe holds a whole line."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if select.select([pipe], [], [], left)[0]:
            return pipe.readline().strip()
    raise TimeoutError


@lru_cache(maxsize=1)
def expression_judge() -> ExpressionJudge:
    """The process-wide judge."""
    return ExpressionJudge()
