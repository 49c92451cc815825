"""`astrolabe reward`: scores rollouts again, or Tool-Star texts by the ladder, without a model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Kind(StrEnum):
    f1 = "f1"
    answer = "answer"
    ladder = "ladder"


def reward(
    file: Annotated[Path, typer.Argument(help="JSONL of rollouts, or (ladder) of responses.")],
    envs: Annotated[Path | None, typer.Option("--envs", help="Environments that the rollouts were in.")] = None,
    kind: Annotated[Kind, typer.Option("--kind", help="Which reward.")] = Kind.f1,
) -> int:
    """Score rollouts from their executor records; one JSON row each on stdout, in input order."""
    from astrolabe.envs.rewards.rescore import rescore_file

    return rescore_file(file, envs, kind.value)
