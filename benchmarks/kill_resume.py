"""kill -9 at random moments of a real synthesis run, each followed by the same command: the end must be the files of an
unbroken run, and no process may be left over.

    python benchmarks/kill_resume.py --kills 20 -- synth trajectories --servers cards.jsonl --limit 20

Files are compared byte for byte, but for logs and the seconds in `timings.jsonl`. Orphans are seen by being their
reaper: whatever outlives a killed process becomes a child of this one (Linux).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 5.0


def adopt_orphans(on: bool = True) -> None:
    """Makes this process the parent of its descendants' orphans."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def children() -> set[int]:
    """Living child processes of this one; ended ones among them are reaped only if they were adopted."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[1]) == os.getpid():
            pid = int(entry.parent.name)
            if fields[0] == "Z":
                os.waitpid(pid, os.WNOHANG)
            else:
                found.add(pid)
    return found


def orphans_after(before: set[int]) -> set[int]:
    """Children that are still there after a grace period and were not before."""
    deadline = time.monotonic() + GRACE_S
    while (left := children() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def command(arguments: Sequence[str], out: Path) -> list[str]:
    return [sys.executable, "-m", "astrolabe.cli.main", *arguments, "--out", str(out)]


def launch(arguments: Sequence[str], out: Path) -> subprocess.Popen[bytes]:
    """Starts the command; a commit made meanwhile would be in the provenance of the later rows, so one is given."""
    environment = {**os.environ, "ASTROLABE_COMMIT": "0" * 40}
    return subprocess.Popen(
        command(arguments, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )


def contents(run: Path) -> dict[str, bytes]:
    """The files that must be equal: all but logs, and timings without their seconds."""
    found: dict[str, bytes] = {}
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run)
        if not path.is_file() or name.parts[0] in ("logs", "run.lock"):
            continue
        found[str(name)] = path.read_bytes()
    timings = [json.loads(line) for line in found.pop("timings.jsonl", b"").split(b"\n") if line]
    found["timings.jsonl, ids"] = json.dumps([row["id"] for row in timings]).encode()
    return found


def unlike(one: dict[str, bytes], two: dict[str, bytes]) -> list[str]:
    """Names of files that differ or are only on one side."""
    return [name for name in sorted({*one, *two}) if one.get(name) != two.get(name)]


def kill_and_resume(
    arguments: Sequence[str], folder: Path, *, kills: int, seed: int, say: bool = True
) -> tuple[int, list[str]]:
    """(kills done, faults). Runs that finish before their kill are compared, and a new one is begun.

    A kill comes at a uniform moment of the time that the unbroken run took, shortened so that a run meets several.
    """
    rng = random.Random(seed)
    adopt_orphans()
    begun = time.monotonic()
    code = launch(arguments, folder / "whole").wait()
    took = time.monotonic() - begun
    if code not in (0, 3):
        return 0, [f"the unbroken run ended with {code}"]
    wanted = contents(folder / "whole")
    faults: list[str] = []
    done = rounds = 0
    while done < kills or rounds == 0:
        rounds += 1
        out = folder / f"killed-{rounds}"
        while True:
            before = children()
            process = launch(arguments, out)
            if done < kills:
                try:
                    process.wait(timeout=rng.uniform(0.05, 1.0) * took * (0.8 if rounds == 1 else 1.0))
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                    done += 1
                    if say:
                        rows = sum(p.read_bytes().count(b"\n") for p in out.glob("journal.jsonl"))
                        print(f"kill {done}: {rows} items committed", file=sys.stderr)
            ended = process.wait()
            if left := orphans_after(before):
                faults.append(f"left over after kill {done}: {sorted(left)}")
            if ended != -signal.SIGKILL:
                break
        if ended != code:
            faults.append(f"round {rounds} ended with {ended}, the unbroken run with {code}")
        faults += [f"round {rounds}: {name} differs" for name in unlike(wanted, contents(out))]
    adopt_orphans(False)
    return done, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep the run folders")
    parser.add_argument("arguments", nargs="+", help="the command after `astrolabe`, without --out")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kill-resume-"))
    try:
        done, faults = kill_and_resume(options.arguments, folder, kills=options.kills, seed=options.seed)
    finally:
        if options.keep:
            print(folder, file=sys.stderr)
        else:
            shutil.rmtree(folder)
    print(
        "\n".join(faults) or f"{done} kills: every run ended with the files of the unbroken one, no process left over"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
