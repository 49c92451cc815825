"""`astrolabe synth`: data sets from server cards and from knowledge."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from graphs.options import SynthOptions

app = typer.Typer(help="Synthesise trajectories or environments.", no_args_is_help=True)

Out = Annotated[Path, typer.Option("--out", help="Run folder; a folder of the same command is continued.")]
Url = Annotated[
    str | None, typer.Option("--model-url", help="OpenAI-compatible server. Default: the offline teacher, in process.")
]
Model = Annotated[str | None, typer.Option("--model", help="Model name on that server. Default: the one it offers.")]
Limit = Annotated[int | None, typer.Option("--limit", help="At most this many inputs.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of the run. Default 0.")]
Concurrency = Annotated[int | None, typer.Option("--concurrency", help="Inputs in work at once. Default 16.")]
Config = Annotated[Path | None, typer.Option("--config", help="TOML file of these options and of [roles.NAME].")]
Replay = Annotated[Path | None, typer.Option("--replay", help="Run whose stored replies are used; no server is asked.")]
Shard = Annotated[str | None, typer.Option("--shard", help="i/n: every n-th input, from the i-th (from 0).")]
Defects = Annotated[
    float | None, typer.Option("--defect-rate", help="Offline teacher: share of planted defects, 0 to 1.")
]
Labels = Annotated[Path | None, typer.Option("--labels", help="Offline teacher: file for the labels of its defects.")]
TemperatureOption = Annotated[float | None, typer.Option("--temperature", help="Default 0.7.")]


def _options(config: Path | None, shard: str | None, **flags: object) -> SynthOptions:
    from graphs.options import load_options, parse_shard

    return load_options(config, {**flags, "shard": parse_shard(shard) if shard else None})


def _ended(code: int, out: Path) -> int:
    """Says where the run stands, and passes the exit code on."""
    from astrolabe.records.run_status import run_status, status_lines

    for line in status_lines(run_status(out)):
        print(line, file=sys.stderr)
    return code


@app.command()
def trajectories(
    servers: Annotated[Path, typer.Option("--servers", help="JSONL of server cards.")],
    out: Out,
    model_url: Url = None,
    model: Model = None,
    limit: Limit = None,
    seed: Seed = None,
    concurrency: Concurrency = None,
    config: Config = None,
    replay: Replay = None,
    shard: Shard = None,
    min_tools: Annotated[
        int | None, typer.Option("--min-tools", help="Good tools that a card needs. Default 3.")
    ] = None,
    defect_rate: Defects = None,
    labels: Labels = None,
    temperature: TemperatureOption = None,
) -> int:
    """Server cards to judged tool-use trajectories."""
    options = _options(
        config,
        shard,
        model_url=model_url,
        model=model,
        limit=limit,
        seed=seed,
        concurrency=concurrency,
        replay=replay,
        min_tools=min_tools,
        defect_rate=defect_rate,
        labels=labels,
        temperature=temperature,
    )
    from graphs.trajectory import synthesise_trajectories

    return _ended(synthesise_trajectories(servers, out, options), out)


@app.command()
def environments(
    out: Out,
    knowledge: Annotated[
        Path | None, typer.Option("--knowledge", help="JSONL of knowledge. Default: what the package ships.")
    ] = None,
    model_url: Url = None,
    model: Model = None,
    limit: Limit = None,
    seed: Seed = None,
    concurrency: Concurrency = None,
    config: Config = None,
    replay: Replay = None,
    shard: Shard = None,
    defect_rate: Defects = None,
    labels: Labels = None,
    temperature: TemperatureOption = None,
) -> int:
    """Knowledge to executable environments that pass every gate."""
    options = _options(
        config,
        shard,
        model_url=model_url,
        model=model,
        limit=limit,
        seed=seed,
        concurrency=concurrency,
        replay=replay,
        defect_rate=defect_rate,
        labels=labels,
        temperature=temperature,
    )
    from graphs.environment import synthesise_environments

    return _ended(synthesise_environments(knowledge, out, options), out)
