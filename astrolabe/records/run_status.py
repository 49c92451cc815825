"""Where a run stands: stages, rejections, and what an accepted row has cost, read off its journal while it may be in
work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from astrolabe.records.errors import RunError
from astrolabe.records.funnel import funnel_of
from astrolabe.records.jsonl import ROW_DEPTH, parse_json
from astrolabe.records.run_store import RESTORE, is_locked, read_journal, read_run


def counted_rows(path: Path, count: int | None) -> list[dict[str, Any]]:
    """The first `count` rows (None: all whole ones) of a file of measures that a run may be appending to."""
    if not count and not path.exists():
        return []
    lines = _read(path).split(b"\n")[:-1]
    if count is not None and len(lines) < count:
        raise RunError(f"{path}: shorter than the journal says", RESTORE)
    return [_row(path, number, line) for number, line in enumerate(lines[:count], 1)]


def committed_lines(path: Path, size: int) -> list[bytes]:
    """The lines within the first `size` bytes of a row file: what lies beyond is not committed. RunError if it is
    missing, unreadable or shorter."""
    data = _read(path, size)
    if len(data) < size:
        raise RunError(f"{path}: shorter than the journal says", RESTORE)
    if data and not data.endswith(b"\n"):
        raise RunError(f"{path}: no line ends where the journal says", RESTORE)
    return data.split(b"\n")[:-1]


def committed_rows(path: Path, size: int) -> list[dict[str, Any]]:
    """The same as rows. RunError names a line that is no JSON object."""
    return [_row(path, number, line) for number, line in enumerate(committed_lines(path, size), 1)]


def _read(path: Path, size: int = -1) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except FileNotFoundError:
        raise RunError(f"{path}: missing, but the journal counts its rows", RESTORE) from None
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}", "check the path and its permissions") from None


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = parse_json(line.decode(), ROW_DEPTH)
    except ValueError as error:
        raise RunError(f"{path}, line {number}: not JSON: {error}", RESTORE) from None
    if not isinstance(row, dict):
        raise RunError(f"{path}, line {number}: no JSON object", RESTORE)
    return row


def run_status(path: Path) -> dict[str, Any]:
    """`{"run","verb","state","finished","items","rows","rejected","stages","cost"}`. RunError if `path` is no run.

    state: finished, running, or stopped (the same command continues it). items: inputs committed. rows: file -> rows.
    rejected: reason -> rows. stages: the funnel, with `rate` = out / in. cost: model calls, tokens and seconds of work in
    total and per accepted row (null before the first).
    """
    run = read_run(path)
    entries, _ = read_journal(path)
    last = entries[-1] if entries else {"offsets": {}, "lines": {}}
    finished = bool(last.get("finished"))
    offsets = dict(last["offsets"])
    rejected = offsets.pop("rejected", 0)
    rows = {stem: len(committed_lines(path / f"{stem}.jsonl", size)) for stem, size in offsets.items()}
    reasons: dict[str, int] = {}
    for row in committed_rows(path / "rejected.jsonl", rejected) if rejected else []:
        for reason in row["reasons"]:
            reasons[reason] = reasons.get(reason, 0) + 1
    items = {entry["item"] for entry in entries if "item" in entry}
    usage = {"calls": 0, "prompt_tokens": 0, "completion_tokens": 0}
    for row in counted_rows(path / "metrics.jsonl", last["lines"].get("metrics", 0)):
        for key in usage:
            usage[key] += row.get("usage", {}).get(key, 0)
    timings = counted_rows(path / "timings.jsonl", last["lines"].get("timings", 0))
    cost: dict[str, Any] = {**usage, "seconds": round(sum(t["seconds"] for t in timings if t["id"] in items), 3)}
    accepted = sum(rows.values())
    stages = funnel_of([entry["funnel"] for entry in entries if "funnel" in entry])
    return {
        "run": path.name,
        "verb": run["verb"],
        "state": "finished" if finished else "running" if is_locked(path) else "stopped",
        "finished": finished,
        "items": len(items),
        "rows": rows,
        "rejected": dict(sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))),
        "stages": [{**row, "rate": row["out"] / row["in"] if row["in"] else None} for row in stages],
        "cost": {**cost, "per_accepted": {k: v / accepted for k, v in cost.items()} if accepted else None},
    }


def status_lines(status: dict[str, Any]) -> list[str]:
    """The status for a reader."""
    rows = ", ".join(f"{n} {stem}" for stem, n in status["rows"].items()) or "no rows yet"
    hint = "" if status["state"] != "stopped" else " (the same command continues it)"
    lines = [f"{status['run']}: {status['verb']}, {status['state']}{hint}; {status['items']} inputs done, {rows}"]
    width = max([len(stage["stage"]) for stage in status["stages"]], default=0)
    for stage in status["stages"]:
        rate = "" if stage["rate"] is None else f" {stage['rate']:6.1%}"
        reasons = ", ".join(f"{reason} {n}" for reason, n in stage["rejected"].items())
        lines.append(f"  {stage['stage']:<{width}} {stage['in']:>6} -> {stage['out']:<6}{rate}  {reasons}".rstrip())
    if status["rejected"]:
        lines.append("  rejected: " + ", ".join(f"{reason} {n}" for reason, n in status["rejected"].items()))
    per = status["cost"]["per_accepted"]
    if per:
        tokens = per["prompt_tokens"] + per["completion_tokens"]
        lines.append(f"  per row: {per['calls']:.1f} model calls, {tokens:.0f} tokens, {per['seconds']:.2f} s of work")
    return lines
