"""The sandbox holds by itself: no test here goes through the static rules, and every escape is tried with the real
`os`, `ctypes` and builtins, reached through `__subclasses__`."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from astrolabe.envs.sandbox import LEVELS, Execution, Sandbox, SandboxReport, sandbox_level
from astrolabe.envs.sandbox_reply import read_lines
from astrolabe.envs.sandbox_zygote_client import JobReply, ZygoteClient, ZygoteKey, has_bubblewrap
from astrolabe.envs.seccomp import program
from astrolabe.envs.static_rules import check_code
from astrolabe.records.errors import UsageError

LINUX = sys.platform.startswith("linux")
linux_only = pytest.mark.skipif(not LINUX, reason="needs Linux's seccomp")

# Climbs out of the namespace: `g` is the globals of `os`, `imp` the true importer.
CLIMB = """
def climb():
    for c in ().__class__.__base__.__subclasses__():
        if c.__name__ == "_wrap_close":
            return c.__init__.__globals__
g = climb()
imp = g["__builtins__"]["__import__"] if isinstance(g["__builtins__"], dict) else g["__builtins__"].__import__
"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(workers=2) as box:
        yield box


@pytest.fixture(scope="module", params=["seccomp", "landlock", "full"])
def layered(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """The sandbox at every level that holds escapes back, as far as this machine has them."""
    if not LINUX or sandbox_level(request.param).level != request.param:
        pytest.skip(f"this machine does not reach level {request.param}")
    with Sandbox(request.param, workers=1, at_most=request.param) as box:
        yield box


def attempt(box: Sandbox, body: str, **options: object) -> Execution:
    """Run `body` as the inside of a tool, outside its namespace."""
    code = CLIMB + "def tool():\n" + textwrap.indent(textwrap.dedent(body), "    ")
    return box.run(code, "tool", {}, **options)  # type: ignore[arg-type]


# What a call gives


def test_a_value_an_error_and_their_lines_come_back(sandbox: Sandbox) -> None:
    code = "import math\ndef f(a, b=2):\n    if a < 0:\n        raise ToolError('负数')\n    return {'v': (math.sqrt(a), b / a)}\n"
    assert sandbox.run(code, "f", {"a": 4}).value == {"v": [2.0, 0.5]}
    refused = sandbox.run(code, "f", {"a": -1})
    assert (refused.status, refused.message, refused.line) == ("tool_error", "负数", 4)
    broken = sandbox.run(code, "f", {"a": 0})
    assert (broken.status, broken.error_type, broken.line) == ("error", "ZeroDivisionError", 5)
    assert sandbox.run("def f(:\n", "f", {}).error_type == "SyntaxError"
    assert sandbox.run(code, "g", {}).error_type == "NameError"


@pytest.mark.parametrize(
    "value", ["float('nan')", "{1: 2}", "{1, 2}", "b'x'", "'\\ud800'", "object()", "10 ** 5000", "deep"]
)
def test_what_is_no_json_value_is_the_tools_error(sandbox: Sandbox, value: str) -> None:
    code = f"def f():\n    deep = []\n    for _ in range(500):\n        deep = [deep]\n    return {value}\n"
    assert sandbox.run(code, "f", {}).status == "error"


def test_data_cannot_be_changed_and_state_comes_back(sandbox: Sandbox) -> None:
    code = "def f(n, *, data, state):\n    data['seen'] = 1\n    state['total'] += n\n    return len(data)\n"
    data, state = {"k": 1}, {"total": 1}
    first, second = sandbox.run_many(code, "f", [{"n": 2}, {"n": 3}], data=data, state=state, chain=True)
    assert (first.value, second.value, second.state) == (2, 2, {"total": 6})
    assert (data, state) == ({"k": 1}, {"total": 1})
    assert [e.state["total"] for e in sandbox.run_many(code, "f", [{"n": 2}, {"n": 3}], data=data, state=state)] == [
        3,
        4,
    ]


def test_a_failed_call_leaves_the_state_as_it_was(sandbox: Sandbox) -> None:
    code = "def f(*, state):\n    state['n'] = 9\n    raise ToolError('no')\n"
    assert sandbox.run(code, "f", {}, state={"n": 1}).state == {"n": 1}
    hangs = "def f(*, state):\n    state['n'] = 9\n    while True: pass\n"
    assert sandbox.run(hangs, "f", {}, state={"n": 1}, cpu_s=0.1).state == {"n": 1}


def test_module_state_does_not_leak_between_calls(sandbox: Sandbox) -> None:
    code = "seen = []\ndef f():\n    seen.append(1)\n    return len(seen)\n"
    assert [sandbox.run(code, "f", {}).value for _ in range(6)] == [1] * 6
    assert [e.value for e in sandbox.run_many(code, "f", [{}] * 3)] == [1, 2, 3]  # the gate's question: one process
    assert [e.value for e in sandbox.run_many(code, "f", [{}] * 3, same_process=False)] == [1] * 3
    patch = "import math\ndef f():\n    before = math.pi\n    math.pi = 3\n    return before\n"
    assert {sandbox.run(patch, "f", {}).value for _ in range(4)} == {3.141592653589793}


def test_a_call_that_dies_does_not_take_the_others_with_it(sandbox: Sandbox) -> None:
    code = "def f(n):\n    while n == 1:\n        pass\n    return n\n"
    done = sandbox.run_many(code, "f", [{"n": n} for n in range(3)], cpu_s=0.2)
    assert [e.status for e in done] == ["ok", "timeout", "ok"]


def test_the_hash_seed_and_the_time_zone_are_the_callers(sandbox: Sandbox) -> None:
    code = "def f():\n    return hash('astrolabe')\n"
    by_seed = [sandbox.run(code, "f", {}, hash_seed=seed).value for seed in (0, 1, 7)]
    assert len(set(by_seed)) == 3
    assert sandbox.run(code, "f", {}, hash_seed=7).value == by_seed[2]
    local = "import datetime as d\ndef f():\n    return d.datetime(2020, 1, 1, tzinfo=d.UTC).astimezone().hour\n"
    assert sandbox.run(local, "f", {}, tz="UTC-9").value == 9
    assert sandbox.run(local, "f", {}, tz="UTC").value == 0


def test_every_permitted_module_works_behind_the_walls(sandbox: Sandbox) -> None:
    code = """
import math, statistics, decimal, fractions, datetime, re, json, itertools, functools, collections, string
import unicodedata, bisect, heapq
def f():
    Point = collections.namedtuple("Point", "x y")
    return [
        statistics.median([3, 1, 2]), str(decimal.Decimal("1.10") + 1), str(fractions.Fraction(2, 4)),
        datetime.datetime.strptime("2024-03-01", "%Y-%m-%d").strftime("%d %B"), re.sub(r"\\d", "#", "a1"),
        json.loads("[1]"), list(itertools.accumulate([1, 2])), functools.reduce(max, [1, 3]), Point(1, 2).x,
        string.Template("$a").substitute(a=1), unicodedata.name("é"), bisect.bisect([1, 3], 2), heapq.nsmallest(1, [2, 1]),
        len("中文".encode("gbk")), str(2 ** 4000)[:3], math.comb(5, 2), "{:,}".format(1234567),
    ]
"""
    done = sandbox.run(code, "f", {})
    assert done.status == "ok", done
    assert done.value[3] == "01 March"


@pytest.mark.parametrize(
    "module", ["os", "sys", "random", "time", "socket", "subprocess", "ctypes", "importlib", "collections.abc"]
)
def test_other_modules_are_not_there(sandbox: Sandbox, module: str) -> None:
    assert sandbox.run(f"def f():\n    import {module}\n    return 1\n", "f", {}).error_type == "ImportError"


def test_modules_inside_modules_and_dangerous_builtins_are_not_there(sandbox: Sandbox) -> None:
    assert (
        sandbox.run("import statistics\ndef f():\n    return statistics.random.random()", "f", {}).error_type
        == "AttributeError"
    )
    for name in ("eval", "exec", "compile", "open", "input", "getattr", "setattr", "vars", "globals", "breakpoint"):
        assert sandbox.run(f"def f():\n    return {name} is None", "f", {}).error_type == "NameError"


# Escapes, at every level that is meant to hold them


def test_no_file_can_be_written(layered: Sandbox, tmp_path: Path) -> None:
    target = tmp_path / "written"
    for path in (str(target), "/tmp/astrolabe_escape", "/dev/shm/astrolabe_escape"):
        done = attempt(
            layered, f"fd = g['open']({path!r}, g['O_WRONLY'] | g['O_CREAT'])\ng['write'](fd, b'x')\nreturn 1"
        )
        assert done.status == "error", done
        assert done.error_type in ("PermissionError", "FileNotFoundError", "OSError")
    assert not target.exists()
    assert not Path("/tmp/astrolabe_escape").exists()


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/proc/self/environ", "/proc/1/environ", "/proc/self/maps", "/dev/null", ".", "/"]
)
def test_nothing_outside_can_be_read(layered: Sandbox, path: str) -> None:
    done = attempt(layered, f"fd = g['open']({path!r}, g['O_RDONLY'])\nreturn g['read'](fd, 100).decode('latin-1')")
    assert done.status == "error", done
    assert attempt(layered, f"return g['listdir']({path!r})").status == "error"


