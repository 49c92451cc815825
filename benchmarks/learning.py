"""GRPO against continued SFT and against rejection-sampling SFT, at equal compute, on held-out environments.

    python benchmarks/learning.py --data runs/demo --seeds 3 --out runs/learning

`--data` is the folder of a finished `astrolabe demo`: its training environments, held-out environments and teacher
demonstrations. Per seed: SFT to its validation plateau, then from there (a) GRPO, (b) SFT going on with the same
demonstrations, (c) rollouts of the SFT policy, of which the best per environment are trained on.

Compute is counted in tokens of a forward pass: a trained token costs 3 (forward and backward), a token of a rollout's
context 1. (b) and (c) get what (a) used. Printed: mean F1 per arm, sampled at temperature 1 (what GRPO
optimises) and greedy, and the paired differences with 95 % bootstrap intervals over environments and seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from astrolabe.evals.envs import evaluate, paired_difference
from astrolabe.records.ids import rng_for
from jax_train.config import GrpoConfig, SftConfig, load_config
from jax_train.nano.held_out import rows_of, write_rows
from jax_train.phases import grpo, sft

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "demo.toml"


def config(phase: str, **given: Any) -> Any:
    flags: list[str] = []
    for key, value in given.items():
        flags += [f"--{key.replace('__', '.')}", json.dumps(value) if isinstance(value, list) else str(value)]
    return load_config(phase, CONFIG, flags)


def context_tokens(rows: Iterable[dict[str, Any]]) -> int:
    """Tokens of the rollouts' contexts."""
    return sum(trace["length"] for row in rows for trace in row["traces"])


def grpo_compute(run: Path) -> tuple[int, int]:
    """(forward tokens of rollouts, tokens trained on) of a GRPO run."""
    rollouts = rows_of(run / "rollouts.jsonl")
    sampled = context_tokens(rollouts)
    mean = sampled / max(1, len(rollouts))
    trained = sum(row["trained_rollouts"] for row in rows_of(run / "metrics.jsonl"))
    return sampled, int(trained * mean)


def best_of_each(rollouts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per environment the distinct rollouts of the highest reward, where that is above 0."""
    best: dict[str, list[dict[str, Any]]] = {}
    for row in rollouts:
        best.setdefault(row["task"]["environment"], []).append(row)
    kept = []
    for members in best.values():
        top = max(row["reward"]["value"] for row in members)
        distinct = {row["id"]: row for row in members if row["reward"]["value"] == top and top > 0}
        kept += list(distinct.values())
    return kept


def one_seed(data: Path, out: Path, seed: int, steps: int) -> dict[str, Path]:
    """Train all arms; arm -> model folder."""
    demos = rows_of(data / "demonstrations" / "rollouts.jsonl")
    # Environments of one domain share tools and entities: validation is on domains of its own.
    domain = {row["id"]: row["domain"] for row in rows_of(data / "train" / "environments.jsonl")}
    domains = sorted(set(domain.values()))
    rng_for(seed, "learning", "split").shuffle(domains)
    validated = set(domains[: max(1, len(domains) // 8)])
    kept_out = {environment for environment, name in domain.items() if name in validated}
    validation = write_rows(out / "validation.jsonl", [r for r in demos if r["task"]["environment"] in kept_out])
    train = write_rows(out / "demonstrations.jsonl", [r for r in demos if r["task"]["environment"] not in kept_out])
    common = {"seed": seed, "data__train": [str(train)], "data__validation": [str(validation)]}
    first: SftConfig = config(
        "sft", out=out / "sft", steps=600, eval_every=20, patience=3, checkpoint__every=20,
        optimizer__schedule="constant", **common
    )  # fmt: skip
    model = sft.run(first)["model"]
    rl: GrpoConfig = config(
        "grpo", out=out / "grpo", seed=seed, steps=steps, model__path=model,
        environments=[str(data / "train")], store_rollouts="true"
    )  # fmt: skip
    arms = {"SFT": Path(model), "GRPO": Path(grpo.run(rl)["model"])}
    sampled, trained = grpo_compute(out / "grpo")
    budget = sampled + 3 * trained
    per_step = np.mean([row["tokens"] for row in rows_of(out / "sft" / "metrics.jsonl")])
    more = max(1, round(budget / (3 * per_step)))
    print(f"seed {seed}: compute {budget} forward tokens; continued SFT gets {more} steps", flush=True)
    again = config("sft", out=out / "continued", steps=more, model__path=model, eval_every=more, **common)
    arms["continued SFT"] = Path(sft.run(again)["model"])
    rolled = out / "rejection"
    _roll(Path(model), data / "train" / "environments.jsonl", rolled, seed)
    rows = rows_of(rolled / "rollouts.jsonl")
    left = max(0, budget - context_tokens(rows))
    kept = write_rows(out / "best.jsonl", best_of_each(rows))
    rft = config(
        "sft", out=out / "rejection-sft", steps=max(1, round(left / (3 * per_step))), model__path=model, seed=seed,
        data__train=[str(kept)], data__min_reward=0.0, eval_every=10_000
    )  # fmt: skip
    arms["rejection-sampling SFT"] = Path(sft.run(rft)["model"])
    return arms


def _roll(model: Path, envs: Path, out: Path, seed: int) -> None:
    """Eight sampled episodes of the policy in each environment."""
    evaluate(envs, model=model, out=out, n=8, seed=seed, temperature=1.0, max_new_tokens=64)


DECODING = {"sampled": {"temperature": 1.0, "n": 4}, "greedy": {"temperature": 0.0, "n": 1}}
"""How the arms are evaluated: as the policy that GRPO optimises, four episodes an environment, and at its mode."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("runs/demo"))
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="GRPO steps")
    given = parser.parse_args()
    f1: dict[str, dict[str, list[list[float]]]] = {how: {} for how in DECODING}
    for seed in range(given.seeds):
        out = given.out / f"seed-{seed}"
        for arm, model in one_seed(given.data, out, seed, given.steps).items():
            for how, kind in DECODING.items():
                folder = out / "eval" / how / arm.replace(" ", "-")
                result = evaluate(
                    given.data / "held-out.jsonl", model=model, out=folder, seed=seed, max_new_tokens=64, **kind
                )
                values = [row["f1"] for _, row in sorted(result["per_environment"].items())]
                f1[how].setdefault(arm, []).append(values)
                print(
                    f"seed {seed}: {arm}, {how}: F1 {np.mean(values):.4f}, answers "
                    f"{result['answer_accuracy']['mean']:.4f} over {len(values)} environments",
                    flush=True,
                )
    for how, arms in f1.items():
        for arm, rows in arms.items():
            print(
                f"{how:8s} {arm:24s} mean F1 {np.mean(rows):.4f}, by seed {[round(float(np.mean(v)), 4) for v in rows]}"
            )
        for arm in ("SFT", "continued SFT", "rejection-sampling SFT"):
            d = paired_difference(arms[arm], arms["GRPO"])
            print(f"{how:8s} GRPO - {arm}: {d['mean']:+.4f} [{d['low']:+.4f}, {d['high']:+.4f}]")


if __name__ == "__main__":
    main()
