"""`astrolabe demo`: the whole loop on the CPU, from the project's own cards and knowledge to a policy that has learnt.

    cards ─► trajectories ─┐
    knowledge ─► environments ─┴─► demonstrations ─► SFT ─► GRPO ─► self-critic (DPO)
    held-out environments (shipped) ─► evaluation of each policy ─► table, report.html

Every step is the verb that a user would call, on a run folder of its own: a demo that was stopped goes on where it was.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from astrolabe.records.errors import RunError
from jax_train.nano.held_out import DATA, FILE, rows_of, split_knowledge, write_rows

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "demo.toml"
TRAIN_SAMPLES = 3
"""Environments asked for per knowledge row."""
HELD_OUT = 240
"""Environments that are evaluated, at most."""
CRITIC = 40
"""Training environments that the self-critic round rolls out in."""


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder of the demo's runs.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option("--seed", help="Seed of everything.")] = 0,
) -> None:
    """The whole loop on the CPU with the embedded defaults: data, training, evaluation, report."""
    clock = _Clock(out / "clock.json")
    knowledge = write_rows(out / "knowledge.jsonl", split_knowledge()[0])
    clock("trajectories from server cards", lambda: _trajectories(out / "trajectories", seed))
    clock("environments from knowledge", lambda: _environments(knowledge, out / "train", seed))
    train, held_out, leaks = select(out, seed)
    clock("demonstrations of the teacher", lambda: _demonstrations(train, out / "demonstrations", seed))
    base = DATA / "nano"
    sft = clock("SFT", lambda: _phase("sft", out, seed, {"model.path": base}))
    grpo = clock("GRPO", lambda: _phase("grpo", out, seed, {"model.path": sft}))
    critic = clock("self-critic round (DPO)", lambda: _selfcritic(out, seed, grpo, train))
    policies = {"base": base, "SFT": sft, "GRPO": grpo, "after the self-critic round": critic}
    results: dict[str, Any] = {}
    for name, model in policies.items():
        results[name] = clock(f"evaluation: {name}", functools.partial(_evaluate, name, model, held_out, out, seed))
    table = result_table(results)
    print_table(table)
    count = len(rows_of(held_out))
    page = write_page(out, table, results, leaks, clock.seconds, count)
    print(f"\n{count} held-out environments; in both sets: " + ", ".join(f"{r['both']} {r['what']}" for r in leaks))
    print(f"report: {page}")


class _Clock:
    """Runs the steps, says what it does, and keeps how long each took (over restarts) for the report."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self.seconds: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
        self._number = 0

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        self._number += 1
        print(f"[{self._number}] {name}", file=sys.stderr, flush=True)
        began = time.monotonic()
        try:
            return work()
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - began, 1)
            self._file.write_text(json.dumps(self.seconds, indent=1))


def _trajectories(out: Path, seed: int) -> None:
    from graphs.options import SynthOptions
    from graphs.trajectory import synthesise_trajectories

    _done(synthesise_trajectories(DATA / "cards" / "cards.jsonl", out, SynthOptions(seed=seed)), out)


def _environments(knowledge: Path, out: Path, seed: int) -> None:
    from graphs.environment import synthesise_environments
    from graphs.options import SynthOptions

    _done(synthesise_environments(knowledge, out, SynthOptions(seed=seed), samples=TRAIN_SAMPLES), out)


def _done(code: int, out: Path) -> None:
    if code:
        raise RunError(f"{out}: stopped before the end", "run the same command again: it goes on")


def select(out: Path, seed: int) -> tuple[Path, Path, list[dict[str, Any]]]:
    """Files of training and of held-out environments that share no question, entity or tool, and the leak report."""
    from astrolabe.evals.leaks import leak_report, without_shared
    from astrolabe.records.environment import read_environments
    from astrolabe.records.ids import rng_for

    rows = out / "train" / "environments.jsonl"
    train = read_environments(rows)
    held_out = without_shared(read_environments(FILE), train)
    rng_for(seed, "demo", "held-out").shuffle(held_out)
    held_out = held_out[:HELD_OUT]
    leaks = leak_report(train, held_out)
    write_rows(out / "leaks.jsonl", leaks)
    return rows, write_rows(out / "held-out.jsonl", [e.to_json() for e in held_out]), leaks


def _demonstrations(envs: Path, out: Path, seed: int) -> None:
    from agents.teacher.server import create_app
    from jax_train.rollout import rollout_file
    from serving.http import launch_in_thread

    with launch_in_thread(create_app(seed=seed, defect_rate=0.05), name="teacher") as server:
        report = rollout_file(envs, server.url, 2, out, seed=seed)
    _done(report.exit_code, out)


