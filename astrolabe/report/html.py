"""The HTML report: one self-contained file, from the records of a run folder or of the demo.

Everything that a model or a tool wrote is escaped by the template engine (autoescape on); the page holds no script
and asks for nothing from the network. A token view colours every token by its author and underlines what is trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment as Jinja
from jinja2 import FileSystemLoader
from markupsafe import Markup

from astrolabe import __version__
from astrolabe.records.errors import UsageError
from astrolabe.records.funnel import funnel_of
from astrolabe.records.jsonl import as_record
from astrolabe.records.run_status import committed_lines, committed_rows, counted_rows
from astrolabe.records.run_store import read_journal, read_run
from astrolabe.records.trajectory import Trajectory
from astrolabe.report.charts import Series, line_chart

RECORD_FILES = ("trajectories", "rollouts", "environments", "preferences")
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
    """Write `report.html` for a run folder (or to `out`) and return its path.

    The run may be in work: rows are shown as far as its journal counts them, metrics as far as they are whole. RunError
    if `run` is no run or one that lacks what its journal counts, UsageError for a row of the wrong form or a bad `out`.
    """
    target = out or run / "report.html"
    header = read_run(run)
    if target.is_dir():
        raise UsageError(f"--out {target} is a folder", "give the path of the page to write")
    entries, _ = read_journal(run)
    offsets = entries[-1]["offsets"] if entries else {}
    counts = []
    episodes: list[dict[str, Any]] = []
    for stem in RECORD_FILES:
        if size := offsets.get(stem, 0):
            file = run / f"{stem}.jsonl"
            counts.append(f"{len(committed_lines(file, size))} {stem}")
            if stem in ("trajectories", "rollouts"):
                rows = enumerate(committed_rows(file, size)[:limit], 1)
                mend = "restore the file, or make the run again"
                episodes += _episodes(run, [as_record(Trajectory, row, f"{file}, line {n}", mend) for n, row in rows])
    size = offsets.get("rejected", 0)
    rejected = len(committed_lines(run / "rejected.jsonl", size)) if size else 0
    lead = f"{header.get('verb', 'run')}: {', '.join(counts) or 'no records yet'}, {rejected} rejected."
    stages = funnel_of([entry["funnel"] for entry in entries if "funnel" in entry])
    page = render(
        title=f"Run {run.name}",
        lead=lead,
        charts=metric_charts(counted_rows(run / "metrics.jsonl", None)),
        funnels=[{"name": run.name, "rows": stages}] if stages else [],
        episodes=episodes,
    )
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{target}: {error.strerror}", "give --out a file that can be written") from None
    return target


def _episodes(run: Path, trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
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
    for trajectory in trajectories:
        tokens = token_view(trajectory, store, decode) if store is not None and trajectory.traces else ()
        out.append(episode(trajectory, tokens=tokens))
    return out
