"""`astrolabe rollout`: episodes of a served policy in environments, scored and stored with their tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def rollout(
    envs: Annotated[Path, typer.Option("--envs", help="JSONL of environments.")],
    model_url: Annotated[str, typer.Option("--model-url", help="Server with /generate: `serve policy`, or SGLang.")],
    out: Annotated[Path, typer.Option("--out", help="Run folder; a folder of the same command is continued.")],
    model: Annotated[
        Path | None, typer.Option("--model", help="Folder with the policy's tokenizer. Default: the server names it.")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Episodes per environment.")] = 8,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most this many environments.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the run.")] = 0,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Environments in work at once.")] = 8,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="Sampling temperature.")] = 1.0,
) -> int:
    """Roll a policy out in environments: n scored episodes each, with exact tokens."""
    from astrolabe.records.run_status import run_status, status_lines
    from jax_train.rollout import rollout_file

    report = rollout_file(
        envs,
        model_url,
        n,
        out,
        model=model,
        limit=limit,
        seed=seed,
        concurrency=concurrency,
        temperature=temperature,
    )
    for line in status_lines(run_status(out)):
        print(line, file=sys.stderr)
    return report.exit_code