def test_no_socket_can_be_made(layered: Sandbox) -> None:
    body = "libc = imp('ctypes').CDLL(None, use_errno=True)\nreturn [libc.socket(2, 1, 0), libc.socket(1, 1, 0)]"
    done = attempt(layered, body)
    assert done.status == "error" or done.value == [-1, -1], done


def test_a_fork_bomb_does_not_start(layered: Sandbox) -> None:
    done = attempt(layered, "while True:\n    g['fork']()")
    assert (done.status, done.error_type) == ("error", "PermissionError")
    assert attempt(layered, "t = imp('_thread')\nt.start_new_thread(print, ())\nreturn 1").status == "error"


def test_no_program_can_be_started(layered: Sandbox) -> None:
    assert attempt(layered, "g['execv']('/bin/sh', ['sh', '-c', 'true'])").status == "error"


def test_memory_is_bounded(layered: Sandbox) -> None:
    done = attempt(layered, "blocks = []\nwhile True:\n    blocks.append(bytearray(1 << 24))", cpu_s=5, wall_s=20)
    assert done.error_type in ("MemoryError", "SIGKILL", "SIGSEGV")


def test_an_endless_loop_ends_by_cpu_and_a_sleep_by_the_wall_clock(layered: Sandbox) -> None:
    done = attempt(layered, "while True:\n    pass", cpu_s=0.2, wall_s=30)
    assert done.status == "timeout"
    assert done.cpu_s < 5
    assert attempt(layered, "imp('time').sleep(100)", cpu_s=5, wall_s=0.3).status == "timeout"
    stubborn = "while True:\n    try:\n        while True: pass\n    except BaseException: pass"
    assert attempt(layered, stubborn, cpu_s=0.2, wall_s=30).status == "timeout"


