"""`astrolabe env`: what can be done with a file of environments."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Check executable environments.", no_args_is_help=True)


class Source(StrEnum):
    native = "native"
    astra_rl = "astra-rl"


@app.callback()
def _group() -> None:
    """Check executable environments."""


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="JSONL of environments.")],
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the rows that pass, with certificates.")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="One verdict per row, as JSON, on stdout.")] = False,
    source: Annotated[Source, typer.Option("--from", help="Form of the rows.")] = Source.native,
) -> int:
    """Reopen the file in fresh processes and put each row through every gate. Exit 0: all pass, 1: some fail."""
    from astrolabe.envs.gates.check import check_file

    return check_file(file, out, json_lines, source.value)