def _phase(name: str, out: Path, seed: int, overrides: dict[str, Any]) -> Path:
    """A training phase by `configs/demo.toml`, with the demo's folders; the trained model's folder."""
    from jax_train.config import load_config

    given = {"out": out / name, "seed": seed, **overrides}
    if name == "sft":
        given |= {"data.train": [str(out / "demonstrations"), str(out / "trajectories")]}
    elif name == "grpo":
        given |= {"environments": [str(out / "train")]}
    flags = [
        text
        for key, value in given.items()
        for text in (f"--{key}", json.dumps(value) if isinstance(value, list) else str(value))
    ]
    run = importlib.import_module(f"jax_train.phases.{name}").run
    return Path(run(load_config(name, CONFIG, flags))["model"])


def _selfcritic(out: Path, seed: int, model: Path, envs: Path) -> Path:
    from jax_train.config import load_config
    from jax_train.phases.selfcritic import SelfCriticConfig, run

    envs = write_rows(out / "critic.jsonl", rows_of(envs)[:CRITIC])
    common = ["--seed", str(seed), "--model.path", str(model), "--out", str(out / "selfcritic")]
    dpo = load_config("dpo", CONFIG, [*common, "--data.preferences", str(out / "selfcritic" / "rollouts")])
    grpo = load_config("grpo", CONFIG, [*common, "--environments", json.dumps([str(envs)])])
    config = SelfCriticConfig(
        **dpo.model_dump(exclude={"data"}), **grpo.model_dump(include={"environments", "rollout", "engine"})
    )
    return Path(run(config)["model"])


def _evaluate(name: str, model: Path, envs: Path, out: Path, seed: int) -> dict[str, Any]:
    from astrolabe.evals.envs import evaluate

    folder = out / "eval" / name.replace(" ", "-")
    return evaluate(envs, model=model, out=folder, seed=seed, max_new_tokens=64, concurrency=32)


def result_table(results: dict[str, Any]) -> dict[str, Any]:
    """Header, rows and notes: what the demo prints and the report shows."""
    from astrolabe.evals.envs import compare

    def cell(value: dict[str, float] | None, digits: int) -> str:
        if value is None:
            return "–"
        return f"{value['mean']:.{digits}f} [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"

    rows = [
        [name, cell(r["f1"], 3), cell(r["answer_accuracy"], 3), cell(r["calls"], 2), cell(r["errors"], 2)]
        for name, r in results.items()
    ]
    notes = ["Means over held-out environments, with 95 % bootstrap intervals over environments; greedy decoding."]
    names = list(results)
    for before, after in itertools.pairwise(names):
        d = compare(results[before], results[after])
        notes.append(f"{after} against {before}: F1 {d['mean']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}], paired.")
    return {"header": ["Policy", "Mean F1", "Answer accuracy", "Calls", "Errors"], "rows": rows, "notes": notes}


def print_table(table: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(*table["header"])
    for row in table["rows"]:
        shown.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(shown)
    for note in table["notes"]:
        console.print(note, highlight=False, soft_wrap=True)


def write_page(
    out: Path,
    table: dict[str, Any],
    results: dict[str, Any],
    leaks: list[dict[str, Any]],
    seconds: dict[str, float],
    count: int,
) -> Path:
    """`report.html` of the demo: result, curves, funnels, leaks, sample episodes with their tokens."""
    from tokenizers import Tokenizer

    from astrolabe.records.token_store import TokenStore
    from astrolabe.records.trajectory import Trajectory
    from astrolabe.report import html

    charts = []
    for phase in ("sft", "grpo", "selfcritic/dpo"):
        metrics = rows_of(out / phase / "metrics.jsonl") if (out / phase / "metrics.jsonl").exists() else []
        charts += html.metric_charts(metrics, name=phase)
    funnels = [
        {"name": name, "rows": json.loads((out / name / "funnel.json").read_text(encoding="utf-8"))}
        for name in ("trajectories", "train", "demonstrations", "grpo")
        if (out / name / "funnel.json").exists()
    ]
    tokenizer = Tokenizer.from_file(str(DATA / "nano" / "tokenizer.json"))
    episodes = []
    for name in results:
        run = out / "eval" / name.replace(" ", "-")
        store = TokenStore(run / "tokens", read_only=True)
        for row in rows_of(run / "rollouts.jsonl")[:3]:
            t = Trajectory.from_json(row)
            tokens = (
                html.token_view(t, store, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
                if t.traces
                else ()
            )
            episodes.append(html.episode(t, title=f"{name}: {t.task.question}", tokens=tokens))
    for row in rows_of(out / "trajectories" / "trajectories.jsonl")[:2]:
        t = Trajectory.from_json(row)
        episodes.append(html.episode(t, title=f"from a server card: {t.task.question}"))
    total = sum(seconds.values())
    page = html.render(
        title="Astrolabe demo",
        lead=f"From server cards and knowledge to a trained policy, evaluated on {count} environments that it never saw, "
        f"in {total / 60:.1f} minutes (" + ", ".join(f"{k} {v:.0f} s" for k, v in seconds.items()) + ").",
        table=table,
        charts=charts,
        funnels=funnels,
        leak=leaks,
        episodes=episodes,
    )
    (out / "report.html").write_text(page, encoding="utf-8")
    return out / "report.html"