def test_huge_output_has_a_kind_of_its_own(layered: Sandbox) -> None:
    assert attempt(layered, "return 'x' * 3_000_000").error_type == "output_too_large"
    flood = "while True:\n    g['write'](3, b'x' * 65536)"
    assert attempt(layered, flood, cpu_s=20, wall_s=20).error_type == "output_too_large"
    printed = attempt(layered, "g['write'](1, b'x' * 5_000_000)\nprint('x' * 5_000_000)\nreturn 1")
    assert printed.value == 1


def test_an_exit_and_a_crash_are_no_reply(layered: Sandbox) -> None:
    assert attempt(layered, "g['_exit'](0)").status == "killed"
    assert attempt(layered, "raise SystemExit(0)").error_type == "SystemExit"
    crash = attempt(layered, "imp('ctypes').string_at(0)")
    assert crash.status in ("killed", "error")
    assert layered.run("def f():\n    return 1\n", "f", {}).value == 1


def test_no_signal_reaches_the_parent(layered: Sandbox) -> None:
    for pid in (os.getpid(), "g['getppid']()", 1, -1, 0):
        done = attempt(layered, f"g['kill']({pid}, 9)\nreturn 'sent'")
        assert done.value != "sent", done
    assert layered.run("def f():\n    return 1\n", "f", {}).value == 1


def test_another_process_cannot_be_traced_or_read(layered: Sandbox) -> None:
    body = "libc = imp('ctypes').CDLL(None)\nreturn [libc.ptrace(16, 1, 0, 0), libc.prctl(4, 1, 0, 0, 0)]"
    done = attempt(layered, body)
    assert done.status == "error" or done.value == [-1, -1], done


