"""`astrolabe rollout`: episodes of a served policy in environments, scored and stored with their tokens."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Reward(StrEnum):
    f1 = "f1"
    answer = "answer"


def rollout(
    envs: Annotated[Path, typer.Option("--envs", help="JSONL of environments.")],
    model_url: Annotated[str, typer.Option("--model-url", help="`serve policy`, SGLang, or any chat server.")],
    out: Annotated[Path, typer.Option("--out", help="Run folder; a folder of the same command is continued.")],
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Model folder, for exact tokens. Default: the server's, if it is here."),
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Episodes per environment.")] = 8,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most this many environments.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the run.")] = 0,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Environments in work at once.")] = 8,
    reward: Annotated[Reward, typer.Option("--reward", help="What the rollouts are scored by.")] = Reward.f1,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens of one turn.")] = 256,
    max_turns: Annotated[int, typer.Option("--max-turns", min=1, help="Turns of one episode.")] = 8,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Sampled tokens of one episode.")] = 2048,
) -> int:
    """Roll a policy out in environments: n scored episodes each, with exact tokens."""
    from astrolabe.records.run_status import run_status, status_lines
    from graphs.solver import Budgets
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
        max_new_tokens=max_new_tokens,
        budgets=Budgets(max_turns=max_turns, max_tokens=max_tokens),
        reward=reward.value,  # type: ignore[arg-type]
    )
    for line in status_lines(run_status(out)):
        print(line, file=sys.stderr)
    return report.exit_code
