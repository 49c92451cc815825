"""Evaluation on environments: mean F1, answer accuracy, calls and errors per episode, with 95 % intervals.

The unit of chance is the environment: an environment's episodes are averaged, and the bootstrap draws environments. A
comparison of two policies is paired, over the same environments (and seeds of training, where there are several).
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from astrolabe.records.durable import write_atomic
from astrolabe.records.environment import Environment, read_environments
from astrolabe.records.errors import Interrupted, ServerError, UsageError
from astrolabe.records.ids import content_hash, seed_for
from astrolabe.records.jsonl import read_rows
from astrolabe.records.run_store import RunStore
from astrolabe.records.trajectory import Trajectory
from graphs.solver import Budgets, Policy
from jax_train.groups import Opener, RolloutConfig
from jax_train.rollout import Opened, acting, roll_into, served_identity, served_policy
from jax_train.trainer import model_fingerprint
from serving.tokens import Sampling

METRICS = ("f1", "answer_accuracy", "calls", "errors")
Table = dict[str, dict[str, float | None]]
"""environment id -> metric -> mean over its episodes; None where the metric does not apply."""


def table_of(episodes: Sequence[Trajectory]) -> Table:
    """Means per environment over scored episodes."""
    by_environment: dict[str, list[Trajectory]] = {}
    for episode in episodes:
        if episode.reward is not None and episode.task.environment is not None:
            by_environment.setdefault(episode.task.environment, []).append(episode)
    return {name: _means(rows) for name, rows in by_environment.items()}


def _means(rows: Sequence[Trajectory]) -> dict[str, float | None]:
    rewards = [row.reward for row in rows if row.reward is not None]
    graded = [float(reward.answer_correct) for reward in rewards if reward.answer_correct is not None]
    return {
        "f1": float(np.mean([reward.value for reward in rewards])),
        "answer_accuracy": float(np.mean(graded)) if graded else None,
        "calls": float(np.mean([len(row.calls) for row in rows])),
        "errors": float(np.mean([sum(call.status == "error" for call in row.calls) for row in rows])),
    }


def interval(values: Sequence[float], *, seed: int = 0, draws: int = 2000) -> dict[str, float]:
    """Mean of values [environments] with its 95 % percentile bootstrap interval."""
    array = np.asarray(values, np.float64)
    rng = np.random.default_rng(seed_for(seed, "bootstrap"))
    means = array[rng.integers(0, len(array), (draws, len(array)))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return {"mean": float(array.mean()), "low": float(low), "high": float(high)}


def paired_difference(a: Any, b: Any, *, seed: int = 0, draws: int = 2000) -> dict[str, float]:
    """Mean of b - a with its 95 % interval, paired.

    a, b: [environments], or [seeds, environments] where each policy was trained several times; then the bootstrap draws
    seeds and environments. ValueError if the shapes differ."""
    one, two = np.atleast_2d(np.asarray(a, np.float64)), np.atleast_2d(np.asarray(b, np.float64))
    if one.shape != two.shape:
        raise ValueError(f"paired values of shapes {one.shape} and {two.shape}")
    difference = two - one
    seeds, environments = difference.shape
    rng = np.random.default_rng(seed_for(seed, "paired"))
    rows = rng.integers(0, seeds, (draws, seeds))
    columns = rng.integers(0, environments, (draws, environments))
    means = np.asarray([difference[np.ix_(r, c)].mean() for r, c in zip(rows, columns, strict=True)])
    low, high = np.quantile(means, (0.025, 0.975))
    return {"mean": float(difference.mean()), "low": float(low), "high": float(high)}


def compare(a: Mapping[str, Any], b: Mapping[str, Any], metric: str = "f1", *, seed: int = 0) -> dict[str, float]:
    """Paired difference b - a of two results of `evaluate`, over the environments that both have."""
    one, two = a["per_environment"], b["per_environment"]
    names = [n for n in one if n in two and one[n][metric] is not None and two[n][metric] is not None]
    if not names:
        raise UsageError("the two evaluations share no environment", "evaluate both on the same file")
    return paired_difference([one[n][metric] for n in names], [two[n][metric] for n in names], seed=seed)


def summarise(
    environments: Sequence[Environment], episodes: Sequence[Trajectory], *, n: int, seed: int = 0
) -> dict[str, Any]:
    """The result as one JSON object. ServerError if no episode could be scored."""
    table = table_of(episodes)
    scored = [episode for episode in episodes if episode.reward is not None]
    if not scored:
        raise ServerError("no episode could be scored", "see rejected.jsonl of the run for why they failed")
    scenarios: dict[str, list[str]] = {}
    for environment in environments:
        if environment.id in table:
            scenarios.setdefault(environment.scenario, []).append(environment.id)
    return {
        "environments": len(table),
        "episodes": len(scored),
        "failed": len(environments) * n - len(scored),
        **{metric: _interval_of(table, list(table), metric, seed) for metric in METRICS},
        "truncated": sum(episode.status == "truncated" for episode in scored) / len(scored),
        "scenarios": {
            name: {"environments": len(ids), **{m: _interval_of(table, ids, m, seed) for m in METRICS[:2]}}
            for name, ids in sorted(scenarios.items())
        },
        "per_environment": table,
    }


def _interval_of(table: Table, names: Sequence[str], metric: str, seed: int) -> dict[str, float] | None:
    values = [value for name in names if (value := table[name][metric]) is not None]
    return interval(values, seed=seed) if values else None


async def evaluate_policy(
    environments: Sequence[Environment],
    policy: Policy,
    opener: Opener,
    *,
    n: int = 1,
    budgets: Budgets | None = None,
    seed: int = 0,
    out: Path | None = None,
    identity: Mapping[str, Any] | None = None,
    concurrency: int = 16,
    progress: bool = True,
) -> dict[str, Any]:
    """`n` episodes of a policy in each environment, summarised. With `out` the episodes stay there as a run that can be
    continued, and the summary as `eval.json`; `identity` (JSON) says which policy that is."""
    config = RolloutConfig(n=n, budgets=budgets or Budgets())
    with tempfile.TemporaryDirectory() as scratch:
        folder = out or Path(scratch)
        with RunStore.open(
            folder,
            verb="eval envs",
            config={"n": n, "budgets": vars(config.budgets), **(identity or {})},
            seed=seed,
            inputs={"envs": content_hash([environment.id for environment in environments])},
            files=("rollouts",),
        ) as store:
            report = await roll_into(
                store,
                environments,
                policy,
                opener,
                config,
                seed=seed_for(seed, "eval"),
                concurrency=concurrency,
                progress=progress,
            )
        if report.interrupted:
            mend = "run the same command again: it goes on" if out is not None else "give --out RUN to be able to go on"
            raise Interrupted(f"stopped before the end of {len(environments)} environments", mend)
        episodes = [Trajectory.model_validate(row) for _, row in read_rows(folder / "rollouts.jsonl")]
        result = summarise(environments, episodes, n=n, seed=seed)
        if out is not None:
            write_atomic(out / "eval.json", (json.dumps(result, ensure_ascii=False, indent=1) + "\n").encode())
    return result


def evaluate(
    file: Path,
    model_url: str | None = None,
    *,
    model: Path | None = None,
    out: Path | None = None,
    n: int = 1,
    limit: int | None = None,
    seed: int = 0,
    temperature: float = 0.0,
    max_new_tokens: int = 256,
    budgets: Budgets | None = None,
    concurrency: int = 16,
    progress: bool = True,
) -> dict[str, Any]:
    """A policy on the environments of a file: behind a server (`model_url`), or `model` in the embedded engine, in
    process. `temperature` 0 is greedy."""
    environments = read_environments(file, limit)
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature)

    async def main() -> dict[str, Any]:
        if model_url is not None:
            acts = await served_identity(model_url)
        elif model is not None:
            acts = model_fingerprint(model)
        else:
            raise UsageError("no policy to evaluate", "give --model DIR or --model-url URL")
        opened = _policy(model_url, model, sampling, concurrency * n)
        async with acting(opened, budgets or Budgets()) as (policy, opener):
            return await evaluate_policy(
                environments,
                policy,
                opener,
                n=n,
                budgets=budgets,
                seed=seed,
                out=out,
                identity={"policy": acts, "temperature": temperature, "max_new_tokens": max_new_tokens, "limit": limit},
                concurrency=concurrency,
                progress=progress,
            )

    return asyncio.run(main())


async def _policy(model_url: str | None, model: Path | None, sampling: Sampling, concurrency: int) -> Opened:
    if model_url is not None:
        return await served_policy(model_url, model, sampling, concurrency)
    assert model is not None
    from graphs.token_policy import TokenPolicy
    from serving.engine.engine import Engine
    from serving.render import Renderer

    renderer = Renderer.from_folder(model)
    engine = Engine(model, renderer, slots=min(64, concurrency))

    async def close() -> None:
        engine.close()

    return TokenPolicy(engine.client(allow_truncated=True), renderer, sampling=sampling, model=model.name), close


def summary_lines(result: Mapping[str, Any]) -> list[str]:
    """The result for a reader."""
    lines = [
        f"{result['environments']} environments, {result['episodes']} episodes"
        + (f", {result['failed']} failed" if result["failed"] else "")
    ]
    for metric in METRICS:
        if (figure := result[metric]) is not None:
            name = metric.replace("_", " ")
            lines.append(f"{name:16} {figure['mean']:.3f}  [{figure['low']:.3f}, {figure['high']:.3f}]")
    return lines
