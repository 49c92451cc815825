"""The held-out environments that ship with the project, made again: `python -m jax_train.nano.held_out --run RUN`.

The English domains of the project's knowledge are split by a seed; the held-out ones go through the same synthesis and
gates as any knowledge (`RUN` is that run's folder and can be continued). Environments that need an arithmetic tool are
left out, since those tools are the same in every domain: what is left has its own tools, entities and questions.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import astrolabe
from astrolabe.records.environment import Environment
from astrolabe.records.errors import RunError
from astrolabe.records.ids import rng_for
from astrolabe.records.jsonl import read_rows

DATA = Path(astrolabe.__file__).parent / "data"
FILE = DATA / "held_out" / "environments.jsonl"
SEED = 0
SHARE = 0.55
"""Share of the domains that is held out."""
SAMPLES = 6
"""Environments asked for per knowledge row."""


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(file)]


def split_knowledge() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training rows, held-out rows) of the English knowledge, which share no domain."""
    rows = rows_of(DATA / "knowledge" / "en.jsonl")
    domains = sorted({row["domain"] for row in rows})
    rng_for(SEED, "demo", "domains").shuffle(domains)
    held_out = set(domains[: round(len(domains) * SHARE)])
    return [r for r in rows if r["domain"] not in held_out], [r for r in rows if r["domain"] in held_out]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def has_own_tools(environment: Environment) -> bool:
    """Whether every true tool reads the environment's own data or state (arithmetic tools read neither)."""
    return all('data["' in tool.code or "state" in tool.code for tool in environment.tools)


def main() -> None:
    from graphs.environment import synthesise_environments
    from graphs.options import SynthOptions

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run folder of the synthesis")
    parser.add_argument("--out", type=Path, default=FILE)
    given = parser.parse_args()
    knowledge = write_rows(given.run.with_name(given.run.name + "-knowledge.jsonl"), split_knowledge()[1])
    if synthesise_environments(knowledge, given.run, SynthOptions(seed=SEED), samples=SAMPLES):
        raise RunError(f"{given.run}: stopped before the end", "run the same command again: it goes on")
    made = [Environment.from_json(row) for row in rows_of(given.run / "environments.jsonl")]
    kept = [environment for environment in made if has_own_tools(environment)]
    write_rows(given.out, [environment.to_json() for environment in kept])
    print(f"{len(kept)} of {len(made)} environments in {given.out}")


if __name__ == "__main__":
    main()
