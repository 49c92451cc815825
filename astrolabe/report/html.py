"""The HTML report: one self-contained file, from the records of a run folder or of the demo.

Everything that a model or a tool wrote is escaped by the template engine (autoescape on); the page holds no script
and asks for nothing from the network. A token view colours every token by its author and underlines what is trained.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment as Jinja
from jinja2 import FileSystemLoader
from markupsafe import Markup

from astrolabe import __version__
from astrolabe.records.errors import UsageError
from astrolabe.records.jsonl import read_rows
from astrolabe.records.trajectory import Trajectory
from astrolabe.report.charts import Series, line_chart

RECORD_FILES = ("trajectories.jsonl", "rollouts.jsonl", "environments.jsonl", "preferences.jsonl")
CURVES = (
    ("loss", "Loss"),
    ("validation_loss", "Validation loss"),
    ("reward", "Mean reward"),
    ("answer_accuracy", "Answer accuracy"),
    ("calls", "Calls per episode"),
    ("errors", "Errors per episode"),
    ("accept_rate", "Groups accepted"),
    ("entropy", "Entropy (nats per token)"),
    ("mismatch_kl", "Engine against trainer, KL (nats per token)"),
)


def render(
    *,
    title: str,
    lead: str,
    table: dict[str, Any] | None = None,
    charts: Sequence[str] = (),
    funnels: Sequence[dict[str, Any]] = (),
    leak: Sequence[dict[str, Any]] = (),
    episodes: Sequence[dict[str, Any]] = (),
) -> str:
    """The page. `charts` are SVG from `charts.line_chart`; every other value is text and is escaped."""
    jinja = Jinja(loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True)
    return jinja.get_template("report.html.j2").render(
        title=title,
        lead=lead,
        table=table,
        charts=[Markup(chart) for chart in charts],
        funnels=funnels,
        leak=leak,
        episodes=episodes,
        footer=f"Astrolabe {__version__}. This file is complete in itself.",
    )


def metric_charts(rows: Sequence[dict[str, Any]], *, name: str = "run") -> list[str]:
    """A chart per known metric that occurs in `metrics.jsonl` rows, by step."""
    charts = []
    for key, label in CURVES:
        points = [(float(r["step"]), float(r[key])) for r in rows if _number(r.get(key)) and _number(r.get("step"))]
        if len(points) > 1:
            charts.append(line_chart(label, [Series(name, points)]))
    return charts


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def token_view(trajectory: Trajectory, store: Any, decode: Any) -> list[dict[str, Any]]:
    """One entry per token of the episode's first trace: text, author, mask, and log-prob and weight version as a tip.

    `store.read(start, length)` gives the arrays; `decode([id])` the token's text. Bytes of a character that is split
    over tokens show as the replacement character."""
    trace = trajectory.traces[0]
    arrays = store.read(trace.start, trace.length)
    author = ["prompt"] * trace.length
    for segment in trace.segments:
        author[segment.start : segment.end] = [segment.author] * (segment.end - segment.start)
    view = []
    for i in range(trace.length):
        mask = int(arrays.mask[i])
        tip = f"log p {float(arrays.logprobs[i]):.3f}, weights {int(arrays.versions[i])}" if mask else ""
        view.append({"text": decode([int(arrays.tokens[i])]), "author": author[i], "mask": mask, "tip": tip})
    return view


def episode(trajectory: Trajectory, *, title: str = "", tokens: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """What the template shows of one episode."""
    reward = trajectory.reward
    facts = [f"status {trajectory.status}", f"{len(trajectory.calls)} calls"]
    errors = sum(call.status == "error" for call in trajectory.calls)
    if errors:
        facts.append(f"{errors} errors ({sum(call.injected for call in trajectory.calls)} injected)")
    if reward:
        facts.append(f"reward {reward.value:.3f} ({reward.kind}), hits {len(reward.hits)} of {reward.targets}")
        if reward.answer_correct is not None:
            facts.append("answer right" if reward.answer_correct else "answer wrong")
    messages = []
    for message in trajectory.messages:
        text = message.content
        for call in message.tool_calls or []:
            text += f"\n→ {call.function.name}({call.function.arguments})"
        css = {"assistant": "policy", "tool": "tool"}.get(message.role, "prompt")
        messages.append({"role": message.role, "text": text.strip(), "css": css})
    verdicts = " · ".join(f"{v.judge}: {v.verdict}" for v in trajectory.verdicts)
    return {
        "title": title or trajectory.task.question,
        "facts": ", ".join(facts),
        "messages": messages,
        "tokens": tokens,
        "verdicts": verdicts,
    }


def write_report(run: Path, out: Path | None = None, *, limit: int = 20) -> Path:
    """Write `report.html` for a run folder (or to `out`) and return its path. UsageError if `run` is no run folder."""
    if not (run / "run.json").is_file():
        raise UsageError(f"{run}: no run.json there", "give the folder that a synth, rollout or train command wrote")
    header = json.loads((run / "run.json").read_text(encoding="utf-8"))
    metrics = [r for _, r in read_rows(run / "metrics.jsonl")] if (run / "metrics.jsonl").exists() else []
    funnels = []
    if (run / "funnel.json").exists():
        funnels.append({"name": run.name, "rows": json.loads((run / "funnel.json").read_text(encoding="utf-8"))})
    counts = []
    episodes: list[dict[str, Any]] = []
    for name in RECORD_FILES:
        if (run / name).exists():
            rows = [row for _, row in read_rows(run / name)]
            counts.append(f"{len(rows)} {name.removesuffix('.jsonl')}")
            if name in ("trajectories.jsonl", "rollouts.jsonl"):
                episodes += _episodes(run, rows[:limit])
    rejected = sum(1 for _ in read_rows(run / "rejected.jsonl")) if (run / "rejected.jsonl").exists() else 0
    lead = f"{header.get('verb', 'run')}: {', '.join(counts) or 'no records yet'}, {rejected} rejected."
    page = render(
        title=f"Run {run.name}",
        lead=lead,
        charts=metric_charts(metrics),
        funnels=funnels,
        episodes=episodes,
    )
    target = out or run / "report.html"
    target.write_text(page, encoding="utf-8")
    return target


def _episodes(run: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Episodes with token views where the run holds their tokens and a tokenizer (`tokenizer.json`), else as messages."""
    decode = store = None
    tokenizer_file = run / "tokenizer.json"
    if tokenizer_file.exists() and (run / "tokens").is_dir():
        from tokenizers import Tokenizer

        from astrolabe.records.token_store import TokenStore

        tokenizer = Tokenizer.from_file(str(tokenizer_file))

        def decode(ids: list[int]) -> str:
            return tokenizer.decode(ids, skip_special_tokens=False)

        store = TokenStore(run / "tokens", read_only=True)
    out = []
    for row in rows:
        trajectory = Trajectory.from_json(row)
        tokens = token_view(trajectory, store, decode) if store is not None and trajectory.traces else ()
        out.append(episode(trajectory, tokens=tokens))
    return out
