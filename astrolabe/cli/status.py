"""`astrolabe status`: where a run stands, from its journal; the run may be in work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from astrolabe.records.errors import EXIT_DONE, EXIT_PARTIAL


def status(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="The same as one JSON object.")] = False,
) -> int:
    """Stages, rejections and cost of a run. Exit 0 if it is finished, 3 if not."""
    from astrolabe.records.run_status import run_status, status_lines

    found = run_status(run)
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        print("\n".join(status_lines(found)))
    return EXIT_DONE if found["finished"] else EXIT_PARTIAL