def test_the_environment_is_empty(layered: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTROLABE_TEST_SECRET", "hunter2hunter2")
    with Sandbox(workers=1, at_most=layered.report.level) as box:
        seen = attempt(box, "libc = imp('ctypes').CDLL(None)\nreturn [dict(g['environ']), libc.getenv(b'PATH')]")
        assert seen.value in (None, [{}, 0])
        # The initial block of /proc/self/environ lies in the child's own memory: even there is no secret.
        zygote = next(iter(box._live))
        block = Path(f"/proc/{zygote.pid}/environ")
        assert b"hunter2" not in block.read_bytes()
        assert block.read_bytes().rstrip(b"\0") == b"PYTHONHASHSEED=0"


@linux_only
def test_a_subclasses_walk_is_refused_by_the_rules_and_contained_by_the_sandbox(sandbox: Sandbox) -> None:
    code = CLIMB + "def tool():\n    return g['open']('/etc/passwd', 0)\n"
    assert any("__subclasses__" in violation for violation in check_code(code, "tool"))
    assert sandbox.run(code, "tool", {}).status == "error"


# Forged replies


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b'{"status": "ok"}',
        b'{"status": "ok", "value": 1, "state": null, "wall_s": 0}',
        b'{"status": "timeout", "message": "", "error_type": "x", "line": null}',
        b'{"status": "ok", "value": NaN, "state": null}',
        b'{"status": "ok", "value": "\\ud800", "state": null}',
        b'{"status": "ok", "value": ' + b"[" * 5000 + b"]" * 5000 + b', "state": null}',
        b'{"status": "ok", "value": ' + b"[" * 300 + b"]" * 300 + b', "state": null}',
        b'{"status": "error", "message": 5, "error_type": "x", "line": null}',
        b"\xff\xfe",
        b"",
    ],
)
def test_an_ill_formed_reply_is_refused(sandbox: Sandbox, line: bytes) -> None:
    done = attempt(sandbox, f"g['write'](3, {line + bytes([10])!r})\ng['_exit'](0)")
    assert (done.status, done.error_type, done.value) == ("error", "bad_reply", None)
    assert read_lines(JobReply("done", [line], [[0.0, 0.0]], [0.0, 0.0]), [None], False) is None


def test_a_reply_with_anything_behind_it_is_refused(sandbox: Sandbox) -> None:
    line = json.dumps({"status": "ok", "value": "forged", "state": None}).encode() + b"\n"
    # The forged line is followed by the true one: two lines for one call.
    assert attempt(sandbox, f"g['write'](3, {line!r})\nreturn 'true'").error_type == "bad_reply"
    assert attempt(sandbox, f"g['write'](3, {line + line!r})\ng['_exit'](0)").error_type == "bad_reply"
    assert attempt(sandbox, f"g['write'](3, {line + b'x'!r})\ng['_exit'](0)").error_type == "bad_reply"


def test_a_forged_reply_wins_no_more_than_a_value_of_the_tools_own(sandbox: Sandbox) -> None:
    line = json.dumps({"status": "ok", "value": "forged", "state": None}).encode() + b"\n"
    done = attempt(sandbox, f"g['write'](3, {line!r})\ng['_exit'](0)")
    assert (done.status, done.value) == ("ok", "forged")  # as if it had returned it: whoever asked compares values
    # It cannot write into the zygote's own channel, nor see the nonce: every descriptor but its pipe is closed.
    fds = "out = []\nfor fd in range(64):\n    try:\n        g['write'](fd, b'')\n        out.append(fd)\n    except OSError: pass\nreturn out"
    assert attempt(sandbox, fds).value == [0, 1, 2, 3]
    # And the next call is untouched.
    assert sandbox.run("def f():\n    return 'honest'\n", "f", {}).value == "honest"


# The pool and the levels


def test_calls_from_many_threads_each_get_their_own_answer(sandbox: Sandbox) -> None:
    code = "def f(n):\n    return n * n\n"
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        values = list(pool.map(lambda n: sandbox.run(code, "f", {"n": n}).value, range(60)))
    assert values == [n * n for n in range(60)]


