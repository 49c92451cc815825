"""`astrolabe eval`: how good a policy is, with intervals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Evaluate a policy.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Evaluate a policy."""


@app.command("envs")
def envs(
    file: Annotated[Path, typer.Option("--envs", help="JSONL of held-out environments.")],
    model_url: Annotated[
        str | None, typer.Option("--model-url", help="`serve policy`, SGLang, or any chat server. Default: in process.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="Model folder: needed in process; else for exact tokens.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Run folder for the episodes and eval.json.")] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Episodes per environment.")] = 1,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most this many environments.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of sampling and of the intervals.")] = 0,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens of one turn.")] = 256,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Environments in work at once.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="The figures as one JSON object.")] = False,
) -> None:
    """Mean F1, answer accuracy, calls and errors per episode on environments, with 95 % intervals."""
    from astrolabe.evals.envs import evaluate, summary_lines

    result = evaluate(
        file,
        model_url,
        model=model,
        out=out,
        n=n,
        limit=limit,
        seed=seed,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        concurrency=concurrency,
    )
    print(json.dumps(result, ensure_ascii=False) if as_json else "\n".join(summary_lines(result)))
