"""`astrolabe view`: a run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def view(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[Path | None, typer.Option("--out", help="The page. Default: report.html in the run.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Episodes shown.")] = 20,
) -> None:
    """Write the run's report, a self-contained HTML page, and print its path."""
    from astrolabe.report.html import write_report

    print(write_report(run, out, limit=limit))