async def test_the_asynchronous_call_gives_the_same(sandbox: Sandbox) -> None:
    assert (await sandbox.arun("def f(n):\n    return n + 1\n", "f", {"n": 1})).value == 2


def test_a_dead_zygote_is_replaced() -> None:
    with Sandbox(workers=1) as box:
        assert box.run("def f():\n    return 1\n", "f", {}).value == 1
        os.kill(next(iter(box._live)).pid, signal.SIGKILL)
        assert box.run("def f():\n    return 2\n", "f", {}).value == 2


def test_idle_zygotes_are_bounded() -> None:
    with Sandbox(workers=1) as box:
        for seed in range(22):
            assert box.run("def f():\n    return 1\n", "f", {}, hash_seed=seed).status == "ok"
        assert len(box._live) <= 17


def test_code_is_refused_below_the_configured_level() -> None:
    with pytest.raises(UsageError, match="is required"):
        Sandbox("full", at_most="rlimits")
    with pytest.raises(UsageError, match="unknown sandbox level"):
        Sandbox("strong")
    if LINUX:
        with pytest.raises(UsageError, match="is required"):
            Sandbox("auto", at_most="rlimits")


def test_resource_limits_alone_work_and_say_what_they_are() -> None:
    with Sandbox("rlimits", workers=1, at_most="rlimits") as box:
        assert box.report.level == "rlimits"
        assert box.run("def f():\n    return 1\n", "f", {}).value == 1
        assert box.run("def f():\n    while True: pass\n", "f", {}, cpu_s=0.2).status == "timeout"


def test_the_report_names_the_level() -> None:
    report = sandbox_level()
    assert isinstance(report, SandboxReport)
    assert report.level in LEVELS


def test_the_filter_has_a_table_for_both_architectures() -> None:
    for machine, count in (("x86_64", 37), ("aarch64", 36)):
        code = program(machine)
        assert code is not None
        assert len(code) % 8 == 0
        assert abs(len(code) // 8 - count) < 8
    assert program("sparc") is None


@pytest.mark.skipif(not LINUX, reason="reads /proc")
@pytest.mark.parametrize("at_most", ["landlock", "full"])
def test_nothing_outlives_a_killed_parent(at_most: str) -> None:
    script = (
        "import sys\nfrom astrolabe.envs.sandbox import Sandbox\n"
        f"box = Sandbox('seccomp', workers=1, at_most={at_most!r})\n"
        "box.run('def f(): return 1', 'f', {})\nprint(next(iter(box._live)).pid, flush=True)\n"
        "box.run('def f():\\n    while True: pass', 'f', {}, cpu_s=600, wall_s=600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    zygote = int(parent.stdout.readline())
    session = _session_members(zygote)
    for _ in range(200):  # until the endless child is there
        session = _session_members(zygote)
        if len(session) >= (3 if at_most == "full" else 2):
            break
        time.sleep(0.05)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    for _ in range(200):
        if not _session_members(zygote):
            break
        time.sleep(0.05)
    assert len(session) >= 2
    assert _session_members(zygote) == []


def _session_members(session: int) -> list[int]:
    """Live processes of a session (each zygote leads one)."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                members.append(int(entry.name))
    return members


@pytest.mark.skipif(not has_bubblewrap(), reason="bubblewrap is not installed")
def test_bubblewrap_gives_the_same_walls() -> None:
    zygote = ZygoteClient(ZygoteKey(), ("seccomp", "landlock", "namespaces"), bubblewrap=True)
    try:
        assert zygote.report["namespaces"]
        assert zygote.report["seccomp"]
        code = CLIMB + "def tool():\n    return g['listdir']('/etc')\n"
        job = {"code": code, "function": "tool", "calls": [{}], "states": [None], "chain": False, "data": "null"}
        limits = {
            "calls": 1,
            "cpu_s": 2,
            "wall_s": 20,
            "memory_bytes": 1 << 28,
            "line_bytes": 9999,
            "total_bytes": 9999,
        }
        reply = zygote.submit(json.dumps(job).encode(), limits)
        assert reply.ending == "done"
        assert json.loads(reply.lines[0])["status"] == "error"
    finally:
        zygote.close()
