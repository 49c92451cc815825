"""A gating process: opens the file anew, reads one row by its place in it, gates it, and answers with a line of JSON.

`check.py` starts one per core. Requests come on standard input as `{"path", "offset", "length", "number"}`; what is
gated is what the file holds, read by a process that has seen nothing else of the row.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from astrolabe.envs.gates.gate import gate_environment
from astrolabe.envs.gates.report import Finding, GateReport
from astrolabe.envs.sandbox import Sandbox
from astrolabe.records.jsonl import parse_json


def read_row(path: Path, offset: int, length: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(length)


def parse_row(line: bytes, number: int) -> Any:
    """The row, or the report that it is not JSON."""
    try:
        return parse_json(line.decode())
    except ValueError as error:
        return GateReport("", [Finding("schema_invalid", f"line {number} is not JSON: {error}")])


def gate_line(line: bytes, number: int, sandbox: Sandbox) -> dict[str, Any]:
    """`{"report", "certificate"}` of one line of the file."""
    row = parse_row(line, number)
    report = row if isinstance(row, GateReport) else gate_environment(row, sandbox)
    certificate = report.certificate.model_dump(mode="json") if report.certificate is not None else None
    return {"report": report.to_json(), "certificate": certificate}


def main() -> None:
    replies = sys.stdout
    sys.stdout = sys.stderr  # nothing but replies may go where replies go
    with Sandbox(workers=1) as sandbox:
        for request in sys.stdin:
            task = json.loads(request)
            line = read_row(Path(task["path"]), task["offset"], task["length"])
            replies.write(json.dumps(gate_line(line, task["number"], sandbox), ensure_ascii=False) + "\n")
            replies.flush()


if __name__ == "__main__":
    main()
